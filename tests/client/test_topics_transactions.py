"""Rows, messages and acknowledgements in one transaction: all at once, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.storage.faults import arm, disarm

Messages = Callable[..., list[txnkv.Message]]
Values = Callable[..., list[bytes | None]]

OPEN, ABORTED, COMMITTED = (txnkv.TxnState[name] for name in ("OPEN", "ABORTED", "COMMITTED"))

ROW = {"id": 1, "v": "a"}


# -- commit ----------------------------------------------------------------------------


def test_rows_and_messages_come_at_once(
    client: txnkv.Client, table: txnkv.Table, topic: txnkv.Topic, values: Values, size: str
) -> None:
    other = client.create_topic("other", partitions=2)
    txn = client.new_transaction()
    txn.insert(table, ROW)
    txn.send(topic, b"a")
    txn.send(other, b"b", partition=0)
    txn.send(other, b"c", partition=1)
    txn.flush()
    assert table.count() == 0
    assert values(topic) == values(other) == []
    stamp = txn.commit()
    assert table.get(1) == ROW
    assert (values(topic), values(other)) == ([b"a"], [b"b", b"c"])
    assert table.get(1, snapshot=stamp) == ROW
    assert txn.commit() == stamp
    assert txn.state is COMMITTED


def test_messages_alone_are_a_transaction_too(
    client: txnkv.Client, topic: txnkv.Topic, messages: Messages, size: str
) -> None:
    """1000 messages in 2 transactions, invisible while open; after both commits exactly those."""
    first, second = client.new_transaction(), client.new_transaction()
    for n in range(500):
        first.send(topic, b"1 %d" % n)
        second.send(topic, b"2 %d" % n)
    first.flush()
    second.flush()
    assert messages(topic) == []
    first.commit()
    second.commit()
    found = messages(topic)
    assert len(found) == 1000
    for txn, name in ((first, b"1"), (second, b"2")):
        own = [m.value for m in found if m.txn_id == txn.id]
        assert own == [b"%b %d" % (name, n) for n in range(500)]


def test_sends_of_many_transactions_keep_their_order(
    client: txnkv.Client, topic: txnkv.Topic, values: Values
) -> None:
    for turn in range(10):
        with client.transaction() as txn:
            for n in range(100):
                txn.send(topic, b"%d" % (100 * turn + n))
    assert values(topic) == [b"%d" % n for n in range(1000)]


def test_plain_messages_and_those_of_transactions(
    client: txnkv.Client, values: Values, size: str
) -> None:
    """Pulsar's stable position: plain, txn, plain; what stands behind an open one waits."""
    topic = client.create_topic("marker")
    session = client.new_session()
    session.send(topic, b"1")
    session.flush()
    txn = client.new_transaction()
    txn.send(topic, b"2")
    txn.flush()
    session.send(topic, b"3")
    session.flush()
    if size == "large":
        assert values(topic) == [b"1"]
        assert topic.last_stable_offsets() == {0: 1}
        assert topic.end_offsets() == {0: 3}
        assert values(topic, "read_uncommitted") == [b"1", b"2", b"3"]
        txn.commit()
        assert values(topic) == [b"1", b"2", b"3"]
    else:
        assert values(topic) == [b"1", b"3"]
        txn.commit()
        assert values(topic) == [b"1", b"3", b"2"]
    session.close()


def test_a_transaction_that_grows_large_keeps_its_order(
    client: txnkv.Client, topic: txnkv.Topic, table: txnkv.Table, values: Values
) -> None:
    sent = []
    with client.transaction() as txn:
        txn.insert(table, ROW)
        for n in range(40):
            value = b"%d " % n + b"x" * 100_000
            sent.append(value)
            txn.send(topic, value)
            if n % 7 == 0:
                txn.flush()
        txn.send_batch(topic, pa.table({"value": sent}))
    assert values(topic) == sent + sent
    assert table.count() == 1


def test_sends_after_it_was_stored(
    client: txnkv.Client, topic: txnkv.Topic, values: Values
) -> None:
    with client.transaction() as txn:
        txn.send(topic, b"before")
        txn.serialize()
        txn.send(topic, b"after")
    assert values(topic) == [b"before", b"after"]


