"""A message as a reader holds it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import pyarrow as pa

from txnkv import core
from txnkv.coordinator.ids import TxnId

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class MessageId(NamedTuple):
    """Where a message stands; what an acknowledgement names it by."""

    partition: int
    offset: int


class Message:
    """One message of a topic. What needs work to be read is made when it is asked for.

    Attributes:
        value: bytes, or None.
        key: bytes, or None.
        partition: its number.
        offset: its place in the partition.
        txn_id: of the transaction that sent it; None when it was sent outside of any.
    """

    __slots__ = ("_headers", "_micros", "key", "offset", "partition", "txn_id", "value")

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

    @property
    def id(self) -> MessageId:
        """Partition and offset."""
        return MessageId(self.partition, self.offset)

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        """Names and values, in the order in which they were given."""
        return core.decode_headers(self._headers)

    @property
    def timestamp(self) -> datetime:
        """When it was sent, or what the sender said; UTC."""
        return _EPOCH + timedelta(microseconds=self._micros)

    def _content(self) -> tuple[object, ...]:
        return (self.value, self.key, self._headers or None, self._micros, self.id, self.txn_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        key = "" if self.key is None else f" key={_shown(self.key)}"
        return f"<Message {self.partition}:{self.offset}{key} {_shown(self.value)}>"


def messages_of(
    batch: pa.RecordBatch, partition: int, txn_id: Callable[[int], TxnId]
) -> list[Message]:
    """Messages of what `core.decode` gives.

    Args:
        batch: columns offset, timestamp, key, value, headers, txn_id (0: none).
        partition: its number.
        txn_id: gives the id of 128 bits of a local one.
    """
    micros = batch.column("timestamp").view(pa.int64()).to_pylist()
    locals_ = batch.column("txn_id").to_pylist()
    ids = {local: txn_id(local) if local else None for local in set(locals_)}
    columns = (batch.column(name).to_pylist() for name in ("value", "key", "headers", "offset"))
    return [
        Message(value, key, headers, at, partition, offset, ids[local])
        for value, key, headers, offset, at, local in zip(*columns, micros, locals_, strict=True)
    ]


def _shown(value: bytes | None) -> str:
    if value is None or len(value) <= 40:
        return repr(value)
    return f"{value[:40]!r}... ({len(value)} bytes)"
