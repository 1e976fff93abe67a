"""`txnkv scan, query`: rows out, as a table for people, CSV, JSON lines, Parquet or Arrow IPC."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, Final

import click
import pyarrow as pa
from pyarrow import csv

import txnkv
from txnkv.cli import parsing
from txnkv.cli.command_group import given, words
from txnkv.cli.conditions import where, where_option
from txnkv.cli.console import (
    bar,
    json_lines,
    json_text,
    json_value,
    plural,
    print_grid,
    snapshot_option,
    stdin,
    stdout,
    store_argument,
    table_argument,
)
from txnkv.cli.load import format_of
from txnkv.core import JSON, UUID, uuid_texts
from txnkv.core import compute as pc
from txnkv.storage import disk_errors

SHOWN: Final = 100
FORMATS: Final = ("table", "json", "csv", "parquet", "arrow")
BINARY: Final = ("parquet", "arrow")
_JSON_BYTES: Final = 8 << 20
"""About so much of a batch is made text at once, in each of so many threads."""
_THREADS: Final = 2
Batches = Iterable[pa.RecordBatch]
Writer = Callable[[pa.Schema, Batches, IO[bytes]], int]


@click.command()
@store_argument
@table_argument
@click.option("-c", "--columns", metavar="NAMES", help="As id,total. Default: all.")
@where_option
@click.option("--limit", type=click.IntRange(min=0), help="At most so many rows.")
@click.option("--ordered", is_flag=True, help="By primary key.")
@click.option("--descending", is_flag=True, help="By primary key, the last rows first.")
@click.option("--by", metavar="NAMES", help="In the order of columns, as total or region,-total.")
@snapshot_option
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="Default: by the name of the output file, else table.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines, as --format json.")
@click.option("-o", "--output", metavar="FILE", help="Write to a file. Default: stdout.")
def scan(
    store: str,
    table: str,
    columns: str | None,
    conditions: tuple[str, ...],
    limit: int | None,
    ordered: bool,
    descending: bool,
    by: str | None,
    at: str | None,
    format: str | None,
    as_json: bool,
    output: str | None,
) -> None:
    """Read rows of TABLE, all from one snapshot.

    A table for people shows the first 100 rows unless --limit says otherwise; the other
    formats have all rows.
    """
    kind = _kind(format, as_json, output)
    if by is not None and (ordered or descending):
        raise click.UsageError("--by tells the order, without --ordered and --descending")
    with txnkv.connect(store, create=False, read_only=True) as client:
        found = client.table(table)
        asked = limit
        if kind == "table" and limit is None:
            asked = SHOWN + 1
        with given():
            order = ordered if by is None else parsing.names(by)
            rows = found.scan(
                columns=None if columns is None else parsing.names(columns),
                where=where(conditions, found.schema),
                snapshot=None if at is None else client.timestamp_of(parsing.snapshot(at)),
                ordered="descending" if descending else order,
                limit=asked,
            )
        _write(kind, rows.schema, rows.to_batches(), output, limit)


@click.command()
@store_argument
@click.argument("sql", metavar="SQL")
@snapshot_option
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="Default: by the name of the output file, else table.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines, as --format json.")
@click.option("-o", "--output", metavar="FILE", help="Write to a file. Default: stdout.")
def query(
    store: str, sql: str, at: str | None, format: str | None, as_json: bool, output: str | None
) -> None:
    """Ask the tables in SQL, all at one snapshot. Needs DuckDB; "-" reads SQL from stdin.

    Tables have their names. DuckDB asks of each the columns and the rows that the query needs; it
    does not change them.
    """
    kind = _kind(format, as_json, output)
    try:
        import duckdb
    except ImportError:
        raise click.ClickException(
            "txnkv query needs DuckDB: pip install 'txnkv[duckdb]'"
        ) from None
    text = stdin().read() if sql == "-" else sql
    with txnkv.connect(store, create=False, read_only=True) as client, duckdb.connect() as duck:
        with given():
            when = None if at is None else client.timestamp_of(parsing.snapshot(at))
        with client.snapshot(when) as snap:
            duck.execute("SET TimeZone = 'UTC'")
            for name in client.tables():
                duck.register(name, client.table(name).dataset(snap))
            try:
                answer = duck.sql(text)
                if answer is None:
                    raise click.UsageError("SQL is a question, as SELECT ... FROM a table")
                with _calls_that_end(duck.interrupt) as call:
                    found = call(pa.RecordBatchReader.from_stream, answer)
                    rows = iter(lambda: call(next, found, None), None)
                    batches = map(_whole_numbers, rows) if kind == "json" else rows
                    _write(kind, found.schema, batches, output, None)
            except duckdb.ProgrammingError as error:
                raise click.UsageError(words(error)) from error
            except duckdb.Error as error:
                raise click.ClickException(words(error)) from error


@contextmanager
def _calls_that_end(interrupt: Callable[[], None]) -> Iterator[Callable[..., Any]]:
    """Have calls that take long in C, where Python's signals wait, end by Ctrl-C.

    Args:
        interrupt: what ends a call from another thread.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="txnkv-query") as pool:

        def call(function: Callable[..., Any], *args: Any) -> Any:
            done = pool.submit(function, *args)
            try:
                return done.result()
            except KeyboardInterrupt:
                interrupt()
                raise

        yield call


