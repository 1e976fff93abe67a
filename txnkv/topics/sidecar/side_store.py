"""The store of a side log: its chunks, the index of its transactions, and logs of their own.

A chunk holds batches of one transaction:

    key    u64 transaction, u64 index in it of the chunk's first message, both big-endian
    value  one or more whole batches, without offsets

A transaction's chunks stand one behind the other, whatever was written between them, so that a
run of them is found by a seek and read in order. The same layout serves the partition's side log
and a transaction's own. Beside the chunks of the partition's:

    side_transactions    transaction -> what it has here, its state, where its marker stands
    side_by_marker       first offset of a marker -> transaction: those committed, in commit order
    side_garbage         transactions whose batches are to be removed

A transaction is OPEN from its first batch; COMMITTED when its marker is in the log; GARBAGE when
it was aborted, when the log's start has passed its messages, or when its marker was cut off. It
is forgotten when nothing of it is left here.

**Logs of their own**, for huge transactions, are each an LMDB environment, dropped whole. Measured
with 512 MiB in batches of 1 MiB: appends go at 458 MB/s, against 679 MB/s in the partition's side
log, for each commits twice. What that buys is the end: LMDB never makes a file shorter, so the
partition's stayed 512 MiB longer for good, while the folder of an own one goes in 0.1 s with all
its space. Making one takes 1-4 ms, so it is worth it from `OWN_BYTES` on.

    logs/7/                  the partition's environment
    logs/7/side/4711/        the own side log of transaction 4711

What counts is written in the partition's environment, in the transaction that takes a batch;
batches in the own log that are beyond it are of a writer that died, and are written over.
"""

from __future__ import annotations

import shutil
import struct
import uuid
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import lmdb

from txnkv.core import (
    Attributes,
    BatchHeader,
    CoreError,
    check_batch,
    crc32c,
    place,
    read_header,
    walk,
)
from txnkv.errors import ClosedError, CorruptionError, StoreNotFoundError, UnavailableError
from txnkv.storage import (
    Environment,
    Environments,
    declare_fault_point,
    fault_point,
    is_there,
    make_private_directory,
    numbers_in,
    sync_directory,
)
from txnkv.topics.log import OWN, SHARED, SideRun, gathered

_KEY: Final = struct.Struct(">QQ")
_ATTRIBUTES: Final = struct.Struct("<H")
_CRC: Final = struct.Struct("<I")


def chunk_key(txn_id: int, index: int) -> bytes:
    """Return the key of a chunk of side batches, by the index of its first message."""
    return _KEY.pack(txn_id, index)


def read_chunk_key(stored: Any) -> tuple[int, int]:
    """The transaction and the index of a key."""
    txn_id, index = _KEY.unpack(stored)
    return txn_id, index


def packed_id(number: int) -> bytes:
    """Return a transaction or an offset as the indexes have it."""
    return _ID.pack(number)


def packed_row(side: SideTxn) -> bytes:
    """Return what the index says of a transaction, as it is stored."""
    return _TXN.pack(*side)


def decided(batch: bytes, txn_id: int) -> bytes:
    """A batch of a transaction as a side log holds it: DECIDED.

    Nobody sees it before the marker stands in the log, so whoever sees it sees a decided one.

    Raises:
        ValueError: it is no data batch of this transaction.
    """
    header = read_header(batch)
    if header.txn_id != txn_id or header.is_control or header.length != len(batch):
        raise ValueError(
            f"append to the side log of transaction {txn_id}: one data batch of it each, not "
            f"{len(batch)} bytes that begin with a batch of {header.txn_id}"
        )
    if header.is_decided:
        return batch
    sealed = bytearray(batch)
    _ATTRIBUTES.pack_into(sealed, 26, header.attributes | Attributes.DECIDED)
    _CRC.pack_into(sealed, 16, crc32c(memoryview(sealed)[20:]))
    return bytes(sealed)


