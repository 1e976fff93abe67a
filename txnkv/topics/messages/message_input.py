"""Messages on their way in: checked at the call, made into Arrow when they are flushed.

    send        bytes                          the usual message: one append to a list
                (value, key)                   with a key, or no value
                (value, key, partition, headers, timestamp)       with any of the others
    take        -> Outgoing, in bulk
    send_batch  -> Outgoing, checked as a whole

Nothing is done a message in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.storage import EPOCH_SECONDS, clock

MAX_VALUE_BYTES: Final = 1 << 30
"""The largest message; so that Arrow's 32-bit offsets hold it with its key and headers."""

TIME: Final = pa.timestamp("us", tz="UTC")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_SLICE_ROWS: Final = 1 << 18
_BYTES: Final = pa.binary()
_VALUE: Final = pa.schema([("value", _BYTES)])
_VALUE_KEY: Final = pa.schema([("value", _BYTES), ("key", _BYTES)])

Pending = bytes | tuple[bytes | None, bytes | None] | tuple[Any, Any, Any, Any, Any]
"""A message that waits; see above."""


class Single(NamedTuple):
    """One message as it waits, where it is all there is: it need not become Arrow."""

    value: bytes | None
    key: bytes | None

    @property
    def num_rows(self) -> int:
        return 1

    @property
    def nbytes(self) -> int:
        """The bytes of the content, about."""
        return 8 + len(self.value or b"") + len(self.key or b"")

    @property
    def arrow(self) -> pa.RecordBatch:
        """The same as Arrow."""
        fields = (self.value,) if self.key is None else (self.value, self.key)
        arrays = [pa.array([field], _BYTES) for field in fields]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    @property
    def schema(self) -> pa.Schema:
        """The schema of `arrow`."""
        return _VALUE if self.key is None else _VALUE_KEY


def as_arrow(messages: pa.RecordBatch | Single) -> pa.RecordBatch:
    """Messages for a partition, whatever they are."""
    return messages.arrow if type(messages) is Single else messages


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
    value: object, key: object, partition: object, headers: object, timestamp: object, count: int
) -> Pending:
    """One message, checked, as it waits.

    Args:
        value: bytes, any buffer of bytes, text (as UTF-8) or None.
        key: the same.
        partition: its number; None: it is chosen.
        headers: pairs of a name and bytes, or a mapping.
        timestamp: an aware datetime or a Timestamp; None: when it is flushed.
        count: how many partitions there are.

    Raises:
        TypeError: one of them is of another type.
        ValueError: there is no such partition, the datetime is naive, or it is too large.
    """
    given = as_bytes("value", value)
    by = as_bytes("key", key)
    if partition is None and headers is None and timestamp is None:
        return given if by is None and given is not None else (given, by)
    return (
        given,
        by,
        None if partition is None else _partition(partition, count),
        None if headers is None else _headers(headers),
        None if timestamp is None else _micros(timestamp),
    )


def as_bytes(what: str, given: object) -> bytes | None:
    """A value or key as bytes.

    Raises:
        TypeError: it is neither bytes nor text.
        ValueError: it is too large.
    """
    if isinstance(given, str):
        given = given.encode()
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
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"partition is a number, not {type(given).__name__}")
    if not 0 <= given < count:
        raise ValueError(
            f"there is no partition {given}: the topic has {count}, numbered from 0 to {count - 1}"
        )
    return given


def _headers(given: object) -> bytes | None:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(
            f"headers are a list of (name, bytes) or a mapping, not {type(given).__name__}"
        )
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    if not pairs:
        return None
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"a header is (name: str, value: bytes), not {pair!r}")
        value = as_bytes(f"header {pair[0]!r}", pair[1])
        if value is None:
            raise TypeError(f"header {pair[0]!r} is bytes or str, not None")
        checked.append((pair[0], value))
    return core.encode_headers(checked)


def _micros(given: object) -> int:
    if isinstance(given, Timestamp):
        given = given.datetime
    if not isinstance(given, datetime):
        raise TypeError(f"timestamp is an aware datetime, not {type(given).__name__}")
    if given.tzinfo is None:
        raise ValueError(
            f"{given!r} has no time zone: a message's timestamp is an aware datetime, "
            "as datetime.now(timezone.utc)"
        )
    return (given - _EPOCH) // _MICROSECOND


def single(waiting: list[Pending]) -> Single | None:
    """Return what waits, if it is one message without partition, headers or time of its own."""
    if len(waiting) != 1:
        return None
    row = waiting[0]
    if isinstance(row, bytes):
        return Single(row, None)
    return None if len(row) > 2 else Single(row[0], row[1])


# -- in bulk ---------------------------------------------------------------------------


def outgoing(waiting: list[Pending]) -> Iterator[Outgoing]:
    """Yield what waits, in its order, as Arrow; several where it is much."""
    for at in range(0, len(waiting), _SLICE_ROWS):
        yield from _outgoing(waiting[at : at + _SLICE_ROWS])


def _outgoing(rows: list[Pending]) -> Iterator[Outgoing]:
    columns = _columns(rows)
    made = [pa.array(column, _BYTES) for column in columns[:2]]
    if any(isinstance(column, pa.ChunkedArray) for column in made):
        half = len(rows) // 2  # more than 32-bit offsets hold
        yield from _outgoing(rows[:half])
        yield from _outgoing(rows[half:])
    elif len(columns) < 5:
        schema = _VALUE if len(columns) == 1 else _VALUE_KEY
        yield Outgoing(pa.RecordBatch.from_arrays(made, schema=schema), None)
    else:
        arrays = {
            "value": made[0],
            "key": made[1],
            "headers": pa.array(columns[3], _BYTES),
            "timestamp": pa.array(columns[4], TIME),
        }
        yield lean(arrays, pa.array(columns[2], pa.int32()))


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
