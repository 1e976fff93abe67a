"""Acks that are refused or fail leave nothing behind; consumers close, and sessions let go."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import txnkv
from tests.topics.acks.ack_tools import Acks
from txnkv.storage import settle_dropped
from txnkv.topics.acks import ack_rows
from txnkv.topics.delivery.transaction_acks import TransactionAcks
from txnkv.topics.messages.message import MessageId

# -- what is refused leaves nothing behind ---------------------------------------------


def collected() -> None:
    """Finalizers of what nothing refers to have run."""
    gc.collect()
    settle_dropped()


@pytest.mark.parametrize("late", [False, True], ids=["refused first", "refused later"])
def test_a_refused_ack_gives_nothing_of_its_transaction_back(acks: Acks, late: bool) -> None:
    """The remains of the refused ack gave back, when they were collected, all acks of its
    transaction, which then committed: output there, input delivered again.
    """
    a = acks.begin("A")
    if late:
        acks.ack(1, a)
    with pytest.raises(txnkv.OffsetOutOfRangeError) as error:
        acks.sub.ack(MessageId(0, 1000), a)
    acks.ack(2, a)
    a.serialize()
    del error
    collected()
    assert acks.delivered() == []
    a.commit()
    assert acks.left() == ([0, 3, 4, 5] if late else [0, 1, 3, 4, 5])


@pytest.mark.parametrize("wrong", [(0, 1.0), (0, 2.5), (0.0, 1), (0, True), (0, "1"), ("a", 0)])
def test_an_id_of_what_are_no_integers_is_refused(acks: Acks, wrong: Any) -> None:
    """Fractions were taken, and neighbours of theirs never came again."""
    a, id = acks.begin("A"), MessageId(*wrong)
    calls: list[Any] = [acks.sub.ack, acks.sub.nack, lambda id: acks.sub.ack([id], a)]
    for call in [*calls, *[acks.sub.ack_cumulative] * acks.cumulative]:
        with pytest.raises(TypeError, match=r"^(a partition|an offset) is a number, not the"):
            call(id)
    places: Any = np.arange(4)
    acks.sub.ack(MessageId(places[0], places[3]), a)
    a.commit()
    assert acks.left() == [0, 1, 2, 4, 5]


def test_an_ack_that_a_full_disk_refused_gives_nothing_back(
    acks: Acks, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = acks.begin("A")
    register = ack_rows.register
    full = threading.Event()
    full.set()

    def refuse(*args: Any) -> int:
        if full.is_set():
            raise txnkv.StorageFullError("no room")
        return register(*args)

    monkeypatch.setattr(ack_rows, "register", refuse)
    in_memory = False
    try:
        acks.ack(1, a)
        in_memory = True
        a.serialize()
    except txnkv.StorageFullError:
        pass
    collected()
    full.clear()
    acks.ack(2, a)
    collected()
    a.commit()
    assert acks.left() == ([0, 3, 4, 5] if in_memory else [0, 1, 3, 4, 5])


@pytest.mark.parametrize("stored", ["small", "large"])
def test_a_conflict_in_one_partition_holds_nothing_of_another(
    client: txnkv.Client, type: str, stored: str
) -> None:
    """The message of the other was nobody's for as long as the error was looked at."""
    topic = client.create_topic("two", partitions=2)
    with client.transaction() as txn:
        for number in range(2):
            txn.send("two", str(number), partition=number)
    options = {"max_deliveries": 9} if type == "counted" else {"type": type}
    sub = topic.subscribe("s", **options)
    messages = {m.partition: m for m in sub.receive_many(2, timeout=0)}
    a, b = client.new_transaction(), client.new_transaction()
    if stored == "large":
        b.serialize()
    sub.ack(messages[1], a)
    with pytest.raises(txnkv.AckConflictError) as error:
        sub.ack([messages[0], messages[1]], b)
    with client.transaction() as txn:
        txn.ack(sub, messages[0])
    assert error.value is not None  # it keeps its traceback alive
    a.commit()
    assert sub.lag() == {0: 0, 1: 0}
    sub.close()


