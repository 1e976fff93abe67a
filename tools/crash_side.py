"""The crash driver's scenario of side logs, and what has to be true of them after a death.

The scenario sends in transactions that are large from their first message, some beyond what the
shared side log takes, interleaved, committed and rolled back; sweeps (garbage, compaction); gives
up the beginning of the log and sweeps again. Limits are small, so that little data passes every
fault point. It says, line by line:

    committed T AT N      transaction T is committed, its N messages have offsets AT, AT+1, ...
    rolled back T         it is gone
    start OFFSET          messages below are given up
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import lmdb

import txnkv
from tools.topic_contents import stored
from txnkv.topics import outbox
from txnkv.topics.sidecar import side_store, side_sweep
from txnkv.topics.sidecar.side_store import SideState
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.topics import Partition

TOPIC: Final = "side"
MESSAGES: Final = 12
ROUNDS: Final = 6


def change(path: str, say: Callable[..., None]) -> None:
    """Send, commit and roll back; sweep; give up the beginning; sweep."""
    outbox.MAX_BYTES = -1  # type: ignore[misc]
    side_store.OWN_BYTES = 1600
    side_sweep.COMPACT_BYTES = 700
    side_sweep.GARBAGE_BYTES = 500
    client = txnkv.connect(path, create=False)
    options = TopicOptions(segment_bytes=3000)
    client.instance.topics.create(TOPIC, 1, "sidecar", options)
    names = iter(range(100))
    for round in range(ROUNDS):
        left, right = client.new_transaction(), client.new_transaction()
        left_name, right_name = next(names), next(names)
        for part in range(3):
            _send(left, left_name, part, size=30)
            _send(right, right_name, part, size=150 if round % 2 else 60)
        if round % 3 == 1:
            left.rollback()
            say("rolled", "back", left_name)
        for txn, name in ((right, right_name), (left, left_name)):
            if txn.state == txnkv.TxnState.OPEN:
                txn.commit()
                offsets = [batch.offset for batch in _batches(client) if _of(batch.values) == name]
                say("committed", name, offsets[0], 3 * MESSAGES)
        if round % 2:
            _sweep(client)
    rolled = client.new_transaction()
    for part in range(5):
        _send(rolled, next(names), part, size=150)
    rolled.rollback()
    partition = _partition(client)
    for _ in range(3):
        say("start", partition.environment.write(lambda txn: _advance(txn, partition)))
        _sweep(client)


def _send(txn: txnkv.Transaction, name: int, part: int, size: int) -> None:
    for number in range(part * MESSAGES, (part + 1) * MESSAGES):
        txn.send(TOPIC, b"%d:%d:" % (name, number) + b"." * size)
    txn.flush()


def _advance(txn: lmdb.Transaction, partition: Partition) -> int:
    log = partition.log
    log.roll(txn)
    segments = log.segments(txn)
    start = segments[len(segments) // 2].base
    log.advance_start(txn, start)
    return start


def _partition(client: txnkv.Client) -> Partition:
    engine = client.instance.topics
    return engine.partitions(engine.get(TOPIC))[0]


def _sweep(client: txnkv.Client) -> None:
    partition = _partition(client)
    assert partition.side is not None
    partition.side.sweep(partition.log)


def _batches(client: txnkv.Client) -> list[Any]:
    return list(stored(client, TOPIC))


def _of(values: Sequence[bytes]) -> int:
    return int(values[0].split(b":")[0])


# -- afterwards ------------------------------------------------------------------------


def examine(path: Path, said: Sequence[str]) -> list[str]:
    """Everything that is wrong in the topic; nothing if all is well."""
    with txnkv.connect(path, create=False) as client:
        return _examine(client, said)


def _examine(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    if TOPIC not in client.topics():
        return [] if not said else ["the topic is gone"]
    problems = _told(client, said)
    before = _contents(client)
    _sweep(client)
    if _contents(client) != before:
        problems.append("a sweep changed what readers see")
    partition = _partition(client)
    assert partition.side is not None
    with partition.environment.read() as txn:
        sides = partition.side.rows(txn)
    if any(side.state is not SideState.COMMITTED for _, side in sides):
        problems.append(f"side logs of transactions that are over are left: {sides}")
    folder = partition.environment.path / "side"
    folders = list(folder.iterdir()) if folder.exists() else []
    own = sum(side.has_own for _, side in sides)
    if len(folders) != own:
        problems.append(f"{folders} are there, {own} transactions have one")
    return problems


def _contents(client: txnkv.Client) -> dict[int, bytes]:
    return {
        batch.offset + at: value
        for batch in _batches(client)
        for at, value in enumerate(batch.values)
    }


def _told(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """List what is not as the child was told, or not whole."""
    problems = []
    partition = _partition(client)
    with partition.environment.read() as txn:
        start = partition.log.start(txn)
    contents = {at: value for at, value in _contents(client).items() if at >= start}
    whole: dict[int, list[tuple[int, int]]] = {}
    for at, value in contents.items():
        of, number, _ = value.split(b":")
        whole.setdefault(int(of), []).append((at, int(number)))
    for name, found in whole.items():
        first = found[0][0] - found[0][1]
        expected = [(at, at - first) for at in range(max(first, start), first + 3 * MESSAGES)]
        if found != expected:
            problems.append(f"transaction {name} has messages {found}, from {start} on")
    for line in said:
        words = line.split()
        if words[0] == "rolled" and int(words[2]) in whole:
            problems.append(f"transaction {words[2]} was rolled back and is there")
        if words[0] == "committed":
            name, at, count = map(int, words[1:])
            expected = [(o, o - at) for o in range(max(at, start), at + count)]
            if whole.get(name, []) != expected:
                problems.append(f"transaction {name} was committed at {at}: {whole.get(name)}")
        if words[0] == "start" and start < int(words[1]):
            problems.append(f"the log starts at {start}, it was given up to {words[1]}")
    return problems
