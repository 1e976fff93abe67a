"""Arrow data as messages: a column value, and others where they are wanted.

value      binary or text; null: no value
key        binary or text; null: none
headers    binary, as a reader gives them; or list<struct<name, value>>, or map<name, value>
timestamp  with a time zone; null: when it is flushed
partition  an integer; null: it is chosen

Of a topic with a value schema, its columns stand in place of value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.errors import SchemaError
from txnkv.topics.messages.message_input import MAX_VALUE_BYTES, TIME, Outgoing, lean
from txnkv.topics.messages.values import ValueCodec

COLUMNS: Final = ("value", "key", "headers", "timestamp", "partition")
_BESIDE: Final = COLUMNS[1:]
_ROWS: Final = 1 << 18
_BYTES: Final = 64 << 20


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
        for batch in _cut(whole):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            if codec is not None:
                row = [name for name in columns if name not in _BESIDE]
                beside = {name: columns[name] for name in columns if name in _BESIDE}
                columns = {"value": codec.encode(batch.select(row)), **beside}
            given = columns.pop("partition", None)
            arrays = {name: _column(name, columns[name]) for name in COLUMNS if name in columns}
            yield lean(arrays, None if given is None else _numbers(given, partitions))


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows == 0:
        return
    width = max(batch.nbytes / batch.num_rows, 1.0)
    step = max(1, min(_ROWS, int(_BYTES / width)))
    for lo in range(0, batch.num_rows, step):
        yield batch.slice(lo, step)


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
        return pa.types.is_string(kind.key_type) and _is_bytes(kind.item_type)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    pair = kind.value_type
    if not pa.types.is_struct(pair) or pair.num_fields != 2:
        return False
    return pa.types.is_string(pair.field(0).type) and _is_bytes(pair.field(1).type)


def _column(name: str, array: pa.Array) -> pa.Array:
    if name == "headers":
        return _headers(array)
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


def _headers(array: pa.Array) -> pa.Array:
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


def _numbers(array: pa.Array, partitions: int) -> pa.Int32Array:
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
