"""The options of reads and writes: one table of them, and their values, which Spark has as strings.

Spark hands options in small letters, and does not tell a data source what it is for: a read
looks the same to `schema()` whether it is a batch or a stream. So names are checked twice, when
the schema is asked for (is there such an option at all, for what is read?) and when the reader is
made (is it for this kind of read?). What options say together is up to `settings`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import Flag, auto
from typing import Final, NamedTuple

from txnkv.coordinator import Timestamp
from txnkv.errors import NotSupportedError


class Kind(Flag):
    """A kind of read or write."""

    READ_TABLE = auto()
    READ_TOPIC = auto()
    STREAM_TOPIC = auto()
    STREAM_CHANGES = auto()
    WRITE_TABLE = auto()
    WRITE_TOPIC = auto()
    SINK_TABLE = auto()
    SINK_TOPIC = auto()


READS: Final = Kind.READ_TABLE | Kind.READ_TOPIC | Kind.STREAM_TOPIC | Kind.STREAM_CHANGES
WRITES: Final = Kind.WRITE_TABLE | Kind.WRITE_TOPIC | Kind.SINK_TABLE | Kind.SINK_TOPIC


class Option(NamedTuple):
    """An option, as docs/spark.md tells of it.

    Attributes:
        name: with its capital letters.
        kinds: of reads and writes that take it.
        default: in Markdown; empty where it has to be given.
        meaning: in Markdown.
    """

    name: str
    kinds: Kind
    default: str
    meaning: str


OPTIONS: Final = (
    Option("path", READS | WRITES, "", "the store's directory; it must be there"),
    Option(
        "table",
        Kind.READ_TABLE | Kind.STREAM_CHANGES | Kind.WRITE_TABLE | Kind.SINK_TABLE,
        "",
        "the table's name",
    ),
    Option(
        "topic",
        Kind.READ_TOPIC | Kind.STREAM_TOPIC | Kind.WRITE_TOPIC | Kind.SINK_TOPIC,
        "",
        "the topic's name",
    ),
    Option("changes", Kind.STREAM_CHANGES, "`false`", "`true`: the table's changes"),
    Option(
        "token",
        Kind.READ_TABLE | Kind.WRITE_TABLE | Kind.WRITE_TOPIC,
        "none",
        "join this transaction; `txnkv.spark.options` fills it in",
    ),
    Option("columns", READS, "all", "names with commas between"),
    Option(
        "snapshot",
        Kind.READ_TABLE,
        "the latest",
        "`str()` of a `Timestamp`, or an ISO 8601 time with its zone",
    ),
    Option(
        "pushFilters",
        Kind.READ_TABLE,
        "`false`",
        "`true`: the data frame serves one query; see above",
    ),
    Option(
        "startingOffsets",
        Kind.READ_TOPIC | Kind.STREAM_TOPIC | Kind.STREAM_CHANGES,
        "`earliest`",
        "where a new query begins: `earliest`, `latest` (streams), or JSON; of changes a time as "
        "in `snapshot`",
    ),
    Option("endingOffsets", Kind.READ_TOPIC, "`latest`", "`latest`, or JSON"),
    Option(
        "maxOffsetsPerTrigger", Kind.STREAM_TOPIC, "no limit", "about so many offsets a micro batch"
    ),
    Option(
        "order",
        Kind.READ_TOPIC | Kind.STREAM_TOPIC,
        "`offset`",
        "`commit`: whole transactions, as they were committed",
    ),
    Option(
        "failOnDataLoss",
        Kind.READ_TOPIC | Kind.STREAM_TOPIC,
        "`true`",
        "`false`: go on where something is left, with a warning",
    ),
    Option(
        "history", Kind.STREAM_CHANGES, "900", "seconds of the past that Spark's processes keep"
    ),
    Option(
        "operation",
        Kind.WRITE_TABLE | Kind.SINK_TABLE,
        "`insert`",
        "`insert`, `insert_ignore`, `upsert`, `update`, `update_ignore`, `delete`, `delete_ignore`",
    ),
    Option(
        "operationColumn",
        Kind.SINK_TABLE,
        "none",
        "the column that names the operation for each row",
    ),
    Option(
        "appId",
        Kind.SINK_TABLE | Kind.SINK_TOPIC,
        "the query's id",
        "the application that micro batches are counted for",
    ),
    Option(
        "timeout", WRITES, "none", "seconds after which a transaction of the job's own is aborted"
    ),
    Option("keepaliveTime", WRITES, "30", "seconds without heartbeat after which it is"),
)


def _of(kind: Kind) -> tuple[str, ...]:
    return tuple(option.name for option in OPTIONS if kind in option.kinds)


READ_TABLE: Final = _of(Kind.READ_TABLE)
READ_TOPIC: Final = _of(Kind.READ_TOPIC)
STREAM_TOPIC: Final = _of(Kind.STREAM_TOPIC)
STREAM_CHANGES: Final = _of(Kind.STREAM_CHANGES)
WRITE_TABLE: Final = _of(Kind.WRITE_TABLE)
WRITE_TOPIC: Final = _of(Kind.WRITE_TOPIC)
SINK_TABLE: Final = _of(Kind.SINK_TABLE)
SINK_TOPIC: Final = _of(Kind.SINK_TOPIC)
OF_SPARK: Final[tuple[str, ...]] = ("checkpointLocation", "queryName")
"""Spark's own options of a stream, which it hands to the sink with the others."""

