"""`txnkv scan`: rows out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import pyarrow as pa

import txnkv
from txnkv.cli import parsing, sinks
from txnkv.cli.console import bar, plural, store_argument
from txnkv.cli.group import given
from txnkv.cli.sources import format_of

SHOWN: Final = 100


@click.command()
@store_argument
@click.argument("table", metavar="TABLE")
@click.option("-c", "--columns", metavar="NAMES", help="As id,total. Default: all.")
@click.option(
    "-w",
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="As 'total > 5', 'region in eu,us' or 'total is null'; all of them must hold.",
)
@click.option("--limit", type=click.IntRange(min=0), help="At most so many rows.")
@click.option("--ordered", is_flag=True, help="By primary key.")
@click.option("--snapshot", "at", metavar="WHEN", help="A timestamp, or a time with its zone.")
@click.option(
    "--format",
    type=click.Choice(sinks.FORMATS),
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
    with txnkv.connect(store, create=False, read_only=True) as client:
        found = client.table(table)
        asked = limit
        if kind == "table" and limit is None:
            asked = SHOWN + 1
        with given():
            rows = found.scan(
                columns=None if columns is None else parsing.names(columns),
                where=[parsing.where(text, found.schema) for text in conditions] or None,
                snapshot=None if at is None else client.timestamp_of(parsing.snapshot(at)),
                ordered=ordered,
                limit=asked,
            )
        if kind == "table":
            _print(rows, limit)
        elif output is None:
            sinks.write_stdout(kind, rows.schema, rows.to_batches())
        else:
            _write(kind, rows, output)


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
    elif kind in sinks.BINARY:
        raise click.UsageError(f"--format {kind} goes to a file: give --output FILE")
    return kind or "table"


def _print(rows: Any, limit: int | None) -> None:
    batches: Iterator[pa.RecordBatch] = rows.to_batches()
    table = pa.Table.from_batches(batches, rows.schema)
    more = limit is None and table.num_rows > SHOWN
    shown = table.slice(0, SHOWN) if more else table
    sinks.print_table(rows.schema, shown.to_batches())
    if more:
        click.echo(
            f"the first {SHOWN} rows; --limit N shows more, --format csv or json all", err=True
        )
    else:
        click.echo(plural(shown.num_rows, "row"), err=True)


def _write(kind: str, rows: Any, output: str) -> None:
    with bar() as progress:
        task = progress.add_task(output, total=None, note="")

        def counted() -> Iterator[pa.RecordBatch]:
            done = 0
            for batch in rows.to_batches():
                done += batch.num_rows
                progress.update(task, note=plural(done, "row"))
                yield batch

        written = sinks.write_file(kind, rows.schema, counted(), Path(output))
    click.echo(f"wrote {plural(written, 'row')} to {output}", err=True)