def _whole_numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Have sums of whole numbers, which are decimals in DuckDB, be numbers in JSON."""
    for i, column in enumerate(batch.columns):
        if pa.types.is_decimal(column.type) and column.type.scale == 0:
            with suppress(pa.ArrowInvalid):  # more than 64 bits: text, as decimals are
                batch = batch.set_column(i, batch.schema.names[i], column.cast(pa.int64()))
    return batch


def _write(
    kind: str,
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
    output: str | None,
    limit: int | None,
) -> None:
    if kind == "table":
        _print(schema, batches, limit)
        return
    if kind != "csv" and (names := _unlike(schema.names)) != schema.names:
        batches = (batch.rename_columns(names) for batch in batches)
        schema = pa.schema(map(pa.Field.with_name, schema, names))
    if output is None:
        write_stdout(kind, schema, batches)
    else:
        _export(kind, schema, batches, output)


def _unlike(names: list[str]) -> list[str]:
    """Names of columns, of which later ones that are there already are `id_1`, as in DuckDB."""
    seen: dict[str, int] = {}
    for name in names:
        new = name
        while new in seen:
            new = f"{name}_{seen[name]}"
            seen[name] += 1
        seen[new] = 1
    return list(seen)


def _kind(format: str | None, as_json: bool, output: str | None) -> str:
    if as_json:
        if format not in (None, "json"):
            raise click.UsageError(f"--json and --format {format} exclude each other")
        return "json"
    kind = format or (format_of(output) if output is not None else None)
    if output is not None:
        if kind is None:
            raise click.UsageError(f"{output}: the name does not tell the format; give --format")
        if kind == "table":
            raise click.UsageError("--format table goes to stdout; leave --output out")
        if output.endswith(".gz"):
            raise click.UsageError(f"{output}: output is not compressed; leave .gz out")
    elif kind in BINARY:
        raise click.UsageError(f"--format {kind} goes to a file: give --output FILE")
    return kind or "table"


def _print(schema: pa.Schema, batches: Iterator[pa.RecordBatch], limit: int | None) -> None:
    table = pa.Table.from_batches(_first(batches, limit), schema)
    more = limit is None and table.num_rows > SHOWN
    shown = table.slice(0, SHOWN) if more else table
    if schema.names:
        _print_grid(shown)
    if more:
        click.echo(
            f"the first {SHOWN} rows; --limit N shows more, --format csv or json all", err=True
        )
    else:
        click.echo(plural(shown.num_rows, "row"), err=True)


def _first(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """All of them where there is a limit already, else as many as are shown, and one row more."""
    rows = 0
    for batch in batches:
        yield batch
        rows += batch.num_rows
        if limit is None and rows > SHOWN:
            return


def _export(kind: str, schema: pa.Schema, batches: Batches, output: str) -> None:
    with bar() as progress:
        task = progress.add_task(output, total=None, note="")

        def counted() -> Iterator[pa.RecordBatch]:
            done = 0
            for batch in batches:
                done += batch.num_rows
                progress.update(task, note=plural(done, "row"))
                yield batch

        written = write_file(kind, schema, counted(), Path(output))
    click.echo(f"wrote {plural(written, 'row')} to {output}", err=True)


# -- outputs ---------------------------------------------------------------------------


def _print_grid(table: pa.Table) -> None:
    numeric = [field.name for field in table.schema if _numeric(field.type)]
    kinds = [field.type for field in table.schema]
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    cells = (list(map(_cell, row, kinds)) for row in rows)
    print_grid(table.column_names, cells, right=numeric)


def _numeric(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def _cell(value: Any, kind: pa.DataType) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, dict)):
        return json_text(json_value(value, kind))
    if isinstance(value, (bytes, timedelta, pa.MonthDayNano)):
        value = json_value(value)
    return " ".join(str(value).splitlines()) if isinstance(value, str) else str(value)


def write_file(kind: str, schema: pa.Schema, batches: Batches, path: Path) -> int:
    """Write a file, which is there when it is whole and not before; returns the rows."""
    with disk_errors(path, denied=False), _whole(path) as file:
        return _WRITERS[kind](schema, batches, file)


def write_stdout(kind: str, schema: pa.Schema, batches: Batches) -> int:
    """Write to stdout; returns the rows."""
    file = stdout()
    rows = _WRITERS[kind](schema, batches, file)
    file.flush()
    return rows


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    if path.exists() and not path.is_file():  # a pipe, or /dev/null: another's, to be written to
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()  # what a link leads to is replaced, not the link
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_json(schema: pa.Schema, batches: Batches, file: IO[bytes]) -> int:
    rows = 0
    waiting: deque[Future[pa.Buffer | bytes]] = deque()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="txnkv-json") as pool:
        for batch in batches:
            step = max(1, _JSON_BYTES * batch.num_rows // max(batch.nbytes, 1))
            for start in range(0, batch.num_rows, step):
                waiting.append(pool.submit(json_lines, batch.slice(start, step)))
                if len(waiting) > _THREADS:
                    file.write(waiting.popleft().result())
            rows += batch.num_rows
        while waiting:
            file.write(waiting.popleft().result())
    return rows


def _write_csv(schema: pa.Schema, batches: Batches, file: IO[bytes]) -> int:
    for field in schema:
        if pa.types.is_binary(field.type) or pa.types.is_nested(field.type):
            raise ValueError(
                f"column {field.name!r} is {field.type}: CSV cannot hold it; leave it out, "
                "or write json, parquet or arrow"
            )
    texts = pa.schema([pa.field(field.name, _text_type(field.type)) for field in schema])
    with csv.CSVWriter(file, texts) as writer:
        return _write_all(writer, (_as_texts(batch, texts) for batch in batches))


def _text_type(kind: pa.DataType) -> pa.DataType:
    is_text = _is_length(kind) or kind in (JSON, UUID) or _has_zone(kind)
    return pa.string() if is_text else kind


def _is_length(kind: pa.DataType) -> bool:
    return bool(pa.types.is_duration(kind) or pa.types.is_interval(kind))


def _has_zone(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) and kind.tz not in (None, "UTC")


_STANDARD: Final = datetime(1973, 1, 1, tzinfo=UTC)
"""From when on all zones are whole minutes from UTC."""
_LAST: Final = 971_000_000_000
"""Seconds from 1970 to about the years of which Arrow makes texts, on either side."""


def _with_texts(name: str, column: pa.Array) -> pa.Array:
    """A column of dates or times of which Arrow makes texts that say what is there.

    Raises:
        ValueError: it makes none.
    """
    kind = column.type
    seconds = column.cast(pa.timestamp("s", getattr(kind, "tz", None)), safe=False)
    low, high = pc.min_max(seconds.cast(pa.int64())).values()
    if low.is_valid and not -_LAST < low.as_py() <= high.as_py() < _LAST:
        raise ValueError(
            f"column {name!r} has dates of which CSV is not made: write json, parquet or arrow"
        )
    if not _has_zone(kind):
        return column
    early = low.is_valid and low.as_py() < _STANDARD.timestamp()
    return column.cast(pa.timestamp(kind.unit, "UTC") if early else kind).cast(pa.string())


def _as_texts(batch: pa.RecordBatch, texts: pa.Schema) -> pa.RecordBatch:
    """A batch with text for what Arrow writes none of."""
    columns = list(batch.columns)
    for i, column in enumerate(columns):
        if column.type == UUID:
            columns[i] = uuid_texts(column)
        elif column.type == JSON:
            columns[i] = column.storage
        elif _is_length(column.type):
            columns[i] = pa.array(map(json_value, column.to_pylist()), pa.string())
        elif pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            columns[i] = _with_texts(batch.schema.names[i], column)
    return pa.record_batch(columns, schema=texts)


def _write_parquet(schema: pa.Schema, batches: Batches, file: IO[bytes]) -> int:
    from pyarrow import parquet  # which takes longer to load than many a scan

    for field in schema:  # one by one, since its errors name no column
        try:
            parquet.ParquetWriter(pa.MockOutputStream(), pa.schema([field])).close()
        except (OSError, pa.ArrowException) as error:
            raise ValueError(
                f"column {field.name!r} is {field.type}: Parquet cannot hold it ({error}); leave "
                "it out, or write json or arrow"
            ) from None
    with parquet.ParquetWriter(file, schema) as writer:
        return _write_all(writer, batches)


def _write_arrow(schema: pa.Schema, batches: Batches, file: IO[bytes]) -> int:
    with pa.ipc.new_file(file, schema) as writer:
        return _write_all(writer, batches)


def _write_all(writer: Any, batches: Batches) -> int:
    rows = 0
    for batch in batches:
        writer.write_batch(batch)
        rows += batch.num_rows
    return rows


_WRITERS: dict[str, Writer] = {
    "json": _write_json,
    "csv": _write_csv,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
}
