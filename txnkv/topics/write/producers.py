"""Producers in status.db: who may send under a name, and what each has sent.

Of each producer there is one row, and one for each partition that it sent to (`producer_state`).
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
any sequence number. A name goes a week after its last use, when its states are gone. An elder
that comes back after that week finds no row of its name, and is taken for the one of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import apsw

from txnkv.coordinator import Lease, one
from txnkv.errors import ProducerFencedError
from txnkv.storage import Store, clock, declare_fault_point, fault_point
from txnkv.topics.write import producer_state
from txnkv.topics.write.producer_state import IDLE_SECONDS, ProducerState, SentBatch

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
        began: when it was made, microseconds of the store's clock.
        sent: messages of those who had the name before; they are durable.
    """

    topic_id: int
    name: str | None
    id: int
    epoch: int
    began: int
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
        id, epoch, sent = found
        if epoch + 1 < EPOCHS:
            cur.execute(
                "UPDATE producers SET epoch = ?, began = ?, last_used = ? WHERE id = ?",
                (epoch + 1, now, now, id),
            )
            fault_point("producer.registered")
            return ProducerId(topic_id, name, id, epoch + 1, now, sent)
        _forget(cur, id)
    cur.execute(
        "INSERT INTO producers (topic_id, name, epoch, began, last_used, sent) "
        "VALUES (?, ?, 0, ?, ?, ?)",
        (topic_id, name, now, now, sent),
    )
    fault_point("producer.registered")
    return ProducerId(topic_id, name, cur.connection.last_insert_rowid(), 0, now, sent)


def renew(cur: apsw.Cursor, producer: ProducerId, now: int) -> ProducerId:
    """The same producer in a new epoch, whose sequence numbers begin at 0.

    Raises:
        ProducerFencedError: a later one of its name took over.
    """
    require_current(cur, producer, now)
    if producer.name is None:
        _forget(cur, producer.id)
    return register(cur, producer.topic_id, producer.name, now)


def require_current(cur: apsw.Cursor, producer: ProducerId, now: int) -> None:
    """Refuse a producer that a later one of its name took over from.

    Raises:
        ProducerFencedError: one did.
    """
    if producer.name is None:
        found = cur.execute(
            "SELECT id, epoch, sent FROM producers WHERE id = ?", (producer.id,)
        ).fetchone()
    else:
        found = _by_name(cur, producer.topic_id, producer.name)
    if found is None:
        cur.execute(
            "INSERT INTO producers VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                producer.id,
                producer.topic_id,
                producer.name,
                producer.epoch,
                producer.began,
                now,
                producer.sent,
            ),
        )
        return
    id, epoch, _ = found
    if (id, epoch) > (producer.id, producer.epoch):
        if id == producer.id:
            raise producer_state.fenced(producer.epoch, epoch)
        raise ProducerFencedError(
            f"a later producer took over the name {producer.name!r}: nothing of this one is taken "
            "any more. Close it; if it is to go on, make a new producer"
        )
    if (id, epoch) < (producer.id, producer.epoch):  # an elder that came back after its week
        _forget(cur, id)
        require_current(cur, producer, now)


def check(
    cur: apsw.Cursor, producer: ProducerId, sending: Sequence[Sending], now: int
) -> list[SentBatch | None]:
    """May these batches be appended? Inside the SQLite transaction that commits them.

    Returns:
        For each: None, or as what it is there already.

    Raises:
        ProducerFencedError: a later producer of the name took over.
        OutOfOrderSequenceError: one of them leaves a gap; nothing is to be appended.
    """
    require_current(cur, producer, now)
    strict = now - producer.began <= int(IDLE_SECONDS * 1e6)
    states: dict[int, ProducerState | None] = {}
    answers = []
    for partition_id, first, last in sending:
        if partition_id not in states:
            states[partition_id] = find(cur, producer.id, partition_id)
        state = states[partition_id]
        there = producer_state.check(state, producer.epoch, first, last, strict=strict)
        answers.append(there)
        if there is None:  # what follows it in this commit is checked against it
            pending = SentBatch(first, last, 0, 0, now)
            states[partition_id] = producer_state.appended(state, producer.epoch, pending)
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
        state = producer_state.appended(state, producer.epoch, batch)
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
    return None if found is None else producer_state.unpack(found[0])


def save(cur: apsw.Cursor, producer_id: int, partition_id: int, state: ProducerState) -> None:
    """Put a state in the place of the one before."""
    cur.execute(
        "INSERT OR REPLACE INTO producer_states VALUES (?, ?, ?, ?)",
        (producer_id, partition_id, state.last_timestamp, producer_state.pack(state)),
    )


def _by_name(cur: apsw.Cursor, topic_id: int, name: str) -> tuple[int, int, int] | None:
    found = cur.execute(
        "SELECT id, epoch, sent FROM producers WHERE topic_id = ? AND name = ?",
        (topic_id, name),
    ).fetchone()
    return None if found is None else (found[0], found[1], found[2])


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
        "partition_id FROM producer_states WHERE last_timestamp < ? LIMIT ?) RETURNING 1",
        (_before(now, IDLE_SECONDS), _SWEEP_ROWS),
    ).fetchall()
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


def truncate(cur: apsw.Cursor, partition_id: int, offset: int, upto: int) -> None:
    """Forget the batches in [offset, upto): they are gone from the log."""
    rows = cur.execute(
        "SELECT producer_id, state FROM producer_states WHERE partition_id = ?", (partition_id,)
    ).fetchall()
    for producer_id, data in cast(list[tuple[int, bytes]], rows):
        state = producer_state.unpack(data)
        left = producer_state.truncated(state, offset, upto)
        if left != state:
            save(cur, producer_id, partition_id, left)


def forget_idle(store: Store, lease: Lease) -> int:
    """Forget producers that nobody used for long. Answers how many rows went."""
    now = clock.now_micros()
    gone = 0
    while True:
        with store.status.read() as cur:
            if not anything_idle(cur, now):
                return gone
        with store.status.write() as cur:
            lease.confirm(cur)
            found = sweep(cur, now)
        gone += found
        if not found:
            return gone
