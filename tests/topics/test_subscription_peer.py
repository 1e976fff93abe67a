"""Pulsar's tests of transactional acknowledgement, as they apply here; each names its own.

Redelivery is asked for there by redeliverUnacknowledgedMessages, here by a negative ack or a new
consumer; a second end of a transaction succeeds here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from txnkv.topics.delivery import redelivery
from txnkv.topics.messages.message import Message, MessageId
from txnkv.topics.topic_catalog import TopicOptions

BOTH = pytest.mark.parametrize("type", ["exclusive", "shared"])
STORED = pytest.mark.parametrize("stored", [False, True])


@pytest.fixture
def topic(client: txnkv.Client) -> txnkv.Topic:
    return client.create_topic("events")


def send(client: txnkv.Client, first: int, last: int) -> None:
    """Messages of these numbers, in one batch."""
    with client.new_session() as session:
        for number in range(first, last):
            session.send("events", str(number))


def begin(client: txnkv.Client, stored: bool = False) -> txnkv.Transaction:
    txn = client.new_transaction()
    if stored:
        txn.serialize()
    return txn


def drain(sub: txnkv.Subscription) -> list[Message]:
    found: list[Message] = []
    while some := sub.receive_many(1000, timeout=0):
        found += some
    return found


def numbers(messages: list[Message]) -> list[int]:
    return sorted(int(m.value or b"") for m in messages)


def pending(client: txnkv.Client, sub: txnkv.Subscription) -> int:
    """Messages that wait for the end of a transaction."""
    with client.instance.store.status.read() as cur:
        found = cur.execute("SELECT coalesce(sum(last - max(first, 0)), 0) FROM pending_acks").get
    state = client.instance.topics.local.exclusive(sub.info.id)
    memory = 0 if state is None else sum(ranges.count for ranges in state.pending.values())
    return int(found) + memory


# -- TransactionEndToEndTest -----------------------------------------------------------


@BOTH
@STORED
def test_msgs_in_pending_ack_state_would_not_get_the_consumer_stuck(
    client: txnkv.Client,
    topic: txnkv.Topic,
    type: str,
    stored: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redelivery, "AHEAD", 2)
    send(client, 0, 20)
    sub = topic.subscribe("s", type)
    first, second = begin(client, stored), begin(client, stored)
    for txn in (first, second):
        for _ in range(5):
            message = sub.receive(timeout=0)
            assert message is not None
            txn.ack(sub, message)
    first.commit()
    assert numbers(drain(sub)) == list(range(10, 20))
    second.commit()


@BOTH
def test_produce_commit(client: txnkv.Client, topic: txnkv.Topic, type: str) -> None:
    sub = topic.subscribe("s", type)
    txns = [begin(client, stored) for stored in (False, True)]
    for number in range(1000):
        txns[number % 2].send(topic, str(number))
    for txn in txns:
        txn.flush()
    assert drain(sub) == []
    for txn in txns:
        txn.commit()
    assert numbers(drain(sub)) == list(range(1000))


@BOTH
@STORED
@pytest.mark.parametrize("batched", [False, True])
def test_txn_individual_ack(
    client: txnkv.Client, topic: txnkv.Topic, type: str, stored: bool, batched: bool
) -> None:
    count = 1000 if batched else 60
    if batched:
        send(client, 0, count)
    else:
        for number in range(count):
            send(client, number, number + 1)
    sub = topic.subscribe("s", type)
    for end in ("rollback", "commit"):
        messages = drain(sub)
        assert numbers(messages) == list(range(count))
        txn = begin(client, stored)
        sub.ack(messages, txn)
        sub.nack(messages)
        assert drain(sub) == []
        assert pending(client, sub) == count
        getattr(txn, end)()
    sub.nack(messages)
    assert drain(sub) == []
    txn.commit()  # again
    sub.close()
    assert drain(topic.subscribe("s", type)) == []


@STORED
def test_txn_ack_cumulative(client: txnkv.Client, topic: txnkv.Topic, stored: bool) -> None:
    send(client, 0, 100)
    sub = topic.subscribe("s")
    for end in ("rollback", "commit"):
        messages = drain(sub)
        assert numbers(messages) == list(range(100))
        txn = begin(client, stored)
        for message in messages[::7]:
            txn.ack_cumulative(sub, message)
        txn.ack_cumulative(sub, messages[-1])
        sub.nack(messages)
        assert drain(sub) == []
        getattr(txn, end)()
    assert drain(sub) == []
    late = begin(client, stored)
    with pytest.raises(txnkv.AckConflictError):
        late.ack_cumulative(sub, messages[50])


@BOTH
@STORED
def test_unack_message_after_ack_all_messages(
    client: txnkv.Client, topic: txnkv.Topic, type: str, stored: bool
) -> None:
    send(client, 0, 200)
    sub = topic.subscribe("s", type)
    messages = drain(sub)
    for part in range(4):
        txn = begin(client, stored)
        sub.ack(messages[part::4], txn)
        txn.commit()
    assert sub.lag() == {0: 0}


@BOTH
@STORED
def test_ack_with_transaction_reduces_the_unacknowledged(
    client: txnkv.Client, topic: txnkv.Topic, type: str, stored: bool
) -> None:
    """Here at the commit: until then the message is not done."""
    send(client, 0, 50)
    sub = topic.subscribe("s", type)
    txn = begin(client, stored)
    sub.ack(drain(sub)[:25], txn)
    assert sub.lag() == {0: 50}
    txn.commit()
    assert sub.lag() == {0: 25}
    one = begin(client, stored)
    sub.ack(MessageId(0, 40), one)
    one.commit()
    assert sub.lag() == {0: 24}


@BOTH
def test_txn_message_ack(client: txnkv.Client, topic: txnkv.Topic, type: str) -> None:
    with client.transaction() as txn:
        for number in range(20):
            txn.send(topic, str(number))
    sub = topic.subscribe("s", type)
    messages = drain(sub)
    sub.ack(messages[::2])
    sub.nack(messages)
    assert numbers(drain(sub)) == list(range(1, 20, 2))


def test_produce_txn_message_order(client: txnkv.Client, topic: txnkv.Topic) -> None:
    sub = topic.subscribe("s")
    for number in range(10):
        with client.transaction() as txn:
            for i in range(1000):
                txn.send(topic, str(number * 1000 + i))
    assert [int(m.value or b"") for m in drain(sub)] == list(range(10_000))


@BOTH
@STORED
def test_produce_and_consume_close_state_txn(
    client: txnkv.Client, topic: txnkv.Topic, type: str, stored: bool
) -> None:
    send(client, 0, 2)
    sub = topic.subscribe("s", type)
    first, second = drain(sub)
    txn = begin(client, stored)
    txn.ack(sub, first)
    txn.commit()
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.ack(sub, second)
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.send(topic, "late")
    txn.commit()


@BOTH
@STORED
def test_txn_time_out_in_client(
    client: txnkv.Client, topic: txnkv.Topic, type: str, stored: bool, now: Any
) -> None:
    send(client, 0, 1)
    sub = topic.subscribe("s", type)
    (message,) = drain(sub)
    txn = client.new_transaction(timeout=1.0)
    if stored:
        txn.serialize()
    now.forward(5)
    with pytest.raises(txnkv.InvalidTxnStateError), txn:
        txn.ack(sub, message)


@STORED
@pytest.mark.parametrize(
    ("type", "cumulative"), [("exclusive", False), ("exclusive", True), ("shared", False)]
)
def test_abort_without_a_consumer(
    client: txnkv.Client, topic: txnkv.Topic, type: str, stored: bool, cumulative: bool
) -> None:
    """There: txnTransactionRedeliverNullDispatcher."""
    send(client, 0, 10)
    sub = topic.subscribe("s", type)
    messages = drain(sub)
    txn = begin(client, stored)
    (txn.ack_cumulative if cumulative else txn.ack)(sub, messages[4])
    sub.close()
    txn.rollback()
    assert numbers(drain(topic.subscribe("s", type))) == list(range(10))


@STORED
def test_one_transaction_one_topic_with_multi_sub(
    client: txnkv.Client, topic: txnkv.Topic, stored: bool
) -> None:
    send(client, 0, 3)
    subs = [topic.subscribe(name, type) for name, type in (("a", "exclusive"), ("b", "shared"))]
    for end in ("rollback", "commit"):
        txn = begin(client, stored)
        for sub in subs:
            txn.ack(sub, drain(sub)[0])
        getattr(txn, end)()
        assert [numbers(drain(sub)) for sub in subs] == (
            [[0]] * 2 if end == "rollback" else [[]] * 2
        )
        for sub in subs:
            sub.nack([MessageId(0, offset) for offset in range(3)])
    assert [numbers(drain(sub)) for sub in subs] == [[1, 2]] * 2


# -- TransactionTest -------------------------------------------------------------------


@BOTH
def test_async_send_or_ack(client: txnkv.Client, topic: txnkv.Topic, type: str) -> None:
    """30 threads send and acknowledge in one transaction."""
    send(client, 0, 300)
    sub = topic.subscribe("s", type)
    messages = drain(sub)
    txn = begin(client)
    errors: list[BaseException] = []

    def work(part: list[Message]) -> None:
        try:
            for message in part:
                txn.send(topic, "again")
                txn.ack(sub, message)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(messages[i::30],)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    txn.commit()
    assert [m.value for m in drain(sub)] == [b"again"] * 300
    assert sub.lag() == {0: 300}


@BOTH
@STORED
def test_transaction_ack_message_list(
    client: txnkv.Client, topic: txnkv.Topic, type: str, stored: bool
) -> None:
    send(client, 0, 10)
    sub = topic.subscribe("s", type)
    for end, left in (("rollback", list(range(10))), ("commit", [])):
        txn = begin(client, stored)
        sub.ack(drain(sub), txn)
        getattr(txn, end)()
        sub.close()
        sub = topic.subscribe("s", type)
        found = drain(sub)
        assert numbers(found) == left
        sub.nack(found)


# -- TransactionProduceTest, TransactionConsumeTest ------------------------------------


@BOTH
@STORED
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_ack_commit_and_abort(
    client: txnkv.Client, topic: txnkv.Topic, type: str, stored: bool, end: str
) -> None:
    send(client, 0, 10)
    sub = topic.subscribe("s", type)
    messages = drain(sub)
    txn = begin(client, stored)
    for message in messages:
        txn.ack(sub, message)
    assert pending(client, sub) == 10
    sub.nack(messages)
    assert drain(sub) == []
    getattr(txn, end)()
    assert pending(client, sub) == 0
    assert len(drain(sub)) == (0 if end == "commit" else 10)


@BOTH
def test_message_redelivery(client: txnkv.Client, topic: txnkv.Topic, type: str) -> None:
    sub = topic.subscribe("s", type)
    for number in range(6):
        txn = begin(client, stored=True)
        txn.send(topic, str(number))
        txn.flush()
        (txn.commit if number % 2 else txn.rollback)()
    messages = drain(sub)
    assert numbers(messages) == [1, 3, 5]
    sub.nack(messages)
    assert numbers(drain(sub)) == [1, 3, 5]
    sub.close()
    assert numbers(drain(topic.subscribe("s", type))) == [1, 3, 5]


@BOTH
@STORED
def test_ack_chunk_message(client: txnkv.Client, type: str, stored: bool) -> None:
    client.instance.topics.create("events", 1, "marker", TopicOptions(max_message_bytes=100))
    topic = client.topic("events")
    with client.transaction() as txn:
        txn.send(topic, b"x" * 1000)
    sub = topic.subscribe("s", type)
    (message,) = drain(sub)
    txn = begin(client, stored)
    txn.ack(sub, message)
    txn.commit()
    sub.close()
    sub = topic.subscribe("s", type)
    assert drain(sub) == []
    assert sub.lag() == {0: 0}  # the end marker is no message


@BOTH
@STORED
@pytest.mark.parametrize("end", ["rollback", "cumulative"])
def test_small_messages_before_a_large_one_come_again(
    client: txnkv.Client, type: str, stored: bool, end: str
) -> None:
    """Only the large one did, and a cumulative ack of what came next lost the others."""
    client.instance.topics.create("events", 1, "marker", TopicOptions(max_message_bytes=100))
    topic = client.topic("events")
    values = [b"a", b"b", b"x" * 1000, b"c"]
    with client.transaction() as txn:
        for value in values:
            txn.send(topic, value)
    sub = topic.subscribe("s", type)
    messages = drain(sub)
    txn = begin(client, stored)
    if end == "cumulative" and type == "exclusive":
        txn.ack_cumulative(sub, messages[2])
    else:
        txn.ack(sub, messages[:3])
    txn.rollback()
    assert [m.value for m in drain(sub)] == values[:3]
    sub.ack(messages[3])
    sub.close()
    assert [m.value for m in drain(topic.subscribe("s", type))] == values[:3]


# -- TransactionLowWaterMarkTest -------------------------------------------------------


@BOTH
def test_pending_ack_low_water_mark(
    client: txnkv.Client, topic: txnkv.Topic, type: str, elsewhere: Callable[..., Any]
) -> None:
    """There a late ack stayed pending until a later transaction committed; here it is refused."""
    send(client, 0, 3)
    sub = topic.subscribe("s", type)
    messages = drain(sub)
    txn = client.new_transaction()
    token = str(txn.serialize())
    txn.ack(sub, messages[0])
    txn.commit()
    code = """
