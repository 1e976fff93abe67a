"""Fetches: what is there, where it ends, and that nobody misses a commit that returned."""

from __future__ import annotations

from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.log_tools import ABORT, COMMIT, data, marker, script
from tests.topics.reading_tools import partition_of, put
from tools.topic_writers import abort, begin, commit, send, small
from txnkv import core
from txnkv.topics import topic_catalog
from txnkv.topics.read import log_view
from txnkv.topics.read.log_view import bounds
from txnkv.topics.write import roll_forward


@pytest.fixture
def topic(client: txnkv.Client) -> Any:
    return client.create_topic("events")


def found(topic: Any, offset: int = 0, **options: Any) -> list[tuple[int, int]]:
    """First offset and count of the batches of a fetch."""
    records = topic.fetch(0, offset, **options).records
    return [(h.base_offset, h.count) for _, h in core.walk(records)] if records else []


def flush(client: txnkv.Client) -> None:
    """Write what waits in memory into the logs, and forget it there."""
    client.compact()


def reserve(client: txnkv.Client, topic: Any, count: int) -> None:
    """Take offsets and write nothing, as one who dies does."""
    with internals.status(client).write() as cur:
        topic_catalog.take_offsets(cur, topic.info.partitions[0], count)


# -- what is there ---------------------------------------------------------------------


def test_an_empty_topic(topic: Any) -> None:
    for level in ("read_committed", "read_uncommitted"):
        result = topic.fetch(0, 0, isolation=level)
        assert (result.records, result.high_watermark, result.last_stable_offset) == (b"", 0, 0)
    assert topic.fetch(0, 0).aborted == []
    assert topic.fetch(0, 0, isolation="read_uncommitted").aborted is None
    assert topic.end_offsets() == topic.last_stable_offsets() == {0: 0}


def test_memory_and_log_are_one_row_of_offsets(client: txnkv.Client, topic: Any) -> None:
    partition = partition_of(client, topic)
    small(client, [partition], [b"a", b"b"])
    small(client, [partition], [b"c"])
    assert found(topic) == [(0, 2), (2, 1)]
    roll_forward.complete(internals.topics(client), partition)  # they are in both now
    small(client, [partition], [b"d"])
    assert found(topic) == [(0, 2), (2, 1), (3, 1)]
    assert found(topic, 3) == [(3, 1)]
    assert topic.end_offsets() == {0: 4}
    flush(client)
    small(client, [partition], [b"e"])
    assert found(topic, 1) == [(0, 2), (2, 1), (3, 1), (4, 1)]


def test_the_first_batch_holds_the_offset(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, data(n=5), data(n=3), data(n=2))
    assert found(topic, 4, max_bytes=1) == [(0, 5)]
    assert found(topic, 5, max_bytes=1) == [(5, 3)]
    assert found(topic, 7) == [(5, 3), (8, 2)]
    small(client, [partition_of(client, topic)], [b"x", b"y"])
    assert found(topic, 11) == [(10, 2)]


def test_one_batch_at_least_and_whole_ones(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, data(n=3, size=1000), data(size=10), data(size=10))
    first = [topic.fetch(0, offset, max_bytes=1).records for offset in (0, 3, 4)]
    sizes = [core.read_header(batch).decoded_bytes for batch in first]
    assert found(topic, max_bytes=1) == [(0, 3)]
    assert found(topic, max_bytes=sizes[0] + sizes[1]) == [(0, 3), (3, 1)]
    assert found(topic, max_bytes=sizes[0] + sizes[1] + sizes[2] - 1) == [(0, 3), (3, 1)]
    partition = partition_of(client, topic)
    small(client, [partition], [b"z" * 100])
    assert found(topic, max_bytes=sum(sizes)) == [(0, 3), (3, 1), (4, 1)]
    assert found(topic, max_bytes=sum(sizes) + 1000) == [(0, 3), (3, 1), (4, 1), (5, 1)]


def test_outside_of_the_log(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, data(n=5), data(n=5))
    partition = partition_of(client, topic)
    partition.environment.write(lambda txn: partition.log.advance_start(txn, 5))
    for offset in (4, 11):
        with pytest.raises(
            txnkv.OffsetOutOfRangeError, match=rf"'events', partition 0.*{offset}.*\[5, 10\)"
        ):
            topic.fetch(0, offset)
    assert found(topic, 5) == [(5, 5)]
    assert found(topic, 10) == []
    assert topic.fetch(0, 10).start_offset == 5


def test_arguments_that_make_no_sense(topic: Any) -> None:
    with pytest.raises(ValueError, match="isolation"):
        topic.fetch(0, 0, isolation="serializable")
    with pytest.raises(ValueError, match="max_bytes"):
        topic.fetch(0, 0, max_bytes=0)
    with pytest.raises(ValueError, match="partition 1"):
        topic.fetch(1, 0)


