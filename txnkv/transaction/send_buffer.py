"""Messages that a session was given to send and has not flushed.

    send        -> the list of its topic; the append of that list is all that most messages take
    flush       -> the lists become parcels: Arrow, by partition
                -> the parcels are given to a transaction, one after the other

Parcels that could not be given are kept, in their order, and go first the next time. Typed values
are given as rows, and made bytes when they are sent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, cast
from weakref import WeakSet

import pyarrow as pa

from txnkv.coordinator import status_table
from txnkv.core import column_type
from txnkv.errors import InvalidTxnStateError, SchemaError, TopicNotFoundError
from txnkv.tables import (
    Column,
    RowChecker,
    Schema,
    SchemaChange,
    altered,
    arrow_input,
    nothing,
)
from txnkv.topics import (
    Encoded,
    Outgoing,
    Pending,
    Plain,
    Sticky,
    TopicEngine,
    TopicInfo,
    TopicOptions,
    ValueCodec,
    ValuesOf,
    ValueStage,
    as_arrow,
    message_input,
    outbox,
    spread,
    topic_catalog,
)
from txnkv.transaction.connection import AnyTopic
from txnkv.transaction.context import TxnContext
from txnkv.transaction.local_state import Intake

ValueSchema: TypeAlias = Mapping[str, str | pa.DataType | Column] | pa.Schema
"""Columns of values: as those of a `Schema`, or Arrow's."""

Encode: TypeAlias = Callable[[Any], bytes | None]

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
    parts: list[tuple[int, pa.RecordBatch | Plain]]

    @property
    def rows(self) -> int:
        return sum(part.num_rows for _, part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, part in self.parts)


class Lone(NamedTuple):
    """A message that waits before its transaction has a session: most send no other."""

    topic: TopicInfo
    message: Pending

    @classmethod
    def checked(cls, topic: TopicInfo, said: tuple[Any, ...]) -> Lone:
        """The message for a topic as it is now, of the other arguments of `Session.send`."""
        value, key, partition, headers, timestamp, deliver_at = said
        topic_catalog.require_writable(topic)
        if (encode := encoder_of(topic)) is not None:
            value = encode(value)
        rest = partition, headers, timestamp, len(topic.partitions), deliver_at
        return cls(topic, message_input.pending(value, key, *rest))

    def give(self, context: TxnContext) -> bool:
        """Give it to a transaction; False where that takes a session.

        Raises:
            TopicNotFoundError: the topic was dropped.
            InvalidTxnStateError: the transaction has ended.
        """
        count = len(self.topic.partitions)
        one = message_input.plain([self.message], count)
        if one is None:
            return False
        number = 0 if count == 1 else one.partition(count, Sticky().turn(count))
        context.send(self.topic, [(number, one)])
        context.instance.coordinator.metrics.messages_sent.value += 1
        return True


def send_alone(engine: TopicEngine, parcels: Sequence[Parcel]) -> bool:
    """Send messages without a transaction; False where they need one.

    They need none to come at one instant when they go to one partition in one piece. Where they
    fit a row of the commit log, that is cheaper.
    """
    places = {(parcel.topic.id, number) for parcel in parcels for number, _ in parcel.parts}
    if len(places) != 1:
        return False
    if not outbox.MAX_BYTES < sum(parcel.nbytes for parcel in parcels) <= _ALONE_BYTES:
        return False
    batches = [as_arrow(part) for parcel in parcels for _, part in parcel.parts]
    outbox.send_alone(engine, parcels[0].topic, parcels[0].parts[0][0], batches)
    return True


def send_in(context: TxnContext, parcels: Iterable[Parcel]) -> Iterator[int]:
    """Send messages in a transaction; yields how many were sent until then."""
    sent, went = 0, False
    for parcel in parcels:
        context.send(parcel.topic, parcel.parts, more=True)
        yield (sent := sent + parcel.rows)
        try:
            context.settle(more=True)
        except InvalidTxnStateError as error:
            status_table.note_part(error, went)
            raise
        went = context.scope is None  # those of an attempt may not count
    context.settle()


