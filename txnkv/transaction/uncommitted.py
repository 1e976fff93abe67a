"""Changes of a transaction, while they are in memory; what it needs of names, sessions and handles.

They are in parts, of one commit:

    rows        tables.SmallWrites           sections known before, keys validated
    messages    topics.Outbox                sections made when their offsets are taken
    acks        the same                     rows of status.db, changed with the commit
    marks       coordinator.Marks            the same

The parts know nothing of each other. They are validated one after the other, and then written,
inside one SQLite transaction; or all are staged, when it turns large. Then rows alone wait here
again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import apsw
import pyarrow as pa

from txnkv.coordinator import Coordinator, Marks, SmallCommit, Timestamp, TxnRow
from txnkv.errors import ProducerFencedError
from txnkv.storage import fault_point
from txnkv.tables import ReadSet, RowWatch, SmallWrites, WriteContext, staging
from txnkv.topics import Hold, Outbox, Plain
from txnkv.transaction.instance import Instance


def name_taken(name: str) -> ProducerFencedError:
    """Return the reason of the end of a transaction whose name another one has."""
    return ProducerFencedError(f"another transaction {name!r} has begun")


class Fence:
    """The name of a small transaction, as long as the row of the name is as at its begin.

    Args:
        coordinator: of the store.
        name: the name.
        row: of the name.
        since: the snapshot of the transaction.
        take: puts a transaction's id into the row; False where that is another one by now.
        forget: has the next of the name write the row, which decides how a commit ended.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        row: RowWatch,
        since: Timestamp,
        take: Callable[[int], bool],
        forget: Callable[[], None],
    ) -> None:
        self._coordinator, self._name = coordinator, name
        self._row, self._since = row, since
        self.take, self.forget = take, forget

    @property
    def error(self) -> ProducerFencedError:
        """The reason of its end where it is lost."""
        return name_taken(self._name)

    @property
    def is_lost(self) -> bool:
        """Another one has the name."""
        self._coordinator.latest()  # from here on what others have committed is in memory
        if not self._row.needs_cursor:
            return self._row.changed(self._since, None)
        with self._coordinator.store.status.read() as cur:
            return self._row.changed(self._since, cur)

    def within(self, commit: SmallCommit) -> SmallCommit:
        """Return a commit that is refused where another one has the name."""

        def validate(cur: apsw.Cursor | None, latest: Timestamp) -> bool | None:
            looks = self._row.needs_cursor
            if looks and cur is None:
                return False
            asked = looks or latest > self._since
            if asked and self._row.changed(self._since, cur if looks else None):
                raise self.error
            return commit.validate(cur, latest)

        return commit._replace(validate=validate)


class Heart:
    """A transaction for which the heartbeater beats, as long as a handle refers to this object."""

    def __init__(self, row: TxnRow) -> None:
        self.pid = os.getpid()
        self.txn_id = row.txn_id
        self.heartbeat_slot = row.heartbeat_slot
        self.keepalive = row.keepalive


class Flushable(Protocol):
    """A session, as its transaction sees it."""

    def flush_for_commit(self) -> None: ...

    def discard(self) -> None: ...

    def end(self) -> None: ...

    def look_anew(self, closed: object = None) -> None: ...

    def waiting(self) -> int: ...

    @property
    def has_pending(self) -> bool: ...

    @property
    def flush_mode(self) -> str: ...

    @property
    def flushing(self) -> bool: ...


class HeartOwner(Protocol):
    """A handle that is told when its transaction is stored, since heartbeats are needed then."""

    def start_heart(self) -> None: ...


Parts = Sequence[tuple[int, pa.RecordBatch | Plain]]
"""Messages for one topic, by number of their partition."""


class SmallParts:
    """The parts of one transaction. Not for two threads at a time.

    Args:
        instance: the store's.
        row: of the transaction.
        reads: what it read, of a serializable one.
        stored: it has staged others.
        transactional: False for a write outside of any transaction.

    Attributes:
        rows: its rows, to be written to.
        hold: keeps what is acknowledged while the transaction is tried again.
    """

    hold: Hold | None = None
    _outbox: Outbox | None = None
    _marks: Marks | None = None

    def __init__(
        self,
        instance: Instance,
        row: TxnRow,
        reads: ReadSet | None,
        *,
        stored: bool = False,
        transactional: bool,
    ) -> None:
        self._instance = instance
        self._row = row
        self._reads = reads
        self._transactional = transactional
        engine = instance.engine
        self.rows = SmallWrites(engine, row, reads, stored=stored, transactional=transactional)

    @property
    def too_large(self) -> bool:
        """More than a row of the commit log should hold."""
        return self.rows.too_large or (self._outbox is not None and self._outbox.too_large)

    @property
    def has_more(self) -> bool:
        """Return True where it has more than rows."""
        outbox = self._outbox
        return self._marks is not None or (outbox is not None and not outbox.empty)

    @property
    def shown(self) -> SmallWrites | None:
        """The rows that its reads see; None when there are none."""
        return self.rows if self.rows.memories else None

    @property
    def outbox(self) -> Outbox:
        """The messages and acknowledgements of the transaction, to be added to."""
        if self._outbox is None:
            self._outbox = Outbox(
                self._instance.topics, self._row, self.hold, transactional=self._transactional
            )
        return self._outbox

    @property
    def marks(self) -> Marks:
        """The versions of applications that the transaction is, to be added to."""
        if self._marks is None:
            self._marks = Marks()
        return self._marks

    def commit(self) -> SmallCommit | None:
        """Return the commit of all parts, for the commit log; None when they are empty."""
        outbox = self._outbox
        if outbox is None or outbox.empty:
            if not self.rows.memories and self._marks is None:
                return None
            commit = self.rows.commit()
        else:
            commit = self._commit_with(outbox)
        return commit if self._marks is None else self._marks.within(commit)

    def _commit_with(self, outbox: Outbox) -> SmallCommit:
        sends = outbox.commit_parts()
        if self._reads is None and self.shown is None:
            return SmallCommit(self._row.txn_id, (), sends.validate, sends.write, sends.size)
        changes = self.rows.commit()

        def validate(cur: apsw.Cursor, latest: Timestamp) -> None:
            changes.validate(cur, latest)
            sends.validate(cur, latest)

        return SmallCommit(self._row.txn_id, changes.sections, validate, sends.write, sends.size)

    def stage(self, context: WriteContext, *, rows: bool = True) -> None:
        """Give all of it to the participants, `rows` too; what is done is not done again."""
        self._row = context.row
        written, outbox = self.shown if rows else None, self._outbox
        if written is not None:
            staging.stage_evaluated(self._instance.engine, context, written.evaluated())
            self.rows = written.anew()
        if outbox is not None and not outbox.empty:
            outbox.stage(context.row)
        self._outbox = None
        if self._marks is not None:
            with self._instance.store.status.write() as cur:
                self._marks.stage(cur, context.row.txn_id)
            self._marks = None
            fault_point("applications.staged")

    def reopen(self) -> None:
        """Nothing was committed: the transaction is as open as before."""
        if self._outbox is not None:
            self._outbox.reopen()

    def ended(self, committed: bool) -> None:
        """Note that the transaction has ended while it was small."""
        if self._outbox is not None:
            self._outbox.ended(committed)
