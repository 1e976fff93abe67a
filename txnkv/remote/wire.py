"""The calls that cross hosts, and the bytes that calls and answers are.

One table has the calls, by the class of the handle that they are made on (`METHODS`). A remote
handle has a method for each that its local twin has, and most of those do nothing but to send name
and arguments to the server, where the method of that name is called on the handle's twin. Such
methods are made from this table by `remote_calls`. Where a remote handle does more (it buffers
rows, waits in turns), it sends calls of its own, which stand here too, and which the server answers
by functions of its own. A call that is not in this table is refused, whatever the twin has.

    N, T, F            null, true, false         l   n, values         a list
    i   8 bytes        an integer                m   n, names, values  a dict whose keys are texts
    I   n, digits      one of more than 64 bits  !   kind, content     any other value
    d   8 bytes        a float
    s   n, UTF-8       a text
    b   n, bytes       bytes

n is a number of 4 bytes; all are little-endian. What stands here is packed and unpacked in C
(csrc/native/wire.c); any other value is told by its kind, a text, and content of values in turn:
a tuple, a decimal, Arrow data as an IPC stream, one of the data classes in `_CLASSES`, an error.
So what comes from another host becomes one of these and nothing else; no byte of it names code. A
handle, as a table's, has no value here: each side gives `pack` and `unpack` a function that turns
handles into names and back.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cache, lru_cache
from inspect import signature
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pyarrow as pa

from txnkv import errors, topics
from txnkv.client import CheckReport, CompactReport, DiffToken, Index, TxnInfo
from txnkv.coordinator import Applied, Timestamp, TxnId, TxnState
from txnkv.core import compute as pc
from txnkv.core import inexact, require_valid_columns, wire_pack, wire_unpack
from txnkv.errors import (
    CommitOutcomeUnknownError,
    RowError,
    RowErrors,
    SchemaChangedError,
    SchemaError,
    TxnkvError,
    UnavailableError,
)
from txnkv.metrics import MetricsSnapshot
from txnkv.tables import (
    Column,
    DiffParts,
    HashPartition,
    RangePartition,
    Schema,
    TokenParts,
)
from txnkv.topics import (
    Encoded,
    MessageId,
    PinnedRange,
    TopicOffset,
    TopicPart,
    TopicReading,
)
from txnkv.transaction import ScanToken, TxnToken, WriteResult, message_ids

# -- calls -----------------------------------------------------------------------------

VERSION: Final = 15
"""The version of the calls and their form; a server refuses another one."""

ACTION: Final = "txnkv.call"
PING: Final = "txnkv.ping"
BYE: Final = "txnkv.bye"

END_OF_PUT: Final = b"txnkv.end"
"""Metadata of the last batch of a stream; without it the stream broke off, and is nothing."""

Right: TypeAlias = Literal["none", "read", "write", "admin"]

RIGHTS: Final = ("none", "read", "write", "admin")
"""Each one has those before it."""

K = TypeVar("K", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


class Method(NamedTuple):
    """A call.

    Attributes:
        right: the right that it needs, to the table or topic that it is about.
        names: its first argument is the name of a "table" or "topic".
        given: its first argument is a table, topic or subscription, by a reference, or by the name
            where it `names` one, and by nothing else: of these rights are asked.
        again: nothing is lost or doubled when it is made twice.
        stream: it is answered by batches, as they are read.
    """

    right: Right
    names: str = ""
    given: bool = False
    again: bool = False
    stream: bool = False


def _all(right: Right, calls: str, **options: Any) -> dict[str, Method]:
    return {name: Method(right, **options) for name in calls.split()}


_ROWS = {
    **_all("write", "rows sends"),
    **_all("write", "write send_batch ack ack_cumulative", given=True),
    **_all("none", "put flush pending_errors"),
}

METHODS: Final[dict[str, dict[str, Method]]] = {
    "Client": {
        **_all("none", "tables topics applied applications transaction_state", again=True),
        **_all("none", "attempts snapshot open_scan new_session begin join planning", again=True),
        **_all("none", "open_diff", again=True, stream=True),
        **_all("read", "table", names="table", given=True, again=True),
        **_all("read", "topic", names="topic", given=True, again=True),
        **_all("none", "outcome", again=True),
        **_all("none", "keep_transaction_alive commits"),
        **_all("write", "forget_applied"),
        **_all("admin", "create_table recall_table", names="table"),
        **_all("admin", "drop_table rename_table", names="table", given=True),
        **_all("admin", "create_index drop_index", names="table", given=True),
        **_all("admin", "create_topic", names="topic"),
        **_all("admin", "drop_topic", names="topic", given=True),
        **_all("admin", "transactions stats metrics check", again=True),
        **_all("admin", "abort_transaction repair_clock compact"),
    },
    "Table": {
        **_all("read", "get get_by get_many", again=True),
        **_all("read", "indexes history count scan diff_tokens", again=True),
        **_all("read", "diff", again=True, stream=True),
        **_all("write", "insert upsert update delete next_ids restore"),
        **_all("admin", "alter"),
    },
    "Snapshot": _all("none", "timestamp close", again=True),
    "Scan": {
        **_all("read", "few snapshot tokens close", again=True),
        **_all("read", "to_batches", again=True, stream=True),
    },
    "Topic": {
        **_all("read", "end_offsets last_stable_offsets fetch subscriptions consumer", again=True),
        **_all("write", "subscribe subscribe_again sender"),
        **_all("read", "options partitions", again=True),
        **_all("admin", "drop_subscription alter truncate"),
    },
    "Consumer": {
        **_all("read", "position seek seek_to_time lag close", again=True),
        **_all("read", "poll poll_batch"),
    },
    "Subscription": {
        **_all("write", "committed lag lost is_active close", again=True),
        **_all("write", "receive_many unreceive nack seek ack ack_cumulative"),
    },
    "Sender": _all("write", "deliver"),
    "Session": _ROWS | _all("none", "flush_untold discard close"),
    "Transaction": {
        **_ROWS,
        **_all("read", "get get_by get_many scan schema_of", given=True, again=True),
        **_all("none", "about state is_commit_complete new_session serialize close", again=True),
        **_all("none", "commit start_commit rollback"),
        **_all("write", "mark_applied start_job"),
        **_all("write", "join_job", again=True),
    },
    "Job": _all("write", "session commit abort", again=True),
    "Planning": {
        **_all("read", "schema_of changed kept", names="table", again=True),
        **_all("read", "plan", names="topic", again=True),
        **_all("read", "read_part", names="topic", again=True, stream=True),
        **_all("read", "pending", again=True),
        **_all("admin", "overview subscriptions subscription", names="topic", again=True),
        **_all("none", "latest timestamp_of is_applied", again=True),
        **_all("write", "end_named names_below name abandon", again=True),
    },
    "Attempts": _all("none", "wait begin", again=True),
}


def remote_calls(
    twin: str, names: str, made: Callable[[Any, Any], Any] | None = None, *, by: str = "_call"
) -> Callable[[K], K]:
    """A class decorator: the class's methods of these names call the same on the server.

    Args:
        twin: the class of the handle at the server.
        names: of methods in the table, which take what the twin's take and give what it gives.
        made: makes of the connection, and of what the server tells, what they give.
        by: the method of the class that makes the calls.
    """

    def with_calls(kind: K) -> K:
        for name in names.split():
            of = getattr(kind, name)
            call = like(of)(_call(name, of, METHODS[twin][name], made, by))
            setattr(kind, name, property(call) if isinstance(of, property) else call)
        return kind

    return with_calls


def _call(name: str, of: Any, method: Method, made: Any, by: str) -> Callable[..., Any]:
    takes = None if isinstance(of, property) else signature(of)
    plain = takes is None or not (method.names or "progress" in takes.parameters)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        if not plain:
            assert takes is not None
            given = takes.bind(self, *args, **named)
            given.arguments.pop("progress", None)  # who has none of a server
            args, named = given.args[1:], given.kwargs
        if name in _TAKE_SEVERAL:
            args, named = tuple(map(at_hand, args)), {k: at_hand(v) for k, v in named.items()}
        found = getattr(self, by)(name, *args, **named)
        return found if made is None else made(self._connection, found)

    return call


def like(of: Any) -> Callable[[F], F]:
    """A decorator: the method has name, docstring and signature of its local twin."""

    def made(method: F) -> F:
        wrapped: Any = method
        wrapped.__doc__, wrapped.__wrapped__ = of.__doc__, of
        return method

    return made


def arguments(of: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return what a call of a method is given, by name, with its defaults."""
    given = _signature_of(of).bind(None, *args, **named)
    given.apply_defaults()
    each = list(given.arguments.items())[1:]
    return {name: at_hand(value, 2 if name == "where" else 0) for name, value in each}


