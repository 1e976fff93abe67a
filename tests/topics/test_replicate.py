"""A follower store: the same batches, its own state, the same index byte for byte."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.threads import at_once
from tools.topic_contents import partitions, raw, values
from tools.topic_writing import Writer
from txnkv.client.producer import Producer
from txnkv.client.replica import Replicated, replicate
from txnkv.errors import (
    NotSupportedError,
    OffsetOutOfRangeError,
    StoreNotFoundError,
    TopicExistsError,
    TopicNotFoundError,
)
from txnkv.topics.log.partition_state import unpack_entries
from txnkv.topics.read.offset_reader import fetch
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import roll_forward

TOPIC = "events"


@pytest.fixture
def source(client: txnkv.Client) -> Writer:
    return Writer(client, TOPIC, partitions=2, options=TopicOptions(segment_bytes=1500))


def copy(source: Writer, dest: txnkv.Client, **options: Any) -> Replicated:
    return replicate(source.client, dest, **{"max_bytes": 500, **options})


def state(client: txnkv.Client, number: int = 0) -> dict[str, Any]:
    """Return what a log says of itself, after it was brought up to date."""
    roll_forward.complete(internals.topics(client), partitions(client, TOPIC)[number])
    partition = partitions(client, TOPIC)[number]
    log = partition.log
    with partition.environment.read() as txn:
        segments = log.segments(txn)
        return {
            "bounds": (log.start(txn), log.end(txn), log.last_stable_offset(txn)),
            "open": log.open_transactions(txn),
            "mark": log.low_water_mark(txn),
            "segments": segments,
            "index": [log.aborted_index(txn, segment.base) for segment in segments],
            "commits": log.commits(txn, 0, 1 << 30),
        }


def agree(source: Writer, dest: txnkv.Client) -> None:
    for number in range(2):
        assert raw(dest, TOPIC, number) == raw(source.client, TOPIC, number)
        assert state(dest, number) == state(source.client, number)


def mixed(source: Writer, rounds: int = 6) -> None:
    """Small and large transactions, committed, aborted, interleaved."""
    for i in range(rounds):
        first, second = source.begin(), source.begin()
        source.append(first, f"{i}p1", f"{i}p2")
        source.small(f"{i}s")
        source.append(second, f"{i}q1", number=i % 2)
        source.append(first, f"{i}p3", number=1)
        (source.commit if i % 3 else source.abort)(first)
        source.append(second, f"{i}q2")
        (source.abort if i % 2 else source.commit)(second)


def test_it_has_the_same_batches_state_and_index(source: Writer, dest: txnkv.Client) -> None:
    mixed(source)
    done = copy(source, dest)
    agree(source, dest)
    index = b"".join(state(dest)["index"])
    assert len(unpack_entries(index)) > 3
    assert len(state(dest)["segments"]) > 2
    assert done.high_watermarks == {TOPIC: [state(dest, n)["bounds"][1] for n in range(2)]}
    assert done.copied_bytes == sum(len(raw(dest, TOPIC, n)) for n in range(2))


def test_it_goes_on_where_it_stopped(source: Writer, dest: txnkv.Client) -> None:
    sizes = []
    for _ in range(4):
        mixed(source, 2)
        sizes.append(copy(source, dest).copied_bytes)
        agree(source, dest)
    assert copy(source, dest).copied_bytes == 0
    assert sum(sizes) == sum(len(raw(dest, TOPIC, n)) for n in range(2))


def test_an_open_transaction_is_open_in_the_copy(source: Writer, dest: txnkv.Client) -> None:
    source.small("a")
    txn = source.begin()
    source.append(txn, "b", "c")
    source.small("d")
    copy(source, dest)
    agree(source, dest)
    assert state(dest)["bounds"] == (0, 4, 1)
    origin = partitions(dest, TOPIC)[0]
    assert fetch(internals.topics(dest), origin, 1).records == b""
    uncommitted = fetch(internals.topics(dest), origin, 1, isolation="read_uncommitted")
    assert uncommitted.records == raw(dest, TOPIC, 0, 1)
    source.abort(txn)
    copy(source, dest)
    agree(source, dest)
    found = fetch(internals.topics(dest), origin, 1)
    assert (found.last_stable_offset, found.high_watermark) == (5, 5)
    assert [each.first_offset for each in found.aborted or []] == [1]


def test_its_high_watermark_is_its_own(source: Writer, dest: txnkv.Client) -> None:
    source.small("a")
    copy(source, dest)
    source.small("b")
    ours = fetch(source.engine, partitions(source.client, TOPIC)[0], 0)
    theirs = fetch(internals.topics(dest), partitions(dest, TOPIC)[0], 0)
    assert (ours.high_watermark, theirs.high_watermark) == (2, 1)
    with pytest.raises(OffsetOutOfRangeError):
        fetch(internals.topics(dest), partitions(dest, TOPIC)[0], 2)


def test_messages_that_nobody_has_flushed_come_too(source: Writer, dest: txnkv.Client) -> None:
    for i in range(10):
        source.small(f"{i}")
    copy(source, dest)
    assert values(dest, TOPIC) == [b"%d" % i for i in range(10)]
    assert source.engine.tail.entries(partitions(source.client, TOPIC)[0].id, 0, 1 << 62)


def test_snapshots_of_the_follower_hold_what_was_copied(source: Writer, dest: txnkv.Client) -> None:
    source.small("a")
    done = copy(source, dest)
    assert internals.latest(dest) >= done.snapshot
    assert done.snapshot == internals.latest(source.client)
    with dest.snapshot() as snapshot:
        assert snapshot.timestamp >= done.snapshot


def test_nobody_else_writes_to_a_copy(source: Writer, dest: txnkv.Client) -> None:
    source.small("a")
    copy(source, dest)
    with pytest.raises(NotSupportedError, match="copy"):
        Producer(dest, internals.topics(dest).get(TOPIC), "p")
    assert values(dest, TOPIC) == [b"a"]


# -- what the source gives up or takes back ----------------------------------------------


def test_it_gives_up_what_the_source_gave_up(source: Writer, dest: txnkv.Client) -> None:
    mixed(source)
    copy(source, dest)
    origin = partitions(source.client, TOPIC)[0]
    with origin.environment.read() as txn:
        base = origin.log.segments(txn)[2].base
    origin.environment.write(lambda txn: origin.log.advance_start(txn, base))
    copy(source, dest)
    assert state(dest)["bounds"][0] == base
    agree(source, dest)


def test_it_begins_anew_where_it_fell_behind_retention(source: Writer, dest: txnkv.Client) -> None:
    source.small("a")
    copy(source, dest)
    mixed(source)
    origin = partitions(source.client, TOPIC)[0]
    roll_forward.complete(source.engine, origin)
    with origin.environment.read() as txn:
        base = origin.log.segments(txn)[2].base
    origin.environment.write(lambda txn: origin.log.advance_start(txn, base))
    copy(source, dest)
    assert raw(dest, TOPIC) == raw(source.client, TOPIC)
    assert state(dest)["bounds"] == state(source.client)["bounds"]
    source.small("b")
    copy(source, dest)
    assert values(dest, TOPIC)[-1] == b"b"


@pytest.mark.parametrize("keep", [0, 3, 7, 12])
def test_it_is_truncated_with_the_source(keep: int, source: Writer, dest: txnkv.Client) -> None:
    """Also where the source has gone on with others at the same offsets since."""
    for i in range(15):
        source.small(f"old {i}")
    copy(source, dest)
    source.lose(keep)
    assert copy(source, dest).copied_bytes == 0
    agree(source, dest)
    for i in range(20):
        source.small(f"new {i}")
    source.lose(keep + 1)
    for i in range(15):
        source.small(f"newer {i}")
    copy(source, dest)
    agree(source, dest)
    assert values(dest, TOPIC)[keep + 1] == b"newer 0"


def test_truncated_in_a_transaction_its_index_goes_back(source: Writer, dest: txnkv.Client) -> None:
    txn = source.begin()
    source.append(txn, "a", "b")
    source.abort(txn)
    source.small("c")
    copy(source, dest)
    partition = partitions(dest, TOPIC)[0]
    partition.environment.write(lambda txn: partition.log.truncate(txn, 2))
    with internals.status(dest).write() as cur:
        cur.execute("UPDATE partitions SET next_offset = 2 WHERE id = ?", (partition.id,))
    assert state(dest)["bounds"] == (0, 2, 0)
    copy(source, dest)
    agree(source, dest)


# -- which topics ------------------------------------------------------------------------


def test_topics_can_be_named(source: Writer, dest: txnkv.Client) -> None:
    Writer(source.client, "other").small("x")
    source.small("a")
    assert list(copy(source, dest, topics=["other"]).high_watermarks) == ["other"]
    assert internals.topics(dest).names() == ["other"]
    assert sorted(copy(source, dest).high_watermarks) == [TOPIC, "other"]
    with pytest.raises(TopicNotFoundError):
        copy(source, dest, topics=["none"])


def test_a_topic_of_its_own_is_not_overwritten(source: Writer, dest: txnkv.Client) -> None:
    Writer(dest, TOPIC).small("mine")
    source.small("a")
    with pytest.raises(TopicExistsError, match="no copy"):
        copy(source, dest)
    assert values(dest, TOPIC) == [b"mine"]


def test_paths_are_opened_and_closed(source: Writer, tmp_path: Path) -> None:
    mixed(source, 1)
    path = tmp_path / "new"
    steps: list[int] = []
    done = replicate(source.client.path, path, progress=steps.append)
    assert sum(steps) == done.copied_bytes > 0
    with txnkv.connect(path) as follower:
        agree(source, follower)
    with pytest.raises(ValueError, match="itself"):
        replicate(source.client, source.client.path)
    with pytest.raises(StoreNotFoundError):
        replicate(tmp_path / "none", path)
    with pytest.raises(ValueError, match="max_bytes"):
        replicate(source.client, path, max_bytes=0)


def test_a_side_log_topic_is_copied_in_commit_order(
    dest: txnkv.Client, client: txnkv.Client
) -> None:
    source = Writer(client, TOPIC, partitions=2, buffer="sidecar")
    first, second = source.begin(), source.begin()
    source.append(first, "a1")
    source.append(second, "b1", "b2")
    source.append(first, "a2")
    source.small("s")
    source.commit(second)
    source.commit(first)
    lost = source.begin()
    source.append(lost, "lost")
    source.abort(lost)
    copy(source, dest)
    assert values(dest, TOPIC) == [b"s", b"b1", b"b2", b"a1", b"a2"]
    source.small("t")
    copy(source, dest)
    assert values(dest, TOPIC)[-1] == b"t"
    assert raw(dest, TOPIC) == raw(client, TOPIC)


def test_a_side_log_topic_is_truncated_with_the_source(
    dest: txnkv.Client, client: txnkv.Client
) -> None:
    """The source has another commit at the same offsets since."""
    source = Writer(client, TOPIC, buffer="sidecar")
    for i in range(6):
        source.small(f"old {i}")
    copy(source, dest)
    source.lose(3)
    for i in range(5):
        source.small(f"new {i}")
    copy(source, dest)
    assert values(dest, TOPIC) == values(client, TOPIC)
    assert raw(dest, TOPIC) == raw(client, TOPIC)


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
@pytest.mark.parametrize("behind", [0, 1, 6])
def test_it_begins_within_a_batch(
    dest: txnkv.Client, client: txnkv.Client, buffer: Any, behind: int
) -> None:
    """The source was truncated there: the copy could not be made, or not go on. It may have what is
    before the batch, or another log at its offsets.
    """
    topic = client.create_topic(TOPIC, buffer=buffer)
    for _ in range(behind):
        with client.transaction() as txn:
            txn.send(topic, b"before")
    if behind:
        replicate(client, dest)
    if behind == 6:
        topic.truncate(after=0)
    for _ in range(2):
        with client.transaction() as txn:
            txn.send_batch(topic, pa.table({"value": [b"a"] * 5}))
    start = topic.end_offsets()[0] - (8 if buffer == "marker" else 7)
    topic.truncate(start)
    for _ in range(2):
        replicate(client, dest)
        assert values(dest, TOPIC) == values(client, TOPIC)
        assert raw(dest, TOPIC) == raw(client, TOPIC)
        copied = partitions(dest, TOPIC)[0]
        with copied.environment.read() as txn:
            assert copied.log.start(txn) == start


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_its_source_is_truncated_twice_at_one_place(
    dest: txnkv.Client, client: txnkv.Client, buffer: Any
) -> None:
    """The offsets that are given to nobody any more are one filler, which had become longer."""
    source = Writer(client, TOPIC, buffer=buffer)
    topic = client.topic(TOPIC)
    for i in range(5):
        source.small(f"{i}")
    topic.truncate(after=2)
    copy(source, dest)
    for i in range(2):
        source.small(f"lost {i}")
    topic.truncate(after=2)
    for i in range(3):
        source.small(f"new {i}")
    for _ in range(2):
        copy(source, dest)
        assert values(dest, TOPIC) == values(client, TOPIC)
        assert raw(dest, TOPIC) == raw(client, TOPIC)


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_a_copy_of_a_topic_that_was_made_anew_is_refused(
    buffer: str, dest: txnkv.Client, client: txnkv.Client
) -> None:
    Writer(client, TOPIC, buffer=buffer).small("old")
    replicate(client, dest)
    consumer = dest.topic(TOPIC).consumer()
    client.drop_topic(TOPIC)
    Writer(client, TOPIC, buffer=buffer).small("new")
    with pytest.raises(TopicExistsError, match="made anew"):
        replicate(client, dest)
    assert values(dest, TOPIC) == [b"old"]
    dest.drop_topic(TOPIC)
    replicate(client, dest)
    with pytest.raises(TopicNotFoundError):
        consumer.poll(timeout=0)
    assert values(dest, TOPIC) == [b"new"]


# -- deaths ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "hit"),
    [
        *(("follow.put", hit) for hit in (1, 2, 3)),
        *(("follow.offset", hit) for hit in (1, 2)),
        *(("lmdb.before_commit", hit) for hit in (1, 2, 5)),
        *(("lmdb.after_commit", hit) for hit in (1, 4)),
        *(("status.before_commit", hit) for hit in (1, 2, 3)),
    ],
)
def test_killed_it_goes_on(
    point: str, hit: int, source: Writer, dest: txnkv.Client, process: Callable[..., Any],
) -> None:  # fmt: skip
    mixed(source, 4)
    path = dest.path
    child = process(
        """
        from txnkv.storage import arm
        from txnkv.client.replica import replicate
        with txnkv.connect(path) as follower:
            say()
            wait()
            arm(point, f"kill@{hit}")
            replicate(client, follower, max_bytes=500)
        """,
        path=path, point=point, hit=hit,
    )  # fmt: skip
    child.hear()
    child.tell()
    child.finish(-signal.SIGKILL)
    copy(source, dest)
    agree(source, dest)


def test_killed_while_it_gives_up_what_the_source_has_not(
    source: Writer, dest: txnkv.Client, process: Callable[..., Any]
) -> None:
    for i in range(8):
        source.small(f"old {i}")
    copy(source, dest)
    source.lose(3)
    source.small("new")
    child = process(
        """
        from txnkv.storage import arm
        from txnkv.client.replica import replicate
        with txnkv.connect(path) as follower:
            arm("follow.cut", "kill")
            replicate(client, follower, max_bytes=500)
        """,
        path=dest.path,
    )
    child.finish(-signal.SIGKILL)
    copy(source, dest)
    agree(source, dest)


@pytest.mark.parametrize(("behind", "hit"), [(False, 1), (True, 1), (True, 2)])
def test_killed_while_it_begins_anew_within_a_batch(
    client: txnkv.Client, dest: txnkv.Client, process: Callable[..., Any], behind: bool, hit: int
) -> None:
    """A copy that is behind, of a log that was truncated since, is first truncated, too."""
    source = Writer(client, TOPIC)
    topic = client.topic(TOPIC)
    if behind:
        for i in range(6):
            source.small(f"before {i}")
        replicate(client, dest)
        source.lose(1)
    with client.transaction() as txn:
        txn.send_batch(topic, pa.table({"value": [b"a"] * 20}))
    topic.truncate(topic.end_offsets()[0] - 10)
    child = process(
        """
        from txnkv.storage import arm
        from txnkv.client.replica import replicate
        with txnkv.connect(source) as origin, txnkv.connect(path) as follower:
            arm("follow.cut", f"kill@{hit}")
            replicate(origin, follower)
        """,
        source=client.path, path=dest.path, hit=hit,
    )  # fmt: skip
    child.finish(-signal.SIGKILL)
    replicate(client, dest)
    assert raw(dest, TOPIC) == raw(client, TOPIC)
    consumers = [each.topic(TOPIC).consumer() for each in (client, dest)]
    there, here = ([m.id for m in consumer.poll(timeout=0)] for consumer in consumers)
    assert here == there
    assert len(here) > 5


def test_runs_at_one_time_take_turns(source: Writer, dest: txnkv.Client) -> None:
    mixed(source)
    done = at_once(*[lambda: copy(source, dest, max_bytes=200)] * 3)
    agree(source, dest)
    copied = sum(each.copied_bytes for each in done)
    assert copied == sum(len(raw(dest, TOPIC, number)) for number in range(2))


def test_consumers_of_the_follower_read_what_was_committed(
    source: Writer, dest: txnkv.Client
) -> None:
    mixed(source)
    txnkv.replicate(source.client, dest)
    txn = source.begin()
    source.append(txn, "open")
    source.small("behind it")
    txnkv.replicate(source.client, dest)
    for options in ({}, {"isolation": "serializable"}, {"order": "commit"}):
        both = []
        for client in (source.client, dest):
            found: list[txnkv.Message] = []
            with client.topic(TOPIC).consumer(**options) as consumer:
                while some := consumer.poll(timeout=0.3):
                    found += some
            both.append(sorted((m.partition, m.offset, m.value) for m in found))
        assert both[0] == both[1]
        assert len(both[0]) > 10
        assert b"open" not in [value for _, _, value in both[1]]
    source.abort(txn)


def test_it_follows_a_writer_that_goes_on(source: Writer, dest: txnkv.Client) -> None:
    """Run between and during writes, it is always a prefix of the source."""
    stop = threading.Event()

    def write() -> None:
        i = 0
        while not stop.is_set():
            txn = source.begin()
            source.append(txn, f"{i}a", f"{i}b")
            source.small(f"{i}c")
            (source.commit if i % 2 else source.abort)(txn)
            i += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(6):
            copy(source, dest)
            for number in range(2):
                own = raw(dest, TOPIC, number)
                assert raw(source.client, TOPIC, number)[: len(own)] == own
    finally:
        stop.set()
        thread.join()
    copy(source, dest)
    agree(source, dest)


def test_it_begins_within_a_batch_that_another_log_was_part_of(
    source: Writer, dest: txnkv.Client, client: txnkv.Client
) -> None:
    """What the copy has at the offsets of the batch is of a log that was cut off since."""
    for i in range(3):
        source.small(f"old {i}")
    copy(source, dest)
    end = state(dest)["bounds"][1]
    source.lose(1)
    row = source.begin()
    source.append(row, *["new"] * 20)
    source.commit(row)
    assert end < 15
    client.topic(TOPIC).truncate({0: 15})
    for _ in range(2):
        copy(source, dest)
        assert values(dest, TOPIC) == values(client, TOPIC)
        assert raw(dest, TOPIC) == raw(client, TOPIC)


def test_a_copy_keeps_what_its_subscriptions_have_not_acknowledged(
    client: txnkv.Client, dest: txnkv.Client
) -> None:
    """The source, where nobody subscribes, has given it up."""
    topic = client.create_topic(TOPIC, retain_unacknowledged=True)
    for i in range(4):
        with client.transaction() as txn:
            txn.send(topic, b"%d" % i)
    replicate(client, dest)
    with dest.topic(TOPIC).subscribe("s") as subscription:
        topic.truncate(topic.end_offsets()[0])
        replicate(client, dest)
        assert [subscription.receive(timeout=0).value for _ in range(4)] == [b"0", b"1", b"2", b"3"]
