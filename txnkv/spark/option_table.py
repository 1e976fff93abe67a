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
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from enum import Flag, auto
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from txnkv.coordinator import MIN_KEEPALIVE, Timestamp
from txnkv.errors import NotSupportedError
from txnkv.remote import CREDENTIAL_WORDS, is_address
from txnkv.tables import Operation, require_operation
from txnkv.topics import EARLIEST, Position


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


T = TypeVar("T")
U = TypeVar("U")


# -- values ----------------------------------------------------------------------------

Parser: TypeAlias = Callable[[str], Any]
"""From an option's text to its value; raises ValueError for what makes no sense. `value_of` says
of which option."""

_DECIMAL: Final = re.compile("0|[1-9][0-9]*", re.ASCII)
_URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def text(given: str) -> str:
    """Any text."""
    return given


def place(given: str | os.PathLike[str]) -> str:
    """A store's directory, absolute; or the address of its server.

    Raises:
        NotSupportedError: it is neither.
        ValueError, OSError: no file can have this path.
    """
    path = os.fspath(given)
    if is_address(path):
        return path
    if "://" in path:
        raise NotSupportedError(
            f"path {path!r} is neither a directory of this machine nor the address of a server, "
            "as grpc+tls://host:8815"
        )
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # told of when opened
        os.stat(path)
    return os.path.abspath(path)


def credentials(given: str) -> str | dict[str, str]:
    """A token; or JSON of token, ca, cert and key."""
    if not given.lstrip().startswith("{"):
        return given
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ValueError("a token, or JSON of token, ca, cert and key, all of them text")
    if unknown := found.keys() - set(CREDENTIAL_WORDS):  # where the path is a folder, too
        raise ValueError(f"JSON of token, ca, cert and key, not {', '.join(sorted(unknown))}")
    return found


def location(checkpoint: str | None) -> str | None:
    """A checkpoint's place: absolute, as two programs may mean two places by one relative path.

    That of a URI, as hdfs:///queries/7, is as it was given.
    """
    if checkpoint is None or _URI.match(checkpoint):
        return checkpoint
    return os.path.abspath(checkpoint)


def columns(given: str) -> tuple[str, ...]:
    """Names of columns: with commas between, or any at all as JSON."""
    try:
        is_json = given.lstrip().startswith("[")
        names = json.loads(given) if is_json else [each.strip() for each in given.split(",")]
    except ValueError:
        names = []
    if not names or not all(isinstance(each, str) and each for each in names):
        raise ValueError(
            "names with commas between, as 'id,total', or a JSON list of them, as "
            f'\'["id", "x,y"]\', not {given!r}'
        )
    if len(set(names)) != len(names):
        raise ValueError(f"a column twice: {given!r}")
    return tuple(names)


def flag(given: str) -> bool:
    """True or false."""
    if given.lower() not in ("true", "false"):
        raise ValueError(f"'true' or 'false', not {given!r}")
    return given.lower() == "true"


def seconds(given: str) -> float:
    """Seconds, above 0; of microseconds that are counted in 63 bits."""
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e12:
        raise ValueError(f"seconds, from 1e-6 to 1e12, not {given!r}")
    return value


def keepalive(given: str) -> float:
    """Seconds without heartbeat."""
    if (value := seconds(given)) < MIN_KEEPALIVE:
        raise ValueError(
            f"at least {MIN_KEEPALIVE:g} seconds, for heartbeats may be late behind threads that "
            f"compute; not {given!r}"
        )
    return value


def time(given: str) -> Timestamp | datetime:
    """A commit timestamp, or a time of the clock."""
    with suppress(ValueError):
        if given.strip().isdecimal():
            return Timestamp(int(given))
        if (found := datetime.fromisoformat(given)).tzinfo is not None:
            return found
    raise ValueError(
        f"str() of a txnkv.Timestamp, or an ISO 8601 time with its zone, not {given!r}"
    )


def whole_number(given: str) -> int:
    """A whole number above 0."""
    digits = given.strip()
    if not digits.isdecimal() or len(digits) > 19 or not 0 < int(digits) < 1 << 63:
        raise ValueError(f"a whole number above 0 and below 2^63, not {given!r}")
    return int(digits)


def order(given: str) -> str:
    """The order of messages."""
    if given.lower() not in ("offset", "commit"):
        raise ValueError(f"'offset' or 'commit', not {given.lower()!r}")
    return given.lower()


