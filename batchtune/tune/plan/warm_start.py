"""What an earlier study of the same task tells a new one: `--warm-start`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchtune.config.schema import Config
from batchtune.document import NoiseScale, RangeTest
from batchtune.errors import UsageError
from batchtune.result import Result, find_run, load_result
from batchtune.task.spec import file_hash

DECADES = 0.2  # standard deviation of the belief in the learning rate that a study has found before


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Where an earlier study ended, and what it had measured before its search."""

    run: str
    batch_size: int
    learning_rate: float
    noise_scale: NoiseScale | None = None
    range_tests: tuple[RangeTest, ...] = ()


def read_warm_start(run: str, config: Config, root: Path) -> WarmStart:
    """The end of the study that a person means by a run's name, a folder or a file.

    Raises:
        UsageError: there is none, it was of another task, or it came to no recommendation.
    """
    if config.batch_size.unit == "tokens":
        raise UsageError(f"--warm-start {run}: not with batch_size.unit tokens, which measures its start anew")
    earlier = load_result(find_run(run, root))
    if not _is_of(earlier, config.task):
        raise UsageError(
            f"--warm-start {run}: that was a study of {earlier.task.path}, and this is one of {config.task}; "
            "name a study of the same task"
        )
    found, prior = earlier.recommendation, earlier.prior
    if found is None or found.learning_rate is None:
        raise UsageError(f"--warm-start {run}: it holds no recommendation to start from; name a study that ended")
    return WarmStart(
        run=run,
        batch_size=found.global_batch_size,
        learning_rate=found.learning_rate,
        noise_scale=prior.noise_scale if prior else None,
        range_tests=tuple(prior.range_tests) if prior else (),
    )


def _is_of(earlier: Result, task: str) -> bool:
    """Whether a result is of this task: by its name, or by what its file holds, wherever that was."""
    same_name = Path(earlier.task.path).absolute() == Path(task).absolute()
    return same_name or (earlier.task.sha256 is not None and earlier.task.sha256 == file_hash(task))
