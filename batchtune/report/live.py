"""A run drawn as it goes: a moving line with the time left in a terminal, plain lines in a pipe; always on stderr."""

from __future__ import annotations

import threading
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from batchtune.progress import Observer
from batchtune.report.units import duration, number, size
from batchtune.results import Attempt, CurvePoint, ThroughputPoint, Trial


class LiveObserver(Observer):
    """Prints what happens, and in a terminal keeps a line at the bottom for what is going on now.

    Args:
        console: where to print.
        verbose: also print reasons and what the user's code prints.
        total_seconds: the budget, for the bar; None where there is none.
    """

    def __init__(self, console: Console, *, verbose: bool, total_seconds: float | None = None) -> None:
        self._console, self._verbose, self._total = console, verbose, total_seconds
        self._lock = threading.Lock()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        self._task = self._progress.add_task("starting", total=self._total, left="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, title: str) -> None:
        self._say(f"[bold]{title}[/bold]")
        self._now(title)

    def note(self, text: str) -> None:
        if self._verbose:
            self._say(f"  {text}", markup=False)

    def attempting(self, batch_size: int, reason: str) -> None:
        self._now(f"batch {batch_size:,}: {reason}")

    def attempted(self, attempt: Attempt) -> None:
        peak = f"  peak {size(attempt.peak_reserved_bytes)}" if attempt.fits else f"  {attempt.message or ''}"[:120]
        check = "  (final check)" if attempt.purpose == "verify" else ""
        self._say(f"  batch {attempt.batch_size:>8,}  {attempt.outcome:<5}{peak}{check}", markup=False)

    def throughput(self, point: ThroughputPoint) -> None:
        self._say(f"  batch {point.batch_size:>8,}  {number(point.samples_per_second)} samples/s", markup=False)

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:
        best = f", best so far {duration(best_seconds)}" if best_seconds else ""
        self._now(f"{trial.role} run {trial.number}: batch {trial.batch_size:,}, lr {trial.learning_rate:g}{best}")

    def trial_evaluated(self, trial: Trial, point: CurvePoint) -> None:
        self._now(
            f"{trial.role} run {trial.number}: batch {trial.batch_size:,}, lr {trial.learning_rate:g}, "
            f"{number(point.value, 4)} after {duration(point.seconds)}"
        )

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:  # noqa: ARG002
        reached = duration(trial.time_to_target_seconds) if trial.time_to_target_seconds is not None else trial.outcome
        left = f"{duration(max(0.0, seconds_left))} left"
        self._say(
            f"  {trial.role:<8} run {trial.number:>3}  batch {trial.batch_size:>6,}  lr {trial.learning_rate:<9.3g}"
            f" {reached:>10}  {left}",
            markup=False,
        )
        if self._task is not None and self._total:
            self._progress.update(self._task, completed=min(self._total, self._total - seconds_left), left=left)

    def printed(self, line: str) -> None:
        if self._verbose:
            self._say(f"  | {line}", markup=False)

    def _say(self, text: str, *, markup: bool = True) -> None:
        with self._lock:  # the user's prints come from a thread of their own
            self._console.print(text, markup=markup, highlight=False, soft_wrap=True)

    def _now(self, text: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, description=text.replace("[", "\\["))
