"""A client's hold on a store, its handles, and the names that calls have for what is in it."""

from __future__ import annotations

import atexit
import html
import logging
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from numbers import Integral
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, Protocol, Self, TypeAlias, TypeVar

from txnkv.coordinator import Timestamp
from txnkv.errors import ClosedError, NotSupportedError, TxnkvError, UnavailableError, as_index
from txnkv.storage import SharedWeakSet, WhenDropped, shielded
from txnkv.tables import RowWriter, TableInfo
from txnkv.topics import Message, MessageId, SubscriptionInfo, TopicInfo
from txnkv.transaction.instance import Instance

_log = logging.getLogger("txnkv")

Grid: TypeAlias = tuple[Sequence[str], Iterable[Sequence[Any]]]
"""A head and rows, as a notebook shows them."""


class Handle:
    """Something that belongs to this process: it cannot be pickled."""

    _elsewhere: ClassVar[str] = "open it there by its name"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its process and cannot be pickled or copied: "
            f"{self._elsewhere}"
        )


class Closing(Handle, ABC):
    """Something with `close()`, usable in `with`."""

    @abstractmethod
    def close(self) -> None:
        """Give it up. Twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if has_failed(error):
            self._forget()
        self.close()

    def _forget(self) -> None:
        """Drop what `close` would write: the block failed."""

    def _repr_html_(self) -> str | None:
        """The HTML that a notebook shows; None where the store cannot be read: then the repr."""
        try:
            shown = shielded(self._grid)()
        except TxnkvError:
            return None
        return None if shown is None else _html(repr(self), *shown)

    def _grid(self) -> Grid | None:
        """Return what a notebook shows of it."""
        return None


def _html(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in HTML, with a line above; null is an empty cell."""

    def cells(kind: str, values: Sequence[Any]) -> str:
        texts = ("" if value is None else html.escape(str(value)) for value in values)
        return "<tr>" + "".join(f"<{kind}>{text}</{kind}>" for text in texts) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return (
        f"<div><code>{html.escape(title)}</code><table><thead>{cells('th', head)}</thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


# -- names -----------------------------------------------------------------------------


class NamesTable(Protocol):
    """A `Table`."""

    @property
    def name(self) -> str:
        """The name that it has now."""

    @property
    def info(self) -> TableInfo:
        """The table as the catalog has it."""


class NamesTopic(Protocol):
    """A `Topic`."""

    @property
    def info(self) -> TopicInfo:
        """The topic as the catalog has it."""


class NamesSubscription(Protocol):
    """A `Subscription`."""

    @property
    def info(self) -> SubscriptionInfo:
        """The subscription, for other processes too."""


class Instant(Protocol):
    """A `Snapshot`."""

    @property
    def timestamp(self) -> Timestamp:
        """Everything that committed at or below it is seen."""

    def require_open(self) -> None:
        """Refuse a snapshot that keeps its history no more."""


AnyTable: TypeAlias = str | NamesTable
"""A name of a table, or its handle."""

Info = TypeVar("Info", TableInfo, TopicInfo)

AnyTopic: TypeAlias = str | NamesTopic
"""A name of a topic, or its handle."""

AnySubscription: TypeAlias = NamesSubscription | SubscriptionInfo
"""A subscription, or what names it in another process."""

Acknowledged: TypeAlias = Message | MessageId | Sequence[Message | MessageId]
"""A message, its id, or several."""

At: TypeAlias = Timestamp | datetime | Instant | None
"""A time to read at; None for now."""


# -- a store ---------------------------------------------------------------------------


class Endable(Protocol):
    """A session."""

    def begin_anew(self) -> None:
        """Forget what a forked child inherited."""

    def look_anew(self, closed: object = None) -> None:
        """Let the next call find out what has changed."""


INHERITED: Final = SharedWeakSet[Endable]()
"""Sessions of all clients, which a forked child has too."""


def _after_fork_in_child() -> None:
    for session in list(INHERITED):
        session.begin_anew()
    _JOINED.clear()
    for session in _ALONE:
        _ALONE.discard(session)


os.register_at_fork(after_in_child=_after_fork_in_child)


class JoinedTxn(NamedTuple):
    """A transaction that was joined by a token, and what is done with what waits in it: nobody
    else has that.

    Attributes:
        connection: gives the client, if it is there.
        write_out: writes it; raises as `close`.
        drop: forgets it.
    """

    connection: Callable[[], Connection | None]
    write_out: Callable[[Any], None]
    drop: Callable[[Any], None]


_JOINED: Final = weakref.WeakKeyDictionary[Any, JoinedTxn]()
"""By what lives as long as a handle or a session of the transaction does."""

_ALONE: Final = SharedWeakSet[Any]()
"""Sessions outside of transactions; `_lost` of each tells that something in it is."""

_ends_seen: Final[dict[int, object]] = {}
"""By its id, a process of `multiprocessing` that calls `_at_exit`."""


def note_joined(
    txn: Any,
    connection: Connection,
    write_out: Callable[[Any], None],
    drop: Callable[[Any], None],
    waiting: Sequence[Sized] = (),
) -> None:
    """Have what waits in a joined transaction written when its client closes, or the process ends.

    Args:
        txn: what the other two functions take.
        waiting: what waits there; it is said in the log if that is dropped before.
    """
    _JOINED[txn] = JoinedTxn(weakref.ref(connection), write_out, drop)
    _see_the_end()
    if waiting:
        WhenDropped(txn, _tell_lost, waiting, repr(txn.handle()))


def _see_the_end() -> None:
    util, mine = sys.modules.get("multiprocessing.util"), object()
    if util is not None and _ends_seen.setdefault(os.getpid(), mine) is mine:
        util.Finalize(None, _at_exit, exitpriority=0)  # a process that it forked has no `atexit`


def _tell_lost(waiting: Sequence[Sized], name: str = "a session outside of transactions") -> None:
    said = "%s was dropped with rows or messages that are lost (%d): close it, or use it in `with`"
    if lost := sum(map(len, waiting)):
        _log.warning(said, name, lost)


def note_alone(connection: Connection, session: Any, waiting: Sequence[Sized]) -> None:
    """Note a session outside of transactions, unless its client is being closed: then, or when the
    process ends, what waits is flushed, or its `_lost`, made here, tells that it is lost.
    """
    session._lost = WhenDropped(session, _tell_lost, waiting)
    connection.sessions.add(session)
    _ALONE.add(session)
    if connection._closing is not None:  # its close may have seen the others
        connection.sessions.discard(session)
        _ALONE.discard(session)
        raise ClosedError(f"the client of {connection.path} was closed; connect again")
    _see_the_end()


def close_sessions(sessions: Iterable[Any]) -> None:
    """Close those of no transaction that flush by themselves, and tell of others what is lost: they
    take no more. A server that does not answer is asked once.
    """
    gone = set[Any]()
    for session in sessions:
        if (lost := session._lost) is None:
            continue
        with (connection := session._connection)._asking_once():
            before = session.waiting()  # also what a flush has that fails meanwhile
            session._take_no_more()
            waiting = max(before, session.waiting())
            try:
                if session.flush_mode == "auto_background" and connection not in gone:
                    session.close()
            except Exception as error:
                if isinstance(error, UnavailableError) and connection.elsewhere is not None:
                    gone.add(connection)
                lost.forget()
                said = "%r, in which %d rows or messages waited, failed as its client was closed"
                _log.warning(said + ": %s", session, waiting, error)
        lost()


def flush_sessions(context: Any) -> None:
    """Flush all sessions of a transaction that is open, also behind one that fails."""
    with ExitStack() as stack:
        for session in reversed(context.sessions) if context.local.open else ():
            stack.callback(session.flush_for_commit)


def discard_sessions(context: Any) -> None:
    """Forget what waits in the sessions of a transaction."""
    for session in context.sessions:
        session.discard()


@contextmanager
def ending_joined(connection: Connection | None = None) -> Iterator[None]:
    """Close a client, or all of this process, in the block: before, what waits in transactions that
    were joined is written. What that raises comes when the block is done.
    """
    try:
        with ExitStack() as stack:
            for txn, joined in _joined(connection):
                stack.callback(joined.write_out, txn)
    finally:
        yield


def _joined(connection: Connection | None) -> list[tuple[Any, JoinedTxn]]:
    """Those of a client, which has none from then on; or all, which may be given more yet."""
    while True:
        with suppress(RuntimeError):  # others came meanwhile
            found = list(_JOINED.items())
            break
    if connection is not None:
        found = [each for each in found if each[1].connection() is connection]
        for txn, _ in found:
            _JOINED.pop(txn, None)
    return found


def has_failed(error: BaseException | None) -> bool:
    """Tell whether a block failed that ended so; one that ends by `sys.exit()` is done."""
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def _at_exit() -> None:
    error = sys.exc_info()[1]  # there is none but in a process of `multiprocessing`
    if error is None and not hasattr(sys, "ps1"):  # in a session, it is that of any line
        error = getattr(sys, "last_value", None)
    if has_failed(error):
        for session in _ALONE:
            session._lost()
        return
    try:
        with ending_joined():
            close_sessions(_ALONE)
    except Exception as error:
        _log.error("transactions that were joined had rows or messages not written: %s", error)


atexit.register(_at_exit)  # before the stores are closed, as that of `instance` came first


class Connection:
    """A store that is open, for one client and its handles. Shared by threads.

    Attributes:
        instance: the store's, shared by all connections of this process.
        keepalive_time: seconds without heartbeat after which a transaction is aborted.
        sessions: those outside of transactions.
        handles: those that have what others wait for, or what is to be sent.
        is_open: it was not closed.
        claims: by the names of its transactions: number and epoch, as they were claimed.
        addresses: of servers of the store, for the tokens that are made here.
        elsewhere: opens what a token names ("join", "open_scan", "open_diff") where the store is on
            another host; None: it is here.
    """

    elsewhere: Callable[[str, Any], Any] | None = None
    addresses: tuple[str, ...] = ()
    _closing: object = None  # how it is closed (`closing_once`)

    def __init__(self, instance: Instance, keepalive_time: float) -> None:
        self.instance = instance
        self.keepalive_time = keepalive_time
        self.sessions = SharedWeakSet[Any]()
        self.handles = SharedWeakSet[Closing]()
        self.is_open = True
        self.claims: dict[str, Any] = {}

    @property
    def _is_over(self) -> bool:
        return not self.is_open

    def _asking_once(self) -> AbstractContextManager[object]:
        return nullcontext()  # nothing is asked here

    def close_handles(self) -> None:
        """Give up what handles have; send what waits in them, and in sessions that flush by
        themselves. What cannot be done is said in the log.
        """
        close_sessions(self.sessions)
        for handle in self.handles:
            try:
                handle.close()
            except Exception as error:
                _log.error("%r was closed with its client, and failed: %s", handle, error)

    def _forget(self) -> None:
        for txn, joined in _joined(self):
            joined.drop(txn)
        for session in self.sessions:
            if session._lost is not None:
                session.discard()

    @property
    def path(self) -> str:
        """The store's directory."""
        return str(self.instance.store.directory.path)

    def _grid(self) -> Grid:
        self.require_open()
        names = {"table": self.instance.engine.names(), "topic": self.instance.topics.names()}
        return ["kind", "name"], [(kind, name) for kind, of in names.items() for name in of]

    def require_open(self) -> None:
        """Refuse a closed client.

        Raises:
            ClosedError: it was closed.
        """
        if not self.is_open:
            raise ClosedError(f"the client of {self.path} was closed; connect again")

    def require_writable(self) -> None:
        """Refuse to write where this client was opened to read only.

        Raises:
            NotSupportedError: it was.
            ClosedError: it is closed.
        """
        self.require_open()
        if self.instance.read_only:
            raise NotSupportedError(
                f"the store {self.path} was opened with read_only=True: connect without it to write"
            )

    def table_info(self, table: AnyTable) -> TableInfo:
        """The catalog entry of a name or a handle, of a table that is not dropped, as it is now.

        Raises:
            TypeError, ValueError: it is no table, or one of another store.
        """
        self.require_open()
        if isinstance(table, str):
            return self.instance.engine.get(table)
        return self.instance.engine.current(self.info_of(table, TableInfo))

    def writer(self, table: AnyTable, snapshot: int | None = None) -> RowWriter:
        """Return the row writer of a table that is not dropped, with its schema of now or, in a
        transaction, that of its snapshot; the name or handle has its reader of now from here on.
        """
        engine = self.instance.engine
        info = getattr(table, "info", None)
        known = engine.known_writer(info) if type(info) is TableInfo else None
        if known is None or not self.is_open:
            info = self.table_info(table)
            known = engine.row_writer(info)
            engine.known_writer(info)
        if isinstance(table, str):
            engine.readers[table] = known.reader
        else:
            handle: Any = table
            handle._reader = known.reader
        if snapshot is not None and snapshot < known.table.since:
            return engine.row_writer(known.table.at(snapshot))
        return known

    def topic_info(self, topic: AnyTopic) -> TopicInfo:
        """The catalog entry of a name or a handle, of a topic that is not dropped."""
        self.require_open()
        if isinstance(topic, str):
            return self.instance.topics.get(topic)
        return self.instance.topics.current(self.info_of(topic, TopicInfo))

    def info_of(self, handle: Any, kind: type[Info]) -> Info:
        """The table or topic of a handle, as it was when the handle was made.

        Raises:
            TypeError, ValueError: it is no table or topic, or one of another store.
        """
        info, what = getattr(handle, "info", None), kind.__name__.removesuffix("Info")
        name = what.lower()
        if not isinstance(info, kind):
            raise TypeError(f"a {name} is a name or a {what}, not {type(handle).__name__}")
        self.require_own(handle, f"{name} {info.name!r}", f"client.{name}({info.name!r})")
        return info

    def require_own(self, handle: Any, what: object, take: str) -> None:
        """Refuse a handle of another store: what it is there, something else is here.

        Raises:
            ValueError: it is one.
        """
        of = getattr(getattr(handle, "_connection", None), "instance", self.instance)
        if of is not self.instance and of.store.store_id != self.instance.store.store_id:
            raise ValueError(
                f"{what} is one of the store {of.store.directory.path}, and this is {self.path}: "
                f"take {take}, of a client of this store"
            )

    def timestamp_of(self, at: At) -> Timestamp:
        """The timestamp that `at` names; the latest snapshot for None.

        Raises:
            TypeError: it is no time.
            ValueError: it is in the future, a naive datetime, or a snapshot of another store.
        """
        coordinator = self.instance.coordinator
        if at is None:
            return coordinator.log.latest()
        require_time(at)
        if isinstance(at, datetime):
            return coordinator.snapshot_by(at)
        if isinstance(at, int | Integral):
            return coordinator.snapshot_at(Timestamp(int(at)))
        self.require_own(at, "the snapshot", "client.snapshot()")
        at.require_open()
        return at.timestamp

    def renew_sessions(self, *, closed: bool = False) -> None:
        """Let the next row or message of each session find out that a schema is another, or that
        this client was closed: its sessions flush no more by themselves.
        """
        by = self if closed else None
        for session in self.sessions:
            session.look_anew(by)
        for context in self.instance.contexts:
            context.local.withdraw()
            for one in context.sessions:
                one.look_anew(by)


def require_time(at: Any) -> None:
    """Raise TypeError for what is no snapshot, timestamp or datetime."""
    number = isinstance(at, Integral) and not isinstance(at, bool)
    snapshot = hasattr(at, "require_open") and hasattr(type(at), "timestamp")
    if not (number or isinstance(at, datetime) or snapshot):
        raise TypeError(
            f"a time is a Snapshot, Timestamp or aware datetime, not the {type(at).__name__} {at!r}"
        )


# -- acknowledgements ------------------------------------------------------------------


def subscription_info(subscription: AnySubscription) -> SubscriptionInfo:
    """Return what is known of a subscription.

    Raises:
        TypeError: it is none.
    """
    found = getattr(subscription, "info", subscription)
    if not isinstance(found, SubscriptionInfo):
        raise TypeError(
            f"a subscription is what topic.subscribe(...) gives, not {type(found).__name__}"
        )
    return found


def acks_of(
    connection: Connection, subscription: AnySubscription, message: Acknowledged
) -> tuple[SubscriptionInfo, list[tuple[int, int]]]:
    """Return the subscription and the ids of what is acknowledged.

    Raises:
        TypeError: the one is no subscription, or the other no message, id or list of them.
        ValueError: the subscription is one of another store, or of another topic.
    """
    found = subscription_info(subscription)
    if not found.store:
        found = replace(found, store=connection.instance.store.store_id)
    if found.store != connection.instance.store.store_id:
        take = "topic.subscribe(...)"
        connection.require_own(subscription, found, take)  # it knows the path
        raise ValueError(
            f"{found} is one of the store {found.store}, and this is {connection.path}: take "
            f"{take}, of a client of this store"
        )
    return found, message_ids(message, found)


def message_ids(message: Acknowledged, subscription: SubscriptionInfo) -> list[tuple[int, int]]:
    """Partitions and offsets of messages, as `ack` and `nack` take them.

    Raises:
        TypeError: it is no message, id or list of them, or an id of what are no integers.
        ValueError: it is a message of another topic than the subscription is of.
    """
    if isinstance(message, Message):
        if message._topic != subscription.messages:
            raise ValueError(
                f"{message!r} is a message of another topic, or store, than that of {subscription}"
            )
        return [(message.partition, message.offset)]
    if isinstance(message, MessageId):
        return [(as_index("a partition", message[0]), as_index("an offset", message[1]))]
    if isinstance(message, list | tuple):
        topic = subscription.messages
        found = [
            (one.partition, one.offset)
            for one in message
            if one.__class__ is Message and one._topic == topic
        ]
        if len(found) < len(message):
            found = [id for one in message for id in message_ids(one, subscription)]
        return found
    raise TypeError(
        "what is acknowledged is a Message, its MessageId or a list of them, not "
        f"{type(message).__name__}"
    )
