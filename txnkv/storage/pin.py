"""A holder's record of its pin in the runtime file."""

from __future__ import annotations


class Pin:
    """The pin of a snapshot, told of it at the instant at which it is taken or given back.

    Attributes:
        snapshot: what is pinned; None for nothing.
    """

    def __init__(self) -> None:
        self.snapshot: int | None = None
