"""Whether the kernel's out-of-memory killer was at work: its counters, before and after a process died."""

from __future__ import annotations

import re
from pathlib import Path


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed for want of memory: in our cgroup, or else on the whole host.

    Args:
        root: where `proc` and `sys` are.

    Returns:
        A count that only grows; None where the system keeps none.
    """
    for file in _counters(root):
        try:
            text = file.read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        if found := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return int(found[1])
    return None


def _counters(root: Path) -> list[Path]:
    """The nearest counter first: version 2 of cgroups, version 1, the host."""
    try:
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    own = {names: path.lstrip("/") for names, path in re.findall(r"^\d+:([^:]*):(.*)$", text, re.MULTILINE)}
    groups = root / "sys/fs/cgroup"
    return [
        groups / own.get("", "") / "memory.events",
        groups / "memory.events",  # a container may see its own group as the root
        groups / "memory" / own.get("memory", "") / "memory.oom_control",
        groups / "memory" / "memory.oom_control",
        root / "proc/vmstat",
    ]


def describe_kill(before: int | None, after: int | None) -> str:
    """Why a process ended by SIGKILL that we did not send, as far as the counts around its life tell."""
    if before is None or after is None:
        return "killed by SIGKILL from outside, most likely because the host ran out of memory"
    if after > before:
        return "killed by the host's out-of-memory killer: the host's memory ran out, not the device's"
    return "killed by SIGKILL from outside, and not by the host's out-of-memory killer, which counted no victim"
