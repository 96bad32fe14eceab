"""The metric value that a study must reach: set by the user or by the baseline's run, and whether it makes sense."""

from __future__ import annotations

from collections.abc import Sequence

from optuna import Study

from batchtune.config.schema import Config
from batchtune.document import CurvePoint, Target
from batchtune.errors import NothingFitsError, UsageError, UserCodeError
from batchtune.protocol.messages import Json
from batchtune.tune.study.history import StudyHistory
from batchtune.tune.verdict.scores import JOULES, SECONDS, cost_of
from batchtune.units import duration
from batchtune.vocabulary import FAILED, Goal, meets

LEAST_SLACK, MOST_SLACK = 0.01, 0.05  # of the improvement: another seed may not reach the last bit of it
TARGET_TIME = 0.8  # of the time of the best value: a curve that still falls is cut a little before its end
_PERCENT = 100
LEVEL_LOOKS, LEVEL_SECONDS = 10, 5.0  # before a run is said to have levelled off


class Targets:
    """The target of one study, kept as an attribute of it once it is known."""

    def __init__(self, study: Study, config: Config, history: StudyHistory) -> None:
        self._study, self._config, self._objective, self._history = study, config, config.objective, history
        self._counted = cost_of(config.objective.kind) is not None

    @property
    def current(self) -> Target:
        """The target as far as it is known."""
        wanted, diverged = self._objective, None
        if not self._counted:
            value, reason = None, "the best value within budget.run counts"
        elif wanted.target != "auto":
            value, reason = wanted.target, "set in the configuration"
        elif "target" in self._study.user_attrs:
            value, reason, *rest = self._study.user_attrs["target"]
            diverged = next(iter(rest), None)
        else:
            value, reason = None, "not known before the baseline has run"
        target = Target(metric=wanted.metric, goal=wanted.goal, kind=wanted.kind, value=value, reason=reason)
        return target.model_copy(update={"baseline_diverged_after_seconds": diverged})

    @property
    def is_automatic(self) -> bool:
        """Whether the baseline's run sets it."""
        return self._counted and self._objective.target == "auto"

    def derive(self, curve: list[CurvePoint], *, diverged: bool = False) -> None:
        """Sets the automatic target by the baseline's whole run, before that run is told to the study."""
        if not self.is_automatic or "target" in self._study.user_attrs:
            return
        if found := automatic_target(curve, self._objective.goal):
            (value, reason), seconds = found, curve[-1].seconds
            kept = (value, f"{reason}, where it diverged after {seconds:.3g} s", seconds) if diverged else found
            self._study.set_user_attr("target", kept)

    def check(self, enough: str) -> None:
        """Refuses a study in which nothing could be compared; `enough` is a budget.total that has room for more.

        Raises:
            NothingFitsError: the baseline could not be trained, or did not improve.
            UserCodeError: the metric is no number before training.
            UsageError: the target is met before training.
        """
        history, has_best = self._history, self._history.best_cost() is not None
        if "cut_off" in history.last_attributes("baseline") and not has_best:
            total = f"budget.total ({self._config.budget.total:g} s)"
            known = "reached the target, as had no other run" if self._counted else "run to its end"
            shown = "shown a target" if self.is_automatic else known
            raise NothingFitsError(
                f"{total} was used up before the baseline had {shown}; start again with budget.total={enough}, "
                "whose first run shows what is enough"
            )
        if self._counted and not has_best and not history.finished("baseline"):
            failed = [trial for trial in history.records() if trial.role == "baseline" and trial.state == "fail"]
            why = failed[-1].message if failed else "it did not run"
            what, remedy = "could not be trained", "change baseline: in the configuration"
            if history.last_outcome("baseline") == "oom":  # the last words of a library may name no memory
                what, remedy = "ran out of memory", "make baseline.batch_size smaller, or memory.limit larger"
            raise NothingFitsError(f"the baseline {what}: {why}; {remedy}")
        self.check_start()
        if not self._counted or self.current.value is not None:
            return
        if history.last_outcome("baseline") == "diverged":
            raise NothingFitsError(
                "the baseline diverged, so there is no target; lower baseline.learning_rate, or set objective.target"
            )
        trained = max(trial.training_seconds or 0.0 for trial in history.records() if trial.role == "baseline")
        text = f"the baseline did not improve {self._objective.metric} ({self._objective.goal}) in {duration(trained)}"
        remedy = "raise budget.run and budget.total, fix the baseline, or set objective.target"
        raise NothingFitsError(f"{text} of training, so there is no target; {remedy}")

    def check_start(self) -> None:
        """Refuses a metric that no run could be judged by, once runs have begun: another seed may start elsewhere.

        Raises:
            UserCodeError: the metric is no number before training.
            UsageError: the target is met before training.
        """
        curves = [trial.curve for trial in self._history.records() if trial.curve]
        metric, target = self._objective.metric, self.current
        if curves and all(point.value is None for point in curves[0]):
            raise UserCodeError(f"{metric} is NaN or infinite before training; fix evaluate() or data")
        if met := self.met_at_start():
            whose, remedy = "objective.target", "set a harder one, or check objective.goal"
            if self.is_automatic:
                whose, remedy = f"{whose}, as the baseline sets it,", "raise budget.run, or set one"
            if target.baseline_diverged_after_seconds is not None:
                remedy = "the baseline diverged: lower baseline.learning_rate, or fix evaluate() if that gives the NaN"
            met_at = f"{whose} {target.value:g} is met before training ({metric} starts at {met[0]:.4g})"
            raise UsageError(f"{met_at}; {remedy}, and start over with --fresh")

    def met_at_start(self) -> list[float]:
        """Values before training that meet the target already: then no time to it means anything."""
        target = self.current
        starts = [trial.curve[0].value for trial in self._history.records() if trial.curve]
        return [value for value in starts if value is not None and meets(value, target.value, target.goal)]

    def unmet(self, enough: str) -> str:
        """Why a study that has run to its end has nothing to recommend; `enough` is a budget.total to search in."""
        target, budget = self.current, self._config.budget
        ended = [trial for trial in self._history.records() if trial.outcome is not None]
        if ended and all(trial.outcome == "diverged" for trial in ended):
            return "every run diverged; lower learning_rate.min and max, and baseline.learning_rate"
        if not any(trial.role == "search" for trial in ended):
            used = f"probe and baseline used up budget.total ({budget.total:g} s) before anything else was tried"
            return f"{used}; start again with budget.total={enough}"
        if not self._counted or target.value is None:
            return f"{target.metric} was NaN or infinite in every run; fix evaluate() or lower learning_rate.max"
        bound = f"{'at most' if target.goal == 'minimize' else 'at least'} {target.value:g}"
        told = f"no run reached the target ({target.metric} {bound}{self._best_seen()})"
        longest = max((trial.curve[-1].seconds for trial in ended if trial.curve), default=0.0)
        if longest < budget.run and any(trial.outcome == "capped" for trial in ended):  # by budget.total
            told += f" in {duration(longest)} of training, what budget.total ({budget.total:g} s) had room for"
            return f"{told}; start again with budget.total={enough}, or set an easier objective.target"
        return f"{told} within budget.run ({budget.run:g} s); raise budget.run, or set an easier objective.target"

    def _best_seen(self) -> str:
        """How near to the target a run came."""
        points = [point for trial in self._history.records() for point in trial.curve]
        values = [point.value for point in points if point.value is not None]
        if not values:
            return ""
        best, target = (min if self._objective.goal == "minimize" else max)(values), self.current.value or 0.0
        is_percentage = self._objective.goal == "maximize" and 0 <= min(values) <= best <= 1 < target <= _PERCENT
        as_share = f", and none is above 1: is {target / _PERCENT:g} meant?" if is_percentage else ""
        return f"; the best was {best:g}{as_share}"


