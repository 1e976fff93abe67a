"""Copies of a topic, made again and again under random use.

Whatever is done to the source between two runs of `replicate`, readers of the copy get what those
of the source get, up to the same last stable offset, and there is nothing left to copy.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

import txnkv
from tests import internals
from tools.topic_contents import partitions, raw
from tools.topic_writing import Writer
from txnkv.client.replica import replicate
from txnkv.errors import InvalidTxnStateError, OffsetOutOfRangeError
from txnkv.topics import key_compaction
from txnkv.topics.read import Bounds, bounds
from txnkv.topics.topic_catalog import TopicOptions

TOPIC = "events"
KEYS = (b"a", b"b", b"c")
STEPS = st.sampled_from([
    *["send"] * 3, *["begin"] * 2, "append", "end", *["truncate_before"] * 2, "truncate_after",
    *["compact"] * 2, "compact_segments", "compact_copy", *["copy"] * 2, "copy_in_pieces",
])  # fmt: skip
LEFT_OUT = [
    ("begin", 8), ("send", 0), ("send", 1), ("copy", 0), ("end", 0), ("truncate_before", 2),
    ("compact", 0), ("copy", 0),
]  # fmt: skip
"""What is open in the copy ends, begins below the start of the source, and is left out there."""


class Copied:
    """A topic and its copy. Each step takes a number, for whatever it has to choose."""

    def __init__(self, source: txnkv.Client, dest: txnkv.Client, kind: str, size: int) -> None:
        self.source, self.dest = source, dest
        self.compacts = kind == "compact"
        cleanup: Any = "compact" if self.compacts else "delete"
        options = TopicOptions(cleanup=cleanup, segment_bytes=size)
        buffer = "sidecar" if kind == "sidecar" else "marker"
        self.writer = Writer(source, TOPIC, buffer=buffer, options=options)
        self.topic = source.topic(TOPIC)
        self.open: list[Any] = []

    # -- steps -------------------------------------------------------------------------

    def send(self, number: int) -> None:
        with self.source.transaction() as txn:
            for _ in range(number // 3 + 1):
                txn.send(self.topic, b"small", key=KEYS[number % 3])

    def begin(self, number: int) -> None:
        self.open.append(self.writer.begin())
        self._append(-1, number)

    def append(self, number: int) -> None:
        if self.open:
            self._append(number % len(self.open), number)

    def _append(self, which: int, number: int) -> None:
        self.writer.append(self.open[which], *["large"] * (number // 2 + 1), key=KEYS[number % 3])

    def end(self, number: int) -> None:
        if self.open:
            row = self.open.pop(number // 2 % len(self.open))
            (self.writer.commit if number % 2 else self.writer.abort)(row)

    def truncate_before(self, number: int) -> None:
        """Where a batch begins or inside of one, that far from the end."""
        start, end, _ = self._bounds(self.source)
        with suppress(OffsetOutOfRangeError):
            self.topic.truncate(max(end - number, start))

    def truncate_after(self, number: int) -> None:
        start, end, _ = self._bounds(self.source)
        with suppress(OffsetOutOfRangeError, InvalidTxnStateError):
            self.topic.truncate(after=max(end - number, start))

    def compact(self, number: int) -> None:
        """Compact all that is decided; mostly, everything is."""
        for _ in range(len(self.open) if number % 4 else 0):
            self.end(number)
        self.source.compact()

    def compact_segments(self, _: int) -> None:
        key_compaction.compact_all(internals.topics(self.source))

    def compact_copy(self, _: int) -> None:
        key_compaction.compact_all(internals.topics(self.dest))

    def copy_in_pieces(self, number: int) -> None:
        self.copy(number, 1 + 100 * number)

    def copy(self, _: int, max_bytes: int = 1 << 20) -> None:
        replicate(self.source, self.dest, max_bytes=max_bytes)
        assert replicate(self.source, self.dest).copied_bytes == 0
        start = self._bounds(self.source)[0]
        assert self._bounds(self.dest)[1:] == self._bounds(self.source)[1:]
        assert self._read(self.dest, start) == self._read(self.source, start)
        if not self.compacts:
            assert raw(self.dest, TOPIC, 0, start) == raw(self.source, TOPIC)

    # -- what is there -----------------------------------------------------------------

    def _bounds(self, client: txnkv.Client) -> Bounds:
        return bounds(internals.topics(client), partitions(client, TOPIC)[0])

    def _read(self, client: txnkv.Client, start: int) -> Any:
        """The messages; the last one of each key, since compaction is each store's own."""
        with client.topic(TOPIC).consumer(start={0: start}) as consumer:
            found = [(m.key, m.offset) for m in consumer.poll(max_messages=10_000, timeout=0)]
        return dict(found) if self.compacts else found


@given(
    kind=st.sampled_from(["compact", "compact", "marker", "sidecar"]),
    size=st.sampled_from([1000, 64 << 20]),
    steps=st.lists(st.tuples(STEPS, st.integers(0, 11)), min_size=10, max_size=40),
)
@example(kind="compact", size=64 << 20, steps=LEFT_OUT)
def test_a_copy_follows(kind: str, size: int, steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stores = [txnkv.connect(Path(folder) / name) for name in ("source", "copy")]
        with stores[0] as source, stores[1] as dest:
            copied = Copied(source, dest, kind, size)
            for step, number in steps:
                getattr(copied, step)(number)
            copied.copy(0)
            assert source.check().problems == dest.check().problems == []
