"""The tables as a reader sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """Counts of rows that a reader saw, the same from one look to another.

    Attributes:
        first, last: times of the looks, by the monotonic clock that all processes share.
        looks: the number of looks.
        counts: rows of each table.
    """

    first: float
    last: float
    looks: int
    counts: tuple[int, ...]
