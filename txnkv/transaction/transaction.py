"""Transactions as a user holds them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast

import pyarrow as pa

from txnkv.coordinator import LOCK_TIMEOUT, Mark, ShieldedFuture, Timestamp, TxnId, TxnState
from txnkv.errors import (
    InvalidTxnStateError,
    RowError,
    RowErrors,
    TableNotFoundError,
    TopicNotFoundError,
    TxnkvError,
)
from txnkv.storage import brief, lengthy, shielded, shielded_unless
from txnkv.tables import Operation, Outcome, ReadView, SmallWrites, TableEngine, TableInfo, lookup
from txnkv.tables import operations as ops
from txnkv.transaction import commit_protocols
from txnkv.transaction import token as tokens
from txnkv.transaction.begin import FlushMode, Isolation, Locking, begin, require_client
from txnkv.transaction.connection import (
    Acknowledged,
    AnySubscription,
    AnyTable,
    AnyTopic,
    Closing,
    Connection,
    Grid,
    discard_sessions,
    flush_sessions,
    note_joined,
)
from txnkv.transaction.context import TxnContext
from txnkv.transaction.local_state import ROLLED_BACK, Local
from txnkv.transaction.session import Session
from txnkv.transaction.session_buffer import BUFFER_BYTES, NO_LIMIT, SessionRows, WriteResult
from txnkv.transaction.table_scan import Order, Scan
from txnkv.transaction.token import TxnToken
from txnkv.transaction.uncommitted import Heart


class Transaction(Closing):
    """One transaction. Shared by threads; crosses processes as a token.

    As a context manager it commits at the end and rolls back on an exception; one made by
    `deserialize` does neither. Once dropped it is aborted when its keepalive time has passed.
    """

    _own_session: Session | None = None
    _hand: SmallWrites | None = None
    _heart: Heart | None = None
    _elsewhere = "hand on txn.serialize(), and join by Transaction.deserialize(client, token)"

    def __init__(
        self, connection: Connection, context: TxnContext, *, joined: bool, keepalive: bool
    ) -> None:
        self.connection, self.context = connection, context
        self._rows, self._joined, self._keepalive = SessionRows(NO_LIMIT), joined, keepalive
        # Weakly, so that who drops the handle stops its heartbeats, whatever sessions live on.
        context.handle = weakref.ref(self)
        if joined:
            context.buffers = [self._rows]
            note_joined(context, connection, flush_sessions, discard_sessions, context.buffers)
        if context.local.stored:
            self.start_heart()

    @classmethod
    def begin(
        cls,
        connection: Connection,
        timeout: float | None = 60.0,
        isolation: Isolation = "snapshot",
        locking: Locking = "optimistic",
        keepalive: bool = True,
        lock_timeout: float = LOCK_TIMEOUT,
        age_ts: Timestamp | None = None,
        spare: int | None = None,
    ) -> Transaction:
        """Begin a transaction; see `Client.new_transaction`, for `age_ts` and `spare` `begin`."""
        if not connection.is_open or connection.instance.read_only:
            connection.require_writable()
        context = begin(
            connection.instance,
            timeout=timeout,
            isolation=isolation,
            locking=locking,
            keepalive=connection.keepalive_time,
            lock_timeout=lock_timeout,
            age_ts=age_ts,
            spare=spare,
        )
        made = cls(connection, context, joined=False, keepalive=keepalive)
        if locking == "optimistic":
            made._offer(context.rows)
        return made

    @property
    def id(self) -> TxnId:
        """128 bits: the store's coordinator id (`.tcid`), then `.local`."""
        return self.context.id

    @property
    def snapshot(self) -> Timestamp:
        """Everything that committed at or below it is what the transaction reads."""
        return self.context.snapshot

    @property
    def age(self) -> Timestamp:
        """The time that wait-die goes by: the begin, in `client.run` that of the first attempt."""
        return self.context.row.age_ts or self.context.row.begin_ts

    @property
    @shielded_unless(lambda self: self.context.local.at in (Local.IN_MEMORY, Local.COMMITTED))
    def state(self) -> TxnState:
        """The state in the status table.

        Raises:
            TxnNotFoundError: it ended so long ago that it was forgotten.
            CommitOutcomeUnknownError: its commit broke off, and how that ended was forgotten.
        """
        self.connection.require_open()
        return commit_protocols.current(self.context).state

    def __repr__(self) -> str:
        row, at = self.context.row, f"snapshot {int(self.snapshot)}"
        return f"<Transaction {self.id.local}, {row.isolation}, {row.locking}, {at}>"

    def _grid(self) -> Grid:
        row, state, at = self.context.row, self.state.name, int(self.snapshot)
        begun = f"{row.begin_ts.datetime:%Y-%m-%d %H:%M:%S} UTC"
        names = ["id", "state", "begun", "isolation", "locking", "snapshot"]
        return names, [(self.id.local, state, begun, row.isolation, row.locking, at)]

    # -- commit, rollback --------------------------------------------------------------

    @shielded_unless(lambda self: commit_protocols.is_brief(self.context))
    def commit(self) -> Timestamp:
        """Flush the sessions, commit, and return when new snapshots everywhere see it.

        Returns:
            The commit timestamp; for a transaction that wrote nothing, its snapshot.

        Raises:
            RowErrors: rows were refused that nobody was told of yet: the transaction stays OPEN. Or
                two workers wrote the same key: it can only be rolled back, `mendable` is False.
            TransactionConflictError: another committed first what this one wrote, or read when
                it is serializable; this one is aborted.
            TransactionLockedError: by another; it is aborted, unless the message says: still open.
            TransactionTimedOutError: it passed its timeout; it is aborted.
            InvalidTxnStateError: it was aborted before, or a job still runs under it.
            StorageFullError: no room; it is not committed.
            CommitOutcomeUnknownError: the disk failed at the commit point; ask for the state.
        """
        self.connection.require_open()
        behind = self.context, self._rows, self._flush_for_end
        found = commit_protocols.commit_small(self.context, commit_protocols.begin_behind(*behind))
        return lengthy(self._commit_large)() if found is None else found

    @shielded
    def start_commit(self) -> None:
        """Begin to commit and return at once; `is_commit_complete` tells when it is done.

        Raises:
            InvalidTxnStateError: a session has rows that were not flushed, or it is not open.
        """
        self.connection.require_open()
        self._require_flushed()
        begun = commit_protocols.begin_behind(self.context, self._rows, self._require_flushed)
        if not commit_protocols.start(self.context, begun):
            self.start_commit()

    @shielded
    def is_commit_complete(self) -> bool:
        """True when the commit is done and finalized, False while it goes on.

        Raises:
            InvalidTxnStateError: it is still open, or was aborted (as the error that says why).
        """
        self.connection.require_open()
        if done := commit_protocols.is_complete(self.context):
            self._stop_heart()
        return done

    @shielded
    def commit_async(self) -> Future[Timestamp]:
        """`commit()` without waiting: one thread may have thousands of commits on their way.

        The sessions are flushed at the call; the future, not to be cancelled, alone has what
        `commit` returns or raises. Small ones commit in order of calls, large ones on a thread.
        """
        try:
            self.connection.require_open()
            begun = commit_protocols.begin_behind(self.context, self._rows, self._flush_for_end)
            return commit_protocols.submit(self.context, begun, self._commit_large)
        except TxnkvError as error:
            future = ShieldedFuture[Timestamp]().begun()
            future.set_exception(error)
            return future

    @shielded
    def mark_applied(self, app_id: str, version: int, source: str | None = None) -> None:
        """This transaction is version `version` of application `app_id`.

        When it has committed, `client.applied(app_id)` says so, and no other transaction commits
        this version or one below it. A transaction may be a version of several applications.

        Args:
            app_id: the application, any text.
            version: 0 or above; versions only grow, with gaps where there are some.
            source: who drives it, as a streaming query's id; another than is known is refused.

        Raises:
            AlreadyAppliedError: this version or a later one is committed. The transaction was
                aborted. `commit` raises it too, where another one was faster.
            ValueError: the application is driven by another source, or the transaction is another
                version of it; or an argument makes no sense. Nothing was marked.
            InvalidTxnStateError: the transaction is not open.
        """
        self.connection.require_open()
        self.context.mark(Mark(app_id, version, source))

    @shielded_unless(lambda self: commit_protocols.is_brief(self.context))
    def rollback(self) -> None:
        """Abort, and return when every participant has dropped what was staged. Twice is fine.

        Raises:
            InvalidTxnStateError: it is committed.
        """
        self.connection.require_open()
        context, sessions = self.context, self.context.sessions
        commit_protocols.abort_behind(context, lambda: self.abort_for(ROLLED_BACK))
        self._rows.discard()
        for session in sessions:
            session.discard()

    @shielded
    def close(self) -> None:
        """Stop heartbeats from this handle, and end nothing; twice is fine. One that joined by a
        token flushes first, since nobody else has what waits in it, and raises as `commit` does.
        """
        try:
            if self._joined:
                flush_sessions(self.context)
        finally:
            self._stop_heart()

    def drop(self) -> None:
        """Close one that joined, and forget what waits in it: its block failed."""
        discard_sessions(self.context)
        self._stop_heart()

    def _stop_heart(self) -> None:
        heart, self._heart, self._keepalive = self._heart, None, False
        if heart is not None and os.getpid() == heart.pid:
            self.context.instance.coordinator.heartbeats.remove(heart)

    # -- tokens, sessions --------------------------------------------------------------

    @shielded
    def serialize(self, keepalive: bool = False) -> TxnToken:
        """A token by which other processes join; its sessions are flushed first.

        Args:
            keepalive: whether those who join send heartbeats too.

        Raises as `flush`, and:
            NotSupportedError: it is serializable.
            InvalidTxnStateError: it ended or is being committed, and no other process knew of it.
        """
        self.connection.require_open()
        (context := self.context).require_process()
        tokens.require_shareable(context.row, "serialize")
        if context.local.at in (Local.IN_MEMORY, Local.STORED):
            if self._rows.lone:
                self._session()
            self._flush_first("serialize")
        if context.local.at is Local.STORED or not context.stored:
            context.share("serialize")
        at, row, told = context.instance, context.row, self.connection.addresses
        return tokens.issue(at.coordinator, at.store.store_id, row, keepalive, told)

    @classmethod
    @shielded
    def deserialize(cls, client: Connection, token: TxnToken | bytes | str) -> Transaction:
        """Join a transaction by its token, in any process, by a client that may write.

        Raises:
            InvalidTokenError: altered, forged, of another store, or expired.
            TxnNotFoundError: it ended so long ago that it was forgotten.
        """
        require_client(client)
        client.require_writable()
        if client.elsewhere is not None:
            return cast(Transaction, client.elsewhere("join", token))
        at = client.instance
        row, keepalive = tokens.admit(at.coordinator, at.store.store_id, token)
        return cls(client, TxnContext(at, row, stored=True), joined=True, keepalive=keepalive)

    def new_session(
        self, flush_mode: FlushMode = "manual", buffer_bytes: int | None = BUFFER_BYTES
    ) -> Session:
        """A session of this transaction; `Session` tells of the options.

        Raises:
            InvalidTxnStateError: commit was called already, or it is not open.
        """
        self.connection.require_open()
        if (context := self.context).local.commit_called:
            said = f"transaction {context.row.txn_id} takes no new sessions"
            raise InvalidTxnStateError(f"transaction commit has already started: {said}")
        session = Session(self.connection, context, flush_mode, buffer_bytes)
        with context.lock:
            context.sessions += (session,)
        context.local.withdraw()
        context.require_open("make a session")
        return session

    # -- writing: on a session of its own, made at the first call -------------------------

    def insert(self, table: AnyTable, row: Any) -> None:
        """Insert a row; see `Session.insert`."""
        if (hand := self._hand) is None or not hand.put(table, ops.INSERT, row):
            self._put(table, "insert", row)

    def insert_ignore(self, table: AnyTable, row: Any) -> None:
        """Insert a row, unless its key is there; see `Session.insert_ignore`."""
        self._put(table, "insert_ignore", row)

    def upsert(self, table: AnyTable, row: Any) -> None:
        """Insert a row, or give the one that is there new values; see `Session.upsert`."""
        if (hand := self._hand) is None or not hand.put(table, ops.PUT, row):
            self._put(table, "upsert", row)

    def update(self, table: AnyTable, row: Any) -> None:
        """Give the row with this key new values; see `Session.update`."""
        if (hand := self._hand) is None or not hand.put(table, ops.UPDATE, row):
            self._put(table, "update", row)

    def update_ignore(self, table: AnyTable, row: Any) -> None:
        """Give the row with this key new values, if it is there; see `Session.update_ignore`."""
        self._put(table, "update_ignore", row)

    def delete(self, table: AnyTable, key: Any) -> None:
        """Delete the row with this key; see `Session.delete`."""
        if (hand := self._hand) is None or not hand.put(table, ops.DELETE, key):
            self._put(table, "delete", key)

    def delete_ignore(self, table: AnyTable, key: Any) -> None:
        """Delete the row with this key, if it is there; see `Session.delete_ignore`."""
        self._put(table, "delete_ignore", key)

    def write(self, table: AnyTable, data: Any, op: Operation = "insert") -> WriteResult:
        """Write Arrow data; see `Session.write`."""
        return self._session().write(table, data, op)

    def send(
        self,
        topic: AnyTopic,
        value: Any,
        key: bytes | str | None = None,
        partition: int | None = None,
        headers: Any = None,
        timestamp: Any = None,
        deliver_at: Any = None,
    ) -> None:
        """Send one message; see `Session.send`."""
        said = value, key, partition, headers, timestamp, deliver_at
        if not self._rows.send(self.connection, self.context, topic, said):
            self._session().send(topic, *said)

    def send_batch(self, topic: AnyTopic, data: Any) -> WriteResult:
        """Send Arrow data; see `Session.send_batch`."""
        return self._session().send_batch(topic, data)

    def ack(self, subscription: AnySubscription, message: Acknowledged) -> None:
        """Acknowledge a message, its id, or a list of them; see `Session.ack`."""
        if (acks := self.context.local.acks) is not None and acks.take(subscription, message):
            self._rows.acked += 1
        else:
            self._rows.acknowledge(self.connection, self.context, subscription, message, False)

    def ack_cumulative(self, subscription: AnySubscription, message: Acknowledged) -> None:
        """Acknowledge all messages up to this one; see `Session.ack_cumulative`."""
        self._rows.acknowledge(self.connection, self.context, subscription, message, True)

    def flush(self) -> WriteResult:
        """Write and send what waits; see `Session.flush`."""
        return self._session().flush()

    def pending_errors(self) -> list[RowError]:
        """Return the rows refused since the last call; see `Session.pending_errors`."""
        return self._session().pending_errors()

    def _put(self, table: AnyTable, op: str, row: Any) -> None:
        """Take a row into memory, without a session; what is not known at sight waits."""
        with (context := self.context).lock:
            rows = self._rows
            if context.local.ending:
                context.require_open(op)
                context.local.require_more(op)
            few = self._own_session is None and rows.are_few
            if few and (own := context.rows_at_hand(op)) is not None:
                writer = self.connection.writer(table, context.row.snapshot_ts)
                values = writer.checker[op].take(row)
                if not rows.runs and (what := own.take(writer, op, values)):
                    rows.written.append(what)
                    self._offer(own)
                else:
                    rows.keep(writer, op, values)
                    context.touched = True
                    context.local.withdraw()
                return
        getattr(self._session(), op)(table, row)

    def _offer(self, own: SmallWrites) -> None:
        """Have the next calls go straight to the rows, where nothing waits before them."""
        if (local := self.context.local).hand is None and not (self._rows.runs or local.ending):
            self._hand = local.hand = own
            own.offer(local.lock, self.context.row.deadline, self._rows.written)
            if self.context.sessions or not self.connection.is_open:  # or they come now
                local.withdraw()

    def _session(self) -> Session:
        return self._own_session or self._begin_session()

    @brief  # else an interruption loses the message that it takes over
    def _begin_session(self) -> Session:
        with (context := self.context).lock:
            if (found := self._own_session) is None:
                found = Session(self.connection, context, "manual", None, self._rows)
                context.sessions += (found,)
                context.local.withdraw()
                self._own_session = found
                for name in ("insert", "upsert", "update", "delete", "send"):  # straight there now
                    self.__dict__[name] = getattr(found, name)
        return found

    # -- reading -----------------------------------------------------------------------

    def get(self, table: AnyTable, key: Any) -> dict[str, Any] | None:
        """The row with this key in the transaction's snapshot or its own writes, or None."""
        if (hand := self._hand) and (found := hand.find(table, key)) is not NotImplemented:
            return found
        if (context := self.context).sessions or self._rows.runs:
            self._flush_first()
        with context.lock:
            own = context.rows_at_hand("read")
            writer = self.connection.writer(table, context.row.snapshot_ts)
            if own is not None:
                self._offer(own)
                return own.get(writer, key)
        engine, info, view = self._before_read_of(table)
        return lookup.get(engine, engine.row_writer(info), view, key)

    def get_by(self, table: AnyTable, columns: str | Sequence[str], values: Any) -> list[Any]:
        """The rows with these values in the columns of an index, as dicts; see `Table.get_by`."""
        return lookup.get_by(*self._before_read_of(table), columns, values)

    def get_many(self, table: AnyTable, keys: Sequence[Any]) -> pa.Table:
        """The rows with these keys, in their order; a row of nulls where there is none."""
        return lookup.get_many(*self._before_read_of(table), keys)

    def scan(
        self,
        table: AnyTable,
        columns: Sequence[str] | None = None,
        where: Any = None,
        ordered: Order = False,
        limit: int | None = None,
    ) -> Scan:
        """A scan of the transaction's snapshot and its own writes, which are flushed first."""
        info = self.context.table_at_begin(self.connection.table_info(table))
        seen = info, self._view, columns, where, ordered, limit, self._shared_view
        return Scan.over(self.connection, *seen)

    # -- inside ------------------------------------------------------------------------

    def _before_read_of(self, table: AnyTable) -> tuple[TableEngine, TableInfo, ReadView]:
        info, engine = self.connection.table_info(table), self.context.instance.engine
        return engine, engine.at(info, (view := self._view()).snapshot), view

    def _view(self) -> ReadView:
        self._flush_first()
        return self.context.view()

    def _shared_view(self) -> ReadView:
        self._flush_first()
        tokens.require_shareable(self.context.row, "hand out tokens of a scan of")
        self.context.ensure_large()
        return self.context.view().until_now(self.context.instance.engine)

    def _flush_first(self, what: str = "read") -> None:
        self.connection.require_open()
        self.context.require_open(what)
        if self._rows.runs:
            self._write_rows()
            if self._own_session is not None:
                self._own_session.flush_for_commit()
        for session in [each for each in self.context.sessions if each.has_pending]:
            session.flush_for_commit()

    def start_heart(self) -> None:
        """The transaction is stored: from now on it needs heartbeats."""
        if self._keepalive and self._heart is None and not self.context.local.ended:
            self._heart = Heart(self.context.row)
            self.context.instance.coordinator.heartbeats.add(self._heart)

    def _flush_for_end(self, gated: bool) -> None:
        (context := self.context).local.commit_called = True
        try:
            if self._rows.lone and not self._rows.give(context):
                self._session()
            if self._rows.runs:
                self._write_rows()
            for session in context.sessions if gated else ():
                session.end()  # its short cuts, too
                session.flush_for_commit()
            if context.unsettled:
                context.settle()
        except (TableNotFoundError, TopicNotFoundError) as error:
            with suppress(InvalidTxnStateError):  # the rest is not committed without them
                self.abort_for(str(error))
            raise
        except InvalidTxnStateError as error:
            if not error._commits:  # else it may say what is in the commit
                context.look_open("commit")  # ended by another handle: the error that says why
            raise

    def _require_flushed(self, gated: bool | None = None) -> None:
        if self._rows or any(session.has_pending for session in self.context.sessions):
            said = "a session of the transaction has rows that were not flushed. Flush it first"
            raise InvalidTxnStateError(f"cannot start committing: {said}, or call commit()")
        if gated is not None:
            self._flush_for_end(gated)

    def _write_rows(self) -> None:
        """Write the rows that wait; more than a few wait for a session to be flushed."""
        if self._own_session is None and self.context.local.at is Local.IN_MEMORY:
            self._write_few()
        if self._rows.runs:
            self._session()

    @brief  # else an interruption of a read ends it with the rows that it has taken
    def _write_few(self) -> None:
        """Write what waits; where rows are refused, a session knows of them."""
        refused: list[Outcome] = []
        with (context := self.context).lock:
            try:
                self._rows.write(context, refused.append, context.lock, counted=False)
            finally:
                for outcome in refused:
                    self._session()._errors.keep(outcome)

    def abort_for(self, reason: str) -> None:
        """Abort it, for a reason that whoever goes on to use it is told."""
        if not commit_protocols.abort_small(context := self.context, reason):
            context.instance.coordinator.abort(context.row.txn_id, reason)
        context.end(TxnState.ABORTED, reason)
        self._stop_heart()

    def _commit_large(self) -> Timestamp:
        try:
            found = commit_protocols.commit_large(self.context)
        finally:
            if self.context.local.ended:
                self._stop_heart()
        return self.commit() if found is None else found

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._joined:
            (self.close if error is None else self.drop)()
        elif error is not None:
            self._leave(error)
        elif not self.context.local.is_over:
            try:
                self.commit()
            except BaseException as failed:
                self._leave(failed)
                raise

    def _leave(self, error: BaseException) -> None:
        """Roll back on the way out of an error, but not a commit that flushes or is on its way."""
        with self.context.local.new_gate(), self.context.lock:
            on_its_way = self.context.local.at in (Local.COMMITTING, Local.FINISHING)
        if not on_its_way and not self.context.local.ended:
            self._stop_heart()
            try:
                self.rollback()
            except TxnkvError:  # the exception that is under way says more
                self.context.instance.coordinator.leave(self.context.row)
            if isinstance(error, RowErrors):
                error.note_rollback(self.id)
