"""Messages on their way in: checked at the call, made into Arrow when they are flushed.

    send        bytes                          the usual message: one append to a list
                (value, key)                   with a key, or no value
                (value, key, partition, headers, timestamp)       with any of the others
    take        -> Outgoing, in bulk
    send_batch  -> Outgoing, checked as a whole

Nothing is done a message in between. Data of `send_batch` has a column value, and others where they
are wanted; of a topic with a value schema, its columns stand in place of value:

    value      binary or text; null: no value
    key        binary or text; null: none
    headers    binary, as a reader gives them; or list<struct<name, value>>, or map<name, value>
    timestamp  with a time zone; null: when it is flushed
    partition  an integer; null: it is chosen

**The partition** that a message goes to:

    it names one      that one
    it has a key      by `hash64` of the key's bytes: equal keys meet in one partition, in order
    neither           one for all such messages of a flush, another the next time: few large
                      batches instead of many small ones

A time before which it is not to be delivered is a header (`message.DELIVER_AT`).

The numbers of keys are frozen: messages of one key stay together over versions of the library.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.core import compute as pc
from txnkv.errors import SchemaError, as_index, require_text
from txnkv.storage import EPOCH_SECONDS, clock
from txnkv.topics.messages.message import DELIVER_AT, Message
from txnkv.topics.messages.values import ValueCodec

MAX_VALUE_BYTES: Final = 1 << 30
"""The largest message; so that Arrow's 32-bit offsets hold it with its key and headers."""

TIME: Final = pa.timestamp("us", tz="UTC")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_SLICE_ROWS: Final = 1 << 18
_PLAIN_ROWS: Final = 1 << 14
_PLAIN_BYTES: Final = 1 << 20
_MANY_BYTES: Final = 1 << 20
_WIDE_BYTES: Final = 128
_MOST_BYTES: Final = (1 << 31) - 1
"""That 32-bit offsets hold."""
_BYTES: Final = pa.binary()
_VALUE: Final = pa.schema([("value", _BYTES)])
_VALUE_KEY: Final = pa.schema([("value", _BYTES), ("key", _BYTES)])

Pending = bytes | tuple[bytes | None, bytes | None] | tuple[Any, Any, Any, Any, Any]
"""A message that waits; see above."""


class Plain(NamedTuple):
    """Messages as they wait, of values and keys alone: they need not become Arrow.

    Attributes:
        rows: one or more.
        nbytes: of their content, about.
        keyed: whether one has a key.
    """

    rows: list[Any]
    nbytes: int
    keyed: bool

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def arrow(self) -> pa.RecordBatch:
        """The same as Arrow."""
        (made,) = _outgoing(self.rows)
        return made.messages

    def partition(self, partitions: int, sticky: int) -> int:
        """The partition that `spread` has them in; of those with a key there is one."""
        if partitions == 1:
            return 0
        return partition_of(self.rows[0][1], partitions) if self.keyed else sticky


def as_arrow(messages: pa.RecordBatch | Plain) -> pa.RecordBatch:
    """Messages for a partition, whatever they are."""
    return messages.arrow if type(messages) is Plain else messages


class Outgoing(NamedTuple):
    """Messages for one topic.

    Attributes:
        messages: column value, and key, headers, timestamp where one of them has it.
        partitions: int32, for each its partition as far as one was given; None: for none.
    """

    messages: pa.RecordBatch
    partitions: pa.Int32Array | None


def now_micros() -> int:
    """Microseconds since 1970."""
    return clock.now_micros() + EPOCH_SECONDS * 1_000_000


def pending(
    value: object,
    key: object,
    partition: object,
    headers: object,
    timestamp: object,
    count: int,
    deliver_at: object = None,
) -> Pending:
    """One message, checked, as it waits.

    Args:
        value: bytes, any buffer of bytes, text (as UTF-8) or None.
        key: the same.
        partition: its number; None: it is chosen.
        headers: pairs of a name and bytes, or a mapping.
        timestamp: an aware datetime or a Timestamp; None: when it is flushed.
        count: how many partitions there are.
        deliver_at: as a timestamp; None: at once.

    Raises:
        TypeError: one of them is of another type.
        ValueError: there is no such partition, a datetime is naive, or it is too large.
    """
    if deliver_at is not None:
        headers = _delayed(headers, deliver_at)
    given = as_bytes("value", value)
    by = as_bytes("key", key)
    if partition is None and headers is None and timestamp is None:
        return given if by is None and given is not None else (given, by)
    return (
        given,
        by,
        None if partition is None else _partition(partition, count),
        None if headers is None else _headers(headers),
        None if timestamp is None else _micros("timestamp", timestamp),
    )


