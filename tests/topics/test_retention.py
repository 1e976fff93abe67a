"""Retention: what goes, what stays, and what readers behind it are told."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import txnkv
from tools.topic_contents import values
from tools.topic_writing import Writer
from txnkv.errors import OffsetOutOfRangeError
from txnkv.topics import retention
from txnkv.topics.log.log_state import Segment
from txnkv.topics.log.partition_log import PartitionLog
from txnkv.topics.messages.message_input import now_micros
from txnkv.topics.read.offset_reader import fetch
from txnkv.topics.retention import Surplus, surplus
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import roll_forward
from txnkv.topics.write.producer_sender import Sender

pytestmark = pytest.mark.usefixtures("by_hand")  # else the leader may be first

TOPIC = "events"
NOW = 1_000_000_000


def segment(base: int, size: int = 100, age: float = 0.0) -> Segment:
    """One whose newest message is so many seconds old."""
    newest = NOW - int(age * 1e6)
    return Segment(base, newest - 1, size, newest)


def options(seconds: float | None = None, size: int | None = None) -> TopicOptions:
    return TopicOptions(retention_seconds=seconds, retention_bytes=size)


OLD = [segment(0, age=50), segment(10, age=40), segment(20, age=30), segment(30, age=20)]
MIXED = [segment(0, age=50), segment(10, age=10), segment(20, age=30), segment(30)]


@pytest.mark.parametrize(
    ("segments", "stable", "kept", "expected"),
    [
        ([], 0, options(10), Surplus([], False)),
        (OLD, 40, options(), Surplus([], False)),
        (OLD, 40, options(60), Surplus([], False)),
        (OLD, 40, options(35), Surplus([10, 20], False)),
        (OLD, 40, options(25), Surplus([10, 20, 30], False)),
        (OLD, 40, options(15), Surplus([10, 20, 30], True)),  # the last one is old, too
        (OLD, 39, options(15), Surplus([10, 20, 30], False)),  # it has an open transaction
        (OLD, 25, options(15), Surplus([10, 20], False)),
        (OLD, 20, options(15), Surplus([10, 20], False)),
        (OLD, 19, options(15), Surplus([10], False)),
        (OLD, 0, options(15), Surplus([], False)),
        (MIXED, 40, options(25), Surplus([10], False)),  # the oldest first, without a hole
        (OLD, 40, options(size=400), Surplus([], False)),
        (OLD, 40, options(size=301), Surplus([], False)),
        (OLD, 40, options(size=300), Surplus([10], False)),
        (OLD, 40, options(size=100), Surplus([10, 20, 30], False)),
        (OLD, 40, options(size=0), Surplus([10, 20, 30], False)),  # never the last one by size
        (OLD, 40, options(45, 200), Surplus([10, 20], False)),  # whichever wants more
        (OLD, 40, options(35, 400), Surplus([10, 20], False)),
        ([Segment.empty(7)], 7, options(0), Surplus([], False)),
        ([*OLD[:2], Segment.empty(20)], 20, options(5), Surplus([10, 20], False)),
    ],
)
def test_what_may_go(
    segments: list[Segment], stable: int, kept: TopicOptions, expected: Surplus
) -> None:
    end = segments[-1].base + (10 if segments[-1].bytes else 0) if segments else 0
    assert surplus(segments, end, stable, NOW, kept) == expected


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 100)), min_size=1, max_size=8),
    st.integers(0, 80),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(0, 300),
)
def test_what_may_go_against_a_plain_model(
    sizes: list[tuple[int, int]], stable: int, seconds: int | None, most: int | None
) -> None:
    segments = [segment(i * 10, size, age) for i, (size, age) in enumerate(sizes)]
    end = len(sizes) * 10
    starts, _ = surplus(segments, end, min(stable, end), NOW, options(seconds, most))
    left = list(sizes)
    expected = []
    while len(left) > 1:
        _, age = left[0]
        old = seconds is not None and age > seconds
        large = most is not None and sum(size for size, _ in left[1:]) >= most
        following = (len(sizes) - len(left) + 1) * 10
        if not (old or large) or following > min(stable, end):
            break
        expected.append(following)
        left.pop(0)
    assert starts == expected


# -- in a store --------------------------------------------------------------------------


def writer(client: txnkv.Client, buffer: str = "marker", **kept: Any) -> Writer:
    kept.setdefault("segment_bytes", 1000)
    return Writer(client, TOPIC, buffer=buffer, options=TopicOptions(**kept))


def fill(to: Writer, count: int, ago: float = 0.0, first: int = 0) -> None:
    """Messages that are so many seconds old, in the log."""
    at = now_micros() - int(ago * 1e6)
    for i in range(first, first + count):
        to.small(f"{i}".ljust(100, "."), timestamp=at)
    roll_forward.complete(to.engine, to.partitions[0])


def bounds(to: Writer) -> tuple[int, int, int]:
    """Start, end and bytes of the log."""
    log = to.partitions[0].log
    with to.partitions[0].environment.read() as txn:
        size = sum(each.bytes for each in log.segments(txn))
        return log.start(txn), log.end(txn), size


def test_old_messages_go(client: txnkv.Client) -> None:
    to = writer(client, retention_seconds=3600)
    fill(to, 30, ago=4000)
    fill(to, 30, first=30)
    assert retention.enforce(to.engine, to.partitions[0]) > 0
    start, end, _ = bounds(to)
    assert 20 < start <= 30 < end == 60
    left = [int((value or b"").rstrip(b".")) for value in values(client, TOPIC)]
    assert left == list(range(left[0], 60))
    assert left[0] <= start
    assert retention.enforce(to.engine, to.partitions[0]) == 0


def test_an_idle_log_becomes_empty_and_goes_on(client: txnkv.Client) -> None:
    to = writer(client, retention_seconds=3600)
    fill(to, 30, ago=4000)
    retention.enforce(to.engine, to.partitions[0])
    assert bounds(to) == (30, 30, 0)
    fill(to, 1, first=30)
    assert bounds(to)[:2] == (30, 31)
    assert len(values(client, TOPIC)) == 1


def test_a_large_log_is_cut_to_size(client: txnkv.Client) -> None:
    to = writer(client, retention_bytes=5000)
    fill(to, 100)
    assert retention.enforce(to.engine, to.partitions[0]) > 0
    _, end, size = bounds(to)
    assert end == 100
    assert 5000 <= size < 6200


def test_without_options_nothing_goes(client: txnkv.Client) -> None:
    to = writer(client)
    fill(to, 50, ago=1e9)
    assert retention.enforce(to.engine, to.partitions[0]) == 0
    assert bounds(to)[0] == 0


def test_an_open_transaction_keeps_its_messages(client: txnkv.Client) -> None:
    to = writer(client, retention_bytes=0)
    fill(to, 20)
    txn = to.begin()
    (first,) = to.append(txn, "open")
    fill(to, 20, first=20)
    retention.enforce(to.engine, to.partitions[0])
    assert bounds(to)[0] <= first
    to.commit(txn)
    retention.enforce(to.engine, to.partitions[0])
    assert bounds(to)[0] > first


def test_readers_behind_are_told(client: txnkv.Client) -> None:
    to = writer(client, retention_bytes=0)
    fill(to, 30)
    retention.enforce(to.engine, to.partitions[0])
    start, end, _ = bounds(to)
    log, environment = to.partitions[0].log, to.partitions[0].environment
    with environment.read() as txn:
        with pytest.raises(OffsetOutOfRangeError, match=rf"\[{start}, {end}\)"):
            log.read(txn, start - 1, 100)
        assert log.read(txn, start, 100)


def test_a_consumer_behind_is_told(client: txnkv.Client) -> None:
    to = writer(client, retention_bytes=0)
    fill(to, 30)
    with client.topic(TOPIC).consumer() as consumer:
        assert consumer.poll(max_messages=1)[0].offset == 0
        retention.enforce(to.engine, to.partitions[0])
        start, _, _ = bounds(to)
        with pytest.raises(OffsetOutOfRangeError, match="earliest"):
            fetch(to.engine, to.partitions[0], 0)
        consumer.seek(0, 0)
        with pytest.raises(OffsetOutOfRangeError, match="earliest"):
            consumer.poll()
        consumer.seek(0, start)
        assert consumer.poll(max_messages=1)[0].offset == start
    assert fetch(to.engine, to.partitions[0], start).start_offset == start


def test_aborted_entries_and_commits_go_with_their_segments(client: txnkv.Client) -> None:
    to = writer(client, retention_bytes=0, segment_bytes=600)
    for i in range(20):
        txn = to.begin()
        to.append(txn, f"{i}".ljust(100, "."))
        (to.abort if i % 2 else to.commit)(txn)
    roll_forward.complete(to.engine, to.partitions[0])
    retention.enforce(to.engine, to.partitions[0])
    log = to.partitions[0].log
    with to.partitions[0].environment.read() as txn:
        start = log.start(txn)
        assert start > 20
        assert all(entry.last_offset >= start for entry in log.aborted(txn, 0, 1 << 62))
        assert all(entry.marker_offset >= start for entry in log.commits(txn, 0, 1000))
        assert [each.base for each in log.segments(txn)] == [start]


def test_the_leader_does_it(by_hand: Any, client: txnkv.Client, now: Any) -> None:
    to = writer(client, retention_seconds=3600)
    fill(to, 30)
    by_hand(client)
    assert bounds(to)[0] == 0
    now.forward(4000)
    fill(to, 1, first=30)
    by_hand(client)
    assert bounds(to)[0] > 0


def test_what_a_producer_sent_is_known_after_its_segments_went(client: txnkv.Client) -> None:
    """Kafka: testProducerIdExpirationOnSegmentDeletion."""
    to = writer(client, retention_bytes=0)
    by = Sender(to.engine, to.topic, "p")
    messages = pa.record_batch({"value": [b"x" * 100]})
    assert by.deliver([(0, messages)])[0].base == 0
    numbers = dict(by._next)
    fill(to, 30, first=1)
    retention.enforce(to.engine, to.partitions[0])
    assert bounds(to)[0] > 1
    by._next = {}
    assert by.deliver([(0, messages)])[0].base == 0  # a duplicate of what is gone
    assert by._next == numbers
    assert by.deliver([(0, messages)])[0].base == 31


def test_a_partition_nobody_wrote_to_is_not_opened(client: txnkv.Client) -> None:
    to = writer(client, retention_bytes=0)
    assert retention.enforce_all(to.engine) == 0
    assert not to.partitions[0].exists


def test_the_side_log_follows(client: txnkv.Client) -> None:
    to = writer(client, "sidecar", retention_bytes=0, segment_bytes=2000)
    for i in range(20):
        txn = to.begin()
        to.append(txn, f"{i}".ljust(500, "."))
        to.commit(txn)
    roll_forward.complete(to.engine, to.partitions[0])
    side = to.partitions[0].side
    assert side is not None
    retention.enforce(to.engine, to.partitions[0])
    assert bounds(to)[0] > 0
    side.sweep(to.partitions[0].log)
    left = [int((value or b"").rstrip(b".")) for value in values(client, TOPIC)]
    assert left == list(range(left[0], 20))
    assert left[0] > 0


@pytest.mark.parametrize("point", ["retention.dropped", "partition.trimmed", "lmdb.before_commit",
                                   "lmdb.after_commit"])  # fmt: skip
@pytest.mark.parametrize("hit", [1, 2])
def test_killed_it_goes_on(
    point: str, hit: int, client: txnkv.Client, process: Callable[..., Any]
) -> None:
    to = writer(client, retention_bytes=0)
    fill(to, 50)
    child = process(
        """
        from txnkv.storage import arm
        from txnkv.topics import retention
        engine = client.instance.topics
        partition = engine.partitions(engine.get("events"))[0]
        arm(point, f"kill@{hit}")
        retention.enforce(engine, partition)
        """,
        point=point, hit=hit,
    )  # fmt: skip
    child.finish(-signal.SIGKILL)
    start, end, _ = bounds(to)
    assert end == 50
    left = [int((value or b"").rstrip(b".")) for value in values(client, TOPIC)]
    assert left == list(range(left[0], 50))
    retention.enforce(to.engine, to.partitions[0])
    assert bounds(to)[0] > start
    fill(to, 1, first=50)
    assert bounds(to)[1] == 51


def test_killed_after_the_roll(client: txnkv.Client, process: Callable[..., Any]) -> None:
    to = writer(client, retention_seconds=3600)
    fill(to, 30, ago=4000)
    process(
        """
        from txnkv.topics import retention
        engine = client.instance.topics
        retention.enforce(engine, engine.partitions(engine.get("events"))[0])
        """,
        fault="retention.rolled=kill",
    ).finish(-signal.SIGKILL)
    assert bounds(to)[:2] == (0, 30)
    retention.enforce(to.engine, to.partitions[0])
    assert bounds(to) == (30, 30, 0)


def test_a_leader_that_lost_its_lease_stops(client: txnkv.Client) -> None:
    to = writer(client, retention_bytes=0)
    fill(to, 30)

    class Lost(Exception):
        pass

    def check() -> None:
        raise Lost

    with pytest.raises(Lost):
        retention.enforce(to.engine, to.partitions[0], check)
    assert bounds(to)[0] == 0


# -- subscriptions -------------------------------------------------------------------------

BY_TIME, BY_SIZE = {"retention_seconds": 3600}, {"retention_bytes": 0}
KEPT = pytest.mark.parametrize("kept", [BY_TIME, BY_SIZE], ids=["time", "size"])
TYPE = pytest.mark.parametrize("type", ["exclusive", "shared", "failover"])
COUNT = 40


def filled(client: txnkv.Client, type: Any, **kept: Any) -> tuple[Writer, Any, list[Any]]:
    """A topic of old messages, its subscription, and what that was given: all of them."""
    to = writer(client, **kept)
    sub = client.topic(TOPIC).subscribe("s", type=type)
    fill(to, COUNT, ago=4000)
    return to, sub, sub.receive_many(COUNT, timeout=0)


def offsets(sub: Any) -> list[int]:
    """Offsets of all that a subscription gives."""
    return [m.offset for m in sub.receive_many(100, timeout=0)]


@KEPT
@TYPE
@pytest.mark.parametrize(
    ("acked", "least", "most"),
    [
        ([], 0, 0),
        (range(20), 11, 20),  # whole segments below
        (range(1, COUNT), 0, 0),  # one message that is missing keeps all behind it
        ([*range(20), *range(30, 35)], 11, 20),
        (range(COUNT), 31, 40),
    ],
)
def test_what_is_not_acknowledged_stays(
    client: txnkv.Client, kept: Any, type: Any, acked: Any, least: int, most: int
) -> None:
    to, sub, got = filled(client, type, retain_unacknowledged=True, **kept)
    assert len(got) == COUNT
    if acked:
        sub.ack([got[i] for i in acked])
    retention.enforce(to.engine, to.partitions[0])
    assert least <= bounds(to)[0] <= most
    sub.close()
    left = sorted(set(range(COUNT)) - set(acked))
    assert offsets(client.topic(TOPIC).subscribe("s", type=type)) == left
    assert client.metrics()["messages_lost_to_retention"] == 0


@KEPT
@TYPE
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_an_open_transaction_acknowledged_stays(
    client: txnkv.Client, kept: Any, type: Any, stored: bool, end: str
) -> None:
    to, sub, got = filled(client, type, retain_unacknowledged=True, **kept)
    txn = client.new_transaction()
    txn.ack(sub, got[:20])
    if stored:
        txn.serialize()
    retention.enforce(to.engine, to.partitions[0])
    assert bounds(to)[0] == 0
    getattr(txn, end)()
    retention.enforce(to.engine, to.partitions[0])
    if end == "commit":
        assert 10 < bounds(to)[0] <= 20
    else:
        assert bounds(to)[0] == 0
        assert offsets(sub) == list(range(20))


@KEPT
@pytest.mark.parametrize("moved", [False, True])
def test_the_slowest_subscription_decides_until_it_is_moved_or_dropped(
    client: txnkv.Client, kept: Any, moved: bool
) -> None:
    to, fast, got = filled(client, "exclusive", retain_unacknowledged=True, **kept)
    slow = client.topic(TOPIC).subscribe("slow", type="shared")
    fast.ack(got)
    slow.ack(slow.receive_many(10, timeout=0))
    slow.close()
    retention.enforce(to.engine, to.partitions[0])
    assert 0 < bounds(to)[0] <= 10
    if moved:
        client.topic(TOPIC).subscribe("slow", type="shared").seek(0, "latest")
    else:
        client.topic(TOPIC).drop_subscription("slow")
    retention.enforce(to.engine, to.partitions[0])
    assert bounds(to)[0] > 30


@pytest.mark.parametrize("there", [False, True])
def test_a_subscription_that_is_made_or_moved_back_in_the_midst_of_a_cut_waits_for_its_end(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    to = writer(client, retention_bytes=0, retain_unacknowledged=True)
    fill(to, COUNT)
    known = client.topic(TOPIC).subscribe("s", start="latest") if there else None
    inside, go_on = threading.Event(), threading.Event()
    cut = PartitionLog.advance_start

    def waiting(self: PartitionLog, *args: Any) -> None:
        inside.set()
        assert go_on.wait(60)
        cut(self, *args)

    monkeypatch.setattr(PartitionLog, "advance_start", waiting)
    found: list[Any] = []
    cutting = threading.Thread(target=retention.enforce, args=(to.engine, to.partitions[0]))
    cutting.start()
    assert inside.wait(60)

    def make() -> None:
        sub = known or client.topic(TOPIC).subscribe("s")
        if known:
            sub.seek(0, "earliest")
        found.append(sub)

    def is_made() -> bool:
        subscriptions = to.engine.subscriptions
        return any(
            subscriptions.committed(info) == {0: 0} for info in subscriptions.of_topic(to.topic)
        )

    making = threading.Thread(target=make)
    making.start()
    while not is_made():
        time.sleep(0.001)
    assert not found
    go_on.set()
    for each in (cutting, making):
        each.join(60)
    start = bounds(to)[0]
    assert 0 < start < 20  # what was under way, and nothing more
    retention.enforce(to.engine, to.partitions[0])
    assert bounds(to)[0] == start
    assert offsets(found[0]) == list(range(start, COUNT))


@KEPT
@TYPE
@pytest.mark.parametrize("acked", [0, 3, COUNT])
def test_what_goes_unacknowledged_is_told(
    client: txnkv.Client, kept: Any, type: Any, acked: int, caplog: pytest.LogCaptureFixture,
    by_hand: Any,
) -> None:  # fmt: skip
    to, sub, got = filled(client, type, **kept)
    if acked:
        sub.ack(got[:acked])
    client.topic(TOPIC).subscribe("late", start="latest").close()
    with caplog.at_level(logging.WARNING, "txnkv"):
        retention.enforce(to.engine, to.partitions[0])
    start = bounds(to)[0]
    assert start > 30
    lost = max(start - acked, 0)
    warned = [r.getMessage() for r in caplog.records if "retention took" in r.getMessage()]
    assert all("subscription 's' " in text for text in warned)
    assert bool(warned) == (lost > 0)
    for _ in range(2):  # also when its cursor has followed the log
        assert sub.lost() == {0: lost}
        assert client.metrics()["messages_lost_to_retention"] == lost
        about = client.stats()["topics"][TOPIC]["subscriptions"]
        assert (about["s"]["lost"], about["late"]["lost"]) == (lost, 0)
        by_hand(client)


def test_end_markers_are_no_messages_to_be_lost(client: txnkv.Client) -> None:
    to = writer(client, retention_seconds=3600)
    sub = client.topic(TOPIC).subscribe("s")
    txn = to.begin()
    to.append(txn, "one")
    to.commit(txn)
    roll_forward.complete(to.engine, to.partitions[0])
    sub.ack(sub.receive_many(10, timeout=0))
    retention.give_up(to.engine, to.partitions[0], bounds(to)[1], lambda txn, offset: True)
    assert bounds(to)[0] == bounds(to)[1] == 2
    assert sub.lost() == {0: 0}


@pytest.mark.parametrize("point", ["retention.dropped", "partition.trimmed", "lmdb.before_commit",
                                   "lmdb.after_commit"])  # fmt: skip
@pytest.mark.parametrize("retain", [False, True])
@TYPE
def test_killed_it_has_counted_what_went(
    point: str, retain: bool, type: str, client: txnkv.Client, process: Callable[..., Any]
) -> None:
    to, sub, got = filled(client, type, retention_bytes=0, retain_unacknowledged=retain)
    sub.ack([*got[:12], *got[14:20]])
    child = process(
        """
        from txnkv.storage import arm
        from txnkv.topics import retention
        engine = client.instance.topics
        partition = engine.partitions(engine.get("events"))[0]
        arm(point, f"kill@2")
        retention.enforce(engine, partition)
        """,
        point=point,
    )
    child.finish(-signal.SIGKILL)
    for _ in range(2):
        start = bounds(to)[0]
        assert sub.lost() == {0: len({12, 13, *range(20, COUNT)} & set(range(start)))}
        retention.enforce(to.engine, to.partitions[0])
    assert start <= 12 if retain else start > 30


def test_a_subscription_that_is_made_before_the_cut_loses_nothing(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may go was looked for, and nothing is gone yet."""
    to = writer(client, retention_bytes=0, retain_unacknowledged=True)
    fill(to, COUNT)
    look = retention.unacknowledged_in
    made: list[txnkv.Subscription] = []

    def late(*args: Any) -> Any:
        if not made:
            made.append(client.topic(TOPIC).subscribe("s"))
        return look(*args)

    monkeypatch.setattr(retention, "unacknowledged_in", late)
    assert retention.enforce(to.engine, to.partitions[0]) == 0
    assert offsets(made[0]) == list(range(COUNT))


def test_a_copy_keeps_for_its_own_subscriptions(client: txnkv.Client, tmp_path: Path) -> None:
    to = writer(client, retention_bytes=0, retain_unacknowledged=True)
    fill(to, COUNT)
    txnkv.replicate(client, tmp_path / "copy")
    with txnkv.connect(tmp_path / "copy") as copy:
        sub = copy.topic(TOPIC).subscribe("s")
        retention.enforce(to.engine, to.partitions[0])
        assert bounds(to)[0] > 30
        txnkv.replicate(client, copy)
        got = sub.receive_many(100, timeout=0)
        assert [m.offset for m in got] == list(range(COUNT))
        sub.ack(got)
        txnkv.replicate(client, copy)
        assert copy.topic(TOPIC).consumer().position(0) == bounds(to)[0]
        assert sub.lost() == {0: 0}
