"""Messages for an exclusive consumer: first what came back, then what it has not seen.

    came back    acks of aborted transactions, negative acks after their delay    (exclusive)
    not seen     each partition in the order of its offsets, or of commits, from its cursor on

Between messages lie offsets that are none. They are noted as gaps while reading, and go with the
ack beside them. The pieces of a large message are no gaps: they go with that message alone, or a
cursor could come to stand in the middle of it. With leases the first of them keeps the cursor, and
others go as soon as the message is given, where messages lie between:

    offset    F0  b  F1  m  c  F2      F: a message in three pieces; m: a marker, a gap
    lease of  c: [m, c]    F: F0, F2 when it is acknowledged, F1 at once

What a reader has taken for its consumer stays with it until it is given, whatever fails meanwhile.

**Failover.** Consumers wait for the place of the one that has it:

    active      reads and acknowledges, as the consumer of an exclusive subscription
    standby     is given nothing, and looks whether the place is free: when something is written in
                the store (one that closes writes), and now and then (one that is killed does not)

Who looks first has the place then. It begins at the cursors, as any new consumer does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from txnkv.errors import OffsetOutOfRangeError
from txnkv.storage import new_rlock
from txnkv.topics.acks import NONE, Exclusive
from txnkv.topics.messages import Message
from txnkv.topics.ranges import Ranges
from txnkv.topics.read import FETCH_BYTES, CommitReader, Ends, OffsetReader, bounds
from txnkv.topics.subscription_catalog import dropped
from txnkv.topics.topics import Partition, Topics

AHEAD: Final = 1000
"""Messages that are made objects at a time."""

FOR_EVER: Final = 1 << 62
"""A time that never comes, in monotonic microseconds."""

_NEAR: Final = 8
"""Offsets between two that came back which are still read together."""

_BACK_BYTES: Final = 64 << 10
"""Bytes fetched at once where single messages are wanted again."""


class Trail(NamedTuple):
    """The offsets that go with a message: its other pieces, and gaps.

    Attributes:
        offset: of the message.
        first: see `leases.first` in `topic_catalog`.
        loose: they do not lie right before it, and go as soon as it is given.
    """

    offset: int
    first: int
    loose: Ranges

    @property
    def others(self) -> Ranges:
        """All of them, without the message's own."""
        first, last = self.first, self.offset
        found = Ranges([(first, last) if first >= 0 else (~first, -first)])
        found.update(self.loose)
        return found


def _trail(offset: int, pieces: Ranges, gaps: Ranges) -> Trail:
    """Give a message its other pieces, and the gaps before it that nothing else took."""
    loose = Ranges(pieces)
    loose.update(gaps)
    first, _ = loose.touching(offset, offset)
    if pieces and (head := pieces.span[0]) < first:
        loose.remove(head, head + 1)
        return Trail(offset, ~head, loose)
    loose.remove(first, offset)
    return Trail(offset, first, loose)