def batches_of(chunk: Any) -> list[tuple[int, BatchHeader]]:
    """The batches of a chunk of a side log, with where they begin.

    Raises:
        CorruptionError: there is something else in it.
    """
    try:
        return walk(chunk)
    except CoreError as error:
        raise CorruptionError(f"side log: {error}") from None


class SideChunks:
    """The chunks of a side log in one LMDB transaction.

    Args:
        txn: the transaction.
        db: the database of the chunks.
    """

    def __init__(self, txn: lmdb.Transaction, db: Any) -> None:
        self._txn = txn
        self._db = db

    def put(self, txn_id: int, index: int, batches: Sequence[bytes]) -> int:
        """Puts batches of a transaction from an index on; the index behind them.

        What stands there and behind it is replaced: it is of a writer that died before what it
        wrote counted.
        """
        self.delete(txn_id, index, None)
        for chunk in gathered(batches):
            self._txn.put(chunk_key(txn_id, index), b"".join(chunk), db=self._db)
            index += sum(read_header(batch).count for batch in chunk)
        return index

    def read(self, txn_id: int, index: int, upto: int) -> Iterator[tuple[int, memoryview]]:
        """Batches that hold messages of a transaction in [index, upto), by chunks.

        Yields:
            The index of a chunk's first message, and a view of the chunk. The first chunk
            begins with the batch that holds `index`.

        Raises:
            CorruptionError: a part of them is missing.
        """
        with self._txn.cursor(db=self._db) as cursor:
            first, chunk = self._holding(cursor, txn_id, index)
            while True:
                count = sum(header.count for _, header in batches_of(chunk))
                at, first_batch = _position(chunk, index - first) if first < index else (0, 0)
                yield first + first_batch, chunk[at:]
                index = first + count
                if index >= upto:
                    return
                if not cursor.next() or read_chunk_key(cursor.key()) != (txn_id, index):
                    raise self._missing(txn_id, index)
                first, chunk = index, cursor.value()  # type: ignore[assignment]

    def end(self, txn_id: int) -> int:
        """The index behind the last message of a transaction; 0 when there is none."""
        with self._txn.cursor(db=self._db) as cursor:
            there = cursor.prev() if cursor.set_range(chunk_key(txn_id + 1, 0)) else cursor.last()
            if not there or read_chunk_key(cursor.key())[0] != txn_id:
                return 0
            count = sum(header.count for _, header in batches_of(cursor.value()))
            return int(read_chunk_key(cursor.key())[1]) + count

    def delete(self, txn_id: int, index: int, upto: int | None, most: int = 1 << 62) -> int:
        """Removes the chunks of a transaction that begin in [index, upto), None: all behind.

        Args:
            txn_id: of the transaction.
            index: where to begin.
            upto: where to stop.
            most: bytes after which to stop.

        Returns:
            How many bytes were removed: `most` or more when it stopped there.
        """
        low = chunk_key(txn_id, index)
        high = chunk_key(txn_id + 1, 0) if upto is None else chunk_key(txn_id, upto)
        removed = 0
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.set_range(low)
            while found and removed < most and low <= bytes(cursor.key()) < high:
                removed += len(cursor.value())
                found = cursor.delete()
        return removed

    def _holding(self, cursor: Any, txn_id: int, index: int) -> tuple[int, memoryview]:
        wanted = chunk_key(txn_id, index)
        found = cursor.set_range(wanted)
        if not found or bytes(cursor.key()) != wanted:
            found = cursor.prev() if found else cursor.last()
        if found:
            owner, first = read_chunk_key(cursor.key())
            chunk = cursor.value()
            if owner == txn_id and index < first + sum(h.count for _, h in batches_of(chunk)):
                return first, chunk
        raise self._missing(txn_id, index)

    def _missing(self, txn_id: int, index: int) -> CorruptionError:
        return CorruptionError(
            f"side log: message {index} of transaction {txn_id} is missing. Check the store, or "
            "restore it from a backup"
        )


