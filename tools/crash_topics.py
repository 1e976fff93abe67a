"""Topics under the crash driver: messages of a large transaction, and of small ones in between.

Each scenario sends to both partitions of a topic with a marker buffer and of one with a side
log; the large transaction writes rows as well. After a death every partition has all of the large
transaction if its rows are there and nothing of it if not, the same small commits, every one that
was acknowledged, and all in the order they were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import txnkv
from tools.topic_writers import abort, begin, commit, create, send, small
from txnkv import core
from txnkv.topics.topics import Partition
from txnkv.topics.write import roll_forward

TOPICS: Final = {"crash-marker": "marker", "crash-side": "sidecar"}
PARTITIONS: Final = 2
ACKNOWLEDGED: Final = "acknowledged"
"""A child's word that the large transaction is acknowledged, as in the scenarios of tables."""

BATCHES: Final = 3
"""That the large transaction sends to each partition."""

Say = Callable[..., None]


def prepare(client: txnkv.Client) -> None:
    """Make the topics, with a message in each partition."""
    for name, buffer in TOPICS.items():
        create(client, name, PARTITIONS, buffer)
    small(client, partitions(client), [b"before"])


def partitions(client: txnkv.Client) -> list[Partition]:
    """Those of all the topics."""
    engine = client.instance.topics
    return [each for name in TOPICS for each in engine.partitions(engine.get(name))]


def load(path: str, say: Say, write: Callable[[txnkv.Transaction], None], end: str) -> None:
    """A large transaction that ends so, small commits in between, another one that stays open.

    Args:
        path: of the store.
        say: takes what is acknowledged.
        write: has the transaction write rows.
        end: "commit" or "rollback".
    """
    client = txnkv.connect(path, create=False)
    everywhere = partitions(client)
    large = client.new_transaction()
    large.serialize()  # others may know it from now on: its row is stored
    txn, other = client.instance.coordinator.get(large.id.local), begin(client)
    for number in range(BATCHES):
        for partition in everywhere:
            send(client, txn, partition, [b"large %d %d" % (number, i) for i in range(2)])
        small(client, everywhere, [b"small %d" % number])
        say("small", number)
        send(client, other, everywhere[number], [b"never"])
    write(large)
    getattr(large, end)()
    say(ACKNOWLEDGED)
    small(client, everywhere, [b"small %d" % BATCHES])
    say("small", BATCHES)


def trickle(path: str, say: Say) -> None:
    """Small commits, and flushes between them."""
    client = txnkv.connect(path, create=False)
    for number in range(6):
        small(client, partitions(client), [b"small %d" % number])
        say("small", number)
        if number % 2:
            client.instance.engine.flush()


def alone(path: str, say: Say) -> None:
    """Large transactions that send to one partition each."""
    client = txnkv.connect(path, create=False)
    for number, partition in enumerate(partitions(client)):
        txn = begin(client)
        for i in range(2):
            send(client, txn, partition, [b"alone %d %d" % (number, i)])
        commit(client, txn)
        say("alone", number)


def widen(path: str, say: Say) -> None:
    """Partitions are added; a message to each, and a subscription of all of them."""
    with txnkv.connect(path, create=False) as client:
        for name in TOPICS:
            topic = client.topic(name)
            for count in range(PARTITIONS + 1, PARTITIONS + 3):
                topic.subscribe(f"of {count}").close()
                topic.alter(partitions=count)
                say("partitions", name, count)
                small(client, client.instance.topics.partitions(topic.info), [b"to %d" % count])
                say("sent", name, count)


