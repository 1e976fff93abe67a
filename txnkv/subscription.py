"""Subscriptions as a user holds them: messages to work on, each until it is acknowledged.

    m = sub.receive()          delivered: nobody else gets it while this consumer has it
    sub.ack(m)                 deleted, durable; or
    sub.ack(m, txn)            deleted if and when the transaction commits; else delivered again
    sub.nack(m)                delivered again, after the subscription's delay

An exclusive subscription has one live consumer and may acknowledge cumulatively; a shared one
has any number, in any processes, and each message is leased to one of them for a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from txnkv.closing import Closing
from txnkv.errors import AckConflictError, ClosedError, InvalidTxnStateError
from txnkv.storage.dropped import WhenDropped
from txnkv.topics.leases import LeaseReader
from txnkv.topics.message import Message, MessageId
from txnkv.topics.redelivery import Delivery, ExclusiveReader
from txnkv.topics.subscriptions import EXCLUSIVE, Place, SubscriptionInfo, Subscriptions
from txnkv.topics.values import Encoded
from txnkv.topics.waiting import Waiting, deadline

if TYPE_CHECKING:
    from txnkv.client import Client
    from txnkv.topics.catalog import TopicInfo
    from txnkv.transaction import Transaction

_DEAD_LETTER_HEADERS: Final = ("txnkv-topic", "txnkv-partition", "txnkv-offset", "txnkv-deliveries")


class _Stirred(Exception):
    """There may be something to be delivered again."""


def subscribe(
    client: Client,
    topic: TopicInfo,
    name: str,
    type: str = EXCLUSIVE,
    start: str | Mapping[int, int] = "earliest",
    partitions: Sequence[int] | None = None,
    *,
    lease_seconds: float = 30.0,
    max_deliveries: int | None = None,
    dead_letter: str | None = None,
    redelivery_delay: float = 0.0,
) -> Subscription:
    """A consumer of a subscription, which is made when there is none of this name.

    Args:
        client: of the store.
        topic: of which topic.
        name: of the subscription; unique in the topic.
        type: "exclusive" or "shared".
        start: where a new one begins: "earliest", "latest", or an offset by partition number.
        partitions: numbers of those that this consumer reads; None: all.
        lease_seconds: a message that a shared consumer had for so long without acknowledging it
            goes to another.
        max_deliveries: after so many deliveries without an ack a message goes to the dead letter
            topic; None: never.
        dead_letter: that topic, made when it is missing; by default named after topic and
            subscription.
        redelivery_delay: seconds from a negative ack to the next delivery.

    Raises:
        UnavailableError: an exclusive one has a live consumer.
        ValueError: an argument makes no sense, or there is one of the other type.
        TopicNotFoundError: the topic was dropped.
    """
    numbers = range(len(topic.partitions)) if partitions is None else sorted(set(partitions))
    if not numbers or not set(numbers) <= set(range(len(topic.partitions))):
        raise ValueError(
            f"topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}: name some of "
            f"them, not {partitions!r}"
        )
    if max_deliveries is not None and dead_letter is None:
        dead_letter = f"{topic.name}.{name}.dead"
    info = SubscriptionInfo(
        0,
        topic,
        name,
        type,
        float(lease_seconds),
        max_deliveries,
        dead_letter,
        float(redelivery_delay),
    )
    info = client.instance.topics.subscriptions.make(info, start)
    if dead_letter is not None:
        schema = topic.options.value_schema
        client.create_topic(dead_letter, exists_ok=True, value_schema=schema)
    return Subscription(client, info, numbers)


class Subscription(Closing):
    """A consumer of a subscription. One thread at a time; a context manager.

    Attributes:
        info: what names the subscription; picklable, for processes that acknowledge by a token.
    """

    def __init__(self, client: Client, info: SubscriptionInfo, partitions: Sequence[int]) -> None:
        """Made by `Topic.subscribe`."""
        self._client = client
        self.info = info
        self._engine = client.instance.topics
        self._pid = os.getpid()
        subscriptions = self._engine.subscriptions
        place = subscriptions.open(info)
        self._reader: ExclusiveReader | LeaseReader
        try:
            state = None if info.leased else subscriptions.exclusive(info.id)
            self._state = state
            if state is None:
                self._reader = LeaseReader(self._engine, info, place, partitions)
            else:
                self._reader = ExclusiveReader(self._engine, state, partitions)
        except BaseException:
            subscriptions.close(info, place)
            raise
        leases = self._reader if isinstance(self._reader, LeaseReader) else None
        self._close = WhenDropped(self, _close, subscriptions, info, place, leases)

    @property
    def name(self) -> str:
        """Unique in the topic."""
        return self.info.name

    def __repr__(self) -> str:
        return f"<Subscription {self.info.name!r} of {self.info.topic.name!r}, {self.info.type}>"

    # -- receiving ---------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message, or None when there was none for `timeout` seconds (None: wait).

        Raises:
            TopicNotFoundError: the topic was dropped.
            ClosedError: this consumer was closed.
        """
        found = self.receive_many(1, timeout)
        return found[0] if found else None

    def receive_many(self, max_messages: int = 100, timeout: float | None = None) -> list[Message]:
        """The next messages, as many as there are, at most so many; waits for the first one.

        Raises:
            As `receive`.
        """
        if max_messages < 1:
            raise ValueError(f"max_messages is at least 1, not {max_messages!r}")
        found = self._take(max_messages)
        if found or (timeout is not None and timeout <= 0):
            return found
        waiting = Waiting(self._engine, deadline(timeout), self._check)
        while True:
            waiting.mark()
            found = self._take(max_messages)
            if found:
                return found
            try:
                if not waiting.wait(self._reader.pending):
                    return []
            except _Stirred:
                continue

    def __iter__(self) -> Iterator[Message]:
        """Messages without end; each waits until there is one."""
        while True:
            message = self.receive()
            assert message is not None
            yield message

    def _take(self, most: int) -> list[Message]:
        while True:
            self._require_open()
            given = self._reader.take(most)
            found = [one.message for one in given if not self._is_spent(one)]
            for one in given:
                if self._is_spent(one):
                    self._give_up(one)
            if found or not given:
                return found

    def _is_spent(self, delivery: Delivery) -> bool:
        return self.info.max_deliveries is not None and delivery.before >= self.info.max_deliveries

    def _give_up(self, delivery: Delivery) -> None:
        """To the dead letter topic, and acknowledged, in one transaction."""
        message, topic = delivery.message, self.info.dead_letter
        assert topic is not None
        about = (self.info.topic.name, message.partition, message.offset, delivery.before)
        headers = [
            (name, str(value).encode())
            for name, value in zip(_DEAD_LETTER_HEADERS, about, strict=True)
        ]
        try:
            with self._client.transaction() as txn:
                txn.send(
                    topic,
                    None if message.raw is None else Encoded(message.raw),
                    key=message.key,
                    headers=[*message.headers, *headers],
                    timestamp=message.timestamp,
                )
                txn.ack(self, message)
        except AckConflictError:
            return  # somebody acknowledged it after all

    def _check(self) -> None:
        self._require_open()
        if self._reader.stirred():
            raise _Stirred

    # -- acknowledging -----------------------------------------------------------------

    def ack(
        self,
        message: Message | MessageId | Sequence[Message | MessageId],
        txn: Transaction | None = None,
    ) -> None:
        """The message is worked on: it is not delivered again.

        Args:
            message: or its id, or several of them.
            txn: acknowledge when this commits; else at once, durably. Outside of a transaction an
                ack of what is deleted, or acknowledged by an open transaction, has no effect.

        Raises:
            AckConflictError: another ack was first; `txn` is aborted whole.
            InvalidTxnStateError: `txn` is not open.
            OffsetOutOfRangeError: there is no such message.
        """
        self._acknowledge("ack", message, txn)

    def ack_cumulative(
        self,
        message: Message | MessageId | Sequence[Message | MessageId],
        txn: Transaction | None = None,
    ) -> None:
        """The same, for this message and all before it in its partition; exclusive only.

        Raises:
            As `ack`.
            NotSupportedError: the subscription is shared.
        """
        self._acknowledge("ack_cumulative", message, txn)

    def _acknowledge(self, how: str, message: Any, txn: Transaction | None) -> None:
        self._require_open()
        if txn is not None:
            getattr(txn, how)(self, message)
            return
        with self._client.new_session() as session:
            getattr(session, how)(self, message)
            session.flush()

    def nack(self, message: Message | MessageId | Sequence[Message | MessageId]) -> None:
        """The message could not be worked on: it is delivered again, after `redelivery_delay`.

        What is deleted, or acknowledged by an open transaction, is left alone.
        """
        self._require_open()
        named = [message] if isinstance(message, Message | MessageId) else list(message)
        ids = [one.id if isinstance(one, Message) else MessageId(*one) for one in named]
        delay = self.info.redelivery_delay
        if isinstance(self._reader, LeaseReader):
            self._reader.nack(ids, delay)
            return
        state = self._state
        assert state is not None
        for number, offset in ids:
            partition_id = self.info.topic.partitions[number]
            if state.deliverable(partition_id, offset):
                state.give_back(partition_id, offset, offset + 1, delay)

    def lag(self) -> dict[int, int]:
        """Messages that are not deleted, by partition; markers may be counted among them."""
        return self._engine.subscriptions.lag(self.info)

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        """Let others have what this consumer has not acknowledged. Twice is fine."""
        if os.getpid() == self._pid:
            self._close()

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidTxnStateError(
                f"{self.info} was opened by process {self._pid}: subscribe in this one"
            )
        self._client.require_open()
        if not self._close.alive:
            raise ClosedError(f"{self.info}: this consumer was closed; subscribe again")


def _close(
    subscriptions: Subscriptions, info: SubscriptionInfo, place: Place, leases: LeaseReader | None
) -> None:
    try:
        if leases is not None:
            leases.close()
        subscriptions.close(info, place)
    except ClosedError:
        return  # the store went first, and with this process's slot the place is free
