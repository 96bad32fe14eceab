"""How a campaign on a GPU reads: goals met and missed, and each figure beside that of the rig for the same case."""

from __future__ import annotations

from itertools import groupby
from statistics import median
from typing import Any

Row = dict[str, Any]
EXACT = ("_bytes", "batch_size", "attempts", "ooms")  # what a rig without arithmetic tells: no times, watts or losses
MIB = 1 << 20


def goal(wanted: str, measured: str, *, met: bool | None) -> Row:
    """A verdict; None where this device cannot tell."""
    return {"goal": wanted, "measured": measured, "met": met}


def comparable(name: str, value: Any) -> bool:
    """Whether the rig's figure of this name means something."""
    return isinstance(value, int | float) and not isinstance(value, bool) and name.endswith(EXACT)


def figure(name: str, value: Any) -> str:
    """A cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(each) for each in value) or "none"
    if isinstance(value, str):
        return value.replace("|", "/").replace("\n", " ")
    if name.endswith("_bytes"):
        return f"{value / MIB:,.1f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def column(name: str) -> str:
    """A column's heading."""
    return (
        f"{name.removesuffix('_bytes')}, MiB".replace("_", " ") if name.endswith("_bytes") else name.replace("_", " ")
    )


def difference(measured: float, rig: float) -> str:
    """How far the measured figure is from the rig's, as a share of the rig's."""
    if measured == rig:
        return "="
    return f"{measured / rig - 1:+.2%}" if rig else "new"


def table(rows: list[Row], rig: dict[str, Row]) -> list[str]:
    """Rows with the same figures, in one table; the rig's figure and the difference stand in the same cell."""
    names = [name for name in rows[0] if name != "case"]
    lines = [f"| case | {' | '.join(map(column, names))} |", f"|---|{'---:|' * len(names)}"]
    for row in rows:
        theirs = rig.get(row["case"], {})
        cells = [figure("case", row["case"])]
        for name in names:
            text = figure(name, row[name])
            if comparable(name, row[name]) and comparable(name, theirs.get(name)):
                text += f" (rig {figure(name, theirs[name])}, {difference(row[name], theirs[name])})"
            cells.append(text)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def distance(campaign: Row, rig: Row) -> str:
    """How far the rig is from this device, over all figures that both have."""
    off, missing = [], 0
    for name, part in campaign["parts"].items():
        theirs = {row["case"]: row for row in rig["parts"].get(name, {}).get("rows", [])}
        for row in part["rows"]:
            for key, value in row.items():
                if comparable(key, value):
                    there = theirs.get(row["case"], {}).get(key)
                    missing += not there
                    off += [abs(value / there - 1)] if there else []
    if not off:
        return "No figure of the rig is there for these cases."
    near = sum(each <= 0.01 for each in off)
    return (
        f"Rig against this device, {len(off)} figures: {off.count(0.0)} the same, {near} within 1 %, median "
        f"{median(off):.2%}, worst {max(off):.1%} off; {missing} have none of the rig's beside them."
    )


def summary(campaign: Row, titles: dict[str, str]) -> str:
    """A line for each part and each of its goals."""
    lines = []
    for name, title in titles.items():
        part = campaign["parts"].get(name)
        if part is None:
            lines.append(f"- **{title}** (`{name}`): not done")
            continue
        told = f"; {figure('error', part['error'])}" if "error" in part else ""
        lines.append(f"- **{title}** (`{name}`): {part['state']} in {part['seconds']:.0f} s{told}")
        for each in part["goals"]:
            verdict = {True: "met", False: "**missed**", None: "cannot be told here"}[each["met"]]
            lines.append(f"  - {verdict}: {each['goal']}: {figure('measured', each['measured'])}")
    return "\n".join(lines)


def markdown(campaign: Row, rig: Row, titles: dict[str, str]) -> str:
    """The whole report."""
    facts = " · ".join(f"{name} {value}" for name, value in campaign["machine"].items() if name != "device")
    lines = [f"# batchtune on {campaign['machine']['device']}", "", f"{campaign['began']} · {facts}"]
    lines += ["", f"`{campaign['command']}`", "", summary(campaign, titles), "", distance(campaign, rig)]
    lines += ["", "In brackets: the same figure on the rig, and by how much the measured one differs from it."]
    for name, title in titles.items():
        part = campaign["parts"].get(name, {})
        if not part.get("rows"):
            continue
        theirs = {row["case"]: row for row in rig["parts"].get(name, {}).get("rows", [])}
        lines += ["", f"## {title}"]
        for _, same in groupby(part["rows"], key=list):  # rows of the same figures
            lines += ["", *table(list(same), theirs)]
    return "\n".join(lines)
