"""Holdings of an open transaction, and interfaces that hear when it is stored or ends."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from txnkv.coordinator import IdPin, TxnRow
from txnkv.errors import ClosedError
from txnkv.instance import Instance
from txnkv.storage import WhenDropped


class Heart:
    """A transaction for which the heartbeater beats, as long as a handle refers to this object."""

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
    """A handle that is told when its transaction is stored, since heartbeats are needed then."""

    def start_heart(self) -> None: ...


class Holding:
    """The id and the snapshot that a transaction holds while it is not stored; made before it has
    either. Both are given back once, by `end` or when this object is dropped.
    """

    def __init__(self, instance: Instance) -> None:
        self.held = IdPin()
        self.end = WhenDropped(self, _give_back, instance, self.held)


def _give_back(instance: Instance, held: IdPin) -> None:
    if held.txn_id is not None:
        instance.coordinator.ids.ended(held.txn_id)
    if held.snapshot is not None:
        with suppress(ClosedError):  # with the store went its pins
            instance.store.runtime.unpin(held.snapshot, held)
