"""Between the columns of a table and those of Spark.

    bool, int8..int64, float32, float64        boolean, byte, short, int, long, float, double
    uint8, uint16, uint32, uint64              short, int, long, decimal(20, 0)
    string, binary, date32                     string, binary, date
    timestamp[us], timestamp[us, tz]           timestamp_ntz, timestamp
    decimal128(p, s), list<T>                  decimal(p, s), array<T>
    time64[us], time32[ms], time32[s]          time(6), time(3), time(0)
    duration[us]                               interval day to second
    map<K, V>, struct<...>                     map<K, V>, struct<...>
    json, uuid                                 string

Spark reads Arrow buffers by the layout that it expects and nothing else, so what goes to it
has exactly its schema: order, nullability, time zone, the names of list elements. What comes
from it goes by column name, and is cast where that loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from txnkv.core import JSON, UUID, repeated, type_name, uuid_texts
from txnkv.core import compute as pc
from txnkv.errors import SchemaChangedError, SchemaError
from txnkv.tables import Normaliser, Schema, widened

_SIMPLE: Final[dict[pa.DataType, spark.DataType]] = {
    pa.bool_(): spark.BooleanType(),
    pa.int8(): spark.ByteType(),
    pa.int16(): spark.ShortType(),
    pa.int32(): spark.IntegerType(),
    pa.int64(): spark.LongType(),
    pa.uint8(): spark.ShortType(),
    pa.uint16(): spark.IntegerType(),
    pa.uint32(): spark.LongType(),
    pa.uint64(): spark.DecimalType(20, 0),
    pa.float32(): spark.FloatType(),
    pa.float64(): spark.DoubleType(),
    pa.string(): spark.StringType(),
    pa.binary(): spark.BinaryType(),
    pa.date32(): spark.DateType(),
    pa.time64("us"): spark.TimeType(6),
    pa.time32("ms"): spark.TimeType(3),
    pa.time32("s"): spark.TimeType(0),
    pa.duration("us"): spark.DayTimeIntervalType(),
    JSON: spark.StringType(),
    UUID: spark.StringType(),
}


def spark_schema(table: Schema, columns: Sequence[str] | None) -> spark.StructType:
    """The schema that Spark sees.

    Args:
        columns: the projection, in order; None for all columns.

    Raises:
        SchemaError: there is no such column, or Spark has no type for it.
    """
    names = table.names if columns is None else list(columns)
    for name in names:
        table.position(name)
    return spark.StructType(
        [
            spark.StructField(name, spark_type(table.columns[name].type, name), nullable)
            for name in names
            for nullable in [table.columns[name].nullable]
        ]
    )


def spark_type(kind: pa.DataType, name: str) -> spark.DataType:
    """The type that Spark has for a column's.

    Raises:
        SchemaError: there is none.
    """
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if pa.types.is_timestamp(kind):
        return spark.TimestampNTZType() if kind.tz is None else spark.TimestampType()
    if pa.types.is_list(kind):
        return spark.ArrayType(spark_type(kind.value_type, name), True)
    if pa.types.is_map(kind):
        return spark.MapType(spark_type(kind.key_type, name), spark_type(kind.item_type, name))
    if pa.types.is_struct(kind):
        return spark.StructType(
            [spark.StructField(field.name, spark_type(field.type, name)) for field in kind]
        )
    if pa.types.is_decimal128(kind) and 0 <= kind.scale <= kind.precision:
        return spark.DecimalType(kind.precision, kind.scale)
    raise SchemaError(
        f"column {name!r} is {type_name(kind)}, which Spark has no type for: leave it out by "
        "option columns"
    )


def arrow_schema(schema: spark.StructType) -> pa.Schema:
    """The Arrow schema that Spark expects for its own.

    Raises:
        SchemaError: it has a type that Arrow has not.
    """
    try:
        return to_arrow_schema(schema, timezone="UTC")
    except Exception as error:  # pyspark raises several kinds, by type and version
        raise SchemaError(f"Spark cannot hand over {_untyped(schema)}: {error}") from None


def _untyped(schema: spark.StructType) -> str:
    for field in schema:
        kind = field.dataType.simpleString()
        if "void" in kind and kind != "void":
            typed = kind.replace("void", "int")
            return f"column {field.name!r}, {kind}; say of what, as CAST({field.name} AS {typed})"
    return schema.simpleString()


def require_promised(table: str, now: Schema, promised: pa.Schema) -> None:
    """Refuse to read columns of a table that are not what Spark was promised.

    Args:
        table: its name.
        now: its schema as it is to be read.
        promised: what Spark expects; names that are not of the table are no affair of this.

    Raises:
        SchemaChangedError: it was altered meanwhile.
    """
    for field in promised:
        if field.name in now.columns:
            (found,) = arrow_schema(spark_schema(now, [field.name]))
            if found.type == field.type and (field.nullable or not found.nullable):
                continue
            said = f"is {found.type}{'?' if found.nullable else ''} now"
        else:
            said = "is not there any more"
        raise SchemaChangedError(
            f"table {table!r} was altered since Spark planned to read it: column {field.name!r} "
            f"{said}. Make the data frame or the query anew"
        )


class FormerRows:
    """Brings rows of a table of before it was altered into the columns that it has now. Picklable.

    Args:
        table: its name.
        then, now: its schema when the rows were there, and the present one.
        promised: what Spark expects; names of the present schema.
    """

    def __init__(self, table: str, then: Schema, now: Schema, promised: pa.Schema) -> None:
        there = {id: name for name, id in then.ids.items()}
        self._table = table
        self._columns: list[tuple[pa.Field, str | None, Any]] = []
        for field in promised:
            name, found = field.name, now.stored(field.name, there)
            former = None if found is None else there[found[0]]
            own = pa.field(name, now.columns[name].type, field.nullable)
            self._columns.append((own, former, now.fill(name)))

    @property
    def names(self) -> list[str]:
        """The columns that are to be read, by the names that they had."""
        return [former for _, former, _ in self._columns if former is not None]

    def brought(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the promised columns of rows that were read with `names`.

        Raises:
            SchemaChangedError: a row has no value for a column that may not be null by now.
        """
        arrays = []
        for field, former, fill in self._columns:
            if former is None:
                array = repeated(field.type, fill, batch.num_rows)
            else:
                array = widened(batch.column(former), field.type)
            if array.null_count and not field.nullable:
                raise SchemaChangedError(
                    f"table {self._table!r} was altered, and column {field.name!r} may not be "
                    "null any more: but it is in a row of a batch that was planned before. Alter "
                    f"it by nullable={{{field.name!r}: True}}, run the query until that batch is "
                    "done, and take it back"
                )
            arrays.append(array)
        return arrays


