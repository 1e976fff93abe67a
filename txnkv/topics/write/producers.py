"""Producers in status.db: who may send under a name, and what each has sent.

An idempotent producer numbers the messages it sends to a partition: a batch carries the
producer's id, its epoch and the sequence number of its first message. Of each producer the
partition remembers the epoch and the last five batches.

    remembered   epoch 3   [0..4 @ 100] [5..9 @ 105] [10..10 @ 112]
    comes        epoch 3   sequence 11          appended: it follows
                 epoch 3   sequences 5..9       a duplicate: answered with offset 105
                 epoch 3   sequence 12          OutOfOrderSequenceError: 11 was lost on the way
                 epoch 4   sequence 0           appended: a new epoch begins at 0
                 epoch 2   anything             ProducerFencedError: a later producer took over

Sequence numbers go from 0 to 2**31 - 1, then on at 0. The rules (`ProducerState` and its functions)
are pure; the rows do the I/O.

Of each producer there is one row, and one for each partition that it sent to.
Both change in the SQLite transaction that commits its messages, so "the messages are there" and
"these sequence numbers have come" are one fact, after any crash:

    validate   is it still the one of its name?  are these batches new, or duplicates, or a gap?
    write      offsets are taken, the states move on                 (one SQLite transaction)

A named producer fences its elder: making one under a name that is there raises the epoch of the
row, and from that commit on nothing of the elder is taken.

The row also counts the messages that all who had the name have sent. A process that was killed
does not know which of its last messages are there; whoever takes over the name does, for its
making fenced the elder and read the count.

What nobody uses is forgotten. A state goes after a day: the producer may then go on with
any sequence number. `began` of its row becomes 0 with that, which holds when the clock goes back,
too. A name goes a week after its last use, when its states are gone. An elder that comes back after
that week finds no row of its name, and is taken for the one of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import apsw

from txnkv.coordinator import Lease, aging_micros, one
from txnkv.errors import CorruptionError, OutOfOrderSequenceError, ProducerFencedError
from txnkv.storage import Store, declare_fault_point, fault_point

KEPT_BATCHES: Final = 5
"""Batches that are remembered of a producer in a partition: the latest ones."""

SEQUENCES: Final = 1 << 31
NO_SEQUENCE: Final = -1
_PENDING: Final = -1
"""The offsets of a batch that takes them in this commit."""

IDLE_SECONDS: Final = 86_400.0
"""After so long without a batch a producer is forgotten."""

_STATE = struct.Struct("<HHIq")  # epoch, number of batches, 0, last timestamp
_BATCH = struct.Struct("<iiQQq")  # first and last sequence, first and last offset, timestamp


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
        last_timestamp: of its last batch, in microseconds.
    """

    epoch: int
    batches: tuple[SentBatch, ...] = ()
    last_timestamp: int = 0

    @property
    def last_sequence(self) -> int:
        """The last sequence number of the latest batch; -1 when there is none."""
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE


# -- sequence numbers ------------------------------------------------------------------


def following(sequence: int, count: int = 1) -> int:
    """The sequence number `count` after this one; -1 stands for "before the first"."""
    return (sequence + count) % SEQUENCES


def last_of(first_sequence: int, count: int) -> int:
    """The sequence number of the last of `count` messages."""
    return following(first_sequence, count - 1)


# -- the rules -------------------------------------------------------------------------


def duplicate_of(
    state: ProducerState | None,
    epoch: int,
    first_sequence: int,
    last_sequence: int,
    *,
    strict: bool = False,
) -> SentBatch | None:
    """May this batch be appended?

    Args:
        state: what is remembered; None of a producer that is not known here.
        epoch: the batch's.
        first_sequence: of its first message.
        last_sequence: of its last one.
        strict: nothing can have been forgotten of this producer, so that one that is not known
            begins at sequence 0. Otherwise it may go on anywhere.

    Returns:
        None: append it. A batch: it is there already, under these offsets; append nothing.

    Raises:
        ProducerFencedError: a later epoch was seen; nothing is to be appended.
        OutOfOrderSequenceError: it leaves a gap, or repeats what is not remembered whole.
    """
    if state is None:
        if strict and first_sequence != 0:
            raise _gap(first_sequence, last_sequence, "this producer sent nothing before", 0)
        return None
    if epoch < state.epoch:
        raise fenced(epoch, state.epoch)
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
    """The state after a batch that `duplicate_of` has let through."""
    before = state.batches if state is not None and state.epoch == epoch else ()
    return ProducerState(epoch, (*before, batch)[-KEPT_BATCHES:], batch.timestamp)


