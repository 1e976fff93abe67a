"""The state of a partition by itself: stable offset, aborted index, low water mark."""

from __future__ import annotations

import pytest

from tests.topics.log_tools import ABORT, COMMIT, FILLER, collect, data, marker, script
from txnkv import core
from txnkv.topics.log.partition_state import (
    AbortedEntry,
    CommitEntry,
    MemoryOpenTxns,
    OpenTxn,
    PartitionState,
)


def fresh(end: int = 0, mark: int = 0, *txns: OpenTxn) -> PartitionState:
    return PartitionState(end, mark, MemoryOpenTxns(txns))


def feed(state: PartitionState, *batches: bytes) -> list[int]:
    """The LSO after each batch."""
    stable = []
    for batch in batches:
        placed = core.place(batch, state.end)
        header = core.read_header(placed)
        state.apply(header, core.read_control(placed) if header.is_control else None)
        stable.append(state.last_stable_offset)
    return stable


def test_the_design_s_example() -> None:
    state = fresh()
    stable = feed(state, *script("P1 P1 P2 C1 P2 A2 P1 P2 P1 A1 C2"))
    assert state.aborted == [AbortedEntry(2, 2, 5, 6), AbortedEntry(1, 6, 9, 7)]
    assert stable == [0, 0, 0, 2, 2, 6, 6, 6, 6, 7, 11]
    # The document counts the LSO inclusively.
    assert [entry.last_stable_offset - 1 for entry in state.aborted] == [5, 6]
    assert [entry.marker_offset for entry in state.commits] == [3, 10]


@pytest.mark.parametrize(
    ("offset", "upto", "expected"), [(0, 5, [(2, 2)]), (5, 9, [(2, 2), (1, 6)])]
)
def test_the_design_s_fetches(offset: int, upto: int, expected: list[tuple[int, int]]) -> None:
    state = fresh()
    feed(state, *script("P1 P1 P2 C1 P2 A2 P1 P2 P1 A1 C2"))
    found = collect(state.aborted, offset, upto)
    assert [(entry.txn_id, entry.first_offset) for entry in found] == expected


def test_last_stable_offset_of_completed_transactions() -> None:
    """testLastStableOffsetCompletedTxn: the entry's LSO as each of three ends, all by abort."""
    starts = [OpenTxn(1, 992342, 0), OpenTxn(2, 992367, 0), OpenTxn(3, 992399, 0)]
    state = fresh(992414, 0, *starts)
    firsts = []
    for txn, at in ((1, 992414), (3, 992434), (2, 992512)):
        state.end = at
        feed(state, marker(ABORT, txn))
        firsts.append(state.open.first())
    assert [entry.last_stable_offset for entry in state.aborted] == [992367, 992367, 992513]
    assert firsts == [992367, 992367, None]


@pytest.mark.parametrize("kind", [COMMIT, ABORT])
def test_a_marker_of_an_empty_transaction_changes_nothing(kind: core.ControlType) -> None:
    state = fresh()
    assert feed(state, data(), marker(kind, 7), data(8), marker(kind, 7)) == [1, 2, 2, 2]
    assert (state.aborted, state.changes) == ([], 1)
    assert [entry.txn_id for entry in state.commits] == [0]


def test_a_control_batch_without_a_transaction_opens_nothing() -> None:
    """Kafka's testAppendEmptyControlBatch."""
    state = fresh()
    assert feed(state, marker(FILLER, offsets=5)) == [5]
    assert state.open.first() is None


def test_decided_and_plain_batches_are_visible_at_once() -> None:
    state = fresh()
    assert feed(state, data(5, 3, decided=True), data(n=2)) == [3, 5]
    assert state.commits == [CommitEntry(0, 3, 5, 0, 0), CommitEntry(3, 2, 0, 3, 0)]
    assert state.changes == 0


def test_since_is_the_time_of_the_first_batch() -> None:
    state = fresh()
    feed(state, data(1, time=50), data(1, time=70))
    assert state.open.get(1) == OpenTxn(1, 0, 50)


# -- the low water mark ----------------------------------------------------------------


def test_a_batch_below_the_mark_is_aborted_where_it_stands() -> None:
    state = fresh()
    stable = feed(state, *script("P5 C5"), marker(COMMIT, 9, mark=6), data(5, 3), data(5))
    assert stable == [0, 2, 3, 6, 7]
    assert state.aborted == [AbortedEntry(5, 3, 5, 6), AbortedEntry(5, 6, 6, 7)]
    assert [entry.first_offset for entry in state.commits] == [0]


def test_a_late_batch_beside_an_open_transaction() -> None:
    state = fresh()
    feed(state, data(7), marker(FILLER, mark=6), data(5))
    assert state.aborted == [AbortedEntry(5, 2, 2, 0)]
    assert state.last_stable_offset == 0


def test_a_mark_ends_what_opened_again_below_it() -> None:
    state = fresh()
    stable = feed(state, *script("P5 C5 P5 P8"), marker(COMMIT, 8, mark=6), data(5))
    assert stable == [0, 2, 2, 2, 5, 6]
    assert state.aborted == [AbortedEntry(5, 2, 4, 3), AbortedEntry(5, 5, 5, 6)]
    assert [(entry.txn_id, entry.first_offset) for entry in state.commits] == [(5, 0), (8, 3)]


def test_several_that_one_mark_ends_stop_no_search_too_early() -> None:
    """Were each of them given the LSO behind the marker, a fetch of [0, 2) would miss 3."""
    state = fresh()
    feed(state, *script("P1 P3 P2 P9"), marker(ABORT, 2, mark=5))
    assert [entry[:3] for entry in state.aborted] == [(1, 0, 4), (3, 1, 4), (2, 2, 4)]
    assert [entry.last_stable_offset for entry in state.aborted] == [1, 2, 3]
    assert [entry.txn_id for entry in collect(state.aborted, 0, 2)] == [1, 3]


def test_the_mark_never_falls() -> None:
    state = fresh()
    feed(state, marker(FILLER, mark=9), marker(FILLER, mark=3), data(5))
    assert state.low_water_mark == 9
    assert [entry.txn_id for entry in state.aborted] == [5]


def test_a_mark_spares_the_transaction_that_it_commits() -> None:
    state = fresh()
    feed(state, data(5), marker(COMMIT, 5, mark=8))
    assert state.aborted == []
    assert state.commits == [CommitEntry(1, 1, 5, 0, 0)]
