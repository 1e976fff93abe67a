"""Kafka's tests of the last stable offset, as far as they concern a log.

A log here has one copy, and what a reader calls the high watermark is the end of the log in its
read transaction. So "the marker is appended, the high watermark has not passed it" is a reader
that began before the marker: it goes on to see the LSO as it was.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.topics.log_tools import ABORT, COMMIT, Log, data, marker, script
from txnkv.errors import OffsetOutOfRangeError
from txnkv.topics.log.partition_state import AbortedEntry

P1, P2 = 11, 12


@pytest.fixture
def log(tmp_path: Path):  # type: ignore[no-untyped-def]
    with Log(tmp_path / "store") as made:
        yield made


def test_first_unstable_offset(log: Log) -> None:
    """ProducerStateManagerTest.testFirstUnstableOffset, with its offsets."""
    log.append(data(n=99))
    assert log.open_firsts() == {}
    log.append(data(P1))
    assert log.lso == 99
    log.append(data(n=5))
    assert log.append(data(P2)) == 105
    assert log.lso == 99
    log.append(data(n=3))
    with log.reader() as before:
        in_thread(log.append, marker(COMMIT, P1))  # at 109
        assert (log_first(log), before.first_open) == (105, 99)
        assert (log.lso, before.lso) == (105, 99)
    log.append(data(n=2))
    with log.reader() as before:
        in_thread(log.append, marker(ABORT, P2))  # at 112
        assert (log_first(log), before.first_open) == (None, 105)
    assert log.lso == log.end == 113
    assert log.index() == [AbortedEntry(P2, 105, 112, 113)]


def test_fetch_up_to_last_stable_offset(log: Log) -> None:
    """UnifiedLogTest.testFetchUpToLastStableOffset."""
    log.append(*[data(P1)] * 5, *[data()] * 3, *[data(P2)] * 2)
    log.append(*[data(P1)] * 4, *[data()] * 2, *[data(P1)] * 10)
    assert_fetches(log, 0, 26)
    with log.reader() as before:
        in_thread(log.append, marker(COMMIT, P1))
        assert before.lso == 0
    assert_fetches(log, 8, 27)
    with log.reader() as before:
        in_thread(log.append, marker(ABORT, P2))
        assert before.lso == 8
    assert_fetches(log, 28, 28)
    assert [offset for offset, _ in log.committed(0)] == [*range(8), *range(10, 26)]


def assert_fetches(log: Log, lso: int, end: int) -> None:
    assert (log.lso, log.end) == (lso, end)
    for offset in range(end + 1):
        records = log.ask("read", offset, 1 << 20, lso)
        assert bool(records) == (offset < lso), offset


def test_recover_transaction_index(log: Log) -> None:
    """LogSegmentTest.testRecoverTransactionIndex, by a truncation that goes back and on."""
    log.append(data(n=100))
    log.write("roll")
    log.append(*script("P5*2 P10*2 N*2 A10 C5"))
    assert (log.end, log.index()) == (108, [AbortedEntry(10, 102, 106, 100)])
    log.write("truncate", 104)
    assert (log.index(), log.open_firsts()) == ([], {5: 100, 10: 102})
    log.append(*script("N*2 A10 C5"))
    assert (log.end, log.index()) == (108, [AbortedEntry(10, 102, 106, 100)])


def test_recover_transaction_index_of_one_that_began_before(log: Log) -> None:
    log.append(data(n=75), data(10), data(n=24))
    log.write("roll")
    log.append(*script("P5*2 P10*2 N*2 A10 C5"))
    assert log.index() == [AbortedEntry(10, 75, 106, 100)]
    assert log.ask("aborted_index", 0) == b""
    assert log.ask("aborted_index", 100) == AbortedEntry(10, 75, 106, 100).pack()


def test_first_unstable_offset_without_transactions(log: Log) -> None:
    log.append(data(n=3))
    assert (log_first(log), log.lso) == (None, 3)


def test_first_unstable_offset_with_transactions(log: Log) -> None:
    log.append(data(P1, 3))
    assert log.lso == 0
    log.append(data(P1))
    assert log.lso == 0
    with log.reader() as before:
        in_thread(log.append, marker(COMMIT, P1))
        assert before.first_open == 0
    assert log_first(log) is None


def test_last_stable_offset_with_mixed_producers(log: Log) -> None:
    log.append(data(137, 3), data(n=3), data(983, 3))
    assert log.lso == 0
    log.append(marker(ABORT, 137))
    assert log.lso == 6
    log.append(marker(COMMIT, 983))
    assert (log.lso, log_first(log)) == (11, None)


def test_last_stable_offset_is_not_below_the_start_mid_segment(log: Log) -> None:
    log.append(data(P1, 5), data(n=3))
    log.write("roll")
    log.append(data(P1, 5))
    assert log.lso == 0
    log.write("advance_start", 5)
    assert log.lso == 5
    assert log.open_firsts() == {P1: 0}
    with pytest.raises(OffsetOutOfRangeError, match=r"\[5, 13\)"):
        log.ask("read", 4, 100)


def test_last_stable_offset_is_not_below_the_start_after_deletion(log: Log) -> None:
    log.append(data(P1, 5), data(n=3))
    log.write("roll")
    log.append(data(P1, 5))
    log.write("advance_start", 8)
    assert log.lso == 8
    assert [segment.base for segment in log.ask("segments")] == [8]
    log.append(marker(ABORT, P1))
    assert log.index() == [AbortedEntry(P1, 0, 13, 14)]


def test_truncate_below_first_unstable_offset(log: Log) -> None:
    log.append(data(n=3), data(P1, 2))
    log.reopen()
    assert log_first(log) == 3
    log.write("truncate", 0)
    assert (log_first(log), log.end, log.lso) == (None, 0, 0)


def test_truncate_fully_and_start_below_first_unstable_offset(log: Log) -> None:
    log.append(data(n=3), data(P1, 2))
    log.write("advance_start", 6)  # behind the end: all goes
    assert (log_first(log), log.start, log.end, log.lso) == (None, 6, 6, 6)
    assert log.append(data(P2)) == 6
    assert log_first(log) == 6


def test_rebuild_transactional_state(log: Log) -> None:
    log.append(data(P1, 3), marker(ABORT, P1))
    log.reopen()
    assert (log_first(log), log.lso) == (None, 4)


def test_first_unstable_offset_after_truncation(log: Log) -> None:
    """ProducerStateManagerTest.testFirstUnstableOffsetAfterTruncation."""
    log.append(data(n=99), data(P1), data(n=5), marker(COMMIT, P1), data())
    assert log_first(log) is None
    log.write("truncate", 106)
    assert (log_first(log), log.lso) == (None, 106)
    log.write("truncate", 100)
    assert (log_first(log), log.lso) == (99, 99)


def test_read_committed_beside_a_writer(log: Log) -> None:
    """testReadCommittedWithConcurrentHighWatermarkUpdates: never a batch of open data."""
    from threading import Thread

    def write() -> None:
        while log.end < 50:
            log.append(data(P1))
            log.append(marker(ABORT, P1))

    writer = Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert log.committed(0) == []
    writer.join()
    assert log.end == 50


def log_first(log: Log) -> int | None:
    firsts = log.open_firsts().values()
    return min(firsts, default=None)


def in_thread(fn, *args) -> None:  # type: ignore[no-untyped-def]
    """This thread has a read transaction open, in which it may not write."""
    from threading import Thread

    thread = Thread(target=fn, args=args)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
