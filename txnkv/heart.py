"""What a transaction holds on to while it is open, and who is told when it is stored or ends."""

from __future__ import annotations

from typing import Protocol

from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import ClosedError
from txnkv.instance import Instance


class Heart:
    """What the heartbeater beats for, as long as a handle refers to it."""

    def __init__(self, row: TxnRow) -> None:
        self.txn_id = row.txn_id
        self.heartbeat_slot = row.heartbeat_slot
        self.keepalive = row.keepalive


class Flushable(Protocol):
    """A session, as its transaction sees it."""

    def flush_for_commit(self) -> None: ...

    def discard(self) -> None: ...

    def end(self) -> None: ...

    @property
    def has_pending(self) -> bool: ...


class Beating(Protocol):
    """Who wants to know when the transaction is stored, and heartbeats are needed."""

    def start_heart(self) -> None: ...


def unpin(instance: Instance, txn_id: int, snapshot: Timestamp) -> None:
    """Give back what a transaction that was not stored held: its id and its snapshot."""
    instance.coordinator.ids.ended(txn_id)
    try:
        instance.store.runtime.unpin(snapshot)
    except ClosedError:  # with the store went its pins
        return
