"""Peak memory over batch and length: one polynomial for what was measured at any length, with its doubt.

With b for the batch and x for a length, each as a share of the largest there is, a training takes
c + b (s + Σ p_i x_i + Σ q_ij x_i x_j) + r b²: what it holds at any size, what each sample takes at any length, with
it and with its square (attention's matrices, pixels), and what grows with the square of the batch (contrastive losses).
No coefficient is below nothing. A length's own steps of the allocator are a part of the error.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

from batchtune.vocabulary import LARGEST, Length, dimensions

_CONSTANT, _LINEAR, _SQUARE, _PER_SAMPLE, _BATCH_SQUARE = 1.0, 1.0, 0.25, 0.25, 0.1
"""How large each coefficient may well be, as a share of the highest peak: what little is measured leaves to these."""
_MOST_PAIRED = 2  # numbers of a length; with more, their product alone stands for all pairs


class PeakPoint(NamedTuple):
    """A peak in bytes, and its error as a share of it."""

    batch_size: int
    length: Length
    peak_bytes: float
    error_share: float


Row = list[float]


@dataclass(frozen=True)
class Surface:
    """A fitted polynomial; see `fit_surface`."""

    unit_batch: float
    unit_length: tuple[int, ...]
    unit_bytes: float
    coefficients: Row
    precision: list[Row]

    def peak_bytes(self, batch_size: float, length: Length) -> float:
        """The peak of a batch."""
        row = _row(batch_size / self.unit_batch, length, self.unit_length)
        return self.unit_bytes * _dot(row, self.coefficients)

    def doubt_bytes(self, batch_size: float, length: Length) -> float:
        """Its standard deviation, by what is known of the coefficients."""
        row = _row(batch_size / self.unit_batch, length, self.unit_length)
        return self.unit_bytes * math.sqrt(max(0.0, _dot(row, _solved(self.precision, row))))

    def largest_batch(self, length: Length, end_bytes: float) -> int:
        """The largest batch that takes no more than that; 0 where none does."""
        return bisect_right(range(1, LARGEST + 1), end_bytes, key=lambda size: self.peak_bytes(size, length))


def fit_surface(points: Sequence[PeakPoint]) -> Surface:
    """The polynomial of least squares with no coefficient below nothing, each drawn towards nothing where free.

    Args:
        points: one at least.
    """
    unit_length = tuple(map(max, zip(*(dimensions(each.length) for each in points), strict=True)))
    unit_batch = max(each.batch_size * math.prod(dimensions(each.length)) for each in points) / math.prod(unit_length)
    unit_bytes = max(each.peak_bytes for each in points)
    rows = [_row(each.batch_size / unit_batch, each.length, unit_length) for each in points]
    values = [each.peak_bytes / unit_bytes for each in points]
    weights = [(each.error_share * value) ** -2 for each, value in zip(points, values, strict=True)]
    scales = _scales(len(unit_length))
    columns = list(zip(*rows, strict=True))
    weighted = [[weight * each for weight, each in zip(weights, column, strict=True)] for column in columns]
    precision = [[_dot(left, column) for column in columns] for left in weighted]
    for i, scale in enumerate(scales):
        precision[i][i] += scale**-2
    right = [_dot(left, values) for left in weighted]
    return Surface(unit_batch, unit_length, unit_bytes, _least_squares(precision, right), precision)


def _row(batch: float, length: Length, unit: tuple[int, ...]) -> Row:
    shares = [each / most for each, most in zip(dimensions(length), unit, strict=True)]
    return [1.0, *(batch * each for each in [*shares, *_squares(shares), 1.0]), batch * batch]


def _squares(shares: Sequence[float]) -> list[float]:
    if len(shares) > _MOST_PAIRED:
        return [math.prod(shares)]
    return [left * right for left, right in combinations_with_replacement(shares, 2)]


def _scales(count: int) -> Row:
    pairs = combinations_with_replacement(range(count), 2) if count <= _MOST_PAIRED else [(0, 1)]
    squares = [_SQUARE if left == right else _LINEAR for left, right in pairs]  # a picture has both its sides at once
    return [_CONSTANT, *[_LINEAR / math.sqrt(count)] * count, *squares, _PER_SAMPLE, _BATCH_SQUARE]


def _least_squares(precision: Sequence[Row], right: Row) -> Row:
    """The minimum of x'Px/2 - r'x with no x below nothing: by trying each choice of those above it."""
    count, lowest = len(right), 0.0
    best = [0.0] * count
    for some in (each for size in range(1, count + 1) for each in combinations(range(count), size)):
        part = _solved([[precision[i][j] for j in some] for i in some], [right[i] for i in some])
        height = -_dot(part, [right[i] for i in some])
        if min(part) >= 0 and height < lowest:
            lowest, best = height, [0.0] * count
            for i, value in zip(some, part, strict=True):
                best[i] = value
    return best


def _solved(matrix: Sequence[Row], right: Sequence[float]) -> Row:
    """X of Mx = r."""
    import numpy as np  # not for every probe

    found: Row = np.linalg.solve(matrix, right).tolist()
    return found


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
