"""Rows in: whatever holds Arrow data, or single rows, becomes batches in the table's schema."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Final

import pyarrow as pa

from txnkv import core
from txnkv.core import JSON
from txnkv.core import column_types as types
from txnkv.errors import SchemaError
from txnkv.storage import go_on
from txnkv.tables.operations import DELETES, INSERTS
from txnkv.tables.schema import Schema, column_array

TASKS: Final = 4
"""Tasks of a job that a machine is thought to run at once."""

CHUNK_ROWS: Final = 1 << 21
CHUNK_BYTES: Final = 64 << 20

_VIEWS: Final = {
    **{pa.string_view(): pa.string(), pa.binary_view(): pa.binary()},
    **{kind: kind.storage_type for kind in (core.UUID, core.JSON)},
}
"""Values of dictionaries, as of polars' categories, that Arrow neither reads nor sends; as what."""


_ONE: Final = {
    "write": "single rows go through insert()",
    "send_batch": "single messages go through send()",
}


def open_stream(data: Any, call: str = "write") -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The batches of an object with Arrow data.

    Args:
        data: the object.
        call: what was called with it: "write" or "send_batch".

    Raises:
        TypeError: it has none.
        SchemaError: it is of pandas, and a column has values of no one type.
    """
    schema, batches = _opened(data, call)
    plain = schema
    for i, field in enumerate(schema):
        if pa.types.is_dictionary(field.type) and field.type.value_type in _VIEWS:
            kind = pa.dictionary(field.type.index_type, _VIEWS[field.type.value_type])
            plain = plain.set(i, field.with_type(kind))
    return plain, batches if plain is schema else (_without_views(each, plain) for each in batches)


def _without_views(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = batch.columns
    for i, (array, field) in enumerate(zip(columns, schema, strict=True)):
        if array.type != field.type:
            values = array.dictionary.cast(field.type.value_type)
            columns[i] = pa.DictionaryArray.from_arrays(array.indices, values)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _opened(data: Any, call: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    if isinstance(data, pa.RecordBatch):
        return data.schema, iter([data])
    if isinstance(data, pa.Table):
        return data.schema, iter(data.to_batches())
    if isinstance(data, pa.RecordBatchReader):
        return data.schema, data
    try:
        if hasattr(data, "__arrow_c_stream__"):
            reader = pa.RecordBatchReader.from_stream(data)
            return reader.schema, reader
        if hasattr(data, "__arrow_c_array__"):
            batch = pa.record_batch(data)
            return batch.schema, iter([batch])
    except OverflowError as error:
        raise SchemaError(_too_large(data, str(error))) from None
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        if found := re.match(_OF_COLUMN, str(error.args[-1])):
            raise SchemaError(_mixed(data, found["column"], str(error.args[0]))) from None
        raise TypeError(
            f"{call} takes tables, with a name for each column; this {type(data).__name__} is "
            f"none: {error}"
        ) from None
    raise TypeError(
        f"{call} takes Arrow data (pyarrow, pandas, polars, or an object with __arrow_c_stream__), "
        f"not {type(data).__name__}; {_ONE[call]}"
    )


_OF_COLUMN: Final = r"(?s)Conversion failed for column (?P<column>.*) with type"


def _columns_of(frame: Any) -> list[tuple[str, Any]]:
    """The columns of a frame of pandas, by name, and after them those of its index."""
    index = frame.index
    levels = [(name, index.get_level_values(at)) for at, name in enumerate(index.names)]
    return [(str(name), values) for name, values in [*frame.items(), *levels]]


def _mixed(frame: Any, name: str, why: str) -> str:
    """Say of which types the values of a column of pandas are."""
    column = next((each for found, each in _columns_of(frame) if found == name), None)
    if column is None:  # pyarrow names it otherwise
        return f"{why}: convert it first"
    firsts = {type(value).__name__: value for value in reversed(column.dropna().tolist())}
    told = ", ".join(f"{value!r:.40} is a {kind}" for kind, value in sorted(firsts.items()))
    alone = len(firsts) == 1 and not {"list", "dict", "tuple", "set", "ndarray"} & firsts.keys()
    fault = "values that no column takes" if alone else "no one type"
    return f"column {name!r} has {fault}: {told}; convert it first ({why})"


def _too_large(frame: Any, why: str) -> str:
    """Name a column of pandas with whole numbers that no one type of 64 bits holds."""
    for name, column in _columns_of(frame) if hasattr(frame, "index") else ():
        try:
            pa.array(column, from_pandas=True)
        except OverflowError:
            found = [int(value) for value in column if isinstance(value, Integral)]
            told = f"from {min(found)} to {max(found)}" if found else "within its values"
            return (
                f"column {name!r} has whole numbers {told}, which neither int64 nor uint64 holds: "
                "make decimals of them"
            )
        except pa.ArrowException:
            continue
    return why


class Normaliser:
    """Brings batches of one Arrow schema into the schema of a table.

    Of columns that are missing inserts take the default. Other operations leave them out: they
    keep the values they have. Deletes want the key alone.

    Raises:
        SchemaError: a column is unknown, missing though it is needed, or of another kind.
    """

    def __init__(self, schema: Schema, given: pa.Schema, op: str = "insert") -> None:
        self._schema = schema
        names = given.names
        if len(set(names)) != len(names):
            raise SchemaError(f"the data has a column twice: {', '.join(names)}")
        unknown = [name for name in names if name not in schema.columns]
        if unknown:
            alike = {name.casefold() for name in unknown} <= {*map(str.casefold, schema.columns)}
            raise SchemaError(
                f"the data has columns that the table does not have: {', '.join(unknown)}; "
                f"the table has {', '.join(schema.columns)}"
                + (" (names differ in case alone)" if alike else "")
            )
        for name, column in schema.columns.items():
            if name in names:
                continue
            if name in schema.primary_key and op not in INSERTS:
                raise SchemaError(
                    f"the data has no column {name!r}, which is of the primary key: {op} needs "
                    f"the whole key; the data has {', '.join(names) or 'none'}"
                )
            if op in INSERTS and not column.nullable and column.default is None:
                raise SchemaError(
                    f"the data has no column {name!r}, which is not nullable and has no default; "
                    f"it has {', '.join(names) or 'none'}"
                )
        wanted = wanted_columns(schema, names, op)
        self._target = (
            schema.arrow
            if len(wanted) == len(schema.columns)
            else pa.schema([schema.arrow.field(name) for name in wanted])
        )
        for field in given:
            if field.name in wanted:
                types.cast(
                    pa.chunked_array([], field.type), schema.columns[field.name].type, field.name
                )

    def batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """One batch, cast without loss.

        Raises:
            SchemaError: a value does not fit, or a null stands where none may.
        """
        columns = []
        for name in self._target.names:
            column = self._schema.columns[name]
            position = batch.schema.get_field_index(name)
            if position < 0:
                columns.append(core.repeated(column.type, column.default, batch.num_rows))
                continue
            array = batch.column(position)
            types.require_valid(array, name)
            if array.type != column.type or array.type == JSON or pa.types.is_time(array.type):
                cast = types.cast(pa.chunked_array([array]), column.type, name)
                array = cast.combine_chunks()
                if isinstance(array, pa.ChunkedArray):
                    array = pa.concat_arrays(array.chunks)
            if not column.nullable and array.null_count:
                raise SchemaError(
                    f"column {name!r} is not nullable, and {array.null_count} of the "
                    f"{len(array)} values given are null"
                )
            columns.append(array)
        return pa.record_batch(columns, schema=self._target)


def wanted_columns(schema: Schema, given: Sequence[str], op: str) -> list[str]:
    """The columns that an operation takes, of the data that has those `given`; schema order."""
    if op in INSERTS:
        return schema.names
    wanted = schema.primary_key if op in DELETES else given
    return [name for name in schema.names if name in wanted]


def chunks(
    schema: Schema, data: Any, op: str = "insert", *, shared_by: int = 1
) -> Iterator[pa.RecordBatch]:
    """`data` in the table's schema, in pieces of up to 2 Mi rows and about 64 MiB.

    Args:
        schema: of the table.
        data: Arrow data.
        op: what is done with it; see `Normaliser` for what becomes of columns that are missing.
        shared_by: how many writers share that much: the tasks of a job on one machine. Small
            pieces also use the same memory again, where large ones are fresh pages each time.

    Raises:
        TypeError: `data` has no Arrow data in it.
        SchemaError: it does not fit the table.
    """
    given, batches = open_stream(data)
    normaliser = Normaliser(schema, given, op)
    most_rows, most_bytes = CHUNK_ROWS // shared_by, CHUNK_BYTES // shared_by

    def normal() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            go_on()
            for piece in core.slices_of(batch, most_rows, most_bytes):
                yield normaliser.batch(piece)

    yield from map(core.joined, core.gathered(normal(), most_rows, most_bytes))


# -- single rows -----------------------------------------------------------------------


class _Missing:
    """A column that a row does not name, and that keeps its value."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


