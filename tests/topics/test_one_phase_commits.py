"""Commits of who sent to one partition alone: one phase, and what breaks in on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.engine_tools import controls, is_dense, no_room
from tools.topic_contents import raw, values
from tools.topic_writers import begin, commit, create, send, small
from txnkv import core
from txnkv.coordinator import jobs
from txnkv.core import ControlType
from txnkv.errors import (
    InvalidTxnStateError,
    UnavailableError,
)
from txnkv.storage import arm
from txnkv.topics.write import roll_forward


def test_who_sent_to_one_partition_takes_the_short_way(
    client: txnkv.Client, by_hand: Callable[[txnkv.Client], None]
) -> None:
    """From OPEN to COMMITTED in one write of status.db; the note of its marker goes later."""
    engine, orchestrator = internals.topics(client), internals.coordinator(client).orchestrator
    (partition,) = create(client)
    row = begin(client)
    send(client, row, partition, [b"a"])
    ended = orchestrator.start_commit(row.txn_id)
    assert ended.state is txnkv.TxnState.COMMITTED
    assert ended.commit_ts == internals.latest(client)
    with partition.environment.read() as txn:
        (entry,) = partition.log.commits(txn, 0, 10)
        assert partition.log.last_stable_offset(txn) == 2
    assert (entry.marker_offset, entry.commit_ts) == (1, ended.commit_ts)
    by_hand(client)
    assert engine.look(partition.id) == (2, False, 0)
    assert orchestrator.finish(row.txn_id).state is txnkv.TxnState.COMMITTED
    assert orchestrator.start_commit(row.txn_id).state is txnkv.TxnState.COMMITTED


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_a_short_commit_that_breaks_off_before_its_marker_is_one(
    client: txnkv.Client, by_hand: Callable[[txnkv.Client], None], buffer: str
) -> None:
    (partition,) = create(client, buffer=buffer)
    roll_forward.complete(internals.topics(client), partition)
    row = begin(client)
    send(client, row, partition, [b"a"])
    arm("lmdb.before_commit", no_room)
    assert commit(client, row).state is txnkv.TxnState.COMMITTED
    assert internals.topics(client).behind(partition.id, 0)
    small(client, [partition], [b"b"])
    assert values(client, "events") == [b"a", b"b"]
    by_hand(client)
    assert is_dense(client)


def test_a_short_commit_whose_commit_point_fails_is_none(client: txnkv.Client) -> None:
    (partition,) = create(client)
    row = begin(client)
    send(client, row, partition, [b"a"])
    arm("status.before_commit", no_room)
    with pytest.raises((UnavailableError, txnkv.StorageFullError)):
        commit(client, row)
    assert client.transaction_state(row.txn_id) is txnkv.TxnState.OPEN
    assert commit(client, row).state is txnkv.TxnState.COMMITTED
    assert values(client, "events") == [b"a"]


def test_a_job_that_runs_stops_the_short_way(client: txnkv.Client) -> None:
    (partition,) = create(client)
    row = begin(client)
    send(client, row, partition, [b"a"])
    with internals.store(client).status.write() as cur:
        jobs.start(cur, row.txn_id, "job")
    with pytest.raises(InvalidTxnStateError, match="job that still runs"):
        commit(client, row)
    assert client.transaction_state(row.txn_id) is txnkv.TxnState.OPEN


def test_a_second_participant_that_comes_in_between_is_asked(client: txnkv.Client) -> None:
    """It registers while the short way waits for the log's lock."""
    first, second = create(client, partitions=2)
    row = begin(client)
    send(client, row, first, [b"a"])
    entered, go_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        entered.set()
        assert go_on.wait(30)

    holder = threading.Thread(target=lambda: first.environment.write(hold))
    holder.start()
    assert entered.wait(30)
    committer = threading.Thread(target=commit, args=(client, row))
    committer.start()
    send(client, row, second, [b"b"])
    go_on.set()
    committer.join()
    holder.join()
    assert client.transaction_state(row.txn_id) is txnkv.TxnState.COMMITTED
    for number in range(2):
        data = raw(client, "events", number)
        assert [h.is_control for _, h in core.walk(data)] == [False, True]


def test_a_late_note_of_a_marker_changes_nothing(
    client: txnkv.Client, by_hand: Callable[[txnkv.Client], None]
) -> None:
    """The write that forgets it is not synced: after a power loss it may be there again."""
    engine = internals.topics(client)
    (partition,) = create(client)
    row = begin(client)
    send(client, row, partition, [b"a"])
    commit(client, row)
    by_hand(client)
    with internals.status(client).write() as cur:
        cur.execute(
            "INSERT INTO end_markers VALUES (?, 1, 1, ?, ?, 5, 0, 0)",
            (partition.id, row.txn_id, int(ControlType.COMMIT)),
        )
    assert not engine.behind(partition.id, 2)
    by_hand(client)
    assert engine.look(partition.id) == (2, False, 0)
    assert controls(client) == [(1, "COMMIT", row.txn_id)]
