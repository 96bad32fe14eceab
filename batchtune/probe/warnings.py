"""What a reader of a probe's result must know besides its numbers, in sentences."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from batchtune.device.sharing import name_processes
from batchtune.document import Attempt, Environment, ProbeResult, ThroughputPoint
from batchtune.protocol.commands import STEPS_AFTER_EVALUATION
from batchtune.units import share, size
from batchtune.vocabulary import LARGEST

BUSY = 0.2  # share of the host's processors; less hardly slows a step
MOVED = 0.01  # share of the device's memory by which its free memory may move before it is worth a sentence

_APART = 4  # times: among sizes so different, memory that ends after the same number of steps is not the batch's
_KEPT = "something keeps what each step made: losses that are summed without .item(), or a list of outputs"


def attempt_warnings(attempts: Sequence[Attempt], largest_fit: int) -> list[str]:
    """What failed for another reason than memory: each size below the largest fit, above it the first of each kind."""
    last = {attempt.batch_size: attempt for attempt in attempts}
    failed = [attempt for _, attempt in sorted(last.items()) if attempt.outcome not in {"fit", "oom"}]
    found = [f"{_ended(each)} (the search went on above it)" for each in failed if each.batch_size < largest_fit]
    above = [each for each in failed if each.batch_size > largest_fit]
    for outcome in dict.fromkeys(each.outcome for each in above):
        smallest, *larger = (each for each in above if each.outcome == outcome)
        text = _ended(smallest)
        if larger:
            text += f" ({len(larger)} larger size{'s' if larger[1:] else ''} failed so, too)"
        elif smallest.batch_size == max(last):
            text += " (larger sizes were not searched)"
        found.append(text)
    return found


def end_warnings(largest_fit: int, maximum: int | None) -> list[str]:
    """One where the search ended for its own sake, which keeps batches from filling the host's memory."""
    if maximum is not None or largest_fit < LARGEST:
        return []
    return [f"a search without a maximum ends at {LARGEST:,} samples: --max looks for more"]


def _ended(attempt: Attempt) -> str:
    return f"batch size {attempt.batch_size} ended in {attempt.outcome}: {attempt.message}"


def recompile_warnings(attempts: Sequence[Attempt], points: Sequence[ThroughputPoint]) -> list[str]:
    """One where torch.compile went on compiling, from the longest look at it."""
    looks: list[Attempt | ThroughputPoint] = [*points, *attempts]
    worst = max(looks, key=lambda each: each.recompiles or 0, default=None)
    if worst is None or not worst.recompiles:
        return []
    text = (
        f"torch.compile compiled {worst.recompiles} more graphs after the first steps at batch size {worst.batch_size}"
    )
    return [f"{text}: a longer run will do so too (TORCH_LOGS=recompiles says why)"]


def leak_warnings(attempts: Sequence[Attempt], limit_bytes: int | None) -> list[str]:
    """One where memory grew from step to step, from the longest look at it."""
    worst = max((each for each in attempts if each.growth_bytes_per_step), key=lambda each: each.steps, default=None)
    if worst is None or not worst.growth_bytes_per_step:
        return []
    text = f"memory grew by {size(worst.growth_bytes_per_step)} a step at batch size {worst.batch_size}"
    high = worst.peak_reserved_bytes or worst.peak_allocated_bytes
    if worst.fits and limit_bytes and high:
        trained = worst.steps + (STEPS_AFTER_EVALUATION if worst.purpose == "verify" else 0)
        left = max(0, limit_bytes - high) // worst.growth_bytes_per_step
        text += f": a longer run would be out of memory some {trained + left} steps from its start"
    return [f"{text} ({_KEPT})"]


