"""A partition's log goes back to an earlier offset, and finds damage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.topics.log_tools import COMMIT, Log, LogOptions, data, marker, script
from txnkv.errors import CorruptionError
from txnkv.storage import clock
from txnkv.topics.log.log_chunks import KEY
from txnkv.topics.log.log_state import ABORTED, LOG, OPEN, SNAPSHOTS, STATE, StateSnapshot
from txnkv.topics.log.partition_state import AbortedEntry

DESIGN = "P1 P1 P2 C1 P2 A2 P1 P2 P1 A1 C2"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log(tmp_path / "store") as made:
        yield made


def cut(log: Log, **options: Any) -> None:
    log.log.options = replace(log.options, **options)


def snapshots(log: Log) -> list[int]:
    with log.environment.read() as txn:
        keys = txn.cursor(db=log.environment.db(SNAPSHOTS)).iternext(values=False)
        return [KEY.unpack(key)[0] for key in keys]


def test_snapshots_by_changes_and_at_segments(log: Log) -> None:
    cut(log, snapshot_changes=4, snapshot_seconds=1e9)
    log.append(*script("P1 P1 A1 N P2 C2 P3 C3 P4"))
    assert snapshots(log) == [0, 6]
    log.write("roll")
    assert snapshots(log) == [0, 6, 9]
    log.append(*script("C4 P5 C5 P6 C6"))
    log.write("roll")
    assert snapshots(log) == [0, 9, 13, 14]  # those in between go when two segments are behind


def test_snapshots_by_time(log: Log) -> None:
    cut(log, snapshot_seconds=5)
    now = clock.now_micros()
    with clock.replaced(wall=lambda: now):
        log.append(*script("P1"))
        now += 4_000_000
        log.append(*script("P2"))
        assert snapshots(log) == [0]
        now += 2_000_000
        log.append(*script("P2"))
        assert snapshots(log) == [0, 3]
        now += 60_000_000
        log.append(*script("P2"))  # changes nothing, so there is nothing to keep
        assert snapshots(log) == [0, 3]
        now -= 600_000_000
        log.append(*script("P3"))  # a clock that was set back does not stop them
        assert snapshots(log) == [0, 3, 5]


def test_truncate_goes_back_to_every_offset(tmp_path: Path) -> None:
    batches = [*script(DESIGN), *script("P3*3 D4*2 P5 N A3 C5 P6 P7"), marker(COMMIT, 7, mark=7)]
    options = LogOptions(segment_bytes=700, snapshot_changes=3)
    with Log(tmp_path / "expected", options) as expected:
        states = []
        for batch in batches:
            states.append(seen(expected))
            expected.append(batch)
        states.append(seen(expected))
    assert states[-1]["end"] == 23
    for cut_at in range(23, -1, -1):
        with Log(tmp_path / f"{cut_at}", options) as log:
            log.append(*batches)
            end = log.write("truncate", cut_at)
            found = next(state for state in reversed(states) if state["end"] <= cut_at)
            assert end == found["end"] == log.end
            assert seen(log) == found
            log.append(*batches[states.index(found) :])
            assert seen(log) == states[-1]


def seen(log: Log) -> dict[str, Any]:
    """All that a reader can see of a log but where it is cut."""
    with log.reader() as reader:
        log_, txn = reader.log, reader.txn
        return {
            "end": log_.end(txn),
            "lso": log_.last_stable_offset(txn),
            "mark": log_.low_water_mark(txn),
            "open": log_.open_transactions(txn),
            "aborted": log_.aborted(txn, 0, 1 << 62),
            "commits": log_.commits(txn, 0, 1000),
            "records": b"".join(log_.read(txn, 0, 1 << 30)),
        }


def test_truncate_of_what_is_not_there(log: Log) -> None:
    log.append(data(n=3))
    log.write("advance_start", 2)
    for offset in (1, 4):
        with pytest.raises(ValueError, match=r"\[2, 3\)"):
            log.write("truncate", offset)
    assert log.write("truncate", 3) == 3
    assert log.write("truncate", 2) == 0  # the batch began there
    assert (log.start, log.end) == (0, 0)


def test_a_damaged_snapshot_is_passed_over(log: Log) -> None:
    cut(log, snapshot_changes=1)
    log.append(*script("P1 P2 P3"))
    good = StateSnapshot(2, 0, ()).pack()

    def damage(txn: Any) -> None:
        db = log.environment.db(SNAPSHOTS)
        for offset, value in ((3, good), (2, b""), (1, bytes(37) + good)):
            txn.put(KEY.pack(offset), value, db=db)

    log.environment.write(damage)
    assert len(log.problems()) == 3
    log.append(data(9))
    assert log.write("truncate", 3) == 3
    assert log.open_firsts() == {1: 0, 2: 1, 3: 2}
    log.write("truncate", 0)


def test_without_any_snapshot_the_replay_begins_with_the_segment(tmp_path: Path) -> None:
    log = Log(tmp_path / "store")
    log.append(*script("P1 P2"))
    log.write("roll")
    log.append(*script("P1 A2 P3"))
    log.environment.write(lambda txn: txn.drop(log.environment.db(SNAPSHOTS), delete=False))
    log.write("truncate", 4)
    assert log.open_firsts() == {1: 0}
    assert log.index() == [AbortedEntry(2, 1, 3, 0)]
    assert log.problems() == [f"no snapshot at the base of {s}" for s in log.ask("segments")]
    log.close()


# -- damage ----------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["empty", "short", "flipped"])
def test_a_damaged_record_is_found(tmp_path: Path, damage: str) -> None:
    log = Log(tmp_path / "store")
    log.append(data())

    def spoil(txn: Any) -> None:
        db = log.environment.db(STATE)
        stored = bytearray(txn.get(b"log", db=db))
        stored[7] ^= 1
        spoilt = {"empty": b"", "short": b"x" * 10, "flipped": bytes(stored)}[damage]
        txn.put(b"log", spoilt, db=db)

    log.environment.write(spoil)
    with pytest.raises(CorruptionError, match="record of its state"):
        log.ask("end")
    assert len(log.problems()) == 1
    log.close()


@pytest.mark.parametrize("name", [LOG, OPEN, ABORTED])
def test_a_check_finds_what_is_gone(tmp_path: Path, name: bytes) -> None:
    log = Log(tmp_path / "store")
    log.append(*script(DESIGN), *script("P1"))
    assert log.problems() == []
    log.environment.write(lambda txn: txn.drop(log.environment.db(name), delete=False))
    assert log.problems() != []
    log.close()


def test_a_check_finds_a_flipped_bit(tmp_path: Path) -> None:
    log = Log(tmp_path / "store")
    log.append(data(n=10, size=100), together=True)

    def damage(txn: Any) -> None:
        db = log.environment.db(LOG)
        value = bytearray(txn.get(KEY.pack(0), db=db))
        value[500] ^= 1
        txn.put(KEY.pack(0), bytes(value), db=db)

    log.environment.write(damage)
    assert ["checksum" in problem for problem in log.problems()] == [True]
    log.close()


def test_bytes_that_are_no_chunk_raise(tmp_path: Path) -> None:
    log = Log(tmp_path / "store")
    log.append(data(n=3))
    zeros = bytes(300)
    log.environment.write(lambda txn: txn.put(KEY.pack(0), zeros, db=log.environment.db(LOG)))
    for name, args in (("read", (1, 10)), ("read", (0, 10)), ("offset_for_time", (0,))):
        with pytest.raises(CorruptionError):
            log.ask(name, *args)
    log.close()
