"""The coordinator of a store in this process: begin, look up, keep alive, lock, end."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

import apsw

from txnkv.coordinator import liveness, partition_locks, payload, status_table
from txnkv.coordinator.applications import ApplicationParticipants
from txnkv.coordinator.commit_log import CommitLog
from txnkv.coordinator.damage import Damage
from txnkv.coordinator.ids import (
    EPOCH,
    LOGICAL_BITS,
    IdRanges,
    Timestamp,
    TxnId,
    low_water_mark,
    raise_clock,
    refuse_jump,
    stamp_of,
    wall_timestamp,
    warn_ahead,
)
from txnkv.coordinator.jobs import find_named, name_transaction
from txnkv.coordinator.maintenance import Maintenance
from txnkv.coordinator.orchestration import Orchestrator
from txnkv.coordinator.partition_locks import LockAnswer, Verdict
from txnkv.coordinator.status_schema import one, one_whole
from txnkv.coordinator.status_table import PartIds, TxnRow, TxnState, past_timeout
from txnkv.errors import (
    CorruptionError,
    InvalidTxnStateError,
    TransactionLockedError,
    TransactionTimedOutError,
    TxnkvError,
)
from txnkv.metrics import Metrics
from txnkv.storage import Store, back_off, boot_id, brief, clock, lengthy, shielded

KEEPALIVE_TIME: Final = 30.0
_UNCHANGED: Final = Exception("nothing was changed")
"""Has a write rolled back."""


def initialise(cur: apsw.Cursor) -> None:
    """The first rows of a new status.db."""
    identity = _new_tcid(), os.urandom(32)
    cur.execute("INSERT INTO store (id, tcid, token_key) VALUES (1, ?, ?)", identity)
    # Snapshots before the first commit are of the store's beginning: one of time 0 would be older
    # than any history.
    begun = wall_timestamp()
    cur.execute(
        "INSERT INTO clock_row (id, last_timestamp, last_commit, next_txn_id, stage_sequence) "
        "VALUES (1, ?, ?, 1, 0)",
        (begun, begun),
    )


def _new_tcid(before: int = 0) -> int:
    """Draw the coordinator id of a store, another one than `before`."""
    while (tcid := int.from_bytes(os.urandom(2), "big") | 1) == before:
        pass
    return tcid


def renew(cur: apsw.Cursor) -> None:
    """Make a copy of a status database that of a store of its own, which nobody uses yet.

    Both stores may be in use from then on, and give the same numbers to other transactions; so
    what names the one must not be taken for the other's. With the store id in FORMAT two things
    are drawn anew: the TCID, with which the ids of transactions begin as users see them, and the
    key of the tokens. Transactions that had not committed are to be aborted, and no process lives.
    """
    (tcid,) = one(cur, "SELECT tcid FROM store")
    cur.execute("UPDATE store SET tcid = ?, token_key = ?", (_new_tcid(tcid), os.urandom(32)))
    cur.execute(
        "UPDATE transactions SET state = ?, heartbeat_slot = NULL, "
        "reason = 'open when the backup was taken' WHERE state IN (?, ?)",
        (
            int(TxnState.ABORT_IN_PROGRESS),
            int(TxnState.OPEN),
            int(TxnState.COMMIT_IN_PROGRESS),
        ),
    )
    cur.execute("DELETE FROM id_ranges")
    cur.execute("UPDATE lease SET owner_slot = NULL")


def _require_whole(store: Store) -> None:
    """Refuse a status.db that lacks what was durable since the machine was started.

    Raises:
        CorruptionError: its WAL is damaged at some commit, of which SQLite says nothing, or an
            older file is in its place.
    """
    known = store.runtime.durable  # before the look: others go on
    with store.status.read() as cur:
        (last,) = one_whole(cur, "SELECT last_commit FROM clock")
    if last < known:
        raise CorruptionError(
            f"{store.status.path} has no commit after {Timestamp(last).datetime}, those up "
            f"to {Timestamp(known).datetime} were durable: its WAL is damaged, or an older file is "
            "in its place. Put both back as they were, or restore the store from a backup. To go "
            f"on without these commits remove {store.runtime.folder} while nobody has it open"
        )


_KINDS: Final = 64
_FOREVER: Final = 1e11  # seconds, whose microseconds are a timestamp
"""Kinds of transactions whose fields are kept, at most: by what they ask for."""


class Coordinator:
    """Transactions of one store.

    Args:
        store: the open store.
        history: seconds for which ended transactions, and row versions, are remembered.
    """

    def __init__(self, store: Store, history: float) -> None:
        self.store = store
        store.extents.keep()
        self._boot = boot_id()
        self.history = history
        self._warned = False
        self._kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.metrics = Metrics()
        self.damage = Damage(self.metrics.failing_parts)
        self.orchestrator = Orchestrator(store, self.damage)
        self.ids = IdRanges(store)
        self.heartbeats = liveness.Heartbeater(store)
        self.maintenance = Maintenance(store, self.orchestrator, history)
        self.log = CommitLog(store, self.metrics, self.maintenance.start)
        _require_whole(store)
        with store.status.read() as cur:
            self.tcid, self.token_key = one(cur, "SELECT tcid, token_key FROM store")
        self.orchestrator.tcid = self.tcid
        self.orchestrator.add_handler(ApplicationParticipants(store, self.log))

    # -- snapshots ---------------------------------------------------------------------

    def latest(self) -> Timestamp:
        """The latest snapshot: every commit at or below it is visible, none will be added."""
        return self.log.latest()

    @lengthy
    def snapshot_at(self, when: Timestamp) -> Timestamp:
        """A snapshot at `when`, which no later commit can change. In a store that is open to read
        only, whose clock cannot be raised to it, the latest one where that is earlier.

        Raises:
            ValueError: `when` is in the future.
        """
        if when <= self.latest():
            return when
        now = clock.now_micros()
        if when.micros > now:
            raise ValueError(
                f"snapshot {when.datetime.isoformat()} is in the future, it is now "
                f"{(EPOCH + timedelta(microseconds=now)).isoformat()}: name a time that has passed"
            )
        if self.store.directory.read_only:
            return self.latest()
        with self.store.status.write() as cur:
            (last,) = one(cur, "SELECT last_timestamp FROM clock")
            refuse_jump(last, when.micros)
            raise_clock(cur, when)
        return when

    def snapshot_by(self, when: datetime) -> Timestamp:
        """`snapshot_at` a time. Warns, once, where timestamps are ahead of the clock.

        Raises:
            ValueError: `when` is in the future, or no time that a timestamp has.
        """
        named = Timestamp.from_datetime(when)
        self._warned = self._warned or warn_ahead(self.latest(), str(self.store.directory.path))
        return self.snapshot_at(named)

    # -- begin -------------------------------------------------------------------------

    def begin(
        self,
        *,
        timeout: float | None,
        isolation: str,
        locking: str,
        keepalive: float,
        age_ts: Timestamp | None = None,
        snapshot: Timestamp | None = None,
        txn_id: int | None = None,
    ) -> TxnRow:
        """A new transaction. No I/O beyond a range of ids now and then.

        Args:
            timeout: seconds, or None.
            isolation: "snapshot".
            locking: "optimistic" or "partition".
            keepalive: seconds without heartbeat until it is aborted.
            age_ts: when the first attempt began, for a retry.
            snapshot: a recent one, that is pinned; the latest for None.
            txn_id: an id that lives; None for a new one.

        Returns:
            The row as `write_open` will store it when somebody else needs it.
        """
        if snapshot is None:
            snapshot = self.latest()
        micros = None if timeout is None or timeout > _FOREVER else int(timeout * 1e6)
        kind = micros, isolation, locking, keepalive
        fields = self._kinds.get(kind)
        if fields is None:
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
            fields = self._kinds[kind] = status_table.fields_of(
                state=TxnState.OPEN,
                timeout=micros,
                boot=self._boot,
                keepalive=int(keepalive * 1e6),
                isolation=isolation,
                locking=locking,
                owner_slot=0,
                owner_start=0,
            )
        row = object.__new__(TxnRow)  # the constructor of a frozen class takes three times as long
        own = row.__dict__
        own.update(fields)
        own["txn_id"] = self.ids.begin() if txn_id is None else txn_id
        own["snapshot_ts"] = snapshot
        now = clock.now_micros() << LOGICAL_BITS
        own["begin_ts"] = own["last_update_ts"] = stamp_of(now) if now > snapshot else snapshot
        if micros is not None:
            own["deadline"] = clock.monotonic_micros() + micros
        if age_ts is not None:
            own["age_ts"] = age_ts
        return row

    def write_open(
        self,
        row: TxnRow,
        *,
        fixed: bool = False,
        name: str | None = None,
        parts: PartIds | None = None,
    ) -> TxnRow:
        """Store the OPEN row, with an entry in the heartbeat table. Again after a failure is fine.

        Args:
            row: of a transaction that `begin` gave.
            fixed: as `fix_snapshot`.
            name: under which it is to be found.
            parts: participants by kind, where the caller writes to status.db next and acknowledges
                nothing before: then this is durable with that, and not synced by itself.

        Raises:
            TransactionTimedOutError: its timeout passed before it wrote anything.
        """
        if past_timeout(row):
            self.ids.ended(row.txn_id)
            raise TransactionTimedOutError(
                f"transaction {row.txn_id} passed its timeout of {(row.timeout or 0) / 1e6:g} s "
                "before it wrote anything: begin a new one, with a longer timeout"
            )
        with self.store.status.write(sync=parts is None) as cur:
            there = status_table.find(cur, row.txn_id)
            slot = None if there is None else there.heartbeat_slot
            if slot is None:
                slot = liveness.free_slot(cur, self.store)
            owner_slot, owner_start = self.log.runtime.owner
            row = replace(row, heartbeat_slot=slot, owner_slot=owner_slot, owner_start=owner_start)
            now = clock.monotonic_micros()
            self.store.runtime.heartbeat_register(slot, row.txn_id, now)
            status_table.insert(cur, row)
            if fixed:
                partition_locks.fix_snapshot(cur, row)
            if name is not None:
                name_transaction(cur, name, row.txn_id)
            self.ids.record(cur)
            for kind, ids in (parts or {}).items():
                status_table.register_participant(cur, row.txn_id, kind, ids)
        self.ids.ended(row.txn_id)  # from now on the row keeps the low water mark down
        self.maintenance.set_pace(row.keepalive / 4e6)
        self.maintenance.start()
        return row

    # -- look up and keep alive --------------------------------------------------------

    @brief
    def get(self, txn_id: int) -> TxnRow:
        """The status row; of a small transaction, what the commit log says.

        Raises:
            TxnNotFoundError: no such transaction, or it ended and was forgotten.
        """
        with self.store.status.read() as cur:
            committed = None
            if status_table.find(cur, txn_id) is None:
                committed = payload.find(cur, txn_id)
            row = (
                status_table.get(cur, txn_id)
                if committed is None
                else status_table.small(txn_id, committed)
            )
        if row.commit_ts is not None:  # the read has synced it: whoever is told of it can read it
            self.store.runtime.raise_durable(row.commit_ts)
        return row

    @contextmanager
    def write_beside(self) -> Iterator[apsw.Cursor]:
        """Write to status.db, unsynced, nothing that the log has in memory: what is known stays so.
        Where nothing was changed there is no write, and nobody looks for one.
        """
        database = self.store.status
        failed: BaseException | None = None
        cur = database.begin_write()
        try:
            number, before = self.store.runtime.change_number(), cur.connection.total_changes()
            yield cur
            if cur.connection.total_changes() == before:
                number, failed = None, _UNCHANGED
        except BaseException as error:
            failed = error
            raise
        finally:
            database.end_write(cur, failed, False, None)
        self.log.moved_on(number)

    def highest_id(self) -> int:
        """The highest id that may have been given out."""
        with self.store.status.read() as cur:
            (following,) = one(cur, "SELECT next_txn_id FROM clock")
        return int(following) - 1

    def low_water_mark(self) -> int:
        with self.store.status.read() as cur:
            return low_water_mark(cur)

    def keep_alive(self, txn_id: int) -> None:
        """Beat once for an OPEN transaction.

        Raises:
            TxnNotFoundError: no such transaction.
            InvalidTxnStateError: it is being committed, or has ended.
        """
        row = self.get(txn_id)
        if row.state is not TxnState.OPEN:
            phase = (
                "is in commit phase"
                if row.state in (TxnState.COMMIT_IN_PROGRESS, TxnState.FINALIZE_IN_PROGRESS)
                else f"is not available for further commits: {row.describe_state()}"
            )
            raise InvalidTxnStateError(f"cannot keep alive: transaction {txn_id} {phase}")
        if row.heartbeat_slot is not None:
            self.store.runtime.heartbeat(row.heartbeat_slot, txn_id, clock.monotonic_micros())

    def txn_id(self, local: int) -> TxnId:
        return TxnId.of(self.tcid, local)

    # -- locks -------------------------------------------------------------------------

    def admit(
        self,
        row: TxnRow,
        kind: str,
        ids: Iterable[int],
        *,
        transactional: bool,
        lock_timeout: float = partition_locks.LOCK_TIMEOUT,
        named: Callable[[int], str] | None = None,
    ) -> None:
        """Before a write to participants: take their locks, or meet those of others.

        Waits while an older transaction may wait (wait-die), up to its timeout. `named` tells the
        name of a participant.

        Raises:
            TransactionLockedError: a lock stood in the way. With `transactional`, a younger
                transaction was aborted; an older one that waited for `lock_timeout` stays OPEN.
            TransactionTimedOutError: its timeout passed while it waited; it is aborted.
            InvalidTxnStateError: the transaction is not OPEN.
        """
        wanted = list(ids)
        give_up = time.monotonic() + lock_timeout
        for tries in itertools.count(1):
            answer = self._ask(row, kind, wanted, transactional)
            if answer.verdict is Verdict.GRANTED:
                return
            locked = named(answer.id) if named else f"{kind} {answer.id}"
            holder = f"{locked} is locked by transaction {answer.holder}"
            if answer.verdict is Verdict.DIE:
                if transactional:
                    self.abort(row.txn_id, f"{holder}, which is older", TransactionLockedError)
                    raise TransactionLockedError(
                        f"{holder}, which is older: transaction {row.txn_id} was aborted "
                        "(wait-die). Run it again"
                    )
                raise TransactionLockedError(
                    f"{holder}; a write outside of a transaction does not wait. Try it again later"
                )
            if past_timeout(row):
                aborted = self.abort(row.txn_id, f"timed out: {holder}", TransactionTimedOutError)
                raise status_table.ending_error(aborted, "write")
            if time.monotonic() > give_up:
                raise TransactionLockedError(
                    f"{holder}, which is younger, and did not end within {lock_timeout:g} s. "
                    f"Transaction {row.txn_id} is still open: try again"
                )
            time.sleep(back_off(tries, 0.002, 0.05))

    @shielded
    def fix_snapshot(self, txn_id: int) -> Timestamp:
        """The snapshot of a transaction with partition locks, that no lock moves from now on.

        Raises:
            InvalidTxnStateError: the transaction is not OPEN.
        """
        with self.store.status.write() as cur:
            return partition_locks.fix_snapshot(cur, status_table.get_open(cur, txn_id, "read"))

    @brief
    def snapshot_of(self, row: TxnRow) -> Timestamp:
        """Return the snapshot that a transaction whose row is stored would read now."""
        with self.store.status.read() as cur:
            return partition_locks.snapshot_of(cur, row)

    def _ask(self, row: TxnRow, kind: str, ids: list[int], transactional: bool) -> LockAnswer:
        if row.locking != "partition":
            with self.store.status.read() as cur:
                return partition_locks.meet(cur, row if transactional else None, kind, ids)
        with self.store.status.read() as cur:
            if all(partition_locks.holder_of(cur, kind, id) == row.txn_id for id in ids):
                return LockAnswer(Verdict.GRANTED)
        with self.store.status.write() as cur:
            status_table.get_open(cur, row.txn_id, "lock a partition")
            return partition_locks.request(cur, row, kind, ids)

    # -- end ---------------------------------------------------------------------------

    def leave(self, row: TxnRow) -> None:
        """Have the leader's next round abort a transaction, if it is still open then: its handle is
        gone.
        """
        if row.heartbeat_slot is not None:
            self.store.runtime.heartbeat(row.heartbeat_slot, row.txn_id, liveness.LEFT)

    def abort(self, txn_id: int, reason: str, error: type[TxnkvError] | None = None) -> TxnRow:
        """Abort a transaction and wait until every participant has done so. Twice is fine.

        Raises:
            TxnNotFoundError: no such transaction.
            InvalidTxnStateError: it is committed.
        """
        self.orchestrator.start_abort(txn_id, reason, error)
        return self.orchestrator.finish(txn_id)

    def end_named(self, name: str) -> None:
        """End the transaction under a name, if there is one that has not ended: an open one is
        aborted, one that is being committed is committed.
        """
        with self.store.status.read() as cur:
            found = find_named(cur, name)
        if found is not None and not found.row.state.ended:
            self.end(found.row.txn_id, f"{name} begins another one")

    def end(self, txn_id: int, reason: str, error: type[TxnkvError] | None = None) -> None:
        """End a stored transaction: an open one is aborted, one that is being committed is
        committed.

        Raises:
            TxnNotFoundError: no such transaction, or it ended and was forgotten.
        """
        with suppress(InvalidTxnStateError):
            self.orchestrator.start_abort(txn_id, reason, error, only_open=True)
        self.orchestrator.finish(txn_id)

    def recover(self) -> None:
        """At open: resume what dead processes left, when nobody else leads."""
        with self.store.status.read() as cur:
            rows = status_table.live(cur)
        for row in rows:
            if row.state is TxnState.OPEN:
                liveness.refresh_missing(self.store, row)
                self.maintenance.set_pace(row.keepalive / 4e6)
        if rows:
            with self.damage.guard("the store", "recovery"):  # the background tries it again
                self.maintenance.round()
        self.maintenance.start()

    def close(self) -> None:
        self.log.close()
        self.heartbeats.close()
        self.maintenance.close()
        self.ids.close()

    def after_fork_in_child(self) -> None:
        """Threads, ids and the lease belong to the parent."""
        self.ids = IdRanges(self.store)
        self.heartbeats.forget_thread()
        self.maintenance.forget_thread()
        self.log.after_fork_in_child()
