"""How one command talks to its user: the result on stdout, progress and errors on stderr, and what signals mean."""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import inspect
import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from batchtune.config.options import Option, cap, count, flag_of, options_of
from batchtune.errors import BatchtuneError, RunInterrupted, UsageError, without_passwords

if TYPE_CHECKING:
    from rich.console import Console

    from batchtune.document import Document
    from batchtune.observer import Observer

INTERRUPTED = RunInterrupted.exit_code


class Session:
    """How one command talks to its user: the result on stdout, everything else on stderr."""

    def __init__(self, *, json: bool, output: Path | None, quiet: bool, verbose: bool, debug: bool) -> None:
        self.json, self.output, self.quiet, self.verbose, self.debug = json, output, quiet, verbose, debug
        if output is not None:
            _check_writable(output)

    @contextlib.contextmanager
    def observer(self, total_seconds: float | None = None) -> Iterator[Observer]:
        """Progress on stderr for as long as the block runs."""
        if self.quiet:
            from batchtune.observer import Observer

            yield Observer()
            return
        from batchtune.report.terminal.live import LiveObserver

        with LiveObserver(_console(stderr=True), verbose=self.verbose, total_seconds=total_seconds) as observer:
            yield observer

    def deliver(self, result: Document) -> None:
        """Prints a result, and writes it to the output file."""
        shown = self.json or not self.quiet or self.output is None
        try:
            if self.output is not None:
                _write(self.output, result.to_json() + "\n")
        except UsageError:
            shown = True  # what took so long to find out is not lost
            raise
        finally:
            if shown:
                self._show(result)

    def _show(self, result: Document) -> None:
        if self.json:
            _print(result.to_json(), exact=True)
        else:
            with _stdout() as stdout:
                stdout.write(_drawn(result, _console(), verbose=self.verbose))

    def deliver_page(self, result: Document) -> None:
        """Prints what a reader sees of a result, or writes that as text to the output file."""
        if self.output is None:
            self._show(result)
            return
        from rich.console import Console

        page = Console(file=io.StringIO(), width=100, force_terminal=False)  # a file has no colours, FORCE_COLOR or not
        self.deliver_text(_drawn(result, page, verbose=self.verbose))

    def deliver_text(self, text: str, *, exact: bool = False) -> None:
        """Prints text, or writes it to the output file; with --json both.

        Args:
            text: what the command has to say.
            exact: for programs: UTF-8, whatever the encoding of stdout lacks.
        """
        try:
            if self.output is not None:
                _write(self.output, text)
        finally:
            if self.json or self.output is None:
                _print(text, exact=exact or self.json)

    def notes(self, sentences: list[str]) -> None:
        """Says on stderr what a reader of the output must know besides it."""
        for sentence in [] if self.quiet else sentences:
            _complain(f"note: {sentence}")


COMMON = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
    for name, default, kind, option in (
        ("json", False, bool, typer.Option("--json", help="Print the result document alone on stdout.")),
        ("output", None, Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the result to FILE.")),
        ("quiet", False, bool, typer.Option("--quiet", "-q", help="No progress on stderr.")),
        (
            "verbose",
            False,
            bool,
            typer.Option("--verbose", "-v", help="Reasons, every row, what your code prints."),
        ),
        ("debug", False, bool, typer.Option("--debug", help="Show tracebacks.")),
    )
]


def with_session(function: Callable[..., None], like: Callable[..., Any] | None = None) -> Callable[..., None]:
    """Makes a command of a function whose first parameter is its session.

    The options that every command has are added to its own, and whatever goes wrong in it ends in the documented exit
    code.

    Args:
        function: the command.
        like: the function whose options it has, too; they come to it as keyword arguments.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [each for each in list(signature.parameters.values())[1:] if each.kind is not each.VAR_KEYWORD]
    own += _parameters_like(like) if like else []

    @functools.wraps(function)
    def run(**given: Any) -> None:
        with _command(**{option.name: given.pop(option.name) for option in COMMON}) as session:
            function(session, **given)

    # a backspace tells Typer that the lines after it keep their ends
    run.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("\n\nExamples:", "\n\n\b\nExamples:")
    parameters = [*own, *COMMON]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # Typer reads both
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def one_of(*words: str) -> Any:
    """A type for Typer: one of some words, which is a text like any other once it is parsed."""
    return enum.StrEnum("Word", {word: word for word in words})


def _parameters_like(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Typer's parameters for the options of a function of the package."""
    defaults = inspect.signature(function).parameters
    return [_parameter(name, option, defaults[name].default) for name, option in options_of(function).items()]


def _parameter(name: str, option: Option, default: Any) -> inspect.Parameter:
    kind: Any = one_of(*option.choices) if option.choices else str
    if option.is_several:
        kind, default = list[str], None
    elif isinstance(default, bool | float):
        kind = type(default)
    elif option.check in {count, cap}:
        kind = int
    flag, how = flag_of(name, option), dict[str, Any](help=option.help)
    if option.off is not None:
        flag, default, how = f"--no-{name}", False, {"help": option.off, "callback": lambda value: not value}
    given = typer.Option(flag, metavar=option.metavar, envvar=option.variable, **how)
    annotation: Any = Annotated[kind if default is not None else kind | None, given]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@contextlib.contextmanager
