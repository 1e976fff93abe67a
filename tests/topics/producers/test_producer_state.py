"""The rules of idempotent producers: Kafka's ProducerStateManagerTest as far as it applies.

A script is a list of steps, each against the state that the step before left. A marker of
Kafka's that bumps an epoch is a takeover here: transactions are not bound to producers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.errors import CorruptionError, OutOfOrderSequenceError, ProducerFencedError
from txnkv.topics.write import producers
from txnkv.topics.write.producers import (
    KEPT_BATCHES,
    SEQUENCES,
    ProducerState,
    SentBatch,
    last_of,
)

MAX = SEQUENCES - 1
GAP, FENCED = OutOfOrderSequenceError, ProducerFencedError


@dataclass(frozen=True)
class Send:
    """A batch; `error` is what it meets, `same_as` the offset it is answered with."""

    epoch: int
    sequence: int
    offset: int = 0
    count: int = 1
    strict: bool = False
    error: type[Exception] | None = None
    same_as: int | None = None


@dataclass(frozen=True)
class Is:
    """The state that is expected after the steps before."""

    epoch: int
    first_sequence: int
    last_sequence: int
    last_offset: int | None = None


Step = Send | Is


def span(state: ProducerState) -> tuple[int, int, int]:
    """First and last sequence number, and last offset, of what is remembered; -1 of nothing."""
    if not state.batches:
        return -1, -1, -1
    first, last = state.batches[0], state.batches[-1]
    return first.first_sequence, last.last_sequence, last.last_offset


def send(state: ProducerState | None, step: Send) -> ProducerState | None:
    last = last_of(step.sequence, step.count)
    found = producers.duplicate_of(state, step.epoch, step.sequence, last, strict=step.strict)
    assert (found and found.first_offset) == step.same_as
    if found is not None:
        return state
    batch = SentBatch(step.sequence, last, step.offset, step.offset + step.count - 1, 0)
    return producers.appended(state, step.epoch, batch)


def take(state: ProducerState | None, step: Step) -> ProducerState | None:
    if isinstance(step, Is):
        assert state is not None
        first, last, offset = span(state)
        assert (state.epoch, first, last) == (step.epoch, step.first_sequence, step.last_sequence)
        assert step.last_offset in (None, offset)
        return state
    if step.error is not None:
        with pytest.raises(step.error):
            run([replace(step, error=None)], state)
        return state
    return send(state, step)


def run(steps: list[Step], state: ProducerState | None = None) -> ProducerState | None:
    for step in steps:
        state = take(state, step)
    return state


SCRIPTS: dict[str, list[Step]] = {
    "testBasicIdMapping": [
        Send(0, 0), Send(0, 1),
        # Kafka's manager alone refuses the repeated 1; its log answers it, as we do.
        Send(0, 5, error=GAP), Send(1, 0), Send(0, 0, error=FENCED),
    ],
    "testProducerSequenceWrapAround": [
        Send(15, MAX, 735), Send(15, 0, 1235), Is(15, MAX, 0, 1235),
    ],
    "testProducerSequenceWithWrapAroundBatchRecord": [
        Send(0, MAX - 10, 2000, count=21), Is(0, MAX - 10, 9, 2020), Send(0, 10, 2021),
    ],
    "testProducerSequenceInvalidWrapAround": [
        Send(15, MAX, 735), Send(15, 1, 1235, error=GAP),
    ],
    "testControlRecordBumpsProducerEpoch": [
        Send(0, 0, 0), Send(1, 0, 2), Is(1, 0, 0, 2),
    ],
    "updateProducerTransactionState": [
        Send(0, 0, 9), Send(0, 1, 16, count=5), Send(0, 6, 26, count=5), Is(0, 0, 10, 30),
    ],
    "testOutOfSequenceAfterControlRecordEpochBump": [
        Send(0, 0), Send(0, 1), Send(1, 2, error=GAP), Send(2, 2, error=GAP), Send(1, 0),
    ],
    "testAcceptAppendWithSequenceGapsOnReplica": [
        Send(0, 0, 0), Send(0, 3, 1, error=GAP), Send(0, 1, 1), Is(0, 0, 1, 1),
    ],
    "testRejectNonZeroSequenceForTransactionsV2WithEmptyState": [
        Send(0, 5, strict=True, error=GAP), Send(0, 0, strict=True),
    ],
    "testAllowNonZeroSequenceForTransactionsV1WithEmptyState": [Send(0, 5)],
    "testRejectNonZeroSequenceForDirectEpochBump": [
        Send(0, 0), Send(0, 1), Send(0, 2), Send(1, 5, error=GAP), Send(1, 0),
    ],
    "testDuplicateAppends": [
        *(Send(0, sequence, sequence) for sequence in range(6)), Send(0, 6, 6, count=3),
        Send(0, 6, 9, count=3, same_as=6),
        Send(0, 7, 9, count=2, error=GAP),  # a part of a batch
        Send(0, 2, 9, same_as=2),  # five back
        Send(0, 1, 9, error=GAP),  # six back: forgotten
        Send(0, 5, 9, same_as=5), Send(0, 9, 9), Is(0, 3, 9, 9),
    ],
    "testOldProducerEpoch": [Send(1, 0), Send(0, 0, 1, error=FENCED)],
    "a duplicate of an earlier epoch is fenced, not answered": [
        Send(0, 0, 0), Send(1, 0, 1), Send(0, 0, 2, error=FENCED),
    ],
}  # fmt: skip


@pytest.mark.parametrize("steps", SCRIPTS.values(), ids=SCRIPTS)
def test_script(steps: list[Step]) -> None:
    run(steps)


def test_a_check_and_an_append_leave_the_state_before_as_it_was() -> None:
    """Kafka: testPrepareUpdateDoesNotMutate."""
    before = run([Send(0, 0, 15, count=6)])
    assert before is not None
    copy = producers.unpack_state(producers.pack_state(before))
    after = run([Send(0, 6, 26, count=5)], before)
    assert before == copy
    assert after is not None
    assert span(after) == (0, 10, 30)


def test_truncation_takes_batches_away() -> None:
    """Kafka: testProducerIdMapTruncateTo: up to 2, then up to 1, then all."""
    state = run([Send(0, sequence, sequence) for sequence in range(3)])
    assert state is not None
    for offset in (2, 1):
        state = producers.truncated(state, offset)
        assert span(state)[1:] == (offset - 1, offset - 1)
    run([Send(0, 2, error=GAP), Send(0, 1, 1)], state)
    state = producers.truncated(state, 0)
    run([Is(0, -1, -1), Send(0, 1, error=GAP), Send(0, 0)], state)


def test_truncation_takes_a_batch_that_reaches_the_offset() -> None:
    state = run([Send(0, 0, 0, count=4), Send(0, 4, 4, count=4)])
    assert state is not None
    assert producers.truncated(state, 8) == state
    assert producers.truncated(state, 7).last_sequence == 3


def test_one_that_is_forgotten_may_go_on_anywhere() -> None:
    run([Send(0, 1)], None)


@pytest.mark.parametrize(
    "state",
    [
        ProducerState(2, (SentBatch(-1, 1, 2, 5, -1),), -1),
        ProducerState(12, (), 123456),
        ProducerState(65535, tuple(SentBatch(i, i, i, i, i) for i in range(KEPT_BATCHES)), 1),
    ],
)
def test_bytes_and_back(state: ProducerState) -> None:
    """Kafka: testReadWriteSnapshot."""
    assert producers.unpack_state(producers.pack_state(state)) == state


def test_the_bytes_are_frozen() -> None:
    state = ProducerState(3, (SentBatch(5, 9, 100, 104, 7), SentBatch(10, 10, 112, 112, 8)), 8)
    assert producers.pack_state(state).hex(" ", 8) == (
        "0300020000000000 0800000000000000 "
        "0500000009000000 6400000000000000 6800000000000000 0700000000000000 "
        "0a0000000a000000 7000000000000000 7000000000000000 0800000000000000"
    )


@pytest.mark.parametrize("cut", [0, 1, 15, 17, 40])
def test_damaged_bytes_are_refused(cut: int) -> None:
    """Kafka: testLoadFrom{Empty,Truncated,Corrupt}SnapshotFile."""
    whole = producers.pack_state(ProducerState(1, (SentBatch(0, 0, 0, 0, 0),), 0))
    with pytest.raises(CorruptionError, match="Restore"):
        producers.unpack_state(whole[:cut])
    with pytest.raises(CorruptionError):
        producers.unpack_state(bytes([255]) * len(whole))


@given(
    st.lists(
        st.tuples(st.integers(min_value=1, max_value=4), st.integers(min_value=0, max_value=9)),
        max_size=40,
    ),
    st.sampled_from([0, MAX - 7]),
)
def test_a_log_has_each_sequence_once_and_in_order(
    sends: list[tuple[int, int]], start: int
) -> None:
    """Batches of 1 to 4 messages, each sent again up to nine batches later: against a list."""
    log: list[int] = []
    sent: list[tuple[int, int]] = []
    state: ProducerState | None = None
    sequence = start
    for count, back in sends:
        batch = SentBatch(sequence, last_of(sequence, count), len(log), len(log) + count - 1, 0)
        assert producers.duplicate_of(state, 0, *batch[:2]) is None
        state = producers.appended(state, 0, batch)
        sent.append((batch.first_sequence, batch.last_sequence))
        log += [(sequence + i) % SEQUENCES for i in range(count)]
        sequence = producers.following(sequence, count)
        if back < len(sent):
            first, last = sent[-1 - back]
            if back < KEPT_BATCHES:
                found = producers.duplicate_of(state, 0, first, last)
                assert found is not None
                assert log[found.first_offset] == first
            else:
                with pytest.raises(OutOfOrderSequenceError):
                    producers.duplicate_of(state, 0, first, last)
    assert log == [(start + i) % SEQUENCES for i in range(len(log))]
