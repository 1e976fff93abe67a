"""A table as single rows are written to it: checked at the call, where each goes, as what bytes.

Made once for a table and process. What bulk writes do with arrays and C, this does for one row
with Python values, without an array in between: a key of one int64 costs about a microsecond.

A session looks at each value of each row that it is given, so that a wrong one is refused where
it was given. Asked column by column in Python that costs more than everything behind it, so
`core.RowCheck` asks in C, and `core.RowTable` makes the bytes.

What it does not know at sight goes the slow way, which refuses or accepts it and turns it into
what the column's type gives back, so that those behind meet only such values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import pyarrow as pa

from txnkv import core
from txnkv.errors import SchemaError
from txnkv.storage import CachedProperty
from txnkv.tables.arrow_input import MISSING, row_values
from txnkv.tables.operations import DELETES, INSERTS, PARTIAL
from txnkv.tables.schema import Schema, normal
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.table_index import TableIndex, Values, tuple_getter
from txnkv.tables.tablets import Tablet

Adder = Callable[[Any], None]


def nothing(taken: object) -> None:
    """Take a row or message, and do nothing: where there is no short cut."""


class RowChecker(dict[str, core.RowCheck]):
    """The checks of one table's rows, by operation; each is made when it is asked for.

    `checker[op].take(row)` gives the values of a row in schema order, of a delete those of the key,
    as the column's type gives them back, and `MISSING` where an upsert or update has none. It takes
    what `arrow_input.row_values` takes, and raises SchemaError (a column is unknown or missing, or
    a value does not fit) and TypeError (it is no row).

    Attributes:
        schema: of the table.
        rows: the native codec of whole rows.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        types = {name: column.type for name, column in schema.columns.items()}
        nullable = [name for name, column in schema.columns.items() if column.nullable]
        self.rows = core.row_table(types, nullable, schema.primary_key, MISSING)

    def __missing__(self, op: str) -> core.RowCheck:
        schema, fits = self.schema, self.rows.fits
        names = list(schema.primary_key) if op in DELETES else schema.names
        at = [schema.names.index(name) for name in names]

        def slow(row: Any) -> Values:
            return tuple(
                value if value is MISSING or fits(i, value) else self._normal(i, name, value)
                for i, name, value in zip(at, names, row_values(schema, row, op), strict=True)
            )

        made = self[op] = core.RowCheck(self.rows, slow, op in DELETES, op in PARTIAL)
        return made

    def _normal(self, i: int, name: str, value: Any) -> Any:
        column = self.schema.columns[name]
        if column.type == core.JSON and isinstance(value, dict | list):
            with suppress(TypeError, ValueError):  # said below
                if self.rows.fits(i, text := core.json_of(value)):
                    return text
        found = None if value is None else normal(name, column.type, value)
        if found is None and not column.nullable:  # of Arrow's nulls one is no None
            raise SchemaError(f"column {name!r} is not nullable: give it a value")
        return found


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


def _known(values: Values) -> Values | None:
    """The values that are to be unique; None where they need not be, () where some are not told."""
    if MISSING not in values:
        return None if None in values else values
    return None if all(value is MISSING for value in values) else ()


Place = Callable[[Values, bytes], int]
"""From the values of a key and its bytes to the tablet's number."""


