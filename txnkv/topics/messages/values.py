"""Typed values: messages of a topic whose values are rows of declared columns.

    declared    {"id": "int64", "note": "string?"}        client.create_topic(value_schema=...)
    given       {"id": 7, "note": None}                   send: a row; send_batch: columns
    stored      01 | 01 00 | 02 07 00 .. 00 00 00 00      version, schema, row: bytes as any others
    read        {"id": 7, "note": None}                   poll: a dict; poll_batch: columns again

Below this module a typed value is bytes: logs, buffers, retention and copies know nothing of it.
A message without a value, a tombstone, is in columns a row of nothing but nulls, and the other
way round: a row of nothing but nulls is no value. So data that is read and sent again is the same,
and columns that are read may hold nulls whatever was declared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

from txnkv import core
from txnkv.core import cast, column_type, element_type, parse_type, type_name
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError, SchemaError

RESERVED: Final = ("key", "headers", "timestamp", "partition", "offset", "txn_id")
"""Names of what a message has beside its value; no column of a value is called so, in any case."""

_FIRST: Final = 1
"""The number of a topic's schema; there will be others when schemas can change."""


def require_declarable(schema: pa.Schema) -> None:
    """Refuse what cannot be the value schema of a topic.

    Raises:
        SchemaError: there is no column, a name is reserved or there twice, or a type is unknown.
    """
    if not len(schema):
        raise SchemaError("a value schema has at least one column; None is for values of bytes")
    for name in schema.names:
        if not name or schema.names.count(name) > 1:
            raise SchemaError(f"a value schema has the column {name!r} more than once, or no name")
        if name.lower() in RESERVED:
            raise SchemaError(
                f"a value schema has no column {name!r}: every message has {', '.join(RESERVED)} "
                "beside its value. Take another name"
            )
    for field in schema:
        inner = element_type(field.type)
        is_map = pa.types.is_struct(inner) or pa.types.is_map(inner)
        if is_map or column_type(field.type) != field.type:
            raise SchemaError(
                f"column {field.name!r} of a value schema cannot be {type_name(field.type)}"
                + ("; json holds such values" if is_map else "")
            )


class Encoded(bytes):
    """A value that a codec made: it is sent as it is, to a topic of the same schema."""


