r"""Acknowledgements in status.db: what is deleted of a partition, and what transactions hold.

    PENDING -- ack in a transaction --> PENDING_ACK -- commit --> DELETED
        ^------------------ abort ----------'

**Cursors** say what a subscription has deleted, and so what it still has to deliver:

    offsets       0 1 2 3 4 5 6 7 8 9
    deleted       x x x . . x x . x .
                  \___/     \_/   |
             mark_delete 3  acked_ranges [5, 7) [8, 9)

Everything below `mark_delete` is deleted, and ranges beyond it; a range that comes to touch
`mark_delete` goes up in it. What is deleted stays deleted: only `seek` takes an offset back.

Offsets that are no messages (markers, aborted ones) lie between messages. A consumer knows them
when it has read past them, and an ack takes those beside its message along, or ranges would never
join.

**Pending acks** are what every process sees of the acks of transactions. A row is a range of
messages that a transaction holds, or (first = -1) all below its position. It is written when the
ack is made, and goes in the SQLite transaction that commits, or when the transaction is aborted. A
stored transaction's rows go with its row in the status table; those of one that is only in a
process's memory also go when that process dies or its deadline passes.

There is one rule, for rows and for memory (`refuse`):

    named individually   refused when it is deleted, or held by anybody, itself included
    named cumulatively   refused when it is deleted, when another holds it or any message before,
                         or when the transaction itself holds it, or a position not below it

A plain ack meets a pending one: what is pending stays so, and the plain ack goes for the rest.
Many rows beside plain acks make rows of these too (`PLAIN`), for the commit point to find: they
keep no message from anybody, as it is delivered again where the write comes to nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import apsw

from txnkv.coordinator import one
from txnkv.errors import AckConflictError
from txnkv.storage import Store, clock
from txnkv.topics.ranges import Cursor, Held, Ranges
from txnkv.topics.subscription_catalog import SubscriptionInfo


def load_cursors(cur: apsw.Cursor, subscription_id: int) -> dict[int, Cursor]:
    """The cursors of a subscription, by partition id."""
    found = {id: Cursor(mark) for id, mark in marks(cur, subscription_id).items()}
    for partition_id, first, last in cur.execute(
        "SELECT partition_id, first, last FROM acked_ranges WHERE subscription_id = ? "
        "ORDER BY partition_id, first",
        (subscription_id,),
    ):
        found[partition_id].deleted.add(first, last)
    return found


def marks(cur: apsw.Cursor, subscription_id: int) -> dict[int, int]:
    """By partition id, the offset below which a subscription has deleted all."""
    found: list[Any] = cur.execute(
        "SELECT partition_id, mark_delete FROM cursors WHERE subscription_id = ?",
        (subscription_id,),
    ).fetchall()
    return dict(found)


def mark_delete(cur: apsw.Cursor, subscription_id: int, partition_id: int) -> int | None:
    """Return the offset below which all is deleted; None when there is no such cursor."""
    found: Any = cur.execute(
        "SELECT mark_delete FROM cursors WHERE subscription_id = ? AND partition_id = ?",
        (subscription_id, partition_id),
    ).fetchone()
    return None if found is None else int(found[0])


def least_mark(cur: apsw.Cursor, partition_id: int) -> int | None:
    """Return the offset below which all subscriptions deleted all; None when there are none."""
    found: Any = cur.execute(
        "SELECT min(mark_delete) FROM cursors WHERE partition_id = ?", (partition_id,)
    ).fetchone()
    return None if found[0] is None else int(found[0])


def deleted_in(
    cur: apsw.Cursor, subscription_id: int, partition_id: int, first: int, last: int
) -> Ranges:
    """Return the part of [first, last) that is deleted."""
    mark = mark_delete(cur, subscription_id, partition_id) or 0
    found = Ranges([(first, min(last, mark))])
    for low, high in cur.execute(
        "SELECT first, last FROM acked_ranges WHERE subscription_id = ? AND partition_id = ? "
        "AND first < ? ORDER BY first DESC",
        (subscription_id, partition_id, last),
    ):
        if high <= first:
            break
        found.add(max(low, first), min(high, last))
    return found


def any_from(cur: apsw.Cursor, subscription_id: int, partition_id: int, offset: int) -> bool:
    """Tell whether anything from an offset on is deleted, or an ack of it pending."""
    (found,) = one(
        cur,
        "SELECT EXISTS (SELECT 1 FROM cursors WHERE subscription_id = ?1 AND partition_id = ?2 "
        "AND mark_delete > ?3) OR ifnull((SELECT last FROM acked_ranges WHERE subscription_id = ?1 "
        "AND partition_id = ?2 ORDER BY first DESC LIMIT 1) > ?3, 0) OR EXISTS (SELECT 1 FROM "
        "pending_acks WHERE subscription_id = ?1 AND partition_id = ?2 AND last > ?3)",
        (subscription_id, partition_id, offset),
    )
    return bool(found)


def delete(
    cur: apsw.Cursor, subscription_id: int, partition_id: int, first: int, last: int
) -> None:
    """[first, last) is deleted. Without a cursor, of a dropped subscription say, nothing is."""
    key = (subscription_id, partition_id)
    mark = mark_delete(cur, subscription_id, partition_id)
    if mark is None or last <= mark or last <= first:
        return
    first = max(first, mark)
    joined = []
    for low, high in cur.execute(
        "SELECT first, last FROM acked_ranges WHERE subscription_id = ? AND partition_id = ? "
        "AND first <= ? ORDER BY first DESC",
        (*key, last),
    ):
        if high < first:
            break
        joined.append(low)
        first, last = min(first, low), max(last, high)
    if joined:
        cur.executemany(
            "DELETE FROM acked_ranges WHERE subscription_id = ? AND partition_id = ? AND first = ?",
            [(*key, low) for low in joined],
        )
    if first > mark:
        cur.execute("INSERT INTO acked_ranges VALUES (?, ?, ?, ?)", (*key, first, last))
    else:
        cur.execute(
            "UPDATE cursors SET mark_delete = ? WHERE subscription_id = ? AND partition_id = ?",
            (last, *key),
        )


def advance(
    cur: apsw.Cursor, subscription_id: int, partition_id: int, first: int, last: int
) -> bool:
    """`delete` for a cursor that has nothing deleted beyond its mark, where [first, last) begins
    at the mark. False, and nothing is done, where it does not.
    """
    cur.execute(
        "UPDATE cursors SET mark_delete = ?3 WHERE subscription_id = ?1 AND partition_id = ?2 "
        "AND mark_delete BETWEEN ?4 AND ?3",
        (subscription_id, partition_id, last, first),
    )
    return bool(cur.connection.changes())


def is_unbroken(cur: apsw.Cursor, subscription_id: int, partition_id: int) -> bool:
    """Tell whether nothing is deleted beyond the mark."""
    found: Any = cur.execute(
        "SELECT 1 FROM acked_ranges WHERE subscription_id = ? AND partition_id = ? LIMIT 1",
        (subscription_id, partition_id),
    ).fetchone()
    return found is None


def seek(cur: apsw.Cursor, subscription_id: int, partition_id: int, offset: int) -> None:
    """All below an offset is deleted and nothing else, as if nothing had been delivered yet."""
    key = (subscription_id, partition_id)
    cur.execute(
        "UPDATE cursors SET mark_delete = ?1, dispatched = ?1 WHERE subscription_id = ?2 "
        "AND partition_id = ?3",
        (offset, *key),
    )
    for table in ("acked_ranges", "leases", "returned_acks"):
        cur.execute(f"DELETE FROM {table} WHERE subscription_id = ? AND partition_id = ?", key)
    bump(cur, subscription_id)


def bump(cur: apsw.Cursor, subscription_id: int) -> None:
    """Have an exclusive consumer read again what it remembers, where there are no leases."""
    cur.execute(
        "UPDATE subscriptions SET version = version + 1 WHERE id = ? AND NOT leased",
        (subscription_id,),
    )


CUMULATIVE = -1
PLAIN: Final = -1
"""Stands for the hold of acks outside of transactions. They hold nothing until they commit."""


class Holder(NamedTuple):
    """The owner in whose name an ack is pending.

    Attributes:
        txn_id: the transaction.
        stored: it has its row in the status table.
        slot, start: this process.
        expires: its deadline, if it is not stored.
        hold: of the `client.run` that it is an attempt of, or PLAIN.
    """

    txn_id: int
    stored: bool
    slot: int
    start: int
    expires: int | None
    hold: int | None


class Pending(NamedTuple):
    """Messages that are not to be delivered: [first, last).

    Attributes:
        txn_id: the transaction that holds it; negative where a run goes on whose attempt did.
    """

    partition_id: int
    first: int
    last: int
    txn_id: int


def conflict(info: SubscriptionInfo, number: int, offset: int, why: str) -> AckConflictError:
    """The error for an ack that came too late."""
    return AckConflictError(
        f"{info}: message {number}:{offset} {why}. The transaction that asked was aborted whole; "
        "receive again, and acknowledge what is delivered"
    )


def given_back(txn_id: int) -> AckConflictError:
    """The error for a commit of acks that others may have by now."""
    return AckConflictError(
        f"acknowledgements of transaction {txn_id} were given to others: it passed its deadline. "
        "It was aborted whole; begin a new one"
    )


def pending(
    cur: apsw.Cursor,
    store: Store,
    subscription_id: int,
    partition_id: int | None = None,
    first: int = 0,
    last: int = 1 << 62,
    *,
    plain: bool = False,
) -> list[Pending]:
    """List what overlaps [first, last), of one partition or all; with `plain`, what is PLAIN, too.
    What the dead held is left out.
    """
    which = "NULL" if partition_id is None else "partition_id"
    found: list[Any] = cur.execute(
        "SELECT partition_id, first, last, txn_id, stored, slot, start, expires FROM pending_acks "
        f"WHERE subscription_id = ?1 AND {which} IS ?2 "
        "AND first < ?4 AND last > ?3 AND (?5 OR hold IS NOT ?6)",
        (subscription_id, partition_id, first, last, plain, PLAIN),
    ).fetchall()
    return [
        Pending(id, max(low, 0), high, txn_id)
        for id, low, high, txn_id, stored, slot, start, expires in found
        if stored or _lives(store, slot, start, expires)
    ]


def leave_pending(cur: apsw.Cursor, store: Store, subscription_id: int, wanted: Held) -> None:
    """Take out of `wanted` what transactions hold."""
    for partition_id, ranges in wanted.items():
        if ranges:
            first, last = ranges.span
            for row in pending(cur, store, subscription_id, partition_id, first, last):
                if row.txn_id > 0:
                    ranges.remove(row.first, row.last)


def _lives(store: Store, slot: int, start: int, expires: int | None) -> bool:
    in_time = expires is None or clock.monotonic_micros() <= expires
    return in_time and store.runtime.slot_alive(slot, start)


NONE: Final = Ranges()


def refuse(
    info: SubscriptionInfo,
    number: int,
    wanted: Iterable[tuple[int, int]],
    others: Mapping[str, Ranges],
    *,
    deleted: Cursor | Ranges = NONE,
    own: Ranges = NONE,
    cumulative: bool = False,
) -> None:
    """Refuse what a transaction may not acknowledge.

    Args:
        number: of the partition.
        wanted: ranges of messages that it names; if `cumulative` one, with all before the last.
        others: messages that others hold, by who that is.
        deleted: those that are deleted.
        own: those that it holds itself.

    Raises:
        AckConflictError: one of them is not to be had.
    """
    for first, last in wanted:
        named = last - 1 if cumulative else first
        if (at := deleted.first_in(named, last)) is not None:
            raise conflict(info, number, at, "is acknowledged already")
        if (at := own.first_in(named, last)) is not None:
            raise conflict(info, number, at, "is acknowledged by this transaction")
        for who, held in others.items():
            if (at := held.first_in(first, last)) is not None:
                raise conflict(info, number, at, f"is acknowledged by {who}")


def refuse_by_rows(
    cur: apsw.Cursor,
    store: Store,
    info: SubscriptionInfo,
    number: int,
    txn_id: int,
    wanted: Ranges,
    *,
    cumulative: bool,
    again: bool,
) -> None:
    """`refuse` by what status.db has.

    Args:
        again: its own acks do not count: it was let pass before, and they may be there.

    Raises:
        AckConflictError: one of them is not to be had.
    """
    partition_id, (first, last) = info.topic.partitions[number], wanted.span
    named = last - 1 if cumulative else first
    deleted = deleted_in(cur, info.id, partition_id, named, last)
    own, others = Ranges(), defaultdict[str, Ranges](Ranges)
    for row in pending(cur, store, info.id, partition_id, first, last):
        if row.txn_id == txn_id and not again:
            own.add(row.first, row.last)
        elif row.txn_id > 0 and row.txn_id != txn_id:
            others[f"transaction {row.txn_id}"].add(row.first, row.last)
    refuse(info, number, wanted, others, deleted=deleted, own=own, cumulative=cumulative)


def register(
    cur: apsw.Cursor,
    info: SubscriptionInfo,
    partition_id: int,
    holder: Holder,
    ranges: Ranges,
    position: int | None = None,
) -> int:
    """Note acks that `refuse` has let pass: individual ones, and of all below `position`. Answers
    how many rows more there are. Again is harmless.
    """
    more = 0
    for first, last in ranges:
        cur.execute(
            "UPDATE pending_acks SET last = max(last, ?1) WHERE subscription_id = ?2 "
            "AND partition_id = ?3 AND txn_id = ?4 AND last >= ?5 AND first = (SELECT max(first) "
            "FROM pending_acks WHERE subscription_id = ?2 AND partition_id = ?3 AND txn_id = ?4 "
            "AND first BETWEEN 0 AND ?5)",
            (last, info.id, partition_id, holder.txn_id, first),
        )
        if cur.connection.changes() == 0:
            _insert(cur, info, partition_id, holder, first, last)
            more += 1
        if holder.hold != PLAIN:
            _keep_lease(cur, info, partition_id, first, last)
    if position is not None:
        cur.execute(
            "UPDATE pending_acks SET last = ? WHERE subscription_id = ? AND partition_id = ? "
            "AND txn_id = ? AND first = -1",
            (position, info.id, partition_id, holder.txn_id),
        )
        if cur.connection.changes() == 0:
            _insert(cur, info, partition_id, holder, CUMULATIVE, position)
            more += 1
        _keep_lease(cur, info, partition_id, 0, position)
    return more


def _insert(
    cur: apsw.Cursor,
    info: SubscriptionInfo,
    partition_id: int,
    holder: Holder,
    first: int,
    last: int,
) -> None:
    expires = None if holder.stored else holder.expires
    cur.execute(
        "INSERT INTO pending_acks (subscription_id, partition_id, first, last, txn_id, stored, "
        "slot, start, expires, hold) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (info.id, partition_id, first, last, *holder._replace(expires=expires)),
    )


def register_own(
    cur: apsw.Cursor,
    info: SubscriptionInfo,
    partition_id: int,
    offset: int,
    holder: Holder,
    *,
    first: bool,
) -> int | None:
    """Note the ack of one message, if its lease is this process's and no ack is pending: then it is
    there, and nobody else's, and nothing refuses it. Answers as `register`; None: nothing is noted.

    Args:
        first: the transaction has no others.
    """
    cur.execute(
        "UPDATE leases SET until = NULL WHERE subscription_id = ? AND partition_id = ? AND message "
        "= ? AND slot = ? AND start = ? AND until IS NOT NULL "
        "AND EXISTS (SELECT 1 FROM topics WHERE id = ? AND dropped_ts IS NULL)",
        (info.id, partition_id, offset, holder.slot, holder.start, info.topic.id),
    )
    if not cur.connection.changes():
        return None
    if first:
        _insert(cur, info, partition_id, holder, offset, offset + 1)
        return 1
    return register(cur, info, partition_id, holder, Ranges([(offset, offset + 1)]))


def _keep_lease(
    cur: apsw.Cursor, info: SubscriptionInfo, partition_id: int, first: int, last: int
) -> None:
    """While an ack is pending, no lease runs out."""
    if info.leased:
        cur.execute(
            "UPDATE leases SET until = NULL WHERE subscription_id = ? AND partition_id = ? "
            "AND message >= ? AND message < ?",
            (info.id, partition_id, first, last),
        )


def made_stored(cur: apsw.Cursor, txn_id: int) -> None:
    """A transaction that was small has its row from now on."""
    cur.execute("UPDATE pending_acks SET stored = 1, expires = NULL WHERE txn_id = ?", (txn_id,))


def count_pending(cur: apsw.Cursor, txn_id: int) -> int:
    """Count the rows of a transaction."""
    (found,) = one(cur, "SELECT count(*) FROM pending_acks WHERE txn_id = ?", (txn_id,))
    return int(found)


# -- the end ---------------------------------------------------------------------------


def apply_pending(cur: apsw.Cursor, store: Store, txn_id: int) -> None:
    """The transaction commits, in this SQLite transaction: what it holds is deleted."""
    found: list[Any] = cur.execute(
        "DELETE FROM pending_acks WHERE txn_id = ? "
        "RETURNING subscription_id, partition_id, first, last, hold",
        (txn_id,),
    ).fetchall()
    acked = defaultdict[int, Held](dict)
    for subscription_id, partition_id, first, last, _ in found:
        acked[subscription_id].setdefault(partition_id, Ranges()).add(max(first, 0), last)
    for subscription_id, held in acked.items():
        if found[0][4] == PLAIN:  # so are all
            leave_pending(cur, store, subscription_id, held)
        for partition_id, ranges in held.items():
            for first, last in ranges:
                delete_leased(cur, subscription_id, partition_id, first, last)
        bump(cur, subscription_id)


def delete_leased(
    cur: apsw.Cursor, subscription_id: int, partition_id: int, first: int, last: int
) -> None:
    """[first, last) is deleted, with its leases, and with what goes with them."""
    gone: list[Any] = cur.execute(
        "DELETE FROM leases WHERE subscription_id = ? AND partition_id = ? AND message >= ? "
        "AND message < ? RETURNING first",
        (subscription_id, partition_id, first, last),
    ).fetchall()
    first = min([first, *(low for (low,) in gone if low >= 0)])
    for part in (first, last), *((~low, -low) for (low,) in gone if low < 0):
        delete(cur, subscription_id, partition_id, *part)


def give_back(cur: apsw.Cursor, store: Store, txn_id: int, *, stored: bool = True) -> None:
    """The transaction is aborted: what it holds is to be delivered again.

    What belongs to a `client.run` that goes on stays away from consumers until that has ended.

    Args:
        stored: False: only what it had while it was small. A late finalizer must not take the
            acks of a transaction that has been stored since.
    """
    found: list[Any] = cur.execute(
        "SELECT subscription_id, partition_id, first, last, hold, slot, start FROM pending_acks "
        "WHERE txn_id = ? AND stored <= ? AND hold IS NOT ?",
        (txn_id, stored, PLAIN),
    ).fetchall()
    for subscription_id, partition_id, first, last, hold, slot, start in found:
        if hold is not None and store.runtime.slot_alive(slot, start):
            cur.execute(
                "UPDATE OR REPLACE pending_acks SET txn_id = -txn_id, stored = 0, expires = NULL "
                "WHERE subscription_id = ? AND partition_id = ? AND txn_id = ? AND first = ?",
                (subscription_id, partition_id, txn_id, first),
            )
        else:
            _return(cur, subscription_id, partition_id, first, last)
    cur.execute("DELETE FROM pending_acks WHERE txn_id = ? AND stored <= ?", (txn_id, stored))
    for subscription_id in {row[0] for row in found}:
        bump(cur, subscription_id)


def end_hold(cur: apsw.Cursor, hold: int) -> None:
    """A `client.run` has ended: what its attempts had and did not delete is delivered again."""
    cur.execute("UPDATE pending_acks SET hold = NULL WHERE hold = ? AND txn_id > 0", (hold,))
    found: list[Any] = cur.execute(
        "DELETE FROM pending_acks WHERE hold = ? AND txn_id < 0 "
        "RETURNING subscription_id, partition_id, first, last",
        (hold,),
    ).fetchall()
    _return_all(cur, found)


def free_dead(cur: apsw.Cursor, store: Store, subscription_id: int) -> None:
    """Give back what the memory of processes held that are dead, or was held past a deadline."""
    found: list[Any] = cur.execute(
        "SELECT DISTINCT txn_id, slot, start, expires FROM pending_acks "
        "WHERE subscription_id = ? AND NOT stored",
        (subscription_id,),
    ).fetchall()
    freed: list[Any] = []
    for txn_id, slot, start, expires in found:
        if not _lives(store, slot, start, expires):
            freed += cur.execute(
                "DELETE FROM pending_acks WHERE subscription_id = ? AND txn_id = ? "
                "RETURNING subscription_id, partition_id, first, last",
                (subscription_id, txn_id),
            )
    _return_all(cur, freed)


def _return_all(cur: apsw.Cursor, found: Iterable[tuple[int, int, int, int]]) -> None:
    returned = list(found)
    for row in returned:
        _return(cur, *row)
    for subscription_id in {row[0] for row in returned}:
        bump(cur, subscription_id)


def _return(
    cur: apsw.Cursor, subscription_id: int, partition_id: int, first: int, last: int
) -> None:
    """Leases are free for anybody; where there are none the consumer is told by a row."""
    low = max(first, 0)
    cur.execute(
        "UPDATE leases SET until = 0, slot = NULL WHERE subscription_id = ? AND partition_id = ? "
        "AND message >= ? AND message < ? AND until IS NULL",
        (subscription_id, partition_id, low, last),
    )
    cur.execute(
        "INSERT INTO returned_acks (subscription_id, partition_id, first, last) "
        "SELECT id, ?, ?, ? FROM subscriptions WHERE id = ? AND NOT leased",
        (partition_id, low, last, subscription_id),
    )
