"""A run drawn as it goes: rows that stay, a moving last line in a terminal, plain lines in a pipe; always on stderr."""

from __future__ import annotations

import threading
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from batchtune.document import Attempt, CurvePoint, ThroughputPoint, Trial
from batchtune.observer import Observer
from batchtune.report.terminal.ascii import written_in
from batchtune.report.terminal.table import TONES
from batchtune.report.view.words import tone
from batchtune.units import LEAST_PEAK, duration, number, size

_Columns = tuple[tuple[str, int], ...]  # names and widths; a negative width: words, which stand left
_ATTEMPTS: _Columns = (("batch", 9), ("outcome", -12), ("peak", 10), ("step", 10), ("why", -1))
_SPEEDS: _Columns = (("batch", 9), ("samples/s", 10), ("step", 10))
_TRIALS: _Columns = (("run", 4), ("batch", 8), ("lr", 9), ("result", 11), ("role", -8), ("time left", 12))
_GAP = 2
_SECONDS_BETWEEN_LINES = 10.0  # on progress, where no line moves
_WIDE = 72  # columns from which the moving line has a bar


def stderr_observer() -> LiveObserver:
    """One that prints on stderr what a user must not wait for in silence."""
    return LiveObserver(Console(stderr=True), verbose=False)


class LiveObserver(Observer):
    """Prints a row for whatever ends, and in a terminal keeps a line at the bottom for what is going on now.

    Args:
        console: where to print.
        verbose: also print reasons and what the user's code prints.
        total_seconds: the budget, for the bar; None where there is none.
    """

    def __init__(self, console: Console, *, verbose: bool, total_seconds: float | None = None) -> None:
        self._console, self._verbose, self._total = console, verbose, total_seconds
        self._lock = threading.Lock()
        self._columns: _Columns = ()  # of the rows printed last
        self._said_at = 0.0  # seconds into a part whose progress is told
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", table_column=Column(overflow="fold")),  # goes on in a second line
            *([BarColumn(bar_width=20)] if total_seconds and console.width >= _WIDE else []),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        self._task = self._progress.add_task("starting", total=self._total, left="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, title: str) -> None:
        self._say(Text(title, style="bold"))
        self._columns, self._said_at = (), 0.0
        self._now(title)

    def note(self, text: str) -> None:
        if self._verbose:
            self._say(Text(f"  {text}"))

    def progress(self, share: float, seconds: float, limit_seconds: float) -> None:
        text = f"{share:.0%} done after {duration(seconds)} of at most {duration(limit_seconds)}"
        self._now(text)
        if not self._console.is_terminal and seconds - self._said_at >= _SECONDS_BETWEEN_LINES:
            self._said_at = seconds
            self._say(Text(f"  {text}"))

    def attempting(self, batch_size: int, reason: str) -> None:
        self._now(f"batch {batch_size:,}: {reason}")

    def attempted(self, attempt: Attempt) -> None:
        why = attempt.message or ("final check" if attempt.purpose == "verify" else "")
        peak, step = size(attempt.peak_reserved_bytes, LEAST_PEAK), duration(attempt.step_seconds)
        measured = [peak, step] if attempt.fits else ["-", "-"]
        colour = TONES[tone(attempt.outcome)]
        self._row(_ATTEMPTS, [f"{attempt.batch_size:,}", attempt.outcome, *measured, why], {1: colour})

    def throughput(self, point: ThroughputPoint) -> None:
        self._row(_SPEEDS, [f"{point.batch_size:,}", number(point.samples_per_second), duration(point.step_seconds)])

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:
        best = f", best so far {duration(best_seconds)}" if best_seconds else ""
        self._now(f"{_name(trial)}{best}")

    def trial_evaluated(self, trial: Trial, point: CurvePoint) -> None:
        self._now(f"{_name(trial)}, {number(point.value, 4)} after {duration(point.seconds)}")

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:  # noqa: ARG002
        timed = trial.time_to_target_seconds
        result = duration(timed) if timed is not None else trial.outcome or trial.state
        left = duration(max(0.0, seconds_left))
        cells = [f"{trial.number}", f"{trial.batch_size:,}", number(trial.learning_rate), result, trial.role, left]
        self._row(_TRIALS, cells, {3: TONES[tone(trial.outcome or trial.state)]})
        if self._task is not None and self._total:
            self._progress.update(
                self._task, completed=min(self._total, self._total - seconds_left), left=f"{left} left"
            )

    def printed(self, line: str) -> None:
        if self._verbose:
            self._say(Text(f"  | {line}"))

    def _row(self, columns: _Columns, cells: list[str], styles: dict[int, str] | None = None) -> None:
        """One more row of a table that grows; its heading comes before the first."""
        if columns is not self._columns:
            self._columns = columns
            names = [name for name, _ in columns]
            self._say(self._placed(columns, names, dict.fromkeys(range(len(names)), "dim")))
        self._say(self._placed(columns, cells, styles or {}))

    def _placed(self, columns: _Columns, cells: list[str], styles: dict[int, str]) -> Text | Table:
        """A line with all cells, or in a terminal as much as has room, with its last words under one another."""
        cells = [written_in(self._console.encoding, cell) for cell in cells]
        if not self._console.is_terminal:
            return Text("  ".join(map(_padded, cells, columns)).rstrip())
        table, used = Table.grid(padding=(0, _GAP, 0, 0)), 0
        row = []
        for index, (cell, (_, width)) in enumerate(zip(cells, columns, strict=True)):
            used += abs(width) + _GAP
            if used - _GAP > self._console.width:
                break
            table.add_column(no_wrap=abs(width) > 1, min_width=abs(width), overflow="fold")
            row.append(Text(_padded(cell, columns[index]), style=styles.get(index, "")))
        table.add_row(*row)
        return table

    def _say(self, what: Text | Table) -> None:
        with self._lock:  # the user's prints come from a thread of their own
            self._console.print(what, highlight=False, soft_wrap=isinstance(what, Text))

    def _now(self, text: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, description=escape(written_in(self._console.encoding, text)))


def _padded(cell: str, column: tuple[str, int]) -> str:
    _, width = column
    return f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"


def _name(trial: Trial) -> str:
    return f"{trial.role} run {trial.number}: batch {trial.batch_size:,}, lr {number(trial.learning_rate)}"
