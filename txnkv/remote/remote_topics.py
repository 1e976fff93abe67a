"""Topics of a store on another host, their readers and their producers, as a user holds them.

A consumer at its positions and a subscription are made again where the server was started again. A
consumer keeps here what it was given and takes back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from operator import itemgetter
from typing import Any, Final, TypeVar

import pyarrow as pa

from txnkv.client import MESSAGE_COLUMNS, Consumer, Producer, Subscription, Topic
from txnkv.errors import (
    ClosedError,
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    TopicNotFoundError,
    UnavailableError,
    require_count,
)
from txnkv.remote.channel import Call
from txnkv.remote.remote_handles import RemoteHandle
from txnkv.remote.wire import arguments, ids_of, like, remote_calls
from txnkv.storage import clock
from txnkv.topics import (
    Delivered,
    Message,
    Start,
    SubscriptionInfo,
    TopicInfo,
    deadline,
    messages_from_arrow,
    messages_to_arrow,
    topic_number,
)
from txnkv.transaction import Connection

_POLL_SECONDS: Final = 2.0
"""A wait at the server is at most so long; then it is asked for again."""

T = TypeVar("T")


@remote_calls(
    "Topic",
    "drop_subscription end_offsets fetch last_stable_offsets options partitions "
    "subscriptions truncate",
)
class RemoteTopic(RemoteHandle, Topic):
    """See `txnkv.Topic`."""

    twin = "Topic"

    def __init__(self, connection: Any, told: Mapping[str, Any]) -> None:
        self._connection = connection
        self.info: TopicInfo = told["info"]

    def reference(self) -> list[Any]:
        return ["topic", [self.info.name, self.info.id]]

    @like(Topic.alter)
    def alter(self, *args: Any, **named: Any) -> Any:
        found = self._call("alter", *args, **named)
        self._look()
        return found

    def _look(self) -> None:
        with suppress(TopicNotFoundError, ClosedError):
            found = self._connection.topic_info(self.info.name)
            self.info = found if found.id == self.info.id else self.info

    @like(Topic.consumer)
    def consumer(self, *args: Any, **named: Any) -> Consumer:
        return RemoteConsumer(self, arguments(Topic.consumer, args, named))

    @like(Topic.subscribe)
    def subscribe(self, *args: Any, **named: Any) -> Subscription:
        given = arguments(Topic.subscribe, args, named)
        return RemoteSubscription(self, given.pop("options"), given)

    def _waiting(self, until: int | None, check: Callable[[], bool]) -> None:
        """See `txnkv.Topic`: none waits here."""

    def producer(self, name: str | None = None, **options: Any) -> Producer:
        return RemoteProducer(self._connection, self.info, name, **options)


class _Polling(RemoteHandle):
    """A reader of messages, which are waited for at the server."""

    _info: TopicInfo
    _tcid: int
    _store: str

    def _wait_for(self, name: str, most: int, timeout: float | None) -> Any:
        """Ask until there is something, or the time is over."""
        end = deadline(timeout)
        longest = min(_POLL_SECONDS, self.channel.patience / 2)
        while True:
            left = longest
            if end is not None:
                left = min(max((end - clock.monotonic_micros()) / 1e6, 0), longest)
            try:
                found = self._call(name, most, left)
            except CommitOutcomeUnknownError as error:  # what was given comes again
                raise UnavailableError(f"{self.channel.address} was lost; ask again") from error
            if found["rows"].num_rows or (end is not None and clock.monotonic_micros() >= end):
                return found

    def _waiting(self, until: int | None) -> None:
        """See `txnkv.Consumer`: none waits here."""

    def _messages(self, found: Mapping[str, Any]) -> list[Message]:
        if found.get("stages", 0) > len(self._info.options.values):
            self._info = self._connection.topic_info(self._info.name)
        info = self._info
        topic = topic_number(self._store, info.id)
        return messages_from_arrow(found["rows"], topic, self._tcid, info.options.codec)


class RemoteConsumer(_Polling, Consumer):
    """See `txnkv.Consumer`."""

    twin = "Consumer"

    def __init__(self, topic: RemoteTopic, options: dict[str, Any]) -> None:
        self._connection = topic._connection
        self._topic_handle, self._options, self._start = topic, options, options.pop("start")
        self._info = self._topic = topic.info
        self._closed = False
        self._at: dict[int, list[int]] = {}  # by partition; its position comes first
        self._make()
        self._was = self._at  # before the last `poll_batch`
        self._from = self._at  # before the last request for messages
        self._given: list[Message] = []
        self._had: int | None = None
        self._returned: list[Message] = []  # as `Consumer` has them, but they stay here

    def _make(self) -> None:
        told = self._made(self._topic_handle, "consumer", self._start, self._at, **self._options)
        self._tcid, self._store = told["tcid"], told["store"]
        self._at = told["at"]

    def _make_again(self) -> bool:
        self._make()
        return True

    def poll(self, *, max_messages: int = 500, timeout: float | None = 1.0) -> list[Message]:
        self._next(max_messages, timeout)
        self._had = None
        return self._given

    def _next(self, most: int, timeout: float | None) -> list[Message]:
        if not self._take_back(most):
            self._given = self._polled("poll", most, timeout, self._messages)
            self._was = self._at
        self._had = 0
        return self._given

    def _take_back(self, most: int) -> list[Message]:
        """Give again, or give what a loop did not."""
        self._require_open()
        require_count("max_messages", most)
        waits = self._waits()
        self._given, self._returned, self._had = waits[:most], waits[most:], None
        return self._given

    def _waits(self) -> list[Message]:
        return [*(() if self._had is None else self._given[self._had :]), *self._returned]

    def _polled(self, name: str, most: int, timeout: float | None, read: Callable[[Any], T]) -> T:
        try:
            found = self._wait_for(name, most, timeout)
            rows = read(found)
        except (UnavailableError, KeyboardInterrupt):
            self._go_back(self._at)  # the server may have given what did not come here
            raise
        self._from = self._was = self._at
        self._at = found["at"]
        return rows

    def _go_back(self, at: dict[int, list[int]]) -> None:
        """Be made anew there, at the next call: the server may be out of reach."""
        self._at, self.number, self._kept = at, 0, None

    def _or_again(self, do: Callable[[], T]) -> T:
        if not self.number:
            self._make()
        return super()._or_again(do)

    @like(Consumer.unpoll)
    def unpoll(self) -> None:
        if self._given:
            self._returned, self._given, self._had = self._given + self._returned, [], None
        else:
            self._go_back(self._was)

    def poll_batch(
        self, *, max_messages: int = 65536, timeout: float | None = 1.0
    ) -> pa.RecordBatch:
        found: pa.RecordBatch
        if again := self._take_back(max_messages):
            rows = messages_to_arrow(again)
            columns = [rows.column(each.name).cast(each.type) for each in MESSAGE_COLUMNS]
            found = pa.RecordBatch.from_arrays(columns, schema=MESSAGE_COLUMNS)
            return self._typed(found, self._info.options.codec)
        return self._polled("poll_batch", max_messages, timeout, itemgetter("rows"))

    @property
    def partitions(self) -> list[int]:
        return list(self._at)

    def position(self, partition: int) -> int:
        found = self._waiting_at(partition)
        return self._call("position", partition) if found is None else found

    def _waiting_at(self, partition: int) -> int | None:
        """The position before what waits here; None: nothing does."""
        first = next((each.offset for each in self._waits() if each.partition == partition), None)
        if first is None or partition not in self._from:
            return first
        before = self._from[partition]
        return before[0] if len(before) > 1 else max(first, before[0])

    def lag(self, partition: int | None = None) -> int:
        found: int = self._call("lag", partition)
        for number in self._at if partition is None else [partition]:
            waiting = self._waiting_at(number)
            found += 0 if waiting is None else self._at[number][0] - waiting
        return found

    def seek(self, partition: int, offset: int) -> None:
        self._at = self._call("seek", partition, offset)
        self._was = self._was | {partition: self._at[partition]}
        given = [each for each in self._given[: self._had] if each.partition != partition]
        waits = [each for each in self._waits() if each.partition != partition]
        self._given, self._returned, self._had = given, waits, None

    def seek_to_time(self, when: datetime) -> None:
        self._was = self._at = self._call("seek_to_time", when)
        self._given, self._returned, self._had = [], [], None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.channel.drop(self.number)

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        isolation = self._options["isolation"]
        waiting = {number: self._waiting_at(number) for number in self._at}
        at = {n: self._at[n][0] if place is None else place for n, place in waiting.items()}
        places = ", ".join(f"{number}@{place}" for number, place in at.items())
        return f"<Consumer of {self._info.name!r}, {isolation}: {places}{closed}>"

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this consumer of {self._info.name!r} was closed; make another")
        self._connection.require_open()


@remote_calls("Subscription", "committed is_active lag lost unreceive")
class RemoteSubscription(_Polling, Subscription):
    """See `txnkv.Subscription`."""

    twin = "Subscription"

    def __init__(self, topic: RemoteTopic, options: dict[str, Any], named: dict[str, Any]) -> None:
        self._connection = topic._connection
        self._topic_handle, self._named = topic, named
        self._info, self._pid, self._closed = topic.info, os.getpid(), False
        self._make("subscribe", **named, **options)

    def _make(self, how: str, /, *args: Any, **options: Any) -> None:
        told = self._made(self._topic_handle, how, *args, **options)
        self.info: SubscriptionInfo = told["info"]
        self._tcid, self._store = told["tcid"], told["store"]

    def _make_again(self) -> bool:
        # Without options: others may have set them otherwise since.
        self._make("subscribe_again", self.info.id, self._named)
        return True

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        info = self.info
        return f"<Subscription {info.name!r} of {info.topic.name!r}, {info.type}{closed}>"

    def receive_many(self, max_messages: int = 100, timeout: float | None = None) -> list[Message]:
        self._require_open()
        return self._messages(self._wait_for("receive_many", max_messages, timeout))

    def _acknowledge_alone(self, message: Any, *, cumulative: bool) -> None:
        self._call("ack_cumulative" if cumulative else "ack", ids_of(message, self.info))

    def nack(self, message: Any) -> None:
        self._require_open()
        self._call("nack", ids_of(message, self.info))

    def seek(self, partition: int, offset: int | Start) -> None:
        self._require_open()
        self._call("seek", partition, offset)

    def close(self) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            if not self.channel.closed:
                with suppress(UnavailableError):  # with its server it is closed
                    self.channel.call(Call(self.twin, self, "close"))
            self.channel.drop(self.number)

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidTxnStateError(
                f"{self.info} was opened by process {self._pid}: subscribe in this one"
            )
        self._connection.require_open()
        if self._closed:
            raise ClosedError(f"{self.info}: this consumer was closed; subscribe again")


# -- producers -------------------------------------------------------------------------


class RemoteProducer(Producer):
    """See `txnkv.Producer`: what waits does so here, and one request sends it."""

    def _make_sender(self, connection: Connection, name: str | None, patience: float) -> Any:
        return _RemoteSender(connection, self._topic, name, patience)


class _RemoteSender(RemoteHandle):
    """A sender at the server. Made again it goes on as the producer that it was, or is fenced."""

    twin = "Sender"

    def __init__(
        self, connection: Any, topic: TopicInfo, name: str | None, patience: float
    ) -> None:
        self._connection, self._name, self.patience = connection, name, patience
        self._topic = RemoteTopic(connection, {"info": topic})
        self._producer: list[int] | None = None  # id and epoch
        self._make_again()

    def _make_again(self) -> bool:
        told = self._made(self._topic, "sender", self._name, self.patience, self._producer)
        self.sent: int = told["sent"]
        self.partitions: int = told["partitions"]
        self._producer = told["producer"]
        return True

    def look(self) -> int:
        """Ask for the number of partitions."""
        self.partitions = self._topic.partitions
        return self.partitions

    def deliver(self, shares: Sequence[tuple[int, pa.RecordBatch]]) -> list[Delivered]:
        told = self._call("deliver", [list(share) for share in shares])
        self.sent += sum(batch.num_rows for _, batch in shares)
        self.partitions, self._producer = told["partitions"], told["producer"]
        found: list[Delivered] = told["delivered"]
        return found
