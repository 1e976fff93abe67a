"""The facts of a transaction for callers that have no handle of it."""

from __future__ import annotations

from dataclasses import dataclass

from txnkv.coordinator import Timestamp, TxnId, TxnState, status_table
from txnkv.instance import Instance


@dataclass(frozen=True)
class TxnInfo:
    """A transaction as it stands in the status table.

    Attributes:
        timeout: seconds from begin, or None.
        reason: why it was aborted.
    """

    id: TxnId
    state: TxnState
    begin: Timestamp
    commit: Timestamp | None
    timeout: float | None
    isolation: str
    locking: str
    participants: int
    reason: str | None


def listed(instance: Instance) -> list[TxnInfo]:
    """All transactions in the status table: those that have not ended, and recent ones."""
    with instance.store.status.read() as cur:
        rows = status_table.select(cur)
        participants = {
            row.txn_id: sum(map(len, status_table.participants(cur, row.txn_id).values()))
            for row in rows
        }
    return [
        TxnInfo(
            instance.coordinator.txn_id(row.txn_id),
            row.state,
            row.begin_ts,
            row.commit_ts if row.state is not TxnState.ABORTED else None,
            None if row.timeout is None else row.timeout / 1e6,
            row.isolation,
            row.locking,
            participants[row.txn_id],
            row.reason,
        )
        for row in rows
    ]