_signature_of: Final = cache(signature)


_TAKE_SEVERAL: Final = frozenset({"get_many", "get_by"})


def at_hand(value: Any, deep: int = 0) -> Any:
    """Return an argument that may be sent again: with a list for an iterator so deep inside, as
    `where` has the constants of `in`.
    """
    kind = type(value)
    if deep and kind in (list, tuple):
        return kind([at_hand(each, deep - 1) for each in value])
    return list(value) if not deep and hasattr(kind, "__next__") else value


# -- values ----------------------------------------------------------------------------


class LostHandleError(UnavailableError):
    """A handle is gone at the server: that was started again, or had not heard of this client for
    longer than its keepalive time.
    """


class UnsendableError(SchemaError, TypeError):
    """A value that is sent to no other host, and that no column takes either."""


Tagged = list[Any]
"""A kind, and content."""

Refer = Callable[[Any], Tagged | None]
"""Names a handle; None: it is none."""

Resolve = Callable[[str, Any], Any]
"""Finds the handle that a kind and content name; raises ValueError for another kind."""

_CLASSES: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        Applied, CheckReport, Column, CompactReport, DiffParts, DiffToken, HashPartition, Index,
        MessageId, PinnedRange, RangePartition, RowError, ScanToken, TokenParts, TopicOffset,
        TopicPart, TopicReading, TxnInfo, WriteResult, topics.AbortedTxn, topics.Delivered,
        topics.FetchResult, topics.HeldMessages, topics.Holders, topics.OpenTxn,
        topics.PartitionOverview, topics.SubscriptionInfo, topics.SubscriptionOverview,
        topics.TopicInfo, topics.TopicOptions, topics.TopicOverview, topics.ValueStage,
    )
}  # fmt: skip
_FROM_GUESTS: Final = {
    name: _CLASSES[name]
    for name in (
        "Column", "DiffParts", "DiffToken", "HashPartition", "MessageId", "PinnedRange",
        "RangePartition", "ScanToken", "TokenParts", "TopicOffset", "TopicPart", "TopicReading",
    )
}  # fmt: skip
"""Those that a server takes; it finds topics and the like by their names."""

