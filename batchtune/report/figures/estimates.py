"""Figures of an estimate: the largest batch and the efficiency of each GPU, and memory over a training step."""

from __future__ import annotations

import itertools
import textwrap

import plotly.graph_objects as go

from batchtune.document import Document, Estimate
from batchtune.report.figures.theme import LIGHT, SERIES, axis, label, layout, padded
from batchtune.report.view.words import estimated
from batchtune.units import bytes_unit, number, size

_MOST_BARS = 24
_LONGEST_LINE = 26
_BAR_HEIGHT, _HEIGHT_OF_TWO_LINES = 26, 34


def estimates(result: Document) -> go.Figure | None:
    """The largest batch on each GPU as calculated, with the part of it that is safe drawn solid."""
    known = [row for row in result.estimates or [] if row.max_batch_size is not None]
    if not known:
        return None
    groups = _alike(sorted(known, key=lambda row: (row.memory_bytes, row.max_batch_size or 0)))
    several = len({row.precision for row in known}) > 1
    rows = [group[0] for group in groups]
    names = [_gpu(group, several=several) for group in groups]
    about = [[label(", ".join(dict.fromkeys(row.gpu for row in group))), *_facts(group)] for group in groups]
    figure = go.Figure()
    for key, words, colour, width in (
        ("max_batch_size", "expected", LIGHT["brisk"], 0.62),
        ("safe_max_batch_size", "safe, error band included", LIGHT["accent"], 0.34),
    ):
        values = [getattr(row, key) for row in rows]
        if any(value is not None for value in values):
            figure.add_bar(
                y=list(range(len(rows))),
                x=values,
                orientation="h",
                name=words,
                width=width,
                marker={"color": colour, "line": {"width": 0}},
                customdata=about,
                hovertemplate=f"%{{customdata[0]}}<br>{words}: %{{x:,}}<br>%{{customdata[1]}}, %{{customdata[2]}}"
                "<br>confidence: %{customdata[3]}<extra></extra>",
            )
    figure.update_layout(
        layout(
            "Largest batch on each GPU, estimated",
            height=130 + (_HEIGHT_OF_TWO_LINES if any("<br>" in name for name in names) else _BAR_HEIGHT) * len(rows),
            barmode="overlay",
            xaxis=axis("largest micro-batch size", rangemode="tozero", tickformat=",d", nticks=6),
            yaxis=axis("", tickmode="array", tickvals=list(range(len(rows))), ticktext=names, showgrid=False),
            showlegend=True,
        )
    )
    return figure


def _alike(rows: list[Estimate]) -> list[list[Estimate]]:
    """GPUs and precisions with one and the same answer share a bar where there are too many for a bar each."""
    if len(rows) <= _MOST_BARS:
        return [[row] for row in rows]
    groups: dict[tuple[object, ...], list[Estimate]] = {}
    for row in rows:
        answer = (row.memory_bytes, row.max_batch_size, row.safe_max_batch_size)
        groups.setdefault(answer, []).append(row)
    return list(groups.values())


def _gpu(group: list[Estimate], *, several: bool) -> str:
    """What stands beside a bar; all its GPUs are named where the pointer rests on it."""
    row = group[0]
    more = len({each.gpu for each in group}) - 1
    words = [row.gpu, *([f"+{more}"] if more else [])]
    words += ["/".join(dict.fromkeys(each.precision for each in group))] if several else []
    # two lines rather than a short first one: what tells GPUs apart is often at the end of their names
    return "<br>".join(map(label, textwrap.wrap(" ".join(words), _LONGEST_LINE, max_lines=2, placeholder="…")))


def _facts(group: list[Estimate]) -> list[str]:
    precisions = ", ".join(dict.fromkeys(row.precision for row in group))
    return [size(group[0].memory_bytes), label(precisions), label(group[0].confidence or "not stated")]


