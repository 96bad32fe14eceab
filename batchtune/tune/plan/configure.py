"""What a study is asked for: its configuration, what of that must not change, and the earlier study it starts from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtune.config.checks import SOLVED, one_or_several
from batchtune.config.load import config_of_task, default_name, load_config
from batchtune.config.schema import Config
from batchtune.document import NoiseScale, RangeTest
from batchtune.errors import UsageError
from batchtune.observer import Observer
from batchtune.processes.local import LocalLauncher
from batchtune.processes.worker import Worker
from batchtune.result import Result, find_run, load_result
from batchtune.run_folder import THE_CODE, RunFolder, write_atomically
from batchtune.task.spec import code_hashes, file_hash, names_task, spec_of, task_name
from batchtune.tune.plan.open_task import start_worker, worker_settings

_FLAGS = {"batch_size": "--batch-size 32", "learning_rate": "--lr 1e-3"}
# More of the same may be measured under these.
_FREE_TO_CHANGE = {"name", "budget", "confirm", "storage", "ray.address"}
DECADES = 0.2  # standard deviation of the belief in the learning rate that an earlier study has found


def configure(
    given: str | os.PathLike[str] | Config,
    options: Mapping[str, Any],
    observer: Observer,
    save_config: str | os.PathLike[str] | None = None,
) -> Config:
    """The configuration of a study.

    Args:
        given: a YAML file, or a task; what a task does not say by itself must be among the options; or the record.
        options: those of `batchtune.tune`, and `overrides`: texts such as `baseline.batch_size=32`, laid over them.
        observer: told where the baseline was read.
        save_config: the file that it is written to.

    Raises:
        UsageError: it is none, neither task nor options say what the baseline is, or the file cannot be
            written, or is read.
    """
    texts = options.get("overrides") or ()
    overrides = [*_overrides_of(options), *(one_or_several("overrides", texts) if texts else ())]
    if not isinstance(given, Config):
        config, told = _read(spec_of(given), overrides, observer)
    elif overrides:
        raise UsageError(f"{overrides[0]}: a Config is complete; change it by its model_copy(update=...)")
    else:
        config, told = given, []
    if options.get("target"):
        config = config.model_copy(update={"objective": config.objective.typed_as(options["target"])})
    config.ranks.require_launcher(workers=config.workers, executor=config.executor)
    if not config.name:
        config = config.model_copy(update={"name": default_name(Path(f"{task_name(config.task)}.py"))})
    if save_config is not None:
        if Path(save_config).is_dir():
            raise UsageError(f"--save-config {save_config}: is a folder; name a file, e.g. config.yaml")
        if _is_read(Path(save_config), given):
            why = "is a file of code, or what this study is read from; name another that is not there yet"
            raise UsageError(f"--save-config {save_config}: {why}")
        try:
            write_atomically(Path(save_config), _as_file(config, told))
        except OSError as error:
            raise UsageError(f"--save-config {save_config}: cannot be written: {error.strerror}") from None
    return config


def _is_read(file: Path, given: str | os.PathLike[str] | Config) -> bool:
    """Whether a file is the study's configuration or Python, which writing to it would destroy."""
    sources = () if isinstance(given, Config) else (Path(given), Path(given) / "config.yaml")
    return file.suffix == ".py" or (file.exists() and any(each.exists() and file.samefile(each) for each in sources))


def _read(source: str, overrides: Sequence[str], observer: Observer) -> tuple[Config, list[str]]:
    """The configuration of a file or a task, and sentences on where its baseline was read."""
    if not names_task(source):
        config = load_config(source, overrides)
        if not any(each.partition("=")[0].strip() == "name" for each in overrides):
            _refuse_copied(Path(source), config.name)
        return config, []
    name = task_name(source)
    config = config_of_task(source, name, overrides)
    missing = [key for key in _FLAGS if key not in config.baseline.model_fields_set]
    if not missing:
        return config, []
    settings = worker_settings(config).but(asks_for_current_settings=True)
    with Worker(settings, LocalLauncher(observer.printed), note=observer.announce) as worker:
        found = {key: value for key, value in start_worker(worker).current_settings if value}
    unknown = [key for key in missing if key not in found]
    if unknown:
        what = " and ".join(key.replace("_", " ") for key in unknown)
        raise UsageError(f"{source}: does not say its {what}; add {' '.join(_FLAGS[key] for key in unknown)}")
    read = [f"baseline.{key}={found[key][0]!r}" for key in missing]
    config = config_of_task(source, name, [*read, *overrides])
    size, rate = (f" ({found[key][1]})" if key in missing else "" for key in _FLAGS)
    told = f"baseline: batch {config.baseline.batch_size}{size}, learning rate {config.baseline.learning_rate:g}{rate}"
    observer.announce(told)
    return config, [told]


def _refuse_copied(source: Path, name: str) -> None:
    """Raises UsageError for the configuration of a run folder that is not its run's: it was copied, or renamed."""
    folder = (source if source.is_dir() else source.parent).resolve()
    if folder.name != name and "task" in (RunFolder(folder.name, folder.parent).identity() or {}):
        raise UsageError(
            f"{source}: is of the run '{name}', in a folder copied or renamed: give that run's own to go on with it, "
            f"or add name={folder.name} for a study of its own"
        )


def _overrides_of(options: Mapping[str, Any]) -> list[str]:
    """What options of the command line say, as texts that are laid over a configuration."""
    keys = {"batch_size": "baseline.batch_size", "lr": "baseline.learning_rate", "budget": "budget.total"}
    keys |= {"ranks": "ranks.per_trial", "strategy": "ranks.strategy", "workers": "workers"}
    keys |= {"storage": "storage", "executor": "executor", "ray_address": "ray.address"}
    texts = {name: json.dumps(options[name]) for name in ("storage", "ray_address") if options.get(name)}  # as they are
    given = [f"{key}={texts.get(name, options[name])}" for name, key in keys.items() if options.get(name)]
    if found := SOLVED.fullmatch(options.get("target") or ""):
        metric, sign, value = found.groups()
        goal = "minimize" if sign == "<" else "maximize"
        given += [f"objective.metric={metric}", f"objective.goal={goal}", f"objective.target={value}"]
    return given


def _as_file(config: Config, told: Sequence[str]) -> str:
    """A configuration as a file to keep, which goes on with the study of whoever wrote it."""
    head = ["batchtune tune FILE    goes on with this study; more keys: batchtune schema config", *told]
    return "".join(f"# {line}\n" for line in head) + config.to_yaml(only_given=True)


def identity_of(config: Config) -> dict[str, object]:
    """What must not change under a study: the task and every key that gives a measurement its meaning."""
    flat: dict[str, object] = {"task": config.task, THE_CODE: code_hashes(config.task)}
    for key, value in config.model_dump(mode="json").items():
        if key == "budget":
            flat["budget.run"] = value["run"]
            continue
        if key == "space":
            flat["the arguments under space"] = sorted(value)  # one that comes or goes is a change, too
        if key not in _FREE_TO_CHANGE:
            whole = key == "gradient_clipping" or not isinstance(value, dict)  # one that comes or goes is a change
            sections = {"": value} if whole else value
            flat |= {f"{key}.{leaf}".rstrip("."): each for leaf, each in sections.items()}
    return {key: value for key, value in flat.items() if key not in _FREE_TO_CHANGE}


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
    if found.batch_unit == "tokens":
        raise UsageError(f"--warm-start {run}: its batch sizes count tokens, and this study's samples; leave it out")
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
