"""Validation of a small transaction's commit, inside the transaction of its commit point.

By then all that committed before is in memory, earlier members of its group included, so what is
asked here is asked once. Whatever can be seen not to have changed since it began is not asked at
all: the catalog by its version, locks by whether there are any, keys by the latest commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import apsw

from txnkv import core
from txnkv.coordinator import (
    Timestamp,
    TxnRow,
    Verdict,
    held,
    partition_locks,
    past_timeout,
    payload,
)
from txnkv.errors import (
    TransactionConflictError,
    TransactionLockedError,
    TransactionTimedOutError,
)
from txnkv.tables import table_catalog
from txnkv.tables.commit import changes
from txnkv.tables.read_set import ReadSet
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import KIND, Tablet


class LockedByYoungerError(TransactionLockedError):
    """A tablet is locked by a younger transaction: who meets it may wait and try again."""


class Validation:
    """Called with the cursor and the latest commit timestamp.

    Args:
        tables: of the store.
        row: of the transaction.
        transactional: False for a write outside of any transaction, which waits for no lock.
        catalog: a version of the catalog in which the tables were live.
        reads: what it read, of a serializable one.
        tablets: those that it writes to, by id.
        written: gives the keys, ascending, by tablet.
    """

    __slots__ = (
        "_catalog",
        "_reads",
        "_row",
        "_tables",
        "_tablets",
        "_transactional",
        "_written",
    )  # fmt: skip

    def __init__(
        self,
        tables: Tables,
        row: TxnRow,
        transactional: bool,
        catalog: int | None,
        reads: ReadSet | None,
        tablets: Mapping[int, Tablet],
        written: Callable[[], Iterable[tuple[Tablet, core.Keys]]],
    ) -> None:
        self._tables = tables
        self._row = row
        self._transactional = transactional
        self._catalog = catalog
        self._reads = reads
        self._tablets = tablets
        self._written = written

    def __call__(self, cur: apsw.Cursor, latest: Timestamp) -> None:
        """Validate.

        Raises:
            TransactionConflictError: others changed what it wrote, or a serializable one read.
            TransactionLockedError: a tablet is locked by another.
            TransactionTimedOutError: it is past its deadline.
            TableNotFoundError: a table was dropped.
            CorruptionError: a tablet is damaged, and takes no writes.
        """
        row, log = self._row, self._tables.log
        if past_timeout(row):
            raise timed_out(row, "commit")
        if log.catalog_version != self._catalog:
            for tablet in self._tablets.values():
                table_catalog.require_live(cur, tablet.table)
            held.refuse(held.ids(cur, payload.TABLET), self._tablets)
        if log.locked:
            _refuse_locked(cur, row if self._transactional else None, list(self._tablets))
        since = row.snapshot_ts
        if latest > since:
            # Memory has all up to `latest`; to ask for it would make the log look once more.
            for tablet, keys in self._written():
                key = changes.changed(tablet, keys, since, since)
                if key is not None:
                    raise _conflict(tablet, key)
            if self._reads is not None:
                changes.validate_reads(self._tables, self._reads, since, since)


def timed_out(row: TxnRow, what: str) -> TransactionTimedOutError:
    return TransactionTimedOutError(
        f"cannot {what}: transaction {row.txn_id} timed out, after {(row.timeout or 0) / 1e6:g} s. "
        "Begin a new transaction, with a longer timeout"
    )


def _conflict(tablet: Tablet, key: bytes) -> TransactionConflictError:
    return TransactionConflictError(
        f"table {tablet.table.name!r}, key {tablet.readable_key(key)!r}: another transaction "
        "committed it first. This transaction was aborted whole; run it again"
    )


def _refuse_locked(cur: apsw.Cursor, row: TxnRow | None, ids: Sequence[int]) -> None:
    answer = partition_locks.meet(cur, row, KIND, ids)
    if answer.verdict is Verdict.GRANTED:
        return
    holder = f"{KIND} {list(ids)} is locked by transaction {answer.holder}"
    if row is None:
        raise TransactionLockedError(
            f"{holder}; a write outside of a transaction does not wait. Try it again later"
        )
    if answer.verdict is Verdict.WAIT:
        raise LockedByYoungerError(f"{holder}, which is younger")
    raise TransactionLockedError(
        f"{holder}, which is older: transaction {row.txn_id} was aborted (wait-die). Run it again"
    )
