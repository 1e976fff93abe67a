"""Consumers of one subscription: processes and threads that share it or follow one another."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.threads import at_once
from tests.topics.subscriptions.subscription_tools import left_over, received, send, take
from txnkv.topics.acks import exclusive
from txnkv.topics.messages.message import MessageId

# -- one consumer ----------------------------------------------------------------------


def test_an_exclusive_subscription_has_one_consumer(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    sub = topic.subscribe("s")
    with pytest.raises(txnkv.UnavailableError, match="this process"):
        topic.subscribe("s")
    code = """
try:
    client.topic("events").subscribe("s")
except txnkv.UnavailableError as error:
    say(str(error))
"""
    assert f"process {os.getpid()}" in process(code).finish()
    sub.close()
    topic.subscribe("s").close()


@pytest.mark.parametrize("options", [{}, {"ack_timeout": 3600}])
def test_consumers_of_a_failover_subscription_wait_for_the_place(
    client: txnkv.Client, topic: txnkv.Topic, options: dict[str, Any]
) -> None:
    send(client, *range(3))
    first = topic.subscribe("s", "failover", **options)
    second, third = (topic.subscribe("s", "failover") for _ in range(2))
    assert received(second) == received(third) == []
    got = first.receive_many(3, timeout=0)
    first.ack(got[0])
    assert (first.is_active, second.is_active) == (True, False)
    second.nack(got[1])  # of no effect
    with pytest.raises(txnkv.UnavailableError, match="has a consumer"):
        topic.subscribe("s", "failover", redelivery_delay=7.0)
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.extend([str(second.receive(timeout=60))]))
    waiting.start()
    txn = client.new_transaction()
    txn.ack(first, got[1])
    first.close()
    waiting.join(60)
    assert "0:2" in found[0]
    assert received(third) == []
    second.ack_cumulative(MessageId(0, 0))
    txn.rollback()
    assert received(second) == ["1"]
    second.close()
    assert received(third) == ["1", "2"]
    third.close()


def test_a_killed_consumer_is_followed_by_one_that_waits(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    send(client, 0)
    code = """
sub = client.topic("events").subscribe("s", "failover")
say(sub.receive(timeout=60).offset)
wait()
"""
    killed = process(code)
    assert killed.hear() == 0
    with topic.subscribe("s", "failover") as sub:
        assert received(sub) == []
        killed.kill()
        message = sub.receive(timeout=60)
        assert message is not None
        assert message.offset == 0


def test_a_dropped_consumer_gives_its_place(
    client: txnkv.Client, topic: txnkv.Topic, until: Callable[..., Any]
) -> None:
    send(client, 0)
    sub = topic.subscribe("s")
    take(sub)
    del sub

    def again() -> Any:
        try:
            return topic.subscribe("s")
        except txnkv.UnavailableError:
            return None

    assert received(until(again)) == ["0"]


@pytest.mark.parametrize("options", [{}, {"type": "shared"}, {"max_deliveries": 9}])
def test_what_a_killed_consumer_had_is_delivered_at_once(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any], options: dict[str, Any]
) -> None:
    send(client, *range(5))
    child = process(
        """
sub = client.topic("events").subscribe("s", **how)
got = sub.receive_many(3, timeout=0)
sub.ack(got[0])
txn = client.new_transaction()
txn.ack(sub, got[1])
say([m.value for m in got])
wait()
""",
        how=options,
    )
    assert child.hear() == [b"0", b"1", b"2"]
    other = topic.subscribe("s", **options) if options.get("type") == "shared" else None
    if other is not None:
        assert received(other) == ["3", "4"]
        other.ack([MessageId(0, 3), MessageId(0, 4)])
    child.kill()
    if other is not None:
        for value in (b"1", b"2"):  # what was acknowledged may come back before what was leased
            assert [m.value for m in other.receive_many(1, timeout=20)] == [value]
    else:
        assert received(topic.subscribe("s", **options)) == ["1", "2", "3", "4"]


def test_a_stored_transaction_of_a_killed_consumer_keeps_its_acks(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    send(client, *range(3))
    for type in ("exclusive", "shared"):
        child = process(
            """
