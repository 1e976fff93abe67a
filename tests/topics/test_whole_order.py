"""Serializable consumers: several partitions as one stream of whole transactions."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.log_tools import COMMIT, data, marker
from tests.topics.reading_tools import drained, partition_of, put
from tools.topic_writers import begin, commit, send, small
from txnkv.topics import topic_catalog
from txnkv.topics.write import roll_forward


@pytest.fixture(params=["marker", "sidecar"])
def topic(client: txnkv.Client, request: pytest.FixtureRequest) -> Any:
    return client.create_topic("events", partitions=3, buffer=request.param)


def whole(topic: Any, **options: Any) -> Any:
    return topic.consumer("serializable", **options)


def told(messages: list[Any]) -> list[tuple[int, bytes]]:
    return [(m.partition, m.value) for m in messages]


def partitions(client: txnkv.Client, topic: Any) -> list[Any]:
    return [partition_of(client, topic, number) for number in range(3)]


def test_the_picture(client: txnkv.Client, topic: Any) -> None:
    p0, p1, _ = partitions(client, topic)
    small(client, [p0], [b"T1"])
    small(client, [p1], [b"T2"])
    row = begin(client)
    send(client, row, p1, [b"T3"])
    send(client, row, p0, [b"T3"])
    commit(client, row)
    small(client, [p0], [b"T4"])
    consumer = whole(topic)
    expected = [(0, b"T1"), (1, b"T2"), (0, b"T3"), (1, b"T3"), (0, b"T4")]
    assert told(drained(consumer)) == expected
    small(client, [p1], [b"T5"])
    assert told(drained(consumer)) == [(1, b"T5")]
    for most in (1, 2, 3):
        assert told(drained(whole(topic), most)) == [*expected, (1, b"T5")]


def test_small_and_large_ones_in_commit_order(client: txnkv.Client, topic: Any) -> None:
    """Many transactions over changing partitions, several open at once."""
    all_of_them = partitions(client, topic)
    committed, open_ = [], []
    for i in range(40):
        chosen = [p for bit, p in enumerate(all_of_them) if (i % 7 + 1) >> bit & 1]
        value = b"%d" % i
        if i % 3 == 0:
            row = begin(client)
            for partition in chosen:
                send(client, row, partition, [value] * 2)
            open_.append((row, [(p.number, value) for p in chosen for _ in range(2)]))
            if len(open_) > 3:
                row, messages = open_.pop(i % 3)
                commit(client, row)
                committed.append(messages)
        else:
            small(client, chosen, [value])
            committed.append([(p.number, value) for p in chosen])
        if i == 20:
            client.compact()
    expected = [message for messages in committed for message in messages]
    assert told(drained(whole(topic))) == expected
    assert told(drained(whole(topic), 5)) == expected
    some = [(n, v) for n, v in expected if n != 1]
    assert told(drained(whole(topic, partitions=[0, 2]))) == some


def test_no_poll_ends_inside_of_a_transaction_that_fits(client: txnkv.Client, topic: Any) -> None:
    all_of_them = partitions(client, topic)
    for i in range(30):
        small(client, all_of_them[: i % 3 + 1], [b"%d" % i] * (i % 4 + 1))
    large = begin(client)
    for partition in all_of_them:
        send(client, large, partition, [b"large"] * 10)
    commit(client, large)
    small(client, all_of_them, [b"last"])
    for most in (12, 17, 31, 500):
        consumer = whole(topic)
        seen: list[Any] = []
        while messages := consumer.poll(max_messages=most, timeout=0):
            assert len(messages) <= most
            ids = [id for id, _ in groupby(m.txn_id for m in messages)]
            assert len(ids) == len(set(ids))
            if most >= 30:
                assert not set(ids) & {m.txn_id for m in seen}
            seen += messages
        ids = [id for id, _ in groupby(m.txn_id for m in seen)]
        assert len(ids) == len(set(ids)) == 32


def test_what_came_while_a_snapshot_was_given(client: txnkv.Client, topic: Any) -> None:
    """A poll that finds all of the last snapshot given goes on with the next one, at once."""
    p0, p1, _ = partitions(client, topic)
    small(client, [p0], [b"1", b"2"])
    consumer = whole(topic)
    assert len(consumer.poll(max_messages=2, timeout=0)) == 2
    small(client, [p1], [b"3"])
    assert told(consumer.poll(max_messages=2, timeout=0)) == [(1, b"3")]


def test_what_is_open_and_what_was_aborted(client: txnkv.Client, topic: Any) -> None:
    p0, p1, _ = partitions(client, topic)
    slow, gone = begin(client), begin(client)
    send(client, slow, p0, [b"slow"])
    send(client, gone, p0, [b"gone"])
    small(client, [p0, p1], [b"quick"])
    send(client, slow, p1, [b"slow"])
    client.abort_transaction(internals.coordinator(client).txn_id(gone.txn_id))
    consumer = whole(topic)
    assert told(drained(consumer)) == [(0, b"quick"), (1, b"quick")]
    commit(client, slow)
    assert told(drained(consumer)) == [(0, b"slow"), (1, b"slow")]


def test_a_marker_that_is_missing_in_one_partition(
    by_hand: Any, client: txnkv.Client, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finalizer died between two partitions: the transaction is seen whole, or not at all."""
    p0, p1, _ = partitions(client, topic)
    row = begin(client)
    for partition in (p0, p1):
        send(client, row, partition, [b"a"])
    monkeypatch.setattr("txnkv.topics.write.roll_forward.complete_marked", lambda *_: {})
    commit(client, row)
    roll_forward.complete(internals.topics(client), p0)
    assert told(drained(whole(topic))) == [(0, b"a"), (1, b"a")]


