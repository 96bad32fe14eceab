"""The options of the commands, each declared once.

The command line, the functions of the same names, their documentation and the checks of what is given come from here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ParamSpec, TypeVar, get_args

from batchtune.config import checks
from batchtune.errors import BatchtuneError, UsageError

STEPS, TOLERANCE, VERIFY_STEPS, MARGIN = 3, 0.01, 20, 0.05
TIMEOUT_SECONDS = 120.0
TIMEOUT = f"{TIMEOUT_SECONDS:g}s"
TRACE_SECONDS = 60.0  # for which a probe waits, which can do without
TRACE_TIMEOUT = "3m"  # of estimate, which has nothing else to say
_BY_COMMAND: ContextVar[bool] = ContextVar("_BY_COMMAND", default=False)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Option:
    """What the command line, the documentation and the checks know of an option.

    Attributes:
        help: what it is for.
        check: of `batchtune.config.checks`; what is None where that is the default is not checked.
        flag: where it is called otherwise than its parameter.
        variable: of the environment, that gives it on the command line, too.
        unset: what the configuration takes in that variable for nothing given, in small letters.
        metavar: what stands for its value in the help.
        off: the help of the flag that switches it off, where it is on.
        is_several: it may be given again and again.
        choices: all that it may be on the command line; none: anything that passes the check.
    """

    help: str
    check: Callable[[str, Any], object]
    _: KW_ONLY
    flag: str | None = None
    variable: str | None = None
    unset: tuple[str, ...] = ()
    metavar: str | None = None
    off: str | None = None
    is_several: bool = False
    choices: tuple[str, ...] = ()


Precision = Annotated[
    str | Sequence[str],
    Option(
        "auto: what the device does well; all: each in turn.",
        checks.precisions,
        choices=checks.PRECISIONS,
        variable="BATCHTUNE_PRECISION",
    ),
]
MemoryLimit = Annotated[
    int | str | None,
    Option(
        "Memory that may be reserved, e.g. 20GiB.",
        checks.memory,
        variable="BATCHTUNE_MEMORY_LIMIT",
        unset=("off", "no", "none", "false"),
        metavar="SIZE",
    ),
]
Margin = Annotated[
    float,
    Option("Share of device memory kept free during the probe.", checks.share, variable="BATCHTUNE_MEMORY_MARGIN"),
]
Minimum = Annotated[int, Option("Smallest micro-batch size.", checks.count, variable="BATCHTUNE_BATCH_SIZE_MIN")]
Maximum = Annotated[
    int | None,
    Option(
        "Largest micro-batch size; never exceeded.", checks.count, variable="BATCHTUNE_BATCH_SIZE_MAX", unset=("auto",)
    ),
]
MultipleOf = Annotated[
    int,
    Option("Try only multiples of this.", checks.count, variable="BATCHTUNE_BATCH_SIZE_MULTIPLE_OF", unset=("auto",)),
]
Steps = Annotated[int, Option("Optimizer steps of one attempt.", checks.count)]
Device = Annotated[str, Option("auto, cpu, cuda:0, mps, …", checks.text, variable="BATCHTUNE_DEVICE")]
Tolerance = Annotated[
    float, Option("How far apart the largest fit and the smallest failure may be; 0 is exact.", checks.share)
]
Timeout = Annotated[
    str | float,
    Option(
        "Give an attempt up after so long without a sign of life, and try no size whose batch takes a third of that.",
        checks.duration,
    ),
]
TraceTimeout = Annotated[str | float, Option("Give tracing up after so long.", checks.duration)]
VerifySteps = Annotated[int, Option("Steps of the final check in a fresh process.", checks.count)]
NoOom = Annotated[bool, Option("Try only sizes that are predicted to fit even at worst.", checks.switch)]
Inference = Annotated[
    bool, Option("Find a batch to evaluate with: forward passes in eval mode, no gradients.", checks.switch)
]
Lengths = Annotated[
    str | Sequence[int | tuple[int, ...]] | None,
    Option(
        "Find the largest batch of each length of the inputs: auto, 128,256,512, or 128x64,256x128.",
        checks.lengths,
        metavar="auto|LENGTHS",
    ),
]
Throughput = Annotated[bool, Option("Time steps and loader, too.", checks.switch, off="Do not time steps and loader.")]
Accumulation = Annotated[
    int, Option("Micro-batches of one optimizer step.", checks.count, flag="--accumulation", metavar="N")
]
OwnAccumulation = Annotated[
    int | None,
    Option(
        "Micro-batches of one optimizer step; default: as your Trainer has it, or 1.",
        checks.count,
        flag="--accumulation",
        metavar="N",
    ),
]
Ranks = Annotated[
    int, Option("Ranks that train as one, each on its device; sizes are per rank.", checks.count, metavar="N")
]
WorldSize = Annotated[int, Option("Data-parallel ranks; the answer is per rank.", checks.count, metavar="N")]
Strategy = Annotated[str, Option("How several ranks share the work.", checks.strategy, choices=checks.STRATEGIES)]
Gpus = Annotated[
    str | Sequence[str],
    Option(
        "A GPU, e.g. A100-80GB, or all that are called A100; repeatable; default: all.",
        checks.one_or_several,
        flag="--gpu",
        metavar="NAME",
        is_several=True,
    ),
]

BaselineBatchSize = Annotated[int | None, Option("Batch size that you train with today.", checks.count, metavar="N")]
BaselineRate = Annotated[
    float | str | None, Option("Learning rate that you train with today.", checks.rate, metavar="RATE")
]
TotalTime = Annotated[
    str | float | None,
    Option(
        "Wall-clock time of the whole study, e.g. 10m; default: from the time of the baseline's run.", checks.duration
    ),
]
Solved = Annotated[
    str | None, Option('What counts as solved: "val_loss<0.3", "accuracy>0.9".', checks.solved, metavar="METRIC<VALUE")
]
RanksOfRuns = Annotated[
    int | None,
    Option(
        "Ranks that train each run as one, each on a device of its own; batch sizes are of all together.",
        checks.count,
        flag="--ranks",
        metavar="N",
    ),
]
StrategyOfRuns = Annotated[
    str | None,
    Option("How such ranks share the work; default: ddp.", checks.strategy, choices=checks.STRATEGIES),
]
Workers = Annotated[
    int | str | None, Option("Runs at once, each on a device of its own.", checks.workers, metavar="N|auto")
]
StorageOfRuns = Annotated[
    str | None, Option("An Optuna storage instead of the run folder's journal.", checks.text, metavar="URL")
]
Executor = Annotated[
    str | None,
    Option(
        "Where runs train: on this machine, or on a Ray cluster.",
        checks.executor,
        choices=checks.EXECUTORS,
    ),
]
RayAddress = Annotated[
    str | None, Option("A running Ray cluster, e.g. auto or ray://head:10001.", checks.text, metavar="ADDRESS")
]
WarmStart = Annotated[
    str | os.PathLike[str] | None,
    Option("An earlier study of the same task, to start from where it ended.", checks.text, metavar="RUN"),
]
SaveConfig = Annotated[
    str | os.PathLike[str] | None,
    Option("Write the YAML of this study, to keep or to go on with.", checks.text, metavar="FILE"),
]


_PLAIN = Option("", checks.text)
_ARGUMENTS: dict[str, str] = {}
"""What flags are called as arguments of any function; errors may name those of another than was called."""


def options_of(function: Callable[..., object]) -> dict[str, Option]:
    """The options among a function's parameters, by their names: those annotated with one of the above."""
    parameters = inspect.signature(function).parameters.values()
    found = {each.name: get_args(globals().get(str(each.annotation).removeprefix("options."))) for each in parameters}
    return {name: given[1] for name, given in found.items() if given}


