"""The command line: parse, call, print. What a command does stands in the package of its name."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from batchtune import __version__, api
from batchtune.cli_report import Open, report
from batchtune.config.options import check_options
from batchtune.console import complete_gpus, complete_keys, with_session
from batchtune.errors import RunInterrupted, UsageError
from batchtune.session import Session, complain, discard_stdout, keep_to_open_streams, open_stdout
from batchtune.task.spec import TEMPLATE

if TYPE_CHECKING:
    from batchtune.config.schema import Config

app = typer.Typer(
    name="batchtune",
    help="Finds the batch size, learning rate and precision that train a PyTorch model to its goal soonest.",
    no_args_is_help=True,
    rich_markup_mode=None,  # Typer's help in boxes takes as long to load as all the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Origin = Literal["pytorch", "lightning", "transformers"]
Schema = Literal["config", "result"]
_TEMPLATES: dict[Origin, str] = {  # what follows the file's name
    "pytorch": "",
    "lightning": ":LitModel",
    "transformers": ":make_trainer",
}
Task = Annotated[str, typer.Argument(metavar="TASK", help="model.py, path.py:attribute or pkg.module:attribute.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        with open_stdout() as stdout:
            stdout.write(f"batchtune {__version__}\n")
        raise typer.Exit


@app.command(short_help="Write a commented batchtune_task.py and config.yaml.")
@with_session
def init(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; made if missing.")] = Path(),
    origin: Annotated[Origin, typer.Option("--from", help="The library that you train with.")] = "pytorch",
) -> None:
    """Write a commented batchtune_task.py and config.yaml that work as they are, and the schema for editors.

    Examples:
      batchtune init mymodel
      batchtune init mymodel --from lightning
    """
    from batchtune.config.schema import config_schema

    templates = Path(__file__).parent / "templates"
    model = templates / (origin if _TEMPLATES[origin] else "") / TEMPLATE
    config = (templates / "config.yaml").read_text(encoding="utf-8")
    texts = {
        TEMPLATE: model.read_text(encoding="utf-8"),
        "config.yaml": config.replace(f"task: {TEMPLATE}", f"task: {TEMPLATE}{_TEMPLATES[origin]}", 1),
        "config.schema.json": json.dumps(config_schema(), indent=1) + "\n",  # config.yaml names it for editors
    }
    files = [directory / name for name in texts]
    try:
        taken = [str(file) for file in files if file.exists()]
        if taken:
            raise UsageError(f"{', '.join(taken)}: already there; choose another folder: batchtune init DIR")
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in zip(files, texts.values(), strict=True):
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{str(directory)[:100]}: cannot be written: {error.strerror}") from None
    if session.json or session.output:
        session.deliver_text(json.dumps({"written": [str(file) for file in files]}))
    elif not session.quiet:
        next_step = f"batchtune tune {shlex.quote(str(directory / 'config.yaml'))}"
        session.deliver_text("".join(f"wrote {file}\n" for file in files) + f"next: {next_step}\n")


@app.command(short_help="Find the largest batch that trains in the device's memory.")
@partial(with_session, like=api.probe, trains=True)
def probe(session: Session, task: Task, open_page: Open = False, **options: Any) -> None:
    """Find the largest batch that really trains in the device's memory, and how fast each size trains.

    Examples:
      batchtune probe model.py
      batchtune probe model.py --memory-limit 20GiB --precision bf16
      batchtune probe train.py:make_trainer --no-oom --json -o probe.json
      batchtune probe model.py --lengths 128,256,512,1024
    """
    from batchtune.result import ROOT

    with session.observer() as observer:
        result = api.probe(task, **options, observer=observer, run_folders=ROOT)
    session.deliver(result, open_page=open_page)


@app.command(short_help="Calculate which batch fits on which GPU, without one.")
@partial(with_session, like=api.estimate, completions={"gpus": complete_gpus})
def estimate(session: Session, task: Task, **options: Any) -> None:
    """Calculate which batch fits on which GPU, with no GPU at hand.

    Examples:
      batchtune estimate model.py
      batchtune estimate model.py --gpu A100-80GB --gpu 4090 --precision bf16
    """
    gpus = options.pop("gpus") or "all"
    with session.observer() as observer:
        result = api.estimate(task, gpus=gpus, **options, observer=observer)
    session.deliver(result)


@app.command(short_help="Find the batch size and learning rate that train soonest.")
@partial(with_session, like=api.tune, trains=True)
def tune(
    session: Session,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG|TASK", help="The YAML configuration, or model.py and the like.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Keys of the configuration, e.g. budget.total=5m.", autocompletion=complete_keys
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming the study.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    open_page: Open = False,
    **options: Any,
) -> None:
    """Find the batch size and learning rate that reach the target soonest, and confirm them on fresh seeds.

    Examples:
      batchtune tune model.py --batch-size 32 --lr 1e-3
      batchtune tune model.py --budget 10m --target "accuracy>0.9" --save-config tune.yaml
      batchtune tune config.yaml --dry-run
      batchtune tune config.yaml budget.total=5m baseline.batch_size=64
      batchtune tune config.yaml --ranks 4 --strategy fsdp
      batchtune tune config.yaml --executor ray --workers auto
    """
    from batchtune.tune.plan import configure
    from batchtune.tune.run import run_tune

    began = time.perf_counter()  # budget.total counts from the first look at the task on
    check_options(api.tune, options)
    options["overrides"] = overrides
    warm_start = options.pop("warm_start")
    with session.observer() as observer:
        loaded = configure.configure(config, options, observer, options.pop("save_config"))
    if dry_run:
        _check(session, loaded, warm_start, fresh=fresh)
        return
    with session.observer(loaded.budget.given_total) as observer:
        result = run_tune(loaded, fresh=fresh, observer=observer, warm_start=warm_start, began=began)
    session.deliver(result, open_page=open_page)


def _check(session: Session, loaded: Config, warm_start: str | None, *, fresh: bool) -> None:
    """`tune --dry-run`: opens the task, trains nothing, and tells what was found or would be refused."""
    from batchtune.result import ROOT
    from batchtune.tune.plan import configure, open_task
    from batchtune.tune.run import check_kept

    if warm_start is not None:
        configure.read_warm_start(warm_start, loaded, ROOT)
    if not fresh:
        check_kept(loaded, ROOT)
    with session.observer() as observer:
        facts = api.check(loaded, observer=observer)
    if not fresh:
        check_kept(loaded, ROOT, facts.get("environment"))
    session.notes(open_task.verdict(loaded, facts))
    if session.json or session.verbose or session.output or not sys.stdout.isatty():  # else the verdict says enough
        session.deliver_text(json.dumps(facts, indent=2) if session.json else loaded.to_yaml(), exact=True)


app.command("report", short_help="Print the recommendation of a run.")(with_session(report))


@app.command(short_help="Describe this machine, to paste into an issue.")
@with_session
def env(session: Session, device: Annotated[str, typer.Option(help="auto, cpu, cuda:0, mps, …")] = "auto") -> None:
    """Print versions, device, driver and live GPU sensors, to paste into an issue.

    Examples:
      batchtune env
      batchtune env --device cuda:1 --json
    """
    facts = api.environment(device)
    if session.json:
        session.deliver_text(json.dumps(facts, indent=2))
    else:
        from batchtune.report.formats import environment_text

        session.deliver_text(environment_text(facts))


@app.command(short_help="Print the JSON Schema of configuration or result.")
@with_session
def schema(
    session: Session, which: Annotated[Schema, typer.Argument(metavar="config|result", help="Which document.")]
) -> None:
    """Print the JSON Schema of the configuration or of the result document.

    Examples:
      batchtune schema config -o config.schema.json
      batchtune schema result
    """
    from batchtune.config.schema import config_schema
    from batchtune.result import result_schema

    found = config_schema() if which == "config" else result_schema()
    session.deliver_text(json.dumps(found, indent=2), exact=True)


def main() -> NoReturn:
    """The console entry point; exits with the documented code."""
    keep_to_open_streams()
    try:
        with open_stdout():
            code = app(standalone_mode=False)
    except UsageError as error:  # of --help and --version
        complain(str(error))
        code = error.exit_code
    except BrokenPipeError:
        discard_stdout()
        code = 0
    except typer.Exit as end:
        code = end.exit_code
    except typer.Abort:
        code = RunInterrupted.exit_code
    except Exception as error:
        show: Callable[[], None] | None = getattr(error, "show", None)  # Typer's own usage errors
        if show is None:
            raise
        _say_what_to_type(error)
        show()
        code = getattr(error, "exit_code", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _say_what_to_type(error: Exception) -> None:
    """Adds to what Typer says of an unknown word the one that was meant; for an option, a key of the configuration."""
    message = str(getattr(error, "message", "")).replace("Value error, ", "")
    given, *known = re.findall(r"'([^']*)'", message) or [""]
    near = difflib.get_close_matches(given, known, n=1)
    vars(error)["message"] = f"{message} Did you mean '{near[0]}'?" if near else message
    option, command = getattr(error, "option_name", ""), getattr(getattr(error, "ctx", None), "info_name", "")
    wanted = option.strip("-").replace("-", "_")
    for key in complete_keys("") if command == "tune" else []:
        if key.rstrip("=").replace(".", "_") == wanted:
            vars(error).update(message=f"{message}; write {key}… without dashes", possibilities=[])
