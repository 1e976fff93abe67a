"""The calls that cross hosts: one table of them, by the class of the handle that they are made on.

A remote handle has a method for each that its local twin has, and most of those do nothing but to
send name and arguments to the server, where the method of that name is called on the handle's twin.
Such methods are made from this table by `remote_calls`. Where a remote handle does more (it buffers
rows, waits in turns), it sends calls of its own, which stand here too, and which the server answers
by functions of its own.

A call that is not in this table is refused, whatever the twin has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

VERSION: Final = 7
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
        again: nothing is lost or doubled when it is made twice.
        stream: it is answered by batches, as they are read.
    """

    right: Right
    names: str = ""
    again: bool = False
    stream: bool = False


def _all(right: Right, calls: str, **options: Any) -> dict[str, Method]:
    return {name: Method(right, **options) for name in calls.split()}


_ROWS = {
    **_all("write", "rows sends write send_batch ack ack_cumulative"),
    **_all("none", "put flush pending_errors"),
}
_READS = _all("read", "get get_by get_many", again=True)

METHODS: Final[dict[str, dict[str, Method]]] = {
    "Client": {
        **_all("none", "tables topics applied applications transaction_state", again=True),
        **_all("none", "attempts snapshot open_scan new_session begin join planning", again=True),
        **_all("none", "open_diff", again=True, stream=True),
        **_all("read", "table", names="table", again=True),
        **_all("read", "topic", names="topic", again=True),
        **_all("none", "outcome", again=True),
        **_all("none", "keep_transaction_alive commits"),
        **_all("write", "forget_applied"),
        **_all("admin", "create_table drop_table recall_table rename_table", names="table"),
        **_all("admin", "create_index drop_index", names="table"),
        **_all("admin", "create_topic drop_topic", names="topic"),
        **_all("admin", "transactions stats metrics check", again=True),
        **_all("admin", "abort_transaction repair_clock compact"),
    },
    "Table": {
        **_READS,
        **_all("read", "schema indexes history count scan diff_tokens", again=True),
        **_all("read", "diff", again=True, stream=True),
        **_all("write", "insert upsert update delete next_ids restore"),
        **_all("admin", "alter"),
    },
    "Snapshot": _all("none", "close", again=True),
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
        **_READS,
        **_all("read", "scan", again=True),
        **_all("none", "about state is_commit_complete new_session serialize close", again=True),
        **_all("none", "commit start_commit rollback"),
        **_all("write", "mark_applied start_job"),
        **_all("write", "join_job", again=True),
    },
    "Job": _all("write", "session commit abort", again=True),
    "Planning": {
        **_all("read", "schema_of changed", names="table", again=True),
        **_all("read", "plan", names="topic", again=True),
        **_all("read", "read_part", names="topic", again=True, stream=True),
        **_all("read", "pending", again=True),
        **_all("none", "latest timestamp_of kept is_applied", again=True),
        **_all("write", "end_named name abandon", again=True),
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
            _, *rest = given.args
            if method.names:  # of the handle, where one is given
                rest[:1] = [
                    each if isinstance(each, str) else getattr(each, "name", each)
                    for each in rest[:1]
                ]
            args, named = tuple(rest), given.kwargs
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
    return dict(list(given.arguments.items())[1:])


_signature_of: Final = cache(signature)
