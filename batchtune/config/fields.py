"""Kinds of values in the configuration, and what all of its sections are."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from batchtune.config.checks import TOO_MANY_BYTES, parse_bytes, parse_seconds

_RUN_NAME = re.compile(r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(?:\.|$))[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?")


def _no_switch(value: object) -> object:
    """Python counts true as 1; nobody who writes true means a number."""
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")  # noqa: TRY004 - pydantic wants a ValueError
    return value


def _off_is_null(value: object) -> object:
    """`storage: off` is how people spell that there is none."""
    return None if value is False or (isinstance(value, str) and value in {"off", "no", "none"}) else value


def is_run_name(value: str) -> bool:
    """Whether every system takes this for the name of a folder within another; Windows takes some for devices."""
    return _RUN_NAME.fullmatch(value) is not None


def _run_name(value: str) -> str:
    if value and not is_run_name(value):
        raise ValueError(f"{value[:110]!r} cannot name a run folder; use up to 100 letters, digits, '.', '_' and '-'")
    return value


def distinct(words: str) -> AfterValidator:
    """A check that no value of a list stands in it twice; `words` say so, with the values in place of `{}`."""

    def check(value: list[str] | list[bool]) -> list[str] | list[bool]:
        if len(set(value)) < len(value):
            raise ValueError(words.format(", ".join(map(str, value))))
        return value

    return AfterValidator(check)


_SECONDS_SCHEMA = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "examples": ["90s", "10m"]}]}
_BYTES_SCHEMA = {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "examples": ["20GiB"]}]}
NoSwitch = BeforeValidator(_no_switch)
Off = BeforeValidator(_off_is_null)
Seconds = Annotated[
    float, Field(gt=0, allow_inf_nan=False), NoSwitch, BeforeValidator(parse_seconds), WithJsonSchema(_SECONDS_SCHEMA)
]
Bytes = Annotated[
    int, Field(gt=0, lt=TOO_MANY_BYTES), NoSwitch, BeforeValidator(parse_bytes), WithJsonSchema(_BYTES_SCHEMA)
]
RunName = Annotated[str, AfterValidator(_run_name)]
Finite = Annotated[float, Field(allow_inf_nan=False), NoSwitch]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), NoSwitch]
Count = Annotated[int, Field(ge=1, lt=2**31), NoSwitch]


class Section(BaseModel):
    """A part of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
    )
