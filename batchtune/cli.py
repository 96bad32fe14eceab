"""The command line: parse, call, print. What a command does stands in the package of its name."""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from batchtune import __version__
from batchtune.errors import BatchtuneError, RunInterrupted, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from batchtune.progress import Observer
    from batchtune.results import Result

app = typer.Typer(
    name="batchtune",
    help="Finds the batch size, learning rate and precision that train a PyTorch model to its goal soonest.",
    no_args_is_help=True,
    rich_markup_mode=None,  # Typer's help in boxes takes as long to load as all the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_INTERRUPTED = RunInterrupted.exit_code


class Precision(enum.StrEnum):
    """Values of --precision."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    tf32 = "tf32"
    all = "all"


class Format(enum.StrEnum):
    """Values of --format."""

    table = "table"
    json = "json"
    markdown = "markdown"
    html = "html"
    csv = "csv"


class Schema(enum.StrEnum):
    """What `schema` can print."""

    config = "config"
    result = "result"


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result document alone on stdout.")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the result to FILE.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Reasons, and what your code prints.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


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
            from batchtune.progress import Observer

            yield Observer()
            return
        from batchtune.report.live import LiveObserver

        with LiveObserver(_console(stderr=True), verbose=self.verbose, total_seconds=total_seconds) as observer:
            yield observer

    def deliver(self, result: Result) -> None:
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

    def _show(self, result: Result) -> None:
        if self.json:
            sys.stdout.write(result.to_json() + "\n")
        else:
            _console().print(result)
        sys.stdout.flush()

    def deliver_text(self, text: str) -> None:
        """Prints text, or writes it to the output file."""
        if self.output is not None:
            _write(self.output, text)
        else:
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
            sys.stdout.flush()


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        sys.stdout.write(f"batchtune {__version__}\n")
        raise typer.Exit


@app.command(short_help="Write a commented model.py and config.yaml.")
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; made if missing.")] = Path(),
    json_: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a commented model.py and config.yaml that work as they are.

    Example: batchtune init mymodel && batchtune tune mymodel/config.yaml
    """
    with _command(json=json_, output=output, quiet=quiet, verbose=verbose, debug=debug) as session:
        files = [directory / name for name in ("model.py", "config.yaml")]
        taken = [str(file) for file in files if file.exists()]
        if taken:
            raise UsageError(f"{', '.join(taken)}: already there; choose another folder: batchtune init DIR")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copyfile(Path(__file__).parent / "templates" / file.name, file)
        except OSError as error:
            raise UsageError(f"{directory}: cannot be written: {error.strerror}") from None
        if session.json or session.output:
            session.deliver_text(json.dumps({"written": [str(file) for file in files]}))
        elif not session.quiet:
            next_step = f"batchtune tune {directory / 'config.yaml'}"
            session.deliver_text("".join(f"wrote {file}\n" for file in files) + f"next: {next_step}\n")


@app.command(short_help="Find the largest batch that trains in the device's memory.")
def probe(
    task: Annotated[str, typer.Argument(metavar="TASK", help="model.py, path.py:attribute or pkg.module:attribute.")],
    precision: Annotated[Precision, typer.Option(envvar="BATCHTUNE_PRECISION")] = Precision.auto,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", envvar="BATCHTUNE_MEMORY_LIMIT", help="Bytes that may be reserved, e.g. 20GiB."),
    ] = None,
    margin: Annotated[
        float, typer.Option(envvar="BATCHTUNE_MEMORY_MARGIN", help="Share of device memory kept free during the probe.")
    ] = 0.05,
    min_: Annotated[
        int, typer.Option("--min", envvar="BATCHTUNE_BATCH_SIZE_MIN", help="Smallest micro-batch size.")
    ] = 1,
    max_: Annotated[int | None, typer.Option("--max", help="Largest micro-batch size; never exceeded.")] = None,
    multiple_of: Annotated[int, typer.Option(help="Try multiples of this only.")] = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps of one attempt.")] = 3,
    device: Annotated[str, typer.Option(envvar="BATCHTUNE_DEVICE", help="auto, cpu, cuda:0, mps, …")] = "auto",
    tolerance: Annotated[
        float, typer.Option(help="How far apart largest fit and smallest failure may be; 0 is exact.")
    ] = 0.01,
    timeout: Annotated[str, typer.Option(help="After so long without a sign of life an attempt hangs.")] = "120s",
    verify_steps: Annotated[int, typer.Option(help="Steps of the final check in a fresh process.")] = 20,
    no_oom: Annotated[bool, typer.Option("--no-oom", help="Never risk an out-of-memory error.")] = False,
    no_throughput: Annotated[bool, typer.Option("--no-throughput", help="Do not time steps and loader.")] = False,
    accumulation: Annotated[int, typer.Option(metavar="N", help="Micro-batches of one optimizer step.")] = 1,
    json_: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the largest batch that really trains in the device's memory, and how fast each size trains.

    Example: batchtune probe model.py --memory-limit 20GiB --precision bf16
    """
    with _command(json=json_, output=output, quiet=quiet, verbose=verbose, debug=debug) as session:
        import batchtune

        with session.observer() as observer:
            result = batchtune.probe(
                task,
                precision=precision.value,
                memory_limit=memory_limit,
                margin=margin,
                min=min_,
                max=max_,
                multiple_of=multiple_of,
                steps=steps,
                device=device,
                tolerance=tolerance,
                timeout=timeout,
                verify_steps=verify_steps,
                no_oom=no_oom,
                throughput=not no_throughput,
                accumulation=accumulation,
                observer=observer,
                run_folders=_run_folders(),
            )
        session.deliver(result)


@app.command(short_help="Calculate which batch fits on which GPU, without one.")
def estimate(
    task: Annotated[str, typer.Argument(metavar="TASK", help="model.py, path.py:attribute or pkg.module:attribute.")],
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", metavar="NAME", help="A GPU, e.g. A100-80GB; repeatable; default: all.")
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", envvar="BATCHTUNE_MEMORY_LIMIT", help="Bytes that may be reserved, e.g. 24GiB."),
    ] = None,
    precision: Annotated[Precision, typer.Option(envvar="BATCHTUNE_PRECISION")] = Precision.auto,
    accumulation: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 1,
    json_: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Calculate which batch fits on which GPU, with no GPU at hand.

    Example: batchtune estimate model.py --gpu A100-80GB --gpu 4090
    """
    with _command(json=json_, output=output, quiet=quiet, verbose=verbose, debug=debug) as session:
        import batchtune

        with session.observer() as observer:
            result = batchtune.estimate(
                task,
                gpus=gpu or "all",
                precision=precision.value,
                memory_limit=memory_limit,
                accumulation_steps=accumulation,
                observer=observer,
            )
        session.deliver(result)


@app.command(short_help="Find the batch size and learning rate that train soonest.")
def tune(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML configuration.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Laid over it, e.g. budget.total=5m.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming the run folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="An Optuna storage instead of the run folder's journal.")
    ] = None,
    json_: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the batch size and learning rate that reach the target soonest, and confirm them on fresh seeds.

    Example: batchtune tune config.yaml budget.total=5m baseline.batch_size=64
    """
    with _command(json=json_, output=output, quiet=quiet, verbose=verbose, debug=debug) as session:
        import batchtune
        from batchtune.config_file import load_config

        extra = [f"storage={json.dumps(storage)}"] if storage else []
        loaded = load_config(config, [*(overrides or []), *extra])
        with session.observer(loaded.budget.total) as observer:
            if dry_run:
                facts = batchtune.check(loaded, observer=observer)
            else:
                result = batchtune.tune(loaded, fresh=fresh, observer=observer, run_folders=_run_folders())
        if dry_run:
            session.deliver_text(json.dumps(facts, indent=2) if session.json else loaded.to_yaml())
        else:
            session.deliver(result)


@app.command(short_help="Print the recommendation of a run.")
def report(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN|FILE.json", help="A run's name, its folder, or a result file.")
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.table,
    json_: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Print the recommendation of the latest run, or of one named, in one of several formats.

    Example: batchtune report digits --format markdown -o summary.md
    """
    with _command(json=json_, output=output, quiet=quiet, verbose=verbose, debug=debug) as session:
        import batchtune
        from batchtune.report.export import FORMATS
        from batchtune.run_folder import find_run

        result = batchtune.load_result(find_run(run, _run_folders()))
        name = "json" if session.json else format_.value
        if name == "html" and session.output is None and sys.stdout.isatty():
            raise UsageError("--format html is a page of some megabytes: add --output report.html")
        if name in FORMATS:
            session.deliver_text(FORMATS[name](result))
        elif session.output is not None:
            from rich.console import Console

            page = Console(file=io.StringIO(), width=100)
            with page.capture() as captured:
                page.print(result)
            session.deliver_text(captured.get())
        else:
            _console().print(result)