def truncated(state: ProducerState, offset: int) -> ProducerState:
    """The state when all batches that reach `offset` are gone."""
    kept = [batch for batch in state.batches if batch.last_offset < offset]
    return replace(state, batches=tuple(kept))


def fenced(epoch: int, later: int) -> ProducerFencedError:
    return ProducerFencedError(
        f"this producer has epoch {epoch}, a later one of the same name has epoch {later}: "
        "nothing of this one is taken any more. Close it; if it is to go on, make a new producer"
    )


def _taken_over(name: str | None) -> ProducerFencedError:
    return ProducerFencedError(
        f"a later producer took over the name {name!r}: nothing of this one is taken any more. "
        "Close it; if it is to go on, make a new producer"
    )


def _gap(first: int, last: int, known: str, expected: int) -> OutOfOrderSequenceError:
    return OutOfOrderSequenceError(
        f"a batch with the sequence numbers {first} to {last} came, {known}: {expected} was to "
        "come. Nothing was appended; send what is missing first, or make a new producer"
    )


# -- as bytes --------------------------------------------------------------------------


def pack_state(state: ProducerState) -> bytes:
    """The state as it stands in status.db: 16 bytes and 32 for each batch."""
    head = _STATE.pack(state.epoch, len(state.batches), 0, state.last_timestamp)
    return head + b"".join(_BATCH.pack(*batch) for batch in state.batches)


def unpack_state(data: bytes) -> ProducerState:
    """Return the state that `pack_state` packed.

    Raises:
        CorruptionError: `pack_state` did not make `data`.
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


declare_fault_point("producer.registered", "a producer has its epoch, its elder is not told")
declare_fault_point("producer.checked", "a producer's batches are checked, not yet written")
declare_fault_point("producer.recorded", "a producer's states have moved on, COMMIT was not called")
declare_fault_point("producer.swept", "idle producers are forgotten, COMMIT was not called")

EPOCHS: Final = 1 << 16
"""The header of a batch has 16 bits for the epoch; after the last one the name gets a new id."""

NAME_SECONDS: Final = 7 * 86_400.0
"""Seconds for which a producer's name is kept after its last use."""

_SWEEP_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class ProducerId:
    """One producer, as its batches name it.

    Attributes:
        topic_id: of the topic it sends to.
        name: None for one that nobody can fence.
        id: never given again in this store.
        epoch: how many had this name and id before.
        sent: messages of those who had the name before; they are durable.
    """

    topic_id: int
    name: str | None
    id: int
    epoch: int
    sent: int


class Sending(NamedTuple):
    """The sequence numbers of messages that a producer sends to a partition."""

    partition_id: int
    first_sequence: int
    last_sequence: int


def register(cur: apsw.Cursor, topic_id: int, name: str | None, now: int) -> ProducerId:
    """Make a producer. Its elder of the same name, if there is one, is fenced.

    Args:
        cur: of a write.
        topic_id: the topic it sends to.
        name: None for one without.
        now: microseconds of the store's clock.
    """
    found = None if name is None else _by_name(cur, topic_id, name)
    sent = 0
    if found is not None:
        id, epoch, sent, _ = found
        if epoch + 1 < EPOCHS:
            cur.execute(
                "UPDATE producers SET epoch = ?, began = ?, last_used = ? WHERE id = ?",
                (epoch + 1, now, now, id),
            )
            fault_point("producer.registered")
            return ProducerId(topic_id, name, id, epoch + 1, sent)
        _forget(cur, id)
    cur.execute(
        "INSERT INTO producers (topic_id, name, epoch, began, last_used, sent) "
        "VALUES (?, ?, 0, ?, ?, ?)",
        (topic_id, name, now, now, sent),
    )
    fault_point("producer.registered")
    return ProducerId(topic_id, name, cur.connection.last_insert_rowid(), 0, sent)


def resume(
    cur: apsw.Cursor, topic_id: int, name: str, known: Sequence[int], now: int
) -> ProducerId:
    """The producer that had this id and epoch, in a new epoch; another one where its name is
    forgotten.

    Raises:
        ProducerFencedError: a later one of its name took over.
    """
    found = _by_name(cur, topic_id, name)
    if found is not None and [*found[:2]] != [*known]:
        raise _taken_over(name)
    return register(cur, topic_id, name, now)


