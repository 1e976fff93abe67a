"""Appending batches to a log directly: what is too large for the commit log.

    LMDB's write lock
      status.db: is the transaction OPEN? it takes part now; offsets [N, N + n) are taken
                 -> committed; being synced from here on
      log:       what waited below N (tail, end markers, fillers), then the batches at N
      LMDB's commit -> durable, the lock is free
    status.db's sync has ended -> acknowledged

A death between the two commits leaves offsets without batches, which the next one who has the
lock fills. A power loss may leave the opposite, batches at offsets that status.db has not given:
`regain` sees to that when the store is opened. But nothing else may be in a log before it is
durable in status.db: where something waited, or the transaction takes part only now, the sync
comes before LMDB's commit.

One after another is the point: a transaction that ends takes the lock, too, so no batch of it
comes into the log after its end marker. A writer that was stopped goes on, takes the lock and is
refused, for its transaction is not OPEN.

Into a side log go the batches of a transaction alone; they have no offsets there.

An append may fail when its batches are in the log already: an error of LMDB's commit that came too
late, or of the sync. Nobody can tell from the error. So who may try again keeps an `AppendAttempt`,
and the next try looks first whether the batches are where the last one put them:

    try     offsets [40, 45), LMDB's commit: error          in the log, or a hole
    retry   at 40: a batch of this transaction              there: nothing is appended
            at 40: the end, or a filler of somebody else    not there: offsets are taken anew
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import apsw
import lmdb

from txnkv.coordinator import EPOCH, TxnRow, next_timestamp, reach, status_table
from txnkv.coordinator import PARTITION as KIND
from txnkv.core import ControlType, encode_control, place, place_here, read_header, walk
from txnkv.storage import GATE, clock, declare_fault_point, fault_point
from txnkv.topics import topic_catalog
from txnkv.topics.log import Buffer, whole
from txnkv.topics.topics import Partition, Topics
from txnkv.topics.write import producers, roll_forward

declare_fault_point("append.reserved", "offsets of an append are taken, nothing is in the log")
declare_fault_point("append.written", "the batches of an append are in the log, durable")
declare_fault_point("append.side", "the batches of an append are in a side log, durable")


_EPOCH_MICROS = int(EPOCH.timestamp()) * 1_000_000


@dataclass
class AppendAttempt:
    """The place where batches that may be appended again were put last.

    Attributes:
        at: their first offset, or in a side log their first index; None before the first try.
    """

    at: int | None = None


class _Admitted(NamedTuple):
    """The answer of status.db to an append.

    Attributes:
        commit_ts: of the batches; 0 while it is not known.
        first: it has to be durable before the log is.
    """

    commit_ts: int
    first: bool


Note: TypeAlias = Callable[[apsw.Cursor, int], None]
"""Writes more where offsets are taken; it is given the first of them."""

Run: TypeAlias = tuple[Buffer, int]
"""Batches one behind the other, and how many messages they hold."""


def append(
    topics: Topics,
    row: TxnRow,
    partition: Partition,
    batches: Sequence[bytes],
    attempt: AppendAttempt | None = None,
    note: Note | None = None,
) -> None:
    """Append batches of a large transaction, whose OPEN row is stored.

    Args:
        topics: the topics.
        row: of the transaction.
        partition: where to.
        batches: with the transaction's id, without offsets.
        attempt: of these batches, kept over all tries; None: there is one only.
        note: writes to status.db with the offsets that are taken; not of a topic with a side log.

    Raises:
        InvalidTxnStateError: the transaction is not OPEN; nothing was appended.
        TopicNotFoundError: the topic was dropped; nothing was appended.
        StorageFullError, UnavailableError: the disk is full or failed; what is there of it is
            found by the next try with the same attempt.
    """
    attempt = attempt or AppendAttempt()
    if partition.side is not None:
        _append_aside(topics, row, partition, batches, attempt)
        return
    admit = _taking_part(topics, row, partition)
    _append(topics, partition, _runs(batches), place, admit, attempt, row.txn_id, note)


def take_part(topics: Topics, row: TxnRow, partitions: Sequence[Partition]) -> None:
    """Let a transaction take part in partitions: its end gets a marker in each of them.

    Raises:
        InvalidTxnStateError, TxnNotFoundError: it is not open.
    """
    ids = [partition.id for partition in partitions]
    with topics.store.status.write() as cur:
        status_table.join(cur, row.txn_id, KIND, ids, "send messages")


def mark_end(topics: Topics, txn_id: int, partition: Partition, *, commit: bool) -> None:
    """Append the end marker of a transaction to a log to which it has sent nothing.

    A log has those of the others by itself, and needs none here: it is for readers who count on one
    wherever a transaction takes part.
    """
    kind = ControlType.COMMIT if commit else ControlType.ABORT
    now = clock.now_micros() + _EPOCH_MICROS
    marker = encode_control(kind, txn_id=txn_id, timestamp=now)

    def admit(cur: apsw.Cursor) -> _Admitted:
        return _Admitted(0, first=False)

    _append(topics, partition, _runs([marker]), place, admit, AppendAttempt(), txn_id)


def sent_before(
    topics: Topics, partition: Partition, producer_id: int
) -> producers.ProducerState | None:
    """Return what a partition remembers of a producer whose appends had a `note`.

    Where its process died between the two commits of the last one, that is not in the log, and is
    left out: its producer sends it again.
    """
    with topics.store.status.read() as cur:
        state = producers.find(cur, producer_id, partition.id)
    if state is None or not state.batches:
        return state
    log, at = partition.log, state.batches[-1].first_offset
    with partition.environment.read() as txn:
        if at < log.start(txn):
            return state
        if at < log.end(txn) and not read_header(whole(log.read(txn, at, 1)[0])).is_control:
            return state
    return producers.truncated(state, at)


def forget_lost(topics: Topics, partition_id: int, producer_id: int) -> None:
    """Forget the last batch of a producer where `append_alone` took its offsets, and no more.

    Its process died between the two commits, or the second one failed. The producer sends it again,
    and it is no duplicate. Not of logs that are compacted, where a batch may go.
    """
    partition = topics.partition(partition_id)
    with topics.store.status.read() as cur:
        state = producers.find(cur, producer_id, partition_id)
    if partition is None or state is None or not state.batches:
        return
    roll_forward.complete(topics, partition)  # what is not in the log now never will be
    kept = sent_before(topics, partition, producer_id)
    if kept != state:
        with topics.store.status.write() as cur:
            producers.take_back(cur, producer_id, partition_id, state.batches[-1])


def append_runs(topics: Topics, row: TxnRow, partition: Partition, runs: Sequence[Run]) -> None:
    """Append batches of a large transaction that lie in memory which may be written.

    Args:
        topics: the topics.
        row: of the transaction.
        partition: where to.
        runs: the batches. They get their offsets where they are.

    Raises:
        InvalidTxnStateError, TopicNotFoundError, StorageFullError: as for `append`.
    """
    if partition.side is not None:
        single = [
            bytes(run[at : at + header.length]) for run, _ in runs for at, header in walk(run)
        ]
        _append_aside(topics, row, partition, single, AppendAttempt())
        return
    admit = _taking_part(topics, row, partition)
    _append(topics, partition, runs, _place_here, admit, AppendAttempt(), row.txn_id)


def _taking_part(
    topics: Topics, row: TxnRow, partition: Partition
) -> Callable[[apsw.Cursor], _Admitted]:

    def take_part(cur: apsw.Cursor) -> _Admitted:
        status_table.get_open(cur, row.txn_id, "send messages")
        if status_table.takes_part(cur, row.txn_id, KIND, partition.id):
            return _Admitted(0, first=False)
        # A log with messages of a transaction that is not known to be there waits for its end.
        status_table.join(cur, row.txn_id, KIND, [partition.id], "send messages")
        return _Admitted(0, first=True)

    return take_part


def append_alone(
    topics: Topics,
    partition: Partition,
    batches: Sequence[bytes],
    attempt: AppendAttempt | None = None,
    note: Note | None = None,
) -> None:
    """Append plain batches, outside of any transaction: visible at one instant, that of a commit.

    Args:
        topics: the topics.
        partition: where to.
        batches: without offsets.
        attempt: as for `append`.
        note: as for `append`; what it writes is durable before the batches are.

    Raises:
        TopicNotFoundError: the topic was dropped; nothing was appended.
        StorageFullError, UnavailableError: as for `append`.
    """
    stamps = []

    def commit(cur: apsw.Cursor) -> _Admitted:
        stamps.append(next_timestamp(cur))
        reach(cur, stamps[-1])
        return _Admitted(stamps[-1], first=note is not None)

    attempt = attempt or AppendAttempt()
    _append(topics, partition, _runs(batches), place, commit, attempt, 0, note)
    if stamps:
        topics.store.runtime.raise_durable(stamps[-1])
        topics.log.wake()


def is_appended(topics: Topics, partition: Partition, attempt: AppendAttempt) -> bool:
    """Tell whether batches of an `append_alone` that failed are in the log; durably, if so.

    Raises:
        StorageFullError, UnavailableError: the disk still fails; it is as unsure as before.
    """
    found = partition.environment.write(lambda txn: _is_there(txn, partition, attempt, 0))
    if found:
        topics.store.status.sync()
    return found


def _append(
    topics: Topics,
    partition: Partition,
    runs: Sequence[Run],
    put: Callable[[Buffer, int, int], Buffer],
    admit: Callable[[apsw.Cursor], _Admitted],
    attempt: AppendAttempt,
    txn_id: int,
    note: Note | None = None,
) -> None:
    topic_catalog.require_writable(partition.topic)
    status = topics.store.status
    syncing: list[Callable[[], None]] = []

    def write(txn: lmdb.Transaction) -> None:
        if attempt.at is not None and _is_there(txn, partition, attempt, txn_id):
            syncing.append(status.begin_sync())
            return
        end = partition.log.end(txn)
        with status.write(sync=False) as cur:
            topic_catalog.require_live(cur, partition.topic)
            commit_ts, first = admit(cur)
            # What came before is looked at first: these offsets are ours, and no hole.
            waiting = roll_forward.look(topics, cur, partition, end)
            base = topic_catalog.take_offsets(cur, partition.id, sum(count for _, count in runs))
            if note is not None:
                note(cur, base)
        if first or waiting.upto > end:
            status.sync()
        else:
            syncing.append(status.begin_sync())
        fault_point("append.reserved")
        attempt.at = base
        roll_forward.write(txn, partition, waiting)
        partition.log.put(txn, _placed(runs, put, base, commit_ts))

    with GATE.use():
        try:
            partition.environment.write(write)
        finally:
            for wait in syncing:
                wait()
    fault_point("append.written")


def _is_there(
    txn: lmdb.Transaction, partition: Partition, attempt: AppendAttempt, txn_id: int
) -> bool:
    """Tell whether the batches of a try that failed are in the log; inside a write to it."""
    log, at = partition.log, attempt.at
    if at is None or not log.start(txn) <= at < log.end(txn):
        return False
    # The offset was this one's alone: other than its batch only a filler can be there.
    header = read_header(whole(log.read(txn, at, 1, raw=True)[0]))
    if header.is_control or header.txn_id != txn_id:
        return False
    log.put(txn, ())  # a commit of LMDB that goes through makes the one before it durable
    return True


def _runs(batches: Sequence[bytes]) -> list[Run]:
    return [(batch, read_header(batch).count) for batch in batches]


def _place_here(run: Buffer, base: int, commit_ts: int) -> Buffer:
    place_here(run, base, commit_ts)
    return run


def _placed(
    runs: Sequence[Run], put: Callable[[Buffer, int, int], Buffer], base: int, commit_ts: int
) -> Iterator[Buffer]:
    # One by one: each is a copy, and memory that was just given back is there to be used again.
    for run, count in runs:
        yield put(run, base, commit_ts)
        base += count


def _append_aside(
    topics: Topics,
    row: TxnRow,
    partition: Partition,
    batches: Sequence[bytes],
    attempt: AppendAttempt,
) -> None:
    side = partition.side
    assert side is not None
    topic_catalog.require_writable(partition.topic)

    def write(txn: lmdb.Transaction) -> None:
        with topics.store.status.read() as cur:
            topic_catalog.require_live(cur, partition.topic)
            status_table.get_open(cur, row.txn_id, "send messages")
            takes_part = status_table.takes_part(cur, row.txn_id, KIND, partition.id)
        if not takes_part:
            with topics.store.status.write() as cur:
                status_table.join(cur, row.txn_id, KIND, [partition.id], "send messages")
        if attempt.at is None or not side.holds(txn, row.txn_id, attempt.at, batches):
            attempt.at = side.append(txn, row.txn_id, batches)

    partition.environment.write(write)
    fault_point("append.side")
