"""A partition's log in LMDB: batches in and out, segments, commits, times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.topics.log_tools import ABORT, COMMIT, FILLER, Log, LogOptions, data, marker, script
from txnkv import core
from txnkv.errors import CorruptionError, OffsetOutOfRangeError
from txnkv.storage.faults import arm, disarm
from txnkv.topics.log.log_chunks import CHUNK_BYTES
from txnkv.topics.log.log_state import LOG
from txnkv.topics.log.partition_log import CommitEntry, PartitionLog
from txnkv.topics.log.partition_state import AbortedEntry

DESIGN = "P1 P1 P2 C1 P2 A2 P1 P2 P1 A1 C2"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log(tmp_path / "store") as made:
        yield made


def values(records: bytes) -> list[int]:
    """The offsets of all messages of a read."""
    rows = core.decode(records, core.all_data(records, 0, 1 << 62), 0, None)
    return list(rows["offset"].to_pylist())


# -- the design's examples -------------------------------------------------------------


def test_the_design_s_example(log: Log) -> None:
    stable = []
    for batch in script(DESIGN):
        log.append(batch)
        stable.append(log.lso)
    assert stable == [0, 0, 0, 2, 2, 6, 6, 6, 6, 7, 11]
    assert log.index() == [AbortedEntry(2, 2, 5, 6), AbortedEntry(1, 6, 9, 7)]
    # The document counts the LSO inclusively: 5 and 6.
    assert [entry.last_stable_offset - 1 for entry in log.index()] == [5, 6]
    assert [offset for offset, _ in log.committed(0)] == [0, 1, 7]


@pytest.mark.parametrize("cut", [None, 6])
def test_the_design_s_fetches(log: Log, cut: int | None) -> None:
    """In one segment, and in two: the search goes on in the second."""
    batches = script(DESIGN)
    log.append(*batches[:6])
    if cut:
        log.write("roll")
    log.append(*batches[6:])
    assert [entry[:2] for entry in log.ask("aborted", 0, 5)] == [(2, 2)]
    assert [entry[:2] for entry in log.ask("aborted", 5, 9)] == [(2, 2), (1, 6)]


@pytest.mark.parametrize("max_bytes", [1, 500, 1 << 20])
def test_a_reader_of_committed_messages(log: Log, max_bytes: int) -> None:
    log.append(*script(DESIGN), together=True)
    assert [offset for offset, _ in log.committed(0, max_bytes)] == [0, 1, 7]
    for start in range(11):
        found = [offset for offset, _ in log.committed(start, max_bytes)]
        assert found == [offset for offset in (0, 1, 7) if offset >= start]


# -- put and read ----------------------------------------------------------------------


def test_an_empty_log(log: Log) -> None:
    assert (log.start, log.end, log.lso) == (0, 0, 0)
    assert log.ask("read", 0, 100) == b""
    assert log.ask("open_transactions") == []
    assert log.ask("segments") == []
    assert log.ask("commits", 0, 9) == []
    assert log.ask("aborted", 0, 9) == []
    assert log.ask("offset_for_time", 0) is None


def test_a_log_that_was_never_prepared_is_empty(log: Log) -> None:
    other = log.environments.get("logs/2", create=True)
    unprepared = PartitionLog(other, LogOptions())
    with other.read() as txn:
        assert unprepared.end(txn) == unprepared.last_stable_offset(txn) == 0
        assert unprepared.read(txn, 0, 10) == []
        assert unprepared.aborted_index(txn, 0) == b""


def test_prepare_is_one_write_and_then_none(log: Log) -> None:
    commits: list[None] = []
    arm("lmdb.after_commit", lambda: commits.append(None))
    other = PartitionLog(log.environments.get("logs/2", create=True), LogOptions())
    for _ in range(3):
        other.prepare()
    disarm("lmdb.after_commit")
    assert len(commits) == 1


@pytest.mark.parametrize("together", [False, True])
def test_what_is_put_is_read(log: Log, together: bool) -> None:
    batches = [data(n=n) for n in (1, 3, 5, 2)]
    log.append(*batches, together=together)
    placed = [core.place(b, at) for b, at in zip(batches, (0, 1, 4, 9), strict=True)]
    assert log.ask("read", 0, 1 << 20) == b"".join(placed)
    for offset, first in ((0, 0), (1, 1), (3, 1), (4, 2), (8, 2), (9, 3), (10, 3)):
        assert log.ask("read", offset, 1 << 20) == b"".join(placed[first:])
        assert log.ask("read", offset, 1) == placed[first]
        two = sum(core.read_header(batch).decoded_bytes for batch in placed[first : first + 2])
        assert log.ask("read", offset, two) == b"".join(placed[first : first + 2])
        assert log.ask("read", offset, two - 1) == placed[first]
    assert log.ask("read", 11, 100) == b""


def test_read_ends_at_an_offset(log: Log) -> None:
    for n in (2, 1, 4):
        log.append(data(n=n), data(n=n), together=True)
    for upto in (0, 2, 4, 5, 6, 10, 14, 99):
        assert values(log.ask("read", 0, 1 << 20, upto)) == list(range(min(upto, 14)))
    assert log.ask("read", 5, 1 << 20, 5) == b""


@pytest.mark.parametrize("offset", [-1, 4, 100])
def test_read_outside_of_the_log(log: Log, offset: int) -> None:
    log.append(data(n=3))
    with pytest.raises(OffsetOutOfRangeError, match=r"\[0, 3\)"):
        log.ask("read", offset, 100)


@pytest.mark.parametrize("offset", [0, 2, 4])
def test_put_refuses_what_does_not_follow(log: Log, offset: int) -> None:
    log.append(data(n=3))
    batch = core.place(data(1), offset)
    with pytest.raises(ValueError, match="ends at 3"):
        log.write("put", [batch])
    with pytest.raises(ValueError, match="offset 9 into a log that ends at 4"):
        log.write("put", [core.place(data(), 3) + core.place(data(), 9), batch])
    assert (log.end, log.open_firsts()) == (3, {})


def test_put_refuses_what_is_no_batch(log: Log) -> None:
    with pytest.raises(CorruptionError, match="Nothing was put"):
        log.write("put", [b"x" * 100])
    assert log.end == 0


def test_small_batches_share_chunks_and_large_ones_have_their_own(log: Log) -> None:
    log.append(*[data(size=100) for _ in range(1000)], together=True)
    log.append(*[data(size=100) for _ in range(1000)])
    log.append(data(n=2, size=CHUNK_BYTES), data(), data(size=CHUNK_BYTES))
    with log.environment.read() as txn:
        db = log.environment.db(LOG)
        sizes = [len(value) for _, value in txn.cursor(db=db)]
    assert len(sizes) <= 2000 * 210 // CHUNK_BYTES + 6
    assert len([size for size in sizes if size > CHUNK_BYTES]) == 2
    assert values(log.ask("read", 0, 1 << 30)) == list(range(2004))


def test_any_buffer_is_taken(log: Log) -> None:
    batch = data()
    log.write("put", [bytearray(core.place(batch, 0)), memoryview(core.place(batch, 1))])
    assert log.end == 2


# -- segments --------------------------------------------------------------------------


def cut(log: Log, **options: Any) -> None:
    log.log.options = replace(log.options, **options)


def test_segments_roll_by_bytes_wherever_the_puts_begin(tmp_path: Path) -> None:
    batches = [data(txn, n, size=40) for txn in (1, 2, 3) for n in (1, 2, 3, 4)]
    size = 2 * max(map(len, batches))
    bases = []
    for together in (False, True):
        with Log(tmp_path / f"{together}", LogOptions(segment_bytes=size)) as log:
            log.append(*batches, together=together)
            segments = log.ask("segments")
            assert all(segment.bytes <= size for segment in segments)
            assert sum(segment.bytes for segment in segments) == sum(map(len, batches))
            assert values(log.ask("read", 0, 1 << 20)) == list(range(30))
            bases.append([segment.base for segment in segments])
    assert bases[0] == bases[1]
    assert len(bases[0]) > 3


def test_a_batch_larger_than_a_segment_is_one(log: Log) -> None:
    cut(log, segment_bytes=100)
    log.append(data(n=3), data(n=2), data())
    assert [segment.base for segment in log.ask("segments")] == [0, 3, 5]


def test_segments_roll_by_the_age_of_their_messages(log: Log) -> None:
    cut(log, segment_seconds=2)
    for seconds in (10, 11, 12, 13, 9, 15.5):
        log.append(data(time=int(seconds * 1e6)))
    segments = log.ask("segments")
    assert [segment.base for segment in segments] == [0, 3, 5]
    assert [segment.created // 10**6 for segment in segments] == [10, 13, 15]
    assert [segment.max_timestamp // 10**6 for segment in segments] == [12, 13, 15]


def test_roll_by_hand_makes_no_empty_segments(log: Log) -> None:
    for _ in range(2):
        log.write("roll")
    log.append(data())
    for _ in range(2):
        log.write("roll")
    assert [segment.base for segment in log.ask("segments")] == [0, 1]
    log.append(data(time=77))
    assert log.ask("segments")[1].created == 77


def test_each_segment_has_an_index_of_its_own(log: Log) -> None:
    for txn in (1, 2, 3):
        log.append(data(txn), data(txn), marker(ABORT, txn), data())
        log.write("roll")
    entries = [AbortedEntry(txn, at, at + 2, at + 3) for txn, at in ((1, 0), (2, 4), (3, 8))]
    bases = [segment.base for segment in log.ask("segments")]
    assert bases == [0, 4, 8, 12]
    assert [log.ask("aborted_index", base) for base in bases] == [
        *(entry.pack() for entry in entries),
        b"",
    ]
    assert log.ask("aborted", 0, 3) == entries[:1]
    assert log.ask("aborted", 0, 9) == entries
    assert log.ask("aborted", 3, 12) == entries[1:]


def test_advance_start_drops_segments_and_what_belongs_to_them(log: Log) -> None:
    for txn in (1, 2, 3):
        log.append(data(txn), marker(ABORT, txn), data(n=2))
        log.write("roll")
    log.append(data(9))
    log.write("advance_start", 6)
    assert (log.start, log.end) == (6, 13)
    assert [segment.base for segment in log.ask("segments")] == [4, 8, 12]
    assert [entry.txn_id for entry in log.index()] == [2, 3]
    assert [entry.marker_offset for entry in log.ask("commits", 0, 9)] == [6, 10]
    assert values(log.ask("read", 6, 1 << 20)) == [6, 7, 8, 10, 11, 12]
    log.write("advance_start", 13)
    assert (log.start, log.end, log.lso) == (13, 13, 13)
    assert [segment.base for segment in log.ask("segments")] == [12]
    with pytest.raises(ValueError, match="does not come back"):
        log.write("advance_start", 12)


# -- commits ---------------------------------------------------------------------------


def test_commits_are_the_places_where_messages_become_visible(log: Log) -> None:
    log.append(*script("P1 P2 C1"), commit_ts=70)
    log.append(*script("D7*3 N*2 D8"), commit_ts=80, together=True)
    log.append(*script("A2 P3"), commit_ts=90)
    everything = [
        CommitEntry(2, 1, 1, 0, 70),
        CommitEntry(3, 3, 7, 3, 80),
        CommitEntry(6, 2, 0, 6, 80),
        CommitEntry(8, 1, 8, 8, 80),
    ]
    assert log.ask("commits", 0, 100) == everything
    assert log.ask("commits", 0, 2) == everything[:2]
    for offset, left in ((2, 4), (3, 3), (5, 3), (6, 2), (7, 2), (8, 1), (9, 0)):
        assert log.ask("commits", offset, 100) == everything[4 - left :], offset


def test_what_was_aborted_while_another_stays_open(log: Log) -> None:
    """The last stable offset of all entries is 0 then, and ends no search."""
    log.append(data(1))
    for txn in range(2, 60):
        log.append(data(txn), data(txn), marker(ABORT, txn), together=True)
    log.append(*script("P90 P91 P90 A91 P92 A1 A90 P93"))
    index = log.index()
    assert [entry.last_stable_offset for entry in index[:-2]] == [0] * 59
    for offset in range(0, log.end, 7):
        for upto in range(offset + 1, log.end + 1, 5):
            expected = [e for e in index if e.last_offset >= offset and e.first_offset < upto]
            assert log.ask("aborted", offset, upto) == expected


# -- time ------------------------------------------------------------------------------


def test_offset_for_time(log: Log) -> None:
    cut(log, segment_seconds=0.000_035)
    for time in (10, 30, 20, 50, 60):
        log.append(data(n=2, time=time), marker(FILLER, time=time + 5))
    assert [segment.base for segment in log.ask("segments")] == [0, 9]
    for time, offset in ((0, 0), (10, 0), (11, 3), (30, 3), (31, 9), (51, 12), (61, None)):
        assert log.ask("offset_for_time", time) == offset, time
    log.write("advance_start", 4)
    assert log.ask("offset_for_time", 0) == 4


def test_offset_for_time_inside_of_a_batch(log: Log) -> None:
    import pyarrow as pa

    times = pa.array([5, 9, 7, 20], pa.timestamp("us", "UTC"))
    rows = pa.record_batch({"value": pa.array([b"x"] * 4, pa.binary()), "timestamp": times})
    log.append(data(time=1), core.encode_batch(rows, timestamp=0))
    for time, offset in ((1, 0), (2, 1), (5, 1), (6, 2), (10, 4), (21, None)):
        assert log.ask("offset_for_time", time) == offset, time


# -- readers beside a writer -----------------------------------------------------------


def test_a_reader_goes_on_to_see_what_it_began_with(log: Log) -> None:
    """A log has one copy, so its high watermark is its end, as a reader found it."""
    log.append(data(n=99), data(11), data(n=5), data(12), data(n=3))
    for batch, lso, after in ((marker(COMMIT, 11), 99, 105), (marker(ABORT, 12), 105, 111)):
        with log.reader() as before:
            beside(log.append, batch)
            assert (before.lso, log.lso) == (lso, after)


def test_read_committed_beside_a_writer(log: Log) -> None:
    def write() -> None:
        while log.end < 50:
            log.append(data(1))
            log.append(marker(ABORT, 1))

    writer = Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert log.committed(0) == []
    writer.join()
    assert log.end == 50


def beside(call: Callable[..., Any], *args: Any) -> None:
    """Call in another thread: this one has a read transaction open, in which it may not write."""
    thread = Thread(target=call, args=args)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_start_behind_the_end_takes_all(log: Log) -> None:
    log.append(data(n=3), data(1, 2))
    log.write("advance_start", 6)
    assert (log.open_firsts(), log.start, log.end, log.lso) == ({}, 6, 6, 6)
    assert log.append(data(2)) == 6
    assert log.open_firsts() == {2: 6}