def adopt(cur: apsw.Cursor, topic_id: int, name: str, epoch: int, now: int) -> ProducerId:
    """Return the producer of a name, of which somebody else gives out the epochs.

    Nothing is known of what it sent elsewhere, so it may begin with any sequence number.

    Raises:
        ProducerFencedError: a later epoch was seen.
    """
    found = _by_name(cur, topic_id, name)
    if found is None:
        cur.execute(
            "INSERT INTO producers (topic_id, name, epoch, began, last_used, sent) "
            "VALUES (?, ?, ?, 0, ?, 0)",
            (topic_id, name, epoch, now),
        )
        return ProducerId(topic_id, name, cur.connection.last_insert_rowid(), epoch, 0)
    id, known, sent, _ = found
    if known > epoch:
        raise fenced(epoch, known)
    cur.execute(
        "UPDATE producers SET epoch = ?, began = 0, last_used = ? WHERE id = ?", (epoch, now, id)
    )
    return ProducerId(topic_id, name, id, epoch, sent)


def renew(cur: apsw.Cursor, producer: ProducerId, now: int) -> ProducerId:
    """The same producer in a new epoch, whose sequence numbers begin at 0.

    Raises:
        ProducerFencedError: a later one of its name took over.
    """
    require_current(cur, producer, now)
    if producer.name is None:
        _forget(cur, producer.id)
    return register(cur, producer.topic_id, producer.name, now)


def require_current(cur: apsw.Cursor, producer: ProducerId, now: int) -> int:
    """Refuse a producer that a later one of its name took over from.

    Returns:
        When it was made; 0 where something of it may be forgotten since.

    Raises:
        ProducerFencedError: one did.
    """
    if producer.name is None:
        found = cur.execute(
            "SELECT id, epoch, sent, began FROM producers WHERE id = ?", (producer.id,)
        ).fetchone()
    else:
        found = _by_name(cur, producer.topic_id, producer.name)
    if found is None:
        cur.execute(
            "INSERT INTO producers VALUES (?, ?, ?, ?, 0, ?, ?)",
            (
                producer.id,
                producer.topic_id,
                producer.name,
                producer.epoch,
                now,
                producer.sent,
            ),
        )
        return 0
    id, epoch, _, began = found
    if (id, epoch) > (producer.id, producer.epoch):
        if id == producer.id:
            raise fenced(producer.epoch, epoch)
        raise _taken_over(producer.name)
    if (id, epoch) < (producer.id, producer.epoch):  # an elder that came back after its week
        _forget(cur, id)
        return require_current(cur, producer, now)
    return int(began)


def check(
    cur: apsw.Cursor, producer: ProducerId, sending: Sequence[Sending], now: int
) -> list[SentBatch | None]:
    """May these batches be appended? Inside the SQLite transaction that commits them.

    Returns:
        For each: None, or as what it is there already.

    Raises:
        ProducerFencedError: a later producer of the name took over.
        OutOfOrderSequenceError: one leaves a gap, or comes twice; nothing is to be appended.
    """
    began = require_current(cur, producer, now)
    strict = began != 0 and now - began <= int(IDLE_SECONDS * 1e6)
    states: dict[int, ProducerState | None] = {}
    answers = []
    for partition_id, first, last in sending:
        if partition_id not in states:
            states[partition_id] = find(cur, producer.id, partition_id)
        state = states[partition_id]
        there = duplicate_of(state, producer.epoch, first, last, strict=strict)
        if there is not None and there.first_offset == _PENDING:
            raise OutOfOrderSequenceError(f"sequence number {first} comes twice in one commit")
        answers.append(there)
        if there is None:  # what follows it in this commit is checked against it
            pending = SentBatch(first, last, _PENDING, _PENDING, now)
            states[partition_id] = appended(state, producer.epoch, pending)
    fault_point("producer.checked")
    return answers


def record(
    cur: apsw.Cursor, producer: ProducerId, sent: Sequence[tuple[int, SentBatch]], messages: int
) -> None:
    """Remember what `check` let through.

    Args:
        cur: of the same SQLite transaction.
        producer: who sends.
        sent: by partition id, with the offsets that the batches were given.
        messages: how many these are.
    """
    now = 0
    for partition_id, batch in sent:
        state = find(cur, producer.id, partition_id)
        state = appended(state, producer.epoch, batch)
        save(cur, producer.id, partition_id, state)
        now = batch.timestamp
    cur.execute(
        "UPDATE producers SET sent = sent + ?, last_used = ? WHERE id = ?",
        (messages, now, producer.id),
    )
    fault_point("producer.recorded")


# -- rows ------------------------------------------------------------------------------


