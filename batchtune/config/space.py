"""What a study searches: batch sizes, learning rates, clipping, and arguments of the optimizer."""

from __future__ import annotations

import difflib
import keyword
import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from batchtune.config.fields import Count, Finite, Positive, Section
from batchtune.document import GradientClipping

_SEARCHED = {"learning_rate", "batch_size", "precision", "gradient_clipping"}
_NOT_EXTRA = {"model", "lr", *_SEARCHED}
_MISSPELLED = 0.9  # difflib's ratio of two words of which one is meant by the other


class BatchSize(Section):
    """Which batch sizes are searched; beyond what fits, by gradient accumulation; the baseline's is measured anyway."""

    unit: Literal["samples", "tokens"] = Field(
        default="samples",
        description="tokens: runs batch samples of similar length (sample_length), all but the baseline's.",
    )
    min: Count = Field(default=1, description="Smallest global batch size that is searched.")
    max: Count | Literal["auto"] = Field(default="auto", description="Largest; auto: from the probe and the data set.")
    multiple_of: Count | Literal["auto"] = Field(default="auto", description="Only multiples of this; auto: of 1.")
    global_: Count | None = Field(
        default=None,
        alias="global",
        description="Keep this global batch size; micro-batch and accumulation are chosen.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        searched = {"min": self.min != 1, "max": self.max != "auto", "multiple_of": self.multiple_of != "auto"}
        names = ", ".join(name for name, is_set in searched.items() if is_set)
        if self.global_ is not None and names:
            raise ValueError(
                f"global {self.global_} fixes the batch size, so there is no {names} of it; remove one side"
            )
        exact = "multiple_of" if searched["multiple_of"] else "global" if self.global_ is not None else ""
        if self.unit == "tokens" and exact:
            raise ValueError(f"unit tokens: batches have so many tokens in the mean, so there is no {exact}; remove it")
        if self.max != "auto":
            if self.min > self.max:
                raise ValueError(f"min {self.min} is greater than max {self.max}; swap them or raise max")
            if self.multiple_of != "auto" and -(-self.min // self.multiple_of) * self.multiple_of > self.max:
                between = f"from min {self.min} to max {self.max}" if self.min > 1 else f"within max {self.max}"
                raise ValueError(f"no multiple of multiple_of {self.multiple_of} is {between}")
        return self


class LearningRate(Section):
    """Which learning rates are searched, on a logarithmic scale; a bound left out gives way to the baseline's.

    The baseline is measured wherever it is.
    """

    min: Positive = Field(default=1e-5, description="Smallest that is searched.")
    max: Positive = Field(default=1.0, description="Largest that is searched.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min:g} is greater than max {self.max:g}; swap them or raise max")
        return self


class Parameter(Section):
    """What is searched: a range of floats, or choices."""

    min: Finite | None = Field(default=None, description="The range's lower end; with max.")
    max: Finite | None = Field(default=None, description="The range's upper end; with min.")
    log: bool = Field(default=False, description="Search the range on a logarithmic scale.")
    choices: Annotated[list[bool | int | float | str], Field(min_length=1)] | None = Field(
        default=None, description="The values to choose from, instead of a range."
    )

    @model_validator(mode="after")
    def _range_or_choices(self) -> Self:
        if self.choices is not None:
            if self.min is not None or self.max is not None or self.log:
                raise ValueError("has choices and a range; keep one of them")
            if any(isinstance(choice, float) and not math.isfinite(choice) for choice in self.choices):
                raise ValueError("choices are finite numbers, words or booleans")
            if len({repr(choice) for choice in self.choices}) < len(self.choices):
                raise ValueError(f"{', '.join(map(str, self.choices))}: each choice once")
            return self
        if self.min is None or self.max is None:
            raise ValueError("should have min and max, or choices, for example {min: 1e-4, max: 0.1, log: true}")
        if self.min >= self.max:
            raise ValueError(f"min {self.min:g} is not less than max {self.max:g}; swap them or raise max")
        if self.log and self.min <= 0:
            raise ValueError(f"min {self.min:g} has no logarithm; raise it above 0 or leave out log")
        return self


CLIPS_NOTHING = (
    "a range has no place for what you run today, which clips nothing; write choices with a 0 in them, "
    "such as {choices: [0, 0.5, 1.0, 5.0]}, or baseline: {gradient_clipping: 1.0}"
)


class Clipping(Section):
    """How gradients are clipped before the optimizer's step: by norm or by value, a number or what to search."""

    norm: Positive | Parameter | None = Field(default=None, description="The largest norm of all gradients together.")
    value: Positive | Parameter | None = Field(default=None, description="The largest absolute value of each.")

    @field_validator("norm", "value")
    @classmethod
    def _can_be_searched(cls, given: float | Parameter | None) -> float | Parameter | None:
        if isinstance(given, Parameter):
            if any(isinstance(each, bool | str) or each < 0 for each in given.choices or []):
                raise ValueError("choices are numbers from 0 (none) up")
            if given.min is not None and given.min <= 0:
                raise ValueError(f"min {given.min:g} clips everything away; raise it")
        return given

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.norm is None) == (self.value is None):
            raise ValueError("should have either norm or value, for example {norm: 1.0}")
        return self

    @property
    def kind(self) -> str:
        """Which of the two it is."""
        return "value" if self.norm is None else "norm"

    @property
    def given(self) -> float | Parameter:
        """The number, or what is searched; of choices and of what is run today, 0 is none."""
        found = self.value if self.norm is None else self.norm
        assert found is not None  # noqa: S101 - checked above
        return found

    @property
    def searched(self) -> Parameter | None:
        """What is searched; None: it is one number."""
        return self.given if isinstance(self.given, Parameter) else None

    @property
    def fixed(self) -> GradientClipping | None:
        """The clipping of every run; None: it is searched."""
        return None if isinstance(self.given, Parameter) else self.of(self.given)

    def of(self, number: float) -> GradientClipping:
        """The clipping that a number stands for; 0 is none."""
        return GradientClipping.model_validate({self.kind: number} if number else {})


def _argument_name(value: str) -> str:
    if not value.isidentifier() or keyword.iskeyword(value):
        raise ValueError(f"{value!r} cannot name an argument of build_optimizer")
    if value in _NOT_EXTRA:
        raise ValueError(f"{value!r} is searched already, or is not build_optimizer's to choose")
    if meant := meant_instead_of(value):
        raise ValueError(f"{value!r} is too much like {meant!r}, which is searched already")
    return value


def meant_instead_of(argument: str) -> str | None:
    """What somebody who writes this under `space` has most likely misspelled; None where it is a name of its own."""
    near = difflib.get_close_matches(argument, _SEARCHED, n=1, cutoff=_MISSPELLED)
    return near[0] if near and not argument.startswith(near[0]) else None


ArgumentName = Annotated[str, AfterValidator(_argument_name)]
