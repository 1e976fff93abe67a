"""Pieces of a log with fewer messages: what readers see, and that all else says what it said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.topics.log_tools import FILLER, Log, data, marker, script
from tests.topics.test_log_machine import LogMachine
from txnkv import core
from txnkv.errors import CorruptionError


def rewrite(log: Log, keeps: Callable[[int], bool], upto: int | None = None) -> int:
    """Keep some of the committed messages below an offset; return up to where that was done."""
    with log.environment.read() as txn:
        limit = log.log.last_stable_offset(txn) if upto is None else upto
        segments = [segment.base for segment in log.log.segments(txn)]
        chunks = [(base, chunk_end(chunk)) for base, chunk in log.log.chunks(txn).between(0, limit)]
        made = []
        if not chunks or chunks[0][1] > limit:
            return 0
        state = log.log.state_at(txn, chunks[0][0])
        for low, high in zip(segments, [*segments[1:], 1 << 63], strict=True):
            ends = [end for base, end in chunks if low <= base < high and end <= limit]
            if ends:
                piece = log.log.piece(txn, state, ends[-1], wanted_of(keeps), None)
                batches = [bytes(batch) for batch in piece.batches]
                made.append(piece._replace(batches=batches))
    for piece in made:
        log.environment.write(lambda txn, piece=piece: piece.put(txn, log.environment))
    return made[-1].high if made else 0


def chunk_end(chunk: Any) -> int:
    return core.walk(chunk)[-1][1].next_offset


def wanted_of(keeps: Callable[[int], bool]) -> Callable[[Any, Any], pa.UInt32Array | None]:
    def wanted(header: Any, batch: Any) -> pa.UInt32Array | None:
        offsets = core.decode(batch, core.all_data(batch, 0, 1 << 62), 0).column("offset")
        found = [i for i, at in enumerate(offsets.to_pylist()) if keeps(at)]
        return None if len(found) == header.rows else pa.array(found, pa.uint32())

    return wanted


def batches(log: Log) -> list[str]:
    """The batches of a log in words: kind, transaction, offset, offsets taken, messages."""
    found = []
    for _, header in core.walk(log.ask("read", log.start, 1 << 20)):
        kind = "control" if header.is_control else "decided" if header.is_decided else "data"
        taken = f"{header.base_offset}+{header.count}"
        found.append(f"{kind} {header.txn_id} {taken}: {header.rows}")
    return found


KEPT = [
    # The essay's: what was aborted goes, and so do a transaction's marker and batches.
    ("N*4 P2 P1*2 C1 A2", {0, 2, 6}, ["data 0 0+5: 2", "data 1 5+2: 1", "control 1 7+1: 0",
     "control 0 8+1: 0"]),
    ("N*4 P2 P1*2 C1 A2", {3}, ["data 0 0+9: 1"]),
    ("N*4 P2 P1*2 C1 A2", set(), ["control 0 0+9: 0"]),
    ("D7 D8*2 D9", {0, 2}, ["decided 7 0+1: 1", "decided 8 1+3: 1"]),
    # The first batch stays with the marker, and keeps no other.
    ("P1 P1 P1 C1", {2}, ["data 1 0+2: 0", "data 1 2+1: 1", "control 1 3+1: 0"]),
    ("P1 P1 P1 C1", {1}, ["data 1 0+1: 0", "data 1 1+2: 1", "control 1 3+1: 0"]),
    # One that begins again is another one.
    ("P1 C1 P1 C1", {2}, ["control 0 0+2: 0", "data 1 2+1: 1", "control 1 3+1: 0"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kept", "expected"), KEPT)
def test_what_is_left(tmp_path: Path, text: str, kept: set[int], expected: list[str]) -> None:
    with Log(tmp_path) as log:
        log.append(*script(text))
        before = dict(log.committed(0))
        rewrite(log, lambda offset: offset in kept)
        assert batches(log) == expected
        assert dict(log.committed(0)) == {at: before[at] for at in before if at in kept}
        rewrite(log, lambda offset: offset in kept)
        assert batches(log) == expected


def test_what_goes_over_the_edge_keeps_its_ends(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.append(*script("P1 P1 P2"))
        log.append(*script("C1 A2"))
        assert rewrite(log, lambda _: False, upto=3) == 3
        assert batches(log)[:3] == ["data 1 0+2: 0", "data 2 2+1: 0", "control 1 3+1: 0"]
        assert [entry[:3] for entry in log.index()] == [(2, 2, 4)]
        assert log.committed(0) == []


def test_the_low_water_mark_stays(tmp_path: Path) -> None:
    """A late batch is aborted where it stands, also behind a piece in which nothing is left."""
    with Log(tmp_path) as log:
        log.append(*script("P1"), marker(FILLER, mark=3), *script("C1 N N"))
        rewrite(log, lambda _: False)
        assert batches(log) == ["control 0 0+5: 0"]
        assert log.ask("low_water_mark") == 3
        log.append(*script("P2"))
        assert [entry[:3] for entry in log.index()] == [(2, 5, 5)]


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_messages_stay_as_they_are(tmp_path: Path, codec: str | None) -> None:
    n = 200
    messages = pa.record_batch(
        {
            "value": pa.array([None if i % 7 == 0 else b"v%d" % i * 9 for i in range(n)]),
            "key": pa.array([None if i % 5 == 0 else b"k%d" % i for i in range(n)]),
            "headers": pa.array(
                [core.encode_headers([("h", b"%d" % i)]) if i % 3 else None for i in range(n)]
            ),
            "timestamp": pa.array(range(1000, 1000 + n), pa.timestamp("us", "UTC")),
        }
    )
    batch = core.encode_batch(messages, timestamp=1, producer_id=9, base_sequence=5, codec=codec)
    with Log(tmp_path) as log:
        log.append(batch, commit_ts=77)

        def read() -> Any:
            records = log.ask("read", 0, 1 << 20)
            spans = core.all_data(records, 0, 1 << 62)
            return core.decode(records, spans, 0)

        before = read()
        kept = [i for i in range(n) if i % 4 == 1 or 50 < i < 90]
        rewrite(log, set(kept).__contains__)
        assert read() == before.take(pa.array(kept))
        headers = [header for _, header in core.walk(log.ask("read", 0, 1 << 20))]
        (header,) = headers  # one batch, with gaps
        assert header.has_places
        assert (header.commit_ts, header.base_sequence) == (77, 5)
        assert (header.count, header.rows) == (n, len(kept))
        kept = [i for i in kept if i % 3]
        rewrite(log, set(kept).__contains__)  # one that has gaps
        assert read() == before.take(pa.array(kept))


def test_a_damaged_batch_is_not_touched(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(data(n=3))
    db = log.environment.db(b"log")

    def damage(txn: Any) -> None:
        key = bytes(8)
        chunk = bytearray(txn.get(key, db=db))
        chunk[-20] ^= 1
        txn.put(key, bytes(chunk), db=db)

    log.environment.write(damage)
    with pytest.raises(CorruptionError, match="damaged"):
        rewrite(log, lambda _: False)
    log.close()


def test_a_record_that_is_damaged_says_nothing(tmp_path: Path) -> None:
    """What it says was looked at may be anything; a look at all does no harm."""
    with Log(tmp_path) as log:
        log.append(*script("N N"))
        log.write("note_rewritten", 2)
        assert log.ask("rewritten").upto == 2
        db = log.environment.db(b"state")
        for flip in range(20):

            def damage(txn: Any, flip: int = flip) -> bytes:
                whole = bytes(txn.get(b"rewritten", db=db))
                damaged = bytearray(whole)
                damaged[flip] ^= 4
                txn.put(b"rewritten", bytes(damaged), db=db)
                return whole

            whole = log.environment.write(damage)
            assert log.ask("rewritten").upto == 0
            log.environment.write(lambda txn, was=whole: txn.put(b"rewritten", was, db=db))  # type: ignore[misc]
        log.write("truncate", 1)
        assert log.ask("rewritten").upto == 1


class RewritingMachine(LogMachine):
    """The machine of a log, with pieces that are rewritten: some of the messages go, for good."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[int] = set()
        self.upto = 0
        self.filter = core.CommittedFilter()

    @rule(seed=st.randoms(use_true_random=False), part=st.floats(0, 1))
    def rewrite(self, seed: Any, part: float) -> None:
        limit = self.model.start + int(part * (self.log.lso - self.model.start))
        gone = {at for at in range(limit) if seed.random() < 0.6} | self.gone
        upto = rewrite(self.log, lambda at: at not in gone, limit)
        self.gone |= {at for at in gone if at < upto}
        self.upto = max(upto, self.upto)

    @precondition(lambda self: self.model.end > max(self.model.start, self.upto))
    @rule(where=st.floats(0, 1))
    def truncate(self, where: float) -> None:
        low = max(self.model.start, self.upto)
        offset = low + int(where * (self.model.end - low))
        assert self.log.write("truncate", offset) == self.model.truncate(offset)
        self.gone = {at for at in self.gone if at < self.model.end}

    @invariant()
    def sees_what_the_list_says(self) -> None:
        told, start = self.model.told(), self.model.start
        assert (self.log.start, self.log.end) == (start, self.model.end)
        assert self.log.lso == max(told.lso, start)
        assert self.log.open_firsts() == told.open
        assert self.log.ask("low_water_mark") == told.mark

    @invariant()
    def finds_what_was_aborted(self) -> None:
        """What is left of the index is looked at by `is_whole`."""

    def _shown(self, told: Any, offset: int) -> list[tuple[int, bytes]]:
        return [each for each in super()._shown(told, offset) if each[0] not in self.gone]


TestRewritingMachine = RewritingMachine.TestCase
TestRewritingMachine.settings = settings(
    max_examples=60,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
