r"""An exclusive subscription in the process of its one consumer: acks at the speed of memory.

Nobody else delivers, so what is pending here need not be known elsewhere before it commits:

    cursors     as status.db has them                  -\\
    foreign     acks of stored transactions, there too   > deliverable: in none of these
    pending     acks of small transactions, here alone  |
    holds       of attempts of client.run that failed  -/
    gaps        offsets that are no messages: they go with the ack beside them
    unseen      came back from stored transactions, not given since: no cumulative ack is of them

Processes that joined a transaction by its token write to status.db and raise the subscription's
version. While the version is the one that was read, memory is the whole truth, and the commit
of an ack checks one number; else it checks against what they wrote. So the earlier of two acks
wins inside of a process, and between processes the one that status.db had first.

Lock order: the write lock of status.db, then `lock`, under which nothing is read or written.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import apsw

from txnkv.core import AckRun, Delivery
from txnkv.metrics import Counter
from txnkv.storage import Store, clock, lengthy, new_rlock
from txnkv.topics import topic_catalog
from txnkv.topics.acks import ack_rows
from txnkv.topics.acks.ack_rows import NONE, Pending, conflict, refuse
from txnkv.topics.messages import Message
from txnkv.topics.ranges import Acked, Cursor, Held, Ranges, in_the_way
from txnkv.topics.subscription_catalog import SubscriptionInfo
from txnkv.topics.topic_catalog import TopicInfo

_GONE = -2
"""Stands for the version of a subscription that was dropped."""
_ALL = 1 << 62
"""Above every offset."""
_ELSEWHERE = 0
"""Stands for the holds that status.db has."""
_MANY = 100
"""Rows of what came back that status.db may keep although they were read."""


class _Found(NamedTuple):
    """The state of a subscription, as status.db has it."""

    topic: TopicInfo
    cursors: dict[int, Cursor]
    pending: list[Pending]
    returned: list[tuple[int, int, int, int]]


class Exclusive:
    """The state of an exclusive subscription in its consumer's process. Shared by threads.

    Attributes:
        info: the subscription, of the topic as the last look found it.
        cursors: by partition id.
        gaps: by partition id: what a reader has seen not to be messages.
        pieces: by partition id and offset of a large message, where its other pieces are.
        redelivered: by partition id and offset, how often, of messages that came back.
        delivery: messages that need no look before they are given. What makes one deliverable, or
            not, withdraws it first: an ack by an `AckRun` comes without the lock.
    """

    def __init__(self, store: Store, info: SubscriptionInfo, delivered: Counter) -> None:
        self.lock = new_rlock()
        self.delivery = Delivery(store.runtime, delivered, threading.main_thread().ident or 0)
        self.info = info
        self._store = store
        self._number: int | None = None
        self._returned = 0  # the last row of `returned_acks` that was read
        self._kept = 0  # so many rows were read and not deleted
        self._changes, self.version = 0, -1
        self._unbroken: set[int] = set()  # cursors without ranges in status.db
        self.cursors: dict[int, Cursor] = {}
        self.gaps: Held = {}
        self.pieces: dict[int, dict[int, Ranges]] = {}
        self.redelivered: dict[int, dict[int, int]] = {}
        self.pending: Held = {}
        self._positions: dict[int, tuple[object, int]] = {}
        self._foreign: Held = {}
        self._holds: dict[int, Held] = {}
        self._back: Held = {}
        self._unseen: Held = {}
        self._later: list[tuple[int, int, int]] = []
        self._when: dict[tuple[int, int], int] = {}  # of each in `_later` that counts
        self.look()

    # -- what others did ---------------------------------------------------------------

    def look(self) -> None:
        """See what other processes wrote since the last look. No I/O when nothing changed.

        `lock` is not held while status.db is read: a fork may want the reader to wait, and the
        writer to end, which wants `lock`.
        """
        number = self._number
        if number is not None and number == self._store.runtime.change_word():
            return
        while True:
            before = self._changes
            number = self._store.runtime.change_number()
            found = None
            with self._store.status.read(durable=False) as cur:
                version = self.version_in(cur)
                if version != self.version:
                    found = self._read(cur)
            with self.lock:
                if before != self._changes:
                    continue  # what was read may be older than what came here meanwhile
                self._changes += 1
                if found is not None:
                    self.delivery.withdraw(None, _ALL)
                    if version != _GONE:
                        self._adopt(found)
                self.version = version
                self._know(number)
                return

    def _know(self, number: int | None) -> None:
        self._number = number
        self.delivery.know(number)

    @property
    def gone(self) -> bool:
        """The subscription was dropped, as of the last look."""
        return self.version == _GONE

    def version_in(self, cur: apsw.Cursor) -> int:
        """Return the version that status.db has: others wrote, where it is another."""
        found = cur.execute("SELECT version FROM subscriptions WHERE id = ?", (self.info.id,)).get
        return _GONE if found is None else int(found)

    def _read(self, cur: apsw.Cursor) -> _Found:
        cursors = ack_rows.load_cursors(cur, self.info.id)
        topic = self.info.topic
        if len(cursors) > len(topic.partitions):
            topic = topic_catalog.by_partition(cur, min(cursors)) or topic
        pending = ack_rows.pending(cur, self._store, self.info.id)
        return _Found(topic, cursors, pending, self._read_returned(cur))

    def _read_returned(self, cur: apsw.Cursor) -> list[Any]:
        return cur.execute(
            "SELECT id, partition_id, first, last FROM returned_acks WHERE subscription_id = ? "
            "AND id > ? ORDER BY id",
            (self.info.id, self._returned),
        ).fetchall()

    def look_for_returned(self, cur: apsw.Cursor) -> None:
        """See what came back since the last look, inside of a write to status.db."""
        found = self._read_returned(cur)
        with self.lock:
            self.delivery.withdraw(None, _ALL)
            self._adopt_returned(found)

    def _adopt(self, found: _Found) -> None:
        if found.topic is not self.info.topic:
            self.info = replace(self.info, topic=found.topic)
        new = found.cursors.keys() - self.gaps.keys()
        if new:  # dicts of their own, for others look at these without the lock
            self.gaps, self.pending, self._back = (
                held | {id: Ranges() for id in new}
                for held in (self.gaps, self.pending, self._back)
            )
            self.redelivered = self.redelivered | {id: {} for id in new}
        self.cursors = found.cursors
        self._unbroken = {id for id, cursor in self.cursors.items() if not cursor.deleted}
        self._foreign = {}
        self._holds.pop(_ELSEWHERE, None)
        for id, first, last, txn_id in found.pending:
            into = self._foreign if txn_id > 0 else self._holds.setdefault(_ELSEWHERE, {})
            into.setdefault(id, Ranges()).add(first, last)
        self._adopt_returned(found.returned)

    def _adopt_returned(self, found: list[Any]) -> None:
        for row, id, first, last in found:
            if id not in self._back:
                return  # the next look knows the partition
            if row > self._returned:
                self._returned = row
                self._kept += 1
                self._back[id].add(first, last)
                self._unseen.setdefault(id, Ranges()).add(first, last)

    def prune(self) -> None:
        """Have status.db forget what came back and is here, when it has become much."""
        with self.lock:
            if self._kept < _MANY:
                return
            returned, self._kept = self._returned, 0
        self._forget_returned(returned)

    @lengthy
    def _forget_returned(self, upto: int) -> None:
        with self._store.status.write(sync=False) as cur:
            cur.execute(
                "DELETE FROM returned_acks WHERE subscription_id = ? AND id <= ?",
                (self.info.id, upto),
            )

    # -- delivering --------------------------------------------------------------------

    def deliverable(self, partition_id: int, offset: int) -> bool:
        """Tell whether a message is PENDING: neither deleted nor acknowledged by a transaction."""
        return self.first_taken(partition_id, offset, offset + 1) is None

    def first_taken(self, partition_id: int, first: int, last: int) -> int | None:
        """Return the first offset of [first, last) that is not PENDING; None where all are. What an
        attempt of a run had acknowledged is not, until the run ends.
        """
        with self.lock:
            if first < self._position(partition_id):
                return first
            found = self.cursors[partition_id].first_in(first, last)
            for held in (self.pending, self._foreign, *self._holds.values()):
                at = held[partition_id].first_in(first, last) if partition_id in held else None
                if at is not None and (found is None or at < found):
                    found = at
            return found

    def _position(self, partition_id: int) -> int:
        found = self._positions.get(partition_id)
        return 0 if found is None else found[1]

    def give_back(self, partition_id: int, first: int, last: int, delay: float = 0.0) -> None:
        """Let [first, last) be delivered again, as far as it is not deleted by then."""
        with self.lock:
            self.delivery.withdraw(None, _ALL)
            if delay > 0:
                when = clock.monotonic_micros() + int(delay * 1e6)
                for offset in range(first, last):
                    self._when[partition_id, offset] = when
                    heapq.heappush(self._later, (when, partition_id, offset))
            else:
                self._back[partition_id].add(first, last)

    def next_back(self, near: int, most: int) -> tuple[int, Ranges] | None:
        """The next to be delivered again, as `Ranges.pop` takes them; None: there are none now."""
        if not self._later and not any(self._back.values()):
            return None
        with self.lock:
            now = clock.monotonic_micros()
            while self._later and self._later[0][0] <= now:
                when, partition_id, offset = heapq.heappop(self._later)
                if self._when.get((partition_id, offset)) == when:  # else it was put off again
                    del self._when[partition_id, offset]
                    self._back[partition_id].add(offset, offset + 1)
            for partition_id, ranges in self._back.items():
                if ranges:
                    return partition_id, ranges.pop(near, most)
            return None

    def something_back(self) -> bool:
        """Tell whether `next_back` has something, now."""
        return any(self._back.values()) or bool(
            self._later and self._later[0][0] <= clock.monotonic_micros()
        )

    def seen(self, partition_id: int, first: int, last: int) -> None:
        """Take note that what is in [first, last) was given."""
        with self.lock:
            self._unseen.setdefault(partition_id, Ranges()).remove(first, last)

    def unseen(self, partition_id: int, below: int) -> Ranges:
        """Ranges that came back from another transaction, and were not given since."""
        if not self._unseen.get(partition_id):
            return NONE
        with self.lock:
            found = Ranges(self._unseen[partition_id])
            found.remove(0, self.cursors[partition_id].mark)
            found.remove(below, _ALL)
            return found.minus(self.cursors[partition_id].deleted)

    def offer(self, number: int, ready: deque[Message]) -> None:
        """Have the messages of a partition that are ready given without a look, if all of them are
        to be given next.
        """
        id = self.info.topic.partitions[number]
        with self.lock:
            self.delivery.withdraw(None, 0)
            back = self._later or any(self._back.values())
            if not back and self.first_taken(id, ready[0].offset, _ALL) is None:
                self.delivery.offer(number, ready)

    def mark(self, partition_id: int) -> int:
        """Return the offset below which all is deleted."""
        return self.cursors[partition_id].mark

    # -- acknowledging in a transaction ------------------------------------------------

    def take(self, owner: object, own: Ranges, number: int, offsets: Sequence[int]) -> None:
        """Individual acks of a transaction: into `own`, what it has of the partition.

        Raises:
            AckConflictError: another ack was first. Nothing was taken.
        """
        partition_id = self.info.topic.partitions[number]
        with self.lock:
            self.delivery.withdraw(number, offsets[-1] + 1)
            if len(offsets) == 1 and self._is_free(partition_id, first := offsets[0]):
                for into in (own, self.pending[partition_id]):
                    into.add(first, first + 1)
                return
            wanted, deleted = Ranges.of(offsets), self.cursors[partition_id]
            taken = self._taken(partition_id, owner) | self._stored(partition_id)
            refuse(self.info, number, wanted, taken, deleted=deleted, own=own)
            own.update(wanted)
            self.pending[partition_id].update(wanted)

    def more(
        self,
        info: SubscriptionInfo,
        last: tuple[int, int],
        end: int,
        own: Ranges,
        before: AckRun | None,
        *,
        counter: Counter,
        deadline: int | None,
    ) -> AckRun | None:
        """The run of acks that comes behind all acks so far, or where it is not plain that before.

        Args:
            info: what the consumer has as `info`.
            last: partition and offset of the last ack.
            end: of the partition's messages.
            own: what its transaction has of the partition.
            before: the run that was offered before.
            counter: of acks.
            deadline: of the transaction.
        """
        number, offset = last
        id = self.info.topic.partitions[number]
        with self.lock:
            cursor, pending = self.cursors[id], self.pending[id]
            begin = max(cursor.mark, cursor.deleted.end, pending.end, self._position(id))
            if id in self._foreign or begin != offset + 1 or begin >= end:
                return before
            where = info.messages, number, begin, end
            sets = own.bounds, pending.bounds
            return AckRun(self.delivery, counter, info, where, *sets, clock, deadline, before)

    def _is_free(self, partition_id: int, offset: int) -> bool:
        """Tell whether it is seen at once that nobody has acknowledged a message."""
        if partition_id in self._foreign or offset in self.pending[partition_id]:
            return False
        return offset >= self._position(partition_id) and offset not in self.cursors[partition_id]

    def refuse(self, number: int, wanted: Ranges) -> None:
        """Refuse acks of a stored transaction of this process, of which memory has nothing.

        Raises:
            AckConflictError: a small transaction was first.
        """
        partition_id = self.info.topic.partitions[number]
        with self.lock:
            refuse(self.info, number, wanted, self._taken(partition_id))

    def require_seen(self, number: int, below: int) -> None:
        """Refuse a cumulative ack of what came back and was not given since, with AckConflictError:
        it is given again, with all behind it.
        """
        partition_id = self.info.topic.partitions[number]
        with self.lock:
            for first, _ in self.unseen(partition_id, below):
                self.delivery.withdraw(None, _ALL)
                self._back[partition_id].add(first, below)
                why = "came back from another transaction, and was not received since"
                raise conflict(self.info, number, first, why)

    def _taken(self, partition_id: int, owner: object = None) -> dict[str, Ranges]:
        by, position = self._positions.get(partition_id, (None, 0))
        below = Ranges([(0, position)]) if position else NONE
        who = "this transaction" if by is owner else "a transaction, with others"
        return {"a transaction": self.pending[partition_id], who: below}

    def _stored(self, partition_id: int) -> dict[str, Ranges]:
        return {"a stored transaction": self._foreign.get(partition_id, NONE)}

    def take_plain(self, wanted: Held, *, keep: bool = True) -> Held:
        """Leave those of `wanted` that a plain ack gets; keep them until its commit ends."""
        with self.lock:
            for partition_id, ranges in wanted.items():
                self.delivery.withdraw(None, ranges.end)
                pending = self.pending[partition_id]
                ranges.difference_update(pending)
                ranges.remove(0, self._position(partition_id))
                if keep:
                    pending.update(ranges)
            return wanted

    def take_position(self, owner: object, own: Ranges, number: int, offset: int) -> None:
        """A cumulative ack of a transaction, up to and with `offset`.

        Raises:
            AckConflictError: another ack was first. Nothing was taken.
        """
        partition_id = self.info.topic.partitions[number]
        with self.lock:
            self.delivery.withdraw(number, offset + 1)
            self.require_seen(number, offset + 1)
            others, mine = self.pending[partition_id].minus(own), Ranges(own)
            by, position = self._positions.get(partition_id, (owner, 0))
            (mine if by is owner else others).add(0, position)
            taken = {"a transaction": others} | self._stored(partition_id)
            wanted, deleted = [(0, offset + 1)], self.cursors[partition_id]
            refuse(self.info, number, wanted, taken, deleted=deleted, own=mine, cumulative=True)
            self._positions[partition_id] = (owner, offset + 1)

    def take_partition(self, owner: object, partition_id: int) -> bool:
        """Have a partition to oneself, as if by a cumulative ack of all of it.

        Returns:
            False, and nothing was taken: an ack is pending there.
        """
        with self.lock:
            self.delivery.withdraw(None, _ALL)
            taken = self.pending[partition_id] or partition_id in self._positions
            if taken or any(held.get(partition_id) for held in self._holds.values()):
                return False
            self._positions[partition_id] = (owner, _ALL)
            return True

    def begin_anew(self, partition_id: int) -> None:
        """Nothing of a partition was delivered yet: its cursor was moved."""
        with self.lock:
            self.delivery.withdraw(None, _ALL)
            self._back[partition_id] = Ranges()
            self._unseen.pop(partition_id, None)
            self._when = {at: when for at, when in self._when.items() if at[0] != partition_id}
            self.redelivered[partition_id] = {}

    def release(self, owner: object, acked: Acked) -> None:
        """Release what `take` and `take_position` took: it is not pending any more."""
        with self.lock:
            self.delivery.withdraw(None, 0)
            for partition_id, ranges in acked.held.items():
                self.pending[partition_id].difference_update(ranges)
            for partition_id in acked.positions:
                if self._positions.get(partition_id, (None, 0))[0] is owner:
                    del self._positions[partition_id]

    def passed(self) -> list[tuple[int, int, int]]:
        """Ranges that are no messages and that a cursor stands before."""
        with self.lock:
            found = []
            for partition_id, cursor in self.cursors.items():
                gaps = in_the_way(cursor.mark, cursor.deleted, NONE, self.gaps[partition_id])
                found += [(partition_id, first, last) for first, last in gaps]
            return found

    # -- the end of a transaction ------------------------------------------------------

    def current(self, cur: apsw.Cursor) -> bool:
        """Tell whether memory is the whole truth, inside a write to status.db."""
        seen = self._number is not None and self._number == self._store.runtime.change_number()
        if seen or self.version_in(cur) == self.version:
            return True
        self._unbroken = set()  # others may have deleted beyond the marks
        return False

    def applied(self, held: Held) -> Held:
        """Return the ranges that acks delete: their own, with the gaps beside them."""
        with self.lock:
            found: Held = {}
            for partition_id, ranges in held.items():
                gaps = self.gaps[partition_id]
                if not gaps and not self.pieces.get(partition_id):
                    found[partition_id] = ranges
                    continue
                found[partition_id] = into = Ranges(
                    gaps.touching(first, last) if gaps else (first, last) for first, last in ranges
                )
                for offset, pieces in self.pieces.get(partition_id, {}).items():
                    if offset in ranges:
                        for first, last in pieces:
                            into.add(*gaps.touching(first, last))
                if self.info.by_commit:  # those beside were found behind what was deleted
                    cursor = self.cursors[partition_id]
                    into.update(Ranges(in_the_way(cursor.mark, cursor.deleted, into, gaps)))
            return found

    def delete(self, cur: apsw.Cursor, deleted: Held) -> None:
        """Delete ranges in status.db, inside the write of a commit."""
        for partition_id, ranges in deleted.items():
            for first, last in ranges:
                if partition_id in self._unbroken:
                    if ack_rows.advance(cur, self.info.id, partition_id, first, last):
                        continue
                    self._unbroken.discard(partition_id)
                ack_rows.delete(cur, self.info.id, partition_id, first, last)
            if partition_id not in self._unbroken and ack_rows.is_unbroken(
                cur, self.info.id, partition_id
            ):
                self._unbroken.add(partition_id)

    def committed(self, number: int | None, deleted: Held) -> None:
        """A commit whose write began at a change number has deleted these.

        If nobody committed before that write unseen, there is nothing more to look at after it.
        """
        with self.lock:
            self._changes += 1
            self.delivery.withdraw(None, 0)
            for partition_id, ranges in deleted.items():
                cursor = self.cursors[partition_id]
                counts = self.redelivered[partition_id]
                for first, last in ranges:
                    cursor.delete(first, last)
                    for offset in range(first, last) if last - first < len(counts) else [*counts]:
                        if first <= offset < last:
                            counts.pop(offset, None)
                gaps = self.gaps[partition_id]
                if gaps:
                    gaps.remove(0, cursor.mark)
                pieces = self.pieces.get(partition_id, {})
                for offset in [at for at in pieces if at < cursor.mark]:
                    del pieces[offset]
            if number is not None and self._number == number:
                self._know(number + 2)

    def unsure(self) -> None:
        """A commit broke off: what status.db has is to be read again."""
        with self.lock:
            self._know(None)
            self.version = -1
            self._unbroken = set()

    def hold(self, id: int, acked: Acked) -> None:
        """An attempt of a run had these; they are not delivered while the run goes on."""
        with self.lock:
            self.delivery.withdraw(None, _ALL)
            kept = self._holds.setdefault(id, {})
            for partition_id, ranges in acked.whole(self.mark).items():
                kept.setdefault(partition_id, Ranges()).update(ranges)

    def end_hold(self, id: int) -> None:
        """The run has ended."""
        with self.lock:
            self.delivery.withdraw(None, _ALL)
            for partition_id, ranges in self._holds.pop(id, {}).items():
                for first, last in ranges:
                    self._back[partition_id].add(first, last)

    def return_all(self, acked: Acked) -> None:
        """A transaction is aborted: what it had is delivered again."""
        with self.lock:
            self.delivery.withdraw(None, _ALL)
            for partition_id, ranges in acked.whole(self.mark).items():
                for first, last in ranges:
                    self._back[partition_id].add(first, last)


@dataclass
class HeldAcks(Acked):
    """The acknowledgements of one transaction in one subscription.

    Attributes:
        info: the subscription.
        state: in whose memory they are; None: in status.db, or nowhere yet.
        version: of `state`, before the first of them was taken.
        deleted: what the commit deletes, of those in memory.
        number: the change number when it was written.
    """

    info: SubscriptionInfo = field(kw_only=True)
    state: Exclusive | None = field(kw_only=True)
    version: int | None = None
    deleted: Held = field(default_factory=dict)
    number: int | None = None

    def remember(self, named: dict[int, list[int]], *, cumulative: bool) -> None:
        """Take messages in that nothing refuses."""
        for number, offsets in named.items():
            partition_id = self.info.topic.partitions[number]
            if cumulative:
                last = self.positions.get(partition_id, 0)
                self.positions[partition_id] = max(last, offsets[-1] + 1)
            for offset in () if cumulative else offsets:
                self.ranges(partition_id).add(offset, offset + 1)
