"""What an exclusive consumer is given: first what came back, then what it has not seen.

    came back    acks of aborted transactions, negative acks after their delay    (exclusive)
    not seen     each partition in the order of its offsets, from its cursor on

Between messages lie offsets that are none. They are noted as gaps while reading, and go with the
ack beside them. The pieces of a large message are no gaps: they go with that message alone, or a
cursor could come to stand in the middle of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from txnkv.errors import OffsetOutOfRangeError, TopicNotFoundError
from txnkv.topics.exclusive import Exclusive
from txnkv.topics.log_view import bounds
from txnkv.topics.message import Message, messages_of
from txnkv.topics.offset_reader import OffsetReader
from txnkv.topics.ranges import Ranges

if TYPE_CHECKING:
    from txnkv.topics.engine import TopicEngine
    from txnkv.topics.partition import Partition

AHEAD: Final = 1000
"""So many messages are made objects at a time."""

_BACK_BYTES: Final = 64 << 10
"""Is fetched at once where single messages are wanted again."""


class Delivery(NamedTuple):
    """A message that is given to the consumer.

    Attributes:
        before: how often it was delivered before; 0 where nobody counts.
    """

    message: Message
    before: int


class Read(NamedTuple):
    """A message as read.

    Attributes:
        begin: all from here to its offset, exclusive, is no other message's.
    """

    begin: int
    message: Message


class Source:
    """One partition, read ahead.

    Attributes:
        moved: past something in the last `fill`, and there may be more.
    """

    def __init__(
        self,
        engine: TopicEngine,
        partition: Partition,
        offset: int,
        state: Exclusive | None = None,
    ) -> None:
        """Begins at an offset; what it finds not to be messages is noted in `state`."""
        self._engine = engine
        self._lock = threading.RLock() if state is None else state.lock
        self.partition = partition
        self._reader = OffsetReader(engine, partition, offset, "read_committed")
        self._ready: deque[Read] = deque()
        self._seen = offset
        self.gaps = Ranges() if state is None else state.gaps[partition.id]
        self.pieces: dict[int, Ranges] = {}
        if state is not None:
            self.pieces = state.pieces.setdefault(partition.id, {})
        self._large: dict[int, int] = {}  # offset of each, and of its first piece
        self._begins: dict[int, int] = {}
        self._undecided = Ranges()  # gaps, or pieces of large messages
        self.moved = False

    @property
    def pending(self) -> bool:
        """There were signs of messages that are on their way."""
        return self._reader.pending

    @property
    def position(self) -> int:
        """All messages below were given."""
        return self._ready[0].message.offset if self._ready else self._reader.position

    def fill(self) -> bool:
        """Read ahead when nothing is ready; whether something is."""
        if self._ready:
            return True
        reader = self._reader
        try:
            loaded = reader.load()
        except OffsetOutOfRangeError:
            start = bounds(self._engine, self.partition).start
            if start <= reader.position:
                raise
            self._pass(start)  # retention took what comes before
            reader.seek(start)
            self.moved = True
            return False
        self.moved = reader.moved
        if not loaded:
            self._pass(reader.position)
            return False
        self._large.update(reader.large)
        rows = reader.take(AHEAD)
        txn_id = self._engine.coordinator.txn_id
        codec = self.partition.topic.options.codec
        messages = messages_of(rows, self.partition.number, txn_id, codec)
        with self._lock:
            for message in messages:
                self._ready.append(Read(self._note(message.offset), message))
        self._pass(reader.position)
        return True

    def _note(self, offset: int) -> int:
        """A message follows; answers from where on there is no other's before it."""
        first, self._seen = self._seen, offset + 1
        if not self._large and not self._reader.has_begun:
            self.gaps.add(first, offset)
            return first
        self._undecided.add(first, offset)
        begin = self._large.get(offset, offset)
        return begin if begin >= first else offset

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
        for offset, begin in self._large.items():
            pieces = Ranges([(begin, offset)])
            pieces = pieces.minus(pieces.minus(self._undecided))
            if pieces:
                self.pieces[offset] = pieces
                self._begins[offset] = begin
                self._undecided.difference_update(pieces)
        self.gaps.update(self._undecided)
        self._undecided = Ranges()
        self._large = {}

    def begin(self, first: int, last: int) -> int:
        """Where the messages of [first, last) begin, large ones with their first piece."""
        with self._lock:
            large = [low for at, low in self._begins.items() if first <= at < last]
        return min(large, default=first)

    def next(self) -> Read | None:
        """The next message, if one is ready."""
        return self._ready.popleft() if self._ready else None

    def peek(self) -> Read | None:
        """The same, which stays."""
        return self._ready[0] if self._ready else None

    def skip_to(self, offset: int) -> None:
        """Others have what comes before."""
        while self._ready and self._ready[0].message.offset < offset:
            self._ready.popleft()
        if not self._ready and self._reader.position < offset:
            self._reader.seek(offset)
            self._seen = max(self._seen, offset)


