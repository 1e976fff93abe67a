"""The state of a producer in one partition, and the rules for what it may append next.

An idempotent producer numbers the messages it sends to a partition: a batch carries the
producer's id, its epoch and the sequence number of its first message. Of each producer the
partition remembers the epoch and the last five batches.

    remembered   epoch 3   [0..4 @ 100] [5..9 @ 105] [10..10 @ 112]
    comes        epoch 3   sequence 11          appended: it follows
                 epoch 3   sequences 5..9       a duplicate: answered with offset 105
                 epoch 3   sequence 12          OutOfOrderSequenceError: 11 was lost on the way
                 epoch 4   sequence 0           appended: a new epoch begins at 0
                 epoch 2   anything             ProducerFencedError: a later producer took over

Sequence numbers go from 0 to 2**31 - 1, then on at 0. Nothing here does I/O: the rules are pure,
the rows are in `producers`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple

from txnkv.errors import CorruptionError, OutOfOrderSequenceError, ProducerFencedError

KEPT_BATCHES: Final = 5
"""Batches that are remembered of a producer in a partition: the latest ones."""

SEQUENCES: Final = 1 << 31
NO_SEQUENCE: Final = -1

IDLE_SECONDS: Final = 86_400.0
"""After so long without a batch a producer is forgotten."""

_STATE = struct.Struct("<HHIq")  # epoch, number of batches, 0, last timestamp
_BATCH = struct.Struct("<iiQQq")  # first and last sequence, first and last offset, timestamp


class Origin(Enum):
    """The sender of a batch, and so what is checked of it."""

    CLIENT = "client"
    """A producer: epoch and sequence."""
    COORDINATOR = "coordinator"
    """The store itself: the epoch alone."""
    REPLICATION = "replication"
    """A follower that copies a log: nothing, the source has checked."""


class SentBatch(NamedTuple):
    """One appended batch. Sequences and offsets of its first and its last message; timestamp in
    microseconds.
    """

    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int
    timestamp: int


@dataclass(frozen=True, slots=True)
class ProducerState:
    """A partition's memory of one producer. Never changed: each append makes a new one.

    Attributes:
        epoch: the highest that was seen.
        batches: the latest of this epoch, oldest first, at most `KEPT_BATCHES`.
        last_timestamp: of its last batch or takeover, in microseconds.
    """

    epoch: int
    batches: tuple[SentBatch, ...] = ()
    last_timestamp: int = 0

    @property
    def first_sequence(self) -> int:
        """The first sequence number of the oldest batch remembered; -1 when there is none."""
        return self.batches[0].first_sequence if self.batches else NO_SEQUENCE

    @property
    def last_sequence(self) -> int:
        """The last sequence number of the latest batch; -1 when there is none."""
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def last_offset(self) -> int:
        """The last offset of the latest batch; -1 when there is none."""
        return self.batches[-1].last_offset if self.batches else -1


# -- sequence numbers ------------------------------------------------------------------


def following(sequence: int, count: int = 1) -> int:
    """The sequence number `count` after this one; -1 stands for "before the first"."""
    return (sequence + count) % SEQUENCES


def last_of(first_sequence: int, count: int) -> int:
    """The sequence number of the last of `count` messages."""
    return following(first_sequence, count - 1)


# -- the rules -------------------------------------------------------------------------


def check(
    state: ProducerState | None,
    epoch: int,
    first_sequence: int,
    last_sequence: int,
    *,
    origin: Origin = Origin.CLIENT,
    strict: bool = False,
) -> SentBatch | None:
    """May this batch be appended?

    Args:
        state: what is remembered; None of a producer that is not known here.
        epoch: the batch's.
        first_sequence: of its first message.
        last_sequence: of its last one.
        origin: who appends.
        strict: nothing can have been forgotten of this producer, so that one that is not known
            begins at sequence 0. Otherwise it may go on anywhere.

    Returns:
        None: append it. A batch: it is there already, under these offsets; append nothing.

    Raises:
        ProducerFencedError: a later epoch was seen; nothing is to be appended.
        OutOfOrderSequenceError: it leaves a gap, or repeats what is not remembered whole.
    """
    if origin is Origin.REPLICATION:
        return None
    if state is None:
        if strict and origin is Origin.CLIENT and first_sequence != 0:
            raise _gap(first_sequence, last_sequence, "this producer sent nothing before", 0)
        return None
    if epoch < state.epoch:
        raise fenced(epoch, state.epoch)
    if origin is Origin.COORDINATOR:
        return None
    if epoch > state.epoch:
        if first_sequence != 0:
            raise _gap(first_sequence, last_sequence, f"epoch {epoch} is a new one", 0)
        return None
    for batch in state.batches:
        if (batch.first_sequence, batch.last_sequence) == (first_sequence, last_sequence):
            return batch
    expected = following(state.last_sequence)
    if first_sequence != expected:
        known = f"the last that came is {state.last_sequence}"
        raise _gap(first_sequence, last_sequence, known, expected)
    return None


def appended(state: ProducerState | None, epoch: int, batch: SentBatch) -> ProducerState:
    """The state after a batch that `check` has let through."""
    before = state.batches if state is not None and state.epoch == epoch else ()
    return ProducerState(epoch, (*before, batch)[-KEPT_BATCHES:], batch.timestamp)


def taken_over(state: ProducerState | None, epoch: int, timestamp: int) -> ProducerState:
    """The state after a producer of a new epoch took over.

    Raises:
        ProducerFencedError: a later one did already.
    """
    if state is None:
        return ProducerState(epoch, (), timestamp)
    if epoch < state.epoch:
        raise fenced(epoch, state.epoch)
    batches = state.batches if epoch == state.epoch else ()
    return ProducerState(epoch, batches, timestamp)


def truncated(state: ProducerState, offset: int, upto: int | None = None) -> ProducerState:
    """The state when all batches that reach `offset`, and begin below `upto`, are gone."""
    kept = [
        batch
        for batch in state.batches
        if batch.last_offset < offset or (upto is not None and batch.first_offset >= upto)
    ]
    return replace(state, batches=tuple(kept))


def expired(last_timestamp: int, now: int, idle_seconds: float = IDLE_SECONDS) -> bool:
    """Tell whether a producer is to be forgotten; times in microseconds."""
    return now - last_timestamp > int(idle_seconds * 1e6)


def fenced(epoch: int, later: int) -> ProducerFencedError:
    return ProducerFencedError(
        f"this producer has epoch {epoch}, a later one of the same name has epoch {later}: "
        "nothing of this one is taken any more. Close it; if it is to go on, make a new producer"
    )


def _gap(first: int, last: int, known: str, expected: int) -> OutOfOrderSequenceError:
    return OutOfOrderSequenceError(
        f"a batch with the sequence numbers {first} to {last} came, {known}: {expected} was to "
        "come. Nothing was appended; send what is missing first, or make a new producer"
    )


# -- as bytes --------------------------------------------------------------------------


def pack(state: ProducerState) -> bytes:
    """The state as it stands in status.db: 16 bytes and 32 for each batch."""
    head = _STATE.pack(state.epoch, len(state.batches), 0, state.last_timestamp)
    return head + b"".join(_BATCH.pack(*batch) for batch in state.batches)


def unpack(data: bytes) -> ProducerState:
    """Return the state that `pack` packed.

    Raises:
        CorruptionError: `pack` did not make `data`.
    """
    if len(data) < _STATE.size:
        raise _damaged(data)
    epoch, count, zero, last = _STATE.unpack_from(data)
    if zero != 0 or count > KEPT_BATCHES or len(data) != _STATE.size + count * _BATCH.size:
        raise _damaged(data)
    batches = (SentBatch(*fields) for fields in _BATCH.iter_unpack(data[_STATE.size :]))
    return ProducerState(epoch, tuple(batches), last)


def _damaged(data: bytes) -> CorruptionError:
    return CorruptionError(
        f"status.db, producer_states: {len(data)} bytes that are no producer state. "
        "Restore the store from a backup"
    )
