"""Rows that say what is done with each of them, as a stream of changes has them.

    _op      id   total                      of each key the last row counts
    insert   1    10
    update   1    12         ->  put         1  12
    insert   2    20             delete      2
    delete   2    20

What comes is the state after each change, so a row of insert, update or upsert is put there
whatever was there, and a delete of what is not there is none. That makes it harmless to begin
with changes that the table has already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from txnkv.client import Client
from txnkv.core import compute as pc
from txnkv.errors import SchemaError
from txnkv.options import Operation
from txnkv.spark.columns import FromSpark
from txnkv.spark.writing.attempts import Written, again
from txnkv.tables import Schema
from txnkv.transaction import Job, Transaction

_PUTS: Final = pa.array(["insert", "update", "upsert"])
_DELETES: Final = pa.array(["delete"])
_ROWS: Final = 1 << 19
"""So many rows are looked at together."""


@dataclass(frozen=True)
class ChangesTarget:
    """Changes applied to a table.

    Attributes:
        column: says for each row what is done: insert, update, upsert or delete.
    """

    table: str
    column: str

    @property
    def first(self) -> tuple[str, ...]:
        return ()

    def require(self, client: Client, given: pa.Schema) -> None:
        """Refuse data that does not fit.

        Raises:
            TableNotFoundError, SchemaError: there is no such table, or the data does not fit.
        """
        _Split(client.table(self.table).schema, given, self.column)

    def make_room(self, txn: Transaction, job: Job) -> None:
        """Changes are of single rows."""

    def stage(
        self, client: Client, job: Job, done: Written, batches: Iterator[pa.RecordBatch]
    ) -> None:
        """Stage what the changes come to.

        Raises:
            SchemaError: a value does not fit its column, or is no operation.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
        """
        first = next(batches, None)
        if first is None:
            return
        table = client.table(self.table)
        split = _Split(table.schema, first.schema, self.column)
        with job.session(done.attempt) as session:
            for some in _gathered(again(first, batches)):
                for operation, rows in split.operations(some):
                    done.count(session.write(table, rows, operation))


class _Split:
    def __init__(self, table: Schema, given: pa.Schema, column: str) -> None:
        if column not in given.names:
            raise SchemaError(
                f"option operationColumn names {column!r}, and the data has no such column; it "
                f"has {', '.join(given.names)}"
            )
        if not pa.types.is_string(given.field(column).type):
            raise SchemaError(
                f"column {column!r} (option operationColumn) is a string, not "
                f"{given.field(column).type}"
            )
        self._column = column
        self._keys = list(table.primary_key)
        rows = given.remove(given.get_field_index(column))
        self._put = FromSpark(table, rows, "upsert")
        key_fields = [given.field(name) for name in self._keys]
        self._delete = FromSpark(table, pa.schema(key_fields), "delete_ignore")

    def operations(self, rows: pa.Table) -> Iterator[tuple[Operation, pa.RecordBatchReader]]:
        """Yield operations with their rows, in an order of no matter: no key is in two of them."""
        last = self._last_of_each_key(rows)
        said = last[self._column]
        puts, deletes = (pc.is_in(said, value_set=names) for names in (_PUTS, _DELETES))
        if not pc.all(pc.or_(puts, deletes)).as_py():
            wrong = last.filter(pc.invert(pc.or_(puts, deletes)))[self._column][0].as_py()
            raise SchemaError(
                f"column {self._column!r} says insert, update, upsert or delete, not {wrong!r}"
            )
        kept = last.filter(puts).drop_columns([self._column])
        gone = last.filter(deletes).select(self._keys)
        parts: list[tuple[FromSpark, Operation, pa.Table]] = [
            (self._put, "upsert", kept),
            (self._delete, "delete_ignore", gone),
        ]
        for convert, operation, some in parts:
            if some.num_rows:
                yield operation, convert.reader(iter(some.to_batches()))

    def _last_of_each_key(self, rows: pa.Table) -> pa.Table:
        place = "#"
        while place in rows.column_names:
            place += "#"
        counted = pc.subtract(pc.cumulative_sum(pa.repeat(1, rows.num_rows)), 1)
        keys = rows.select(self._keys).append_column(place, counted)
        last = keys.group_by(self._keys).aggregate([(place, "max")])[f"{place}_max"]
        if len(last) == rows.num_rows:
            return rows
        return rows.take(last)


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= _ROWS:
            yield pa.Table.from_batches(waiting)
            waiting, rows = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)
