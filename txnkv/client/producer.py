"""An idempotent producer as a user holds it.

`send` gives a message to the producer and a future to the caller. The producer's thread takes
what waits, after `linger` seconds or when there is enough of it, and commits it at once:

    send, send, send ...  ->  [ waiting ]  --linger or size-->  one commit  -->  futures

`flush` does the same in the calling thread, and so does a `send` that finds too much waiting. Who
waits for a future ends the linger: the thread sends all that waits, while the next ones gather.
Who has the turn takes from the front: the order of the sends is the order in each partition.
Futures are answered when all that was taken is on its way, still in the turn, which the same
thread may have again: a callback may send and flush.

The thread is a daemon that ends when nothing comes for a while, so that a producer nobody holds
goes away; what waits when the interpreter exits is flushed then. A forked child does not inherit
a producer: what waits belongs to the parent, which sends it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import pyarrow as pa

from txnkv.coordinator import ShieldedFuture
from txnkv.errors import (
    ClosedError,
    ProducerFencedError,
    SchemaError,
    TopicNotFoundError,
    TxnkvError,
    require_count,
    require_number,
    require_text,
)
from txnkv.storage import SharedWeakSet, brief, new_condition, new_rlock, shielded
from txnkv.topics import (
    PATIENCE,
    Delivered,
    MessageId,
    Outgoing,
    Pending,
    Sender,
    Sticky,
    TopicInfo,
    outgoing,
    pending,
    spread,
)
from txnkv.transaction import Closing, Connection, encoder_of
from txnkv.transaction import instance as instances

_log = logging.getLogger("txnkv")

MAX_MESSAGE_BYTES: Final = 256 << 20
"""A producer's message is one small commit; a larger one needs a transaction that stages."""

_MESSAGE_BYTES: Final = 64
"""Bytes that a message takes while it waits, beside its content, about."""

_MOST_WAITING: Final = 16
"""So many times `batch_bytes` may wait before `send` does the sending."""

_LOOKS: Final = 8
"""So many times the thread looks by itself, a linger apart, before `send` has to wake it."""
_SHORT: Final = 0.05
"""Seconds of a linger up to which it does."""

_MOST_SECONDS: Final = 1e9
_IDLE: Final = 2.0
_EXIT_PATIENCE: Final = 5.0
"""Seconds for which an interpreter that ends waits for a failing store."""

_ROW: Final = "row"