_NUMBERS: Final = {kind.__name__: kind for kind in (Timestamp, TxnId, TxnState)}
_ERRORS: Final[dict[str, type[Exception]]] = {
    name: found
    for module in (errors, builtins)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Exception)
} | {"LostHandleError": LostHandleError}


def pack(value: Any, refer: Refer | None = None) -> bytes:
    """Return the bytes of a value.

    Raises:
        TypeError: it is of a type that does not cross hosts.
        ValueError: it is nested too deep.
    """
    return wire_pack(value, _tagged if refer is None else _tagger(refer))


def unpack(data: bytes, resolve: Resolve | None = None) -> Any:
    """Return the value of some bytes, which may be anybody's.

    Raises:
        ValueError: they are none of a value, or of one that is nested too deep.
    """
    try:
        return wire_unpack(data, _maker(resolve))
    except (KeyError, IndexError, AttributeError, pa.ArrowException) as error:
        raise ValueError(f"a message makes no sense: {error}") from None
    except (TypeError, OverflowError, ArithmeticError) as error:
        raise ValueError(f"a message makes no sense: {error}") from None


# -- to kinds and contents ------------------------------------------------------------


@lru_cache(64)  # one for each client
def _tagger(refer: Refer) -> Callable[[Any], Tagged]:
    def tagged(value: Any) -> Tagged:
        return refer(value) or _tagged(value)

    return tagged


def _tagged(value: Any) -> Tagged:
    kind: object = type(value)
    down = _down_of(kind)
    if down is not None:
        return down(value)
    name = type(value).__name__
    if name == "Expression":  # of pyarrow.compute, which takes a while to load
        return ["x", value.__reduce__()[1][0].to_pybytes()]
    if name in _CLASSES and type(value) is _CLASSES[name]:
        return _members(name, value)
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        found = value.tolist()
        if found is None:
            raise _no_time(value)
        if value.dtype.kind in "mM" and isinstance(found, int):  # of nanoseconds, or of long ago
            return _scalar(pa.scalar(value))
        if value.dtype.kind in "mM" and value.ndim == 1:
            return _array(pa.array(value))
        return ["v", found]
    if isinstance(value, Collection):
        return ["v", list(value)]
    if is_dataclass(value):  # a row
        return ["v", {each.name: getattr(value, each.name) for each in fields(value)}]
    if hasattr(value, "__index__"):
        return ["v", int(value)]
    raise UnsendableError(f"a {name} cannot be sent to another host")


