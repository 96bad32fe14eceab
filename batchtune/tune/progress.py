"""What a run of `tune` knows so far: the document at every moment with its warnings, and what of it is on disk."""

from __future__ import annotations

import contextlib
import shlex
import statistics
import time
from collections.abc import Sequence
from typing import Literal

from batchtune.config.schema import Config
from batchtune.document import Attempt, Failure, Prior, ProbeResult, Recommendation, Scaling, Target, TaskInfo, Trial
from batchtune.errors import BatchtuneError, UsageError
from batchtune.probe.findings import sharing_warnings
from batchtune.probe.runner import Probe
from batchtune.protocol.commands import Opened
from batchtune.result import Result, load_result
from batchtune.run_folder import RunFolder
from batchtune.task.spec import file_hash
from batchtune.tune.plan.prior import as_one_device, step_seconds, with_loading
from batchtune.tune.plan.tokens import probe_in_tokens, token_batches
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.verdict.scores import slowdown
from batchtune.units import number

Status = Literal["complete", "interrupted", "failed"]
_SAVING_SHARE = 0.005  # of the time that trials take may go into writing the document in between; the journal has all
_INPUT_BOUND = 2.0  # times as long as a step alone: then it is mostly the data that training waits for
_TWICE = 2  # a rank that is slow in a single run may be so by accident
UNEVEN = 0.2  # of the counted time; less is the ordinary noise of a machine


class Progress:
    """What is known so far; each attribute is None until it is.

    Attributes:
        earlier: what an earlier start came to.
        opened: the task on its device.
        identity: what must not change while the study goes on.
        probing: the probe, as long as it runs and after it.
        probe: its result, or an earlier start's or another machine's.
        prior: what the search starts from.
        scaling: what several ranks would make of the recommendation.
    """

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config, self.folder = config, folder
        self._task = TaskInfo(path=config.task, sha256=file_hash(config.task))
        self.earlier: Result | None = None
        self.opened: Opened | None = None
        self.identity: dict[str, object] = {}
        self.probing: Probe | None = None
        self.probe: ProbeResult | None = None
        self.prior: Prior | None = None
        self.study: TuneStudy | None = None
        self.scaling: Scaling | None = None
        self._save_due = 0.0

    def load_earlier(self) -> None:
        """Reads what an earlier start left in the folder.

        Raises:
            UsageError: it cannot be read, being another version's or damaged.
        """
        if (self.folder.path / "result.json").exists():
            try:
                self.earlier = load_result(self.folder.path)
            except UsageError as error:
                raise UsageError(f"{error}. Or use --fresh to start over, or another 'name' to keep both") from None

    def earlier_probe(self) -> ProbeResult | None:
        """An earlier start's probe, where it came to its end."""
        found = self.earlier.probe if self.earlier else None
        return found if found and found.verified_in_fresh_process and found.throughput else None

    def keep(self, attempt: Attempt) -> None:
        """Adds an attempt to the run folder; the first that fits is something not to be mixed with anything else."""
        if attempt.fits:
            self.keep_identity()
        assert self.opened is not None  # noqa: S101 - it is what attempts are made with
        about = {"precision": self.opened.precision[0][0], "memory_limit_bytes": self.opened.memory_limit_bytes}
        self.folder.append_attempt(attempt, **about)

    def keep_identity(self) -> None:
        """Writes what the run folder's measurements hold for, once."""
        if not self.folder.identity():
            self.folder.keep_identity(self.identity)

    def save(self, status: Status, error: BatchtuneError | None = None) -> Result:
        """Writes `result.json` as things stand; a start that stops early leaves that of an earlier one alone."""
        result, earlier = self.document(status, error), self.earlier
        nothing_new = earlier is not None and (earlier.trials or (earlier.probe and not (self.probe or self.probing)))
        if self.study is None and earlier is not None and nothing_new:
            return earlier.model_copy(update={"status": status, "error": result.error})
        self.folder.write_result(result)
        return result

    def save_now_and_then(self) -> None:
        """Writes `result.json` after a trial, less often where there is so much of it that writing takes long."""
        began = time.perf_counter()
        if began >= self._save_due:
            self.save("interrupted")
            now = time.perf_counter()
            self._save_due = now + (now - began) / _SAVING_SHARE

    def show(self, words: str) -> None:
        """Redraws the page of the run now and then; `words` say where it stands."""
        self.folder.show(lambda: self.document("interrupted"), words)

    def save_if_possible(self, status: Status, error: BatchtuneError) -> Result:
        """The document at the end of a run that stops; where it cannot be written, the caller still has it to show."""
        with contextlib.suppress(UsageError):
            return self.save(status, error)
        return self.document(status, error)

    def document(self, status: Status, error: BatchtuneError | None = None) -> Result:
        """The result document as things stand."""
        study, opened = self.study, self.opened
        environment = opened.environment if opened else None
        made = {"optimizer": opened.optimizer, "optimizer_settings": opened.optimizer_settings} if opened else {}
        recommendation, baseline = study.recommendation() if study else (None, None)
        if study is not None and recommendation is not None:
            more = {"scaling": self.scaling, "confirm_command": self._confirm_command(study, recommendation)}
            recommendation = recommendation.model_copy(update=more)
        probe = self.probe or (self.probing.result() if self.probing else None)
        trials = study.records() if study else []
        told = self._warnings(status, probe, trials, recommendation)
        return Result(
            kind="tune",
            status=status,
            name=self._config.name,
            environment=environment,
            task=self._task.model_copy(update=made),
            warnings=list(dict.fromkeys(sharing_warnings(environment) + told)),
            error=Failure(exit_code=error.exit_code, message=str(error)) if error else None,
            probe=probe,
            prior=self.prior or (self.earlier.prior if self.earlier else None),
            target=study.target if study else None,
            trials=trials,
            landscape=study.belief.landscape() if study and status == "complete" else None,
            recommendation=recommendation,
            baseline=baseline,
        )

    def _confirm_command(self, study: TuneStudy, found: Recommendation) -> str | None:
        """What goes on with this study, by the configuration that its folder keeps; None where all is confirmed."""
        if found.seeds_to_confirm is None:
            return None
        file = shlex.quote(str(self.folder.path / "config.yaml"))
        return f"batchtune tune {file} {study.parts.budget.to_confirm(found.seeds_to_confirm)}"

    def _warnings(
        self, status: Status, probe: ProbeResult | None, trials: list[Trial], recommended: Recommendation | None
    ) -> list[str]:
        """All that a reader of a study must know besides its numbers."""
        found, study = list(probe.warnings) if probe else [], self.study
        if self.probe is None or self.opened is None:
            return found
        ranks = self._config.ranks.of_each
        counted = probe_in_tokens(self.probe, token_batches(self._config, self.probe))
        found += loading_warnings(counted, self.prior, self.opened.device, ranks) if self.prior else []
        found += baseline_warnings(as_one_device(self.probe, ranks), self._config.baseline.batch_size)
        found += target_warnings(study.target) if study else []
        found += uneven_warnings(trials, recommended) + straggler_warnings(trials)
        if study and status == "complete":
            found += search_warnings(trials, study.parts.budget.enough())
        return found


