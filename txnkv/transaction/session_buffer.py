"""The room for what a session keeps until it is flushed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from txnkv.errors import InvalidTxnStateError

BUFFER_BYTES: Final = 64 << 20
"""The default `buffer_bytes` of `new_session`."""

_TEXT: Final = frozenset({str, bytes})
_NESTED: Final = frozenset({tuple, list})


def size_of(values: Iterable[Any]) -> int:
    """About what values take: eight bytes each, and the length of text and bytes."""
    size = 0
    for value in values:
        kind = value.__class__
        size += 8
        if kind in _TEXT:
            size += len(value)
        elif kind in _NESTED:
            size += size_of(value)
    return size


class Room:
    """The bytes that rows and messages of a session may still take.

    Args:
        limit: bytes; None for no limit.

    Attributes:
        left: bytes, a list of one number: adders of many rows change it in place. Not above 0:
            full.
        refuses: nobody but the caller flushes, and nothing is taken where it is full.
    """

    __slots__ = ("left", "limit", "refuses")

    def __init__(self, limit: int | None, *, refuses: bool) -> None:
        if limit is not None and limit <= 0:
            raise ValueError(f"buffer_bytes is bytes above 0, or None, not {limit!r}")
        self.limit = limit
        self.refuses = refuses
        self.left: list[float] = [0]
        self.empty()

    def empty(self) -> None:
        """Make all room free again: nothing waits any more."""
        self.left[0] = math.inf if self.limit is None else self.limit

    def take(self, values: Iterable[Any]) -> None:
        """Make room for one row or message.

        Raises:
            InvalidTxnStateError: there is none, and the caller is to flush.
        """
        if self.limit is None:
            return
        if self.refuses and self.full:
            raise InvalidTxnStateError(
                f"cannot take more: the rows and messages that wait have {self.used} bytes, and "
                f"buffer_bytes of the session is {self.limit}. All of them still wait: flush the "
                "session, then make this call again"
            )
        self.left[0] -= size_of(values)

    def take_back(self, size: int) -> None:
        """Take room again for what could not be flushed and waits again."""
        self.left[0] -= size

    @property
    def used(self) -> int:
        """Bytes that wait; 0 where there is no limit."""
        return 0 if self.limit is None else int(self.limit - self.left[0])

    @property
    def full(self) -> bool:
        return self.left[0] <= 0

    @property
    def half_full(self) -> bool:
        return self.limit is not None and 2 * self.left[0] <= self.limit
