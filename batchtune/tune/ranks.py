"""What several ranks would make of a recommendation for one device, some of them timed."""

from __future__ import annotations

from batchtune.document import ProbeResult, Recommendation, Scaling
from batchtune.observer import Observer
from batchtune.probe.timing.ranks import time_group
from batchtune.protocol.commands import Opened
from batchtune.tune.objective.cost import SECONDS, cost_of
from batchtune.tune.plan.open_task import worker_settings
from batchtune.tune.study.study import TuneStudy
from batchtune.tune.verdict.scaling import can_scale, scaling, split


def scale(
    study: TuneStudy,
    opened: Opened,
    probe: ProbeResult,
    found: Recommendation,
    earlier: Scaling | None,
    observer: Observer,
) -> Scaling | None:
    """Times as many ranks as the configuration asks for; see `verdict.scaling`.

    Args:
        study: that has ended.
        opened: the task on its device.
        probe: of one device.
        found: what it recommends for one device.
        earlier: of an earlier start: the ranks are not timed again.
        observer: told why none were timed.

    Returns:
        None where only one is asked for, or no time of one device is known.
    """
    config, count = study.parts.plan.config, study.parts.plan.config.world_size
    if count == "auto":
        is_here = config.executor == "local" and not opened.device.startswith("cpu")
        count = opened.device_count if is_here else 1
    if count == 1 or not can_scale(found, probe):
        return None
    sizes = split(found.global_batch_size, count, probe.max_batch_size or 1)
    if sizes is None:
        observer.note(f"batch {found.global_batch_size} cannot be split among {count} ranks: none was timed")
        return None
    measured = earlier.measured if earlier else None
    if measured is None or (measured.world_size, measured.global_batch_size) != (count, found.global_batch_size):
        observer.stage(f"timing {count} ranks")
        kind = opened.device.partition(":")[0]
        settings = worker_settings(config).but(device=kind, metric=None)
        measured = time_group(settings, count, *sizes, found.precision, observer)
    expected = study.expected() if cost_of(config.objective.kind) is SECONDS else None
    return scaling(study.records(), found, probe, measured, expected) if measured else None