def find(cur: apsw.Cursor, producer_id: int, partition_id: int) -> ProducerState | None:
    """Return what a partition remembers of a producer; None when that is nothing.

    Raises:
        CorruptionError: it cannot be read.
    """
    found = cur.execute(
        "SELECT state FROM producer_states WHERE producer_id = ? AND partition_id = ?",
        (producer_id, partition_id),
    ).fetchone()
    return None if found is None else unpack_state(found[0])


def of_partition(store: Store, partition_id: int) -> list[tuple[str | None, int, ProducerState]]:
    """Name, id and state of the producers that have sent to a partition, and are remembered."""
    with store.status.read() as cur:
        found: list[Any] = cur.execute(
            "SELECT name, id, state FROM producer_states JOIN producers ON id = producer_id "
            "WHERE partition_id = ? ORDER BY id",
            (partition_id,),
        ).fetchall()
    return [(name, id, unpack_state(state)) for name, id, state in found]


def save(cur: apsw.Cursor, producer_id: int, partition_id: int, state: ProducerState) -> None:
    """Put a state in the place of the one before."""
    cur.execute(
        "INSERT OR REPLACE INTO producer_states VALUES (?, ?, ?, ?)",
        (producer_id, partition_id, state.last_timestamp, pack_state(state)),
    )


def take_back(cur: apsw.Cursor, producer_id: int, partition_id: int, batch: SentBatch) -> None:
    """Forget the last batch of a producer, if it is this one: it took its offsets, and no more."""
    state = find(cur, producer_id, partition_id)
    if state is None or not state.batches or state.batches[-1] != batch:
        return
    if state.batches[1:]:
        save(cur, producer_id, partition_id, replace(state, batches=state.batches[:-1]))
        return
    cur.execute(
        "DELETE FROM producer_states WHERE producer_id = ? AND partition_id = ?",
        (producer_id, partition_id),
    )


def _by_name(cur: apsw.Cursor, topic_id: int, name: str) -> tuple[int, int, int, int] | None:
    found = cur.execute(
        "SELECT id, epoch, sent, began FROM producers WHERE topic_id = ? AND name = ?",
        (topic_id, name),
    ).fetchone()
    return None if found is None else (found[0], found[1], found[2], found[3])


def _forget(cur: apsw.Cursor, producer_id: int) -> None:
    cur.execute("DELETE FROM producer_states WHERE producer_id = ?", (producer_id,))
    cur.execute("DELETE FROM producers WHERE id = ?", (producer_id,))


# -- looking after ---------------------------------------------------------------------


def anything_idle(cur: apsw.Cursor, now: int) -> bool:
    """Tell whether `sweep` would find something."""
    (found,) = one(
        cur,
        "SELECT EXISTS (SELECT 1 FROM producer_states WHERE last_timestamp < ?) "
        "OR EXISTS (SELECT 1 FROM producers WHERE last_used < ?)",
        (_before(now, IDLE_SECONDS), _before(now, NAME_SECONDS)),
    )
    return bool(found)


def sweep(cur: apsw.Cursor, now: int) -> int:
    """Forget what was not used for long; some thousands at once.

    Returns:
        How many rows went.
    """
    idle = cur.execute(
        "DELETE FROM producer_states WHERE (producer_id, partition_id) IN (SELECT producer_id, "
        "partition_id FROM producer_states WHERE last_timestamp < ? LIMIT ?) RETURNING producer_id",
        (_before(now, IDLE_SECONDS), _SWEEP_ROWS),
    ).fetchall()
    cur.executemany("UPDATE producers SET began = 0 WHERE id = ?", set(idle))
    names = cur.execute(
        "DELETE FROM producers WHERE id IN (SELECT id FROM producers WHERE last_used < ? AND NOT "
        "EXISTS (SELECT 1 FROM producer_states WHERE producer_id = producers.id) LIMIT ?) "
        "RETURNING 1",
        (_before(now, NAME_SECONDS), _SWEEP_ROWS),
    ).fetchall()
    fault_point("producer.swept")
    return len(idle) + len(names)


def _before(now: int, seconds: float) -> int:
    return now - int(seconds * 1e6)


def forget_idle(store: Store, lease: Lease) -> int:
    """Forget producers that nobody used for long. Answers how many rows went."""
    gone = 0
    while True:
        with store.status.read() as cur:
            now = aging_micros(cur)
            if not anything_idle(cur, now):
                return gone
        with store.status.write() as cur:
            lease.confirm(cur)
            found = sweep(cur, now)
        gone += found
        if not found:
            return gone
