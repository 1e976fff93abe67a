"""Consumers: what they are given and when, positions, waiting, large messages, forks."""

from __future__ import annotations

import math
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.topics.log_tools import ABORT, COMMIT, data, marker, piece, script
from tests.topics.reading_tools import drained, given, offsets, partition_of, put
from tools.topic_writers import abort, begin, commit, send, small
from txnkv import core
from txnkv.client.consumer import MESSAGE_COLUMNS
from txnkv.topics import waiting
from txnkv.topics.log.log_state import LOG
from txnkv.topics.write import roll_forward

VALUE = pa.schema([("value", pa.binary())])
LEVELS = ("read_uncommitted", "read_committed", "serializable")


@pytest.fixture
def topic(client: txnkv.Client) -> Any:
    return client.create_topic("events", partitions=2)


def send_all(client: txnkv.Client, topic: Any, *values: bytes, partition: int = 0) -> None:
    with client.transaction() as txn:
        for value in values:
            txn.send(topic, value, partition=partition)


# -- what is given ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"isolation": "read_uncommitted"}, {"order": "commit"}],
    ids=["committed", "uncommitted", "commit order"],
)
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_partition_keeps_back_no_other(
    client: txnkv.Client, topic: Any, options: dict[str, Any], damaged: int
) -> None:
    sound = 1 - damaged
    send_all(client, topic, b"a", b"b", partition=sound)
    send_all(client, topic, b"lost", partition=damaged)
    client.compact()
    environment = partition_of(client, topic, damaged).environment

    def spoil(txn: Any) -> None:
        with txn.cursor(db=environment.db(LOG)) as cursor:
            cursor.first()
            key, value = bytes(cursor.key()), bytearray(cursor.value())
        value[-1] ^= 1
        txn.put(key, bytes(value), db=environment.db(LOG))

    environment.write(spoil)
    found, errors = [], []
    with topic.consumer(**options) as consumer:
        for _ in range(6):
            try:
                found += [message.value for message in consumer.poll(timeout=0)]
            except txnkv.CorruptionError as error:
                errors.append(str(error))
        assert consumer.position(sound) == 2
    assert found == [b"a", b"b"]
    assert errors
    assert all(f"partition {damaged}" in error for error in errors)
    client.drop_topic("events")


@pytest.mark.parametrize("isolation", LEVELS)
def test_messages_are_given_once_and_in_order(
    client: txnkv.Client, topic: Any, isolation: str
) -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    with client.transaction() as txn:
        txn.send(topic, b"a", key=b"k", partition=1, headers=[("h", b"1")], timestamp=when)
        txn.send(topic, None, partition=1)
    consumer = topic.consumer(isolation=isolation)
    first, second = consumer.poll(timeout=0)
    assert (first.value, first.key, first.headers, first.timestamp) == (
        b"a", b"k", [("h", b"1")], when
    )  # fmt: skip
    assert (first.partition, first.offset, first.txn_id) == (1, 0, txn.id)
    assert (second.value, second.key, second.headers, second.offset) == (None, None, [], 1)
    assert consumer.poll(timeout=0) == []
    send_all(client, topic, b"b", partition=1)
    assert [m.value for m in consumer.poll(timeout=0)] == [b"b"]


def test_batches_of_messages(client: txnkv.Client, topic: Any) -> None:
    with client.transaction() as txn:
        for number in (0, 1):
            txn.send(topic, b"v", key=b"k", partition=number, headers=[("h", b"")])
    plain = client.new_session()
    plain.send(topic, None, partition=1)
    plain.flush()
    batch = topic.consumer().poll_batch(timeout=0)
    assert batch.schema == MESSAGE_COLUMNS
    columns = batch.drop_columns(["timestamp"]).to_pydict()
    assert columns == {
        "offset": [0, 0, 1],
        "partition": [0, 1, 1],
        "key": [b"k", b"k", None],
        "value": [b"v", b"v", None],
        "headers": [core.encode_headers([("h", b"")])] * 2 + [None],
        "txn_id": [txn.id.local, txn.id.local, 0],
    }
    batch.validate(full=True)
    empty = topic.consumer(start="latest").poll_batch(timeout=0)
    assert (empty.num_rows, empty.schema) == (0, MESSAGE_COLUMNS)