def efficiency(result: Document) -> go.Figure | None:
    """Samples per joule over samples per second, a point for each GPU; those that none beats in both are named."""
    known = [row for row in result.estimates or [] if row.samples_per_second and row.samples_per_joule]
    if not known:
        return None
    figure = go.Figure()
    precisions, best = list(dict.fromkeys(row.precision for row in known)), _unbeaten(known)
    for precision, colour in zip(precisions, itertools.cycle(SERIES)):
        rows = [row for row in known if row.precision == precision]
        figure.add_scatter(
            x=[row.samples_per_second for row in rows],
            y=[row.samples_per_joule for row in rows],
            mode="markers+text",
            name=label(precision),
            marker={"color": colour, "size": 8},
            text=[_gpu([row], several=False) if row in best else "" for row in rows],
            textposition="bottom left",
            textfont={"size": 11, "color": LIGHT["muted"]},
            cliponaxis=False,
            customdata=[
                [label(row.gpu), estimated(row, row.max_batch_size), number(row.samples_per_second)] for row in rows
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[2]} samples/s<br>%{y:.3~g} samples/J"
            "<br>largest batch %{customdata[1]}<extra></extra>",
        )
    fastest, leanest = ([getattr(row, key) for row in known] for key in ("samples_per_second", "samples_per_joule"))
    figure.update_layout(
        layout(
            "Speed and energy on each GPU, estimated (roofline at full board power)",
            height=420,
            xaxis=axis("samples per second", type="log", range=padded(min(fastest), max(fastest), 0.1), nticks=6),
            yaxis=axis("samples per joule", type="log", range=padded(min(leanest), max(leanest), 0.1), nticks=6),
            showlegend=len(precisions) > 1,
        )
    )
    return figure


def _unbeaten(rows: list[Estimate]) -> list[Estimate]:
    """Those than which no other is faster without being less lean, or leaner without being slower."""

    def figures(row: Estimate) -> tuple[float, float]:
        return row.samples_per_second or 0.0, row.samples_per_joule or 0.0

    def beats(other: Estimate, row: Estimate) -> bool:
        theirs, own = figures(other), figures(row)
        return theirs != own and all(a >= b for a, b in zip(theirs, own, strict=True))

    return [row for row in rows if not any(beats(other, row) for other in rows)]


def step(result: Document) -> go.Figure | None:
    """Allocated bytes over two training steps at the estimated batch of the first precision, from phase to phase."""
    detail = next((each for each in result.details or [] if each.curve), None)
    if detail is None:
        return None
    unit, scale = bytes_unit(detail.peak_allocated_bytes)
    values = [point.allocated_bytes / scale for point in detail.curve]
    moments = [point.moment for point in detail.curve]
    starts = [at for at, moment in enumerate(moments) if at == 0 or moment != moments[at - 1]]
    peak = values.index(max(values))
    figure = go.Figure()
    figure.add_scatter(
        x=list(range(len(values))),
        y=values,
        mode="lines",
        line={"color": LIGHT["accent"], "width": 1.5, "shape": "hv"},
        fill="tozeroy",
        fillcolor=LIGHT["tint"],
        text=[label(moment) for moment in moments],
        hovertemplate=f"%{{text}}<br>%{{y:.4~g}} {unit}<extra></extra>",
    )
    figure.add_scatter(
        x=[peak],
        y=[values[peak]],
        mode="markers",
        marker={"color": LIGHT["bad"], "size": 9},
        hovertemplate=f"peak: {size(detail.peak_allocated_bytes)} in {label(moments[peak])}<extra></extra>",
    )
    for start in starts[1:]:
        figure.add_vline(x=start, line={"color": LIGHT["rule"], "width": 1})
    figure.update_layout(
        layout(
            f"Memory over two steps at batch {detail.batch_size:,}, {label(detail.precision)}, estimated",
            xaxis=axis("", tickmode="array", tickvals=starts, ticktext=[label(moments[at]) for at in starts]),
            yaxis=axis(f"allocated, {unit}", rangemode="tozero"),
            showlegend=False,
        )
    )
    return figure
