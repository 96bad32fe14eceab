"""HTML that cannot be broken by what is put into it: text is escaped unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_VOID = {"meta", "link", "br"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """One element.

    Args:
        name: the element's name.
        children: `Markup` goes in as it is, None not at all, everything else as escaped text.
        attributes: `class_` stands for class and `data_sort` for data-sort; None and False leave one out.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key_ = key.rstrip("_").replace("_", "-")
        written.append(f" {key_}" if value is True else f' {key_}="{html.escape(str(value))}"')
    start = f"<{name}{''.join(written)}>"
    return Markup(start if name in _VOID else f"{start}{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    """Several children in a row."""
    return Markup("".join(_text(child) for child in children))


def _text(child: object) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Markup) else html.escape(str(child))


def facts(rows: Iterable[tuple[str, object]], *, class_: str = "facts") -> Markup:
    """Names with their values; a value of None or '-' was not measured and is left out."""
    shown = [(name, value) for name, value in rows if value is not None and value not in ("-", "")]
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in shown), class_=class_)


def table(
    columns: Sequence[tuple[str, bool]],
    rows: Sequence[Sequence[object]],
    *,
    caption: str,
    sortable: bool = False,
    marked: Sequence[str | None] | None = None,
) -> Markup:
    """A table in a box of its own, which scrolls sideways where it is wider than the page.

    Args:
        columns: names, and whether the column holds figures; one without any value is left out.
        rows: cells; a pair is (what to show, what to sort by).
        caption: what the table is, for readers who cannot see it.
        sortable: whether the page lets its reader sort it.
        marked: a class for each row.
    """
    cells = [[cell if isinstance(cell, tuple) else (cell, None) for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i][0] not in ("-", "", None) for row in cells)]
    head = [tag("th", columns[i][0], scope="col", class_="number" if columns[i][1] else None) for i in kept]
    body = [
        tag(
            "tr",
            *(tag("td", row[i][0], data_sort=row[i][1], class_="number" if columns[i][1] else None) for i in kept),
            class_=name,
        )
        for row, name in zip(cells, marked or [None] * len(cells), strict=True)
    ]
    made = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
        class_="sortable" if sortable else None,
    )
    return tag("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)
