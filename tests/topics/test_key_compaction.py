"""Key compaction: what stays, what readers, subscriptions and copies make of it, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from tools.topic_contents import raw
from tools.topic_writing import Writer
from txnkv import core
from txnkv.coordinator.liveness import LeaseLostError
from txnkv.errors import NotSupportedError
from txnkv.storage import StoreDirectory, arm, disarm
from txnkv.topics import key_compaction
from txnkv.topics.log.log_check import problems
from txnkv.topics.read.commit_reader import CommitReader
from txnkv.topics.read.pinned_range import pin, read
from txnkv.topics.topic_catalog import TopicOptions

pytestmark = pytest.mark.usefixtures("by_hand")  # else the leader may be first

TOPIC = "state"
LONG_AGO = datetime.now(UTC) - timedelta(days=3)
Sent = tuple[int, bytes | None, bytes | None]


@pytest.fixture
def topic(client: txnkv.Client) -> txnkv.Topic:
    return client.create_topic(TOPIC, cleanup="compact")


def send(client: txnkv.Client, *pairs: tuple[str | None, str | None], **more: Any) -> None:
    """Each by itself."""
    for key, value in pairs:
        client.run(lambda txn, key=key, value=value: txn.send(TOPIC, value, key=key, **more))  # type: ignore[misc]


def left(topic: txnkv.Topic, **options: Any) -> list[Sent]:
    """Offset, key and value of what is there."""
    with topic.consumer(**options) as consumer:
        found = consumer.poll(max_messages=10_000, timeout=0)
    return [(each.offset, each.key, each.value) for each in found]  # type: ignore[misc]


@pytest.mark.parametrize(
    "reader",
    [{}, {"order": "commit"}, {"isolation": "read_uncommitted"}, {"isolation": "serializable"}],
)
def test_the_last_message_of_a_key_stays(
    client: txnkv.Client, topic: txnkv.Topic, reader: dict[str, Any]
) -> None:
    send(client, ("a", "1"), (None, "2"), ("b", "3"), ("a", "4"), ("b", None), (None, None))
    assert client.compact().messages_left_out == 2
    expected = [(1, None, b"2"), (3, b"a", b"4"), (4, b"b", None), (5, None, None)]
    assert left(topic, **reader) == expected
    assert client.compact().messages_left_out == 0
    send(client, ("a", "5"))
    assert left(topic, **reader) == [*expected, (6, b"a", b"5")]
    client.compact()
    expected = [each for each in expected if each[0] != 3]
    assert left(topic, **reader) == [*expected, (6, b"a", b"5")]
    assert topic.end_offsets() == {0: 7}


def test_a_batch_that_has_as_many_bytes_with_fewer_messages(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    with client.transaction() as txn:
        for key in ("a", "b", "c", "d", "e"):
            txn.send(topic, "1", key=key)
    send(client, ("e", "2"))
    assert client.compact().messages_left_out == 1
    assert [each[0] for each in left(topic)] == [0, 1, 2, 3, 5]


def test_tombstones_stay_for_a_time(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, ("a", "1"), ("b", "1"))
    send(client, ("a", None), timestamp=LONG_AGO)
    send(client, ("b", None), ("c", "1"))
    client.compact()
    assert left(topic) == [(3, b"b", None), (4, b"c", b"1")]
    topic.alter(tombstone_seconds=0)
    client.compact()
    assert left(topic) == [(4, b"c", b"1")]
    send(client, ("c", None))
    client.compact()
    assert left(topic) == []
    send(client, ("c", "2"))
    assert left(topic) == [(6, b"c", b"2")]


def test_what_is_open_or_aborted(client: txnkv.Client, topic: txnkv.Topic) -> None:
    """A value that is not committed hides nothing; what is behind it stays as it is."""
    send(client, ("a", "1"), ("a", "2"))
    writer = Writer(client, TOPIC)
    row = writer.begin()
    writer.append(row, "no key")
    send(client, ("a", "3"), ("a", "4"))
    client.compact()
    assert [each[0] for each in left(topic, isolation="read_uncommitted")] == [1, 2, 3, 4]
    writer.abort(row)
    client.compact()
    assert left(topic, isolation="read_uncommitted") == [(4, b"a", b"4")]


def test_rounds_leave_the_last_segment_alone(client: txnkv.Client) -> None:
    topic = client.create_topic(TOPIC, cleanup="compact", segment_bytes=2000)
    engine = internals.topics(client)
    (partition,) = engine.partitions(topic.info)
    for number in range(100):
        send(client, (f"{number % 3}", f"{number}".ljust(50, ".")))
    internals.flush(client)
    with partition.environment.read() as txn:
        last = partition.log.segments(txn)[-1].base
    done = key_compaction.compact_all(engine)
    assert done.messages == last - 3
    assert done.bytes_after < done.bytes_before / 10
    assert [each[0] for each in left(topic)] == list(range(last - 3, 100))
    send(client, *[("0", "again".ljust(50, "."))] * 3)
    internals.flush(client)
    assert key_compaction.compact_all(engine).messages == 0  # not half of it is new


@pytest.mark.parametrize("limit", [{}, {"_MOST_KEYS": 3}, {"_MOST_BYTES": 300}])
def test_keys_that_are_too_many_for_one_pass(
    limit: dict[str, int], client: txnkv.Client, topic: txnkv.Topic, monkeypatch: Any
) -> None:
    for name, value in limit.items():
        monkeypatch.setattr(key_compaction, name, value)
    monkeypatch.setattr(key_compaction, "_READ_BYTES", 100)
    passes: list[int] = []
    arm("compaction.marked", lambda: passes.append(1))
    for round in range(3):
        for key in range(10):
            send(client, (f"{key}", f"{round}"))
            internals.flush(client)  # a chunk of its own
    assert client.compact().messages_left_out == 20
    disarm()
    assert len(passes) > 2 if limit else len(passes) == 1
    assert [each[0] for each in left(topic)] == list(range(20, 30))


def test_somebody_else_compacts_meanwhile(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the pass ends: a tombstone may not go before what it hides."""
    send(client, ("a", "1"))
    send(client, ("a", None), timestamp=LONG_AGO)
    internals.flush(client)
    engine = internals.topics(client)
    (partition,) = engine.partitions(topic.info)
    between(monkeypatch, lambda: key_compaction.compact(engine, partition, force=True))
    assert key_compaction.compact(engine, partition, force=True).messages == 0
    assert left(topic) == []


