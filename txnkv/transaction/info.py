"""The facts of a transaction for callers that have no handle of it."""

from __future__ import annotations

from dataclasses import dataclass

from txnkv.coordinator.ids import Timestamp, TxnId
from txnkv.coordinator.states import TxnState


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
