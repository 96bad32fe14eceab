"""A finished study in an experiment tracker, one run a trial: what each tracker calls the parts of a trial."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from batchtune.document import Document, Trial, is_of
from batchtune.errors import UsageError

_PARAMETERS = (
    "batch_size", "micro_batch_size", "gradient_accumulation_steps", "learning_rate", "precision", "seed", "role",
    "world_size", "strategy", "activation_checkpointing",
)  # fmt: skip
_FIGURES = (
    "time_to_target_seconds", "energy_to_target_joules", "samples_to_target", "training_seconds", "value",
)  # fmt: skip
_TEXTS = ("state", "outcome", "message")
_LONGEST_TEXT = 5000  # MLflow's bound for a tag


@dataclass(frozen=True)
class Point:
    """One evaluation: the optimizer steps and training seconds before it, and the figures seen there by their names."""

    step: int
    seconds: float
    seen: dict[str, float]


@dataclass(frozen=True)
class Run:
    """One trial as trackers see it; `id` is the same whenever the same trial is logged, so that it is logged once.

    `files` are texts by their names, of the one run that stands for the answer.
    """

    id: str
    name: str
    parameters: dict[str, object]
    figures: dict[str, float]
    texts: dict[str, str]
    points: list[Point]
    files: Mapping[str, str]

    @property
    def summary(self) -> str | None:
        """The answer, as its Markdown says it."""
        return next((text for name, text in self.files.items() if name.endswith(".md")), None)


@dataclass(frozen=True)
class Study:
    """What is logged of a result. `began` (seconds since 1970) is its date: a trial's own was not kept."""

    name: str
    began: float
    runs: list[Run]


def study_of(result: Document, files: Mapping[str, str] | None = None) -> Study:
    """The trials of a result that are over, as runs; the first confirmed with the recommendation has the files.

    Raises:
        UsageError: there are none, or nobody can tell when they ran.
    """
    over = [trial for trial in result.trials or [] if trial.state not in {"running", "waiting"}]
    if not over:
        raise UsageError(f"--log-to logs the trials of a study, and this {result.kind} result has none")
    try:
        began = datetime.fromisoformat(result.created_at).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--log-to dates runs by created_at, and {result.created_at[:40]!r} is no date") from None
    metric = re.sub(r"[^\w./-]", "_", result.target.metric) if result.target else "value"
    ours = [trial for trial in over if is_of(trial, result.recommendation)]
    first = min(ours, key=lambda trial: (trial.role != "confirm", trial.number), default=None)
    runs = [_run(trial, result.name, metric, trial in ours, (files or {}) if trial is first else {}) for trial in over]
    return Study(result.name or "batchtune", began, runs)


def _run(trial: Trial, study: str, metric: str, recommended: bool, files: Mapping[str, str]) -> Run:
    digest = hashlib.sha256(f"{study} {trial.model_dump_json(exclude_none=True)}".encode()).hexdigest()
    known = trial.model_dump(exclude_none=True)
    texts: dict[str, str] = {name: str(known[name])[:_LONGEST_TEXT] for name in _TEXTS if name in known}
    texts |= {"recommended": "yes"} if recommended else {}
    return Run(
        id=digest[:16],
        name=f"trial-{trial.number:03}-{trial.role}",
        parameters={name: known[name] for name in _PARAMETERS if name in known}
        | {f"optimizer.{name}": value for name, value in trial.optimizer_arguments.items()},
        figures={name: known[name] for name in _FIGURES if name in known},
        texts=texts,
        points=[
            Point(
                point.samples // max(1, trial.batch_size),
                point.seconds,
                {metric: point.value, "seconds": point.seconds, "samples": point.samples},
            )
            for point in trial.curve
            if point.value is not None
        ],
        files=files,
    )


def _to_mlflow(study: Study) -> tuple[int, str]:
    """Runs of the experiment named like the study (or MLFLOW_EXPERIMENT_NAME), wherever MLFLOW_TRACKING_URI points."""
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", study.name)
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)
    new = [run for run in study.runs if not client.search_runs([experiment], f"tags.batchtune_id = '{run.id}'")]
    for run in new:
        moments = {point.seconds: round(1000 * (study.began + point.seconds)) for point in run.points}
        began, ended = round(1000 * study.began), max(moments.values(), default=round(1000 * study.began))
        logged = client.create_run(experiment, start_time=began, run_name=run.name).info.run_id
        metrics = [Metric(key, value, ended, 0) for key, value in run.figures.items()]
        for point in run.points:
            metrics += [Metric(key, value, moments[point.seconds], point.step) for key, value in point.seen.items()]
        for start in range(0, len(metrics), 1000):  # the most that one call takes
            client.log_batch(logged, metrics=metrics[start : start + 1000])
        tags = [RunTag(key, value) for key, value in (run.texts | {"batchtune_id": run.id}).items()]
        client.log_batch(logged, params=[Param(key, str(value)) for key, value in run.parameters.items()], tags=tags)
        for file, text in run.files.items():
            client.log_text(logged, text, file)
        if run.summary:
            client.set_tag(logged, "mlflow.note.content", run.summary)
        failed = run.texts["state"] == "fail"
        client.set_terminated(logged, status="FAILED" if failed else "FINISHED", end_time=ended)
    return len(new), f"experiment {name!r} at {client.tracking_uri}"


