"""Commit order: one slow transaction delays nobody, and positions are places of commits."""

from __future__ import annotations

from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.log_tools import COMMIT, data, marker, script
from tests.topics.reading_tools import drained, given, offsets, partition_of, put
from tools.topic_writers import begin, commit, send, small
from txnkv.core import walk
from txnkv.topics.read import batch_places
from txnkv.topics.read.commit_reader import CommitReader
from txnkv.topics.write import roll_forward


@pytest.fixture
def topic(client: txnkv.Client) -> Any:
    return client.create_topic("events")


def by_commit(topic: Any, **options: Any) -> Any:
    return topic.consumer(order="commit", **options)


def with_little_memory(consumer: Any) -> Any:
    """One batch a look."""
    consumer._readers[0]._max_bytes = 1
    return consumer


def test_transactions_come_as_they_committed(client: txnkv.Client, topic: Any) -> None:
    """The picture of commit_reader."""
    put(client, topic, *script("P1 P2 P2 C2 D7 P1 C1 D8"))
    expected = [1, 2, 4, 0, 5, 7]
    for most in (1, 2, 500):
        assert [o for o, _ in given(by_commit(topic), most)] == expected
        assert [o for o, _ in given(with_little_memory(by_commit(topic)), most)] == expected
    assert offsets(topic.consumer()) == [0, 1, 2, 4, 5, 7]


def test_what_is_open_holds_nothing_back(client: txnkv.Client, topic: Any) -> None:
    partition = partition_of(client, topic)
    slow = begin(client)
    send(client, slow, partition, [b"slow"])
    consumer = by_commit(topic)
    for i in range(5):
        small(client, [partition], [b"%d" % i])
        assert [v for _, v in given(consumer)] == [b"%d" % i]
    row = begin(client)
    send(client, row, partition, [b"large"])
    commit(client, row)
    assert [v for _, v in given(consumer)] == [b"large"]
    send(client, slow, partition, [b"slower"])
    commit(client, slow)
    assert [v for _, v in given(consumer)] == [b"slow", b"slower"]
    assert topic.consumer().position(0) == 0


def test_aborted_and_late_messages_are_never_given(client: txnkv.Client, topic: Any) -> None:
    late = marker(COMMIT, 5, mark=9)  # all below 9 have ended
    put(client, topic, *script("P1 P5 A1 P2"), late, *script("P2 P1 D12 P3"))
    assert offsets(by_commit(topic)) == [1, 7]


def test_a_transaction_that_commits_twice(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, *script("P1 P2 C1 P1 P2 A1 P1 C2 P1 C1"))
    assert offsets(by_commit(topic)) == [0, 1, 4, 6, 8]


def test_positions_are_places_of_commits(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, *script("P1 P2*3 P1 C2 D7 P1*2 C1 D8"))
    # P1 at 0, 4 and 7-8, committed at 9; P2 at 1-3, committed at 5; decided ones at 6 and 10
    consumer = by_commit(topic)
    places = [(consumer.position(0), [])]
    while messages := consumer.poll(max_messages=1, timeout=0):
        places[-1][1].append(messages[0].offset)
        if consumer.position(0) != places[-1][0]:
            places.append((consumer.position(0), []))
    assert places == [(0, [1, 2, 3]), (6, [6]), (7, [0, 4, 7, 8]), (10, [10]), (11, [])]
    everything = [1, 2, 3, 6, 0, 4, 7, 8, 10]
    for place, _ in places:
        consumer.seek(0, place)
        left = sum(len(part) for at, part in places if at < place)
        assert offsets(consumer) == everything[left:]
    assert offsets(by_commit(topic, start={0: 6})) == [6, 0, 4, 7, 8, 10]


def test_a_long_transaction_comes_in_parts(client: txnkv.Client, topic: Any) -> None:
    """More than one look gives; and nothing comes between its parts."""
    batches = []
    for i in range(20):
        batches += [data(1, 2, size=100), data(2, 1, size=100), data(100 + i, decided=True)]
    put(client, topic, *batches, *script("C2 C1 D7"))
    small_ones = [4 * i + 3 for i in range(20)]
    first = [o for i in range(20) for o in (4 * i, 4 * i + 1)]
    second = [4 * i + 2 for i in range(20)]
    expected = small_ones + second + first + [82]
    for most in (1, 7, 500):
        for consumer in (by_commit(topic), with_little_memory(by_commit(topic))):
            assert [o for o, _ in given(consumer, most)] == expected


