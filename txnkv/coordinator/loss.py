"""The data of a damaged part that is given up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from txnkv.coordinator.ids import Timestamp


@dataclass(frozen=True)
class LostRows:
    """A row set.

    Attributes:
        id: of the row set.
        rows, live: row versions, and those that were not deleted.
        min_key, max_key: the values of their columns, inclusive.
        first_commit, last_commit: of its rows; None where its transaction has not ended.
    """

    id: int
    rows: int
    live: int
    min_key: tuple[Any, ...]
    max_key: tuple[Any, ...]
    first_commit: Timestamp | None
    last_commit: Timestamp | None

    def __str__(self) -> str:
        when = "of a transaction that has not ended"
        if self.first_commit is not None and self.last_commit is not None:
            first, last = self.first_commit.datetime, self.last_commit.datetime
            when = f"committed from {first.isoformat()} to {last.isoformat()}"
        return (
            f"row set {self.id}: {self.live:,} rows ({self.rows:,} versions), keys "
            f"{_key(self.min_key)} to {_key(self.max_key)}, {when}"
        )


def _key(values: tuple[Any, ...]) -> str:
    return repr(values[0] if len(values) == 1 else values)


@dataclass(frozen=True)
class Loss:
    """The data that is given up, or would be.

    Attributes:
        part: whose.
        offsets: [first, end) of messages; fillers stand there.
        rows: row sets of a tablet.
        transactions: that had touched it; those that are not decided are aborted.
        commits: small ones whose rows of a tablet are damaged in the commit log.
    """

    part: str
    offsets: tuple[tuple[int, int], ...] = ()
    rows: tuple[LostRows, ...] = ()
    transactions: tuple[int, ...] = ()
    commits: tuple[Timestamp, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.offsets or self.rows or self.commits)

    def lines(self) -> Iterator[str]:
        """For people."""
        for first, end in self.offsets:
            yield f"{self.part}: offsets {first:,} to {end - 1:,}"
        for row_set in self.rows:
            yield f"{self.part}: {row_set}"
        for commit in self.commits:
            when = commit.datetime.isoformat()
            yield f"{self.part}: what commit {commit} changed there, at {when}"
        for txn_id in self.transactions:
            yield f"{self.part}: transaction {txn_id} is aborted, if it is not decided"