def _to_tensorboard(study: Study) -> tuple[int, str]:
    """Folders `runs/<study>/<trial>` with event files: curves, parameters for the HParams page, and the outcome."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    root = Path("runs") / (re.sub(r"[^\w.-]", "_", study.name).lstrip(".") or "batchtune")  # it stays in there
    folders = {root / f"{run.name}-{run.id[:6]}": run for run in study.runs}
    new = {folder: run for folder, run in folders.items() if not folder.exists()}
    for folder, run in new.items():
        writer = EventFileWriter(str(folder))

        def add(summary: Summary, seconds: float = 0.0, step: int = 0, to: EventFileWriter = writer) -> None:
            to.add_event(Event(wall_time=study.began + seconds, step=step, summary=summary))

        def scalars(figures: dict[str, float]) -> Summary:
            return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()])

        add(hparams_pb(run.parameters, trial_id=run.name, start_time_secs=study.began))
        for point in run.points:
            add(scalars(point.seen), point.seconds, point.step)
        add(scalars(run.figures), run.points[-1].seconds if run.points else 0.0)
        for tag, text in (run.texts | ({"report": run.summary} if run.summary else {})).items():
            add(text_pb(tag, text))
        for file, text in run.files.items():
            (folder / file).write_text(text, encoding="utf-8")
        writer.close()
    return len(new), f"{root}; look at them with: tensorboard --logdir {root}"


def _to_wandb(study: Study) -> tuple[int, str]:
    """Offline runs below `wandb/` over training seconds; WANDB_MODE, WANDB_PROJECT and WANDB_DIR are heeded."""
    import wandb

    below = Path(os.environ.get("WANDB_DIR", ".")) / "wandb"
    new = [run for run in study.runs if not list(below.glob(f"*run-*-{run.id}"))]
    for run in new:
        logged = wandb.init(
            project=os.environ.get("WANDB_PROJECT", study.name),
            group=study.name,
            name=run.name,
            id=run.id,
            job_type=str(run.parameters["role"]),
            notes=run.summary,
            tags=["recommended"] if "recommended" in run.texts else None,
            config=run.parameters,
            mode=None if "WANDB_MODE" in os.environ else "offline",
            settings=wandb.Settings(silent=True, console="off"),
        )
        logged.define_metric("*", step_metric="seconds")
        for point in run.points:
            logged.log(point.seen | {"optimizer_steps": point.step})
        logged.summary.update(run.figures | run.texts)
        if run.files:
            artifact = wandb.Artifact(f"report-{run.id}", type="report")
            for file, text in run.files.items():
                with artifact.new_file(file, encoding="utf-8") as opened:
                    opened.write(text)
            logged.log_artifact(artifact)
        logged.finish(exit_code=int(run.texts["state"] == "fail"))
    return len(new), f"{below}; bring offline runs to the server with: wandb sync {below}/offline-run-*"


TRACKERS: dict[str, Callable[[Study], tuple[int, str]]] = {
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
}
"""What `report --log-to` can log to, each through its own client, which is named as its package is."""


def log_to(tracker: str, result: Document, files: Mapping[str, str] | None = None) -> dict[str, object]:
    """Logs the trials of a study that the tracker does not have yet.

    Files (texts by their names) go with a run of the recommendation. Returned is how many trials were logged, of how
    many, and where they are.

    Raises:
        UsageError: nothing to log, the client is not installed, or it refused.
    """
    study = study_of(result, files)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a client's worries about its own future are none of our user's
            logged, where = TRACKERS[tracker](study)
    except Exception as error:  # clients raise what they like
        if isinstance(error, ModuleNotFoundError) and error.name == tracker:
            reason = f"{tracker} is not installed; run: pip install {tracker}"
        else:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise UsageError(f"--log-to {tracker}: {reason}") from error
    return {"tracker": tracker, "logged": logged, "trials": len(study.runs), "where": where}
