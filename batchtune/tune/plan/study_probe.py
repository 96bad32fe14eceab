"""The probe of a study: which sizes it looks at, and how much time it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from batchtune.config.probe import SECONDS_PER_POINT, ProbeOptions
from batchtune.config.schema import Config
from batchtune.document import Attempt
from batchtune.observer import Observer
from batchtune.probe.runner import Probe
from batchtune.probe.timing.steps import MAX_POINTS
from batchtune.processes.worker import LONG_SILENCE_SECONDS, Worker
from batchtune.protocol.commands import Opened
from batchtune.tune.plan.open_task import multiple_of
from batchtune.tune.plan.prior import MAX_EVALUATION_BATCH
from batchtune.tune.plan.tokens import in_samples
from batchtune.vocabulary import Variant

USEFUL_FACTOR = 8  # of the baseline's batch: probed up to there however slow the machine is at the moment
MIN_STEPS = 100  # in budget.run; a batch so large that fewer fit would not get far in it
VERIFY_SHARE, TIMING_SHARE = 0.005, 0.005  # of budget.total, for the final check and for timing steps
_LEAST_TIMING_SECONDS = 0.1  # of each size
_TIMING_WITHIN = 0.05  # of budget.total, however slow steps are


def study_probe(
    config: Config,
    opened: Opened,
    worker: Worker,
    observer: Observer,
    earlier: Iterable[Mapping[str, object]],
    variant: Variant | None = None,
) -> Probe:
    """The probe of a study, which goes on from the attempts of earlier starts.

    It takes a small share of the study's time: what that recommends has trained for longer. Its sizes are of each rank.
    With a `variant`, it is of what is trained by that instead of as the baseline is.
    """
    precision = opened.precision[0][0]
    about = {"precision": precision, "purpose": "search"}.items()
    earlier = [each for each in earlier if each.get("variant") == (variant.name if variant else None)]
    limited = [each for each in earlier if isinstance(each.get("memory_limit_bytes"), int)]
    known = [Attempt.model_validate(each) for each in limited if about <= each.items()]
    known = [each for each in known if each.outcome != "user_error"]  # whose frames and cause only an attempt tells
    sizes, total, ranks = in_samples(config).batch_size, config.budget.total, config.ranks.of_each
    unit, most = multiple_of(config) // ranks, sizes.global_ or (None if sizes.max == "auto" else sizes.max)
    options = ProbeOptions(
        minimum=unit,
        maximum=None if most is None else most // ranks,
        multiple_of=unit,
        of_today=config.baseline.batch_size // ranks,
        verify_timeout=LONG_SILENCE_SECONDS,
        max_step_seconds=config.budget.run / MIN_STEPS,
        useful_size=USEFUL_FACTOR * config.baseline.batch_size // ranks,
        evaluation_batch_size=MAX_EVALUATION_BATCH,
        verify_seconds=VERIFY_SHARE * total,
        timing_seconds=min(max(TIMING_SHARE * total / MAX_POINTS, _LEAST_TIMING_SECONDS), SECONDS_PER_POINT),
        timing_within=_TIMING_WITHIN * total,
        flops=False,
        variant=variant or Variant(),
        lengths="auto" if config.batch_size.unit == "tokens" else None,
    )
    return Probe(worker, options, precision, observer, known)
