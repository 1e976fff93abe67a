"""The engine of topics: catalog, offsets, the tail, appends, end markers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.threads import at_once
from tests.topics.engine_tools import controls, is_dense, no_room, offsets
from tools.topic_contents import raw, stored, values
from tools.topic_writers import abort, batch, begin, commit, create, send, small
from txnkv import core
from txnkv.errors import (
    InvalidTxnStateError,
    UnavailableError,
)
from txnkv.storage import arm
from txnkv.topics.write import append, roll_forward

# -- small commits ---------------------------------------------------------------------


def test_messages_of_a_small_commit_are_in_every_tail(
    client: txnkv.Client, elsewhere: Callable[..., Any]
) -> None:
    left, right = create(client, partitions=2)
    first = small(client, [left, right], [b"a", b"b"])
    second = small(client, [left], [b"c"])
    engine = internals.topics(client)
    entries = engine.tail.entries(left.id, 0, engine.log.latest())
    assert [(e.base_offset, e.count, e.stamp) for e in entries] == [(0, 2, first), (2, 1, second)]
    assert engine.tail.entries(left.id, 0, first) == entries[:1]
    assert engine.tail.entries(left.id, 1, second) == entries
    assert engine.tail.entries(left.id, 2, second) == entries[1:]
    assert engine.tail.entries(left.id, 3, second) == []
    assert engine.look(left.id)[:2] == (3, False)
    there = elsewhere(
        "engine = client.instance.topics; at = engine.log.latest();"
        "say([(e.base_offset, e.data) for e in engine.tail.entries(id, 0, at)])",
        id=left.id,
    )
    assert there == [(e.base_offset, e.data) for e in entries]
    headers = [core.read_header(entry.data) for entry in entries]
    assert [(h.base_offset, h.commit_ts, h.is_decided) for h in headers] == [
        (0, first, True),
        (2, second, True),
    ]


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_a_flush_writes_the_tail_into_the_log(client: txnkv.Client, buffer: str) -> None:
    """A store without a table flushes as well."""
    (partition,) = create(client, buffer=buffer)
    for i in range(5):
        small(client, [partition], [b"%d" % i])
    engine = internals.topics(client)
    internals.flush(client)
    assert engine.tail.partition_ids == []
    assert engine.tail.nbytes == 0
    with partition.environment.read() as txn:
        assert partition.log.end(txn) == 5
        assert partition.log.last_stable_offset(txn) == 5
    small(client, [partition], [b"5"])
    assert values(client, "events") == [b"%d" % i for i in range(6)]
    internals.flush(client)
    assert values(client, "events") == [b"%d" % i for i in range(6)]


def test_a_flush_without_new_messages_writes_nothing(client: txnkv.Client) -> None:
    (partition,) = create(client)
    small(client, [partition], [b"a"])
    internals.flush(client)
    before = internals.store(client).directory.log_dir(partition.id).joinpath("data.mdb").stat()
    internals.flush(client)
    after = internals.store(client).directory.log_dir(partition.id).joinpath("data.mdb").stat()
    assert before.st_mtime_ns == after.st_mtime_ns


def test_what_a_store_has_in_its_log_is_there_when_it_is_opened_again(
    client: txnkv.Client, connect: Callable[..., txnkv.Client]
) -> None:
    (partition,) = create(client)
    small(client, [partition], [b"a", b"b"])
    client.close()
    with connect() as again:
        assert values(again, "events") == [b"a", b"b"]


def test_a_commit_that_is_refused_takes_no_offset(client: txnkv.Client) -> None:
    (partition,) = create(client)
    engine = internals.topics(client)
    small(client, [partition], [b"a"])
    arm("log.written", "error@1")
    with pytest.raises(txnkv.TxnkvError):
        small(client, [partition], [b"lost"])
    assert engine.tail.entries(partition.id, 0, engine.log.latest())[-1].next_offset == 1
    small(client, [partition], [b"b"])
    assert values(client, "events") == [b"a", b"b"]
    assert is_dense(client)


def test_threads_that_send_at_once_get_dense_offsets(client: txnkv.Client) -> None:
    partitions = create(client, partitions=2)
    stamps: dict[int, Any] = {}

    def run(thread: int) -> None:
        for i in range(20):
            number = thread * 20 + i
            stamps[number] = small(client, partitions, [b"%d" % number] * (1 + number % 3))

    at_once(*(partial(run, i) for i in range(8)))
    assert is_dense(client)
    for number in range(2):
        batches = stored(client, "events", number)
        assert len(batches) == 160
        order = [batch.header.commit_ts for batch in batches]
        assert order == sorted(order)
        assert {int(b.values[0] or b""): b.header.commit_ts for b in batches} == stamps


def test_a_child_of_a_fork_reads_the_tail_anew(client: txnkv.Client) -> None:
    (partition,) = create(client)
    small(client, [partition], [b"a"])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            small(client, [partition], [b"b"])
            code = 0 if values(client, "events") == [b"a", b"b"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    small(client, [partition], [b"c"])
    assert values(client, "events") == [b"a", b"b", b"c"]


# -- appends and end markers -----------------------------------------------------------


def test_what_was_sent_before_comes_before(client: txnkv.Client) -> None:
    (partition,) = create(client)
    small(client, [partition], [b"a"])
    row = begin(client)
    assert send(client, row, partition, [b"b", b"c"]) == [1]
    small(client, [partition], [b"d"])
    assert send(client, row, partition, [b"e"]) == [4]
    with partition.environment.read() as txn:
        assert partition.log.last_stable_offset(txn) == 1
        assert partition.log.first_offset_of(txn, row.txn_id) == 1
    small(client, [partition], [b"f"])
    ended = commit(client, row)
    assert controls(client) == [(6, "COMMIT", row.txn_id)]
    assert values(client, "events") == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert is_dense(client)
    with partition.environment.read() as txn:
        assert partition.log.last_stable_offset(txn) == 7
        (*_, last) = partition.log.commits(txn, 0, 100)
    assert (last.marker_offset, last.first_offset, last.commit_ts) == (6, 1, ended.commit_ts)


def test_an_abort_leaves_a_marker_and_an_entry(client: txnkv.Client) -> None:
    (partition,) = create(client)
    row = begin(client)
    send(client, row, partition, [b"a"])
    small(client, [partition], [b"b"])
    abort(client, row)
    abort(client, row)
    assert controls(client) == [(2, "ABORT", row.txn_id)]
    with partition.environment.read() as txn:
        (entry,) = partition.log.aborted(txn, 0, 3)
        assert (entry.txn_id, entry.first_offset, entry.last_offset) == (row.txn_id, 0, 2)
        assert partition.log.last_stable_offset(txn) == 3


@pytest.mark.parametrize("end", [commit, abort])
def test_who_sent_nothing_leaves_no_marker(
    client: txnkv.Client, end: Callable[[txnkv.Client, Any], Any]
) -> None:
    (partition,) = create(client)
    row = begin(client)
    arm("append.reserved", "error@1")
    with pytest.raises(Exception, match=r"append\.reserved"):
        send(client, row, partition, [b"a"])
    end(client, row)
    assert values(client, "events") == []
    assert controls(client) == [(0, "FILLER", 0)]


def test_ended_transactions_send_nothing(client: txnkv.Client) -> None:
    (partition,) = create(client)
    committed, aborted = begin(client), begin(client)
    send(client, committed, partition, [b"a"])
    commit(client, committed)
    abort(client, aborted)
    for row in (committed, aborted):
        with pytest.raises(InvalidTxnStateError, match="cannot send messages"):
            send(client, row, partition, [b"late"])
    assert values(client, "events") == [b"a"]
    assert internals.topics(client).look(partition.id).next_offset == 2


def test_offsets_of_a_failed_append_are_filled(client: txnkv.Client) -> None:
    (partition,) = create(client)
    row = begin(client)
    arm("append.reserved", "error@1")
    with pytest.raises(Exception, match=r"append\.reserved"):
        send(client, row, partition, [b"x", b"y"])
    assert send(client, row, partition, [b"a"]) == [2]
    small(client, [partition], [b"b"])
    commit(client, row)
    assert controls(client) == [(0, "FILLER", 0), (4, "COMMIT", row.txn_id)]
    assert offsets(client) == [(0, 2), (2, 1), (3, 1), (4, 1)]


def test_markers_stand_in_commit_order(client: txnkv.Client) -> None:
    (partition,) = create(client)
    rows = [begin(client) for _ in range(4)]
    for row in rows:
        send(client, row, partition, [b"%d" % row.txn_id])
    stamps = []
    for row in (rows[2], rows[0], rows[3], rows[1]):
        stamps.append(commit(client, row).commit_ts)
        stamps.append(small(client, [partition], [b"small"]))
    raw(client, "events")
    with partition.environment.read() as txn:
        found = [entry.commit_ts for entry in partition.log.commits(txn, 0, 100)]
    assert found == stamps == sorted(stamps)


def test_a_reader_helps_a_commit_that_is_decided(client: txnkv.Client) -> None:
    """Its marker has an offset and is not in the log; a small commit lies behind it."""
    engine = internals.topics(client)
    partition, other = create(client, partitions=2)
    row = begin(client)
    send(client, row, partition, [b"a"])
    send(client, row, other, [b"a"])
    orchestrator = internals.coordinator(client).orchestrator
    orchestrator.start_commit(row.txn_id)
    arm("commit.decided", "error@1")
    with pytest.raises(Exception, match=r"commit\.decided"):
        orchestrator.finish(row.txn_id)
    small(client, [partition], [b"b"])
    assert engine.look(partition.id) == (3, True, 2)
    assert engine.behind(partition.id, 1)
    assert roll_forward.complete(engine, partition) == 3
    assert not engine.behind(partition.id, 3)
    assert controls(client) == [(1, "COMMIT", row.txn_id)]
    orchestrator.finish(row.txn_id)
    assert engine.look(partition.id) == (3, False, 0)
    assert controls(client) == [(1, "COMMIT", row.txn_id)]


def test_an_append_under_way_is_not_waited_for(client: txnkv.Client) -> None:
    engine = internals.topics(client)
    (partition,) = create(client)
    row = begin(client)
    arm("append.reserved", "error@1")
    with pytest.raises(Exception, match=r"append\.reserved"):
        send(client, row, partition, [b"a"])
    assert engine.look(partition.id).next_offset == 1
    assert not engine.behind(partition.id, 0)
    small(client, [partition], [b"b"])
    assert engine.behind(partition.id, 0)


def test_plain_batches_are_appended_without_a_transaction(client: txnkv.Client) -> None:
    (partition,) = create(client)
    small(client, [partition], [b"a"])
    attempt = append.AppendAttempt()
    batches = [batch([b"b", b"c"]), batch([b"d"])]
    append.append_alone(internals.topics(client), partition, batches, attempt)
    assert attempt.at == 1
    assert values(client, "events") == [b"a", b"b", b"c", b"d"]
    assert client.transactions() == []


def test_the_leader_writes_markers_that_were_left(
    client: txnkv.Client, by_hand: Callable[[txnkv.Client], None]
) -> None:
    engine = internals.topics(client)
    partitions = create(client, partitions=2)
    row = begin(client)
    for partition in partitions:
        send(client, row, partition, [b"a"])
    orchestrator = internals.coordinator(client).orchestrator
    orchestrator.start_commit(row.txn_id)
    arm("commit.decided", "error@1")
    with pytest.raises(Exception, match=r"commit\.decided"):
        orchestrator.finish(row.txn_id)
    by_hand(client)
    assert client.transaction_state(row.txn_id) is txnkv.TxnState.COMMITTED
    for partition in partitions:
        with partition.environment.read() as txn:
            assert partition.log.end(txn) == 2
        assert engine.look(partition.id) == (2, False, 0)


def test_a_send_that_is_tried_again_makes_durable_what_is_in_the_log(client: txnkv.Client) -> None:
    """LMDB tells of a sync that failed once, and the batch is in the log all the same."""
    (partition,) = create(client)
    small(client, [partition], [b"a"])
    attempt, engine = append.AppendAttempt(), internals.topics(client)
    batches = [batch([b"b"])]

    def writes() -> int:
        with partition.environment.read() as txn:
            return int(txn.id())

    append.append_alone(engine, partition, batches, attempt)  # as if its sync had failed
    before = writes()
    append.append_alone(engine, partition, batches, attempt)
    assert writes() > before
    assert values(client, "events") == [b"a", b"b"]


# -- readers, full disks, holes ---------------------------------------------------------


def test_a_read_only_client_reads_what_is_in_the_log(
    client: txnkv.Client, connect: Callable[..., txnkv.Client], process: Callable[..., Any]
) -> None:
    partition, empty = create(client, partitions=2)
    small(client, [partition], [b"a"])
    row = begin(client)
    send(client, row, partition, [b"b"])
    client.close()
    reader = process(
        "from txnkv.topics.write import roll_forward\n"
        "engine = client.instance.topics\n"
        "say([roll_forward.complete(engine, engine.partition(id)) for id in ids])\n",
        options={"read_only": True},
        ids=[partition.id, empty.id],
    )
    assert reader.finish() == [2, 0]


def test_a_full_disk_refuses_the_append_and_loses_nothing(client: txnkv.Client) -> None:
    (partition,) = create(client)
    small(client, [partition], [b"a"])
    roll_forward.complete(internals.topics(client), partition)
    row = begin(client)
    arm("lmdb.before_commit", no_room)
    with pytest.raises((UnavailableError, txnkv.StorageFullError)):
        send(client, row, partition, [b"b"])
    assert send(client, row, partition, [b"c"]) == [2]
    commit(client, row)
    assert values(client, "events") == [b"a", b"c"]
    assert is_dense(client)


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_holes_of_more_than_one_batch_can_count(client: txnkv.Client, buffer: str) -> None:
    """Several fillers, which every reader passes; and one that nobody can have made is damage."""
    topic = client.create_topic("far", buffer=buffer)
    (partition,) = internals.topics(client).partitions(topic.info)
    hole = (1 << 32) + 5

    def skip(offsets: int) -> None:
        with internals.status(client).write() as cur:
            cur.execute(
                "UPDATE partitions SET next_offset = next_offset + ? WHERE id = ?",
                (offsets, partition.id),
            )

    small(client, [partition], [b"a"])
    skip(hole)
    roll_forward.complete(internals.topics(client), partition)
    small(client, [partition], [b"b"])
    for make in (
        topic.consumer,
        partial(topic.consumer, isolation="read_uncommitted"),
        partial(topic.consumer, order="commit"),
    ):
        with make() as consumer:
            found = [(m.offset, m.value) for _ in range(9) for m in consumer.poll(timeout=0)]
        assert found == [(0, b"a"), (hole + 1, b"b")]
    assert topic.end_offsets()[0] == hole + 2
    skip(1 << 45)
    with pytest.raises(txnkv.CorruptionError, match="given to nobody"):
        roll_forward.complete(internals.topics(client), partition)
    skip(-(1 << 45))