def flag_of(name: str, option: Option) -> str:
    """What an option is called on the command line."""
    return option.flag or f"--{name.replace('_', '-')}"


@contextlib.contextmanager
def asked_by_command() -> Iterator[None]:
    """Within it, functions of the package work for the command line: their errors name flags."""
    token = _BY_COMMAND.set(True)
    try:
        yield
    finally:
        _BY_COMMAND.reset(token)


@contextlib.contextmanager
def asked_by_call(function: Callable[..., object]) -> Iterator[None]:
    """Within it, errors name the arguments of a function of the package, unless the command line has called it."""
    try:
        yield
    except BatchtuneError as error:
        if not _BY_COMMAND.get():
            error.say_arguments(_ARGUMENTS | _arguments_of(function))
        raise


def _arguments_of(function: Callable[..., object]) -> dict[str, str]:
    """What the arguments of a function are called, by their flags; a switch with its value."""
    options, parameters = options_of(function), inspect.signature(function).parameters.values()
    flags = {each: flag_of(each.name, options.get(each.name, _PLAIN)) for each in parameters}
    return {flag: f"{each.name}=True" if each.default is False else each.name for each, flag in flags.items()}


def check_options(function: Callable[..., object], given: dict[str, Any]) -> None:
    """Puts in the place of what is given for options of a function what they are used as.

    Raises:
        UsageError: one cannot be used as given.
    """
    parameters = inspect.signature(function).parameters
    for name, option in options_of(function).items():
        if name in given and (given[name] is not None or parameters[name].default is not None):
            given[name] = option.check(flag_of(name, option), given[name])
    for name, check in (("observer", checks.observer), ("fresh", checks.switch)):  # of functions alone
        if given.get(name) is not None:
            check(f"--{name}", given[name])
    least, most = given.get("min"), given.get("max")
    if least is not None and most is not None and least > most:
        raise UsageError(f"--min {least} is greater than --max {most}; swap them or raise --max")
    ranks = next((name for name in ("nproc_per_node", "world_size") if given.get(name) == 1), None)
    if ranks is not None and given["strategy"] != "ddp":
        from batchtune.config.ranks import TorchrunEnv, nothing_to_share  # takes long to load

        if TorchrunEnv.from_environment() is None:  # which starts several by itself
            add = f"{flag_of(ranks, options_of(function)[ranks])} 2"
            raise UsageError(f"--{nothing_to_share(given['strategy'], add=add)}")