class RowWriter:
    """Keys, values and tablets of one table's rows. Shared by threads.

    Attributes:
        checker: checks rows, by operation.
        rows: the native codec of whole rows.
        reader: of rows by key, where no step of Python is needed.
        lone: the tablet, where there is one.
        key_of: the key's values of a row in schema order.
        native_entries: C writes its indexes, too; where that was asked for.
    """

    native_entries = False

    def __init__(
        self,
        table: TableInfo,
        tablets: Sequence[Tablet],
        tables: object,
        indexes: Callable[[], Sequence[TableIndex]],
        writer_of: Callable[[TableInfo], RowWriter],
    ) -> None:
        schema = table.schema
        self.table = table
        self.schema = schema
        self.checker = RowChecker(schema)
        self.tablets = tablets
        self._ask_indexes, self._writer_of = indexes, writer_of
        self.codec = self.tablets[0].codec
        self.layout = self.tablets[0].layout
        names = schema.names
        self.rows = self.checker.rows
        self.key_of = tuple_getter([names.index(name) for name in schema.primary_key])
        self._place = _placing(table)
        each = [one for tablet in tablets for one in (tablet.at_hand, tablet.id, tablet)]
        self.reader = core.RowReader(
            self.rows, tables, tuple(each), table.since, _places(table), bool(schema.indexes)
        )
        self.lone = None if self._place is not None else self.tablets[0]

    @CachedProperty
    def is_plain(self) -> bool:
        """Return True where C makes bytes of all values by itself."""
        of = pa.types
        return self._has_only(
            of.is_integer, of.is_floating, of.is_boolean, of.is_string, of.is_binary
        )

    @CachedProperty
    def is_flat(self) -> bool:
        """Return True where it makes them of all, though it asks Python about some."""
        of = pa.types
        return self.is_plain or self._has_only(
            of.is_primitive, of.is_string, of.is_binary, of.is_decimal
        )

    def _has_only(self, *kinds: Callable[[pa.DataType], bool]) -> bool:
        types = [column.type for column in self.schema.columns.values()]
        return all(any(is_one(type_) for is_one in kinds) for type_ in types)

    @CachedProperty
    def indexes(self) -> Sequence[TableIndex]:
        """The indexes that are written with each row.

        Raises:
            SchemaChangedError: the table has not all of them any more.
        """
        found, place, known = self._ask_indexes(), self.schema.position, []
        for each in found:
            of = self._writer_of(each.tablet.table)
            if each.ready and of.is_flat:
                columns = tuple(map(place, (*each.key, *each.rest)))
                known.append((of.reader, columns, tuple(map(place, each.beside)), each.checked))
        if len(known) == len(found):
            self.reader.index(tuple(known))
            self.native_entries = True
        return found

    @CachedProperty
    def indexed(self) -> Callable[[bytes], Values]:
        """Decode the columns beside the key, as far as indexes take entries from them."""
        columns = {name for index in self.indexes for name in index.columns}
        names = self.schema.value_columns
        return self.layout.decoder([i for i, name in enumerate(names) if name in columns])

    @CachedProperty
    def may_refuse(self) -> bool:
        """Also a whole row that is upserted may be refused."""
        return any(index.checked for index in self.indexes)

    def counts_singly(self, op: str) -> bool:
        """Tell whether rows of an operation count one after the other and never as a whole: by a
        unique index one may be refused for what another has, or has given up.
        """
        return op not in DELETES and self.may_refuse

    def to_batches(self, op: str, rows: Sequence[Values]) -> Iterator[pa.RecordBatch]:
        """Rows of one shape as batches, of which each may count as a whole: where they count one
        after the other, no two of a batch have a key in common, or values that are to be unique.
        """
        checked = [each for each in self.indexes if each.checked] if self.counts_singly(op) else []
        taken: list[Callable[[Values], Values]] = [
            self.key_of,
            *(tuple_getter(each.positions) for each in checked),
        ]
        begin, seen = 0, set[Any]()
        for at, row in enumerate(rows if checked else ()):
            marks = {(i, _known(of(row))) for i, of in enumerate(taken)}
            marks -= {(i, None) for i in range(1, len(taken))}
            if marks & seen:
                yield to_batch(self.schema, rows[begin:at], op)
                begin, seen = at, set()
            seen |= marks
        yield to_batch(self.schema, rows[begin:], op)

    def key(self, values: Values) -> bytes:
        """The encoded key of a key's values."""
        return self.codec.encode_one(values)

    def tablet_of(self, row: Values, key: bytes) -> Tablet:
        """Return the tablet of a whole row in schema order, whose key this is."""
        if self._place is None:
            return self.tablets[0]
        return self.tablets[self._place(self.key_of(row), key)]

    def tablet(self, values: Values, key: bytes) -> Tablet:
        """Return the tablet of the row with this key."""
        if self._place is None:
            return self.tablets[0]
        return self.tablets[self._place(values, key)]

    def adapted(
        self, rows: list[Values], op: str, former: RowWriter
    ) -> tuple[list[Values], list[tuple[Values, str]]]:
        """Checked rows of another schema of the table, as rows of this one: without columns that it
        has not; and of those that are new an insert has the default, other operations nothing.

        Returns:
            Those, and others with the name of a column that is null there and may not be any more.
        """
        if former.schema is self.schema or op in DELETES:
            return rows, []
        at = {former.schema.ids[name]: i for i, name in enumerate(former.schema.names)}
        sources: list[tuple[int | None, Any]] = []
        required = []
        for name, column in self.schema.columns.items():
            found = self.schema.stored(name, at)
            new = column.default if op in INSERTS else MISSING
            if not column.nullable:
                required.append((len(sources), name))
            sources.append((None if found is None else at[found[0]], new))
        made: list[Values] = []
        unfit: list[tuple[Values, str]] = []
        for row in rows:
            whole = tuple(new if i is None else row[i] for i, new in sources)
            lacks = next((name for i, name in required if whole[i] is None), None)
            if lacks is None:
                made.append(whole)
            else:
                unfit.append((whole, lacks))
        return made, unfit

    def with_defaults(self, values: Values) -> Values | str:
        """A new row, columns that are `MISSING` with their defaults; or the name of one that has to
        be given.
        """
        filled = []
        for (name, column), value in zip(self.schema.columns.items(), values, strict=True):
            if value is MISSING:
                value = column.default
                if value is None and not column.nullable:
                    return name
            filled.append(value)
        return tuple(filled)