class ToSpark:
    """Brings batches of a table into the schema that Spark expects.

    Args:
        expected: `arrow_schema` of what Spark was promised.
    """

    def __init__(self, expected: pa.Schema) -> None:
        self._expected = expected

    def batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """One batch with columns of the same names in the same order. Copies only casts."""
        arrays = [
            array
            if array.type.equals(field.type) and not pa.types.is_nested(field.type)
            else as_spark_has_it(array, field.type)
            for array, field in zip(batch.columns, self._expected, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._expected)


def as_spark_has_it(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column cast to the type that Spark has for it."""
    return uuid_texts(array) if array.type == UUID else array.cast(kind)


class Retyped:
    """Gives batches of Spark types that Spark does not have.

    Args:
        types: as columns are to have them, by name; others stay as they are.
        given: the schema of Spark's batches.
    """

    def __init__(self, types: Mapping[str, pa.DataType], given: pa.Schema) -> None:
        self._cast: list[int] = []
        fields = []
        for position, field in enumerate(given):
            wanted = types.get(field.name)
            kind = field.type if wanted is None else _unsigned(field.type, wanted)
            if kind != field.type:
                self._cast.append(position)
            fields.append(pa.field(field.name, kind, field.nullable))
        self.schema: pa.Schema = pa.schema(fields)

    def reader(self, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatchReader:
        """The batches as one stream, which the engine cuts as it likes."""
        return pa.RecordBatchReader.from_batches(self.schema, map(self._batch, batches))

    def _batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self._cast:
            return batch
        arrays: list[Any] = list(batch.columns)
        for position in self._cast:
            field = self.schema.field(position)
            try:
                arrays[position] = pc.cast(arrays[position], field.type)
            except pa.ArrowInvalid as error:
                raise SchemaError(f"column {field.name!r} is {field.type}: {error}") from None
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


class FromSpark(Retyped):
    """Brings the batches of a task into a form that `Session.write` takes.

    Args:
        table: the table's schema.
        given: the schema of Spark's batches.
        op: what is done with the rows.

    Raises:
        SchemaError: a column is unknown, missing, or its type does not fit.
    """

    def __init__(self, table: Schema, given: pa.Schema, op: str = "insert") -> None:
        super().__init__({name: column.type for name, column in table.columns.items()}, given)
        try:
            Normaliser(table, self.schema, op)
        except SchemaError as error:
            raise _advised(error) from None


def _advised(error: SchemaError) -> SchemaError:
    """The error with Spark's way to mend it, in place of pyarrow's."""
    for advice, kind in (("clock is meant", "TIMESTAMP_NTZ"), ("time it is", "TIMESTAMP")):
        found, there, _ = str(error).partition(f": say whose {advice}")
        if there:
            return SchemaError(f"{found}: CAST(... AS {kind}) takes the session's time zone")
    return error


def _unsigned(given: pa.DataType, column: pa.DataType) -> pa.DataType:
    """`given`, with uint64 for the decimals that Spark holds it in."""
    if column == pa.uint64() and pa.types.is_decimal128(given) and given.scale == 0:
        return column
    if pa.types.is_list(column) and pa.types.is_list(given):
        inner = _unsigned(given.value_type, column.value_type)
        return given if inner == given.value_type else pa.list_(inner)
    if pa.types.is_map(column) and pa.types.is_map(given):
        return pa.map_(
            _unsigned(given.key_type, column.key_type), _unsigned(given.item_type, column.item_type)
        )
    if pa.types.is_struct(column) and pa.types.is_struct(given):
        there = {field.name: field.type for field in column}
        kinds = [_unsigned(each.type, there.get(each.name, each.type)) for each in given]
        return pa.struct([each.with_type(kind) for each, kind in zip(given, kinds, strict=True)])
    return given
