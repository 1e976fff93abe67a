"""Liveness: the leader's lease, heartbeats, and the abort of transactions that nobody keeps alive.

Any process may lead the background work. The lease goes to whoever finds its holder dead (its
slot of the runtime file is no longer locked) or silent for `LEASE_TIME`; each change of hands
raises the term. The holder is heard in the runtime file, by a heartbeat under its term: to go on
leading costs no write. Every background write calls `confirm` in its own SQLite transaction,
so a leader that was stopped and goes on later is refused. LMDB environments do not know the term:
`tables/tablets/tablet_files.py` says why what comes late changes nothing there.

A transaction's heartbeat is a store into the runtime file, no I/O. An OPEN transaction is aborted
when it had none for its keepalive time, or is past its own timeout; no other transaction is.
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
from txnkv.coordinator.orchestration import Orchestrator
from txnkv.coordinator.status_schema import one
from txnkv.coordinator.status_table import TxnRow, TxnState, past_timeout
from txnkv.errors import (
    InvalidTxnStateError,
    TransactionTimedOutError,
    TxnNotFoundError,
    UnavailableError,
)
from txnkv.storage import Store, clock, new_condition, new_lock, no_thread

LEASE_TIME: Final = 10 * 1_000_000


class LeaseLostError(Exception):
    """Another process leads now."""


class Lease:
    """This process's view of the lease of one store.

    Attributes:
        term: under which this process leads, if it does.
        unwatched: microseconds for which nobody led before it took the lease; to be set to 0 by
            whoever has taken that into account.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.term: int | None = None
        self.unwatched = 0

    def beat(self) -> bool:
        """Say that this process leads still; False when it does not, or nobody would hear."""
        runtime = self._store.runtime
        return self.term is not None and runtime.heartbeat(runtime.LEADER, self.term)

    def acquire(self) -> bool:
        """Take the lease, or renew it when it is ours already.

        Returns:
            True when this process leads.
        """
        runtime = self._store.runtime
        now = clock.monotonic_micros()
        with self._store.status.read() as cur:
            held = self._held(cur)
        if held is not None:
            term, slot, start, taken = held
            heard_of, heard = runtime.heartbeat_read(runtime.LEADER)
            renewed = max(taken, heard) if heard_of == term else taken
            if term == self.term:
                if self.beat():
                    return True
            elif self._free(slot, start, renewed, now):
                self.unwatched = max(now - renewed, 0)
            else:
                self.term = None
                return False
        with self._store.status.write() as cur:
            if self._held(cur) != held:
                self.term = None
                return False
            term = 1 if held is None else held[0] + (held[0] != self.term)
            cur.execute(
                "INSERT OR REPLACE INTO lease (id, term, owner_slot, owner_start, renewed) "
                "VALUES (1, ?, ?, ?, ?)",
                (term, *runtime.owner, now),
            )
            runtime.heartbeat_register(runtime.LEADER, term, now)
        self.term = term
        return True

    def confirm(self, cur: apsw.Cursor) -> int:
        """The term, when this process still leads. Inside the write that relies on it.

        Raises:
            LeaseLostError: it does not.
        """
        held = self._held(cur)
        if self.term is None or held is None or held[0] != self.term:
            self.term = None
            raise LeaseLostError
        return self.term

    def release(self) -> None:
        if self.term is None:
            return
        with self._store.status.write() as cur:
            cur.execute("UPDATE lease SET owner_slot = NULL WHERE term = ?", (self.term,))
        self.term = None

    def _free(self, slot: int | None, start: int, renewed: int, now: int) -> bool:
        alive = slot is not None and self._store.runtime.slot_alive(slot, start)
        return not alive or now - renewed > LEASE_TIME

    @staticmethod
    def _held(cur: apsw.Cursor) -> tuple[int, int | None, int, int] | None:
        found = cur.execute("SELECT term, owner_slot, owner_start, renewed FROM lease").fetchone()
        return None if found is None else found


_log = logging.getLogger("txnkv")

MIN_KEEPALIVE: Final = 0.5
"""Seconds. A heartbeat waits until its thread has Python's lock, for 5 ms behind each thread
that computes, and for as long as C code keeps it: that must not be taken for silence."""

LEFT: Final = 0
"""The last heartbeat of a transaction that is to be aborted: no moment is so early."""

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
    if txn_id == row.txn_id and last == LEFT:
        return "was left, and could not be rolled back then"
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


class HeartbeatEntry(Protocol):
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
        self._beating: weakref.WeakSet[HeartbeatEntry] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Have the thread, before a transaction is stored that it is to keep alive.

        Raises:
            UnavailableError: the machine gives none.
        """
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="txnkv-heartbeat", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise no_thread(error) from error
                self._thread = thread

    def add(self, handle: HeartbeatEntry) -> None:
        self.start()
        with self._lock:
            self._beating.add(handle)
            self._wake.notify()

    def remove(self, handle: HeartbeatEntry) -> None:
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

    def _beat(self, handles: list[HeartbeatEntry]) -> float:
        """Beat for these; how many seconds until the next time."""
        now = clock.monotonic_micros()
        for handle in handles:
            if handle.heartbeat_slot is not None:
                self._store.runtime.heartbeat(handle.heartbeat_slot, handle.txn_id, now)
        return min((handle.keepalive for handle in handles), default=4_000_000) / 4e6