def _position(chunk: memoryview, index: int) -> tuple[int, int]:
    """Find where the batch begins that holds a message, by index, and the index of its first."""
    at = first = 0
    while True:
        header = read_header(chunk, at)
        if first + header.count > index:
            return at, first
        check_batch(chunk, at)  # its count says where the next one is placed
        at, first = at + header.length, first + header.count


SIDE: Final = b"side"
TRANSACTIONS: Final = b"side_transactions"
BY_MARKER: Final = b"side_by_marker"
GARBAGE: Final = b"side_garbage"
DATABASES: Final = (SIDE, TRANSACTIONS, BY_MARKER, GARBAGE)

_ID: Final = struct.Struct(">Q")
_TXN: Final = struct.Struct("<IIQQQQQQQq")


class SideState(IntEnum):
    """The state of a transaction in a side log."""

    OPEN = 0
    COMMITTED = 1
    GARBAGE = 2


_STATES: Final = frozenset(SideState)


class SideTxn(NamedTuple):
    """A transaction in a side log.

    Attributes:
        state: where it stands.
        has_own: whether it has a side log of its own.
        shared_count: messages that went to the partition's side log; the rest is in its own.
        shared_bytes: of the batches of these that are there still.
        own_count: messages in its own.
        own_bytes: of their batches.
        moved: messages that compaction has put into the log, from index 0 on.
        marker_offset: where the marker's offsets begin; 0 while it is OPEN.
        commit_ts: of the commit; 0 while it is OPEN.
        max_timestamp: the greatest of its messages, microseconds since 1970.
    """

    state: SideState = SideState.OPEN
    has_own: bool = False
    shared_count: int = 0
    shared_bytes: int = 0
    own_count: int = 0
    own_bytes: int = 0
    moved: int = 0
    marker_offset: int = 0
    commit_ts: int = 0
    max_timestamp: int = 0

    @property
    def count(self) -> int:  # type: ignore[override]  # hides tuple.count
        """Its messages."""
        return self.shared_count + self.own_count

    @property
    def end_offset(self) -> int:
        """The offset behind its messages, once it is committed."""
        return self.marker_offset + self.count

    @property
    def runs(self) -> list[SideRun]:
        """Its side batches that compaction has not put into the log."""
        left = self.shared_count - self.moved
        shared = SideRun(SHARED, self.moved, left, self.shared_bytes)
        return [shared, SideRun(OWN, self.shared_count, self.own_count, self.own_bytes)]


