"""Staged files: the batches that one session of a task's attempt has sent, and how much counts.

An attempt's messages count only if its job is committed with the attempt's name, so they stay out
of the logs until then: in a plain file, as record batches that lack nothing but their offsets.

    +--------+---------+---------+---------+---------+---
    | header | frame   | batches | frame   | batches |      one file, of all topics and partitions
    +--------+---------+---------+---------+---------+---
                                 ^ what counts ends here, or further on: status.db says where

What stands behind that was being written when its writer failed or died. Nothing is synced:
a machine that dies takes the job with it, and status.db knows in which boot a file was written.

Byte by byte, little-endian (docs/format-topics.md):

    header   magic "txnkvsnd" | u32 crc | u32 version, 1 | u64 id | u64 transaction
    frame    u32 crc | u32 zero | u64 partition | u64 bytes of batches that follow
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import apsw

from txnkv.coordinator import jobs, status_table
from txnkv.core import CoreError, check_batch, crc32c, walk
from txnkv.errors import CorruptionError, TxnkvError, UnavailableError
from txnkv.storage import FULL_ERRNOS, boot_id, make_private_directory, opened, storage_full

KIND: Final = "staged"
"""The kind of the participant that has a transaction's files removed at an abort; its id is 0."""

_COLUMNS: Final = "id, txn_id, job_id, attempt, bytes, boot"


class StagedFile(NamedTuple):
    """A row of `staged_sends`.

    Attributes:
        id: names the file.
        txn_id: of the transaction.
        job_id: of the job.
        attempt: as row sets name it: job and attempt.
        bytes: at the beginning of the file, that count.
        boot: in which it was written.
    """

    id: int
    txn_id: int
    job_id: str
    attempt: str
    bytes: int
    boot: str


def register(cur: apsw.Cursor, txn_id: int, job_id: str, attempt: str) -> StagedFile:
    """Note a new file, of which nothing counts yet.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: the transaction is not OPEN, or its job ended.
    """
    require_running(cur, txn_id, job_id)
    status_table.register_participant(cur, txn_id, KIND, [0])
    boot = boot_id()
    cur.execute(
        "INSERT INTO staged_sends (txn_id, job_id, attempt, boot) VALUES (?, ?, ?, ?)",
        (txn_id, job_id, attempt, boot),
    )
    return StagedFile(cur.connection.last_insert_rowid(), txn_id, job_id, attempt, 0, boot)


def count_upto(cur: apsw.Cursor, file: StagedFile, upto: int) -> None:
    """From now on so many bytes of the file count.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: as for `register`.
    """
    require_running(cur, file.txn_id, file.job_id)
    cur.execute("UPDATE staged_sends SET bytes = ? WHERE id = ?", (upto, file.id))


def require_running(cur: apsw.Cursor, txn_id: int, job_id: str) -> None:
    """Refuse a session that comes too late.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: the transaction is not OPEN, or its job ended.
    """
    status_table.get_open(cur, txn_id, "send messages")
    jobs.require_running(cur, txn_id, job_id)


def of_attempts(cur: apsw.Cursor, txn_id: int, attempts: Sequence[str]) -> list[StagedFile]:
    """Files of which something counts: by attempt in this order, then as they were begun."""
    if not attempts or not _any(cur, txn_id):
        return []
    found: dict[str, list[StagedFile]] = {}
    for file in _select(cur, "txn_id = ? AND bytes > 0", (txn_id,)):
        found.setdefault(file.attempt, []).append(file)
    return [file for attempt in attempts for file in found.get(attempt, ())]


def of_job(cur: apsw.Cursor, txn_id: int, job_id: str) -> list[StagedFile]:
    return _select(cur, "txn_id = ? AND job_id = ?", (txn_id, job_id))


def of_transaction(cur: apsw.Cursor, txn_id: int) -> list[StagedFile]:
    return _select(cur, "txn_id = ?", (txn_id,))


def all_files(cur: apsw.Cursor) -> list[StagedFile]:
    return _select(cur, "1", ())


