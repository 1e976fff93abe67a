"""The side logs of one partition: what is there, what readers get, what goes when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.topics.log_tools import LogOptions, data
from tests.topics.side_tools import SideLog
from txnkv import core
from txnkv.errors import CorruptionError, InvalidTxnStateError, UnavailableError
from txnkv.storage.faults import arm, disarm
from txnkv.topics.log.log_chunks import side_bytes
from txnkv.topics.sidecar import side_store, side_sweep
from txnkv.topics.sidecar.side_store import SideState

T1, T2, T3 = 101, 102, 103


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SideLog]:
    with SideLog(tmp_path / "store") as made:
        yield made


@pytest.fixture
def small_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transactions get side logs of their own early."""
    monkeypatch.setattr(side_store, "OWN_BYTES", 400)


def values(txn_id: int, n: int, first: int = 0, size: int = 20) -> list[bytes]:
    return [b"%d:%d" % (txn_id, i) + b"." * size for i in range(first, first + n)]


# -- transactions ----------------------------------------------------------------------


def states(log: SideLog) -> Counter[SideState]:
    """Count the transactions of the side logs by their state."""
    return Counter(side.state for _, side in log.look("rows"))


def holder(log: SideLog, offset: int) -> int | None:
    """Return the committed transaction that has an offset."""
    for txn_id, side in log.look("rows"):
        if side.state is SideState.COMMITTED and side.marker_offset <= offset < side.end_offset:
            return int(txn_id)
    return None


def test_no_side_log_without_transactions(log: SideLog) -> None:
    log.plain(b"a", b"b")
    assert log.sweep() == side_sweep.SideSwept()
    with log.environment.read(), pytest.raises(KeyError):
        log.environment.db(b"side")
    assert log.look("transaction", T1) is None
    assert log.look("open_transactions") == []


def test_an_open_transaction_holds_nobody_back(log: SideLog) -> None:
    log.send(T1, *values(T1, 5))
    log.send(T2, *values(T2, 2))
    log.plain(b"x")
    log.commit(T2)
    assert list(log.values().values()) == [b"x", *values(T2, 2)]
    assert log.lso == log.end == 3
    log.send(T1, *values(T1, 1, first=5))
    assert log.commit(T1) == 3
    assert list(log.values(3).values()) == values(T1, 6)


def test_readers_get_decided_batches_of_one_transaction_with_its_timestamp(log: SideLog) -> None:
    log.send(T1, *values(T1, 9), batch=4)
    log.commit(T1)
    found = [header for _, header in core.walk(log.raw())]
    assert [(h.base_offset, h.count, h.txn_id) for h in found] == [
        (0, 4, T1),
        (4, 4, T1),
        (8, 1, T1),
    ]
    assert all(h.is_decided and h.commit_ts == log.clock for h in found)


def test_every_offset_and_every_room(log: SideLog) -> None:
    log.send(T1, *values(T1, 50), batch=3)
    log.send(T2, *values(T2, 50, size=70_000), batch=1)
    log.commit(T2)
    log.commit(T1)
    whole = log.raw()
    for offset in range(0, log.end, 7):
        for room in (1, 500, 100_000, 1 << 30):
            got = log.raw(offset, room)
            batches = core.walk(got)
            assert batches[0][1].base_offset <= offset < batches[0][1].next_offset
            assert got in whole
            assert len(batches) == 1 or len(got) <= room


def test_aborted_messages_are_never_seen_and_their_space_goes(log: SideLog) -> None:
    log.send(T1, *values(T1, 1000), batch=10)
    log.send(T2, b"stays")
    log.abort(T1)
    log.abort(T1)
    assert log.look("count", T1) == 0
    assert states(log)[SideState.GARBAGE] == 1
    swept = log.sweep()
    assert swept.removed_bytes > 20_000
    assert log.look("transaction", T1) is None
    log.commit(T2)
    assert log.values() == {0: b"stays"}


def test_an_aborted_transaction_takes_no_more(log: SideLog) -> None:
    log.send(T1, b"a")
    log.abort(T1)
    with pytest.raises(InvalidTxnStateError, match="has ended here"):
        log.send(T1, b"b")
    log.send(T2, b"a")
    log.commit(T2)
    with pytest.raises(InvalidTxnStateError, match="has ended here"):
        log.send(T2, b"b")
    log.abort(T2)  # the opposite of what was decided: nothing
    assert log.values() == {0: b"a"}


def test_an_end_without_messages(log: SideLog) -> None:
    log.abort(T1)
    assert log.commit(T2) is None
    assert log.end == 0


