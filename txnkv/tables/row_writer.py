"""A table as single rows are written to it: where a row goes, and as what bytes.

Made once for a table and process. What bulk writes do with arrays and C, this does for one row
with Python values, without an array in between: a key of one int64 costs about a microsecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from txnkv import core
from txnkv.tables.arrow_input import MISSING
from txnkv.tables.row_checker import RowChecker, Values
from txnkv.tables.schema import Schema
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tablets import Tablet

Place = Callable[[Values, bytes], int]
"""From the values of a key and its bytes to the tablet's number."""


class RowWriter:
    """Keys, values and tablets of one table's rows. Shared by threads.

    Attributes:
        checker: makes the functions that check rows.
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
        self.key_of = _tuple_getter([names.index(name) for name in schema.primary_key])
        self.values_of = _tuple_getter(
            [names.index(name) for name in names if name not in schema.primary_key]
        )
        self._place = _placing(table)
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
        return lambda values: ()
    if len(positions) == 1:
        (at,) = positions
        return lambda values: (values[at],)
    if list(positions) == list(range(positions[0], positions[0] + len(positions))):
        return itemgetter(slice(positions[0], positions[0] + len(positions)))
    return itemgetter(*positions)


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
