"""Point reads: one row, or many, by primary key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from txnkv import core
from txnkv.errors import SchemaError
from txnkv.tables.catalog import TableInfo
from txnkv.tables.ingest import column_array
from txnkv.tables.schema import Schema
from txnkv.tables.tablet import Tablet
from txnkv.tables.view import ReadView

if TYPE_CHECKING:
    from txnkv.tables.engine import TableEngine


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


def get(engine: TableEngine, table: TableInfo, view: ReadView, key: Any) -> dict[str, Any] | None:
    """The row with this key, or None."""
    schema = table.schema
    values = key_values(schema, key)
    columns = [
        column_array(name, schema.columns[name].type, [value])
        for name, value in zip(schema.primary_key, values, strict=True)
    ]
    tablets = engine.tablets(table)
    tablet = tablets[table.partitioning.place_key(columns) if len(tablets) > 1 else 0]
    encoded = tablet.codec.encode(columns).key(0)
    infos = [
        info for info in view.row_sets(engine, tablet) if info.min_key <= encoded <= info.max_key
    ]
    if not infos:
        return None
    with tablet.read() as pages:
        for info in reversed(infos):
            row_set = tablet.row_set(info)
            found = row_set.find_one(pages, encoded)
            if found is not None:
                number, row = found
                block = row_set.header(pages).blocks[number]
                arrays = row_set.read(pages, block, number, schema.names, row, 1)
                return {
                    name: array[0].as_py() for name, array in zip(schema.names, arrays, strict=True)
                }
    return None


def get_many(
    engine: TableEngine, table: TableInfo, view: ReadView, keys: Sequence[Any]
) -> pa.Table:
    """The rows with these keys, in their order; a row of nulls where there is none."""
    schema = table.schema
    result = pa.schema([field.with_nullable(True) for field in schema.arrow])
    columns = _key_columns(schema, keys)
    batch = pa.record_batch(columns, names=list(schema.primary_key))
    if batch.num_rows == 0:
        return result.empty_table()
    tablets = engine.tablets(table)
    encoded = tablets[0].codec.encode(columns)
    numbers: list[pa.Array] = []
    pieces: list[pa.RecordBatch] = []
    for tablet, rows in zip(tablets, table.partitioning.place(batch), strict=True):
        if rows is None or rows.n:
            _find_in(engine, tablet, view, encoded, rows, result, numbers, pieces)
    if not pieces:
        return pa.table([pa.nulls(batch.num_rows, field.type) for field in result], schema=result)
    wanted = core.Rows.range(batch.num_rows).to_arrow()
    position = pc.index_in(wanted, value_set=pa.concat_arrays(numbers))
    return pa.Table.from_batches(pieces, result).combine_chunks().take(position)


def _key_columns(schema: Schema, keys: Sequence[Any]) -> list[pa.Array]:
    if isinstance(keys, (pa.Array, pa.ChunkedArray)):
        keys = keys.to_pylist()
    rows = [key_values(schema, key) for key in keys]
    return [
        column_array(name, schema.columns[name].type, [row[i] for row in rows])
        for i, name in enumerate(schema.primary_key)
    ]


def _find_in(
    engine: TableEngine,
    tablet: Tablet,
    view: ReadView,
    encoded: core.Keys,
    rows: core.Rows | None,
    schema: pa.Schema,
    numbers: list[pa.Array],
    pieces: list[pa.RecordBatch],
) -> None:
    """Append what this tablet has: for each piece of rows, which of the asked keys they are."""
    order = core.sort_keys(encoded, rows) or rows or core.Rows.range(encoded.n)
    probes = encoded.gather(order)
    asked = order.to_arrow()
    low, high = probes.key(0), probes.key(probes.n - 1)
    infos = [info for info in view.row_sets(engine, tablet) if info.overlaps(low, high)]
    if not infos:
        return
    with tablet.read() as pages:
        for info in reversed(infos):
            row_set = tablet.row_set(info)
            for number, start, hits in row_set.find_many(pages, probes):
                found = pc.is_valid(hits)
                arrays = row_set.gather(
                    pages, number, schema.names, core.Rows.from_arrow(hits.drop_null())
                )
                pieces.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
                numbers.append(asked.slice(start, len(hits)).filter(found))
