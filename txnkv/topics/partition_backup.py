"""A partition's log on its way into a backup, and back.

    logs/7/0             the chunks of the segment that begins at offset 0
    logs/7/4096          of the next one: those that are closed do not change any more
    logs/7/index         all other databases of the log, and of its side logs
    logs/7/side-4711     the side batches of transaction 4711, which is committed

The next offset in the copy of status.db says where the backup's log ends. Before it is copied, the
log is brought up to all offsets that were given by then, so it ends there or behind; and nothing
goes at its beginning, nor is a side log compacted, while the lock `Store.log_cuts` is held. So all
below the next offset is there and stays, however long it takes to copy it.

    status.db     next offset                     58
    log           [ 0 ..................... 40 )      brought up: [ 0 ............ 58 ... 63 )
    restored      [ 0 ............ 58 )               what came later is cut off

Indexes are read in one LMDB transaction, chunks in many after that: a chunk that grew meanwhile is
cut where the indexes end. What they know of more is taken back by the restore as by a truncation,
which replays the state up to the next offset. Transactions that were open there are aborted when
the restored store is opened.

**A dump** has messages as rows of columns, without batches and transactions. They get back their
offsets; fillers take those between, of end markers and of what was aborted:

    rows          0 a    1 b          4 c         [0, 6)
    log           [ a      b ] [ 2-3 ] [ c ] [ 5 ]

A batch is committed when its last message was sent, or just behind the batch before it: so readers
in the order of commits have the partitions side by side, about as they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import apsw
import lmdb
import pyarrow as pa

from txnkv.coordinator import Timestamp
from txnkv.core import CoreError, encode_batch, intact, join_headers, place, split_headers
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError
from txnkv.storage import (
    READ_OTHERWISE,
    Backup,
    BackupWriter,
    EntryFile,
    Environments,
    StaleHandleError,
    each_between,
    giving_up,
    make_private_directory,
    put_entries,
)
from txnkv.topics import subscription_catalog, topic_catalog
from txnkv.topics.acks import ack_rows
from txnkv.topics.log import (
    DATABASES,
    KEY,
    LOG,
    LogOptions,
    PartitionLog,
    Segment,
    gathered,
    position_of,
)
from txnkv.topics.messages import cut_runs
from txnkv.topics.read import READ_BYTES, bounds, pinned_range
from txnkv.topics.sidecar import (
    OWN_DATABASE,
    SIDE,
    SideLogs,
    committed_rows,
    put_chunks,
    put_rows,
)
from txnkv.topics.subscription_catalog import SubscriptionInfo
from txnkv.topics.topic_catalog import TopicInfo, TopicOptions
from txnkv.topics.topics import Partition, Topics
from txnkv.topics.write import roll_forward


def next_offsets(cur: apsw.Cursor) -> dict[int, int]:
    """The next offset of each partition of topics that are not dropped."""
    live = sorted(topic_catalog.live_partitions(cur))
    return {id: topic_catalog.next_offset(cur, id) for id in live}


def back_up_partition(
    topics: Topics, partition: Partition, upto: int, backup: BackupWriter
) -> None:
    """Copy a log up to an offset that was given. Nothing is taken out of logs meanwhile.

    Args:
        topics: the topics.
        partition: of the log.
        upto: the next offset of the copy of status.db.
        backup: takes it.

    Raises:
        CorruptionError: the log is damaged.
        StorageFullError: there is no room for it.
    """
    if not partition.exists:
        return
    roll_forward.complete(topics, partition)
    _PartitionBackup(partition, upto, backup).run()


class _PartitionBackup:
    """One partition on its way into a backup."""

    def __init__(self, partition: Partition, upto: int, backup: BackupWriter) -> None:
        self._partition = partition
        self._environment = partition.environment
        self._folder = f"logs/{partition.id}"
        self._upto = upto
        self._backup = backup
        self._end = 0
        self._segments: list[Segment] = []
        self._rows: dict[int, Any] = {}

    def run(self) -> None:
        """Copy all of it."""
        self._backup.entries(f"{self._folder}/index", self._copy_indexes)
        bases = [segment.base for segment in self._segments if segment.base <= self._upto]
        ends = [*bases[1:], min(self._upto + 1, self._end)] if bases else []
        for base, end in zip(bases, ends, strict=True):
            self._backup.entries(f"{self._folder}/{base}", partial(self._copy_chunks, base, end))
        for txn_id, row in self._rows.items():
            assert self._partition.side is not None
            self._backup.entries(
                f"{self._folder}/side-{txn_id}",
                partial(self._copy_side, self._partition.side, txn_id, row),
            )

    def _copy_indexes(self, file: EntryFile) -> None:
        begun = file.size
        while True:
            with self._environment.read() as txn:
                try:
                    self._look(txn)
                    self._put_indexes(txn, file)
                    return
                except StaleHandleError:
                    assert file.size == begun  # a thread has just made the databases of side logs

    def _look(self, txn: lmdb.Transaction) -> None:
        log, side = self._partition.log, self._partition.side
        self._end, self._segments = log.end(txn), log.segments(txn)
        self._rows = {} if side is None else committed_rows(side, txn, self._upto)

    def _put_indexes(self, txn: lmdb.Transaction, file: EntryFile) -> None:
        for name in DATABASES:
            if name != LOG:
                with txn.cursor(db=self._environment.db(name)) as cursor:
                    found = cursor.first()
                    while found:
                        file.put(name, bytes(cursor.key()), bytes(cursor.value()))
                        found = cursor.next()
        put_rows(self._rows, file)

    def _copy_chunks(self, base: int, end: int, file: EntryFile) -> None:
        def take(key: bytes, chunk: bytes) -> None:
            try:
                whole = len(intact(chunk)) == len(chunk)
                value = chunk[: position_of(chunk, self._end)]
            except CoreError:
                whole = False
            if not whole:
                raise self._damaged(f"the chunk at offset {KEY.unpack(key)[0]} is damaged")
            file.put(LOG, key, value)

        each_between(self._environment, LOG, KEY.pack(base), KEY.pack(end), take)

    def _copy_side(self, side: SideLogs, txn_id: int, row: Any, file: EntryFile) -> None:
        try:
            put_chunks(side, txn_id, row, file)
        except CorruptionError as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, what: str) -> CorruptionError:
        return CorruptionError(
            f"{self._partition.label}: {what}, so that there is no backup of it. `txnkv check` "
            "lists all damage; restore the store from an earlier backup, or "
            + giving_up(self._partition.part)
        )


def restore_partition(
    environments: Environments, id: int, upto: int, backup: Backup, names: Sequence[str]
) -> None:
    """Make the log of a partition from a backup; durable when it returns.

    Args:
        environments: of the store that is made.
        id: of the partition.
        upto: its next offset.
        backup: verified.
        names: of the partition's files.
    """
    environment = environments.get(f"logs/{id}", databases=DATABASES)
    sides = [name for name in names if "/side-" in name]
    for name in names:
        put_entries(environment, _apart(backup, name, own=False))
    for name in sides:
        if any(True for _ in _apart(backup, name, own=True)):
            make_private_directory(environment.path / "side")
            own = environments.get(f"logs/{id}/side/{name.rpartition('-')[2]}")
            put_entries(own, _apart(backup, name, own=True))
    log = PartitionLog(environment, LogOptions())

    def cut(txn: lmdb.Transaction) -> None:
        if log.start(txn) <= upto < log.end(txn):
            log.truncate(txn, upto)

    environment.write(cut)


def _apart(backup: Backup, name: str, *, own: bool) -> Iterator[tuple[bytes, bytes, bytes]]:
    """The entries of the partition's environment, or those of a side log of its own."""
    for database, key, value in backup.entries(name):
        if (database == OWN_DATABASE) is own:
            yield SIDE if own else database, key, value