def as_bytes(what: str, given: object) -> bytes | None:
    """A value or key as bytes.

    Raises:
        TypeError: it is neither bytes nor text.
        ValueError: it is too large.
    """
    if isinstance(given, str):
        try:
            given = given.encode()
        except UnicodeEncodeError:
            require_text(f"a message's {what}", str(given))
            raise
    elif isinstance(given, bytes | bytearray | memoryview):
        given = bytes(given)
    elif given is None:
        return None
    else:
        raise TypeError(f"a message's {what} is bytes, str or None, not {type(given).__name__}")
    if len(given) > MAX_VALUE_BYTES:
        raise ValueError(
            f"a message's {what} of {len(given):,} bytes: {MAX_VALUE_BYTES:,} are the most"
        )
    return given


def _partition(given: object, count: int) -> int:
    given = as_index("partition", given)
    if not 0 <= given < count:
        raise ValueError(
            f"there is no partition {given}: the topic has {count}, numbered from 0 to {count - 1}"
        )
    return given


def _pairs(given: object) -> list[Any]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(
            f"headers are a list of (name, bytes) or a mapping, not {type(given).__name__}"
        )
    return list(given.items() if isinstance(given, Mapping) else given)


def _headers(given: object) -> bytes | None:
    pairs = _pairs(given)
    if not pairs:
        return None
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"a header is (name: str, value: bytes), not {pair!r}")
        require_text("a header's name", pair[0])
        value = as_bytes(f"header {pair[0]!r}", pair[1])
        if value is None:
            raise TypeError(f"header {pair[0]!r} is bytes or str, not None")
        checked.append((pair[0], value))
    return core.encode_headers(checked)


def _delayed(headers: object, deliver_at: object) -> object:
    """Headers with the time of a delayed message, in place of one that they may have."""
    micros = max(_micros("deliver_at", deliver_at), 0)
    given = _pairs(headers) if headers is not None else []
    pairs = [each for each in given if not isinstance(each, tuple | list) or DELIVER_AT not in each]
    return [*pairs, (DELIVER_AT, str(micros))]


def _micros(what: str, given: object) -> int:
    if isinstance(given, Timestamp):
        given = given.datetime
    if not isinstance(given, datetime):
        raise TypeError(f"{what} is an aware datetime, not {type(given).__name__}")
    if given.tzinfo is None:
        raise ValueError(
            f"{given!r} has no time zone: a message's {what} is an aware datetime, "
            "as datetime.now(timezone.utc)"
        )
    return (given - _EPOCH) // _MICROSECOND


def plain(waiting: list[Pending], partitions: int) -> Plain | None:
    """Return what waits as it is, if it is little, without partitions, headers or times of its own,
    and goes to one of so many partitions.
    """
    count = len(waiting)
    if count > _PLAIN_ROWS or (said := core.message_size(waiting)) is None:
        return None
    size, keyed = said
    if size > _PLAIN_BYTES or (keyed and count > 1 and partitions > 1):
        return None
    return Plain(waiting, size + 8 * count, keyed)


# -- in bulk ---------------------------------------------------------------------------


def outgoing(waiting: list[Pending]) -> Iterator[Outgoing]:
    """Yield what waits, in its order, as Arrow; several where it is much."""
    for at in range(0, len(waiting), _SLICE_ROWS):
        yield from _outgoing(waiting[at : at + _SLICE_ROWS])


def _outgoing(rows: list[Pending]) -> Iterator[Outgoing]:
    columns = _columns(rows)
    said = core.message_size(rows)
    few = said is not None and said[0] < _few_bytes(len(rows))
    made = [
        pa.array(column, _BYTES) if few else _bytes_column(column)
        for column in [*columns[:2], *columns[3:4]]
    ]
    if any(column is None for column in made):
        half = len(rows) // 2
        yield from _outgoing(rows[:half])
        yield from _outgoing(rows[half:])
    elif len(columns) < 5:
        schema = _VALUE if len(columns) == 1 else _VALUE_KEY
        yield Outgoing(pa.RecordBatch.from_arrays(made, schema=schema), None)
    else:
        arrays = {
            "value": made[0],
            "key": made[1],
            "headers": made[2],
            "timestamp": pa.array(columns[4], TIME),
        }
        yield lean(arrays, pa.array(columns[2], pa.int32()))


