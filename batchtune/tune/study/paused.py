"""Stopped runs of a study that can go on: which they are, and the files they are kept in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from batchtune.tune.optuna_parts.pruner import TimeToValuePruner

MOST_KEPT = 4  # a checkpoint takes as much room as model and optimizer


class Paused:
    """The checkpoints of one study. A run goes on when the sampler proposes exactly its configuration again.

    Args:
        study: whose trials.
        folder: where their checkpoints lie; None: none are kept.
        pruner: what stopped them: of too many, those furthest behind are dropped; None: nothing is stopped.
    """

    def __init__(self, study: Study, folder: Path | None, pruner: TimeToValuePruner | None) -> None:
        self._study, self.folder, self._pruner = study, folder if pruner else None, pruner

    def path(self, number: int) -> str | None:
        """The file in which a trial's run is to be kept."""
        return None if self.folder is None else str(self.folder / f"{number}.pt")

    def numbers(self) -> set[int]:
        """The trials whose runs can go on."""
        return {trial.number for trial in self._trials()}

    def _trials(self) -> list[FrozenTrial]:
        if self.folder is None or not self.folder.exists():
            return []
        trials = self._study.get_trials(deepcopy=False)
        taken_up = {trial.user_attrs.get("continues") for trial in trials if trial.state is not TrialState.FAIL}
        return [
            trial
            for trial in trials
            if trial.user_attrs.get("kept") and trial.number not in taken_up and self._file(trial).exists()
        ]

    def find(self, params: Mapping[str, Any]) -> FrozenTrial | None:
        """The stopped run of exactly this configuration."""
        return next((trial for trial in self._trials() if trial.params == params), None)

    def tidy(self) -> None:
        """Deletes the checkpoints of runs that have gone on, and those furthest behind where there are too many."""
        if self.folder is None or self._pruner is None or not self.folder.exists():
            return
        pruner = self._pruner
        kept = sorted(self._trials(), key=lambda trial: pruner.behind(self._study, trial))[:MOST_KEPT]
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        numbers = {trial.number for trial in [*kept, *running]}  # another worker may be about to write or read one
        numbers |= {trial.user_attrs["continues"] for trial in running if "continues" in trial.user_attrs}
        for file in self.folder.iterdir():
            if file.stem not in {str(number) for number in numbers}:  # one that is half written has the same stem
                file.unlink(missing_ok=True)

    def _file(self, trial: FrozenTrial) -> Path:
        assert self.folder is not None  # noqa: S101 - the callers looked
        return self.folder / f"{trial.number}.pt"