def operation(given: str) -> Operation:
    """An operation on rows."""
    return require_operation(given)


def app_id(given: str) -> str:
    """A name of an application."""
    if not given:
        raise ValueError("an empty name: name the application, or leave it out")
    return given


def position(given: str) -> Position:
    """Return the position where a read of a topic begins."""
    given = given.strip()
    if given.lower() in ("earliest", "latest"):
        return given.lower()
    try:
        found = json.loads(given, object_pairs_hook=_once).items()
        offsets = {int(key): value for key, value in found if _DECIMAL.fullmatch(key)}
    except (ValueError, AttributeError):
        found, offsets = (), {}
    if (
        not offsets
        or len(offsets) < len(found)
        or not all(type(value) is int and value >= EARLIEST for value in offsets.values())
    ):
        raise ValueError(
            f"'earliest', 'latest', or offsets by partition as "
            f'\'{{"0": 5, "1": -2}}\' (-2 earliest, -1 latest), not {given!r}'
        )
    return offsets


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def end_position(given: str) -> Position:
    """Return the position where a read of a topic ends."""
    found = position(given)
    if found == "earliest" or (isinstance(found, dict) and EARLIEST in found.values()):
        raise ValueError("'latest' or offsets by partition (-1 latest), not the earliest")
    return found


def change_position(given: str) -> str | Timestamp | datetime:
    """Return the position where a stream of changes begins."""
    given = given.strip()
    if given.lower() in ("earliest", "latest"):
        return given.lower()
    try:
        return time(given)
    except ValueError as error:
        raise ValueError(f"of changes 'earliest', 'latest', or {error}") from None


# -- the table -------------------------------------------------------------------------


class Option(NamedTuple):
    """An option, as docs/spark.md tells of it.

    Attributes:
        name: with its capital letters.
        kinds: of reads and writes that take it.
        parse: makes its value of its text.
        default: in Markdown; empty where it has to be given.
        meaning: in Markdown.
    """

    name: str
    kinds: Kind
    parse: Parser
    default: str
    meaning: str

    @property
    def attribute(self) -> str:
        """Return the attribute of settings that has its value."""
        return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", self.name)


OPTIONS: Final = (
    Option(
        "path",
        READS | WRITES,
        place,
        "",
        "the store's directory, which must be there, or the address of its server; a relative one "
        "counts from where the session was begun",
    ),
    Option(
        "credentials",
        READS | WRITES,
        credentials,
        "`TXNKV_CREDENTIALS`",
        "for a server: a token, or JSON of `token`, `ca`, `cert`, `key`; see below",
    ),
    Option(
        "direct",
        READS | WRITES,
        flag,
        "`true`",
        "`false`: by the server also where the store's directory could be opened",
    ),
    Option(
        "table",
        Kind.READ_TABLE | Kind.STREAM_CHANGES | Kind.WRITE_TABLE | Kind.SINK_TABLE,
        text,
        "",
        "the table's name",
    ),
    Option(
        "topic",
        Kind.READ_TOPIC | Kind.STREAM_TOPIC | Kind.WRITE_TOPIC | Kind.SINK_TOPIC,
        text,
        "",
        "the topic's name",
    ),
    Option("changes", Kind.STREAM_CHANGES, flag, "`false`", "`true`: the table's changes"),
    Option(
        "token",
        Kind.READ_TABLE | Kind.WRITE_TABLE | Kind.WRITE_TOPIC,
        text,
        "none",
        "join this transaction; `txnkv.spark.options` fills it in",
    ),
    Option(
        "columns",
        READS,
        columns,
        "all",
        "names with commas between; or, where they have commas or blanks at an end, a JSON list: "
        '`["x,y", " z"]`',
    ),
    Option(
        "snapshot",
        Kind.READ_TABLE,
        time,
        "the latest",
        "`str()` of a `Timestamp`, or an ISO 8601 time with its zone",
    ),
    Option(
        "pushFilters",
        Kind.READ_TABLE,
        flag,
        "`false`",
        "`true`: the data frame serves one query; see above",
    ),
    Option(
        "startingOffsets",
        Kind.READ_TOPIC | Kind.STREAM_TOPIC | Kind.STREAM_CHANGES,
        position,
        "`earliest`",
        "where a new query begins: `earliest`, `latest` (streams), or JSON; of changes a time as "
        "in `snapshot`",
    ),
    Option("endingOffsets", Kind.READ_TOPIC, end_position, "`latest`", "`latest`, or JSON"),
    Option(
        "maxOffsetsPerTrigger",
        Kind.STREAM_TOPIC,
        whole_number,
        "no limit",
        "about so many offsets a micro batch",
    ),
    Option(
        "maxBytes",
        Kind.READ_TOPIC | Kind.STREAM_TOPIC,
        whole_number,
        "2097152",
        "about so many bytes of messages, in memory, that a task holds at a time",
    ),
    Option(
        "order",
        Kind.READ_TOPIC | Kind.STREAM_TOPIC,
        order,
        "`offset`",
        "`commit`: whole transactions, as they were committed",
    ),
    Option(
        "failOnDataLoss",
        Kind.READ_TOPIC | Kind.STREAM_TOPIC,
        flag,
        "`true`",
        "`false`: go on where something is left, with a warning",
    ),
    Option(
        "history",
        Kind.STREAM_CHANGES,
        seconds,
        "900",
        "seconds of the past that Spark's processes keep",
    ),
    Option(
        "operation",
        Kind.WRITE_TABLE | Kind.SINK_TABLE,
        operation,
        "`insert`",
        "`insert`, `insert_ignore`, `upsert`, `update`, `update_ignore`, `delete`, `delete_ignore`",
    ),
    Option(
        "operationColumn",
        Kind.SINK_TABLE,
        text,
        "none",
        "the column that names the operation for each row",
    ),
    Option(
        "appId",
        Kind.SINK_TABLE | Kind.SINK_TOPIC,
        app_id,
        "the query's id",
        "the application that micro batches are counted for",
    ),
    Option(
        "timeout",
        WRITES,
        seconds,
        "none",
        "seconds after which a transaction of the job's own is aborted",
    ),
    Option(
        "keepaliveTime",
        WRITES,
        keepalive,
        "30",
        f"seconds without heartbeat after which it is, at least {MIN_KEEPALIVE:g}",
    ),
)


