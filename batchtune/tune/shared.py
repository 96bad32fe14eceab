"""One study on several machines: what they agree on before it, and how the runs of a dead one are taken over.

Each machine runs the same command. The first to have probed decides what all choose from; a run whose machine has sent
no sign of life for `GRACE_SECONDS` is given back, and whoever asks next runs it again.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import optuna
from optuna import Study
from optuna.storages import BaseStorage
from optuna.storages._heartbeat import get_heartbeat_thread, is_heartbeat_enabled
from optuna.trial import FrozenTrial

from batchtune.errors import UsageError

_SETTLING_SECONDS = 1.0  # in which two machines that settle at the same time have both written


def requeue(study: Study, trial: FrozenTrial) -> None:
    """Queues a trial that did not come to an end again as it was."""
    attributes = {key: trial.user_attrs[key] for key in ("role", "seed") if key in trial.user_attrs}
    params = trial.system_attrs.get("fixed_params", {}) | trial.params
    study.enqueue_trial(params, user_attrs=attributes | {"retry_of": trial.number})


class Machines:
    """The machines of one study; where its storage tells no signs of life, there is only this one.

    Args:
        study: theirs.
    """

    def __init__(self, study: Study) -> None:
        self._study = study
        self.several = is_heartbeat_enabled(study._storage)  # noqa: SLF001 - Optuna shows it nowhere else
        if self.several:  # it wants Study.optimize, whose signs of life are given here
            warnings.filterwarnings("ignore", message="Heartbeat of storage|.*fail_stale_trials is experimental")

    def announce(self, trial: optuna.Trial) -> None:
        """Gives a trial its first sign of life, at once after it was asked for: without one it is never missed."""
        storage: Any = self._study._storage  # noqa: SLF001 - as above
        if self.several:
            storage.record_heartbeat(trial._trial_id)  # noqa: SLF001 - Optuna's own name of it

    @contextlib.contextmanager
    def sign_of_life(self, trial: optuna.Trial) -> Iterator[None]:
        """For as long as the block runs, the others see that this trial's machine is alive."""
        beating: Any = get_heartbeat_thread(trial._trial_id, self._study._storage)  # noqa: SLF001 - as Study.optimize
        with beating:
            yield

    def take_over(self) -> None:
        """Gives back the trials of machines that are dead."""
        if self.several:
            optuna.storages.fail_stale_trials(self._study)


def settle(
    storage: BaseStorage, name: str, direction: Literal["minimize", "maximize"], key: str, value: dict[str, Any] | None
) -> Any:
    """What the machines of a study go by: the value that one of them has left there, or else this one.

    Args:
        storage: the study's.
        name: of the study.
        direction: its direction, where it does not exist yet.
        key: what is settled.
        value: this machine's; None: only look.

    Raises:
        UsageError: the study cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(study_name=name, storage=storage, direction=direction, load_if_exists=True)
    except ValueError as error:
        raise UsageError(f"storage: study {name} cannot be joined: {error}") from None
    if key not in study.user_attrs and value is not None:
        study.set_user_attr(key, value)
        time.sleep(_SETTLING_SECONDS)
    return study.user_attrs.get(key)


def require_alike(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuses a machine whose times would not compare with those in the study.

    Raises:
        UsageError: its task, configuration or device differs.
    """
    for key, value in ours.items():
        if key in theirs and theirs[key] != value:
            raise UsageError(
                f"storage: study {name} was begun with {key} = {theirs[key]}, here it is {value}; "
                "results would mix, so choose another 'name'"
            )