class SendBuffer:
    """The messages of one session. Shared by the threads that share its transaction.

    Args:
        lock: the session's.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._lists: dict[int, tuple[TopicInfo, list[Pending]]] = {}
        self._parcels: list[Parcel] = []
        self._sticky: dict[int, Sticky] = {}

    @property
    def pending(self) -> bool:
        """Something waits."""
        for _, rows in self._lists.values():
            if rows:
                return True
        return bool(self._parcels)

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
            elif found[0].options.altered < topic.options.altered:  # it may have got partitions
                self._lists[topic.id] = (topic, found[1])
            return found[1].append

    def require_taken(self, local: Intake, put: Callable[[Any], None], message: Any) -> None:
        """Take a message back that was put behind the last flush.

        Raises:
            InvalidTxnStateError: it was.
        """
        with self._lock:
            rows: list[Pending] = cast(Any, put).__self__
            at = [n for n, each in enumerate(rows) if each is message] if local.ending else []
            if at:
                del rows[at[0]]
                local.require_more("send")

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
        given, batches = arrow_input.open_stream(data, "send_batch")
        codec = topic.options.codec
        message_input.check_columns(given, codec)
        outgoing = message_input.outgoing_of(batches, len(topic.partitions), codec)
        return self.parcels_of(topic, outgoing)

    def _parcel_of(self, topic: TopicInfo, messages: Plain) -> Parcel:
        partitions = len(topic.partitions)
        sticky = self._sticky.setdefault(topic.id, Sticky()).turn(partitions)
        return Parcel(topic, [(messages.partition(partitions, sticky), messages)])

    def take(self) -> list[Parcel]:
        """All that waits, to be given or put back."""
        with self._lock:
            parcels, self._parcels = self._parcels, []
            for topic, rows in self._lists.values():
                some = rows[:]
                if some:
                    few = message_input.plain(some, len(topic.partitions))
                    if few is None:
                        parcels += self.parcels_of(topic, message_input.outgoing(some))
                    else:
                        parcels.append(self._parcel_of(topic, few))
                    del rows[: len(some)]
            return parcels

    def put_back(self, parcels: list[Parcel]) -> None:
        """Keep parcels that could not be given: they go first the next time."""
        with self._lock:
            self._parcels = parcels + self._parcels

    def give(self, context: TxnContext, note: Callable[[int], None]) -> bool:
        """Give all that waits to a transaction; True when it had something, and has it staged where
        it may not wait in memory.

        Args:
            context: the transaction.
            note: told how many messages were given, piece by piece: the rest may fail.

        Raises:
            TopicNotFoundError: a topic was dropped; what was sent to it is gone.
            InvalidTxnStateError: the transaction has ended, and all is gone.
        """
        if not (parcels := self.take()):
            return False
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
            note(parcels.pop(0).rows)
        context.settle()
        return True

    def after_fork_in_child(self) -> None:
        """Forget all that waits: the parent sends it."""
        self.discard()

    def discard(self) -> None:
        """Forget all that waits."""
        with self._lock:
            self._parcels = []
            for _, rows in self._lists.values():
                del rows[:]


_used: WeakSet[SendBuffer] = WeakSet()


def _after_fork_in_child() -> None:
    for sending in list(_used):
        sending.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


# -- typed values ----------------------------------------------------------------------


def declared(given: ValueSchema | None) -> list[ValueStage]:
    """The value schema of a new topic, as it keeps that.

    Raises:
        SchemaError: a type is unknown, or a default does not fit.
        TypeError: it is no schema.
    """
    if isinstance(given, pa.Schema):  # which may have a name twice: that is refused later
        fields = [pa.field(f.name, column_type(f.type), f.nullable) for f in given]
        return [ValueStage(pa.schema(fields))]
    return [] if given is None else [_columns_of(given).stage]


def evolved_values(given: ValueSchema) -> ValuesOf:
    """Return the schemas that a topic has once its values are of this schema, by the rules by which
    a table is altered: columns may be added behind those that there are, with a default or
    nullable, widened, made nullable, and get another default. What was sent can so be read.

    The function raises SchemaError for any other change.

    Raises:
        SchemaError: a type is unknown, or a default does not fit.
        TypeError: it is no schema.
    """
    wanted = _columns_of(given)
    says_defaults = not isinstance(given, pa.Schema)

    def values_of(options: TopicOptions) -> Sequence[ValueStage]:
        if not options.values:
            raise SchemaError(
                "the values of the topic are bytes, and those that are there fit no columns: make "
                "another topic with value_schema="
            )
        present = _Columns.of(options.values[-1])
        made = altered(present, _change(present, wanted, says_defaults))
        assert isinstance(made, _Columns)
        stage = made.stage
        return options.values if stage == options.values[-1] else (*options.values, stage)

    return values_of


def _change(present: Schema, wanted: Schema, says_defaults: bool) -> SchemaChange:
    """Return the change from one schema of values to another one.

    Raises:
        SchemaError: it would lose what is there.
    """
    for name, column in present.columns.items():
        new = wanted.columns.get(name)
        if new is None:
            raise SchemaError(
                f"column {name!r} is not in the new value schema: columns of values stay, for "
                "messages that are there have them. Name it too"
            )
        if column.nullable and not new.nullable:
            raise SchemaError(
                f"column {name!r} may be null in messages that are there: it stays nullable"
            )
    both = {name: wanted.columns[name] for name in present.columns}
    return SchemaChange(
        add={name: each for name, each in wanted.columns.items() if name not in both},
        widen={name: new.type for name, new in both.items()},
        nullable={name: new.nullable for name, new in both.items()},
        default={n: new.default for n, new in both.items()} if says_defaults else {},
    )


def _columns_of(given: ValueSchema) -> _Columns:
    if isinstance(given, pa.Schema):
        return _Columns({f.name: Column(f.type, f.nullable) for f in given})
    if not isinstance(given, Mapping):
        raise TypeError(
            "value_schema is a mapping of names to types, as {'id': 'int64', 'note': 'string?'}, "
            f"or a pyarrow.Schema, not {type(given).__name__}"
        )
    return _Columns(given)


def encoder_of(topic: TopicInfo) -> Encode | None:
    """Return the function that makes bytes of a topic's rows; None where values are bytes.

    The function takes a dict, a tuple in schema order, a dataclass or None, and raises SchemaError
    for anything else and for what does not fit.
    """
    codec = topic.options.codec
    return None if codec is None else _encoder(codec)


class _Columns(Schema):
    """Columns without a key."""

    def __init__(
        self, columns: Mapping[str, str | pa.DataType | Column], *key_and_ttl: object
    ) -> None:
        super().__init__(columns, ())

    @classmethod
    def of(cls, stage: ValueStage) -> _Columns:
        """The columns of a schema of values."""
        defaults = stage.by_column
        return cls({f.name: Column(f.type, f.nullable, defaults.get(f.name)) for f in stage.schema})

    @property
    def stage(self) -> ValueStage:
        """The same as topics have it."""
        return ValueStage.of(
            self.arrow, {name: each.default for name, each in self.columns.items()}
        )

    def _check_key(self) -> None:
        return


def _is_nothing(row: Mapping[str, Any]) -> bool:
    return bool(row) and all(value is None for value in row.values())


@lru_cache(maxsize=256)
def _encoder(codec: ValueCodec) -> Encode:
    check = RowChecker(_Columns.of(codec.stages[-1]))["insert"].take
    to_bytes, has_defaults = codec.encode_one, bool(codec.defaults)

    def encode(value: Any) -> bytes | None:
        if value is None or type(value) is Encoded:
            return value
        try:
            row = check(value)
            if has_defaults and isinstance(value, dict) and _is_nothing(value):
                return None  # as without defaults, for whoever does not know of the new columns
            return to_bytes(row)
        except SchemaError as error:
            raise SchemaError(f"a value of columns {codec.described}: {error}") from None
        except (TypeError, ValueError) as error:
            if isinstance(value, dict | tuple | list):
                raise SchemaError(f"a value of columns {codec.described}: {error}") from None
            raise SchemaError(
                f"the topic's values have the columns {codec.described}: send a dict, a tuple in "
                f"this order or a dataclass, not {type(value).__name__}; columns of many rows go "
                "through send_batch()"
            ) from None

    return encode