# -- dumps -----------------------------------------------------------------------------

_PUT_BYTES: Final = 16 << 20
"""Bytes of batches that one write of LMDB takes, about."""


def topic_document(topics: Topics, topic: TopicInfo) -> dict[str, Any]:
    """A topic for JSON, as `restore_topic` takes it: all but its messages.

    Nobody else has the store open.
    """
    options = replace(
        topic.options, replica_of=None, replica_topic=None, altered=0, former_values=()
    )
    ends = [bounds(topics, partition) for partition in topics.partitions(topic)]
    with topics.store.status.read() as cur:
        subscriptions = [
            {
                "name": info.name,
                "type": info.type,
                "options": info.options,
                "positions": _positions(cur, info),
            }
            for info in subscription_catalog.of_topic(cur, topic)
        ]
    return {
        "name": topic.name,
        "buffer": topic.buffer,
        "options": json.loads(options.to_json()),
        "partitions": [{"start": each.start, "end": each.high_watermark} for each in ends],
        "subscriptions": subscriptions,
    }


def _positions(cur: apsw.Cursor, info: SubscriptionInfo) -> list[dict[str, Any]]:
    cursors = ack_rows.load_cursors(cur, info.id)
    found = [cursors[id] for id in info.topic.partitions]
    return [{"acked_below": each.mark, "acked": list(each.deleted)} for each in found]


