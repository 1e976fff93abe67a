"""The acknowledgements of one transaction, from the call to the end.

    exclusive, its consumer in this process      in memory (`exclusive`) until the commit writes
                                                 them to status.db, in its SQLite transaction
    shared, or counted deliveries, or elsewhere  rows of status.db from the call on
    a stored transaction                         the same; the commit point applies them

An ack that others must see is in status.db when the call returns, though not yet on the disk:
what comes after it is there later, so the commit makes it durable, and without one it is void.

Outside of a transaction acks wait here for the flush; nothing can refuse them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import apsw

from txnkv.coordinator import status_table
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.states import TxnState
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import (
    AckConflictError,
    ClosedError,
    NotSupportedError,
)
from txnkv.storage import dropped
from txnkv.storage.seam import clock, declare_fault_point, fault_point
from txnkv.storage.store import Store
from txnkv.topics import catalog, cursors, pending_acks
from txnkv.topics.exclusive import Exclusive
from txnkv.topics.held_acks import HeldAcks, by_partition, refuse_unknown, remember
from txnkv.topics.message import MessageId
from txnkv.topics.pending_acks import Holder, conflict
from txnkv.topics.ranges import Ranges
from txnkv.topics.subscription_info import EXCLUSIVE, SubscriptionInfo

if TYPE_CHECKING:
    from txnkv.topics.engine import TopicEngine
    from txnkv.topics.holding import Hold

KIND: Final = "subscription"

_GRACE: Final = 1_000_000
"""Microseconds after a deadline by which a commit that was in time is over."""

declare_fault_point("acks.registered", "acks of a transaction are pending in status.db")


class PendingAcks:
    """What one transaction acknowledges. Not for two threads at a time.

    Args:
        engine: of the topics.
        row: of the transaction; stored when it has a heartbeat slot, or is not OPEN.
        transactional: False for acks outside of any transaction.
        hold: of the `client.run` that the transaction is an attempt of.

    Attributes:
        count: how many messages were named.
    """

    def __init__(
        self,
        engine: TopicEngine,
        row: TxnRow,
        *,
        transactional: bool,
        hold: Hold | None = None,
    ) -> None:
        self.count = 0
        self._engine = engine
        self._store = engine.store
        self._row = row
        self._transactional = transactional
        self._hold = hold
        small = row.heartbeat_slot is None and row.state is TxnState.OPEN
        self._stored = transactional and not small
        self._acks: dict[int, HeldAcks] = {}
        self._rows = 0
        self._ended = False
        self._catalog: int | None = None
        self._token = object()
        self._watched = False
        self._pid = os.getpid()

    # -- acknowledging -----------------------------------------------------------------

    def add(self, info: SubscriptionInfo, ids: Sequence[MessageId], *, cumulative: bool) -> None:
        """Acknowledge these messages, or with `cumulative` each with all before it.

        Raises:
            AckConflictError: another ack was first; nothing of this call was taken. The
                transaction is to be aborted.
            InvalidTxnStateError: the transaction is not open.
            OffsetOutOfRangeError: there is no such message.
            TopicNotFoundError: the topic was dropped.
            NotSupportedError: a cumulative ack of a shared subscription.
        """
        if cumulative and info.type != EXCLUSIVE:
            raise NotSupportedError(
                f"{info} is {info.type}: others have messages before this one. Acknowledge "
                "them one by one, or subscribe exclusively"
            )
        named = by_partition(info, ids, cumulative=cumulative)
        acks = self._of(info)
        if self._transactional and self._catalog is None:
            self._catalog = self._engine.live_at(info.topic)
        if not self._transactional:
            self._refuse_unknown(info, named)
            remember(acks, named, cumulative=cumulative)
        elif acks.state is None:
            self._register(acks, named, cumulative=cumulative)
        else:
            self._take(acks, acks.state, named, cumulative=cumulative)
        self.count += len(ids)

    def _of(self, info: SubscriptionInfo) -> HeldAcks:
        found = self._acks.get(info.id)
        if found is None:
            state = None
            if self._transactional and not self._stored and not info.leased:
                state = self._engine.subscriptions.exclusive(info.id, self)
            found = self._acks[info.id] = HeldAcks(info, state)
        return found

    def _take(
        self, acks: HeldAcks, state: Exclusive, named: dict[int, list[int]], *, cumulative: bool
    ) -> None:
        state.look()
        self._refuse_unknown(acks.info, named)
        if not self._watched:
            self._watch()
        for number, offsets in named.items():
            partition_id = acks.info.topic.partitions[number]
            own = acks.ranges(partition_id)
            if cumulative:
                state.take_position(self._token, own, number, offsets[0])
                acks.positions[partition_id] = offsets[0] + 1
            else:
                state.take(own, number, offsets)

    def _register(self, acks: HeldAcks, named: dict[int, list[int]], *, cumulative: bool) -> None:
        info = acks.info
        local = self._engine.subscriptions.exclusive(info.id)
        if local is not None:
            for number, offsets in named.items():
                local.refuse(number, offsets, cumulative=cumulative)
        self._watch()
        rows = 0
        with self._store.status.write(sync=False) as cur:
            if self._stored:
                self._join(cur, [info.id])
            for number, offsets in named.items():
                partition_id = info.topic.partitions[number]
                refuse_unknown(info, number, offsets, catalog.next_offset(cur, partition_id))
                txn_id = self._row.txn_id
                pending_acks.refuse(
                    cur, self._store, info, number, txn_id, offsets, cumulative=cumulative
                )
                position = offsets[0] + 1 if cumulative else None
                ranges = Ranges() if cumulative else Ranges((at, at + 1) for at in offsets)
                if local is not None:
                    ranges = local.applied({partition_id: ranges})[partition_id]
                rows += self._write_rows(cur, info, partition_id, ranges, position)
            cursors.bump(cur, info.id)
        self._rows += rows
        fault_point("acks.registered")

    def _write_rows(
        self,
        cur: apsw.Cursor,
        info: SubscriptionInfo,
        partition_id: int,
        ranges: Ranges,
        position: int | None,
    ) -> int:
        runtime, hold = self._store.runtime, self._hold
        if hold is not None:
            hold.in_status = True
        holder = Holder(
            self._row.txn_id,
            self._stored,
            runtime.slot,
            runtime.slot_start,
            self._row.deadline,
            None if hold is None else hold.id,
        )
        rows = pending_acks.register(cur, info, partition_id, holder, ranges)
        if position is not None:
            rows += pending_acks.register_position(cur, info, partition_id, holder, position)
        return rows

    def _join(self, cur: apsw.Cursor, ids: Sequence[int]) -> None:
        status_table.get_open(cur, self._row.txn_id, "acknowledge")
        status_table.register_participant(cur, self._row.txn_id, KIND, ids)

    def _refuse_unknown(self, info: SubscriptionInfo, named: dict[int, list[int]]) -> None:
        for number, offsets in named.items():
            end = self._engine.subscriptions.known_end(info.topic.partitions[number], offsets[-1])
            if offsets[-1] >= end:
                self._engine.require_live(info.topic)
            refuse_unknown(info, number, offsets, end)

    # -- the commit of a small one -----------------------------------------------------

    def validate(self, cur: apsw.Cursor, latest: Timestamp) -> None:
        """Inside the SQLite transaction that commits: is all still this transaction's?

        Raises:
            AckConflictError: it is not. The transaction is to be aborted.
            TopicNotFoundError: a topic was dropped.
        """
        if not self._transactional:
            return
        topics = [acks.info.topic for acks in self._acks.values()]
        self._engine.refuse_dropped(cur, self._catalog, topics)
        if self._rows and pending_acks.count(cur, self._row.txn_id) != self._rows:
            raise AckConflictError(
                f"acknowledgements of transaction {self._row.txn_id} were given to others: it "
                "passed its deadline. It was aborted whole; begin a new one"
            )
        for acks in self._acks.values():
            if acks.state is not None and not acks.state.current(cur):
                self._compare(cur, acks)

    def _compare(self, cur: apsw.Cursor, acks: HeldAcks) -> None:
        """What is in memory with what status.db has."""
        info = acks.info
        for number, partition_id in enumerate(info.topic.partitions):
            for first, last in acks.held.get(partition_id, ()):
                deleted = cursors.deleted_in(cur, info.id, partition_id, first, last)
                held = pending_acks.rows(cur, self._store, info.id, partition_id, first, last)
                if deleted or held:
                    raise conflict(info, number, first, "was acknowledged first by another process")
            position = acks.positions.get(partition_id, 0)
            if position:
                last = position - 1
                held = pending_acks.rows(cur, self._store, info.id, partition_id, 0, position)
                if held or cursors.deleted_in(cur, info.id, partition_id, last, position):
                    raise conflict(info, number, last, "was acknowledged first by another process")

    def write(self, cur: apsw.Cursor, stamp: Timestamp) -> None:
        """Inside the SQLite transaction that commits, once it has passed `validate`."""
        for acks in self._acks.values():
            if not self._transactional:
                self._write_plain(cur, acks)
            elif acks.state is not None:
                wanted = acks.held
                if acks.positions:
                    marks = {id: cursor.mark for id, cursor in acks.state.cursors.items()}
                    wanted = acks.whole(marks)
                acks.deleted = acks.state.applied(wanted)
                acks.number = self._store.status.change_number()
                acks.state.delete(cur, acks.deleted)
        if self._rows:
            pending_acks.apply(cur, self._row.txn_id)

    def _write_plain(self, cur: apsw.Cursor, acks: HeldAcks) -> None:
        """What is pending stays so; the rest is deleted."""
        info = acks.info
        marks = {
            id: cursors.mark_delete(cur, info.id, id) or 0 for id in {*acks.held, *acks.positions}
        }
        wanted = acks.whole(marks)
        for row in pending_acks.blocked(cur, self._store, info.id):
            if row.pending and row.partition_id in wanted:
                wanted[row.partition_id].remove(row.first, row.last)
        state = None if info.leased else self._engine.subscriptions.exclusive(info.id, self)
        acks.state = state
        if state is not None:
            wanted = state.take_plain(wanted)
            acks.held, acks.positions = wanted, {}
            acks.deleted = state.applied(wanted)
            acks.number = self._store.status.change_number()
            state.delete(cur, acks.deleted)
            return
        for partition_id, ranges in wanted.items():
            for first, last in ranges:
                pending_acks.delete(cur, info.id, partition_id, first, last)
        if wanted:
            cursors.bump(cur, info.id)

    def ended(self, committed: bool | None) -> None:
        """The small transaction has ended. Twice is fine; of a stored one its handler hears.

        Args:
            committed: None when nobody knows.
        """
        if self._ended:
            return
        self._ended = True
        if self._stored:
            return
        for acks in self._acks.values():
            if acks.state is not None:
                self._ended_in_memory(acks, acks.state, committed)
        if self._rows and not committed:
            with self._store.status.write(sync=False) as cur:
                pending_acks.give_back(cur, self._store, self._row.txn_id)

    def _ended_in_memory(self, acks: HeldAcks, state: Exclusive, committed: bool | None) -> None:
        with state.lock:
            if committed:
                state.committed(acks.number, acks.deleted)
            else:
                state.unsure()
            if not committed and self._transactional:
                if self._hold is not None:
                    self._hold.in_memory = True
                    state.hold(self._hold.id, acks.held, acks.positions)
                else:
                    state.return_all(acks.held, acks.positions)
            state.release(self._token, acks.held, acks.positions)

    # -- where it goes on --------------------------------------------------------------

    def stage(self, row: TxnRow) -> None:
        """The transaction is stored from now on: so are its acks.

        Raises:
            AckConflictError: another ack was first. The transaction is to be aborted.
            InvalidTxnStateError: the transaction is not open.
        """
        self._row = row
        self._to_status(stored=True)

    def move_out(self, state: Exclusive) -> None:
        """The consumer gives up its place: what its process's memory had goes to status.db."""
        if not self._ended and any(acks.state is state for acks in self._acks.values()):
            self._to_status(stored=self._stored)

    def _to_status(self, *, stored: bool) -> None:
        rows = 0
        self._stored = stored
        with self._store.status.write(sync=False) as cur:
            if stored and self._acks:
                self._join(cur, list(self._acks))
                pending_acks.made_stored(cur, self._row.txn_id)
            for acks in self._acks.values():
                if acks.state is None:
                    continue
                self._compare(cur, acks)
                held = acks.state.applied(acks.held)
                for partition_id in {*held, *acks.positions}:
                    ranges = held.get(partition_id, Ranges())
                    position = acks.positions.get(partition_id)
                    rows += self._write_rows(cur, acks.info, partition_id, ranges, position)
                cursors.bump(cur, acks.info.id)
        self._rows += rows
        for acks in self._acks.values():
            if acks.state is not None:
                acks.state.release(self._token, acks.held, acks.positions)
                acks.state = None
        fault_point("acks.registered")

    def expire(self) -> None:
        """The deadline of a small one has passed long ago, and nobody noticed."""
        deadline = self._row.deadline
        if deadline is not None and clock.monotonic_micros() > deadline + _GRACE:
            self.ended(committed=False)

    def _watch(self) -> None:
        """Have the thread ready that gives acks back when the transaction is dropped."""
        if not self._watched:
            self._watched = True
            dropped.ready()

    def __del__(self) -> None:
        if self._watched and not self._ended and not self._stored and self._pid == os.getpid():
            dropped.later(_give_back, self._acks, self._token, self._store, self._row.txn_id)


def _give_back(acks: dict[int, HeldAcks], token: object, store: Store, txn_id: int) -> None:
    """What a transaction had that was dropped without an end."""
    for one in acks.values():
        if one.state is not None:
            with one.state.lock:
                one.state.return_all(one.held, one.positions)
                one.state.release(token, one.held, one.positions)
    if any(one.state is None for one in acks.values()):
        with suppress(ClosedError), store.status.write(sync=False) as cur:
            pending_acks.give_back(cur, store, txn_id)