def kept_warnings(checks: Sequence[Attempt], cut_short: Sequence[Attempt]) -> list[str]:
    """One where every final check took about the same number of steps to fill the memory, whatever its batch size.

    Args:
        checks: all final checks.
        cut_short: those that were out of memory before their last step.
    """
    sizes, steps = [each.batch_size for each in cut_short], [each.steps for each in cut_short]
    if not sizes or len(checks) > len(sizes) or max(sizes) < _APART * min(sizes):
        return []
    if any(each.growth_bytes_per_step for each in checks):  # which says more
        return []
    if not 1 <= min(steps) <= max(steps) <= min(steps) + 1:
        return []
    after = f"{min(steps)} to {max(steps)}" if max(steps) > min(steps) else f"{min(steps)}"
    text = f"memory grows from step to step whatever the batch size: from {max(sizes)} down to {min(sizes)}"
    return [f"{text} every final check was out of it after {after} steps ({_KEPT})"]


def evaluation_warnings(evaluated: Sequence[Attempt], largest_fit: int, tolerance: float) -> list[str]:
    """One where memory ends later in training than in evaluation or saving.

    Args:
        evaluated: final checks that were out of memory after all their training steps.
        largest_fit: that passed its final check; 0: none did.
        tolerance: a relative difference that is not worth a sentence.
    """
    trained = max((each.batch_size for each in evaluated), default=0)
    if trained - largest_fit <= 2 * tolerance * trained:  # the largest fit may itself be one below where memory ends
        return []
    where = f"beyond {largest_fit}" if largest_fit else "at any size that was tried"
    return [f"training alone fits {trained}, but evaluation or saving does not {where}: evaluate in smaller batches"]


def mapping_warnings(attempts: Sequence[Attempt]) -> list[str]:
    """One where the end of memory was that a file could not be mapped, which counts as memory only on a CPU."""
    if not any(each.maps_file for each in attempts):
        return []
    text = "a file that is memory-mapped during training counts against a CPU's limit with its whole size"
    return [f"{text}: map it at import, where it does not count, or raise --memory-limit by its size"]


def busy_warnings(points: Sequence[ThroughputPoint]) -> list[str]:
    """One where other programs used the host's processors while steps were timed."""
    others = max((point.processors_used_by_others or 0.0 for point in points), default=0.0)
    if others < BUSY:
        return []
    busy = f"other programs used up to {share(others)} of this machine's processors while steps were timed"
    return [f"{busy}: the speeds are those of a busy machine, so probe again when it is idle"]


def foreign_warnings(parameters: int) -> list[str]:
    """One where the optimizer holds parameters that are not the model's."""
    if not parameters:
        return []
    which = f"{parameters} parameter{'s that are' if parameters > 1 else ' that is'} not the model's"
    text = f"the optimizer holds {which} (of a loss, say), which nobody moves to the device or saves with the model"
    return [f"{text}; make it a module of what build_model returns"]


def allocator_warnings(environment: Environment | None, probes: Sequence[ProbeResult]) -> list[str]:
    """One where a CPU's memory set the limit: attempts do without what glibc keeps when left to itself."""
    on_glibc = environment and environment.device_type == "cpu" and platform.libc_ver()[0] == "glibc"
    if not on_glibc or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return []
    limited = [each for each in probes if each.limited_by == "memory" and each.max_batch_size]
    text = "on a CPU this is what the tensors take, and glibc's allocator may keep as much again of what was freed"
    remedy = "run with MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 (slower), or leave room"
    return [f"{text}: {remedy}"] if limited else []


def sharing_warnings(environment: Environment | None) -> list[str]:
    """Who else held memory of the device, and whether what was free moved meanwhile."""
    if environment is None:
        return []
    found = []
    others = environment.other_processes or []
    if others:
        known = [process.memory_bytes for process in others if process.memory_bytes]
        held = size(sum(known)) if known else "some"
        found.append(
            f"other processes hold {held} of the device's memory ({name_processes(others)}): what they leave free is "
            "what was probed, and their work slows the timing"
        )
    before, after = environment.device_memory_free_bytes, environment.device_memory_free_after_bytes
    total = environment.device_memory_bytes
    if total and before is not None and after is not None and abs(after - before) > MOVED * total:
        found.append(
            f"the device's free memory moved by {share(abs(after - before) / total)} of the whole, from {size(before)} "
            f"to {size(after)}, during the probe: somebody else uses it, and the answer may not hold later"
        )
    return found
