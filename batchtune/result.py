"""A result: the document, how it shows itself, and how it is found and read back."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema

from batchtune.config.fields import is_run_name
from batchtune.document import SCHEMA_VERSION, Document
from batchtune.errors import UsageError, error_of
from batchtune.processes.torchrun import follow, leading
from batchtune.version import __version__

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

MAX_BYTES = 128 << 20  # 600 trials that were evaluated 1200 times each have some 110 million
_NAME = "name a run, its folder or its result.json"
_MAX_BYTES_OF_A_PIPE = 64 << 20  # which does not say how long it is

ROOT = Path(".batchtune")

_MOST_NAMED = 10
_AT_ONCE_SECONDS = 1.0  # between two files that are written one after the other


class Result(Document):
    """The document that every command prints with --json and keeps as result.json."""

    def to_frame(self) -> pd.DataFrame:
        """The rows behind the answer: trials of a study, attempts of a probe, or estimates, one row each.

        Returns:
            A data frame whose columns are the JSON keys (curves are left out); counts are whole numbers, with or
            without gaps.
        """
        from batchtune.report.formats import frame_of

        return frame_of(self)

    def to_html(self) -> str:
        """The report as one self-contained page."""
        from batchtune.report.formats import to_html

        return to_html(self)

    def plot_memory(self) -> go.Figure:
        """Peak memory against batch size, with the limit; UsageError where nothing was attempted."""
        return self._plot("memory")

    def plot_throughput(self) -> go.Figure:
        """Samples per second against batch size, with the fitted step time; UsageError where it was not measured."""
        return self._plot("throughput")

    def plot_lengths(self) -> go.Figure:
        """The largest batch against length, with what failed; UsageError where no lengths were asked for."""
        return self._plot("lengths")

    def plot_sensors(self) -> go.Figure:
        """What the device's sensors said at each batch size; UsageError where there were none."""
        return self._plot("sensors")

    def plot_estimates(self) -> go.Figure:
        """The largest batch on each GPU as calculated; UsageError where nothing was estimated."""
        return self._plot("estimates")

    def plot_curves(self) -> go.Figure:
        """Learning curves against training time, with the target; UsageError where no run was evaluated."""
        return self._plot("curves")

    def plot_landscape(self) -> go.Figure:
        """The runs over batch size and learning rate; UsageError where there are fewer than two configurations."""
        return self._plot("landscape")

    def plot_efficiency(self) -> go.Figure:
        """Samples per second and per joule on each GPU as calculated; UsageError where no GPU's rates are known."""
        return self._plot("efficiency")

    def plot_step(self) -> go.Figure:
        """Memory over two training steps at the estimated batch; UsageError where nothing was estimated."""
        return self._plot("step")

    def _plot(self, name: str) -> go.Figure:
        from batchtune.report.view.read import plot_of

        plot = plot_of(self, name)
        if plot is None:
            raise UsageError(f"this {self.kind} result ({self.status}) has no measurements for plot_{name}()")
        try:
            from batchtune.report.plotly_figures import draw
        except ImportError:
            raise UsageError(f"plot_{name}() draws with plotly: pip install 'batchtune-cli[plots]'") from None
        return draw(plot)

    def __repr__(self) -> str:
        """What it is of and what it comes to, in one line; the whole document is `to_json()`, or `model_dump()`."""
        from batchtune.report.view.read import in_short

        return f"<Result: {in_short(self)}>"

    __str__ = __repr__

    def __rich__(self) -> object:
        from batchtune.report.terminal import render

        return render(self)

    def _repr_html_(self) -> str:
        from batchtune.report.formats import notebook

        return notebook(self)


def result_schema() -> dict[str, object]:
    """JSON Schema (draft 2020-12) of the result document."""
    return {"$schema": GenerateJsonSchema.schema_dialect} | Result.model_json_schema(by_alias=True)


def of_first_rank(work: Callable[[], Result]) -> Result:
    """What `work` finds; in a process that torchrun started beside the first one, what it has found there.

    Raises:
        BatchtuneError: the same in all processes.
    """
    outcome = follow()
    if outcome is None:
        with leading() as leader:
            found = work()
            if leader is not None:
                leader.outcome = leader.outcome.model_copy(update={"result": found.to_json()})
            return found
    result = Result.model_validate_json(outcome.result) if outcome.result else None
    if result is None or outcome.exit_code:
        error = error_of(outcome.exit_code, outcome.error)
        error.result = result
        raise error
    return result


