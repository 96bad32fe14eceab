"""What must not change under a study while it goes on."""

from __future__ import annotations

from typing import Any

from batchtune.config.schema import Config
from batchtune.task.spec import file_hash

# More of the same may be measured under these.
_FREE_TO_CHANGE = {"name", "budget", "confirm", "storage", "ray.address"}


def identity_of(config: Config) -> dict[str, Any]:
    """What must not change under a study: the task and every key that gives a measurement its meaning."""
    flat: dict[str, Any] = {"task": config.task, "the task's code": file_hash(config.task)}
    for key, value in config.model_dump(mode="json").items():
        if key == "budget":
            flat["budget.run"] = value["run"]
            continue
        if key == "space":
            flat["the arguments under space"] = sorted(value)  # one that comes or goes is a change, too
        if key not in _FREE_TO_CHANGE:
            whole = key == "gradient_clipping" or not isinstance(value, dict)  # one that comes or goes is a change
            sections = {"": value} if whole else value
            flat |= {f"{key}.{leaf}".rstrip("."): each for leaf, each in sections.items()}
    return {key: value for key, value in flat.items() if key not in _FREE_TO_CHANGE}