class SideIndex:
    """The indexes of a side log, in one LMDB transaction.

    Args:
        txn: the transaction; a write makes the databases where they are missing.
        environment: the partition's.

    Raises:
        KeyError: a read of a partition that never had a side log.
    """

    def __init__(self, txn: lmdb.Transaction, environment: Environment) -> None:
        self.txn = txn
        self._transactions = environment.db(TRANSACTIONS)
        self._by_marker = environment.db(BY_MARKER)
        self._garbage = environment.db(GARBAGE)

    def get(self, txn_id: int) -> SideTxn | None:
        """A transaction; None when nothing of it is here."""
        stored = self.txn.get(_ID.pack(txn_id), db=self._transactions)
        return None if stored is None else _unpack(stored, txn_id)

    def put(self, txn_id: int, side: SideTxn) -> None:
        """Stores a transaction."""
        self.txn.put(_ID.pack(txn_id), packed_row(side), db=self._transactions)

    def commit(self, txn_id: int, side: SideTxn) -> None:
        """Stores a committed transaction and its place in commit order."""
        self.put(txn_id, side)
        marker = _ID.pack(side.marker_offset)
        self.txn.put(marker, _ID.pack(txn_id), db=self._by_marker)

    def discard(self, txn_id: int, side: SideTxn) -> None:
        """Makes a transaction garbage, whatever it was."""
        if side.state is SideState.COMMITTED:
            self._forget_marker(side)
        self.put(txn_id, side._replace(state=SideState.GARBAGE))
        self.txn.put(_ID.pack(txn_id), b"", db=self._garbage)

    def forget(self, txn_id: int) -> None:
        """Forgets a transaction of which nothing is left."""
        side = self.get(txn_id)
        if side is not None and side.state is SideState.COMMITTED:
            self._forget_marker(side)
        self.txn.delete(_ID.pack(txn_id), db=self._transactions)
        self.txn.delete(_ID.pack(txn_id), db=self._garbage)

    def all(self) -> Iterator[tuple[int, SideTxn]]:
        """All transactions, by id. Nothing may be written meanwhile."""
        with self.txn.cursor(db=self._transactions) as cursor:
            for stored, value in cursor:
                yield _id(stored), _unpack(value, _id(stored))

    def committed(self, offset: int = 0) -> Iterator[tuple[int, int]]:
        """Marker offsets from `offset` on, each with its transaction.

        What was given may be changed meanwhile, what comes may not.
        """
        found = True
        while found:
            with self.txn.cursor(db=self._by_marker) as cursor:
                found = cursor.set_range(_ID.pack(offset))
                if found:
                    marker, txn_id = _id(cursor.key()), _id(cursor.value())
            if found:
                yield marker, txn_id
                offset = marker + 1

    def committed_before(self, offset: int) -> tuple[int, int] | None:
        """The last marker below an offset, and its transaction."""
        with self.txn.cursor(db=self._by_marker) as cursor:
            there = cursor.prev() if cursor.set_range(_ID.pack(offset)) else cursor.last()
            return (_id(cursor.key()), _id(cursor.value())) if there else None

    def garbage(self) -> int | None:
        """A transaction whose batches are to be removed; None when there is none."""
        with self.txn.cursor(db=self._garbage) as cursor:
            return _id(cursor.key()) if cursor.first() else None

    def _forget_marker(self, side: SideTxn) -> None:
        self.txn.delete(_ID.pack(side.marker_offset), db=self._by_marker)


def _id(stored: Any) -> int:
    found: int = _ID.unpack(stored)[0]
    return found


def _unpack(stored: Any, txn_id: int) -> SideTxn:
    state, has_own, *numbers = _TXN.unpack(stored)
    if state not in _STATES or has_own not in (0, 1):
        raise CorruptionError(
            f"side log: the row of transaction {txn_id} is damaged. `txnkv check` says more; "
            "restore the store from a backup"
        )
    return SideTxn(SideState(state), bool(has_own), *numbers)


OWN_BYTES = 64 << 20
"""A transaction that has more than that in a partition goes on in a side log of its own."""

declare_fault_point("side.own_written", "batches are in an own side log, they do not count yet")
declare_fault_point("side.own_renamed", "an own side log is on its way out, its files are there")

_FOLDER: Final = "side"
_REMOVED: Final = ".removed-"


