"""The crash driver's scenarios of producers, retention, truncation and followers.

produce   a producer sends, flush by flush; another of its name takes over; the idle ones are
          forgotten. It says `sent N` when the first N messages are durable.
retain    old segments go, by size and by age. It says `at least N` for offsets below N that
          must be gone.
cut       a log is written and truncated. It says `wrote TEXT`, `cutting N`, `cut N`.
follow    a store beside this one copies a topic, which is cut meanwhile.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import txnkv
from tools.topic_contents import partitions, raw, stored, values
from tools.topic_writing import Writer
from txnkv.client.producer import Producer
from txnkv.client.replica import replicate
from txnkv.storage import clock
from txnkv.topics import retention
from txnkv.topics.log.log_check import problems
from txnkv.topics.messages.message_input import now_micros
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import producers, roll_forward

TOPIC: Final = "kept"
MESSAGES: Final = 24
FLUSH: Final = 5

Say = Callable[..., None]


# -- producers ---------------------------------------------------------------------------


def produce(say: Say, path: str) -> None:
    """Send as two producers of one name, one after the other; forget idle ones."""
    client = txnkv.connect(path, create=False)
    writer = Writer(client, TOPIC)
    for upto in (MESSAGES // 2, MESSAGES):
        producer = Producer(client, writer.topic, "teller", linger=60.0, patience=0.0)
        _send(producer, upto, say)
    with client.instance.store.status.write() as cur:
        producers.sweep(cur, clock.now_micros() + 2 * 86_400 * 1_000_000)


def _send(producer: Producer, upto: int, say: Say) -> None:
    for number in range(producer.sent, upto):
        producer.send(f"{number}")
        if number % FLUSH == 0:
            producer.flush()
            say("sent", number + 1)
    producer.flush()
    say("sent", upto)


def examine_produce(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """None of the messages is missing, none is there twice; whoever goes on knows how many."""
    if client.instance.topics.find(TOPIC) is None:
        return []
    told = max((int(line.split()[1]) for line in said if line.startswith("sent")), default=0)
    there = values(client, TOPIC)
    found = []
    if there != [b"%d" % number for number in range(len(there))]:
        found.append(f"the producer's messages are {there}")
    if len(there) < told:
        found.append(f"{told} messages were acknowledged, {len(there)} are there")
    with Producer(client, client.instance.topics.get(TOPIC), "teller") as producer:
        if producer.sent != len(there):
            found.append(f"{len(there)} messages are there, the producer knows {producer.sent}")
        _send(producer, MESSAGES + FLUSH, lambda *_: None)
    if values(client, TOPIC) != [b"%d" % number for number in range(MESSAGES + FLUSH)]:
        found.append(f"after going on the messages are {values(client, TOPIC)}")
    return found


# -- retention ---------------------------------------------------------------------------


def retain(say: Say, path: str) -> None:
    """Give up by size, then by age; then what is named, in the middle of a segment and all."""
    client = txnkv.connect(path, create=False)
    options = TopicOptions(retention_bytes=1500, retention_seconds=3600, segment_bytes=600)
    writer = Writer(client, TOPIC, options=options)
    partition = writer.partitions[0]
    now = now_micros()
    for ago, first in ((0, 0), (7200, MESSAGES)):
        for number in range(first, first + MESSAGES):
            writer.small(f"{number}".ljust(40, "."), timestamp=now - ago * 1_000_000)
        roll_forward.complete(writer.engine, partition)
        retention.enforce(writer.engine, partition)
        with partition.environment.read() as txn:
            say("at least", partition.log.start(txn))
    for number in range(2 * MESSAGES, 3 * MESSAGES):
        writer.small(f"{number}".ljust(40, "."))
    topic = client.topic(TOPIC)
    (end,) = topic.end_offsets().values()
    for before in (end - 3, end):
        topic.truncate(before)
        say("at least", before)


def examine_retain(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """Check that what is left is the end of what was written, at its offsets."""
    if client.instance.topics.find(TOPIC) is None:
        return []
    gone = max((int(line.split()[2]) for line in said if line.startswith("at least")), default=0)
    partition = partitions(client, TOPIC)[0]
    roll_forward.complete(client.instance.topics, partition)
    retention.enforce(client.instance.topics, partition)
    numbers = [int((value or b"").rstrip(b".")) for value in values(client, TOPIC)]
    with partition.environment.read() as txn:
        start, end = partition.log.start(txn), partition.log.end(txn)
        found = list(problems(partition.log, txn))
    if numbers != list(range(end - len(numbers), end)) or len(numbers) < end - start:
        found.append(f"of [{start}, {end}) there are {numbers}")
    if start < gone:
        found.append(f"messages below {gone} were given up, the log begins at {start}")
    return found


# -- truncation --------------------------------------------------------------------------


def cut(say: Say, path: str) -> None:
    """Write and truncate, several times, the end of transactions among it."""
    client = txnkv.connect(path, create=False)
    writer = Writer(client, TOPIC, options=TopicOptions(segment_bytes=800))
    for round, keep in enumerate((4, 2, 5)):
        for number in range(6):
            text = f"{round}.{number}"
            writer.small(text)
            say("wrote", text)
        txn = writer.begin()
        writer.append(txn, "aborted")
        writer.abort(txn)
        say("cutting", keep)
        there = [each.offset for each in stored(client, TOPIC) if each.values != [b"aborted"]]
        writer.truncate(there[keep])
        say("cut", keep)


def examine_cut(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """The messages are those before the truncation that was under way, or those after it."""
    if client.instance.topics.find(TOPIC) is None:
        return []
    texts: list[str] = []
    allowed: list[list[str]] = []
    for line in said:
        word, rest = line.split(" ", 1)
        if word == "wrote":
            texts = [*texts, rest]
            allowed = [texts]
        elif word == "cutting":
            allowed = [texts, texts[: int(rest)]]
        else:
            texts = texts[: int(rest)]
            allowed = [texts]
    there = [(value or b"").decode() for value in values(client, TOPIC)]
    kept = [text for text in there if text != "aborted"]
    partition = partitions(client, TOPIC)[0]
    with partition.environment.read() as txn:
        found = list(problems(partition.log, txn))
        lso, end = partition.log.last_stable_offset(txn), partition.log.end(txn)
    if lso != end:
        found.append(f"nothing is open, but the last stable offset is {lso}, the end {end}")
    if not any(kept[: len(each)] == each and len(kept) <= len(each) + 1 for each in allowed):
        found.append(f"there is {kept}, not one of {allowed}")
    return found


# -- followers ---------------------------------------------------------------------------


def _beside(path: str) -> Path:
    return Path(f"{path}-follower")


def follow(say: Say, path: str) -> None:
    """Copy, cut the source, copy again."""
    client = txnkv.connect(path, create=False)
    writer = Writer(client, TOPIC, partitions=2, options=TopicOptions(segment_bytes=800))
    for offset in (7, 3):
        for number in range(6):
            txn = writer.begin()
            writer.append(txn, f"{offset}.{number}", number=number % 2)
            writer.small(f"{offset}.{number}", number=number % 2)
            (writer.commit if number % 3 else writer.abort)(txn)
        replicate(client, _beside(path), max_bytes=300)
        say("copied")
        for number in range(2):
            writer.truncate(offset - offset % 3, number=number)
    replicate(client, _beside(path), max_bytes=300)


def examine_follow(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """Another run makes the follower what the source is."""
    if client.instance.topics.find(TOPIC) is None:
        return []
    path = _beside(client.path)
    found = []
    replicate(client, path, max_bytes=300)
    with txnkv.connect(path, create=False) as follower:
        for number in range(2):
            if raw(follower, TOPIC, number) != raw(client, TOPIC, number):
                found.append(f"the copy of partition {number} is not what the source has")
        found += follower.check().problems
    shutil.rmtree(path)
    return found


SCENARIOS: Final[dict[str, Callable[[Say, str], None]]] = {
    "produce": produce,
    "retain": retain,
    "cut": cut,
    "follow": follow,
}

EXAMINERS: Final[dict[str, Callable[[txnkv.Client, Sequence[str]], list[str]]]] = {
    "produce": examine_produce,
    "retain": examine_retain,
    "cut": examine_cut,
    "follow": examine_follow,
}