def row_values(schema: Schema, row: Any, op: str = "insert") -> tuple[Any, ...]:
    """One row, in schema order: from a dict, a tuple in schema order, or a dataclass.

    Args:
        op: an insert takes the default of a column that the row does not name; an upsert or
            update has `MISSING` there. A delete takes the key's values alone, of a key or of a
            dict or dataclass that has them.

    Raises:
        SchemaError: a column is unknown, or missing though it is needed.
        TypeError: `row` is none of these.
    """
    if isinstance(row, (tuple, list)) and op not in DELETES:
        if len(row) != len(schema.columns):
            raise SchemaError(
                f"a row has {len(schema.columns)} values ({', '.join(schema.columns)}), "
                f"this one has {len(row)}"
            )
        for value, (name, column) in zip(row, schema.columns.items(), strict=True):
            if value is None and not column.nullable:
                raise SchemaError(f"column {name!r} is not nullable: give it a value")
        return tuple(row)
    named = _named(row)
    if op in DELETES:
        return key_values(schema, row) if named is None else _key_of(schema, named)
    if named is not None:
        return _from_mapping(schema, named, op)
    raise TypeError(
        f"a row is a dict, a tuple in schema order or a dataclass, not {type(row).__name__}; "
        "whole tables go through write()"
    )


