"""A table as a dataset of Arrow: other engines read it, and say what they need of it.

    orders = client.table("orders").dataset()
    duckdb.sql("SELECT region, sum(total) FROM orders WHERE id < 100 GROUP BY region")

DuckDB asks the dataset for a scanner of the columns `region` and `total`, with the filter
`id < 100` as an expression of Arrow; so do polars (`scan_pyarrow_dataset`) and others. Their scans
make conditions of it, as of any expression (`tables.read.expressions`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as arrow

from txnkv.errors import NotSupportedError
from txnkv.tables import Schema

Read = Callable[[Sequence[str] | None, list[Any] | None], Any]
"""Gives the scan of columns, all by default, where conditions hold."""


class TableDataset(arrow.Dataset):  # type: ignore[misc]
    """A table for whoever reads datasets of Arrow; made by `Table.dataset`.

    What reads rows works: `scanner`, `to_table`, `to_batches`, `head`, `take`, `count_rows`. There
    are no fragments, and no joins of Arrow's own.
    """

    def __init__(self, table: Schema, read: Read) -> None:
        self._table = table
        self._read = read

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the table."""
        return self._table.arrow

    def scanner(
        self, columns: Any = None, filter: pc.Expression | None = None, **options: Any
    ) -> arrow.Scanner:
        """One reading of the table.

        Args:
            columns: names, or names with expressions; all by default.
            filter: rows for which it is true.
            options: of Arrow's scanner; those of files mean nothing here.

        Raises:
            SchemaError: there is no such column, or the filter does not fit the columns.
        """
        where = None if filter is None else [filter]
        plain = columns is not None and not isinstance(columns, dict) and len(columns) > 0
        scan = self._read(list(columns) if plain else None, where)
        kept = {} if plain or columns is None else {"columns": columns}
        return arrow.Scanner.from_batches(
            scan.to_batches(),
            schema=scan.schema,
            use_threads=options.get("use_threads", True),
            **kept,
        )

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse what asks for files.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError(
            "a table has no files that Arrow could take on: read it by scanner(), to_table() or "
            "to_batches()"
        )

    filter = get_fragments = join = join_asof = replace_schema = sort_by = _refuse
    _get_fragments = __reduce__ = _refuse
    partition_expression = property(_refuse)
