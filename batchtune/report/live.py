"""A run drawn as it goes: on stderr, as a picture that is gone at the end or as lines in a pipe; or in a notebook."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

from markupsafe import Markup
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from batchtune.document import Attempt, CurvePoint, ThroughputPoint, Trial, by_configuration
from batchtune.observer import Observer
from batchtune.report.terminal import TONES, written_in
from batchtune.report.view.words import tone
from batchtune.units import LEAST_PEAK, counted, duration, number, size
from batchtune.vocabulary import length_text

_Columns = tuple[tuple[str, int], ...]  # names and widths; a negative width: words, which stand left
_Cells = tuple[list[str], dict[int, str]]  # of a row, and styles by column
_ATTEMPTS: _Columns = (("batch", 9), ("outcome", -12), ("peak", 10), ("step", 10), ("why", -1))
_SPEEDS: _Columns = (("batch", 9), ("samples/s", 10), ("step", 10))
_TRIALS: _Columns = (("run", 4), ("batch", 8), ("lr", 9), ("result", 11), ("role", -8), ("time left", 12))
_CONFIGURATIONS: _Columns = (("batch", 8), ("lr", 9), ("median", 11), ("runs", 5), ("last run", -1))
_GAP = 2
_SECONDS_BETWEEN_LINES = 10.0  # on progress, where no line moves
_AROUND = 9  # lines of the picture that are no rows, and one for the cursor

_SECONDS_BETWEEN = 0.5


def stderr_observer() -> LiveObserver:
    """One that prints on stderr what a user must not wait for in silence; its rows stay."""
    return LiveObserver(Console(stderr=True), verbose=True, notes=False)


class LiveObserver(Observer):
    """Draws what goes on: the rows of this part, what is known by now, what is being done and the time left.

    What is no terminal, or verbose, gets a line for whatever ends; with notes, reasons and the code's prints, too.
    """

    def __init__(
        self, console: Console, *, verbose: bool, notes: bool = True, total_seconds: float | None = None
    ) -> None:
        self._console, self._tells = console, verbose and notes
        self._moves = console.is_terminal and not console.is_dumb_terminal
        self._rows_stay = verbose or not self._moves
        self._lock = threading.Lock()
        self._columns: _Columns = ()  # of the rows of this part
        self._rows: list[_Cells] = []
        self._attempts: list[Attempt] = []
        self._trials: list[Trial] = []
        self._title, self._announced, self._doing, self._said_at = "starting", "", "", 0.0
        self._began = time.monotonic()
        self._ends = self._began + total_seconds if total_seconds else None
        self._spinner = Spinner("dots" if console.encoding.startswith("utf") else "line")
        self._live = Live(
            console=console, transient=True, get_renderable=self._drawn, vertical_overflow="crop", refresh_per_second=8
        )

    def __enter__(self) -> Self:
        if self._moves:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def stage(self, title: str) -> None:
        if self._rows_stay:
            self._say(Text(title, style="bold"))
        self._columns, self._rows, self._attempts = (), [], []
        self._title, self._doing, self._said_at = title, "", 0.0
        self._refresh()

    def note(self, text: str) -> None:
        if self._tells:
            self._say(Text(f"  {text}"))

    def announce(self, text: str) -> None:
        self._announced = text
        if self._rows_stay:
            self._say(Text(text))

    def progress(self, share: float, seconds: float, limit_seconds: float) -> None:
        self._doing = f"{share:.0%} done, given up after {duration(limit_seconds)}"
        if not self._moves and seconds - self._said_at >= _SECONDS_BETWEEN_LINES:
            self._said_at = seconds
            self._say(Text(f"  {share:.0%} done after {duration(seconds)} of at most {duration(limit_seconds)}"))

    def attempting(self, batch_size: int, reason: str) -> None:
        self._doing = f"now: batch {batch_size:,}, {reason}"

    def attempted(self, attempt: Attempt) -> None:
        self._attempts.append(attempt)
        self._doing = ""
        why = attempt.message or ("final check" if attempt.purpose == "verify" else "")
        peak, step = size(attempt.peak_reserved_bytes, LEAST_PEAK), duration(attempt.step_seconds)
        measured = [peak, step] if attempt.fits else ["-", "-"]
        colour = TONES[tone(attempt.outcome)]
        if attempt.length is not None:
            why = f"length {length_text(attempt.length)}{f': {why}' if why else ''}"
        self._row(_ATTEMPTS, [f"{attempt.batch_size:,}", attempt.outcome, *measured, why], {1: colour})

    def throughput(self, point: ThroughputPoint) -> None:
        cells = [f"{point.batch_size:,}", number(point.samples_per_second), duration(point.step_seconds)]
        self._row(_SPEEDS, cells, {})

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:  # noqa: ARG002 - it is in the rows
        self._doing = f"now: {_name(trial)}"

    def trial_evaluated(self, trial: Trial, point: CurvePoint) -> None:
        self._doing = f"now: {_name(trial)}, {number(point.value, 4)} after {duration(point.seconds)}"

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:  # noqa: ARG002
        self._trials.append(trial)
        self._doing = ""
        self._ends = time.monotonic() + seconds_left if self._ends else None
        if not self._rows_stay:
            self._columns, self._rows = _CONFIGURATIONS, list(_configurations(self._trials))
            self._refresh()
            return
        left, outcome = duration(max(0.0, seconds_left)), trial.came_to
        found = duration(trial.time_to_target_seconds) if trial.time_to_target_seconds else outcome
        cells = [f"{trial.number}", f"{trial.batch_size:,}", number(trial.learning_rate), found, trial.role]
        self._row(_TRIALS, [*cells, left], {3: TONES[tone(outcome)]})

    def printed(self, line: str) -> None:
        if self._tells:
            self._say(Text(f"  | {line}"))

    def _row(self, columns: _Columns, cells: list[str], styles: dict[int, str]) -> None:
        """One more row of this part; printed, it has a heading before the first."""
        if columns is not self._columns:
            self._columns, self._rows = columns, []
            if self._rows_stay:
                self._say_row(_heading(columns))
        self._rows.append((cells, styles))
        if self._rows_stay:
            self._say_row((cells, styles))
        self._refresh()

    def _say_row(self, row: _Cells) -> None:
        if self._console.is_terminal:
            self._say(_grid(self._console, self._columns, [row], folds=True))
        else:
            self._say(Text("  ".join(_placed(self._console, self._columns, row[0])).rstrip()))

    def _drawn(self) -> Group:
        """The picture of this moment, no higher than the terminal."""
        took = time.monotonic() - self._began
        left = f", {duration(round(max(0.0, self._ends - time.monotonic())))} left" if self._ends else ""
        told = [f"{self._title} ({duration(round(took))}{left})", self._announced, self._known(), self._doing]
        title, *about = [Text(written_in(self._console.encoding, each)) for each in told if each]
        title.style = "bold"
        self._spinner.update(text=title)
        room = max(2, self._console.height - _AROUND)
        rows = self._rows[:room] if self._columns is _CONFIGURATIONS else self._rows[-room:]
        if not rows:
            return Group(self._spinner, *about)
        shown = [_heading(self._columns), *rows]
        return Group(self._spinner, *about, _grid(self._console, self._columns, shown, folds=self._rows_stay))

    def _known(self) -> str:
        """What is known by now of the answer: both sides of the bracket, or the best configuration."""
        if self._trials:
            (cells, _), *_ = self._rows if self._columns is _CONFIGURATIONS else _configurations(self._trials)
            batch, rate, median, *_ = cells
            return f"best so far: {median} at batch {batch}, lr {rate}" if median != "-" else ""
        low = max((each.batch_size for each in self._attempts if each.fits), default=None)
        high = min((each.batch_size for each in self._attempts if not each.fits), default=None)
        return ", ".join(filter(None, [f"{low:,} fits" if low else "", f"{high:,} does not" if high else ""]))

    def _say(self, what: Text | Table) -> None:
        with self._lock:  # the user's prints come from a thread of their own
            self._console.print(what, highlight=False, soft_wrap=not self._console.is_terminal)

    def _refresh(self) -> None:
        if self._live.is_started:
            self._live.refresh()


def _configurations(trials: list[Trial]) -> Iterator[_Cells]:
    """A row for each configuration, those with the least median time to the target first."""
    ranked = []
    for runs in by_configuration(trials).values():
        times = [run.time_to_target_seconds for run in runs if run.time_to_target_seconds is not None]
        ranked.append((statistics.median(times) if times else float("inf"), -runs[-1].number, runs))
    for median, _, runs in sorted(ranked, key=lambda each: each[:2]):
        last = runs[-1]
        today = "today" if any(run.role == "baseline" for run in runs) else ""
        told = ", ".join(filter(None, (today, last.came_to)))
        shown = duration(median) if median < float("inf") else "-"
        cells = [f"{last.batch_size:,}", number(last.learning_rate), shown, f"{len(runs)}", told]
        yield cells, {4: TONES[tone(last.came_to)]}


def _heading(columns: _Columns) -> _Cells:
    return [name for name, _ in columns], dict.fromkeys(range(len(columns)), "dim")


def _placed(console: Console, columns: _Columns, cells: list[str]) -> list[str]:
    """Each cell as wide as its column, in characters that the output can write."""
    known = zip((written_in(console.encoding, cell) for cell in cells), columns, strict=True)
    return [f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, (_, width) in known]


def _grid(console: Console, columns: _Columns, rows: list[_Cells], *, folds: bool) -> Table:
    """Rows in as many columns as a terminal has room for; last words may fold, under one another."""
    table, used, shown = Table.grid(padding=(0, _GAP, 0, 0)), 0, 0
    for _, width in columns:
        used += abs(width) + _GAP
        if used - _GAP > console.width:
            break
        is_last = abs(width) == 1 and folds
        table.add_column(no_wrap=not is_last, min_width=abs(width), overflow="fold" if is_last else "crop")
        shown += 1
    for cells, styles in rows:
        placed = _placed(console, columns, cells)[:shown]
        table.add_row(*(Text(cell, style=styles.get(at, "")) for at, cell in enumerate(placed)))
    return table


def _name(trial: Trial) -> str:
    return f"{trial.role} run {trial.number}, batch {trial.batch_size:,}, lr {number(trial.learning_rate)}"


def usual_observer() -> Observer:
    """One for who gives none: it shows progress in a notebook, and is silent elsewhere."""
    return NotebookObserver() if "ipykernel" in sys.modules else Observer()


class NotebookObserver(Observer):
    """Shows the stage, what was tried last, and of a study the best so far and the time left, with a bar."""

    def __init__(self) -> None:
        self._stage, self._last, self._best, self._left = "", "", "", ""
        self._share: float | None = None
        self._began, self._due = time.monotonic(), 0.0
        self._place: Any = None  # where the notebook shows it

    def stage(self, title: str) -> None:
        self._stage, self._last, self._due = title, "", 0.0
        self._show()

    def attempted(self, attempt: Attempt) -> None:
        peak = size(attempt.peak_reserved_bytes, LEAST_PEAK)
        self._show(f"batch {attempt.batch_size:,}: {f'fits in {peak}' if attempt.fits else attempt.outcome}")

    def throughput(self, point: ThroughputPoint) -> None:
        self._show(f"batch {point.batch_size:,}: {number(point.samples_per_second)} samples/s")

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:
        self._best = f"best so far {duration(best_seconds)}" if best_seconds else ""
        self._show(f"run {trial.number}: batch {trial.batch_size:,}, learning rate {number(trial.learning_rate)}")

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:  # noqa: ARG002 - its number says it
        left, elapsed = max(0.0, seconds_left), time.monotonic() - self._began
        self._left = f"{counted(done, 'run')} done, at most {duration(left)} left"
        self._share = elapsed / (elapsed + left) if elapsed + left else None
        self._show()

    def _show(self, last: str | None = None) -> None:
        self._last = self._last if last is None else last
        if time.monotonic() < self._due:
            return
        from IPython.display import HTML, display

        words = " · ".join(each for each in (self._stage, self._last, self._best, self._left) if each)
        bar = Markup('<progress value="{}" max="1"></progress> ').format(self._share) if self._share else ""
        shown = HTML(Markup("<p>{}{}</p>").format(bar, words))
        if self._place is None:
            self._place = display(shown, display_id=True)
        else:
            self._place.update(shown)
        self._due = time.monotonic() + _SECONDS_BETWEEN