def automatic_target(curve: Sequence[CurvePoint], goal: Goal) -> tuple[float, str] | None:
    """The target that the baseline's own run sets: what it reached, with a little room for other seeds.

    The value held at 80 % of the time at which the run was best, but from 1 % to 5 % of the whole improvement short of
    that best. The first serves curves that still fall, the bounds those that level off or were seldom looked at.

    Returns:
        The value and the sentence why; None where the run never improved on its start.
    """
    falling = _falling(curve, goal)
    if len(falling) < 2:  # noqa: PLR2004 - a start and nothing after it
        return None
    sign, start = 1.0 if goal == "minimize" else -1.0, falling[0][1]
    best_at, best = min(falling, key=lambda point: point[1])
    if not best < start:
        return None
    early = [value for seconds, value in falling if seconds <= TARGET_TIME * best_at]
    slack = (min(early, default=best) - best) / (start - best)
    target = best + min(max(slack, LEAST_SLACK), MOST_SLACK) * (start - best)
    reached = (start - target) / (start - best)
    reason = f"{reached:.1%} of the way from {sign * start:.4g} to {sign * best:.4g}, the best that"
    return sign * target, f"{reason} the baseline reached in its budget"


def levelled_off(curve: Sequence[CurvePoint], goal: Goal) -> bool:
    """Whether a run that is to set the target has gained less in the second half of its time than a target may be off.

    That is 1 % of the whole improvement. Training as long again would hardly move the target, and every second of it is
    one less for the search. A curve that stands still and then falls again is cut off by this: budget.run keeps it.
    """
    falling = _falling(curve, goal)
    if len(falling) < LEVEL_LOOKS or falling[-1][0] < LEVEL_SECONDS:
        return False
    start, best = falling[0][1], min(value for _, value in falling)
    before = min(value for seconds, value in falling if seconds <= falling[-1][0] / 2)
    return best < start and before - best <= LEAST_SLACK * (start - best)


def _falling(curve: Sequence[CurvePoint], goal: Goal) -> list[tuple[float, float]]:
    """Seconds and values of a curve, of which a lower one is better."""
    sign = 1.0 if goal == "minimize" else -1.0
    return [(point.seconds, sign * point.value) for point in curve if point.value is not None]


def measured(curve: list[CurvePoint], outcome: str, target: Target) -> Json:
    """A trial's attributes that follow from its curve; a curve that meets the target has reached it."""
    values = [point.value for point in curve if point.value is not None]
    attributes: Json = {"training_seconds": curve[-1].seconds} if curve else {}
    if curve and curve[-1].measured_seconds is not None:
        attributes["measured_training_seconds"] = curve[-1].measured_seconds
    if values:
        attributes["best_value"] = min(values) if target.goal == "minimize" else max(values)
    for point in curve if outcome not in FAILED else []:
        if meets(point.value, target.value, target.goal):
            attributes |= {SECONDS.attribute: point.seconds, "samples_to_target": point.samples}
            if point.joules:  # less than the counter shows is no measurement
                attributes[JOULES.attribute] = point.joules
            return attributes | {"outcome": "reached"}
    return attributes | {"outcome": outcome}
