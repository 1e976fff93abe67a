"""Transactions of a store on another host.

    txn.insert, txn.send    checked here, and wait here
    txn.get, txn.ack        what waits goes along, in front
    txn.commit              begin, what waits, and the commit, in one request

A transaction begins at the server with this client's next request, whichever that is: all that this
client learns from the store after `new_transaction` it learns from after its begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from txnkv.coordinator import ShieldedFuture, Timestamp, TxnId, TxnState
from txnkv.errors import (
    AuthenticationError,
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    RowErrors,
    TxnkvError,
    TxnNotFoundError,
    UnavailableError,
)
from txnkv.remote.channel import Call
from txnkv.remote.remote_handles import RemoteHandle, RemoteScan, RemoteTable, TableThen
from txnkv.remote.remote_session import RemoteSession
from txnkv.remote.wire import LostHandleError, arguments, like, remote_calls, tells_of_change
from txnkv.storage import TaskThread, new_lock, new_rlock, shielded
from txnkv.tables import Schema
from txnkv.transaction import (
    BUFFER_BYTES,
    FlushMode,
    Job,
    Scan,
    Session,
    Transaction,
    TxnToken,
    note_joined,
)

T = TypeVar("T")

_MOST_TOGETHER: Final = 256
"""Commits of one request."""


@remote_calls("Transaction", "mark_applied")
@remote_calls("Transaction", "get get_by get_many", by="_read")
class RemoteTransaction(RemoteHandle, Transaction):
    """See `txnkv.Transaction`.

    Args:
        connection: to the server.
        source: the handle that makes it.
        name: of the call on that: "begin" or "join".
        args: of that.
        at_once: make it now; else with the next request.
    """

    twin = "Transaction"

    def __init__(
        self,
        connection: Any,
        source: Any,
        name: str,
        args: tuple[Any, ...],
        *,
        at_once: bool,
    ) -> None:
        self._connection = self.connection = connection
        self._joined = name == "join"
        self._token: TxnToken | None = args[0] if self._joined else None
        self._told: list[int] | None = None
        self._spare = 0
        self._asked = False  # how it ended, by an id that it perhaps did not begin by
        self.over = False
        self.rolled_back = False
        self.ending = False
        self._commit_called = False  # also one that refused rows, after which it is open
        self._committed_at: Timestamp | None = None
        self._going: Future[Timestamp] | None = None  # its last `commit_async`
        self._unsure = ""  # a call broke off, and nobody knows what of it was done
        self.given = False  # beside what its sessions were given
        self._sessions: tuple[RemoteSession, ...] = ()  # changed under the lock
        self._lock = new_rlock()
        self._own_session = None
        self._then: dict[int, TableThen] = {}
        connection.begun += 1
        self._order = 0 if self._joined else connection.begun
        number = self.channel.new_handle()
        if self._joined:
            note_joined(self, connection, RemoteTransaction._write_out, RemoteTransaction.drop)
        elif not at_once:
            self._spare = self.channel.spare_id()
            args = (*args, self._spare) if self._spare else args
        call = Call(source.twin, source, name, args, {}, number, self._learn)
        if at_once:
            self.channel.call(call)
        else:
            self.channel.later(call)
        self.numbered(number)

    def _learn(self, told: list[Any] | int | None) -> None:
        if told is None:
            return  # it could not be made, as who uses it is told
        if isinstance(told, int):  # it did not begin by the id of an earlier server
            self._spare = told
            if self._asked:
                raise LostHandleError(
                    "it was told of the transaction that it never began: begin again"
                )
            return
        self._told = told[:3]
        if len(told) > 3 and told[3]:
            self.channel.spare_ids.append(told[3])
        if len(told) > 4:
            name, *claim = told[4:]
            self._connection.claims[name] = claim

    @property
    def committing(self) -> bool:
        """Its commit, and no other request, takes along all that waits."""
        return self.ending and not self.over

    @property
    def _known_id(self) -> int:
        """Its id; 0: it is not known, and nothing of it was sent to be committed."""
        return self._spare if self._told is None else self._told[0]

    def _about(self) -> list[int]:
        if self._told is None:
            self._told = self._call("about")
        assert self._told is not None
        return self._told

    @property
    def id(self) -> TxnId:
        return TxnId(self._about()[0])

    @property
    def snapshot(self) -> Timestamp:
        return Timestamp(self._about()[1])

    @property
    def age(self) -> Timestamp:
        return Timestamp(self._about()[2])

    def serialize(self, keepalive: bool = False) -> TxnToken:
        with self._waiting_calls() as calls:
            if self._token is None:  # its own, which keeps it alive
                calls.append(self._serialize_call(True))
                calls[-1].done = self._keep_token
            calls.append(self._serialize_call(keepalive))
            try:
                found: TxnToken = self.channel.call(*calls)
            except LostHandleError:
                if not self._make_again():
                    raise
                found = self.channel.call(self._serialize_call(keepalive))
        return found

    def _serialize_call(self, keepalive: bool) -> Call:
        return Call(self.twin, self, "serialize", (keepalive, self.channel.address))

    def _keep_token(self, token: TxnToken) -> None:
        self._token = token
        self.channel.shared.add(self)

    def _make_again(self) -> bool:
        """Join it again, where others know of it and nothing that it was given can be lost."""
        given = self.given or any(session.given for session in self._sessions)
        return not given and self.rejoin()

    def rejoin(self) -> bool:
        """Join it again at a server that has lost it; whether that can be."""
        if self._token is None:
            return False
        self.numbered(self.channel.new_handle())
        args = (self._token,)
        client = self._connection
        self.channel.later(Call("Client", client, "join", args, {}, self.number, self._learn))
        for session in self._sessions:
            session.make()
        return True

    def revive(self) -> None:
        """See that the server has it, which sends its heartbeats."""
        if self.ending or self._call("state").ended:
            self.channel.shared.discard(self)

    def __repr__(self) -> str:
        return f"<Transaction {'not begun yet' if self._told is None else self.id!r}>"

    # -- its end -----------------------------------------------------------------------

    @shielded
    def commit(self) -> Timestamp:
        while True:
            with self._lock:
                if self._committed_at is not None:
                    return self._committed_at
                if (going := self._going) is None or going.done():
                    return self.ended_by(partial(self._committed, self._begin_to_end()))
            with suppress(RowErrors):  # the future tells of them, and the others are committed
                return going.result()

    def _committed(self, calls: list[Call]) -> Timestamp:
        commit = Call(self.twin, self, "commit")
        try:
            found: Timestamp = self.channel.call(*calls, commit)
        except LostHandleError:
            if not self._make_again():
                raise
            found = self.channel.call(commit)
        return found

    def _begin_to_end(self) -> list[Call]:
        with self._lock:
            self._connection.require_open()
            if not (self._known_id or self._joined):
                self._about()  # so that its outcome can be asked for, should the answer be lost
            for session in self._sessions:
                session.before_commit()
            self._require_sure()
            # First: what other threads added until now goes along, and from now on it is refused.
            self.ending = self._commit_called = True
            return [call for session in self._sessions for call in session.taken()]

    def ask(self, do: Callable[[], T]) -> T:
        """Do what is asked of the server in the transaction and does not end it.

        Raises:
            UnavailableError: they broke off. Where nobody else knows of the transaction it cannot
                be committed any more.
        """
        try:
            return do()
        except CommitOutcomeUnknownError as error:
            if self._token is not None or error.txn_id:
                raise
            self._unsure = (
                f"the answer to a call of the transaction was lost ({self.channel.address}), so "
                "that it cannot be committed: roll it back, and do its work again"
            )
            raise UnavailableError(self._unsure) from None

    def ended_by(self, commit: Callable[[], Timestamp]) -> Timestamp:
        """Return what a commit gives, and know how the transaction stands after it."""
        self._committed_at = self._attempted(commit)
        self.over = True
        return self._committed_at

    def _attempted(self, commit: Callable[[], T]) -> T:
        try:
            return commit()
        except LostHandleError:
            self._require_unknown()
            raise
        except (RowErrors, UnavailableError, AuthenticationError):  # it was not begun
            self.ending = False
            raise
        except CommitOutcomeUnknownError as error:
            if error.txn_id or not self._known_id:
                raise
            raise self._unknown(f"{error} (transaction {self._known_id})") from None
        except Exception:
            with suppress(TxnkvError):
                state = self.state
                self.over, self.ending = state.ended, state is not TxnState.OPEN
            raise

    def _require_unknown(self) -> None:
        """The server has no handle of it: was it committed by a call that was not answered?

        Raises:
            InvalidTxnStateError: it was, as the store has it.
            CommitOutcomeUnknownError: that cannot be told now.
        """
        id = self._known_id
        if not id:
            return  # it never began
        try:
            state = self._connection.transaction_state(id)
        except TxnNotFoundError:
            return  # it was in the server's memory alone
        except UnavailableError as error:
            raise self._unknown(f"{error} (transaction {id})") from None
        if state is TxnState.COMMITTED:
            self.over = True
            raise InvalidTxnStateError(f"cannot commit: transaction {id} is committed already")
        if state is not TxnState.OPEN and not state.ended:
            raise self._unknown(f"the commit of transaction {id} goes on: ask for its state")

    def _unknown(self, text: str) -> CommitOutcomeUnknownError:
        return CommitOutcomeUnknownError(text, TxnId(self._known_id))

    def start_commit(self) -> None:
        before, self.ending = self.ending, True  # first, so that no other thread adds a row
        if any(session.calls() for session in self._sessions):
            self.ending = before
            raise InvalidTxnStateError(
                "cannot start committing: a session of the transaction has rows that were not "
                "flushed. Flush it first, or call commit()"
            )
        self._attempted(lambda: self._call("start_commit"))

    def is_commit_complete(self) -> bool:
        self.over = bool(self._call("is_commit_complete"))
        return self.over

    @shielded
    def commit_async(self) -> Future[Timestamp]:
        with self._lock:
            if self._committed_at is not None:
                found = ShieldedFuture[Timestamp]().begun()
                found.take(self.commit)
                return found
            if self._going is None or self._going.done():
                calls = self._begin_to_end()
                for call in calls:
                    self.channel.require_writable(call)
                self._going = self._connection.committer.add(self, calls)
            assert self._going is not None
            return self._going

    @property
    def state(self) -> TxnState:
        try:
            found: TxnState = self._call("state")
        except LostHandleError:
            self._asked = self._told is None and (self.ending or self._commit_called)
            if not self._known_id or not (self._told or self._asked):
                raise
            found = self._connection.transaction_state(self._known_id)
        return found

    def rollback(self) -> None:
        if self._going is not None:
            self._going.exception()  # or it would be taken for rolled back, and yet be committed
        with self._lock:
            self.ending = True
            for session in self._sessions:
                session.sent()
            try:
                self._call("rollback")
            except LostHandleError:  # its server gave it up, if nobody else knew of it
                if self.rejoin():
                    self._call("rollback")
            self.over = self.rolled_back = True

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._let_go)
            if self._joined and not (self.over or self.ending):
                for session in reversed(self._sessions):
                    stack.callback(session.flush_for_commit)

    def _write_out(self) -> None:
        if any(session.has_pending for session in self._sessions):
            self.close()

    def drop(self) -> None:
        for session in self._sessions if self._joined else ():
            session.sent()
        with suppress(TxnkvError):  # the caller's own error is the one to be told
            self._let_go()

    def _let_go(self) -> None:
        self.channel.shared.discard(self)
        if self._told is not None and not self.over and not self.channel.closed:
            self._call("close")

    # -- sessions ----------------------------------------------------------------------

    def new_session(
        self, flush_mode: FlushMode = "manual", buffer_bytes: int | None = BUFFER_BYTES
    ) -> Session:
        self._connection.require_open()
        if self.ending or self._commit_called:
            raise InvalidTxnStateError(
                "transaction commit has already started: the transaction takes no new sessions"
            )
        session = RemoteSession(self._connection, self, flush_mode, buffer_bytes)
        with self._lock:
            self._sessions += (session,)
        return session

    def _session(self) -> Session:
        if (found := self._own_session) is None:
            with self._lock:
                if (found := self._own_session) is None:
                    made = RemoteSession(self._connection, self, "manual", None, own=True)
                    self._sessions += (made,)
                    found = self._own_session = made
        return found

    def _put(self, table: Any, op: str, row: Any) -> None:
        getattr(self._session(), op)(table, row)

    @like(Transaction.send)
    def send(self, *args: Any, **named: Any) -> None:
        self._session().send(*args, **named)

    def ack(self, subscription: Any, message: Any) -> None:
        self._session().ack(subscription, message)

    def ack_cumulative(self, subscription: Any, message: Any) -> None:
        self._session().ack_cumulative(subscription, message)

    def table_then(self, table: RemoteTable) -> RemoteTable:
        """Return a table as rows of this transaction are for it: where the client learned of other
        columns since its begin, by those of then.
        """
        found = self._then.get(table.id)
        if found is None:
            if self._connection.learned(table.id) < self._order:
                return table
            schema: Schema = self._call("schema_of", table)
            found = self._then[table.id] = TableThen(table, schema)
        return found

    # -- reading -----------------------------------------------------------------------

    def _read(self, name: str, table: Any, *args: Any, **named: Any) -> Any:
        call = Call(self.twin, self, name, (self._connection.table_of(table), *args), named)
        with self._waiting_calls() as calls:
            return self.ask(lambda: self.channel.call(*calls, call))

    @like(Transaction.scan)
    def scan(self, *args: Any, **named: Any) -> Scan:
        options = arguments(Transaction.scan, args, named)
        table = self._connection.table_of(options.pop("table"))
        return RemoteScan(self._connection, self, options, table=table, before=self._send_waiting)

    def _require_sure(self) -> None:
        if self._unsure:
            told = InvalidTxnStateError(self._unsure)
            told.retriable = True
            raise told

    @contextmanager
    def _waiting_calls(self) -> Iterator[list[Call]]:
        """Take what waits, as calls in front of another, which the block makes: until then no other
        thread adds to it, or sends it too.
        """
        self._require_sure()
        with ExitStack() as held:
            yield [call for session in self._sessions for call in session.taken(held)]

    def _send_waiting(self) -> None:
        with self._waiting_calls() as calls:
            if calls:
                self.ask(lambda: self.channel.call(*calls))

    # -- as a context manager ----------------------------------------------------------

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._joined:
            (self.close if error is None else self.drop)()
        elif error is not None:
            self._leave(error)
        elif not self.over:
            try:
                self.commit()
            except BaseException as failed:
                self._leave(failed)
                raise

    def _leave(self, error: BaseException) -> None:
        """Roll back on the way out of an exception, but not a commit that is on its way."""
        going = self._going is not None and not self._going.done()
        unsure = isinstance(error, CommitOutcomeUnknownError)
        if self.over or going or unsure or not self._lock.acquire(blocking=False):
            return
        try:
            with suppress(TxnkvError):
                self.rollback()
                if isinstance(error, RowErrors) and self._told is not None:
                    error.note_rollback(self.id)
            self.drop()
        finally:
            self._lock.release()


@remote_calls("Job", "abort")
class RemoteJob(RemoteHandle, Job):
    """See `txnkv.transaction.Job`.

    Args:
        id: of a job that was started; None: start one.
    """

    twin = "Job"

    txn: RemoteTransaction

    def __init__(self, txn: RemoteTransaction, id: str | None) -> None:
        self._connection = txn.connection
        self.txn = txn
        if id is None:
            try:
                id = self._made(txn, "start_job")["id"]
            except LostHandleError:
                if not txn._make_again():
                    raise
                id = self._made(txn, "start_job")["id"]
            self.id = id
        else:
            self.id = id
            self._join()

    def _join(self) -> None:
        number = self.channel.new_handle()
        self.channel.later(Call(self.txn.twin, self.txn, "join_job", (self.id,), {}, number))
        self.numbered(number)

    def _make_again(self) -> bool:
        if not self.txn._make_again():
            return False
        self._join()
        return True

    def session(self, attempt: str, *, alone: bool = False) -> Session:
        number = self.channel.new_handle()
        made = Call(self.twin, self, "session", (attempt,), {"alone": alone}, number)
        self.channel.later(made)
        return RemoteSession(self._connection, self.txn, "manual", None, made_by=made)

    def commit(self, attempts: Iterable[str], *, first: Iterable[str] = ()) -> None:
        self._call("commit", list(attempts), first=list(first))


class Committer:
    """Commits that nobody waits for, in the order of their calls.

    What has gathered while the request before was on its way goes in the next one; the server
    commits it all as one local thread would by `commit_async`.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._waiting: deque[tuple[RemoteTransaction, list[Call], Future[Timestamp]]] = deque()
        self._thread = TaskThread("txnkv-remote")
        self._sending = new_lock()  # in the order of the calls

    def add(self, txn: RemoteTransaction, calls: list[Call]) -> Future[Timestamp]:
        """Have a transaction committed, after these calls of it."""
        found = ShieldedFuture[Timestamp]().begun()
        self._waiting.append((txn, calls, found))
        if not self._thread.hand(self._send):
            self._send()
        return found

    def close(self) -> None:
        """Wait for what is on its way."""
        self._thread.close()

    def _send(self) -> None:
        parts: list[tuple[RemoteTransaction, list[Call], Future[Timestamp]]] = []
        answers, failed = list[Any](), None
        with self._sending:
            while self._waiting and len(parts) < _MOST_TOGETHER:
                parts.append(self._waiting.popleft())
            if not parts:
                return  # the request before took it along
            content = [[txn, [call.content() for call in calls]] for txn, calls, _ in parts]
            call = Call("Client", self._connection, "commits", (content,))
            try:
                answers = self._connection.channel.call(call)
            except Exception as error:
                failed = error
        if failed is not None:
            for txn, _, future in parts:
                _settle(future, txn, failed)
        for (txn, calls, future), answer in zip(parts, answers, strict=False):
            for each in calls:
                if each.done is not None:
                    each.done(None)
            _settle(future, txn, answer)


def _settle(future: Future[Timestamp], txn: RemoteTransaction, answer: Any) -> None:
    def commit() -> Timestamp:
        if isinstance(answer, Exception):
            raise answer
        found: Timestamp = answer
        return found

    try:
        txn.channel.changes += tells_of_change(answer)
        future.set_result(txn.ended_by(commit))
    except Exception as error:
        future.set_exception(error)
