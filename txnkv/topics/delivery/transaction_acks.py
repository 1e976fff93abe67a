"""The acknowledgements of one transaction, from the call to the end.

    exclusive, its consumer in this process      in memory (`exclusive`) until the commit writes
                                                 them to status.db, in its SQLite transaction
    shared, or counted deliveries, or elsewhere  rows of status.db from the call on
    a stored transaction                         the same; the commit point applies them

An ack that others must see is in status.db when the call returns, though not yet on the disk:
what comes after it is there later, so the commit makes it durable, and without one it is void.

Memory is checked at the commit point against what status.db has, where another process wrote there
since the first ack (`HeldAcks.version`): of two transactions that have one message one commits.

Outside of a transaction nothing can refuse acks, and they keep no message from anybody until they
are written; beside many rows they are rows for the commit point to find (`ack_rows.PLAIN`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import apsw

from txnkv.coordinator import Timestamp, TxnRow, TxnState, status_table
from txnkv.core import AckRun
from txnkv.errors import (
    AckConflictError,
    ClosedError,
    NotSupportedError,
    OffsetOutOfRangeError,
    TxnkvError,
)
from txnkv.storage import (
    Store,
    WhenDropped,
    clock,
    declare_fault_point,
    fault_point,
    later,
    new_rlock,
)
from txnkv.topics import subscription_catalog
from txnkv.topics.acks import Exclusive, Held, HeldAcks, Holder, ack_rows
from txnkv.topics.ranges import Ranges
from txnkv.topics.read import bounds
from txnkv.topics.subscription_catalog import MANY, SubscriptionInfo
from txnkv.topics.topics import Hold, Topics

KIND: Final = "subscription"
_GRACE: Final = 1_000_000
"""Microseconds after a deadline by which a commit that was in time is over."""

declare_fault_point("acks.registered", "acks of a transaction are pending in status.db")


class TransactionAcks:
    """The acknowledgements of one transaction. For one thread at a time, beside that of the
    consumer, which may close.

    Args:
        topics: of the store.
        row: of the transaction; stored when it has a heartbeat slot, or is not OPEN.
        transactional: False for acks outside of any transaction.
        hold: of the `client.run` that the transaction is an attempt of.

    Attributes:
        empty: nothing was named, but what was refused.
    """

    def __init__(
        self,
        topics: Topics,
        row: TxnRow,
        *,
        transactional: bool,
        hold: Hold | None = None,
    ) -> None:
        self.empty = True
        self._topics = topics
        self._store = topics.store
        self._row = row
        self._transactional = transactional
        self._hold = hold
        small = row.heartbeat_slot is None and row.state is TxnState.OPEN
        self._stored = transactional and not small
        self._acks: dict[int, HeldAcks] = {}
        self._rows = self._unsure_rows = 0  # in status.db; more of them, if a late failure was none
        self._guard = new_rlock()
        self._ended = self._expired = self._committing = False
        self._lost: AckConflictError | None = None
        self._catalog: int | None = None
        self._token = object()
        self._giving_back: WhenDropped | None = None

    # -- acknowledging -----------------------------------------------------------------

    def add(
        self,
        info: SubscriptionInfo,
        ids: Sequence[tuple[int, int]],
        *,
        cumulative: bool,
        again: bool,
    ) -> None:
        """Acknowledge these messages, or with `cumulative` each with all before it.

        Args:
            info: of which subscription.
            ids: of the messages.
            cumulative: with all before.
            again: the same call failed before, maybe after its work was done.

        Raises:
            AckConflictError: another ack was first; nothing of this call was taken. The
                transaction is to be aborted.
            InvalidTxnStateError: the transaction is not open.
            OffsetOutOfRangeError: there is no such message.
            TopicNotFoundError: the topic was dropped.
            NotSupportedError: a cumulative ack of a shared subscription.
        """
        try:
            info, named = refuse(self._topics, info, ids, cumulative=cumulative)
        except OffsetOutOfRangeError:
            if self._stored:  # that it has ended, and its messages are gone, says more
                with self._store.status.read() as cur:
                    status_table.get_open(cur, self._row.txn_id, "acknowledge")
            raise
        if self._transactional and self._catalog is None:
            self._catalog = self._topics.require_live(info.topic)
        with self._guard:
            if self._lost is not None:
                raise self._lost
            if info.topic.options.altered:
                _cover(self._topics.local.exclusive(info.id), info)
            acks = self._of(info)
            self.empty = False
            if not self._transactional:
                acks.remember(named, cumulative=cumulative)
            elif acks.state is None:
                self._register(acks, named, cumulative=cumulative, again=again)
            else:
                self._take(acks, acks.state, named, cumulative=cumulative)

    def more(
        self, info: SubscriptionInfo, last: tuple[int, int], before: AckRun | None
    ) -> AckRun | None:
        """The run of acks that follows the last one; see `Exclusive.more`."""
        with self._guard:
            acks = self._acks[info.id]
            if acks.state is None or info.reads_otherwise:
                return before
            own = acks.ranges(id := acks.info.topic.partitions[last[0]])
            end = self._topics.local.ends.get(id, 0)
            return acks.state.more(
                info, last, end, own, before,
                counter=self._topics.coordinator.metrics.messages_acked,
                deadline=self._row.deadline,
            )  # fmt: skip

    def _of(self, info: SubscriptionInfo) -> HeldAcks:
        found = self._acks.get(info.id)
        if found is None:
            state = None
            if self._transactional and not self._stored and not info.leased:
                state = self._topics.local.exclusive(info.id, self)
            found = self._acks[info.id] = HeldAcks(info=info, state=state)
        found.info = info
        return found

    def _take(
        self, acks: HeldAcks, state: Exclusive, named: dict[int, list[int]], *, cumulative: bool
    ) -> None:
        state.look()
        if state.gone:
            raise subscription_catalog.dropped(acks.info)
        if acks.version is None:
            acks.version = state.version
        self._watch()
        for number, offsets in named.items():
            partition_id = acks.info.topic.partitions[number]
            own = acks.ranges(partition_id)
            if cumulative:
                state.take_position(self._token, own, number, offsets[0])
                acks.positions[partition_id] = offsets[0] + 1
            else:
                state.take(self._token, own, number, offsets)

    def _register(
        self, acks: HeldAcks, named: dict[int, list[int]], *, cumulative: bool, again: bool
    ) -> None:
        info = acks.info
        self._watch()
        with self._topics.coordinator.write_beside() as cur:
            self._count_rows(cur)
            if self._stored:
                status_table.join(cur, self._row.txn_id, KIND, [info.id], "acknowledge")
            rows = None
            if info.leased and not (again or cumulative):
                rows = self._write_own(cur, info, named)
            if rows is None:
                rows = self._write_checked(cur, info, named, cumulative=cumulative, again=again)
            self._unsure_rows = rows
        self._rows, self._unsure_rows = self._rows + rows, 0
        fault_point("acks.registered")

    def _write_own(
        self, cur: apsw.Cursor, info: SubscriptionInfo, named: dict[int, list[int]]
    ) -> int | None:
        """Write the ack of one message that is leased to this process, without other looks."""
        at = [(info.topic.partitions[number], one) for number in named for one in named[number]]
        if len(at) != 1:
            return None
        holder = self._holder(self._stored)
        return ack_rows.register_own(cur, info, *at[0], holder, first=not self._rows)

    def _write_checked(
        self,
        cur: apsw.Cursor,
        info: SubscriptionInfo,
        named: dict[int, list[int]],
        *,
        cumulative: bool,
        again: bool,
    ) -> int:
        rows, local = 0, self._topics.local.exclusive(info.id)
        wanted = {
            number: Ranges((0 if cumulative else offset, offset + 1) for offset in offsets)
            for number, offsets in named.items()
        }
        subscription_catalog.require(cur, info)
        if local is not None:
            if cumulative:
                local.look_for_returned(cur)
            for number, ranges in wanted.items():
                local.refuse(number, ranges)
                if cumulative:
                    local.require_seen(number, ranges.end)
        for number, ranges in wanted.items():
            ack_rows.refuse_by_rows(
                cur, self._store, info, number, self._row.txn_id, ranges,
                cumulative=cumulative, again=again,
            )  # fmt: skip
            partition_id = info.topic.partitions[number]
            position = ranges.end if cumulative else None
            ones = Ranges() if cumulative else ranges
            if local is not None:
                ones = local.applied({partition_id: ones})[partition_id]
            rows += self._write_rows(cur, info, partition_id, ones, position, self._stored)
        ack_rows.bump(cur, info.id)
        return rows

    def _count_rows(self, cur: apsw.Cursor) -> None:
        """Count the rows of a write that failed late, if it has left them."""
        if self._unsure_rows:
            more, self._unsure_rows = self._unsure_rows, 0
            if ack_rows.count_pending(cur, self._row.txn_id) == self._rows + more:
                self._rows += more

    def _write_rows(
        self,
        cur: apsw.Cursor,
        info: SubscriptionInfo,
        partition_id: int,
        ranges: Ranges,
        position: int | None,
        stored: bool,
    ) -> int:
        holder = self._holder(stored)
        return ack_rows.register(cur, info, partition_id, holder, ranges, position)

    def _holder(self, stored: bool) -> Holder:
        hold, row = self._hold, self._row
        hold_id = None if self._transactional else ack_rows.PLAIN
        if hold is not None:
            hold_id = hold.for_rows()
        return Holder(row.txn_id, stored, *self._store.runtime.owner, row.deadline, hold_id)

    # -- the commit of a small one -----------------------------------------------------

    def validate(self, cur: apsw.Cursor, latest: Timestamp) -> None:
        """Inside the SQLite transaction that commits: is all still this transaction's?

        Raises:
            AckConflictError: it is not. The transaction is to be aborted.
            TopicNotFoundError: a topic or subscription was dropped.
        """
        if not self._transactional:
            for acks in self._acks.values():
                subscription_catalog.require(cur, acks.info)
            return
        # Set before `_expired` is read, as that is before this is: one of the two sees the other.
        self._committing = True
        if self._expired:
            raise ack_rows.given_back(self._row.txn_id)
        self._refuse_lost()
        self._count_rows(cur)
        topics = [acks.info.topic for acks in self._acks.values()]
        self._topics.refuse_dropped(cur, self._catalog, topics)
        if self._rows and ack_rows.count_pending(cur, self._row.txn_id) != self._rows:
            for acks in self._acks.values():
                subscription_catalog.require(cur, acks.info)
            raise ack_rows.given_back(self._row.txn_id)
        for acks in self._acks.values():
            state = acks.state
            if state is not None and not (state.current(cur) and acks.version == state.version):
                _refuse_taken(cur, self._store, acks, self._row.txn_id)

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def write(self, cur: apsw.Cursor, stamp: Timestamp) -> None:
        """Inside the SQLite transaction that commits, once it has passed `validate`."""
        for acks in self._acks.values():
            if not self._transactional:
                self._write_plain(cur, acks)
            elif acks.state is not None:
                wanted = acks.whole(acks.state.mark) if acks.positions else acks.held
                self._delete(cur, acks, acks.state, wanted)
        if self._rows:
            ack_rows.apply_pending(cur, self._store, self._row.txn_id)

    def _delete(self, cur: apsw.Cursor, acks: HeldAcks, state: Exclusive, wanted: Held) -> None:
        acks.deleted = state.applied(wanted)
        acks.number = self._store.runtime.change_number()
        state.delete(cur, acks.deleted)

    def _write_plain(self, cur: apsw.Cursor, acks: HeldAcks) -> None:
        """Delete what is acknowledged outside of a transaction; what is pending stays so."""
        info = acks.info
        acks.state, wanted = self._plain(cur, acks)
        if (state := acks.state) is not None:
            state.current(cur)
            wanted = state.take_plain(wanted)
            acks.held, acks.positions = wanted, {}
            self._delete(cur, acks, state, wanted)
            return
        for partition_id, ranges in wanted.items():
            for first, last in ranges:
                ack_rows.delete_leased(cur, info.id, partition_id, first, last)
        if wanted:
            ack_rows.bump(cur, info.id)

    def _plain(self, cur: apsw.Cursor, acks: HeldAcks) -> tuple[Exclusive | None, Held]:
        """Messages that are acknowledged outside of a transaction, but what is pending."""
        info = acks.info
        state = None if info.leased else self._topics.local.exclusive(info.id, self)
        wanted = acks.whole(lambda id: ack_rows.mark_delete(cur, info.id, id) or 0)
        if state is not None and acks.positions:
            state.look_for_returned(cur)
            for id, position in acks.positions.items():
                named = acks.held.get(id, Ranges())
                wanted[id].difference_update(state.unseen(id, position).minus(named))
        ack_rows.leave_pending(cur, self._store, info.id, wanted)
        return state, wanted

    def ended(self, committed: bool | None) -> None:
        """The small transaction has ended; None: nobody knows how. Twice is fine; of a stored one
        its handler hears.
        """
        with self._guard:
            if self._ended:
                return
            self._ended = True
            self._forget_to_give_back()
            if self._stored:
                return
            for acks in self._acks.values():
                if acks.state is not None:
                    self._ended_in_memory(acks, acks.state, committed)
            if (self._rows or self._unsure_rows) and not committed:
                try:
                    _give_rows_back(self._store, self._row.txn_id)
                except TxnkvError:  # others write, or the disk is full
                    if self._hold is None or not self._hold.put_off(self._row.txn_id):
                        later(_give_rows_back, self._store, self._row.txn_id)

    def _ended_in_memory(self, acks: HeldAcks, state: Exclusive, committed: bool | None) -> None:
        with state.lock:
            if committed:
                state.committed(acks.number, acks.deleted)
            else:
                state.unsure()
            if not committed and self._transactional:
                if self._hold is not None:
                    self._hold.keep(state, acks)
                else:
                    state.return_all(acks)
            state.release(self._token, acks)

    # -- where it goes on --------------------------------------------------------------

    def stage(self, row: TxnRow) -> None:
        """The transaction is stored from now on: so are its acks.

        Raises:
            AckConflictError: another ack was first. The transaction is to be aborted.
            InvalidTxnStateError: the transaction is not open.
        """
        with self._guard:
            self._refuse_lost()
            self._row = row
            if self._stored:
                return
            moved = self._in_memory() if self._transactional else []
            with self._store.status.write(sync=False) as cur:
                status_table.join(cur, row.txn_id, KIND, self._acks, "acknowledge")
                ack_rows.made_stored(cur, row.txn_id)
                rows = self._write_out(cur, moved, stored=True) + self._write_out_plain(cur)
            self._stored = True
            self._forget_to_give_back()
            self._rows += rows
            self._leave_memory(moved)
        fault_point("acks.registered")

    def move_out(self, state: Exclusive) -> None:
        """The consumer gives up its place: what its process's memory had goes to status.db.

        What cannot, as another process was first or the disk is full, dooms the transaction: it
        hears of it at its next ack, or its commit.
        """
        with self._guard:
            state.delivery.withdraw(None, 0)
            moved = self._in_memory(state)
            if self._ended or not self._transactional or not moved:
                return
            try:
                with self._store.status.write(sync=False) as cur:
                    self._rows += self._write_out(cur, moved, stored=False)
                    # Before a commit has its turn, which would find them in both places.
                    self._leave_memory(moved)
            except TxnkvError as error:
                self._leave_memory(moved)
                self._lost = AckConflictError(
                    f"the consumer of {state.info} was closed, and acknowledgements of transaction "
                    f"{self._row.txn_id} could not be kept ({error}). It was aborted whole; begin "
                    "a new one"
                )
        fault_point("acks.registered")

    def _in_memory(self, state: Exclusive | None = None) -> list[HeldAcks]:
        return [
            acks
            for acks in self._acks.values()
            if acks.state is not None and state in (None, acks.state)
        ]

    def _write_out(self, cur: apsw.Cursor, moved: Sequence[HeldAcks], *, stored: bool) -> int:
        """Move acks from memory into rows; how many rows more there are."""
        rows = 0
        for acks in moved:
            assert acks.state is not None
            _refuse_taken(cur, self._store, acks, self._row.txn_id)
            held = acks.state.applied(acks.held)
            for partition_id in {*held, *acks.positions}:
                ranges = held.get(partition_id, Ranges())
                position = acks.positions.get(partition_id)
                rows += self._write_rows(cur, acks.info, partition_id, ranges, position, stored)
            ack_rows.bump(cur, acks.info.id)
        return rows

    def _write_out_plain(self, cur: apsw.Cursor) -> int:
        rows = 0
        for acks in () if self._transactional else self._acks.values():
            subscription_catalog.require(cur, acks.info)
            state, wanted = self._plain(cur, acks)
            if state is not None:
                wanted = state.applied(state.take_plain(wanted, keep=False))
            for partition_id, ranges in wanted.items():
                rows += self._write_rows(cur, acks.info, partition_id, ranges, None, True)
        return rows

    def _leave_memory(self, moved: Sequence[HeldAcks]) -> None:
        for acks in moved:
            if acks.state is not None:
                acks.state.release(self._token, acks)
                acks.state = None

    def reopen(self) -> None:
        """Nothing was committed: the transaction is as open as before."""
        self._committing = False

    def expire(self) -> None:
        """The deadline of a small one has passed long ago, and nobody noticed."""
        deadline = self._row.deadline
        if deadline is not None and clock.monotonic_micros() > deadline + _GRACE:
            self._expired = True
            if not self._committing:  # else its commit was in time, and is slow
                self.ended(committed=False)

    def _watch(self) -> None:
        """Have acks given back when the transaction is dropped without an end."""
        if self._giving_back is None:
            self._giving_back = WhenDropped(
                self, _give_back, self._acks, self._token, self._store, self._row.txn_id
            )

    def _forget_to_give_back(self) -> None:
        if self._giving_back is not None:
            self._giving_back.forget()


def _give_back(acks: dict[int, HeldAcks], token: object, store: Store, txn_id: int) -> None:
    """Give back what a small transaction had that was dropped without an end."""
    for one in acks.values():
        if one.state is not None:
            with one.state.lock:
                one.state.return_all(one)
                one.state.release(token, one)
    if any(one.state is None for one in acks.values()):
        _give_rows_back(store, txn_id)


def _give_rows_back(store: Store, txn_id: int) -> None:
    with suppress(ClosedError), store.status.write(sync=False) as cur:
        ack_rows.give_back(cur, store, txn_id, stored=False)


def _refuse_taken(cur: apsw.Cursor, store: Store, acks: HeldAcks, txn_id: int) -> None:
    """Compare what a transaction has in memory with what status.db has of others. Of its own it
    may have what a write left there that failed late.

    Raises:
        AckConflictError: another process was first.
    """
    info = acks.info
    subscription_catalog.require(cur, info)
    for number, id in enumerate(info.topic.partitions):
        below = Ranges([(0, acks.positions.get(id, 0))])
        for wanted, cumulative in ((acks.held.get(id), False), (below, True)):
            if wanted:
                ack_rows.refuse_by_rows(
                    cur, store, info, number, txn_id, wanted, cumulative=cumulative, again=True
                )


def _cover(state: Exclusive | None, info: SubscriptionInfo) -> None:
    """Have memory know the partitions that its topic has got."""
    if state is not None and len(state.info.topic.partitions) < len(info.topic.partitions):
        state.look()


def refuse(
    topics: Topics, info: SubscriptionInfo, ids: Sequence[tuple[int, int]], *, cumulative: bool
) -> tuple[SubscriptionInfo, dict[int, list[int]]]:
    """Refuse acks that make no sense whatever others do.

    Returns:
        The subscription, with its topic as that is now, which may have got partitions; and offsets
        in order, by partition number; of a cumulative ack the highest.

    Raises:
        NotSupportedError: a cumulative ack of a shared subscription.
        OffsetOutOfRangeError: there is no such message, or it is not decided yet: it cannot
            have been delivered.
        TopicNotFoundError: the topic was dropped.
    """
    if cumulative and info.by_commit:
        raise NotSupportedError(
            f"{info} gives messages in the order of commits: those of lower offsets may not have "
            "been given. Acknowledge them one by one"
        )
    if cumulative and info.type in MANY:
        raise NotSupportedError(
            f"{info} is {info.type}: others have messages before this one. Acknowledge "
            "them one by one, or subscribe exclusively"
        )
    topic = topics.current(info.topic)
    if topic is not info.topic:
        info = replace(info, topic=topic)
    named = info.by_partition(ids, cumulative=cumulative)
    for number, offsets in named.items():
        end = _known_end(topics, info, info.topic.partitions[number], offsets[-1])
        if offsets[0] < 0 or offsets[-1] >= end:
            raise OffsetOutOfRangeError(
                f"{info}: partition {number} has committed messages up to offset {end}, "
                f"exclusive; {offsets[-1] if offsets[0] >= 0 else offsets[0]} is none. "
                "Acknowledge what was delivered"
            )
    return info, named


def _known_end(topics: Topics, info: SubscriptionInfo, partition_id: int, offset: int) -> int:
    """Return the offset below which all is decided, or an older one that is behind `offset`. 0
    for a partition that is gone. Of a subscription that is given more, the end of that.
    """
    if info.reads_otherwise:
        partition = topics.partition(partition_id)
        return 0 if partition is None else bounds(topics, partition).high_watermark
    ends = topics.local.ends
    end = ends.get(partition_id, 0)
    if offset >= end:
        partition = topics.partition(partition_id)
        end = 0 if partition is None else bounds(topics, partition).last_stable_offset
        ends[partition_id] = end
    return end
