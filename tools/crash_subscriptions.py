"""The crash driver's scenario of subscriptions: messages are passed on, acknowledged in every way.

Each message of the topic is sent on to another topic in the transaction that acknowledges it, or
acknowledged plainly, or refused until it is a dead letter. The child says `passed VALUE` and
`dropped VALUE` of what it was told is done. After a death whoever goes on passes on the rest, and
then every message is there once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import txnkv

TOPIC: Final = "work"
OUT: Final = "passed"
DEAD: Final = "refused"
BULK: Final = "bulk"
MESSAGES: Final = 9
KINDS: Final[dict[str, dict[str, Any]]] = {
    "exclusive": {},
    "shared": {"type": "shared", "lease_seconds": 3600},
    "counted": {"max_deliveries": 2, "dead_letter": DEAD},
}
DROPPED: Final = "2"
"""The message that is acknowledged plainly and not passed on."""

Say = Callable[..., None]


def pass_on(say: Say, path: str) -> None:
    """Small and stored transactions, plain acks, also beside much, rollbacks, negative acks, dead
    letters.
    """
    client = txnkv.connect(path, create=False)
    topic = client.create_topic(TOPIC)
    client.create_topic(OUT)
    client.create_topic(BULK)
    with client.transaction() as txn:
        for number in range(MESSAGES):
            txn.send(TOPIC, str(number))
    say("sent")
    for kind in KINDS:
        sub = topic.subscribe(kind, **KINDS[kind])
        _pass(client, kind, sub, _take(sub), say)
        _pass(client, kind, sub, _take(sub), say, stored=True)
        message = _take(sub)
        sub.ack(message)
        say("dropped", kind, _text(message))
        _pass_beside_much(client, kind, sub, _take(sub), say)
        for stored in (False, True):
            message = _take(sub)
            txn = _begin(client, stored=stored)
            txn.send(OUT, "never")
            txn.ack(sub, message)
            txn.rollback()
            _pass(client, kind, sub, _take(sub), say, stored=stored)
        for _ in range(2):
            sub.nack(_take(sub))
        message = _take(sub)
        if kind != "shared":
            txn = _begin(client, stored=True)
            txn.send(OUT, f"{kind} {_text(message)}")
            txn.ack_cumulative(sub, message)
            if kind == "exclusive":
                txn.commit()
                say("passed", kind, _text(message))
            else:
                txn.rollback()


def _begin(client: txnkv.Client, *, stored: bool) -> txnkv.Transaction:
    txn = client.new_transaction()
    if stored:
        txn.serialize()
    return txn


def _pass(
    client: txnkv.Client,
    kind: str,
    sub: txnkv.Subscription,
    message: txnkv.Message,
    say: Say,
    *,
    stored: bool = False,
) -> None:
    txn = _begin(client, stored=stored)
    txn.send(OUT, f"{kind} {_text(message)}")
    txn.ack(sub, message)
    txn.commit()
    say("passed", kind, _text(message))


def _pass_beside_much(
    client: txnkv.Client, kind: str, sub: txnkv.Subscription, message: txnkv.Message, say: Say
) -> None:
    """Outside of a transaction, with more than one small commit holds."""
    with client.new_session(flush_mode="manual") as session:
        session.send(OUT, f"{kind} {_text(message)}")
        session.send(BULK, bytes(2 << 20))
        session.ack(sub, message)
        session.flush()
    say("passed", kind, _text(message))


def _take(sub: txnkv.Subscription) -> txnkv.Message:
    message = sub.receive(timeout=10.0)
    assert message is not None
    return message


def _text(message: txnkv.Message) -> str:
    return (message.value or b"").decode()


def examine(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """List what is wrong, also after whoever goes on has passed on the rest."""
    if "sent" not in said:
        return []
    problems = _once(client, said)
    topic = client.topic(TOPIC)
    for kind in KINDS:
        if all(info.name != kind for info in _subscriptions(client)):
            continue  # it did not come so far
        with topic.subscribe(kind, **KINDS[kind]) as sub:
            while (message := sub.receive(timeout=0.0)) is not None:
                _pass(client, kind, sub, message, lambda *_: None)
            if sub.lag() != {0: 0}:
                problems.append(f"{kind}: all is passed on, and there is a lag of {sub.lag()}")
    found = _counts(client)
    for info in _subscriptions(client):
        for number in map(str, range(MESSAGES)):
            if (
                number != DROPPED
                and not found[f"{info.name} {number}"]
                and not (info.max_deliveries and found[number])
            ):
                problems.append(f"{info.name}: message {number} is lost")
    return problems + _once(client, said) + _left(client)


def _subscriptions(client: txnkv.Client) -> list[Any]:
    topics = client.instance.topics
    return topics.subscriptions.of_topic(topics.get(TOPIC))


def _counts(client: txnkv.Client) -> Counter[str]:
    """Count how often each text is there, passed on or refused."""
    found: Counter[str] = Counter()
    for name in (OUT, DEAD):
        if name in client.topics():
            with client.topic(name).consumer() as consumer:
                while messages := consumer.poll(timeout=0.0):
                    found.update(map(_text, messages))
    return found


def _once(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """List what is there twice, was never to be there, or was acknowledged and is not there."""
    found = _counts(client)
    problems = [f"{text!r} is there {count} times" for text, count in found.items() if count > 1]
    problems += ["a transaction that was rolled back has sent"] * found["never"]
    for line in said:
        word, _, text = line.partition(" ")
        if word == "passed" and not found[text]:
            problems.append(f"{text!r} was passed on, and is not there")
        if word == "dropped" and found[text]:
            problems.append(f"{text!r} was acknowledged, and was delivered again")
    return problems


def _left(client: txnkv.Client) -> list[str]:
    """Rows of business that is over."""
    problems = []
    with client.instance.store.status.read() as cur:
        for table in ("pending_acks", "leases", "acked_ranges"):
            count = cur.execute(f"SELECT count(*) FROM {table}").get
            if count:
                problems.append(f"{count} rows are left in {table}")
    return problems


SCENARIOS: Final[dict[str, Callable[[Say, str], None]]] = {"pass_on": pass_on}
EXAMINERS: Final[dict[str, Callable[[txnkv.Client, Sequence[str]], list[str]]]] = {
    "pass_on": examine
}
