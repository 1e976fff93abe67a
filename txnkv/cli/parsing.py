"""Texts that users type: schemas, columns, keys, partitions, snapshots; options of topics.

A text that is not written as it should be is a click.UsageError.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, TypeVar

import click
import pyarrow as pa

from txnkv.cli.command_group import given
from txnkv.cli.conditions import constant
from txnkv.coordinator import Timestamp
from txnkv.core import split_outside
from txnkv.tables import Column, HashPartition, Schema, hash_partition, seconds_of
from txnkv.topics import Cleanup

N = TypeVar("N", int, float)

_NEW: Final = re.compile(
    r"""\s*(?:"(?P<quoted>[^"]+)"|(?P<name>[^\s:="]+))\s*(?:\s|:)\s*(?P<kind>[^\s:=].*)""",
    re.VERBOSE | re.DOTALL,
)
_COLUMN: Final = re.compile(
    r"""\s*(?:"(?P<quoted>[^"]+)"\s*|(?P<name>[^:"]*[^\s:"])\s*):(?P<kind>.*\S.*)""", re.DOTALL
)


@given()
def names(text: str) -> list[str]:
    """`id,region`, or `"my column",region`, as names.

    Raises:
        click.UsageError: one is empty.
    """
    found = [name.strip() for name in items(text)]
    if not found or not all(found):
        raise ValueError(f"{text!r}: names are separated by single commas, as id,region")
    return found


@given()
def schema(text: str, key: Sequence[str]) -> Schema:
    """`id:int64,name:string?` as a schema.

    Raises:
        click.UsageError: it is not written like that, names a column twice, a type is unknown, or
            the key does not fit.
    """
    return Schema(columns(text, "--schema"), primary_key=key)


@given()
def columns(text: str, option: str) -> dict[str, str]:
    """`id:int64,name:string?` as names and types.

    Raises:
        click.UsageError: it is not written like that, or names a column twice.
    """
    columns: dict[str, str] = {}
    for part in split_outside(text):
        found = _COLUMN.fullmatch(part)
        if found is None:
            raise ValueError(
                f"{option}: {part.strip()!r} is no column; write name:type, as "
                "id:int64,name:string? (? for nullable)"
            )
        name = found["quoted"] or found["name"]
        if name in columns:
            raise ValueError(f"{option} names the column {name!r} twice")
        columns[name] = found["kind"].strip()
    return columns


@given()
def new_column(text: str) -> tuple[str, Column]:
    """`note string?` or `total float64 = 0` as a column's name and the column.

    Raises:
        click.UsageError: it is not written like that, the type is unknown, or the default does not
            fit it.
    """
    found = _NEW.fullmatch(text)
    if found is None:
        raise ValueError(
            f"--add: {text!r} is no column; write name and type, as 'note string?', and a default "
            "behind them, as 'total float64 = 0'"
        )
    name = found["quoted"] or found["name"]
    return name, _column(name, found["kind"], "--add")


def _column(name: str, text: str, option: str) -> Column:
    """`float64 = 0` as a column with a default."""
    kind, *default = split_outside(text, "=")
    column = Column(kind.strip()).resolved()
    if default:
        assert isinstance(column.type, pa.DataType)
        value = _default(name, "=".join(default).strip(), column.type, option)
        column = replace(column, default=value)
    return column


def items(text: str) -> list[str]:
    """`eu,'a, b'` as the parts between commas, of which any may stand in quotes."""
    quote = "'" if "'" in text else '"'
    try:
        return next(csv.reader([text], quotechar=quote, skipinitialspace=True), [])
    except csv.Error as error:
        raise ValueError(f"{text!r} is no list with commas: {error}") from None


def _default(name: str, text: str, kind: pa.DataType, option: str) -> Any:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return constant(name, text, kind, option)


