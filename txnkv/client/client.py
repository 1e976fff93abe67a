"""The client: where everything begins."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from txnkv import instance as instances
from txnkv.client.catalog_operations import CatalogOperations
from txnkv.client.compacting import CompactReport, compact_store
from txnkv.client.inspection import CheckReport, check_store, store_stats
from txnkv.client.producer import close_producers
from txnkv.client.table import At, Snapshot
from txnkv.coordinator import clock, status_table
from txnkv.coordinator.coordinator import KEEPALIVE_TIME
from txnkv.coordinator.ids import MAX_TIMESTAMP, Timestamp, TxnId
from txnkv.coordinator.liveness import MIN_KEEPALIVE
from txnkv.coordinator.locks import LOCK_TIMEOUT
from txnkv.coordinator.states import TxnState
from txnkv.errors import (
    ClosedError,
    CommitOutcomeUnknownError,
    NotSupportedError,
    TxnkvError,
    TxnNotFoundError,
)
from txnkv.instance import Instance
from txnkv.metrics import MetricsSnapshot
from txnkv.options import FlushMode, Isolation, Locking, one_of
from txnkv.storage.shield import shielded
from txnkv.topics.holding import Hold
from txnkv.transaction import one_phase_commit, two_phase_commit
from txnkv.transaction.begin import begin
from txnkv.transaction.closeable import Closing
from txnkv.transaction.context import TxnContext
from txnkv.transaction.info import TxnInfo
from txnkv.transaction.retry import DEADLINE, DEFAULTS, Retries
from txnkv.transaction.session import Session
from txnkv.transaction.session_buffer import BUFFER_BYTES
from txnkv.transaction.transaction import Transaction
from txnkv.transaction.versions import ApplicationOperations

T = TypeVar("T")


@shielded
def connect(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    read_only: bool = False,
    history: float | None = None,
    cache_bytes: int | None = None,
    keepalive_time: float = KEEPALIVE_TIME,
) -> Client:
    """Open a store; it is made when it is missing.

    Args:
        path: the store's directory.
        create: make it when there is none.
        read_only: refuse to write.
        history: seconds that can be read back, and for which ended transactions are remembered;
            None for 900, or for what this process has the store open with.
        cache_bytes: of status.db that each connection to it keeps in memory, one for each thread
            that is at it; None for 8 MiB, or for what this process has the store open with.
        keepalive_time: seconds without heartbeat after which a transaction begun by this
            client is aborted; at least 0.5. Heartbeats come from a thread of this process: one that
            keeps Python's lock for longer (C code, a hundred threads that compute) needs more.

    Raises:
        StoreNotFoundError: there is none, and `create` is false or `read_only` is true; or this
            process has it open, and it was removed or replaced since.
        IncompatibleStoreError: the store is of a newer format, or the path is no store.
        ValueError: the path is empty or ":memory:", or an option makes no sense, or this process
            has the store open with another.
    """
    if path in ("", ":memory:"):
        raise ValueError(
            f"{path!r} names no directory, and a store is one. For a store that goes with the "
            "program take tempfile.TemporaryDirectory(), below /dev/shm for one in memory"
        )
    if isinstance(path, str) and "://" in path:
        raise NotSupportedError(
            f"{path!r}: this version opens stores on this machine alone; give a directory"
        )
    if keepalive_time < MIN_KEEPALIVE:
        raise ValueError(
            f"keepalive_time={keepalive_time:g}: at least {MIN_KEEPALIVE:g} s, for heartbeats may "
            "be late behind threads that compute"
        )
    make = create and not read_only
    return Client(instances.acquire(path, make, read_only, history, cache_bytes), keepalive_time)


class Client(CatalogOperations, ApplicationOperations, Closing):
    """A connection to a store. Shared by threads; a context manager."""

    _elsewhere = "connect there too; a transaction crosses processes as txn.serialize()"

    def __init__(self, instance: Instance, keepalive_time: float) -> None:
        self.instance = instance
        self._keepalive_time = keepalive_time
        self._closed = False
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()  # those outside transactions

    def __repr__(self) -> str:
        kind = ", read only" if self.instance.read_only else ""
        return f"<Client of {self.path!r}{kind}{', closed' if self._closed else ''}>"

    @shielded
    def close(self) -> None:
        """Close. The last client of a store in this process closes the store. Twice is fine."""
        if not self._closed:
            close_producers(self)
            self._closed = True
            self._end_sessions()
            instances.release(self.instance)

    @property
    def path(self) -> str:
        """The store's directory."""
        return str(self.instance.store.directory.path)

    def _itself(self) -> Client:
        return self

    def _end_sessions(self) -> None:
        """Let the next row or message of a session find out that the client is closed."""
        for session in self._sessions:
            session.end()
        for known in list(self.instance.contexts.values()):
            context: TxnContext | None = known()
            if context is not None:
                for one in context.sessions:
                    one.end()

    # -- transactions ------------------------------------------------------------------

    def new_transaction(
        self,
        timeout: float | None = 60.0,
        isolation: Isolation = "snapshot",
        locking: Locking = "optimistic",
        keepalive: bool = True,
        lock_timeout: float = LOCK_TIMEOUT,
    ) -> Transaction:
        """Begin a transaction.

        Args:
            timeout: seconds from now after which it is aborted; None for no such bound, only
                that of its heartbeats (for jobs).
            isolation: "snapshot": it reads one snapshot, and of two that write the same key the
                first to commit wins; "serializable": also what it read must be unchanged.
            locking: "optimistic": nobody waits, who commits first wins; "partition": it
                locks each tablet that it writes to, and older transactions wait for it.
            keepalive: send heartbeats while this handle lives.
            lock_timeout: seconds for which it waits, in all of its timeout, for the end of a
                younger transaction that has locked a tablet.
        """
        return self.begin(timeout, isolation, locking, keepalive, None, lock_timeout)

    def begin(
        self,
        timeout: float | None,
        isolation: Isolation,
        locking: Locking,
        keepalive: bool,
        age_ts: Timestamp | None,
        lock_timeout: float = LOCK_TIMEOUT,
    ) -> Transaction:
        """`new_transaction`, as old for wait-die as one that began at `age_ts`."""
        self.require_writable()
        one_of("isolation", isolation, Isolation)
        one_of("locking", locking, Locking)
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout is seconds above 0, or None, not {timeout!r}")
        if lock_timeout < 0:
            raise ValueError(f"lock_timeout is seconds, 0 or above, not {lock_timeout!r}")
        context = begin(
            self.instance,
            timeout=timeout,
            isolation=isolation,
            locking=locking,
            keepalive=self._keepalive_time,
            age_ts=age_ts,
        )
        context.lock_timeout = lock_timeout
        return Transaction(self, context, joined=False, keepalive=keepalive)

    def transaction(self, **options: Any) -> Transaction:
        """`with client.transaction() as txn:` commits at the end, rolls back on an exception.

        Takes the options of `new_transaction`.
        """
        return self.new_transaction(**options)

    def run(
        self,
        fn: Callable[[Transaction], T],
        attempts: int | None = None,
        deadline: float | None = DEADLINE,
        **options: Any,
    ) -> T:
        """Call `fn(txn)` and commit; again, after a growing pause, on whatever is retriable.

        A retry keeps the age of the first attempt, so that wait-die cannot starve it.

        Args:
            fn: does the work with the transaction that it gets; may run several times.
            attempts: how often at most; None for any number.
            deadline: seconds from now after which no other attempt begins; None for never. One
                that runs goes on: its own bound is its timeout.
            **options: of `new_transaction`.

        Raises:
            TxnkvError: the last attempt's, or one that is not retriable.
        """
        hold = Hold(self.instance.topics)
        try:
            retries = Retries(self.instance, attempts, deadline)
            return self._run(fn, retries, DEFAULTS | options, hold)
        finally:
            hold.release()

    def _run(
        self, fn: Callable[[Transaction], T], retries: Retries, settings: dict[str, Any], hold: Hold
    ) -> T:
        age_ts: Timestamp | None = None
        while True:
            txn = self.begin(**settings, age_ts=age_ts)
            txn.context.hold = hold
            age_ts = txn.age
            try:
                with txn:
                    result = fn(txn)
                return result
            except CommitOutcomeUnknownError as error:
                if self.outcome(error.txn_id) is TxnState.COMMITTED:
                    return result
                pause = retries.pause(error, retriable=True)
            except TxnkvError as error:
                pause = retries.pause(error, retriable=error.retriable)
            time.sleep(pause)

    @shielded
    def outcome(self, txn_id: int) -> TxnState:
        """Drive a transaction whose commit broke off to its end, and return how it ended."""
        local = TxnId(txn_id).local
        context = self._unstored(local)
        if context is not None:
            return one_phase_commit.current(context).state
        row = self.instance.coordinator.orchestrator.finish(local)
        return row.state

    def new_session(
        self, flush_mode: FlushMode = "manual", buffer_bytes: int | None = BUFFER_BYTES
    ) -> Session:
        """A session outside of any transaction: each flush is one of its own. See `Session`."""
        self.require_writable()
        session = Session(self, None, flush_mode, buffer_bytes)
        self._sessions.add(session)
        return session

    @shielded
    def transaction_state(self, id: int) -> TxnState:
        """The state of a transaction.

        Raises:
            TxnNotFoundError: no transaction has this id, it never wrote anything, or it ended
                so long ago that it was forgotten.
            CommitOutcomeUnknownError: its commit broke off, and how that ended was forgotten.
        """
        self.require_open()
        local = self._local(id)
        context = self._unstored(local)
        if context is not None and context.has_written:
            return one_phase_commit.current(context).state
        return self.instance.coordinator.get(local).state

    @shielded
    def transactions(self) -> list[TxnInfo]:
        """All transactions in the status table: those that have not ended, and recent ones."""
        self.require_open()
        with self.instance.store.status.read() as cur:
            rows = status_table.select(cur)
            participants = {
                row.txn_id: sum(map(len, status_table.participants(cur, row.txn_id).values()))
                for row in rows
            }
        return [
            TxnInfo(
                self.instance.coordinator.txn_id(row.txn_id),
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

    @shielded
    def abort_transaction(self, id: int) -> None:
        """Abort a transaction of any process. Twice is fine.

        Raises:
            TxnNotFoundError: no transaction has this id.
            InvalidTxnStateError: it is committed.
        """
        self.require_writable()
        local = self._local(id)
        context = self._unstored(local)
        if context is None or not one_phase_commit.abort_small(context, "aborted by hand"):
            two_phase_commit.abort_by_hand(self.instance, local)

    @shielded
    def keep_transaction_alive(self, id: int) -> None:
        """Send one heartbeat for an open transaction of any process.

        Raises:
            TxnNotFoundError: no transaction has this id.
            InvalidTxnStateError: it is being committed, or has ended.
        """
        self.require_writable()
        local = self._local(id)
        context = self._unstored(local)
        if context is not None:
            context.require_open("keep alive")  # it needs no heartbeats
        else:
            self.instance.coordinator.keep_alive(local)

    def _unstored(self, local: int) -> TxnContext | None:
        """A transaction of this process of which status.db knows nothing, or not yet."""
        known = self.instance.contexts.get(local)
        context: TxnContext | None = None if known is None else known()
        return None if context is None or context.stored else context

    def _local(self, id: int) -> int:
        number, coordinator = TxnId(id), self.instance.coordinator
        if number.tcid not in (0, coordinator.tcid) or number.local > MAX_TIMESTAMP:
            raise TxnNotFoundError(
                f"{number!r} was not found: the ids of this store begin with {coordinator.tcid}, "
                f"the highest id given so far is {coordinator.highest_id()}"
            )
        return number.local

    # -- reading -----------------------------------------------------------------------

    @shielded
    def snapshot(self, at: Timestamp | datetime | None = None) -> Snapshot:
        """The store at one instant: the latest, or at a timestamp or aware datetime.

        Raises:
            ValueError: `at` is in the future, or a naive datetime.
        """
        self.require_open()
        return Snapshot(self, self.timestamp_of(at))

    def timestamp_of(self, at: At) -> Timestamp:
        """The timestamp that `at` names; the latest snapshot for None."""
        coordinator = self.instance.coordinator
        if at is None:
            return coordinator.latest()
        if isinstance(at, Snapshot):
            at.require_open()
            return at.timestamp
        if isinstance(at, datetime):
            return coordinator.snapshot_at(Timestamp.from_datetime(at))
        return coordinator.snapshot_at(Timestamp(at))

    # -- looking after -----------------------------------------------------------------

    @shielded
    def stats(self) -> dict[str, Any]:
        """Numbers about the store: tables with rows, bytes and row sets; transactions; files."""
        self.require_open()
        return store_stats(self.instance)

    def metrics(self) -> MetricsSnapshot:
        """Counters, gauges and histograms of this process, with an OpenMetrics text."""
        self.require_open()
        return self.instance.coordinator.metrics.snapshot()

    @shielded
    def check(self, progress: Callable[[int, int], None] | None = None) -> CheckReport:
        """Read everything and compare it with what it should be.

        Args:
            progress: called with (row sets done, row sets in all).
        """
        self.require_open()
        return check_store(self.instance, progress)

    @shielded
    def repair_clock(self) -> Timestamp:
        """Set the store's clock to this machine's, where that is ahead; it never goes back.

        Needed once, when a store was not used for more than ten years: commits are refused until
        then, for the machine's clock might be wrong.

        Returns:
            The store's last timestamp.
        """
        self.require_writable()
        with self.instance.store.status.write() as cur:
            return clock.repair(cur)

    def compact(self, progress: Callable[[int, int], None] | None = None) -> CompactReport:
        """Merge row sets now, leave out what no snapshot sees, and give back space.

        Readers and writers go on meanwhile. The files get shorter only where no other process
        has them open; otherwise their space is free for what is written next.

        Args:
            progress: called with (row versions done, row versions in all).

        Raises:
            StorageFullError: the disk is full; what is done is done, nothing is lost.
        """
        self.require_writable()
        return compact_store(self.instance, progress)

    def require_open(self) -> None:
        """Refuse a closed client.

        Raises:
            ClosedError: it was closed.
        """
        if self._closed:
            raise ClosedError(f"the client of {self.path} was closed; connect again")

    def require_writable(self) -> None:
        """Refuse to write where this client was opened to read only.

        Raises:
            NotSupportedError: it was.
            ClosedError: it is closed.
        """
        self.require_open()
        if self.instance.read_only:
            raise NotSupportedError(
                f"the store {self.path} was opened with read_only=True: connect without it to write"
            )