def test_a_size_above_all_is_the_largest(client: txnkv.Client, topic: Any) -> None:
    """It was an OverflowError."""
    with client.transaction() as txn:
        txn.send(topic, "a")
    for most in (1 << 62, 1 << 63, 1 << 64, 10**400):
        assert found(topic, max_bytes=most) == [(0, 1)]


def test_a_dropped_topic(client: txnkv.Client, topic: Any) -> None:
    small(client, [partition_of(client, topic)], [b"a"])
    client.drop_topic("events")
    with pytest.raises(txnkv.TopicNotFoundError, match="was dropped"):
        topic.fetch(0, 0)


# -- where it ends ---------------------------------------------------------------------


def test_an_open_transaction_holds_readers_of_committed_messages_back(
    client: txnkv.Client, topic: Any
) -> None:
    partition = partition_of(client, topic)
    small(client, [partition], [b"a"])
    row = begin(client)
    send(client, row, partition, [b"b", b"c"])
    small(client, [partition], [b"d"])
    assert found(topic) == [(0, 1)]
    for offset in (1, 2, 3, 4):  # at or behind the last stable offset: empty, no error
        result = topic.fetch(0, offset)
        assert (result.records, result.aborted) == (b"", [])
        assert (result.last_stable_offset, result.high_watermark) == (1, 4)
    assert found(topic, isolation="read_uncommitted") == [(0, 1), (1, 2), (3, 1)]
    commit(client, row)
    assert found(topic) == [(0, 1), (1, 2), (3, 1), (4, 1)]
    assert topic.fetch(0, 0).aborted == []


def test_an_aborted_transaction_is_listed(client: txnkv.Client, topic: Any) -> None:
    partition = partition_of(client, topic)
    row = begin(client)
    send(client, row, partition, [b"b", b"c"])
    small(client, [partition], [b"d"])
    abort(client, row)
    result = topic.fetch(0, 0)
    assert result.aborted == [(row.txn_id, 0)]
    assert result.aborted[0].producer_id == row.txn_id
    assert topic.fetch(0, 2).aborted == [(row.txn_id, 0)]
    small(client, [partition], [b"e"])
    assert topic.fetch(0, 4).aborted == []


def test_the_list_stops_where_the_fetch_ends(client: txnkv.Client, topic: Any) -> None:
    """It names all that may be in the fetch, and none that begins behind its end."""
    words = " ".join(f"P{i} A{i}" for i in range(1, 101))
    put(client, topic, *script(words))
    one = len(topic.fetch(0, 0, max_bytes=1).records)
    assert topic.fetch(0, 0, max_bytes=one).aborted == [(1, 0)]
    assert topic.fetch(0, 50, max_bytes=one).aborted == [(26, 50)]
    assert len(topic.fetch(0, 0).aborted) == 100


def test_a_snapshot_of_the_start_is_not_below_it(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, data(1, 5), data(n=5))
    partition = partition_of(client, topic)
    partition.environment.write(lambda txn: partition.log.advance_start(txn, 7))
    assert bounds(internals.topics(client), partition) == (7, 10, 7)
    put(client, topic, marker(ABORT, 1))
    assert bounds(internals.topics(client), partition) == (7, 11, 11)


# -- nobody misses a commit that returned ----------------------------------------------


