"""Heartbeats, and the abort of transactions that nobody keeps alive.

A heartbeat is a store into the runtime file, no I/O. An OPEN transaction is aborted when
it had none for its keepalive time, or is past its own timeout; no other transaction is.
Silence counts only while somebody listens: after a restart of the machine, or when nobody had
the store open, each OPEN transaction gets a fresh heartbeat from who leads next.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Final, Protocol

import apsw

from txnkv.coordinator import status_table
from txnkv.coordinator.lease import Lease
from txnkv.coordinator.metadata_store import past_timeout
from txnkv.coordinator.orchestration import Orchestrator
from txnkv.coordinator.query import one
from txnkv.coordinator.states import TxnState
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import (
    InvalidTxnStateError,
    TransactionTimedOutError,
    TxnNotFoundError,
    UnavailableError,
)
from txnkv.storage import Store, clock, new_condition, new_lock

_log = logging.getLogger("txnkv")

MIN_KEEPALIVE: Final = 0.5
"""Seconds. A heartbeat waits until its thread has Python's lock, for 5 ms behind each thread
that computes, and for as long as C code keeps it: that must not be taken for silence."""

_CHANGE_OF_LEADERS: Final = 2 * 1_000_000
"""Microseconds without a leader that are no reason to listen anew."""


def free_slot(cur: apsw.Cursor, store: Store) -> int:
    """An entry of the heartbeat table that no transaction has.

    Raises:
        UnavailableError: as many transactions are open as the table has entries.
    """
    highest = cur.execute(
        "SELECT heartbeat_slot FROM transactions WHERE heartbeat_slot IS NOT NULL "
        "ORDER BY heartbeat_slot DESC LIMIT 1"
    ).fetchone()
    slot = 0 if highest is None else int(highest[0]) + 1
    if slot < store.runtime.HEARTBEATS:
        return slot
    # Seldom: the table is full, or an old transaction has its last entry.
    (slot,) = one(
        cur,
        "SELECT CASE WHEN NOT EXISTS (SELECT 1 FROM transactions WHERE heartbeat_slot = 0) THEN 0 "
        "ELSE (SELECT t.heartbeat_slot + 1 FROM transactions t WHERE t.heartbeat_slot "
        "IS NOT NULL AND NOT EXISTS (SELECT 1 FROM transactions n "
        "WHERE n.heartbeat_slot = t.heartbeat_slot + 1) ORDER BY t.heartbeat_slot LIMIT 1) END",
    )
    if slot >= store.runtime.HEARTBEATS:
        raise UnavailableError(
            f"{slot} transactions are open at once, as many as the store has heartbeats for: "
            "end some of them (`txnkv txn list`), then try again"
        )
    return int(slot)


def expired(row: TxnRow, store: Store) -> str | None:
    """Return why an OPEN transaction must be aborted, or None."""
    now = clock.monotonic_micros()
    if past_timeout(row):
        return f"passed its timeout of {(row.timeout or 0) / 1e6:g} s"
    if row.heartbeat_slot is None:
        return None
    txn_id, last = store.runtime.heartbeat_read(row.heartbeat_slot)
    if txn_id == row.txn_id and now - last > row.keepalive:
        return f"had no heartbeat for {row.keepalive / 1e6:g} s"
    return None


def refresh_missing(store: Store, row: TxnRow, unwatched: int = 0) -> None:
    """Give a fresh heartbeat to an OPEN transaction that the runtime file does not know, or that
    nobody listened to for a while.
    """
    if row.heartbeat_slot is None:
        return
    txn_id, _ = store.runtime.heartbeat_read(row.heartbeat_slot)
    if txn_id != row.txn_id or unwatched > min(row.keepalive, _CHANGE_OF_LEADERS):
        store.runtime.heartbeat_register(row.heartbeat_slot, row.txn_id, clock.monotonic_micros())


def abort_expired(store: Store, orchestrator: Orchestrator, lease: Lease) -> list[int]:
    """Begin to abort the OPEN transactions that expired: in status.db alone, which nobody that is
    stopped in a flush or a log has locked.

    Returns:
        Their ids: somebody has to `finish` them.

    Raises:
        LeaseLostError: this process leads no more: what it found may be long past.
    """
    with store.status.read() as cur:
        rows = status_table.select(cur, [TxnState.OPEN])
    begun: list[int] = []
    unwatched, lease.unwatched = lease.unwatched, 0
    for row in rows:
        refresh_missing(store, row, unwatched)
        reason = expired(row, store)
        if reason is None:
            continue
        with orchestrator.damage.guard(f"transaction {row.txn_id}", "its abort") as one:
            try:
                with store.status.write() as cur:
                    lease.confirm(cur)
                    if expired(row, store) is None:
                        continue  # a heartbeat came meanwhile
                    orchestrator.start_abort_in(
                        cur, row.txn_id, reason, TransactionTimedOutError, only_open=True
                    )
                begun.append(row.txn_id)
            except (InvalidTxnStateError, TxnNotFoundError):
                continue  # its owner was quicker
        if one.error is None:
            _log.warning("aborted transaction %d: it %s", row.txn_id, reason)
    return begun


class Beating(Protocol):
    """A transaction that the heartbeater keeps alive."""

    txn_id: int
    heartbeat_slot: int | None
    keepalive: int


class Heartbeater:
    """One thread a process and store that beats for every registered transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = new_lock()
        self._wake = new_condition(self._lock)
        self._beating: weakref.WeakSet[Beating] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, handle: Beating) -> None:
        with self._lock:
            self._beating.add(handle)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="txnkv-heartbeat", daemon=True
                )
                self._thread.start()
            self._wake.notify()

    def remove(self, handle: Beating) -> None:
        with self._lock:
            self._beating.discard(handle)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=5)

    def forget_thread(self) -> None:
        """In a forked child: the thread and what it beat for belong to the parent."""
        self._thread = None
        self._beating = weakref.WeakSet()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                handles = list(self._beating)
            pause = self._beat(handles)
            handles.clear()  # a reference kept over the wait would keep a dropped handle alive
            with self._lock:
                if not self._closed:
                    self._wake.wait(timeout=pause)

    def _beat(self, handles: list[Beating]) -> float:
        """Beat for these; how many seconds until the next time."""
        now = clock.monotonic_micros()
        for handle in handles:
            if handle.heartbeat_slot is not None:
                self._store.runtime.heartbeat(handle.heartbeat_slot, handle.txn_id, now)
        return min((handle.keepalive for handle in handles), default=4_000_000) / 4e6
