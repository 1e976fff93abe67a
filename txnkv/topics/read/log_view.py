"""One look at a partition: what its log has, and what waits in memory, as one row of offsets.

    LMDB     [ 0 ............ 40 )          40: an open transaction began at 35
    tail                     [ 40-41 | 42 ]   [ 50-52 ]
    view     [ 0 ........................ 43 )            high watermark 43, LSO 35

The high watermark is the first offset that is in neither: what comes behind it may be an append
that is under way, which LMDB will have in a moment. The last stable offset comes from the same
LMDB snapshot: a transaction that is open in it holds it back, and the tail has only what is
committed.

**Nobody misses a commit that returned.** Small ones are in the tail of every process as soon as
it has looked at the change number. A large one has its end markers noted in status.db, which a
finalizer writes into the logs later; a reader that finds one noted above its high watermark
*helps*: it writes what is missing, and looks again. The order matters:

    1. the snapshot of small commits       (the tail holds all of them, or LMDB does)
    2. the noted markers                   (a marker that is noted no more is in LMDB)
    3. LMDB
    4. entries of the tail that are missing: dropped meanwhile, they are in a newer LMDB

The tail may be long, and most looks come soon after another. So the last entry that was reached
without a gap is remembered: as long as it is in the tail, what is before it in the tail is as it
was, and only what came behind it is looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import lmdb

from txnkv.coordinator import Timestamp
from txnkv.core import CoreError, within
from txnkv.errors import ClosedError, CorruptionError, OffsetOutOfRangeError, UnavailableError
from txnkv.storage import StaleHandleError, lengthy
from txnkv.topics.log import (
    Buffer,
    CommitEntry,
    OpenTxn,
    behind,
    first_length,
    first_not_older,
    position_of,
    unlike,
)
from txnkv.topics.tail import TailEntry
from txnkv.topics.topics import Partition, Topics
from txnkv.topics.write import roll_forward

T = TypeVar("T")

_TRIES: Final = 100
_ALL: Final = (1 << 64) - 1
_UNIX: Final = datetime(1970, 1, 1, tzinfo=UTC)
_complete: Final = lengthy(roll_forward.complete)  # another process may write there
_reached: WeakKeyDictionary[Any, TailEntry] = WeakKeyDictionary()
"""By partition: the last entry of the tail that was found without a gap before it."""
_unmarked: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""By partition: a manifest version as of which no end markers were noted."""


class Bounds(NamedTuple):
    """The bounds of what a partition holds.

    Attributes:
        start: the least offset that is readable.
        high_watermark: behind the last message that is readable.
        last_stable_offset: below it all is decided.
    """

    start: int
    high_watermark: int
    last_stable_offset: int


class _MovedError(Exception):
    """Entries that the tail had when the look began are in a newer LMDB snapshot now."""


