"""Applications: each version of one is committed at most once, whoever asks, retries and dies.

An application is a name. What it does, it does in versions (the batches of a stream, the days of
a job) that grow, and each is a transaction that says so before it commits. The row of the
application moves inside the commit point, so "the work is there" and "the version is there" are
one fact:

    driver        mark(daily, 7)                commit: 6 < 7, work and row
                                                daily = 7, ts, txn
    dies, and its successor asks: is 7 there?   yes: it goes on with 8
    a slow one    mark(daily, 7)                commit: 7 is there: refused, its work is gone

Where a mark waits for the commit:

    small     in memory, `Marks`; validated and written with the rest of the transaction
    stored    a row of application_marks; a participant of kind "application" (id 0, it stands for
              all marks of the transaction) takes it to `applications` in the commit point

The *source* is who drives: a stream's query, say. A source that is not the one that is there
counts from another beginning, and would take its own first versions for committed ones: it is
refused, until somebody says that the application begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import apsw

from txnkv.coordinator import status_table
from txnkv.coordinator.commit_log import CommitLog
from txnkv.coordinator.commit_queue import SmallCommit
from txnkv.coordinator.ids import MAX_TIMESTAMP, Timestamp, TxnId
from txnkv.coordinator.orchestration import Participants
from txnkv.coordinator.payload import Section
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import AlreadyAppliedError, require_text
from txnkv.storage import Store, declare_fault_point, fault_point

KIND: Final = "application"
"""Kind of the one participant that stands for all marks of a transaction."""

_PARTICIPANT: Final = 0

declare_fault_point("applications.staged", "a stored transaction is marked, the mark not committed")
declare_fault_point("applications.written", "the versions are written inside the commit point")


@dataclass(frozen=True)
class Applied:
    """The last version of an application that is committed.

    Attributes:
        version: its number.
        source: who drives the application; None when nobody said.
        commit_ts: when it was committed.
        txn_id: by which transaction.
    """

    version: int
    source: str | None
    commit_ts: Timestamp
    txn_id: TxnId


@dataclass(frozen=True)
class Mark:
    """The version of an application that a transaction is."""

    app_id: str
    version: int
    source: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.app_id, str) or not self.app_id:
            raise ValueError(f"an application id is a non-empty string, not {self.app_id!r}")
        require_text("an application id", self.app_id)
        if not isinstance(self.version, int) or isinstance(self.version, bool):
            raise TypeError(f"a version is an int, not {type(self.version).__name__}")
        if not 0 <= self.version <= MAX_TIMESTAMP:
            raise ValueError(f"a version is 0 or above, and below 2**63, not {self.version}")
        if self.source is not None and not isinstance(self.source, str):
            raise TypeError(f"a source is a string or None, not {type(self.source).__name__}")


# -- what is committed -----------------------------------------------------------------


def find(cur: apsw.Cursor, app_id: str, tcid: int) -> Applied | None:
    """The last version of an application; None when there is none."""
    require_text("an application id", app_id)
    found = cur.execute(
        "SELECT version, source, commit_ts, txn_id FROM applications WHERE app_id = ?", (app_id,)
    ).fetchone()
    return None if found is None else _applied(found, tcid)


def every(cur: apsw.Cursor, tcid: int) -> dict[str, Applied]:
    """The last version of each application."""
    return {
        app_id: _applied(rest, tcid)
        for app_id, *rest in cur.execute(
            "SELECT app_id, version, source, commit_ts, txn_id FROM applications ORDER BY app_id"
        )
    }


def _applied(values: Sequence[Any], tcid: int) -> Applied:
    version, source, commit_ts, txn_id = values
    return Applied(version, source, Timestamp(commit_ts), TxnId.of(tcid, txn_id))


def forget(cur: apsw.Cursor, app_id: str) -> bool:
    """Let an application begin anew. False when nothing was known of it."""
    cur.execute("DELETE FROM applications WHERE app_id = ?", (app_id,))
    return cur.connection.changes() == 1


def is_applied(cur: apsw.Cursor, mark: Mark) -> bool:
    """Tell whether this version or a later one is committed.

    Raises:
        ValueError: the application is driven by another source.
    """
    found = cur.execute(
        "SELECT version, source FROM applications WHERE app_id = ?", (mark.app_id,)
    ).fetchone()
    if found is None:
        return False
    version, source = found
    if mark.source is not None and source != mark.source:
        driver = "nobody that was named" if source is None else repr(source)
        raise ValueError(
            f"application {mark.app_id!r} is driven by {driver} and has version {version}, and "
            f"now version {mark.version} comes from {mark.source!r}: versions that count from "
            "another beginning (after a checkpoint was deleted, say) would be taken for those that "
            "are there. Go on with the source that it had, take another application id, or let it "
            "begin anew with client.forget_applied"
        )
    return bool(version >= mark.version)


def refuse_applied(cur: apsw.Cursor, mark: Mark) -> None:
    """Refuse a version that is committed.

    Raises:
        AlreadyAppliedError: it is, or a later one.
        ValueError: the application is driven by another source.
    """
    if is_applied(cur, mark):
        version, txn_id = next(
            cur.execute("SELECT version, txn_id FROM applications WHERE app_id = ?", (mark.app_id,))
        )
        raise AlreadyAppliedError(
            f"version {mark.version} of application {mark.app_id!r} is there already: transaction "
            f"{txn_id} committed version {version}. Nothing of this transaction counts; go on with "
            f"what follows version {version} (client.applied)"
        )


def _write(cur: apsw.Cursor, marks: Iterable[Mark], commit_ts: int, txn_id: int) -> None:
    cur.executemany(
        "INSERT INTO applications (app_id, version, source, commit_ts, txn_id) "
        "VALUES (?, ?, ?, ?, ?) ON CONFLICT (app_id) DO UPDATE SET version = excluded.version, "
        "source = coalesce(excluded.source, source), commit_ts = excluded.commit_ts, "
        "txn_id = excluded.txn_id",
        [(mark.app_id, mark.version, mark.source, commit_ts, txn_id) for mark in marks],
    )
    fault_point("applications.written")


def _refuse_all(cur: apsw.Cursor, marks: Iterable[Mark]) -> None:
    """At the commit: nobody is there any more to mend the source."""
    for mark in marks:
        try:
            refuse_applied(cur, mark)
        except ValueError as error:
            raise AlreadyAppliedError(str(error)) from None


# -- of a transaction that is small ----------------------------------------------------


class Marks:
    """The marks of a transaction, in memory."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}

    def add(self, mark: Mark) -> None:
        """Mark it; twice alike is harmless.

        Raises:
            ValueError: it is another version of this application.
        """
        self._marks[mark.app_id] = _joined(self._marks.get(mark.app_id), mark)

    def within(self, commit: SmallCommit) -> SmallCommit:
        """A commit that takes the marks along."""
        marks = list(self._marks.values())

        def validate(cur: apsw.Cursor, latest: Timestamp) -> None:
            _refuse_all(cur, marks)
            commit.validate(cur, latest)

        def write(cur: apsw.Cursor, stamp: Timestamp) -> Sequence[Section]:
            _write(cur, marks, stamp, commit.txn_id)
            return () if commit.write is None else commit.write(cur, stamp)

        return commit._replace(validate=validate, write=write)

    def stage(self, cur: apsw.Cursor, txn_id: int) -> None:
        """The transaction is stored from now on."""
        for mark in self._marks.values():
            stage(cur, txn_id, mark)


