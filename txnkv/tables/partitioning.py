"""The partitioning of a table: the tablet of each row.

A table is cut by hash, by range, or by both. Tablets are numbered range first:

    hash_partition("id", 2) and range_partition("day", [d1, d2])

                     day < d1    d1 <= day < d2    d2 <= day
    hash bucket 0       0              2               4
    hash bucket 1       1              3               5

Partition columns belong to the primary key, so that equal keys meet in one tablet. The
hash is `hash64` of the columns' key encoding, which is part of the on-disk format.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.errors import SchemaError, as_index, as_names, require_several
from txnkv.tables.schema import Schema, column_array

MAX_TABLETS = 1024


@dataclass(frozen=True)
class HashPartition:
    columns: tuple[str, ...]
    buckets: int


@dataclass(frozen=True)
class RangePartition:
    columns: tuple[str, ...]
    bounds: tuple[tuple[Any, ...], ...]


PartitionBy = HashPartition | RangePartition | Sequence[HashPartition | RangePartition] | None


def hash_partition(columns: str | Sequence[str], buckets: int) -> HashPartition:
    """Spread rows evenly over `buckets` tablets by a hash of key columns. A scan reads those alone
    in which the values lie that it wants of them, by "=" or a short "in".
    """
    names = tuple(as_names("columns", columns))
    if not names:
        raise ValueError("hash_partition needs at least one column")
    if not 1 <= (count := as_index("buckets", buckets)) <= MAX_TABLETS:
        raise ValueError(f"hash_partition takes 1 to {MAX_TABLETS} buckets, not {buckets!r}")
    return HashPartition(names, count)


def range_partition(columns: str | Sequence[str], bounds: Sequence[Any]) -> RangePartition:
    """Cut the table at each of `bounds`: a row equal to a bound lies above it.

    Args:
        columns: key columns.
        bounds: ascending values; tuples when there are several columns. n bounds make
            n + 1 ranges.
    """
    names = tuple(as_names("columns", columns))
    require_several("bounds", bounds, "values")
    if not names:
        raise ValueError("range_partition needs at least one column")
    rows = tuple(b if isinstance(b, tuple) else (b,) for b in bounds)
    if not rows:
        raise ValueError("range_partition needs at least one bound")
    for row in rows:
        if len(row) != len(names):
            raise ValueError(f"bound {row!r} has {len(row)} values for columns {', '.join(names)}")
    return RangePartition(names, rows)


@dataclass(frozen=True)
class Partitioning:
    """The partitioning of one table, ready to place rows."""

    schema: Schema
    hashes: tuple[HashPartition, ...] = ()
    ranges: RangePartition | None = None
    _bounds: core.Keys | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, schema: Schema, partition_by: PartitionBy) -> Partitioning:
        """Check a partitioning against the schema.

        Raises:
            SchemaError: it names a column outside of the primary key, has unordered bounds,
                or makes too many tablets.
        """
        if partition_by is None:
            parts: list[HashPartition | RangePartition] = []
        elif isinstance(partition_by, (HashPartition, RangePartition)):
            parts = [partition_by]
        else:
            require_several("partition_by", partition_by, "hash_partition and range_partition")
            parts = list(partition_by)
        for part in parts:
            if not isinstance(part, (HashPartition, RangePartition)):
                raise TypeError(
                    f"partition_by takes hash_partition(...) and range_partition(...), not {part!r}"
                )
            for name in part.columns:
                if name not in schema.primary_key:
                    raise SchemaError(
                        f"partition column {name!r} is not of the primary key "
                        f"({', '.join(schema.primary_key)})"
                    )
        hashes = tuple(part for part in parts if isinstance(part, HashPartition))
        ranges = [part for part in parts if isinstance(part, RangePartition)]
        if len(ranges) > 1:
            raise SchemaError("a table has one range_partition at most")
        bounds = None
        if ranges:
            bounds = _encode_bounds(schema, ranges[0])
        made = cls(schema, hashes, ranges[0] if ranges else None, bounds)
        if made.tablets > MAX_TABLETS:
            raise SchemaError(
                f"the partitioning makes {made.tablets} tablets, at most {MAX_TABLETS} are allowed"
            )
        return made

    @property
    def buckets(self) -> int:
        count = 1
        for part in self.hashes:
            count *= part.buckets
        return count

    @property
    def tablets(self) -> int:
        return self.buckets * (len(self.ranges.bounds) + 1 if self.ranges else 1)

    def encoded_bounds(self) -> list[bytes]:
        """The bounds of the ranges, ascending, as keys of the columns that are cut."""
        bounds = self._bounds
        return [] if bounds is None else [bounds.key(i) for i in range(bounds.n)]

    def same_as(self, other: Partitioning) -> bool:
        """Return True when both put equal keys in tablets of the same number."""
        cut = [part and part.columns for part in (self.ranges, other.ranges)]
        bounds = self.encoded_bounds(), other.encoded_bounds()
        return self.hashes == other.hashes and cut[0] == cut[1] and bounds[0] == bounds[1]

    def __str__(self) -> str:
        parts = [f"hash_partition({list(part.columns)}, {part.buckets})" for part in self.hashes]
        if self.ranges is not None:
            bounds = ", ".join(map(repr, self.ranges.bounds))
            parts.append(f"range_partition({list(self.ranges.columns)}, [{bounds}])")
        return " and ".join(parts) or "one tablet"

    def place(self, batch: pa.RecordBatch) -> list[core.Rows | None]:
        """The rows of each tablet, by tablet number; a lone None means all rows of the one."""
        if self.tablets == 1:
            return [None]
        numbers: pa.Array | None = None
        if self.ranges is not None and self._bounds is not None:
            keys = self._keys(batch, self.ranges.columns)
            numbers = core.range_partition(keys, self._bounds)
        for part in self.hashes:
            bucket = core.hash_partition(self._keys(batch, part.columns), part.buckets)
            numbers = bucket if numbers is None else _combine(numbers, part.buckets, bucket)
        return list(core.scatter(numbers, self.tablets))

    def tablets_with(self, values: Mapping[str, pa.Array]) -> Sequence[int]:
        """The numbers of tablets, ascending, in which rows may be that have in each of these
        columns one of its values.
        """
        numbers: Sequence[int] = range(self.tablets // self.buckets)
        if self.ranges is not None and self._bounds is not None:
            keys = self._choices(values, self.ranges.columns)
            if keys is not None:
                numbers = _distinct(core.range_partition(keys, self._bounds))
        for part in self.hashes:
            keys = self._choices(values, part.columns)
            buckets: Sequence[int] = range(part.buckets)
            if keys is not None:
                buckets = _distinct(core.hash_partition(keys, part.buckets))
            numbers = [number * part.buckets + bucket for number in numbers for bucket in buckets]
        return numbers

    def _choices(self, values: Mapping[str, pa.Array], names: tuple[str, ...]) -> core.Keys | None:
        """The keys of columns, each with each of its values; None where they are any, or many."""
        if not values.keys() >= set(names):
            return None
        arrays = [values[name] for name in names]
        if math.prod(map(len, arrays)) > MAX_TABLETS:
            return None
        if len(arrays) > 1:
            rows = zip(*product(*(range(len(array)) for array in arrays)), strict=True)
            arrays = [array.take(pa.array(at)) for array, at in zip(arrays, rows, strict=True)]
        return self._encoded(names, arrays)

    def _keys(self, batch: pa.RecordBatch, names: tuple[str, ...]) -> core.Keys:
        return self._encoded(names, [batch.column(name) for name in names])

    def _encoded(self, names: tuple[str, ...], arrays: Sequence[pa.Array]) -> core.Keys:
        return core.key_codec(*(self.schema.columns[name].type for name in names)).encode(arrays)

    # -- stored form -------------------------------------------------------------------

    def to_json(self) -> str:
        bounds = None
        if self.ranges is not None:
            sink = pa.BufferOutputStream()
            table = _bounds_table(self.schema, self.ranges)
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            bounds = base64.b64encode(sink.getvalue()).decode()
        return json.dumps(
            {
                "hash": [
                    {"columns": part.columns, "buckets": part.buckets} for part in self.hashes
                ],
                "range": bounds,
            }
        )

    @classmethod
    def from_json(cls, schema: Schema, text: str) -> Partitioning:
        stored = json.loads(text)
        parts: list[HashPartition | RangePartition] = [
            HashPartition(tuple(part["columns"]), part["buckets"]) for part in stored["hash"]
        ]
        if stored["range"] is not None:
            table = pa.ipc.open_stream(base64.b64decode(stored["range"])).read_all()
            bounds = tuple(zip(*(column.to_pylist() for column in table.columns), strict=True))
            parts.append(RangePartition(tuple(table.column_names), bounds))
        return cls.of(schema, parts)


def _distinct(numbers: pa.Array) -> list[int]:
    return sorted(set(numbers.to_pylist()))


def _combine(high: pa.Array, buckets: int, low: pa.Array) -> pa.Array:
    """High * buckets + low, over u16 arrays."""
    product = pc.multiply(high, pa.scalar(buckets, pa.uint16()))
    return pc.add(product, low)


def _bounds_table(schema: Schema, part: RangePartition) -> pa.Table:
    columns = {}
    for i, name in enumerate(part.columns):
        try:
            columns[name] = column_array(
                name, schema.columns[name].type, [bound[i] for bound in part.bounds]
            )
        except SchemaError as error:
            raise SchemaError(f"a bound of range_partition does not fit: {error}") from None
        if columns[name].null_count:
            raise SchemaError(f"a bound of range_partition on {name!r} is null")
    return pa.table(columns)


def _encode_bounds(schema: Schema, part: RangePartition) -> core.Keys:
    table = _bounds_table(schema, part)
    codec = core.KeyCodec([schema.columns[name].type for name in part.columns])
    keys = codec.encode([column.combine_chunks() for column in table.columns])
    encoded = [keys.key(i) for i in range(keys.n)]
    if any(a >= b for a, b in pairwise(encoded)):
        raise SchemaError(f"the bounds of range_partition on {part.columns} are not ascending")
    return keys
