"""The crash driver's scenario of key compaction.

hide      keys are written again and again, alone and in transactions with end markers, and the log
          is compacted. It says `sent KEY VALUE` when a message is durable; no value is a tombstone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import txnkv
from tools.topic_contents import partitions
from tools.topic_writing import Writer
from txnkv.topics import key_compaction
from txnkv.topics.log.log_check import problems
from txnkv.topics.topic_catalog import TopicOptions

TOPIC: Final = "hiding"
KEYS: Final = 4

Say = Callable[..., None]


def hide(say: Say, path: str) -> None:
    """Write and compact, three times."""
    client = txnkv.connect(path, create=False)
    options = TopicOptions(cleanup="compact", segment_bytes=1500, tombstone_seconds=0)
    writer = Writer(client, TOPIC, options=options)
    topic = client.topic(TOPIC)
    for round in range(3):
        for number in range(3 * KEYS):
            key, value = number % KEYS, f"{round}.{number}"
            if key == round and number >= 2 * KEYS:
                client.run(lambda txn, key=key: txn.send(topic, None, key=f"{key}"))  # type: ignore[misc]
                say("sent", key)
                continue
            client.run(lambda txn, key=key, value=value: txn.send(topic, value, key=f"{key}"))  # type: ignore[misc]
            say("sent", key, value)
        for ends in (writer.commit, writer.abort):
            row = writer.begin()
            writer.append(row, "without a key")
            ends(row)
        _compact(client)


def _compact(client: txnkv.Client) -> None:
    """Compact what is closed, then all."""
    partition = partitions(client, TOPIC)[0]
    client.instance.engine.flush()
    for force in (False, True):
        key_compaction.compact(client.instance.topics, partition, force=force)


def examine_hide(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """Each key has its last value, also when what is left over is compacted."""
    if client.instance.topics.find(TOPIC) is None:
        return []
    expected: dict[str, str] = {}
    for line in said:
        word, _, rest = line.partition(" ")
        if word == "sent":
            key, _, value = rest.partition(" ")
            expected[key] = value
    expected = {key: value for key, value in expected.items() if value}
    found = []
    for when in ("left", "compacted"):
        messages = _messages(client)
        there = {key: value for key, value in dict(messages).items() if value}
        # One more may be durable than was said.
        if len(set(there.items()) ^ set(expected.items())) > 2:
            found.append(f"{when}: the keys have {there}, not {expected}")
        if when == "compacted" and len(dict(messages)) < len(messages):
            found.append(f"{when}: {messages} has a key twice")
        _compact(client)
    partition = partitions(client, TOPIC)[0]
    with partition.environment.read() as txn:
        found += problems(partition.log, txn)
    return found


def _messages(client: txnkv.Client) -> list[tuple[str, str]]:
    """Key and value of each message that has a key."""
    with client.topic(TOPIC).consumer() as consumer:
        messages = consumer.poll(max_messages=10_000, timeout=0)
    return [
        (each.key.decode(), (each.value or b"").decode())
        for each in messages
        if each.key is not None
    ]