KNOWN: Final = (*(option.name for option in OPTIONS), *OF_SPARK)
_URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_NAMES: Final = {name.lower(): name for name in KNOWN}


def given(options: Mapping[str, str]) -> dict[str, str]:
    """Options under their own names; unknown ones as they are."""
    return {_NAMES.get(key.lower(), key): value for key, value in options.items()}


def named(options: Mapping[str, str], known: Iterable[str], what: str) -> dict[str, str]:
    """Options under their own names.

    Args:
        known: those that `what` has.
        what: as "a read of a table".

    Raises:
        ValueError: there is another one.
    """
    known = tuple(known)
    found = given(options)
    for name in found:
        if name not in known:
            raise ValueError(f"{what} has no option {name!r}; its options are {', '.join(known)}")
    return found


def place(found: Mapping[str, str], kind: str) -> tuple[str, str]:
    """The store's directory, absolute, and the name of the table or topic.

    Raises:
        ValueError: one of them is missing.
        NotSupportedError: the path is no directory.
    """
    for name in ("path", kind):
        if not found.get(name):
            raise ValueError(f"option {name} is missing: say .option({name!r}, ...)")
    return directory(found["path"]), found[kind]


def directory(path: str | os.PathLike[str]) -> str:
    """A store's directory, absolute.

    Raises:
        NotSupportedError: the path is no directory.
    """
    text = os.fspath(path)
    if "://" in text:
        raise NotSupportedError(
            f"path {text!r}: this version opens stores on this machine alone; give a directory"
        )
    return os.path.abspath(text)


def location(checkpoint: str | None) -> str | None:
    """A checkpoint's place: absolute, as two programs may mean two places by one relative path.

    That of a URI, as hdfs:///queries/7, is as it was given.
    """
    if checkpoint is None or _URI.match(checkpoint):
        return checkpoint
    return os.path.abspath(checkpoint)


def columns(found: Mapping[str, str]) -> tuple[str, ...] | None:
    """Option columns; None without it."""
    text = found.get("columns")
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"columns is names with commas between, as 'id,total', not {text!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"columns names a column twice: {text!r}")
    return names


def flag(found: Mapping[str, str], name: str, default: bool) -> bool:
    """An option that is true or false."""
    text = found.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{name} is 'true' or 'false', not {text!r}")
    return text.lower() == "true"


def seconds(found: Mapping[str, str], name: str) -> float | None:
    """An option in seconds; None without it."""
    text = found.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is seconds above 0, not {text!r}")
    return value


def time(name: str, text: str) -> Timestamp | datetime:
    """An option that is a time: a commit timestamp, or one of the clock."""
    if text.strip().isdecimal():
        return Timestamp(int(text))
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name} is str() of a txnkv.Timestamp, or an ISO 8601 time with its zone, not {text!r}"
        ) from None


def positive(found: Mapping[str, str], name: str) -> int | None:
    """An option that is a whole number above 0; None without it."""
    text = found.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) == 0:
        raise ValueError(f"{name} is a whole number above 0, not {text!r}")
    return int(text)


EARLIEST: Final = -2
LATEST: Final = -1
Position = str | dict[int, int]
"""`"earliest"`, `"latest"`, or offsets by partition, with EARLIEST and LATEST among them."""


def position(found: Mapping[str, str], name: str, default: str) -> Position:
    """Return the position where a read of a topic begins or ends, from an option."""
    text = found.get(name, default).strip()
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    try:
        offsets = {int(key): value for key, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        offsets = {}
    if not offsets or not all(
        type(value) is int and value >= EARLIEST and key >= 0 for key, value in offsets.items()
    ):
        raise ValueError(
            f"{name} is 'earliest', 'latest', or offsets by partition as "
            f'\'{{"0": 5, "1": -2}}\' (-2 earliest, -1 latest), not {text!r}'
        )
    return offsets