def _bytes_column(column: list[bytes | None]) -> pa.Array | None:
    """Bytes as Arrow; None: there are more than one array holds. Other threads go on while many are
    copied: `join` lets them, and `pa.array` does not.
    """
    if len(column) == 1:
        return pa.array(column, _BYTES)
    there = [each for each in column if each is not None]
    size = sum(map(len, there))
    if size > _MOST_BYTES:
        return None
    data = b"" if size < _few_bytes(len(column)) else b"".join(there)
    if len(data) != size or not size:  # few; or a length is not what its bytes say
        return pa.array(column, _BYTES)
    valid, sizes = None, map(len, there)
    if len(there) < len(column):
        valid = pa.array([each is not None for each in column]).buffers()[1]
        sizes = map(len, (each or b"" for each in column))
    ends = pa.py_buffer(array("i", accumulate(sizes, initial=0)))
    return pa.Array.from_buffers(_BYTES, len(column), [valid, ends, pa.py_buffer(data)])


def _few_bytes(rows: int) -> int:
    """Below so many in so many rows `pa.array` is quick."""
    return max(_MANY_BYTES, _WIDE_BYTES * rows)


def _columns(rows: Sequence[Any]) -> list[list[Any]]:
    """Values alone, with keys, or all five."""
    if len(rows) == 1:
        row = rows[0]
        return [[given] for given in row] if type(row) is tuple else [[row]]
    if set(map(type, rows)) == {bytes}:
        return [list(rows)]
    full = [row if type(row) is tuple else (row, None) for row in rows]
    if len(set(map(len, full))) > 1:
        full = [row if len(row) == 5 else (*row, None, None, None) for row in full]
    return [[row[i] for row in full] for i in range(len(full[0]))]


def lean(arrays: dict[str, pa.Array], partitions: pa.Int32Array | None) -> Outgoing:
    """Without the columns in which there is nothing."""
    kept = {
        name: array
        for name, array in arrays.items()
        if name == "value" or array.null_count < len(array)
    }
    if partitions is not None and partitions.null_count == len(partitions):
        partitions = None
    return Outgoing(pa.RecordBatch.from_arrays(list(kept.values()), list(kept)), partitions)


COLUMNS: Final = ("value", "key", "headers", "timestamp", "partition")
_BESIDE: Final = COLUMNS[1:]
_CUT_ROWS: Final = 1 << 18
_CUT_BYTES: Final = 64 << 20


def check_columns(given: pa.Schema, codec: ValueCodec | None = None) -> None:
    """Refuse data that is not of messages, by its schema alone.

    Args:
        given: of the data.
        codec: of the topic, if it has one.

    Raises:
        SchemaError: a column is missing, not known, there twice or of another type.
    """
    names = given.names
    if codec is not None:
        codec.require(pa.schema([field for field in given if field.name not in _BESIDE]))
        given = pa.schema([field for field in given if field.name in _BESIDE])
        for field in given:
            _demand(field.name, field.type)
        return
    if len(set(names)) != len(names):
        raise SchemaError(f"the data has a column twice: {', '.join(names)}")
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise SchemaError(
            f"the data has columns that messages do not have: {', '.join(unknown)}; "
            f"messages have {', '.join(COLUMNS)}"
        )
    if "value" not in names:
        raise SchemaError(f"the data has no column 'value'; it has {', '.join(names) or 'none'}")
    for field in given:
        _demand(field.name, field.type)


def outgoing_of(
    batches: Iterable[pa.RecordBatch], partitions: int, codec: ValueCodec | None = None
) -> Iterator[Outgoing]:
    """Batches whose columns were checked, as messages for a topic.

    Args:
        batches: the data.
        partitions: how many the topic has.
        codec: of the topic, if it has one.

    Raises:
        SchemaError: a value does not fit.
        ValueError: there is no such partition, or a message is too large.
    """
    for whole in batches:
        for batch in core.slices_of(whole, _CUT_ROWS, _CUT_BYTES):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            if codec is not None:
                row = [name for name in columns if name not in _BESIDE]
                beside = {name: columns[name] for name in columns if name in _BESIDE}
                columns = {"value": codec.encode(batch.select(row)), **beside}
            given = columns.pop("partition", None)
            arrays = {name: _column(name, columns[name]) for name in COLUMNS if name in columns}
            yield lean(arrays, None if given is None else _partition_column(given, partitions))


# -- columns ---------------------------------------------------------------------------


def _demand(name: str, kind: pa.DataType) -> None:
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_null(kind):
        return
    if name in ("value", "key"):
        fits, wanted = _is_bytes(kind), "binary or string"
    elif name == "headers":
        fits = _is_bytes(kind) or _is_pairs(kind)
        wanted = "binary, map<string, binary> or list<struct<name: string, value: binary>>"
    elif name == "timestamp":
        fits, wanted = types.is_timestamp(kind) and kind.tz is not None, "timestamp with time zone"
    else:
        fits, wanted = types.is_integer(kind), "an integer"
    if not fits:
        raise SchemaError(f"column {name!r} of messages is {wanted}, not {kind}")


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (
        types.is_binary, types.is_large_binary, types.is_binary_view, types.is_string,
        types.is_large_string, types.is_string_view, types.is_fixed_size_binary,
    )  # fmt: skip
    return any(test(kind) for test in tests)