# -- reading them ----------------------------------------------------------------------

OF_SPARK: Final[tuple[str, ...]] = ("checkpointLocation", "queryName")
"""Spark's own options of a stream, which it hands to the sink with the others."""
_BY_NAME: Final = {option.name: option for option in OPTIONS}
_NAMES: Final = {name.lower(): name for name in (*_BY_NAME, *OF_SPARK)}


def given(options: Mapping[str, str]) -> dict[str, str]:
    """Options under their own names; unknown ones as they are.

    Raises:
        NotSupportedError: they are of CREATE TABLE.
    """
    if any(key.lower().startswith("option.") for key in options):
        raise NotSupportedError(
            "CREATE TABLE makes no table of a data source that is written in Python: read with "
            "spark.read, write with df.write; for SQL, give what load() returns a name by "
            "createOrReplaceTempView, or CREATE TEMPORARY VIEW ... USING txnkv OPTIONS (...)"
        )
    return {_NAMES.get(key.lower(), key): value for key, value in options.items()}


def parsed(
    options: Mapping[str, str], what: str, *kinds: Kind, **parsers: Parser
) -> dict[str, Any]:
    """Values of the options that are given, by the attributes of settings that have them.

    Args:
        what: is read or written, as "a read of a table".
        kinds: of reads and writes that it may be.
        parsers: for options whose value means something else here.

    Raises:
        ValueError: an option is unknown here, or missing, or its value makes no sense.
        NotSupportedError: the path is no directory or address.
    """
    known = [option.name for kind in kinds for option in OPTIONS if kind in option.kinds]
    known = list(dict.fromkeys(known))
    found = given(options)
    for name in found:
        if name not in known:
            raise ValueError(f"{what} has no option {name!r}; its options are {', '.join(known)}")
    for name in ("path", "table", "topic"):
        if name in known and not found.get(name):
            raise ValueError(f"option {name} is missing: say .option({name!r}, ...)")
    values = {}
    for name, value in found.items():
        option = _BY_NAME[name]
        parse = parsers.get(name, option.parse)
        values[option.attribute] = value_of(f"option {name}", parse, value)
    return values


def value_of(what: str, parse: Callable[[T], U], given: T) -> U:
    """Parse a value.

    Args:
        what: it is of, for the error.

    Raises:
        ValueError: it makes no sense.
        NotSupportedError: the path is no directory or address.
    """
    try:
        return parse(given)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{what}: {error!s:.300}") from None
