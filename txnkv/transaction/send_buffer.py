"""Messages that a session was given to send and has not flushed.

    send        -> the list of its topic; the append of that list is all that most messages take
    flush       -> the lists become parcels: Arrow, by partition
                -> the parcels are given to a transaction, one after the other

Parcels that could not be given are kept, in their order, and go first the next time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakSet

import pyarrow as pa

from txnkv.errors import InvalidTxnStateError, TopicNotFoundError, TxnkvError
from txnkv.storage import new_lock
from txnkv.tables import arrow_input, nothing
from txnkv.topics import (
    Outgoing,
    Pending,
    Single,
    Sticky,
    TopicEngine,
    TopicInfo,
    as_arrow,
    message_batches,
    message_input,
    outbox,
    partition_of_one,
    spread,
)
from txnkv.transaction.connection import AnyTopic
from txnkv.transaction.context import TxnContext
from txnkv.transaction.typed_values import Encode

_ALONE_BYTES: Final = 64 << 20
"""So much is appended to a log in one piece, outside of a transaction."""


ShortCut: TypeAlias = tuple[AnyTopic | None, Callable[[Any], None], Encode | None]
"""A topic; a call that takes its messages without ado, while the topic stays the same; and the
encoder of its values to bytes, where they are typed.
"""


NO_SHORT_CUT: Final[ShortCut] = (None, nothing, None)


class Parcel(NamedTuple):
    """Messages for one topic, by number of their partition."""

    topic: TopicInfo
    parts: list[tuple[int, pa.RecordBatch | Single]]

    @property
    def rows(self) -> int:
        return sum(part.num_rows for _, part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, part in self.parts)


def alone(parcels: Sequence[Parcel]) -> bool:
    """Tell whether messages are too many for a row of the commit log, and go to one partition in
    one piece: then they need no transaction to come at one instant.
    """
    places = {(parcel.topic.id, number) for parcel in parcels for number, _ in parcel.parts}
    if len(places) != 1:
        return False
    size = sum(parcel.nbytes for parcel in parcels)
    return bool(outbox.MAX_BYTES < size <= _ALONE_BYTES)


def send_alone(engine: TopicEngine, parcels: Sequence[Parcel]) -> None:
    """Send parcels that are `alone`, without a transaction."""
    batches = [as_arrow(part) for parcel in parcels for _, part in parcel.parts]
    outbox.send_alone(engine, parcels[0].topic, parcels[0].parts[0][0], batches)


class SendBuffer:
    """The messages of one session. Shared by the threads that share its transaction."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._lists: dict[int, tuple[TopicInfo, list[Pending]]] = {}
        self._parcels: list[Parcel] = []
        self._sticky: dict[int, Sticky] = {}

    @property
    def pending(self) -> bool:
        """Something waits."""
        if not self._lists and not self._parcels:
            return False
        return bool(self._parcels) or any(rows for _, rows in self._lists.values())

    def __len__(self) -> int:
        """Return the number of messages that wait."""
        waiting = sum(len(rows) for _, rows in self._lists.values())
        return waiting + sum(parcel.rows for parcel in self._parcels)

    def appender(self, topic: TopicInfo) -> Callable[[Pending], None]:
        """Takes messages for a topic, as `messages.pending` makes them.

        It stays good: a list is emptied when it is flushed, not replaced, so that no message of
        another thread gets into one that nobody looks at any more.
        """
        with self._lock:
            found = self._lists.get(topic.id)
            if found is None:
                found = self._lists[topic.id] = (topic, [])
                _used.add(self)
            return found[1].append

    def parcels_of(self, topic: TopicInfo, outgoing: Iterable[Outgoing]) -> Iterable[Parcel]:
        """Messages by partition; those that say nothing all go to one."""
        sticky = self._sticky.setdefault(topic.id, Sticky()).turn(len(topic.partitions))
        for some in outgoing:
            yield Parcel(topic, [*spread(some, len(topic.partitions), sticky)])

    def parcels_from(self, topic: TopicInfo, data: Any) -> Iterable[Parcel]:
        """Messages of Arrow data, by partition; read and cut as they are taken.

        Raises:
            SchemaError: a column is missing, not known or of another type.
        """
        given, batches = arrow_input.open_stream(data)
        codec = topic.options.codec
        message_batches.check_columns(given, codec)
        outgoing = message_batches.outgoing_of(batches, len(topic.partitions), codec)
        return self.parcels_of(topic, outgoing)

    def _parcel_of(self, topic: TopicInfo, message: Single) -> Parcel:
        partitions = len(topic.partitions)
        sticky = self._sticky.setdefault(topic.id, Sticky()).turn(partitions)
        return Parcel(topic, [(partition_of_one(message, partitions, sticky), message)])

    def take(self) -> list[Parcel]:
        """All that waits, to be given or put back."""
        with self._lock:
            parcels, self._parcels = self._parcels, []
            for topic, rows in self._lists.values():
                some = rows[:]
                if some:
                    one = message_input.single(some)
                    if one is None:
                        parcels += self.parcels_of(topic, message_input.outgoing(some))
                    else:
                        parcels.append(self._parcel_of(topic, one))
                    del rows[: len(some)]
            return parcels

    def put_back(self, parcels: list[Parcel]) -> None:
        """Keep parcels that could not be given: they go first the next time."""
        with self._lock:
            self._parcels = parcels + self._parcels

    def put_back_living(self, engine: TopicEngine, parcels: Sequence[Parcel]) -> None:
        """Put back those for topics that were not dropped."""
        self.put_back([parcel for parcel in parcels if not _dropped(engine, parcel.topic)])

    def give(self, context: TxnContext) -> int:
        """Give all that waits to a transaction; return the number of messages.

        Raises:
            TopicNotFoundError: a topic was dropped; what was sent to it is gone.
            InvalidTxnStateError: the transaction has ended, and all is gone.
        """
        parcels = self.take()
        given = 0
        while parcels:
            try:
                context.send(parcels[0].topic, parcels[0].parts)
            except InvalidTxnStateError:
                raise
            except TopicNotFoundError:
                self.put_back(parcels[1:])
                raise
            except BaseException:
                self.put_back(parcels)
                raise
            given += parcels.pop(0).rows
        return given

    def after_fork_in_child(self) -> None:
        """Forget all that waits: the parent sends it."""
        self.discard()

    def discard(self) -> None:
        """Forget all that waits."""
        with self._lock:
            self._parcels = []
            for _, rows in self._lists.values():
                del rows[:]


def _dropped(engine: TopicEngine, topic: TopicInfo) -> bool:
    try:
        engine.require_live(topic)
    except TopicNotFoundError:
        return True
    except TxnkvError:  # the disk fails: the next try will tell
        return False
    return False


_used: WeakSet[SendBuffer] = WeakSet()


def _after_fork_in_child() -> None:
    for sending in list(_used):
        sending.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
