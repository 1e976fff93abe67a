"""A transaction as its handles and sessions share it inside a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from txnkv.coordinator.ids import Timestamp, TxnId
from txnkv.coordinator.states import TxnState
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import InvalidTxnStateError, TransactionTimedOutError
from txnkv.instance import Instance
from txnkv.storage.dropped import WhenDropped
from txnkv.storage.seam import clock
from txnkv.tables.manifest import Scope
from txnkv.tables.staging import WriteContext
from txnkv.tables.view import ReadView


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

    @property
    def has_pending(self) -> bool: ...


class TxnContext:
    """One transaction in one process: its row, whether that is stored, how it ended here.

    The OPEN row is stored when somebody else needs it (a token, staged rows, a lock); until
    then begin and end cost no I/O.
    """

    def __init__(
        self, instance: Instance, row: TxnRow, *, stored: bool, scope: Scope | None = None
    ) -> None:
        self.instance = instance
        self.row = row
        self.stored = stored
        self.scope = scope or Scope(row.txn_id)
        self.sessions: list[Flushable] = []
        self.ended: TxnState | None = None
        self.commit_called = False
        self.on_stored: Callable[[], Callable[[], None] | None] = lambda: None
        self._lock = threading.RLock()
        self._pid = os.getpid()
        if not stored:
            WhenDropped(self, instance.coordinator.ids.ended, row.txn_id)

    @property
    def id(self) -> TxnId:
        return self.instance.coordinator.txn_id(self.row.txn_id)

    @property
    def snapshot(self) -> Timestamp:
        return self.row.snapshot_ts

    def require_process(self) -> None:
        """Refuse a handle that a forked child inherited.

        Raises:
            InvalidTxnStateError: this process is not the one that made the handle.
        """
        if os.getpid() != self._pid:
            raise InvalidTxnStateError(
                f"transaction {self.row.txn_id} belongs to process {self._pid}: hand it to another "
                "process as a token (serialize, Transaction.deserialize)"
            )

    def require_open(self, what: str) -> None:
        """Refuse what only an open transaction admits, as far as this process knows.

        Raises:
            InvalidTxnStateError: it was ended here.
            TransactionTimedOutError: it is past its timeout.
        """
        self.require_process()
        if self.ended is not None:
            raise InvalidTxnStateError(
                f"cannot {what}: transaction {self.row.txn_id} is not open: {self.ended.name}. "
                "Begin a new transaction"
            )
        if not self.stored and self.past_deadline:
            raise TransactionTimedOutError(
                f"cannot {what}: transaction {self.row.txn_id} passed its timeout of "
                f"{(self.row.timeout or 0) / 1e6:g} s. Begin a new transaction, with a longer one"
            )

    @property
    def past_deadline(self) -> bool:
        return self.row.deadline is not None and clock.monotonic_micros() > self.row.deadline

    def ensure_stored(self) -> TxnRow:
        """Store the OPEN row, once."""
        with self._lock:
            if not self.stored:
                self.row = self.instance.coordinator.write_open(self.row)
                self.stored = True
                told = self.on_stored()
                if told is not None:
                    told()
            return self.row

    def write_context(self) -> WriteContext:
        return WriteContext(self.ensure_stored(), self.scope)

    def view(self) -> ReadView:
        """The snapshot and, once rows are staged, the transaction's own writes."""
        return ReadView(self.snapshot, self.row.txn_id if self.stored else None)

    def with_scope(self, scope: Scope) -> TxnContext:
        """The same transaction, staging in the name of a job's attempt."""
        return TxnContext(self.instance, self.row, stored=True, scope=scope)

    def current(self) -> TxnRow:
        """The row as it stands in status.db."""
        if not self.stored:
            return replace(self.row, state=self.ended or TxnState.OPEN)
        return self.instance.coordinator.get(self.row.txn_id)