def _command(*, json: bool, output: Path | None, quiet: bool, verbose: bool, debug: bool) -> Iterator[Session]:
    """Turns whatever happens in a command into one line on stderr and the documented exit code."""
    _stop_on_signals()
    warnings.showwarning = lambda message, *_, **__: _complain(f"warning: {message}")
    session: Session | None = None
    try:
        session = Session(json=json, output=output, quiet=quiet, verbose=verbose, debug=debug)
        yield session
    except BatchtuneError as error:
        _explain(error, debug=debug)
        if session is not None and error.result is not None and _is_wanted(error, error.result, session):
            try:
                session.deliver(error.result)
            except UsageError as second:
                _explain(second, debug=debug)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except typer.Exit:
        raise
    except BrokenPipeError:  # the reader of our output has gone; nobody is left to tell
        _discard_stdout()
        raise typer.Exit from None
    except Exception as error:  # noqa: BLE001 - a bug of ours, whatever it is, is said in one line
        _show_traceback(debug=debug)
        _complain(_bug(f"{type(error).__name__}: {error}"))
        raise typer.Exit(BatchtuneError.exit_code) from None


def _stop_on_signals() -> None:
    """SIGTERM stops as Ctrl-C does; whichever comes second stops at once (children end with us)."""

    def stop(number: int, frame: object) -> None:  # noqa: ARG001 - the signal module's signature
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: os._exit(INTERRUPTED))
        raise KeyboardInterrupt

    with contextlib.suppress(ValueError):  # not the main thread: somebody embeds the command
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)


def _is_wanted(error: BatchtuneError, result: Document, session: Session) -> bool:
    """Whether what was measured until an error is delivered; who interrupts sees it where a file is asked for."""
    quiet = isinstance(error, RunInterrupted) and session.output is None
    return session.json or (_worth_showing(result) and not quiet)


def _worth_showing(result: Document) -> bool:
    tried = result.probe.attempts if result.probe else []
    return bool(result.trials or result.estimates or any(each.outcome != "user_error" for each in tried))


def _explain(error: BatchtuneError, *, debug: bool) -> None:
    _show_traceback(debug=debug)
    frames = getattr(error, "frames", "")
    if frames:
        sys.stderr.write(frames.rstrip() + "\n")
    text = str(error).strip()
    if error.exit_code == BatchtuneError.exit_code:  # a child's report of a bug is its traceback
        text = _bug(text if debug else text.splitlines()[-1])
    _complain(text)


def _bug(what: str) -> str:
    remedy = "run again with --debug and report it together with the output of 'batchtune env'"
    return f"this is a bug in batchtune: {what}\n{remedy}"


def _show_traceback(*, debug: bool) -> None:
    if debug:
        sys.stderr.write(without_passwords(traceback.format_exc()))


def _complain(message: str) -> None:
    sys.stderr.write(f"batchtune: {without_passwords(message)}\n")
    sys.stderr.flush()


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _drawn(result: Document, console: Console, *, verbose: bool) -> str:
    from batchtune.report.terminal.report import render

    with console.capture() as captured:
        console.print(render(result, verbose=verbose))
    return captured.get()


def _print(text: str, *, exact: bool) -> None:
    """Writes text to stdout; unless it must be exact, what stdout's encoding lacks is replaced by what looks alike."""
    from batchtune.report.terminal.ascii import written_in

    text = text if text.endswith("\n") else text + "\n"
    with _stdout() as stdout:
        if exact and hasattr(stdout, "buffer"):
            stdout.flush()
            stdout.buffer.write(text.encode("utf-8", "replace"))
        else:
            stdout.write(written_in(stdout.encoding or "utf-8", text))


@contextlib.contextmanager
def _stdout() -> Iterator[TextIO]:
    """Standard output, flushed at the end; one that takes no more is said in a line."""
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_stdout()
        remedy = "make room, or use --output FILE; what a probe or tune measured 'batchtune report' prints again"
        raise UsageError(f"stdout cannot be written: {error.strerror}; {remedy}") from None


def _discard_stdout() -> None:
    """What stdout still holds goes nowhere: Python would try to write it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _check_writable(path: Path) -> None:
    """Opens the output file before the work starts; what it holds stays until there is a result."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            return  # a pipe or a device: to open it is to use it
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.resolve().unlink()  # a link that leads to it stays
        if not os.access(path.resolve().parent, os.W_OK):  # the file is replaced, not overwritten
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _not_written(path, error) from None


def _write(path: Path, text: str) -> None:
    from batchtune.files import write_atomically

    text = text if text.endswith("\n") else text + "\n"
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe: nothing to replace
            path.write_text(text, encoding="utf-8")
        else:
            write_atomically(path.resolve(), text)
    except OSError as error:
        raise _not_written(path, error) from None


def _not_written(path: Path, error: OSError) -> UsageError:
    return UsageError(f"--output {path}: cannot be written: {error.strerror}; name a file elsewhere, or make room")
