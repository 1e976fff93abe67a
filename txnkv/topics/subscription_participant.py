"""Subscriptions as participants of a stored transaction.

ack             rows of pending_acks; from then on nobody else can have the messages, so
                there is nothing to validate
write_commit    inside the commit point: what the rows hold is deleted
abort           the rows go, and their messages are delivered again
"""

from __future__ import annotations

from collections.abc import Sequence

import apsw

from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.status_table import TxnRow
from txnkv.storage.seam import declare_fault_point, fault_point
from txnkv.topics import pending_acks
from txnkv.topics.acks import KIND
from txnkv.topics.topics import Topics

declare_fault_point("acks.applied", "acks are applied inside the commit point")
declare_fault_point("acks.returned", "acks of an aborted transaction are given back")


class SubscriptionParticipants:
    """The coordinator's handler for subscriptions."""

    kind = KIND

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._store = topics.store

    def check(self, row: TxnRow, ids: Sequence[int]) -> int:
        """Acks are refused when they are made, or never."""
        return 0

    def checked_all(self, cur: apsw.Cursor, row: TxnRow, checked: int) -> bool:
        """Nothing was checked."""
        return True

    def begin_commit(self, row: TxnRow, ids: Sequence[int]) -> Timestamp:
        """Acks need an OPEN transaction, inside the write that makes them: all are there."""
        return self._topics.log.latest()

    def validate(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], validated: Timestamp
    ) -> bool:
        """Pending acks keep everybody else off."""
        return True

    def write_commit(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], commit_ts: Timestamp
    ) -> None:
        """Delete what is pending."""
        pending_acks.apply(cur, row.txn_id)
        fault_point("acks.applied")

    def finalize_commit(self, row: TxnRow, ids: Sequence[int]) -> None:
        """The commit point did it all."""

    def abort(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Have what is pending delivered again."""
        with self._store.status.write() as cur:
            pending_acks.give_back(cur, self._store, row.txn_id)
        fault_point("acks.returned")
