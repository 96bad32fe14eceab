"""A made-up training law with a simulated clock: what a worker would measure if training followed it exactly."""

import math
import random

from fakes import FakeTrainer

from batchtune.config.schema import Baseline, Budget, Config, Confirm
from batchtune.document import CurvePoint, Prior, ProbeResult, ThroughputFit, ThroughputPoint
from batchtune.tune.plan.space import Plan

ALPHA, BETA = 2e-3, 1e-4  # seconds
E_MIN, B_CRITICAL = 20_000, 128  # samples
BEST_RATE, BEST_BATCH = 0.02, 64
START, FLOOR = 2.0, 0.1
SIZES = (8, 16, 32, 64, 128, 256, 512)
FIXED_JOULES, SAMPLE_JOULES = 0.02, 0.01  # of a step: large batches save hardly any energy


def timed(steps):
    """Points of a mapping from batch size to seconds of a step."""
    return [
        ThroughputPoint(batch_size=size, step_seconds=seconds, samples_per_second=size / seconds)
        for size, seconds in steps.items()
    ]


def best_rate(batch_size):
    return BEST_RATE * ((1 + B_CRITICAL / BEST_BATCH) / (1 + B_CRITICAL / batch_size)) ** 0.5


def seconds_to_target(batch_size, rate, *, target=0.5, noise=0.0, seed=0):
    """Time until the loss START * exp(-progress) + FLOOR meets the target; infinite where the rate diverges."""
    off = math.log10(rate / best_rate(batch_size))
    if off > 0.8:
        return math.inf
    samples = E_MIN * (1 + batch_size / B_CRITICAL) * math.exp(1.5 * off**2)
    scale = math.log((START - FLOOR) / (target - FLOOR)) / math.log((START - FLOOR) / 0.4)
    jitter = math.exp(noise * random.Random(f"{seed}-{batch_size}-{rate}").gauss(0, 1))
    return samples * scale * jitter * (ALPHA + BETA * batch_size) / batch_size


def prior(config, sizes):
    """What is believed of the law's study where nothing was measured before it: twice the baseline's learning rate."""
    rate, reasons = 2 * config.baseline.learning_rate, ("batch_sizes_reason", "learning_rate_reason")
    return Prior(batch_sizes=sizes, learning_rate=rate, learning_rate_decades=0.7, **dict.fromkeys(reasons, "test"))


def plan(sizes=SIZES, **changes):
    """A study of the law; `changes` are keys of its configuration."""
    known = {
        "task": "model.py",
        "name": "law",
        "baseline": Baseline(batch_size=16, learning_rate=1e-3),
        "budget": Budget(run=120.0, total=3600.0, trials=30),
        "confirm": Confirm(seeds=3, top=2),
    }
    fit = ThroughputFit(alpha_seconds=ALPHA, beta_seconds_per_sample=BETA, saturation_batch_size=20.0)
    probe = ProbeResult(precision="fp32", max_batch_size=256, limited_by="memory", throughput_fit=fit, seconds=1.0)
    config = Config(**(known | changes))
    return Plan(
        config=config,
        probe=probe.model_copy(update={"throughput": timed({size: ALPHA + BETA * size for size in (8, 32, 128, 256)})}),
        prior=prior(config, sizes),
        precisions=["fp32"],
    )


class LawWorker(FakeTrainer):
    """Stands in for a child process: `train` follows the law, on a clock that takes no time.

    Energy is counted as well.
    """

    def __init__(self, noise=0.0, fail_at=(), slower=lambda arguments: 1.0):
        self.noise, self.fail_at, self.slower, self.specs = noise, set(fail_at), slower, []

    def train(self, *, timeout, on_event, **spec):
        assert timeout > spec["limit_seconds"]
        self.specs.append(spec)
        if len(self.specs) in self.fail_at:
            raise KeyboardInterrupt
        batch = spec["micro_batch_size"] * spec["accumulation_steps"]
        needed = seconds_to_target(batch, spec["learning_rate"], noise=self.noise, seed=spec["seed"])
        needed *= self.slower(spec["optimizer_arguments"])
        rate = 0.0 if math.isinf(needed) else math.log((START - FLOOR) / 0.4) / needed
        seconds = 0.0
        while True:
            value = FLOOR + (START - FLOOR) * math.exp(-rate * seconds) if rate else START * (1 + seconds)
            steps = seconds / (ALPHA + BETA * batch)
            joules = steps * (FIXED_JOULES + SAMPLE_JOULES * batch)
            point = CurvePoint(seconds=seconds, samples=int(steps * batch), value=value, joules=joules)
            go_on = on_event(point)
            if spec["target"] is not None and value <= spec["target"]:
                return {"outcome": "reached"}
            if seconds >= spec["limit_seconds"] or joules >= (spec["limit_joules"] or math.inf):
                return {"outcome": "finished"}
            if not go_on:
                return {"outcome": "pruned"}
            seconds = self._next(seconds, spec)

    def step_seconds(self, spec):
        return (ALPHA + BETA * spec.batch_size) * self.slower(spec.optimizer_arguments)

    def _next(self, seconds, spec):
        return min(spec["limit_seconds"], seconds * 1.1 + 0.02)
