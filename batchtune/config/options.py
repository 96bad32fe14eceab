"""The options of the commands, each declared once.

The command line, the functions of the same names, their documentation and the checks of what is given come from here.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, TypeVar, get_args

from batchtune.config.quantities import parse_bytes, parse_seconds
from batchtune.errors import UsageError, kind_of

PRECISIONS = ("auto", "bf16", "fp16", "fp32", "tf32", "all")
STRATEGIES = ("ddp", "fsdp")
STEPS, TOLERANCE, VERIFY_STEPS, MARGIN = 3, 0.01, 20, 0.05
TIMEOUT_SECONDS = 120.0
TIMEOUT = f"{TIMEOUT_SECONDS:g}s"
TRACE_SECONDS = 60.0
TRACE_TIMEOUT = f"{TRACE_SECONDS:g}s"
_LARGEST = 2**31 - 1  # that a result document takes as a count
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What the command line, the documentation and the checks know of an option.

    Attributes:
        help: what it is for.
        check: takes its flag and a value, and returns the value as it is used; see below.
        flag: where it is called otherwise than its parameter.
        variable: of the environment, that gives it, too.
        metavar: what stands for its value in the help.
        off: the help of the flag that switches it off, where it is on.
        is_several: it may be given again and again.
        choices: all that it may be on the command line; none: anything that passes the check.
    """

    help: str
    check: Callable[[str, Any], Any]
    flag: str | None = None
    variable: str | None = None
    metavar: str | None = None
    off: str | None = None
    is_several: bool = False
    choices: tuple[str, ...] = ()


def text(flag: str, value: Any) -> Any:  # noqa: ARG001 - the signature of a check
    """Anything; whoever uses it knows what it may be."""
    return value


def switch(flag: str, value: Any) -> bool:  # noqa: ARG001 - the signature of a check
    """Yes or no."""
    return bool(value)


