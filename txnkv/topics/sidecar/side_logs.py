"""The sidecar transaction buffer: batches of open transactions wait beside the log.

The words. A *side log* holds the batches of large transactions that are undecided; there is one
in a partition's LMDB environment, made when the first transaction comes. At the commit one
control batch, the *marker*, is put into the log. It takes as many offsets as the transaction
has messages here and carries the *list* of its side batches, so a message's id is the marker's
offset and the message's index, from then on for ever.

    side log    T1: a b          T2: x         T1: c        nobody reads here
                 |                                |
    log     0 .. 9 | [10, 13): SIDE_LIST T1, 3 messages | 13: plain | ...
                           ^ what readers get at 10, 11, 12: a b c

    T2 is open, and nobody waits for it: there is nothing of it in the log. So readers see whole
    transactions in commit order, and the log's end is its last stable offset.

Nobody reads a batch before its transaction is committed. So side batches are DECIDED ones: what
a reader, a follower or a replay gets in place of a marker are decided batches of the same
offsets, and whether compaction has put them there already is the same to it.

    append       OPEN       batches go under (transaction, index)              in the partition's
                            beyond 64 MiB into a side log of its own           LMDB transaction
    committed    COMMITTED  the marker is in the log; indexes by transaction   with the marker
                            and by marker
    expand                  what a marker stands for, from any offset in it
    compaction              side batches of the least marker first, chunk by   4 MiB at a time
                            chunk into the log, in the marker's place
    abort        GARBAGE    one row says so; the batches go by and by          a row, then chunks
    retention    GARBAGE    when the log's start has passed all its messages
    truncation   GARBAGE    when its marker is cut off

Compaction of one transaction may take many steps, and readers come between any two:

    [10, 5010): SIDE_LIST of 5000          before
    [10, 900) batches, [900, 5010): SIDE_LIST of 4110      after a step; the list begins later
    [10, 5010) batches                     at the end

An own side log (`side_store`) is adopted by the commit as it is: it holds one transaction in
order, so there is nothing to compact, and it is dropped whole with its marker.

Into a backup go the side logs of committed transactions, whose markers stand for them: what is open
is given up by the restored store, and garbage is garbage. One file for each such transaction, of
entries of two databases: `side`, its chunks in the partition's side log, and `own`, those in a side
log of its own.

Calls that take an LMDB transaction are made inside one of the partition's environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import lmdb

from txnkv.core import CoreError, check_batch, place, read_header
from txnkv.errors import CorruptionError, InvalidTxnStateError, NotSupportedError, UnavailableError
from txnkv.storage import EntryFile, Environment, Environments, each_between
from txnkv.topics.log import OWN, PartitionLog, SideRun, is_side_list, pack_runs, read_marker
from txnkv.topics.sidecar import side_store
from txnkv.topics.sidecar.side_store import (
    BY_MARKER,
    SIDE,
    TRANSACTIONS,
    OwnLogs,
    SideChunks,
    SideIndex,
    SideState,
    SideTxn,
    batches_of,
    chunk_key,
    decided,
    packed_id,
    packed_row,
    read_chunk_key,
)
from txnkv.topics.sidecar.side_sweep import SideSweep, SideSwept

MOST_MESSAGES = (1 << 31) - 1
"""Messages of one transaction in one partition, at most: what a control batch can count."""


class SideLogs:
    """The side logs of a partition. Shared by threads; it holds no state of its own.

    Args:
        environment: the partition's.
        environments: of the store, for side logs of their own.
        name: of the partition's environment in it: "logs/7".
    """

    def __init__(self, environment: Environment, environments: Environments, name: str) -> None:
        self.environment = environment
        self.own = OwnLogs(environment, environments, name)

    # -- OPEN --------------------------------------------------------------------------

    def append(self, txn: lmdb.Transaction, txn_id: int, batches: Sequence[bytes]) -> int:
        """Adds batches of an open transaction, in the order of the calls.

        Args:
            txn: a write transaction; they count when it commits.
            txn_id: of the transaction.
            batches: data batches with its id, without offsets.

        Returns:
            The index of the first message.

        Raises:
            InvalidTxnStateError: the transaction has ended here; nothing was added.
            NotSupportedError: there would be more than 2^31 - 1 messages; nothing was added.
            ValueError: one of them is no data batch of this transaction; nothing was added.
        """
        index = SideIndex(txn, self.environment)
        side = index.get(txn_id) or SideTxn()
        if side.state is not SideState.OPEN:
            raise InvalidTxnStateError(
                f"append to the side log of transaction {txn_id}: it has ended here "
                f"({side.state.name}). Begin a new transaction"
            )
        sealed = [decided(batch, txn_id) for batch in batches]
        if not sealed:
            return side.count
        headers = [read_header(batch) for batch in sealed]
        count = sum(header.count for header in headers)
        if side.count + count > MOST_MESSAGES:
            raise NotSupportedError(
                f"transaction {txn_id} has {side.count:,} messages in one partition and sends "
                f"{count:,} more: {MOST_MESSAGES:,} are the most. Commit and begin another one"
            )
        newest = max(header.max_timestamp for header in headers)
        if side.count:
            newest = max(newest, side.max_timestamp)
        added = self._added(txn, txn_id, side, sealed, count)
        index.put(txn_id, added._replace(max_timestamp=newest))
        return side.count

    def holds(
        self, txn: lmdb.Transaction, txn_id: int, index: int, batches: Sequence[bytes]
    ) -> bool:
        """Tell whether an append that failed is here all the same; write, so that it is durable.

        Another writer of the transaction may have come to the index instead. Its batches differ:
        they were made at another microsecond, or say something else.

        Args:
            txn: a write transaction.
            txn_id: of the transaction.
            index: that `append` gave, or would have given.
            batches: as they were given to `append`.
        """
        sides = SideIndex(txn, self.environment)
        side = sides.get(txn_id)
        if side is None or side.state is not SideState.OPEN:
            return False
        wanted = place(b"".join(decided(batch, txn_id) for batch in batches), index)
        found = bytearray()
        for run in side.runs:
            first = max(index, run.first)
            if first < run.end and len(found) < len(wanted):
                room = len(wanted) - len(found)
                for part in self._run(txn, txn_id, run, first, room, 0, 0):
                    found += part
        sides.put(txn_id, side)
        return found.startswith(wanted)

    def _added(
        self, txn: lmdb.Transaction, txn_id: int, side: SideTxn, batches: list[bytes], count: int
    ) -> SideTxn:
        size = sum(map(len, batches))
        if side.has_own or side.shared_bytes + size > side_store.OWN_BYTES:
            self.own.put(txn_id, side.count, batches, begun=side.has_own)
            return side._replace(
                has_own=True, own_count=side.own_count + count, own_bytes=side.own_bytes + size
            )
        self._chunks(txn).put(txn_id, side.count, batches)
        return side._replace(
            shared_count=side.shared_count + count, shared_bytes=side.shared_bytes + size
        )

    def count(self, txn: lmdb.Transaction, txn_id: int) -> int:
        """Messages that wait here for the end of a transaction; 0 for one that is not open."""
        side = SideIndex(txn, self.environment).get(txn_id)
        return 0 if side is None or side.state is not SideState.OPEN else side.count

    # -- the end -----------------------------------------------------------------------

    def marker_body(self, txn: lmdb.Transaction, txn_id: int) -> bytes:
        """The list of an open transaction's side batches, for its marker, which counts `count`.

        Nothing when it has none, or was cut off by a truncation: then no marker may be put.
        """
        side = SideIndex(txn, self.environment).get(txn_id)
        return b"" if side is None or side.state is not SideState.OPEN else pack_runs(side.runs)

    def max_timestamp(self, txn: lmdb.Transaction, txn_id: int) -> int:
        """The greatest timestamp of a transaction's messages, which is the marker's."""
        side = SideIndex(txn, self.environment).get(txn_id)
        return 0 if side is None else side.max_timestamp

    def committed(
        self, txn: lmdb.Transaction, txn_id: int, marker_offset: int, commit_ts: int
    ) -> None:
        """Notes that a transaction's marker was put into the log; again, and without batches
        here, it is fine.

        Args:
            txn: the write transaction that puts the marker.
            txn_id: of the transaction.
            marker_offset: the first offset of the marker.
            commit_ts: of the commit.
        """
        index = SideIndex(txn, self.environment)
        side = index.get(txn_id)
        if side is not None and side.state is SideState.OPEN:
            index.commit(
                txn_id,
                side._replace(
                    state=SideState.COMMITTED, marker_offset=marker_offset, commit_ts=commit_ts
                ),
            )

    def abort(self, txn: lmdb.Transaction, txn_id: int) -> None:
        """Gives an open transaction's batches up, however many they are; twice is fine.

        They are removed by `sweep`.
        """
        index = SideIndex(txn, self.environment)
        side = index.get(txn_id)
        if side is not None and side.state is SideState.OPEN:
            index.discard(txn_id, side)

    def truncate(self, txn: lmdb.Transaction, offset: int) -> None:
        """Gives up what stands behind markers that are cut off with `PartitionLog.truncate`.

        Args:
            txn: the write transaction that truncates the log.
            offset: what the log was asked to be truncated to.
        """
        index = SideIndex(txn, self.environment)
        before = index.committed_before(offset)
        if before is not None:
            side = index.get(before[1])
            if side is not None and side.end_offset > offset:
                index.discard(before[1], side)
        for _, txn_id in index.committed(offset):
            side = index.get(txn_id)
            assert side is not None
            index.discard(txn_id, side)

    # -- reading -----------------------------------------------------------------------

    def expand(
        self, txn: lmdb.Transaction, marker: bytes, offset: int, max_bytes: int
    ) -> list[bytes]:
        """Return the batches that a marker stands for, placed at its offsets.

        Args:
            txn: the transaction in which the marker was read.
            marker: the SIDE_LIST control batch.
            offset: in the marker's range.
            max_bytes: to stop after.

        Returns:
            Copies of whole batches, some in each, from the one that holds `offset` on: at least
            one.

        Raises:
            CorruptionError: the marker or a batch is damaged or missing.
            UnavailableError: retention dropped them while the marker was read; read anew.
        """
        header, runs = read_marker(marker)
        zero = header.base_offset - runs[0].first  # the offset of the message of index 0
        found: list[bytes] = []
        for run in runs:
            index = max(offset - zero, run.first)
            if index >= run.end or max_bytes <= 0:
                continue
            for batches in self._run(txn, header.txn_id, run, index, max_bytes, zero, header[1]):
                found.append(batches)
                max_bytes -= len(batches)
        return found

    def _run(
        self,
        txn: lmdb.Transaction,
        txn_id: int,
        run: SideRun,
        index: int,
        max_bytes: int,
        zero: int,
        commit_ts: int,
    ) -> list[bytes]:
        if run.log == OWN:
            try:
                return self.own.read(txn_id, index, run.end, max_bytes, zero, commit_ts)
            except UnavailableError:
                with self.environment.read() as now:
                    side = SideIndex(now, self.environment).get(txn_id)
                if side is not None and side.state is not SideState.GARBAGE:
                    raise self.own.lost(txn_id) from None
                raise
        found = []
        for at, chunk in self._chunks(txn).read(txn_id, index, run.end):
            found.append(place(chunk, zero + at, commit_ts))
            max_bytes -= len(chunk)
            if max_bytes <= 0:
                break
        return found

    # -- the indexes -------------------------------------------------------------------

    def transaction(self, txn: lmdb.Transaction, txn_id: int) -> SideTxn | None:
        """Return what is here of a transaction; None: nothing, or no more."""
        index = self._index(txn)
        return None if index is None else index.get(txn_id)

    def open_transactions(self, txn: lmdb.Transaction) -> list[tuple[int, SideTxn]]:
        """Undecided transactions with batches here, by id."""
        return [each for each in self.rows(txn) if each[1].state is SideState.OPEN]

    def rows(self, txn: lmdb.Transaction) -> list[tuple[int, SideTxn]]:
        """All transactions with batches here, by id."""
        index = self._index(txn)
        return [] if index is None else list(index.all())

    def chunks_of(self, txn: lmdb.Transaction, txn_id: int, run: SideRun) -> list[bytes]:
        """All batches of a run, without their offsets; for checks.

        Raises:
            CorruptionError: a part of them is missing.
        """
        found = self._run(txn, txn_id, run, run.first, 1 << 62, 0, 0)
        return [bytes(chunk) for chunk in found]

    def sweep(self, log: PartitionLog, check: Callable[[], object] = lambda: None) -> SideSwept:
        """Removes garbage, follows the log's start, compacts. Outside of any transaction.

        Args:
            log: of the partition.
            check: called inside of each LMDB write; what it raises ends the sweep.

        Returns:
            What was done.
        """
        return SideSweep(self.environment, self.own, log, check).run()

    def close(self) -> None:
        """Closes side logs of their own in this process for good, before their files go."""
        self.own.close()

    def _index(self, txn: lmdb.Transaction) -> SideIndex | None:
        try:
            return SideIndex(txn, self.environment)
        except KeyError:
            return None

    def _chunks(self, txn: lmdb.Transaction) -> SideChunks:
        db: Any = self.environment.db(SIDE)
        return SideChunks(txn, db)


def side_problems(side: SideLogs, log: PartitionLog, txn: lmdb.Transaction) -> Iterator[str]:
    """Everything that is wrong in side logs, one line each; nothing if all is well.

    Every checksum is verified; each transaction has as many messages as are counted; each
    committed one has its marker in the log, and the reverse index knows it.

    Args:
        side: the side logs.
        log: of the partition.
        txn: a read transaction of its environment.
    """
    try:
        index = SideIndex(txn, side.environment)
    except KeyError:
        return
    by_marker = {txn_id: marker for marker, txn_id in index.committed()}
    start = log.start(txn)
    for txn_id, found in index.all():
        if found.state is SideState.GARBAGE:
            continue
        try:
            if found.state is SideState.COMMITTED and found.end_offset > start:
                yield from _marker(log, txn, txn_id, found)
            if by_marker.pop(txn_id, None) != _expected(found):
                yield f"side log: transaction {txn_id} is not in the index by marker as it is"
            yield from _batches(side, txn, txn_id, found)
        except (CorruptionError, CoreError) as error:
            yield str(error)
    for txn_id, marker in by_marker.items():
        yield f"side log: the marker at {marker} is of transaction {txn_id}, which is not there"


def _expected(found: SideTxn) -> int | None:
    return found.marker_offset if found.state is SideState.COMMITTED else None


def _marker(log: PartitionLog, txn: lmdb.Transaction, txn_id: int, found: SideTxn) -> Iterator[str]:
    at = max(found.marker_offset + found.moved, log.start(txn))
    parts = log.read(txn, at, 1, raw=True)
    if not parts or not is_side_list(parts[0]):
        yield f"side log: transaction {txn_id} is committed and has no marker at {at}"
        return
    marker = read_marker(bytes(parts[0]))
    runs = tuple(run for run in found.runs if run.count)
    if marker.header.txn_id != txn_id or marker.runs != runs:
        yield f"side log: the marker at {at} names {marker.runs}, there are {runs}"


def _batches(side: SideLogs, txn: lmdb.Transaction, txn_id: int, found: SideTxn) -> Iterator[str]:
    for run in found.runs:
        count = size = 0
        for chunk in side.chunks_of(txn, txn_id, run) if run.count else ():
            for at, header in batches_of(chunk):
                check_batch(chunk, at)
                count, size = count + header.count, size + header.length
                if header.txn_id != txn_id or not header.is_decided:
                    yield f"side log: a batch of transaction {txn_id} is of {header.txn_id}"
        if (count, size) != (run.count, run.bytes):
            yield (
                f"side log: transaction {txn_id} has {count} messages of {size} bytes, "
                f"{run.count} of {run.bytes} are counted"
            )


# -- on the way into a backup ----------------------------------------------------------

OWN_DATABASE: Final = b"own"


def committed_rows(side: SideLogs, txn: lmdb.Transaction, upto: int) -> dict[int, SideTxn]:
    """The transactions whose markers stand below an offset, by id.

    Args:
        side: the side logs.
        txn: a read.
        upto: the offset.
    """
    return {
        txn_id: found
        for txn_id, found in side.rows(txn)
        if found.state is SideState.COMMITTED and found.marker_offset < upto
    }


def put_rows(rows: dict[int, SideTxn], file: EntryFile) -> None:
    """Put the rows of transactions, and their places in commit order."""
    for txn_id, row in sorted(rows.items()):
        file.put(TRANSACTIONS, packed_id(txn_id), packed_row(row))
    for marker, txn_id in sorted((row.marker_offset, txn_id) for txn_id, row in rows.items()):
        file.put(BY_MARKER, packed_id(marker), packed_id(txn_id))


def put_chunks(side: SideLogs, txn_id: int, row: SideTxn, file: EntryFile) -> None:
    """Put the batches of a committed transaction, each compared with its checksum.

    Raises:
        CorruptionError: one is damaged, or missing.
    """
    for environment, database, first, last in (
        (side.environment, SIDE, row.moved, row.shared_count),
        (side.own.environment(txn_id) if row.own_count else None, OWN_DATABASE,
         row.shared_count, row.count),
    ):  # fmt: skip
        if environment is None or first >= last:
            continue
        reached = first

        def take(key: bytes, value: bytes, database: bytes = database) -> None:
            nonlocal reached
            at, count = read_chunk_key(key)[1], 0
            for begin, header in batches_of(value):
                check_batch(value, begin)
                count += header.count
            reached = at + count if at == reached else -1
            file.put(database, key, value)

        try:
            each_between(environment, SIDE, chunk_key(txn_id, first), chunk_key(txn_id, last), take)
        except CoreError as error:
            raise _damaged(txn_id, str(error)) from None
        if reached != last:
            raise _damaged(txn_id, "a part of it is missing")


def _damaged(txn_id: int, what: str) -> CorruptionError:
    return CorruptionError(f"the side log of transaction {txn_id}: {what}")
