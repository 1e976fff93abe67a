"""`txnkv load`: files into a table, in one transaction.

Rows stream from the files through Arrow batches into the transaction; at no time more than
a few batches are in memory. The transaction has no timeout: it lives as long as its process
sends heartbeats. Whatever fails rolls all of it back, and a table made for it goes too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import click
import pyarrow as pa
from rich.progress import Progress, TaskID

import txnkv
from txnkv.cli import parsing
from txnkv.cli.command_group import stopping, words
from txnkv.cli.console import (
    bar,
    json_option,
    plural,
    print_json,
    rate,
    store_argument,
    table_argument,
)
from txnkv.cli.row_sources import FORMATS, RowSource, named, open_source
from txnkv.cli.text_sources import Options
from txnkv.errors import (
    RowErrors,
    StoreNotFoundError,
    TableNotFoundError,
    TxnkvError,
)
from txnkv.tables import DELETES, INSERTS, OPERATIONS, UPDATES, HashPartition, Operation


@click.command()
@store_argument
@table_argument
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--key", metavar="NAMES", help="Key columns of a table to be made, as id or id,region."
)
@click.option(
    "--schema", metavar="COLUMNS", help='Columns, as "id:int64,name:string?"; ? means nullable.'
)
@click.option(
    "--partition-hash",
    "partitions",
    multiple=True,
    metavar="COL:N",
    help="Make the table in N tablets by a hash of COL.",
)
@click.option(
    "--operation",
    type=click.Choice(OPERATIONS),
    metavar="NAME",
    default="insert",
    show_default=True,
    help=f"{', '.join(OPERATIONS[:-1])} or {OPERATIONS[-1]}. upsert and update leave columns alone "
    "that the files do not have; delete needs the key.",
)
@click.option("--format", type=click.Choice(FORMATS), help="Default: by the file's name.")
@click.option("--delimiter", metavar="CHAR", help="Of CSV. Default: a comma; a tab in .tsv files.")
@click.option("--no-header", is_flag=True, help="CSV without names in its first line.")
@click.option(
    "--null",
    "nulls",
    multiple=True,
    metavar="TEXT",
    help="What stands for null in CSV, unquoted. Default: nothing between two delimiters.",
)
@json_option
def load(
    store: str,
    table: str,
    files: tuple[str, ...],
    key: str | None,
    schema: str | None,
    partitions: tuple[str, ...],
    operation: Operation,
    format: str | None,
    delimiter: str | None,
    no_header: bool,
    nulls: tuple[str, ...],
    as_json: bool,
) -> None:
    """Load files into TABLE, all of them in one transaction.

    Reads CSV, JSON lines, Parquet and Arrow IPC, the text formats also gzipped; "-" is stdin.
    The store and the table are made when they are missing. The types of a new table come
    from --schema, or from the files: text is inferred from its first megabytes.
    """
    if delimiter is not None and len(delimiter) != 1:
        raise click.UsageError("--delimiter is one character")
    options = Options(format, delimiter, not no_header, nulls or ("",))
    target = LoadTarget(store, table, key, schema, [parsing.partition(text) for text in partitions])
    with ExitStack() as stack:
        sources = target.open(stack, files, options, operation)
        client = stack.enter_context(txnkv.connect(store))  # made when it is missing
        made = target.make(client)
        done = _Load(client, table, sources, operation)
        try:
            with stopping(done.stopped):
                timestamp, result, seconds = done.run()
        except BaseException as error:
            if made:
                _unmake(client, table)
            if isinstance(error, (TxnkvError, OSError, ValueError, pa.ArrowException)):
                raise click.ClickException(done.failure(error)) from error
            raise
    if as_json:
        print_json(
            {
                "table": table,
                "made": made,
                "rows": done.rows,
                "inserted": result.inserted,
                "updated": result.updated,
                "deleted": result.deleted,
                "ignored": result.ignored,
                "seconds": round(seconds, 6),
                "commit_timestamp": int(timestamp),
            }
        )
        return
    click.echo(
        f"{_summary(operation, result, table + (' (made)' if made else ''))} "
        f"in {seconds:.2f} s, {rate(done.rows, seconds)}"
    )


def _summary(operation: str, result: txnkv.WriteResult, table: str) -> str:
    """Say what was done, as `loaded 5 rows into t, updated 2`."""
    if operation in DELETES:
        done = f"deleted {plural(result.deleted, 'row')} from {table}"
    elif operation in UPDATES:
        done = f"updated {plural(result.updated, 'row')} of {table}"
    else:
        done = f"loaded {plural(result.inserted, 'row')} into {table}"
        if operation == "upsert":
            done += f", updated {plural(result.updated, 'row')}"
    why = "there already" if operation in INSERTS else "not there"
    return done + (f" ({result.ignored:,} were {why})" if result.ignored else "")


@dataclass
class LoadTarget:
    """The table to load into, there or to be made."""

    store: str
    table: str
    key: str | None
    schema_text: str | None
    partitions: list[HashPartition]
    _schema: txnkv.Schema | None = None
    _exists: bool = False

    def open(
        self, stack: ExitStack, files: Sequence[str], options: Options, operation: str
    ) -> list[RowSource]:
        """Open the files, before anything is made in the store.

        Raises:
            ValueError: a file is malformed, the key of a new table is not given, or a table that
                is missing has no rows for the operation.
        """
        found = self._found()
        if found is None and operation in UPDATES | DELETES:
            raise ValueError(f"there is no table {self.table!r}: nothing to {operation}")
        self._schema = found or self._given()
        sources: list[RowSource] = []
        for file in files:
            types = None if self._schema is None else self._schema.arrow
            source = open_source(file, options, types)
            stack.callback(source.close)
            sources.append(source)
            if self._schema is None:
                self._schema = txnkv.Schema.from_arrow(_nullable(source.schema), self._keys())
        return sources

    def _found(self) -> txnkv.Schema | None:
        try:
            with txnkv.connect(self.store, create=False, read_only=True) as client:
                found = client.table(self.table).schema
        except (StoreNotFoundError, TableNotFoundError):
            return None
        self._exists = True
        if self.key is not None and tuple(self._keys()) != found.primary_key:
            raise ValueError(
                f"--key {self.key}: the table {self.table!r} exists with the key "
                f"{','.join(found.primary_key)}; leave --key out"
            )
        given = self._given(found.primary_key)
        if given is not None and given != found:
            raise ValueError(
                f"--schema: the table {self.table!r} exists with other columns: {found!r}; "
                "leave --schema out"
            )
        if self.partitions:
            raise ValueError(
                f"--partition-hash: the table {self.table!r} exists; leave the option out"
            )
        return found

    def _given(self, key: Sequence[str] | None = None) -> txnkv.Schema | None:
        if self.schema_text is None:
            return None
        return parsing.schema(self.schema_text, key or self._keys())

    def _keys(self) -> list[str]:
        if self.key is None:
            raise ValueError(
                f"there is no table {self.table!r} yet: to make it name its key, as --key id"
            )
        return parsing.names(self.key)

    def make(self, client: txnkv.Client) -> bool:
        """Make the table; False when it was there."""
        assert self._schema is not None
        if not self._exists:
            client.create_table(self.table, self._schema, self.partitions or None)
        return not self._exists


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


def _unmake(client: txnkv.Client, table: str) -> None:
    """Drop a table that was made for a load that failed, unless somebody uses it by now."""
    with suppress(TxnkvError):
        if client.table(table).count() == 0:
            client.drop_table(table)


class _Load:
    """One load: what it reads, and how far it is."""

    def __init__(
        self, client: txnkv.Client, table: str, sources: list[RowSource], operation: Operation
    ) -> None:
        self.rows = 0
        self._client = client
        self._table = table
        self._sources = sources
        self._operation = operation
        self._txn: txnkv.Transaction | None = None

    def run(self) -> tuple[txnkv.Timestamp, txnkv.WriteResult, float]:
        """Read all, write all, commit."""
        begin = time.monotonic()
        total = txnkv.WriteResult()
        with bar() as progress, self._client.transaction(timeout=None) as txn:
            self._txn = txn
            for source in self._sources:
                task = progress.add_task(source.name, total=source.total, note="")
                result = txn.write(
                    self._table, self._reader(source, progress, task), self._operation
                )
                total.inserted += result.inserted
                total.updated += result.updated
                total.deleted += result.deleted
                total.ignored += result.ignored
            progress.add_task("committing", total=None, note="")
            timestamp = txn.commit()
        return timestamp, total, time.monotonic() - begin

    def _reader(self, source: RowSource, progress: Progress, task: TaskID) -> Any:
        batches = self._counted(source, progress, task)
        first = next(batches, None)
        schema = source.schema if first is None else first.schema

        def all_batches() -> Iterator[pa.RecordBatch]:
            if first is not None:
                yield first
                yield from batches

        return pa.RecordBatchReader.from_batches(schema, all_batches())

    def _counted(
        self, source: RowSource, progress: Progress, task: TaskID
    ) -> Iterator[pa.RecordBatch]:
        with named(source.name):
            batches = source.batches()
        while True:
            with named(source.name):
                batch = next(batches, None)
            if batch is None:
                break
            self.rows += batch.num_rows
            progress.update(task, completed=source.position, note=plural(self.rows, "row"))
            yield batch
        if source.total is not None:
            progress.update(task, completed=source.total)

    def stopped(self) -> str:
        """Say what is durable after Ctrl-C: all or nothing."""
        read = plural(self.rows, "row")
        if self._txn is not None and self._txn.state is txnkv.TxnState.COMMITTED:
            return f"{read} had been loaded by then, and stay"
        return f"nothing was loaded ({read} had been read)"

    def failure(self, error: BaseException) -> str:
        """Say what went wrong, and that nothing was loaded."""
        hint = ""
        if isinstance(error, RowErrors) and self._operation in ("insert", "update", "delete"):
            present = "that are there" if self._operation == "insert" else "that are not there"
            hint = f"; --operation {self._operation}_ignore leaves out keys {present}"
        return (
            f"{words(error)}; nothing was loaded ({plural(self.rows, 'row')} had been read){hint}"
        )