sub = client.topic("events").subscribe(type, type)
got = sub.receive_many(3, timeout=0)
txn = client.new_transaction()
token = str(txn.serialize())
txn.ack(sub, got[1])
say(token)
wait()
""",
            type=type,
        )
        token = child.hear()
        child.kill()
        sub = topic.subscribe(type, type)
        found = [m.value for m in sub.receive_many(5, timeout=20)]
        assert found == [b"0", b"2"]
        txnkv.Transaction.deserialize(client, token).rollback()
        assert [m.value for m in sub.receive_many(5, timeout=20)] == [b"1"]


def test_what_came_back_to_a_consumer_does_not_pile_up(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row stayed for each ack of a stored transaction that was aborted."""
    monkeypatch.setattr(exclusive, "_MANY", 5)
    send(client, "x")
    sub = topic.subscribe("s")
    for _ in range(23):
        message = take(sub)
        assert left_over(client) <= 5
        txn = client.new_transaction()
        txn.serialize()
        txn.ack(sub, message)
        txn.rollback()
    assert received(sub) == ["x"]


# -- other processes -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_acks_by_token_from_another_process(
    client: txnkv.Client,
    topic: txnkv.Topic,
    elsewhere: Callable[..., Any],
    options: dict[str, Any],
    end: str,
) -> None:
    send(client, *range(4))
    sub = topic.subscribe("s", **options)
    got = sub.receive_many(4, timeout=0)
    txn = client.new_transaction()
    txn.ack(sub, got[0])
    code = """
import pickle
joined = txnkv.Transaction.deserialize(client, token)
joined.ack(pickle.loads(info), id)
joined.flush()
"""
    token, info = str(txn.serialize()), pickle.dumps(sub.info)
    elsewhere(code, token=token, info=info, id=got[2].id)
    with pytest.raises(txnkv.AckConflictError):
        sub.ack(got[2], client.new_transaction())
    sub.ack(got[2])  # dropped
    assert received(sub) == []
    getattr(txn, end)()
    assert received(sub) == ([] if end == "commit" else ["0", "2"])
    sub.close()
    left = received(topic.subscribe("s", **options))
    assert left == (["1", "3"] if end == "commit" else ["0", "1", "2", "3"])


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_a_late_ack_by_token_is_refused(
    client: txnkv.Client,
    topic: txnkv.Topic,
    elsewhere: Callable[..., Any],
    options: dict[str, Any],
) -> None:
    """In Pulsar it stayed pending until a later transaction committed."""
    send(client, *range(3))
    sub = topic.subscribe("s", **options)
    got = sub.receive_many(3, timeout=0)
    txn = client.new_transaction()
    token = str(txn.serialize())
    txn.ack(sub, got[0])
    txn.commit()
    code = """
late = txnkv.Transaction.deserialize(client, token)
try:
    late.ack(info, id)
    late.flush()
except txnkv.InvalidTxnStateError:
    say("refused")
"""
    assert elsewhere(code, token=token, info=sub.info, id=got[1].id) == "refused"
    assert left_over(client) == (2 if options else 0)  # leases
    sub.close()
    assert received(topic.subscribe("s", **options)) == ["1", "2"]


def test_an_ack_elsewhere_wins_over_a_later_one_here(
    client: txnkv.Client, topic: txnkv.Topic, elsewhere: Callable[..., Any]
) -> None:
    send(client, 0)
    sub = topic.subscribe("s")
    message = take(sub)
    first, second = client.new_transaction(), client.new_transaction()
    code = """
import pickle
joined = txnkv.Transaction.deserialize(client, token)
joined.ack(pickle.loads(info), id)
"""
    token, info = str(first.serialize()), pickle.dumps(sub.info)
    elsewhere(code, token=token, info=info, id=message.id)
    with pytest.raises(txnkv.AckConflictError):
        second.ack(sub, message)
    assert second.state is txnkv.TxnState.ABORTED
    first.commit()
    assert received(sub) == []


