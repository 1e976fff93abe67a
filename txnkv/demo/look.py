"""What a reader sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """What a reader saw from one look to another, all the same.

    Attributes:
        first, last: when, by the monotonic clock that all processes share.
        looks: how many.
        counts: rows of each table.
    """

    first: float
    last: float
    looks: int
    counts: tuple[int, ...]