def count(flag: str, value: Any) -> int:
    """A whole number from 1 up.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise UsageError(f"{flag} {value}: must be an int, not {kind_of(value)}")
    number = int(value)
    if number < 1:
        raise UsageError(f"{flag} {value}: must be at least 1")
    if number > _LARGEST:
        raise UsageError(f"{flag} {value}: must be at most {_LARGEST}")
    return number


def cap(flag: str, value: Any) -> int | None:
    """As `count`; None: there is no cap."""
    return None if value is None else count(flag, value)


def share(flag: str, value: Any) -> float:
    """At least 0 and less than 1.

    Raises:
        UsageError: it is not.
    """
    if not _is_number(value) or not 0 <= value < 1:
        raise UsageError(f"{flag} {value}: is a share: at least 0 and less than 1")
    return float(value)


def duration(flag: str, value: Any) -> float:
    """Seconds, or text such as "2m".

    Raises:
        UsageError: it is neither, or not greater than 0.
    """
    try:
        seconds: Any = parse_seconds(value)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if not _is_number(seconds) or not seconds > 0:
        raise UsageError(f"{flag} {value}: must be seconds greater than 0, or text such as 2m")
    return float(seconds)


def memory(flag: str, value: Any) -> int | None:
    """Bytes, or text such as "20GiB"; None: there is no such limit.

    Raises:
        UsageError: it is neither, or not greater than 0.
    """
    try:
        found: Any = parse_bytes(value)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if found is None:
        return None
    if not _is_number(found) or not 0 < found < math.inf:
        raise UsageError(f"{flag} {value}: must be more than 0 bytes")
    return int(found)


def precisions(flag: str, value: Any) -> tuple[str, ...]:
    """Names, of which `all` stands alone.

    Raises:
        UsageError: an unknown one, or none.
    """
    names = one_or_several(flag, value)
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown:
        raise UsageError(f"{flag} {unknown[0]}: unknown; use {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")
    if not names or ("all" in names and len(names) > 1):
        raise UsageError(f"{flag} {', '.join(names) or '(none)'}: name at least one, and all alone")
    return names


def one_or_several(flag: str, value: Any) -> tuple[str, ...]:  # noqa: ARG001 - the signature of a check
    """Texts, of which one may stand for itself."""
    return (str(value),) if isinstance(value, str) else tuple(value)


def strategy(flag: str, value: Any) -> str:
    """How ranks share the work.

    Raises:
        UsageError: in no such way.
    """
    if value not in STRATEGIES:
        raise UsageError(f"{flag} {value}: unknown; use {' or '.join(STRATEGIES)}")
    return str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


Precision = Annotated[
    str | Sequence[str],
    Option(
        help="auto: what the device does well; all: each.",
        check=precisions,
        choices=PRECISIONS,
        variable="BATCHTUNE_PRECISION",
    ),
]
MemoryLimit = Annotated[
    int | str | None,
    Option(
        help="Bytes that may be reserved, e.g. 20GiB.",
        check=memory,
        variable="BATCHTUNE_MEMORY_LIMIT",
        metavar="SIZE",
    ),
]
Margin = Annotated[
    float,
    Option(help="Share of device memory kept free during the probe.", check=share, variable="BATCHTUNE_MEMORY_MARGIN"),
]
Minimum = Annotated[int, Option(help="Smallest micro-batch size.", check=count, variable="BATCHTUNE_BATCH_SIZE_MIN")]
Maximum = Annotated[
    int | None,
    Option(help="Largest micro-batch size; never exceeded.", check=cap, variable="BATCHTUNE_BATCH_SIZE_MAX"),
]
MultipleOf = Annotated[
    int, Option(help="Try multiples of this only.", check=count, variable="BATCHTUNE_BATCH_SIZE_MULTIPLE_OF")
]
Steps = Annotated[int, Option(help="Optimizer steps of one attempt.", check=count)]
Device = Annotated[str, Option(help="auto, cpu, cuda:0, mps, …", check=text, variable="BATCHTUNE_DEVICE")]
Tolerance = Annotated[
    float, Option(help="How far apart largest fit and smallest failure may be; 0 is exact.", check=share)
]
Timeout = Annotated[str | float, Option(help="After so long without a sign of life an attempt hangs.", check=duration)]
TraceTimeout = Annotated[str | float, Option(help="After so long tracing is given up.", check=duration)]
VerifySteps = Annotated[int, Option(help="Steps of the final check in a fresh process.", check=count)]
NoOom = Annotated[bool, Option(help="Try only what is predicted to fit even at worst.", check=switch)]
Inference = Annotated[
    bool, Option(help="Of forward passes in eval mode, without gradients: a batch to evaluate with.", check=switch)
]
Throughput = Annotated[
    bool, Option(help="Time steps and loader, too.", check=switch, off="Do not time steps and loader.")
]
Accumulation = Annotated[
    int, Option(help="Micro-batches of one optimizer step.", check=count, flag="--accumulation", metavar="N")
]
OwnAccumulation = Annotated[
    int | None,
    Option(
        help="Micro-batches of one optimizer step; default: as your Trainer has it, or 1.",
        check=cap,
        flag="--accumulation",
        metavar="N",
    ),
]
Ranks = Annotated[
    int,
    Option(help="Ranks that train as one, each on its device; sizes are of each rank.", check=count, metavar="N"),
]
WorldSize = Annotated[int, Option(help="Data-parallel ranks; the answer is for each.", check=count, metavar="N")]
Strategy = Annotated[str, Option(help="How several ranks share the work.", check=strategy, choices=STRATEGIES)]
Gpus = Annotated[
    str | Sequence[str],
    Option(
        help="A GPU, e.g. A100-80GB; repeatable; default: all.",
        check=one_or_several,
        flag="--gpu",
        metavar="NAME",
        is_several=True,
    ),
]


def options_of(function: Callable[..., Any]) -> dict[str, Option]:
    """The options among a function's parameters, by their names: those annotated with one of the above."""
    parameters = inspect.signature(function).parameters.values()
    found = {each.name: get_args(globals().get(str(each.annotation))) for each in parameters}
    return {name: given[1] for name, given in found.items() if given}


def flag_of(name: str, option: Option) -> str:
    """What an option is called on the command line."""
    return option.flag or f"--{name.replace('_', '-')}"


def takes_options(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function check its options before it runs, and say in its documentation what they are for.

    There, they take the place of the line `(options)` among the arguments.
    """
    options, signature = options_of(function), inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, option in options.items():
            bound.arguments[name] = option.check(flag_of(name, option), bound.arguments[name])
        _require_order(bound.arguments)
        return function(*bound.args, **bound.kwargs)

    lines = "".join(f"        {name}: {option.help[:1].lower()}{option.help[1:]}\n" for name, option in options.items())
    checked.__doc__ = (function.__doc__ or "").replace("        (options)\n", lines)
    return checked


def _require_order(given: Mapping[str, Any]) -> None:
    least, most = given.get("min"), given.get("max")
    if least is not None and most is not None and least > most:
        raise UsageError(f"--min {least} is greater than --max {most}; swap them or raise --max")