def between(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do something when the next pass has noted its keys, before each of its pieces."""
    pieces = key_compaction._Pass._pieces

    def meanwhile(self: Any, upto: int) -> Any:
        for piece in pieces(self, upto):
            monkeypatch.setattr(key_compaction._Pass, "_pieces", pieces)
            do()
            yield piece

    monkeypatch.setattr(key_compaction._Pass, "_pieces", meanwhile)


def test_what_hides_others_is_cut_off_meanwhile(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, ("a", "1"))
    internals.flush(client)
    send(client, ("a", "2"))
    internals.flush(client)
    (partition,) = internals.topics(client).partitions(topic.info)

    def cut() -> None:
        partition.environment.write(lambda txn: partition.log.truncate(txn, 1))

    between(monkeypatch, cut)
    assert key_compaction.compact(internals.topics(client), partition).messages == 0
    with partition.environment.read() as txn:
        assert core.read_header(partition.log.read(txn, 0, 1000)[0]).rows == 1


def test_a_topic_that_keeps_all_from_now_on(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others get the lock of cuts between two pieces, and what they change holds."""
    monkeypatch.setattr(key_compaction, "_PIECE_BYTES", 1)
    for number in range(4):
        send(client, ("a", f"{number}"))
        internals.flush(client)  # a piece of its own
    between(monkeypatch, lambda: topic.alter(cleanup="delete"))
    assert client.compact().messages_left_out == 0
    assert len(left(topic)) == 4


def test_a_store_with_gaps_says_so(client: txnkv.Client, topic: txnkv.Topic) -> None:
    directory = internals.topics(client).store.directory
    with client.transaction() as txn:
        for key in ("a", "b", "a", "c"):
            txn.send(topic, key, key=key)
    assert directory.features == []
    assert client.compact().messages_left_out == 1
    assert directory.features == ["places"]
    assert core.read_header(raw(client, TOPIC)).has_places
    assert [each[0] for each in left(topic)] == [1, 2, 3]
    with topic.consumer(start={0: 2}) as consumer:
        assert [each.offset for each in consumer.poll(timeout=0)] == [2, 3]


def test_it_stops_when_it_is_told(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any step; then every key has its last value still, and the next pass ends the work."""
    monkeypatch.setattr(key_compaction, "_PIECE_BYTES", 1)
    engine = internals.topics(client)
    (partition,) = engine.partitions(topic.info)
    for number in range(4):
        send(client, (f"{number % 2}", f"{number}"), (f"gone {number}", "x"))
        internals.flush(client)  # a piece of its own
    for number in range(4):
        send(client, (f"gone {number}", None), timestamp=LONG_AGO)
    internals.flush(client)
    steps = 0
    while True:
        left_to_do = iter(range(steps))

        def check(left_to_do: Any = left_to_do) -> None:
            if next(left_to_do, None) is None:
                raise LeaseLostError

        with suppress(LeaseLostError):
            key_compaction.compact(engine, partition, check, force=True)
            break
        values = {key: value for _, key, value in left(topic)}
        assert {key: value for key, value in values.items() if value} == {b"0": b"2", b"1": b"3"}
        steps += 1
    assert steps > 5
    assert [each[1:] for each in left(topic)] == [(b"0", b"2"), (b"1", b"3")]


def test_rounds_end_when_the_store_is_closed(client: txnkv.Client) -> None:
    maintenance = internals.maintenance(client)
    maintenance.require_running()
    client.close()
    with pytest.raises(txnkv.ClosedError, match="what was done"):
        maintenance.require_running()


def test_what_a_topic_keeps_for_subscriptions(client: txnkv.Client) -> None:
    topic = client.create_topic(TOPIC, cleanup="compact", retain_unacknowledged=True)
    with topic.subscribe("s") as subscription:
        for number in range(6):
            send(client, ("a", f"{number}"))
            internals.flush(client)  # a chunk of its own
        client.compact()
        assert len(left(topic)) == 6
        subscription.ack_cumulative(subscription.receive_many(4, timeout=0)[-1])
        client.compact()
        assert [each[0] for each in left(topic)] == [3, 4, 5]


@pytest.mark.parametrize("type", ["exclusive", "shared", "key_shared"])
def test_messages_go_that_a_subscription_has_not_acknowledged(
    client: txnkv.Client, topic: txnkv.Topic, type: Any
) -> None:
    send(client, *[(f"{number % 2}", f"{number}") for number in range(10)])
    with topic.subscribe("s", type=type) as subscription:
        given = subscription.receive_many(6, timeout=0)
        assert [each.offset for each in given] == list(range(6))
        subscription.ack(given[3])
        client.compact()
        for each in given[:3]:
            subscription.nack(each)
    with topic.subscribe("s", type=type) as subscription:
        found = []
        while message := subscription.receive(timeout=0.5):
            found.append(message.offset)
            subscription.ack(message)
    assert found == [8, 9]
    assert client.check().problems == []


@pytest.mark.parametrize("taken", [2, 5])
def test_what_is_hidden_in_hand_is_there_to_be_acknowledged_when_another_joins(
    client: txnkv.Client, topic: txnkv.Topic, taken: int
) -> None:
    """The consumers read on from the cursor then, and took it for a gap."""
    send(client, ("a", "0"), ("b", "1"), ("a", "2"), ("b", "3"), ("a", "4"))
    with topic.subscribe("s", "key_shared") as one:
        given = one.receive_many(taken, timeout=0)
        client.compact()  # leaves 3 and 4
        with topic.subscribe("s", "key_shared") as other:
            one.ack(given[3:])
            send(client, ("c", "5"), ("d", "6"))
            for _ in range(3):
                for each in (one, other):
                    each.ack(each.receive_many(9, timeout=0))
            with client.transaction() as txn:
                txn.ack(one, given[:3])
            for each in (one, other):
                each.ack(each.receive_many(9, timeout=0))
            assert (one.committed(), one.lag()) == ({0: 7}, {0: 0})
    assert client.check().problems == []


@pytest.mark.parametrize("again", [False, True])
def test_what_is_hidden_in_hand_is_there_to_be_acknowledged_in_the_order_of_commits(
    client: txnkv.Client, topic: txnkv.Topic, again: bool
) -> None:
    """Gaps are looked for behind the messages, and were found where they had been."""
    send(client, *[("a", f"{number}") for number in range(6)])
    with topic.subscribe("s", order="commit") as subscription:
        given = subscription.receive_many(6, timeout=0)
        if again:
            subscription.nack(given)
            given = subscription.receive_many(6, timeout=0)
        send(client, ("z", "6"), ("a", "7"))
        client.compact()
        given += subscription.receive_many(1, timeout=0)
        subscription.ack([given[3], given[6]])
        send(client, ("y", "8"))
        given += subscription.receive_many(9, timeout=0)
        assert [each.offset for each in given] == list(range(9))
        with client.transaction() as txn:
            txn.ack(subscription, [*given[:3], *given[4:6], *given[7:]])
        assert subscription.committed() == {0: 9}
    assert client.check().problems == []


@pytest.mark.parametrize("type", ["exclusive", "shared", "key_shared"])
def test_what_is_hidden_below_the_beginning_is_not_given(
    client: txnkv.Client, topic: txnkv.Topic, type: Any
) -> None:
    """It was read ahead, and no loss, so nobody was told that it is gone."""
    send(client, *[("a", f"{number}") for number in range(8)], ("z", "last"))
    with topic.subscribe("s", type=type) as subscription:
        (first,) = subscription.receive_many(1, timeout=0)
        client.compact()
        topic.truncate(7)
        assert subscription.lost() == {0: 0}
        assert [each.offset for each in subscription.receive_many(9, timeout=0)] == [7, 8]
        subscription.ack(first)
        assert subscription.committed() == {0: 7}
    assert client.check().problems == []


def test_readers_go_on(client: txnkv.Client, topic: txnkv.Topic) -> None:
    """One in the middle of a transaction in the order of commits, and one of a pinned range."""
    engine = internals.topics(client)
    (partition,) = engine.partitions(topic.info)
    writer = Writer(client, TOPIC)
    row, other = writer.begin(), writer.begin()
    for number in range(40):
        writer.append(row, f"{number}".ljust(100, "."))
        writer.append(other, "aborted")
    writer.abort(other)
    writer.commit(row)
    send(client, *[("a", f"{number}") for number in range(5)])
    internals.flush(client)
    size = core.read_header(raw(client, TOPIC)).decoded_bytes
    reader = CommitReader(engine, partition, 0, max_bytes=2 * size)  # to behind the second one
    ranges = pin(engine, partition, 0, 84, 0)
    pinned = read(engine, partition, ranges, 1000)
    found, ranged = [], [next(pinned)]

    def take() -> None:
        assert reader.load()
        found.extend(reader.take(1000).column("offset").to_pylist())

    take()
    for _ in range(3):
        key_compaction.compact(engine, partition, force=True)
        take()
        ranged.append(next(pinned))
        send(client, ("a", "more"))
        internals.flush(client)
    while reader.load() or reader.moved:
        take()
    assert found[:40] == list(range(0, 80, 2))
    assert len(set(found)) == len(found)
    assert found[-1] == topic.end_offsets()[0] - 1
    offsets = [at for batch in [*ranged, *pinned] for at in batch.column("offset").to_pylist()]
    assert offsets == list(range(0, 80, 2))


def test_backups_and_dumps(client: txnkv.Client, topic: txnkv.Topic, tmp_path: Path) -> None:
    send(client, *[(f"{number % 3}", f"{number}") for number in range(9)])
    client.backup(tmp_path / "first")
    client.compact()
    expected = left(topic)
    assert len(expected) == 3
    client.backup(tmp_path / "second", base=tmp_path / "first")
    txnkv.dump(client, tmp_path / "dump")
    for name in ("second", "dump"):
        txnkv.restore(tmp_path / name, tmp_path / f"of {name}")
        with txnkv.connect(tmp_path / f"of {name}") as other:
            assert left(other.topic(TOPIC)) == expected
            assert other.check().problems == []


def test_copies(client: txnkv.Client, tmp_path: Path, store_path: Path) -> None:
    """One is compacted by itself, where its log is closed, and goes on behind that."""
    topic = client.create_topic(TOPIC, cleanup="compact", segment_bytes=2000)

    def copy() -> list[Sent]:
        internals.flush(client)
        txnkv.replicate(store_path, tmp_path / "copy")
        with txnkv.connect(tmp_path / "copy") as other:
            assert other.compact().messages_left_out == 0
            key_compaction.compact_all(internals.topics(other))
            assert other.check().problems == []
            return left(other.topic(TOPIC))

    for round in range(3):
        for number in range(50):
            send(client, (f"{number % 3}", f"{round}.{number}".ljust(50, ".")))
        there = copy()
        assert len(there) < 60
        assert there[-3:] == left(topic)[-3:]
        key_compaction.compact_all(internals.topics(client))
        assert copy() == left(topic)


def test_a_copy_says_so_before_it_has_gaps(
    client: txnkv.Client, topic: txnkv.Topic, tmp_path: Path, store_path: Path, monkeypatch: Any
) -> None:
    with client.transaction() as txn:
        for key in ("a", "b", "a", "c"):
            txn.send(topic, key, key=key)
    client.compact()

    def fail(*_: object) -> None:
        raise txnkv.StorageFullError("no room for FORMAT")

    with monkeypatch.context() as full:
        full.setattr(StoreDirectory, "add_feature", fail)
        with pytest.raises(txnkv.StorageFullError, match="no room for FORMAT"):
            txnkv.replicate(store_path, tmp_path / "copy")
    with txnkv.connect(tmp_path / "copy") as copy:
        directory = internals.topics(copy).store.directory
        assert (directory.features, left(copy.topic(TOPIC))) == ([], [])
    txnkv.replicate(store_path, tmp_path / "copy")
    with txnkv.connect(tmp_path / "copy") as copy:
        assert internals.topics(copy).store.directory.features == ["places"]
        assert left(copy.topic(TOPIC)) == left(topic)


def test_typed_values(client: txnkv.Client) -> None:
    topic = client.create_topic(TOPIC, cleanup="compact", value_schema={"n": "int64"})
    for number in range(4):
        client.run(lambda txn, number=number: txn.send(TOPIC, {"n": number}, key="a"))  # type: ignore[misc]
    client.compact()
    assert left(topic) == [(3, b"a", {"n": 3})]


def test_a_topic_that_is_compacted_from_now_on(client: txnkv.Client) -> None:
    topic = client.create_topic(TOPIC)
    send(client, ("a", "1"), ("a", "2"))
    assert client.compact().messages_left_out == 0
    assert topic.alter(cleanup="compact")["cleanup"] == "compact"
    assert client.compact().messages_left_out == 1
    topic.alter(cleanup="delete")
    send(client, ("a", "3"))
    assert client.compact().messages_left_out == 0


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cleanup": "compact", "buffer": "sidecar"}, NotSupportedError, "buffer='marker'"),
    ({"cleanup": "compacted"}, ValueError, "'delete' or 'compact'"),
    ({"tombstone_seconds": -1}, ValueError, "tombstone_seconds"),
    ({"tombstone_seconds": None}, ValueError, "tombstone_seconds is a number"),
    ({"segment_bytes": 0}, ValueError, "segment_bytes is above 0"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_refused(
    client: txnkv.Client, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        client.create_topic(TOPIC, **options)
    assert client.topics() == []
    topic = client.create_topic("other", buffer=options.pop("buffer", "marker"))
    if "segment_bytes" not in options:
        with pytest.raises(error, match=message):
            topic.alter(**options)
    assert topic.options == TopicOptions().changeable


def test_in_another_process(client: txnkv.Client, elsewhere: Callable[..., Any]) -> None:
    topic = client.create_topic(TOPIC, cleanup="compact")
    send(client, ("a", "1"), ("a", "2"))
    with topic.consumer() as consumer:
        assert consumer.poll(max_messages=1, timeout=0)[0].offset == 0
        assert elsewhere("say(client.compact().messages_left_out)") == 1
        send(client, ("a", "3"))
        assert [each.value for _ in range(2) for each in consumer.poll(timeout=0)] == [b"2", b"3"]
    assert left(topic) == [(1, b"a", b"2"), (2, b"a", b"3")]


def test_a_large_message_hides_itself_not(client: txnkv.Client) -> None:
    """Its key is in its first piece, and its offset is that of the last one."""
    options = TopicOptions(cleanup="compact", max_message_bytes=200)
    internals.topics(client).create(TOPIC, 1, "marker", options)
    topic = client.topic(TOPIC)
    large = "." * 1000
    send(client, ("a", "1"), ("a", large), ("b", large), ("b", "2"))
    client.compact()
    assert [(key, value) for _, key, value in left(topic)] == [
        (b"a", large.encode()),
        (b"b", b"2"),
    ]


def test_how_far_is_not_noted_of_a_log_that_was_cut_off_at_the_end(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, ("a", "1"), ("b", "1"))
    internals.flush(client)
    engine = internals.topics(client)
    (partition,) = engine.partitions(topic.info)
    pieces = key_compaction._Pass._pieces

    def then_cut(self: Any, upto: int) -> Any:
        yield from pieces(self, upto)
        partition.environment.write(lambda txn: partition.log.truncate(txn, 1))

    with monkeypatch.context() as patched:
        patched.setattr(key_compaction._Pass, "_pieces", then_cut)
        key_compaction.compact(engine, partition, force=True)
    with partition.environment.read() as txn:
        assert partition.log.rewritten(txn).upto <= partition.log.end(txn)


def test_the_index_of_commits_goes_by_segments(client: txnkv.Client) -> None:
    """Readers in commit order get what is left where those before are given up. No entry stands
    where such a segment begins.
    """
    to = Writer(client, TOPIC, options=TopicOptions(cleanup="compact", segment_bytes=500))
    topic = client.topic(TOPIC)
    for i in range(12):
        row = to.begin()
        to.append(row, f"{i}", "." * 100)
        to.commit(row)
        send(client, ("a", f"{i}"))
    client.compact()
    (partition,) = to.partitions
    with partition.environment.read() as txn:
        bases = [each.base for each in partition.log.segments(txn)]
    assert len(bases) > 3
    for base in bases[1:]:
        topic.truncate(base)
        with partition.environment.read() as txn:
            assert list(problems(partition.log, txn)) == []
        found: list[Any] = []
        with topic.consumer(order="commit") as consumer:
            while some := consumer.poll(timeout=0):
                found += [(each.offset, each.key, each.value) for each in some]
        there = left(topic)
        assert found in (there, there[1:])  # without a transaction that is torn