def loading_warnings(probe: ProbeResult, prior: Prior, device: str, world_size: int = 1) -> list[str]:
    """One where steps at the batch size that the search starts with wait for their data for most of the time.

    The probe is that of one of so many ranks.
    """
    size, seconds = prior.start_batch_size, prior.loader_seconds_per_sample
    alone = as_one_device(probe, world_size).throughput_fit
    loaded = as_one_device(with_loading(probe, seconds, device), world_size).throughput_fit
    if alone is None or loaded is None or not seconds or not size:
        return []
    slower = step_seconds(loaded, size) / max(step_seconds(alone, size), 1e-9)
    if slower < _INPUT_BOUND:
        return []
    rate = f"{1 / seconds:,.0f} samples/s{' on each rank' if world_size > 1 else ''}"
    told = f"input-bound: loading data ({rate}) makes steps at batch {size:,} {number(slower)} times as long"
    return [f"{told}: prepare the data beforehand, or keep it in memory, and tune again"]


def baseline_warnings(probe: ProbeResult, batch_size: int) -> list[str]:
    """One where the user's bounds keep the probe below the baseline's batch size, so that it had to be accumulated."""
    most = probe.max_batch_size
    if most is None or probe.limited_by != "max" or batch_size <= most:
        return []
    text = f"the baseline's batch {batch_size:,} is above what batch_size allows ({most:,} at once): it was measured in"
    return [f"{text} accumulated micro-batches, which may be slower than what you run today"]


def target_warnings(target: Target) -> list[str]:
    """One where the baseline's run, which sets the target, diverged before its end."""
    if target.baseline_diverged_after_seconds is None:
        return []
    text = "the baseline diverged (NaN, infinite, or long worse than at its start) before its budget.run was over"
    return [f"{text}; what it had reached is the target: set objective.target, or fix it, and start over with --fresh"]


def search_warnings(trials: Sequence[Trial], enough: str) -> list[str]:
    """One where a study that has ended never came to search, or where the task raised errors in it."""
    searched = [trial for trial in trials if trial.role == "search" and trial.outcome]
    if not searched:
        text = "no other configuration was tried: probe and baseline took all of budget.total"
        return [f"{text}; start again with budget.total={enough}"]
    raised = [trial.message for trial in searched if trial.outcome == "user_error"]
    if not raised:
        return []
    runs = f"{len(raised)} of {len(searched)} runs of the search, which tell nothing"
    return [f"the task raised an error in {runs}: {raised[-1]}"]


def straggler_warnings(trials: Sequence[Trial]) -> list[str]:
    """One where the same rank was far slower than the others in most runs, twice at least."""
    ran = [trial for trial in trials if trial.curve]
    slow = [trial.straggler for trial in ran if trial.straggler]
    if not slow:
        return []
    rank = statistics.mode(each.rank for each in slow)
    times = [each.times for each in slow if each.rank == rank]
    if len(times) < _TWICE or 2 * len(times) <= len(ran):
        return []
    text = (
        f"rank {rank} is {number(statistics.median(times))} times as slow as the others, in {len(times)} of {len(ran)}"
    )
    return [f"{text} runs, and they wait for it in every step: look at its device, what else runs there, and its data"]


def uneven_warnings(trials: Sequence[Trial], found: Recommendation | None) -> list[str]:
    """One where runs of the recommendation or the baseline took much longer than they count.

    Stretches that are far slower than the usual pace count as if they were not: mostly it is another program that slows
    them, but batches of very unequal length look the same.
    """
    ours = None if found is None else (found.global_batch_size, found.learning_rate)
    shown = [each for each in trials if each.role != "search" or (each.batch_size, each.learning_rate) == ours]
    times = slowdown(shown)
    if times <= 1 + UNEVEN:
        return []
    longer = f"training took longer than it counts by {times - 1:.0%}"
    text = f"{longer}: stretches far slower than the usual pace are put down to other programs"
    rest = "where it is your data, in batches of very unequal length, times are that much longer for you"
    return [f"{text} on this machine; {rest}"]