def load_result(path: str | os.PathLike[str]) -> Result:
    """Reads a result document from a JSON file or a run folder.

    Raises:
        UsageError: there is none, it is not one, or a newer batchtune wrote it.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file = file / "result.json"
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size or _MAX_BYTES_OF_A_PIPE
            content = stream.read(size + 1) if size <= MAX_BYTES else b""
        if not len(content) <= size <= MAX_BYTES:
            raise UsageError(f"{file}: larger than {min(size, MAX_BYTES) >> 20} MiB; this is no result")
        document = json.loads(content.decode("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{file}: no such result; run 'batchtune probe' or 'batchtune tune' first") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not a JSON document ({str(error)[:100]}); {_NAME}") from None
    name, _, version = str(document.get("schema", "") if isinstance(document, dict) else "").partition("/")
    if name != "batchtune.result":
        raise UsageError(
            f"{file}: not a batchtune result (its 'schema' is not batchtune.result/{SCHEMA_VERSION}); {_NAME}"
        )
    number = int(version[:9]) if version.isascii() and version.isdigit() else 0
    if number > SCHEMA_VERSION:
        raise UsageError(
            f"{file}: a newer batchtune wrote it (schema {number}); this is {__version__}, which reads schema "
            f"{SCHEMA_VERSION}: upgrade batchtune to read it"
        )
    if number != SCHEMA_VERSION:
        raise UsageError(f"{file}: 'schema' is batchtune.result/{version[:20]}, and there never was such a version")
    try:
        return Result.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{file}: {where}: {first['msg']} ({error.error_count()} problem(s) in all)") from None


def find_run(run: str | None, root: Path = ROOT) -> Path:
    """The result that a person means by a run's name, a folder or a file; by nothing, the newest.

    Raises:
        UsageError: there is no run of this name, but there are others; or it has no result yet.
    """
    if run is None:
        return latest_run(root)
    named = root / run
    if is_run_name(run) and (named / "result.json").is_file():
        return named
    kept, is_no_path = kept_runs(root), Path(run).name == run and not Path(run).exists()
    if is_run_name(run) and is_no_path and (process := running_in(named)):
        raise UsageError(f"{run}: process {process} is at work on it, and it has no result yet; look again later")
    if kept and is_no_path:
        near = difflib.get_close_matches(run, kept, n=1)
        told = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(kept[-_MOST_NAMED:])}"
        raise UsageError(f"{run}: no such run; {told}")
    return Path(run)


def kept_runs(root: Path = ROOT) -> list[str]:
    """The names of the runs that have a result."""
    return sorted(path.parent.name for path in root.glob("*/result.json"))


def is_behind(run: Path) -> bool:
    """Whether a study went on after its result was last written: it runs at the moment, or was killed."""
    journal, result = run / "study.log", run / "result.json"
    written = [file.stat().st_mtime for file in (result, journal) if file.is_file()]
    return len(written) == 2 and written[1] > written[0] + _AT_ONCE_SECONDS  # noqa: PLR2004 - both are there


def running_in(run: Path) -> str | None:
    """The process that is running in a run folder; None where none is, or the system does not tell."""
    try:
        import fcntl

        with (run / "lock").open(encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "unknown"
    except (ImportError, OSError):  # no such locks on Windows; no run folder, but a file
        pass
    return None


def kept_value(run: Path, *keys: str) -> object:
    """A value of a run's result; None where there is none that can be read."""
    try:
        found: object = json.loads((run / "result.json").read_text(encoding="utf-8"))
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
    except (OSError, ValueError, RecursionError):
        return None
    return found


def latest_run(root: Path = ROOT) -> Path:
    """The run folder whose result is the newest of those that did not fail, or of all if all did.

    Raises:
        UsageError: there is none below the current folder.
    """
    runs = _newest_first(root)
    if not runs:
        raise UsageError(f"no result in {root}/ here; run 'batchtune probe' or 'batchtune tune' first, or name a file")
    return next((run for run in runs if kept_value(run, "status") != "failed"), runs[0])


def page_of(result: Document, root: Path = ROOT) -> Path | None:
    """The page of a result that a run folder keeps; None where none does."""
    about = result.created_at, result.task.path
    for run in _newest_first(root):
        if (kept_value(run, "created_at"), kept_value(run, "task", "path")) == about:
            page = run / "report.html"
            return page if page.is_file() else None
    return None


def _newest_first(root: Path) -> list[Path]:
    """The run folders that have a result."""
    kept = sorted(root.glob("*/result.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [result.parent for result in kept]
