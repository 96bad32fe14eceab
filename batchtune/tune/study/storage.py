"""Where a study is kept, alone or with other machines: a journal in the run folder, or a database.

Each machine runs the same command. The first to have probed decides what all choose from; a run whose machine has sent
no sign of life for a while is given back, and whoever asks next runs it again.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from pathlib import Path
from typing import TypeVar

import optuna
from optuna import Study
from optuna.storages import BaseStorage
from optuna.storages._heartbeat import BaseHeartbeat, BaseHeartbeatThread, get_heartbeat_thread, is_heartbeat_enabled
from optuna.trial import TrialState

from batchtune.config.load import load_config
from batchtune.config.schema import Config
from batchtune.document import Document, Prior, ProbeResult
from batchtune.errors import UsageError
from batchtune.protocol.messages import Json
from batchtune.run_folder import THE_CODE, cut_to_whole_lines, differs
from batchtune.tune.optuna_parts.storages import Journal, open_own
from batchtune.tune.plan.configure import identity_of
from batchtune.tune.study.history import StudyHistory
from batchtune.tune.verdict.recommend import recommend
from batchtune.tune.verdict.scores import cost_of
from batchtune.vocabulary import Goal

Kept = TypeVar("Kept", bound=Document)
_BEGUN = "begun"  # the study's attribute
_SETTLING_SECONDS = 1.0  # in which two machines that settle at the same time have both written


class Machines:
    """The machines of one study; where its storage tells no signs of life, there is only this one."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self.several = is_heartbeat_enabled(study._storage)  # noqa: SLF001 - Optuna shows it nowhere else
        if self.several:  # it wants Study.optimize, whose signs of life are given here
            warnings.filterwarnings("ignore", message="Heartbeat of storage|.*fail_stale_trials is experimental")

    def announce(self, trial: optuna.Trial) -> None:
        """Gives a trial its first sign of life, at once after it was asked for: without one it is never missed."""
        storage = self._study._storage  # noqa: SLF001 - as above
        if self.several and isinstance(storage, BaseHeartbeat):
            storage.record_heartbeat(trial._trial_id)  # noqa: SLF001 - Optuna's own name of it

    def sign_of_life(self, trial: optuna.Trial) -> BaseHeartbeatThread:
        """For as long as the block runs, the others see that this trial's machine is alive."""
        return get_heartbeat_thread(trial._trial_id, self._study._storage)  # noqa: SLF001 - as Study.optimize

    def take_over(self) -> None:
        """Gives back the trials of machines that are dead."""
        if self.several:
            optuna.storages.fail_stale_trials(self._study)


def open_study(storage: BaseStorage, config: Config) -> Study:
    """The study of a configuration, which begins where the storage has none of its name.

    Raises:
        ValueError: Optuna cannot join the one that it has.
    """
    objective, cost = config.objective, cost_of(config.objective.kind)
    direction: Goal = "minimize" if cost else objective.goal
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name=config.name, storage=storage, direction=direction, load_if_exists=True)
    if study.metric_names is None:
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            study.set_metric_names([f"{cost.field} to target" if cost else objective.metric])
    return study


def delete_study(storage: BaseStorage, name: str) -> None:
    """Deletes what a storage has of a study, if it has anything.

    Raises:
        UsageError: a machine is at work in it.
    """
    try:
        study = optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        return
    machines = Machines(study)
    machines.take_over()
    if machines.several and study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        raise UsageError(
            f"storage: a run of study {name} was alive a moment ago, here or on another machine; stop what trains it "
            "and try again a few minutes later, or choose another 'name'"
        )
    optuna.delete_study(study_name=name, storage=storage)


