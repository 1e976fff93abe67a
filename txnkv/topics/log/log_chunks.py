"""Chunks: the LMDB values of a log; and markers that stand for batches in a side log.

    key    u64 big-endian, the base offset of the first batch
    value  one or more whole batches, one behind the other, without a gap in their offsets

Batches that are small are gathered, so that a chunk fills its pages; a large one is a chunk by
itself. No chunk goes over from one segment into the next. A SIDE_LIST marker is always alone in
its chunk, so that a reader need not look into others for it.

Such a marker is a control batch whose body, the list, names side batches by runs, for those of
one transaction stand one behind the other under its id:

     0          8           16          24          32
    +----------+-----------+-----------+-----------+
    | which    | index of  | messages  | bytes of  |     little-endian, one entry a run
    | log      | the first | in it     | batches   |
    +----------+-----------+-----------+-----------+

The log is 0 for the partition's side log, 1 for the transaction's own. The index is that of a
message in the transaction, from 0: the message's offset is the marker's first offset and that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import lmdb

from txnkv.core import (
    HEADER_BYTES,
    BatchHeader,
    Control,
    ControlType,
    CoreError,
    intact,
    read_control,
    read_header,
    sound,
    walk,
)
from txnkv.errors import CorruptionError
from txnkv.storage import PLACES, Store
from txnkv.topics.log.partition_state import AbortedEntry

CHUNK_BYTES: Final = (64 << 10) - 16
"""Bytes that LMDB stores in 16 pages: a header of 16 bytes stands before the value."""

KEY: Final = struct.Struct(">Q")
_PLACE: Final = struct.Struct("<Q12xI4xI")  # base offset, length, count
_ATTRIBUTES: Final = struct.Struct("<H")
_CONTROL: Final = struct.Struct("<HH")


def gathered(batches: Iterable[Any], most: int = CHUNK_BYTES) -> Iterator[list[Any]]:
    """Batches in lists of together at most so many bytes, or of a single one."""
    some: list[Any] = []
    size = 0
    for batch in batches:
        if some and size + len(batch) > most:
            yield some
            some, size = [], 0
        some.append(batch)
        size += len(batch)
    if some:
        yield some


def damaged(offset: int) -> CorruptionError:
    """The batch at an offset of a log is not as it was written."""
    return CorruptionError(
        f"offset {offset}: the batch is damaged, or gone. `txnkv check` says more; "
        "restore the store from a backup, or read on behind it"
    )


def unlike(offset: int, index: str) -> CorruptionError:
    """An entry of an index is not what the log has."""
    return CorruptionError(
        f"offset {offset}: the {index} differs from the log. `txnkv check` says more; restore the "
        "store from a backup"
    )


def position_of(chunk: Any, offset: int) -> int:
    """Find where in a chunk the batch of an offset begins; the chunk's length, if behind all.

    Raises:
        CorruptionError: there are no batches.
    """
    at, size = 0, len(chunk)
    while at < size:
        base, length, count = _batch(chunk, at)
        if base + count > offset:
            return at
        at += length
    return size


def below(part: memoryview, end: int) -> Iterator[memoryview]:
    """Batches up to an offset, at which one begins unless it is damaged."""
    cut = position_of(part, end)
    if cut:
        yield part[:cut]
    if cut < len(part) and base_at(part, cut) < end:
        raise damaged(base_at(part, cut))


def first_length(chunk: Any, at: int = 0) -> int:
    """Bytes of the batch at byte `at`.

    Raises:
        CorruptionError: there is no batch.
    """
    return _batch(chunk, at)[1]


def base_at(chunk: Any, at: int) -> int:
    """The base offset of the batch at byte `at`.

    Raises:
        CorruptionError: there is no batch.
    """
    return _batch(chunk, at)[0]


def next_offset(chunk: Any) -> int:
    """The offset behind the last batch of a chunk.

    Raises:
        CorruptionError: there are no batches.
    """
    at = end = 0
    while at < len(chunk):
        base, length, count = _batch(chunk, at)
        at, end = at + length, base + count
    return end


def behind(batches: Any) -> int:
    """The offset behind batches that `PartitionLog.read` gave."""
    base = base_at(batches, 0)
    return sound(batches, base, base, checksums=False)[2]


def whole(batches: Any) -> Any:
    """The first of some batches, as many as are as they were written.

    Raises:
        CorruptionError: the first one is damaged.
    """
    try:
        return intact(batches)
    except CoreError:
        raise damaged(base_at(batches, 0)) from None


def is_side_list(chunk: Any) -> bool:
    """Tell whether a chunk is a SIDE_LIST marker."""
    if len(chunk) < HEADER_BYTES + 4 or not _ATTRIBUTES.unpack_from(chunk, 26)[0] & 16:
        return False
    return _CONTROL.unpack_from(chunk, HEADER_BYTES) == (0, 3)


def _batch(chunk: Any, at: int) -> tuple[int, int, int]:
    if len(chunk) - at >= HEADER_BYTES:
        base, length, count = _PLACE.unpack_from(chunk, at)
        if HEADER_BYTES <= length <= len(chunk) - at:
            return base, length, count
    raise CorruptionError(
        f"log: the batch at byte {at} of a chunk of {len(chunk)} bytes makes no sense. "
        "Check the store, or restore it from a backup"
    )


class ChunkReader:
    """Chunks from the one that holds an offset on, as they lie in the map.

    Args:
        txn: an LMDB transaction.
        db: the database of the chunks.
    """

    def __init__(self, txn: lmdb.Transaction, db: Any) -> None:
        self._cursor = txn.cursor(db=db)

    def at(self, offset: int) -> tuple[int, memoryview] | None:
        """The base offset and the bytes of the chunk that holds an offset, or ends below it."""
        cursor = self._cursor
        if not seek_at_or_below(cursor, KEY.pack(offset)):
            return None
        return KEY.unpack(cursor.key())[0], cursor.value()  # type: ignore[return-value]

    def batch(self, offset: int) -> tuple[BatchHeader, memoryview]:
        """The batch that holds an offset.

        Raises:
            CorruptionError: it is damaged, or gone.
        """
        found = self.at(offset)
        if found is None or found[0] > offset:
            raise damaged(offset)
        start, stop, end = sound(found[1], found[0], offset, 1)
        if start == stop:
            raise damaged(end)
        return read_header(found[1], start), found[1][start:stop]

    def compare(self, entry: AbortedEntry) -> None:
        """See that a transaction begins where its entry in the aborted index says.

        Raises:
            CorruptionError: another one does.
        """
        try:
            header, _ = self.batch(entry.first_offset)
        except CorruptionError:
            return  # who reads there is told of it
        if (header.base_offset, header.txn_id) != (entry.first_offset, entry.txn_id):
            raise unlike(entry.first_offset, "aborted index")

    def next(self) -> tuple[int, memoryview] | None:
        """The chunk behind that one."""
        cursor = self._cursor
        if not cursor.next():
            return None
        return KEY.unpack(cursor.key())[0], cursor.value()  # type: ignore[return-value]

    def between(self, offset: int, upto: int) -> Iterator[tuple[int, memoryview]]:
        """Chunks with batches in [offset, upto); the first and the last may hold others too."""
        found = self.at(offset) if offset < upto else None
        while found is not None and found[0] < upto:
            yield found
            found = self.next()


def seek_at_or_below(cursor: lmdb.Cursor, key: bytes) -> bool:
    """Move to an LMDB key, or to the greatest below it; false when there is neither."""
    if not cursor.set_range(key):
        return cursor.last()
    return True if bytes(cursor.key()) == key else cursor.prev()


def delete_range(txn: lmdb.Transaction, db: Any, low: bytes, high: bytes | None) -> int:
    """Delete the LMDB keys in [low, high), or from `low` on; how many they were."""
    count = 0
    with txn.cursor(db=db) as cursor:
        found = cursor.set_range(low)
        while found and (high is None or bytes(cursor.key()) < high):
            found = cursor.delete()
            count += 1
    return count


class LogPart:
    """One database of a log, whose keys begin with an offset, inside of a transaction."""

    def __init__(self, txn: lmdb.Transaction, db: Any) -> None:
        self._txn = txn
        self._db = db

    def drop_from(self, offset: int) -> None:
        """Delete what begins at an offset or behind it."""
        delete_range(self._txn, self._db, KEY.pack(offset), None)

    def drop_below(self, offset: int) -> None:
        """Delete what begins below an offset."""
        delete_range(self._txn, self._db, b"", KEY.pack(offset))


SHARED: Final = 0
OWN: Final = 1

_ENTRY: Final = struct.Struct("<QQQQ")


class SideRun(NamedTuple):
    """One entry of a list: side batches that stand one behind the other.

    Attributes:
        log: SHARED or OWN.
        first: the index in the transaction of the first message.
        count: how many messages.
        bytes: of their batches.
    """

    log: int
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    bytes: int

    @property
    def end(self) -> int:
        """The index behind its last message."""
        return self.first + self.count


class Marker(NamedTuple):
    """A SIDE_LIST marker as it lies in a log.

    Attributes:
        header: of the control batch.
        runs: what it stands for, by index.
    """

    header: BatchHeader
    runs: tuple[SideRun, ...]


def pack_runs(runs: Sequence[SideRun]) -> bytes:
    """The body of a marker."""
    return b"".join(_ENTRY.pack(*run) for run in runs if run.count)


def read_marker(marker: Any) -> Marker:
    """A SIDE_LIST control batch.

    Raises:
        CorruptionError: it is damaged, is none, or its list and its offsets differ in number.
    """
    try:
        header, control = read_header(marker), read_control(marker)
    except CoreError as error:
        raise CorruptionError(f"marker of a side log: {error}") from None
    runs = _runs(control)
    if not runs or sum(run.count for run in runs) != header.count:
        raise CorruptionError(
            f"marker at offset {header.base_offset}: it takes {header.count} offsets and lists "
            f"{sum(run.count for run in runs)} messages. Check the store, or restore a backup"
        )
    return Marker(header, runs)


def _runs(control: Control) -> tuple[SideRun, ...]:
    body = control.body
    if control.type is not ControlType.SIDE_LIST or len(body) % _ENTRY.size:
        return ()
    return tuple(SideRun(*fields) for fields in _ENTRY.iter_unpack(body))


def side_bytes(marker: Any) -> int:
    """Count the bytes of the batches that a SIDE_LIST marker stands for.

    Raises:
        CorruptionError: it is none, or damaged.
    """
    return sum(run.bytes for run in read_marker(marker).runs)


def declare_places(store: Store, batches: Any) -> None:
    """Before a log has batches with places, FORMAT says so: see `StoreDirectory.add_feature`."""
    has_places = any(header.has_places for _, header in walk(batches))
    if has_places and PLACES not in store.directory.features:
        with store.status.write():
            store.directory.add_feature(PLACES)
