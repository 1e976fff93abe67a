"""Versions of applications: each is committed at most once, with the work of its transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.coordinator.jobs import find_named, name_transaction
from txnkv.transaction.job import Job

ENDINGS: dict[str, dict[str, Any]] = {
    "small": {},
    "partition": {"locking": "partition"},
    "serializable": {"isolation": "serializable"},
}


@pytest.fixture(params=[*ENDINGS, "stored", "joined", "grown"])
def begin(
    request: pytest.FixtureRequest, client: txnkv.Client, table: txnkv.Table
) -> Callable[[], txnkv.Transaction]:
    """Begins a transaction whose marks wait in memory, or in status.db."""
    kept: list[txnkv.Transaction] = []

    def made() -> txnkv.Transaction:
        txn = client.new_transaction(**ENDINGS.get(request.param, {}))
        kept.append(txn)
        if request.param == "stored":
            txn.serialize()
        elif request.param == "joined":
            txn = txnkv.Transaction.deserialize(client, txn.serialize())
        elif request.param == "grown":  # marked while it is small, stored at its commit
            mark = txn.mark_applied

            def mark_then_store(*args: Any) -> None:
                mark(*args)
                txn.serialize()

            txn.mark_applied = mark_then_store  # type: ignore[method-assign, assignment]
        return txn

    return made


Begin = Callable[[], txnkv.Transaction]


def test_a_version_is_there_with_its_work(
    client: txnkv.Client, table: txnkv.Table, begin: Begin
) -> None:
    assert client.applied("daily") is None
    txn = begin()
    txn.insert(table, (1, "a"))
    txn.mark_applied("daily", 0, "q1")
    assert client.applied("daily") is None
    stamp = txn.commit()
    assert client.applied("daily") == txnkv.Applied(0, "q1", stamp, txn.id)
    assert client.applications() == {"daily": txnkv.Applied(0, "q1", stamp, txn.id)}
    assert table.get(1) == {"id": 1, "v": "a"}


def test_a_version_that_is_there_is_refused_at_the_mark(
    client: txnkv.Client, table: txnkv.Table, begin: Begin
) -> None:
    first = begin()
    first.mark_applied("daily", 5)
    first.commit()
    for version in (5, 4, 0):
        again = begin()
        again.insert(table, (1, "a"))
        with pytest.raises(txnkv.AlreadyAppliedError, match="committed version 5") as caught:
            again.mark_applied("daily", version)
        assert not caught.value.retriable
        assert again.state is txnkv.TxnState.ABORTED
        with pytest.raises(txnkv.InvalidTxnStateError, match="ABORTED"):
            again.commit()
    assert table.count() == 0
    assert client.applied("daily") == txnkv.Applied(
        5, None, client.applications()["daily"].commit_ts, first.id
    )


def test_of_two_at_work_the_first_to_commit_wins(
    client: txnkv.Client, table: txnkv.Table, begin: Begin
) -> None:
    one, other = begin(), begin()
    for n, txn in enumerate((one, other)):
        txn.insert(table, (n, "x"))
        txn.mark_applied("daily", 1, "q1")
    other.commit()
    with pytest.raises(txnkv.AlreadyAppliedError, match="version 1 of application 'daily' is"):
        one.commit()
    assert one.state is txnkv.TxnState.ABORTED
    assert [row["id"] for row in table.scan()] == [1]
    found = client.applied("daily")
    assert found is not None
    assert found.txn_id == other.id


@pytest.mark.parametrize("rows", [1, 5_000])
def test_the_first_handle_is_told_what_aborted_it(
    client: txnkv.Client, table: txnkv.Table, rows: int
) -> None:
    """The rows that wait in it are not written, and the error is not about them."""
    with client.transaction() as txn:
        txn.mark_applied("a", 3)
    late = client.new_transaction()
    for key in range(rows):
        late.insert(table, (key, "x"))
    other = txnkv.Transaction.deserialize(client, late.serialize())
    late.insert(table, (rows, "x"))
    with pytest.raises(txnkv.AlreadyAppliedError):
        other.mark_applied("a", 3)
    for _ in range(2):
        with pytest.raises(txnkv.AlreadyAppliedError, match=r"cannot commit.*version 3 of .*'a'"):
            late.commit()
    assert late.state is txnkv.TxnState.ABORTED
    assert table.count() == 0


def test_what_is_rolled_back_is_no_version(client: txnkv.Client, begin: Begin) -> None:
    txn = begin()
    txn.mark_applied("daily", 1)
    txn.rollback()
    assert client.applied("daily") is None
    again = begin()
    again.mark_applied("daily", 1)
    again.commit()


def test_another_source_is_refused_until_it_begins_anew(client: txnkv.Client, begin: Begin) -> None:
    first = begin()
    first.mark_applied("daily", 7, "q1")
    first.commit()
    txn = begin()
    with pytest.raises(ValueError, match=r"driven by 'q1' and has version 7.*from 'q2'"):
        txn.mark_applied("daily", 8, "q2")
    txn.mark_applied("daily", 8)  # who names no source is not compared
    txn.commit()
    found = client.applied("daily")
    assert found is not None
    assert (found.version, found.source) == (8, "q1")
    assert client.forget_applied("daily")
    assert not client.forget_applied("daily")
    txn = begin()
    txn.mark_applied("daily", 0, "q2")
    txn.commit()
    found = client.applied("daily")
    assert found is not None
    assert (found.version, found.source) == (0, "q2")


def test_a_source_joins_none_that_was_not_named(client: txnkv.Client, begin: Begin) -> None:
    first = begin()
    first.mark_applied("daily", 7)
    first.commit()
    with pytest.raises(ValueError, match="nobody that was named"):
        begin().mark_applied("daily", 8, "q1")


def test_a_source_that_came_between(client: txnkv.Client, begin: Begin) -> None:
    txn, other = begin(), begin()
    txn.mark_applied("daily", 3, "q1")
    other.mark_applied("daily", 1, "q2")
    other.commit()
    with pytest.raises(txnkv.AlreadyAppliedError, match=r"driven by 'q2'.*from 'q1'"):
        txn.commit()
    assert txn.state is txnkv.TxnState.ABORTED


def test_versions_of_several_applications(client: txnkv.Client, begin: Begin) -> None:
    txn = begin()
    txn.mark_applied("a", 1)
    txn.mark_applied("a", 1, "q1")
    txn.mark_applied("a", 1)
    txn.mark_applied("b", 2**63 - 1)
    with pytest.raises(ValueError, match="is version 1 of application 'a'"):
        txn.mark_applied("a", 2)
    with pytest.raises(ValueError, match="marked with source 'q1'"):
        txn.mark_applied("a", 1, "q2")
    txn.commit()
    found = {app: (it.version, it.source) for app, it in client.applications().items()}
    assert found == {"a": (1, "q1"), "b": (2**63 - 1, None)}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("", 1), ValueError),
        ((b"a", 1), ValueError),
        (("a", -1), ValueError),
        (("a", 2**63), ValueError),
        (("a", True), TypeError),
        (("a", 1.0), TypeError),
        (("a", 1, 7), TypeError),
    ],
)
def test_arguments(client: txnkv.Client, arguments: Any, error: type[Exception]) -> None:
    txn = client.new_transaction()
    with pytest.raises(error):
        txn.mark_applied(*arguments)
    txn.commit()
    assert client.applications() == {}


def test_run_does_not_try_again(client: txnkv.Client, table: txnkv.Table) -> None:
    calls = []

    def work(txn: txnkv.Transaction) -> None:
        calls.append(txn.id)
        txn.insert(table, (len(calls), "x"))
        txn.mark_applied("daily", 1)

    client.run(work)
    with pytest.raises(txnkv.AlreadyAppliedError):
        client.run(work)
    assert len(calls) == 2
    assert table.count() == 1


def test_with_messages_and_acks(client: txnkv.Client, topic: txnkv.Topic, begin: Begin) -> None:
    """Refused at the commit, nothing is sent and what was acknowledged comes again."""
    with client.transaction() as txn:
        txn.send(topic, b"in")
    out = client.create_topic("out")
    with topic.subscribe("s") as subscription:
        message = subscription.receive(timeout=5)
        assert message is not None
        txn, other = begin(), client.new_transaction()
        txn.ack(subscription, message)
        txn.send(out, b"out")
        txn.mark_applied("daily", 1)
        other.mark_applied("daily", 1)
        other.commit()
        with pytest.raises(txnkv.AlreadyAppliedError):
            txn.commit()
        assert out.end_offsets() == {0: 0} or out.last_stable_offsets() == out.end_offsets()
        with out.consumer() as consumer:
            assert consumer.poll(timeout=0) == []
        again = subscription.receive(timeout=5)
        assert again is not None
        assert again.id == message.id


def test_one_that_is_named_is_ended_by_the_next(client: txnkv.Client, table: txnkv.Table) -> None:
    coordinator = internals.coordinator(client)
    coordinator.end_named("stream")
    txns = [client.new_transaction() for _ in range(3)]
    for n, txn in enumerate(txns):
        txn.context.name = "stream"
        txn.insert(table, (n, "x"))
    txns[0].commit()  # small: nobody finds it
    with internals.status(client).read() as cur:
        assert find_named(cur, "stream") is None
    txns[1].serialize()
    coordinator.end_named("stream")
    assert txns[1].state is txnkv.TxnState.ABORTED
    txns[2].serialize()
    txns[2].flush()
    coordinator.orchestrator.start_commit(txns[2].id.local)
    coordinator.end_named("stream")
    assert txns[2].state is txnkv.TxnState.COMMITTED
    coordinator.end_named("stream")
    assert [row["id"] for row in table.scan(ordered=True)] == [0, 2]


# -- under a name ----------------------------------------------------------------------


def test_a_name_moves_on_and_tells_of_the_one_before(connect: Callable[..., txnkv.Client]) -> None:
    client = connect(history=0.0)
    status = internals.status(client)
    first, second = client.new_transaction(timeout=None), client.new_transaction(timeout=None)
    jobs = [Job.start(txn).id for txn in (first, second)]
    with status.write() as cur:
        assert find_named(cur, "stream") is None
        assert name_transaction(cur, "stream", first.id.local, jobs[0]) is None
        assert name_transaction(cur, "other", first.id.local, jobs[0]) is None
    with status.write() as cur:
        before = name_transaction(cur, "stream", second.id.local, jobs[1])
    assert before is not None
    assert (before.row.txn_id, before.row.state, before.job_id) == (
        first.id.local,
        txnkv.TxnState.OPEN,
        jobs[0],
    )
    second.rollback()
    with status.read() as cur:
        found = find_named(cur, "stream")
        assert found is not None
        assert (found.row.state, found.job_id) == (txnkv.TxnState.ABORTED, jobs[1])
        other = find_named(cur, "other")
        assert other is not None
        assert other.row.state is txnkv.TxnState.OPEN
    first.rollback()
    assert internals.maintenance(client).round(resume_all=True)
    with status.read() as cur:
        assert find_named(cur, "stream") is find_named(cur, "other") is None
