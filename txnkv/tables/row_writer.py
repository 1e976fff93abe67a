"""A table as single rows are written to it: checked at the call, where each goes, as what bytes.

Made once for a table and process. What bulk writes do with arrays and C, this does for one row
with Python values, without an array in between: a key of one int64 costs about a microsecond.

A session looks at each value of each row that it is given, so that a wrong one is refused where
it was given. Asked column by column in Python that costs more than everything behind it, so for
each table the checks are written out as one expression and compiled once. For
(id int64, name string?):

    def check(row):
        if type(row) is dict and len(row) == 2:
            try:
                row = (row['id'], row['name'])
            except KeyError:
                return slow(row)
        if type(row) is tuple and len(row) == 2:
            v0, v1 = row
            if ((type(v0) is int and -0x8000000000000000 <= v0 <= 0x7FFFFFFFFFFFFFFF)
                and (v1 is None or type(v1) is str and (v1.isascii() or sound(v1)))):
                return row
        return slow(row)

Where many whole rows are added to one list, `adder` gives the same with the list's `append` in it.

What it does not know at sight goes the slow way, which refuses or accepts it and turns it into
what the column's type gives back, so that those behind meet only such values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from operator import itemgetter
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from txnkv import core
from txnkv.errors import SchemaError
from txnkv.tables.arrow_input import MISSING, row_values
from txnkv.tables.operations import DELETES, INSERTS
from txnkv.tables.schema import Schema, normal
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tablets import Tablet

Values = tuple[Any, ...]
Check = Callable[[Any], Values]
Adder = Callable[[Any], None]

_FLOAT32_MAX: Final = 3.4028234663852886e38
_DAYS: Final = (1 << 63) // 86_400_000_000 - 1
"""Durations of fewer days fit 64 bits of microseconds."""


def nothing(taken: object) -> None:
    """Take a row or message, and do nothing: where there is no short cut."""


class RowChecker:
    """The checks of one table's rows, a function for each operation."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._checks: dict[str, Check] = {}
        self._adders: dict[str, Callable[[Adder, list[float], Adder], Adder]] = {}

    def of(self, op: str) -> Check:
        """The function that takes a row and gives its values in schema order.

        It takes what `arrow_input.row_values` takes, of a delete the key, and gives Python values
        as the column's type gives them back, `MISSING` where an upsert or update has none.

        Raises:
            SchemaError: a column is unknown or missing, or a value does not fit.
            TypeError: it is no row.
        """
        check = self._checks.get(op)
        if check is None:
            check = self._checks[op] = self._make(op)
        return check

    def adder(self, op: str, append: Adder, room: list[float], more: Adder) -> Adder:
        """A function that checks a row, as `of(op)` does, and appends it.

        Args:
            op: the operation.
            append: takes a row that was known at sight, while there is room.
            room: the bytes that rows may still take, one number; it takes from them.
            more: takes any other row, once it is checked.
        """
        made = self._adders.get(op)
        if made is None:
            space = {"check": self.of(op), **self._space}
            exec(compile(self._source_of_adder(op), "<row adder>", "exec"), space)
            made = self._adders[op] = space["adder"]
        return made(append, room, more)

    def _source_of_adder(self, op: str) -> str:
        schema = self._schema
        conditions = [_condition(schema, name, f"v{i}") for i, name in enumerate(schema.names)]
        variables = "".join(f"v{i}, " for i in range(len(conditions)))
        texts = [i for i, column in enumerate(schema.arrow) if _is_text(column.type)]
        size = " + ".join([str(8 * len(conditions)), *(f"len(v{i} or '')" for i in texts)])
        return (
            "def adder(append, room, more):\n"
            "    def add(row):\n"
            f"        if type(row) is tuple and len(row) == {len(conditions)}:\n"
            f"            {variables}= row\n"
            f"            if room[0] > 0 and {' and '.join(conditions)}:\n"
            "                append(row)\n"
            f"                room[0] -= {size}\n"
            "                return\n"
            "        more(check(row))\n"
            "    return add\n"
        )

    @property
    def _space(self) -> dict[str, Any]:
        return {"sound": _sound, **_NAMES}

    def _make(self, op: str) -> Check:
        schema = self._schema
        key = op in DELETES
        names = list(schema.primary_key) if key else schema.names
        conditions = [_condition(schema, name, f"v{i}") for i, name in enumerate(names)]
        tests = [_test(schema, name) for name in names]

        def slow(row: Any) -> Values:
            values = row_values(schema, row, op)
            return tuple(
                value if value is MISSING or test(value) else _normal(schema, name, value)
                for value, name, test in zip(values, names, tests, strict=True)
            )

        source = _source_of_key(conditions) if key else _source_of_row(names, conditions)
        space: dict[str, Any] = {"slow": slow, **self._space}
        exec(compile(source, "<row checker>", "exec"), space)
        made: Check = space["check"]
        return made


Shape = tuple[bool, ...] | None
"""Which columns rows do not name; None where they name all."""


def shape_of(values: Values) -> Shape:
    """The shape of a row of an upsert or update."""
    return tuple(value is MISSING for value in values) if MISSING in values else None


