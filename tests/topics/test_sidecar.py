"""Topics with the sidecar buffer, as their users meet them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from tools.topic_contents import partitions
from tools.topic_writers import send as send_batch
from txnkv.core import walk
from txnkv.errors import (
    InvalidTxnStateError,
    OffsetOutOfRangeError,
    TransactionTimedOutError,
)
from txnkv.storage import arm, disarm
from txnkv.topics.sidecar import side_store, side_sweep
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import roll_forward

NAME = "events"


@pytest.fixture
def topic(client: txnkv.Client) -> txnkv.Topic:
    return client.create_topic(NAME, buffer="sidecar")


@pytest.fixture
def segmented(client: txnkv.Client) -> txnkv.Topic:
    """Each commit begins another segment."""
    internals.topics(client).create(NAME, 1, "sidecar", TopicOptions(segment_bytes=1))
    return client.topic(NAME)


@pytest.fixture
def small_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transactions get side logs of their own early."""
    monkeypatch.setattr(side_store, "OWN_BYTES", 300)


def values(topic: txnkv.Topic, **options: Any) -> list[bytes]:
    """All that a new consumer is given."""
    return [m.value for m in messages(topic, **options)]


def messages(topic: txnkv.Topic, **options: Any) -> list[txnkv.Message]:
    consumer = topic.consumer(**options)
    found = []
    while given := consumer.poll(timeout=0):
        found += given
    return found


def sweep(client: txnkv.Client, number: int = 0) -> side_sweep.SideSwept:
    partition = partitions(client, NAME)[number]
    roll_forward.complete(internals.topics(client), partition)
    assert partition.side is not None
    return partition.side.sweep(partition.log)


def look(client: txnkv.Client, name: str, *args: Any) -> Any:
    partition = partitions(client, NAME)[0]
    with partition.environment.read() as txn:
        return getattr(partition.side, name)(txn, *args)


# -- transactions ----------------------------------------------------------------------


def test_committed_is_seen_and_aborted_is_not(
    client: txnkv.Client, topic: txnkv.Topic, size: str
) -> None:
    with client.transaction() as txn:
        txn.send(topic, b"a")
        txn.send(topic, b"b")
        txn.flush()
        txn.send(topic, b"c")
        assert values(topic, isolation="read_uncommitted") == []
    gone = client.new_transaction()
    gone.send(topic, b"never")
    gone.flush()
    gone.rollback()
    with client.transaction() as txn:
        txn.send(topic, b"d")
    found = messages(topic)
    assert [(m.offset, m.value) for m in found] == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]
    assert found[0].txn_id == found[2].txn_id != found[3].txn_id == txn.id
    assert topic.end_offsets() == topic.last_stable_offsets() == {0: 4}


def test_a_slow_transaction_delays_nobody(
    client: txnkv.Client, topic: txnkv.Topic, size: str
) -> None:
    slow = client.new_transaction()
    slow.send(topic, b"slow 1")
    slow.flush()
    consumer = topic.consumer()
    for number in range(20):
        with client.transaction() as txn:
            txn.send(topic, b"%d" % number)
        assert [m.value for m in consumer.poll(timeout=0)] == [b"%d" % number]
    slow.send(topic, b"slow 2")
    slow.commit()
    assert [(m.offset, m.value) for m in consumer.poll(timeout=0)] == [
        (20, b"slow 1"),
        (21, b"slow 2"),
    ]


@pytest.mark.parametrize("order", ["offset", "commit"])
@pytest.mark.parametrize("isolation", ["read_committed", "serializable"])
def test_transactions_are_whole_and_in_commit_order(
    client: txnkv.Client, size: str, order: str, isolation: str
) -> None:
    topic = client.create_topic(NAME, partitions=3, buffer="sidecar")
    txns = [client.new_transaction() for _ in range(6)]
    for part in range(5):
        for n, txn in enumerate(txns):
            for number in range(3):
                txn.send(topic, b"%d:%d" % (n, part), partition=number)
            if part % 2:
                txn.flush()
    ended = [3, 0, 5, 2, 4]
    for n in ended:
        txns[n].commit() if n != 5 else txns[n].rollback()
    ended.remove(5)
    for number in range(3):
        found = values(topic, partitions=[number], order=order, isolation=isolation)
        assert found == [b"%d:%d" % (n, part) for n in ended for part in range(5)]
    if isolation == "serializable":
        given = [m.value.split(b":")[0] for m in messages(topic, isolation=isolation)]
        assert given == [b"%d" % n for n in ended for _ in range(15)]
    txns[1].rollback()


