"""The command line: parse, call, print. What a command does stands in the package of its name."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from batchtune import api
from batchtune.console import Session, one_of, with_session
from batchtune.errors import RunInterrupted, UsageError
from batchtune.task.spec import TEMPLATE
from batchtune.version import __version__

app = typer.Typer(
    name="batchtune",
    help="Finds the batch size, learning rate and precision that train a PyTorch model to its goal soonest.",
    no_args_is_help=True,
    rich_markup_mode=None,  # Typer's help in boxes takes as long to load as all the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_TEMPLATES = {"pytorch": "", "lightning": ":LitModel", "transformers": ":make_trainer"}  # what follows the file's name
Origin: Any = one_of(*_TEMPLATES)
Format: Any = one_of("table", "json", "markdown", "html", "csv", "hf", "lightning", "deepspeed", "env")
Tracker: Any = one_of("mlflow", "tensorboard", "wandb")
Executor: Any = one_of("local", "ray")
Schema: Any = one_of("config", "result")
Task = Annotated[str, typer.Argument(metavar="TASK", help="model.py, path.py:attribute or pkg.module:attribute.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        sys.stdout.write(f"batchtune {__version__}\n")
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
        next_step = f"batchtune tune {directory / 'config.yaml'}"
        session.deliver_text("".join(f"wrote {file}\n" for file in files) + f"next: {next_step}\n")


@app.command(short_help="Find the largest batch that trains in the device's memory.")
@partial(with_session, like=api.probe)
def probe(session: Session, task: Task, **options: Any) -> None:
    """Find the largest batch that really trains in the device's memory, and how fast each size trains.

    Examples:
      batchtune probe model.py
      batchtune probe model.py --memory-limit 20GiB --precision bf16
      batchtune probe train.py:make_trainer --no-oom --json -o probe.json
    """
    from batchtune.processes.ranks.torchrun import rank_of_this_process

    with session.observer() as observer:
        result = api.probe(task, **options, observer=observer, run_folders=_run_folders())
    if rank_of_this_process() == 0:
        session.deliver(result)


@app.command(short_help="Calculate which batch fits on which GPU, without one.")
@partial(with_session, like=api.estimate)
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
@with_session
def tune(
    session: Session,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML configuration.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Laid over it, e.g. budget.total=5m.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming the study.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    workers: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Runs at once, each on a device of its own.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="An Optuna storage instead of the run folder's journal.")
    ] = None,
    executor: Annotated[
        Executor | None, typer.Option(help="Where runs train: on this machine, or on a Ray cluster.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Of a Ray cluster that runs, e.g. auto or ray://head:10001.")
    ] = None,
) -> None:
    """Find the batch size and learning rate that reach the target soonest, and confirm them on fresh seeds.

    Examples:
      batchtune tune config.yaml --dry-run
      batchtune tune config.yaml budget.total=5m baseline.batch_size=64
      batchtune tune config.yaml --executor ray --workers auto
    """
    from batchtune.config.load import load_config
    from batchtune.tune.plan.open_task import verdict

    given = {"workers": workers, "storage": storage, "executor": executor, "ray.address": ray_address}
    extra = [f"{key}={value if key == 'workers' else json.dumps(value)}" for key, value in given.items() if value]
    loaded = load_config(config, [*(overrides or []), *extra])
    with session.observer(loaded.budget.total) as observer:
        if dry_run:
            facts = api.check(loaded, observer=observer)
        else:
            result = api.tune(loaded, fresh=fresh, observer=observer, run_folders=_run_folders())
    if dry_run:
        session.notes(verdict(loaded, facts))
        session.deliver_text(json.dumps(facts, indent=2) if session.json else loaded.to_yaml(), exact=True)
    else:
        session.deliver(result)


@app.command(short_help="Print the recommendation of a run.")
@with_session
def report(
    session: Session,
    run: Annotated[
        str | None, typer.Argument(metavar="RUN|FILE.json", help="A run's name, its folder, or a result file.")
    ] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="A report or, from hf on, the settings for a training library.")
    ] = "table",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=NAME", help="Calls a field of such settings otherwise; repeatable."),
    ] = None,
    log_to: Annotated[
        Tracker | None, typer.Option("--log-to", help="Log a study to this tracker instead, one run a trial.")
    ] = None,
) -> None:
    """Print the recommendation of the latest run, or of one named, in one of several formats.

    Examples:
      batchtune report digits --format html -o report.html
      batchtune report digits --format hf -o arguments.json
      batchtune report digits --format lightning --set model.lr=model.rate
      batchtune report digits --log-to mlflow
    """
    from batchtune.report.export.trainers import EXPORTS
    from batchtune.report.formats import FORMATS
    from batchtune.run_folder import find_run, is_behind, running_in

    found = find_run(run, _run_folders())
    result, process = api.load_result(found), running_in(found)
    if process is not None:
        result = result.model_copy(update={"status": "running", "error": None})
        session.notes([f"process {process} goes on with this run: here is what it had when it last saved"])
    elif is_behind(found):
        session.notes(["the study was killed, and has more than this: the same 'batchtune tune' shows it all"])
    name = "json" if session.json else format_
    if log_to is not None and format_ != "table":
        raise UsageError(f"--log-to {log_to}: not together with --format {format_}; give one of them")
    if set_ and name not in EXPORTS:
        raise UsageError(f"--set {set_[0]}: not with --format {name}; fields of {', '.join(EXPORTS)} can be renamed")
    if log_to is not None:
        from batchtune.report.export.trackers import log_to as log

        files = {"report.md": FORMATS["markdown"](result), "report.html": FORMATS["html"](result)}
        logged = log(log_to, result, files)
        line = "logged {logged} of {trials} trials to {where}".format_map(logged)
        session.deliver_text(json.dumps(logged) if session.json else line)
    elif name in EXPORTS:
        session.deliver_text(EXPORTS[name].text(result, set_ or ()), exact=True)
        session.notes(EXPORTS[name].said_beside(result))
    elif name == "html" and session.output is None and sys.stdout.isatty():
        raise UsageError("--format html is a page of some megabytes: add --output report.html")
    elif name in FORMATS:
        session.deliver_text(FORMATS[name](result), exact=True)
    else:
        session.deliver_page(result)


@app.command(short_help="Describe this machine, to paste into an issue.")
@with_session
def env(
    session: Session,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0, mps, …")] = "auto",
) -> None:
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
    session: Session,
    which: Annotated[Schema, typer.Argument(metavar="config|result", help="Of which document.")],
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
    try:
        code: Any = app(standalone_mode=False)
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
    """Adds to what Typer says of an unknown word the one that was meant."""
    message = str(getattr(error, "message", "")).replace("Value error, ", "")
    given, *known = re.findall(r"'([^']*)'", message) or [""]
    near = difflib.get_close_matches(given, known, n=1)
    vars(error)["message"] = f"{message} Did you mean '{near[0]}'?" if near else message


def _run_folders() -> Path:
    from batchtune.run_folder import ROOT

    return ROOT