def test_abort_of_much_is_done_in_steps(log: SideLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_sweep, "GARBAGE_BYTES", 500)
    steps = []
    arm("side.removed", lambda: steps.append(states(log)[SideState.GARBAGE]))
    log.send(T1, *values(T1, 50, size=100), batch=1)
    for i in range(10):
        log.send(T1, *values(T1, 5, first=50 + 5 * i))
    log.send(T2, *values(T2, 5))
    log.abort(T1)
    log.abort(T2)
    log.sweep()
    disarm("side.removed")
    assert len(steps) > 3
    assert (steps[0], steps[-1]) == (2, 0)
    assert states(log)[SideState.GARBAGE] == 0


def test_only_data_batches_of_the_transaction(log: SideLog) -> None:
    for batch in (
        data(T2),
        data(),
        core.encode_control(core.ControlType.COMMIT, txn_id=T1, timestamp=1),
    ):
        with pytest.raises(ValueError, match="data batch of it"):
            log.environment.write(lambda txn, batch=batch: log.side.append(txn, T1, [batch]))
    assert log.look("transaction", T1) is None


# -- the indexes -----------------------------------------------------------------------


def test_transaction_index_and_its_reverse(log: SideLog) -> None:
    log.plain(b"x")
    log.send(T1, *values(T1, 3))
    log.send(T2, *values(T2, 2))
    log.send(T3, b"open")
    log.commit(T2)
    log.plain(b"y")
    log.commit(T1)
    first = log.look("transaction", T2)
    assert (first.state, first.marker_offset, first.count) == (SideState.COMMITTED, 1, 2)
    assert log.look("transaction", T1).marker_offset == 4
    assert [holder(log, offset) for offset in range(8)] == [
        None, T2, T2, None, T1, T1, T1, None,
    ]  # fmt: skip
    assert [id for id, _ in log.look("open_transactions")] == [T3]
    with log.environment.read() as txn:
        entries = log.log.commits(txn, 0, 10)
        assert [(e.marker_offset, e.count, e.txn_id) for e in entries] == [
            (0, 1, 0), (1, 2, T2), (3, 1, 0), (4, 3, T1),
        ]  # fmt: skip


def test_the_marker_counts_the_bytes_that_it_stands_for(log: SideLog) -> None:
    log.send(T1, *values(T1, 100), batch=7)
    log.commit(T1)
    with log.environment.read() as txn:
        marker = bytes(log.log.read(txn, 0, 1, raw=True)[0])
        (segment,) = log.log.segments(txn)
    assert side_bytes(marker) == len(log.raw())
    assert segment.bytes == len(marker) + side_bytes(marker)


# -- compaction ------------------------------------------------------------------------


def test_compaction_changes_nothing_that_a_reader_sees(log: SideLog) -> None:
    log.send(T1, *values(T1, 30), batch=3)
    log.plain(b"x")
    log.send(T2, *values(T2, 30, size=30_000), batch=2)
    log.commit(T2)
    log.send(T3, b"open")
    log.commit(T1)
    before, commits = log.raw(), log.ask("commits", 0, 100)
    swept = log.sweep()
    assert swept.moved_bytes > 900_000
    assert log.raw() == before
    assert log.ask("commits", 0, 100) == commits
    with log.environment.read() as txn:
        assert b"".join(log.log.read(txn, 0, 1 << 30, raw=True)) == before
    assert log.look("transaction", T1) is None
    assert [id for id, _ in log.look("open_transactions")] == [T3]
    assert log.sweep() == side_sweep.SideSwept()


def test_compaction_in_steps_in_commit_order_beside_readers(
    log: SideLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_sweep, "COMPACT_BYTES", 70_000)
    for part in range(10):
        for txn_id in (T1, T2):
            log.send(txn_id, *values(txn_id, 10, first=10 * part, size=2_000))
    log.commit(T2)
    log.commit(T1)
    before = log.raw()
    left: list[tuple[int, int]] = []

    def look() -> None:
        assert log.raw() == before
        sides = [log.look("transaction", txn_id) for txn_id in (T2, T1)]
        left.append(tuple(s.count - s.moved if s else 0 for s in sides))  # type: ignore[arg-type]

    arm("side.compacted", look)
    with log.environment.read() as txn:  # what a long reader sees stays
        in_thread(log.sweep)
        assert b"".join(log.log.read(txn, 0, 1 << 30)) == before
    disarm("side.compacted")
    assert len(left) > 4
    assert left == sorted(left, reverse=True)
    assert all(t2 == 0 or t1 == 100 for t2, t1 in left)
    assert left[-1] == (0, 0)