@app.command(short_help="Describe this machine, to paste into an issue.")
def env(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0, mps, …")] = "auto",
    json_: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Print versions, device, driver and live GPU sensors, to paste into an issue.

    Example: batchtune env
    """
    with _command(json=json_, output=output, quiet=quiet, verbose=verbose, debug=debug) as session:
        import batchtune

        facts = batchtune.environment(device)
        if session.json:
            session.deliver_text(json.dumps(facts, indent=2))
        else:
            from batchtune.report.export import environment_text

            session.deliver_text(environment_text(facts))


@app.command(short_help="Print the JSON Schema of configuration or result.")
def schema(
    which: Annotated[Schema, typer.Argument(metavar="config|result")],
    json_: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Print the JSON Schema of the configuration or of the result document.

    Example: batchtune schema config -o batchtune.schema.json
    """
    with _command(json=json_, output=output, quiet=quiet, verbose=verbose, debug=debug) as session:
        from batchtune.config import config_schema
        from batchtune.results import result_schema

        found = config_schema() if which is Schema.config else result_schema()
        session.deliver_text(json.dumps(found, indent=2))


def main() -> NoReturn:
    """The console entry point; exits with the documented code."""
    try:
        code: Any = app(standalone_mode=False)
    except typer.Exit as end:
        code = end.exit_code
    except typer.Abort:
        code = _INTERRUPTED
    except Exception as error:
        show: Callable[[], None] | None = getattr(error, "show", None)  # Typer's own usage errors
        if show is None:
            raise
        show()
        code = getattr(error, "exit_code", 2)
    sys.exit(code if isinstance(code, int) else 0)


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
        if error.result is not None and session is not None and (session.json or _worth_showing(error.result)):
            try:
                session.deliver(error.result)
            except UsageError as second:
                _explain(second, debug=debug)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(_INTERRUPTED) from None
    except typer.Exit:
        raise
    except BrokenPipeError:  # the reader of our output has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit from None
    except Exception as error:  # noqa: BLE001 - a bug of ours, whatever it is, is said in one line
        if debug:
            traceback.print_exc()
        _complain(_bug(f"{type(error).__name__}: {error}"))
        raise typer.Exit(BatchtuneError.exit_code) from None


def _stop_on_signals() -> None:
    """SIGTERM stops as Ctrl-C does; whichever comes second stops at once (children end with us)."""

    def stop(number: int, frame: object) -> None:  # noqa: ARG001 - the signal module's signature
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: os._exit(_INTERRUPTED))
        raise KeyboardInterrupt

    with contextlib.suppress(ValueError):  # not the main thread: somebody embeds the command
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)


def _worth_showing(result: Result) -> bool:
    return bool(result.trials or (result.probe and result.probe.attempts))


def _explain(error: BatchtuneError, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
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


def _complain(message: str) -> None:
    sys.stderr.write(f"batchtune: {message}\n")
    sys.stderr.flush()


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _run_folders() -> Path:
    from batchtune.run_folder import ROOT

    return ROOT


def _check_writable(path: Path) -> None:
    """Opens the output file before the work starts; what it holds stays until there is a result."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a pipe or a device: to open it is to use it
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
        if not os.access(path.resolve().parent, os.W_OK):  # the file is replaced, not overwritten
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _not_written(path, error) from None


def _write(path: Path, text: str) -> None:
    from batchtune.results import write_atomically

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