class PartitionSource:
    """One partition, read ahead.

    Attributes:
        moved: past something in the last `fill`, and there may be more.
        share: bytes that are read ahead.
    """

    def __init__(
        self,
        topics: Topics,
        partition: Partition,
        offset: int,
        max_bytes: int,
        state: Exclusive | None = None,
        isolation: str = "read_committed",
    ) -> None:
        """Begins at an offset, reads about `max_bytes` ahead; what it finds not to be messages is
        noted in `state`.
        """
        self._topics = topics
        self._state = state
        self._lock = new_rlock() if state is None else state.lock
        self.partition = partition
        self.share = max_bytes
        self._reader = OffsetReader(topics, partition, offset, isolation, max_bytes, skip_lost=True)
        self._ready: deque[Message] = deque()
        self._trails: dict[int, Trail] = {}  # of messages that are ready, where there is more
        self._begin = offset
        self._seen = offset
        self._pieces = Ranges()  # of large messages, in what was loaded last
        self._begun = set[int]()  # those of messages that are not whole yet
        self._passed = Ranges()  # gaps behind which no message was seen yet; without a state
        self._isolation = isolation
        self.moved = False

    def is_pending(self, ends: Ends) -> bool:
        """There are signs of messages that are on their way."""
        return ends.is_ahead(self.partition.id, self._reader)

    def may_have_new(self, ends: Ends) -> bool:
        """Tell whether there may be what the last `fill` did not find."""
        return bool(self._ready) or ends.has_new(self.partition.id, self._reader)

    @property
    def position(self) -> int:
        """All messages below were given."""
        return self._ready[0].offset if self._ready else self._reader.position

    def fill(self, ends: Ends) -> bool:
        """Read ahead when nothing is ready, and there may be something; whether something is."""
        if self._ready:
            return True
        reader = self._reader
        if not ends.has_new(self.partition.id, reader):
            self.moved = False
            return False
        loaded = reader.load(room=self.share)
        self.moved = reader.moved
        if not loaded:
            with self._lock:
                self._look_at_pieces()
                self._pass(reader.position)
            return False
        rows = reader.take(AHEAD)
        messages = self._topics.messages_of(self.partition, rows)
        self._trails = {}
        if self._isolation == "read_committed":  # what was given can be acknowledged
            known, id = self._topics.local.ends, self.partition.id
            known[id] = max(known.get(id, 0), messages[-1].offset + 1)
        with self._lock:
            self._look_at_pieces()
            self._note([message.offset for message in messages])
            self._ready.extend(messages)
            self._pass(reader.position)
        return True

    def _look_at_pieces(self) -> None:
        """Know where the pieces of large messages are; those that come to nothing are gaps."""
        large, begun = self._reader.large, self._reader.begun
        found = begun.union(*large.values())
        lost = Ranges.of(sorted(self._begun - found))
        self._begun = begun
        self._pieces = Ranges.of(sorted(found))
        if lost:
            self._gaps.update(lost)

    def _note(self, offsets: list[int]) -> None:
        """These messages follow, and what lies between them is none."""
        first, last = offsets[0], offsets[-1]
        large, state, id = self._reader.large, self._state, self.partition.id
        plain = not (self._pieces or self._passed)
        if plain and first == self._seen and last - first == len(offsets) - 1:
            self._seen = last + 1
            return
        for offset in offsets:
            self._pass(offset)
            self._seen = offset + 1
            pieces = Ranges.of(large.get(offset, ())[:-1])
            if state is None:
                if pieces or self._passed:
                    self._trails[offset] = _trail(offset, pieces, self._passed)
                    self._passed = Ranges()
            elif offset in state.cursors[id]:
                state.gaps[id].update(pieces)  # it was acknowledged before
            elif pieces:
                state.pieces.setdefault(id, {})[offset] = pieces

    def _pass(self, upto: int) -> None:
        """There is no message up to here: what is no piece of one either is a gap."""
        if self._seen < upto:
            gap = Ranges([(self._seen, upto)])
            self._gaps.update(gap.minus(self._pieces) if self._pieces else gap)
            self._seen = upto

    @property
    def _gaps(self) -> Ranges:
        return self._passed if self._state is None else self._state.gaps[self.partition.id]

    def again(self, first: int, last: int) -> Iterator[Message]:
        """Those of [first, last) that were given before."""
        last = min(last, self.position)
        return read_range(self._topics, self.partition, first, last, self._isolation)

    def take(
        self, first: int = 0, last: int = FOR_EVER, most: int = AHEAD, room: float = math.inf
    ) -> list[Message]:
        """Take those that are ready, at most so many: the next ones, as long as their offsets are
        in [first, last) and they do not fill the room, in bytes.
        """
        ready, found = self._ready, list[Message]()
        while ready and room > 0 and len(found) < most and first <= ready[0].offset < last:
            found.append(ready.popleft())
            room -= found[-1].nbytes
        return found

    def offer(self) -> None:
        """Have those that are ready given without a look, as far as they need none."""
        if self._ready and self._state is not None:
            self._state.offer(self.partition.number, self._ready)

    @property
    def ready(self) -> Sequence[Message]:
        """The messages that are ready, in order."""
        return self._ready

    def trail_of(self, offset: int) -> Trail:
        """Return what goes with a message that was ready last."""
        return self._trails.get(offset) or Trail(offset, offset, NONE)

    def is_behind(self, offset: int) -> bool:
        """Tell whether this source began to read at or below an offset."""
        return self._begin <= offset

    def go_to(self, offset: int) -> None:
        """Others have what comes before, and all from there on is to be given."""
        if not self.is_behind(offset):
            self.restart(offset)
            return
        self._begin = offset
        while self._ready and self._ready[0].offset < offset:
            self._ready.popleft()
        if not self._ready and self._reader.position < offset:
            self._reader.seek(offset)
            self._seen = max(self._seen, offset)
            self._begun, self._passed = set(), Ranges()

    def restart(self, offset: int) -> None:
        """Read from an offset on, wherever this was."""
        self._ready.clear()
        self._reader.seek(offset)
        self._begin = self._seen = offset
        self._begun, self._passed = set(), Ranges()


