"""Following: a copy of a topic in another store, kept by fetching.

A follower asks the source as any reader does, READ_UNCOMMITTED, so it gets every batch as it is,
open transactions and end markers among them, and puts them into its own log. What a log says of
its transactions is a function of its batches, so the follower's last stable offset, aborted index
and segments come out as the source's, byte for byte, without being sent.

    source     [ 0 .................... 940 )  high watermark 940
                     fetch from 610
    follower   [ 0 ...... 610 )                high watermark 610, its own

Nothing but the log says how far a follower is, so it goes on where it stopped, after any death.
Before it does, it looks whether they still agree:

    the source has given up its beginning   so does the follower; if it is behind, it begins anew
    the source was truncated                so is the follower, to the last batch that is the same
    a batch lies over an end or a start     the follower goes back to where the source's begins
    what is open here was left out there    the follower goes back to before it, or begins anew

A subscription on a copy keeps its place, also when the copy is truncated: messages that come at
offsets it has deleted are not delivered to it. Consumers have no place of their own and are told.

In status.db of the follower the next offset only follows the log, where in a store of its own it
goes ahead of it. So nothing ever fills offsets in a copy, and nobody else may write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import lmdb

from txnkv.core import BatchHeader, walk
from txnkv.errors import OffsetOutOfRangeError
from txnkv.storage import declare_fault_point, fault_point
from txnkv.topics import retention
from txnkv.topics.log import declare_places, whole
from txnkv.topics.read import READ_UNCOMMITTED, FetchResult, bounds, fetch, look_at
from txnkv.topics.topics import Partition, Topics

declare_fault_point("follow.put", "fetched batches are in a copy's log, durable")
declare_fault_point("follow.offset", "the next offset of a copy follows its log, durable")
declare_fault_point("follow.cut", "a copy gave up what its source does not have, durably")

_ONE: Final = 1
"""A fetch of so many bytes gives one batch."""


class _Cut(NamedTuple):
    """A cut of a copy, which goes on as its source does then.

    Attributes:
        end: of the copy.
        base: where it goes on: a batch of the source begins there, or is to come there.
        at: its start then, if nothing of it stays.
        over: the batch at `base`, if `at` is inside of it.
        known: a batch of the copy ends at `base`: what is below stays.
        unseen: of what is below no batch is known to be the source's.
    """

    end: int
    base: int
    at: int
    over: bytes
    known: bool
    unseen: bool


class Follower:
    """One partition and its copy. For one thread and one process at a time.

    Args:
        source: topics of the source.
        origin: the partition that is copied.
        topics: topics of the follower.
        copy: the copy, of a topic with `replica_of`.
        max_bytes: of a fetch.
        agree_on_values: has the copy know all schemas of values that the source has by then.
    """

    def __init__(
        self,
        source: Topics,
        origin: Partition,
        topics: Topics,
        copy: Partition,
        max_bytes: int,
        agree_on_values: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._origin = origin
        self._topics = topics
        self._copy = copy
        self._max_bytes = max_bytes
        self._agree_on_values = agree_on_values

    @property
    def end(self) -> int:
        """The end of the copy: its high watermark."""
        with self._copy.environment.read() as txn:
            return self._copy.log.end(txn)

    def agree(self) -> None:
        """Give up what the source does not have, or has otherwise."""
        with self._topics.store.log_cuts():
            self._agree()

    def _agree(self) -> None:
        there = bounds(self._source, self._origin)
        start, end = self._bounds()
        common = self._common_end(there.start, min(end, there.high_watermark))
        at = min(max(common, start, there.start), there.high_watermark)
        base, over = self._batch_at(at)
        known = start <= common == base  # else what is between was given up before it was copied
        unseen = common <= max(start, there.start)
        if not known or common < end or over or (unseen and self._has_open()):
            known = self._cut(_Cut(end, base, at, over, known, unseen))
        if known and start < there.start:
            self._give_up(there.start)

    def catch_up(self) -> Iterator[int]:
        """Copy up to the source's high watermark as it is when this begins. Bytes, step by step."""
        target: int | None = None
        offset = self.end
        while target is None or offset < target:
            try:
                found = self._fetch(offset, self._max_bytes)
            except OffsetOutOfRangeError:  # retention was faster
                self.agree()
                if self.end <= offset:
                    raise
                offset = self.end
                continue
            if target is None:
                target = found.high_watermark
            if not found.records:
                break
            records = whole(found.records)
            if self._back_from(offset, found.start_offset) < offset:
                self.agree()  # the source was truncated since; once it is copied nothing shows it
                offset = self.end
                continue
            self._agree_on_values()  # the values that were fetched may be of a new schema
            self._put(records)
            offset = _next_offset(records)
            yield len(records)
        self._note(offset)

    # -- what both have ----------------------------------------------------------------

    def _common_end(self, low: int, high: int) -> int:
        """Return the offset up to which the copy has what the source has; a batch of each ends
        there. If they have nothing in common, it is the start of the copy or below.

        Args:
            low: start of the source. What the copy has below it is taken for the same.
            high: the end of the one that ends first.
        """
        start, _ = self._bounds()
        high = self._edge(high)
        while high > start and (back := self._back_from(high, low)) < high:
            high = back
        return high

    def _back_from(self, offset: int, low: int) -> int:
        """Return an offset where a batch of the copy ends, if the source has the same before it;
        else the end of an earlier one.
        """
        base, _ = self._batch_at(max(offset, low))
        if base < offset:  # a filler of a copy may be the beginning of a longer one
            return self._edge(base)
        if offset <= max(low, self._bounds()[0]):
            return offset
        own = self._own_batch(offset - 1)
        if not self._same(own, low):
            return own[0].base_offset
        return min([offset, *self._gone(offset, low)])

    def _same(self, own: tuple[BatchHeader, bytes], low: int) -> bool:
        header, batch = own
        theirs = self._fetch(max(header.base_offset, low), _ONE).records
        if self._origin.side is None or header.is_control:
            return theirs[: header.length] == batch
        # Compaction cuts its batches anew; but of one commit they stay, at its offsets.
        other = walk(theirs)[0][1]
        one, two = ((each.txn_id, each.commit_ts, each.is_control) for each in (header, other))
        return one == two

    def _gone(self, offset: int, low: int) -> Iterator[int]:
        """First offsets of transactions that are open in the copy at an offset, and that the source
        lacks: key compaction leaves them out with their ends. Of those that began below the start
        of the source, where only its state tells, that start.
        """
        with self._copy.environment.read() as txn:
            log = self._copy.log
            at_end = offset == log.end(txn)
            found = log.open_transactions(txn) if at_end else log.open_at(txn, offset)
        began_below = any(each.first_offset < low for each in found)
        there = self._opened_there(offset) if began_below else {}
        for txn_id, first, _ in found:
            theirs = self._fetch(max(first, low), _ONE).records
            if walk(theirs)[0][1].txn_id == txn_id:
                continue
            if first >= low:
                yield first
            elif there.get(txn_id, offset) > first:
                yield self._edge(low)

    def _opened_there(self, offset: int) -> dict[int, int]:
        """First offsets, by id, of transactions that are open in the source at an offset."""
        found = look_at(self._source, self._origin, lambda view: view.open_at(offset))
        return {each.txn_id: each.first_offset for each in found}

    def _batch_at(self, offset: int) -> tuple[int, bytes]:
        """Return where the source's batch begins that holds an offset, or that is to come there;
        and the batch, if that is below.
        """
        found = self._fetch(offset, _ONE).records
        base = walk(found)[0][1].base_offset if found else offset
        return base, whole(found) if base < offset else b""

    def _bounds(self) -> tuple[int, int]:
        with self._copy.environment.read() as txn:
            return self._copy.log.start(txn), self._copy.log.end(txn)

    def _has_open(self) -> bool:
        with self._copy.environment.read() as txn:
            return bool(self._copy.log.open_transactions(txn))

    def _edge(self, offset: int) -> int:
        """Return where the copy's batch begins that holds an offset; the offset, if none does."""
        start, end = self._bounds()
        return self._own_batch(offset)[0].base_offset if start <= offset < end else offset

    def _own_batch(self, offset: int) -> tuple[BatchHeader, bytes]:
        with self._copy.environment.read() as txn:
            data = b"".join(self._copy.log.read(txn, offset, _ONE))
        at, header = walk(data)[0]
        return header, data[at : at + header.length]

    def _fetch(self, offset: int, max_bytes: int) -> FetchResult:
        return fetch(self._source, self._origin, offset, max_bytes, READ_UNCOMMITTED)

    # -- writing -----------------------------------------------------------------------

    def _put(self, records: Any) -> None:
        declare_places(self._topics.store, records)
        self._copy.environment.write(lambda txn: self._copy.log.put(txn, [records]))
        fault_point("follow.put")

    def _give_up(self, offset: int) -> None:
        def may_go(_: lmdb.Transaction, offset: int) -> bool:
            kept = retention.kept_from(self._topics, self._copy)
            return kept is None or offset <= kept

        kept = retention.kept_from(self._topics, self._copy)
        offset = offset if kept is None else min(offset, kept)
        if retention.give_up(self._topics, self._copy, offset, may_go):
            fault_point("follow.cut")

    def _cut(self, to: _Cut) -> bool:
        """Make a cut; tell whether what is below it stays."""
        log = self._copy.log
        if to.over:
            self._agree_on_values()
            declare_places(self._topics.store, to.over)

        def cut(txn: lmdb.Transaction) -> bool:
            known = to.known
            if known:
                log.truncate(txn, to.base)
                # The source may lack what is open, and its end would never come.
                known = not (to.unseen and log.open_transactions(txn))
            if not known:
                log.begin_at(txn, to.base)
            if to.over:
                log.put(txn, [to.over])
                if not known:
                    log.advance_start(txn, to.at)
            if to.base < to.end:
                # Before the commit of the log: that may be ahead of its next offset, never behind.
                self._note(to.base)
            return known

        stays = self._copy.environment.write(cut)
        fault_point("follow.cut")
        return stays

    def _note(self, offset: int) -> None:
        with self._topics.store.status.read() as cur:
            (known,) = cur.execute(
                "SELECT next_offset FROM partitions WHERE id = ?", (self._copy.id,)
            ).fetchone() or (offset,)
        if known == offset:
            return
        with self._topics.store.status.write() as cur:
            cur.execute(
                "UPDATE partitions SET next_offset = ? WHERE id = ?", (offset, self._copy.id)
            )
        fault_point("follow.offset")


def _next_offset(records: bytes) -> int:
    return walk(records)[-1][1].next_offset
