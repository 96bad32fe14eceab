"""What a run of `tune` knows so far: the document at every moment with its warnings, and what of it is on disk."""

from __future__ import annotations

import contextlib
import shlex
import time
from typing import Literal

from batchtune.config.schema import Config
from batchtune.document import (
    Attempt,
    Failure,
    Prior,
    ProbeResult,
    Recommendation,
    Scaling,
    TaskInfo,
    ThroughputPoint,
    Trial,
)
from batchtune.errors import BatchtuneError, UsageError
from batchtune.observer import Forwarder, Observer
from batchtune.probe.runner import Probe
from batchtune.protocol.commands import Opened
from batchtune.result import Result, load_result
from batchtune.run_folder import RunFolder
from batchtune.task.spec import file_hash
from batchtune.tune import findings
from batchtune.tune.study.phases import TuneStudy
from batchtune.units import counted, duration

Status = Literal["complete", "interrupted", "failed"]
_SAVING_SHARE = 0.005  # of the time that trials take may go into writing the document in between; the journal has all


class Progress:
    """What is known so far; each attribute is None until it is.

    Attributes:
        began: by `time.perf_counter`, when this start first looked at the task.
        earlier: what an earlier start came to.
        opened: the task on its device.
        identity: what must not change while the study goes on.
        variant: the name of what a probe under way trains by; None: as the baseline does.
        probing: the probe, as long as it runs and after it.
        probe: its result, or an earlier start's or another machine's.
        prior: what the search starts from.
        scaling: what several ranks would make of the recommendation.
    """

    def __init__(self, config: Config, folder: RunFolder, began: float) -> None:
        self.config, self.folder, self.began = config, folder, began
        self._task = TaskInfo(path=config.task, sha256=file_hash(config.task))
        self.earlier: Result | None = None
        self.opened: Opened | None = None
        self.identity: dict[str, object] = {}
        self.variant: str | None = None
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
                raise UsageError(
                    f"{error}. Without that file the study goes on with its trials; --fresh starts over"
                ) from None

    def earlier_probe(self) -> ProbeResult | None:
        """An earlier start's probe, where it came to its end."""
        found, others = self.earlier.probe if self.earlier else None, {each.name for each in self.config.variants[1:]}
        is_whole = found and found.verified_in_fresh_process and found.throughput
        return found if found and is_whole and others == (found.other_variants or {}).keys() else None

    def run(self, probing: Probe, opened: Opened) -> ProbeResult:
        """What a probe of the task comes to, as that was opened for it; `document` has it on the way, too."""
        self.opened, self.probing = opened, probing
        return probing.run()

    def keep(self, attempt: Attempt) -> None:
        """Adds an attempt to the run folder; the first that fits is something not to be mixed with anything else."""
        if attempt.fits:
            self.keep_identity()
        assert self.opened is not None  # noqa: S101 - it is what attempts are made with
        about = {"precision": self.opened.precision[0][0], "memory_limit_bytes": self.opened.memory_limit_bytes}
        self.folder.append_attempt(attempt, **about | ({"variant": self.variant} if self.variant else {}))

    def keep_identity(self) -> None:
        """Writes what the run folder's measurements hold for, once."""
        if not self.folder.identity():
            self.folder.keep_identity(self.identity)

    def save(self, status: Status, error: BatchtuneError | None = None) -> Result:
        """Writes `result.json` as things stand; a start that stops early leaves that of an earlier one alone."""
        result, earlier = self.document(status, error), self.earlier
        if self.probe is None and result.probe is not None:  # whose steps the next start times all together
            untimed = result.probe.model_copy(update={"throughput": [], "throughput_fit": None})
            result = result.model_copy(update={"probe": untimed})
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
            name=self.config.name,
            environment=environment,
            task=self._task.model_copy(update=made),
            warnings=list(dict.fromkeys(told)),
            error=Failure(exit_code=error.exit_code, message=str(error)) if error else None,
            probe=probe,
            prior=self.prior or (self.earlier.prior if self.earlier else None),
            target=study.target if study else None,
            trials=trials,
            landscape=study.belief.landscape() if study and status == "complete" else None,
            recommendation=recommendation,
            baseline=baseline,
        )

    def said_first(self) -> list[str]:
        """What is to be known of the configuration before anything is measured."""
        defaults = findings.default_warnings(self.config, self.opened) if self.opened else []
        return self.config.objective.warnings() + defaults

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
        opened, study = self.opened, self.study
        of_device = findings.device_warnings(opened.environment if opened else None, probe)
        if self.probe is None or opened is None:
            return of_device
        found = self.said_first() + findings.bound_warnings(self.config, recommended)
        sets_target = trials if self.config.objective.target == "auto" else []
        found += findings.target_warnings(study.target, sets_target) if study else []
        found += findings.uneven_warnings(trials, recommended) + findings.straggler_warnings(trials)
        found += findings.precision_warnings(self.config, opened)
        if study:
            found = findings.schedule_warnings(opened, trials, study.parts.plan.config.budget.run) + found
        if study and status == "complete":
            found = findings.search_warnings(trials, study.parts.budget.enough(), self.config.objective.kind) + found
        return found + of_device + findings.probe_warnings(self.config, self.probe, self.prior, opened.device)


class Recorder(Forwarder):
    """Keeps attempts and results in the run folder as they come, and hands everything on."""

    def __init__(self, progress: Progress, behind: Observer) -> None:
        super().__init__(behind)
        self._progress = progress
        self._stage, self._done = "", ""

    def stage(self, title: str) -> None:
        super().stage(title)
        self._stage = title

    def attempted(self, attempt: Attempt) -> None:
        self._progress.keep(attempt)
        super().attempted(attempt)
        self._show()

    def throughput(self, point: ThroughputPoint) -> None:
        super().throughput(point)
        self._show()

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:
        super().trial_started(trial, best_seconds=best_seconds)
        self._show()

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        self._progress.save_now_and_then()
        super().trial_ended(trial, done=done, seconds_left=seconds_left)
        self._done = f": {counted(done, 'run')} done, at most {duration(max(0.0, seconds_left))} left"
        self._show()

    def _show(self) -> None:
        """Redraws the page of the run; never while a run waits to go on, whose time is measured."""
        self._progress.folder.show(lambda: self._progress.document("interrupted"), self._stage + self._done)
