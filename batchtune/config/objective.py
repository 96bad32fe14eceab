"""The section of the configuration that says what makes one setting better than another."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from batchtune.config.checks import SOLVED
from batchtune.config.fields import Finite, Section
from batchtune.vocabulary import Goal, Kind

_RISES = re.compile(  # what people maximize, by its name
    r"acc|f1|auc|score|bleu|recall|map\b|(rouge|precision|psnr|ssim|(\b|_)(dice|return|exact)|iou\b|reward)(?!.*loss)"
    r"|(\b|_)(r2|top_?[\dk]|hits?|mrr|ndcg|mcc|kappa|corr(elation)?|pearsonr?|spearmanr?)(?![a-z])"
    r"(?!.*(loss|err|dist|nll|penalty))"
)
_FALLS = re.compile(
    r"loss|error|mse|entropy|perplexity|diverg|distance|"
    r"(?<![a-z])(err|mae|mape|ppl|bpb|bpc|bits|nll|wer|cer|fid|dist|kl|ece|brier|cost)(?![a-z])"
)


def _rises(metric: str) -> bool:
    """Whether more of a metric is better, by its name."""
    return _RISES.search(metric.lower()) is not None


class Objective(Section):
    """What makes one configuration better than another."""

    kind: Kind = Field(
        default="time_to_target",
        description="What is least: training seconds or joules until the target; or the best value within budget.run.",
    )
    metric: Annotated[str, Field(min_length=1)] = Field(
        default="val_loss", description="val_loss (the mean of compute_loss), or a name that evaluate returns."
    )
    goal: Goal = Field(default="minimize", description="Of metrics that look like an accuracy it has to be written.")
    target: Finite | Literal["auto"] = Field(
        default="auto", description="auto: what the baseline reaches within budget.run."
    )
    _typed: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _goal_is_clear(self) -> Self:
        if "goal" not in self.model_fields_set and _rises(self.metric):
            raise ValueError(
                f"{self.metric!r} looks like one to maximize: write objective.goal=maximize (or minimize, or --target)"
            )
        if self.kind == "best_metric" and self.target != "auto":
            raise ValueError("best_metric has no target; leave it out, or use kind: time_to_target")
        return self

    def typed_as(self, target: str) -> Self:
        """The same, knowing that it was typed so as an option: `accuracy>0.9`."""
        found = self.model_copy()
        found._typed = target.strip()  # noqa: SLF001 - its own
        return found

    def as_typed(self, told: str) -> str:
        """A sentence that proposes a metric: with the target where one was typed, else with the goal that it needs."""
        if not (typed := SOLVED.fullmatch(self._typed)) or typed[1] != self.metric:
            needs_goal = "goal" not in self.model_fields_set
            proposed = re.search(r"objective\.metric=(\S+)", told)
            return f"{told} objective.goal=maximize" if needs_goal and proposed and _rises(proposed[1]) else told
        found = re.sub(r"objective\.metric=(\S+)", rf'--target "\1{self._typed.removeprefix(self.metric)}"', told)
        is_named, named = f"objective.metric '{self.metric}'", f"--target {self._typed}:"
        return found.replace(f"{is_named}:", named).replace(is_named, f"{named} '{self.metric}'")

    def warnings(self) -> list[str]:
        """One where nothing says that less of the metric is better."""
        if "goal" in self.model_fields_set or _FALLS.search(self.metric.lower()):
            return []
        remedy = "where more of it is better, set objective.goal=maximize (of a study that has begun, with --fresh)"
        return [f"{self.metric} is minimized, since objective.goal is not set: {remedy}"]
