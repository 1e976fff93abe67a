"""A message as a reader holds it, and messages in batches: cut, large ones into pieces, and back.

    rows     [a b c][d e][F: 3 MiB][g]
    batches  [a b c][d e] F0 F1 F2 [g]        F0..F2: CHUNK batches of one row each

The pieces of a message share a random id of 64 bits and stand one behind the other; key, headers
and timestamp stand in the first. A reader gives the message whole, at the offset of its last piece:

    offset   10    11   12   13   14   15        F: a message in three pieces, of one transaction
    batch    a     F0   F1   b    F2   c
    given    a(10)           b(13) F(14) c(15)   F: key, headers and time of F0

The pieces stand in one transaction, so a reader of committed messages finds all of them; others'
batches may stand between. One who began in the middle looks back for the pieces before
(`offset_reader`); a message of which retention took some is left out. A reader of what is not
committed may wait for pieces of a transaction that ends without them: its end marker says so.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import TxnId
from txnkv.core import (
    MESSAGES,
    ROW_BYTES,
    Chunk,
    MessageFields,
    Spans,
    decode,
    read_chunk,
    read_header,
    walk,
)
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError
from txnkv.topics.messages.values import ValueCodec

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

DELIVER_AT: Final = "txnkv-deliver-at"
"""The header that has the time of a delayed message: microseconds since 1970, in digits."""

_IN_HEADERS: Final = DELIVER_AT.encode()
_FIRST: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_LAST: Final = 253_402_300_799_999_999
"""The last microsecond that a datetime has."""


_new_tuple: Final = tuple.__new__
"""That of a NamedTuple, without a call of Python besides."""


class MessageId(NamedTuple):
    """The place of a message, by which an acknowledgement names it."""

    partition: int
    offset: int


class Message(MessageFields):
    """One message of a topic, made by readers. What needs work to be read is made when it is asked
    for.

    Attributes:
        raw: the bytes of the value, as they are stored, or None.
        codec: reads values of a topic with a value schema; None where they are bytes.
        key: bytes, or None.
        partition: its number.
        offset: its place in the partition.
        txn_id: of the transaction that sent it; None when it was sent outside of any.
        nbytes: of key, value and headers.
        lease_end: of a shared subscription, when another may get it, in monotonic microseconds.
        redelivery_count: how often a subscription delivered it before: in all where deliveries
            are counted (shared ones, `max_deliveries`, `ack_timeout`), else to this consumer.
    """

    __slots__ = ()

    codec: ValueCodec | None
    txn_id: TxnId | None

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.raw, self.key, self._headers, self._micros)
        place = (self.partition, self.offset, self.txn_id, self.codec, self._topic)
        more = getattr(self, "__dict__", None)  # of a subclass
        return _remade, (type(self), fields + place, self.redelivery_count), more

    @property
    def value(self) -> Any:
        """Bytes, or None; of a topic with a value schema a dict, or None.

        Raises:
            CorruptionError: its bytes are not of the topic's value schema; they are `raw`.
            ValueError: it has a date or time that Python has not.
        """
        if self.codec is None or self.raw is None:
            return self.raw
        if self._row is None:
            try:
                self._row = self.codec.decode_one(self.raw)
            except CorruptionError as error:
                raise CorruptionError(
                    f"partition {self.partition}, offset {self.offset}: {error}"
                ) from None
        return self._row

    @property
    def id(self) -> MessageId:
        """Partition and offset."""
        return _new_tuple(MessageId, (self.partition, self.offset))

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        """Names and values, in the order in which they were given."""
        return core.decode_headers(self._headers)

    @property
    def timestamp(self) -> datetime:
        """The time at which the message was sent, or that the sender gave; UTC. One that no
        datetime holds, as other clients may give, is the first or last that there is.
        """
        return _EPOCH + timedelta(microseconds=max(_FIRST, min(self._micros, _LAST)))

    @property
    def deliver_at(self) -> datetime | None:
        """The time in UTC before which shared subscriptions do not deliver it, if it has one."""
        micros = self.deliver_micros
        return None if micros is None else _EPOCH + timedelta(microseconds=micros)

    @property
    def deliver_micros(self) -> int | None:
        """`deliver_at` in microseconds since 1970. A header that is no such number is none."""
        if self._headers is None or _IN_HEADERS not in self._headers:
            return None
        for name, value in self.headers:
            if name == DELIVER_AT and value.isdigit() and len(value) <= len(str(_LAST)):
                return min(int(value), _LAST)
        return None

    def _content(self) -> tuple[object, ...]:
        return (self.raw, self.key, self._headers or None, self._micros, self.id, self.txn_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        key = "" if self.key is None else f" key={_shown(self.key)}"
        try:
            value = _shown(self.raw) if self.codec is None else repr(self.value)
        except (CorruptionError, ValueError):
            value = _shown(self.raw)
        return f"<Message {self.partition}:{self.offset}{key} {value}>"


def _remade(kind: type[Message], fields: tuple[Any, ...], redelivery_count: int) -> Message:
    made = kind(*fields)
    made.redelivery_count = redelivery_count
    return made


def topic_number(store_id: str, topic: int) -> int:
    """Return the number by which messages know their topic, and its store."""
    return int(store_id[:8], 16) << 31 | topic


def messages_of(
    batch: pa.RecordBatch,
    topic: int,
    partition: int,
    txn_id: Callable[[int], TxnId],
    codec: ValueCodec | None = None,
) -> list[Message]:
    """Messages of what `core.decode` gives.

    Args:
        batch: columns offset, timestamp, key, value, headers, txn_id (0: none).
        topic: by its number (`topic_number`).
        partition: its number.
        txn_id: gives the id of 128 bits of a local one.
        codec: of the topic, if it has one.
    """
    values, keys, headers, offsets, locals_ = (
        batch.column(name).to_pylist() for name in ("value", "key", "headers", "offset", "txn_id")
    )
    micros = batch.column("timestamp").view(pa.int64()).to_pylist()
    ids = {local: txn_id(local) if local else None for local in set(locals_)}
    txn_ids = [ids[local] for local in locals_]
    return core.messages(
        Message, values, keys, headers, offsets, micros, txn_ids, partition, codec, topic
    )


_ARROW: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.int64()),
        ("value", pa.large_binary()),
        ("key", pa.large_binary()),
        ("headers", pa.large_binary()),
        ("txn_id", pa.int64()),
        ("redelivery_count", pa.int32()),
    ]
)


def messages_to_arrow(messages: Sequence[Message]) -> pa.RecordBatch:
    """Messages, of several partitions perhaps, as they go to another host."""
    columns: list[list[Any]] = [
        [m.partition for m in messages],
        [m.offset for m in messages],
        [m._micros for m in messages],
        [m.raw for m in messages],
        [m.key for m in messages],
        [m._headers for m in messages],
        [0 if m.txn_id is None else m.txn_id.local for m in messages],
        [m.redelivery_count for m in messages],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _ARROW, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_ARROW)


def messages_from_arrow(
    batch: pa.RecordBatch, topic: int, tcid: int, codec: ValueCodec | None = None
) -> list[Message]:
    """Messages that `messages_to_arrow` has sent, of a topic by its number and a store by its
    coordinator's id.
    """
    found = []
    for partition, offset, micros, value, key, headers, local, before in zip(
        *(column.to_pylist() for column in batch.columns), strict=True
    ):
        txn_id = TxnId.of(tcid, local) if local else None
        message = Message(value, key, headers, micros, partition, offset, txn_id, codec, topic)
        message.redelivery_count = before
        found.append(message)
    return found


def _shown(value: bytes | None) -> str:
    if value is None or len(value) <= 40:
        return repr(value)
    return f"{value[:40]!r}... ({len(value)} bytes)"


# -- in batches, and in pieces ---------------------------------------------------------

MAX_ROWS: Final = 1 << 16
"""Messages of a batch, at most."""


def cut_messages(
    messages: pa.RecordBatch, most: int
) -> Iterator[tuple[pa.RecordBatch, Chunk | None]]:
    """Messages in parts that a batch holds, in their order.

    Args:
        messages: column value and maybe others.
        most: bytes of a batch in memory, keys and headers counted, unless it is of one message.

    Returns:
        Parts, and of a piece of a large message which one it is.
    """
    if fit_batch(messages.nbytes, messages.num_rows, most):
        yield messages, None
        return
    values = messages.column("value")
    large = pc.indices_nonzero(pc.fill_null(pc.greater(pc.binary_length(values), most), False))
    at = 0
    for row in large.to_pylist():
        yield from cut_runs(messages.slice(at, row - at), most)
        yield from _pieces(messages.slice(row, 1), most)
        at = row + 1
    yield from cut_runs(messages.slice(at), most)


def fit_batch(size: int, rows: int, most: int) -> bool:
    """Tell whether so many messages, whose columns have so many bytes, are one batch."""
    return size + ROW_BYTES * rows <= most and rows <= MAX_ROWS


def cut_runs(messages: pa.RecordBatch, most: int) -> Iterator[tuple[pa.RecordBatch, None]]:
    """Messages in parts that a batch holds, none of them in pieces; see `cut_messages`."""
    n = messages.num_rows
    at = 0
    while at < n:
        begin = at

        def size(end: int, begin: int = begin) -> int:
            return int(messages.slice(begin, end - begin).nbytes) + ROW_BYTES * (end - begin)

        last = min(begin + MAX_ROWS, n)
        end = max(bisect_right(range(begin, last + 1), most, key=size) - 1 + begin, begin + 1)
        yield messages.slice(at, end - at), None
        at = end


def _pieces(message: pa.RecordBatch, most: int) -> Iterator[tuple[pa.RecordBatch, Chunk]]:
    value = message.column("value")[0].as_buffer()
    place = message.schema.get_field_index("value")
    id = int.from_bytes(os.urandom(8), "little")
    count = -(-value.size // most)
    for piece in range(count):
        part = value.slice(piece * most, min(most, value.size - piece * most))
        column = pa.Array.from_buffers(pa.binary(), 1, [None, _offsets(part.size), part])
        chunk = Chunk(id, piece, count, value.size)
        if piece == 0:
            yield message.set_column(place, "value", column), chunk
        else:
            yield pa.RecordBatch.from_arrays([column], ["value"]), chunk


def _offsets(size: int) -> pa.Buffer:
    return pa.array([0, size], pa.int32()).buffers()[1]


@dataclass
class _Partial:
    offsets: list[int]
    txn_id: int
    head: pa.RecordBatch
    values: list[pa.Buffer]


class Reassembly:
    """The messages of one reader in one partition that have begun and are not complete.

    Attributes:
        completed: of the last `decode`: the offset of each large message, with those of its pieces.
    """

    def __init__(self) -> None:
        self._partials: dict[int, _Partial] = {}
        self.completed: dict[int, list[int]] = {}

    def reset(self) -> None:
        """Forgets all: the reader goes elsewhere."""
        self._partials.clear()

    @property
    def begun(self) -> set[int]:
        """The offsets of pieces of messages that have begun and are not complete."""
        return {offset for each in self._partials.values() for offset in each.offsets}

    def has(self, message_id: int) -> bool:
        """This one has begun and is not complete."""
        return message_id in self._partials

    def decode(self, buf: Any, spans: Spans, from_offset: int) -> pa.RecordBatch:
        """Decode as `core.decode` does, with large messages whole.

        Args:
            buf: what the spans were made of; `intact`.
            spans: the batches that are shown, all behind those of the call before.
            from_offset: the first offset that is wanted.
        """
        self.completed = {}
        if not spans.has_chunks:
            return decode(buf, spans, from_offset, checked=True)
        parts: list[pa.RecordBatch] = []
        begin = 0
        for i, (at, _) in enumerate(spans):
            chunk = read_chunk(buf, at)
            if chunk is None:
                continue
            if begin < i:
                parts.append(decode(buf, spans[begin:i], from_offset, checked=True))
            begin = i + 1
            whole = self._add(buf, at, spans[i : i + 1], chunk, from_offset)
            if whole is not None:
                parts.append(whole)
        if begin < len(spans):
            parts.append(decode(buf, spans[begin:], from_offset, checked=True))
        return joined(parts)

    def end_transactions(self, buf: Any) -> None:
        """Gives up messages of transactions whose end marker is in a buffer."""
        if not self._partials:
            return
        ended = {header.txn_id for _, header in walk(buf) if header.is_control} - {0}
        self._partials = {
            id: each for id, each in self._partials.items() if each.txn_id not in ended
        }

    def _add(
        self, buf: Any, at: int, span: Spans, chunk: Chunk, from_offset: int
    ) -> pa.RecordBatch | None:
        """Take a piece; the message when it is the last one."""
        header = read_header(buf, at)
        if header.base_offset < from_offset:
            return None
        row = decode(buf, span, from_offset, checked=True)
        value = row.column("value")[0].as_buffer()
        if chunk.piece == 0:
            partial = _Partial([header.base_offset], header.txn_id, row, [value])
            self._partials[chunk.message_id] = partial
        else:
            found = self._partials.get(chunk.message_id)
            if found is None or len(found.values) != chunk.piece:
                self._partials.pop(chunk.message_id, None)
                return None
            partial = found
            partial.offsets.append(header.base_offset)
            partial.values.append(value)
        if chunk.piece + 1 < chunk.pieces:
            return None
        del self._partials[chunk.message_id]
        self.completed[header.last_offset] = partial.offsets
        return _whole(partial, row)


def joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches one behind the other as one."""
    if len(parts) == 1:
        return parts[0]
    return pa.concat_batches(parts) if parts else pa.RecordBatch.from_pylist([], schema=MESSAGES)


def _whole(partial: _Partial, last: pa.RecordBatch) -> pa.RecordBatch:
    columns: dict[str, Any] = dict(zip(MESSAGES.names, partial.head.columns, strict=True))
    value = b"".join(partial.values)
    columns["value"] = pa.array([value], pa.binary())
    columns["offset"] = last.column("offset")
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=MESSAGES)
