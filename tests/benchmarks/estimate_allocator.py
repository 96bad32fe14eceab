"""The estimate against torch's own CUDA allocator, on a GPU or a fake one: peaks to the byte, and the largest batches.

    python tests/benchmarks/estimate_allocator.py [--fake] [--quick] [--only NAME ...] [--resume | --again]

Each case of the zoo is traced as `estimate` traces it, in a process that does not see the card; then real steps are
taken at three batch sizes and around the largest, each size in a process of its own. Processes are forked from one
that has imported torch and has not initialised CUDA, so that they start in no time. Nothing is fitted to what is
measured. Where the estimate differs, the operator at the first difference between trace and allocator is named.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import pickle
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking whether there is a GPU must not open it: no fork could
sys.path.insert(0, str(Path(__file__).parent))
import allocator_ranks
import torch
import zoo
from allocator_history import events_of, first_difference
from torch.overrides import TorchFunctionMode
from zoo import Case

from batchtune.child import attempt as commands
from batchtune.estimate.commands import EstimateMemory, Refusal
from batchtune.estimate.tracing import server as product
from batchtune.estimate.tracing import trace
from batchtune.protocol.commands import TryBatchSize
from batchtune.vocabulary import LARGEST

RESULTS = Path(__file__).parent / "results"
GIB = 1 << 30
LIMITS = (20 * GIB, 8 * GIB)
STEPS, CHECK_STEPS = 3, 8
SECONDS = 600.0  # that an estimate may take
_WITHOUT = ("refused", "failed", "not_measured")  # what a record has that has no figures
EXPANDABLE = "expandable_segments:True"
_EXPANDABLE = "expandable_segments_max_batch_size"  # its place among an estimate's figures
QUICK = (
    "MLP, AdamW",
    "MLP, 2 micro-batches",
    "MLP, fused AdamW",
    "contrastive, B x B logits",
    "transformer, bf16",
    "transformer, checkpointing",
    "ResNet",
    "U-Net",
    "LoRA, bf16",
    "MLP, 8-bit states",
    "GAN, one loss",
    "recommender, large embeddings",
)


class Unfilled(TorchFunctionMode):
    """Random numbers are left out: on a fake card nobody reads them, and memory that is not written costs nothing."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is torch.randn:
            return torch.empty(*arguments, **options)
        if function is torch.randint:
            return torch.empty(arguments[-1], dtype=torch.int64)
        return function(*arguments, **options)