def examine_widen(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """List what is wrong after a death in `widen`."""
    problems = []
    for name in TOPICS:
        topic = client.topic(name)
        told = [int(line.split()[-1]) for line in said if line.startswith(f"partitions {name}")]
        if not max(told, default=PARTITIONS) <= topic.partitions <= PARTITIONS + 2:
            problems.append(f"{name} has {topic.partitions} partitions, told was {told}")
        sent = [int(line.split()[-1]) for line in said if line.startswith(f"sent {name}")]
        wanted = {(number, b"to %d" % count) for count in sent for number in range(count)}
        for each in topic.subscriptions():
            with topic.subscribe(each) as subscription:
                found = {
                    (message.partition, message.value)
                    for message in subscription.receive_many(99, timeout=0)
                }
                covered = subscription.committed().keys()
            if not wanted <= found or covered != set(range(topic.partitions)):
                problems.append(f"{each!r} of {name} has {found} in {covered}, sent was {sent}")
        topic.alter(partitions=PARTITIONS + 3)
        everywhere = client.instance.topics.partitions(topic.info)
        small(client, everywhere, [b"after"])
        lost = [each.label for each in everywhere if committed(client, each)[-1:] != [b"after"]]
        problems += [f"{lost} took no message" for _ in lost[:1]]
    return problems


SCHEMAS: Final[list[dict[str, str | txnkv.Column]]] = [
    {"n": "int32"},
    {"n": "int64", "a": txnkv.Column("int8", default=1)},
    {"n": "int64", "a": txnkv.Column("int16", default=1), "b": "string?"},
]
"""Schemas that the values of a topic have, one after the other."""
WIDTHS: Final = [len(schema) for schema in SCHEMAS]


def evolve(path: str, say: Say) -> None:
    """Topics get other value schemas; a message of each, and dead letters beside."""
    with txnkv.connect(path, create=False) as client:
        for buffer in TOPICS.values():
            topic = client.create_topic(f"typed-{buffer}", value_schema=SCHEMAS[0])
            topic.subscribe("s", "shared", max_deliveries=1).close()
            for width, schema in zip(WIDTHS, SCHEMAS, strict=True):
                topic.alter(value_schema=schema)
                say("altered", topic.name, width)
                with client.transaction() as txn:
                    txn.send(topic, {"n": width})
                say("sent", topic.name, width)


def examine_evolve(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """List what is wrong after a death in `evolve`."""
    problems = []
    for name in (f"typed-{buffer}" for buffer in TOPICS.values()):
        if name not in client.topics():
            continue
        told, sent = (
            [int(line.split()[-1]) for line in said if line.startswith(f"{what} {name} ")]
            for what in ("altered", "sent")
        )
        topic = client.topic(name)
        stages = topic.info.options.values
        if not max(told, default=1) <= len(stages[-1].schema) <= WIDTHS[-1]:
            problems.append(f"{name} has {stages}, told was {told}")
        for each in topic.subscriptions():
            letters = client.topic(f"{name}.{each}.dead")
            if letters.info.options.values != stages:
                problems.append(f"dead letters of {name} have {letters.info.options.values}")
        topic.alter(value_schema=SCHEMAS[-1])
        with client.transaction() as txn:
            txn.send(topic, {"n": 9, "b": "after"})
        with topic.consumer() as consumer:
            *found, last = [message.value for message in consumer.poll(timeout=0)]
        rows = [{"n": width, "a": 1, "b": None} for width in WIDTHS]
        right = found in (rows[: len(sent)], rows[: len(sent) + 1])
        if not right or last != {"n": 9, "a": 1, "b": "after"}:
            problems.append(f"{name} has {found} and {last}, sent was {sent}")
    return problems


def examine_alone(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """List what is wrong after a death in `alone`."""
    problems = []
    for number, partition in enumerate(partitions(client)):
        wanted = [b"before", *(b"alone %d %d" % (number, i) for i in range(2))]
        values = committed(client, partition)
        told = f"alone {number}" in said
        if values != wanted and (told or values != wanted[:1]):
            problems.append(f"{partition.label}, of which {told} was told, has {values}")
    return problems or _works(client)


def examine(client: txnkv.Client, said: Sequence[str], rows: bool) -> list[str]:
    """List what is wrong in the topics; nobody's transaction is open any more.

    Args:
        client: of the store.
        said: what the child said.
        rows: the rows of the large transaction are there.
    """
    found = {partition.label: committed(client, partition) for partition in partitions(client)}
    contents = list(found.values())
    problems = [
        f"{label} has {values}, another partition {contents[0]}"
        for label, values in found.items()
        if sorted(values) != sorted(contents[0])
    ]
    for label, values in found.items():
        problems += [f"{label}: {problem}" for problem in _wrong(values, said, rows)]
    if not problems:
        problems += _works(client)
    return problems


def _wrong(values: Sequence[bytes], said: Sequence[str], rows: bool) -> list[str]:
    large = [b"large %d %d" % (number, i) for number in range(BATCHES) for i in range(2)]
    problems = []
    if [value for value in values if value.startswith(b"large")] != (large if rows else []):
        problems.append(f"with rows {'there' if rows else 'gone'}, the messages are {values}")
    smalls = [value for value in values if value.startswith(b"small")]
    if smalls != [b"small %d" % number for number in range(len(smalls))]:
        problems.append(f"small commits are out of order, or missing: {values}")
    told = sum(line.startswith("small") for line in said)
    if len(smalls) < told:
        problems.append(f"of {told} small commits that were acknowledged there are {len(smalls)}")
    if b"never" in values or values[:1] != [b"before"]:
        problems.append(f"there is what was not committed: {values}")
    return problems


def committed(client: txnkv.Client, partition: Partition) -> list[bytes]:
    """The values that a reader of committed messages gets."""
    roll_forward.complete(client.instance.topics, partition)
    log = partition.log
    with partition.environment.read() as txn:
        start, stable = log.start(txn), log.last_stable_offset(txn)
        data = b"".join(bytes(part) for part in log.read(txn, start, 1 << 62))
        entries = log.aborted(txn, start, stable)
    aborted = [(entry.txn_id, entry.first_offset) for entry in entries]
    spans = core.CommittedFilter().keep(data, aborted, start, stable)
    values: list[bytes] = core.decode(data, spans, start, None).column("value").to_pylist()
    return values


def _works(client: txnkv.Client) -> list[str]:
    """Transactions after the crash."""
    everywhere = partitions(client)
    before = [len(committed(client, partition)) for partition in everywhere]
    undone, done = begin(client), begin(client)
    for partition in everywhere:
        send(client, undone, partition, [b"after, undone"])
        send(client, done, partition, [b"after"])
    small(client, everywhere, [b"after"])
    abort(client, undone)
    commit(client, done)
    more = [
        len(committed(client, partition)) - count
        for partition, count in zip(everywhere, before, strict=True)
    ]
    return [] if more == [2] * len(more) else [f"of 2 new messages there are {more}"]
