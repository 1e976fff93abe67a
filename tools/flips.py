"""Flipped bytes: every reader of a topic on a store of which one byte is not as it was written.

A *record* is one LMDB value. One byte of one is changed, all readers run, and it is put back. What
a reader gives is the right answer, or a beginning of it and then CorruptionError: nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

import txnkv
from txnkv.core import CommittedFilter, CoreError, all_data, decode, intact, walk
from txnkv.storage import Environment
from txnkv.topics.read import pinned_range
from txnkv.topics.read.log_view import bounds
from txnkv.topics.topics import Partition

Row: TypeAlias = tuple[Any, ...]
Reader: TypeAlias = Callable[[txnkv.Client, str], Iterator[Row]]

MASKS: Final = (0x01, 0x80)
_FETCH: Final = 700


class Record(NamedTuple):
    """An LMDB value.

    Attributes:
        environment: where it lies.
        db, key: under which name and key.
        value: as it was written.
    """

    environment: Environment
    db: bytes
    key: bytes
    value: bytes

    @property
    def name(self) -> str:
        """The name of the record in messages."""
        return f"{self.db.decode()} {self.key.hex()}"

    def batch_of(self, at: int) -> int:
        """Return the offset of the batch, in a chunk of batches, that a byte is in."""
        return max(header.base_offset for begin, header in walk(self.value) if begin <= at)

    @contextmanager
    def changed(self, at: int, to: int) -> Iterator[None]:
        """One byte is another one, as long as the block runs."""
        self._put(self.value[:at] + bytes([to]) + self.value[at + 1 :])
        try:
            yield
        finally:
            self._put(self.value)

    def _put(self, value: bytes) -> None:
        db = self.environment.db(self.db)
        self.environment.write(lambda txn: txn.put(self.key, value, db=db))


def records(environment: Environment, names: Sequence[bytes]) -> list[Record]:
    """All values of some databases, where they are there."""
    found = []
    with environment.read() as txn:
        for name in names:
            if environment.has(name):
                with txn.cursor(db=environment.db(name)) as cursor:
                    found += [Record(environment, name, bytes(k), bytes(v)) for k, v in cursor]
    return found


def changes(value: bytes, stride: int = 1, begin: int = 0) -> Iterator[tuple[int, int]]:
    """Places and what stands there instead: one bit flipped, now and then all of them alike."""
    for at in range(begin, len(value), stride):
        yield at, value[at] ^ MASKS[at % 2]
        if at % 5 == 0:
            yield from ((at, other) for other in (0x00, 0xFF) if other != value[at])


# -- readers of topics -----------------------------------------------------------------


def _row(message: txnkv.Message) -> Row:
    of = message
    return of.offset, of.value, of.key, tuple(of.headers), of.timestamp, of.txn_id


def consumer(**how: Any) -> Reader:
    """A consumer, to the end of what there is."""

    def read(client: txnkv.Client, topic: str) -> Iterator[Row]:
        with client.topic(topic).consumer(**how) as found:
            yield from _until_idle(lambda: found.poll(max_messages=3, timeout=0.0))

    return read


def _until_idle(take: Callable[[], Sequence[txnkv.Message]]) -> Iterator[Row]:
    idle = 0
    while idle < 3:
        messages = take()
        idle = 0 if messages else idle + 1
        yield from map(_row, messages)


def subscription(client: txnkv.Client, topic: str) -> Iterator[Row]:
    """Yield what a subscription delivers that never acknowledged anything."""
    with client.topic(topic).subscribe("flips") as found:
        yield from _until_idle(lambda: found.receive_many(max_messages=3, timeout=0.0))


def shared(client: txnkv.Client, name: str) -> Iterator[Row]:
    """The same of a shared one, which is made anew: what was leased would come in another order."""
    topic = client.topic(name)
    try:
        with topic.subscribe("flips shared", type="shared") as found:
            yield from _until_idle(lambda: found.receive_many(max_messages=3, timeout=0.0))
    finally:
        topic.drop_subscription("flips shared", missing_ok=True)


def fetches(isolation: Any) -> Reader:
    """Raw batches, and their messages as whoever takes them decodes them."""

    def read(client: txnkv.Client, name: str) -> Iterator[Row]:
        topic, offset = client.topic(name), 0
        shown, label = CommittedFilter(), partition_of(client, name).label
        while True:
            found = topic.fetch(0, offset, max_bytes=_FETCH, isolation=isolation)
            if not found.records:
                return
            try:
                batches = intact(found.records)
                if found.aborted is None:
                    spans = all_data(batches, offset, found.high_watermark)
                else:
                    end = found.last_stable_offset
                    spans = shown.keep(batches, found.aborted, offset, end)
                rows = decode(batches, spans, offset, checked=True)
            except CoreError as error:
                raise txnkv.CorruptionError(f"{label}: {error}") from None
            assert spans.next_offset > offset, "it does not go on"
            offset = spans.next_offset
            yield from (tuple(row.values()) for row in rows.to_pylist())

    return read


def pinned(client: txnkv.Client, name: str) -> Iterator[Row]:
    """The whole log as a Spark task reads it."""
    engine, partition = client.instance.topics, partition_of(client, name)
    there = bounds(engine, partition)
    end = there.last_stable_offset
    planned = pinned_range.pin(engine, partition, there.start, end, there.start)
    for rows in pinned_range.read(engine, partition, planned, max_bytes=_FETCH):
        yield from (tuple(row.values()) for row in rows.to_pylist())


def partition_of(client: txnkv.Client, name: str, number: int = 0) -> Partition:
    """One partition of a topic."""
    engine = client.instance.topics
    return engine.partitions(engine.get(name))[number]


def readers(middle: int) -> dict[str, Reader]:
    """Every way to read a topic; some begin in the middle."""
    return {
        "read_uncommitted": consumer(isolation="read_uncommitted"),
        "read_committed": consumer(),
        "from the middle": consumer(start={0: middle}),
        "order=commit": consumer(order="commit"),
        "order=commit, from the middle": consumer(order="commit", start={0: middle}),
        "serializable": consumer(isolation="serializable"),
        "subscription": subscription,
        "shared": shared,
        "fetch uncommitted": fetches("read_uncommitted"),
        "fetch": fetches("read_committed"),
        "pinned": pinned,
    }


BY_OFFSET: Final = (
    "read_uncommitted", "read_committed", "subscription", "shared", "pinned", "fetch uncommitted",
    "fetch",
)  # fmt: skip
"""Names of the readers that begin at the beginning and go by offsets."""


def outcome(reader: Reader, client: txnkv.Client, topic: str) -> tuple[list[Row], str | None]:
    """Return what a reader gave, and the text of the CorruptionError that ended it."""
    rows: list[Row] = []
    try:
        for row in reader(client, topic):
            rows.append(row)
            assert len(rows) < 10_000, "it does not end"
    except txnkv.CorruptionError as error:
        return rows, str(error)
    return rows, None
