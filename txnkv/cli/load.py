"""`txnkv load`: files into a table, in one transaction.

Rows stream from the files through Arrow batches into the transaction; at no time more than
a few batches are in memory. The transaction has no timeout: it lives as long as its process
sends heartbeats. Whatever fails rolls all of it back, and a table made for it goes too.

Files are streams of Arrow batches; text is read by `text_sources`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, Protocol

import click
import pyarrow as pa

import txnkv
from txnkv.cli import parsing
from txnkv.cli.command_group import OneTransaction, stopping, words
from txnkv.cli.console import (
    bar,
    close_bytes,
    json_option,
    open_bytes,
    plural,
    rate,
    store_argument,
    table_argument,
    tell,
)
from txnkv.cli.text_sources import CsvSource, JsonSource, Options
from txnkv.cli.text_types import storable
from txnkv.errors import (
    RowErrors,
    SchemaError,
    StoreNotFoundError,
    TableNotFoundError,
    TxnkvError,
)
from txnkv.tables import DELETES, INSERTS, OPERATIONS, UPDATES, HashPartition, Operation

if TYPE_CHECKING:  # loaded when something is shown to people
    from rich.progress import Progress, TaskID

FORMATS: Final = ("csv", "json", "parquet", "arrow")


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
    done = _Load(store, table, operation)
    with stopping(done.stopped), ExitStack() as stack:
        sources = target.open(stack, files, options, operation)
        client = stack.enter_context(txnkv.connect(store))  # made when it is missing
        made = target.make(client)
        try:
            timestamp, result, seconds = done.run(client, sources)
        except BaseException as error:
            done.leaves_table = made and not _unmake(client, table)
            if isinstance(error, (TxnkvError, OSError, ValueError, pa.ArrowException)):
                raise click.ClickException(done.failure(error)) from error
            raise
        tell(
            as_json,
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
            },
            f"{_summary(operation, result, table + (' (made)' if made else ''))} "
            f"in {seconds:.2f} s, {rate(done.rows, seconds)}",
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
        inferred = self._schema is None
        sources: list[RowSource] = []
        for file in files:
            types = None if self._schema is None else self._schema.arrow
            source = open_source(file, options, types, inferred=inferred)
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


def _unmake(client: txnkv.Client, table: str) -> bool:
    """Drop a table that was made for a load that failed, unless somebody uses it by now."""
    with suppress(TxnkvError):
        if client.table(table).count() == 0:
            client.drop_table(table)
            return True
    return False


class _Load:
    """One load: what it reads, and how far it is."""

    def __init__(self, store: str, table: str, operation: Operation) -> None:
        self.rows = 0
        self.leaves_table = False
        self._table = table
        self._operation = operation
        self._one = OneTransaction(store, "loaded")

    def run(
        self, client: txnkv.Client, sources: Sequence[RowSource]
    ) -> tuple[txnkv.Timestamp, txnkv.WriteResult, float]:
        """Read all, write all, commit."""
        begin = time.monotonic()
        total = txnkv.WriteResult()
        with bar() as progress, self._one.begin(client) as txn:
            for source in sources:
                task = progress.add_task(source.name, total=source.total, note="")
                result = txn.write(
                    self._table, self._reader(source, progress, task), self._operation
                )
                total.inserted += result.inserted
                total.updated += result.updated
                total.deleted += result.deleted
                total.ignored += result.ignored
            progress.add_task("committing", total=None, note="")
            self._one.may_commit()
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
        self._one.wrote = read
        left = f"; the table {self._table} was made for it, and stays" * self.leaves_table
        return self._one.stopped(f" ({read} had been read)") + left

    def failure(self, error: BaseException) -> str:
        """Say what went wrong, and what is durable: all or nothing."""
        hint = ""
        if isinstance(error, RowErrors) and self._operation in ("insert", "update", "delete"):
            present = "that are there" if self._operation == "insert" else "that are not there"
            hint = f"; --operation {self._operation}_ignore leaves out keys {present}"
        return f"{words(error)}; {self.stopped()}{hint}"


# -- files -----------------------------------------------------------------------------


class RowSource(Protocol):
    """One input.

    Attributes:
        name: for messages.
        total: its length, in bytes or rows; None when that is unknown.
    """

    name: str
    total: int | None

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the batches, of types that columns can have."""

    @property
    def position(self) -> int:
        """The part of `total` that was read, in bytes or rows."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, once.

        Raises:
            ValueError: the input is malformed; the message names the line where it can.
        """

    def close(self) -> None:
        """Give the file back."""