class Agreement:
    """What the starts of a study go by, on one machine or several: the probe and the prior of the first that had them.

    They are kept with the trials, which mean nothing without them.
    """

    def __init__(self, storage: BaseStorage, config: Config, device: str) -> None:
        self._storage, self._config, self._several = storage, config, is_heartbeat_enabled(storage)
        self._identity = identity_of(config) | {"device": device}  # whatever the configuration calls it
        del self._identity["task"]  # the same file may lie elsewhere

    def look(self) -> tuple[ProbeResult, Prior] | None:
        """What is settled already; None where nothing is.

        Raises:
            UsageError: the study cannot be opened, or is of another device, task or configuration.
        """
        with contextlib.suppress(KeyError):  # there is no such study yet
            begun = optuna.load_study(study_name=self._config.name, storage=self._storage).user_attrs.get(_BEGUN)
            return None if begun is None else self._taken(begun)
        return None

    def settle(self, probe: ProbeResult, prior: Prior) -> tuple[ProbeResult, Prior]:
        """What holds: this, unless another machine was sooner; it raises what `look` does."""
        try:
            study = open_study(self._storage, self._config)
        except ValueError as error:
            raise UsageError(f"storage: study {self._config.name} cannot be joined: {error}") from None
        if _BEGUN not in study.user_attrs:
            begun = {
                "identity": self._identity,
                "probe": probe.model_dump(mode="json", exclude_none=True),
                "prior": prior.model_dump(mode="json", exclude_none=True),
            }
            study.set_user_attr(_BEGUN, begun)
            time.sleep(_SETTLING_SECONDS if self._several else 0.0)
        return self._taken(study.user_attrs[_BEGUN])

    def _taken(self, found: Json) -> tuple[ProbeResult, Prior]:
        theirs = found["identity"]
        for key, value in self._identity.items():
            if key in theirs and differs(key, theirs[key], value):
                what = f"{key} = {theirs[key]}, here it is {value}"
                if key == THE_CODE:
                    what = f"other code than {self._config.task} has now"
                raise UsageError(
                    f"storage: study {self._config.name} was begun with {what}; "
                    "results would mix, so choose another 'name'; --fresh deletes that study, whoever began it"
                )
        return ProbeResult.model_validate(found["probe"]), Prior.model_validate(found["prior"])


def open_storage(storage: str | None, folder: Path) -> BaseStorage:
    """The study's storage: a journal in the run folder, or the user's own.

    Raises:
        UsageError: the storage cannot be reached, or its driver is not installed.
    """
    if storage is None:
        journal = folder / "study.log"
        for lock in folder.glob(f"{journal.name}.lock*"):  # of a dead process: the folder's own says that nobody has it
            lock.unlink()
        cut_to_whole_lines(journal)  # a kill may have cut its last line off
        try:
            return Journal(journal)
        except (ValueError, RecursionError):
            if (line := _damaged_line(journal)) is None:
                raise
            remedy = "take the line away and start again, or use --fresh to start over"
            raise UsageError(f"{journal}: line {line} is damaged; {remedy}") from None
    return open_own(storage)


def as_in_journal(result: Kept, folder: Path) -> Kept | None:
    """A result that was saved while its study ran, with all runs that ended since by the journal in the run folder.

    Where nothing was recommended yet, single runs are compared. Nothing is written. None where the journal cannot be
    read, or batches count tokens, which it does not say.
    """
    try:
        config = load_config(folder, environment={})
        study = optuna.load_study(study_name=config.name, storage=Journal(folder / "study.log"))
        records = StudyHistory(study, cost_of(config.objective.kind)).records()
    except Exception:  # noqa: BLE001 - of a killed process: whatever is wrong, what was saved is whole
        return None
    if config.batch_size.unit == "tokens":
        return None
    trials = [each for each in records if each.state not in {"running", "waiting"}]
    found, baseline = result.recommendation, result.baseline
    if found is None:
        found, baseline = recommend(trials, kind=config.objective.kind, goal=config.objective.goal)
    return result.model_copy(update={"trials": trials, "recommendation": found, "baseline": baseline})


def _damaged_line(journal: Path) -> int | None:
    """The number of the first line that is no JSON object; None where all are."""
    for number, line in enumerate(journal.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(line), dict):
                continue
        return number
    return None
