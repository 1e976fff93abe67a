"""Cursors over large messages: their pieces go when they are acknowledged, and not before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.log_tools import ABORT, COMMIT, data, marker, piece
from tests.topics.reading_tools import put
from tests.topics.subscriptions.subscription_tools import cursor_rows, left_over, send, take
from txnkv.topics.acks import ack_rows
from txnkv.topics.delivery import redelivery
from txnkv.topics.topic_catalog import TopicOptions

KINDS: dict[str, dict[str, Any]] = {
    "exclusive": {},
    "counted": {"max_deliveries": 99},
    "shared": {"type": "shared"},
    "key_shared": {"type": "key_shared"},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=[1, 1 << 20])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers take one batch at a time, or all."""
    monkeypatch.setattr(redelivery, "FETCH_BYTES", request.param)


def write(client: txnkv.Client, name: str, text: str) -> tuple[txnkv.Topic, dict[int, int]]:
    """A topic with a log by words: m a message, x one that is aborted, A0 A1 ... the pieces of a
    large one; then the markers, and a message. With it the offsets of its messages, each with the
    first that is its own.
    """
    topic, words = client.create_topic(name), text.split()
    of, txns = Counter(word[0] for word in words), {"A": 1, "B": 2, "C": 3}
    first: dict[int, int] = {}
    batches = [
        data(9) if word == "x" else data() if word == "m"
        else piece(b"v", int(word[1]), of[word[0]], txn=txns[word[0]], id=txns[word[0]])
        for word in words
    ]  # fmt: skip
    batches += [marker(COMMIT, txns[name]) for name in txns if name in of]
    batches += [marker(ABORT, 9), data()] if "x" in of else [data()]
    put(client, topic, *batches)
    for offset, word in enumerate(words):
        if word == "m":
            first[offset] = offset
        elif word[0] in txns and int(word[1]) == of[word[0]] - 1:
            first[offset] = words.index(f"{word[0]}0")
    return topic, first | {topic.end_offsets()[0] - 1: topic.end_offsets()[0] - 1}


LOGS = (
    "A0 A1 A2",
    "m A0 A1 x m",
    "A0 m A1 x m A2 m",
    "x A0 x B0 x A1 m x B1 m",
    "A0 B0 m A1 C0 B1 x C1 m B2 A2 m",
)


def acknowledge(sub: txnkv.Subscription, client: txnkv.Client, way: str, message: Any) -> None:
    if way == "plain":
        sub.ack(message)
        return
    with client.transaction() as txn:
        if way == "stored":
            txn.serialize()
        txn.ack(sub, message)


@kinds
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("way", ["plain", "small", "stored"])
def test_a_cursor_passes_what_is_acknowledged(
    client: txnkv.Client, ahead: None, kind: str, way: str, backwards: bool
) -> None:
    """It stayed before the first piece of a large message for ever, where leases were."""
    for name, text in enumerate(LOGS):
        topic, left = write(client, str(name), text)
        with topic.subscribe("s", **KINDS[kind]) as sub:
            given = []
            while found := sub.receive_many(2, timeout=0):
                given += found
            assert [each.offset for each in given] == sorted(left)
            for message in given[::-1] if backwards else given:
                acknowledge(sub, client, way, message)
                del left[message.offset]
                assert sub.committed()[0] <= min(left.values(), default=1 << 62), text
    ends = [(client.topic(str(name)).end_offsets()[0],) for name in range(len(LOGS))]
    assert (cursor_rows(client), left_over(client)) == (ends, 0)


@kinds
@pytest.mark.parametrize("again", ["nacked", "opened", "another"])
def test_a_cursor_passes_what_was_given_again(
    client: txnkv.Client, ahead: None, kind: str, again: str
) -> None:
    """By each of those that read and acknowledge a part, some of them in the midst of pieces."""
    for name, text in enumerate(LOGS):
        topic, left = write(client, str(name), text)
        subs = [topic.subscribe("s", **KINDS[kind])]
        if again == "another" and kind.endswith("shared"):
            subs.append(topic.subscribe("s", **KINDS[kind]))
        for turn in range(99):
            sub = subs[turn % len(subs)]
            found = sub.receive_many(3, timeout=0)
            if not (found or left):
                break
            for message in found[turn % 3 :]:
                sub.ack(message)
                del left[message.offset]
                assert sub.committed()[0] <= min(left.values(), default=1 << 62), text
            sub.nack(found[: turn % 3])
            if again == "opened":
                sub.close()
                subs[0] = topic.subscribe("s", **KINDS[kind])
        assert left == {}
        for sub in subs:
            sub.close()
    ends = [(client.topic(str(name)).end_offsets()[0],) for name in range(len(LOGS))]
    assert (cursor_rows(client), left_over(client)) == (ends, 0)


@kinds
@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_retention_lets_large_messages_go(
    client: txnkv.Client, ahead: None, kind: str, buffer: Any
) -> None:
    options = TopicOptions(
        max_message_bytes=1000, retain_unacknowledged=True, retention_bytes=1, segment_bytes=1000
    )
    internals.topics(client).create("events", 1, buffer, options)
    topic = client.topic("events")
    sub = topic.subscribe("s", **KINDS[kind])
    for number in range(4):
        with client.transaction() as txn:
            if number % 2:
                txn.serialize()
            txn.send(topic, bytes(5000))
            txn.send(topic, b"small")
        while found := sub.receive_many(1, timeout=0):
            sub.ack(found)
    send(client, "last")
    sub.ack(take(sub))
    client.compact()
    assert (topic.truncate("latest"), left_over(client)) == (topic.end_offsets(), 0)


@kinds
def test_a_cursor_that_stands_before_pieces_goes_on(
    client: txnkv.Client, ahead: None, kind: str
) -> None:
    """They were acknowledged by a process that knew nothing of their pieces."""
    topic, left = write(client, "events", LOGS[-1])
    with topic.subscribe("s", **KINDS[kind]) as sub:
        while sub.receive_many(99, timeout=0):
            pass
    (partition,) = topic.info.partitions
    with internals.status(client).write() as cur:
        cur.execute("DELETE FROM leases")
        cur.execute("DELETE FROM acked_ranges")
        for offset in left:
            ack_rows.delete(cur, sub.info.id, partition, offset, offset + 1)
        cur.execute("UPDATE cursors SET dispatched = ?", (topic.end_offsets()[0],))
    with topic.subscribe("s", **KINDS[kind]) as sub:
        assert sub.receive(timeout=0) is None
    assert (cursor_rows(client), left_over(client)) == ([(topic.end_offsets()[0],)], 0)


@kinds
def test_pieces_that_come_to_nothing_keep_no_cursor(
    client: txnkv.Client, ahead: None, kind: str
) -> None:
    """They are read before their transaction is aborted."""
    topic = client.create_topic("events")
    put(client, topic, piece(b"a", 0, 2), data(2, values=[b"b"]))
    options = KINDS[kind] | {"isolation": "read_uncommitted"}
    with topic.subscribe("s", **options) as sub:
        sub.ack(take(sub))
        put(client, topic, marker(ABORT, 1), marker(COMMIT, 2), data())
        sub.ack(take(sub))
    assert (cursor_rows(client), left_over(client)) == ([(5,)], 0)
