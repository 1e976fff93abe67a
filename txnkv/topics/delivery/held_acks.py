"""Messages of one subscription that one transaction acknowledges, and those that a call names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import apsw

from txnkv.errors import OffsetOutOfRangeError
from txnkv.storage import Store
from txnkv.topics.acks import (
    Exclusive,
    Held,
    SubscriptionInfo,
    conflict,
    cursors,
    pending_ack_rows,
    subscription_rows,
)
from txnkv.topics.messages import MessageId
from txnkv.topics.ranges import Ranges


@dataclass
class HeldAcks:
    """The acknowledgements of one transaction in one subscription.

    Attributes:
        info: the subscription.
        state: in whose memory they are; None: in status.db, or nowhere yet.
        version: of `state`, before the first of them was taken.
        held: individual ones, by partition id.
        positions: cumulative ones: all below.
        deleted: what the commit deletes, of those in memory.
        number: the change number when it was written.
    """

    info: SubscriptionInfo
    state: Exclusive | None
    version: int | None = None
    held: Held = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    deleted: Held = field(default_factory=dict)
    number: int | None = None

    def ranges(self, partition_id: int) -> Ranges:
        return self.held.setdefault(partition_id, Ranges())

    def whole(self, marks: dict[int, int]) -> Held:
        """All that is acknowledged, positions as the ranges below them."""
        found = {id: Ranges(ranges) for id, ranges in self.held.items()}
        for id, position in self.positions.items():
            found.setdefault(id, Ranges()).add(marks.get(id, 0), position)
        return found


def by_partition(
    info: SubscriptionInfo, ids: Sequence[MessageId], *, cumulative: bool
) -> dict[int, list[int]]:
    """Offsets in order, by partition number; of a cumulative ack the highest."""
    if len(ids) == 1 and 0 <= ids[0][0] < len(info.topic.partitions):
        number, offset = ids[0]
        return {number: [offset]}
    found: dict[int, set[int]] = {}
    for number, offset in ids:
        if not 0 <= number < len(info.topic.partitions):
            raise OffsetOutOfRangeError(
                f"{info} has partitions 0 to {len(info.topic.partitions) - 1}, not {number}"
            )
        found.setdefault(number, set()).add(offset)
    if cumulative:
        return {number: [max(offsets)] for number, offsets in found.items()}
    return {number: sorted(offsets) for number, offsets in found.items()}


def remember(acks: HeldAcks, named: dict[int, list[int]], *, cumulative: bool) -> None:
    for number, offsets in named.items():
        partition_id = acks.info.topic.partitions[number]
        if cumulative:
            last = acks.positions.get(partition_id, 0)
            acks.positions[partition_id] = max(last, offsets[-1] + 1)
        for offset in () if cumulative else offsets:
            acks.ranges(partition_id).add(offset, offset + 1)


def refuse_taken(cur: apsw.Cursor, store: Store, acks: HeldAcks, txn_id: int) -> None:
    """Compare what a transaction has in memory with what status.db has of others. Of its own it
    may have what a write left there that failed late.

    Raises:
        AckConflictError: another process was first.
    """
    info = acks.info
    subscription_rows.require(cur, info)

    def taken(partition_id: int, first: int, last: int) -> bool:
        return bool(
            pending_ack_rows.rows(cur, store, info.id, partition_id, first, last, besides=txn_id)
        )

    def deleted(partition_id: int, first: int, last: int) -> bool:
        return bool(cursors.deleted_in(cur, info.id, partition_id, first, last))

    for number, id in enumerate(info.topic.partitions):
        for first, last in acks.held.get(id, ()):
            if deleted(id, first, last) or taken(id, first, last):
                raise conflict(info, number, first, "was acknowledged first by another process")
        position = acks.positions.get(id, 0)
        if position and (deleted(id, position - 1, position) or taken(id, 0, position)):
            raise conflict(info, number, position - 1, "was acknowledged first by another process")


def refuse_unknown(info: SubscriptionInfo, number: int, offsets: list[int], end: int) -> None:
    if offsets[0] < 0 or offsets[-1] >= end:
        raise OffsetOutOfRangeError(
            f"{info}: partition {number} has committed messages up to offset {end}, exclusive; "
            f"{offsets[-1] if offsets[0] >= 0 else offsets[0]} is none. Acknowledge what was "
            "delivered"
        )
