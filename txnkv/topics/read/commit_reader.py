"""One partition read in the order of commits: one slow transaction delays nobody.

    offset     0   1   2   3        4   5        6        7
    log        P1  P2  P2  C2       d   P1       C1       d       P1, P2 large; d small ones
    commits                3: P2    4            6: P1    7       the index of commits
    given      P2 P2 at 3, d at 4, P1 P1 at 6, d at 7

The index of commits, kept beside the aborted one, names every place where messages become
visible: the end marker of a transaction whose messages lie before it, or batches that were
decided when they were written. Reading goes from one to the next, so what is open holds nothing
back and what was aborted is never given; where the batches of each lie that stand mixed,
`batch_places` knows. Positions are places of commits: a reader that begins at 4 gets the d at 4,
then P1, all of it.

A *run* is what one look at the log gave: messages of one or more commits, decoded together. A
transaction that is too large for a run goes on in the next one.

**Transaction order** is several partitions as one stream, each transaction whole:

    partition 0    T1@10          T3@12   T4@15
    partition 1            T2@11  T3@12              T5@21
    snapshot 15    T1 | T2 | T3 (both its parts) | T4          then a later snapshot: T5

Each partition is read in commit order, and the streams are merged by commit timestamp, which
all parts of a transaction share. A merge is sound only up to a *snapshot*: everything that
committed at or below it is in the logs as they are read afterwards, in all partitions, so no
part of a transaction can be missing and no earlier one can turn up. When all is given up to
one snapshot, the next one is taken.

What is given at once ends at the end of a transaction, so none is begun that does not fit; one
that is larger than all that was asked for comes in parts, with nothing between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

import pyarrow as pa

from txnkv.core import CoreError, all_data, decided, intact
from txnkv.errors import CorruptionError, OffsetOutOfRangeError
from txnkv.topics.log import CommitEntry, unlike
from txnkv.topics.messages import Reassembly
from txnkv.topics.read.batch_places import BatchPlaces
from txnkv.topics.read.log_view import LogView, look_at
from txnkv.topics.read.offset_reader import FETCH_BYTES, fitting
from txnkv.topics.topics import Partition, Topics

_END: Final = 1 << 63
_ENTRIES: Final = 1024
"""Commits of a run, at most."""
_APART: Final = 16
"""Offsets between two commits of a run, at most: what lies there is read in vain."""


def torn_before(topics: Topics, partition: Partition) -> int:
    """A timestamp: transactions that committed at or below it may have lost messages of this
    partition to retention; those above it have not, so far.
    """

    def see(view: LogView) -> int:
        if not view.start:
            return -1
        entries = view.commits(view.start, 1 << 16)
        torn = [entry.commit_ts for entry in entries if entry.first_offset < view.start]
        first = next((entry.commit_ts for entry in entries if entry.commit_ts), 0)
        return max([first - 1, *torn])

    return look_at(topics, partition, see)


class Commit(NamedTuple):
    """One commit of a run.

    Attributes:
        commit_ts: when; of batches without one, that of the commit before.
        row_end: behind its last row in the run.
        position: where a reader goes on that was given all of it.
    """

    commit_ts: int
    row_end: int
    position: int


@dataclass
class _Run:
    """Messages of commits, by their positions.

    Attributes:
        rows: of all of them.
        commits: ascending; each has rows.
        is_open: the last one goes on in the next run.
        given: rows that were given.
        at: the commit of the next row.
    """

    rows: pa.RecordBatch
    commits: list[Commit]
    is_open: bool
    given: int = 0
    at: int = 0


class _Found(NamedTuple):
    """The result of a look: the batches to be shown, their commits, where to go on."""

    records: bytes
    entries: list[CommitEntry]
    read_to: int


class CommitReader:
    """A reader in commit order. One thread at a time.

    Args:
        topics: of the store.
        partition: where to read.
        offset: where to begin: the place of a commit, or before one.
        max_bytes: of one run.
        above: commits at or below this timestamp are passed over.
        end: places at or behind it are not there; None for all that comes.
        begin: messages at or above it must be there; None where retention may take them.
        whole: pass over transactions that began below `begin` and of which a part is gone; else
            what is left of them is given.

    Attributes:
        empty_at, pending, moved, held: see `PartitionReader`.
        is_behind: the last look missed commits: the store is open to read only, and nobody has
            written their end markers yet.
    """

    def __init__(
        self,
        topics: Topics,
        partition: Partition,
        offset: int,
        max_bytes: int = FETCH_BYTES,
        above: int = -1,
        end: int | None = None,
        begin: int | None = None,
        whole: bool = False,
    ) -> None:
        self._topics = topics
        self._partition = partition
        self._max_bytes = self._room = max_bytes
        self._above = above
        self._end = end
        self._begin = begin
        self._whole = whole
        self._reassembly = Reassembly()
        self._places = BatchPlaces()
        self.moved = False
        self.is_behind = False
        self.seek(offset)

    @property
    def position(self) -> int:
        """The place of the commit that a new reader would go on with."""
        return self._position

    @property
    def pending(self) -> bool:
        """See `PartitionReader`."""
        at = self._empty_at
        return at is not None and self._topics.look(self._partition.id).next_offset > at

    def seek(self, offset: int) -> None:
        """Go on with the first commit at or behind an offset."""
        self._reassembly.reset()
        self._run: _Run | None = None
        self._empty_at: int | None = None
        self.empty_at: int | None = None
        self._inside: CommitEntry | None = None  # this one goes on, at `_read_to`
        self._position = self._next = offset
        self._read_to = 0
        self._last_ts = 0
        self._rewritten = -1
        self._last: tuple[int, ...] = (0, 0)
        self._given_to = 0  # of the transaction that goes on: its batches may begin below by now
        self._forget()

    @property
    def rest(self) -> list[int]:
        """Bounds, and behind which commit and offset the last message that was given stands."""
        return [self._above, self._begin or 0, *self._last]

    def resume(self, above: int, begin: int, *last: int) -> None:
        """Go on as a reader of this position that had this `rest`."""
        self._above, self._begin, self._last = above, begin, last

    def _forget(self) -> None:
        """Forget where commits and batches lie."""
        self._known: list[CommitEntry] = []
        self._places.clear()

    # -- loading -----------------------------------------------------------------------

    @property
    def held(self) -> int:
        """See `PartitionReader`."""
        return 0 if self._run is None else self._run.rows.nbytes

    def load(self, upto: int | None = None, *, room: int | None = None) -> bool:
        """Have messages ready, with one look at the log at most.

        Args:
            upto: a timestamp; commits above it are not there yet.
            room: bytes of the run, if they are less than `max_bytes`.

        Raises:
            OffsetOutOfRangeError: the partition does not hold the position, or retention took a
                part of the transaction that comes next; nothing more of it is given.
            TopicNotFoundError: the topic was dropped.
            CorruptionError: a batch is damaged; the position stays before it.
        """
        self.moved = False
        if self._run is not None:
            return True
        self._room = self._max_bytes if room is None else max(min(room, self._max_bytes), 1)
        self.empty_at = None
        before = self._next, self._read_to, self._inside
        found = look_at(
            self._topics,
            self._partition,
            lambda view: self._see(view, upto),
            whole=upto is not None,
        )
        try:
            self._run = None if found is None else self._decoded(found)
            after = self._next, self._read_to, self._inside
            if found is not None and self._run is None and before == after:
                raise unlike(self._next, "index of commits")
        except (CoreError, CorruptionError) as error:
            place = self._position if self._inside is None else self._read_to
            raise CorruptionError(f"{self._partition.label}, offset {place}: {error}") from None
        if found is not None and self._run is None:
            self.moved = True
            if self._inside is None:
                self._position = self._next
        return self._run is not None

    def _see(self, view: LogView, upto: int | None) -> _Found | None:
        if self._rewritten != (rewritten := view.rewritten):
            self._forget()
            self._rewritten, self._given_to = rewritten, self._read_to
        if self._inside is not None and self._read_to < view.start:
            self._lose_part(view, self._inside)
        if self._inside is not None:
            return self._go_on(view, [self._inside], self._read_to)
        self._given_to = view.start
        view.require(self._next)
        self.is_behind = view.is_behind
        if view.is_behind and upto is not None:
            self._empty_at = view.high_watermark
            return None
        entries = self._ahead(view)
        if self._end is not None:
            view.require(self._end)
            entries = entries[: bisect_left(entries, self._end, key=_place)]
        if not entries:
            self._next = self._position = view.high_watermark
            self.empty_at = self._empty_at = view.high_watermark
            self.moved = False  # there is no more
            return None
        if upto is not None:
            there = bisect_left(entries, upto + 1, key=_commit_ts)
            # They are in order: if one is not what it was, it is the one at the edge.
            for entry in entries[there : there + 1]:
                view.verify(entry)
            entries = entries[:there]
        passed = bisect_left(entries, self._above + 1, key=_commit_ts)
        if passed:
            view.verify(entries[passed - 1])
            self._next = self._position = _behind(entries[passed - 1])
            self._last_ts = entries[passed - 1].commit_ts
            self.moved = True
            entries = entries[passed:]
        if not entries:
            return None
        first = entries[0]
        behind, given_to = self._last
        if behind == _behind(first) and first.first_offset < given_to < behind:  # given in part
            view.verify(first)
            self._inside, self._read_to, self._given_to = first, given_to, given_to
            return self._see(view, upto)
        if self._whole and first.first_offset < (self._begin or 0):
            view.verify(first)
            self._next = self._position = _behind(first)
            self.moved = True
            return None
        if _is_marked(first):
            view.verify(first)
            if self._whole and first.first_offset < view.start:
                raise self._torn(view, first)
            if self._begin is not None:
                view.require(max(first.first_offset, self._begin))
            return self._go_on(view, [first], max(first.first_offset, view.start))
        return self._go_on(view, _together(entries), max(first.marker_offset, self._next))

    def _lose_part(self, view: LogView, inside: CommitEntry) -> None:
        """Go on at what there is of a transaction that was given in part, or behind it."""
        if self._whole:
            raise self._torn(view, inside)
        self._reassembly.reset()
        self._read_to = self._given_to = view.start
        if inside.marker_offset < view.start:
            self._inside = None
            self._next = self._position = max(_behind(inside), view.start)
            self._last_ts = inside.commit_ts
            self.moved = True

    def _torn(self, view: LogView, entry: CommitEntry) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            f"{self._partition.label} begins at offset {view.start} now: retention took a part of "
            f"the transaction whose commit stands at {entry.marker_offset}. To go on behind it, "
            f"seek to {max(_behind(entry), view.start)}"
        )

    def _ahead(self, view: LogView) -> list[CommitEntry]:
        """Some of the commits that come next; those that are known are not asked for again."""
        known = self._known
        passed = bisect_left(known, self._next + 1, key=_behind)
        if passed == len(known) or _behind(known[-1]) > view.high_watermark:
            known = view.commits(self._next, _ENTRIES)
            if known and _behind(known[-1]) > view.high_watermark:
                raise unlike(known[-1].marker_offset, "index of commits")
            known = _dated(known, self._last_ts)
            passed = 0
        self._known = known[passed:] if passed else known
        return self._known

    def _go_on(self, view: LogView, entries: list[CommitEntry], at: int) -> _Found:
        first = entries[0]
        if _is_marked(first):
            upto = first.marker_offset
            parts, read_to = self._places.read(view, first.txn_id, at, upto, self._room)
        else:
            parts = view.read(at, self._room, _behind(entries[-1]))
            read_to = 0  # the last of them says it
        return _Found(b"".join(parts), entries, read_to)

    def _decoded(self, found: _Found) -> _Run | None:
        """The messages of what was found, and which commit each is of."""
        entries, read_to = found.entries, found.read_to
        first = entries[0]
        rows = None
        if found.records:
            marked = _is_marked(first)
            records = intact(found.records)
            if len(records) < len(found.records):
                read_to = 0  # the next read begins with what is damaged
            wanted = self._given_to if marked else max(self._given_to, self._next)
            spans = (all_data if marked else decided)(records, wanted, _END)
            read_to = read_to or spans.next_offset
            rows = self._reassembly.decode(records, spans, wanted) if len(spans) else None
        ends = [_shown_to(entry) for entry in entries]
        whole = bisect_left(ends, read_to + 1)
        is_open = whole < len(entries) and read_to > entries[whole].first_offset
        self._read_to = read_to
        self._inside = entries[whole] if is_open else None
        if whole:
            self._next = _behind(entries[whole - 1])
            self._last_ts = entries[whole - 1].commit_ts
        if rows is None or not rows.num_rows:
            return None
        offsets = memoryview(rows.column("offset").buffers()[1]).cast("Q")[: rows.num_rows]
        commits: list[Commit] = []
        row = 0
        for entry, end in zip(entries[: whole + is_open], ends, strict=False):
            row_end = bisect_left(offsets, end, row)
            if row_end > row:
                if offsets[row] < entry.first_offset:
                    raise unlike(entry.marker_offset, "index of commits")
                commits.append(Commit(entry.commit_ts, row_end, _behind(entry)))
            row = row_end
        if row < rows.num_rows or not commits:
            raise unlike(offsets[row], "index of commits")
        has_open = self._inside is not None and commits[-1].position == _behind(self._inside)
        return _Run(rows, commits, has_open)

    # -- giving ------------------------------------------------------------------------

    @property
    def head(self) -> tuple[int, int, bool]:
        """The commit whose messages come next: timestamp, rows at hand, whether that is all.

        Only after `load` said that there are any.
        """
        run = self._run
        assert run is not None, "nothing was loaded"
        commit = run.commits[run.at]
        whole = not run.is_open or run.at + 1 < len(run.commits)
        return commit.commit_ts, commit.row_end - run.given, whole

    def fitting(self, most: int, before: int | None = None) -> int:
        """Count the rows of the whole commits that come next, are earlier than a timestamp, and
        together have `most` rows at most.
        """
        run = self._run
        assert run is not None, "nothing was loaded"
        fit = 0
        last = len(run.commits) - 1
        for i in range(run.at, last + 1):
            commit = run.commits[i]
            rows = commit.row_end - run.given
            if rows > most or (before is not None and commit.commit_ts >= before):
                break
            if i == last and run.is_open:
                break
            fit = rows
        return fit

    def within(self, room: int) -> int | None:
        """Count the rows that come next and have so many bytes together at most, one at least;
        None: all that are at hand.
        """
        assert self._run is not None, "nothing was loaded"
        rows = self._run.rows.slice(self._run.given)
        fit = fitting(rows, room).num_rows
        return None if fit == rows.num_rows else int(fit)

    def take(self, most: int, room: int | None = None) -> pa.RecordBatch:
        """The next messages, `most` at most, of `room` bytes at most unless one has more. Only
        after `load` said that there are any.
        """
        run = self._run
        assert run is not None, "nothing was loaded"
        part = run.rows.slice(run.given, most)
        if room is not None:
            part = fitting(part, room)
        run.given += part.num_rows
        commits = run.commits
        last = commits[bisect_left(commits, run.given, run.at, key=attrgetter("row_end"))]
        self._last = last.position, part.column("offset")[-1].as_py() + 1
        while run.at < len(commits) and commits[run.at].row_end <= run.given:
            if not (run.is_open and run.at + 1 == len(commits)):
                self._position = commits[run.at].position
            run.at += 1
        if run.given >= run.rows.num_rows:
            self._run = None
            if self._inside is None:
                self._position = self._next
        return part


def _together(entries: list[CommitEntry]) -> list[CommitEntry]:
    """The first entries, as many as are worth reading together."""
    behind = _behind(entries[0])
    for i, entry in enumerate(entries[1:], 1):
        apart = entry.marker_offset - behind
        if _is_marked(entry) or apart > _APART:
            return entries[:i]
        behind = _behind(entry)
    return entries


def _is_marked(entry: CommitEntry) -> bool:
    """Tell whether the messages of a commit stand before its place, among those of others."""
    return entry.first_offset < entry.marker_offset


def _shown_to(entry: CommitEntry) -> int:
    """Return the offset behind the last message of a commit."""
    return entry.marker_offset if _is_marked(entry) else _behind(entry)


def _dated(entries: list[CommitEntry], last: int) -> list[CommitEntry]:
    """Entries of which those without a timestamp have that of the one before."""
    dated = []
    for entry in entries:
        last = entry.commit_ts or last
        dated.append(entry if entry.commit_ts else entry._replace(commit_ts=last))
    return dated


def _behind(entry: CommitEntry) -> int:
    return entry.marker_offset + entry.count


_place: Final = attrgetter("marker_offset")
_commit_ts: Final = attrgetter("commit_ts")


class TransactionOrder:
    """Readers of partitions merged by commit timestamp. One thread at a time.

    Args:
        topics: of the store.
        readers: gives those that may have new messages, by partition number; asked again with each
            snapshot, for partitions that were added by then.
        max_bytes: of messages that all of them have ready.
    """

    def __init__(
        self,
        topics: Topics,
        readers: Callable[[], Mapping[int, CommitReader]],
        max_bytes: int,
    ) -> None:
        self._topics = topics
        self._ask = readers
        self._max_bytes = max_bytes
        self._readers: dict[int, CommitReader] = {}
        self.restart()

    def restart(self) -> None:
        """After a seek of one of the readers: begin with a new snapshot."""
        self._snapshot: int | None = None
        self._exhausted: set[int] = set()
        self._inside: int | None = None  # the commit that was given in parts

    def gather(self, most: int, room: int) -> list[tuple[int, pa.RecordBatch]]:
        """The next messages in commit order, with their partitions' numbers: `most` at most,
        of `room` bytes unless one, or the parts of a transaction in several partitions, have more.
        """
        given: list[tuple[int, pa.RecordBatch]] = []
        if self._snapshot is not None:
            self._gather(most, room, given)
        if not given:  # all is given up to that snapshot: there may be more since
            snapshot = self._topics.log.latest()
            # In this order: what was committed up to it was sent to partitions that are known then.
            self._readers = dict(sorted(self._ask().items()))
            self._snapshot, self._exhausted = snapshot, set()
            self._gather(most, room, given)
        return given

    def _gather(self, most: int, room: int, given: list[tuple[int, pa.RecordBatch]]) -> None:
        while most > 0 and room > 0:
            try:
                heads = self._heads()
            except CorruptionError:
                if given:
                    break  # what was taken is given first; the next call raises
                raise
            if not heads:
                self._snapshot = None
                break
            before = len(given)
            fit = self._readers[heads[0][1]].within(room)
            count = self._give(heads, most if fit is None else min(most, fit), given)
            if count == 0:
                break
            most -= count
            room -= sum(rows.nbytes for _, rows in given[before:])

    def _heads(self) -> list[tuple[int, int]]:
        """Timestamp and partition of what comes next in each, the earliest first."""
        heads = []
        share = max(self._max_bytes // max(len(self._readers), 1), 1)
        for number, reader in self._readers.items():
            if number in self._exhausted:
                continue
            while not reader.load(self._snapshot, room=share):
                if reader.is_behind:
                    return []  # what is missing there may be earlier than what others have
                if not reader.moved:
                    self._exhausted.add(number)
                    break
            else:
                heads.append((reader.head[0], number))
        heads.sort()
        return heads

    def _give(
        self, heads: list[tuple[int, int]], room: int, given: list[tuple[int, pa.RecordBatch]]
    ) -> int:
        """Append what comes next to `given`; how many messages."""
        ts, first = heads[0]
        reader = self._readers[first]
        shared = [number for other, number in heads if other == ts]
        if len(shared) == 1:
            after = heads[1][0] if len(heads) > 1 else None
            rows = reader.fitting(room, after)
        else:
            rows = self._together(shared, room)
        if rows and len(shared) == 1:
            given.append((first, reader.take(rows)))
        elif rows:
            given += [
                (each, self._readers[each].take(self._readers[each].head[1])) for each in shared
            ]
        elif given and self._inside != ts:
            return 0  # it does not fit behind the others: next time it comes first
        else:
            self._inside = ts
            rows = min(room, reader.head[1])
            given.append((first, reader.take(rows)))
        return rows

    def _together(self, numbers: list[int], room: int) -> int:
        """Messages of a transaction in these partitions; 0: not all are at hand, or too many."""
        heads = [self._readers[number].head for number in numbers]
        rows = sum(head[1] for head in heads)
        return rows if rows <= room and all(head[2] for head in heads) else 0
