"""The client of a store on another host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final, TypeVar, get_args

import pyarrow as pa

from txnkv.client import (
    Client,
    Planning,
    Snapshot,
    Table,
)
from txnkv.coordinator import MIN_KEEPALIVE, Timestamp, TxnId, TxnState
from txnkv.errors import (
    ClosedError,
    CommitOutcomeUnknownError,
    NotSupportedError,
    TableNotFoundError,
    TopicNotFoundError,
    TransactionConflictError,
    TxnNotFoundError,
    UnavailableError,
    as_index,
    require_number,
)
from txnkv.metrics import Metrics
from txnkv.remote.channel import Call, Channel
from txnkv.remote.remote_handles import (
    RemoteHandle,
    RemoteSnapshot,
    RemoteTable,
    TokenScan,
    is_same,
    reader_of,
)
from txnkv.remote.remote_session import RemoteSession
from txnkv.remote.remote_topics import RemoteTopic
from txnkv.remote.remote_transaction import Committer, RemoteJob, RemoteTransaction
from txnkv.remote.wire import arguments, like, remote_calls
from txnkv.storage import CachedProperty, SharedWeakSet, new_lock
from txnkv.tables import Schema
from txnkv.topics import SubscriptionInfo, TopicInfo, TopicPart
from txnkv.transaction import (
    BUFFER_BYTES,
    DEFAULTS,
    AnyTable,
    At,
    FlushMode,
    Isolation,
    Locking,
    Retries,
    Session,
    Transaction,
    closing_once,
    ending_joined,
)

T = TypeVar("T")

_FLUSHERS: Final = 4

_ISOLATIONS: Final = get_args(Isolation)
_LOCKINGS: Final = get_args(Locking)

_MADE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "join": lambda client, token: RemoteTransaction(client, client, "join", (token,), at_once=True),
    "start_job": lambda client, txn: RemoteJob(txn, None),
    "join_job": lambda client, parts: RemoteJob(*parts),
    "planning": lambda client, _: client.planning,
    "open_scan": TokenScan,
    "open_diff": lambda client, parts: reader_of(client, "open_diff", parts),
}


@remote_calls(
    "Client",
    "tables topics transactions abort_transaction keep_transaction_alive "
    "applied applications forget_applied stats metrics repair_clock check compact",
)
@remote_calls("Client", "create_index drop_index", by="_call_of_table")
@remote_calls("Client", "create_table recall_table", RemoteTable)
@remote_calls("Client", "create_topic", RemoteTopic)
class RemoteClient(RemoteHandle, Client):
    """See `txnkv.Client`.

    Args:
        address: as "grpc://host:port" or "grpc+tls://host:port".
        headers: of each call: the credentials.
        tls: options of the Flight client.
        keepalive_time: as `txnkv.connect` takes it.
        read_only: refuse to write.
    """

    twin = "Client"

    def __init__(
        self,
        address: str,
        headers: list[tuple[bytes, bytes]],
        tls: dict[str, Any],
        keepalive_time: float,
        read_only: bool,
    ) -> None:
        require_number("keepalive_time", keepalive_time)
        if not keepalive_time >= MIN_KEEPALIVE:
            raise ValueError(f"keepalive_time={keepalive_time:g}: at least {MIN_KEEPALIVE:g} s")
        self._connection = self
        self._channel = Channel(address, headers, tls, keepalive_time, _reference, read_only)
        self._metrics = Metrics()
        self.keepalive_time = keepalive_time
        self.addresses = (address,)
        self.is_open = True
        self.claims = {}
        self.claiming = new_lock()
        self.begun = 0  # transactions
        self.sessions = SharedWeakSet()
        self.handles = SharedWeakSet()
        self._learned: dict[int, tuple[Schema, int]] = {}
        try:
            self.tables()  # so that a wrong address or credential shows here
        except BaseException:
            self._channel.close()  # gRPC would go on knocking
            raise

    def reference(self) -> list[Any]:
        return ["h", 0]

    @property
    def path(self) -> str:
        return self._channel.address

    def __repr__(self) -> str:
        closed = ", closed" if self._channel.closed else ""
        return f"<Client of {self.path!r}{closed}>"

    @CachedProperty
    def planning(self) -> RemotePlanning:
        """See `txnkv.client.Planning`."""
        return RemotePlanning(self)

    @CachedProperty
    def pool(self) -> ThreadPoolExecutor:
        """Threads for flushes in the background."""
        return ThreadPoolExecutor(_FLUSHERS, thread_name_prefix="txnkv-remote-flush")

    @CachedProperty
    def committer(self) -> Committer:
        """Commits what is not waited for."""
        return Committer(self)

    def close(self) -> None:
        with closing_once(self) as first:
            if first and not self._channel.closed:
                self._close()

    def _close(self) -> None:
        with ending_joined(self):
            self.close_handles()
            self.is_open = False
            if "committer" in self.__dict__:
                self.committer.close()
            self._channel.closing = True
            for session in list(self.sessions):
                session.look_anew(self)  # waits for its request
            if "pool" in self.__dict__:
                self.pool.shutdown()
            self._channel.close()

    @property
    def _is_over(self) -> bool:
        return self._channel.closed

    @contextmanager
    def _asking_once(self) -> Iterator[None]:
        """Wait for a server that hangs once only, in the block."""
        self._channel.closing = True
        try:
            yield
        finally:
            self._channel.closing = False

    def require_open(self) -> None:
        self._channel.require_open()
        if not self.is_open:
            raise ClosedError(f"the client of {self.path} is being closed; connect again")

    def require_writable(self) -> None:
        self.require_open()
        self._channel.require_writable()

    def elsewhere(self, name: str, what: Any) -> Any:
        """Open what a token names, at the server."""
        self.require_open()
        return _MADE[name](self, what)

    # -- catalog -----------------------------------------------------------------------

    @like(Client.table)
    def table(self, name: Any) -> RemoteTable:
        return self._table_told("table", name)

    @like(Client.topic)
    def topic(self, name: Any) -> RemoteTopic:
        return RemoteTopic(self, self._call_of_topic("topic", name))

    def learn_schema(self, table: int, schema: Schema) -> None:
        """Note that a table has this schema now, by its id."""
        known = self._learned.get(table)
        if known is None or not is_same(known[0], schema):
            self._learned[table] = schema, self.begun

    def learned(self, table: int) -> int:
        """Return how many transactions had begun when the schema of a table was last another."""
        _, begun = self._learned.get(table, (None, self.begun))  # another client's handle
        return begun

    def rename_table(self, table: AnyTable, name: str) -> Table:
        return self._table_told("rename_table", table, name)

    def table_of(self, table: Any) -> RemoteTable:
        """Return the table of a name or handle."""
        if isinstance(table, str):
            return self.table(table)
        found = getattr(table, "info", table)
        if not isinstance(found, RemoteTable):
            raise TypeError(f"a table is a name or a Table, not {type(table).__name__}")
        if found._connection is not self:
            self.require_own(found, f"table {found.name!r}", f"client.table({found.name!r})")
        return found

    def table_info(self, table: Any) -> Any:
        return self.table(table)

    def topic_info(self, topic: Any) -> TopicInfo:
        return self.topic(topic).info

    def topic_of(self, topic: Any) -> RemoteTopic:
        """Return the topic of a name or handle."""
        if isinstance(topic, str):
            return self.topic(topic)
        info = getattr(topic, "info", topic)
        if not isinstance(info, TopicInfo):
            raise TypeError(f"a topic is a name or a Topic, not {type(topic).__name__}")
        self.require_own(topic, f"topic {info.name!r}", f"client.topic({info.name!r})")
        return topic if isinstance(topic, RemoteTopic) else RemoteTopic(self, {"info": info})

    @like(Client.drop_table)
    def drop_table(self, name: Any, missing_ok: bool = False, keep: float = 0.0) -> None:
        with suppress(*((TableNotFoundError,) if missing_ok else ())):
            self._call_of_table("drop_table", name, missing_ok, keep)

    @like(Client.drop_topic)
    def drop_topic(self, name: Any, missing_ok: bool = False) -> None:
        with suppress(*((TopicNotFoundError,) if missing_ok else ())):
            self._call_of_topic("drop_topic", name, missing_ok)

    def _table_told(self, call: str, table: Any, *args: Any) -> RemoteTable:
        made = RemoteTable(self, self._call_of_table(call, table, *args))
        if not isinstance(table, str):
            self.table_of(table).learn_name(made.name)
        return made

    def _call_of_table(self, name: str, table: Any, *args: Any, **named: Any) -> Any:
        """Call with a table by its name, or by the handle: its name may be another's by now."""
        given = table if isinstance(table, str) else self.table_of(table)
        return self._call(name, given, *args, **named)

    def _call_of_topic(self, name: str, topic: Any, *args: Any) -> Any:
        return self._call(name, topic if isinstance(topic, str) else self.topic_of(topic), *args)

    def require_own(self, handle: Any, what: object, take: str) -> None:
        of = getattr(handle, "_connection", self)
        if of.path != self.path and Planning.of(of).store_id != self.planning.store_id:
            raise ValueError(
                f"{what} is one of the store {of.path}, and this is {self.path}: take {take}, of a "
                "client of this store"
            )

    # -- transactions ------------------------------------------------------------------

    @like(Client.new_transaction)
    def new_transaction(self, *args: Any, **named: Any) -> Transaction:
        if not args and not named:  # as most begin
            return self._begin({})
        options = arguments(Client.new_transaction, args, named)
        return self._begin(options | self.named(options.pop("name")))

    def named(self, name: str | None) -> dict[str, Any]:
        """Return the options of a transaction with a name: that, and how it was claimed here."""
        if name is None:
            return {}
        with self.claiming:
            if name not in self.claims:
                self._begin(DEFAULTS | {"name": name}).rollback()
        return {"name": name, "claims": {name: self.claims[name]}}

    def _begin(self, options: dict[str, Any]) -> RemoteTransaction:
        self.require_writable()
        at_once = bool(options) and not _is_sound(options)
        return RemoteTransaction(self, self, "begin", (options or None,), at_once=at_once)

    def attempts(self, options: dict[str, Any]) -> Any:
        return _RemoteAttempts(self, options)

    @like(Client.transaction_state)
    def transaction_state(self, id: int) -> TxnState:
        given, spare = as_index("a transaction's id", id), self._channel.spare_ids
        for each in list(spare):
            if given in (each, TxnId(each).local):  # none begins by what it was asked about
                with suppress(ValueError):
                    spare.remove(each)
        found: TxnState = self._call("transaction_state", given)
        return found

    def retries(self, attempts: int | None, deadline: float | None) -> Retries:
        return Retries(self._metrics, attempts, deadline)

    def outcome(self, txn_id: int) -> TxnState:
        """Ask how a transaction ended until the server answers, for as long as one could live
        without its client.
        """
        give_up = time.monotonic() + self.keepalive_time + self._channel.patience
        while True:
            try:
                found: TxnState = self._call("outcome", txn_id)
            except TxnNotFoundError:
                return TxnState.ABORTED  # it did not arrive
            except UnavailableError as error:
                if time.monotonic() > give_up:
                    words = f"{error}. Transaction {txn_id}: ask for its state later"
                    raise CommitOutcomeUnknownError(words, txn_id) from error
                time.sleep(0.1)
            else:
                return found

    def new_session(
        self, flush_mode: FlushMode = "manual", buffer_bytes: int | None = BUFFER_BYTES
    ) -> Session:
        self.require_writable()
        return RemoteSession(self, None, flush_mode, buffer_bytes)

    def snapshot(self, at: Timestamp | datetime | None = None) -> Snapshot:
        return RemoteSnapshot(self, at)

    @like(Client.timestamp_of)
    def timestamp_of(self, at: At) -> Timestamp:
        found: Timestamp = self.planning.timestamp_of(at)
        return found

    # -- maintenance -------------------------------------------------------------------

    def backup(self, dest: str | os.PathLike[str], **options: Any) -> Any:
        raise NotSupportedError("a backup is made on the store's host: `txnkv backup` there")

    def accept_loss(self, part: str, *, dry_run: bool = False) -> Any:
        raise NotSupportedError("a loss is accepted on the store's host: `txnkv repair` there")