def _no_time(value: Any) -> UnsendableError:
    return UnsendableError(f"{value!r} is no time: give None where there is none")


def _require_exact(value: datetime | timedelta) -> None:
    """Refuse values of pandas' classes that would be others as Python's."""
    if value != value:  # NaT is a datetime, and as text the first of year 1
        raise _no_time(value)
    if (wrong := inexact(value)) is not None:
        raise UnsendableError(wrong)


def _datetime_down(at: datetime) -> Tagged:
    if type(at) is not datetime:
        _require_exact(at)
    return ["dt", [datetime.isoformat(at), getattr(at.tzinfo, "key", None)]]


def _timedelta_down(value: timedelta) -> Tagged:
    if type(value) is not timedelta:
        _require_exact(value)
    return ["td", [value.days, value.seconds, value.microseconds]]


def _members(name: str, value: Any) -> Tagged:
    names = getattr(value, "_fields", None) or [each.name for each in fields(value)]
    return ["c", [name, {each: getattr(value, each) for each in names}]]


def _tuple(value: tuple[Any, ...]) -> Tagged:
    name = type(value).__name__
    return _members(name, value) if name in _CLASSES else ["t", list(value)]


def _scalar(value: pa.Scalar) -> Tagged:
    return ["as", _arrow(pa.table([pa.repeat(value, 1)], [""]))[1]]


def _array(value: pa.Array | pa.ChunkedArray) -> Tagged:
    return ["aa", _arrow(pa.table([value], [""]))[1]]


def _arrow(value: Any) -> Tagged:
    require_valid_columns(value)
    is_batch = isinstance(value, pa.RecordBatch)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, value.schema) as writer:
        for batch in [value] if is_batch else value.to_batches():
            writer.write_batch(batch)
    return ["rb" if is_batch else "tb", sink.getvalue().to_pybytes()]


def _told(error: BaseException) -> Tagged:
    """The nearest class of an error that both sides know, and what it says."""
    names = [kind.__name__ for kind in type(error).__mro__]
    name = next((each for each in names if _ERRORS.get(each) is not None), "Exception")
    more: dict[str, Any] = {"notes": list(getattr(error, "__notes__", ()))}
    text = str(error)
    if isinstance(error, RowErrors):
        more["rows"] = [error.errors, error.count, error.txn_id, error.rolled_back]
        more["mendable"] = error.mendable
    elif isinstance(error, CommitOutcomeUnknownError):
        more["txn_id"] = int(error.txn_id)
    elif isinstance(error, OSError) and error.errno is not None:
        more["os"] = [error.errno, error.strerror]
    if isinstance(error, TxnkvError) and error.retriable != type(error).retriable:
        more["retriable"] = error.retriable
    return ["e", [name, text, more]]


_DOWN: Final[tuple[tuple[Any, Callable[[Any], Tagged]], ...]] = (
    (tuple, _tuple),
    (str, lambda value: ["v", str.__str__(value)]),  # `str` of an Enum is its name
    (float, lambda value: ["v", float(value)]),
    (Encoded, lambda value: ["enc", bytes(value)]),
    ((bytes, bytearray, memoryview), lambda value: ["v", bytes(value)]),
    (tuple(_NUMBERS.values()), lambda value: ["i", [type(value).__name__, int(value)]]),
    (datetime, _datetime_down),
    (date, lambda value: ["d", value.isoformat()]),
    (time, lambda value: ["tm", value.isoformat()]),
    (timedelta, _timedelta_down),
    (UUID, lambda value: ["u", value.hex]),
    (Decimal, lambda value: ["n", str(value)]),
    (MetricsSnapshot, lambda value: ["metrics", [dict(value), value.about]]),
    (Mapping, lambda value: ["m", [list(pair) for pair in value.items()]]),
    ((pa.RecordBatch, pa.Table), _arrow),
    (pa.Schema, lambda value: ["sc", value.serialize().to_pybytes()]),
    (pa.DataType, lambda value: ["ty", pa.schema([("", value)]).serialize().to_pybytes()]),
    (pa.Scalar, _scalar),
    ((pa.Array, pa.ChunkedArray), _array),
    (Schema, lambda value: ["schema", value.to_json()]),
    (TxnToken, lambda value: ["token", bytes(value)]),
    (BaseException, _told),
)


