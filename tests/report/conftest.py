"""Made-up results, so that what is drawn can be checked figure by figure."""

import documents
import pytest

from batchtune.results import (
    Attempt,
    DataParallel,
    Environment,
    Interval,
    ProbeResult,
    Recommendation,
    Result,
    Scaling,
    ScalingPoint,
    Target,
    TaskInfo,
    ThroughputFit,
    ThroughputPoint,
    Trial,
)

GIB = 1 << 30


@pytest.fixture(params=list(documents.DOCUMENTS))
def any_result(request) -> Result:
    return documents.result(request.param)


@pytest.fixture
def result_of():
    """Builds the result of a named document, with keys laid over it."""
    return documents.result


@pytest.fixture
def probe() -> ProbeResult:
    return ProbeResult(
        precision="bf16",
        max_batch_size=176,
        first_failing_batch_size=177,
        limited_by="memory",
        memory_limit_bytes=20 * GIB,
        peak_reserved_bytes=15 * GIB,
        verified_in_fresh_process=True,
        verify_steps=20,
        seconds=48.0,
        attempts=[
            Attempt(batch_size=1, outcome="fit", steps=3, peak_reserved_bytes=5 * GIB, step_seconds=0.004),
            Attempt(batch_size=177, outcome="oom", message="out of memory [while allocating] 2 GiB"),
            Attempt(batch_size=176, outcome="fit", steps=20, peak_reserved_bytes=15 * GIB, purpose="verify"),
        ],
        throughput=[
            ThroughputPoint(batch_size=88, samples_per_second=440.0, step_seconds=0.2),
            ThroughputPoint(batch_size=176, samples_per_second=880.0, step_seconds=0.2),
        ],
        throughput_fit=ThroughputFit(
            alpha_seconds=0.001,
            beta_seconds_per_sample=0.0005,
            saturation_batch_size=2.0,
            batch_size_within_5_percent=176,
        ),
    )


@pytest.fixture
def probed(probe) -> Result:
    return Result(
        kind="probe",
        status="complete",
        name="model",
        environment=Environment(device="NVIDIA H200", torch="2.13.0", cuda="13.0"),
        task=TaskInfo(path="model.py"),
        probe=probe,
    )


@pytest.fixture
def tuned(probe) -> Result:
    def recommendation(batch_size: int, rate: float, **more: object) -> Recommendation:
        return Recommendation(
            micro_batch_size=min(128, batch_size),
            gradient_accumulation_steps=max(1, batch_size // 128),
            global_batch_size=batch_size,
            learning_rate=rate,
            precision="bf16",
            **more,
        )

    def trial(number: int, state: str = "complete", seconds: float | None = None, **more: object) -> Trial:
        common = {"batch_size": 256, "learning_rate": 3e-4, "precision": "bf16", "seed": number}
        return Trial(number=number, state=state, time_to_target_seconds=seconds, **(common | more))

    return Result(
        kind="tune",
        status="complete",
        name="digits",
        task=TaskInfo(path="model.py"),
        warnings=["batch size 300 ended in crash"],
        probe=probe,
        target=Target(metric="val_loss", goal="minimize", value=0.4123, reason="what the baseline reached"),
        trials=[
            trial(0, seconds=127.0, role="baseline", outcome="reached", batch_size=32),
            trial(1, seconds=41.0, role="search", outcome="reached"),
            trial(2, "pruned", role="search", outcome="capped", value=0.7),
            trial(3, "waiting"),
        ],
        recommendation=recommendation(
            256,
            3e-4,
            time_to_target_seconds=Interval(median=41.0, low=39.0, high=44.0),
            speedup_over_baseline=Interval(median=3.1, low=2.8, high=3.4),
            reason="reaches the target 3.10 times as fast as the baseline",
        ),
        baseline=recommendation(
            32, 1e-3, time_to_target_seconds=Interval(median=127.0, low=120.0, high=130.0), reason="what you run today"
        ),
    )


@pytest.fixture
def scaled(tuned) -> Result:
    """The study on a machine with two devices."""

    def point(world_size: int, median: float) -> ScalingPoint:
        return ScalingPoint(
            world_size=world_size,
            global_batch_size=256,
            micro_batch_size=128 // world_size,
            gradient_accumulation_steps=2,
            learning_rate=3e-4,
            precision="bf16",
            step_seconds=0.4 / world_size,
            time_to_target_seconds=Interval(median=median, low=0.9 * median, high=1.1 * median),
            is_estimate=world_size > 1,
        )

    group = DataParallel(
        world_size=2,
        strategy="ddp",
        backend="nccl",
        batch_size=64,
        global_batch_size=256,
        step_seconds=0.25,
        communication_seconds=0.05,
        communication_share=0.2,
    )
    found = Scaling(measured=group, points=[point(1, 41.0), point(2, 25.6), point(4, 18.2), point(8, 15.1)])
    return tuned.model_copy(update={"recommendation": tuned.recommendation.model_copy(update={"scaling": found})})
