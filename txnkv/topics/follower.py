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

A subscription on a copy keeps its place, also when the copy is truncated: messages that come at
offsets it has deleted are not delivered to it. Consumers have no place of their own and are told.

In status.db of the follower the next offset only follows the log, where in a store of its own it
goes ahead of it. So nothing ever fills offsets in a copy, and nobody else may write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import lmdb

from txnkv.core import BatchHeader, walk
from txnkv.storage import declare_fault_point, fault_point
from txnkv.topics import retention
from txnkv.topics.log import declare_places, whole
from txnkv.topics.read import READ_UNCOMMITTED, FetchResult, bounds, fetch
from txnkv.topics.topics import Partition, Topics

declare_fault_point("follow.put", "fetched batches are in a copy's log, durable")
declare_fault_point("follow.offset", "the next offset of a copy follows its log, durable")
declare_fault_point("follow.cut", "a copy gave up what its source does not have, durably")

_ONE: Final = 1
"""A fetch of so many bytes gives one batch."""


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
        with self._copy.environment.read() as txn:
            start, end = self._copy.log.start(txn), self._copy.log.end(txn)
        if end < there.start:  # what is between was given up before it was copied
            self._begin_anew(there.start, end)
            return
        common = self._common_end(there.start, start, min(end, there.high_watermark), end)
        if common < end:
            self._truncate(common)
        if start < there.start:
            self._give_up(there.start)

    def catch_up(self) -> Iterator[int]:
        """Copy up to the source's high watermark as it is when this begins. Bytes, step by step."""
        target: int | None = None
        offset = self.end
        while target is None or offset < target:
            found = self._fetch(offset, self._max_bytes)
            if target is None:
                target = found.high_watermark
            if not found.records:
                break
            records = whole(found.records)
            self._agree_on_values()  # the values that were fetched may be of a new schema
            self._put(records)
            offset = _next_offset(records)
            yield len(records)
        self._note(offset)

    # -- what both have ----------------------------------------------------------------

    def _common_end(self, low: int, start: int, high: int, end: int) -> int:
        """Return the offset behind the last batch of the copy that the source has, too.

        Args:
            low: start of the source.
            start: of the copy.
            high: the end of the one that ends first.
            end: of the copy.
        """
        least = max(low, start)
        while high > least:
            own = self._own_batch(high - 1)
            if own[0].next_offset > high:  # the source ends inside of it
                high = own[0].base_offset
                continue
            if own[0].base_offset < least or (self._same(own) and self._cut_at(high)):
                return high
            high = own[0].base_offset
        return max(high, start)

    def _same(self, own: tuple[BatchHeader, bytes]) -> bool:
        header, batch = own
        theirs = self._fetch(header.base_offset, _ONE).records
        if self._origin.side is None:
            return theirs[: header.length] == batch
        # Compaction cuts its batches anew; but of one commit they stay, at its offsets.
        other = walk(theirs)[0][1]
        one, two = ((each.txn_id, each.commit_ts, each.is_control) for each in (header, other))
        return one == two

    def _cut_at(self, offset: int) -> bool:
        """Tell whether a batch of the source begins there, or none does yet: a filler of a copy
        may be the beginning of a longer one.
        """
        theirs = self._fetch(offset, _ONE).records
        return not theirs or walk(theirs)[0][1].base_offset >= offset

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

    def _begin_anew(self, start: int, end: int) -> None:
        """Begin at an offset of the source, with the batch that it lies in. `end` is the copy's."""
        found = self._fetch(start, _ONE).records
        base = min(walk(found)[0][1].base_offset, start) if found else start
        if base < end:  # what it has there is of a log that was truncated since
            self._truncate(base)
        first = whole(found) if base < start else b""
        self._agree_on_values()
        declare_places(self._topics.store, first)

        def begin(txn: lmdb.Transaction) -> None:
            self._copy.log.advance_start(txn, base)
            if first:
                self._copy.log.put(txn, [first])
                self._copy.log.advance_start(txn, start)

        self._copy.environment.write(begin)
        fault_point("follow.cut")

    def _truncate(self, offset: int) -> None:
        def cut(txn: lmdb.Transaction) -> None:
            # Before the commit of the log: that may be ahead of its next offset, never behind.
            self._note(self._copy.log.truncate(txn, offset))

        self._copy.environment.write(cut)
        fault_point("follow.cut")

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