class LogView:
    """A partition as of one moment. It lives in an LMDB read transaction, and ends with it.

    Attributes:
        start, end: of the log in LMDB.
        high_watermark, last_stable_offset: of log and tail together.
        latest: of the commits that are looked for in the tail.
        is_behind: it lacks some of what was decided when the look began.
    """

    __slots__ = (
        "_log",
        "_partition",
        "_state",
        "_topics",
        "_txn",
        "end",
        "high_watermark",
        "is_behind",
        "last_stable_offset",
        "latest",
        "start",
    )  # fmt: skip

    def __init__(
        self,
        topics: Topics,
        partition: Partition,
        txn: lmdb.Transaction | None,
        latest: Timestamp,
        fresh: Sequence[TailEntry],
        reached: int,
        decided: int,
    ) -> None:
        """Made by `look_at`.

        Args:
            txn: of LMDB; None where there is no log.
            fresh: of the tail, not below `reached`.
            reached: known to be without a gap up to there.
            decided: what was decided when the look began is below, and has to be in the view.
        """
        self._topics = topics
        self._partition = partition
        self._txn = txn
        self.latest = latest
        self.start = self.end = stable = 0
        if txn is not None:
            self._log = log = partition.log
            self._state = log.state(txn)
            self.start, self.end, stable = log.bounds(txn, self._state)
        high = max(self.end, reached)
        for entry in fresh:
            if entry.base_offset > high:
                break
            high = max(high, entry.next_offset)
        self.high_watermark = high
        self.is_behind = decided > high
        self.last_stable_offset = high if stable == self.end else stable

    @property
    def label(self) -> str:
        """The partition, for messages."""
        return self._partition.label

    @property
    def bounds(self) -> Bounds:
        """The bounds of what the partition holds."""
        return Bounds(self.start, self.high_watermark, self.last_stable_offset)

    def require(self, offset: int) -> None:
        """Refuse an offset that is not there.

        Raises:
            OffsetOutOfRangeError: it is not in [start, high watermark].
        """
        if not self.start <= offset <= self.high_watermark:
            raise OffsetOutOfRangeError(
                f"{self._partition.label} was asked for offset {offset} and holds "
                f"[{self.start}, {self.high_watermark}): begin at one of these, as at the "
                f"{'earliest' if offset < self.start else 'latest'}"
            )

    def open_at(self, offset: int) -> list[OpenTxn]:
        """Transactions that the batches below an offset, at which one begins, leave open."""
        return self._log.open_at(self._txn, offset) if self._txn is not None and self.end else []

    @property
    def rewritten(self) -> int:
        """A count of the pieces of the log that were rewritten: batches lie elsewhere then."""
        return 0 if self._txn is None else self._log.rewritten(self._txn).pieces

    def read(self, offset: int, max_bytes: int, upto: int) -> list[Buffer]:
        """Whole batches from the one that holds an offset on; see `PartitionLog.read`.

        Args:
            offset: in [start, high watermark].
            max_bytes: of all together when they are decoded; one batch is given, however
                large it is.
            upto: batches at or above this offset are left out; it is at a batch's edge.
        """
        parts: list[Buffer] = []
        if offset < self.end:
            parts = self.log_parts(offset, max_bytes, upto)
            if upto <= self.end or _behind(parts) < self.end:
                return parts
            max_bytes -= sum(within(part, _ALL)[1] for part in parts)
        if offset >= upto or (parts and max_bytes <= 0):
            return parts
        # Joined before they are looked at: most entries are one small batch. None is shorter when
        # it is decoded, so more of them than these are not asked for.
        found, size = [], 0
        for entry in self._tail(max(offset, self.end)):
            if entry.base_offset >= upto or size > max_bytes:
                break
            found.append(entry.data)
            size += len(entry.data)
        if not found:
            return parts
        data: Buffer = b"".join(found)
        begin = position_of(data, offset)
        fit, _ = within(memoryview(data)[begin:], max_bytes)
        if not fit and not parts:
            fit = first_length(data, begin)
        if fit:
            parts.append(data if fit == len(data) else memoryview(data)[begin : begin + fit])
        return parts

    def aborted_of(self, offset: int, parts: list[Buffer]) -> list[tuple[int, int]]:
        """`aborted` of what was `read` from an offset on."""
        if offset >= self.end or self._txn is None or not self._log.has_aborted(self._txn, offset):
            return []
        return self.aborted(offset, behind(parts[-1]) if parts else offset)

    def aborted(self, offset: int, upto: int) -> list[tuple[int, int]]:
        """Transaction and first offset of those aborted that may have batches in [offset, upto)."""
        if offset >= self.end or self._txn is None:
            return []
        found = self._partition.log.aborted(self._txn, offset, upto)
        return [(entry.txn_id, entry.first_offset) for entry in found]

    def commits(self, offset: int, limit: int) -> list[CommitEntry]:
        """List where messages became visible, by position: at most so many, from an offset on."""
        found: list[CommitEntry] = []
        if offset < self.end and self._txn is not None:
            found = self._partition.log.commits(self._txn, offset, limit)
        if len(found) < limit and self.end < self.high_watermark:
            for entry in self._tail(max(offset, self.end))[: limit - len(found)]:
                if entry.base_offset >= self.high_watermark:
                    break
                base, count = entry.base_offset, entry.count
                # The transaction's id stands in its batches, where a reader of them finds it.
                found.append(CommitEntry(base, count, 0, base, entry.stamp))
        return found

    def verify(self, entry: CommitEntry) -> None:
        """Compare an entry of `commits` with the log; the tail has made its own."""
        if entry.marker_offset >= self.end or self._txn is None:
            return
        log = self._partition.log
        if entry.txn_id == 0:  # of an earlier tail perhaps: it is in the index by now
            stored = log.commits(self._txn, entry.marker_offset, 1)
            if [_place_of(each) for each in stored] != [_place_of(entry)]:
                raise unlike(entry.marker_offset, "index of commits")
            (entry,) = stored
        log.verify(self._txn, entry)

    def commit_before(self, offset: int) -> CommitEntry | None:
        """Return the last of `commits` below an offset; None where there is none."""
        if self.end < min(offset, self.high_watermark):
            entries = self._tail(self.end)
            behind = bisect_left(entries, min(offset, self.high_watermark), key=_base_offset)
            if behind:
                base, count, _, stamp = entries[behind - 1]
                return CommitEntry(base, count, 0, base, stamp)
        return None if self._txn is None else self._partition.log.commit_before(self._txn, offset)

    def offset_for_time(self, micros: int) -> int | None:
        """The first message that is not older than a time, in microseconds since 1970."""
        found = None
        if self._txn is not None:
            found = self._partition.log.offset_for_time(self._txn, micros)
        for entry in () if found is not None else self._tail(self.end):
            found = first_not_older(entry.data, self.end, micros)
            if found is not None:
                return found if found < self.high_watermark else None
        return found

    def log_parts(self, offset: int, max_bytes: int, upto: int) -> list[Buffer]:
        """Read as `read` does, from the log in LMDB alone."""
        assert self._txn is not None, "there is no log"
        upto = min(upto, self.end)
        return self._log.read(self._txn, offset, max_bytes, upto, state=self._state)

    def chunks(self, offset: int, upto: int) -> Iterator[tuple[int, memoryview]]:
        """Chunks of the log in LMDB with batches in [offset, upto), by their keys."""
        assert self._txn is not None, "there is no log"
        return self._partition.log.chunks(self._txn).between(offset, upto)

    def chunk(self, key: int) -> memoryview | None:
        """The chunk of a key; None where there is none."""
        assert self._txn is not None, "there is no log"
        found = self._partition.log.chunks(self._txn).at(key)
        return found[1] if found is not None and found[0] == key else None

    def _tail(self, offset: int) -> list[TailEntry]:
        """Entries without a gap from an offset at or behind LMDB's end on."""
        if offset >= self.high_watermark:
            return []
        entries = self._topics.tail.entries(self._partition.id, offset, self.latest)
        if not entries or entries[0].base_offset > offset:
            raise _MovedError
        return entries


