"""Columns and tables from figures: which texts stand for a figure alone, and which in a column of its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from batchtune.report.view.model import Column, Table
from batchtune.units import aligned, duration, number, share, size, sizes, times

Values = Sequence[float | None]


def table(title: str, columns: Sequence[Column], **more: Any) -> Table:
    """A table of the columns in which something is known."""
    known = [column for column in columns if any(cell not in {"", "-"} for cell in column.cells)]
    return Table(title=title, columns=known, **more)


def words(name: str, cells: Sequence[str], **more: Any) -> Column:
    """A column of texts."""
    return Column(name=name, cells=cells, **more)


def byte_sizes(name: str, values: Values, *, least: float = 0, **more: Any) -> Column:
    """A column of bytes, of which less than the least cannot be told."""
    unit, lined_up = sizes(values, least)
    cells = [size(value, least) for value in values]
    return Column(name=name, cells=cells, values=values, unit=unit, lined_up=lined_up, **more)


def seconds(name: str, values: Values, **more: Any) -> Column:
    """A column of times."""
    unit, lined_up = times(values)
    return Column(name=name, cells=[*map(duration, values)], values=values, unit=unit, lined_up=lined_up, **more)


def counts(name: str, values: Values, **more: Any) -> Column:
    """A column of whole numbers; `cells` says them otherwise."""
    cells = more.pop("cells", None) or ["-" if value is None else f"{value:,.0f}" for value in values]
    return Column(name=name, cells=cells, values=values, lined_up=cells, **more)


def shares(name: str, values: Values, write: Callable[[float | None], str] = share, **more: Any) -> Column:
    """A column of shares of one."""
    cells = [write(value) for value in values]
    return Column(name=name, cells=cells, values=values, lined_up=cells, **more)


def numbers(name: str, values: Values, *, unit: str = "", digits: int = 3, **more: Any) -> Column:
    """A column of plain figures, all in one unit."""
    plain = [number(value, digits) for value in values]
    cells = [text if text == "-" or not unit else f"{text} {unit}" for text in plain]
    return Column(name=name, cells=cells, values=values, unit=unit, lined_up=aligned(plain), **more)