def test_small_large_and_plain_side_by_side(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = client.new_transaction()
    expected = []
    for number in range(30):
        with monkeypatch.context() as patch:
            if number % 3 == 1:
                patch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
            value = b"%d" % number
            if number % 3 == 2:
                with client.new_session() as session:
                    session.send(topic, value)
            else:
                with client.transaction() as txn:
                    txn.send(topic, value)
            open_.send(topic, b"open %d" % number)
            open_.flush()
        expected.append(value)
        if number % 7 == 6:
            internals.flush(client)
        if number % 11 == 10:
            sweep(client)
    open_.commit()
    expected += [b"open %d" % number for number in range(30)]
    assert values(topic) == expected
    sweep(client)
    assert values(topic) == expected
    assert [m.offset for m in messages(topic)] == list(range(60))


def test_no_side_log_without_large_transactions(client: txnkv.Client, topic: txnkv.Topic) -> None:
    with client.transaction() as txn:
        txn.send(topic, b"a")
    with client.new_session() as session:
        session.send(topic, b"b")
    internals.flush(client)
    sweep(client)
    assert values(topic) == [b"a", b"b"]
    partition = partitions(client, NAME)[0]
    with partition.environment.read(), pytest.raises(KeyError):
        partition.environment.db(b"side")


def test_large_messages(client: txnkv.Client, topic: txnkv.Topic, size: str) -> None:
    large = bytes(range(256)) * 20_000
    with client.transaction() as txn:
        txn.send(topic, b"before")
        txn.send(topic, large, key=b"k")
        txn.send(topic, b"after")
    sweep(client)
    found = messages(topic)
    assert [(m.key, m.value) for m in found] == [(None, b"before"), (b"k", large), (None, b"after")]


def test_other_processes(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    """They send by the token, and read what was committed here."""
    txn = client.new_transaction(timeout=None)
    txn.send(topic, b"here")
    txn.flush()
    workers = [
        process(
            """
            txn = txnkv.Transaction.deserialize(client, txnkv.TxnToken(token))
            for number in range(50):
                txn.send("events", b"%d:%d" % (worker, number))
                txn.flush()
            say()
            wait()
            consumer = client.topic("events").consumer()
            found = []
            while len(found) < 101:
                found += [m.value for m in consumer.poll(timeout=5)]
            say(found)
            """,
            token=bytes(txn.serialize()),
            worker=worker,
        )
        for worker in range(2)
    ]
    for worker in workers:
        worker.hear()
    assert values(topic, isolation="read_uncommitted") == []
    txn.commit()
    found = values(topic)
    assert len(found) == 101
    for number, worker in enumerate(workers):
        own = [value for value in found if value.startswith(b"%d:" % number)]
        assert own == [b"%d:%d" % (number, n) for n in range(50)]
        worker.tell()
        assert worker.hear() == found


# -- who comes late --------------------------------------------------------------------


@pytest.mark.parametrize("late", ["after", "swept"])
def test_what_is_sent_after_a_timeout_is_never_seen(
    client: txnkv.Client,
    topic: txnkv.Topic,
    large: None,
    by_hand: Callable[[txnkv.Client], None],
    now: Any,
    late: str,
) -> None:
    zombie = client.new_transaction(timeout=5.0)
    zombie.send(topic, b"early")
    zombie.flush()
    now.forward(60)
    by_hand(client)
    if late == "swept":
        sweep(client)
        assert look(client, "transaction", zombie.id.local) is None
    with pytest.raises(TransactionTimedOutError):
        zombie.send(topic, b"late")
    row = internals.coordinator(client).get(zombie.id.local)
    with pytest.raises(InvalidTxnStateError):  # one that was stopped behind all such checks
        send_batch(client, row, partitions(client, NAME)[0], [b"late"])
    with pytest.raises(TransactionTimedOutError):
        zombie.commit()
    assert values(topic, isolation="read_uncommitted") == []
    sweep(client)
    assert look(client, "rows") == []


def test_an_append_under_way_is_over_before_the_commit_counts(
    client: txnkv.Client, topic: txnkv.Topic, large: None
) -> None:
    """The commit waits for LMDB's lock; what the append has put is in the marker."""
    txn = client.new_transaction()
    txn.send(topic, b"first")
    txn.flush()
    other = txnkv.Transaction.deserialize(client, txn.serialize())
    inside, go = threading.Event(), threading.Event()

    def stop() -> None:
        disarm("lmdb.before_commit")
        inside.set()
        assert go.wait(30)

    def append() -> None:
        other.send(topic, b"second")
        other.flush()

    arm("lmdb.before_commit", stop)
    sender = threading.Thread(target=append)
    sender.start()
    assert inside.wait(30)
    committer = threading.Thread(target=txn.commit)
    committer.start()
    go.set()
    sender.join(30)
    committer.join(30)
    assert values(topic) == [b"first", b"second"]


# -- compaction, retention, truncation --------------------------------------------------


def fill(client: txnkv.Client, topic: txnkv.Topic, rounds: int = 5, n: int = 10) -> list[bytes]:
    """Pairs of interleaved transactions, the second of each pair commits first."""
    expected: list[bytes] = []
    for round in range(rounds):
        left, right = client.new_transaction(), client.new_transaction()
        sent: dict[txnkv.Transaction, list[bytes]] = {left: [], right: []}
        for part in range(3):
            for txn, name in ((left, b"l"), (right, b"r")):
                for number in range(n):
                    sent[txn].append(b"%s%d:%d:%d" % (name, round, part, number) + b"." * 20)
                    txn.send(topic, sent[txn][-1])
                txn.flush()
        right.commit()
        left.commit()
        expected += sent[right] + sent[left]
    return expected


def test_the_leader_compacts_in_the_background(
    client: txnkv.Client,
    topic: txnkv.Topic,
    large: None,
    by_hand: Callable[[txnkv.Client], None],
) -> None:
    expected = fill(client, topic)
    before = topic.fetch(0, 0, 1 << 30).records
    assert look(client, "rows")
    by_hand(client)
    assert look(client, "rows") == []
    assert topic.fetch(0, 0, 1 << 30).records == before
    assert values(topic) == expected


def test_ids_of_messages_stay(
    client: txnkv.Client, topic: txnkv.Topic, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_sweep, "COMPACT_BYTES", 300)
    expected = fill(client, topic)
    ids = [(m.offset, m.value, m.txn_id) for m in messages(topic)]
    assert [value for _, value, _ in ids] == expected
    seen = []

    def read() -> None:
        seen.append([(m.offset, m.value, m.txn_id) for m in messages(topic)])

    arm("side.compacted", read)
    sweep(client)
    assert len(seen) > 5
    assert all(each == ids for each in seen)


def test_consumers_beside_compaction_and_commits(
    client: txnkv.Client, topic: txnkv.Topic, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_sweep, "COMPACT_BYTES", 400)
    monkeypatch.setattr(side_store, "OWN_BYTES", 1000)
    done = threading.Event()
    found: list[list[bytes]] = [[], []]

    def consume(into: list[bytes]) -> None:
        consumer = topic.consumer()
        while True:
            ended = done.is_set()
            given = consumer.poll(max_messages=7, timeout=0.01)
            into += [m.value for m in given]
            if ended and not given:
                return

    def compact() -> None:
        while not done.is_set():
            sweep(client)

    threads = [threading.Thread(target=consume, args=(each,)) for each in found]
    threads.append(threading.Thread(target=compact))
    for thread in threads:
        thread.start()
    try:
        expected = fill(client, topic, rounds=12)
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert found == [expected, expected]


def test_a_huge_transaction_is_adopted_and_dropped_whole(
    client: txnkv.Client, segmented: txnkv.Topic, large: None, small_own: None
) -> None:
    expected = fill(client, segmented, rounds=2)
    partition = partitions(client, NAME)[0]
    folder = partition.environment.path / "side"
    assert len(list(folder.iterdir())) == 4
    sweep(client)
    assert values(segmented) == expected
    assert len(list(folder.iterdir())) == 4
    partition.environment.write(lambda txn: partition.log.advance_start(txn, 60))
    assert sweep(client).dropped == 2
    assert len(list(folder.iterdir())) == 2
    assert values(segmented) == expected[60:]
    client.drop_topic(NAME)


def test_retention_by_size(
    client: txnkv.Client, large: None, by_hand: Callable[[txnkv.Client], None], now: Any
) -> None:
    """Segments count the bytes that their markers stand for."""
    options = TopicOptions(segment_bytes=2000, retention_bytes=4000)
    internals.topics(client).create(NAME, 1, "sidecar", options)
    topic = client.topic(NAME)
    expected = fill(client, topic, rounds=10)
    assert values(topic) == expected
    for _ in range(2):
        now.forward(120)
        by_hand(client)
    with pytest.raises(OffsetOutOfRangeError):
        topic.fetch(0, 0)
    left = values(topic)
    assert left == expected[-len(left) :]
    kept = sum(map(len, left))
    assert 3000 < kept < 8000
    assert look(client, "rows") == []


@pytest.mark.parametrize("swept", [False, True])
def test_truncation_takes_transactions_whole(
    client: txnkv.Client, topic: txnkv.Topic, large: None, swept: bool, small_own: None
) -> None:
    expected = fill(client, topic, rounds=2)
    if swept:
        sweep(client)
    reader = topic.consumer()
    assert [m.value for m in reader.poll(max_messages=10, timeout=0)] == expected[:10]
    (end,) = topic.end_offsets().values()
    with pytest.raises(OffsetOutOfRangeError, match=r"messages from 90 on .* Truncate after 89"):
        topic.truncate(after=99)
    assert topic.truncate(after=89) == {0: end}
    assert values(topic) == expected[:90]
    with client.transaction() as txn:
        for number in range(30):
            txn.send(topic, b"new %d" % number)
    sweep(client)
    assert values(topic) == [*expected[:90], *(b"new %d" % n for n in range(30))]
    assert [m.offset for m in messages(topic)] == [*range(90), *range(end, end + 30)]


def test_an_open_transaction_outlives_a_truncation(
    client: txnkv.Client, topic: txnkv.Topic, large: None
) -> None:
    txn = client.new_transaction()
    txn.send(topic, b"mine")
    txn.flush()
    fill(client, topic, rounds=1)
    end = topic.truncate(after=-1)[0]
    txn.commit()
    assert [(m.offset, m.value) for m in messages(topic)] == [(end, b"mine")]


# -- with others -----------------------------------------------------------------------


def test_a_copy_has_the_same_messages(
    connect: Callable[..., txnkv.Client],
    client: txnkv.Client,
    topic: txnkv.Topic,
    large: None,
    tmp_path: Any,
    small_own: None,
    store_path: Any,
) -> None:
    expected = fill(client, topic, rounds=3)
    copy = tmp_path / "copy"
    txnkv.replicate(store_path, copy)
    sweep(client)
    expected += fill(client, topic, rounds=2)
    txnkv.replicate(store_path, copy)
    with txnkv.connect(copy) as other:
        assert values(other.topic(NAME)) == expected
        theirs = other.topic(NAME).fetch(0, 0, 1 << 30).records
        assert theirs == topic.fetch(0, 0, 1 << 30).records
        assert other.check().problems == []


def test_dropped_with_side_logs_of_its_own(
    client: txnkv.Client,
    topic: txnkv.Topic,
    large: None,
    small_own: None,
    by_hand: Callable[[txnkv.Client], None],
) -> None:
    txn = client.new_transaction()
    for _ in range(5):
        txn.send(topic, b"x" * 200)
        txn.flush()
    folder = partitions(client, NAME)[0].environment.path
    assert (folder / "side").exists()
    client.drop_topic(NAME)
    assert txn.state == txnkv.TxnState.ABORTED
    txn.rollback()
    by_hand(client)
    by_hand(client)
    assert not folder.exists()


def test_batches_are_decided_ones(client: txnkv.Client, topic: txnkv.Topic, size: str) -> None:
    with client.transaction() as txn:
        txn.send(topic, b"a")
    result = topic.fetch(0, 0)
    ((_, header),) = walk(result.records)
    assert header.is_decided
    assert header.txn_id == txn.id.local
    assert header.commit_ts > 0
    assert result.aborted == []