@remote_calls(
    "Planning",
    "schema_of changed timestamp_of kept plan pending is_applied end_named names_below name "
    "abandon overview subscriptions subscription",
)
class RemotePlanning(RemoteHandle, Planning):
    """See `txnkv.client.Planning`."""

    twin = "Planning"

    def __init__(self, connection: RemoteClient) -> None:
        self._connection = connection
        self._make_again()

    def _make_again(self) -> bool:
        told = self._made(self._connection, "planning")
        self.store_id, self.folder, self.boot = told["store_id"], told["folder"], told["boot"]
        self.inode = tuple(told.get("inode", (0, 0)))
        return True

    def latest(self) -> Snapshot:
        return self._or_again(lambda: RemoteSnapshot(self._connection, None, self))

    def read_part(
        self, topic: str, part: TopicPart, number: int, max_bytes: int, may_lose: bool
    ) -> Iterator[pa.RecordBatch]:
        call = Call(self.twin, self, "read_part", (topic, part, number, max_bytes, may_lose))
        return self._or_again(lambda: self.channel.stream(call))[1]

    def was_rolled_back(self, txn: Any) -> bool:
        return bool(txn.rolled_back)


class _RemoteAttempts(RemoteHandle):
    """The attempts of one `run`, at the server."""

    twin = "Attempts"

    def __init__(self, connection: RemoteClient, options: dict[str, Any]) -> None:
        self._connection = connection
        self._options = options
        self._begun = self._lost = self.ahead = False
        unknown = options.keys() - DEFAULTS.keys()
        if unknown:
            raise TypeError(f"a transaction has no option {', '.join(sorted(unknown))}")
        self._make()

    def _make(self) -> None:
        self._server = self.channel.server
        options = self._options | self._connection.named(self._options.get("name"))
        call = Call("Client", self._connection, "attempts", (options,))
        call.makes = self.channel.new_handle()
        self.channel.later(call)
        self.numbered(call.makes)

    @property
    def blocked(self) -> bool:
        """To `wait` is a request; the first one is not waited for."""
        return self._begun

    def failed(self, error: Exception) -> None:
        """The last one failed, and there is to be another."""
        self._lost = isinstance(error, TransactionConflictError)

    def wait(self, thread: int | None = None) -> bool:
        """Wait for the turn to begin another."""
        if self._begun:
            self.ahead = False
            with suppress(UnavailableError):
                self.ahead = self._call("wait", None, self._lost)
        return self.ahead

    def begin(self) -> Transaction:
        """The next transaction; it begins with the next request."""
        self._begun = True
        if self._server != self.channel.server:
            self._make()
        named = self._options.get("name") is not None
        return RemoteTransaction(self._connection, self, "begin", (), at_once=named)

    def close(self) -> None:
        """The run is over."""
        self.channel.drop(self.number)


