"""Subscriptions as a user holds them: messages to work on, each until it is acknowledged.

    m = sub.receive()          delivered: nobody else gets it while this consumer has it
    sub.ack(m)                 deleted, durable; or
    sub.ack(m, txn)            deleted if and when the transaction commits; else delivered again
    sub.nack(m)                delivered again, after the subscription's delay

An exclusive subscription has one live consumer and may acknowledge cumulatively; a shared one
has any number, in any processes, and each message is leased to one of them for a time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, Unpack, overload

from txnkv.core import Delivery
from txnkv.errors import (
    AckConflictError,
    ClosedError,
    InvalidTxnStateError,
    TxnkvError,
    UnavailableError,
    as_index,
    require_count,
)
from txnkv.storage import WhenDropped, brief, caller, clock, new_lock, shielded, shielded_unless
from txnkv.tables import Outcome
from txnkv.topics import (
    HELD_BYTES,
    KEY_SHARED,
    MANY,
    Belongings,
    Encoded,
    Exclusive,
    ExclusiveReader,
    KeySharedReader,
    LeaseReader,
    Message,
    Place,
    Standby,
    Start,
    SubscriptionInfo,
    SubscriptionOptions,
    SubscriptionType,
    TopicInfo,
    Waiting,
    chosen_partitions,
    deadline,
    require_time,
)
from txnkv.transaction import (
    Acknowledged,
    Closing,
    Connection,
    Transaction,
    TxnContext,
    message_ids,
    write_alone,
)

_log = logging.getLogger("txnkv")

_ABOUT: Final = ("txnkv-topic", "txnkv-partition", "txnkv-offset", "txnkv-deliveries")
_TIMES: Final = (int, float, type(None))
"""Classes of a `timeout` that need no look."""
_FEW_LEASES: Final = 100
_FEW: Final = 500
"""So many messages are acknowledged in no time."""
_LETTERS: Final = 500
"""So many dead letters are written at once."""


def subscribe(
    connection: Connection,
    topic: TopicInfo,
    id: int | None,
    /,
    name: str,
    type: SubscriptionType = "exclusive",
    start: Start | Mapping[int, int] = "earliest",
    partitions: Sequence[int] | None = None,
    max_bytes: int = HELD_BYTES,
    **options: Unpack[SubscriptionOptions],
) -> Subscription:
    """A consumer of a subscription, which is made when there is none of this name.

    Args:
        connection: to the store.
        topic: of which topic.
        id: of the subscription that it is to be: none is made then.
        name: of the subscription; unique in the topic.
        type: "exclusive"; "failover": exclusive, and further consumers wait until the one that
            has the place is closed or dies; "shared": any number of them; or "key_shared": the
            same, and messages of one key go to one of them at a time, in their order.
        start: where a new one begins: "earliest", "latest", or an offset by partition number.
        partitions: numbers of those that this consumer reads; None: all, those that are added to
            the topic later too.
        max_bytes: of messages, in memory: of those that this consumer has read ahead, of all
            partitions together, and of those that one call gives but for the last.
        **options: of the subscription; those that are not named stay as they are.
            lease_seconds: a message that a shared consumer had for so long without acknowledging
            it goes to another; 30. max_deliveries: after so many deliveries without an ack a
            message goes to the dead letter topic; None, never. dead_letter: that topic, which is
            taken as it is, or made when it is missing; by default named after topic and
            subscription. redelivery_delay: seconds from a negative ack to the next delivery; 0.
            ack_timeout: seconds after which a message of an exclusive one is delivered again unless
            it was acknowledged, pending or done; None, never. Its deliveries are counted.
            order: "offset"; or "commit", as transactions were committed, so that an open one holds
            back nothing: for exclusive and failover subscriptions that count no deliveries, and
            for all of topics with buffer="sidecar". isolation: "read_committed"; or
            "read_uncommitted", all that was sent, also what is aborted later.

    Raises:
        UnavailableError: an exclusive one has a live consumer. Nothing was changed, as with every
            other error.
        ValueError: an argument makes no sense, or there is one of the other type.
        OffsetOutOfRangeError: it is to start beyond the end.
        TopicNotFoundError: the topic was dropped.
        NotSupportedError: the dead letter topic is a copy.
    """
    require_count("max_bytes", max_bytes, "bytes")
    numbers = chosen_partitions(topic, type, partitions)
    info, place = connection.instance.topics.subscriptions.subscribe(
        topic, name, type, start, options, id
    )
    return Subscription(connection, info, place, numbers, max_bytes)


class Subscription(Closing):
    """A consumer of a subscription; a context manager. Each message goes to one of the threads that
    share it.

    Attributes:
        info: what names the subscription; picklable, for processes that acknowledge by a token.
    """

    _delivery: Delivery | None = None  # gives what needs no look

    def __init__(
        self,
        connection: Connection,
        info: SubscriptionInfo,
        place: Place | None,
        partitions: Sequence[int] | None,
        max_bytes: int,
    ) -> None:
        """Made by `Topic.subscribe`."""
        self._max_bytes = max_bytes
        self._connection = connection
        self.info = replace(info, store=connection.instance.store.store_id)
        self._engine = connection.instance.topics
        self._partitions, self._pid = partitions, os.getpid()
        self._state: Exclusive | None = None
        self._reader: ExclusiveReader | LeaseReader | Standby = Standby()
        self._taking = new_lock()
        self._on_its_way: list[Message] = []  # to the main thread, which a signal may interrupt
        self._given: list[Message] = []  # by the last call
        self._spent: deque[Message] = deque()  # for the dead letter topic
        self._has = Belongings(self._engine.subscriptions, info)
        if place is not None:
            self._begin(place)
        self._close = WhenDropped(self, self._has.close)
        connection.handles.add(self)

    def _begin(self, place: Place) -> None:
        """Begin to read: this consumer has the place, or its share."""
        info = self.info
        self._has.place = place
        try:
            state = None if info.leased else self._engine.local.exclusive(info.id)
            if state is None:
                make = KeySharedReader if info.type == KEY_SHARED else LeaseReader
                leases = make(self._engine, info, place, self._partitions, self._max_bytes)
                self._reader = self._has.leases = leases
            else:
                self._reader = ExclusiveReader(
                    self._engine, state, self._partitions, self._max_bytes
                )
            self._state = state
            self._delivery = None if state is None or info.max_deliveries else state.delivery
        except BaseException:
            self._has.give_up()
            raise

    def _take_over(self) -> None:
        place = self._engine.subscriptions.take_over(self.info)
        if place is not None:
            self._begin(place)

    @property
    def is_active(self) -> bool:
        """Tell whether messages come to this consumer; False while it waits for the place."""
        return not isinstance(self._reader, Standby)

    @property
    def name(self) -> str:
        """Unique in the topic."""
        return self.info.name

    def __repr__(self) -> str:
        closed = "" if self._close.alive else ", closed"
        info = self.info
        return f"<Subscription {info.name!r} of {info.topic.name!r}, {info.type}{closed}>"

    # -- receiving ---------------------------------------------------------------------

    @overload
    def receive(self, timeout: None = None) -> Message: ...

    @overload
    def receive(self, timeout: float | None) -> Message | None: ...

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message, or None when there was none for `timeout` seconds (None: wait).

        Raises:
            TopicNotFoundError: the topic was dropped.
            ClosedError: this consumer was closed.
        """
        if timeout.__class__ not in _TIMES or timeout != timeout:
            require_time(timeout)
        if (delivery := self._delivery) is not None and not self._on_its_way:
            one: Message | None = delivery.receive()
            if one is not None:
                self._given = [one]
                if delivery.unsure is one:
                    delivery.unsure = None  # nothing is called until the caller has it
                return one
        found = self.receive_many(1, timeout)
        return found[0] if found else None

    def receive_many(self, max_messages: int = 100, timeout: float | None = None) -> list[Message]:
        """The next messages, as many as there are, at most so many, and no more than the
        subscription's `max_bytes` but for the last; waits for the first one.

        Raises:
            TxnkvError: as `receive`.
        """
        require_count("max_messages", max_messages)
        if timeout.__class__ not in _TIMES or timeout != timeout:
            require_time(timeout)
        found = self._take(max_messages)
        if found or (timeout is not None and timeout <= 0):
            if self._on_its_way is found:
                self._on_its_way = []  # nothing is called until the caller has them
            return found
        waiting = self._waiting(deadline(timeout))
        assert waiting is not None
        try:
            while True:
                waiting.mark()
                found = self._take(max_messages)
                if found or not waiting.wait(self._is_pending()):
                    if self._on_its_way is found:
                        self._on_its_way = []
                    return found
        finally:
            waiting.end()

    def _waiting(self, until: int | None) -> Waiting | None:
        """A wait for messages of this consumer; None: it is done on another host."""
        info, numbers = self.info, self._partitions
        group = None if numbers is None else tuple(numbers)
        return Waiting(
            self._engine.watch,
            until,
            self._check,
            (info.id, group) if info.type in MANY else None,
            each_its_own=info.type == KEY_SHARED,
            is_concerned=self._is_concerned,
        )

    def __iter__(self) -> Iterator[Message]:
        """Messages without end; each waits until there is one."""
        while True:
            yield self.receive()

    @shielded_unless(lambda self, most: self._gives_soon(most))
    def _take(self, most: int) -> list[Message]:
        """Take what is there; the next call gives it again if a signal keeps it from the caller."""
        with self._taking:
            if lost := self._lost:
                self._put_back(lost)
            found = self._next(most)
            if found and caller() == threading.main_thread().ident:
                self._on_its_way = found
            return found

    def _gives_soon(self, most: int) -> bool:
        """Taking messages writes no dead letter, and no more than a few leases."""
        if self.info.max_deliveries is not None:
            return False
        leases = isinstance(self._reader, LeaseReader) and most <= _FEW_LEASES
        return leases or isinstance(self._reader, ExclusiveReader)

    def _next(self, most: int) -> list[Message]:
        deliveries = self.info.max_deliveries
        until = 0 if deliveries is None else self._gives_up_until()
        while True:
            self._require_open()
            self._follow()
            if isinstance(self._reader, Standby):
                self._take_over()
            try:
                found = given = self._reader.take(most)
            except TxnkvError:
                self._give_up(0)  # or it would wait for the next that can be read
                raise
            late = True
            if deliveries is not None:
                found = [one for one in given if one.redelivery_count < deliveries]
                self._spent += [one for one in given if one.redelivery_count >= deliveries]
                if given and not found and self._has_room():
                    continue  # to give up several together
                try:
                    late = self._give_up(until)
                except TxnkvError as error:
                    if not found:
                        raise
                    _log.warning("%s cannot give up a message: %s", self.info, error)
            if found or not given or late:
                self._given = found
                self._count(found)
                return found.copy()

    def _gives_up_until(self) -> int:
        """Leases of messages among dead letters are not to run out behind these."""
        return clock.monotonic_micros() + int(min(self.info.lease_time or 4, 4) * 250_000)

    def _has_room(self) -> bool:
        spent = self._spent
        return len(spent) < _LETTERS and sum(one.nbytes for one in spent) < self._max_bytes

    def _follow(self) -> None:
        """Know the topic as it is now: it may have got partitions."""
        topic = self._engine.current(self.info.topic)
        if topic is not self.info.topic:
            self.info = replace(self.info, topic=topic)

    def unreceive(self) -> None:
        """Undo the last `receive` or `receive_many`: the next one gives its messages again."""
        self._put_back(self._lost or self._given)

    @property
    def _lost(self) -> list[Message]:
        """Messages that a signal may have kept from the main thread, whose call this is."""
        if caller() != threading.main_thread().ident:
            return []
        unsure = None if self._delivery is None else self._delivery.unsure
        return self._on_its_way or ([] if unsure is None else [unsure])

    def _put_back(self, messages: list[Message]) -> None:
        self._given = []
        self._reader.put_back(messages)
        if caller() == threading.main_thread().ident:
            self._on_its_way = []
            if self._delivery is not None:
                self._delivery.unsure = None

    def _count(self, found: list[Message]) -> None:
        metrics = self._connection.instance.coordinator.metrics
        metrics.messages_delivered.value += len(found)
        metrics.messages_redelivered.value += sum([one.redelivery_count > 0 for one in found])

    def _give_up(self, until: int) -> bool:
        """To the dead letter topic, as long as there is time; tell whether it is over.

        What is left then is taken again. Of several that cannot go together each goes alone.
        """
        most = _LETTERS
        while self._spent:
            those = list(islice(self._spent, most))
            try:
                # One whose lease ran out may be here twice.
                self._write_letters({(one.partition, one.offset): one for one in those}.values())
            except Exception as error:
                if len(those) > 1:
                    most = 1
                    continue
                if not isinstance(error, AckConflictError):
                    raise  # else somebody acknowledged it after all
            for _ in those:
                self._spent.popleft()
            if clock.monotonic_micros() >= until:
                self._reader.put_back(self._spent)
                self._spent.clear()
                return True
        return False

    def _write_letters(self, messages: Collection[Message]) -> None:
        """Send to the dead letter topic, and acknowledge, in one transaction."""
        topic = self.info.dead_letter
        assert topic is not None
        with Transaction.begin(self._connection) as txn:
            for one in messages:
                about = (self.info.topic.name, one.partition, one.offset, one.redelivery_count)
                headers = [
                    (name, str(each).encode()) for name, each in zip(_ABOUT, about, strict=True)
                ]
                headers, value = [*one.headers, *headers], self._letter(topic, one)
                txn.send(topic, value, key=one.key, headers=headers, timestamp=one.timestamp)
            txn.ack(self, list(messages))
        self._connection.instance.coordinator.metrics.dead_letters.add(len(messages))

    def _letter(self, topic: str, message: Message) -> Any:
        """The value of a message for the topic of dead letters: as it stands where it can be read
        there, which it can but where one of both topics was altered alone.
        """
        raw, codec = message.raw, message.codec
        there = self._connection.topic_info(topic).options.codec
        if raw is None or there is None or (codec is not None and there.has(raw, codec)):
            return None if raw is None else Encoded(raw)
        return message.value

    @brief
    def _check(self) -> bool:
        self._require_open()
        return self._reader.stirred()

    @brief
    def _is_concerned(self) -> bool:
        reader = self._reader
        return not isinstance(reader, ExclusiveReader) or reader.is_concerned()

    @brief
    def _is_pending(self) -> bool:
        return self._reader.pending

    # -- acknowledging -----------------------------------------------------------------

    def ack(self, message: Acknowledged, txn: Transaction | None = None) -> None:
        """The message is worked on: it is not delivered again.

        Args:
            message: or its id, or several of them.
            txn: acknowledge when this commits; else at once, durably. Outside of a transaction an
                ack of what is deleted, or acknowledged by an open transaction, has no effect.

        Raises:
            AckConflictError: another ack was first; `txn` is aborted whole.
            InvalidTxnStateError: `txn` is not open.
            OffsetOutOfRangeError: there is no such message.
            TopicNotFoundError: the subscription was dropped, or its topic.
        """
        self._acknowledge("ack", message, txn)

    def ack_cumulative(self, message: Acknowledged, txn: Transaction | None = None) -> None:
        """The same, for this message and all before it in its partition; exclusive only.

        Raises:
            AckConflictError, InvalidTxnStateError, OffsetOutOfRangeError: as `ack`.
            NotSupportedError: the subscription is shared.
        """
        self._acknowledge("ack_cumulative", message, txn)

    def _acknowledge(self, how: str, message: Any, txn: Transaction | None) -> None:
        self._require_open()
        if txn is None:
            self._acknowledge_alone(message, cumulative=how == "ack_cumulative")
            return
        if not isinstance(txn, Transaction):
            raise TypeError(f"txn is a Transaction, not {type(txn).__name__}")
        getattr(txn, how)(self, message)

    @shielded_unless(lambda _, message, **__: _are_few(message))
    def _acknowledge_alone(self, message: Acknowledged, *, cumulative: bool) -> None:
        instance, info, ids = self._connection.instance, self.info, message_ids(message, self.info)

        def write(context: TxnContext) -> Outcome:
            context.acknowledge(info, ids, cumulative=cumulative)
            context.settle()
            return Outcome()

        if ids:
            write_alone(instance, write, again=True)
            instance.coordinator.metrics.messages_acked.value += len(ids)

    @shielded_unless(lambda _, message: _are_few(message))
    def nack(self, message: Acknowledged) -> None:
        """The message could not be worked on: it is delivered again, after `redelivery_delay`.

        What is deleted, or acknowledged by an open transaction, is left alone.

        Raises:
            OffsetOutOfRangeError: the topic has not the partition.
            TopicNotFoundError: the subscription was dropped, or its topic.
        """
        self._require_there()
        ids = message_ids(message, self.info)
        self.info.require_partitions(number for number, _ in ids)
        delay = self.info.redelivery_delay
        if isinstance(self._reader, LeaseReader):
            self._reader.nack(ids, delay)
            return
        state = self._state
        if state is None:
            return  # it waits for the place, and was given nothing
        for number, offset in ids:
            partition_id = self.info.topic.partitions[number]
            if partition_id in state.cursors and state.deliverable(partition_id, offset):
                state.give_back(partition_id, offset, offset + 1, delay)

    @shielded
    def seek(self, partition: int, offset: int | Start) -> None:
        """Move the subscription in a partition, durably: what lies below is acknowledged, and all
        from there on is delivered, again where it was. Other consumers of a shared one follow.

        Args:
            partition: its number.
            offset: or "earliest", the first that is kept, or "latest", behind what is decided.

        Raises:
            InvalidTxnStateError: acks of its messages are pending in open transactions.
            OffsetOutOfRangeError: the partition does not hold this offset.
            UnavailableError: this consumer waits for the place that another one has.
            ValueError: there is no such partition.
        """
        self._require_open()
        partition = as_index("a partition", partition)
        self._follow()
        if partition not in range(len(self.info.topic.partitions)):
            raise ValueError(f"topic {self.info.topic.name!r} has no partition {partition!r}")
        if isinstance(self._reader, Standby):
            self._take_over()
            if isinstance(self._reader, Standby):
                raise UnavailableError(
                    f"{self.info}: another consumer has the place; seek there, or close it"
                )
        with self._taking:
            if lost := self._lost:
                self._put_back(lost)
            found = self._engine.subscriptions.seek(self.info, partition, offset)
            self._reader.seek(partition, found)
            self._given = [each for each in self._given if each.partition != partition]
            self._spent = deque(each for each in self._spent if each.partition != partition)

    @shielded
    def committed(self) -> dict[int, int]:
        """By partition, the offset below which all is acknowledged, or gone: where a new consumer
        begins.
        """
        self._require_there()
        return self._engine.subscriptions.committed(self.info)

    @shielded
    def lag(self) -> dict[int, int]:
        """Messages that are not deleted, by partition; markers, and each piece of a large message,
        may be counted among them.
        """
        self._require_there()
        return self._engine.subscriptions.lag(self.info)

    @shielded
    def lost(self) -> dict[int, int]:
        """Messages that retention took before they were acknowledged, by partition, since the
        subscription was made; markers, and each piece of a large message, may be counted among
        them.
        """
        self._require_there()
        return self._engine.subscriptions.lost(self.info)

    # -- the end -----------------------------------------------------------------------

    @shielded
    def close(self) -> None:
        """Let others have what this consumer has not acknowledged. Twice is fine."""
        if os.getpid() == self._pid:
            with self._taking:  # or another thread, whose client closes, has leases behind it
                self._close()

    def _require_there(self) -> None:
        self._require_open()
        self._follow()
        self._engine.subscriptions.require(self.info)

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidTxnStateError(
                f"{self.info} was opened by process {self._pid}: subscribe in this one"
            )
        self._connection.require_open()
        if not self._close.alive:
            raise ClosedError(f"{self.info}: this consumer was closed; subscribe again")


def _are_few(message: Acknowledged) -> bool:
    return not isinstance(message, list | tuple) or len(message) <= _FEW
