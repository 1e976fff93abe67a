"""Acknowledgements in sessions outside of transactions: with the rows beside them, or not."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import txnkv
from txnkv import MessageId
from txnkv.storage.faults import arm, disarm


def test_an_ack_of_a_dropped_subscription_is_told_and_the_rest_stays(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """It was counted as acknowledged."""
    topic = client.create_topic("e")
    with client.transaction() as txn:
        txn.send(topic, b"x")
    gone, there = topic.subscribe("gone"), topic.subscribe("there")
    session = client.new_session(flush_mode="manual")
    for consumer in (gone, there):
        message = consumer.receive(timeout=0)
        assert message is not None
        session.ack(consumer, message)
    session.insert(table, {"id": 1})
    topic.drop_subscription("gone")
    with pytest.raises(txnkv.TopicNotFoundError, match="'gone' of topic 'e' was dropped"):
        session.flush()
    result = session.flush()
    assert (result.inserted, result.acked) == (1, 1)
    assert there.lag() == {0: 0}


@pytest.mark.parametrize(
    ("type_", "cumulative"), [("exclusive", False), ("exclusive", True), ("shared", False)]
)
def test_acks_beside_many_rows(
    client: txnkv.Client, table: txnkv.Table, type_: Any, cumulative: bool
) -> None:
    """They were counted, and the messages were delivered again."""
    topic = client.create_topic("e")
    with client.transaction() as txn:
        for number in range(4):
            txn.send(topic, f"{number}")
    sub = topic.subscribe("s", type=type_)
    messages = sub.receive_many(4, timeout=0)
    with client.transaction() as txn:
        txn.ack(sub, messages[1])  # stays so
        with client.new_session(flush_mode="manual") as session:
            for key in range(12_000):
                session.insert(table, {"id": key})
            (session.ack_cumulative if cumulative else session.ack)(sub, messages[2])
            assert session.flush().acked == 1
        assert sub.committed() == {0: 1 if cumulative else 0}
        assert sub.lag() == {0: 2 if cumulative else 3}
    assert sub.lag() == {0: 1 if cumulative else 2}
    assert sub.committed() == {0: 3 if cumulative else 0}
    sub.close()
    again = topic.subscribe("s", type=type_)
    assert [message.offset for message in again.receive_many(4, timeout=0)] == (
        [3] if cumulative else [0, 3]
    )


def _many_rows_and_acks(
    client: txnkv.Client, table: txnkv.Table, sub: txnkv.Subscription, acked: Any
) -> txnkv.Session:
    session = client.new_session(flush_mode="manual")
    for key in range(12_000):
        session.upsert(table, {"id": key})
    session.ack(sub, acked)
    return session


def test_acks_beside_many_rows_that_fail_leave_others_theirs(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """Two transactions acknowledged one message, and both committed."""
    topic = client.create_topic("e")
    client.run(lambda txn: [txn.send(topic, f"{number}") for number in range(4)])
    sub, gone = topic.subscribe("s"), topic.subscribe("gone")
    messages = sub.receive_many(4, timeout=0)
    first, second = client.new_transaction(), client.new_transaction()
    first.ack(sub, messages[2])
    session = _many_rows_and_acks(client, table, sub, messages)
    session.ack(gone, gone.receive_many(1, timeout=0))
    topic.drop_subscription("gone")
    with pytest.raises(txnkv.TopicNotFoundError):
        session.flush()
    with pytest.raises(txnkv.AckConflictError):
        second.ack(sub, messages[2])
    session.flush()
    assert sub.lag() == {0: 1}
    first.commit()
    assert sub.committed() == {0: 4}


@pytest.mark.parametrize("type_", ["exclusive", "failover", "shared"])
@pytest.mark.parametrize("point", ["acks.registered", "commit.started", "commit.validated"])
def test_acks_beside_many_rows_after_a_fault(
    client: txnkv.Client, table: txnkv.Table, type_: Any, point: str
) -> None:
    """What the first try had came back, and the second left it out."""
    topic = client.create_topic("e")
    client.run(lambda txn: [txn.send(topic, f"{number}") for number in range(4)])
    sub = topic.subscribe("s", type=type_)
    messages = sub.receive_many(4, timeout=0)
    session = _many_rows_and_acks(client, table, sub, [])
    if type_ == "shared":
        session.ack(sub, messages)
    else:
        session.ack_cumulative(sub, messages[3])
    arm(point, "error")
    with suppress(txnkv.TxnkvError, OSError):
        session.flush()
    disarm()
    assert sub.receive(timeout=0) is None
    session.flush()
    assert (table.count(), sub.committed()) == (12_000, {0: 4})


WAYS: dict[str, Any] = {
    "exclusive": {},
    "failover": {"type": "failover"},
    "by commit": {"order": "commit"},
    "counted": {"max_deliveries": 5},
    "shared": {"type": "shared"},
    "key_shared": {"type": "key_shared"},
}


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("kind", WAYS)
def test_messages_come_again_until_acks_beside_many_rows_are_written(
    client: txnkv.Client, table: txnkv.Table, kind: str, fails: bool
) -> None:
    """What was refused or first given meanwhile was never delivered, where the flush failed."""
    topic = client.create_topic("e")
    client.run(lambda txn: [txn.send(topic, f"{number}") for number in range(6)])
    sub = topic.subscribe("s", redelivery_delay=0, **WAYS[kind])
    taken = sub.receive_many(2, timeout=0)
    acked = [taken[0], MessageId(0, 2), MessageId(0, 3)]
    session = _many_rows_and_acks(client, table, sub, acked)
    came: list[int] = []

    def meanwhile() -> None:
        disarm()
        sub.nack(taken[0])
        came.extend(message.offset for message in sub.receive_many(3, timeout=0))
        with pytest.raises(txnkv.InvalidTxnStateError, match="pending"):
            sub.seek(0, 0)
        if fails:
            raise MemoryError

    arm("acks.registered", meanwhile)
    if not fails:
        session.flush()
        assert sub.lag() == {0: 3}
    else:
        with pytest.raises(MemoryError):
            session.flush()
        assert sub.lag() == {0: 6}
    came.extend(message.offset for message in sub.receive_many(9, timeout=0))
    assert sorted(came) == [0, 2, 3, 4, 5]
    if fails:
        session.flush()
    sub.close()
    again = topic.subscribe("s", **WAYS[kind])
    assert [message.offset for message in again.receive_many(9, timeout=0)] == [1, 4, 5]


@pytest.mark.parametrize("kind", ["exclusive", "shared"])
@pytest.mark.parametrize("ends", ["before", "rollback", "commit"])
def test_a_transaction_has_what_acks_beside_many_rows_want(
    client: txnkv.Client, table: txnkv.Table, kind: str, ends: str
) -> None:
    """It was refused an ack that came to nothing, and nobody was given the message again."""
    topic = client.create_topic("e")
    client.run(lambda txn: [txn.send(topic, f"{number}") for number in range(3)])
    sub = topic.subscribe("s", **WAYS[kind])
    messages = sub.receive_many(3, timeout=0)
    session = _many_rows_and_acks(client, table, sub, messages)
    txn = client.new_transaction()
    txn.serialize()

    def meanwhile() -> None:
        disarm()
        txn.ack(sub, messages[1])
        if ends == "before":
            txn.commit()

    arm("acks.registered", meanwhile)
    session.flush()
    if ends != "before":
        assert sub.committed() == {0: 1}
        getattr(txn, ends)()
    assert sub.committed() == {0: 1 if ends == "rollback" else 3}
    found = [message.offset for message in sub.receive_many(3, timeout=0)]
    assert found == ([1] if ends == "rollback" else [])


def two_topics(client: txnkv.Client, type_: Any) -> list[txnkv.Subscription]:
    subscriptions = []
    for name in ("a", "b"):
        topic = client.create_topic(name)
        with client.transaction() as txn:
            txn.send(topic, name)
        subscriptions.append(topic.subscribe("s", type=type_))
    return subscriptions


@pytest.mark.parametrize("type_", ["exclusive", "shared"])
def test_messages_of_another_topic_or_store_are_refused(
    client: txnkv.Client, type_: Any, tmp_path: Path
) -> None:
    """The message at the same place of the subscription's own topic was lost."""
    here, there = two_topics(client, type_)
    message = pickle.loads(pickle.dumps(here.receive(timeout=0)))
    (polled,) = client.topic("a").consumer().poll(timeout=0)
    with txnkv.connect(tmp_path / "other") as other:
        foreign = two_topics(other, type_)[1].receive(timeout=0)
    session = client.new_session(flush_mode="manual")
    txn = client.new_transaction()
    session.ack(here, polled)
    mine = there.receive(timeout=0)
    for refused in (message, polled, foreign, [message], [mine, polled]):
        for call, before in (
            (there.ack, ()),
            (there.nack, ()),
            (there.ack_cumulative, ()),
            (txn.ack, (there,)),
            (session.ack, (there,)),
        ):
            with pytest.raises(ValueError, match=r"of another topic, or store, than .* 'b'"):
                call(*before, refused)
    session.ack(there, mine)
    assert session.flush().acked == 2
    assert here.lag() == there.lag() == {0: 0}
