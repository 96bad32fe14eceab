"""The command `report`: an earlier result in one of several formats, in a tracker, or against another one."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from batchtune import api
from batchtune.errors import UsageError
from batchtune.session import Session

if TYPE_CHECKING:
    from batchtune.result import Result

Format = Literal["table", "json", "markdown", "html", "csv", "hf", "lightning", "deepspeed", "env", "lhotse", "fairseq"]
Tracker = Literal["mlflow", "tensorboard", "wandb"]
Open = Annotated[bool, typer.Option("--open", help="Open the page of the result in a browser.")]


def _runs(typed: str) -> list[str]:
    from batchtune.result import kept_runs

    return [name for name in kept_runs() if name.startswith(typed)]


_RUN: Any = {"metavar": "RUN|FILE.json", "autocompletion": _runs}
Run = Annotated[str | None, typer.Argument(help="A run's name, its folder, or a result file.", **_RUN)]
Against = Annotated[
    str | None, typer.Option("--against", help="An earlier result: exit with 1 if this one is worse.", **_RUN)
]


def report(
    session: Session,
    run: Run = None,
    format_: Annotated[
        Format, typer.Option("--format", help="A report; or, from hf on, settings for a training library.")
    ] = "table",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=NAME", help="Rename a field of such settings; repeatable."),
    ] = None,
    log_to: Annotated[
        Tracker | None, typer.Option("--log-to", help="Log a study to this tracker instead, one run per trial.")
    ] = None,
    against: Against = None,
    allow: Annotated[
        str | None, typer.Option(metavar="SHARE", help="How much worse than --against is accepted; default: 5%.")
    ] = None,
    open_page: Open = False,
) -> None:
    """Print the recommendation of the latest run, or of one named, in one of several formats.

    Examples:
      batchtune report digits --format html -o report.html
      batchtune report digits --format hf -o arguments.json
      batchtune report digits --format lightning --set model.lr=model.rate
      batchtune report speech --format lhotse
      batchtune report digits --log-to mlflow
      batchtune report new.json --against old.json --allow 5% --format markdown
    """
    from batchtune.report.formats import FORMATS
    from batchtune.report.view.trainers import EXPORTS

    name = "json" if session.json else format_
    _require_use(name, list(EXPORTS), set_, log_to if format_ != "table" else None, allow if against is None else None)
    if against is not None and log_to is not None:
        raise UsageError(f"--log-to {log_to}: not together with --against; give one of them")
    if against is not None:
        raise _compared(session, run, against, allow or "5%", name)
    result = _read(session, run)
    if log_to is not None:
        _log(session, result, log_to)
    elif name in EXPORTS:
        session.deliver_text(EXPORTS[name].text(result, set_ or ()), exact=True)
        session.notes(EXPORTS[name].said_beside(result))
    elif name == "html" and session.output is None and sys.stdout.isatty():
        raise UsageError("--format html is a page for a browser: add --output report.html")
    elif name in FORMATS:
        session.deliver_text(FORMATS[name](result), exact=True)
    else:
        session.deliver_page(result)
    if open_page:
        session.open_page(result)


def _require_use(
    format_: str, exports: list[str], set_: list[str] | None, log_to: str | None, allow: str | None
) -> None:
    """Raises UsageError for an option of `report` that would say nothing beside the others."""
    if log_to is not None:
        raise UsageError(f"--log-to {log_to}: not together with --format {format_}; give one of them")
    if set_ and format_ not in exports:
        raise UsageError(f"--set {set_[0]}: not with --format {format_}; fields of {', '.join(exports)} can be renamed")
    if allow is not None:
        raise UsageError(f"--allow {allow}: says nothing without --against; name the earlier result")


def _read(session: Session, run: str | None) -> Result:
    """The result that is meant, with a word on a run that goes on or was killed."""
    from batchtune.result import find_run, is_behind, running_in

    found = find_run(run)
    result, process = api.load_result(found), running_in(found)
    last = "has so far" if process is not None else "had"
    if is_behind(found):
        from batchtune.tune.study.storage import as_in_journal

        whole = as_in_journal(result, found)
        result, last = whole or result, last if whole else "had when it last saved"
        if process is None:
            session.notes([f"the study was killed; here is what it {last}: the same 'batchtune tune' goes on with it"])
    if process is not None:
        session.notes([f"process {process} goes on with this run: here is what it {last}"])
        return result.model_copy(update={"status": "running", "error": None})
    return result


def _log(session: Session, result: Result, tracker: str) -> None:
    """Logs a study to a tracker, with its report."""
    from batchtune.report.formats import FORMATS
    from batchtune.report.trackers import log_to

    files = {"report.md": FORMATS["markdown"](result), "report.html": FORMATS["html"](result)}
    logged = log_to(tracker, result, files)
    line = "logged {logged} of {trials} trials to {where}"
    if not logged["logged"]:
        line = "nothing was logged: all {trials} trials are in {where} already"
    session.deliver_text(json.dumps(logged) if session.json else line.format_map(logged))


def _compared(session: Session, run: str | None, against: str, allow: str, format_: str) -> typer.Exit:
    """Prints what a result comes to beside an earlier one; the exit code says whether it is worse."""
    from batchtune.config.checks import percentage
    from batchtune.report.against import WORSE_EXIT_CODE, compare

    if format_ not in {"table", "markdown", "json"}:
        raise UsageError(f"--against {against}: not with --format {format_}; use table, markdown or json")
    share = percentage("--allow", allow)
    found = compare(_read(session, run), _read(session, against), share)
    writers = {"table": found.to_text, "markdown": found.to_markdown, "json": found.to_json}
    session.deliver_text(writers[format_](), exact=format_ != "table")
    return typer.Exit(WORSE_EXIT_CODE if found.worse else 0)
