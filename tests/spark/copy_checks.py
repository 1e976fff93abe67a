"""Claims that must hold of copies, and the names of those for which they do not."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

import txnkv

from .copying import KEYS

_SHOWN: Final = 20


class Seen(NamedTuple):
    """A message."""

    partition: int
    offset: int
    n: int


def seen(table: pa.Table | pa.RecordBatch) -> list[Seen]:
    """Messages of a `poll_batch`."""
    columns = (table.column(name).to_pylist() for name in ("partition", "offset", "value"))
    return [Seen(p, o, int(v)) for p, o, v in zip(*columns, strict=True)]


def standing(topic: txnkv.Topic) -> list[Seen]:
    """All that is committed, partition by partition, once what a killed writer left has ended."""
    until = time.monotonic() + 120.0
    while topic.last_stable_offsets() != topic.end_offsets() and time.monotonic() < until:
        time.sleep(0.1)
    found: list[Seen] = []
    with topic.consumer() as consumer:
        while (batch := consumer.poll_batch(timeout=0)).num_rows:
            found += seen(batch)
    return sorted(found)


def await_the_killed(client: txnkv.Client) -> None:
    """Until what they left open has been aborted, for want of heartbeats."""
    until = time.monotonic() + 120.0
    while time.monotonic() < until and any(
        info.state is txnkv.TxnState.OPEN for info in client.transactions()
    ):
        time.sleep(0.1)


def noted(path: Path) -> list[Seen]:
    """Return the messages that a reader has written down."""
    with pa.memory_map(str(path)) as file:
        return seen(pa.ipc.open_file(file).read_all())


def each_once(what: str, expected: int, found: Iterable[int]) -> list[str]:
    """Problems of numbers that should be 0 to `expected` - 1, each once."""
    counts = Counter(found)
    lost = [n for n in range(expected) if n not in counts]
    doubled = [f"{n} ({times}x)" for n, times in sorted(counts.items()) if times > 1]
    strange = sorted(n for n in counts if not 0 <= n < expected)
    told = [("lost", lost), ("more than once", doubled), ("never sent", strange)]
    return [f"{what}: {_some(numbers)} {how}" for how, numbers in told if numbers]


def in_order(what: str, messages: Sequence[Seen], by_key: bool) -> list[str]:
    """Problems of the order by key, or by partition; messages in the order of their logs."""
    rows: dict[tuple[str, int], list[Seen]] = defaultdict(list)
    for message in messages:
        rows["key k" if by_key else "partition ", _row(message, by_key)].append(message)
    problems = []
    for (kind, number), row in sorted(rows.items()):
        if by_key and len({message.partition for message in row}) > 1:
            problems.append(f"{what}: {kind}{number} is in several partitions")
        wrong = [f"{b.n} after {a.n}" for a, b in pairwise(row) if b.n < a.n]
        if wrong:
            problems.append(f"{what}, {kind}{number}: {_some(wrong)}")
    return problems


def _row(message: Seen, by_key: bool) -> int:
    return message.n % KEYS if by_key else message.partition


def partitions_kept(what: str, source: Sequence[Seen], copy: Sequence[Seen]) -> list[str]:
    """Problems of copies that should be in the partitions of their originals."""
    at = {message.n: message.partition for message in source}
    wrong = [f"{m.n} in {m.partition}" for m in copy if at.get(m.n, m.partition) != m.partition]
    return [f"{what}: {_some(wrong)}, not in the partition of its original"] if wrong else []


def reader_saw(what: str, saw: Sequence[Seen], stands: Sequence[Seen]) -> list[str]:
    """Problems of a reader that saw something else than what stands, or not in its order."""
    problems = []
    ghosts = sorted(set(saw) - set(stands))
    missed = sorted(set(stands) - set(saw))
    again = [message for message, times in Counter(saw).items() if times > 1]
    for how, some in (("saw what does not stand", ghosts), ("missed", missed), ("twice", again)):
        if some:
            problems.append(f"reader of {what} {how}: {_some(some)}")
    if sorted(saw, key=lambda message: message.partition) != sorted(stands) and not problems:
        problems.append(f"reader of {what}: out of order")
    return problems


def same_rows(what: str, expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """Problems of a table of counts."""
    wrong = [
        f"{key}: {found.get(key)} instead of {expected.get(key)}"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]
    return [f"{what}: {_some(wrong)}"] if wrong else []


def counts(total: int) -> dict[str, int]:
    """Return the number of messages of each key among the first `total` ones."""
    return dict(Counter(f"k{n % KEYS}" for n in range(total)))


def _some(numbers: Sequence[object]) -> str:
    shown = ", ".join(str(number) for number in numbers[:_SHOWN])
    return shown if len(numbers) <= _SHOWN else f"{shown} and {len(numbers) - _SHOWN} more"
