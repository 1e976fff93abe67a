"""A message as a reader holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import TxnId
from txnkv.errors import CorruptionError
from txnkv.topics.messages.values import ValueCodec

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

DELIVER_AT: Final = "txnkv-deliver-at"
"""The header that has the time of a delayed message: microseconds since 1970, in digits."""

_IN_HEADERS: Final = DELIVER_AT.encode()
_FIRST: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_LAST: Final = 253_402_300_799_999_999
"""The last microsecond that a datetime has."""


class MessageId(NamedTuple):
    """The place of a message, by which an acknowledgement names it."""

    partition: int
    offset: int


class Message:
    """One message of a topic. What needs work to be read is made when it is asked for.

    Attributes:
        raw: the bytes of the value, as they are stored, or None.
        codec: reads values of a topic with a value schema; None where they are bytes.
        key: bytes, or None.
        partition: its number.
        offset: its place in the partition.
        txn_id: of the transaction that sent it; None when it was sent outside of any.
        redelivery_count: how often a subscription delivered it before: in all where deliveries
            are counted (shared ones, `max_deliveries`, `ack_timeout`), else to this consumer.
    """

    __slots__ = (
        "_headers", "_micros", "_row", "codec", "key", "offset", "partition", "raw",
        "redelivery_count", "txn_id",
    )  # fmt: skip

    _row: dict[str, Any] | None

    def __init__(
        self,
        raw: bytes | None,
        key: bytes | None,
        headers: bytes | None,
        micros: int,
        partition: int,
        offset: int,
        txn_id: TxnId | None,
        codec: ValueCodec | None = None,
    ) -> None:
        """Made by readers.

        Args:
            raw: the bytes of its value.
            key: its bytes.
            headers: as `core.encode_headers` makes them; None: none.
            micros: its time, in microseconds since 1970.
            partition: its number.
            offset: its place in the partition.
            txn_id: of the transaction that sent it.
            codec: of the topic, if it has one.
        """
        self.raw = raw
        self.key = key
        self._headers = headers
        self._micros = micros
        self.partition = partition
        self.offset = offset
        self.txn_id = txn_id
        self.codec = codec
        self._row = None
        self.redelivery_count = 0

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
        return MessageId(self.partition, self.offset)

    @property
    def nbytes(self) -> int:
        """Bytes of key, value and headers."""
        return len(self.raw or b"") + len(self.key or b"") + len(self._headers or b"")

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


def messages_of(
    batch: pa.RecordBatch,
    partition: int,
    txn_id: Callable[[int], TxnId],
    codec: ValueCodec | None = None,
) -> list[Message]:
    """Messages of what `core.decode` gives.

    Args:
        batch: columns offset, timestamp, key, value, headers, txn_id (0: none).
        partition: its number.
        txn_id: gives the id of 128 bits of a local one.
        codec: of the topic, if it has one.
    """
    micros = batch.column("timestamp").view(pa.int64()).to_pylist()
    locals_ = batch.column("txn_id").to_pylist()
    ids = {local: txn_id(local) if local else None for local in set(locals_)}
    columns = (batch.column(name).to_pylist() for name in ("value", "key", "headers", "offset"))
    return [
        Message(value, key, headers, at, partition, offset, ids[local], codec)
        for value, key, headers, offset, at, local in zip(*columns, micros, locals_, strict=True)
    ]


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
    batch: pa.RecordBatch, tcid: int, codec: ValueCodec | None = None
) -> list[Message]:
    """Messages that `messages_to_arrow` has sent, of a store with this coordinator id."""
    found = []
    for partition, offset, micros, value, key, headers, local, before in zip(
        *(column.to_pylist() for column in batch.columns), strict=True
    ):
        txn_id = TxnId.of(tcid, local) if local else None
        message = Message(value, key, headers, micros, partition, offset, txn_id, codec)
        message.redelivery_count = before
        found.append(message)
    return found


def _shown(value: bytes | None) -> str:
    if value is None or len(value) <= 40:
        return repr(value)
    return f"{value[:40]!r}... ({len(value)} bytes)"
