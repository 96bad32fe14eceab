"""The settings that ran: which they are, and as text to paste or to load (PyTorch, or a library's fields)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import yaml

from batchtune.document import Document, LengthBatch, OptimizerSettings, Recommendation
from batchtune.errors import UsageError
from batchtune.vocabulary import PRECISIONS, are_several

Fields = dict[str, object]
UNCHECKED = "the largest batch that trained so far: not checked in a fresh process, larger or smaller may be the answer"
"""What is said of settings of which `is_checked` is false."""


def is_checked(result: Document) -> bool:
    """Whether the settings ran in a fresh process, with evaluation and saving, or in a study."""
    return result.recommendation is not None or result.probe is None or result.probe.verified_in_fresh_process


def to_train_with(result: Document) -> Recommendation | None:
    """The settings: those recommended, or the largest batch where only that was asked.

    A probe tries no learning rates, so its settings have none; one of inference has no settings to train with.
    """
    probe = result.probe if result.kind == "probe" else None
    if result.recommendation is not None or probe is None or probe.inference or probe.max_batch_size is None:
        return result.recommendation
    steps, group = probe.gradient_accumulation_steps or 1, probe.data_parallel
    ranks = group.world_size if group else 1
    lengths = () if probe.lacks_length_check else probe.lengths
    return Recommendation(
        micro_batch_size=probe.max_batch_size,
        gradient_accumulation_steps=steps,
        world_size=ranks,
        strategy=group.strategy if group else None,
        global_batch_size=probe.max_batch_size * steps * ranks,
        precision=probe.precision,
        reason="the largest batch that trains" if is_checked(result) else UNCHECKED,
        length_batches=tuple(LengthBatch(length=each.length, samples=each.max_batch_size) for each in lengths),
    )


@dataclass(frozen=True)
class Ran:
    """Settings that ran, and the result that tells what is known of their optimizer."""

    found: Recommendation
    result: Document

    @property
    def optimizer(self) -> str | None:
        """The class of the optimizer that was recommended: an argument of build_optimizer may have chosen another."""
        return self.found.optimizer or self.result.task.optimizer

    @property
    def several(self) -> str | None:
        """The classes of the recommended optimizers, where there is more than one and a learning rate for them."""
        return self.optimizer if self.found.learning_rate is not None and are_several(self.optimizer) else None

    @property
    def known(self) -> OptimizerSettings:
        """What is known of how the task makes its optimizer, be it nothing."""
        return self.result.task.optimizer_settings or OptimizerSettings()

    @property
    def is_known(self) -> bool:
        """Whether a learning rate was found for the optimizer of which that is known.

        It was read with the default arguments of build_optimizer: what one that is none of the optimizer's own, `beta2`
        say, has changed of it is not known.
        """
        same = self.found.learning_rate is not None and self.found.optimizer in {None, self.result.task.optimizer}
        return same and self.result.task.optimizer_settings is not None and not self.foreign

    @property
    def foreign(self) -> set[str]:
        """Arguments of build_optimizer that are none of the optimizer's own, as far as those are known."""
        own = {*self.known.values, *self.known.differing}
        return set(self.found.optimizer_arguments) - own if own else set()

    @property
    def made_with(self) -> Fields:
        """All that is known of how the recommended optimizer is made, its learning rate left out."""
        return (self.known.values if self.is_known else {}) | Fields(self.found.optimizer_arguments)

    @property
    def maker(self) -> str:
        """Who makes it."""
        return self.known.made_by or "build_optimizer"

    @property
    def norm(self) -> float | None:
        """The largest norm of all gradients together, 0 where that is not clipped; None where nobody knows."""
        clipping = self.found.gradient_clipping
        return None if clipping is None else clipping.norm or 0.0

    @property
    def clipped(self) -> float | None:
        """The largest absolute value of each gradient, where it is clipped."""
        return self.found.gradient_clipping.value if self.found.gradient_clipping else None


