"""Result documents of every kind and state, made by hand, and one in which every text means harm."""

import json
from math import log2, log10

from batchtune.result import Result

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<b>%{x}<a href=//evil>"
FREE_TEXT = {"name", "device", "torch", "path", "sha256", "message", "reason", "metric", "created_at", "precision"}
FREE_TEXT |= {"batch_sizes_reason", "learning_rate_reason", "micro_batch_reason"}
LAW = {"alpha_seconds": 0.004, "beta_seconds_per_sample": 0.0005, "saturation_batch_size": 8.0, "error_share": 0.03}


def step_seconds(batch_size):
    return LAW["alpha_seconds"] + LAW["beta_seconds_per_sample"] * batch_size


def attempt(batch_size, outcome="fit", **more):
    if outcome != "fit":
        return {"batch_size": batch_size, "outcome": outcome, "seconds": 0.2} | more
    measured = {"peak_reserved_bytes": 200_000_000 + 8_000_000 * batch_size, "step_seconds": step_seconds(batch_size)}
    return {"batch_size": batch_size, "outcome": outcome, "steps": 3, "seconds": 0.4} | measured | more


def point(batch_size, *, sensors):
    seen = {
        "gpu_utilization": 1 - 8 / (batch_size + 12),
        "memory_controller_utilization": 0.4,
        "power_watts": 300.0 + batch_size,
        "temperature_celsius": 55.0 + batch_size / 20,
        "joules_per_sample": 0.2 + 1 / batch_size,
    }
    speed = batch_size / step_seconds(batch_size)
    measured = {"batch_size": batch_size, "samples_per_second": speed, "step_seconds": step_seconds(batch_size)}
    return measured | (seen if sensors else {})


def probed(precision="bf16", *, sensors=True):
    return {
        "precision": precision,
        "max_batch_size": 176,
        "first_failing_batch_size": 177,
        "limited_by": "memory",
        "memory_limit_bytes": 1_650_000_000,
        "peak_reserved_bytes": 1_608_000_000,
        "peak_allocated_bytes": 1_500_000_000,
        "verified_in_fresh_process": True,
        "verify_steps": 20,
        "seconds": 48.0,
        "attempts": [
            attempt(1),
            attempt(64),
            attempt(256, "oom", message="tried to allocate 2 GiB"),
            attempt(176),
            attempt(177, "oom", message="tried to allocate 20 MiB"),
            attempt(176, purpose="verify"),
        ],
        "throughput": [point(size, sensors=sensors) for size in (8, 16, 32, 64, 128, 176)],
        "throughput_fit": LAW | {"batch_size_within_5_percent": 128},
    }


def trial(number, batch_size, learning_rate, seconds, **more):
    ends = seconds or 20.0
    curve = [{"seconds": ends * step / 10, "samples": 9 * step, "value": 5.0 - 0.26 * step} for step in range(11)]
    return {
        "number": number,
        "state": "complete" if seconds else "pruned",
        "outcome": "reached" if seconds else "pruned",
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "precision": "bf16",
        "seed": number,
        "time_to_target_seconds": seconds,
        "training_seconds": ends,
        "value": 2.4,
        "curve": curve,
    } | more


def choice(batch_size, learning_rate, seconds, reason, **more):
    return {
        "micro_batch_size": batch_size,
        "global_batch_size": batch_size,
        "learning_rate": learning_rate,
        "precision": "bf16",
        "time_to_target_seconds": {"median": seconds, "low": seconds * 0.9, "high": seconds * 1.1},
        "reason": reason,
    } | more


def predicted(fastest=9.0):
    """A landscape with its valley at batch 128 and rate 0.004, half and twice the median for a band."""
    sizes, rates = [8, 32, 128, 512], [0.0001, 0.001, 0.004, 0.03, 0.5]
    median = [
        [fastest * (1 + log2(size / 128) ** 2 / 4 + log10(rate / 0.004) ** 2) for rate in rates] for size in sizes
    ]
    return {
        "batch_sizes": sizes,
        "learning_rates": rates,
        "median_seconds": median,
        "low_seconds": [[seconds / 2 for seconds in row] for row in median],
        "high_seconds": [[seconds * 2 for seconds in row] for row in median],
        "band": 0.9,
        "runs": 7,
    }


def document(kind, **more):
    return {
        "schema": "batchtune.result/1",
        "kind": kind,
        "status": "complete",
        "name": "digits",
        "created_at": "2026-03-01T12:30:00+00:00",
        "environment": {"device": "NVIDIA H200", "device_memory_bytes": 150_000_000_000, "torch": "2.13.0"},
        "task": {"path": "model.py", "sha256": "ab" * 32},
    } | more


def tuned():
    speedup = {"median": 3.0, "low": 2.7, "high": 3.3}
    reason = "reaches the target 3 times as fast as the baseline"
    diverged = {"state": "fail", "outcome": "diverged", "message": "loss was not finite", "value": None}
    return document(
        "tune",
        probe=probed(),
        target={"metric": "val_loss", "goal": "minimize", "value": 2.41, "reason": "what the baseline reaches"},
        trials=[
            trial(0, 32, 0.001, 30.0, role="baseline"),
            trial(1, 64, 0.002, 12.0),
            trial(2, 128, 0.004, 9.0),
            trial(3, 128, 0.03, None),
            trial(4, 128, 0.5, None, **diverged),
            trial(5, 128, 0.004, 10.0, role="confirm"),
            trial(6, 8, 0.004, 110.0),
        ],
        prior={
            "batch_sizes": [8, 32, 64, 128],
            "batch_sizes_reason": "up to what fits",
            "learning_rate": 0.003,
            "learning_rate_decades": 0.5,
            "learning_rate_reason": "a third of the edge of stability",
            "range_tests": [
                {"batch_size": 32, "edge_learning_rate": 0.09, "highest_learning_rate": 1.0, "steps": 60, "seconds": 1},
                {"batch_size": 128, "highest_learning_rate": 1.0, "steps": 60, "seconds": 1.5},
            ],
            "seconds": 2.5,
        },
        landscape=predicted(),
        recommendation=choice(128, 0.004, 10.0, reason, speedup_over_baseline=speedup),
        baseline=choice(32, 0.001, 30.0, "what you run today"),
    )


