"""The state of a partition: what its log says of the transactions in it.

The words. The *log* is a row of batches with dense offsets. A transaction's batches lie in it
as they were sent, among those of others; it is *open* from its first batch until its *end
marker*, COMMIT or ABORT, which takes an offset as a batch does. The *last stable offset* (LSO)
is the first offset of the earliest open transaction, or the end of the log: below it all is
decided. A reader of committed data gets what is below the LSO, and drops what was aborted.

    offset     0    1    2    3     4    5     6    7    8    9     10
             +----+----+----+-----+----+-----+----+----+----+-----+-----+
    log      | P1 | P1 | P2 | C 1 | P2 | A 2 | P1 | P2 | P1 | A 1 | C 2 |
             +----+----+----+-----+----+-----+----+----+----+-----+-----+
    open       1    1    1,2  2     2    -     1    1,2  1,2  2     -
    LSO after  0    0    0    2     2    6     6    6    6    7     11
    index                                P2 2-5              P1 6-9
                                         lso 6               lso 7

Of an open transaction the first offset is kept and nothing else: no message ids, no lengths.
P1 opens at 0. At the marker at 3 it is committed, and the LSO moves on to 2, where P2 began. At
5 P2 is aborted: nothing else is open, so the LSO is 6, and the aborted index gets "P2 from 2 to
5, and the LSO is 6". A transaction that sends again after its end opens again, as P1 at 6.

The steps at an end marker, in this order, are one change of the state:

    1. the new LSO: the first offset of the first *other* open transaction, else behind the marker
    2. the entry in the aborted index, with that LSO, if it was an abort
    3. the removal of the transaction from those that are open

A reader that saw the removal before the entry would take aborted messages for committed ones;
the three are one LMDB transaction, together with the batch itself. A marker of a transaction
that is not open (it sent nothing here) changes nothing.

*Decided* batches come from small transactions, which were committed before their messages
reached the log, and plain batches from none: both are visible at once and never open anything.

**Late batches.** A control batch carries the *low water mark*: every transaction with a lower
id has ended, and its marker, if it had one here, stands before this one. A writer that was
stopped and goes on after its transaction timed out may still append to it. Two cases:

    its id is below the mark that the log has seen: the batch is aborted where it stands, by an
    entry of its own, from its first to its last offset; it opens nothing and holds nothing back
    it is not yet: the transaction opens again, and the first mark above its id aborts it

In both the entry begins at the late batch, so messages that the transaction sent before, and
committed, are never touched.

The state is a pure function of the batches in offset order. The same `apply` serves appends,
the flush of small commits, replay after a truncation, and a follower, which therefore makes
the same index byte for byte.

**The aborted index.** An entry is written when an abort marker comes, into the segment that holds
the marker. It has 34 bytes, big-endian, the layout of Kafka's transaction index:

     0         2               10             18            26                  34
    +---------+---------------+--------------+-------------+-------------------+
    | version | transaction   | first offset | last offset | last stable       |
    | i16 = 0 | i64           | i64          | i64         | offset, i64       |
    +---------+---------------+--------------+-------------+-------------------+

The last offset is the marker's. The last stable offset is that of the log *after* this abort,
exclusive: the first offset of the next open transaction, or the marker's offset + 1.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

from txnkv.core import Attributes, BatchHeader, Control, ControlType
from txnkv.errors import CorruptionError

ENTRY_BYTES: Final = 34
_ENTRY: Final = struct.Struct(">hqqqq")
_VERSION: Final = 0


class AbortedEntry(NamedTuple):
    """One aborted transaction of a log.

    Attributes:
        txn_id: the local id of the transaction.
        first_offset: of its first batch.
        last_offset: of the abort marker.
        last_stable_offset: of the log as it is after this abort, exclusive.
    """

    txn_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int

    def pack(self) -> bytes:
        """The 34 bytes of the entry."""
        return _ENTRY.pack(_VERSION, *self)

    @classmethod
    def unpack(cls, data: bytes | memoryview, at: int = 0) -> AbortedEntry:
        """The entry at byte `at`.

        Raises:
            CorruptionError: it is cut off, or of a version this program does not know.
        """
        if len(data) - at < ENTRY_BYTES:
            raise CorruptionError(
                f"aborted index: an entry at byte {at} of {len(data)} is cut off; truncate the "
                "log before it, or restore the store from a backup"
            )
        version, *fields = _ENTRY.unpack_from(data, at)
        if version != _VERSION:
            raise CorruptionError(
                f"aborted index: the entry at byte {at} has version {version}, this program reads "
                f"{_VERSION}; use a newer one"
            )
        return cls(*fields)


def unpack_entries(data: bytes | memoryview) -> list[AbortedEntry]:
    """Entries that stand one behind the other.

    Raises:
        CorruptionError: one of them cannot be read.
    """
    return [AbortedEntry.unpack(data, at) for at in range(0, len(data), ENTRY_BYTES)]


CONTROL: Final = int(Attributes.CONTROL)
_UNDECIDED: Final = int(Attributes.TRANSACTIONAL | Attributes.DECIDED)
_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)


class OpenTxn(NamedTuple):
    """A transaction with messages in the log and no end marker yet.

    Attributes:
        txn_id: its local id.
        first_offset: of its first batch.
        since: the timestamp of that batch, microseconds since 1970.
    """

    txn_id: int
    first_offset: int
    since: int


class CommitEntry(NamedTuple):
    """One place in the log where messages become visible.

    Attributes:
        marker_offset: of the COMMIT marker, or the first of the batch that is visible at once.
        count: offsets that the marker or batch takes.
        txn_id: the local id; 0 for messages outside of a transaction.
        first_offset: of the transaction's messages.
        commit_ts: 0 where it is not known.
    """

    marker_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    txn_id: int
    first_offset: int
    commit_ts: int


class OpenTxns(Protocol):
    """The open transactions of a log, by id and by first offset."""

    def get(self, txn_id: int) -> OpenTxn | None:
        """The open transaction of this id."""

    def add(self, txn: OpenTxn) -> None:
        """One more; it begins behind all others."""

    def remove(self, txn: OpenTxn) -> None:
        """It has ended."""

    def first(self, but: int = 0) -> int | None:
        """The least first offset, one transaction left out."""

    def below(self, txn_id: int) -> list[OpenTxn]:
        """Those with a lower id."""


class MemoryOpenTxns:
    """Open transactions in memory: for replay and checks."""

    def __init__(self, txns: Iterable[OpenTxn] = ()) -> None:
        self._by_id = {txn.txn_id: txn for txn in txns}
        self._order = sorted((txn.first_offset, txn.txn_id) for txn in self._by_id.values())

    def get(self, txn_id: int) -> OpenTxn | None:
        """The open transaction of this id."""
        return self._by_id.get(txn_id)

    def add(self, txn: OpenTxn) -> None:
        """One more."""
        self._by_id[txn.txn_id] = txn
        insort(self._order, (txn.first_offset, txn.txn_id))

    def remove(self, txn: OpenTxn) -> None:
        """It has ended."""
        del self._by_id[txn.txn_id]
        del self._order[bisect_left(self._order, (txn.first_offset, txn.txn_id))]

    def first(self, but: int = 0) -> int | None:
        """The least first offset, one transaction left out."""
        return next((offset for offset, txn_id in self._order[:2] if txn_id != but), None)

    def below(self, txn_id: int) -> list[OpenTxn]:
        """Those with a lower id."""
        return [txn for txn in self._by_id.values() if txn.txn_id < txn_id]

    def all(self) -> list[OpenTxn]:
        """All, by first offset."""
        return [self._by_id[txn_id] for _, txn_id in self._order]


class PartitionState:
    """The state that batches up to `end` leave of the transactions; `apply` adds one batch.

    Attributes:
        end: the offset behind the last batch.
        low_water_mark: the highest that a control batch carried.
        open: the open transactions.
        aborted: entries that came since they were last taken away, by last offset.
        commits: the same of what became visible, by marker offset.
        changes: how often a transaction was opened or ended since it was set to 0.
    """

    __slots__ = ("aborted", "changes", "commits", "end", "low_water_mark", "open")

    def __init__(self, end: int, low_water_mark: int, open_: OpenTxns) -> None:
        self.end = end
        self.low_water_mark = low_water_mark
        self.open = open_
        self.aborted: list[AbortedEntry] = []
        self.commits: list[CommitEntry] = []
        self.changes = 0

    @property
    def last_stable_offset(self) -> int:
        """The first offset of the first open transaction, else the end of the log."""
        return self._stable(but=0)

    def apply(self, header: BatchHeader, control: Control | None) -> None:
        """Takes the batch at `end` into the state.

        Args:
            header: its header; its base offset is `end`.
            control: its body, if it is a control batch.
        """
        base = header.base_offset
        self.end = base + header.count
        if control is not None:
            self._control(header, control)
        elif header.attributes & _UNDECIDED == _TRANSACTIONAL:
            self._undecided(header)
        else:
            entry = CommitEntry(base, header.count, header.txn_id, base, header.commit_ts)
            self.commits.append(entry)

    def _undecided(self, header: BatchHeader) -> None:
        txn_id = header.txn_id
        if self.open.get(txn_id) is not None:
            return
        self.changes += 1
        if txn_id < self.low_water_mark:
            self._abort(txn_id, header.base_offset)
        else:
            self.open.add(OpenTxn(txn_id, header.base_offset, header.base_timestamp))

    def _control(self, header: BatchHeader, control: Control) -> None:
        kind = control.type
        if kind is ControlType.SIDE_LIST:
            base = header.base_offset
            entry = CommitEntry(base, header.count, header.txn_id, base, header.commit_ts)
            self.commits.append(entry)
        is_end = kind is ControlType.ABORT or kind is ControlType.COMMIT
        ended = self.open.get(header.txn_id) if is_end else None
        ending = [] if ended is None else [ended]
        if control.low_water_mark > self.low_water_mark:
            self.low_water_mark = control.low_water_mark
            ending += [t for t in self.open.below(control.low_water_mark) if t != ended]
        # By first offset, so that the entry at which a search stops has none behind it that
        # begins below its last stable offset.
        for txn in sorted(ending, key=lambda txn: txn.first_offset):
            if txn is ended and kind is ControlType.COMMIT:
                self._commit(txn, header)
            else:
                self._abort(txn.txn_id, txn.first_offset)
            self.open.remove(txn)
            self.changes += 1

    def _abort(self, txn_id: int, first_offset: int) -> None:
        lso = self._stable(but=txn_id)
        self.aborted.append(AbortedEntry(txn_id, first_offset, self.end - 1, lso))

    def _commit(self, txn: OpenTxn, header: BatchHeader) -> None:
        marker, ts = header.base_offset, header.commit_ts
        entry = CommitEntry(marker, header.count, txn.txn_id, txn.first_offset, ts)
        self.commits.append(entry)

    def _stable(self, but: int) -> int:
        first = self.open.first(but)
        return self.end if first is None else first