def look_at(
    topics: Topics,
    partition: Partition,
    see: Callable[[LogView], T],
    *,
    whole: bool = False,
) -> T:
    """Return what `see` makes of a view of a partition; it is called in an LMDB read transaction.

    Every commit that returned before, in any process, is in the view.

    Args:
        topics: of the store.
        partition: where to look.
        see: leaves no marks elsewhere when it raises; may be called again then. What it returns
            must not point into the log.
        whole: wait for appends that are under way, too: what is written outside of transactions
            has its commit timestamp before it can be read.

    Raises:
        TopicNotFoundError: the topic was dropped.
        OffsetOutOfRangeError: `see` asked for what is not there.
        CorruptionError: the log is damaged where `see` looked; the partition is named.
    """
    topics.require_live(partition.topic)
    read_only = topics.store.directory.read_only
    if read_only and not partition.exists:
        latest = topics.log.latest()
        fresh, reached = _tail_of(topics, partition, latest)
        return see(LogView(topics, partition, None, latest, fresh, reached, 0))
    helped = read_only
    decided: int | None = None
    for _ in range(_TRIES):
        latest = topics.log.latest()
        fresh, reached = _tail_of(topics, partition, latest)
        if decided is None:  # what others begin meanwhile, again and again, is for the next look
            decided = topics.look(partition.id).next_offset if whole else _marked(topics, partition)
            decided = max(decided, fresh[-1].next_offset if fresh else 0)
        try:
            if not partition.is_made:
                given = topics.look(partition.id).next_offset
                view = LogView(topics, partition, None, latest, fresh, reached, given)
                if not view.is_behind:
                    found = see(view)
                    _remember(partition, fresh, view.high_watermark)
                    return found
            with partition.environment.read() as txn:
                view = LogView(topics, partition, txn, latest, fresh, reached, decided)
                if helped or not view.is_behind:
                    found = see(view)
                    _remember(partition, fresh, view.high_watermark)
                    return found
        except (_MovedError, StaleHandleError):
            continue
        except ClosedError:
            topics.require_live(partition.topic)
            raise
        except (CorruptionError, CoreError) as error:
            why = str(error).removeprefix(f"{partition.label}: ")
            raise CorruptionError(f"{partition.label}: {why}") from None
        _complete(topics, partition)
        helped = True
    raise UnavailableError(f"{partition.label} changed {_TRIES} times while it was read; try again")


