"""The command line: parse, call, print. What a command does stands in the package of its name."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from batchtune.console import Session, with_session
from batchtune.errors import RunInterrupted, UsageError
from batchtune.version import __version__

app = typer.Typer(
    name="batchtune",
    help="Finds the batch size, learning rate and precision that train a PyTorch model to its goal soonest.",
    no_args_is_help=True,
    rich_markup_mode=None,  # Typer's help in boxes takes as long to load as all the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Precision(enum.StrEnum):
    """Values of --precision."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    tf32 = "tf32"
    all = "all"


class Strategy(enum.StrEnum):
    """Values of --strategy."""

    ddp = "ddp"
    fsdp = "fsdp"


class Format(enum.StrEnum):
    """Values of --format."""

    table = "table"
    json = "json"
    markdown = "markdown"
    html = "html"
    csv = "csv"
    hf = "hf"
    lightning = "lightning"
    deepspeed = "deepspeed"
    env = "env"


class Tracker(enum.StrEnum):
    """Values of --log-to."""

    mlflow = "mlflow"
    tensorboard = "tensorboard"
    wandb = "wandb"


class Executor(enum.StrEnum):
    """Values of --executor."""

    local = "local"
    ray = "ray"


class Origin(enum.StrEnum):
    """Values of --from."""

    pytorch = "pytorch"
    lightning = "lightning"
    transformers = "transformers"


_MADE_BY = {Origin.lightning: ":LitModel", Origin.transformers: ":make_trainer"}  # in the template's model.py


class Schema(enum.StrEnum):
    """What `schema` can print."""

    config = "config"
    result = "result"


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        sys.stdout.write(f"batchtune {__version__}\n")
        raise typer.Exit


@app.command(short_help="Write a commented model.py and config.yaml.")
@with_session
def init(
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; made if missing.")] = Path(),
    origin: Annotated[Origin, typer.Option("--from", help="The library that model.py trains with.")] = Origin.pytorch,
) -> None:
    """Write a commented model.py and config.yaml that work as they are, and the schema that editors check it by.

    Examples:
      batchtune init mymodel
      batchtune init mymodel --from lightning
    """
    from batchtune.config.schema import config_schema

    templates = Path(__file__).parent / "templates"
    model = templates / origin.value / "model.py" if origin in _MADE_BY else templates / "model.py"
    config = (templates / "config.yaml").read_text(encoding="utf-8")
    texts = {
        "model.py": model.read_text(encoding="utf-8"),
        "config.yaml": config.replace("task: model.py", f"task: model.py{_MADE_BY.get(origin, '')}", 1),
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
@with_session
def probe(
    session: Session,
    task: Annotated[str, typer.Argument(metavar="TASK", help="model.py, path.py:attribute or pkg.module:attribute.")],
    precision: Annotated[
        Precision, typer.Option(envvar="BATCHTUNE_PRECISION", help="auto: what the device does well; all: each.")
    ] = Precision.auto,
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
    max_: Annotated[
        int | None,
        typer.Option("--max", envvar="BATCHTUNE_BATCH_SIZE_MAX", help="Largest micro-batch size; never exceeded."),
    ] = None,
    multiple_of: Annotated[
        int, typer.Option(envvar="BATCHTUNE_BATCH_SIZE_MULTIPLE_OF", help="Try multiples of this only.")
    ] = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps of one attempt.")] = 3,
    device: Annotated[str, typer.Option(envvar="BATCHTUNE_DEVICE", help="auto, cpu, cuda:0, mps, …")] = "auto",
    tolerance: Annotated[
        float, typer.Option(help="How far apart largest fit and smallest failure may be; 0 is exact.")
    ] = 0.01,
    timeout: Annotated[str, typer.Option(help="After so long without a sign of life an attempt hangs.")] = "120s",
    verify_steps: Annotated[int, typer.Option(help="Steps of the final check in a fresh process.")] = 20,
    no_oom: Annotated[bool, typer.Option("--no-oom", help="Try only what is predicted to fit even at worst.")] = False,
    no_throughput: Annotated[bool, typer.Option("--no-throughput", help="Do not time steps and loader.")] = False,
    accumulation: Annotated[int, typer.Option(metavar="N", help="Micro-batches of one optimizer step.")] = 1,
    nproc_per_node: Annotated[
        int, typer.Option(metavar="N", help="Ranks that train as one, each on its device; sizes are of each rank.")
    ] = 1,
    strategy: Annotated[Strategy, typer.Option(help="How several ranks share the work.")] = Strategy.ddp,
) -> None:
    """Find the largest batch that really trains in the device's memory, and how fast each size trains.

    Examples:
      batchtune probe model.py
      batchtune probe model.py --memory-limit 20GiB --precision bf16
      batchtune probe train.py:make_trainer --no-oom --json -o probe.json
    """
    import batchtune
    from batchtune.processes.ranks.torchrun import rank_of_this_process

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
            nproc_per_node=nproc_per_node,
            strategy=strategy.value,
            observer=observer,
            run_folders=_run_folders(),
        )
    if rank_of_this_process() == 0:
        session.deliver(result)


