"""How long each run of a study may train, and at which sizes: what has run before says what is not worth more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from optuna.trial import FrozenTrial

from batchtune.document import ProbeResult, Value
from batchtune.protocol.messages import RunSpec
from batchtune.tune.plan.prior import MAX_EVALUATION_BATCH
from batchtune.tune.plan.space import Plan, Space
from batchtune.tune.plan.tokens import split
from batchtune.tune.study.history import Role, StudyHistory
from batchtune.tune.study.targets import Targets
from batchtune.tune.verdict.scores import JOULES, SECONDS, WORTHLESS, cost_of

CAP_FACTOR = 1.5  # of the best run, which was lucky: one as good may well take a third more on another seed
CONFIRM_CAP_FACTOR = 2.0  # of budget.run: a fresh seed of the baseline may need longer than the first did
CONFIRM_SHARE = 0.1  # of budget.run, which a fresh seed has at least: the search's may have been a lucky one
LOST_FACTOR = 3.0  # of a contender's time: on a fresh seed it has shown by then to be so much faster, or not


class Limits:
    """Makes the run of each trial; the best time so far is what caps the others."""

    def __init__(self, plan: Plan, space: Space, history: StudyHistory, targets: Targets) -> None:
        self._plan, self._space, self._history, self._targets = plan, space, history, targets
        self._cost = cost_of(plan.config.objective.kind)

    def spec(self, params: Mapping[str, Value], role: Role, seed: int) -> RunSpec:
        """What a run of these parameters is to do, as things stand."""
        config, objective, probe = self._plan.config, self._plan.config.objective, self._plan.probe
        precision, variant, ranks = self._space.precision(params), self._space.variant(params), config.ranks.of_each
        max_micro = self._plan.max_batch_size(variant) // ranks
        too_large = self._history.out_of_memory(precision, variant)
        most = max_micro if too_large is None else max(1, min(max_micro, too_large // 2))
        of_rank = int(params["batch_size"]) // ranks
        made = split(self._plan.tokens, of_rank, min(self._plan.micro_batch_size(variant) or most, most), max_micro)
        cap = self._confirm_cap(params) if role == "confirm" else self.capped_at() if role == "search" else None
        longest = config.budget.run * (CONFIRM_CAP_FACTOR if role == "confirm" and self._cost else 1.0)
        limit = longest if cap is None or self._cost is not SECONDS else min(longest, cap)
        own = [trial.user_attrs.get("training_seconds", limit) for trial, _ in self._searched(params)]
        least = CONFIRM_SHARE * config.budget.run if role == "confirm" else 0.0
        spec = RunSpec(
            micro_batch_size=made.micro_batch_size,
            accumulation_steps=made.steps,
            learning_rate=float(params["learning_rate"]),
            precision=precision,
            seed=seed,
            metric=objective.metric,
            goal=objective.goal,
            target=None if role == "baseline" and self._targets.is_automatic else self._targets.current.value,
            limit_seconds=max(limit, least),
            expected_seconds=min([limit, *(LOST_FACTOR * seconds for seconds in own if role == "confirm")]),
            limit_joules=cap if self._cost is JOULES else None,
            evaluate_every=None if config.evaluate_every == "auto" else config.evaluate_every,
            evaluation_batch_size=min(made.at_once, _evaluated(probe) or MAX_EVALUATION_BATCH),
            optimizer_arguments=self._space.optimizer_arguments(params),
            gradient_clipping=self._space.gradient_clipping(params),
            horizon_seconds=config.budget.run,
            total_steps=self._history.total_steps(params),
            world_size=ranks,
            variant=variant,
            samples=made.samples,
            length_batches=made.length_batches,
        )
        return replace(spec, most_step_seconds=self._history.most_step_seconds(spec, probe.throughput_fit))

    def is_capped(self, spec: RunSpec, seconds: float) -> bool:
        """Whether a run that ended without the target, after so long, had less than a whole run's time."""
        given = spec.limit_seconds if spec.limit_joules is None else seconds
        return self._cost is not None and given < self._plan.config.budget.run

    def capped_at(self) -> float | None:
        """What a run of the search may cost before it is not the answer; None as long as nothing has got there."""
        best = self._history.best_cost()
        return None if best is None else CAP_FACTOR * best

    def _confirm_cap(self, params: Mapping[str, Value]) -> float | None:
        """Of a contender's own time in the search; for the baseline, of the slowest contender's on fresh seeds.

        What takes longer than the baseline did has lost for sure, and nothing sooner. The baseline is interleaved
        behind the contenders: with all of them far ahead it need not run to its end.
        """
        if params == self._space.baseline:
            best = max(self._taken("confirm", params), default=self._history.best_cost())
            return LOST_FACTOR * best if best is not None else None
        own = [cost for _, cost in self._searched(params)]
        return max([LOST_FACTOR * min(own), *self._taken("baseline")]) if own else None

    def _searched(self, params: Mapping[str, Value]) -> list[tuple[FrozenTrial, float]]:
        """Runs of these parameters in the search that reached the target, each with what it cost."""
        return [each for each in self._history.costs("search") if each[0].params == params]

    def _taken(self, role: Role, but: Mapping[str, Value] | None = None) -> list[float]:
        """What the target cost runs of a role, or what they were given without it; of some parameters none count."""
        ran = [trial for trial in self._history.records() if trial.role == role and trial.outcome not in WORTHLESS]
        others = [trial for trial in ran if trial.is_over and self._space.of(trial) != but]
        return [cost for trial in others if self._cost and (cost := self._cost.of(trial) or self._cost.spent(trial))]


def _evaluated(probe: ProbeResult) -> int | None:
    """The batch size of the evaluation in the final check of the answer, where not as many samples as asked fitted."""
    checks = [each for each in probe.attempts if each.purpose == "verify" and each.fits]
    largest = max((each.batch_size for each in checks), default=None)  # of a rank, as attempts have it
    return next((each.evaluation_batch_size for each in checks if each.batch_size == largest), None)