@given()
def defaults(texts: Sequence[str], schema: Schema, widened: Mapping[str, str]) -> dict[str, Any]:
    """`total = 0` of several columns as their defaults.

    Args:
        texts: given with `--default`.
        schema: of the table,
        widened: types that some columns are to have.

    Raises:
        click.UsageError: one is not written like that, or does not fit its column.
    """
    found = {}
    for name, text in (assignment(each, "--default", "total=0") for each in texts):
        schema.position(name)
        kind = Column(widened.get(name, schema.columns[name].type)).resolved().type
        assert isinstance(kind, pa.DataType)
        found[name] = _default(name, text, kind, "--default")
    return found


@given()
def assignment(text: str, option: str, example: str) -> tuple[str, str]:
    """`old=new` as what stands before and behind the sign.

    Raises:
        click.UsageError: it is not written like that.
    """
    old, equals, new = text.partition("=")
    if not equals or not old.strip() or not new.strip():
        raise ValueError(f"{option}: {text!r} is not old=new, as {example}")
    return old.strip(), new.strip()


@given()
def partition(text: str) -> HashPartition:
    """`id:4` or `id,region:4` as a hash partition.

    Raises:
        click.UsageError: it is not written like that.
    """
    columns, colon, buckets = text.rpartition(":")
    if not colon or not buckets.strip().isdecimal():
        raise ValueError(f"--partition-hash: {text!r} is not column:buckets, as id:4")
    return hash_partition(names(columns), int(buckets))


@given()
def history(text: str) -> float | None:
    """`3600`, `unlimited`, or `store` as None, in seconds.

    Raises:
        click.UsageError: it is none of them.
    """
    try:
        if text in ("store", "unlimited"):
            return None if text == "store" else math.inf
        return seconds_of(float(text))
    except ValueError:
        raise ValueError(
            f"--history: {text!r} is no number of seconds, and not unlimited or store"
        ) from None


@given()
def ttl(text: str) -> tuple[str, float] | None:
    """`seen:3600` as a column and seconds; `none` as None.

    Raises:
        click.UsageError: it is not written like that.
    """
    if text == "none":
        return None
    column, _, seconds = text.rpartition(":")
    try:
        return column, float(seconds)
    except ValueError:
        raise ValueError(f"--ttl: {text!r} is not column:seconds, as seen:3600") from None


@given()
def snapshot(text: str, option: str = "--snapshot") -> Timestamp | datetime:
    """A timestamp's number, or an ISO date and time with its zone, as an option has it.

    Raises:
        click.UsageError: it is neither.
    """
    if text.isdecimal():
        return Timestamp(text)
    return zoned(text, option, "neither a timestamp (as `txnkv stats` shows it) nor")


def zoned(text: str, option: str, nor: str) -> datetime:
    """A time with its zone, the last form that an option may have.

    Raises:
        ValueError: it has no zone, or is no time; `nor` says what else it might have been.
    """
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{option}: {text!r} is {nor} a time, as 2026-01-31T12:00:00+00:00"
        ) from None
    if when.tzinfo is None:
        raise ValueError(f"{option}: {text!r} has no time zone; end it with Z or +02:00")
    return when


# -- topics ----------------------------------------------------------------------------


_CHANGES: Final = [
    click.option("--compression", type=click.Choice(["none", "lz4", "zstd"]), help="Of messages."),
    click.option("--retention-seconds", metavar="SECONDS", help="Older may go; none: nothing may."),
    click.option(
        "--retention-bytes", metavar="BYTES", help="What a partition has beyond may go, or none."
    ),
    click.option(
        "--retain-unacknowledged/--no-retain-unacknowledged",
        default=None,
        help="What a subscription has not acknowledged stays.",
    ),
    click.option(
        "--cleanup",
        type=click.Choice(["delete", "compact"]),
        help="compact: a key's last one stays.",
    ),
    click.option(
        "--tombstone-seconds",
        type=click.FloatRange(min=0),
        help="Compacted: a message without a value may go then.",
    ),
    click.option(
        "--value-schema",
        metavar="COLUMNS",
        help='Of values: those that are there, wider perhaps, and others, as "n:int32=0".',
    ),
]


