"""A partition's log against a plain list of batches, under random use.

Transactions interleave, commit and abort, come too late, are passed by the low water mark; the
log is put to batch by batch and many at once, cut into segments, truncated, given up from its
start, closed and opened. After each step everything that a reader can see is what a walk through
the list from its first batch says, and a replay from any snapshot gives the state that is stored.
"""

from __future__ import annotations

import shutil
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.topics.log_tools import (
    ABORT,
    COMMIT,
    FILLER,
    Item,
    Log,
    LogOptions,
    ModelLog,
    Told,
    data,
    marker,
)
from txnkv.errors import OffsetOutOfRangeError

TXNS = st.integers(1, 8)
MARKS = st.one_of(st.just(0), st.integers(0, 9))
ITEMS = st.one_of(
    st.tuples(st.just("data"), TXNS, st.integers(1, 3)),
    st.tuples(st.just("data"), TXNS, st.just(1)),
    st.tuples(st.just("decided"), st.integers(100, 105), st.integers(1, 3)),
    st.tuples(st.just("plain"), st.just(0), st.integers(1, 2)),
    st.tuples(st.just("commit"), TXNS, MARKS),
    st.tuples(st.just("abort"), TXNS, MARKS),
    st.tuples(st.just("filler"), st.integers(1, 4), MARKS),
)
OPTIONS = st.builds(
    LogOptions,
    segment_bytes=st.sampled_from([300, 900, 64 << 20]),
    segment_seconds=st.sampled_from([0.00001, 1e6]),
    snapshot_changes=st.sampled_from([1, 3, 1000]),
    snapshot_seconds=st.sampled_from([0.0, 1e9]),
)


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.model = ModelLog()
        self.values: dict[int, bytes] = {}
        self.time = 1000
        self.number = 0

    @initialize(options=OPTIONS)
    def open(self, options: LogOptions) -> None:
        self.log = Log(self.folder / "store", options)

    def teardown(self) -> None:
        self.log.close()
        shutil.rmtree(self.folder)

    # -- what is done ------------------------------------------------------------------

    @rule(items=st.lists(ITEMS, min_size=1, max_size=6), together=st.booleans())
    def append(self, items: list[tuple[str, int, int]], together: bool) -> None:
        batches = [self._batch(*item) for item in items]
        self.log.append(*batches, together=together)

    @rule(forward=st.integers(1, 20))
    def pass_time(self, forward: int) -> None:
        self.time += forward

    @precondition(lambda self: self.model.end > self.model.start)
    @rule(where=st.floats(0, 1))
    def truncate(self, where: float) -> None:
        offset = self._offset(where)
        assert self.log.write("truncate", offset) == self.model.truncate(offset)

    @precondition(lambda self: self.model.end > self.model.start)
    @rule(where=st.floats(0, 0.7))
    def advance_start(self, where: float) -> None:
        self.model.start = self._offset(where)
        self.log.write("advance_start", self.model.start)

    @rule()
    def roll(self) -> None:
        self.log.write("roll")

    @rule()
    def reopen(self) -> None:
        self.log.reopen()

    def _offset(self, where: float) -> int:
        return self.model.start + int(where * (self.model.end - self.model.start))

    def _batch(self, kind: str, a: int, b: int) -> bytes:
        base = self.model.end
        if kind in ("data", "decided", "plain"):
            values = [b"%d" % (self.number + i) for i in range(b)]
            self.number += b
            self.values |= {base + i: value for i, value in enumerate(values)}
            self.model.items.append(Item(kind, base, b, a))
            return data(a, b, time=self.time, decided=kind == "decided", values=values)
        if kind == "filler":
            self.model.items.append(Item(kind, base, a, mark=b))
            return marker(FILLER, mark=b, time=self.time, offsets=a)
        self.model.items.append(Item(kind, base, 1, a, mark=b))
        return marker(COMMIT if kind == "commit" else ABORT, a, mark=b, time=self.time)

    # -- what is seen ------------------------------------------------------------------

    @invariant()
    def sees_what_the_list_says(self) -> None:
        told, start = self.model.told(), self.model.start
        log = self.log
        assert (log.start, log.end) == (start, self.model.end)
        assert log.lso == max(told.lso, start)
        assert log.open_firsts() == told.open
        assert log.ask("low_water_mark") == told.mark
        kept = next((segment.base for segment in log.ask("segments")), 0)
        assert log.index() == [entry for entry in told.index if entry.last_offset >= kept]
        assert log.ask("commits", start, 10_000) == [
            entry for entry in told.commits if entry.marker_offset + entry.count > start
        ]

    @invariant()
    def finds_what_was_aborted(self) -> None:
        index = [e for e in self.model.told().index if e.last_offset >= self.model.start]
        places = sorted({self._offset(where) for where in (0, 0.2, 0.5, 0.8, 1)})
        for offset, upto in combinations(places, 2):
            assert self.log.ask("aborted", offset, upto) == [
                e for e in index if e.last_offset >= offset and e.first_offset < upto
            ]

    @invariant()
    def shows_what_is_committed(self) -> None:
        told = self.model.told()
        for offset, max_bytes in ((self.model.start, 1 << 20), (self._offset(0.4), 250)):
            assert self.log.committed(offset, max_bytes) == self._shown(told, offset)

    def _shown(self, told: Told, offset: int) -> list[tuple[int, bytes]]:
        return [
            (at, self.values[at])
            for item in self.model.items
            if item.base in told.shown and item.base < told.lso
            for at in range(max(item.base, offset), item.base + item.count)
        ]

    @invariant()
    def is_whole(self) -> None:
        assert self.log.problems() == []

    @invariant()
    def refuses_what_is_outside(self) -> None:
        for offset in (self.model.start - 1, self.model.end + 1):
            refused: Any = None
            try:
                self.log.ask("read", offset, 10)
            except OffsetOutOfRangeError as error:
                refused = error
            assert refused is not None


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(
    max_examples=60,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
