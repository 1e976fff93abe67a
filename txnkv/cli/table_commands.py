"""`txnkv alter`: one table."""

from __future__ import annotations

import click

import txnkv
from txnkv.cli import parsing
from txnkv.cli.console import json_option, print_json, store_argument

table_argument = click.argument("table", metavar="TABLE")


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
@json_option
def alter(
    store: str,
    table: str,
    added: tuple[str, ...],
    renamed: tuple[str, ...],
    dropped: tuple[str, ...],
    as_json: bool,
) -> None:
    """Add, rename and drop columns of TABLE, at once whatever its size.

    Rows that are there have the default of a new column, or null. The key stays.
    """
    if not (added or renamed or dropped):
        raise click.UsageError("nothing to change: give --add, --rename or --drop")
    add = dict(parsing.new_column(text) for text in added)
    rename = dict(parsing.renaming(text) for text in renamed)
    with txnkv.connect(store, create=False) as client:
        schema = client.table(table).alter(add, rename, dropped)
    columns = {
        name: f"{column.type}{'?' if column.nullable else ''}"
        for name, column in schema.columns.items()
    }
    if as_json:
        print_json({"name": table, "columns": columns})
    else:
        shown = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        click.echo(f"{table} has the columns {shown}")
