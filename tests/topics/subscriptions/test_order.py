"""Subscriptions in the order of commits, and of messages that are not decided."""

from __future__ import annotations

import random
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.errors import NotSupportedError
from txnkv.storage import directory
from txnkv.topics.topic_catalog import TopicOptions

LARGE = 300
"""Bytes of a message that is sent in pieces."""


@pytest.fixture
def topic(client: txnkv.Client) -> txnkv.Topic:
    internals.topics(client).create("events", 1, "marker", TopicOptions(max_message_bytes=100))
    return client.topic("events")


def sent(client: txnkv.Client, *values: str) -> txnkv.Transaction:
    """An open transaction whose messages stand in the log."""
    txn = client.new_transaction()
    txn.serialize()
    session = txn.new_session()
    for value in values:
        session.send("events", value)
    session.flush()
    return txn


def received(sub: txnkv.Subscription, most: int = 100) -> list[txnkv.Message]:
    return sub.receive_many(most, timeout=0)


def values(messages: list[txnkv.Message]) -> list[str]:
    return [message.value.decode().rstrip(".") for message in messages]


def mark(sub: txnkv.Subscription) -> int:
    return sub.committed()[0]


def end(topic: txnkv.Topic) -> int:
    return topic.end_offsets()[0]


# -- commit order ----------------------------------------------------------------------


@pytest.mark.parametrize("type", ["exclusive", "failover"])
def test_an_open_transaction_holds_back_nothing(
    client: txnkv.Client, topic: txnkv.Topic, type: Any
) -> None:
    plain = topic.subscribe("plain")
    sub = topic.subscribe("s", type, order="commit")
    first = sent(client, "a", "b")
    second = sent(client, "c", "d".ljust(LARGE, "."))
    gone = sent(client, "never")
    second.commit()
    gone.rollback()
    assert received(plain) == []
    found = received(sub)
    assert values(found) == ["c", "d"]
    sub.ack(found)
    assert mark(sub) == 0
    assert received(sub) == []
    with topic.subscribe("other", order="commit") as other:
        assert values(received(other)) == ["c", "d"]
    session = first.new_session()
    session.send("events", "e")
    session.flush()
    first.commit()
    found = received(sub)
    assert values(found) == ["a", "b", "e"]
    sub.ack(found)
    assert received(sub) == []
    sub.close()
    assert topic.subscribe("s", type).committed() == {0: end(topic)}
    assert values(received(plain)) == ["a", "b", "c", "d", "e"]
    assert client.check().ok


def test_what_comes_back_is_given_again(client: txnkv.Client, topic: txnkv.Topic) -> None:
    """Beyond an open transaction too; what was not given yet comes once, in its order."""
    sub = topic.subscribe("s", order="commit")
    holding = sent(client, "late")
    sent(client, "a", "b").commit()
    sent(client, "c").commit()
    a, b = received(sub, 2)
    sub.nack(a)
    assert values(received(sub, 1)) == ["a"]
    txn = client.new_transaction()
    txn.ack(sub, a)
    txn.ack(sub, b)
    txn.rollback()
    again = received(sub)
    assert sorted(values(again)) == ["a", "b", "c"]
    sub.unreceive()
    assert sorted(values(received(sub))) == ["a", "b", "c"]
    with client.transaction() as txn:
        sub.ack(b, txn)
    # Who begins anew is given each once, though an aborted transaction gave some back.
    txn = client.new_transaction()
    token = txn.serialize()
    other = txnkv.Transaction.deserialize(client, token)
    other.ack(sub, a)
    sub.close()
    txn.rollback()
    with topic.subscribe("s") as anew:
        assert anew.info.order == "commit"
        assert values(received(anew)) == ["a", "c"]
        holding.commit()
        assert values(received(anew)) == ["late"]