@cache
def _down_of(kind: type) -> Callable[[Any], Tagged] | None:
    """Return what packs values of a class, where one of `_DOWN` does."""
    return next((down for known, down in _DOWN if issubclass(kind, known)), None)


# -- and back -------------------------------------------------------------------------


@cache
def _maker(resolve: Resolve | None) -> Callable[[str, Any], Any]:
    def up(kind: str, content: Any) -> Any:
        make = _UP.get(kind)
        if make is not None:
            return make(content)
        if kind == "c":
            name, members = content
            return (_CLASSES if resolve is None else _FROM_GUESTS)[name](**members)
        if resolve is None:
            raise ValueError(f"a message has a value of kind {kind!r}")
        return resolve(kind, content)

    return up


def _bytes(content: Any) -> bytes:
    """Return the bytes that a content is to be: else it might be taken for a path, or a length."""
    if type(content) is not bytes:
        raise ValueError("a message has no bytes where some belong")
    return content


def _table(content: Any) -> pa.Table:
    with pa.ipc.open_stream(_bytes(content)) as reader:
        found = reader.read_all()
    found.validate()
    require_valid_columns(found)  # offsets of anybody's point nowhere else
    return found


def _batch(content: Any) -> pa.RecordBatch:
    found = _table(content).combine_chunks()
    batches = found.to_batches()
    if not batches:
        return empty_batch(found.schema)
    if len(batches) > 1:
        raise ValueError("a batch of a message is several")
    return batches[0]


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return one without rows; by nulls, as Arrow makes no list without values of every type."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _schema(content: Any) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(_bytes(content)))


_UP: Final[dict[str, Callable[[Any], Any]]] = {
    "v": lambda content: content,
    "t": tuple,
    "m": dict,
    "e": lambda content: _error(*content),
    "metrics": lambda content: MetricsSnapshot.of(*content),
    "enc": lambda content: Encoded(_bytes(content)),
    "i": lambda content: _NUMBERS[content[0]](content[1]),
    "dt": lambda content: _datetime(*content),
    "d": date.fromisoformat,
    "tm": time.fromisoformat,
    "td": lambda parts: timedelta(*parts),
    "u": UUID,
    "n": Decimal,
    "as": lambda content: _table(content).column(0)[0],
    "aa": lambda content: _table(content).column(0).combine_chunks(),
    "rb": _batch,
    "tb": _table,
    "sc": _schema,
    "ty": lambda content: _schema(content).field(0).type,
    "x": lambda content: pc.Expression._deserialize(pa.py_buffer(_bytes(content))),
    "schema": Schema.from_json,
    "token": lambda content: TxnToken(_bytes(content)),
}


def _datetime(text: str, zone: str | None) -> datetime:
    """A time in its zone; by the offset alone where this host does not know the zone."""
    at = datetime.fromisoformat(text)
    try:
        return at if zone is None else at.astimezone(ZoneInfo(zone))
    except (ValueError, OverflowError, ZoneInfoNotFoundError):
        return at


def _error(name: str, text: str, more: dict[str, Any]) -> Exception:
    kind = _ERRORS.get(name, TxnkvError)
    made: Exception
    if kind is RowErrors:
        made = RowErrors(*more["rows"])
        made.mendable = bool(more.get("mendable", True))
    elif issubclass(kind, CommitOutcomeUnknownError):
        made = kind(text, TxnId(more["txn_id"]))
    elif "os" in more and issubclass(kind, OSError):
        made = kind(*more["os"])
    elif issubclass(kind, UnicodeError):
        made = ValueError(text)
    else:
        made = kind(text)
    if isinstance(made, TxnkvError) and "retriable" in more:
        made.retriable = bool(more["retriable"])
    for note in more["notes"]:
        made.add_note(str(note))
    return made


def tells_of_change(error: Any) -> bool:
    """Tell whether an error is that a table was altered."""
    every = [each.error for each in error.errors] if isinstance(error, RowErrors) else [error]
    return any(isinstance(each, SchemaChangedError) for each in every)


def ids_of(message: Any, subscription: topics.SubscriptionInfo) -> list[MessageId]:
    """Return the ids of a message or several, as an acknowledgement is sent."""
    return [MessageId(*each) for each in message_ids(message, subscription)]