@app.command(short_help="Calculate which batch fits on which GPU, without one.")
@with_session
def estimate(
    session: Session,
    task: Annotated[str, typer.Argument(metavar="TASK", help="model.py, path.py:attribute or pkg.module:attribute.")],
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", metavar="NAME", help="A GPU, e.g. A100-80GB; repeatable; default: all.")
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", envvar="BATCHTUNE_MEMORY_LIMIT", help="Bytes that may be reserved, e.g. 24GiB."),
    ] = None,
    precision: Annotated[
        Precision, typer.Option(envvar="BATCHTUNE_PRECISION", help="auto: what the device does well; all: each.")
    ] = Precision.auto,
    accumulation: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 1,
    strategy: Annotated[Strategy, typer.Option(help="How several GPUs share the work.")] = Strategy.ddp,
    world_size: Annotated[int, typer.Option(metavar="N", help="Data-parallel ranks; the answer is for each.")] = 1,
) -> None:
    """Calculate which batch fits on which GPU, with no GPU at hand.

    Examples:
      batchtune estimate model.py
      batchtune estimate model.py --gpu A100-80GB --gpu 4090 --precision bf16
    """
    import batchtune

    with session.observer() as observer:
        result = batchtune.estimate(
            task,
            gpus=gpu or "all",
            precision=precision.value,
            memory_limit=memory_limit,
            accumulation_steps=accumulation,
            strategy=strategy.value,
            world_size=world_size,
            observer=observer,
        )
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
    import batchtune
    from batchtune.config.load import load_config

    given = {"workers": workers, "storage": storage, "executor": executor, "ray.address": ray_address}
    extra = [f"{key}={value if key == 'workers' else json.dumps(value)}" for key, value in given.items() if value]
    loaded = load_config(config, [*(overrides or []), *extra])
    with session.observer(loaded.budget.total) as observer:
        if dry_run:
            facts = batchtune.check(loaded, observer=observer)
        else:
            result = batchtune.tune(loaded, fresh=fresh, observer=observer, run_folders=_run_folders())
    if dry_run:
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
    ] = Format.table,
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
    import batchtune
    from batchtune.report.export.trainers import EXPORTS
    from batchtune.report.formats import FORMATS
    from batchtune.run_folder import find_run, is_behind

    found = find_run(run, _run_folders())
    result = batchtune.load_result(found)
    if is_behind(found):
        session.notes(["the study runs, or was killed, and has more than this: the same 'batchtune tune' shows it all"])
    name = "json" if session.json else format_.value
    if log_to is not None and format_ is not Format.table:
        raise UsageError(f"--log-to {log_to.value}: not together with --format {format_.value}; give one of them")
    if set_ and name not in EXPORTS:
        raise UsageError(f"--set {set_[0]}: not with --format {name}; fields of {', '.join(EXPORTS)} can be renamed")
    if log_to is not None:
        from batchtune.report.export.trackers import log_to as log

        logged = log(log_to.value, result)
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
    import batchtune

    facts = batchtune.environment(device)
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

    found = config_schema() if which is Schema.config else result_schema()
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
        show()
        code = getattr(error, "exit_code", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _run_folders() -> Path:
    from batchtune.run_folder import ROOT

    return ROOT