class Producer(Closing):
    """Sends messages to one topic, each of them once. A context manager.

    Args:
        connection: to the store.
        topic: to which.
        name: a later producer of the same name and topic fences this one, in any process: what
            this one sends from then on is refused. None: nobody can fence it.
        linger: seconds for which a message may wait for others.
        batch_bytes: with so much waiting it is sent at once.
        patience: seconds for which a failing store is tried again.

    Raises:
        TopicNotFoundError: the topic was dropped.
    """

    def __init__(
        self,
        connection: Connection,
        topic: TopicInfo,
        name: str | None = None,
        *,
        linger: float = 0.005,
        batch_bytes: int = 1 << 20,
        patience: float = PATIENCE,
    ) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"a producer's name is a non-empty string or None, not {name!r}")
        if name is not None:
            require_text("a producer's name", name)
        require_count("batch_bytes", batch_bytes, "bytes")
        for what, seconds in (("linger", linger), ("patience", patience)):
            require_number(what, seconds)
            if not 0 <= seconds <= _MOST_SECONDS:
                raise ValueError(f"{what} is 0 to {_MOST_SECONDS:,.0f} seconds, not {seconds!r}")
        self._connection = connection
        self._topic = topic
        self._name = name
        self._linger = linger
        self._batch_bytes = batch_bytes
        self._encode = encoder_of(topic)
        self._sender = self._make_sender(connection, name, patience)
        self._sticky = Sticky()
        self._pid = os.getpid()
        self._wake = new_condition()
        self._turn = new_rlock()
        self._waiting: list[tuple[Pending, Future[MessageId], int]] = []
        self._bytes = 0
        self._since = 0.0
        self._thread: threading.Thread | None = None
        self._sleeps = False
        self._dead: TxnkvError | None = None
        self._failed: BaseException | None = None
        self._closed = False
        _OPEN.add(self)
        connection.handles.add(self)

    @shielded
    def _make_sender(self, connection: Connection, name: str | None, patience: float) -> Sender:
        return Sender(connection.instance.topics, self._topic, name, patience)

    @property
    def name(self) -> str | None:
        """The name by which a later producer fences this one; None: nobody can."""
        return self._name

    @property
    @shielded
    def sent(self) -> int:
        """The number of durable messages that were sent under this name, by this producer and those
        before it.

        A program that was killed before it had its answers makes a producer of the same name,
        and goes on behind so many messages: none is lost, none is there twice. The number is
        kept for a week.
        """
        return self._sender.sent

    def __repr__(self) -> str:
        name = "" if self._name is None else f" {self._name!r}"
        closed = ", closed" if self._closed else ""
        return f"<Producer{name} of {self._topic.name!r}, {len(self._waiting)} waiting{closed}>"

    def _encoded(self, value: object) -> object:
        """A row as bytes, by the schema that the topic has by now where it does not fit that of
        before.
        """
        assert self._encode is not None
        try:
            return self._encode(value)
        except SchemaError:
            found = self._connection.topic_info(self._topic.name)
            if found.id != self._topic.id:
                raise
            self._topic, encode = found, encoder_of(found)
            assert encode is not None
            self._encode = encode
            return encode(value)

    def send(
        self,
        value: object,
        key: object = None,
        partition: int | None = None,
        headers: Any = None,
        timestamp: Any = None,
        deliver_at: Any = None,
    ) -> Future[MessageId]:
        """Give a message on its way.

        Args:
            value: bytes, text (as UTF-8) or None; of a topic with a value schema a row, as
                `txn.send` takes it.
            key: bytes, text or None; messages of one key go to one partition.
            partition: its number; by default it is chosen.
            headers: list of (name, bytes), or a mapping.
            timestamp: an aware datetime; by default when it is sent.
            deliver_at: an aware datetime, before which shared subscriptions do not deliver it.

        Returns:
            Has the message's id once it is durable, or an error: ProducerFencedError,
            OutOfOrderSequenceError, StorageFullError, UnavailableError and TopicNotFoundError say
            that it was not sent; CommitOutcomeUnknownError that nobody knows. A future that is
            cancelled in time is not sent; one whose `result()` is asked for is sent at once, with
            what waits by then.

        Raises:
            TypeError, ValueError: the message is none, or too large.
            SchemaError: its value is not of the topic's value schema.
            ProducerFencedError, TopicNotFoundError: it was fenced before, or the topic dropped.
            ClosedError: it was closed, or belongs to the process that this one was forked from.
        """
        self._require_usable()
        if self._encode is not None:
            value = self._encoded(value)
        row: Pending
        if type(value) is bytes and key is partition is headers is timestamp is deliver_at is None:
            row = value
        else:
            count = self._sender.partitions
            if isinstance(partition, int) and partition >= count:
                count = self._sender.look()
            row = pending(value, key, partition, headers, timestamp, count, deliver_at)
        size = _size(row)
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {size:,} bytes: a producer sends up to {MAX_MESSAGE_BYTES:,}. "
                "Send it in a transaction: txn.send(topic, value)"
            )
        future = _Sent(self)
        if self._add(row, future, size):
            self._send_some()
        return future

    @brief
    def _add(self, row: Pending, future: Future[MessageId], size: int) -> bool:
        """Have a message wait; True when the caller is to send what waits."""
        with self._wake:
            if self._closed:
                raise self._closed_error()
            before = self._bytes if self._waiting else 0
            if before == 0:
                self._since = time.monotonic()
            self._bytes = total = before + size
            self._waiting.append((row, future, size))
            if self._thread is None:
                self._start()
            elif self._sleeps or before < self._batch_bytes <= total:
                self._wake.notify()
            by_itself = self._thread is not None
        return total > _MOST_WAITING * self._batch_bytes or not by_itself

    @brief
    def _hasten(self) -> None:
        """Have what waits not wait for more."""
        with self._wake:
            self._since = -_MOST_SECONDS
            self._wake.notify()

    @shielded
    def flush(self) -> None:
        """Send what waits; when it returns, all that was sent before is durable.

        Raises:
            TxnkvError: the first error of a message since the last flush; its future has it too.
            ClosedError: it belongs to the process that this one was forked from.
        """
        if os.getpid() != self._pid:
            raise self._closed_error()
        while self._send_some():
            pass
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Flush, and take no more. Twice is fine.

        Raises:
            TxnkvError: as `flush`; it is closed all the same.
        """
        if os.getpid() != self._pid:
            return
        self._closed = True
        self._hasten()  # a send that was before has left its message
        _OPEN.discard(self)
        self.flush()

    def hurry(self, patience: float) -> None:
        """Try no longer than so many seconds from now on, if the store fails."""
        self._sender.patience = min(self._sender.patience, patience)

    def _require_usable(self) -> None:
        if os.getpid() != self._pid or self._closed:
            raise self._closed_error()
        if self._dead is not None:
            raise self._dead.with_traceback(None)
        self._connection.require_open()

    def _closed_error(self) -> ClosedError:
        what = "was closed" if self._closed else "belongs to the process that forked this one"
        return ClosedError(f"{self!r} {what}: make a new one with topic.producer(...)")

    # -- the thread --------------------------------------------------------------------

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="txnkv-producer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # none is to be had, or the interpreter ends
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wait_for_some()
                if not self._waiting:
                    self._thread = None
                    return
                self._wait_for_more()
            self._send_some()

    def _wait_for_some(self) -> None:
        looks = _LOOKS if 0 < self._linger <= _SHORT else 0
        while looks and not self._waiting and not self._closed:
            since = self._since
            self._wake.wait(self._linger)
            looks = looks - 1 if self._since == since else _LOOKS
        if not self._waiting and not self._closed:
            self._sleeps = True
            self._wake.wait(_IDLE)
            self._sleeps = False

    def _wait_for_more(self) -> None:
        while self._waiting and self._bytes < self._batch_bytes and not self._closed:
            left = self._since + self._linger - time.monotonic()
            if left <= 0:
                return
            self._wake.wait(left)

    # -- sending -----------------------------------------------------------------------

    @shielded
    def _send_some(self) -> bool:
        """Send what waits at the front; False when nothing did."""
        with self._turn:
            taken = self._take()
            if not taken:
                return False
            taken = [each for each in taken if each[1].set_running_or_notify_cancel()]
            rows = [row for row, _ in taken]
            futures = [future for _, future in taken]
            partitions = self._sender.partitions
            sticky = self._sticky.turn(partitions)
            answers: list[Callable[[], None]] = []
            try:
                for part in outgoing(rows):
                    count = part.messages.num_rows
                    answers.append(self._send_part(part, futures[:count], partitions, sticky))
                    del futures[:count]
            finally:
                for answer in answers:
                    answer()
        return True

    def _take(self) -> list[tuple[Pending, Future[MessageId]]]:
        with self._wake:
            waiting = self._waiting
            size = count = 0
            for _, _, each in waiting:
                if count and size + each > self._batch_bytes:
                    break
                size += each
                count += 1
            taken, self._waiting = waiting[:count], waiting[count:]
            self._bytes -= size
            self._since = time.monotonic() - self._linger  # what is left has waited
        return [(row, future) for row, future, _ in taken]

    def _send_part(
        self, part: Outgoing, futures: list[Future[MessageId]], partitions: int, sticky: int
    ) -> Callable[[], None]:
        """Send, and return what answers the futures."""
        try:
            if self._dead is not None:
                raise self._dead
            rows, shares = _shares(part, partitions, sticky)
            delivered = self._sender.deliver(shares)
        except Exception as error:
            if isinstance(error, ProducerFencedError | TopicNotFoundError):
                self._dead = error
            self._failed = self._failed or error
            return partial(_fail, futures, error)
        except BaseException as error:
            self._failed = self._failed or error
            _fail(futures, error)
            raise
        return partial(_answer, delivered, rows, futures)


class _Sent(ShieldedFuture[MessageId]):
    """A message of a producer, which waits for others only while nobody waits for it."""

    def __init__(self, producer: Producer) -> None:
        super().__init__()
        self._producer = weakref.ref(producer)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `ShieldedFuture` does; the message is sent now."""
        if not self.done() and (producer := self._producer()) is not None:
            producer._hasten()
            del producer
        return super().exception(timeout)