def test_every_offset_in_the_middle_of_compaction(
    log: SideLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_sweep, "COMPACT_BYTES", 1_000)
    log.send(T1, *values(T1, 60), batch=4)
    for i in range(10):
        log.send(T1, *values(T1, 6, first=60 + 6 * i), batch=2)
    log.commit(T1)
    expected = dict(enumerate(values(T1, 120)))

    def look() -> None:
        assert log.values() == expected
        for offset in range(0, 120, 11):
            assert log.values(offset, 300) == {i: expected[i] for i in range(offset, 120)}

    arm("side.compacted", look)
    log.sweep()
    disarm("side.compacted")


def test_replay_of_the_log_is_the_same_after_compaction(log: SideLog) -> None:
    log.send(T1, *values(T1, 30), batch=3)
    log.commit(T1)
    end = log.plain(b"x") + 1
    log.sweep()
    log.plain(b"y")
    commits = log.ask("commits", 0, 100)
    assert log.truncate(end) == end
    assert log.ask("commits", 0, 100) == commits[:2]
    assert len(log.values()) == 31


# -- side logs of their own ------------------------------------------------------------


def test_a_huge_transaction_goes_on_in_a_log_of_its_own(log: SideLog, small_own: None) -> None:
    for i in range(10):
        log.send(T1, *values(T1, 5, first=5 * i))
    log.send(T2, b"small")
    assert log.folders == [str(T1)]
    log.commit(T2)
    assert log.commit(T1) == 1
    side = log.look("transaction", T1)
    assert side.shared_count > 0 < side.own_count
    assert side.count == 50
    expected = [b"small", *values(T1, 50)]
    assert list(log.values(0, 300).values()) == expected
    log.sweep()  # what is in the shared one is moved, the own one is adopted as it is
    side = log.look("transaction", T1)
    assert side.moved == side.shared_count
    assert log.folders == [str(T1)]
    assert list(log.values(0, 300).values()) == expected
    for offset in range(51):
        assert list(log.values(offset).values()) == expected[offset:]
    assert log.sweep() == side_sweep.SideSwept()


def test_an_own_log_is_dropped_whole_with_its_marker(log: SideLog, small_own: None) -> None:
    log.options = LogOptions(segment_bytes=1)
    log.reopen()
    log.send(T1, *values(T1, 100), batch=10)
    log.commit(T1)
    log.plain(b"x")
    log.advance_start(99)
    log.sweep()
    assert log.folders == [str(T1)]
    assert log.values() == {99: values(T1, 100)[99], 100: b"x"}
    log.advance_start(100)
    assert log.sweep().dropped == 1
    assert log.folders == []
    assert log.look("transaction", T1) is None
    assert log.values() == {100: b"x"}


def test_an_aborted_huge_transaction_gives_its_space_back(log: SideLog, small_own: None) -> None:
    log.send(T1, *values(T1, 10, size=100_000), batch=1)
    assert log.folders == [str(T1)]
    log.abort(T1)
    assert log.sweep().dropped == 1
    assert log.folders == []


def test_a_reader_that_meets_a_dropped_log_is_told_to_read_anew(
    log: SideLog, small_own: None
) -> None:
    log.send(T1, *values(T1, 100), batch=10)
    log.commit(T1)
    log.plain(b"x")

    def drop() -> None:
        log.advance_start(100)
        log.sweep()

    with log.environment.read() as txn:
        in_thread(drop)
        with pytest.raises(UnavailableError, match="read anew"):
            log.log.read(txn, 0, 1 << 20)


def test_what_a_dead_writer_left_in_an_own_log_does_not_count(
    log: SideLog, small_own: None
) -> None:
    log.send(T1, *values(T1, 20), batch=10)
    log.send(T1, *values(T1, 10, first=20))
    arm("side.own_written", "error")
    with pytest.raises(UnavailableError):
        log.send(T1, *values(T2, 30))
    disarm()
    assert log.look("count", T1) == 30
    log.send(T1, *values(T1, 5, first=30))
    log.commit(T1)
    assert list(log.values().values()) == values(T1, 35)


def test_a_folder_without_a_row_is_removed(log: SideLog, small_own: None) -> None:
    arm("side.own_written", "error")
    with pytest.raises(UnavailableError):
        log.send(T1, *values(T1, 30))
    disarm()
    log.send(T2, *values(T2, 30))
    assert log.folders == [str(T1), str(T2)]
    log.sweep()
    assert log.folders == [str(T2)]