def test_the_order_of_a_subscription_may_change(client: txnkv.Client, topic: txnkv.Topic) -> None:
    with topic.subscribe("s") as sub:
        first = sent(client, "a")
        sent(client, "b").commit()
        assert received(sub) == []
    with topic.subscribe("s", order="commit") as sub:
        sub.ack(received(sub))
    first.commit()
    with topic.subscribe("s", order="offset") as sub:
        found = received(sub)
        assert values(found) == ["a"]
        sub.ack_cumulative(found[0])


def test_what_retention_took_is_passed(
    client: txnkv.Client, topic: txnkv.Topic, by_hand: None
) -> None:
    internals.topics(client).create("cut", 1, "marker", TopicOptions(segment_bytes=200))
    cut = client.topic("cut")
    sub = cut.subscribe("s", order="commit")
    for number in range(9):
        with client.transaction() as txn:
            txn.send(cut, f"{number}".ljust(60, "."))
        internals.flush(client)
    cut.truncate({0: 5})
    assert values(received(sub))[0] == "5"


def test_refused(client: txnkv.Client, topic: txnkv.Topic) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"order": "key"}, "order is 'offset' or 'commit'"),
        ({"isolation": "serializable"}, "'read_committed' or 'read_uncommitted'"),
        ({"order": "commit", "isolation": "read_uncommitted"}, "shows what is committed"),
        ({"order": "commit", "type": "shared"}, "for exclusive and failover"),
        ({"order": "commit", "type": "key_shared"}, "for exclusive and failover"),
        ({"order": "commit", "max_deliveries": 3}, "for exclusive and failover"),
        ({"order": "commit", "ack_timeout": 3.0}, "for exclusive and failover"),
    ]
    for options, said in wrong:
        with pytest.raises(ValueError, match=said):
            topic.subscribe("no", **options)
    assert topic.subscriptions() == []
    assert internals.store(client).directory.features == []
    with topic.subscribe("s", order="commit") as sub:
        sent(client, "a").commit()
        (message,) = received(sub)
        with pytest.raises(NotSupportedError, match="in the order of commits"):
            sub.ack_cumulative(message)
    beside = client.create_topic("beside", buffer="sidecar")
    with beside.subscribe("s", "shared", order="commit"):
        assert internals.store(client).directory.features == ["read_otherwise"]