class CommitSource(PartitionSource):
    """One partition in the order of commits, for an exclusive consumer.

    A transaction of which a message is not deleted has its commit behind the cursor, which stands
    at that message or before it. So a reader of commits that begins at the cursor gives all that is
    to be given, and the state of the subscription says what of it is done with: there is no other
    cursor. Offsets that are no messages are found by reading in the order of offsets besides; that
    gets up to the first open transaction, which no cursor passes.
    """

    def __init__(
        self, topics: Topics, partition: Partition, offset: int, max_bytes: int, state: Exclusive
    ) -> None:
        super().__init__(topics, partition, offset, max_bytes, state)
        self._exclusive = state
        self._commits = CommitReader(topics, partition, offset, max_bytes)
        self._given = Ranges()

    def is_pending(self, ends: Ends) -> bool:
        """See `PartitionSource`."""
        return ends.is_ahead(self.partition.id, self._commits) or super().is_pending(ends)

    def may_have_new(self, ends: Ends) -> bool:
        """See `PartitionSource`: what was open has a marker when it is committed."""
        return bool(self._ready) or ends.has_new(self.partition.id, self._commits)

    def fill(self, ends: Ends) -> bool:
        """See `PartitionSource`."""
        commits = self._commits
        if self._ready:
            return True
        loaded = ends.has_new(self.partition.id, commits) and self._load()
        self._look_for_gaps(ends)
        self.moved = commits.moved
        if not loaded:
            return False
        rows = commits.take(AHEAD)
        self._ready.extend(self._topics.messages_of(self.partition, rows))
        self._given.remove(0, self._exclusive.mark(self.partition.id))
        return True

    def _load(self) -> bool:
        try:
            return self._commits.load(room=self.share)
        except OffsetOutOfRangeError:
            start = bounds(self._topics, self.partition).start
            if self._commits.position >= start:
                raise
            self._commits.seek(start)  # retention took the rest
            return self._commits.load(room=self.share)

    def _look_for_gaps(self, ends: Ends) -> None:
        """Note what is no message up to where commits were read, as far as that is decided."""
        state, id, found = self._exclusive, self.partition.id, self._ready
        while super().position < self._commits.position and super().fill(ends):
            found.clear()  # these are given as their transactions were committed
        with state.lock:
            pieces = state.pieces.get(id, {})
            for offset in [each for each in pieces if each in state.cursors[id]]:
                state.gaps[id].update(pieces.pop(offset))  # it was acknowledged before

    def _pass(self, upto: int) -> None:
        """See `PartitionSource`. What was given is no gap, though key compaction may hide it."""
        while self._seen < upto:
            first, last = self._given.gap_from(self._seen)
            self._seen = min(first, upto)
            super()._pass(min(last, upto))

    def again(self, first: int, last: int) -> Iterator[Message]:
        """See `PartitionSource`."""
        for message in read_range(self._topics, self.partition, first, last, "read_uncommitted"):
            if message.offset in self._given:
                yield message

    def take(
        self, first: int = 0, last: int = FOR_EVER, most: int = AHEAD, room: float = math.inf
    ) -> list[Message]:
        """See `PartitionSource`."""
        found = super().take(first, last, most, room)
        for message in found:
            self._given.add(message.offset, message.offset + 1)
        return found

    def offer(self) -> None:
        """See `PartitionSource`: each is noted as it is given."""

    def restart(self, offset: int) -> None:
        """See `PartitionSource`."""
        super().restart(offset)
        self._commits.seek(offset)
        self._given = Ranges()