def test_memory_and_log(client: txnkv.Client, topic: Any) -> None:
    """The index of commits goes on in what waits in memory."""
    partition = partition_of(client, topic)
    for i in range(3):
        small(client, [partition], [b"a%d" % i, b"b%d" % i])
    roll_forward.complete(internals.topics(client), partition)
    row = begin(client)
    send(client, row, partition, [b"large"])
    small(client, [partition], [b"c"])
    commit(client, row)
    small(client, [partition], [b"d"])
    consumer = by_commit(topic)
    assert [v for _, v in given(consumer)] == [
        b"a0", b"b0", b"a1", b"b1", b"a2", b"b2", b"c", b"large", b"d"
    ]  # fmt: skip
    client.compact()
    again = by_commit(topic)
    assert [v for _, v in given(again)][-3:] == [b"c", b"large", b"d"]
    assert again.position(0) == consumer.position(0) == topic.end_offsets()[0]
    assert consumer.lag() == 0


def test_many_commits_in_one_look(client: txnkv.Client, topic: Any) -> None:
    """More than the index gives at once."""
    put(client, topic, *[data(n=1) for _ in range(5000)])
    assert offsets(by_commit(topic)) == list(range(5000))


def test_over_a_sidecar_it_is_the_order_of_offsets(client: txnkv.Client) -> None:
    topic = client.create_topic("side", buffer="sidecar")
    partition = partition_of(client, topic)
    first, second = begin(client), begin(client)
    send(client, first, partition, [b"first"])
    send(client, second, partition, [b"second"])
    small(client, [partition], [b"small"])
    commit(client, second)
    commit(client, first)
    expected = [b"small", b"second", b"first"]
    for options in ({"order": "commit"}, {}, {"isolation": "serializable"}):
        assert [m.value for m in drained(topic.consumer(**options))] == expected


def test_commits_at_or_below_a_timestamp_are_passed_over(client: txnkv.Client, topic: Any) -> None:
    partition = partition_of(client, topic)
    stamps = [small(client, [partition], [b"%d" % i]) for i in range(5)]
    engine = internals.topics(client)
    reader = CommitReader(engine, partition, 0, above=stamps[2])
    assert reader.load(stamps[3])
    assert reader.head == (stamps[3], 1, True)
    assert reader.take(10)["value"].to_pylist() == [b"3"]
    assert not reader.load(stamps[3])
    assert reader.load(stamps[4])
    assert reader.take(10)["value"].to_pylist() == [b"4"]


def test_interleaved_transactions_are_looked_through_once(
    client: txnkv.Client, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the log once more for each of them; also when they are more than are remembered."""
    count, turns = 50, 20
    walked = 0

    def counting(chunk: Any) -> Any:
        nonlocal walked
        found = walk(chunk)
        walked += len(found)
        return found

    monkeypatch.setattr(batch_places, "walk", counting)
    ids = range(1, count + 1)
    batches = [data(id, values=[b"%d-%d" % (id, turn)]) for turn in range(turns) for id in ids]
    ends = [marker(COMMIT, id) for id in reversed(ids)]
    put(client, topic, *batches, *ends)
    expected = [b"%d-%d" % (id, turn) for id in reversed(ids) for turn in range(turns)]
    assert [value for _, value in given(by_commit(topic))] == expected
    assert walked <= 2 * (len(batches) + len(ends))
    assert [value for _, value in given(with_little_memory(by_commit(topic)))] == expected
    monkeypatch.setattr(batch_places, "_MOST", 100)
    assert [value for _, value in given(by_commit(topic))] == expected


def test_gaps_of_what_was_looked_through(client: txnkv.Client, topic: Any) -> None:
    """Short transactions far apart, and long ones over all of them."""
    put(client, topic, *script("P1 P2 D9 P3 C3 D9 P2 P1 D9 P4 C4 P5 P1 A5 P2 D9 C2 C1 P6 C6"))
    found = given(by_commit(topic), 1)
    assert sorted(o for o, _ in found) == sorted(offsets(topic.consumer()))
    assert found == given(with_little_memory(by_commit(topic)), 2)