import pickle
late = txnkv.Transaction.deserialize(client, token)
try:
    late.ack(info, id)
    late.flush()
except txnkv.InvalidTxnStateError:
    say("refused")
"""
    assert elsewhere(code, token=token, info=sub.info, id=messages[1].id) == "refused"
    assert pending(client, sub) == 0
    sub.close()
    assert numbers(drain(topic.subscribe("s", type))) == [1, 2]


# -- PendingAckPersistentTest ----------------------------------------------------------

REPLAY = """
sub = client.topic("events").subscribe("s", kind)
def refused(ack, id):
    txn = client.new_transaction()
    try:
        getattr(txn, ack)(sub, id)
        txn.rollback()
        return False
    except txnkv.AckConflictError:
        return True
say([refused(ack, id) for id in ids])
"""


@BOTH
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_individual_pending_ack_replay(
    client: txnkv.Client,
    topic: txnkv.Topic,
    type: str,
    end: str,
    elsewhere: Callable[..., Any],
) -> None:
    send(client, 0, 10)
    sub = topic.subscribe("s", type)
    messages = drain(sub)
    txn = begin(client, stored=True)
    ids = [message.id for message in messages[::2]]
    sub.ack([m for m in messages if m.id in ids], txn)
    sub.close()
    refused = elsewhere(REPLAY, kind=type, ack="ack", ids=ids)
    assert refused == [True] * len(ids)
    getattr(txn, end)()
    refused = elsewhere(REPLAY, kind=type, ack="ack", ids=ids)
    assert refused == [end == "commit"] * len(ids)
    left = list(range(1, 10, 2)) if end == "commit" else list(range(10))
    assert numbers(drain(topic.subscribe("s", type))) == left


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_cumulative_pending_ack_replay(
    client: txnkv.Client, topic: txnkv.Topic, end: str, elsewhere: Callable[..., Any]
) -> None:
    send(client, 0, 10)
    sub = topic.subscribe("s")
    messages = drain(sub)
    txn = begin(client, stored=True)
    txn.ack_cumulative(sub, messages[5])
    sub.close()
    ids = [message.id for message in messages]
    refused = elsewhere(REPLAY, kind="exclusive", ack="ack_cumulative", ids=ids)
    assert refused == [True] * 10
    getattr(txn, end)()
    refused = elsewhere(REPLAY, kind="exclusive", ack="ack_cumulative", ids=ids)
    assert refused == [end == "commit"] * 6 + [False] * 4
    left = list(range(6, 10)) if end == "commit" else list(range(10))
    assert numbers(drain(topic.subscribe("s"))) == left
    with client.instance.store.status.read() as cur:
        assert cur.execute("SELECT count(*) FROM pending_acks").get == 0


@BOTH
@STORED
def test_a_hundred_transactions_alternately(
    client: txnkv.Client, topic: txnkv.Topic, type: str, stored: bool
) -> None:
    """testPendingAckMetrics: 50 committed, 50 aborted."""
    count = 20 if stored else 100
    send(client, 0, count)
    sub = topic.subscribe("s", type)
    for number in range(count):
        message = sub.receive(timeout=0)
        assert message is not None
        txn = begin(client, stored)
        txn.ack(sub, message)
        if number % 2 == 0:
            txn.commit()
        else:
            txn.rollback()
            again = sub.receive(timeout=0)
            assert again is not None
            assert again.id == message.id
    sub.close()
    assert numbers(drain(topic.subscribe("s", type))) == list(range(1, count, 2))
    assert pending(client, sub) == 0


@BOTH
@STORED
def test_conflict_when_a_message_of_a_batch_is_acknowledged(
    client: txnkv.Client, topic: txnkv.Topic, type: str, stored: bool
) -> None:
    """Two transactions may hold different messages of one batch, not the same one."""
    send(client, 0, 5)
    sub = topic.subscribe("s", type)
    messages = drain(sub)
    first, second, third = (begin(client, stored) for _ in range(3))
    first.ack(sub, messages[1])
    second.ack(sub, messages[2])
    first.commit()
    with pytest.raises(txnkv.AckConflictError):
        third.ack(sub, messages[1])
    second.commit()
    sub.close()
    assert numbers(drain(topic.subscribe("s", type))) == [0, 3, 4]
