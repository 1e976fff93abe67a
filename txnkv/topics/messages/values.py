"""Typed values: messages of a topic whose values are rows of declared columns.

    declared    {"id": "int64", "note": "string?"}        client.create_topic(value_schema=...)
    given       {"id": 7, "note": None}                   send: a row; send_batch: columns
    stored      01 | 01 00 | 02 07 00 .. 00 00 00 00      version, schema, row: bytes as any others
    read        {"id": 7, "note": None}                   poll: a dict; poll_batch: columns again
    altered     {"id": "int64", "note": "string?", "n": Column("int32", default=0)}    schema 2
    read again  {"id": 7, "note": None, "n": 0}           what is of schema 1, as it would be of 2

A topic keeps every schema that it had, by number. A value stays as it was sent, and is read under
the last one: a column that came later has the default that it came with, or null, and a column
that was widened is cast. So who still sends by an earlier schema does no harm, and who reads has to
know the last one: it is in the catalog before any value is of it.

Below this module a typed value is bytes: logs, buffers, retention and copies know nothing of it.
A message without a value, a tombstone, is in columns a row of nothing but nulls, and the other
way round: a row of nothing but nulls is no value. So data that is read and sent again is the same,
and columns that are read may hold nulls whatever was declared.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv import core
from txnkv.core import JSON, cast, column_type, element_type, parse_type, require_valid, type_name
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError, SchemaError
from txnkv.storage import CachedProperty

RESERVED: Final = ("key", "headers", "timestamp", "partition", "offset", "txn_id")
"""Names of what a message has beside its value; no column of a value is called so, in any case."""

MOST_SCHEMAS: Final = (1 << 16) - 1
"""The most that a topic has over time: the number of each is an u16 in its values."""

_DEFAULTS: Final = 0
"""The number of a schema in the value that has its defaults."""


class ValueStage(NamedTuple):
    """One schema of a topic's values.

    Attributes:
        schema: the columns.
        defaults: a value of them with the default of each column, null where it has none; None:
            no column has one.
    """

    schema: pa.Schema
    defaults: bytes | None = None

    @classmethod
    def of(cls, schema: pa.Schema, defaults: Mapping[str, Any]) -> ValueStage:
        """A schema and the defaults of some of its columns, as the columns give them back."""
        row = [defaults.get(name) for name in schema.names]
        if all(each is None for each in row):
            return cls(schema)
        return cls(schema, core.ValueLayout(schema.types, _DEFAULTS).encode_one(row))

    @property
    def by_column(self) -> dict[str, Any]:
        """The defaults of the columns that have one."""
        if self.defaults is None:
            return {}
        row = core.ValueLayout(self.schema.types, _DEFAULTS).decode_one(self.defaults)
        return {n: v for n, v in zip(self.schema.names, row, strict=True) if v is not None}


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


class _Stage:
    """Values of one schema of a topic, as they stand."""

    def __init__(self, stage: ValueStage, number: int) -> None:
        self.schema = stage.schema
        self.defaults = stage.by_column
        self.layout = core.ValueLayout(self.schema.types, number)
        self.required = [i for i, field in enumerate(self.schema) if not field.nullable]
        self.numbers = {name: i for i, name in enumerate(self.schema.names)}

    def columns(self, values: pa.BinaryArray, names: Sequence[str]) -> dict[str, pa.Array]:
        """Columns of values; those that it has of these.

        Raises:
            CoreError: a value is not of this schema, or damaged.
        """
        numbers = [self.numbers[name] for name in names if name in self.numbers]
        # One is decoded whatever is wanted: so values are looked at.
        arrays = self.layout.decode(values, numbers or [0])
        for number, array in zip(numbers, arrays, strict=False):
            self._look(number, array, values)
        found = zip((name for name in names if name in self.numbers), arrays, strict=False)
        return dict(found)

    def row(self, value: bytes) -> dict[str, Any]:
        """One value.

        Raises:
            CoreError: it is not of this schema, or damaged.
        """
        found = self.layout.decode_one(value)
        if None in found:
            for number in self.required:
                if found[number] is None:
                    name = self.schema.names[number]
                    raise core.DamagedValueError(f"its column {name!r} is null")
        return dict(zip(self.schema.names, found, strict=True))

    def _look(self, number: int, array: pa.Array, values: pa.BinaryArray) -> None:
        """Refuse what the core does not look at: text that is none, nulls where none may be."""
        name = self.schema.names[number]
        if number in self.required and array.null_count > values.null_count:
            raise core.DamagedValueError(f"its column {name!r} is null", _first_null(array, values))
        try:
            array.validate(full=True)
        except pa.ArrowInvalid as error:
            raise core.CoreError(f"column {name!r}: {error}") from None


class ValueCodec:
    """Values of a topic, to bytes and back. Picklable, and shared by threads.

    Attributes:
        stages: the schemas that the topic had, by their numbers from 1 on.
        schema: the last one, by which values are sent and read.
        columns: the same as it is read: every column may be null.
        defaults: of its columns; a value that is sent without one has it.
    """

    def __init__(self, *stages: ValueStage) -> None:
        """Made by `value_codec`."""
        self.stages = stages
        self._stages = [_Stage(stage, number) for number, stage in enumerate(stages, 1)]
        last = self._stages[-1]
        self.schema = last.schema
        self.columns = pa.schema([field.with_nullable(True) for field in self.schema])
        self.defaults = last.defaults
        self._layout = last.layout
        self._required = last.required
        self._names = self.schema.names

    def __reduce__(self) -> tuple[Any, ...]:
        return value_codec, self.stages

    def __repr__(self) -> str:
        return f"<ValueCodec of {self.described}>"

    @property
    def described(self) -> str:
        """The columns for people, as (id int64, note string?, n int32 = 0)."""
        each = (
            f"{f.name} {type_name(f.type)}{'?' if f.nullable else ''}"
            + (f" = {self.defaults[f.name]!r}" if f.name in self.defaults else "")
            for f in self.schema
        )
        return f"({', '.join(each)})"

    def has(self, value: bytes, codec: ValueCodec) -> bool:
        """A value of another codec is a value of this one as it stands."""
        number = codec._number_of(value)
        return number is not None and self.stages[:number] == codec.stages[:number]

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
            elif not field.nullable and field.name not in self.defaults:
                raise SchemaError(
                    f"the data has no column {field.name!r}, which is not nullable; the values of "
                    f"the topic are {self.described}, the data has {', '.join(names) or 'none'}"
                )

    def encode(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        """Rows as values; of a row of nothing but nulls the value is null, whatever the columns
        that it lacks have for a default.

        Args:
            batch: columns as `require` takes them, in any order.

        Raises:
            SchemaError: it does not fit, or a null stands where none may.
            ValueError: the values are more than 2 GiB.
        """
        self.require(batch.schema)
        n, given = batch.num_rows, set(batch.schema.names)
        arrays = [self._column(batch, field, n) for field in self.schema]
        absent = _absent(
            [a for a, name in zip(arrays, self._names, strict=True) if name in given], n
        )
        for i in self._required:
            nulls = arrays[i].null_count - (0 if absent is None else absent.true_count)
            if nulls > 0:
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

    def _column(self, batch: pa.RecordBatch, field: pa.Field, n: int) -> pa.Array:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            return core.repeated(field.type, self.defaults.get(field.name), n)
        array = batch.column(at)
        require_valid(array, field.name)
        narrow = array.type == JSON or pa.types.is_time(array.type)  # not all that Arrow takes
        return array if array.type == field.type and not narrow else _cast(array, field)

    # -- out ---------------------------------------------------------------------------

    def decode(
        self, values: pa.BinaryArray, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """Values as rows of the last schema; of a null value all columns are null.

        Args:
            values: as `encode` makes them, by any schema of the topic.
            columns: those that are wanted, one at least; None for all.

        Raises:
            CorruptionError: a value is of no schema of the topic, or damaged.
            KeyError: there is no such column.
        """
        names = self._names if columns is None else list(columns)
        for name in names:
            if name not in self._stages[-1].numbers:
                raise KeyError(f"there is no column {name!r} in {self.described}")
        kept = pa.schema([self.columns.field(name) for name in names])
        try:
            arrays = self._arrays(values, names)
        except core.DamagedValueError as error:
            what = f"value {error.index} of {len(values)}"
            raise self._damaged(error, what) from None
        except core.CoreError as error:
            raise self._damaged(error, f"one of {len(values)} values") from None
        return pa.RecordBatch.from_arrays(arrays, schema=kept)

    def decode_one(self, value: bytes) -> dict[str, Any]:
        """One value as a dict.

        Raises:
            CorruptionError: it is of no schema of the topic, or damaged.
            ValueError: it has a date or time that Python has not.
        """
        last = len(self._stages)
        number = last if last == 1 else self._number_of(value) or last
        try:
            found = self._stages[number - 1].row(value)
        except core.CoreError as error:
            raise self._damaged(error, "a value") from None
        except OverflowError as error:
            raise ValueError(
                f"a value of {self.described}: {error}. poll_batch gives it as Arrow"
            ) from None
        return found if number == last else {**self._fills[number - 1], **found}

    def _number_of(self, value: bytes) -> int | None:
        """Return the number of a value's schema; None when the topic has none of it."""
        return self._heads.get(value[: core.VALUE_HEAD])

    @CachedProperty
    def _heads(self) -> dict[bytes, int]:
        """The numbers of schemas by what their values begin with."""
        return {each.layout.head: number for number, each in enumerate(self._stages, 1)}

    @CachedProperty
    def _fills(self) -> list[dict[str, Any]]:
        """By schema: what its values have in the columns of the last one, which it lacks perhaps.

        In the order of the last one: `decode_one` puts what a value has over it.
        """
        fills: list[dict[str, Any]] = []
        for number, stage in enumerate(self._stages):
            fill = dict.fromkeys(self._names)
            for later in reversed(self._stages[number + 1 :]):  # the first that has it says last
                fill.update({name: later.defaults.get(name) for name in later.numbers})
            fills.append({name: None if name in stage.numbers else fill[name] for name in fill})
        return fills

    def _arrays(self, values: pa.BinaryArray, names: Sequence[str]) -> list[pa.Array]:
        """Columns of values of any schemas."""
        if len(self._stages) == 1:
            found = self._stages[0].columns(values, names)
            return [found[name] for name in names]
        parts = list(self._by_stage(values))
        if len(parts) == 1:
            return self._of_stage(parts[0][0], values, names)
        made: list[list[pa.Array]] = []
        for number, rows in parts:
            try:
                made.append(self._of_stage(number, values.take(rows), names))
            except core.DamagedValueError as error:
                raise core.DamagedValueError(str(error), rows[error.index].as_py()) from None
        order = pc.sort_indices(pa.concat_arrays([rows for _, rows in parts]))
        return [pa.concat_arrays(each).take(order) for each in zip(*made, strict=True)]

    def _by_stage(self, values: pa.BinaryArray) -> Iterator[tuple[int, pa.Array]]:
        """Yield the numbers of the schemas that values are of, and which ones are; those of none
        are the last one's, which says what is wrong with them.
        """
        last = len(self._stages)
        heads = pc.binary_slice(values, 0, core.VALUE_HEAD).dictionary_encode()
        numbers = pa.array([self._heads.get(each, last) for each in heads.dictionary.to_pylist()])
        by_row = pc.fill_null(numbers.cast(pa.uint16()).take(heads.indices), last)
        for number in pc.unique(by_row).to_pylist() or [last]:
            yield number, pc.indices_nonzero(pc.equal(by_row, number))

    def _of_stage(
        self, number: int, values: pa.BinaryArray, names: Sequence[str]
    ) -> list[pa.Array]:
        """Columns of values of one schema, as the last one has them."""
        found = self._stages[number - 1].columns(values, names)
        if number == len(self._stages):
            return [found[name] for name in names]
        fills, absent = self._fills[number - 1], pc.is_null(values)
        arrays = []
        for name in names:
            kind = self.schema.field(name).type
            array = found.get(name)
            if array is None:
                either = [core.repeated(kind, fills[name], 1), pa.nulls(1, kind)]
                array = pa.concat_arrays(either).take(absent.cast(pa.uint8()))
            arrays.append(array.cast(kind))
        return arrays

    def _damaged(self, error: Exception, what: str) -> CorruptionError:
        return CorruptionError(
            f"{what} of schema {self.described} cannot be read: {error}. Nothing was returned. "
            "Check the store that it came from"
        )


