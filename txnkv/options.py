"""The words that options take, as types: a checker finds a wrong one before the program runs.

Each is also checked at the call; what is checked against is made of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, get_args

FlushMode: TypeAlias = Literal["manual", "auto_background", "auto_sync"]
Isolation: TypeAlias = Literal["snapshot", "serializable"]
Locking: TypeAlias = Literal["optimistic", "partition"]
Operation: TypeAlias = Literal[
    "insert", "insert_ignore", "upsert", "update", "update_ignore", "delete", "delete_ignore"
]
Buffer: TypeAlias = Literal["marker", "sidecar"]
Compression: TypeAlias = Literal["lz4", "zstd"]
FetchIsolation: TypeAlias = Literal["read_committed", "read_uncommitted"]
ReadIsolation: TypeAlias = Literal["read_uncommitted", "read_committed", "serializable"]
Order: TypeAlias = Literal["offset", "commit"]
Start: TypeAlias = Literal["earliest", "latest"]
SubscriptionType: TypeAlias = Literal["exclusive", "shared", "failover"]


FLUSH_MODES: Final = get_args(FlushMode)
ISOLATIONS: Final = get_args(Isolation)
LOCKINGS: Final = get_args(Locking)


def one_of(option: str, given: object, words: Sequence[str]) -> None:
    """Refuse what is none of the words that an option takes.

    Raises:
        ValueError: it is none.
    """
    if given not in words:
        raise ValueError(f"{option} is one of {', '.join(words)}, not {given!r}")