def change_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a topic that change, which `topic_changes` takes."""
    for option in reversed(_CHANGES):
        command = option(command)
    return command


def _kept_options(text: Callable[[str], str]) -> list[Callable[..., Any]]:
    """The options of how a log is cut and compacted; `text` makes their help."""
    return [
        click.option(
            "--cleanup",
            type=click.Choice(["delete", "compact"]),
            default="delete",
            show_default=True,
            help=text("compact: the last message of a key stays."),
        ),
        click.option(
            "--tombstone-seconds",
            type=click.FloatRange(min=0),
            default=86400.0,
            help=text("compacted: a message without a value may go then."),
        ),
        click.option(
            "--segment-bytes",
            type=click.IntRange(min=1),
            default=64 << 20,
            help=text("of a part of the log; retention takes whole ones."),
        ),
        click.option(
            "--segment-seconds",
            type=click.FloatRange(min=0, min_open=True),
            default=604800.0,
            help=text("of a part of the log, at most."),
        ),
    ]


def topic_options(of: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of a topic to be made, which `topic_arguments` takes; help begins with `of`."""

    def text(help: str) -> str:
        return f"{of}{help}" if of else f"{help[0].upper()}{help[1:]}"

    options = [
        click.option(
            "--buffer",
            type=click.Choice(["marker", "sidecar"]),
            default="marker",
            show_default=True,
            help=text("where messages of open transactions wait."),
        ),
        click.option(
            "--compression",
            type=click.Choice(["none", "lz4", "zstd"]),
            default="none",
            show_default=True,
            help=text("of messages.") if not of else "Of a topic to be made.",
        ),
        click.option(
            "--retention-seconds", type=click.FloatRange(min=0), help=text("older may go.")
        ),
        click.option(
            "--retention-bytes",
            type=click.IntRange(min=0),
            help=text("what a partition has beyond may go."),
        ),
        click.option(
            "--retain-unacknowledged",
            is_flag=True,
            help=text("what a subscription has not acknowledged stays."),
        ),
        *_kept_options(text),
        click.option(
            "--value-schema",
            metavar="COLUMNS",
            help=text('values are rows of columns, as "id:int64,note:string?,n:int32=0".'),
        ),
    ]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def topic_arguments(compression: str, value_schema: str | None, **others: Any) -> dict[str, Any]:
    """The arguments of `create_topic`, from the values of `topic_options`."""
    return {
        "compression": None if compression == "none" else compression,
        "value_schema": None if value_schema is None else _value_columns(value_schema),
        **others,
    }


def _value_columns(text: str) -> dict[str, Column]:
    """`id:int64,n:int32=0` as columns, of which some have a default."""
    option = "--value-schema"
    return {name: _column(name, kind, option) for name, kind in columns(text, option).items()}


@given()
def topic_changes(
    compression: str | None,
    retention_seconds: str | None,
    retention_bytes: str | None,
    retain_unacknowledged: bool | None,
    cleanup: Cleanup | None,
    tombstone_seconds: float | None,
    value_schema: str | None,
) -> dict[str, Any]:
    """The arguments of `Topic.alter`, of the options that were given.

    Raises:
        click.UsageError: a limit is no number, or a schema is not written as one.
    """
    changes: dict[str, Any] = {}
    if compression is not None:
        changes["compression"] = None if compression == "none" else compression
    if retention_seconds is not None:
        changes["retention_seconds"] = _limit(retention_seconds, float, "--retention-seconds")
    if retention_bytes is not None:
        changes["retention_bytes"] = _limit(retention_bytes, int, "--retention-bytes")
    if retain_unacknowledged is not None:
        changes["retain_unacknowledged"] = retain_unacknowledged
    if cleanup is not None:
        changes["cleanup"] = cleanup
    if tombstone_seconds is not None:
        changes["tombstone_seconds"] = tombstone_seconds
    if value_schema is not None:
        changes["value_schema"] = _value_columns(value_schema)
    return changes


def _limit(text: str, kind: Callable[[str], N], option: str) -> N | None:
    if text == "none":
        return None
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{option}: {text!r} is no number, and not none") from None