@pytest.mark.parametrize("locking", ["optimistic", "partition"])
@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
def test_every_kind_of_transaction_sends(
    client: txnkv.Client,
    topic: txnkv.Topic,
    table: txnkv.Table,
    values: Values,
    locking: str,
    isolation: str,
) -> None:
    with client.transaction(locking=locking, isolation=isolation) as txn:
        txn.send(topic, b"a")
        assert txn.get(table, 1) is None
        txn.upsert(table, ROW)
    assert values(topic) == [b"a"]
    assert table.count() == 1


def test_commits_on_their_way(client: txnkv.Client, topic: txnkv.Topic, values: Values) -> None:
    futures = []
    for n in range(50):
        txn = client.new_transaction()
        txn.send(topic, b"%d" % n)
        futures.append(txn.commit_async())
        with pytest.raises(txnkv.InvalidTxnStateError):
            txn.send(topic, b"late")
    stamps = [future.result() for future in futures]
    assert stamps == sorted(set(stamps))
    assert values(topic) == [b"%d" % n for n in range(50)]


def test_start_commit(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, size: str, until: Any
) -> None:
    txn = client.new_transaction()
    txn.send(topic, b"a")
    with pytest.raises(txnkv.InvalidTxnStateError, match="not flushed"):
        txn.start_commit()
    txn.flush()
    txn.start_commit()
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.send(topic, b"late")
    until(txn.is_commit_complete)
    assert values(topic) == [b"a"]


def test_threads_share_a_transaction(
    client: txnkv.Client, topic: txnkv.Topic, values: Values
) -> None:
    """Some send while another flushes: nothing is lost and nothing doubled."""
    txn = client.new_transaction()
    over = threading.Event()

    def send(name: bytes) -> None:
        for n in range(2000):
            txn.send(topic, b"%b %d" % (name, n), key=name)

    def flush() -> None:
        while not over.is_set():
            txn.flush()

    threads = [threading.Thread(target=send, args=(name,)) for name in (b"a", b"b", b"c")]
    flusher = threading.Thread(target=flush)
    flusher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    flusher.join()
    txn.commit()
    found = values(topic)
    assert len(found) == 6000
    for name in (b"a", b"b", b"c"):
        own = [value for value in found if value is not None and value.startswith(name)]
        assert own == [b"%b %d" % (name, n) for n in range(2000)]


# -- rollback --------------------------------------------------------------------------


def test_rollback_sends_nothing(
    client: txnkv.Client, topic: txnkv.Topic, table: txnkv.Table, values: Values, size: str
) -> None:
    txn = client.new_transaction()
    txn.send(topic, b"a")
    txn.insert(table, ROW)
    txn.flush()
    txn.send(topic, b"waiting")
    txn.rollback()
    with client.transaction() as txn:
        txn.send(topic, b"b")
    assert values(topic) == [b"b"]
    assert table.count() == 0


def test_an_exception_sends_nothing(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, size: str
) -> None:
    def fail() -> None:
        with client.transaction() as txn:
            txn.send(topic, b"a")
            txn.flush()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert values(topic) == []


def test_interleaved_commits_and_aborts(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, size: str
) -> None:
    txns = [client.new_transaction() for _ in range(6)]
    for turn in range(3):
        for n, txn in enumerate(txns):
            txn.send(topic, b"%d %d" % (n, turn))
            txn.flush()
    for n, txn in enumerate(txns):
        txn.commit() if n % 2 else txn.rollback()
    found = values(topic)
    assert sorted(found) == sorted(b"%d %d" % (n, turn) for n in (1, 3, 5) for turn in range(3))


# -- after the end ---------------------------------------------------------------------