def to_batch(schema: Schema, rows: Sequence[Values], op: str) -> pa.RecordBatch:
    """Checked rows of one shape as a batch of the columns that they name.

    Raises:
        SchemaError: a value does not fit its column.
    """
    names = list(schema.primary_key) if op in DELETES else schema.names
    arrays = []
    kept = []
    for i, name in enumerate(names):
        # A column at a time: `zip(*rows)` would make an iterator for each row.
        values = list(map(itemgetter(i), rows))
        if values[0] is MISSING:
            continue
        kind = schema.columns[name].type
        try:
            arrays.append(pa.array(values, kind))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError) as error:
            raise SchemaError(f"column {name!r} is {kind}: {error}") from None
        kept.append(schema.arrow.field(name))
    return pa.record_batch(arrays, schema=pa.schema(kept))


# -- the slow way ----------------------------------------------------------------------


def _normal(schema: Schema, name: str, value: Any) -> Any:
    return None if value is None else normal(name, schema.columns[name].type, value)


def _test(schema: Schema, name: str) -> Callable[[Any], bool]:
    space: dict[str, Any] = {"sound": _sound, **_NAMES}
    made: Callable[[Any], bool] = eval(f"lambda v: {_condition(schema, name, 'v')}", space)
    return made


def _sound(text: str) -> bool:
    """A text that has an encoding: no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- the source ------------------------------------------------------------------------

_NAMES: Final[dict[str, Any]] = {
    "UTC": UTC,
    "UUID": UUID,
    "date": date,
    "datetime": datetime,
    "time": time,
    "timedelta": timedelta,
}


def _source_of_row(names: Sequence[str], conditions: Sequence[str]) -> str:
    n = len(names)
    values = "".join(f"row[{name!r}], " for name in names)
    variables = "".join(f"v{i}, " for i in range(n))
    return (
        "def check(row):\n"
        f"    if type(row) is dict and len(row) == {n}:\n"
        "        try:\n"
        f"            row = ({values})\n"
        "        except KeyError:\n"
        "            return slow(row)\n"
        f"    if type(row) is tuple and len(row) == {n}:\n"
        f"        {variables}= row\n"
        f"        if {' and '.join(conditions)}:\n"
        "            return row\n"
        "    return slow(row)\n"
    )


def _source_of_key(conditions: Sequence[str]) -> str:
    if len(conditions) == 1:
        return f"def check(v0):\n    return (v0,) if {conditions[0]} else slow(v0)\n"
    n = len(conditions)
    return (
        "def check(row):\n"
        f"    if type(row) is tuple and len(row) == {n}:\n"
        f"        {', '.join(f'v{i}' for i in range(n))} = row\n"
        f"        if {' and '.join(conditions)}:\n"
        "            return row\n"
        "    return slow(row)\n"
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _condition(schema: Schema, name: str, v: str) -> str:
    """An expression: the variable holds a value as the column gives it back."""
    column = schema.columns[name]
    assert isinstance(column.type, pa.DataType)
    exact = _exact(column.type, v)
    return f"({v} is None or {exact})" if column.nullable else f"({exact})"


def _exact(kind: pa.DataType, v: str) -> str:
    is_a = pa.types
    if is_a.is_integer(kind):
        bits = kind.bit_width
        low = 0 if is_a.is_unsigned_integer(kind) else -(1 << (bits - 1))
        return f"type({v}) is int and {low} <= {v} <= {low + (1 << bits) - 1}"
    if is_a.is_float64(kind):
        return f"type({v}) is float"
    if is_a.is_float32(kind):
        return f"type({v}) is float and -{_FLOAT32_MAX!r} <= {v} <= {_FLOAT32_MAX!r}"
    if is_a.is_boolean(kind):
        return f"type({v}) is bool"
    if is_a.is_string(kind):
        return f"type({v}) is str and ({v}.isascii() or sound({v}))"
    if is_a.is_binary(kind):
        return f"type({v}) is bytes"
    if is_a.is_date32(kind):
        return f"type({v}) is date"
    if is_a.is_time(kind):
        tick = {"s": 1_000_000, "ms": 1_000, "us": 1}[kind.unit]
        return f"type({v}) is time and {v}.tzinfo is None and {v}.microsecond % {tick} == 0"
    if is_a.is_duration(kind):
        return f"type({v}) is timedelta and -{_DAYS} < {v}.days < {_DAYS}"
    if kind == core.UUID:
        return f"type({v}) is UUID"
    if is_a.is_timestamp(kind) and kind.tz is None:
        return f"type({v}) is datetime and {v}.tzinfo is None"
    if is_a.is_timestamp(kind) and kind.tz == "UTC":
        return f"type({v}) is datetime and {v}.tzinfo is UTC"
    return "False"


Place = Callable[[Values, bytes], int]
"""From the values of a key and its bytes to the tablet's number."""