class ExclusiveReader:
    """The messages of an exclusive subscription for its one consumer. One thread at a time.

    Args:
        engine: of the topics.
        state: what is known of the subscription.
        numbers: of the partitions that it reads.
    """

    def __init__(self, engine: TopicEngine, state: Exclusive, numbers: Sequence[int]) -> None:
        self._engine = engine
        self._state = state
        partitions = engine.partitions(state.info.topic)
        self._sources = deque(
            Source(engine, partitions[number], state.cursors[partitions[number].id].mark, state)
            for number in numbers
        )

    @property
    def pending(self) -> bool:
        """More may come without the change number saying so."""
        return any(source.pending for source in self._sources)

    def stirred(self) -> bool:
        """Something came back, which the change number may not show."""
        return self._state.something_back()

    def take(self, most: int) -> list[Delivery]:
        """The next messages, at most so many; none when there are none now."""
        state = self._state
        state.look()
        if state.gone:
            self._engine.require_live(state.info.topic)
            raise TopicNotFoundError(f"{state.info} was dropped: subscribe again")
        found: list[Delivery] = []
        while len(found) < most and (back := state.next_back()) is not None:
            self._take_back(found, most, *back)
        moved = True
        while moved and len(found) < most:
            moved = False
            for _ in range(len(self._sources)):
                self._sources.rotate(-1)
                source = self._sources[-1]
                self._take_from(source, found, most)
                moved |= source.moved
                if len(found) == most:
                    break
            if found:
                break
        if found:
            return found
        self._engine.subscriptions.expire(state.info.id)
        return self.take(most) if state.something_back() else found

    def _take_from(self, source: Source, found: list[Delivery], most: int) -> None:
        state, id = self._state, source.partition.id
        while len(found) < most and source.fill():
            while len(found) < most and (read := source.next()) is not None:
                if state.deliverable(id, read.message.offset):
                    found.append(Delivery(read.message, 0))

    def _take_back(self, found: list[Delivery], most: int, id: int, first: int, last: int) -> None:
        source = next((one for one in self._sources if one.partition.id == id), None)
        if source is None:
            return
        state = self._state
        last = min(last, source.position)
        first = max(first, state.cursors[id].mark)
        for message in read_range(self._engine, source.partition, source.begin(first, last), last):
            if message.offset < first:
                continue
            if len(found) == most:
                state.put_back(id, message.offset, last)
                return
            if state.deliverable(id, message.offset):
                found.append(Delivery(message, 0))


def read_range(
    engine: TopicEngine, partition: Partition, first: int, last: int
) -> Iterator[Message]:
    """The messages of [first, last) that are committed and still there."""
    if first >= last:
        return
    start = bounds(engine, partition).start
    reader = OffsetReader(engine, partition, max(first, start), "read_committed", _BACK_BYTES)
    number, txn_id = partition.number, engine.coordinator.txn_id
    codec = partition.topic.options.codec
    while reader.position < last:
        if not reader.load():
            if not reader.moved:
                return
            continue
        for message in messages_of(reader.take(AHEAD), number, txn_id, codec):
            if message.offset >= last:
                return
            yield message