def test_many_processes_share_without_loss_or_double(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    count = 200
    send(client, *range(count))
    out = client.create_topic("out")
    code = """
sub = client.topic("events").subscribe("s", type="shared")
done = 0
while (message := sub.receive(timeout=1.0)) is not None:
    with client.transaction() as txn:
        txn.send("out", message.value)
        txn.ack(sub, message)
    done += 1
say(done)
"""
    children = [process(code) for _ in range(3)]
    done = [child.finish() for child in children]
    assert sum(done) == count
    assert sorted(map(int, received(out.subscribe("look")))) == list(range(count))
    assert topic.subscribe("s", type="shared").lag() == {0: 0}


def test_killed_workers_lose_and_double_nothing(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    count = 60
    send(client, *range(count))
    out = client.create_topic("out")
    code = """
sub = client.topic("events").subscribe("s", type="shared")
for _ in range(12):  # and leaves some to the others, however late it is killed
    message = sub.receive(timeout=30)
    with client.transaction() as txn:
        txn.send("out", message.value)
        txn.ack(sub, message)
    say()
wait()
"""
    for killed in range(4):
        child = process(code)
        for _ in range(3 + killed):
            child.hear()
        child.kill()
    sub = topic.subscribe("s", type="shared")
    while (message := sub.receive(timeout=0.5)) is not None:
        with client.transaction() as txn:
            txn.send("out", message.value)
            txn.ack(sub, message)
    assert sorted(map(int, received(out.subscribe("look")))) == list(range(count))


# -- threads ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_threads_acknowledge_what_one_receives(
    client: txnkv.Client, topic: txnkv.Topic, options: dict[str, Any]
) -> None:
    count = 120
    send(client, *range(count))
    sub = topic.subscribe("s", **options)
    messages = sub.receive_many(count, timeout=0)

    def work(part: list[Any]) -> None:
        for number, message in enumerate(part):
            if number % 3 == 0:
                sub.ack(message)
            elif number % 3 == 1:
                with client.transaction() as txn:
                    txn.ack(sub, message)
            else:
                txn = client.new_transaction()
                txn.ack(sub, message)
                txn.rollback()

    at_once(*(partial(work, messages[i::4]) for i in range(4)))
    back = [int(value) for value in received(sub)]
    assert sorted(back) == sorted(
        int(m.value or b"") for i in range(4) for m in messages[i::4][2::3]
    )
    sub.ack([MessageId(0, offset) for offset in back])
    assert sub.lag() == {0: 0}
    assert left_over(client) == 0


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_threads_send_and_acknowledge_in_one_transaction(
    client: txnkv.Client, topic: txnkv.Topic, options: dict[str, Any]
) -> None:
    send(client, *range(300))
    sub = topic.subscribe("s", **options)
    messages = sub.receive_many(300, timeout=0)
    txn = client.new_transaction()

    def work(part: list[Any]) -> None:
        for message in part:
            txn.send(topic, "again")
            txn.ack(sub, message)

    at_once(*(partial(work, messages[i::30]) for i in range(30)))
    txn.commit()
    assert received(sub) == ["again"] * 300
    assert sub.lag() == {0: 300}


def test_two_transactions_that_race_for_a_message(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, *range(30))
    sub = topic.subscribe("s")
    messages = sub.receive_many(30, timeout=0)
    won: list[int] = []
    start = threading.Barrier(3)

    def race() -> None:
        for message in messages:
            start.wait()
            txn = client.new_transaction()
            try:
                txn.ack(sub, message)
                txn.commit()
            except txnkv.AckConflictError:
                continue
            won.append(message.offset)

    at_once(*[race] * 3)
    assert sorted(won) == list(range(30))
    assert received(sub) == []


def test_an_ack_is_durable_when_it_returns(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, 0, 1)
    sub = topic.subscribe("s")
    sub.ack(take(sub))
    assert internals.runtime(client).all_synced()


def test_time_is_not_wasted_on_an_idle_subscription(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    sub = topic.subscribe("s", type="shared")
    before = internals.runtime(client).change_word()
    began = time.process_time()
    assert sub.receive(timeout=0.3) is None
    assert internals.runtime(client).change_word() == before
    assert time.process_time() - began < 0.3
