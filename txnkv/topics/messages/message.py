"""A message as a reader holds it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import TxnId
from txnkv.errors import CorruptionError
from txnkv.topics.messages.values import ValueCodec

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class MessageId(NamedTuple):
    """The place of a message, by which an acknowledgement names it."""

    partition: int
    offset: int


class Message:
    """One message of a topic. What needs work to be read is made when it is asked for.

    Attributes:
        value: bytes, or None; of a topic with a value schema a dict, or None.
        key: bytes, or None.
        partition: its number.
        offset: its place in the partition.
        txn_id: of the transaction that sent it; None when it was sent outside of any.
        redelivery_count: how often a subscription delivered it before: in all where deliveries
            are counted (shared ones, `max_deliveries`, `ack_timeout`), else to this consumer.
    """

    __slots__ = (
        "_headers", "_micros", "key", "offset", "partition", "redelivery_count", "txn_id", "value",
    )  # fmt: skip

    value: Any

    def __init__(
        self,
        value: bytes | None,
        key: bytes | None,
        headers: bytes | None,
        micros: int,
        partition: int,
        offset: int,
        txn_id: TxnId | None,
    ) -> None:
        """Made by readers.

        Args:
            value: its bytes.
            key: its bytes.
            headers: as `core.encode_headers` makes them; None: none.
            micros: its time, in microseconds since 1970.
            partition: its number.
            offset: its place in the partition.
            txn_id: of the transaction that sent it.
        """
        self.value = value
        self.key = key
        self._headers = headers
        self._micros = micros
        self.partition = partition
        self.offset = offset
        self.txn_id = txn_id
        self.redelivery_count = 0

    @property
    def raw(self) -> bytes | None:
        """The bytes of the value, as they are stored."""
        found: bytes | None = self.value
        return found

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
        """The time at which the message was sent, or that the sender gave; UTC."""
        return _EPOCH + timedelta(microseconds=self._micros)

    def _content(self) -> tuple[object, ...]:
        return (self.raw, self.key, self._headers or None, self._micros, self.id, self.txn_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        key = "" if self.key is None else f" key={_shown(self.key)}"
        return f"<Message {self.partition}:{self.offset}{key} {self._shown_value()}>"

    def _shown_value(self) -> str:
        return _shown(self.raw)


class TypedMessage(Message):
    """A message of a topic with a value schema; its value is read when it is asked for."""

    __slots__ = ("_codec", "_raw", "_row")

    _raw: bytes | None
    _row: dict[str, Any] | None

    def __init__(
        self,
        codec: ValueCodec,
        value: bytes | None,
        key: bytes | None,
        headers: bytes | None,
        micros: int,
        partition: int,
        offset: int,
        txn_id: TxnId | None,
    ) -> None:
        """Made by readers.

        Args:
            codec: of the topic.
            value: its bytes.
            key: this and the others as `Message` takes them.
            headers: the same.
            micros: the same.
            partition: the same.
            offset: the same.
            txn_id: the same.
        """
        # Not by `super().__init__`: that takes as long as all of this.
        self._codec = codec
        self._raw = value
        self._row = None
        self.key = key
        self._headers = headers
        self._micros = micros
        self.partition = partition
        self.offset = offset
        self.txn_id = txn_id
        self.redelivery_count = 0

    @property
    def value(self) -> Any:
        """A dict, or None.

        Raises:
            CorruptionError: its bytes are not of the topic's value schema; they are `raw`.
            ValueError: it has a date or time that Python has not.
        """
        if self._row is None and self._raw is not None:
            try:
                self._row = self._codec.decode_one(self._raw)
            except CorruptionError as error:
                raise CorruptionError(
                    f"partition {self.partition}, offset {self.offset}: {error}"
                ) from None
        return self._row

    @property
    def raw(self) -> bytes | None:
        """The bytes of the value, as they are stored."""
        return self._raw

    def _shown_value(self) -> str:
        try:
            return repr(self.value)
        except (CorruptionError, ValueError):
            return _shown(self._raw)

    def __reduce__(self) -> tuple[Any, ...]:
        places = (self._micros, self.partition, self.offset, self.txn_id)
        made_of = (self._codec, self._raw, self.key, self._headers, *places)
        return TypedMessage, made_of, (None, {"redelivery_count": self.redelivery_count})


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
    make = Message if codec is None else partial(TypedMessage, codec)
    columns = (batch.column(name).to_pylist() for name in ("value", "key", "headers", "offset"))
    return [
        make(value, key, headers, at, partition, offset, ids[local])
        for value, key, headers, offset, at, local in zip(*columns, micros, locals_, strict=True)
    ]


def _shown(value: bytes | None) -> str:
    if value is None or len(value) <= 40:
        return repr(value)
    return f"{value[:40]!r}... ({len(value)} bytes)"
