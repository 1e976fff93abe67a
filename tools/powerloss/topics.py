"""Messages under power loss: what was acknowledged is there, of the rest all or nothing.

Every round sends to all partitions of a topic with a marker buffer and of one with a side log: in a
small commit, in a large one, in one that is rolled back, outside of any, and one round to one
partition alone.
Marks say what was acknowledged, by the values that were sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import txnkv
from tools import crash_topics
from tools.crash import settle
from tools.powerloss.recording import mark
from tools.topic_writers import abort, batch, begin, commit, send, small
from txnkv.errors import TxnkvError
from txnkv.topics.write import append

ROUNDS = 5


def run(store: Path) -> None:
    """The whole run."""
    with txnkv.connect(store) as client:
        crash_topics.prepare(client)
        mark("made")
        for number in range(ROUNDS):
            _round(client, number)
            client.instance.coordinator.maintenance.round(resume_all=True)
            if number % 2:
                client.instance.engine.flush()
            client.instance.store.status.checkpoint(cut=number % 3 == 0)


def _round(client: txnkv.Client, number: int) -> None:
    everywhere = crash_topics.partitions(client)
    small(client, everywhere, [b"small %d" % number])
    mark(f"sent small {number}")
    done, undone = begin(client), begin(client)
    for txn, word in ((done, b"large"), (undone, b"undone")):
        for partition in everywhere:
            send(client, txn, partition, [b"%s %d" % (word, number)])
    small(client, everywhere, [b"between %d" % number])
    mark(f"sent between {number}")
    commit(client, done)
    mark(f"sent large {number}")
    abort(client, undone)
    alone = begin(client)
    send(client, alone, everywhere[number % len(everywhere)], [b"alone %d" % number])
    commit(client, alone)
    mark(f"alone {number}")
    for turn in range(2):  # the second one finds nothing that waits, and does not wait either
        for partition in everywhere:
            plain = [batch([b"plain %d" % (2 * number + turn)])]
            append.append_alone(client.instance.topics, partition, plain)
        mark(f"sent plain {2 * number + turn}")


def examine(store: Path, marks: list[str]) -> list[str]:
    """All that is wrong with a store that a power loss left, a line each."""
    if "made" not in marks:
        return []
    try:
        with txnkv.connect(store, create=False) as client:
            return list(_problems(client, marks))
    except TxnkvError as error:
        return [f"{type(error).__name__}: {error}"]


def _problems(client: txnkv.Client, marks: list[str]) -> Iterator[str]:
    yield from client.check().problems
    settle(client)  # what is open holds back what comes behind it
    found = _read(client)
    everywhere = {value for value in found[0] if not value.startswith((b"alone", b"plain"))}
    for number, values in enumerate(found):
        here = {value for value in values if not value.startswith((b"alone", b"plain"))}
        if here != everywhere or len(set(values)) != len(values):
            yield f"partition {number} has {values}, the first one {found[0]}"
        if any(value.startswith(b"undone") for value in values):
            yield f"partition {number} has what was rolled back: {values}"
        for line in marks:
            word, _, value = line.partition(" ")
            if word == "sent" and value.encode() not in values:
                yield f"partition {number} lacks {value!r}, which was acknowledged"
    for line in marks:
        word, _, value = line.partition(" ")
        if word == "alone" and line.encode() not in found[int(value) % len(found)]:
            yield f"{line!r} was acknowledged and is gone"
    everything = crash_topics.partitions(client)
    small(client, everything, [b"after"])
    if any(values[-1:] != [b"after"] for values in _read(client)):
        yield "what is sent now is not the last"
    yield from client.check().problems


def _read(client: txnkv.Client) -> list[list[bytes]]:
    return [
        crash_topics.committed(client, partition) for partition in crash_topics.partitions(client)
    ]
