"""Words with a fixed set of values, which documents, configurations and messages share."""

from __future__ import annotations

from typing import Literal

Precision = Literal["bf16", "fp16", "fp32", "tf32"]
Goal = Literal["minimize", "maximize"]  # of the metric
Kind = Literal["time_to_target", "energy_to_target", "best_metric"]  # of the objective
Purpose = Literal["probe", "tune", "inference"]  # of a child: what the task is to do in it
Outcome = Literal["fit", "oom", "kernel_limit", "crash", "timeout", "user_error"]  # of an attempt