def saving():
    """A study of energy in which the fastest run is not the leanest."""
    made = tuned()
    made["target"]["kind"] = "energy_to_target"
    for each, joules in zip(made["trials"], (9000.0, 4000.0, 5000.0, None, None, 3000.0, 7000.0), strict=True):
        each["energy_to_target_joules"] = joules
    gain = {"speedup_over_baseline": None, "energy_saving_over_baseline": {"median": 3.0, "low": 2.5, "high": 3.5}}
    spent = {"recommendation": (3000.0, gain), "baseline": (9000.0, {})}
    for name, (joules, more) in spent.items():
        made[name] |= {"energy_to_target_joules": {"median": joules, "low": joules, "high": joules}} | more
    return made


def estimate(gpu, gibibytes):
    return {
        "gpu": gpu,
        "memory_bytes": gibibytes * 2**30,
        "precision": "bf16",
        "max_batch_size": 12 * gibibytes,
        "safe_max_batch_size": 11 * gibibytes,
        "limited_by": "memory",
        "samples_per_second": 50.0 * gibibytes,
        "samples_per_joule": 6.0,
        "confidence": "high (±4% of memory)",
        "error_share": 0.04,
    }


def estimated(*gpus):
    rows = gpus or (("RTX 4090", 24), ("A100-80GB", 80), ("H200", 141))
    moments = ["build"] + [f"{phase} {step}" for step in (1, 2) for phase in ("forward", "backward", "optimizer")]
    detail = {
        "precision": "bf16",
        "batch_size": 12 * 141,
        "peak_allocated_bytes": 130 * 2**30,
        "parameters_bytes": 4 * 2**30,
        "gradients_bytes": 4 * 2**30,
        "optimizer_states_bytes": 8 * 2**30,
        "activations_bytes": 104 * 2**30,
        "temporaries_bytes": 10 * 2**30,
        "peak_moment": "backward 2",
        "peak_operator": "aten.mm.default",
        "holders": [
            {"module": "blocks.*.up", "line": "model.py:21", "activation_bytes": 60 * 2**30},
            {"module": "head", "activation_bytes": 30 * 2**30},
        ],
        "curve": [
            {"moment": moment, "allocated_bytes": held * 2**30}
            for moment, held in zip(moments, (4, 110, 120, 20, 118, 130, 24), strict=True)
        ],
    }
    return document("estimate", environment=None, estimates=[estimate(*row) for row in rows], details=[detail])


def poisoned(part, key=""):
    """The same document with every text of a user's, a driver's or a library's replaced by `HOSTILE`."""
    if isinstance(part, dict):
        return {name: poisoned(value, name) for name, value in part.items()}
    if isinstance(part, list):
        return [poisoned(each, key) for each in part]
    return HOSTILE if isinstance(part, str) and key in FREE_TEXT else part


def hostile():
    made = poisoned(tuned() | {"probes": [probed(), probed("fp32")]})
    made["environment"] |= {"driver": HOSTILE, "platform": HOSTILE, "cuda": HOSTILE}
    made["trials"][0]["message"] = HOSTILE
    failed = {"status": "failed", "error": {"exit_code": 3, "message": HOSTILE}}
    return made | failed | {"warnings": [HOSTILE], "batchtune_version": HOSTILE}


def hostile_estimate():
    made = poisoned(estimated())
    for row in made["estimates"]:
        row |= {"gpu": HOSTILE + row["gpu"], "confidence": HOSTILE, "notes": [HOSTILE]}
    for detail in made["details"]:
        detail |= {"peak_moment": HOSTILE, "peak_operator": HOSTILE, "peak_module": HOSTILE}
        for holder in detail["holders"]:
            holder |= {"module": HOSTILE, "line": HOSTILE}
    return made


_NOTHING_FITS = {"precision": "bf16", "memory_limit_bytes": 1000, "attempts": [attempt(1, "oom", message="no memory")]}
_FAILED = {"exit_code": 3, "message": "model.py: no build_model"}
DOCUMENTS = {
    "tune": tuned(),
    "tune of energy": saving(),
    "tune without a baseline": tuned() | {"baseline": None, "target": None},
    "probe": document("probe", probe=probed()),
    "probe without sensors": document("probe", probe=probed(sensors=False)),
    "probe at two precisions": document("probe", probe=probed(), probes=[probed(), probed("fp32")]),
    "probe where nothing fits": document(
        "probe", status="failed", error={"exit_code": 4, "message": "nothing fits"}, probe=_NOTHING_FITS
    ),
    "estimate": estimated(),
    "failed at once": document("probe", status="failed", environment=None, error=_FAILED),
    "interrupted in its probe": document("tune", status="interrupted", probe=probed(), trials=[]),
    "interrupted in its study": tuned() | {"status": "interrupted", "recommendation": None},
    "hostile": hostile(),
    "hostile estimate": hostile_estimate(),
}


def result(name, **more):
    """The result of a named document, with keys laid over it."""
    return Result.model_validate_json(json.dumps(DOCUMENTS[name] | more))
