"""`batchtune probe --lengths` against plain loops that mix lengths, and beside a search of each length from nothing.

    python tests/benchmarks/probe_lengths.py [--resume] [--only WORD,WORD] [--sizes 24,80] [--table]

writes tests/benchmarks/results/probe_lengths.md, and ends with 1 where a goal is missed: no batch that a plain loop
over all lengths cannot train in any of its 26 orders, none below 97 % of the largest that one trains in all of them
(and, where that seems so, in 300 others, each with gradients freed before the forward pass and after the step); 2.5
attempts and 0.6 OOMs a length. Every other one of the 26 orders frees gradients before the forward pass. It needs
torch's CUDA build on the fake card. A part (--only) is printed and kept, and the table made of all that is kept with
--table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]
from length_rows import (  # noqa: E402 - beside this file
    CLOSE,
    FEW_ORDERS,
    FIRST_SIZE,
    MANY_ORDERS,
    NEAR,
    RANDOM_ORDERS,
    Row,
    misses,
    read,
    report,
)

RESULTS = HERE / "results" / "probe_lengths.md"
RANDOM_STEPS, CHECKED_STEPS = 64, 60
RESOLUTION = 0.005  # of the largest batch, where it is bisected
BETWEEN = 1.012, 1.024  # times the answers: sizes that have to train before larger ones count
NAMES = {24: "NVIDIA RTX A5000", 80: "NVIDIA A100-SXM4-80GB"}

Ways = Sequence[tuple[Sequence[int], bool]]
"""Orders of the lengths, and whether gradients are freed before the forward pass."""


def orders(count: int, seeds: Sequence[int]) -> dict[str, list[int]]:
    """Long first, short first, and at random by each seed; each length at least once."""
    down, up = [*range(count)][::-1], [*range(count)]
    found = {"long first": down + up + down, "short first": up + down + up}
    for seed in seeds:
        dice = random.Random(1000 + seed)
        steps = [dice.randrange(count) for _ in range(RANDOM_STEPS - count)]
        found[f"random {seed}"] = [*steps, *dice.sample(up, count)]
    return found


def in_turns(orders: Iterable[Sequence[int]]) -> Ways:
    """Every other one frees gradients before the forward pass."""
    return [(order, bool(number % 2)) for number, order in enumerate(orders)]


def many_ways(count: int) -> Ways:
    """Those that answers have passed, in checks or a replay: some larger batches fail in one, and in no other."""
    from batchtune.lengths.orders import mixed_order

    orders = [[count - 1 - each for each in mixed_order(count, CHECKED_STEPS, at)] for at in range(MANY_ORDERS)]
    return [(order, zeroes_before) for order in orders for zeroes_before in (False, True)]


def loop(source: object, precision: str, steps: Sequence[tuple[object, int]], *, zeroes_before: bool) -> None:
    """A plain loop over batches of these lengths and sizes; the last one lives while the next is made."""
    import torch

    torch.manual_seed(0)
    model = source.build_model().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for length, size in steps:
        batch = [each.cuda(non_blocking=True) for each in source.make_batch(size, length)]
        if zeroes_before:
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = source.compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        if not zeroes_before:
            optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()


class Plain:
    """Whether batches of some sizes train, each try in a fork that has never asked for a card."""

    def __init__(self, name: str, limit: int) -> None:
        import length_tasks

        self.case = length_tasks.CASES[name]
        self._source, self._limit = self.case.source(), limit

    def trains(self, sizes: Sequence[int], order: Sequence[int], *, zeroes_before: bool = False) -> bool:
        steps = [(self.case.lengths[each], sizes[each]) for each in order]
        return self._forked(lambda: loop(self._source, self.case.precision, steps, zeroes_before=zeroes_before))

    def alone(self, at: int, size: int) -> bool:
        """A few steps at one length."""
        return self.trains([size] * (at + 1), [at] * 3)

    def _forked(self, work: Callable[[], None]) -> bool:
        import torch

        child = os.fork()
        if not child:
            code = 2
            with contextlib.suppress(BaseException):
                torch.set_num_threads(1)
                torch.cuda.set_per_process_memory_fraction(self._limit / torch.cuda.mem_get_info()[1])
                try:
                    work()
                    code = 0
                except torch.OutOfMemoryError:
                    code = 1
                except RuntimeError as error:  # a batch that a kernel does not take trains as little
                    code = 1 if "exceeds (65535)" in str(error) else 2
                    print(f"the plain loop raises {error!r}", file=sys.stderr, flush=True)
                except Exception as error:  # noqa: BLE001 - told here, and by the exit status
                    print(f"the plain loop raises {error!r}", file=sys.stderr, flush=True)
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in {0, 1}:
            raise SystemExit(f"a plain loop ended with {code}")
        return code == 0


def failing(plain: Plain, sizes: Sequence[int], ways: Ways) -> list[int]:
    """The places of those in which they do not train."""
    return [
        place
        for place, (order, zeroes_before) in enumerate(ways)
        if not plain.trains(sizes, order, zeroes_before=zeroes_before)
    ]


def from_nothing(fits: Callable[[int], bool]) -> tuple[int, int, int]:
    """Doubling, or halving where that fails, and then bisection: attempts, OOMs and the size."""
    low, high, size, tried = 0, 0, FIRST_SIZE, []
    while not high or not low or (high - low) / low > NEAR:
        tried.append(fits(size))
        low, high = (size, high) if tried[-1] else (low, size)
        size = (low + high) // 2 if low and high else size * 2 if low else size // 2
        if size in {low, high, 0}:
            break
    return len(tried), tried.count(False), low


def room(plain: Plain, sizes: Sequence[int], ways: Ways) -> float:
    """By how much all batches could be larger and still train in all ways: at least 1 where they do.

    Those between have to train, too: a detector's batches 3.2 % larger train in 600 ways, and 1.2 % larger not in 8.
    """

    def fits(factor: float) -> bool:
        larger = [max(1, int(factor * size)) for size in sizes]
        return all(plain.trains(larger, order, zeroes_before=zeroes_before) for order, zeroes_before in ways)

    low, high = 1.0, 1.001 / CLOSE
    if not all(map(fits, BETWEEN)):
        return low
    while fits(high):
        low, high = high, high * 1.05
    while low > 1 and high - low > RESOLUTION:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return round(low, 3)


def measure(name: str, gib: int) -> Row:
    """A probe, the loop's answers to it, and the search from nothing."""
    import fake_gpu
    import length_tasks
    import torch._dynamo  # noqa: F401 - what an optimizer loads when it is first made, here once for all forks

    import batchtune
    from batchtune.errors import BatchtuneError

    row, lengths = Row(name, gib), length_tasks.CASES[name].lengths
    card = fake_gpu.Card(f"{gib}GiB", name=NAMES[gib], capability=(8, 0), context_bytes="500MiB")
    with fake_gpu.machine(card), tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["XDG_CACHE_HOME"] = folder
        started = time.perf_counter()
        spec, precision = f"{HERE / 'length_tasks.py'}:{name}", length_tasks.CASES[name].precision
        try:
            found = batchtune.probe(
                spec, device="cuda", lengths=list(lengths), precision=precision, throughput=False, timeout="900s"
            ).probe
        except BatchtuneError as error:
            row.trouble = str(error)[:200]
            return row
        row.seconds = round(time.perf_counter() - started, 1)
        row.sizes = [point.max_batch_size for point in found.lengths]
        tried = [each for point in found.lengths for each in point.attempts]
        row.attempts = _counts([each.purpose for each in tried])
        row.ooms = _counts([each.purpose for each in tried if each.outcome == "oom"])
        gpu = {"gpus": NAMES[gib].replace("NVIDIA ", ""), "memory_limit": found.memory_limit_bytes, "timeout": "300s"}
        with contextlib.suppress(BatchtuneError):  # a step that needs data is refused
            (estimate,) = batchtune.estimate(spec, lengths=list(lengths), precision=precision, **gpu).estimates
            row.estimated = [(each.max_batch_size, each.alone_max_batch_size) for each in estimate.lengths]
            row.band = estimate.error_share or 0.0
            row.safe = [each.safe_max_batch_size for each in estimate.lengths]
        plain = Plain(name, found.memory_limit_bytes)
        every = orders(len(lengths), range(RANDOM_ORDERS))
        some, names = in_turns(every.values()), [*every]
        row.orders = len(every)
        row.fails = [names[place] for place in failing(plain, row.sizes, some)]
        row.safe_fail = len(failing(plain, row.safe, some)) if row.safe else None
        if not row.fails:
            row.room, row.room_in_few = (room(plain, row.sizes, few) for few in (some, some[:FEW_ORDERS]))
            if row.room * CLOSE > 1:
                many = many_ways(len(lengths))
                row.many_fail = len(failing(plain, row.sizes, many))
                row.room_in_many = room(plain, row.sizes, many)
        searched = [from_nothing(lambda size, at=at: plain.alone(at, size)) for at in range(len(lengths))]
        attempts, ooms, sizes = zip(*searched, strict=True)
        row.nemo = sum(attempts), sum(ooms), list(sizes)
    return row


def _counts(purposes: Sequence[str]) -> tuple[int, int]:
    return purposes.count("search"), purposes.count("verify")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true", help="keep what an earlier start has measured")
    parser.add_argument("--only", default="", help="models whose name has one of these words in it, no table")
    parser.add_argument("--sizes", default=",".join(map(str, NAMES)), help="GiB")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the table of what is there")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "probe_lengths.jsonl")
    return parser.parse_args()


def main() -> int:
    options = _options()
    from fake_gpu import forks
    from length_tasks import CASES

    forks.children_are_forks()
    if not (options.resume or options.table):
        options.state.unlink(missing_ok=True)
    rows = read(options.state)
    names = [name for name in CASES if any(word in name for word in options.only.split(","))]
    for name in names if not options.table else ():
        for gib in map(int, options.sizes.split(",")):
            if (name, gib) in rows:
                continue
            row = measure(name, gib)
            print(row, flush=True)
            with options.state.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    places = [*CASES]
    done = sorted(read(options.state).values(), key=lambda row: (places.index(row.model), row.gib))
    if options.table or not options.only:
        RESULTS.write_text(report(done))
    missed = misses(done) or ([] if done else ["nothing was measured"])
    print("\n".join(missed) or "every goal was met")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
