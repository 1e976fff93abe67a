"""Transactions over topics by token, from several processes and across forks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv

Messages = Callable[..., list[txnkv.Message]]
Values = Callable[..., list[bytes | None]]


def test_by_token_from_other_processes(
    client: txnkv.Client,
    topic: txnkv.Topic,
    table: txnkv.Table,
    values: Values,
    process: Callable[..., Any],
) -> None:
    """Rows and messages of four processes, one commit."""
    txn = client.new_transaction()
    txn.send(topic, b"mine")
    token = txn.serialize()
    workers = [
        process(
            """
            with txnkv.Transaction.deserialize(client, token) as txn:
                txn.insert("t", {"id": n, "v": "x"})
                for i in range(3):
                    txn.send("events", b"%d %d" % (n, i))
                    txn.flush()
            """,
            token=token,
            n=n,
        )
        for n in range(3)
    ]
    for worker in workers:
        worker.finish()
    assert values(topic) == []
    assert table.count() == 0
    txn.send(topic, b"mine too")
    txn.commit()
    found = values(topic)
    assert sorted(map(bytes, filter(None, found))) == sorted(
        [b"mine", b"mine too"] + [b"%d %d" % (n, i) for n in range(3) for i in range(3)]
    )
    assert table.count() == 3


def test_another_process_commits(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, elsewhere: Callable[..., Any]
) -> None:
    """20 transactions of 10 messages each, committed where only their tokens are known."""
    txns = [client.new_transaction() for _ in range(20)]
    for n, txn in enumerate(txns):
        for i in range(10):
            txn.send(topic, b"%d %d" % (n, i))
        txn.flush()
    assert values(topic) == []
    elsewhere(
        """
        for token in tokens:
            txnkv.Transaction.deserialize(client, token).commit()
        """,
        tokens=[txn.serialize() for txn in txns],
    )
    found = values(topic)
    assert sorted(filter(None, found)) == sorted(
        b"%d %d" % (n, i) for n in range(20) for i in range(10)
    )
    for txn in txns:
        with pytest.raises(txnkv.InvalidTxnStateError):
            txn.send(topic, b"late")


def test_a_late_process_sends_nothing(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, process: Callable[..., Any]
) -> None:
    """Neither its messages nor its acknowledgements count when the transaction has ended."""
    txn = client.new_transaction()
    txn.send(topic, b"a")
    late = process(
        """
        txn = txnkv.Transaction.deserialize(client, token)
        txn.send("events", b"early")
        txn.flush()
        txn.send("events", b"late")
        say("there")
        wait()
        try:
            txn.flush()
        except txnkv.InvalidTxnStateError as error:
            say(str(error))
        """,
        token=txn.serialize(),
    )
    assert late.hear() == "there"
    txn.commit()
    late.tell()
    assert "not open" in late.finish()
    assert sorted(map(bytes, filter(None, values(topic)))) == [b"a", b"early"]


def test_another_process_reads_what_is_sent_here(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any], size: str
) -> None:
    reader = process(
        """
        with client.topic("events").consumer() as consumer:
            say("there")
            found = []
            while len(found) < 3:
                found += [message.value for message in consumer.poll(timeout=5)]
            say(found)
        """
    )
    assert reader.hear() == "there"
    for n in range(3):
        with client.transaction() as txn:
            txn.send(topic, b"%d" % n)
    assert reader.hear() == [b"0", b"1", b"2"]
    reader.finish()


def test_processes_that_send_at_once(
    client: txnkv.Client, topic: txnkv.Topic, messages: Messages, process: Callable[..., Any]
) -> None:
    """Small and large ones to one partition: dense, whole, each in its order."""
    code = """
        wait()
        for turn in range(15):
            with client.transaction() as txn:
                for i in range(20):
                    txn.send("events", b"%d %d %d" % (n, turn, i))
                if large:
                    txn.serialize()
        """
    workers = [process(code, n=n, large=n % 2 == 1) for n in range(4)]
    for worker in workers:
        worker.tell()
    for worker in workers:
        worker.finish()
    found = messages(topic)
    for n in range(4):
        own = [m.value for m in found if m.value is not None and m.value.startswith(b"%d " % n)]
        assert own == [b"%d %d %d" % (n, turn, i) for turn in range(15) for i in range(20)]


def test_a_forked_child_sends_by_itself(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, elsewhere: Callable[..., Any]
) -> None:
    with client.transaction() as txn:
        txn.send(topic, b"before")
    elsewhere(
        """
        topic = client.topic("events")
        txn = client.new_transaction()
        txn.send(topic, b"parent's")
        child = os.fork()
        if child == 0:
            try:
                try:
                    txn.send(topic, b"not the child's")
                    txn.flush()
                    os._exit(1)
                except txnkv.InvalidTxnStateError:
                    with client.transaction() as own:
                        own.send(topic, b"child's")
            except BaseException:
                os._exit(2)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        txn.commit()
        """
    )
    assert values(topic) == [b"before", b"child's", b"parent's"]


def test_what_waits_in_a_session_is_sent_by_the_parent_alone(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, elsewhere: Callable[..., Any]
) -> None:
    """Else a fork would double it."""
    elsewhere(
        """
        session = client.new_session()
        session.send("events", b"before")
        child = os.fork()
        session.send("events", b"parent's" if child else b"child's")
        session.flush()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        session.close()
        """
    )
    found = values(topic)
    assert sorted(filter(None, found)) == [b"before", b"child's", b"parent's"]