def test_no_more_than_asked_for(client: txnkv.Client, topic: Any) -> None:
    send_all(client, topic, *[b"%d" % i for i in range(7)])
    send_all(client, topic, *[b"%d" % i for i in range(7, 10)], partition=1)
    for isolation in LEVELS:
        consumer = topic.consumer(isolation=isolation)
        sizes, found = [], []
        while messages := consumer.poll(max_messages=3, timeout=0):
            sizes.append(len(messages))
            found += messages
        assert max(sizes) == 3
        assert sorted(int(m.value) for m in found) == list(range(10))
    consumer = topic.consumer()
    parts = [consumer.poll_batch(max_messages=4, timeout=0) for _ in range(3)]
    assert [part.num_rows for part in parts] == [4, 4, 2]
    with pytest.raises(ValueError, match="max_messages"):
        consumer.poll(max_messages=0)


def test_partitions_take_turns(client: txnkv.Client, topic: Any) -> None:
    for number in (0, 1):
        send_all(client, topic, *[b"x"] * 100, partition=number)
    consumer = topic.consumer()
    turns = [{m.partition for m in consumer.poll(max_messages=10, timeout=0)} for _ in range(4)]
    assert turns == [{0}, {1}, {0}, {1}]


def test_some_partitions_alone(client: txnkv.Client, topic: Any) -> None:
    send_all(client, topic, b"a", partition=0)
    send_all(client, topic, b"b", partition=1)
    consumer = topic.consumer(partitions=[1])
    assert consumer.partitions == [1]
    assert [m.value for m in consumer.poll(timeout=0)] == [b"b"]
    with pytest.raises(ValueError, match="does not read partition 0"):
        consumer.seek(0, 0)
    with pytest.raises(ValueError, match="no partition 2"):
        topic.consumer(partitions=[2])


def test_levels_differ(client: txnkv.Client, topic: Any) -> None:
    partition = partition_of(client, topic)
    small(client, [partition], [b"a"])
    slow, gone = begin(client), begin(client)
    send(client, slow, partition, [b"slow"])
    send(client, gone, partition, [b"gone"])
    abort(client, gone)
    small(client, [partition], [b"b"])
    level = topic.consumer
    assert [v for _, v in given(level("read_uncommitted"))] == [b"a", b"slow", b"gone", b"b"]
    assert [v for _, v in given(level("read_committed"))] == [b"a"]
    assert [v for _, v in given(level("read_committed", order="commit"))] == [b"a", b"b"]
    assert [v for _, v in given(level("serializable"))] == [b"a", b"b"]
    commit(client, slow)
    assert [v for _, v in given(level("read_committed"))] == [b"a", b"slow", b"b"]
    assert [v for _, v in given(level("read_committed", order="commit"))] == [b"a", b"b", b"slow"]


