"""A fetch: raw batches of a partition, and what a reader needs to know to filter them.

    isolation          batches below              aborted list
    read_uncommitted   the high watermark         none: nothing is left out
    read_committed     the last stable offset     of the transactions that may be in the fetch

The batches are those of the log, whole, joined in one copy and not filtered: the reader drops
aborted ones by the list (`core.CommittedFilter`), which may name more transactions than the
fetch has, and never less. Their checksums are the reader's to look at, before it filters
(`core.intact`): a fetch looks at headers and offsets alone. A fetch at or behind the last stable
offset is empty and no error; one outside of what the partition holds is an error that says what
it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from txnkv.topics.log import behind
from txnkv.topics.partition import Partition
from txnkv.topics.read.log_view import LogView, look_at
from txnkv.topics.topics import Topics

READ_UNCOMMITTED: Final = "read_uncommitted"
READ_COMMITTED: Final = "read_committed"
FETCH_BYTES: Final = 1 << 20
HELD_BYTES: Final = 16 << 20
"""Bytes of messages that a consumer has read ahead, of all partitions, and gives at once."""


class AbortedTxn(NamedTuple):
    """A transaction that was aborted.

    Attributes:
        producer_id: the transaction's local id, as it stands in its batches.
        first_offset: of its messages in this partition; what it sent before was committed.
    """

    producer_id: int
    first_offset: int


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The answer to a fetch.

    Attributes:
        records: whole batches one behind the other, in offset order, not filtered; the first
            holds the offset that was asked for. Empty when there is nothing yet.
        high_watermark: behind the last message of the partition.
        last_stable_offset: below it all is decided.
        start_offset: the least offset that is readable.
        aborted: the aborted transactions that may be among the records; None when read
            uncommitted.
    """

    records: bytes
    high_watermark: int
    last_stable_offset: int
    start_offset: int
    aborted: list[AbortedTxn] | None


def fetch(
    topics: Topics,
    partition: Partition,
    offset: int,
    max_bytes: int = FETCH_BYTES,
    isolation: str = READ_COMMITTED,
) -> FetchResult:
    """Raw batches from the one that holds an offset on.

    Args:
        topics: of the store.
        partition: where to read.
        offset: of the first message that is wanted, in [start, high watermark].
        max_bytes: of all records when they are decoded, however small they are stored; one
            batch is given, however large it is.
        isolation: "read_uncommitted" or "read_committed".

    Raises:
        OffsetOutOfRangeError: the partition does not hold the offset, and it is not its end.
        TopicNotFoundError: the topic was dropped.
        ValueError: an argument makes no sense.
    """
    committed = is_committed(isolation)
    if max_bytes <= 0:
        raise ValueError(f"max_bytes is above 0, not {max_bytes!r}")

    def see(view: LogView) -> FetchResult:
        view.require(offset)
        upto = view.last_stable_offset if committed else view.high_watermark
        parts = view.read(offset, max_bytes, upto) if offset < upto else []
        aborted: list[AbortedTxn] | None = None
        if committed:
            end = behind(parts[-1]) if parts else offset
            aborted = [AbortedTxn(*each) for each in view.aborted(offset, end)]
        # Inside the transaction: the parts are views of LMDB's map.
        return FetchResult(
            b"".join(parts), view.high_watermark, view.last_stable_offset, view.start, aborted
        )

    return look_at(topics, partition, see)


def is_committed(isolation: str) -> bool:
    """Tell whether an isolation level leaves out what is not committed.

    Raises:
        ValueError: a fetch knows no such level.
    """
    if isolation not in (READ_UNCOMMITTED, READ_COMMITTED):
        raise ValueError(
            f"isolation of a fetch is {READ_UNCOMMITTED!r} or {READ_COMMITTED!r}, not {isolation!r}"
        )
    return isolation == READ_COMMITTED
