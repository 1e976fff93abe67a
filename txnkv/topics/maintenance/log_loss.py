"""Giving up what a damaged log has lost: fillers take its offsets, and it works again.

The next offset stays: no offset is given twice. What small commits have in the commit log, and what
is held of them, is not lost.
"""

from __future__ import annotations

from txnkv.coordinator import DAMAGE, Loss, held, payload, status_table
from txnkv.storage import Environment, mend
from txnkv.topics import topic_catalog
from txnkv.topics.log import LogOptions, PartitionLog, log_check
from txnkv.topics.partition import Opened, Partition
from txnkv.topics.partition_participants import KIND, end_strays
from txnkv.topics.sidecar import SideLogs, side_problems
from txnkv.topics.topics import Topics
from txnkv.topics.write import roll_forward


class _Aside(Partition):
    """A partition whose environment is aside."""

    def __init__(self, topics: Topics, partition: Partition, environment: Environment) -> None:
        super().__init__(topics.store, partition.topic, partition.number)
        side = None
        if partition.topic.buffer == "sidecar":
            side = SideLogs(environment, topics.store.environments, f"logs/{partition.id}")
        log = PartitionLog(environment, LogOptions(), None if side is None else side.expand)
        log.prepare()
        self._opened = Opened(environment, log, side)

    @property
    def exists(self) -> bool:
        """It was made."""
        return True


def accept_loss(topics: Topics, partition: Partition, *, really: bool) -> Loss:
    """Give up what a log lacks, or all of it where it is damaged.

    Args:
        topics: the topics.
        partition: a damaged one.
        really: else it is only looked at, and nothing changes.

    Raises:
        UnavailableError: another process has its files open.
    """
    store, name = topics.store, f"logs/{partition.id}"
    with store.maintenance():
        environment = store.environments.known(name, partition.label, partition.part)
        with mend(environment, name) as it:
            end = _end(topics, partition, it.environment) if it.is_copy else None
            with store.status.read() as cur:
                upto = topic_catalog.next_offset(cur, partition.id)
                touched = status_table.transactions_of(cur, KIND, [partition.id])
            offsets = _lost(topics, partition, end or 0, upto)
            loss = Loss(partition.label, offsets=offsets, transactions=tuple(touched))
            if not really:
                return loss
            if end is None:
                it.make_anew()
            key = (payload.TOPIC, partition.id)
            it.put_in_place(store.status, lambda cur: held.give_up(cur, key))
    topics.coordinator.orchestrator.give_up(touched, f"{partition.label} lost what was sent to it")
    end_strays(topics, partition)
    roll_forward.complete(topics, partition)
    topics.coordinator.damage.clear(partition.label)
    return loss


def _end(topics: Topics, partition: Partition, environment: Environment) -> int | None:
    """Return the end of what could be copied of a log; None where that is damaged."""
    try:
        aside = _Aside(topics, partition, environment)
        with environment.read() as txn:
            problems = list(log_check.problems(aside.log, txn))
            if aside.side is not None:
                problems += side_problems(aside.side, aside.log, txn)
            return None if problems else aside.log.end(txn)
    except DAMAGE:
        return None


def _lost(topics: Topics, partition: Partition, end: int, upto: int) -> tuple[tuple[int, int], ...]:
    """Offsets in [end, upto) that nobody has; those of end markers hold no messages."""
    found = []
    entries = topics.tail.entries(partition.id, end, topics.log.latest())
    damaged = topics.tail.damaged(partition.id)
    for entry in entries:
        if entry.stamp in damaged:
            continue
        if entry.base_offset > end:
            found.append((end, entry.base_offset))
        end = max(end, entry.next_offset)
    if upto > end:
        found.append((end, upto))
    return tuple(found)