# -- retention and truncation ----------------------------------------------------------


def test_retention_follows_the_start_of_the_log(log: SideLog) -> None:
    log.options = LogOptions(segment_bytes=1)
    log.reopen()
    for txn_id in (T1, T2, T3):
        log.send(txn_id, *values(txn_id, 10))
        log.commit(txn_id)
    log.advance_start(15)
    swept = log.sweep()
    assert swept.removed_bytes > 0
    assert log.values() == {
        **{10 + i: v for i, v in enumerate(values(T2, 10)) if i >= 5},
        **{20 + i: v for i, v in enumerate(values(T3, 10))},
    }
    assert states(log)[SideState.COMMITTED] == 0


def test_retention_goes_before_compaction(log: SideLog) -> None:
    log.options = LogOptions(segment_bytes=1)
    log.reopen()
    for txn_id in (T1, T2):
        log.send(txn_id, *values(txn_id, 10))
        log.commit(txn_id)
    log.advance_start(10)
    size = len(log.raw())
    assert log.sweep().moved_bytes == size


@pytest.mark.parametrize("swept", [False, True])
def test_truncation_never_cuts_a_transaction_in_two(log: SideLog, swept: bool) -> None:
    for txn_id in (T1, T2, T3):
        log.send(txn_id, *values(txn_id, 10), batch=2)
        log.commit(txn_id)
    if swept:
        log.sweep()
    assert log.truncate(15) == 10
    assert list(log.values().values()) == values(T1, 10)
    assert holder(log, 10) is None
    log.sweep()
    assert states(log)[SideState.GARBAGE] == 0
    log.send(104, *values(104, 20), batch=3)
    assert log.commit(104) == 10
    log.sweep()
    assert list(log.values(10).values()) == values(104, 20)


def test_truncation_at_an_edge_keeps_what_is_before(log: SideLog, small_own: None) -> None:
    for txn_id in (T1, T2):
        log.send(txn_id, *values(txn_id, 30), batch=10)
        log.commit(txn_id)
    assert log.truncate(30) == 30
    assert log.sweep().dropped == 1
    assert log.folders == [str(T1)]
    assert list(log.values().values()) == values(T1, 30)


# -- damage ----------------------------------------------------------------------------


def test_missing_side_batches_are_found_out(log: SideLog) -> None:
    log.send(T1, *values(T1, 10))
    log.send(T1, *values(T1, 10, first=10))
    log.commit(T1)

    def damage(txn) -> None:  # type: ignore[no-untyped-def]
        with txn.cursor(db=log.environment.db(b"side")) as cursor:
            assert cursor.last()
            cursor.delete()

    log.environment.write(damage)
    with pytest.raises(CorruptionError, match="message 10 of transaction 101 is missing"):
        log.raw()
    log.truncate(0)
    log.sweep()


def test_a_check_finds_what_is_wrong(log: SideLog, small_own: None) -> None:
    for txn_id in (T1, T2, T3):
        log.send(txn_id, *values(txn_id, 5))
        log.send(txn_id, *values(txn_id, 20, first=5))
    log.commit(T1)
    log.commit(T2)
    assert log.problems() == []

    def change(txn, name, key, value) -> bytes:  # type: ignore[no-untyped-def]
        db = log.environment.db(name)
        before = bytes(txn.get(key, db=db))
        txn.delete(key, db=db) if value is None else txn.put(key, value(before), db=db)
        return before

    def flipped(chunk: bytes) -> bytes:
        return chunk[:-1] + bytes([chunk[-1] ^ 1])

    chunk, row, marker = (T1.to_bytes(8, "big") + bytes(8), T2.to_bytes(8, "big"), bytes(8))
    for name, key, value, found in [
        (b"side", chunk, flipped, "checksum"),
        (b"side", chunk, None, "message 0 of transaction 101 is missing"),
        (b"side_by_marker", marker, None, "101 is not in the index by marker"),
        (b"side_transactions", row, None, "is of transaction 102, which is not there"),
        (b"side_transactions", row, lambda row: row[:8] + b"\x04" + row[9:], "the marker at"),
    ]:
        kept = log.environment.write(lambda txn, n=name, k=key, v=value: change(txn, n, k, v))
        assert any(found in problem for problem in log.problems())
        log.environment.write(
            lambda txn, n=name, k=key, v=kept: txn.put(k, v, db=log.environment.db(n))
        )
    assert log.problems() == []


def in_thread(fn, *args):  # type: ignore[no-untyped-def]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).result()