@pytest.fixture
def unfinished(by_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes end markers but who needs them: as if every finalizer had just died."""
    monkeypatch.setattr("txnkv.topics.write.roll_forward.complete_marked", lambda *_: {})


def test_a_fetch_writes_the_marker_that_is_missing(
    unfinished: None, client: txnkv.Client, topic: Any
) -> None:
    partition, other = partition_of(client, topic), partition_of(client, client.create_topic("o"))
    row = begin(client)
    send(client, row, partition, [b"a"])
    send(client, row, other, [b"a"])
    commit(client, row)
    with partition.environment.read() as txn:
        assert partition.log.end(txn) == 1
    assert topic.last_stable_offsets() == {0: 2}
    assert found(topic) == [(0, 1), (1, 1)]
    with partition.environment.read() as txn:
        assert partition.log.end(txn) == 2


def test_a_hole_before_a_commit_is_filled(client: txnkv.Client, topic: Any) -> None:
    """Offsets were reserved by one who died; then others committed behind them."""
    partition = partition_of(client, topic)
    small(client, [partition], [b"a"])
    reserve(client, topic, 3)
    small(client, [partition], [b"b"])
    assert topic.end_offsets() == {0: 5}
    assert [h.is_control for _, h in core.walk(topic.fetch(0, 0).records)] == [False, True, False]


def test_a_hole_with_nothing_behind_it_is_left_alone(client: txnkv.Client, topic: Any) -> None:
    """It may be an append that is under way."""
    partition = partition_of(client, topic)
    small(client, [partition], [b"a"])
    reserve(client, topic, 3)
    assert topic.end_offsets() == {0: 1}
    assert found(topic, 1) == []


def test_commits_of_another_process(
    client: txnkv.Client, topic: Any, process: Any, until: Any
) -> None:
    """Each is seen by the first fetch after it returned, small and large ones alike."""
    other = process(
        """
        from tools.topic_writers import begin, commit, send, small
        engine = client.instance.topics
        (partition,) = engine.partitions(engine.get("events"))
        say()
        for i in range(10):
            wait()
            if i % 2:
                row = begin(client)
                send(client, row, partition, [b"large"])
                commit(client, row)
            else:
                small(client, [partition], [b"small"])
            say()
        """
    )
    other.hear()
    end = 0
    for i in range(10):
        assert topic.end_offsets() == {0: end}
        other.tell()
        other.hear()
        end += 2 if i % 2 else 1  # its end marker takes an offset
        assert topic.last_stable_offsets() == {0: end}
    other.finish()
    assert found(topic) == [(offset, 1) for offset in range(end)]


def test_a_long_tail_is_walked_once(client: txnkv.Client, topic: Any, monkeypatch: Any) -> None:
    """Entries reached without a gap are not looked at again, until a flush takes them away."""
    partition = partition_of(client, topic)
    engine = internals.topics(client)
    for i in range(50):
        small(client, [partition], [b"%d" % i])
    assert topic.end_offsets() == {0: 50}
    asked: list[int] = []
    entries = engine.tail.entries

    def counted(*args: Any) -> Any:
        answer = entries(*args)
        asked.append(len(answer))
        return answer

    monkeypatch.setattr(engine.tail, "entries", counted)
    assert topic.end_offsets() == {0: 50}
    assert max(asked) == 1
    small(client, [partition], [b"last"])
    assert topic.end_offsets() == {0: 51}
    flush(client)
    small(client, [partition], [b"more"])
    assert topic.end_offsets() == {0: 52}
    assert len(found(topic)) == 52


def test_read_only(client: txnkv.Client, topic: Any, process: Any) -> None:
    """A reader that cannot write sees what is in memory, also where no log was ever made."""
    partition = partition_of(client, topic)
    reader = process(
        """
        topic = client.topic("events")
        while wait() != "end":
            say([m.value for m in topic.consumer().poll(timeout=0)])
        """,
        options={"read_only": True},
    )

    def seen() -> Any:
        reader.tell()
        return reader.hear()

    assert seen() == []
    small(client, [partition], [b"a"])
    assert seen() == [b"a"]
    row = begin(client)
    send(client, row, partition, [b"b"])
    assert seen() == [b"a"]
    commit(client, row)
    assert seen() == [b"a", b"b"]
    reader.tell("end")
    reader.finish()


def test_a_fetch_keeps_nothing_of_the_log(client: txnkv.Client, topic: Any) -> None:
    """The bytes that a fetch gave stay, when the log is given up from its start and written on."""
    put(client, topic, *[data(n=100, size=100) for _ in range(20)])
    kept = topic.fetch(0, 0, max_bytes=1 << 30).records
    copy = bytes(bytearray(kept))
    partition = partition_of(client, topic)
    partition.environment.write(lambda txn: partition.log.advance_start(txn, 2000))
    for _ in range(3):
        put(client, topic, *[data(n=100, size=100) for _ in range(20)])
    assert kept == copy
    assert len(core.walk(kept)) == 20


def test_damage_is_told(client: txnkv.Client, topic: Any) -> None:
    broken = bytearray(data(n=3))
    broken[90] ^= 1
    partition = partition_of(client, topic)
    small(client, [partition], [b"a"])
    engine = internals.topics(client)
    placed = core.place(bytes(broken), 1)
    from txnkv.topics.tail import TailEntry

    stamp = engine.log.latest()
    engine.tail._entries[partition.id].append(TailEntry(1, 3, placed, stamp))
    for isolation in ("read_committed", "read_uncommitted", "serializable"):
        consumer = topic.consumer(isolation=isolation)
        assert [message.value for message in consumer.poll(timeout=0)] == [b"a"]
        with pytest.raises(txnkv.CorruptionError, match="'events', partition 0, offset 1"):
            consumer.poll(timeout=0)
        assert consumer.position(0) == 1
    engine.tail._entries[partition.id].pop()


def test_end_and_commit_markers(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, data(7), marker(COMMIT, 7))
    headers = [h for _, h in core.walk(topic.fetch(0, 0).records)]
    assert [(h.txn_id, h.is_control) for h in headers] == [(7, False), (7, True)]


def test_looks_at_the_tail_go_on_where_they_were(client: txnkv.Client, topic: Any) -> None:
    """Each went over all commits that no flush had taken: thousands, at a thousand a second."""
    topics, partition = internals.topics(client), partition_of(client, topic)
    small(client, [partition], [b"0"])
    flush(client)  # there is a log now
    for number in range(1, 10):
        small(client, [partition], [b"%d" % number])
        assert topic.fetch(0, number).high_watermark == number + 1
        fresh, reached = log_view._tail_of(topics, partition, topics.log.latest())
        assert (len(fresh), reached) == (1, number + 1)
