"""Consumers: readers of a topic that keep their own position."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, get_args

import pyarrow as pa

from txnkv.core import MESSAGES
from txnkv.errors import (
    ClosedError,
    CorruptionError,
    TxnkvError,
    as_index,
    as_offsets,
    require_count,
    require_several,
)
from txnkv.storage import brief, new_rlock, shielded
from txnkv.topics import (
    HELD_BYTES,
    READ_AHEAD,
    CommitReader,
    Ends,
    Message,
    OffsetReader,
    Order,
    Partition,
    PartitionReader,
    ReadIsolation,
    Start,
    TopicInfo,
    TransactionOrder,
    ValueCodec,
    Waiting,
    bounds,
    deadline,
    offset_for_time,
    torn_before,
)
from txnkv.transaction import Closing, Connection

ISOLATIONS: Final = get_args(ReadIsolation)
ORDERS: Final = get_args(Order)

_PARTITION: Final = pa.field("partition", pa.int32())
_IN_A_LOOP: Final = 500
"""Messages that a loop polls at once."""
MESSAGE_COLUMNS: Final = pa.schema([MESSAGES.field(0), _PARTITION, *list(MESSAGES)[1:]])
"""Columns of `Consumer.poll_batch`: offset, partition, timestamp, key, value, headers, txn_id."""

_Parts = list[tuple[int, pa.RecordBatch]]


class Consumer(Closing):
    """Reads the messages of a topic, from positions that it keeps itself and nobody else.

    Belongs to one thread at a time. In a forked child it goes on from where it was.

    Args:
        connection: to the store.
        topic: what to read.
        isolation: "read_committed": messages of committed transactions, and those outside of
            any; "read_uncommitted": all that is in the log, also what is aborted later (over a
            sidecar buffer that is what is committed);
            "serializable": committed transactions whole, over all partitions, in the order of
            their commits.
        order: of the messages of a partition. "offset": as they stand, so that an open
            transaction holds back what stands behind it; "commit": as their transactions were
            committed, so that it holds back nothing.
        start: "earliest", "latest", or offsets by partition; a partition without one is read
            from its earliest.
        partitions: their numbers; by default all, those that are added to the topic later too:
            they are read from their earliest, whatever `start` says, so that nothing is missed.
        max_bytes: of messages, in memory: of those that it has read ahead, of all partitions
            together, and of those that one call gives but for the last. One batch of each log at
            hand is held, and one message given, however large they are.

    In commit order, positions are places of commits: a consumer that begins at an offset is
    given the transactions whose commit stands there or behind.

    Raises:
        TopicNotFoundError: the topic was dropped.
        ValueError: an argument makes no sense.
    """

    def __init__(
        self,
        connection: Connection,
        topic: TopicInfo,
        *,
        isolation: ReadIsolation = "read_committed",
        order: Order = "offset",
        start: Start | Mapping[int, int] = "earliest",
        partitions: Sequence[int] | None = None,
        max_bytes: int = HELD_BYTES,
    ) -> None:
        require_count("max_bytes", max_bytes, "bytes")
        if isolation not in ISOLATIONS:
            raise ValueError(f"isolation is one of {', '.join(ISOLATIONS)}, not {isolation!r}")
        if order not in ORDERS:
            raise ValueError(f"order is 'offset' or 'commit', not {order!r}")
        if order == "commit" and isolation == "read_uncommitted":
            raise ValueError(
                "order='commit' shows what is committed: take isolation='read_committed'"
            )
        connection.require_open()
        self._connection = connection
        self._topic = topic
        self._engine = connection.instance.topics
        self._engine.require_live(topic)
        self._isolation = isolation
        self._max_bytes = max_bytes
        self._closed = False
        self._user: tuple[int, int] | None = None
        self._turn = 0
        self._gathering = new_rlock()
        self._given: list[Any] = []  # parts; messages, where the store is on another host
        self._had: int | None = None  # so many of them the caller has; None: all
        self._again: _Parts = []  # was given, and taken back
        self._before: dict[int, int] = {}  # positions before what was given
        every = self._engine.partitions(topic)
        require_several("partitions", () if partitions is None else partitions, "numbers")
        self._every = partitions is None
        chosen = range(len(every)) if partitions is None else [*partitions]
        if not chosen:
            raise ValueError("partitions has no number: leave it away to read all")
        self._partitions = {number: every[number] for number in self._checked(chosen)}
        whole = isolation == "serializable"
        # Over a sidecar, messages stand in the log as their transactions were committed.
        self._by_commit = whole or (order == "commit" and topic.buffer == "marker")
        self._above = -1
        self._readers = self._begin(start)
        self._ends = Ends(self._engine, topic)
        self._whole = TransactionOrder(self._engine, self._with_new, max_bytes) if whole else None  # type: ignore[arg-type]

    # -- reading -----------------------------------------------------------------------

    def poll(self, *, max_messages: int = 500, timeout: float | None = 1.0) -> list[Message]:
        """The next messages; waits for the first of them.

        Args:
            max_messages: at most so many.
            timeout: seconds to wait when there is none; None for ever, 0 not at all.

        Returns:
            Messages, of several partitions perhaps. None of them when there was nothing to be
            read until the time was over.

        Raises:
            OffsetOutOfRangeError: a position is not in the log any more, or not yet; or, in the
                order of commits, retention took a part of the transaction that comes next: `seek`.
            TopicNotFoundError: the topic was dropped.
            CorruptionError: a batch is damaged.
            ClosedError: the consumer or its client was closed.
        """
        messages = self._next(max_messages, timeout)
        self._had = None  # nothing is called until the caller has them
        return messages

    def _next(self, most: int, timeout: float | None) -> list[Message]:
        messages: list[Message] = []
        for number, rows in self._poll(most, timeout):
            messages += self._engine.messages_of(self._partitions[number], rows)
        return messages

    def poll_batch(
        self, *, max_messages: int = 65536, timeout: float | None = 1.0
    ) -> pa.RecordBatch:
        """Return the next messages as `poll` does, in Arrow.

        Returns:
            Columns offset, partition, timestamp, key (null: none), value (may be null), headers
            (null: none, else for `txnkv.core.decode_headers`), txn_id (the local id, 0: none).
            In place of value, where the topic has a value schema, its columns: all of them null
            where there is no value. No rows when the time was over.

        Raises:
            CorruptionError: also when a value is not of the topic's value schema; the position
                is behind these messages, and `poll` gives those that can be read.
        """
        found = self._poll(max_messages, timeout)
        codec = self._engine.codec_of(next(iter(self._partitions.values())))
        try:
            parts = [self._typed(_numbered(number, rows), codec) for number, rows in found]
        except CorruptionError:
            self._had = None
            raise
        if not parts:
            return self._typed(pa.RecordBatch.from_pylist([], schema=MESSAGE_COLUMNS), codec)
        whole = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
        self._had = None
        return whole

    def __iter__(self) -> Iterator[Message]:
        """Messages for ever, until the consumer is closed; it waits for what is not there yet.

        A loop may be left and begun again, and may seek: what was polled and not given comes next.
        """
        while not self._closed:
            try:
                found = self._next(_IN_A_LOOP, None)  # on their way until each is given
            except ClosedError:
                return
            yield from self._each(found)

    def _each(self, found: list[Message]) -> Iterator[Message]:
        """Give what `poll` returned one by one, as long as nothing else is called for that moves
        the consumer.
        """
        given = self._given
        for self._had, message in enumerate(found, 1):
            yield message
            if self._given is not given or self._closed:
                return

    # -- positions ---------------------------------------------------------------------

    @property
    def partitions(self) -> list[int]:
        """The numbers of the partitions that are read."""
        return list(self._partitions)

    def position(self, partition: int) -> int:
        """Return the offset where this consumer goes on in a partition, after all that `poll` gave.
        In a loop over the consumer, after all that the loop gave; in the order of commits, before
        what was polled together with it.

        Raises:
            ValueError: it does not read this partition.
        """
        reader = self._reader(partition)
        waits = [] if self._had is None else _split(self._given, self._had)[1]
        again = next((part for part in waits + self._again if part[0] == partition), None)
        if again is None:
            return reader.position
        first: int = again[1].column("offset")[0].as_py()
        return self._before[partition] if self._by_commit else max(first, self._before[partition])

    def _place(self, partition: int) -> list[int]:
        """The position in a partition and, in the order of commits, what `_resume` takes."""
        reader = self._reader(partition)
        rest = reader.rest if isinstance(reader, CommitReader) else ()
        return [self.position(partition), *rest]

    def _resume(self, partition: int, above: int, *rest: int) -> None:
        """Go on in a partition as a consumer that was at this position."""
        reader = self._reader(partition)
        if isinstance(reader, CommitReader):
            reader.resume(above, *rest)
            self._above = above

    def unpoll(self) -> None:
        """Undo the last `poll` or `poll_batch`: the next one gives its messages again."""
        self._again, self._given, self._had = self._given + self._again, [], None

    def seek(self, partition: int, offset: int) -> None:
        """Go on elsewhere. The next `poll` says when there is nothing at this offset.

        Raises:
            ValueError: it does not read this partition, or the offset is below 0.
        """
        partition, offset = as_index("a partition", partition), as_index("offset", offset)
        if offset < 0:
            raise ValueError(f"offsets begin at 0, not {offset}")
        self._return_what_was_lost()
        self._reader(partition).seek(offset)
        self._again = [part for part in self._again if part[0] != partition]
        self._given = [part for part in self._given if part[0] != partition]
        if self._whole is not None:
            self._whole.restart()

    @shielded
    def seek_to_time(self, when: datetime) -> None:
        """Go on with the first message of each partition that is not older than a time.

        Where there is none yet, at the end.

        Raises:
            TypeError: it is no datetime.
            ValueError: it has no time zone.
        """
        if not isinstance(when, datetime):
            raise TypeError(f"a time is an aware datetime, not the {type(when).__name__} {when!r}")
        if when.tzinfo is None:
            raise ValueError(f"{when!r} has no time zone: take an aware datetime")
        self._require_open()
        for number, partition in self._partitions.items():
            found, end = offset_for_time(self._engine, partition, when), self._end(partition)
            # What is not decided is searched neither by time nor by readers of what is committed.
            self.seek(number, end if found is None else min(found, end))

    @shielded
    def lag(self, partition: int | None = None) -> int:
        """Return the number of offsets between a position and the end of what can be read; of all
        partitions together without an argument.

        Raises:
            ValueError: it does not read this partition.
        """
        self._require_open()
        numbers = list(self._partitions) if partition is None else [partition]
        positions = {number: self.position(number) for number in numbers}
        ends = {number: self._end(self._partitions[number]) for number in numbers}
        return sum(max(ends[number] - positions[number], 0) for number in numbers)

    def close(self) -> None:
        """Give it up. Twice is fine."""
        self._closed = True

    def __repr__(self) -> str:
        places = ", ".join(f"{number}@{self.position(number)}" for number in self._readers)
        closed = ", closed" if self._closed else ""
        return f"<Consumer of {self._topic.name!r}, {self._isolation}: {places}{closed}>"

    # -- inside ------------------------------------------------------------------------

    def _begin(self, start: str | Mapping[int, int]) -> dict[int, PartitionReader]:
        if start not in ("earliest", "latest") and not isinstance(start, Mapping):
            raise ValueError(
                f"start is 'earliest', 'latest' or a dict of offsets by partition, not {start!r}"
            )
        offsets = {} if isinstance(start, str) else as_offsets(start)
        self._checked(offsets)
        if any(offset < 0 for offset in offsets.values()):
            raise ValueError(f"offsets begin at 0, not {min(offsets.values())}")
        for number, partition in self._partitions.items():
            if start == "latest":
                offsets[number] = self._end(partition)
            elif number not in offsets:
                offsets[number] = bounds(self._engine, partition).start
        # Ends of several partitions are not of one moment: what was committed before all of
        # them is passed over in each. So it is with beginnings that retention has moved.
        above = int(self._engine.log.latest()) if start == "latest" else -1
        whole = self._isolation == "serializable"
        if whole and start == "earliest":
            above = max(torn_before(self._engine, each) for each in self._partitions.values())
        begins = offsets if start == "earliest" else dict.fromkeys(offsets, 0)
        self._above = above
        return {
            number: self._reader_of(partition, offsets[number], begins[number])
            for number, partition in self._partitions.items()
        }

    def _reader_of(self, partition: Partition, offset: int, begin: int) -> PartitionReader:
        most = min(READ_AHEAD, self._max_bytes)
        if self._by_commit:
            return CommitReader(
                self._engine, partition, offset, most, above=self._above, begin=begin, whole=True
            )
        return OffsetReader(self._engine, partition, offset, self._isolation, most)

    def _follow(self) -> dict[int, PartitionReader]:
        """Know the topic as it is now; return the readers, of partitions that were added too."""
        topic = self._engine.current(self._topic)
        if topic is not self._topic:
            every = self._engine.partitions(topic)
            for each in every[len(self._partitions) :] if self._every else ():
                reader = self._reader_of(each, bounds(self._engine, each).start, 0)
                self._before[each.number] = reader.position
                self._partitions[each.number] = each
                self._readers[each.number] = reader
            self._topic = topic
        return self._readers

    def _with_new(self) -> dict[int, PartitionReader]:
        """The readers that may find or have something, as of now."""
        readers, ids = self._follow(), self._topic.partitions
        self._ends.look()
        has_new = self._ends.has_new
        return {number: each for number, each in readers.items() if has_new(ids[number], each)}

    def _end(self, partition: Partition) -> int:
        found = bounds(self._engine, partition)
        if self._by_commit or self._isolation == "read_uncommitted":
            return found.high_watermark
        return found.last_stable_offset

    def _checked(self, given: Iterable[int]) -> list[int]:
        count = len(self._topic.partitions)
        numbers = {as_index("a partition", number) for number in given}
        for number in numbers:
            if not 0 <= number < count:
                raise ValueError(
                    f"topic {self._topic.name!r} has no partition {number!r}: it has {count}, "
                    f"numbered from 0 to {count - 1}"
                )
        return sorted(numbers)

    def _reader(self, partition: int) -> PartitionReader:
        found = self._readers.get(partition)
        if found is None:
            raise ValueError(
                f"this consumer does not read partition {partition!r} of {self._topic.name!r}, "
                f"but {', '.join(map(str, self._readers))}"
            )
        return found

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this consumer of {self._topic.name!r} was closed; make another")
        self._connection.require_open()

    def _poll(self, most: int, timeout: float | None) -> _Parts:
        require_count("max_messages", most)
        self._require_open()
        me = (os.getpid(), threading.get_ident())
        if self._user is not None and self._user[0] == me[0]:
            raise RuntimeError("two threads poll one consumer: give each of them its own")
        self._user = me
        try:
            waiting = self._waiting(deadline(timeout))
            assert waiting is not None
            return self._wait(most, waiting)
        finally:
            self._user = None

    def _typed(self, rows: pa.RecordBatch, codec: ValueCodec | None) -> pa.RecordBatch:
        """With the columns of values in place of value."""
        if codec is None:
            return rows
        try:
            values = codec.decode(rows.column("value"))
        except CorruptionError as error:
            number, offset = rows.column("partition")[0], rows.column("offset")[0]
            raise CorruptionError(
                f"topic {self._topic.name!r}, partition {number}, from offset {offset} on: {error}"
            ) from None
        at = rows.schema.get_field_index("value")
        columns, fields = rows.columns, list(rows.schema)
        columns[at : at + 1], fields[at : at + 1] = values.columns, list(values.schema)
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def _waiting(self, until: int | None) -> Waiting | None:
        """A wait for messages of this consumer; None: it is done on another host."""
        check, concerned = self._require_open, self._is_concerned
        return Waiting(self._engine.watch, until, check, is_concerned=concerned)

    def _wait(self, most: int, waiting: Waiting) -> _Parts:
        try:
            while True:
                waiting.mark()
                parts = self._gather(most)
                if parts:
                    return parts
                if any(reader.moved for reader in self._readers.values()):
                    continue  # nothing is given only where nothing is there, whatever the time
                if waiting.is_over or not waiting.wait(self._is_pending()):
                    return []
        finally:
            waiting.end()

    @brief
    def _is_pending(self) -> bool:
        if self._whole is not None:
            return any(reader.pending for reader in self._with_new().values())
        self._ends.look()
        is_ahead, partitions = self._ends.is_ahead, self._partitions
        return any(is_ahead(partitions[each].id, read) for each, read in self._readers.items())

    @brief
    def _is_concerned(self) -> bool:
        """Tell whether the next look may find something; in whichever thread."""
        if self._whole is not None or self._engine.current(self._topic) is not self._topic:
            return True
        ends = Ends(self._engine, self._topic)  # those of a look are its thread's alone
        ends.look()
        ids, readers = self._topic.partitions, list(self._readers.items())
        return any(ends.has_new(ids[number], reader) for number, reader in readers)

    @brief
    def _gather(self, most: int) -> _Parts:
        """Take the messages that are there now: those taken back, or the next. They are on their
        way until the caller has them, which a signal may prevent.
        """
        with self._gathering:
            self._return_what_was_lost()
            if self._again:
                self._given = self._taken_back(most)
            else:
                self._before = {number: reader.position for number, reader in self._readers.items()}
                self._given = self._read(most)
            self._had = 0
            return self._given

    @brief
    def _return_what_was_lost(self) -> None:
        with self._gathering:
            if self._had is not None:
                self._given, rest = _split(self._given, self._had)
                self._again, self._had = rest + self._again, None

    def _taken_back(self, most: int) -> _Parts:
        parts, self._again = _split(self._again, most)
        return parts

    def _read(self, most: int) -> _Parts:
        """With one look at most at each partition that has something new, each in its turn."""
        room = self._max_bytes
        if self._whole is not None:
            return self._whole.gather(most, room)
        self._follow()
        self._ends.look()
        parts: _Parts = []
        readers, ids = list(self._readers.items()), self._topic.partitions
        turn = self._turn % len(readers)
        free = room - sum(reader.held for reader in self._readers.values())
        for number, reader in readers[turn:] + readers[:turn]:
            self._turn += 1
            held = reader.held
            if not held and free <= 0:
                continue  # others give what they hold first
            try:
                if not (self._ends.has_new(ids[number], reader) and reader.load(room=free)):
                    continue
            except TxnkvError:
                if parts:  # they were taken: first they are given, and the next poll raises
                    break
                raise
            free -= reader.held - held
            rows = reader.take(most, room)
            parts.append((number, rows))
            most -= rows.num_rows
            if most == 0 or len(readers) == 1 or (room := room - rows.nbytes) <= 0:
                break
        return parts


def _split(parts: _Parts, most: int) -> tuple[_Parts, _Parts]:
    """The first messages, so many at most, and those behind."""
    first, rest = [], []
    for number, rows in parts:
        if most > 0:
            first.append((number, rows.slice(0, most)))
        if rows.num_rows > most:
            rest.append((number, rows.slice(most)))
        most = max(most - rows.num_rows, 0)
    return first, rest


@lru_cache(8)
def _repeated(number: int, at_least: int) -> pa.Array:
    # Of a pool that lives on: it is kept beyond a program's own.
    return pa.repeat(pa.scalar(number, pa.int32()), at_least, pa.system_memory_pool())


def _numbered(number: int, rows: pa.RecordBatch) -> pa.RecordBatch:
    numbers = _repeated(number, 1 << rows.num_rows.bit_length()).slice(0, rows.num_rows)
    columns = rows.columns
    return pa.RecordBatch.from_arrays([columns[0], numbers, *columns[1:]], schema=MESSAGE_COLUMNS)