def test_a_reader_that_cannot_write_waits_for_the_marker(
    by_hand: Any,
    client: txnkv.Client,
    topic: Any,
    process: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p0, p1, _ = partitions(client, topic)
    small(client, [p0, p1], [b"first"])
    client.compact()
    reader = process(
        """
        consumer = client.topic("events").consumer("serializable")
        while wait() != "end":
            say([(m.partition, m.value) for m in consumer.poll(timeout=0)])
        """,
        options={"read_only": True},
    )

    def seen() -> Any:
        reader.tell()
        return reader.hear()

    assert seen() == [(0, b"first"), (1, b"first")]
    row = begin(client)
    for partition in (p0, p1):
        send(client, row, partition, [b"a"])
    with monkeypatch.context() as patch:
        patch.setattr("txnkv.topics.write.roll_forward.complete_marked", lambda *_: {})
        commit(client, row)
    roll_forward.complete(internals.topics(client), p0)
    assert seen() == []
    roll_forward.complete(internals.topics(client), p1)
    assert seen() == [(0, b"a"), (1, b"a")]
    reader.tell("end")
    reader.finish()


def test_an_append_that_is_under_way_is_waited_for(
    client: txnkv.Client, process: Any, until: Any
) -> None:
    """Outside of a transaction it has its time before it is in the log: what committed later in
    another partition is not given before it.
    """
    topic = client.create_topic("plain", partitions=2)
    p0, p1 = (partition_of(client, topic, number) for number in (0, 1))
    other = process(
        """
        from tools.topic_writers import batch
        from txnkv.topics.write import append
        engine = client.instance.topics
        append.append_alone(engine, engine.partitions(engine.get("plain"))[0], [batch([b"first"])])
        """,
        fault="append.reserved=pause:0.3",
    )
    until(lambda: internals.topics(client).look(p0.id).next_offset == 1)
    small(client, [p1], [b"second"])
    assert told(drained(whole(topic))) == [(0, b"first"), (1, b"second")]
    other.finish()


def test_latest_is_one_moment(client: txnkv.Client, topic: Any, monkeypatch: Any) -> None:
    """A transaction that commits while the ends of partitions are looked up is seen whole or not
    at all.
    """
    all_of_them = partitions(client, topic)
    small(client, all_of_them, [b"before"])
    import txnkv.client.consumer as module

    real, calls = module.bounds, iter(range(100))

    def bounds(*args: Any) -> Any:
        if next(calls) == 1:
            small(client, all_of_them, [b"between"])
        return real(*args)

    monkeypatch.setattr(module, "bounds", bounds)
    consumer = whole(topic, start="latest")
    small(client, all_of_them, [b"behind"])
    assert told(drained(consumer)) == [(0, b"behind"), (1, b"behind"), (2, b"behind")]


def test_seek(client: txnkv.Client, topic: Any) -> None:
    p0, p1, _ = partitions(client, topic)
    for i in range(4):
        small(client, [p0, p1], [b"%d" % i])
    consumer = whole(topic)
    assert len(consumer.poll(max_messages=4, timeout=0)) == 4
    assert (consumer.position(0), consumer.position(1)) == (2, 2)
    consumer.seek(1, 3)
    assert told(drained(consumer)) == [(0, b"2"), (0, b"3"), (1, b"3")]
    for number in (0, 1):
        consumer.seek(number, 1)
    assert [v for _, v in told(drained(consumer))] == [b"1", b"1", b"2", b"2", b"3", b"3"]


def test_messages_outside_of_transactions_go_by_their_time(client: txnkv.Client) -> None:
    topic = client.create_topic("plain", partitions=2)
    for i in range(6):
        session = client.new_session()
        session.send(topic, b"%d" % i, partition=i % 2)
        session.flush()
    assert [m.value for m in drained(whole(topic))] == [b"%d" % i for i in range(6)]


def test_batches_without_a_time_stand_with_the_commit_before_them(client: txnkv.Client) -> None:
    topic = client.create_topic("copied", partitions=2)
    small(client, [partition_of(client, client.create_topic("now"))], [b"now"])
    put(client, topic, data(n=1, values=[b"old"]))
    put(client, topic, data(3, values=[b"a"], decided=True), ts=100)
    put(client, topic, data(n=1, values=[b"b"]))
    put(client, topic, data(4, values=[b"c"], decided=True), ts=300)
    put(client, topic, data(5, values=[b"x"]), number=1)
    put(client, topic, marker(COMMIT, 5), number=1, ts=200)
    assert [m.value for m in drained(whole(topic))] == [b"old", b"a", b"b", b"x", b"c"]


def test_a_transaction_larger_than_a_look(client: txnkv.Client, topic: Any) -> None:
    p0, p1, _ = partitions(client, topic)
    row = begin(client)
    for i in range(10):
        for partition in (p0, p1):
            send(client, row, partition, [b"%d" % i] * 3)
        small(client, [p0, p1], [b"s%d" % i])
    commit(client, row)
    small(client, [p1], [b"end"])
    for most in (4, 25, 500):
        consumer = whole(topic)
        for reader in consumer._readers.values():
            reader._max_bytes = 1
        found = told(drained(consumer, most))
        expected = [(n, b"s%d" % i) for i in range(10) for n in (0, 1)]
        assert found[:20] == expected
        assert found[-1] == (1, b"end")
        for number in (0, 1):
            mine = [v for n, v in found[20:-1] if n == number]
            assert mine == [b"%d" % i for i in range(10) for _ in range(3)]


def test_appends_that_begin_while_it_helps_are_for_the_next_look(
    client: txnkv.Client, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside busy writers it answered that nothing was there: offsets were taken since it had
    begun to look, so it took what it had for incomplete.
    """
    engine, partition = internals.topics(client), partition_of(client, topic, 0)
    small(client, [partition], [b"T1"])
    complete = roll_forward.complete

    def take_one(*_: Any) -> int:
        """Offsets of an append that is under way, in another process."""
        with engine.store.status.write() as cur:
            return topic_catalog.take_offsets(cur, partition.id, 1)

    def complete_beside_others(*args: Any) -> int:
        end = complete(*args)
        take_one()
        return end

    take_one()
    monkeypatch.setattr(roll_forward, "complete", complete_beside_others)
    assert told(whole(topic).poll(timeout=0)) == [(0, b"T1")]