def _joined(known: Mark | None, mark: Mark) -> Mark:
    if known is None:
        return mark
    if known.version != mark.version:
        raise ValueError(
            f"the transaction is version {known.version} of application {mark.app_id!r}, it cannot "
            f"be version {mark.version} as well"
        )
    if None not in (known.source, mark.source) and known.source != mark.source:
        raise ValueError(
            f"the transaction is marked with source {known.source!r}, not {mark.source!r}"
        )
    return mark if known.source is None else known


# -- of a transaction that is stored ---------------------------------------------------


def stage(cur: apsw.Cursor, txn_id: int, mark: Mark) -> None:
    """Mark a stored transaction; twice alike is harmless.

    Raises:
        InvalidTxnStateError: it is not open.
        ValueError: it is another version of this application.
    """
    status_table.get_open(cur, txn_id, "mark it as a version of an application")
    known = next((found for found in _staged(cur, txn_id) if found.app_id == mark.app_id), None)
    mark = _joined(known, mark)
    status_table.register_participant(cur, txn_id, KIND, [_PARTICIPANT])
    cur.execute(
        "INSERT OR REPLACE INTO application_marks (txn_id, app_id, version, source) "
        "VALUES (?, ?, ?, ?)",
        (txn_id, mark.app_id, mark.version, mark.source),
    )


def _staged(cur: apsw.Cursor, txn_id: int) -> list[Mark]:
    return [
        Mark(*values)
        for values in cur.execute(
            "SELECT app_id, version, source FROM application_marks WHERE txn_id = ? "
            "ORDER BY app_id",
            (txn_id,),
        )
    ]


def _drop_staged(cur: apsw.Cursor, txn_id: int) -> None:
    cur.execute("DELETE FROM application_marks WHERE txn_id = ?", (txn_id,))


class ApplicationParticipants(Participants):
    """Marks of stored transactions.

    Args:
        store: the store.
        log: tells the latest commit.
    """

    kind = KIND

    def __init__(self, store: Store, log: CommitLog) -> None:
        super().__init__(log)
        self._store = store

    def begin_commit(self, row: TxnRow, ids: Sequence[int]) -> Timestamp:
        """Before others are asked, who have more to do."""
        latest = super().begin_commit(row, ids)
        if ids:
            with self._store.status.read() as cur:
                _refuse_all(cur, _staged(cur, row.txn_id))
        return latest

    def validate(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], validated: Timestamp
    ) -> bool:
        """The versions again: they are a row each."""
        if ids:
            _refuse_all(cur, _staged(cur, row.txn_id))
        return True

    def write_commit(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], commit_ts: Timestamp
    ) -> None:
        """The versions are there."""
        _write(cur, _staged(cur, row.txn_id), commit_ts, row.txn_id)
        _drop_staged(cur, row.txn_id)

    def abort(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Nothing of it is a version."""
        with self._store.status.write() as cur:
            _drop_staged(cur, row.txn_id)