def _is_sound(options: Mapping[str, Any]) -> bool:
    """Tell whether a transaction may begin with the next request, since the server takes it so."""
    timeout, lock_timeout = options["timeout"], options["lock_timeout"]
    return (
        options["isolation"] in _ISOLATIONS
        and options["locking"] in _LOCKINGS
        and (timeout is None or (type(timeout) in (int, float) and timeout > 0))
        and type(lock_timeout) in (int, float)
        and lock_timeout >= 0
        and "name" not in options  # what others have open ends now
    )


def _reference(guest: str, address: str, value: Any) -> list[Any] | None:
    if isinstance(value, RemoteHandle):
        found = value.reference()
        if isinstance(value, RemoteSnapshot) or (found[0] == "h" and value.channel.guest != guest):
            return _foreign(value, address)
        return found
    if isinstance(value, SubscriptionInfo):
        return ["sub", [value.topic.name, value.topic.id, value.name, value.store]]
    return None


def _foreign(value: RemoteHandle, address: str) -> list[Any]:
    """Return a value for a handle of another client, whose number may be one of this client's; or
    for a snapshot, which a server that was started again does not know.
    """
    if not isinstance(value, RemoteSnapshot):
        raise ValueError(f"{value!r} is of another client: join a transaction by its token")
    if value.channel.address != address:
        raise ValueError(
            f"the snapshot is one of the store {value.channel.address}, and this is {address}: "
            "take client.snapshot(), of a client of this store"
        )
    return ["v", int(value.timestamp)]
