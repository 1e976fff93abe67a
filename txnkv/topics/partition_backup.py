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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import apsw
import lmdb

from txnkv.core import CoreError, intact
from txnkv.errors import CorruptionError
from txnkv.storage import (
    Backup,
    BackupWriter,
    EntryFile,
    Environments,
    StaleHandleError,
    each_between,
    make_private_directory,
    put_entries,
)
from txnkv.topics import topic_catalog
from txnkv.topics.log import DATABASES, KEY, LOG, LogOptions, PartitionLog, Segment, position_of
from txnkv.topics.sidecar import (
    OWN_DATABASE,
    SIDE,
    SideLogs,
    committed_rows,
    put_chunks,
    put_rows,
)
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
            "lists all damage; restore the store from an earlier backup, or give up what is lost: "
            f"txnkv repair STORE --accept-loss {self._partition.part}"
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