@dataclass(frozen=True)
class Export:
    """How one library takes the settings."""

    title: str  # the library's name, for a reader
    values: Callable[[Ran], Fields]  # by its fields (a dot goes one level down); None where there is nothing to say
    words: Mapping[str, str]  # the result document's names of what some of these fields are, for `--set`
    write: Callable[[Fields], str]  # the fields as the text that the library loads
    notes: Callable[[Ran], list[str]] = lambda _: []  # what a reader must know and no field can say, in sentences
    takes_comments: bool = False  # whether the text has the notes, too, each behind a '#'

    def text(self, result: Document, renames: Sequence[str] = ()) -> str:
        """The settings of a result as this library loads them.

        Args:
            result: a study's result, or a probe's (then without a learning rate).
            renames: texts `field=name`: the field of this name, ours or the library's, is called otherwise.

        Raises:
            UsageError: the result has no settings that ran, the library cannot train so, or a rename is wrong.
        """
        ran = _that_ran(result)
        if ran.found.batch_unit == "tokens":
            raise UsageError("these batches count tokens; train with LengthBatchSampler, as 'report' writes it")
        values = {name: value for name, value in self.values(ran).items() if value is not None}
        comments = [f"# {note}" for note in self.said_beside(result)] if self.takes_comments else []
        return "\n".join([*comments, self.write(_renamed(values, self.words, renames))])

    def said_beside(self, result: Document) -> list[str]:
        """What a reader of `text` must know besides it, in sentences."""
        return [*([] if is_checked(result) else [UNCHECKED]), *self.notes(_that_ran(result))]


def _that_ran(result: Document) -> Ran:
    found = to_train_with(result)
    if found is None:
        if result.kind == "tune":
            raise UsageError(f"this tune is {result.status}: it has no recommendation; 'batchtune report' says why")
        if result.probe is not None and result.probe.inference:
            raise UsageError("this probe is of inference: it has no batch to train with; probe without --inference")
        why = "an estimate is no measurement" if result.estimates else f"this {result.kind} is {result.status}"
        raise UsageError(f"{why}: it has no batch size that ran; run 'batchtune probe' or 'batchtune tune' first")
    if found.precision not in PRECISIONS:
        raise UsageError(f"precision {found.precision!r} is none of {', '.join(PRECISIONS)}; measure again")
    return Ran(found, result)


def optimizer_notes(ran: Ran) -> list[str]:
    """What of the optimizer no export can say."""
    if ran.found.learning_rate is None:
        return []
    if not ran.is_known:
        return [f"what else {ran.optimizer or 'your optimizer'} was made with is not known: add it yourself"]
    names = ", ".join(ran.known.differing)
    return [f"groups of parameters differ in {names} here: set those as your {ran.maker} does"] if names else []


def several_notes(ran: Ran, field: str, remedy: str) -> list[str]:
    """Why a field that names one optimizer is left out, and what to do, where there are several."""
    if ran.several is None:
        return []
    made = ", ".join(f"{name}={value!r}" for name, value in {"lr": ran.found.learning_rate, **ran.made_with}.items())
    return [f"{field} names one, and is left out: {ran.several} are made by your {ran.maker} with {made}; {remedy}"]


def _renamed(values: Fields, words: Mapping[str, str], renames: Sequence[str]) -> Fields:
    names = {name: name for name in values}
    for rename in renames:
        field, _, name = (part.strip() for part in rename.partition("="))
        target = words.get(field, field)
        if not field or not name:
            raise UsageError(f"--set {rename}: not of the form field=name, for example --set {next(iter(values))}=name")
        if target not in values:
            ours = [word for word, theirs in words.items() if theirs in values and word not in values]
            raise UsageError(f"--set {rename}: no field {field!r} here; there are {', '.join([*values, *ours])}")
        names[target] = name
    taken = list(names.values())
    for name in taken:
        if taken.count(name) > 1 or any(other.startswith(f"{name}.") for other in taken):
            raise UsageError(f"--set: two fields would be called {name!r}; give each a name of its own")
    return {names[field]: value for field, value in values.items()}


def _nested(values: Fields) -> Fields:
    """Dotted names as sections."""
    document: Fields = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        section: Fields = document
        for each in sections:
            below = section.setdefault(each, {})
            assert isinstance(below, dict)  # noqa: S101 - _renamed refuses a name that is another's section
            section = below
        section[leaf] = value
    return document


def as_json(values: Fields) -> str:
    """Dotted names as objects of JSON."""
    return json.dumps(_nested(values), indent=2)


def as_yaml(values: Fields) -> str:
    """Dotted names as sections of YAML."""
    return yaml.safe_dump(_nested(values), sort_keys=False).rstrip()


def as_variables(values: Fields) -> str:
    """Names as variables of a shell.

    Raises:
        UsageError: one cannot name a variable.
    """
    wrong = [name for name in values if not (name.isascii() and name.isidentifier())]
    if wrong:
        raise UsageError(f"--set: {wrong[0]!r} cannot name a variable; use letters, digits and '_'")
    return "\n".join(f"{name}={shlex.quote(str(value))}" for name, value in values.items())