class RowWriter:
    """Keys, values and tablets of one table's rows. Shared by threads.

    Attributes:
        checker: makes the functions that check rows.
        rows: the native codec of whole rows.
        reader: of rows by key, where no step of Python is needed.
        key_of: the key's values of a row in schema order.
        values_of: the other columns' values.
    """

    def __init__(self, table: TableInfo, tablets: Sequence[Tablet]) -> None:
        schema = table.schema
        self.table = table
        self.schema = schema
        self.checker = RowChecker(schema)
        self.tablets = tablets
        self.codec = self.tablets[0].codec
        self.layout = self.tablets[0].layout
        names = schema.names
        types = {name: column.type for name, column in schema.columns.items()}
        nullable = [name for name, column in schema.columns.items() if column.nullable]
        self.rows = core.row_table(types, nullable, schema.primary_key)
        self.key_of = _tuple_getter([names.index(name) for name in schema.primary_key])
        self.values_of = _tuple_getter(
            [names.index(name) for name in names if name not in schema.primary_key]
        )
        self._place = _placing(table)
        ids = [each for tablet in tablets for each in (tablet.at_hand, tablet.id)]
        self.reader = core.RowReader(self.rows, tuple(ids), _is_hashed(table))
        self._names = names
        stored = [*schema.primary_key, *schema.value_columns]
        self._in_order = _tuple_getter([stored.index(name) for name in names])

    def key(self, values: Values) -> bytes:
        """The encoded key of a key's values."""
        return self.codec.encode_one(values)

    def tablet(self, values: Values, key: bytes) -> Tablet:
        """Return the tablet of the row with this key."""
        if self._place is None:
            return self.tablets[0]
        return self.tablets[self._place(values, key)]

    def row(self, key: Values, values: Values) -> dict[str, Any]:
        """A row by column, in schema order, from the key's values and the other columns'."""
        return dict(zip(self._names, self._in_order(key + values), strict=True))

    def adapted(self, rows: Sequence[Values], op: str, former: RowWriter) -> Sequence[Values]:
        """Checked rows of another schema of the table, as rows of this one: without columns that it
        has not; and of those that are new an insert has the default, other operations nothing.
        """
        if former.schema is self.schema or op in DELETES:
            return rows
        at = {former.schema.ids[name]: i for i, name in enumerate(former.schema.names)}
        sources = []
        for name, column in self.schema.columns.items():
            new = column.default if op in INSERTS else MISSING
            sources.append((at.get(self.schema.ids[name]), new))
        return [tuple(new if i is None else row[i] for i, new in sources) for row in rows]

    def completed(self, values: Values, old: Values) -> Values:
        """The columns beside the key, those that are `MISSING` as they were."""
        return tuple(
            before if value is MISSING else value for value, before in zip(values, old, strict=True)
        )

    def defaults(self, values: Values) -> Values | str:
        """The columns beside the key of a new row; or the name of one that has to be given."""
        filled = []
        for name, value in zip(self.schema.value_columns, values, strict=True):
            column = self.schema.columns[name]
            if value is MISSING:
                value = column.default
                if value is None and not column.nullable:
                    return name
            filled.append(value)
        return tuple(filled)


def _tuple_getter(positions: Sequence[int]) -> Callable[[Values], Values]:
    if not positions:
        return itemgetter(slice(0))
    if list(positions) == list(range(positions[0], positions[0] + len(positions))):
        return itemgetter(slice(positions[0], positions[0] + len(positions)))
    return itemgetter(*positions)


def _is_hashed(table: TableInfo) -> bool:
    """Return True when the hash of a whole key says which tablet it is in."""
    of = table.partitioning
    whole = [tuple(part.columns) == table.schema.primary_key for part in of.hashes]
    return of.ranges is None and whole == [True]


def _placing(table: TableInfo) -> Place | None:
    """Return the function that places keys; None where there is one tablet."""
    partitioning, schema = table.partitioning, table.schema
    if partitioning.tablets == 1:
        return None
    number_of: list[tuple[int, Place]] = []
    if partitioning.ranges is not None:
        bounds = partitioning.encoded_bounds()
        encode = _prefix_encoder(schema, partitioning.ranges.columns)

        def by_range(values: Values, key: bytes) -> int:
            return bisect_right(bounds, encode(values, key))

        number_of.append((len(bounds) + 1, by_range))
    for part in partitioning.hashes:
        number_of.append((part.buckets, _by_hash(schema, part.columns, part.buckets)))

    def place(values: Values, key: bytes) -> int:
        number = 0
        for count, of in number_of:
            number = number * count + of(values, key)
        return number

    return place if len(number_of) > 1 else number_of[0][1]


def _by_hash(schema: Schema, columns: Sequence[str], buckets: int) -> Place:
    encode = _prefix_encoder(schema, columns)

    def by_hash(values: Values, key: bytes) -> int:
        number: int = core.hash_partition(core.Keys.one(encode(values, key)), buckets)[0].as_py()
        return number

    return by_hash


def _prefix_encoder(schema: Schema, columns: Sequence[str]) -> Callable[[Values, bytes], bytes]:
    """The bytes of some key columns by themselves."""
    if tuple(columns) == schema.primary_key:
        return lambda values, key: key
    codec = core.KeyCodec([schema.columns[name].type for name in columns])
    of = _tuple_getter([schema.primary_key.index(name) for name in columns])
    return lambda values, key: codec.encode_one(of(values))
