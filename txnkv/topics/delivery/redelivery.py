"""Messages for an exclusive consumer: first what came back, then what it has not seen.

    came back    acks of aborted transactions, negative acks after their delay    (exclusive)
    not seen     each partition in the order of its offsets, or of commits, from its cursor on

Between messages lie offsets that are none. They are noted as gaps while reading, and go with the
ack beside them. The pieces of a large message are no gaps: they go with that message alone, or a
cursor could come to stand in the middle of it.

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
from typing import Final

from txnkv.errors import OffsetOutOfRangeError
from txnkv.storage import clock, new_rlock
from txnkv.topics.acks import Exclusive
from txnkv.topics.messages import Message
from txnkv.topics.ranges import Ranges
from txnkv.topics.read import FETCH_BYTES, CommitReader, Ends, OffsetReader, bounds
from txnkv.topics.subscription_catalog import dropped
from txnkv.topics.topics import Partition, Topics

AHEAD: Final = 1000
"""Messages that are made objects at a time."""

FOR_EVER: Final = 1 << 62
"""A time that never comes, in monotonic microseconds."""

_BACK_BYTES: Final = 64 << 10
"""Bytes fetched at once where single messages are wanted again."""


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
        self._begins: dict[int, int] = {}  # by offset, where no message lies right before it
        self._begin = offset
        self._seen = offset
        self._large: dict[int, int] = {}  # offset of each, and of its first piece
        self._undecided = Ranges()  # gaps, or pieces of large messages
        self._passed = Ranges()  # gaps behind which no message was seen yet; without a state
        self._isolation = isolation
        self.moved = False

    @property
    def pending(self) -> bool:
        """There were signs of messages that are on their way."""
        return self._reader.pending

    def may_have_new(self, ends: Ends) -> bool:
        """Tell whether there may be what the last `fill` did not find."""
        return bool(self._ready) or ends.has_new(self.partition.id, self._reader)

    @property
    def position(self) -> int:
        """All messages below were given."""
        return self._ready[0].offset if self._ready else self._reader.position

    def fill(self) -> bool:
        """Read ahead when nothing is ready; whether something is."""
        if self._ready:
            return True
        reader = self._reader
        loaded = reader.load(room=self.share)
        self.moved = reader.moved
        if not loaded:
            self._pass(reader.position)
            return False
        self._large.update(reader.large)
        rows = reader.take(AHEAD)
        self._begins = {}
        messages = self._topics.messages_of(self.partition, rows)
        self._note([message.offset for message in messages])
        self._ready.extend(messages)
        self._pass(reader.position)
        return True

    def _note(self, offsets: list[int]) -> None:
        """These messages follow, and what lies between them is none."""
        first, last = offsets[0], offsets[-1]
        plain = not self._large and not self._reader.has_begun
        with self._lock:
            if plain and not self._passed and first == self._seen and _are_whole(offsets):
                self._seen = last + 1
                return
            for offset in offsets:
                begin, self._seen = self._seen, offset + 1
                if not plain:
                    self._undecided.add(begin, offset)
                    piece = self._large.get(offset, offset)
                    begin = piece if piece >= begin else offset
                elif self._state is not None:
                    self._state.gaps[self.partition.id].add(begin, offset)
                if self._passed:
                    behind = begin
                    begin, _ = self._passed.touching(behind, behind)
                    self._passed.remove(begin, behind)
                if begin < offset:
                    self._begins[offset] = begin

    def _pass(self, upto: int) -> None:
        """There is no message more up to here."""
        with self._lock:
            if self._seen < upto:
                self._undecided.add(self._seen, upto)
                self._seen = upto
            if not self._reader.has_begun:
                self._decide()

    def _decide(self) -> None:
        """No large message is under way: what is no message is a piece of one, or a gap."""
        undecided, large = self._undecided, self._large
        self._undecided, self._large = Ranges(), {}
        state, id = self._state, self.partition.id
        known = {} if state is None else state.pieces.setdefault(id, {})
        for offset, begin in large.items():
            pieces = Ranges([(begin, offset)])
            pieces = pieces.minus(pieces.minus(undecided))
            if pieces:
                known[offset] = pieces
                undecided.difference_update(pieces)
        (self._passed if state is None else state.gaps[id]).update(undecided)

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

    @property
    def ready(self) -> Sequence[Message]:
        """The messages that are ready, in order."""
        return self._ready

    def begin_of(self, offset: int) -> int:
        """Return from where on there is no other message's before one that was ready last."""
        return self._begins.get(offset, offset)

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

    def restart(self, offset: int) -> None:
        """Read from an offset on, wherever this was."""
        self._ready.clear()
        self._reader.seek(offset)
        self._begin = self._seen = offset
        self._undecided, self._large, self._passed = Ranges(), {}, Ranges()


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

    @property
    def pending(self) -> bool:
        """See `PartitionSource`."""
        return self._commits.pending or super().pending

    def may_have_new(self, ends: Ends) -> bool:
        """See `PartitionSource`: what was open may be committed."""
        return True

    def fill(self) -> bool:
        """See `PartitionSource`."""
        commits = self._commits
        if self._ready:
            return True
        loaded = self._load()
        self.moved = moved = commits.moved
        self._look_for_gaps()
        self.moved = moved
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

    def _look_for_gaps(self) -> None:
        """Note what is no message up to where commits were read, as far as that is decided."""
        state, id, found = self._exclusive, self.partition.id, self._ready
        while super().position < self._commits.position and super().fill():
            found.clear()  # these are given as their transactions were committed
        with state.lock:
            pieces = state.pieces.get(id, {})
            for offset in [each for each in pieces if each in state.cursors[id]]:
                state.gaps[id].update(pieces.pop(offset))  # it was acknowledged before

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
        return any(source.pending for source in self._sources)

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
        self._ends.look()
        return any(source.may_have_new(self._ends) for source in tuple(self._sources))

    def _is_mine(self, message: Message) -> bool:
        partition_id = self._state.info.topic.partitions[message.partition]
        return self._state.deliverable(partition_id, message.offset)

    def seek(self, number: int, offset: int) -> None:
        """See `DeliveryReader`."""
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
        while not self._full(most) and (back := state.next_back()) is not None:
            self._take_back(most, *back)
        moved = not self._full(most)
        while moved:
            moved = False
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
        while source.fill():
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

    def _take_back(self, most: int, id: int, first: int, last: int) -> None:
        source = next((one for one in self._sources if one.partition.id == id), None)
        if source is None:
            return
        state = self._state
        begin = first = max(first, state.cursors[id].mark)
        try:
            for message in source.again(first, last):
                if self._full(most):
                    return
                first = message.offset + 1
                if state.deliverable(id, message.offset):
                    counts = state.redelivered[id]
                    counts[message.offset] = before = counts.get(message.offset, 0) + 1
                    message.redelivery_count = before
                    self._add([message])
            first = last
        finally:
            state.seen(id, begin, first)
            if first < last:
                state.give_back(id, first, last)


def _are_whole(offsets: Sequence[int]) -> bool:
    """Tell whether ascending offsets have none between them."""
    return offsets[-1] - offsets[0] == len(offsets) - 1


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


_LOOK: Final = 200_000
"""Microseconds between two looks for a consumer that died."""


class Standby:
    """The reader of a consumer without the place: there is nothing to be read."""

    pending = False

    def __init__(self) -> None:
        self._next_look = 0

    def stirred(self) -> bool:
        """The consumer that has the place may have died."""
        return clock.monotonic_micros() >= self._next_look

    def take(self, most: int) -> list[Message]:
        """Nothing; the place was looked at just now."""
        self._next_look = clock.monotonic_micros() + _LOOK
        return []

    def seek(self, number: int, offset: int) -> None:
        """Nothing was read."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """Nothing was given."""
