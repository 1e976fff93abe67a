"""The sends and acknowledgements of a session."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

from txnkv.client.typed_values import Encode, encoder_of
from txnkv.errors import StorageFullError, UnavailableError
from txnkv.options import FlushMode
from txnkv.storage.shield import shielded
from txnkv.tables import ingest
from txnkv.tables.incoming import Outcome
from txnkv.topics import catalog, message_batches, messages
from txnkv.topics.acks import refuse
from txnkv.topics.message import MessageId
from txnkv.transaction.autocommit import write_alone
from txnkv.transaction.message_operations import (
    Acknowledged,
    AnySubscription,
    MessageOperations,
    ids_of,
    info_of,
)
from txnkv.transaction.sending import Sending, alone, send_alone
from txnkv.transaction.session_buffer import Room
from txnkv.transaction.write_result import WriteResult

if TYPE_CHECKING:
    from txnkv.client.client import Client
    from txnkv.client.topic import Topic
    from txnkv.topics.subscription_info import SubscriptionInfo
    from txnkv.transaction.context import TxnContext


def _nothing(message: Any) -> None: ...


_ShortCut: TypeAlias = "tuple[str | Topic | None, Callable[[Any], None], Encode | None]"
"""A topic; a call that takes its messages without ado, while the topic stays the same; and the
encoder of its values to bytes, where they are typed.
"""

Acks: TypeAlias = "tuple[SubscriptionInfo, list[MessageId], bool]"
"""Acknowledged messages of a subscription; whether each with all before it."""

_NONE: Final[_ShortCut] = (None, _nothing, None)


class SessionMessages(MessageOperations):
    """The part of a session that is about topics and subscriptions."""

    _client: Client
    _context: TxnContext | None
    _mode: FlushMode
    _room: Room

    def _begin_messages(self) -> None:
        self._sending = Sending()
        self._short: _ShortCut = _NONE
        self._acks: list[Acks] = []
        self._sent = self._acked = 0
        # What `send_batch` failed with and has taken, and how many messages it is.
        self._unsent: tuple[Any, int] | None = None

    @property
    @abstractmethod
    def has_pending(self) -> bool:
        """Rows or messages wait to be flushed."""

    @abstractmethod
    def flush(self) -> WriteResult:
        """Write the rows and send the messages that wait."""

    def _stop_short_cut(self) -> None:
        self._short = _NONE

    @abstractmethod
    def _require_open(self, what: str) -> None: ...

    @abstractmethod
    def _after_call(self) -> None: ...

    def send(
        self,
        topic: str | Topic,
        value: Any,
        key: bytes | str | None = None,
        partition: int | None = None,
        headers: Any = None,
        timestamp: Any = None,
    ) -> None:
        """Send one message; see `MessageOperations.send`."""
        to, put, encode = self._short
        room = self._room.left
        if topic is to and encode is not None:
            value = encode(value)
        if (
            topic is to
            and value.__class__ is bytes
            and partition is None
            and headers is None
            and timestamp is None
            and room[0] > 0
        ):
            if key is None:
                put(value)
                room[0] -= 8 + len(value)
                return
            if key.__class__ is bytes:
                put((value, key))
                room[0] -= 16 + len(value) + len(key)
                return
        self._require_open("send")
        if self._context is not None:
            self._context.look_open("send")
        info = self._client.topic_info(topic)
        catalog.require_writable(info)
        if topic is not to or encode is None:
            encode = encoder_of(info)
            if encode is not None:
                value = encode(value)
        count = len(info.partitions)
        put = self._sending.appender(info)
        message = messages.pending(value, key, partition, headers, timestamp, count)
        self._room.take((message,) if isinstance(message, bytes) else message)
        put(message)
        if self._mode == "manual":
            self._short = topic, put, encode
        self._after_call()

    @shielded
    def send_batch(self, topic: str | Topic, data: Any) -> WriteResult:
        """Send Arrow data; see `MessageOperations.send_batch`."""
        self._require_open("send")
        info = self._client.topic_info(topic)
        catalog.require_writable(info)
        given, batches = ingest.open_stream(data)
        codec = info.options.codec
        message_batches.check_columns(given, codec)
        unsent = self._unsent
        if self.has_pending:
            self.flush()
        if unsent is not None and unsent[0] is data:
            self._unsent = None
            return WriteResult(sent=unsent[1])
        streamed = isinstance(data, pa.RecordBatchReader)
        outgoing = message_batches.outgoing_of(batches, len(info.partitions), codec)
        parcels: Any = self._sending.parcels_of(info, outgoing)
        if not streamed:  # looked at as a whole before any of it is sent
            parcels = list(parcels)
        result = WriteResult()

        def write(context: TxnContext) -> Outcome:
            result.sent = 0
            left = iter(parcels)
            try:
                for parcel in left:
                    context.send(parcel.topic, parcel.parts, more=True)
                    result.sent += parcel.rows
                    context.settle(more=True)
                context.settle()
            except (StorageFullError, UnavailableError):
                if context is self._context and context.scope is None:
                    self._note(sent=result.sent)
                    if not streamed:
                        self._sending.put_back([*left])
                        self._unsent = data, sum(parcel.rows for parcel in parcels)
                raise
            return Outcome()

        if self._context is not None:
            with self._context.taking_back():
                write(self._context)
        elif not streamed and alone(parcels):
            send_alone(self._client.instance.topics, parcels)
            result.sent = sum(parcel.rows for parcel in parcels)
        else:
            write_alone(self._client.instance, write, again=not streamed)
        self._client.instance.coordinator.metrics.messages_sent.add(result.sent)
        return result

    def _note(self, *, sent: int = 0, acked: int = 0) -> None:
        """Have these counted by the next flush and the metrics."""
        self._sent += sent
        self._acked += acked
        metrics = self._client.instance.coordinator.metrics
        metrics.messages_sent.add(sent)
        metrics.messages_acked.add(acked)

    def _living(self, acks: list[Acks]) -> list[Acks]:
        """Those of topics that were not dropped: the others could never be flushed."""
        topics = self._client.instance.topics
        return [one for one in acks if topics.is_live(one[0].topic)]

    @shielded
    def _acknowledge(
        self, subscription: AnySubscription, message: Acknowledged, *, cumulative: bool
    ) -> None:
        self._require_open("acknowledge")
        info, ids = info_of(subscription), ids_of(message)
        if self._context is None:
            refuse(self._client.instance.topics, info, ids, cumulative=cumulative)
            self._acks.append((info, ids, cumulative))
        else:
            self._context.acknowledge(info, ids, cumulative=cumulative)
            self._context.settle_if_possible()
            self._note(acked=len(ids))
        self._after_call()