def dumped_messages(
    topics: Topics, partition: Partition, start: int, end: int
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The committed messages of a range that is decided, as a dump has them.

    Returns:
        Columns offset, timestamp, key, the columns of the value or value, headers (pairs of key and
        value); and the batches.
    """
    codec = partition.topic.options.codec
    values = pa.schema([("value", pa.binary())]) if codec is None else codec.columns
    nothing = pa.array([], pa.binary())
    headers = split_headers(nothing).type
    schema = pa.schema([*_HEAD, *values, ("headers", headers)])

    def batches() -> Iterator[pa.RecordBatch]:
        pinned = pinned_range.pin(topics, partition, start, end, start)
        for batch in pinned_range.read(topics, partition, pinned, READ_BYTES):
            value = batch.column("value")
            columns = [value] if codec is None else codec.decode(value).columns
            head = [batch.column(name) for name in _HEAD.names]
            rest = split_headers(batch.column("headers"))
            yield pa.RecordBatch.from_arrays([*head, *columns, rest], schema=schema)

    return schema, batches()


_HEAD: Final = pa.schema(
    [("offset", pa.int64()), ("timestamp", pa.timestamp("us", "UTC")), ("key", pa.binary())]
)


def restore_topic(topics: Topics, document: Mapping[str, Any]) -> TopicInfo:
    """Make a topic of what `topic_document` said, without messages and subscriptions."""
    options = TopicOptions.from_json(json.dumps(document["options"]))
    with topics.store.status.write() as cur:
        topic_catalog.declare_values(topics.store.directory, options)
        return topic_catalog.create(
            cur, document["name"], len(document["partitions"]), document["buffer"], options
        )


def restore_messages(
    topics: Topics,
    partition: Partition,
    start: int,
    end: int,
    messages: Iterable[pa.RecordBatch],
    latest: int,
) -> int:
    """Fill the log of a new partition, [start, end), with messages at their offsets.

    Nobody else has the store open.

    Args:
        messages: columns as those of `dumped_messages`, ascending by offset.
        latest: the commit timestamp of those that were sent in the future, or later.

    Returns:
        The highest commit timestamp of a batch.

    Raises:
        ValueError: offsets do not ascend in the range.
    """
    made = _LogOfMessages(partition, start, end, latest)
    log, environment = partition.log, partition.environment
    environment.write(lambda txn: log.advance_start(txn, start))
    for some in gathered(made.batches(messages), _PUT_BYTES):
        environment.write(partial(log.put, batches=some))
    with topics.store.status.write() as cur:
        cur.execute("UPDATE partitions SET next_offset = ? WHERE id = ?", (end, partition.id))
    return made.committed


class _LogOfMessages:
    """The batches of a log that begins empty.

    Attributes:
        committed: the commit timestamp of the last batch.
    """

    def __init__(self, partition: Partition, start: int, end: int, latest: int) -> None:
        self.committed = 0
        self._options = partition.topic.options
        self._at = start
        self._end = end
        self._latest = latest
        self._sent = 0

    def batches(self, messages: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
        """Batches one behind the other, from the start of the log to its end."""
        for batch in messages:
            if batch.num_rows:
                yield from self._of(batch)
        yield from self._fill(self._end)

    def _of(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        offsets = batch.column("offset")
        steps = pc.subtract(offsets.slice(1), offsets.slice(0, len(offsets) - 1))
        holes = pc.indices_nonzero(pc.not_equal(steps, 1)).to_pylist()
        given = self._given(batch)
        values = pc.max(pc.binary_length(given.column("value"))).as_py() or 0
        most = max(self._options.max_message_bytes, values)  # a large one is not cut in pieces
        first = 0
        for last in (*holes, batch.num_rows - 1):
            yield from self._fill(offsets[first].as_py())
            for part, _ in cut_runs(given.slice(first, last + 1 - first), most):
                yield self._placed(part)
            first = last + 1

    def _given(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        codec = self._options.codec
        value = (
            batch.column("value")
            if codec is None
            else codec.encode(batch.select(codec.columns.names))
        )
        headers = join_headers(batch.column("headers"))
        columns = [batch.column("timestamp"), batch.column("key"), value, headers]
        return pa.RecordBatch.from_arrays(columns, ["timestamp", "key", "value", "headers"])

    def _fill(self, upto: int) -> Iterator[bytes]:
        if not self._at <= upto <= self._end:
            raise ValueError(f"offset {upto} behind {self._at - 1}, in a log up to {self._end}")
        yield from roll_forward.fillers(self._at, upto, self._sent)
        self._at = upto

    def _placed(self, part: pa.RecordBatch) -> bytes:
        times = part.column("timestamp").cast(pa.int64())
        self._sent = times[-1].as_py()
        then = max(self._sent - roll_forward.EPOCH_MICROS, 0)
        stamp = Timestamp.from_micros(min(then, Timestamp(self._latest).micros))
        self.committed = max(self.committed + 1, stamp)
        made = encode_batch(part, timestamp=self._sent, codec=self._options.compression)
        at = self._at
        self._at += part.num_rows
        return place(made, at, self.committed)


def restore_subscriptions(
    topics: Topics, topic: TopicInfo, documents: Iterable[Mapping[str, Any]]
) -> None:
    """Make the subscriptions of a topic that `topic_document` found, at their positions.

    All topics and messages are there.
    """
    for document in documents:
        named = document["name"], document["type"]
        wanted = SubscriptionInfo(0, topic, *named).changed(document["options"])
        subscription_catalog.check(wanted)
        positions = dict(zip(topic.partitions, document["positions"], strict=True))
        with topics.store.status.write() as cur:
            starts = {id: each["acked_below"] for id, each in positions.items()}
            info = subscription_catalog.make(cur, wanted, starts)
            subscription_catalog.set_options(cur, info, anew=False)
            if info.reads_otherwise:
                topics.store.directory.add_feature(READ_OTHERWISE)
            for id, each in positions.items():
                for first, last in each["acked"]:
                    ack_rows.delete(cur, info.id, id, first, last)