def with_variables(function: Callable[..., object], given: dict[str, object]) -> dict[str, object]:
    """What a command line gives for a function; options of which it says nothing are as their variables have them.

    Those are read as the configuration reads them, so that one environment is for all commands.

    Raises:
        UsageError: a variable cannot be used as it is.
    """
    parameters, options = inspect.signature(function).parameters, options_of(function)
    silent = [name for name, option in options.items() if option.variable and given[name] is None]
    found = {name: _of_variable(options[name]) for name in silent}
    return given | {name: parameters[name].default if value is None else value for name, value in found.items()}


def _of_variable(option: Option) -> object:
    """What an option's variable says; None where that is nothing."""
    from batchtune.config.yaml_values import MalformedYamlError, parse_value  # what reads YAML takes long to load

    name = str(option.variable)
    try:
        value = parse_value(os.environ.get(name, ""))
    except MalformedYamlError as error:
        raise UsageError(f"{name}: {error.problems[0][1]}") from None
    return None if value is None or str(value).lower() in option.unset else option.check(name, value)


def takes_options(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function check its options before it runs, and say in its documentation what they are for.

    There, they take the place of the line `(options)` among the arguments.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"batchtune.{function.__name__}(): {error}") from None
        bound.apply_defaults()
        with asked_by_call(function):
            check_options(function, bound.arguments)
            return function(*bound.args, **bound.kwargs)

    _ARGUMENTS.update(_arguments_of(function))
    helps = {name: option.help for name, option in options_of(function).items()}
    lines = "".join(f"        {name}: {text[:1].lower()}{text[1:]}\n" for name, text in helps.items())
    checked.__doc__ = (function.__doc__ or "").replace("        (options)\n", lines)
    return checked
