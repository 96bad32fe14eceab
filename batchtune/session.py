"""What a command says to its user: the result on stdout or in a file, everything else on stderr."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from batchtune.errors import UsageError, without_passwords

if TYPE_CHECKING:
    from rich.console import Console

    from batchtune.document import Document
    from batchtune.observer import Observer


class Session:
    """How one command talks to its user: the result on stdout, everything else on stderr."""

    def __init__(self, *, json: bool, output: Path | None, quiet: bool, verbose: bool) -> None:
        self.json, self.output, self.quiet, self.verbose = json, output, quiet, verbose
        self.has_complained = False
        if output is not None:
            _check_writable(output)

    @contextlib.contextmanager
    def observer(self, total_seconds: float | None = None) -> Iterator[Observer]:
        """Progress on stderr for as long as the block runs."""
        if self.quiet:
            from batchtune.observer import Observer

            yield Observer()
            return
        from rich.console import Console

        from batchtune.report.live import LiveObserver

        with LiveObserver(Console(stderr=True), verbose=self.verbose, total_seconds=total_seconds) as observer:
            yield observer

    def deliver(self, result: Document, *, open_page: bool = False) -> None:
        """Prints a result, writes it to the output file, and opens its page in a browser where that is wanted."""
        shown = self.json or not self.quiet or self.output is None
        try:
            if self.output is not None:
                _write(self.output, result.to_json())
        except UsageError:
            shown = True  # what took so long to find out is not lost
            raise
        finally:
            if shown:
                self._show(result)
        if open_page:
            self.open_page(result)

    def _show(self, result: Document) -> None:
        if self.json:
            _print(result.to_json(), exact=True)
            return
        if self.has_complained and sys.stdout.isatty():
            result = result.model_copy(update={"error": None})  # it stands right above
        from rich.console import Console

        with open_stdout() as stdout:
            stdout.write(self._drawn(result, Console()))

    def _drawn(self, result: Document, console: Console) -> str:
        from batchtune.report.terminal import render

        page = _page_of(result)
        with console.capture() as captured:
            console.print(render(result, verbose=self.verbose, page=str(page) if page else ""))
        return captured.get()

    def open_page(self, result: Document) -> None:
        """Opens the page of a result in a browser; where that is not possible, says why."""
        import webbrowser

        page = _page_of(result)
        if page is None:
            self.notes(["no page to open: --format html -o report.html writes one"])
            return
        with contextlib.suppress(webbrowser.Error, OSError):
            if webbrowser.open(page.resolve().as_uri()):
                return
        self.notes([f"no browser could be started: open {page} in one"])

    def deliver_page(self, result: Document) -> None:
        """Prints what a reader sees of a result, or writes that as text to the output file."""
        if self.output is None:
            self._show(result)
            return
        from rich.console import Console

        page = Console(file=io.StringIO(), width=100, force_terminal=False)  # a file has no colours, FORCE_COLOR or not
        self.deliver_text(self._drawn(result, page))

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
            complain(f"note: {sentence}")


def complain(message: str) -> None:
    """Says one thing on stderr; in a terminal no word is cut at the end of a line."""
    text = f"batchtune: {without_passwords(message)}"
    if sys.stderr.isatty():
        wrapper = textwrap.TextWrapper(
            shutil.get_terminal_size().columns, break_on_hyphens=False, break_long_words=False
        )
        text = "\n".join(map(wrapper.fill, text.splitlines()))
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def keep_to_open_streams() -> None:
    """Lets no reader of ours end a measurement: what a closed stdout, or a stderr that nobody reads, gets is lost."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - one of the three was closed
        os.set_inheritable(file, True)  # noqa: FBT003 - children have it, too
    os.close(file)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - to its end
    sys.stderr = cast("TextIO", _Forgiving(sys.stderr or open(2, "w", encoding="utf-8", closefd=False)))  # noqa: SIM115


class _Forgiving:
    """A text stream that loses what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _page_of(result: Document) -> Path | None:
    from batchtune.result import page_of

    return None if result.kind == "estimate" else page_of(result)


def _print(text: str, *, exact: bool) -> None:
    """Writes text to stdout; unless it must be exact, what stdout's encoding lacks is replaced by what looks alike."""
    from batchtune.report.terminal import written_in

    text = text if text.endswith("\n") else text + "\n"
    with open_stdout() as stdout:
        if exact and hasattr(stdout, "buffer"):
            stdout.flush()
            stdout.buffer.write(text.encode("utf-8", "replace"))
        else:
            stdout.write(written_in(stdout.encoding or "utf-8", text))


@contextlib.contextmanager
def open_stdout() -> Iterator[TextIO]:
    """Standard output, flushed at the end; one that takes no more is said in a line."""
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        remedy = "make room, or use --output FILE; what a probe or tune measured 'batchtune report' prints again"
        raise UsageError(f"stdout cannot be written: {error.strerror}; {remedy}") from None


def discard_stdout() -> None:
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
    from batchtune.run_folder import write_atomically

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