def test_versions_that_do_not_know_it_refuse_the_store(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.subscribe("plain").close()
    with internals.status(client).read() as cur:
        (options,) = cur.execute("SELECT options FROM subscriptions").fetchone() or ("",)
    assert "order" not in options
    topic.subscribe("s", isolation="read_uncommitted").close()
    client.close()
    with monkeypatch.context() as patch:
        patch.setattr(directory, "KNOWN_FEATURES", frozenset())
        with pytest.raises(txnkv.IncompatibleStoreError, match="read_otherwise"):
            txnkv.connect(client.path)


@pytest.mark.parametrize("seed", range(12))
def test_any_course_gives_each_message_once_in_the_order_of_commits(
    seed: int, client: txnkv.Client, topic: txnkv.Topic
) -> None:
    """Against a plain list: transactions end in any order, acks come in any, consumers go."""
    chance = random.Random(seed)
    sub = topic.subscribe("s", order="commit")
    opened: dict[str, tuple[txnkv.Transaction, list[str]]] = {}
    committed: list[str] = []  # in order
    in_hand: list[txnkv.Message] = []
    acked: set[str] = set()
    given = 0
    for step in range(60):
        doing = chance.choice(
            ["begin", "send", "small", "end", "end", "get", "get", "ack", "again"]
        )
        if doing == "begin" and len(opened) < 4:
            name = f"t{step}"
            opened[name] = (sent(client, f"{name}.0"), [f"{name}.0"])
        elif doing == "send" and opened:
            txn, has = opened[chance.choice(sorted(opened))]
            has.append(f"s{step}")
            session = txn.new_session()
            session.send("events", has[-1].ljust(chance.choice([0, LARGE]), "."))
            session.flush()
        elif doing == "small":
            with client.transaction() as txn:
                txn.send("events", f"m{step}")
            committed.append(f"m{step}")
        elif doing == "end" and opened:
            txn, has = opened.pop(chance.choice(sorted(opened)))
            if chance.random() < 0.3:
                txn.rollback()
            else:
                txn.commit()
                committed += has
        elif doing == "get":
            found = received(sub, chance.randint(1, 9))
            names = values(found)
            left = [each for each in committed if each not in acked]
            assert names == left[given : given + len(names)]
            given += len(names)
            in_hand += found
        elif doing == "ack" and in_hand:
            some = chance.sample(in_hand, chance.randint(1, len(in_hand)))
            if chance.random() < 0.7:
                sub.ack(some)
                in_hand = [each for each in in_hand if each not in some]
                acked |= set(values(some))
                given -= len(some)
        elif doing == "again" and chance.random() < 0.5:
            sub.close()
            sub = topic.subscribe("s")
            given, in_hand = 0, []
    for txn, has in opened.values():
        txn.commit()
        committed += has
    while found := received(sub):
        in_hand += found
    sub.ack(in_hand)
    assert acked | set(values(in_hand)) == set(committed)
    with client.transaction() as txn:
        txn.send("events", "last")
    (last,) = received(sub)
    sub.ack(last)
    sub.close()
    with topic.subscribe("s") as anew:
        assert received(anew) == []
        assert mark(anew) == end(topic)
        with internals.status(client).read() as cur:
            assert not cur.execute("SELECT * FROM acked_ranges").fetchall()


# -- isolation -------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["exclusive", "shared", "key_shared"])
def test_what_is_not_decided_is_given(client: txnkv.Client, topic: txnkv.Topic, type: Any) -> None:
    sub = topic.subscribe("s", type, isolation="read_uncommitted")
    plain = topic.subscribe("plain", type)
    first, gone = sent(client, "a", "b"), sent(client, "c")
    sent(client, "d").commit()
    assert received(plain) == []
    found = received(sub)
    assert values(found) == ["a", "b", "c", "d"]
    sub.nack(found[2])
    gone.rollback()
    again = received(sub)
    assert values(again) == ["c"]
    sub.ack(found[:2])
    sub.ack(again)
    with client.transaction() as txn:
        sub.ack(found[3], txn)
    first.commit()
    assert received(sub) == []
    assert values(received(plain)) == ["a", "b", "d"]
    with client.transaction() as txn:
        txn.send("events", "e")
    (last,) = received(sub)
    sub.ack(last)
    assert sub.lag() == {0: 0}
    sub.close()
    with topic.subscribe("s", type) as sub:
        assert sub.info.isolation == "read_uncommitted"
        assert received(sub) == []
        assert mark(sub) == end(topic)
    assert client.check().ok


@pytest.mark.parametrize("cut", [6, 20, 38, 43, 60])
@pytest.mark.parametrize("cleanup", ["delete", "compact"])
def test_truncation_inside_a_transaction_that_is_being_given(
    client: txnkv.Client, cut: int, cleanup: Any
) -> None:
    """Offsets 0 to 39 are one large transaction, 40 its marker, 41 to 80 a small one."""
    topic = client.create_topic("large", cleanup=cleanup, segment_bytes=2048)
    sub = topic.subscribe("s", order="commit", max_bytes=1500)
    with client.transaction() as txn:
        txn.serialize()
        for i in range(40):
            txn.send(topic, bytes(300), key=str(i))
            if i % 4 == 3:
                txn.flush()
    given = [message.offset for message in sub.receive_many(6, timeout=0)]
    with client.transaction() as txn:
        for i in range(40):
            txn.send(topic, bytes(300), key=str(i))
    if cleanup == "compact":
        client.compact()
    topic.truncate(cut)
    while messages := sub.receive_many(6, timeout=0):
        given += [message.offset for message in messages]
    there = [message.offset for message in topic.consumer().poll(timeout=0)]
    assert there
    assert set(there) <= set(given)
    assert given == sorted(set(given))
    assert client.check().problems == []
    fresh = topic.subscribe("fresh", order="commit")
    assert [message.offset for message in fresh.receive_many(100, timeout=0)] == there
