"""What every command has in common: its options, what signals mean to it, and how whatever goes wrong in it ends."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from batchtune.config.checks import count
from batchtune.config.options import asked_by_command, flag_of, options_of, with_variables
from batchtune.errors import BatchtuneError, RunInterrupted, UsageError, without_passwords
from batchtune.session import Session, complain, discard_stdout

if TYPE_CHECKING:
    from batchtune.document import Document


def with_session(
    function: Callable[..., None],
    like: Callable[..., object] | None = None,
    completions: Mapping[str, Callable[[str], list[str]]] | None = None,
    *,
    trains: bool = False,
) -> Callable[..., None]:
    """Makes a command of a function whose first parameter is its session.

    The options that every command has are added to its own, and whatever goes wrong in it ends in the documented exit
    code.

    Args:
        function: the command.
        like: the function whose options it has, too; they come to it as keyword arguments.
        completions: of those options, what a shell proposes for what has been typed of a value.
        trains: it may have ranks train; of the processes of torchrun, the first one then does what the command does.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [each for each in list(signature.parameters.values())[1:] if each.kind is not each.VAR_KEYWORD]
    own += _parameters_like(like, completions or {}) if like else []

    @functools.wraps(function)
    def run(**given: Any) -> None:
        common = {option.name: given.pop(option.name) for option in COMMON}
        if trains:
            _follow_first_rank()
        with _command(**common) as session, asked_by_command(), _leading() if trains else contextlib.nullcontext():
            function(session, **(with_variables(like, given) if like else given))

    # a backspace tells Typer that the lines after it keep their ends
    run.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("\n\nExamples:", "\n\n\b\nExamples:")
    parameters = [*own, *COMMON]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # Typer reads both
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameters_like(
    function: Callable[..., object], completions: Mapping[str, Callable[[str], list[str]]]
) -> Iterator[inspect.Parameter]:
    """Typer's parameters for the options of a function of the package."""
    for name, option in options_of(function).items():
        default = inspect.signature(function).parameters[name].default
        kind: Any = Literal[option.choices] if option.choices else str
        if option.is_several:
            kind, default = list[str], None
        elif isinstance(default, bool | float):
            kind = type(default)
        elif option.check is count:
            kind = int
        flag, how = flag_of(name, option), dict[str, Any](help=option.help, autocompletion=completions.get(name))
        if option.off is not None:
            flag, default, how = f"--no-{name}", False, {"help": option.off, "callback": lambda value: not value}
        if option.variable is not None:  # read by `with_variables`, which has the default, too
            shown = "" if default is None else f"; default: {default}"
            default, how["help"] = None, f"{option.help}  [env var: {option.variable}{shown}]"
        given = typer.Option(flag, metavar=option.metavar, **how)
        annotation: Any = Annotated[kind if default is not None else kind | None, given]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@contextlib.contextmanager
def _command(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, alone on stdout.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the result to FILE.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show reasons, every row, and what your code prints.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> Iterator[Session]:
    """Turns whatever happens in a command into one line on stderr and the documented exit code."""
    _stop_on_signals()
    warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
    session: Session | None = None
    try:
        session = Session(json=json, output=output, quiet=quiet, verbose=verbose)
        yield session
    except BatchtuneError as error:
        _explain(error, debug=debug)
        if session is not None and error.result is not None and _is_wanted(error, error.result, session):
            session.has_complained = True
            try:
                session.deliver(error.result)
            except UsageError as second:
                _explain(second, debug=debug)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(RunInterrupted.exit_code) from None
    except typer.Exit:
        raise
    except BrokenPipeError:  # the reader of our output has gone; nobody is left to tell
        discard_stdout()
        raise typer.Exit from None
    except Exception as error:  # noqa: BLE001 - a bug of ours, whatever it is, is said in one line
        _show_traceback(debug=debug)
        complain(_bug(f"{type(error).__name__}: {error}"))
        raise typer.Exit(BatchtuneError.exit_code) from None


def _leading() -> contextlib.AbstractContextManager[object]:
    from batchtune.processes.torchrun import leading

    return leading()


def _follow_first_rank() -> None:
    """Ends a process that torchrun started beside the first one as that ends, without a word."""
    from batchtune.processes.torchrun import LOST, follow

    _stop_on_signals()
    try:
        outcome = follow()
    except KeyboardInterrupt:
        raise typer.Exit(RunInterrupted.exit_code) from None
    if outcome == LOST:
        complain(outcome.error)
    if outcome is not None:
        raise typer.Exit(outcome.exit_code)


COMMON = list(inspect.signature(_command, eval_str=True).parameters.values())
"""The options that every command has."""


def _stop_on_signals() -> None:
    """SIGTERM stops as Ctrl-C does; whichever comes second stops at once (children end with us)."""

    def stop(number: int, frame: object) -> None:  # noqa: ARG001 - the signal module's signature
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: os._exit(RunInterrupted.exit_code))
        raise KeyboardInterrupt

    with contextlib.suppress(ValueError):  # not the main thread: somebody embeds the command
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)


def _is_wanted(error: BatchtuneError, result: Document, session: Session) -> bool:
    """Whether what was measured until an error is delivered; who interrupts sees it where a file is asked for."""
    quiet = isinstance(error, RunInterrupted) and session.output is None
    tried = result.probe.attempts if result.probe else []
    found = result.trials or any(each.outcome != "user_error" for each in tried)
    found = found or any(each.confidence != "refused" for each in result.estimates or ())
    return session.json or (bool(found) and not quiet)


def _explain(error: BatchtuneError, *, debug: bool) -> None:
    _show_traceback(debug=debug)
    frames = getattr(error, "frames", "")
    if frames:
        sys.stderr.write(frames.rstrip() + "\n")
    text = str(error).strip()
    if error.exit_code == BatchtuneError.exit_code:  # a child's report of a bug is its traceback
        text = _bug(text if debug else text.splitlines()[-1])
    complain(text)


def _bug(what: str) -> str:
    remedy = "run again with --debug and report it together with the output of 'batchtune env'"
    return f"this is a bug in batchtune: {what}\n{remedy}"


def _show_traceback(*, debug: bool) -> None:
    if debug:
        sys.stderr.write(without_passwords(traceback.format_exc()))


def complete_gpus(typed: str) -> list[str]:
    """Names of the catalogue that go on from what has been typed."""
    from batchtune.device.gpus import all_gpus

    names = ["all", *(gpu.name.replace(" ", "-") for gpu in all_gpus())]  # a blank ends a word for shells
    return [typed + name[len(typed) :] for name in names if name.lower().startswith(typed.lower())]


def complete_keys(typed: str) -> list[str]:
    """Keys of the configuration that go on from what has been typed."""
    from batchtune.config.schema import known_keys

    names = list(known_keys())
    sections = {name.rpartition(".")[0] for name in names}
    return [f"{name}=" for name in names if name.startswith(typed) and name not in sections]