class DeliveryReader(ABC):
    """The messages of a subscription for one consumer. One thread at a time.

    Args:
        max_bytes: of messages that one call gives but for the last, and that it has ready.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._ready: deque[Message] = deque()
        self._held = 0

    def take(self, most: int) -> list[Message]:
        """The next messages, at most so many; none when there are none now."""
        self._keep(self._is_mine)
        try:
            if not self._full(most):
                self._gather(most)
        except Exception:
            if not self._ready:
                raise
            # What it failed at is there still: the next call meets it again.
        if len(self._ready) <= most and self._held <= self._max_bytes:
            given, self._held = list(self._ready), 0
            self._ready.clear()
            return given
        given, room = [], self._max_bytes
        while self._ready and len(given) < most and room > 0:
            given.append(self._ready.popleft())
            room -= given[-1].nbytes
        self._held -= self._max_bytes - room
        return given

    def put_back(self, messages: Sequence[Message]) -> None:
        """These were taken last, and not given: they are taken again."""
        self._ready.extendleft(reversed(messages))
        self._held += sum(each.nbytes for each in messages)

    def _full(self, most: int) -> bool:
        return len(self._ready) >= most or self._held >= self._max_bytes

    def _add(self, messages: Sequence[Message]) -> None:
        self._ready.extend(messages)
        self._held += sum([each.nbytes for each in messages])

    def _keep(self, wanted: Callable[[Message], bool]) -> None:
        if self._ready:
            self._ready = deque(each for each in self._ready if wanted(each))
            self._held = sum(each.nbytes for each in self._ready)

    def seek(self, number: int, offset: int) -> None:
        """The cursor of a partition was moved: what was read of it is forgotten."""
        self._keep(lambda each: each.partition != number)

    @property
    @abstractmethod
    def pending(self) -> bool:
        """More may come without the change number saying so."""

    @abstractmethod
    def stirred(self) -> bool:
        """Something may be there, which the change number may not show."""

    @abstractmethod
    def _gather(self, most: int) -> None:
        """Have so many ready, if there are."""

    @abstractmethod
    def _is_mine(self, message: Message) -> bool:
        """Tell whether a message that waits is this consumer's still."""