def key_values(schema: Schema, key: Any) -> tuple[Any, ...]:
    """A key as a tuple of its columns' values: a scalar stands for a one-column key.

    Raises:
        SchemaError: it has too many or too few values, or a null.
    """
    values = tuple(key) if isinstance(key, (tuple, list)) else (key,)
    if len(values) != len(schema.primary_key):
        raise SchemaError(
            f"the primary key is ({', '.join(schema.primary_key)}): "
            f"{len(schema.primary_key)} values, not {len(values)} as in {key!r}"
        )
    if any(value is None for value in values):
        raise SchemaError(f"a key has no nulls: {key!r}")
    return values


def key_columns(schema: Schema, keys: Sequence[Any]) -> list[pa.Array]:
    """Return keys as arrays, one for each column of the key.

    Raises:
        SchemaError: one does not fit the table.
        TypeError: it is no list of keys.
    """
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    if len(schema.primary_key) == 1:
        (name,) = schema.primary_key
        at_once = _as_array(schema.columns[name].type, keys)
        if at_once is not None:
            return [at_once]
    if isinstance(keys, pa.Array):
        keys = keys.to_pylist()
    if not isinstance(keys, Iterable) or isinstance(keys, pa.Table | pa.RecordBatch):
        raise TypeError(f"keys is a list of keys, not {keys!r}")
    rows = [row_values(schema, key, "delete") for key in keys]
    return [
        column_array(name, schema.columns[name].type, [row[i] for row in rows])
        for i, name in enumerate(schema.primary_key)
    ]


def _as_array(kind: pa.DataType, keys: Sequence[Any]) -> pa.Array | None:
    """Keys that can be seen to fit, without a look at each; None for others."""
    if isinstance(keys, pa.Array):
        return keys if keys.type == kind and keys.null_count == 0 else None
    plain = int if pa.types.is_integer(kind) else str if pa.types.is_string(kind) else None
    if not isinstance(keys, Sequence) or set(map(type, keys)) != {plain}:
        return None
    try:
        return pa.array(keys, kind)
    except (pa.ArrowInvalid, OverflowError, UnicodeError):
        return None


def _named(row: Any) -> Mapping[str, Any] | None:
    """The values by name, of a dict or a dataclass."""
    if isinstance(row, Mapping):
        return row
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return None


def _known(schema: Schema, row: Mapping[str, Any]) -> None:
    unknown = [name for name in row if name not in schema.columns]
    if unknown:
        raise SchemaError(
            f"there is no column {', '.join(map(repr, unknown))}; "
            f"there are {', '.join(schema.columns)}"
        )


def _key_of(schema: Schema, row: Mapping[str, Any]) -> tuple[Any, ...]:
    _known(schema, row)
    return key_values(schema, tuple(row.get(name) for name in schema.primary_key))


def _from_mapping(schema: Schema, row: Mapping[str, Any], op: str) -> tuple[Any, ...]:
    _known(schema, row)
    values = []
    for name, column in schema.columns.items():
        if name not in row and op not in INSERTS and name not in schema.primary_key:
            values.append(MISSING)
            continue
        value = row.get(name, column.default)
        if value is None and not column.nullable:
            raise SchemaError(
                f"column {name!r} is not nullable and has no default: give it a value"
            )
        values.append(value)
    return tuple(values)