def wanted_files(cur: apsw.Cursor) -> list[StagedFile]:
    """Those whose job may still take them: all others are garbage, and stay so."""
    return _select(
        cur,
        "EXISTS (SELECT 1 FROM jobs WHERE jobs.id = job_id AND jobs.state IN (?, ?)) AND "
        "EXISTS (SELECT 1 FROM transactions t WHERE t.txn_id = staged_sends.txn_id "
        "AND t.state NOT IN (2, 4))",
        (jobs.RUNNING, jobs.ENDING),
    )


def forget(cur: apsw.Cursor, files: Iterable[StagedFile]) -> None:
    """Forget files that are gone; with the last one the transaction's participant."""
    gone = list(files)
    cur.executemany("DELETE FROM staged_sends WHERE id = ?", [(file.id,) for file in gone])
    for txn_id in {file.txn_id for file in gone}:
        if not _any(cur, txn_id):
            cur.execute("DELETE FROM participants WHERE txn_id = ? AND kind = ?", (txn_id, KIND))


def _any(cur: apsw.Cursor, txn_id: int) -> bool:
    found = cur.execute("SELECT 1 FROM staged_sends WHERE txn_id = ? LIMIT 1", (txn_id,))
    return found.fetchone() is not None


def _select(cur: apsw.Cursor, where: str, bindings: tuple[object, ...]) -> list[StagedFile]:
    found = cur.execute(f"SELECT {_COLUMNS} FROM staged_sends WHERE {where} ORDER BY id", bindings)
    return [StagedFile(*row) for row in found]


MAGIC: Final = b"txnkvsnd"
VERSION: Final = 1
_CRC: Final = struct.Struct("<I")
_REST: Final = struct.Struct("<IQQ")
HEADER_BYTES: Final = len(MAGIC) + _CRC.size + _REST.size
FRAME_BYTES: Final = _CRC.size + _REST.size
_MOST_BUFFERS: Final = 512
"""Buffers of one call, at most; systems admit 1,024."""


class Frame(NamedTuple):
    """Batches of one partition within a file.

    Attributes:
        partition_id: whose.
        at: where the batches begin.
        bytes: how long they are.
    """

    partition_id: int
    at: int
    bytes: int

    @property
    def begin(self) -> int:
        """The byte at which the frame itself begins."""
        return self.at - FRAME_BYTES


# -- writing ---------------------------------------------------------------------------


def create(path: Path, file: StagedFile) -> int:
    """Make a file with nothing in it, and its folder; where its first frame comes.

    Raises:
        StorageFullError: no room. There is no file.
    """
    header = MAGIC + _sealed(VERSION, file.id, file.txn_id)
    try:
        make_private_directory(path.parent)
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            _write(descriptor, 0, [header])
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _translated(error, path) from error
    return HEADER_BYTES


def extend(path: Path, at: int, lots: Sequence[tuple[int, Sequence[bytes]]]) -> int:
    """Write frames from byte `at` on; where the next one comes.

    Args:
        path: of the file.
        at: where what counts ends.
        lots: partition ids, and batches for each.

    Raises:
        FileNotFoundError: somebody has removed it.
        StorageFullError: no room; the file ends at `at`.
        UnavailableError: the disk failed.
    """
    buffers: list[bytes] = []
    for partition_id, batches in lots:
        buffers.append(_sealed(0, partition_id, sum(map(len, batches))))
        buffers += batches
    try:
        with opened(path, os.O_WRONLY) as descriptor:
            try:
                return _write(descriptor, at, buffers)
            except OSError:
                os.ftruncate(descriptor, at)
                raise
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _translated(error, path) from error


def _sealed(first: int, second: int, third: int) -> bytes:
    rest = _REST.pack(first, second, third)
    return _CRC.pack(crc32c(rest)) + rest


def _write(descriptor: int, at: int, buffers: Sequence[bytes]) -> int:
    for lo in range(0, len(buffers), _MOST_BUFFERS):
        some = [memoryview(buffer) for buffer in buffers[lo : lo + _MOST_BUFFERS]]
        while some:
            written = os.pwritev(descriptor, some, at)
            at += written
            while some and written >= len(some[0]):
                written -= len(some.pop(0))
            if some:
                some[0] = some[0][written:]
    return at


