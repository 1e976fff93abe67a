"""Planning reads of a topic that many processes do: where they begin and end, and who reads what.

    bounds     of each partition: [start of the log, last stable offset)
    ends       offset order: the last stable offsets
               commit order: the places behind what was committed at one timestamp
    ranges     what lies between, cut into pieces of about one weight, each pinned
    tasks      ranges, several small ones together

What was planned once can be planned again: the ends are in Spark's checkpoint, and below them
nothing changes any more, but by retention, which is seen. A stream's position there is

    {"store": "5f..", "topic": "events", "id": 3, "order": "offset",
     "offsets": {"0": 170, "1": 95}, "since": {"0": 120, "1": 80}, "begin": {"0": 0, "1": 0}}

`offsets` are the ends of a batch and the starts of the next one, by partition. In commit order
they are places of commits, and `timestamp` says up to which commit all partitions are read.
`since` is where the batch began: Spark writes no start of a query's first batch, and asks for
another when it runs that batch again. `begin` is where the log began when the query did: what
retention took before that is no loss to it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

from txnkv.errors import OffsetOutOfRangeError, TopicNotFoundError
from txnkv.topics.read.log_view import Bounds, bounds
from txnkv.topics.read.pinned_range import (
    PinnedRange,
    between_commits,
    cuts,
    next_timestamp,
    pin,
    reach_at,
    timestamp_before,
    weight,
)
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topics import Topics

Offsets = dict[int, int]

EARLIEST: Final = -2
LATEST: Final = -1
Position: TypeAlias = str | dict[int, int]
"""`"earliest"`, `"latest"`, or offsets by partition, with EARLIEST and LATEST among them."""


@dataclass(frozen=True)
class TopicReading:
    """A read of a topic, for its planner.

    Attributes:
        order: "offset", or "commit": whole transactions, as they were committed.
        starting_offsets: where a batch, or a new query, begins.
        ending_offsets: where a batch ends.
        fail_on_data_loss: whether messages that are gone are an error.
    """

    order: str
    starting_offsets: Position
    ending_offsets: Position
    fail_on_data_loss: bool


class TopicPart(NamedTuple):
    """The part of a topic that one task reads.

    Attributes:
        topic_id: of the topic that it was planned for.
        ranges: with the numbers of their partitions.
        scattered: the ranges are of places of commits, whose messages stand before them.
    """

    topic_id: int
    ranges: tuple[tuple[int, PinnedRange], ...]
    scattered: bool


@dataclass(frozen=True)
class TopicOffset:
    """A point of a topic.

    Attributes:
        store: the store's id.
        topic, id: its name, and the id that tells it from others that had its name.
        order: "offset" or "commit".
        offsets: by partition.
        begin: by partition: what lies below is not looked for.
        since: in the end of a batch: where that batch begins.
        timestamp: in commit order: what was committed up to then lies below.
    """

    store: str
    topic: str
    id: int
    order: str
    offsets: Offsets
    begin: Offsets
    since: Offsets | None = None
    timestamp: int | None = None

    def json(self) -> dict[str, Any]:
        """Return this point as Spark keeps it."""
        made: dict[str, Any] = {"store": self.store, "topic": self.topic, "id": self.id}
        made["order"] = self.order
        made["offsets"] = _texts(self.offsets)
        if self.since is not None:
            made["since"] = _texts(self.since)
        made["begin"] = _texts(self.begin)
        if self.timestamp is not None:
            made["timestamp"] = self.timestamp
        return made

    @classmethod
    def parse(cls, given: Mapping[str, Any], topic: str, order: str) -> TopicOffset:
        """Return the point that `json` gave, for a query that reads this topic in this order.

        Raises:
            ValueError: `given` is of another topic or order, or no such point at all.
        """
        try:
            since = given.get("since")
            made = cls(
                store=given["store"],
                topic=given["topic"],
                id=given["id"],
                order=given["order"],
                offsets=_numbers(given["offsets"]),
                begin=_numbers(given["begin"]),
                since=None if since is None else _numbers(since),
                timestamp=given.get("timestamp"),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(
                f"the checkpoint has {given!r}, which is no place in a topic: it is of another "
                "source. Take a checkpoint of this query's own"
            ) from None
        if (made.topic, made.order) != (topic, order):
            raise ValueError(
                f"the checkpoint is of topic {made.topic!r}, order {made.order!r}, the query reads "
                f"{topic!r}, order {order!r}: take these, or a new checkpoint"
            )
        return made


def share(most: int, there: Mapping[int, int]) -> Offsets:
    """Return the number of offsets that each partition gives to a batch of about `most`.

    In proportion to what is there, and at least one, so that no partition waits behind the others.
    """
    total = sum(there.values())
    if total <= most:
        return dict(there)
    return {
        number: min(max(most * waiting // total, 1), waiting) for number, waiting in there.items()
    }


def _texts(offsets: Offsets) -> dict[str, int]:
    return {str(number): offset for number, offset in sorted(offsets.items())}


def _numbers(given: Mapping[str, int]) -> Offsets:
    return {int(number): int(offset) for number, offset in given.items()}


# -- plans -----------------------------------------------------------------------------

TASK_BYTES: Final = 4 << 20
"""A task of less is not worth its cost."""
TASKS_A_CORE: Final = 2
_ANEW: Final = "Begin with a new checkpoint"
_log = logging.getLogger("txnkv")


class TopicPlanner:
    """Plans reads of a topic. For one call of Spark's: it remembers what it looked up.

    Args:
        topics: of the store.
        info: the topic.
        settings: of the read.
    """

    def __init__(self, topics: Topics, info: TopicInfo, settings: TopicReading) -> None:
        self._settings = settings
        self._info = info
        self._engine = topics
        self._store = topics.store.store_id
        self._partitions = dict(enumerate(self._engine.partitions(self._info)))
        self._by_commit = settings.order == "commit"

    # -- where -------------------------------------------------------------------------

    def initial(self) -> TopicOffset:
        """Return the point where a read begins that has not begun yet.

        Raises:
            OffsetOutOfRangeError: option startingOffsets names an offset that is not there.
            ValueError: it names a partition that is not there.
        """
        found, ends, _ = self._ends()
        offsets = self._resolved(
            "startingOffsets", self._settings.starting_offsets, found, ends, EARLIEST
        )
        return self._at(offsets, {number: each.start for number, each in found.items()}, None)

    def final(self, start: TopicOffset) -> TopicOffset:
        """Return the point where a batch read ends.

        Raises:
            OffsetOutOfRangeError: option endingOffsets names an offset that is not there yet.
            ValueError: it names a partition that is not there, or lies before the start.
        """
        found, ends, _ = self._ends()
        offsets = self._resolved(
            "endingOffsets", self._settings.ending_offsets, found, ends, LATEST
        )
        for number, offset in offsets.items():
            if offset < start.offsets[number]:
                if self._settings.ending_offsets != "latest":
                    raise ValueError(
                        f"endingOffsets has {offset} for partition {number}, which lies before "
                        f"its start, {start.offsets[number]}"
                    )
                offsets[number] = start.offsets[number]
        return self._at(offsets, start.begin, None, start.offsets)

    def ends(self) -> TopicOffset:
        """Up to where messages can be read now."""
        found, offsets, timestamp = self._ends()
        return self._at(offsets, {number: each.start for number, each in found.items()}, timestamp)

    def latest(
        self, start: TopicOffset, most: int | None = None, target: TopicOffset | None = None
    ) -> TopicOffset:
        """Return the end of a batch that begins at `start`; `start` itself when there is nothing.

        Args:
            start: where the batch begins.
            most: about so many offsets at most; None for all that are there.
            target: where the whole query ends; None for never.

        Raises:
            OffsetOutOfRangeError: what comes next is gone, or the log ends before the start.
            TopicNotFoundError: `start` is of a topic that was dropped.
        """
        found, ends, timestamp = self._ends(None if target is None else target.timestamp)
        # A partition that was added since is read from its beginning.
        places = self._checked(start, dict.fromkeys(found, 0) | start.offsets, found)
        if target is not None:
            ends = {number: min(end, target.offsets.get(number, 0)) for number, end in ends.items()}
        ends = {number: max(end, places[number]) for number, end in ends.items()}
        there = {number: end - places[number] for number, end in ends.items()}
        if most is not None and sum(there.values()) > most:
            parts = share(most, there)
            if self._by_commit:
                timestamp = self._cut(places, parts, ends, timestamp)
                ends = self._reached(places, timestamp, ends)
            else:
                ends = {number: places[number] + part for number, part in parts.items()}
        if ends == start.offsets and self._is_same(start):
            return start
        begin = {number: each.start for number, each in found.items()}
        return self._at(ends, start.begin if self._is_same(start) else begin, timestamp, places)

    # -- what --------------------------------------------------------------------------

    def parts(self, start: TopicOffset, end: TopicOffset, cores: int) -> list[TopicPart]:
        """Return the parts of what lies between two points, for tasks; none when that is nothing.

        Args:
            cores: that are there to read them.

        Raises:
            OffsetOutOfRangeError: some of it is gone, or never was in this store.
            TopicNotFoundError: `end` is of a topic that was dropped.
        """
        found = {number: bounds(self._engine, each) for number, each in self._partitions.items()}
        since = self._checked(end, start.offsets if end.since is None else end.since, found)
        upto = self._checked(end, end.offsets, found)
        if not self._is_same(end):
            return []  # it was of a topic that is gone, and may be lost
        loads = {
            number: weight(self._engine, partition, since[number], upto[number])
            for number, partition in self._partitions.items()
        }
        wanted = TASKS_A_CORE * cores
        each = max(TASK_BYTES, -(-sum(loads.values()) // wanted))
        ranges: list[tuple[int, PinnedRange, int]] = []
        for number, load in loads.items():
            begin = end.begin.get(number, 0)
            if not self._settings.fail_on_data_loss:
                begin = max(begin, found[number].start)
            parts = max(1, round(load / each))
            places = self._cuts(number, since[number], upto[number], parts)
            for low, high in pairwise(places):
                ranges.append((number, self._pinned(number, low, high, begin), load // parts))
        return self._packed(ranges, each)

    def _packed(self, ranges: list[tuple[int, PinnedRange, int]], each: int) -> list[TopicPart]:
        tasks: list[TopicPart] = []
        held: list[tuple[int, PinnedRange]] = []
        weights = 0
        for number, pinned, load in ranges:
            if held and weights + load > each:
                tasks.append(TopicPart(self._info.id, tuple(held), self._is_scattered))
                held, weights = [], 0
            held.append((number, pinned))
            weights += load
        if held:
            tasks.append(TopicPart(self._info.id, tuple(held), self._is_scattered))
        return tasks

    @property
    def _is_scattered(self) -> bool:
        """Commits name messages that stand before them; in a side log they stand together."""
        return self._by_commit and self._info.buffer == "marker"

    def _cuts(self, number: int, start: int, end: int, parts: int) -> list[int]:
        if start >= end:
            return []
        partition = self._partitions[number]
        places = cuts(partition, start, end, parts)
        if self._is_scattered:
            inner = [
                between_commits(self._engine, partition, place, start, end)
                for place in places[1:-1]
            ]
            places = sorted({start, *inner, end})
        return places

    def _pinned(self, number: int, start: int, end: int, begin: int) -> PinnedRange:
        if self._is_scattered:
            return PinnedRange(start, end, begin, b"")
        return pin(self._engine, self._partitions[number], start, end, begin)

    # -- ends --------------------------------------------------------------------------

    def _ends(self, timestamp: int | None = None) -> tuple[dict[int, Bounds], Offsets, int | None]:
        """Bounds, how far each partition can be read, and in commit order up to when."""
        if not self._by_commit:
            found = {n: bounds(self._engine, each) for n, each in self._partitions.items()}
            return found, {n: each.last_stable_offset for n, each in found.items()}, None
        latest = int(self._engine.log.latest()) if timestamp is None else timestamp
        reached = {
            number: reach_at(self._engine, partition, latest)
            for number, partition in self._partitions.items()
        }
        places = {number: each.place for number, each in reached.items()}
        return {number: each.bounds for number, each in reached.items()}, places, latest

    def _reached(self, places: Offsets, timestamp: int, ends: Offsets) -> Offsets:
        return {
            number: min(
                max(reach_at(self._engine, partition, timestamp, places[number]).place,
                    places[number]),
                ends[number],
            )
            for number, partition in self._partitions.items()
        }  # fmt: skip

    def _cut(self, places: Offsets, parts: Offsets, ends: Offsets, latest: int | None) -> int:
        """A timestamp up to which each partition gives about its part, one of them something."""
        assert latest is not None
        limit, first = latest, latest
        for number, partition in self._partitions.items():
            place = places[number]
            begins = next_timestamp(self._engine, partition, place)
            if begins is None or begins > latest:
                continue
            first = min(first, begins)
            upto = place + parts[number]
            if upto < ends[number]:
                last = timestamp_before(self._engine, partition, place, upto)
                limit = min(limit, begins - 1 if last is None else last)
        return max(limit, first)

    # -- checks ------------------------------------------------------------------------

    def _resolved(
        self,
        option: str,
        position: Position,
        found: Mapping[int, Bounds],
        ends: Offsets,
        default: int,
    ) -> Offsets:
        """The offsets of option startingOffsets or endingOffsets."""
        if isinstance(position, str):
            default = EARLIEST if position == "earliest" else LATEST
            position = {}
        for number in position:
            if number not in found:
                raise ValueError(
                    f"{option} names partition {number}: topic {self._info.name!r} has "
                    f"{len(found)}, numbered from 0"
                )
        offsets = {}
        for number, each in found.items():
            offset = position.get(number, default)
            if offset == EARLIEST:
                offsets[number] = each.start
            elif offset == LATEST:
                offsets[number] = ends[number]
            else:
                there = self._there(number, offset, each, option)
                offsets[number] = self._uncut(number, there, each)
        return offsets

    def _uncut(self, number: int, offset: int, found: Bounds) -> int:
        """In commit order: an offset of an option, moved behind the transaction that it cuts."""
        if not self._by_commit or offset == found.start:
            return offset
        partition = self._partitions[number]
        return between_commits(self._engine, partition, offset, 0, found.high_watermark)

    def _checked(self, of: TopicOffset, offsets: Offsets, found: Mapping[int, Bounds]) -> Offsets:
        """Offsets of a checkpoint; where messages are gone and may be, the nearest that are not."""
        if not self._is_same(of):
            what = f"the checkpoint is of a topic {of.topic!r} that was dropped (id {of.id})"
            if of.store != self._store:
                what = f"the checkpoint is of a topic {of.topic!r} of another store ({of.store})"
            self._lost(
                TopicNotFoundError,
                f"{what}; the one that is here now is another (id {self._info.id})",
                "with that from its beginning",
            )
            return {number: each.start for number, each in found.items()}
        return {
            number: self._there(number, offsets.get(number, each.start), each)
            for number, each in found.items()
        }

    def _is_same(self, of: TopicOffset) -> bool:
        return (of.store, of.id) == (self._store, self._info.id)

    def _there(self, number: int, offset: int, found: Bounds, option: str = "") -> int:
        """An offset of the option, or of a checkpoint; the nearest that is there."""
        who, advice = "the checkpoint stands at", _ANEW
        cause = ": the store is of an earlier time, restored from a backup perhaps"
        if option:
            who, cause = f"option {option} names", ""
            advice = f"Give one from {found.start} to {found.high_watermark}, or -1 for the latest"
        label = f"{who} offset {offset} of {self._partitions[number].label}"
        if offset < found.start:
            self._lost(
                OffsetOutOfRangeError,
                f"{label}, which begins at {found.start}: retention took what lies before",
                f"at {found.start}",
                advice,
            )
            return found.start
        if offset > found.high_watermark:
            self._lost(
                OffsetOutOfRangeError,
                f"{label}, which ends at {found.high_watermark}{cause}",
                f"at {found.high_watermark}",
                advice,
            )
            return found.high_watermark
        return offset

    def _lost(self, kind: type[Exception], what: str, instead: str, advice: str = _ANEW) -> None:
        if self._settings.fail_on_data_loss:
            raise kind(
                f"{what}. {advice}, or set option failOnDataLoss to false to go on {instead}"
            )
        _log.warning("%s. Going on %s (failOnDataLoss is false)", what, instead)

    def _at(
        self,
        offsets: Offsets,
        begin: Offsets,
        timestamp: int | None,
        since: Offsets | None = None,
    ) -> TopicOffset:
        return TopicOffset(
            store=self._store,
            topic=self._info.name,
            id=self._info.id,
            order=self._settings.order,
            offsets=offsets,
            begin=begin,
            since=since,
            timestamp=timestamp,
        )