def _is_pairs(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return core.is_text(kind.key_type) and _is_bytes(kind.item_type)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    pair = kind.value_type
    if not pa.types.is_struct(pair) or pair.num_fields != 2:
        return False
    return core.is_text(pair.field(0).type) and _is_bytes(pair.field(1).type)


def _column(name: str, array: pa.Array) -> pa.Array:
    if name == "headers":
        return _headers_column(array)
    kind = TIME if name == "timestamp" else pa.binary()
    return array if array.type == kind else _cast(name, array, kind)


def _cast(name: str, array: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        made = array.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(f"column {name!r} of messages does not fit: {error}") from None
    if isinstance(made, pa.ChunkedArray):
        raise ValueError(f"a message's {name} has more than {MAX_VALUE_BYTES:,} bytes")
    return made


def _headers_column(array: pa.Array) -> pa.Array:
    kind = array.type
    if _is_bytes(kind) or pa.types.is_null(kind):
        made = _cast("headers", array, pa.binary())
        for blob in pc.unique(made).drop_null().to_pylist():
            try:
                core.decode_headers(blob)
            except core.CoreError as error:
                raise SchemaError(
                    f"column 'headers': {error}. Take bytes as a reader gives them, or "
                    "list<struct<name: string, value: binary>>"
                ) from None
        return made
    try:
        return core.join_headers(array)
    except (ValueError, pa.ArrowException) as error:
        raise SchemaError(f"column 'headers': {error}") from None


def _partition_column(array: pa.Array, partitions: int) -> pa.Int32Array:
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), pa.int32())
    wide = _cast("partition", array, pa.int64())
    bounds = pc.min_max(wide).as_py()
    for number in (bounds["min"], bounds["max"]):
        if number is not None and not 0 <= number < partitions:
            raise ValueError(
                f"there is no partition {number}: the topic has {partitions}, numbered from 0 to "
                f"{partitions - 1}"
            )
    return wide.cast(pa.int32())


_MIX: Final = 0x9E3779B97F4A7C15


class Sticky:
    """The partition of messages that say nothing; another one with each flush."""

    def __init__(self) -> None:
        self._next = random.getrandbits(16)

    def turn(self, partitions: int) -> int:
        self._next += 1
        return self._next % partitions


def spread(outgoing: Outgoing, partitions: int, sticky: int) -> list[tuple[int, pa.RecordBatch]]:
    """The messages of each partition that gets some, in their order.

    Args:
        outgoing: the messages.
        partitions: how many there are.
        sticky: where those without key and partition go.
    """
    messages, given = outgoing
    if partitions == 1:
        return [(0, messages)]
    keys = messages.column("key") if "key" in messages.schema.names else None
    if given is None and keys is None:
        return [(sticky, messages)]
    if messages.num_rows == 1:
        number = None if given is None else given[0].as_py()
        key = None if keys is None else keys[0].as_py()
        if number is None:
            number = sticky if key is None else partition_of(key, partitions)
        return [(number, messages)]
    numbers = pa.scalar(sticky, pa.uint16())
    if keys is not None:
        hashed = core.hash_partition(_as_keys(keys), partitions)
        numbers = pc.if_else(keys.is_valid(), hashed, numbers) if keys.null_count else hashed
    if given is not None:
        numbers = pc.coalesce(given.cast(pa.uint16()), numbers)
    found = []
    for number, rows in enumerate(core.scatter(numbers, partitions)):
        if rows.n == messages.num_rows:
            return [(number, messages)]
        if rows.n:
            found.append((number, messages.take(rows.to_arrow())))
    return found


def partition_of(key: bytes, partitions: int) -> int:
    """Return the number of the partition of one key: as `core.hash_partition` has it."""
    mixed = core.hash64(key) * _MIX & 0xFFFFFFFFFFFFFFFF
    return (mixed >> 32) * partitions >> 32


def key_hash(message: Message) -> int:
    """Return the hash of a message's key, 63 bits, by which consumers of a key_shared subscription
    share keys; one without a key has the hash of its id. As frozen as that of `partition_of`.
    """
    key = message.key
    if key is None:
        key = b"%d:%d" % message.id
    return (core.hash64(key) * _MIX & 0xFFFFFFFFFFFFFFFF) >> 1


def _as_keys(keys: pa.BinaryArray) -> core.Keys:
    _, offsets, data = keys.buffers()
    part = offsets.slice(4 * keys.offset, 4 * (len(keys) + 1))
    return core.Keys.variable(b"" if data is None else data, part)