def _places(table: TableInfo) -> tuple[tuple[int, int, Any], ...]:
    """Return by which bytes of an encoded key its tablet is found, as `core.RowReader` takes it:
    none where there is one tablet, or the bytes have no fixed place.
    """
    of, found = table.partitioning, []
    cuts: list[tuple[Sequence[str], Any]] = [(part.columns, part.buckets) for part in of.hashes]
    if of.ranges is not None:
        cuts.insert(0, (of.ranges.columns, tuple(of.encoded_bounds())))
    for columns, how in cuts:
        at = _place_in_key(table.schema, tuple(columns))
        if at is None:
            return ()
        found.append((*at, how))
    return tuple(found) if of.tablets > 1 else ()


def _place_in_key(schema: Schema, columns: tuple[str, ...]) -> tuple[int, int] | None:
    """Return where the bytes of some key columns begin, and how many they are, -1: all from there
    on; None where they are not together, or texts before them or in them have any length.
    """
    key = schema.primary_key
    first = key.index(columns[0])
    behind = first + len(columns)
    if key[first:behind] != columns:
        return None
    widths = [core.KeyCodec([schema.columns[name].type]).width for name in key[:behind]]
    if 0 in widths[:first]:
        return None
    if behind == len(key):
        return sum(widths[:first]), -1
    return None if 0 in widths else (sum(widths[:first]), sum(widths[first:]))


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
    of = tuple_getter([schema.primary_key.index(name) for name in columns])
    return lambda values, key: codec.encode_one(of(values))


def dicts(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch as dicts, as `get` gives them.

    Raises:
        OverflowError: a date or time is none that Python has.
    """
    of = {field.name: core.value_of(field.type) for field in batch.schema}
    instants = {name: value_of for name, value_of in of.items() if value_of is not None}
    if instants:  # pyarrow takes microseconds for each
        arrays = [
            column.view(core.number_type(column.type)) if name in instants else column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        batch = pa.record_batch(arrays, names=batch.schema.names)
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except OverflowError as error:
        raise OverflowError(
            f"a date or time that Python cannot name ({error}): read it as Arrow"
        ) from None
    for name, value_of in instants.items():
        for row in rows:
            if (number := row[name]) is not None:
                row[name] = value_of(number)
    return rows