@contextmanager
def named(name: str) -> Iterator[None]:
    """Name the input in what is wrong with it.

    Raises:
        ValueError: for any error about the content; those about opening stay as they are.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(f"{name}: {error}") from error
    except (ValueError, pa.ArrowException, SchemaError) as error:
        raise ValueError(f"{name}: {error}") from error


_BATCH_ROWS: Final = 1 << 16
_READ_BYTES: Final = 1 << 20
_FILE_MAGIC: Final = b"ARROW1"


class ParquetSource:
    """A Parquet file."""

    def __init__(self, path: str) -> None:
        if path == "-":
            raise ValueError("Parquet cannot be read from a pipe: give a file")
        from pyarrow import parquet

        self.name = path
        open(path, "rb").close()  # Its errors name the file; those of Arrow do not.
        self._raw = pa.OSFile(path)
        try:
            self._file = parquet.ParquetFile(self._raw, pre_buffer=False, buffer_size=_READ_BYTES)
        except (pa.ArrowInvalid, OSError) as error:
            self._raw.close()
            raise ValueError(f"this is no Parquet file: {error}") from error
        self.schema = storable(self._file.schema_arrow)
        self.total: int | None = self._file.metadata.num_rows
        self.position = 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows."""
        for batch in self._file.iter_batches(batch_size=_BATCH_ROWS):
            self.position += batch.num_rows
            yield batch

    def close(self) -> None:
        """Give the file back."""
        self._raw.close()


class ArrowSource:
    """An Arrow IPC file or stream; from stdin, a stream."""

    def __init__(self, path: str) -> None:
        self.name = path if path != "-" else "stdin"
        self._raw = open_bytes(path)
        self.total: int | None = None
        self.position = 0
        try:
            self._reader, self._is_file = self._open(path)
        except (pa.ArrowInvalid, OSError) as error:
            self.close()
            raise ValueError(f"this is no Arrow IPC file or stream: {error}") from error
        self.schema = storable(self._reader.schema)
        if self._is_file:
            self.total = self._reader.num_record_batches

    def _open(self, path: str) -> tuple[Any, bool]:
        if path != "-":
            magic = self._raw.read(len(_FILE_MAGIC))
            self._raw.seek(0)
            if magic == _FILE_MAGIC:
                return pa.ipc.open_file(self._raw), True
        return pa.ipc.open_stream(self._raw), False

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows."""
        if self._is_file:
            for number in range(self._reader.num_record_batches):
                self.position = number + 1
                yield self._reader.get_batch(number)
        else:
            yield from self._reader

    def close(self) -> None:
        """Give the file back."""
        close_bytes(self._raw)


SUFFIXES: Final = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}


def format_of(path: str) -> str | None:
    """The format that a file's name tells, if it does."""
    plain = PurePath(path.lower().removesuffix(".gz"))
    return SUFFIXES.get(plain.suffix)


def open_source(
    path: str, options: Options, types: pa.Schema | None, *, inferred: bool
) -> RowSource:
    """Open a file to load; "-" is stdin.

    Args:
        path: of the file.
        options: how to read it.
        types: the columns of the table, for text formats; None infers them.
        inferred: `types` were, from the files before.

    Raises:
        ValueError: the format is unknown, or the file is not of it.
        OSError: it cannot be read.
    """
    kind = options.format or format_of(path)
    if kind is None:
        raise ValueError(
            f"{path}: the name does not tell the format; give --format {'|'.join(FORMATS)}"
        )
    with named("stdin" if path == "-" else path):
        if kind == "csv":
            return CsvSource(path, options, types, inferred=inferred)
        if kind == "json":
            return JsonSource(path, types)
        return ParquetSource(path) if kind == "parquet" else ArrowSource(path)