def _optimizer_lines(ran: Ran) -> list[str]:
    """Comments that say how the optimizer is made, or of several who makes them; none where that is not known."""
    names, known = ran.optimizer or "", ran.known
    if ran.found.optimizer is not None or not ran.is_known:
        return []
    if are_several(names):
        return [f"# optimizers: {names}, as your {ran.maker} makes them"]
    if known.differing:
        return [f"# optimizer: {names}, as your {ran.maker} makes it: groups differ in {' and '.join(known.differing)}"]
    made = "".join(f", {name}={value!r}" for name, value in known.values.items())
    return [f"# optimizer: {names}(model.parameters(), lr=learning_rate{made})"]


def _schedule_lines(ran: Ran) -> list[str]:
    """For how many steps the learning rate's schedule is made, or, of one that did not ask, its class."""
    if ran.found.total_steps is not None:
        return [f"total_steps = {ran.found.total_steps}  # what its schedule was made for"]
    made = f"{ran.known.scheduler}, as your {ran.known.made_by or 'build_scheduler'} makes it"
    return [f"# learning-rate schedule: {made}"] if ran.known.scheduler else []


def pytorch(result: Document) -> str:
    """The settings as lines of plain PyTorch; '' where there are none that ran."""
    found = to_train_with(result)
    if found is None:
        return _evaluation_batch(result)
    ran = Ran(found, result)
    lines = [*_batch_lines(ran), f"accumulation_steps = {found.gradient_accumulation_steps}"]
    if found.learning_rate is not None:
        lines.append(f"learning_rate = {found.learning_rate!r}")
    lines += [f"{name} = {value!r}" for name, value in found.optimizer_arguments.items()]
    lines += _optimizer_lines(ran)
    if found.activation_checkpointing is not None:
        lines.append(f"activation_checkpointing = {found.activation_checkpointing}  # as build_model takes it")
    for name, bound in (("norm", ran.norm), ("value", ran.clipped)):
        if bound:
            call = f"torch.nn.utils.clip_grad_{name}_(model.parameters(), {bound!r})"
            lines.append(f"clip_gradients = lambda: {call}  # call it before optimizer.step()")
    lines += _schedule_lines(ran)
    types = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
    if found.precision in types:
        lines.append(f"autocast = torch.autocast(device.type, dtype={types[found.precision]})")
    elif found.precision == "tf32":
        lines.append("torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True")
    return "\n".join(lines)


def _batch_lines(ran: Ran) -> list[str]:
    """The size of a micro-batch, or how those of many lengths are made."""
    found = ran.found
    tokens = f"{found.micro_batch_size:,} tokens in the mean" if found.batch_unit == "tokens" else ""
    several = [f"# {launched(found, 'torchrun --nproc-per-node')}"] if found.world_size > 1 else []
    if found.length_batches:
        batches = ", ".join(f"{each.length}: {each.samples}" for each in found.length_batches)
        lengths = "[sample_length(each) for each in train_data]"
        return [
            *several,
            f"length_batches = {{{batches}}}  # samples by their length{tokens and ', '}{tokens}",
            f"sampler = batchtune.LengthBatchSampler({lengths}, length_batches)  # a DataLoader's batch_sampler",
        ]
    if tokens:
        return [f"# batches of any samples, as today: {tokens}"]
    said = [found.reason or ""] if ran.result.recommendation is None else []
    comment = ", ".join(filter(None, [*said, "of each rank" if several else ""]))
    return [*several, f"batch_size = {found.micro_batch_size}" + (f"  # {comment}" if comment else "")]


def launched(found: Recommendation, command: str) -> str:
    """How many ranks the settings are for, and how they are started."""
    how, nodes = f" with {found.strategy}" if found.strategy else "", found.nodes or 1
    if nodes == 1:
        return f"for {found.world_size} ranks{how}: {command} {found.world_size}"
    return f"for {found.world_size} ranks{how} on {nodes} machines: {command} {found.world_size // nodes} on each"


def _evaluation_batch(result: Document) -> str:
    probe = result.probe
    if probe is None or not probe.inference or probe.max_batch_size is None:
        return ""
    checked = "" if is_checked(result) else ", not checked in a fresh process"
    about = f"the largest under torch.inference_mode(){checked}; training takes more memory"
    return f"evaluation_batch_size = {probe.max_batch_size}  # {about}"
