"""Side logs against a plain model: a list of messages, and for each open transaction its own."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.topics.log_tools import LogOptions
from tests.topics.side_tools import SideLog
from txnkv.errors import InvalidTxnStateError
from txnkv.storage.faults import arm, disarm
from txnkv.topics.log import gathered
from txnkv.topics.sidecar import side_store, side_sweep
from txnkv.topics.sidecar.side_store import SideState

TXNS = st.integers(1, 6)


class Dead(Exception):
    """Thrown where a process would die."""


class SideMachine(RuleBasedStateMachine):
    """Commits give messages the next offsets at once; a death leaves all as it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.kept = side_store.OWN_BYTES, side_sweep.COMPACT_BYTES, side_sweep.GARBAGE_BYTES
        # Small, so that few messages pass through everything.
        side_store.OWN_BYTES, side_sweep.COMPACT_BYTES, side_sweep.GARBAGE_BYTES = 2000, 500, 700
        self.log = SideLog(Path(self.folder.name) / "store", LogOptions(segment_bytes=1500))
        self.numbers = count()
        self.ids = count(10)
        self.txns = {slot: next(self.ids) for slot in range(1, 7)}
        self.waiting: dict[int, list[bytes]] = {}
        self.messages: list[bytes] = []
        self.edges: list[tuple[int, int]] = []
        self.start = 0

    def teardown(self) -> None:
        side_store.OWN_BYTES, side_sweep.COMPACT_BYTES, side_sweep.GARBAGE_BYTES = self.kept
        disarm()
        found = self.log.problems()
        self.log.close()
        self.folder.cleanup()
        assert found == []

    def made(self, n: int, size: int) -> list[bytes]:
        return [b"%d" % next(self.numbers) + b"." * size for _ in range(n)]

    def ended(self, slot: int) -> None:
        self.waiting.pop(self.txns[slot], None)
        self.txns[slot] = next(self.ids)

    def took(self, values: list[bytes], together: bool) -> None:
        first = len(self.messages)
        self.messages += values
        self.edges.append((first, len(self.messages)) if together else (first, first + len(values)))

    @rule(slot=TXNS, n=st.integers(1, 12), batch=st.integers(1, 5), size=st.integers(0, 150))
    def send(self, slot: int, n: int, batch: int, size: int) -> None:
        values = self.made(n, size)
        self.log.send(self.txns[slot], *values, batch=batch)
        self.waiting.setdefault(self.txns[slot], []).extend(values)

    @rule(slot=TXNS)
    def dies_in_an_own_log(self, slot: int) -> None:
        arm("side.own_written", die)
        try:
            values = self.made(3, 50)
            self.log.send(self.txns[slot], *values)
            self.waiting.setdefault(self.txns[slot], []).extend(values)
        except Dead:
            pass
        finally:
            disarm()

    @rule(slot=TXNS)
    def commit(self, slot: int) -> None:
        values = self.waiting.get(self.txns[slot], [])
        at = self.log.commit(self.txns[slot])
        assert at == (len(self.messages) if values else None)
        if values:
            self.took(values, together=True)
            old = self.txns[slot]
            try:
                self.log.send(old, b"late")
            except InvalidTxnStateError:
                pass
            else:  # compaction has moved it all, and status.db would have refused it
                self.log.abort(old)
        self.ended(slot)

    @rule(slot=TXNS)
    def abort(self, slot: int) -> None:
        self.log.abort(self.txns[slot])
        self.ended(slot)

    @rule(n=st.integers(1, 3))
    def plain(self, n: int) -> None:
        values = self.made(n, 10)
        assert self.log.plain(*values) == len(self.messages)
        self.took(values, together=True)

    @rule()
    def sweep(self) -> None:
        self.log.sweep()

    @rule(point=st.sampled_from(["retired", "dropped", "removed", "moving", "compacted"]))
    def dies_in_a_sweep(self, point: str) -> None:
        arm(f"side.{point}", die)
        try:
            self.log.sweep()
        except Dead:
            pass
        finally:
            disarm()

    @precondition(lambda self: len(self.messages) > self.start)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.start, len(self.messages)))
        edge = next((low for low, high in self.edges if low < offset < high), offset)
        self.start = min(self.start, edge)
        assert self.log.truncate(offset) == edge
        del self.messages[edge:]
        self.edges = [(low, high) for low, high in self.edges if high <= edge]

    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        self.start = data.draw(st.integers(self.start, len(self.messages)))
        self.log.advance_start(self.start)

    @rule()
    def reopen(self) -> None:
        self.log.reopen()

    @invariant()
    def readers_see_the_model(self) -> None:
        assert (self.log.start, self.log.end) == (self.start, len(self.messages))
        assert self.log.lso == self.log.end
        expected = dict(enumerate(self.messages))
        room = 400 if len(self.messages) % 2 else 1 << 20
        found = self.log.values(self.start, room)
        assert found == {offset: expected[offset] for offset in range(self.start, self.log.end)}
        waiting = {id: side.count for id, side in self.log.look("open_transactions")}
        assert waiting == {id: len(values) for id, values in self.waiting.items()}

    @invariant()
    def own_logs_have_rows(self) -> None:
        rows = [side.state for _, side in self.log.look("rows")]
        assert rows.count(SideState.OPEN) == len(self.waiting)


def die() -> None:
    raise Dead


def test_gathered() -> None:
    parts = [bytes(n) for n in (10, 20, 70_000, 5, 65_000, 600)]
    chunks = list(gathered(parts))
    assert [list(map(len, chunk)) for chunk in chunks] == [[10, 20], [70_000], [5, 65_000], [600]]


TestSideMachine: Any = SideMachine.TestCase
TestSideMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