def _fail(futures: list[Future[MessageId]], error: BaseException) -> None:
    for future in futures:
        future.set_exception(error)


def _answer(
    delivered: list[Delivered], rows: list[list[int] | None], futures: list[Future[MessageId]]
) -> None:
    for there, indices in zip(delivered, rows, strict=True):
        for index, row in enumerate(range(len(futures)) if indices is None else indices):
            futures[row].set_result(MessageId(there.number, there.offset(index)))


def _shares(
    part: Outgoing, partitions: int, sticky: int
) -> tuple[list[list[int] | None], list[tuple[int, pa.RecordBatch]]]:
    """Messages by partition, and which of them went there; None: all of them."""
    messages, given = part
    if partitions == 1:
        return [None], spread(part, partitions, sticky)
    numbers = pa.array(range(messages.num_rows), pa.int32())
    marked = Outgoing(messages.append_column(_ROW, numbers), given)
    found = spread(marked, partitions, sticky)
    rows = [batch.column(_ROW).to_pylist() for _, batch in found]
    return rows, [(number, batch.drop_columns([_ROW])) for number, batch in found]


def _size(row: Pending) -> int:
    if type(row) is bytes:
        return len(row) + _MESSAGE_BYTES
    return sum(len(part) for part in row[:2] if isinstance(part, bytes)) + _MESSAGE_BYTES


# -- exit ------------------------------------------------------------------------------

_OPEN: Final = SharedWeakSet["Producer"]()


def _close_producers() -> None:
    """Send what waits in the producers of this process, and close them.

    What cannot be sent is said in the log; the futures have it, too.
    """
    for producer in _OPEN:
        producer.hurry(_EXIT_PATIENCE)
        try:
            producer.close()
        except TxnkvError as error:
            _log.error("%r had messages that could not be sent: %s", producer, error)


# After that of `instance` is registered, so that it runs before the stores are closed.
assert instances is not None
atexit.register(_close_producers)
