"""Topics as people see them: overview, numbers, checks; and giving up what a damaged log has lost.

For people who wait for a message, `held_messages` tells who has it:

    leased     delivered to a consumer that has not acknowledged it
    free       delivered before, and nobody's now: given back, or its lease ran out
    delayed    its time has not come
    pending    acknowledged by an open transaction
    kept       acknowledged by a failed attempt of a `client.run` that goes on

A check compares the logs of topics with what status.db says, batch by batch and together.

An accepted loss puts fillers in the place of what is gone, and the log works again. The next offset
stays: no offset is given twice. What small commits have in the commit log, and what is held of
them, is not lost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import apsw

from txnkv.coordinator import DAMAGE, FAILING, Loss, TxnId, held, one, payload, status_table
from txnkv.core import CoreError, check_batch, walk
from txnkv.errors import CorruptionError, StoreNotFoundError, TxnkvError
from txnkv.storage import Environment, StaleHandleError, clock, fault_point, mend, require_of_store
from txnkv.topics import topic_catalog
from txnkv.topics.log import LogOptions, OpenTxn, PartitionLog, log_check
from txnkv.topics.messages import now_micros
from txnkv.topics.read import OffsetReader, bounds
from txnkv.topics.sidecar import SideLogs, side_problems
from txnkv.topics.subscription_catalog import DELAYED, SubscriptionInfo
from txnkv.topics.tail import TailEntry, is_noted, markers_between
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topic_engine import KIND, TopicEngine, end_strays, open_in
from txnkv.topics.topics import Opened, Partition, Topics
from txnkv.topics.write import roll_forward


@dataclass(frozen=True)
class PartitionOverview:
    """A partition as it is now.

    Attributes:
        number: of the partition.
        start: the least offset that is readable.
        end: the high watermark.
        last_stable_offset: below it all is decided.
        log_bytes: of its batches in the log.
        segments: of the log.
        tail_bytes: of those in the commit log alone.
        side_bytes: of those in side logs.
        open: transactions with messages in the log and no end, by first offset.
        waiting: messages in side logs by transaction; they hold nothing back.
        error: why it cannot be looked at, if it is damaged; the others say nothing then.
    """

    number: int
    start: int = 0
    end: int = 0
    last_stable_offset: int = 0
    log_bytes: int = 0
    segments: int = 0
    tail_bytes: int = 0
    side_bytes: int = 0
    open: tuple[OpenTxn, ...] = ()
    waiting: dict[int, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def bytes(self) -> int:
        """The size of its batches, in the log and beside it."""
        return self.log_bytes + self.tail_bytes + self.side_bytes

    @property
    def held_by(self) -> OpenTxn | None:
        """The transaction that readers of committed messages wait for."""
        return self.open[0] if self.open and self.last_stable_offset < self.end else None


@dataclass(frozen=True)
class SubscriptionOverview:
    """A subscription as it is now.

    Attributes:
        name: of the subscription.
        type: "exclusive" or "shared".
        lag: offsets that are decided and not acknowledged, by partition.
        lost: messages that retention took before they were acknowledged, by partition.
    """

    name: str
    type: str
    lag: dict[int, int]
    lost: dict[int, int]


@dataclass(frozen=True)
class TopicOverview:
    """A topic as it is now."""

    topic: TopicInfo
    partitions: tuple[PartitionOverview, ...]
    subscriptions: tuple[SubscriptionOverview, ...]


class SentTo(NamedTuple):
    """The messages that an undecided transaction has in a partition.

    Attributes:
        topic: name of the topic.
        partition: number of the partition.
        first_offset: of its messages in the log; None: they wait in a side log.
        messages: that wait in a side log; None: they are in the log, where nobody counts them.
        holds_back: readers of committed messages wait for it there.
    """

    topic: str
    partition: int
    first_offset: int | None
    messages: int | None
    holds_back: bool


def overview_of(engine: TopicEngine, topic: TopicInfo) -> TopicOverview:
    """A topic that was not dropped, as it is now."""
    subscriptions = engine.subscriptions
    found = tuple(look_at_partition(engine, each) for each in engine.partitions(topic))
    damaged = damaged_in(found)
    return TopicOverview(
        topic,
        found,
        tuple(
            SubscriptionOverview(
                info.name,
                info.type,
                subscriptions.lag(info, damaged),
                subscriptions.lost(info, damaged),
            )
            for info in subscriptions.of_topic(topic)
        ),
    )


def damaged_in(partitions: Iterable[PartitionOverview]) -> set[int]:
    """The numbers of those that cannot be looked at."""
    return {each.number for each in partitions if each.error is not None}


def look_at_partition(engine: TopicEngine, partition: Partition) -> PartitionOverview:
    """A partition as it is now."""
    while True:
        try:
            return _look_at(engine, partition)
        except StaleHandleError:
            continue  # a thread has just made its side log
        except FAILING as error:
            said = str(error).removeprefix(f"{partition.label}: ")
            return PartitionOverview(partition.number, error=said)


def _look_at(engine: TopicEngine, partition: Partition) -> PartitionOverview:
    found = bounds(engine, partition)
    seen = PartitionOverview(
        partition.number,
        *found,
        tail_bytes=sum(
            len(e.data) for e in engine.tail.entries(partition.id, 0, engine.log.latest())
        ),
    )
    if not partition.exists:
        return seen
    with partition.environment.read() as txn:
        segments = partition.log.segments(txn)
        sides = [] if partition.side is None else partition.side.open_transactions(txn)
        return replace(
            seen,
            log_bytes=sum(segment.bytes for segment in segments),
            segments=len(segments),
            side_bytes=sum(side.shared_bytes + side.own_bytes for _, side in sides),
            open=tuple(partition.log.open_transactions(txn)),
            waiting={txn_id: side.count for txn_id, side in sides},
        )


def sent_to(engine: TopicEngine) -> dict[int, list[SentTo]]:
    """Return what undecided transactions have in topics, by the transaction's local id.

    What a small transaction has sent is in the memory of its process until it commits.
    """
    found: defaultdict[int, list[SentTo]] = defaultdict(list)
    for name in engine.names():
        topic = engine.find(name)
        for partition in () if topic is None else engine.partitions(topic):
            try:
                if not partition.exists:
                    continue
            except FAILING:
                continue
            seen = look_at_partition(engine, partition)
            for at, each in enumerate(seen.open):
                found[each.txn_id].append(
                    SentTo(name, seen.number, each.first_offset, None, at == 0)
                )
            for txn_id, count in seen.waiting.items():
                found[txn_id].append(SentTo(name, seen.number, None, count, False))
    return dict(found)


def topic_stats(engine: TopicEngine) -> dict[str, Any]:
    """Numbers about each topic, by name; sizes in bytes."""
    about = {}
    for topic in filter(None, map(engine.find, engine.names())):
        try:
            about[topic.name] = _topic_stats(engine, topic)
        except Exception:  # another process dropped it: its files went, too
            if engine.is_live(topic):
                raise
    return about


def _topic_stats(engine: TopicEngine, topic: TopicInfo) -> dict[str, Any]:
    found = [look_at_partition(engine, partition) for partition in engine.partitions(topic)]
    damaged = damaged_in(found)
    return {
        "buffer": topic.buffer,
        "partitions": len(found),
        "offsets": sum(each.end - each.start for each in found),
        "bytes": sum(each.log_bytes for each in found),
        "tail_bytes": sum(each.tail_bytes for each in found),
        "open_transactions": sum(len(each.open) for each in found),
        "segments": sum(each.segments for each in found),
        "damaged": sorted(damaged),
        "subscriptions": {
            info.name: subscription_stats(engine, info, damaged)
            for info in engine.subscriptions.of_topic(topic)
        },
    }


def subscription_stats(
    engine: TopicEngine, info: SubscriptionInfo, but: Collection[int] = ()
) -> dict[str, Any]:
    """Numbers about a subscription: what is left to do, and how much of it somebody has; without
    some partitions.
    """
    found = held_messages(engine, info)
    counts = Counter(dict.fromkeys(("leased", "free", "delayed", "pending", "kept"), 0))
    for each in found.held:
        counts[each.state] += each.last - each.first
    return {
        "type": info.type,
        "lag": sum(engine.subscriptions.lag(info, but).values()),
        "lost": sum(engine.subscriptions.lost(info, but).values()),
        "consumer_pid": found.consumer_pid,
        **counts,
    }


@dataclass(frozen=True)
class HeldMessages:
    """Messages of a partition that somebody has.

    Attributes:
        partition: its number.
        first: offset of the first.
        last: behind the last.
        state: "leased", "free", "delayed", "pending" or "kept".
        pid: of the process; None: nobody's, or a transaction's that others may join.
        txn_id: of the transaction, where an ack is pending.
        deliveries: how often it was delivered; None where nobody counts.
        seconds_left: until the lease runs out, or its time comes; None: it does not.
    """

    partition: int
    first: int
    last: int
    state: str
    pid: int | None
    txn_id: TxnId | None = None
    deliveries: int | None = None
    seconds_left: float | None = None


@dataclass(frozen=True)
class Holders:
    """The holders of a subscription's messages.

    Attributes:
        consumer_pid: the process of its one consumer; None: there is none, or it is shared.
        held: by partition and offset.
    """

    consumer_pid: int | None
    held: tuple[HeldMessages, ...]


def held_messages(topics: Topics, info: SubscriptionInfo) -> Holders:
    """The holders now, as status.db has them."""
    with topics.store.status.read() as cur:
        slot, start = one(
            cur,
            "SELECT max(slot), max(start) FROM subscriptions WHERE id = ?",
            (info.id,),
        )
        held = [*_leased(topics, cur, info), *_pending(topics, cur, info)]
    held.sort(key=lambda each: (each.partition, each.first))
    return Holders(topics.store.runtime.pid(slot, start), tuple(held))


def _leased(topics: Topics, cur: apsw.Cursor, info: SubscriptionInfo) -> list[HeldMessages]:
    now = clock.monotonic_micros()
    found: list[Any] = cur.execute(
        "SELECT partition_id, message, slot, start, until, deliveries FROM leases "
        "WHERE subscription_id = ? AND until IS NOT NULL",
        (info.id,),
    ).fetchall()
    held = []
    later = DELAYED + now_micros()
    for partition_id, offset, slot, start, until, deliveries in found:
        pid = topics.store.runtime.pid(slot, start) if until > now else None
        ends = pid is not None and info.lease_time is not None
        delayed = slot is None and until > later
        held.append(
            HeldMessages(
                info.topic.partitions.index(partition_id),
                offset,
                offset + 1,
                "delayed" if delayed else "free" if pid is None else "leased",
                pid,
                deliveries=deliveries,
                seconds_left=(until - (later if delayed else now)) / 1e6
                if ends or delayed
                else None,
            )
        )
    return held


def _pending(topics: Topics, cur: apsw.Cursor, info: SubscriptionInfo) -> list[HeldMessages]:
    found: list[Any] = cur.execute(
        "SELECT partition_id, max(first, 0), last, txn_id, stored, slot, start FROM pending_acks "
        "WHERE subscription_id = ?",
        (info.id,),
    ).fetchall()
    return [
        HeldMessages(
            info.topic.partitions.index(partition_id),
            first,
            last,
            "pending" if txn_id > 0 else "kept",
            None if stored else topics.store.runtime.pid(slot, start),
            topics.coordinator.txn_id(abs(txn_id)),
        )
        for partition_id, first, last, txn_id, stored, slot, start in found
    ]


def live_partition_ids(engine: TopicEngine) -> list[int]:
    """Partitions of topics that were not dropped."""
    with engine.store.status.read() as cur:
        return sorted(topic_catalog.live_partitions(cur))


def check_partition(engine: TopicEngine, id: int) -> Iterator[str]:
    """Read every batch of a partition, in its log and in its tail.

    Yields:
        What is wrong, one line each.
    """
    partition = engine.partition(id)
    if partition is None:
        return
    try:
        latest = engine.log.latest()
        # The tail first: what leaves it meanwhile is in the log by then.
        entries = engine.tail.entries(id, 0, latest)
        end = 0
        if partition.exists:
            with partition.environment.read() as txn:
                end = partition.log.end(txn)
                for problem in log_check.problems(partition.log, txn):
                    yield f"{partition.label}: {problem}"
                if partition.side is not None:
                    for problem in side_problems(partition.side, partition.log, txn):
                        yield f"{partition.label}: {problem}"
        with engine.store.status.read() as cur:
            upto = topic_catalog.next_offset(cur, id)
            noted = markers_between(cur, id, end, upto)
    except StoreNotFoundError:
        return  # dropped meanwhile
    except TxnkvError as error:
        require_of_store(error)
        yield f"{partition.label}: {str(error).removeprefix(f'{partition.label}: ')}"
        return
    for problem in _unknown_transactions(engine, partition):
        yield f"{partition.label}: {problem}"
    if entries and entries[-1].next_offset > upto:
        given = entries[-1].next_offset - 1
        yield f"{partition.label}: a small commit has offset {given}, the next one is {upto}"
    if end > upto and partition.topic.options.replica_of is None:
        yield f"{partition.label}: its log ends at {end}, above the next offset, {upto}"
    for problem in _tail_problems(entries, [(m.first_offset, m.next_offset) for m in noted]):
        yield f"{partition.label}: {problem}"
    for problem in value_problems(engine, partition):
        yield f"{partition.label}: {problem}"


def _unknown_transactions(engine: TopicEngine, partition: Partition) -> Iterator[str]:
    """Transactions that a log has open and nobody will end."""
    if partition.topic.options.replica_of is not None:
        return  # they are another store's
    ended = []
    there = open_in(partition)
    with engine.store.status.read() as cur:
        for txn_id in there:
            row = status_table.find(cur, txn_id)
            if (row is None or row.state.ended) and not is_noted(cur, partition.id, txn_id):
                ended.append((txn_id, "does not know it" if row is None else row.state.name))
    # Its marker was in the log before status.db forgot it: one that is open still has none.
    still = open_in(partition) if ended else {}
    for txn_id, said in ended:
        if txn_id in still:
            yield (
                f"transaction {txn_id} is open in its log, by status.db: {said}. Readers may wait "
                "for it; `txnkv txn abort` ends one that is not known"
            )


def _tail_problems(entries: list[TailEntry], noted: list[tuple[int, int]]) -> Iterator[str]:
    taken = [(entry.base_offset, entry.next_offset) for entry in entries]
    before = 0
    for first, following in sorted(taken + noted):
        if first < before:
            yield f"offset {first} was given twice"
        before = following
    for entry in entries:
        try:
            for at, header in walk(entry.data):
                check_batch(entry.data, at)
                if header.commit_ts != entry.stamp:
                    yield f"the batch at {header.base_offset} is of another commit"
        except CoreError as error:
            yield f"in the commit log, at offset {entry.base_offset}: {error}"


_ROWS: Final = 1 << 16
_END: Final = 1 << 63


def value_problems(topics: Topics, partition: Partition) -> Iterator[str]:
    """Yield what is wrong with the values of a partition, one line each.

    It ends with the first batch that is damaged itself, which others report.
    """
    codec = partition.topic.options.codec
    if codec is None:
        return
    try:
        offset = bounds(topics, partition).start
        reader = OffsetReader(topics, partition, offset, "read_uncommitted")
        for rows in reader.batches(_END, _ROWS):
            try:
                (topics.codec_of(partition) or codec).decode(rows.column("value"))
            except CorruptionError as error:
                yield f"from offset {rows.column('offset')[0]} on: {error}"
    except TxnkvError:
        return  # damaged, or gone meanwhile


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
    with store.log_cuts(), store.maintenance():
        environment = store.environments.known(name, partition.label, partition.part)
        with mend(environment, name, store.status) as it:
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
            it.put_in_place(lambda cur: held.give_up(cur, key))
    topics.coordinator.orchestrator.give_up(touched, f"{partition.label} lost what was sent to it")
    with store.status.write() as cur:
        roll_forward.regain_offsets(cur, partition)
    fault_point("offsets.regained")
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