def _first_null(array: pa.Array, values: pa.BinaryArray) -> int:
    found = pc.and_(pc.is_null(array), pc.is_valid(values))
    return int(pc.index(found, True).as_py())


def _cast(array: pa.Array, field: pa.Field) -> pa.Array:
    made = cast(pa.chunked_array([array]), field.type, field.name).combine_chunks()
    return pa.concat_arrays(made.chunks) if isinstance(made, pa.ChunkedArray) else made


def _absent(arrays: Sequence[pa.Array], n: int) -> pa.BooleanArray | None:
    """Find the rows that are nulls alone; None when no row is."""
    if not arrays:
        return pa.repeat(pa.scalar(True), n)
    if any(array.null_count == 0 for array in arrays):
        return None
    absent = pc.is_null(arrays[0])
    for array in arrays[1:]:
        absent = pc.and_(absent, pc.is_null(array))
    return absent if absent.true_count else None


@lru_cache(maxsize=256)
def value_codec(*stages: ValueStage | pa.Schema) -> ValueCodec:
    """The codec of a topic that had these schemas, the last one last."""
    return ValueCodec(*(e if isinstance(e, ValueStage) else ValueStage(e) for e in stages))


# -- stored form -----------------------------------------------------------------------


def to_document(stages: Sequence[ValueStage]) -> dict[str, Any]:
    """The schemas of values for JSON."""
    *former, last = (_stage_document(stage, number) for number, stage in enumerate(stages, 1))
    return {**last, "former": former} if former else last


def _stage_document(stage: ValueStage, number: int) -> dict[str, Any]:
    columns = [
        {"name": field.name, "type": type_name(field.type), "nullable": field.nullable}
        for field in stage.schema
    ]
    document = {"id": number, "columns": columns}
    if stage.defaults is not None:
        document["defaults"] = base64.b64encode(stage.defaults).decode()
    return document


def from_document(document: dict[str, Any]) -> tuple[ValueStage, ...]:
    """Return the schemas that `to_document` wrote down."""
    return tuple(_stage_of(each) for each in (*document.get("former", ()), document))


def _stage_of(document: dict[str, Any]) -> ValueStage:
    schema = pa.schema(
        [
            pa.field(each["name"], parse_type(each["type"]), each["nullable"])
            for each in document["columns"]
        ]
    )
    defaults = document.get("defaults")
    return ValueStage(schema, None if defaults is None else base64.b64decode(defaults))