class ExclusiveReader(DeliveryReader):
    """For the one consumer of an exclusive subscription.

    Args:
        topics: of the topics.
        state: what is known of the subscription.
        numbers: of the partitions that it reads; None: all, those too that are added later.
        max_bytes: see `DeliveryReader`.
    """

    def __init__(
        self, topics: Topics, state: Exclusive, numbers: Sequence[int] | None, max_bytes: int
    ) -> None:
        super().__init__(max_bytes)
        self._topics = topics
        self._state = state
        self._near = _NEAR
        self._every = numbers is None
        self._ends = Ends(topics, state.info.topic)
        self._version = state.version  # as of the last look for messages
        self._sources: deque[PartitionSource] = deque()
        self._add_sources(range(len(state.info.topic.partitions)) if numbers is None else numbers)

    def _add_sources(self, numbers: Sequence[int]) -> None:
        state, partitions = self._state, self._topics.partitions(self._state.info.topic)
        share = share_of(self._max_bytes, len(self._sources) + len(numbers))
        for partition in map(partitions.__getitem__, numbers):
            mark = state.cursors[partition.id].mark
            source: PartitionSource
            if state.info.by_commit:
                source = CommitSource(self._topics, partition, mark, share, state)
            else:
                isolation = state.info.isolation
                source = PartitionSource(self._topics, partition, mark, share, state, isolation)
            self._sources.append(source)
        for source in self._sources:
            source.share = share

    @property
    def pending(self) -> bool:
        """See `DeliveryReader`."""
        return any(source.is_pending(self._ends) for source in tuple(self._sources))

    def stirred(self) -> bool:
        """See `DeliveryReader`."""
        return self._state.something_back()

    def is_concerned(self) -> bool:
        """Tell whether a change of the store may be one for the next look; in whichever thread."""
        state = self._state
        self._topics.require_live(state.info.topic)
        with self._topics.store.status.read(durable=False) as cur:
            version = state.version_in(cur)  # the consumer's own look takes it in
        if version != self._version or state.something_back():
            return True
        ends = Ends(self._topics, state.info.topic)  # those of a look are its thread's alone
        ends.look()
        return any(source.may_have_new(ends) for source in tuple(self._sources))

    def take(self, most: int) -> list[Message]:
        """See `DeliveryReader`. Where partitions need not take turns, those that are ready behind a
        single one may be given without a look.
        """
        self._state.delivery.end()
        found = super().take(most)
        if most == 1 and not self._ready and len(self._sources) == 1:
            self._sources[0].offer()
        return found

    def put_back(self, messages: Sequence[Message]) -> None:
        """See `DeliveryReader`."""
        self._state.delivery.end()
        super().put_back(messages)

    def _is_mine(self, message: Message) -> bool:
        partition_id = self._state.info.topic.partitions[message.partition]
        return self._state.deliverable(partition_id, message.offset)

    def seek(self, number: int, offset: int) -> None:
        """See `DeliveryReader`."""
        self._state.delivery.end()
        super().seek(number, offset)
        for source in self._sources:
            if source.partition.number == number:
                source.restart(offset)

    def _gather(self, most: int) -> None:
        state, ready = self._state, self._ready
        state.look()
        self._version = state.version
        if state.gone:
            self._topics.require_live(state.info.topic)
            raise dropped(state.info)
        there = len(state.info.topic.partitions)
        if self._every and there > len(self._sources):
            self._add_sources(range(len(self._sources), there))
        state.prune()
        while not self._full(most):
            back = state.next_back(self._near, min(most - len(ready), AHEAD))
            if back is None:
                break
            self._take_back(most, *back)
        moved = not self._full(most)
        while moved:
            moved = False
            self._ends.look()
            for _ in range(len(self._sources)):
                self._sources.rotate(-1)
                source = self._sources[-1]
                self._take_from(source, most)
                moved |= source.moved
                if self._full(most):
                    break
            if ready:
                break
        if not ready:
            self._topics.local.expire(state.info.id)
            if state.something_back():
                self._gather(most)

    def _take_from(self, source: PartitionSource, most: int) -> None:
        state, id = self._state, source.partition.id
        while source.fill(self._ends):
            while source.ready:
                first = source.ready[0].offset
                taken = state.first_taken(id, first, FOR_EVER)
                if taken == first:
                    source.take(most=1)
                    continue
                room = self._max_bytes - self._held
                self._add(source.take(first, taken or FOR_EVER, most - len(self._ready), room))
                if self._full(most):
                    return

    def _take_back(self, most: int, id: int, back: Ranges) -> None:
        source = next((one for one in self._sources if one.partition.id == id), None)
        if source is None:
            return
        state = self._state
        upto, end = max(back.span[0], state.cursors[id].mark), back.end
        try:
            for message in source.again(upto, end):
                if self._full(most):
                    return
                upto = message.offset + 1
                if message.offset in back and state.deliverable(id, message.offset):
                    counts = state.redelivered[id]
                    counts[message.offset] = before = counts.get(message.offset, 0) + 1
                    message.redelivery_count = before
                    self._add([message])
            upto = end
        except Exception:
            self._near = 0  # damage between them is not to hold them back
            raise
        finally:
            for first, last in back:
                state.seen(id, first, min(last, upto))
                state.give_back(id, max(first, upto), last)


def share_of(max_bytes: int, partitions: int) -> int:
    """Bytes that each of so many partitions may read ahead."""
    return min(FETCH_BYTES, max(max_bytes // partitions, 1))


def read_range(
    topics: Topics, partition: Partition, first: int, last: int, isolation: str
) -> Iterator[Message]:
    """The messages of [first, last) that are still there, and committed if need be."""
    reader = OffsetReader(topics, partition, first, isolation, _BACK_BYTES, skip_lost=True)
    for rows in reader.batches(last, AHEAD):
        yield from topics.messages_of(partition, rows)