class OwnLogs:
    """The own side logs of a partition.

    Args:
        environment: the partition's.
        environments: of the store.
        name: of the partition's environment.
    """

    def __init__(self, environment: Environment, environments: Environments, name: str) -> None:
        self._folder = environment.path / _FOLDER
        self._environments = environments
        self._name = f"{name}/{_FOLDER}"

    def put(
        self, txn_id: int, index: int, batches: Sequence[bytes], *, begun: bool = False
    ) -> None:
        """Puts batches from an index on; durable when it returns.

        Args:
            txn_id: of the transaction.
            index: of the first message.
            batches: of the transaction.
            begun: what is before the index counts already; else the log is made if need be.

        Raises:
            CorruptionError: what is before the index is not there; nothing was put.
        """
        if not is_there(self._folder) and not begun:
            make_private_directory(self._folder)
            sync_directory(self._folder.parent)

        def put(txn: lmdb.Transaction) -> None:
            chunks = SideChunks(txn, own.db(SIDE))
            if begun and chunks.end(txn_id) < index:
                raise self.lost(txn_id)
            chunks.put(txn_id, index, batches)

        try:
            own = self._environments.get(f"{self._name}/{txn_id}", create=not begun)
            own.write(put)
        except StoreNotFoundError:
            raise self.lost(txn_id) from None
        fault_point("side.own_written")

    def read(
        self, txn_id: int, index: int, upto: int, max_bytes: int, offset: int, commit_ts: int
    ) -> list[bytes]:
        """Copies of the batches of [index, upto), placed; at least one, until so many bytes.

        Args:
            txn_id: of the transaction.
            index: of the first message.
            upto: the index to stop at.
            max_bytes: to stop after.
            offset: of the transaction's message of index 0.
            commit_ts: of the commit.

        Raises:
            UnavailableError: the log was dropped after the marker was read; read anew.
            CorruptionError: a part of it is missing.
        """
        found: list[bytes] = []
        try:
            own = self._environments.get(f"{self._name}/{txn_id}", create=False)
            with own.read() as txn:
                for at, chunk in SideChunks(txn, own.db(SIDE)).read(txn_id, index, upto):
                    found.append(place(chunk, offset + at, commit_ts))
                    max_bytes -= len(chunk)
                    if max_bytes <= 0:
                        break
        except KeyError:
            raise self.lost(txn_id) from None  # it was made anew, empty
        except (StoreNotFoundError, ClosedError) as error:
            raise UnavailableError(
                f"the side log of transaction {txn_id} in {self._folder} was dropped while a "
                "reader was on its way to it: retention, or a truncation, took it; read anew"
            ) from error
        return found

    def environment(self, txn_id: int) -> Environment:
        """The environment of one that counts.

        Raises:
            CorruptionError: it is gone.
        """
        try:
            return self._environments.get(f"{self._name}/{txn_id}", create=False)
        except StoreNotFoundError:
            raise self.lost(txn_id) from None

    def lost(self, txn_id: int) -> CorruptionError:
        """The error for one that is gone, or of an earlier time.

        Raises:
            StoreNotFoundError: so is the store.
        """
        self._environments.require_there()
        return CorruptionError(
            f"the side log of transaction {txn_id} in {self._folder} is gone, or of an earlier "
            "time. What it held is not made up for. Restore it as it was last"
        )

    def names(self) -> list[int]:
        """The transactions that have one."""
        return list(_names(self._folder))

    def drop(self, txn_id: int) -> None:
        """Removes one with its files; twice is fine. Waits for readers of this process."""
        self._environments.drop(f"{self._name}/{txn_id}")
        folder = self._folder / str(txn_id)
        aside = folder.with_name(f"{_REMOVED}{txn_id}-{uuid.uuid4().hex}")
        try:
            folder.rename(aside)
        except FileNotFoundError:
            return
        sync_directory(self._folder)
        fault_point("side.own_renamed")
        shutil.rmtree(aside, ignore_errors=True)

    def remove_left(self) -> None:
        """Removes what somebody who died had begun to remove."""
        left = self._folder.glob(f"{_REMOVED}*") if is_there(self._folder) else ()
        for each in left:
            shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        """Closes all in this process for good, before the files of the partition go."""
        close_all(self._environments, self._folder.parent, self._name.removesuffix(f"/{_FOLDER}"))


def close_all(environments: Environments, folder: Path, name: str) -> None:
    """Closes the own side logs of a partition in this process for good.

    Args:
        environments: of the store.
        folder: of the partition.
        name: of its environment.
    """
    for txn_id in _names(folder / _FOLDER):
        environments.drop(f"{name}/{_FOLDER}/{txn_id}")


def _names(folder: Path) -> set[int]:
    return numbers_in(folder) if is_there(folder) else set()
