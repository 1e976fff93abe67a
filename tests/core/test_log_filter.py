"""The READ_COMMITTED filter: the design's examples, Kafka's cases, and random logs."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import log_reference as reference
from txnkv.core import (
    CommittedFilter,
    ControlType,
    CoreError,
    Spans,
    all_data,
    crc32c,
    decided,
    decode,
    encode_batch,
    encode_control,
    place,
)

END = 1 << 62


def data(txn_id, *values, decided=False):
    batch = pa.record_batch({"value": pa.array([v.encode() for v in values], pa.binary())})
    return encode_batch(batch, timestamp=1, txn_id=txn_id, decided=decided)


def abort(txn_id):
    return encode_control(ControlType.ABORT, txn_id=txn_id, timestamp=1)


def commit(txn_id):
    return encode_control(ControlType.COMMIT, txn_id=txn_id, timestamp=1)


def log(*batches, base_offset=0):
    return place(b"".join(batches), base_offset)


def shown(buf, spans, from_offset=0):
    """Offset -> value of what a reader gets."""
    batch = decode(buf, spans, from_offset)
    offsets, values = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
    return {o: v.decode() for o, v in zip(offsets, values, strict=True)}


# P1 P1 P2 P1(commit) P2 P2(abort) P1 P2 P1 P1(abort) P2(commit), of the design.
DESIGN = log(
    data(1, "a"),
    data(1, "b"),
    data(2, "c"),
    commit(1),
    data(2, "d"),
    abort(2),
    data(1, "e"),
    data(2, "f"),
    data(1, "g"),
    abort(1),
    commit(2),
)


def cut(buf, lo, hi):
    """Batches lo to hi of a log whose batches take one offset each, both included."""
    found = list(reference.batches(buf))
    return buf[found[lo].at : found[hi].at + found[hi].length]


def test_example_fetch_0_to_4():
    buf = cut(DESIGN, 0, 4)
    assert shown(buf, CommittedFilter().keep(buf, [(2, 2)], 0, 6)) == {0: "a", 1: "b"}


def test_example_fetch_5_to_8():
    buf = cut(DESIGN, 5, 8)
    assert shown(buf, CommittedFilter().keep(buf, [(2, 2), (1, 6)], 5, 11)) == {7: "f"}


def test_example_over_two_fetches_with_one_filter():
    reader = CommittedFilter()
    first, second = cut(DESIGN, 0, 4), cut(DESIGN, 5, 10)
    assert shown(first, reader.keep(first, [(2, 2)], 0, 11)) == {0: "a", 1: "b"}
    assert reader.held == (0, 1)  # inside of P2, which is aborted
    kept = reader.keep(second, [(2, 2), (1, 6)], 5, 11)
    assert shown(second, kept) == {7: "f"}
    assert kept.next_offset == 11
    assert reader.held == (0, 0)


# Cases of Kafka's FetcherTest.


def test_aborted_transaction_records_removed():
    buf = log(data(1000, *"abcdefghij"), abort(1000))
    kept = CommittedFilter().keep(buf, [(1000, 0)], 0, END)
    assert (len(kept), kept.rows, kept.next_offset) == (0, 0, 11)
    assert len(shown(buf, all_data(buf, 0, END))) == 10


def test_committed_transaction_records_included():
    buf = log(data(1000, *"abcdefghij"), commit(1000))
    assert len(shown(buf, CommittedFilter().keep(buf, [], 0, END))) == 10


def test_skipping_aborted_transactions_advances():
    buf = log(data(1, "a", "b"), abort(1))
    assert CommittedFilter().keep(buf, [(1, 0)], 0, END).next_offset == 3


def test_read_committed_with_committed_and_aborted_transactions():
    buf = log(
        data(1, "commit1-1", "commit1-2"), data(2, "abort2-1"), commit(1), data(2, "abort2-2"),
        abort(2), data(1, "abort1-1"), data(2, "commit2-1"), data(1, "abort1-2"), abort(1),
        commit(2),
    )  # fmt: skip
    kept = CommittedFilter().keep(buf, [(2, 2), (1, 6)], 0, END)
    assert shown(buf, kept) == {0: "commit1-1", 1: "commit1-2", 7: "commit2-1"}


def test_control_records_are_never_shown():
    buf = log(encode_control(ControlType.FILLER, timestamp=1, count=3), data(1, "a"), commit(1))
    for spans in (CommittedFilter().keep(buf, [], 0, END), all_data(buf, 0, END)):
        assert shown(buf, spans) == {3: "a"}
        assert spans.next_offset == 5


def gapped(batch, taken):
    """A batch that takes more offsets than it has messages, as compaction leaves them."""
    forged = bytearray(batch)
    forged[28:32] = taken.to_bytes(4, "little")
    forged[16:20] = crc32c(forged[20:]).to_bytes(4, "little")
    return bytes(forged)


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_the_position_passes_messages_that_are_missing(isolation):
    buf = place(gapped(data(0, "a", "b", "c"), 18), 37)
    read = all_data if isolation == "uncommitted" else CommittedFilter().keep
    args = () if isolation == "uncommitted" else ([],)
    spans = read(buf, *args, 37, END)
    assert shown(buf, spans) == {37: "a", 38: "b", 39: "c"}
    assert spans.next_offset == 55
    behind = read(buf, *args, 40, END)
    assert (len(behind), behind.next_offset) == (0, 55)


# -- what is ours --------------------------------------------------------------------------------


def test_nothing_behind_the_last_stable_offset():
    buf = log(data(0, "a"), data(1, "b"), data(0, "c"))
    kept = CommittedFilter().keep(buf, [], 0, 1)
    assert shown(buf, kept) == {0: "a"}
    assert kept.next_offset == 1


def test_a_decided_batch_needs_no_marker():
    buf = log(data(1, "a", decided=True), data(2, "b"), abort(2))
    assert shown(buf, CommittedFilter().keep(buf, [(2, 1)], 0, END)) == {0: "a"}


def test_what_no_marker_comes_for():
    buf = log(data(0, "a"), data(1, "b"), data(2, "c", decided=True), commit(1))
    spans = decided(buf, 0, END)
    assert shown(buf, spans) == {0: "a", 2: "c"}
    assert spans.next_offset == 4


def test_from_the_middle_of_a_batch():
    buf = log(data(0, "a", "b", "c"), data(0, "d"))
    kept = CommittedFilter().keep(buf, [], 2, END)
    assert shown(buf, kept, 2) == {2: "c", 3: "d"}
    assert len(CommittedFilter().keep(buf, [], 3, END)) == 1


def test_a_late_write_takes_nothing_from_what_was_committed():
    buf = log(data(1, "a"), commit(1), data(1, "late"), commit(2))
    reader = CommittedFilter()
    kept = reader.keep(buf, [(1, 2)], 0, END)
    assert shown(buf, kept) == {0: "a"}
    assert shown(buf, reader.keep(buf, [(1, 2)], 0, END)) == {0: "a"}  # back, without a reset


def test_seek_drops_the_state():
    buf = log(data(1, "a"), data(1, "b"), abort(1))
    reader = CommittedFilter()
    reader.keep(cut(buf, 0, 1), [(1, 0), (5, 100)], 0, END)
    assert reader.held == (1, 1)
    reader.reset()
    assert reader.held == (0, 0)


def test_the_same_list_again_and_again_takes_no_more_memory():
    reader, aborted = CommittedFilter(), [(i, 1000 + i) for i in range(1, 101)]
    for _ in range(1000):
        reader.keep(b"", aborted, 0, END)
    assert reader.held[0] <= 400


def test_memory_is_that_of_the_aborted_at_hand():
    """However many messages an open transaction has, and however many were aborted before."""
    reader, sizes = CommittedFilter(), set()
    open_batch = data(1, *["x"] * 100)
    for i in range(200):
        at, aborted = 1000 * i, 10 + i
        buf = log(open_batch, data(aborted, "y"), abort(aborted), base_offset=at)
        assert len(reader.keep(buf, [(aborted, at + 100)], at, END)) == 1
        sizes.add(reader.nbytes)
    assert max(sizes) <= 4096
    reader.keep(b"", [(i, END - 1) for i in range(1, 10_000)], 0, END)
    assert reader.nbytes > 100_000
    reader.reset()
    assert reader.nbytes == 0


def test_damage_leaves_the_state_alone():
    buf = log(data(1, "a"), abort(1))
    damaged = bytearray(buf)
    damaged[-22] ^= 1  # the marker's type: it would be a commit
    reader = CommittedFilter()
    for bad in (damaged, buf[:-1], buf + b"x", cut(buf, 1, 1) + cut(buf, 0, 0)):
        with pytest.raises(CoreError):
            reader.keep(bad, [(1, 0)], 0, END)
        assert reader.held == (0, 0)
    assert len(reader.keep(buf, [(1, 0)], 0, END)) == 0


def test_spans():
    buf = log(data(0, "a"), data(0, "b", "c"), data(0, "d"))
    spans = all_data(buf, 0, END)
    assert (len(spans), spans.rows) == (3, 4)
    assert list(spans) == [spans[0], spans[1], spans[2]]
    assert spans[-1] == (spans[2][0], len(buf) - spans[2][0])
    part = spans[1:]
    assert (len(part), list(part)) == (2, list(spans)[1:])
    chosen = Spans.of(list(part))
    assert list(chosen) == list(part)
    assert shown(buf, chosen) == {1: "b", 2: "c", 3: "d"}
    assert list(part[1:]) == [spans[2]]
    del spans
    assert shown(buf, part) == {1: "b", 2: "c", 3: "d"}
    assert len(part[5:]) == 0
    with pytest.raises(IndexError):
        part[2]
    with pytest.raises(ValueError, match="offset order"):
        part[::2]
    assert not part.has_chunks


# A transaction is a number and a fate; a log is a list of who writes next.
steps = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=40)


@given(steps, st.lists(st.integers(1, 8), min_size=1, max_size=40), st.randoms())
def test_any_log_in_any_fetches(steps, sizes, random):
    batches, open_, index, txn_id, at = [], {}, [], 10, 0
    for who, what in steps:
        if who == 0:
            batches.append(data(0, f"{at}"))
        elif who in open_ and what == 0:
            current, first, commits = open_.pop(who)
            batches.append(commit(current) if commits else abort(current))
            if not commits:
                index.append((current, first, at))
        else:
            if who not in open_:
                txn_id += 1
                open_[who] = (txn_id, at, random.random() < 0.6)
            batches.append(data(open_[who][0], f"{at}"))
        at += 1
    buf = log(*batches)
    stable = min((first for _, first, _ in open_.values()), default=at)
    reader, lo, got = CommittedFilter(), 0, []
    for size in (size for _ in range(at) for size in sizes):
        if lo >= len(batches):
            break
        hi = min(lo + size, len(batches))
        part = cut(buf, lo, hi - 1)
        aborted = [(txn, first) for txn, first, last in index if last >= lo and first < hi]
        random.shuffle(aborted)
        kept = reader.keep(part, aborted, lo, stable)
        got += decode(part, kept, lo).column("offset").to_pylist()
        assert kept.next_offset == max(lo, min(hi, stable))
        lo = hi
    wanted = reference.committed(buf, [(txn, first) for txn, first, _ in index], 0, stable)
    assert got == [message.offset for message in wanted]