def test_an_ack_whose_time_is_over_at_the_commit_loses_to_who_received_it_since(
    client: txnkv.Client, now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline was looked at in time; then the thread had no turn for a while."""
    topic = client.create_topic("events")
    with client.transaction() as txn:
        txn.send(topic, b"a")
    sub = topic.subscribe("s")
    (message,) = sub.receive_many(10, timeout=0)
    txn = client.new_transaction(timeout=5.0)
    txn.ack(sub, message)
    validate = TransactionAcks.validate
    again: list[Any] = []

    def late(self: TransactionAcks, *args: Any) -> None:
        if not again:
            now.forward(120)
            with ThreadPoolExecutor(1) as pool:
                again.extend(pool.submit(sub.receive_many, 10, timeout=0).result(60))
        validate(self, *args)

    monkeypatch.setattr(TransactionAcks, "validate", late)
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
    assert [each.value for each in again] == [b"a"]
    sub.ack(again)


# -- two processes ---------------------------------------------------------------------


BY_TOKEN = """
joined = txnkv.Transaction.deserialize(client, token)
joined.ack(info, id)
joined.flush()
"""


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("first", ["here", "there", "rolled back"])
def test_two_processes_have_one_message_and_one_commits(
    client: txnkv.Client, elsewhere: Callable[..., Any], looks: bool, first: str
) -> None:
    """Both did, when the consumer had looked for messages between ack and commit."""
    acks = Acks(client, "exclusive", "small")
    here, there = client.new_transaction(), client.new_transaction()
    acks.ack(1, here)
    elsewhere(BY_TOKEN, token=str(there.serialize()), info=acks.sub.info, id=acks.messages[1].id)
    if looks:
        assert acks.delivered() == []
    if first == "rolled back":
        there.rollback()
        here.commit()
        assert acks.left() == [0, 2, 3, 4, 5]
        return
    if first == "there":
        there.commit()
    with pytest.raises(txnkv.AckConflictError):
        here.commit()
    assert here.state is txnkv.TxnState.ABORTED
    there.commit()
    assert acks.left() == [0, 2, 3, 4, 5]


ALL_BY_TOKEN = BY_TOKEN.replace("joined.ack(", "joined.ack_cumulative(")


@pytest.mark.parametrize("kind", ["small", "stored", "plain"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_cumulative_ack_is_none_of_what_came_back_and_was_not_received_since(
    client: txnkv.Client, elsewhere: Callable[..., Any], kind: str, joined: bool
) -> None:
    """A worker was killed with acks in a transaction; who followed deleted its messages with the
    later ones, and nobody had their effects.
    """
    acks = Acks(client, "exclusive", "small")
    dead = client.new_transaction()
    token, id = str(dead.serialize()), acks.messages[1].id
    if joined:
        elsewhere(ALL_BY_TOKEN, token=token, info=acks.sub.info, id=id)
    else:
        acks.ack_to(1, dead)
    dead.rollback()
    if kind == "plain":
        acks.ack_to(3)
        assert acks.delivered() == [0, 1]
    else:
        txn = client.new_transaction()
        if kind == "stored":
            txn.serialize()
        with pytest.raises(txnkv.AckConflictError, match="message 0:0 came back from another"):
            acks.ack_to(3, txn)
        assert txn.state is txnkv.TxnState.ABORTED
        assert acks.delivered() == [0, 1, 2, 3]
    with client.transaction() as again:
        if kind == "stored":
            again.serialize()
        acks.ack_to(4, again)
    assert acks.left() == [5]


def test_a_consumer_closes_over_an_ack_that_another_process_has(
    client: txnkv.Client, elsewhere: Callable[..., Any]
) -> None:
    """`close` raised, kept the place, and left the acks of other transactions behind."""
    acks = Acks(client, "exclusive", "small")
    loses, other, joined = (client.new_transaction() for _ in range(3))
    acks.ack(1, loses)
    acks.ack(2, other)
    elsewhere(BY_TOKEN, token=str(joined.serialize()), info=acks.sub.info, id=acks.messages[1].id)
    assert acks.left() == [0, 3, 4, 5]
    with pytest.raises(txnkv.AckConflictError):
        loses.commit()
    other.commit()
    joined.rollback()
    assert acks.delivered() == [1]


def test_a_consumer_closes_on_a_full_disk(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks = Acks(client, "exclusive", "small")
    txn = client.new_transaction()
    acks.ack(1, txn)

    def refuse(*args: Any) -> int:
        raise txnkv.StorageFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(ack_rows, "register", refuse)
        acks.sub.close()
    with pytest.raises(txnkv.AckConflictError, match="no room"):
        txn.ack(acks.sub.info, acks.messages[2])
    assert txn.state is txnkv.TxnState.ABORTED
    assert acks.left() == [0, 1, 2, 3, 4, 5]


# -- copies ----------------------------------------------------------------------------


def test_messages_of_a_copy_are_acknowledged_in_a_transaction(
    client: txnkv.Client, tmp_path: Path
) -> None:
    """The acks were refused: it is a copy. Dead letters made `receive` raise for ever."""
    client.create_topic("events")
    with client.transaction() as txn:
        txn.send("events", b"0")
        txn.send("events", b"1")
    txnkv.replicate(client, tmp_path / "copy")
    with txnkv.connect(tmp_path / "copy") as copy:
        with copy.topic("events").subscribe("s", max_deliveries=1, dead_letter="dead") as sub:
            got = sub.receive_many(2, timeout=0)
            with copy.transaction() as txn:
                txn.ack(sub, got[0])
            sub.nack(got[1])
            assert sub.receive(timeout=0) is None
            assert sub.lag() == {0: 0}
        with copy.topic("dead").subscribe("s") as dead:
            assert [m.value for m in dead.receive_many(2, timeout=0)] == [b"1"]


# -- sessions outside of transactions --------------------------------------------------


def test_a_session_says_what_it_cannot_acknowledge_and_lets_go(acks: Acks) -> None:
    """The ack waited on after each flush that failed, and let none pass."""
    with acks.client.new_session() as session:
        with pytest.raises(txnkv.OffsetOutOfRangeError):
            session.ack(acks.sub, MessageId(0, 1000))
        session.ack(acks.sub, acks.messages[1])
        assert session.flush().acked == 1
    assert acks.left() == [0, 2, 3, 4, 5]


def test_a_session_lets_go_of_acks_of_a_dropped_topic(acks: Acks) -> None:
    table = acks.client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    with acks.client.new_session() as session:
        session.insert(table, {"id": 1})
        session.ack(acks.sub, acks.messages[1])
        acks.client.drop_topic("events")
        with pytest.raises(txnkv.TopicNotFoundError):
            session.flush()
        assert session.flush().acked == 0
        with pytest.raises(txnkv.TopicNotFoundError):
            session.ack(acks.sub, acks.messages[2])
    assert table.count() == 1
    with pytest.raises(txnkv.TopicNotFoundError):
        acks.sub.receive(timeout=0)


# -- a subscription that is dropped ----------------------------------------------------


@pytest.mark.parametrize("looks", [False, True])
def test_dropping_a_subscription_aborts_who_acknowledged_its_messages(
    acks: Acks, looks: bool
) -> None:
    acks.client.create_topic("out")
    a = acks.begin("A")
    acks.ack(1, a)
    a.send("out", b"1")
    acks.topic.drop_subscription("s")
    assert acks.topic.subscriptions() == []
    if looks:
        with pytest.raises(txnkv.TopicNotFoundError):
            acks.delivered()
    with pytest.raises(txnkv.InvalidTxnStateError, match="dropped"):
        a.commit()
    assert a.state is txnkv.TxnState.ABORTED
    assert acks.client.topic("out").last_stable_offsets() == acks.client.topic("out").end_offsets()
    late = acks.begin("B")
    with pytest.raises(txnkv.TopicNotFoundError, match="dropped"):
        acks.ack(2, late)
    late.rollback()
    with pytest.raises(txnkv.TopicNotFoundError, match="no subscription 's'"):
        acks.topic.drop_subscription("s")
    acks.topic.drop_subscription("s", missing_ok=True)
    assert acks.left() == [0, 1, 2, 3, 4, 5]
    assert acks.client.check().problems == []