class ValueCodec:
    """Values of one schema, to bytes and back. Picklable, and shared by threads.

    Attributes:
        schema: as it was declared.
        columns: the same as it is read: every column may be null.
    """

    def __init__(self, schema: pa.Schema) -> None:
        """Made by `value_codec`."""
        self.schema = schema
        self.columns = pa.schema([field.with_nullable(True) for field in schema])
        self._layout = core.ValueLayout(schema.types, _FIRST)
        self._required = [i for i, field in enumerate(schema) if not field.nullable]
        self._names = schema.names

    def __reduce__(self) -> tuple[Any, ...]:
        return value_codec, (self.schema,)

    def __repr__(self) -> str:
        return f"<ValueCodec of {self.described}>"

    @property
    def described(self) -> str:
        """The columns for people, as (id int64, note string?)."""
        each = (f"{f.name} {type_name(f.type)}{'?' if f.nullable else ''}" for f in self.schema)
        return f"({', '.join(each)})"

    # -- in ----------------------------------------------------------------------------

    def require(self, given: pa.Schema) -> None:
        """Refuse data by its schema alone.

        Args:
            given: of the columns of values, in any order, without those of messages.

        Raises:
            SchemaError: a column is not known, there twice, missing though it is not nullable,
                or of a type that cannot be cast without loss.
        """
        names = given.names
        if len(set(names)) != len(names):
            raise SchemaError(f"the data has a column twice: {', '.join(names)}")
        unknown = [name for name in names if name not in self._names]
        if unknown:
            raise SchemaError(
                f"the data has columns that the values of the topic do not have: "
                f"{', '.join(unknown)}; they are {self.described}"
            )
        for field in self.schema:
            if field.name in names:
                nothing = pa.chunked_array([], given.field(field.name).type)
                cast(nothing, field.type, field.name)
            elif not field.nullable:
                raise SchemaError(
                    f"the data has no column {field.name!r}, which is not nullable; the values of "
                    f"the topic are {self.described}, the data has {', '.join(names) or 'none'}"
                )

    def encode(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        """Rows as values; of a row of nothing but nulls the value is null.

        Args:
            batch: columns as `require` takes them, in any order.

        Raises:
            SchemaError: it does not fit, or a null stands where none may.
            ValueError: the values are more than 2 GiB.
        """
        self.require(batch.schema)
        n = batch.num_rows
        arrays = [_column(batch, field, n) for field in self.schema]
        absent = _absent(arrays)
        for i in self._required:
            nulls = arrays[i].null_count - (0 if absent is None else absent.true_count)
            if nulls:
                raise SchemaError(
                    f"column {self._names[i]!r} is not nullable, and {nulls} of the {n} values "
                    "given are null, beside others that are not"
                )
        try:
            if absent is None:
                return self._layout.encode(arrays)
            there = pc.indices_nonzero(pc.invert(absent)).cast(pa.uint32())
            values = self._layout.encode(arrays, core.Rows.from_arrow(there))
        except core.CoreError as error:
            raise ValueError(f"{error}") from None
        places = pc.subtract(pc.cumulative_sum(pc.invert(absent).cast(pa.int64())), 1)
        return values.take(pc.if_else(absent, pa.scalar(None, pa.int64()), places))

    def encode_one(self, values: Sequence[Any]) -> bytes | None:
        """One row, of values as the types of the columns give them back.

        Raises:
            TypeError, ValueError: a value does not fit.
        """
        for value in values:
            if value is not None:
                return self._layout.encode_one(values)
        return None

    # -- out ---------------------------------------------------------------------------

    def decode(
        self, values: pa.BinaryArray, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """Values as rows; of a null value all columns are null.

        Args:
            values: as `encode` makes them.
            columns: those that are wanted, one at least; None for all.

        Raises:
            CorruptionError: a value is not of this schema, or damaged.
            KeyError: there is no such column.
        """
        names = self._names if columns is None else columns
        numbers = [self._number(name) for name in names]
        try:
            arrays = self._layout.decode(values, numbers)
            for number, array in zip(numbers, arrays, strict=True):
                self._look(number, array, values)
        except core.DamagedValueError as error:
            raise self._damaged(error, f"value {error.index} of {len(values)}") from None
        except core.CoreError as error:
            raise self._damaged(error, f"one of {len(values)} values") from None
        kept = pa.schema([self.columns.field(number) for number in numbers])
        return pa.RecordBatch.from_arrays(arrays, schema=kept)

    def decode_one(self, value: bytes) -> dict[str, Any]:
        """One value as a dict.

        Raises:
            CorruptionError: it is not of this schema, or damaged.
            ValueError: it has a date or time that Python has not.
        """
        try:
            found = self._layout.decode_one(value)
            if None in found:
                for number in self._required:
                    if found[number] is None:
                        raise core.DamagedValueError(f"its column {self._names[number]!r} is null")
        except core.CoreError as error:
            raise self._damaged(error, "a value") from None
        except OverflowError as error:
            raise ValueError(
                f"a value of {self.described} has a date or time outside of the years 1 to 9999, "
                f"which Python cannot name ({error}): read it as Arrow, with poll_batch"
            ) from None
        return dict(zip(self._names, found, strict=True))

    def _number(self, name: str) -> int:
        number: int = self.schema.get_field_index(name)
        if number < 0:
            raise KeyError(f"there is no column {name!r} in {self.described}")
        return number

    def _look(self, number: int, array: pa.Array, values: pa.BinaryArray) -> None:
        """Refuse what the core does not look at: text that is none, nulls where none may be."""
        if number in self._required and array.null_count > values.null_count:
            raise core.DamagedValueError(
                f"its column {self._names[number]!r} is null", _first_null(array, values)
            )
        try:
            array.validate(full=True)
        except pa.ArrowInvalid as error:
            raise core.CoreError(f"column {self._names[number]!r}: {error}") from None

    def _damaged(self, error: Exception, what: str) -> CorruptionError:
        return CorruptionError(
            f"{what} of schema {self.described} cannot be read: {error}. Nothing was returned. "
            "Check the store that it came from"
        )


def _first_null(array: pa.Array, values: pa.BinaryArray) -> int:
    found = pc.and_(pc.is_null(array), pc.is_valid(values))
    return int(pc.index(found, True).as_py())


def _column(batch: pa.RecordBatch, field: pa.Field, n: int) -> pa.Array:
    at = batch.schema.get_field_index(field.name)
    if at < 0:
        return pa.nulls(n, field.type)
    array = batch.column(at)
    if array.type == field.type:
        return array
    made = cast(pa.chunked_array([array]), field.type, field.name).combine_chunks()
    return pa.concat_arrays(made.chunks) if isinstance(made, pa.ChunkedArray) else made


def _absent(arrays: Sequence[pa.Array]) -> pa.BooleanArray | None:
    """Find the rows that are nulls alone; None when no row is."""
    if any(array.null_count == 0 for array in arrays):
        return None
    absent = pc.is_null(arrays[0])
    for array in arrays[1:]:
        absent = pc.and_(absent, pc.is_null(array))
    return absent if absent.true_count else None


@lru_cache(maxsize=256)
def value_codec(schema: pa.Schema) -> ValueCodec:
    """The codec of a topic's value schema."""
    return ValueCodec(schema)


# -- stored form -----------------------------------------------------------------------


def to_document(schema: pa.Schema) -> dict[str, Any]:
    """A value schema for JSON."""
    columns = [
        {"name": field.name, "type": type_name(field.type), "nullable": field.nullable}
        for field in schema
    ]
    return {"id": _FIRST, "columns": columns}


def from_document(document: dict[str, Any]) -> pa.Schema:
    """Return the schema that `to_document` wrote down."""
    return pa.schema(
        [
            pa.field(each["name"], parse_type(each["type"]), each["nullable"])
            for each in document["columns"]
        ]
    )
