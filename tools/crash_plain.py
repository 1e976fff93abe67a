"""Messages outside of transactions under the crash driver, and what a power loss does to them.

plain     batches appended to each partition, acknowledged one by one
regain    the same; then the store is as if the power had gone before their offsets were durable,
          and is opened again: killed there, the next one who opens it has to do it
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import txnkv
from tools import crash_topics
from tools.topic_writers import batch, small
from txnkv.topics.write import append

Say = Callable[..., None]
_BATCHES: Final = 2


def plain(say: Say, path: str) -> None:
    """Append to each partition, one after the other."""
    client = txnkv.connect(path, create=False)
    _append(client, say)


def regain(say: Say, path: str) -> None:
    """Append, lose the offsets, open the store."""
    client = txnkv.connect(path, create=False)
    status = client.instance.store.status
    with status.read() as cur:
        given = list(cur.execute("SELECT next_offset, id FROM partitions"))
        clock = cur.execute("SELECT last_timestamp, last_commit FROM clock").fetchone()
    _append(client, say)
    with status.write() as cur:
        cur.executemany("UPDATE partitions SET next_offset = ? WHERE id = ?", given)
        cur.execute("UPDATE clock_row SET last_timestamp = ?, last_commit = ?", clock)
    client.close()
    shutil.rmtree(Path(path) / "runtime")
    txnkv.connect(path, create=False).close()


def _append(client: txnkv.Client, say: Say) -> None:
    for number, partition in enumerate(crash_topics.partitions(client)):
        for turn in range(_BATCHES):
            value = b"plain %d %d" % (number, turn)
            append.append_alone(client.instance.topics, partition, [batch([value, value])])
            say(value.decode())


def examine(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    """List what is wrong after a death in one of the two scenarios."""
    problems = []
    everywhere = crash_topics.partitions(client)
    for number, partition in enumerate(everywhere):
        values = crash_topics.committed(client, partition)
        sent = [b"plain %d %d" % (number, turn) for turn in range(_BATCHES)]
        told = sum(value.decode() in said for value in sent)
        possible = [
            [b"before", *(value for value in sent[:count] for _ in range(2))]
            for count in range(told, min(told + 1, _BATCHES) + 1)
        ]
        if values not in possible:
            problems.append(f"{partition.label}, of which {told} were told, has {values}")
    small(client, everywhere, [b"after"])
    for partition in everywhere:
        if crash_topics.committed(client, partition)[-1:] != [b"after"]:
            problems.append(f"{partition.label}: what is sent now is not the last")
    return problems


SCENARIOS: Final = {"plain": plain, "regain": regain}
EXAMINERS: Final = {"plain": examine, "regain": examine}