def glance_at(topics: Topics, partition: Partition, see: Callable[[LogView], T]) -> T | None:
    """`look_at` in the calling thread, where nothing is to be read or done for it but the log, or
    all is in memory: no exception of a signal handler leaves anything open.

    Returns:
        None when there is something to be done, or to be said: `look_at` does.
    """
    log = partition.log_at_hand
    if topics.store.directory.read_only or (log is None and not partition.is_absent):
        return None
    try:
        topics.require_live(partition.topic)
        latest = topics.log.latest()
        if _unmarked.get(partition) != topics.log.version:
            return None
        fresh, reached = _tail_of(topics, partition, latest)
        if log is None and not fresh:  # nothing says that there ought not to be a log
            return None
        decided = fresh[-1].next_offset if fresh else 0

        def look(txn: lmdb.Transaction | None) -> T | None:
            view = LogView(topics, partition, txn, latest, fresh, reached, decided)
            if view.is_behind:
                return None
            seen = see(view)
            _remember(partition, fresh, view.high_watermark)
            return seen

        found = (look(None),) if log is None else log.look(look)
    except Exception:  # an error is told by who goes the whole way
        return None
    return None if found is None else found[0]


def _marked(topics: Topics, partition: Partition) -> int:
    """Return the offset behind the last end marker that is noted; 0 when none is."""
    # Every commit that leaves a marker moves the version; small ones, which are many, do not.
    version = topics.log.version
    if _unmarked.get(partition) == version:
        return 0
    look = topics.look(partition.id)
    if not look.markers:
        _unmarked[partition] = version
    return look.marker_end


def _tail_of(
    topics: Topics, partition: Partition, latest: Timestamp
) -> tuple[list[TailEntry], int]:
    """Entries that may not have been reached yet, and up to where there is no gap."""
    last = _reached.get(partition)
    if last is not None:
        entries = topics.tail.entries(partition.id, last.base_offset, latest)
        if entries and entries[0] is last:
            return entries, last.next_offset
    return topics.tail.entries(partition.id, 0, latest), 0


def _remember(partition: Partition, fresh: Sequence[TailEntry], high: int) -> None:
    for entry in reversed(fresh):
        if entry.next_offset <= high:
            _reached[partition] = entry
            return


def bounds(topics: Topics, partition: Partition) -> Bounds:
    """Return the bounds of what a partition holds now.

    Raises:
        TopicNotFoundError: the topic was dropped.
    """
    return look_at(topics, partition, lambda view: view.bounds)


def _place_of(entry: CommitEntry) -> tuple[int, int]:
    return entry.marker_offset, entry.count


def _base_offset(entry: TailEntry) -> int:
    return entry.base_offset


def _behind(parts: list[Buffer]) -> int:
    return behind(parts[-1]) if parts else 0


def offset_for_time(topics: Topics, partition: Partition, when: datetime) -> int | None:
    """The first message that is not older than a time; None when all are.

    Raises:
        TopicNotFoundError: the topic was dropped.
    """
    micros = (when - _UNIX) // timedelta(microseconds=1)
    return look_at(topics, partition, lambda view: view.offset_for_time(micros))