def test_arguments_that_make_no_sense(topic: Any) -> None:
    for options in (
        {"isolation": "committed"}, {"order": "time"}, {"start": "first"}, {"start": {3: 0}},
        {"start": {0: -1}}, {"partitions": []},
        {"isolation": "read_uncommitted", "order": "commit"},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            topic.consumer(**options)


# -- positions -------------------------------------------------------------------------


def test_where_it_begins(client: txnkv.Client, topic: Any) -> None:
    send_all(client, topic, b"a", b"b", b"c")
    assert offsets(topic.consumer(start="earliest")) == [0, 1, 2]
    latest = topic.consumer(start="latest")
    assert latest.position(0) == 3
    chosen = topic.consumer(start={0: 1})
    assert (chosen.position(0), chosen.position(1)) == (1, 0)
    assert offsets(chosen) == [1, 2]
    send_all(client, topic, b"d")
    assert offsets(latest) == [3]
    partition = partition_of(client, topic)
    roll_forward.complete(internals.topics(client), partition)
    partition.environment.write(lambda txn: partition.log.advance_start(txn, 2))
    assert offsets(topic.consumer()) == [2, 3]


def test_latest_waits_for_what_is_open(client: txnkv.Client, topic: Any) -> None:
    """Messages that are not committed yet will be given; those committed before are passed."""
    partition = partition_of(client, topic)
    small(client, [partition], [b"a"])
    row = begin(client)
    send(client, row, partition, [b"open"])
    by_offset, by_commit = (
        topic.consumer(start="latest"),
        topic.consumer(start="latest", order="commit"),
    )
    whole = topic.consumer("serializable", start="latest")
    assert by_offset.position(0) == 1
    commit(client, row)
    for consumer in (by_offset, by_commit, whole):
        assert [v for _, v in given(consumer)] == [b"open"]


def test_positions_move_with_what_is_given(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, data(1, 2), data(2, 2), marker(ABORT, 1), marker(COMMIT, 2), data(n=2))
    consumer = topic.consumer()
    places = []
    while consumer.poll(max_messages=1, timeout=0):
        places.append(consumer.position(0))
    assert places == [3, 4, 7, 8]
    assert (consumer.position(0), consumer.lag()) == (8, 0)


def test_seek(client: txnkv.Client, topic: Any) -> None:
    send_all(client, topic, *[b"%d" % i for i in range(10)])
    consumer = topic.consumer()
    assert len(consumer.poll(max_messages=4, timeout=0)) == 4
    consumer.seek(0, 8)
    assert consumer.position(0) == 8
    assert offsets(consumer) == [8, 9]
    consumer.seek(0, 5)
    assert offsets(consumer) == [5, 6, 7, 8, 9]
    consumer.seek(0, 10)
    assert offsets(consumer) == []
    consumer.seek(0, 11)
    with pytest.raises(txnkv.OffsetOutOfRangeError, match=r"\[0, 10\)"):
        consumer.poll(timeout=0)
    consumer.seek(0, 9)
    assert offsets(consumer) == [9]
    with pytest.raises(ValueError, match="-1"):
        consumer.seek(0, -1)
    with pytest.raises(TypeError, match="a time is an aware datetime, not the str '2026'"):
        consumer.seek_to_time("2026")


def test_a_wait_and_a_transaction_may_be_without_end(client: txnkv.Client, topic: Any) -> None:
    consumer = topic.consumer()
    with client.transaction(timeout=math.inf) as txn:
        txn.serialize()
        txn.send(topic, b"0")
    assert [message.offset for message in consumer.poll(timeout=math.inf)] == [0]


def test_partitions_may_be_any_numbers_in_turn(client: txnkv.Client, topic: Any) -> None:
    send_all(client, topic, b"0")
    assert offsets(topic.consumer(partitions=(each for each in [0]))) == [0]


def test_seek_drops_what_is_known_of_aborted_transactions(client: txnkv.Client, topic: Any) -> None:
    """A transaction that is aborted, begins again and is committed; the reader goes back and
    forth within.
    """
    put(client, topic, *script("P1 P2 A1 P1 C1 P2 C2 P1 A1"))
    for most in (1, 500):
        consumer = topic.consumer()
        assert [o for o, _ in given(consumer, most)] == [1, 3, 5]
        for start in (0, 7, 3, 1, 5, 8, 0):
            consumer.seek(0, start)
            assert [o for o, _ in given(consumer, most)] == [o for o in (1, 3, 5) if o >= start]


def test_a_position_that_retention_took(client: txnkv.Client, topic: Any) -> None:
    send_all(client, topic, b"a", b"b", b"c")
    partition = partition_of(client, topic)
    roll_forward.complete(internals.topics(client), partition)
    consumer = topic.consumer()
    partition.environment.write(lambda txn: partition.log.advance_start(txn, 3))
    with pytest.raises(txnkv.OffsetOutOfRangeError, match=r"earliest"):
        consumer.poll(timeout=0)
    consumer.seek(0, 3)
    send_all(client, topic, b"d")
    assert [m.value for m in consumer.poll(timeout=0)] == [b"d"]


def test_seek_to_time(client: txnkv.Client, topic: Any) -> None:
    begin_ = datetime(2026, 1, 1, tzinfo=UTC)
    with client.transaction() as txn:
        for i in range(10):
            txn.send(topic, b"%d" % i, partition=0, timestamp=begin_ + timedelta(minutes=i))
    consumer = topic.consumer()
    consumer.seek_to_time(begin_ + timedelta(minutes=6, seconds=1))
    assert [m.value for m in consumer.poll(timeout=0)] == [b"7", b"8", b"9"]
    consumer.seek_to_time(begin_ + timedelta(hours=1))
    assert consumer.poll(timeout=0) == []
    assert consumer.position(0) == 10
    with pytest.raises(ValueError, match="time zone"):
        consumer.seek_to_time(datetime(2026, 1, 1))


def test_lag(client: txnkv.Client, topic: Any) -> None:
    send_all(client, topic, *[b"x"] * 5)
    send_all(client, topic, *[b"y"] * 3, partition=1)
    consumer = topic.consumer()
    assert (consumer.lag(), consumer.lag(0), consumer.lag(1)) == (8, 5, 3)
    consumer.poll(max_messages=4, timeout=0)
    assert consumer.lag() == 4
    drained(consumer)
    assert consumer.lag() == 0


# -- waiting ---------------------------------------------------------------------------


def test_it_waits_for_the_first_message(client: txnkv.Client, topic: Any) -> None:
    found: list[Any] = []
    consumer = topic.consumer()
    waiting = threading.Thread(target=lambda: found.extend(consumer.poll(timeout=60)))
    waiting.start()
    send_all(client, topic, b"now")
    waiting.join(60)
    assert [m.value for m in found] == [b"now"]


def test_a_commit_of_this_process_ends_the_sleep_of_who_waits(
    client: txnkv.Client, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is: one of many minutes here."""
    monkeypatch.setattr(waiting, "_FIRST", 1000.0)
    monkeypatch.setattr(waiting, "_LONGEST", 1000.0)
    consumer = topic.consumer()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(consumer.poll(timeout=900)))
    thread.start()
    while not internals.topics(client).log.sleepers:
        time.sleep(0.001)
    send_all(client, topic, b"now")
    thread.join(60)
    assert [message.value for message in found] == [b"now"]


@pytest.mark.parametrize("isolation", LEVELS)
def test_another_process_wakes_it(
    client: txnkv.Client, topic: Any, process: Any, isolation: str
) -> None:
    consumer = topic.consumer(isolation=isolation)
    other = process(
        """
        from tools.topic_writers import begin, commit, send, small
        engine = client.instance.topics
        partition = engine.partitions(engine.get("events"))[0]
        say()
        for i in range(4):
            wait()
            if i % 2:
                row = begin(client)
                send(client, row, partition, [b"%d" % i])
                commit(client, row)
            else:
                small(client, [partition], [b"%d" % i])
        """
    )
    other.hear()
    for i in range(4):
        other.tell()
        assert [m.value for m in consumer.poll(timeout=60)] == [b"%d" % i]
    other.finish()


def test_an_append_wakes_readers_of_what_is_not_committed(
    client: txnkv.Client, topic: Any, process: Any
) -> None:
    """Nothing is committed in status.db after the batch is in the log."""
    consumer = topic.consumer("read_uncommitted")
    other = process(
        """
        from tools.topic_writers import begin, send
        engine = client.instance.topics
        partition = engine.partitions(engine.get("events"))[0]
        row = begin(client)
        say()
        for i in range(3):
            wait()
            send(client, row, partition, [b"%d" % i])
        wait()
        """
    )
    other.hear()
    for i in range(3):
        other.tell()
        assert [m.value for m in consumer.poll(timeout=60)] == [b"%d" % i]
    other.kill()


def test_the_time_is_over(topic: Any) -> None:
    assert topic.consumer().poll(timeout=0.01) == []
    assert topic.consumer("serializable").poll_batch(timeout=0.01).num_rows == 0


def test_iteration(client: txnkv.Client, topic: Any) -> None:
    send_all(client, topic, b"a", b"b")
    with topic.consumer() as consumer:
        messages = iter(consumer)
        assert [next(messages).value for _ in range(2)] == [b"a", b"b"]
        late = threading.Thread(target=send_all, args=(client, topic, b"c"))
        late.start()
        assert next(messages).value == b"c"
        late.join()
        consumer.close()
        assert list(messages) == []


def test_a_closed_consumer(client: txnkv.Client, topic: Any, connect: Any) -> None:
    consumer = topic.consumer()
    consumer.close()
    consumer.close()
    with pytest.raises(txnkv.ClosedError, match="consumer of 'events' was closed"):
        consumer.poll(timeout=0)
    second = connect()
    consumer = second.topic("events").consumer()
    second.close()
    with pytest.raises(txnkv.ClosedError):
        consumer.poll(timeout=0)


def test_closing_ends_a_wait(topic: Any) -> None:
    consumer = topic.consumer()
    errors: list[BaseException] = []
    began = threading.Event()

    def wait() -> None:
        try:
            began.set()
            consumer.poll(timeout=60)
        except txnkv.ClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    began.wait()
    consumer.close()
    waiting.join(60)
    assert len(errors) == 1


def test_two_threads_at_once(topic: Any, until: Any) -> None:
    consumer = topic.consumer()
    waiting = threading.Thread(target=lambda: consumer.poll(timeout=0.5))
    waiting.start()
    until(lambda: consumer._user is not None)
    with pytest.raises(RuntimeError, match="two threads"):
        consumer.poll(timeout=0)
    waiting.join()
    assert consumer.poll(timeout=0) == []


def test_a_dropped_topic(client: txnkv.Client, topic: Any) -> None:
    consumer = topic.consumer()
    client.drop_topic("events")
    with pytest.raises(txnkv.TopicNotFoundError, match="was dropped"):
        consumer.poll(timeout=0)
    with pytest.raises(txnkv.TopicNotFoundError):
        topic.consumer()


def test_a_forked_child_goes_on(client: txnkv.Client, topic: Any) -> None:
    send_all(client, topic, *[b"%d" % i for i in range(6)])
    consumer = topic.consumer()
    assert len(consumer.poll(max_messages=2, timeout=0)) == 2
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            send_all(client, topic, b"child")
            os.write(writing, b",".join(value for _, value in given(consumer)))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"2,3,4,5,child"
    os.waitpid(child, 0)
    assert [value for _, value in given(consumer)] == [b"2", b"3", b"4", b"5", b"child"]


# -- large messages --------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("isolation", LEVELS)
@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_a_large_message_comes_whole(
    client: txnkv.Client, buffer: str, isolation: str, compression: str | None
) -> None:
    topic = client.create_topic("large", buffer=buffer, compression=compression)
    large = os.urandom(1 << 20) * 3 + b"end"
    with client.transaction() as txn:
        txn.send(topic, b"before")
        txn.send(topic, large, key=b"k", headers=[("h", b"1")])
        txn.send(topic, b"behind")
    messages = drained(topic.consumer(isolation=isolation))
    assert [m.value for m in messages] == [b"before", large, b"behind"]
    assert (messages[1].key, messages[1].headers) == (b"k", [("h", b"1")])
    assert messages[0].offset < messages[1].offset < messages[2].offset
    batch = topic.consumer(isolation=isolation, order="offset").poll_batch(timeout=0)
    assert batch.num_rows >= 1


def test_pieces_between_others(client: txnkv.Client, topic: Any) -> None:
    put(
        client, topic, piece(b"a", 0, 3, key=b"k"), data(n=1, values=[b"x"]), piece(b"b", 1, 3),
        piece(b"A", 0, 2, txn=2, id=6), piece(b"c", 2, 3), piece(b"B", 1, 2, txn=2, id=6),
        marker(COMMIT, 1), data(n=1, values=[b"y"]), marker(COMMIT, 2),
    )  # fmt: skip
    expected = [(1, b"x"), (4, b"abc"), (5, b"AB"), (7, b"y")]
    for isolation in ("read_uncommitted", "read_committed"):
        assert given(topic.consumer(isolation)) == expected
        assert given(topic.consumer(isolation), most=1) == expected
    assert topic.consumer().poll(timeout=0)[1].key == b"k"
    by_commit = [(1, b"x"), (4, b"abc"), (7, b"y"), (5, b"AB")]
    assert given(topic.consumer(order="commit")) == by_commit


def test_a_position_is_never_in_the_middle_of_a_large_message(
    client: txnkv.Client, topic: Any
) -> None:
    put(client, topic, data(n=2), piece(b"a", 0, 2), piece(b"b", 1, 2), data(n=1))
    consumer = topic.consumer("read_uncommitted")
    consumer._readers[0]._max_bytes = 1  # a batch at a time
    places = [consumer.position(0)]
    while consumer.poll(timeout=0):
        places.append(consumer.position(0))
    assert places == [0, 2, 4, 5]
    put(client, topic, marker(COMMIT, 1))


@pytest.mark.parametrize("most", [1, 2, 9])
def test_positions_go_up_and_lose_nothing(client: txnkv.Client, topic: Any, most: int) -> None:
    put(
        client, topic, piece(b"a", 0, 3), data(n=1), piece(b"b", 1, 3), data(n=2),
        piece(b"A", 0, 2, txn=2, id=6), piece(b"c", 2, 3), data(n=1),
        piece(b"B", 1, 2, txn=2, id=6),
        marker(COMMIT, 1), marker(COMMIT, 2),
    )  # fmt: skip
    every = offsets(topic.consumer())
    assert every == [1, 3, 4, 6, 7, 8]
    consumer = topic.consumer()
    consumer._readers[0]._max_bytes = 1  # a batch at a time
    last = 0
    got: list[int] = []
    while messages := consumer.poll(max_messages=most, timeout=0):
        got += [m.offset for m in messages]
        assert consumer.position(0) > got[-1] >= last
        last = consumer.position(0)
        assert got + offsets(topic.consumer(start={0: last})) == every


def test_who_begins_in_the_middle_gets_it_whole(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, piece(b"a", 0, 2), piece(b"b", 1, 2), marker(COMMIT, 1), data(n=1))
    assert offsets(topic.consumer(start={0: 1})) == [1, 3]
    assert offsets(topic.consumer()) == [1, 3]


def test_pieces_of_an_aborted_transaction_are_given_up(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, data(n=1), piece(b"a", 0, 2), marker(ABORT, 1), data(n=1))
    for isolation in ("read_uncommitted", "read_committed"):
        consumer = topic.consumer(isolation)
        assert offsets(consumer) == [0, 3]
        assert consumer.position(0) == 4
