"""`txnkv create, alter, index, rename, revert, drop, count, get, insert, delete`: a table, and rows
of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import click
import pyarrow as pa

import txnkv
from txnkv.cli import parsing
from txnkv.cli.command_group import OneTransaction, given, stopping
from txnkv.cli.conditions import constant, where, where_option
from txnkv.cli.console import (
    confirm,
    json_option,
    json_text,
    json_value,
    open_bytes,
    plural,
    print_grid,
    print_json,
    print_pairs,
    row_text,
    snapshot_option,
    steps,
    store_argument,
    table_argument,
    tell,
    yes_option,
)
from txnkv.cli.message_lines import RowTexts, short
from txnkv.coordinator import ahead_of_clock
from txnkv.tables import Schema, TtlChange


@click.command()
@store_argument
@table_argument
@click.option(
    "--schema",
    "columns",
    metavar="COLUMNS",
    required=True,
    help='Columns, as "id:int64,name:string?"; ? means nullable.',
)
@click.option("--key", metavar="NAMES", required=True, help="Key columns, as id or id,region.")
@click.option(
    "--partition-hash",
    "partitions",
    multiple=True,
    metavar="COL:N",
    help="N tablets by a hash of COL. May be repeated.",
)
@click.option(
    "--ttl",
    metavar="COL:SECONDS",
    help="Delete rows so long after the time in COL.",
)
@click.option(
    "--history",
    metavar="SECONDS",
    help="Keep versions of rows so long, or unlimited; else as the store does.",
)
@click.option("--exists-ok", is_flag=True, help="One that is there already, alike, is fine.")
@json_option
def create(
    store: str,
    table: str,
    columns: str,
    key: str,
    partitions: tuple[str, ...],
    ttl: str | None,
    history: str | None,
    exists_ok: bool,
    as_json: bool,
) -> None:
    """Make TABLE, and the store when it is missing. `txnkv load` makes a table of files."""
    schema = parsing.schema(columns, parsing.names(key))
    if ttl is not None:
        with given():
            schema = txnkv.Schema(schema.columns, schema.primary_key, parsing.ttl(ttl))
    hashed = [parsing.partition(text) for text in partitions]
    with txnkv.connect(store) as client:
        there = table in client.tables()
        kept = None if history is None else parsing.history(history)
        client.create_table(table, schema, hashed or None, exists_ok=exists_ok, history=kept)
    tablets = math.prod(part.buckets for part in hashed)
    tell(
        as_json,
        {"name": table, "made": not there, "tablets": tablets},
        f"{table} is there already"
        if there
        else f"made {table}" + (f" of {tablets} tablets" if tablets > 1 else ""),
    )


@click.command()
@store_argument
@table_argument
@click.option("--missing-ok", is_flag=True, help="None of this name is fine.")
@yes_option
@json_option
def drop(store: str, table: str, missing_ok: bool, yes: bool, as_json: bool) -> None:
    """Drop TABLE with all its rows, at once and for good.

    Asks first, or wants --yes where nobody can answer. Open transactions that touched it are
    aborted.
    """
    with txnkv.connect(store, create=False) as client:
        there = table in client.tables()
        if there:
            confirm(f"drop {table} with {plural(client.table(table).count(), 'row')}?", yes)
        client.drop_table(table, missing_ok=missing_ok)
    tell(
        as_json,
        {"dropped": table if there else None},
        f"dropped {table}" if there else f"there is no {table}",
    )


@click.command()
@store_argument
@table_argument
@click.option(
    "--add",
    "added",
    multiple=True,
    metavar="'NAME TYPE'",
    help="A new column: 'note string?', or with a default 'total float64 = 0'. May be repeated.",
)
@click.option(
    "--rename", "renamed", multiple=True, metavar="OLD=NEW", help="A column. May be repeated."
)
@click.option("--drop", "dropped", multiple=True, metavar="NAME", help="A column. May be repeated.")
@click.option(
    "--widen",
    "widened",
    multiple=True,
    metavar="NAME=TYPE",
    help="A type with all values of the present one, as total=int64. May be repeated.",
)
@click.option(
    "--default",
    "defaults",
    multiple=True,
    metavar="NAME=VALUE",
    help="For rows that are inserted from here on. May be repeated.",
)
@click.option("--no-default", "bare", multiple=True, metavar="NAME", help="May be repeated.")
@click.option("--nullable", "loose", multiple=True, metavar="NAME", help="May be repeated.")
@click.option(
    "--not-null",
    "tight",
    multiple=True,
    metavar="NAME",
    help="A column that has a value in every row, and is to have one. May be repeated.",
)
@click.option(
    "--ttl",
    metavar="COL:SECONDS",
    help="Delete rows so long after the time in COL; none keeps them.",
)
@click.option(
    "--history",
    metavar="SECONDS",
    help="Keep versions of rows so long, or unlimited, or as the store does: store.",
)
@json_option
def alter(
    store: str,
    table: str,
    added: tuple[str, ...],
    renamed: tuple[str, ...],
    dropped: tuple[str, ...],
    widened: tuple[str, ...],
    defaults: tuple[str, ...],
    bare: tuple[str, ...],
    loose: tuple[str, ...],
    tight: tuple[str, ...],
    ttl: str | None,
    history: str | None,
    as_json: bool,
) -> None:
    """Change columns of TABLE, at once whatever its size; the key stays.

    Rows that are there have the default of a new column, or null. Columns are named as they were
    before the command.
    """
    columns = added or renamed or dropped or widened or defaults or bare or loose or tight
    if not columns and ttl is None and history is None:
        raise click.UsageError("nothing to change: give --add, --rename, --drop or another option")
    add = dict(parsing.new_column(text) for text in added)
    rename = dict(parsing.assignment(text, "--rename", "total=amount") for text in renamed)
    widen = dict(parsing.assignment(text, "--widen", "total=int64") for text in widened)
    nullable = dict.fromkeys(loose, True) | dict.fromkeys(tight, False)
    lives: TtlChange = "keep" if ttl is None else parsing.ttl(ttl)
    kept: Any = "keep" if history is None else parsing.history(history)
    with txnkv.connect(store, create=False) as client:
        found = client.table(table)
        default = parsing.defaults(defaults, found.schema, widen) | dict.fromkeys(bare)
        schema = found.alter(add, rename, dropped, widen, default, nullable, lives, kept)
    types = schema.type_names()
    shown = ", ".join(f"{name} {kind}" for name, kind in types.items())
    tell(as_json, {"name": table, "columns": types}, f"{table} has the columns {shown}")


@click.command()
@store_argument
@table_argument
@click.argument("name")
@json_option
def rename(store: str, table: str, name: str, as_json: bool) -> None:
    """Give TABLE the name NAME, at once.

    Programs that have it open go on; those that look for it by its former name do not find it.
    """
    with txnkv.connect(store, create=False) as client, given():
        client.rename_table(table, name)
    tell(as_json, {"name": name, "was": table}, f"{table} is {name} now")


@click.command()
@store_argument
@table_argument
@click.option(
    "--to", "at", metavar="WHEN", required=True, help="A timestamp, or a time with its zone."
)
@yes_option
@json_option
def revert(store: str, table: str, at: str, yes: bool, as_json: bool) -> None:
    """Give TABLE the rows that it had at a time, in one transaction.

    The time must lie in the history that the store keeps. Columns stay as they are. Asks
    first where the table had no rows then, as before it was made, and where timestamps of the
    store are ahead of this machine's clock, or wants --yes where nobody can answer.
    """
    one = OneTransaction(store, "changed")
    with stopping(one.stopped), txnkv.connect(store, create=False) as client:
        found = client.table(table)
        with given():
            asked = parsing.snapshot(at, "--to")
            when = client.timestamp_of(asked)
        latest = client.timestamp_of(None)
        if isinstance(asked, datetime) and (ahead := ahead_of_clock(latest)):
            confirm(
                f"timestamps of {store} are {ahead:,.0f} s ahead of this machine's clock (the "
                f"latest is {latest}, of {latest.datetime.isoformat()}), as a clock that was wrong "
                f"leaves them: what was committed since is later than {at}. Undo that in {table}, "
                "too?",
                yes,
            )
        if not found.count(snapshot=when) and (rows := found.count()):
            confirm(f"{table} had no rows then. Delete {plural(rows, 'row')} of now?", yes)
        done = txnkv.WriteResult()
        with one.begin(client) as txn:
            if when < txn.snapshot:
                done = found.restore(when, txn)
            one.wrote = plural(done.inserted + done.updated + done.deleted, "row")
        parts = (f"{done.inserted:,} inserted", f"{done.updated:,} updated")
        tell(
            as_json,
            {"inserted": done.inserted, "updated": done.updated, "deleted": done.deleted},
            f"{table} is as it was: {', '.join(parts)}, {done.deleted:,} deleted",
        )


# -- rows ------------------------------------------------------------------------------


@click.command()
@store_argument
@table_argument
@where_option
@snapshot_option
@json_option
def count(
    store: str, table: str, conditions: tuple[str, ...], at: str | None, as_json: bool
) -> None:
    """Count the rows of TABLE, or those that meet conditions."""
    with txnkv.connect(store, create=False, read_only=True) as client:
        found = client.table(table)
        with given():
            when = None if at is None else client.timestamp_of(parsing.snapshot(at))
        rows = found.count(where(conditions, found.schema), when)
    tell(as_json, {"table": table, "rows": rows}, str(rows))


@click.command()
@store_argument
@table_argument
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@snapshot_option
@json_option
def get(store: str, table: str, keys: tuple[str, ...], at: str | None, as_json: bool) -> None:
    """Show the rows of TABLE with these keys, all from one snapshot.

    A key of several columns is their values, as `eu,7`. Exit status 1 when one is not there;
    the others are shown.
    """
    with txnkv.connect(store, create=False, read_only=True) as client:
        found = client.table(table)
        wanted = [_key(text, found.schema) for text in keys]
        with given():
            when = None if at is None else client.timestamp_of(parsing.snapshot(at))
        with client.snapshot(when) as snap:
            rows = [snap.get(found, key) for key in wanted]
    missing = [text for text, row in zip(keys, rows, strict=True) if row is None]
    for i, row in enumerate(row for row in rows if row is not None):
        if as_json:
            click.echo(row_text(row, found.schema.arrow))
        else:
            if i:
                click.echo()
            print_pairs((name, _shown(value)) for name, value in row.items())
    if missing:
        raise click.ClickException(f"{table} has no row {', '.join(missing)}")


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json_text(json_value(value)).strip('"')


@click.command()
@store_argument
@table_argument
@click.argument("rows", metavar="[ROW]...", nargs=-1)
@click.option("--upsert", is_flag=True, help="New values for a row there is.")
@click.option("--update", is_flag=True, help="New values; none is inserted.")
@json_option
def insert(
    store: str, table: str, rows: tuple[str, ...], upsert: bool, update: bool, as_json: bool
) -> None:
    """Insert rows into TABLE, all in one transaction. Without ROW reads lines of JSON from stdin.

    A ROW is a JSON object, as '{"id": 1, "total": 9.5}'; or the arguments are the columns of
    one row, as id=1 total=9.5, with nothing behind = for null. What JSON has not is text:
    dates, times and decimals as they are printed, binary in base64. `txnkv load` is for files.
    """
    if upsert and update:
        raise click.UsageError("give --upsert or --update, not both")
    op = "upsert" if upsert else "update" if update else "insert"
    one = OneTransaction(store, "written")
    with stopping(one.stopped), txnkv.connect(store, create=False) as client:
        found = client.table(table)
        if rows and not rows[0].lstrip().startswith("{"):
            parsed: Iterator[dict[str, Any]] = iter([_assigned(rows, found.schema)])
        elif rows:
            with given():
                parsed = iter(list(_json_rows(rows, "row", found.schema)))
        else:
            parsed = _json_rows(open_bytes("-"), "line", found.schema)
        with one.begin(client) as txn:
            session = txn.new_session()
            write: Callable[[Any, Any], None] = getattr(session, op)
            for row in parsed:
                write(found, row)
            done = session.flush()
            one.wrote = plural(done.inserted + done.updated, "row")
        told = [f"inserted {plural(done.inserted, 'row')}"] if op != "update" else []
        told += [f"updated {plural(done.updated, 'row')}"] if op != "insert" else []
        tell(
            as_json,
            {"table": table, "inserted": done.inserted, "updated": done.updated},
            f"{', '.join(told)} in {table}" if op != "insert" else f"{told[0]} into {table}",
        )


@click.command()
@store_argument
@table_argument
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@where_option
@json_option
def delete(
    store: str, table: str, keys: tuple[str, ...], conditions: tuple[str, ...], as_json: bool
) -> None:
    """Delete rows of TABLE, by their keys or by conditions, all in one transaction.

    A key of several columns is their values, as `eu,7`. When one is not there, nothing is
    deleted. With conditions those rows go that meet them when the command begins.
    """
    if bool(keys) == bool(conditions):
        raise click.UsageError("give KEYs, or conditions by --where; `txnkv drop` drops all")
    one = OneTransaction(store, "deleted")
    with stopping(one.stopped), txnkv.connect(store, create=False) as client:
        found = client.table(table)
        wanted = [_key(text, found.schema) for text in keys]
        asked = where(conditions, found.schema)
        with one.begin(client) as txn:
            if wanted:
                session = txn.new_session()
                for key in wanted:
                    session.delete(found, key)
                deleted = session.flush().deleted
            else:
                columns = list(found.schema.primary_key)
                scan = found.scan(columns, asked, txn.snapshot)
                deleted = txn.write(found, scan, "delete").deleted
            one.wrote = plural(deleted, "row")
        tell(
            as_json,
            {"table": table, "deleted": deleted},
            f"deleted {plural(deleted, 'row')} from {table}",
        )


# -- indexes ---------------------------------------------------------------------------


@click.group()
def index() -> None:
    """Make, drop and list the indexes of a table."""


_columns_argument = click.argument("columns", metavar="COLUMNS")


@index.command("create")
@store_argument
@table_argument
@_columns_argument
@click.option("--unique", is_flag=True, help="No two rows may have the same values.")
@json_option
def create_index(store: str, table: str, columns: str, unique: bool, as_json: bool) -> None:
    """Make an index by COLUMNS, as mail or region,day, while others read and write.

    `txnkv scan --where` goes by it then. Stopped on the way, the same command goes on with it.
    """
    with (
        txnkv.connect(store, create=False) as client,
        stopping(lambda: "the index is not ready"),
        steps("indexing", "rows") as step,
    ):
        names = parsing.names(columns)
        with given():
            made = client.create_index(table, names, unique, step)
    kind = "unique index" if made.unique else "index"
    tell(
        as_json,
        {"table": table, **vars(made)},
        f"made a{'' if made.unique else 'n'} {kind} of {table} by {_columns(made)}",
    )


@index.command("drop")
@store_argument
@table_argument
@_columns_argument
@json_option
def drop_index(store: str, table: str, columns: str, as_json: bool) -> None:
    """Drop the index by COLUMNS, at once; no row goes with it."""
    names = parsing.names(columns)
    with txnkv.connect(store, create=False) as client:
        client.drop_index(table, names)
    tell(
        as_json,
        {"table": table, "dropped": names},
        f"dropped the index of {table} by {', '.join(names)}",
    )


@index.command("list")
@store_argument
@click.argument("table", required=False)
@json_option
def list_indexes(store: str, table: str | None, as_json: bool) -> None:
    """List the indexes of TABLE, or of all tables."""
    with txnkv.connect(store, create=False) as client:
        found = {
            name: client.table(name).indexes
            for name in ([table] if table is not None else client.tables())
        }
    if as_json:
        print_json([{"table": name, **vars(each)} for name, of in found.items() for each in of])
        return
    head = ["table", "by", "unique", "state"]
    rows = (
        [name, _columns(e), "yes" if e.unique else "no", e.state]
        for name in found
        for e in found[name]
    )
    print_grid(head, rows)


def _columns(made: txnkv.Index) -> str:
    """The columns of an index, for people."""
    return ", ".join(made.columns)


@given()
def _key(text: str, schema: Schema) -> Any:
    """`7` or `eu,7` as a key.

    Raises:
        click.UsageError: it has another number of columns than the key, or one does not fit.
    """
    columns = schema.primary_key
    parts = [text] if len(columns) == 1 else parsing.items(text)
    if len(parts) != len(columns):
        raise ValueError(f"{text!r} is no key: give {','.join(columns)}, with commas between")
    values = [
        constant(name, part, _kind(schema, name), "KEY")
        for name, part in zip(columns, parts, strict=True)
    ]
    return values[0] if len(values) == 1 else tuple(values)


@given()
def _assigned(texts: Sequence[str], schema: Schema) -> dict[str, Any]:
    """`id=1`, `total=9.5` as a row.

    Raises:
        click.UsageError: one is not written like that, or a value does not fit its column.
    """
    row: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"ROW: {text!r} is neither column=value nor a JSON object")
        schema.position(name)
        if name in row:
            raise ValueError(f"ROW: column {name!r} is given twice")
        row[name] = constant(name, value, _kind(schema, name), "ROW") if value else None
    return row


def _json_rows(texts: Any, noun: str, schema: Schema) -> Iterator[dict[str, Any]]:
    """Rows of lines of JSON.

    Raises:
        ValueError: a line is no object of columns of the table.
    """
    reader = RowTexts({name: _kind(schema, name) for name in schema.columns})
    for number, text in enumerate(texts, 1):
        line = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        if not line.strip():
            continue
        try:
            row = reader.row_of(line.decode())
            if row is None:
                raise ValueError("it is null")
            yield row
        except ValueError as error:
            why = "it is no UTF-8" if isinstance(error, UnicodeError) else error
            raise ValueError(f"{noun} {number} is no row: {why}: {short(line.strip())}") from None


def _kind(schema: Schema, name: str) -> pa.DataType:
    kind = schema.columns[name].type
    assert isinstance(kind, pa.DataType)
    return kind