def forked(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a fork of this process; its error as a RuntimeError."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        torch.set_num_threads(1)  # makes anew what a fork lost, before autograd's threads do so at the same time
        try:
            answer = (True, work(*arguments))
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            answer = (False, f"{type(error).__name__}: {error}")
        with os.fdopen(writing, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        data = file.read()
    os.waitpid(process, 0)
    if not data:
        raise RuntimeError("the process died")
    fine, found = pickle.loads(data)
    if not fine:
        raise RuntimeError(found)
    return found


def card() -> dict[str, Any]:
    """The GPU as the estimate is asked about it, what the allocator may have of it (`free_bytes`), and their number."""
    from batchtune.device.gpus import find_gpu

    name = torch.cuda.get_device_name(0)
    known = find_gpu(name)
    free, total = torch.cuda.mem_get_info(0)
    facts = {"name": name, "memory_bytes": total, "free_bytes": free, "count": torch.cuda.device_count()}
    return facts | {"generation": known.generation, "vendor": known.vendor}


def estimated(
    case: Case, gpu: dict[str, Any], sizes: list[int] | None = None, limits: tuple[int, ...] = LIMITS[:1]
) -> dict[str, Any]:
    """The estimate's answers within each limit, and its peaks: at three batch sizes where none are given."""
    product.warm_up()
    task = f"{Path(zoo.__file__)}:{case.slug}"
    asked = EstimateMemory(
        task=task,
        precision=case.precision,
        accumulation_steps=case.accumulation_steps,
        strategy=case.strategy,
        world_size=case.world_size,
        gpus=({name: fact for name, fact in gpu.items() if name not in ("free_bytes", "count")},),
        seconds=SECONDS,
    )
    tracer: Any = trace.Tracer(asked)
    tracer.trace = functools.cache(tracer.trace)
    trace.Tracer = lambda *_: tracer  # type: ignore[misc]  # traced once for all questions
    rows = []
    for limit in limits:
        found = product.answer(asked.but(memory_limit=limit), lambda _: None)
        if isinstance(found, Refusal):
            return {"refused": found.refused}
        rows.append(found.gpus[0].model_dump(exclude={"work"}, exclude_none=True))
    largest = rows[0]["max_batch_size"]
    sizes = sizes or sorted({max(1, min(2, largest)), max(1, largest // 3), max(1, largest * 19 // 20)})
    step = _step(tracer, gpu)
    events = events_of(step, sizes[len(sizes) // 2])
    peaks = {size: _expected(step, size, gpu) for size in sizes}
    return {"limits": rows, "peaks": peaks, "events": events}


def _step(tracer: Any, gpu: dict[str, Any]) -> Any:
    from batchtune.estimate.memory.capacity import TracedGrid, TracedStep
    from batchtune.estimate.memory.fit import FittedStep, fit
    from batchtune.estimate.memory.overheads import gpu_of

    found = fit(tracer.trace)
    step = found if isinstance(found, FittedStep) else TracedStep(TracedGrid(tracer.trace))
    return step.on(gpu_of(gpu["name"], gpu["generation"]))


def _expected(step: Any, size: int, gpu: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes allocated and reserved on that card, and reserved with expandable segments; up to its end if it has one."""
    from batchtune.estimate.memory.allocator import CachingAllocator, ExpandableAllocator, OutOfMemory
    from batchtune.estimate.memory.fit import replay

    fixed = CachingAllocator(gpu["free_bytes"])
    expandable = ExpandableAllocator(gpu["free_bytes"], device_bytes=gpu["memory_bytes"])
    for allocator in (fixed, expandable):
        with contextlib.suppress(OutOfMemory):
            replay(step, size, allocator)
    return fixed.peak_allocated_bytes, fixed.peak_reserved_bytes, expandable.peak_reserved_bytes


@contextlib.contextmanager
def _batches() -> Iterator[None]:
    with Unfilled() if "FAKE_GPU" in os.environ else contextlib.nullcontext():
        yield


def with_model(case: Case, model: Any) -> Any:
    """The case's task around a model that is built already; batches without numbers on a fake card."""
    from batchtune.task.contract import Task

    def make_batch(batch_size: int) -> Any:
        with _batches():
            return case.batch(batch_size)

    members = vars(case.source()) | {"build_model": lambda: model, "make_batch": make_batch}
    return Task(SimpleNamespace(**members), case.name)


def attempted(
    case: Case, model: Any, size: int, limit: int | None, settings: str = "", *, steps: int = STEPS, check: bool = False
) -> dict[str, Any]:
    """One size trained for real, as an attempt or a final check; the allocator's settings must be there before CUDA."""
    from batchtune.device.memory import open_device

    if settings:
        torch._C._accelerator_setAllocatorSettings(settings)
    memory = open_device("cuda:0")
    if limit is not None:
        memory.enforce(limit)
    if "FAKE_GPU" in os.environ:
        from fake_gpu import this_machine

        this_machine().reads = "false" if case.batch is zoo.lib.masked_text else "known"  # a mask is data: not traced
        commands.require_finite = lambda *_: None
    how = {"precision": case.precision, "accumulation_steps": case.accumulation_steps}
    command = TryBatchSize(batch_size=size, steps=steps, verify=check, **how)
    found = commands.attempt(with_model(case, model), memory, command).attempt
    if found.outcome not in ("fit", "oom"):
        raise RuntimeError(f"{found.outcome} at {size}: {found.message}")
    return {"fits": found.fits, "peaks": (found.peak_allocated_bytes, found.peak_reserved_bytes)}


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest size that fits, from a guess by ever larger strides and bisection, to 1 in 256."""
    size, stride = max(1, guess), max(1, guess // 100)
    fitting, failing = 0, LARGEST + 1
    while fitting < size < failing and (fitting == 0 or failing > LARGEST):
        if fits(size):
            fitting, size = size, min(LARGEST, size + stride)
        else:
            failing, size = size, max(1, size - stride)
        stride *= 2
    while failing - fitting > max(1, fitting // 256):
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting


def measured(case: Case, guess: dict[str, Any], *, expandable: bool) -> dict[str, Any]:
    """The same figures from real steps; run in a fork, whose forks share the model that it builds."""
    torch.manual_seed(0)
    model = case.model(**case.options)

    def tried(size: int, limit: int | None = None, settings: str = "") -> dict[str, Any]:
        return forked(attempted, case, model, size, limit, settings)

    found: dict[str, Any] = {"peaks": {size: tried(size)["peaks"] for size in guess["peaks"]}, "limits": []}
    for limit, row in zip(LIMITS, guess["limits"], strict=False):
        truth = {"max": largest(lambda size, within=limit: tried(size, within)["fits"], row["max_batch_size"])}
        if expandable and limit == LIMITS[0]:
            truth["expandable"] = largest(lambda size: tried(size, LIMITS[0], EXPANDABLE)["fits"], row[_EXPANDABLE])
        found["limits"].append(truth)
    if expandable:
        near = max(guess["peaks"])
        found["expandable"] = {"size": near, "peaks": tried(near, None, EXPANDABLE)["peaks"]}
    return found


def checked(case: Case, guess: dict[str, Any], truth: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest real sizes, and whether the estimated ones pass a final check: bisection has its resolution."""
    torch.manual_seed(0)
    model = case.model(**case.options)
    found = []
    for limit, row, real in zip(LIMITS, guess["limits"], truth, strict=False):
        now = {name: size for name, size in real.items() if not name.startswith(("passes", "trains"))}
        for name, key, settings in (("max", "max_batch_size", ""), ("expandable", _EXPANDABLE, EXPANDABLE)):
            if name in real and row[key]:
                checking = functools.partial(attempted, steps=CHECK_STEPS, check=True)
                now[f"passes_{name}"] = forked(checking, case, model, row[key], limit, settings)["fits"]
                now[f"trains_{name}"] = forked(attempted, case, model, row[key], limit, settings)["fits"]
                now[name] = max(real[name], row[key]) if now[f"passes_{name}"] else min(real[name], row[key] - 1)
        found.append(now)
    return found


def examined(
    case: Case, gpu: dict[str, Any], *, expandable: bool, truth: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One case's record; `refused`, `not_measured` or `failed` in place of figures where there are none.

    Args:
        case: of the zoo.
        gpu: as `card` tells it.
        expandable: also with expandable segments, and within the second limit.
        truth: what was measured before, which is then not measured again but for ranks, which are quick.
    """
    record: dict[str, Any] = {"case": case.name, "precision": case.precision}
    if case.world_size > gpu["count"]:
        return record | {"not_measured": f"needs {case.world_size} GPUs, there are {gpu['count']}"}
    started, expandable = time.perf_counter(), expandable and case.world_size == 1
    try:
        sizes = [int(size) for size in truth["peaks"]] if truth else None
        guess = forked(estimated, case, gpu, sizes, LIMITS if expandable else LIMITS[:1])
        record |= {"traced_seconds": round(time.perf_counter() - started, 1)}
        if "refused" in guess:
            return record | guess
        events = guess.pop("events")
        if case.world_size > 1:
            truth = forked(allocator_ranks.measured, case, guess, LIMITS[:1], (STEPS, CHECK_STEPS), largest)
        else:
            truth = truth or forked(functools.partial(measured, expandable=expandable), case, guess)
            truth = truth | {"limits": forked(checked, case, guess, truth["limits"])}
    except RuntimeError as error:
        return record | {"failed": str(error)[:300]}
    record |= {"estimated": guess, "measured": truth}
    if not exact(record) and case.world_size == 1:
        try:
            record["difference"] = forked(
                first_difference, case, events, sorted(guess["peaks"])[len(guess["peaks"]) // 2]
            )
        except RuntimeError as error:
            record["difference"] = f"not found: {error}"[:300]
    return record | {"seconds": round(time.perf_counter() - started, 1)}


def pairs(record: dict[str, Any]) -> list[tuple[int, int, int, int, int]]:
    """(batch size, allocated and reserved as estimated, allocated and reserved as measured)."""
    guess, truth = (
        {int(size): peaks for size, peaks in record[key]["peaks"].items()} for key in ("estimated", "measured")
    )
    return [(size, *guess[size][:2], *truth[size]) for size in guess]


def exact(record: dict[str, Any]) -> bool:
    """Whether allocated bytes are those of the allocator at every size."""
    return all(guess == truth for _, guess, _, truth, _ in pairs(record))


def reserved_error(record: dict[str, Any]) -> float:
    """The largest relative error of reserved bytes, with its sign."""
    return max((guess / truth - 1 for _, _, guess, _, truth in pairs(record)), key=abs)


def batches(record: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(estimated, safe, real) largest batch by limit, and with expandable segments where it was measured."""
    found = []
    for guess, truth in zip(record["estimated"]["limits"], record["measured"]["limits"], strict=False):
        found.append((guess["max_batch_size"], guess["safe_max_batch_size"], truth["max"]))
        if "expandable" in truth:
            found.append((guess[_EXPANDABLE], 0, truth["expandable"]))
    return found


def within(row: tuple[int, int, int], share: float) -> bool:
    """Whether the estimated largest batch is within a share of the real one, or one sample off."""
    return abs(row[0] - row[2]) <= max(1, share * row[2])


def summary(records: list[dict[str, Any]]) -> list[str]:
    """What the table comes to, in lines of text."""
    done = [record for record in records if "measured" in record]
    rows = [row for record in done for row in batches(record)]
    return [
        f"{len(records)} of the {len(zoo.CASES)} cases of the zoo were run: {len(done)} measured, "
        + ", ".join(f"{sum(why in each for each in records)} {why.replace('_', ' ')}" for why in _WITHOUT),
        f"Peak allocated exact to the byte at every batch size: {sum(map(exact, done))} of {len(done)}.",
        f"Peak reserved within 1 %: {sum(abs(reserved_error(each)) <= 0.01 for each in done)} of {len(done)}.",
        f"Largest batch within 1 % (or one sample): {sum(within(row, 0.01) for row in rows)} of {len(rows)}.",
        (
            f"Largest above what fits: {sum(row[0] > row[2] for row in rows)}; safe above it: "
            f"{sum(row[1] > row[2] for row in rows)}."
        ),
    ]


def _table_row(record: dict[str, Any]) -> str:
    name = f"| {record['case']} | {record['precision']} |"
    for why in _WITHOUT:
        if why in record:
            return f"{name} {why}: {record[why].replace('|', '/')} | | | | |"
    allocated = ", ".join(f"{guess - truth:+,}" if guess - truth else "0" for _, guess, _, truth, _ in pairs(record))
    reserved = ", ".join(f"{guess / truth - 1:+.2%}" for _, _, guess, _, truth in pairs(record))
    sizes = "/".join(str(size) for size, *_ in pairs(record))
    found = "; ".join(f"{real} / {guess} / {safe or '–'}" for guess, safe, real in batches(record))
    difference = record.get("difference", "exact" if exact(record) else "by formulas, see events.py")
    return f"{name} {sizes} | {allocated} | {reserved} | {found} | {difference} |"


def written(records: list[dict[str, Any]], gpu: dict[str, Any]) -> str:
    """The Markdown."""
    rig = " (fake)" if "FAKE_GPU" in os.environ else ""
    return "\n".join(
        [
            "# Estimate against torch's CUDA allocator",
            "",
            (
                f"{datetime.now(UTC):%Y-%m-%d} · {gpu['name']}{rig}, {gpu['memory_bytes'] / GIB:.1f} GiB · "
                f"torch {torch.__version__} · Python {platform.python_version()} · `python {' '.join(sys.argv)}`"
            ),
            "",
            *(f"- {line}" for line in summary(records)),
            "",
            (
                "Allocated: bytes by which the estimate is off at each batch size. Largest: real / estimated / safe "
                f"within {LIMITS[0] // GIB} GiB; for every third case also with expandable segments (– for safe) and "
                f"within {LIMITS[1] // GIB} GiB. {STEPS} steps, each attempt in a process of its own; an estimate that "
                f"does not pass a final check of {CHECK_STEPS} steps counts as above what fits."
            ),
            "",
            (
                "| case | precision | batches | allocated, bytes off | reserved | largest: real / estimated / safe "
                "| first difference |"
            ),
            "|---|---|---|---|---|---|---|",
            *map(_table_row, records),
            "",
        ]
    )


def run(
    names: list[str], state: Path | None = None, *, resume: bool = False, again: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records of the named cases and of those that the state holds, in the zoo's order; and the card.

    Args:
        names: cases to examine.
        state: JSON of the records, read first and written after each case.
        resume: leave out what the state holds.
        again: trace anew, and compare with what the state says was measured.
    """
    torch.set_num_threads(1)  # threads do not outlive a fork
    gpu = forked(card)
    kept = {each["case"]: each for each in json.loads(state.read_text())} if state and state.exists() else {}
    for number, case in enumerate(zoo.CASES):
        before = kept.get(case.name, {})
        if case.name not in names or (resume and before):
            continue
        with contextlib.suppress(Exception), torch.device("meta"):
            case.model(**case.options)  # so that libraries are imported once, before the forks
        gc.collect()
        gc.freeze()  # so that a collection in a fork copies none of the parent's pages
        truth = before.get("measured") if again else None
        record = examined(case, gpu, expandable=number % 3 == 0, truth=truth)
        kept[case.name] = json.loads(json.dumps(record))
        print(_table_row(kept[case.name]), flush=True)
        if state:
            state.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    return [kept[case.name] for case in zoo.CASES if case.name in kept], gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases by name")
    parser.add_argument("--fake", action="store_true", help="on a fake RTX A5000 of 24 GiB")
    parser.add_argument("--quick", action="store_true", help="a dozen cases")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="leave out what the last run has measured")
    how.add_argument("--again", action="store_true", help="trace anew and compare with what the last run has measured")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where table and records are kept")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if options.fake and "FAKE_GPU" not in os.environ:
        import fake_gpu

        card = fake_gpu.Card("24GiB", name="NVIDIA RTX A5000", context_bytes="500MiB", multiprocessors=64)
        with fake_gpu.machine(*[card] * max(case.world_size for case in zoo.CASES)):
            sys.exit(subprocess.run([sys.executable, *sys.argv], check=False).returncode)
    names = options.only or (list(QUICK) if options.quick else [case.name for case in zoo.CASES])
    records, gpu = run(names, options.folder / "estimate_allocator.json", resume=options.resume, again=options.again)
    (options.folder / "estimate_allocator.md").write_text(written(records, gpu))
    print("\n".join(summary(records)))


if __name__ == "__main__":
    main()