ENDS: dict[str, Callable[[txnkv.Client, txnkv.Transaction], Any]] = {
    "committed": lambda client, txn: txn.commit(),
    "rolled back": lambda client, txn: txn.rollback(),
    "aborted by hand": lambda client, txn: client.abort_transaction(txn.id),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_sent_after_the_end(
    client: txnkv.Client,
    topic: txnkv.Topic,
    messages: Messages,
    size: str,
    end: str,
) -> None:
    txn = client.new_transaction()
    session = txn.new_session()
    subscription = topic.subscribe("s")
    for one in (txn, session):
        one.send(topic, b"a")
    txn.flush()
    session.flush()
    ENDS[end](client, txn)
    kept = [message.value for message in messages(topic)]
    for one in (txn, session):
        with pytest.raises(txnkv.InvalidTxnStateError):
            one.send(topic, b"late")
        with pytest.raises(txnkv.InvalidTxnStateError):
            one.send_batch(topic, pa.table({"value": ["late"]}))
        with pytest.raises(txnkv.InvalidTxnStateError):
            one.ack(subscription, txnkv.MessageId(0, 0))
    assert [message.value for message in messages(topic)] == kept
    assert kept == ([b"a", b"a"] if end == "committed" else [])


def test_nothing_is_sent_after_the_timeout(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, now: Any, size: str
) -> None:
    txn = client.new_transaction(timeout=10.0)
    txn.send(topic, b"a")
    txn.flush()
    now.forward(11)
    with pytest.raises(txnkv.TransactionTimedOutError):
        txn.commit()
    assert txn.state is ABORTED
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.send(topic, b"c")
    assert values(topic) == []


# -- refusals --------------------------------------------------------------------------


def test_a_conflict_over_rows_takes_the_messages_along(
    client: txnkv.Client, topic: txnkv.Topic, table: txnkv.Table, values: Values, size: str
) -> None:
    first, second = client.new_transaction(), client.new_transaction()
    for n, txn in enumerate((first, second)):
        txn.upsert(table, {"id": 1, "v": f"{n}"})
        txn.send(topic, b"%d" % n)
        txn.flush()
    first.commit()
    with pytest.raises(txnkv.TransactionConflictError):
        second.commit()
    assert values(topic) == [b"0"]
    assert second.state is ABORTED


def test_run_sends_once_though_it_tries_again(
    client: txnkv.Client, topic: txnkv.Topic, table: txnkv.Table, values: Values, size: str
) -> None:
    attempts = []

    def work(txn: txnkv.Transaction) -> None:
        attempts.append(txn)
        txn.send(topic, b"%d" % len(attempts))
        txn.get(table, 1)
        if len(attempts) < 3:
            with client.transaction() as other:
                other.upsert(table, {"id": 1, "v": f"{len(attempts)}"})
        txn.upsert(table, {"id": 1, "v": "mine"})

    client.run(work)
    assert len(attempts) == 3
    assert values(topic) == [b"3"]


def test_a_serializable_one_that_only_sends_validates_what_it_read(
    client: txnkv.Client, topic: txnkv.Topic, table: txnkv.Table, values: Values, size: str
) -> None:
    """Else a message could tell of a row that was changed before it."""
    txn = client.new_transaction(isolation="serializable")
    assert txn.get(table, 1) is None
    txn.send(topic, b"there is no row 1")
    txn.flush()
    with client.transaction() as other:
        other.insert(table, ROW)
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
    assert values(topic) == []


def test_refused_rows_leave_it_open_with_its_messages(
    client: txnkv.Client, topic: txnkv.Topic, table: txnkv.Table, values: Values, size: str
) -> None:
    with client.transaction() as other:
        other.insert(table, ROW)
    txn = client.new_transaction()
    txn.send(topic, b"a")
    txn.insert(table, ROW)
    txn.insert(table, {"id": 2})
    txn.send(topic, b"b")
    with pytest.raises(txnkv.RowErrors) as caught:
        txn.commit()
    assert caught.value.count == 1
    assert txn.state is OPEN
    assert values(topic) == []
    txn.send(topic, b"c")
    txn.commit()
    assert values(topic) == [b"a", b"b", b"c"]
    assert table.count() == 2


def test_refused_rows_of_a_plain_session_do_not_keep_messages_back(
    client: txnkv.Client, topic: txnkv.Topic, table: txnkv.Table, values: Values
) -> None:
    with client.new_session() as session:
        session.insert(table, ROW)
        session.flush()
        session.insert(table, ROW)
        session.send(topic, b"a")
        with pytest.raises(txnkv.RowErrors):
            session.flush()
        assert session.flush() == txnkv.WriteResult()
    assert values(topic) == [b"a"]


def test_an_attempt_of_a_job_does_not_acknowledge(
    client: txnkv.Client, topic: txnkv.Topic, values: Values
) -> None:
    from txnkv.transaction.job import Job

    with client.transaction() as txn:
        job = Job.start(txn)
        session = job.session("0")
        subscription = topic.subscribe("s")
        with pytest.raises(txnkv.NotSupportedError, match="attempt"):
            session.ack(subscription, txnkv.MessageId(0, 0))
        with pytest.raises(txnkv.NotSupportedError, match="attempt"):
            session.ack_cumulative(subscription, txnkv.MessageId(0, 0))
        session.close()
        txn.send(topic, b"b")
        job.commit([])
    assert values(topic) == [b"b"]


# -- dropping --------------------------------------------------------------------------


def test_dropping_a_topic_ends_transactions_that_sent_to_it(
    client: txnkv.Client, topic: txnkv.Topic, table: txnkv.Table, size: str
) -> None:
    txn = client.new_transaction()
    txn.insert(table, ROW)
    txn.send(topic, b"a")
    txn.flush()
    client.drop_topic(topic)
    with pytest.raises(txnkv.InvalidTxnStateError, match="dropped"):
        txn.commit()
    assert txn.state is ABORTED
    assert table.count() == 0


def test_messages_that_wait_for_a_dropped_topic_are_gone_others_are_not(
    client: txnkv.Client, topic: txnkv.Topic, values: Values
) -> None:
    kept = client.create_topic("kept")
    for make in (client.new_session, client.new_transaction):
        doomed = client.create_topic("doomed")
        holder: Any = make()
        holder.send(kept, b"before")
        holder.send(doomed, b"a")
        holder.send(kept, b"after")
        client.drop_topic(doomed)
        with pytest.raises(txnkv.TopicNotFoundError, match="dropped"):
            holder.flush()
        holder.flush()
        with pytest.raises(txnkv.TopicNotFoundError, match="dropped"):
            holder.send(doomed, b"b")
        if isinstance(holder, txnkv.Transaction):
            holder.commit()
        else:
            holder.close()
    assert values(kept) == [b"before", b"after"] * 2


def test_a_flush_counts_what_was_sent_before_a_topic_was_found_gone(client: txnkv.Client) -> None:
    kept, gone = client.create_topic("kept"), client.create_topic("gone")
    txn = client.new_transaction()
    session = txn.new_session()
    for topic in (kept, gone, kept):
        session.send(topic, b"x")
    client.drop_topic("gone")
    with pytest.raises(txnkv.TopicNotFoundError, match="'gone' was dropped"):
        session.flush()
    assert [session.flush().sent for _ in range(2)] == [2, 0]
    txn.commit()


def test_a_topic_made_anew_is_another(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, size: str
) -> None:
    with client.transaction() as txn:
        txn.send(topic, b"old")
    client.drop_topic(topic)
    new = client.create_topic("events")
    with client.transaction() as txn:
        txn.send("events", b"new")
        with pytest.raises(txnkv.TopicNotFoundError):
            txn.send(topic, b"old")
    assert values(new) == [b"new"]


# -- faults ----------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["append.reserved@1", "append.reserved@2", "append.reserved@3"])
def test_a_large_flush_that_breaks_off_goes_on_where_it_was(
    client: txnkv.Client, messages: Messages, large: None, point: str
) -> None:
    """Messages that are in one log already are not sent again when another log failed."""
    topics = [client.create_topic(name, partitions=2) for name in ("a", "b")]
    txn = client.new_transaction()
    for topic in topics:
        for number in range(2):
            txn.send(topic, b"%d" % number, partition=number)
    name, _, hit = point.partition("@")
    arm(name, f"error@{hit}")
    with pytest.raises(txnkv.UnavailableError, match="injected"):
        txn.flush()
    disarm()
    txn.send(topics[1], b"more", partition=1)
    txn.commit()
    assert [m.value for m in messages(topics[0])] == [b"0", b"1"]
    assert [m.value for m in messages(topics[1])] == [b"0", b"1", b"more"]


# -- consume, transform, upsert, produce, acknowledge ----------------------------------


@pytest.mark.parametrize("fails", [None, "rollback", "conflict"])
def test_one_transaction_over_all(
    client: txnkv.Client,
    topic: txnkv.Topic,
    table: txnkv.Table,
    values: Values,
    size: str,
    fails: str | None,
) -> None:
    """Consumed messages, the state and produced messages change together, or not at all."""
    out = client.create_topic("out", partitions=2)
    with client.transaction() as txn:
        for n in range(5):
            txn.send(topic, b"%d" % n)
    with topic.subscribe("worker") as subscription:
        received = subscription.receive_many(max_messages=5, timeout=5)
        assert [message.value for message in received] == [b"%d" % n for n in range(5)]
        txn = client.new_transaction()
        txn.upsert(table, {"id": 1, "v": "sum"})
        for message in received:
            txn.send(out, b"got " + (message.value or b""), key=message.value)
            txn.ack(subscription, message)
        assert txn.flush().acked == 5
        if fails == "rollback":
            txn.rollback()
        elif fails == "conflict":
            with client.transaction() as other:
                other.upsert(table, {"id": 1, "v": "other"})
            with pytest.raises(txnkv.TransactionConflictError):
                txn.commit()
        else:
            txn.commit()
        found = sorted(filter(None, values(out)))
        assert found == ([] if fails else [b"got %d" % n for n in range(5)])
        assert table.count() == (1 if fails != "rollback" else 0)
        again = subscription.receive_many(max_messages=5, timeout=5 if fails else 0)
        assert len(again) == (5 if fails else 0)


def test_an_ack_conflict_ends_the_later_transaction(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, size: str
) -> None:
    with client.transaction() as txn:
        txn.send(topic, b"a")
    with topic.subscribe("s") as subscription:
        message = subscription.receive(timeout=5)
        assert message is not None
        first, second = client.new_transaction(), client.new_transaction()
        first.ack(subscription, message)
        second.send(topic, b"b")
        with pytest.raises(txnkv.AckConflictError) as caught:
            second.ack(subscription, message.id)
        assert not caught.value.retriable
        assert second.state is ABORTED
        with pytest.raises(txnkv.InvalidTxnStateError):
            second.send(topic, b"c")
        first.commit()
    assert values(topic) == [b"a"]


@pytest.mark.parametrize(
    ("what", "error"),
    [("id", TypeError), (5, TypeError), (None, TypeError), ((0, 0), TypeError)],
)
def test_what_cannot_be_acknowledged(
    client: txnkv.Client, topic: txnkv.Topic, what: Any, error: type[Exception]
) -> None:
    with topic.subscribe("s") as subscription, client.transaction() as txn:
        with pytest.raises(error):
            txn.ack(subscription, what)
        with pytest.raises(TypeError, match="subscribe"):
            txn.ack("s", txnkv.MessageId(0, 0))  # type: ignore[arg-type]


def test_plain_acks_wait_for_the_flush(
    client: txnkv.Client, topic: txnkv.Topic, table: txnkv.Table
) -> None:
    with client.transaction() as txn:
        txn.send_batch(topic, pa.table({"value": ["a", "b", "c"]}))
    with topic.subscribe("s") as subscription, client.new_session() as session:
        received = subscription.receive_many(timeout=5)
        session.ack(subscription, received[0])
        session.ack_cumulative(subscription, received[1])
        session.insert(table, ROW)
        assert session.has_pending
        result = session.flush()
        assert (result.acked, result.inserted, result.sent) == (2, 1, 0)
    with topic.subscribe("s") as subscription:
        assert [message.value for message in subscription.receive_many(timeout=5)] == [b"c"]
