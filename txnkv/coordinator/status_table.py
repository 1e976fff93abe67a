"""The transaction status table: rows, states, and the compare-and-set moves between these.

    OPEN -> COMMIT_IN_PROGRESS -> FINALIZE_IN_PROGRESS -> COMMITTED
      |             |             (the commit point)
      |             v
      +-----> ABORT_IN_PROGRESS -> ABORTED

A transaction without participants goes from OPEN to COMMITTED at once. The numbers of the states
are part of the on-disk format; they are Kudu's.

To drive a transaction takes `insert`, `join` (before the first use of a participant) and `advance`
(PIP-31's TransactionMetadataStore): each is refused when the transaction is not in the state that
it is for. Every function takes the cursor of a status.db transaction that its caller opened, so
that a step of the protocol is one SQLite transaction whatever it is made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias

import apsw

from txnkv.coordinator.ids import Timestamp, next_timestamp
from txnkv.coordinator.status_schema import one
from txnkv.errors import (
    AckConflictError,
    AlreadyAppliedError,
    CorruptionError,
    InvalidTxnStateError,
    ProducerFencedError,
    SchemaChangedError,
    TransactionConflictError,
    TransactionLockedError,
    TransactionTimedOutError,
    TxnkvError,
    TxnNotFoundError,
)
from txnkv.storage import boot_id, clock

PARTITION: Final = "partition"
"""Kind of the participants that are partitions of topics."""

PartIds: TypeAlias = Mapping[str, Sequence[int]]
"""Ids of participants, by their kind."""


class TxnState(IntEnum):
    """The state of a transaction, by its number in status.db."""

    OPEN = 1
    ABORTED = 2
    COMMIT_IN_PROGRESS = 3
    COMMITTED = 4
    ABORT_IN_PROGRESS = 5
    FINALIZE_IN_PROGRESS = 6

    @property
    def ended(self) -> bool:
        """Nothing more happens to it."""
        return self in (TxnState.COMMITTED, TxnState.ABORTED)

    @property
    def outcome(self) -> TxnState:
        """The state in which a transaction ends that is decided; else the state itself."""
        ends = {
            TxnState.FINALIZE_IN_PROGRESS: TxnState.COMMITTED,
            TxnState.ABORT_IN_PROGRESS: TxnState.ABORTED,
        }
        return ends.get(self, self)

    @property
    def committing(self) -> bool:
        return self in (
            TxnState.COMMIT_IN_PROGRESS,
            TxnState.FINALIZE_IN_PROGRESS,
            TxnState.COMMITTED,
        )

    @property
    def decided(self) -> bool:
        """Its outcome can no longer change."""
        return self not in (TxnState.OPEN, TxnState.COMMIT_IN_PROGRESS)


MOVES: dict[TxnState, frozenset[TxnState]] = {
    TxnState.OPEN: frozenset(
        {TxnState.COMMIT_IN_PROGRESS, TxnState.ABORT_IN_PROGRESS, TxnState.COMMITTED}
    ),
    TxnState.COMMIT_IN_PROGRESS: frozenset(
        {TxnState.FINALIZE_IN_PROGRESS, TxnState.ABORT_IN_PROGRESS}
    ),
    TxnState.FINALIZE_IN_PROGRESS: frozenset({TxnState.COMMITTED}),
    TxnState.ABORT_IN_PROGRESS: frozenset({TxnState.ABORTED}),
    TxnState.COMMITTED: frozenset(),
    TxnState.ABORTED: frozenset(),
}


@dataclass(frozen=True)
class TxnRow:
    """One row of the status table. Durations are microseconds, stamps hybrid time."""

    txn_id: int
    state: TxnState
    begin_ts: Timestamp
    snapshot_ts: Timestamp
    last_update_ts: Timestamp
    commit_ts: Timestamp | None
    timeout: int | None
    deadline: int | None
    boot: str
    keepalive: int
    heartbeat_slot: int | None
    isolation: str
    locking: str
    owner_slot: int
    owner_start: int
    reason: str | None
    error: str | None
    age_ts: Timestamp | None = None

    def age(self) -> tuple[int, int]:
        """Wait-die order: less is older."""
        return (self.age_ts or self.begin_ts, self.txn_id)

    def describe_state(self) -> str:
        return self.state.name + (f" ({self.reason})" if self.reason else "")


_FIELDS: Final = tuple(TxnRow.__dataclass_fields__)
_COLUMNS: Final = ", ".join(_FIELDS)


def past_timeout(row: TxnRow) -> bool:
    """Return True when the time that a transaction asked for is over."""
    if row.deadline is None:
        return False
    if row.boot == boot_id():  # as of each operation of a transaction
        return clock.monotonic_micros() > row.deadline
    return late_by(row) > 0


def late_by(row: TxnRow) -> int:
    """Microseconds since the time is over that a transaction asked for; negative before that."""
    if row.deadline is None or row.timeout is None:
        return -1
    if row.boot == boot_id():
        return clock.monotonic_micros() - row.deadline
    # The monotonic clock began anew.
    return clock.now_micros() - row.begin_ts.micros - row.timeout


def fields_of(**known: Any) -> dict[str, Any]:
    """All fields of a row; None where nothing is known."""
    return dict.fromkeys(_FIELDS) | known


def _row(values: tuple[Any, ...]) -> TxnRow:
    fields: list[Any] = list(values)
    fields[1] = TxnState(fields[1])
    for stamp in (2, 3, 4, 5, -1):
        if fields[stamp] is not None:
            fields[stamp] = Timestamp(fields[stamp])
    return TxnRow(*fields)


def insert(cur: apsw.Cursor, row: TxnRow) -> None:
    """Write the OPEN row of a transaction. Writing it twice is harmless."""
    cur.execute(
        f"INSERT OR IGNORE INTO transactions ({_COLUMNS}) VALUES ({', '.join('?' * len(_FIELDS))})",
        [getattr(row, name) for name in _FIELDS],
    )


def small(txn_id: int, commit_ts: Timestamp) -> TxnRow:
    """Return the row that a small transaction would have, of which the commit log alone knows."""
    return TxnRow(
        txn_id=txn_id,
        state=TxnState.COMMITTED,
        begin_ts=commit_ts,
        snapshot_ts=commit_ts,
        last_update_ts=commit_ts,
        commit_ts=commit_ts,
        timeout=None,
        deadline=None,
        boot="",
        keepalive=0,
        heartbeat_slot=None,
        isolation="snapshot",
        locking="optimistic",
        owner_slot=0,
        owner_start=0,
        reason=None,
        error=None,
    )


def find(cur: apsw.Cursor, txn_id: int) -> TxnRow | None:
    values = cur.execute(
        f"SELECT {_COLUMNS} FROM transactions WHERE txn_id = ?", (txn_id,)
    ).fetchone()
    return None if values is None else _row(values)


def get(cur: apsw.Cursor, txn_id: int) -> TxnRow:
    """The row of a transaction.

    Raises:
        TxnNotFoundError: there is no such row.
    """
    row = find(cur, txn_id)
    if row is None:
        (highest,) = one(cur, "SELECT next_txn_id - 1 FROM clock")
        raise TxnNotFoundError(
            f"transaction {txn_id} was not found; the highest id given so far is {highest}. "
            "It never wrote anything, or ended and was forgotten: begin a new one"
        )
    return row


def get_open(cur: apsw.Cursor, txn_id: int, what: str) -> TxnRow:
    """The row of a transaction that must be OPEN for `what`.

    Raises:
        TxnNotFoundError: there is no such transaction.
        InvalidTxnStateError: it is not OPEN.
    """
    row = get(cur, txn_id)
    if row.state is not TxnState.OPEN:
        raise not_open(row, what)
    return row


_ENDED_BY: Final[Mapping[str, type[TxnkvError]]] = {
    each.__name__: each
    for each in (
        AckConflictError,
        AlreadyAppliedError,
        CorruptionError,
        ProducerFencedError,
        SchemaChangedError,
        TransactionConflictError,
        TransactionLockedError,
        TransactionTimedOutError,
    )
}


_ANEW: Final = "Begin a new transaction"
_IN_PART: Final = (
    "A part of what was flushed came before its commit, and is in it: look at what is there before "
    "you write the rest in a new transaction"
)
_COMMITTING: Final = frozenset(
    {TxnState.COMMIT_IN_PROGRESS, TxnState.FINALIZE_IN_PROGRESS, TxnState.COMMITTED}
)


def ending_error(row: TxnRow, what: str) -> TxnkvError:
    """Return the error for who wanted to commit a transaction that was aborted."""
    return _ENDED_BY.get(row.error or "", InvalidTxnStateError)(str(not_open(row, what)))


def not_open(row: TxnRow, what: str) -> InvalidTxnStateError:
    """Return the error for a transaction that is over, of the class that says what ended it, where
    that is one of these; retriable, if what ended it is.
    """
    ended_by = _ENDED_BY.get(row.error or "", InvalidTxnStateError)
    kind = ended_by if issubclass(ended_by, InvalidTxnStateError) else InvalidTxnStateError
    made = kind(
        f"cannot {what}: transaction {row.txn_id} is not open: {row.describe_state()}. {_ANEW}"
    )
    made.retriable = ended_by.retriable
    made._commits = row.state in _COMMITTING
    return made


def note_part(error: BaseException, went: bool) -> None:
    """Have an error of `not_open` say that a part of the flush `went` before, where that counts."""
    if went and isinstance(error, InvalidTxnStateError) and error._commits:
        error.args = (str(error).replace(_ANEW, _IN_PART),)


def select(cur: apsw.Cursor, states: Iterable[TxnState] | None = None) -> list[TxnRow]:
    if states is None:
        found = cur.execute(f"SELECT {_COLUMNS} FROM transactions ORDER BY txn_id")
    else:
        wanted = ", ".join(str(int(state)) for state in states)
        found = cur.execute(
            f"SELECT {_COLUMNS} FROM transactions WHERE state IN ({wanted}) ORDER BY txn_id"
        )
    return [_row(values) for values in found]


def live(cur: apsw.Cursor) -> list[TxnRow]:
    """Every transaction that has not ended."""
    found = cur.execute(
        f"SELECT {_COLUMNS} FROM transactions WHERE state NOT IN (2, 4) ORDER BY txn_id"
    )
    return [_row(values) for values in found]


def move(
    cur: apsw.Cursor,
    txn_id: int,
    expected: TxnState,
    new: TxnState,
    *,
    commit_ts: Timestamp | None = None,
    reason: str | None = None,
    error: str | None = None,
) -> bool:
    """Compare-and-set of the state. False when the state was not `expected`."""
    if new not in MOVES[expected]:
        raise ValueError(f"no transaction moves from {expected.name} to {new.name}")
    cur.execute(
        "UPDATE transactions SET state = ?, last_update_ts = ?, heartbeat_slot = NULL, "
        "commit_ts = coalesce(?, commit_ts), reason = coalesce(?, reason), "
        "error = coalesce(?, error) WHERE txn_id = ? AND state = ?",
        (
            int(new),
            commit_ts if commit_ts is not None else next_timestamp(cur),
            commit_ts,
            reason,
            error,
            txn_id,
            int(expected),
        ),
    )
    return cur.connection.changes() == 1


def advance(
    cur: apsw.Cursor,
    txn_id: int,
    expected: TxnState,
    new: TxnState,
    *,
    commit_ts: Timestamp | None = None,
    reason: str | None = None,
    error: str | None = None,
) -> TxnRow:
    """Move a transaction on; return its row as it is then.

    OPEN goes to COMMITTED only with a commit timestamp or without participants.

    Raises:
        InvalidTxnStateError: it is not `expected`, or no transaction goes from there to `new`.
        TxnNotFoundError: there is none.
    """
    row = get(cur, txn_id)
    if row.state is not expected:
        raise InvalidTxnStateError(
            f"cannot make transaction {txn_id} {new.name}: it is {row.describe_state()}, not "
            f"{expected.name}"
        )
    straight = expected is TxnState.OPEN and new is TxnState.COMMITTED
    unasked = straight and commit_ts is None and participants(cur, txn_id)
    if new not in MOVES[expected] or unasked:
        raise InvalidTxnStateError(
            f"no transaction goes from {expected.name} to {new.name}"
            + (" past its participants" if unasked else "")
        )
    move(cur, txn_id, expected, new, commit_ts=commit_ts, reason=reason, error=error)
    return get(cur, txn_id)


# -- participants ----------------------------------------------------------------------


def register_participant(cur: apsw.Cursor, txn_id: int, kind: str, ids: Iterable[int]) -> None:
    """Record participants of an OPEN transaction before their first staged row."""
    cur.executemany(
        "INSERT OR IGNORE INTO participants (txn_id, kind, id, state) VALUES (?, ?, ?, ?)",
        [(txn_id, kind, id, int(TxnState.OPEN)) for id in ids],
    )


def join(cur: apsw.Cursor, txn_id: int, kind: str, ids: Iterable[int], what: str) -> None:
    """Record participants of a transaction, for the first use of each.

    Raises:
        InvalidTxnStateError: it is not open, and cannot do `what`.
        TxnNotFoundError: there is none.
    """
    get_open(cur, txn_id, what)
    register_participant(cur, txn_id, kind, ids)


def takes_part(cur: apsw.Cursor, txn_id: int, kind: str, id: int) -> bool:
    """Tell whether a participant is recorded."""
    found = cur.execute(
        "SELECT 1 FROM participants WHERE txn_id = ? AND kind = ? AND id = ?", (txn_id, kind, id)
    ).fetchone()
    return found is not None


def participants(cur: apsw.Cursor, txn_id: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for kind, id in cur.execute(
        "SELECT kind, id FROM participants WHERE txn_id = ? ORDER BY kind, id", (txn_id,)
    ):
        found.setdefault(kind, []).append(id)
    return found


def transactions_of(cur: apsw.Cursor, kind: str, ids: Iterable[int]) -> list[int]:
    """Transactions not yet ended that have one of these participants."""
    found: set[int] = set()
    for id in ids:
        found.update(
            txn_id
            for (txn_id,) in cur.execute(
                "SELECT p.txn_id FROM participants p JOIN transactions t USING (txn_id) "
                "WHERE p.kind = ? AND p.id = ? AND t.state NOT IN (2, 4)",
                (kind, id),
            )
        )
    return sorted(found)


def decided(
    cur: apsw.Cursor, kind: str, ids: Iterable[int], upto: Timestamp
) -> list[tuple[Timestamp, int]]:
    """Commit timestamps, ascending, and ids of transactions that committed at or below `upto`, have
    one of these participants, and are not finalized in all of theirs.
    """
    found: set[tuple[Timestamp, int]] = set()
    for id in ids:
        found.update(
            cur.execute(
                "SELECT t.commit_ts, t.txn_id FROM transactions t "
                "JOIN participants p USING (txn_id) WHERE p.kind = ? AND p.id = ? "
                "AND t.state = ? AND t.state NOT IN (2, 4) AND t.commit_ts <= ?",
                (kind, id, int(TxnState.FINALIZE_IN_PROGRESS), upto),
            )
        )
    return sorted(found)


def set_participants(
    cur: apsw.Cursor,
    txn_id: int,
    kind: str,
    state: TxnState,
    begin_commit_ts: Timestamp | None = None,
) -> None:
    cur.execute(
        "UPDATE participants SET state = ?, begin_commit_ts = coalesce(begin_commit_ts, ?) "
        "WHERE txn_id = ? AND kind = ?",
        (int(state), begin_commit_ts, txn_id, kind),
    )