def _translated(error: OSError, path: Path) -> TxnkvError:
    if error.errno in FULL_ERRNOS:
        return storage_full(path, error.errno or errno.ENOSPC)
    return UnavailableError(f"{path} failed: {error}. Nothing of this write counts; try again")


# -- reading ---------------------------------------------------------------------------


def frames(path: Path, file: StagedFile) -> list[Frame]:
    """List the frames of a file that count, in their order; `read` looks at the batches themselves.

    Raises:
        CorruptionError: the file is missing, is shorter than what counts, or is damaged.
    """
    try:
        with opened(path, os.O_RDONLY) as descriptor:
            size = os.fstat(descriptor).st_size
            if size < file.bytes:
                raise _damaged(path, file, f"it has {size:,} bytes, of {file.bytes:,} that count")
            header = os.pread(descriptor, HEADER_BYTES, 0)
            if header != MAGIC + _sealed(VERSION, file.id, file.txn_id):
                raise _damaged(path, file, "its header is that of another file, or damaged")
            return _frames(descriptor, path, file)
    except FileNotFoundError:
        raise missing(path, file) from None


def _frames(descriptor: int, path: Path, file: StagedFile) -> list[Frame]:
    found = []
    at = HEADER_BYTES
    while at < file.bytes:
        head = os.pread(descriptor, FRAME_BYTES, at)
        _, partition_id, length = _REST.unpack_from(head.ljust(FRAME_BYTES, b"\0"), _CRC.size)
        at += FRAME_BYTES
        if head != _sealed(0, partition_id, length) or at + length > file.bytes:
            raise _damaged(path, file, f"the frame at byte {at - FRAME_BYTES} is damaged")
        found.append(Frame(partition_id, at, length))
        at += length
    return found


def read(
    path: Path, file: StagedFile, wanted: Sequence[Frame], memory: memoryview
) -> list[tuple[memoryview, int]]:
    """The batches of some frames, looked at by their checksums.

    Args:
        path: of the file.
        file: as status.db has it.
        wanted: the frames.
        memory: takes the batches; as long as they are.

    Returns:
        For each frame its part of the memory, and how many messages, or pieces of large ones, are
        in it.

    Raises:
        CorruptionError: the file is missing, cut off or damaged.
        UnavailableError: the disk failed.
    """
    found = []
    try:
        with opened(path, os.O_RDONLY) as descriptor:
            for frame in wanted:
                part, memory = memory[: frame.bytes], memory[frame.bytes :]
                if os.preadv(descriptor, [part], frame.at) != frame.bytes:
                    raise _damaged(path, file, f"it ends in the frame at byte {frame.begin}")
                found.append((part, _count(path, file, frame, part)))
    except FileNotFoundError:
        raise missing(path, file) from None
    except OSError as error:
        raise UnavailableError(f"{path} failed: {error}. Try again") from error
    return found


def _count(path: Path, file: StagedFile, frame: Frame, data: memoryview) -> int:
    count = 0
    try:
        for at, header in walk(data):
            check_batch(data, at)
            if header.txn_id != file.txn_id or header.is_control:
                raise CoreError(f"a batch there is of transaction {header.txn_id}")
            count += header.count
    except CoreError as error:
        raise _damaged(path, file, f"in the frame at byte {frame.begin}: {error}") from None
    return count


def require_boot(file: StagedFile) -> None:
    """Refuse a file of which the machine may have kept a part.

    Raises:
        CorruptionError: the machine was started anew since it was begun.
    """
    if file.boot != boot_id():
        raise CorruptionError(
            f"what attempt {file.attempt} of transaction {file.txn_id} has sent was in a file that "
            "is not synced, and the machine was started anew since: it may be lost. Roll the "
            "transaction back and run the job again"
        )


def missing(path: Path, file: StagedFile) -> CorruptionError:
    """The error for a file that should be there."""
    return _damaged(path, file, "it is missing")


def _damaged(path: Path, file: StagedFile, what: str) -> CorruptionError:
    return CorruptionError(
        f"staged file {path} of attempt {file.attempt} (transaction {file.txn_id}): {what}. What "
        "this attempt has sent is lost: roll the transaction back and run the job again"
    )
