"""LMDB files as the disk has them: how far each was written, and room that is given back.

**Extents** are kept in status.db so that a loss is seen. A file says nothing of what it lost: an
older copy is as sound as any, and one that is gone would be made anew, empty. So status.db has, for
each environment, which file it is and how far it was written durably:

    write to LMDB               transaction 41 is durable      noted in this process: 41
    any write to status.db      a row says 41, in the same SQLite transaction
    opened                      the file is at 41 or above     well
                                below 41, another one, gone    CorruptionError

What is noted has returned from LMDB's commit, so that a row is never ahead of the disk, whatever is
killed or loses its power. It may be behind, by what a process wrote last before it was killed. No
write is made for it where somebody waits; what no other write took along, maintenance records.

A file is told by an identity that is drawn when it is made. LMDB counts its transactions, and a
copy without free pages begins at 1 again; the base that it is given makes up for that:

    mark, in the main database      identity (16 bytes) | base (i64)
    written                         base + number of LMDB's last transaction

A file from before version 6 has no mark: its identity is zeros, its base 0.

**Holes** take the place of free pages while processes use the file. LMDB uses pages again but never
makes its file shorter, so that a file keeps the size of its worst moment. A page that LMDB calls
free, and that no reader sees any more, is overwritten by whichever writer comes next; whoever has
the write lock is that writer, and may as well leave a hole there. To LMDB it is a transaction that
wrote to free pages and was never committed, which it expects of every process that dies. The file
is as long as before; the disk has the room.

    two meta pages     the younger one: number of the last transaction, last page, root of the
                       tree of free pages (database 0)
    that tree          number of a transaction -> count, pages that it freed (u64 each)

LMDB's rule for who may take a page (`mdb_page_alloc`, `mdb_find_oldest`): it was freed by a
transaction older than the last one and than all that are read. Where nothing is written after a
large delete, a write that changes nothing makes another one the last. A hole costs the next writer
of that page a new block of the disk, so some free pages stay as they are: those that LMDB takes
first, with the lowest numbers. Whatever is not as expected here leaves the file alone.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import apsw
import lmdb

from txnkv.core import punch_hole
from txnkv.errors import CorruptionError
from txnkv.storage.directory import opened
from txnkv.storage.faults import declare_fault_point, fault_point, is_there, with_descriptor
from txnkv.storage.locks import new_lock
from txnkv.storage.write_queue import BusyError

SCHEMA: Final = """
CREATE TABLE extents (                  -- of LMDB environments
    name        TEXT    PRIMARY KEY,    -- "tablets/12", "logs/3"
    identity    BLOB    NOT NULL,       -- of the file
    written     INTEGER NOT NULL,       -- durably; the file may be further
    held        INTEGER NOT NULL DEFAULT 0  -- 1: damaged, nothing that is written counts
) WITHOUT ROWID;
"""

_MARK: Final = b"txnkv"
_FORM: Final = struct.Struct("<16sq")
_NOBODY: Final = bytes(16)


class Extent(NamedTuple):
    """Which file it is, and how far it was written."""

    identity: bytes
    written: int


def new_identity() -> bytes:
    """That of no other file."""
    return os.urandom(16)


def read_mark(env: Any) -> tuple[bytes, int]:
    """The identity and the base of an `lmdb.Environment`."""
    with env.begin() as txn:
        found = txn.get(_MARK)
    if found is None:
        return _NOBODY, 0
    if len(found) != _FORM.size:
        return found, 0  # of no file
    identity, base = _FORM.unpack(found)
    return identity, base


def read_extent(env: Any) -> Extent:
    """Read from its file how far an `lmdb.Environment` was written."""
    identity, base = read_mark(env)
    return Extent(identity, base + int(env.info()["last_txnid"]))


def write_mark(env: Any, extent: Extent) -> None:
    """Have an `lmdb.Environment` that is used by nobody else be written so far."""
    with env.begin(write=True) as txn:
        put_mark(txn, extent)


def put_mark(txn: Any, extent: Extent) -> None:
    """Put the mark that `write_mark` writes, in a write transaction that has begun."""
    txn.put(_MARK, _FORM.pack(extent.identity, extent.written - txn.id()))


def copy(env: Any, folder: Path, map_size: int) -> None:
    """Copy an `lmdb.Environment` without free pages; how far it was written is kept. Not synced.

    Args:
        env: what is written to it meanwhile may be in the copy, and is not counted.
        folder: there and empty.
        map_size: address space to map the copy with.
    """
    extent = read_extent(env)
    with_descriptor(env.copy, str(folder), compact=True)
    with opened(folder / "data.mdb", os.O_RDWR | os.O_CREAT):  # LMDB asks the umask
        pass
    how = {"lock": False, "sync": False, "create": False}
    copied = with_descriptor(lambda: lmdb.open(str(folder), map_size=map_size, **how))
    try:
        write_mark(copied, extent)
    finally:
        copied.close()


class Status(Protocol):
    """The status database, as far as extents need it."""

    def read(self, *, durable: bool = True) -> AbstractContextManager[apsw.Cursor]:
        """Begin a read."""

    def write(self, *, sync: bool, wait: bool) -> AbstractContextManager[apsw.Cursor]:
        """Begin a write."""


class Extents:
    """The extents of a store's environments in this process. Shared by threads.

    They are kept from `keep` on; before that all is allowed.

    Attributes:
        noted: what `record` is to put into the next write.
        require_there: refuses a store that was removed, moved or replaced: none of its files is
            where it was; see `Store.require_there`.
    """

    def __init__(self, status: Status) -> None:
        self.require_there: Callable[[], None] = lambda: None
        self._status = status
        self._kept = False
        self._lock = new_lock()
        self.noted: dict[str, Extent] = {}

    def keep(self) -> None:
        """Status.db has the table."""
        self._kept = True

    def required(self, name: str) -> Extent | None:
        """Return how far an environment was written at least; None: nobody wrote to it."""
        if not self._kept:
            return None
        # It was durable before it was there to be seen.
        with self._status.read(durable=False) as cur:
            return find(cur, name)

    def note(self, name: str, extent: Extent) -> None:
        """A commit of this process to an environment is durable."""
        if self._kept:
            with self._lock:
                known = self.noted.get(name)
                if known is None or known < extent or known.identity != extent.identity:
                    self.noted[name] = extent

    def discard(self, name: str) -> None:
        """An environment is on its way out."""
        with self._lock:
            self.noted.pop(name, None)

    def record(self, connection: apsw.Connection) -> list[tuple[str, Extent]]:
        """Put what was noted into a write of status.db that is about to commit; `recorded` after.

        One of another identity is left: it was given up, or is gone.
        """
        with self._lock:
            taken = list(self.noted.items())
        connection.executemany(
            "INSERT INTO extents (name, identity, written) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET written = excluded.written "
            "WHERE identity = excluded.identity AND written < excluded.written AND NOT held",
            [(name, *extent) for name, extent in taken],
        )
        return taken

    def recorded(self, taken: Iterable[tuple[str, Extent]]) -> None:
        """They are committed."""
        with self._lock:
            for name, extent in taken:
                if self.noted.get(name) == extent:
                    del self.noted[name]

    def record_rest(self) -> None:
        """Record what no write took along. Waits for nobody."""
        if self.noted:
            with suppress(BusyError), self._status.write(sync=False, wait=False):
                pass


def giving_up(part: str) -> str:
    """The end of a message about damage: what to do where there is no backup.

    Args:
        part: as people name it to `txnkv repair`, which takes none of an index.
    """
    if is_index := re.fullmatch(r"table:(.*) \(index by (.*)\)/\d+", part):
        index = f"STORE {shlex.quote(is_index[1])} {shlex.quote(is_index[2].replace(', ', ','))}"
        return (
            "make the index anew, with --unique if it was: "
            f"txnkv index drop {index}, then txnkv index create {index}"
        )
    return f"give up what is lost: txnkv repair STORE --accept-loss {shlex.quote(part)}"


class Tracked:
    """An environment whose extent is kept.

    Args:
        extents: of the store.
        name: in status.db.
        label: as messages to people name it.
        part: as people name it to `txnkv repair`.
    """

    def __init__(self, extents: Extents, name: str, label: str, part: str) -> None:
        self._extents = extents
        self._name = name
        self.label = label or name
        self._advice = (
            ". What it held was committed, and is not made up for. Restore the file as it was "
            f"last, or {giving_up(part or 'PART')}"
        )

    def required(self) -> Extent | None:
        """Return how far this environment was written at least; see `Extents.required`."""
        return self._extents.required(self._name)

    def note(self, extent: Extent) -> None:
        """Note a durable commit of this process to this environment; see `Extents.note`."""
        self._extents.note(self._name, extent)

    def gone(self, path: Path) -> CorruptionError:
        """The error for a file that is not there, or is empty.

        Raises:
            StoreNotFoundError: nor is the store.
        """
        self._extents.require_there()
        return CorruptionError(f"{self.label}: {path / 'data.mdb'} is gone or empty{self._advice}")

    def refuse(self, path: Path, found: Extent, required: Extent) -> None:
        """Refuse a file that lacks what was written.

        Raises:
            CorruptionError: it is another one, or of an earlier time.
            StoreNotFoundError: it is of another store, or another copy of it, that stands there.
        """
        file = path / "data.mdb"
        if found.identity != required.identity or found.written < required.written:
            self._extents.require_there()
        if found.identity != required.identity:
            raise CorruptionError(
                f"{self.label}: {file} is not the file that was there{self._advice}"
            )
        if found.written < required.written:
            raise CorruptionError(
                f"{self.label}: {file} is of an earlier time, it ends with write {found.written} "
                f"and status.db knows of {required.written}{self._advice}"
            )


def find(cur: apsw.Cursor, name: str) -> Extent | None:
    """Return how far an environment was written by status.db; None: it knows of no write."""
    found = cur.execute("SELECT identity, written FROM extents WHERE name = ?", (name,)).fetchone()
    return None if found is None else Extent(*found)


def forget(cur: apsw.Cursor, names: Iterable[str]) -> None:
    """Environments are on their way out; their files may go from now on."""
    cur.executemany("DELETE FROM extents WHERE name = ?", [(name,) for name in names])


def replace(cur: apsw.Cursor, name: str, extent: Extent) -> None:
    """Another file takes the place of an environment's."""
    cur.execute(
        "INSERT OR REPLACE INTO extents (name, identity, written) VALUES (?, ?, ?)",
        (name, *extent),
    )


def hold(cur: apsw.Cursor, names: Iterable[str]) -> None:
    """Have exactly these stay as they are: they are damaged and take no writes. So one that is
    restored as it was before does, whatever was tried on the damaged one.
    """
    cur.execute("UPDATE extents SET held = 0 WHERE held")
    cur.executemany("UPDATE extents SET held = 1 WHERE name = ?", [(name,) for name in names])


def strays(cur: apsw.Cursor, folder: str, known: Collection[int]) -> set[int]:
    """Ids of environments in a folder that are of nothing that is known."""
    names = [name.split("/") for (name,) in cur.execute("SELECT name FROM extents")]
    return {int(id) for parent, id in names if parent == folder} - set(known)


def expect_files(cur: apsw.Cursor, path: Path) -> None:
    """Expect the files of an older store to be there from now on.

    Args:
        cur: of a write.
        path: of the store.
    """
    names = [
        f"{folder}/{entry.name}"
        for folder in ("tablets", "logs")
        for entry in (path / folder).iterdir()
        if entry.name.isdigit() and is_there(entry / "data.mdb")
    ]
    cur.executemany(
        "INSERT INTO extents (name, identity, written) VALUES (?, ?, 0) "
        "ON CONFLICT (name) DO NOTHING",
        [(name, _NOBODY) for name in names],
    )


# -- holes -----------------------------------------------------------------------------

declare_fault_point("holes.made", "some free pages of an LMDB file are holes, others not yet")
declare_fault_point("holes.awaited", "a write was made so that more free pages may be holes")

LEAST_FREE_BYTES: Final = 4 << 20
"""Bytes of free pages that a file keeps, beside a part of what is in use."""

_HOLE_BYTES: Final = 256 << 10
"""Bytes of the largest hole that is made at once."""

_LMDB_MAGIC: Final = 0xBEEFC0DE
_META: Final = struct.Struct("<16x I I 16x I 4x 32x Q 48x Q Q")
"""Magic, version, page bytes, root of the free pages, last page, number of the transaction."""
_HEAD: Final = struct.Struct("<Q 2x H H H")
"""Head of a page: its number, flags, end of the places of nodes, begin of the nodes."""
_NODE: Final = struct.Struct("<H H H H")
"""Low and high half of the size of its data (or of a page below), flags, bytes of its key."""
_BRANCH, _LEAF, _OVERFLOW, _KIND = 1, 2, 4, 7
_BIG: Final = 1
_WORD: Final = struct.Struct("<Q")
_NO_ROOT: Final = (1 << 64) - 1
_DEPTH: Final = 32


class _UnexpectedError(Exception):
    """The file is not as it should be; LMDB will say so where it matters."""


@dataclass(frozen=True)
class _Meta:
    page_bytes: int
    root: int
    last_page: int
    number: int


def numbers_read(env: Any) -> Iterator[int]:
    """Numbers of the transactions that are read, by all processes."""
    for line in env.readers().splitlines()[1:]:
        number = line.split()[-1]
        if number.isdecimal():  # else the slot is idle
            yield int(number)


def frees_left_slots(env: Any) -> bool:
    """Free the slots of readers that a killed process of the same pid has left, as one of a
    container that was started again. LMDB takes them for this process's, as others take them, and
    frees them as such: at the end, up to the last that was there when it took one. A process of the
    same pid that lives is in the way of that: it has the lock that the first read takes.

    Args:
        env: just opened, and used by nobody: no slot is this process's.

    Returns:
        True when there were some; `env` is closed then.
    """
    if not any(int(line.split()[0]) == os.getpid() for line in env.readers().splitlines()[1:]):
        return False
    env.reader_check()  # those of other dead processes may have taken all
    with closing(env), env.begin():
        return True


class Holes(NamedTuple):
    """The result of `make_holes`: bytes that the disk has again, and whether free pages that are
    held back, by the last transaction or by what is read, are what it still lacks.
    """

    given: int = 0
    waits: bool = False


def make_holes(
    descriptor: int, writer: int, read: Iterable[int], go_on: Callable[[], bool]
) -> Holes:
    """Make holes of free pages where a file has more of them than it should keep.

    Args:
        descriptor: of data.mdb, to read and write. The caller has LMDB's write lock.
        writer: number of the caller's write transaction, which has written nothing.
        read: the numbers of what is read.
        go_on: asked after each hole that gave something.

    Raises:
        OSError: the file system makes no holes (EOPNOTSUPP), or the disk failed.
    """
    before = _allocated(descriptor)
    if before <= LEAST_FREE_BYTES or sys.byteorder != "little":
        return Holes()
    try:
        meta, lists, kept = _free_pages(descriptor, writer - 1)
        _require((meta.last_page + 1) * meta.page_bytes <= os.fstat(descriptor).st_size)
        free = sum(len(pages) for _, pages in lists)
        used = (meta.last_page + 1 - free) * meta.page_bytes
        most = 2 * (used + LEAST_FREE_BYTES)
        if before <= most:
            return Holes()
        oldest = min([writer - 1, *read])
        runs = _runs(each for number, each in lists if number < oldest)
        _require(all(1 < first <= first + count - 1 <= meta.last_page for first, count in runs))
        _require(not any(_has(runs, page) for page in kept))
    except (_UnexpectedError, struct.error, ValueError):
        return Holes()
    enough = used + used // 2 + LEAST_FREE_BYTES
    for first, count in _pieces_from_the_end(runs, _HOLE_BYTES // meta.page_bytes):
        punch_hole(descriptor, first * meta.page_bytes, count * meta.page_bytes)
        fault_point("holes.made")
        now = _allocated(descriptor)
        if now <= enough or (now < before and not go_on()):  # else it was a hole before
            return Holes(before - now)
    now = _allocated(descriptor)
    held = sum(len(pages) for number, pages in lists if number >= oldest) * meta.page_bytes
    return Holes(before - now, now - held <= most < now)


def is_cut_off(descriptor: int) -> bool:
    """Return True when the file of a descriptor lacks pages that are in use: free ones at its end
    LMDB may leave unwritten.
    """
    try:
        last = _last_meta(descriptor)
        _, lists, _ = _free_pages(descriptor, last.number)
    except (_UnexpectedError, struct.error, ValueError):
        return True
    first = os.fstat(descriptor).st_size // last.page_bytes
    free = sum(first <= page <= last.last_page for _, pages in lists for page in pages)
    return free < last.last_page + 1 - first


def _allocated(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def _free_pages(
    descriptor: int, number: int
) -> tuple[_Meta, list[tuple[int, memoryview]], set[int]]:
    """Return the last meta page, the lists of free pages with who freed them, and the pages that
    the lists take themselves.
    """
    meta = _last_meta(descriptor)
    _require(meta.number == number)
    lists: list[tuple[int, memoryview]] = []
    kept: set[int] = set()
    if meta.root != _NO_ROOT:
        _walk(descriptor, meta, meta.root, lists, kept, _DEPTH)
    return meta, lists, kept


def _last_meta(descriptor: int) -> _Meta:
    first = _meta(descriptor, 0)
    second = _meta(descriptor, first.page_bytes)
    return max(first, second, key=lambda each: each.number)


def _meta(descriptor: int, at: int) -> _Meta:
    magic, version, page_bytes, *rest = _META.unpack(os.pread(descriptor, _META.size, at))
    _require((magic, version) == (_LMDB_MAGIC, 1) and page_bytes in (1 << n for n in range(9, 17)))
    return _Meta(page_bytes, *rest)


def _walk(
    descriptor: int,
    meta: _Meta,
    page: int,
    lists: list[tuple[int, memoryview]],
    kept: set[int],
    depth: int,
) -> None:
    data = _pages(descriptor, meta, page, 1, kept)
    number, flags, lower, _ = _HEAD.unpack_from(data)
    _require(number == page and depth > 0 and flags & _KIND in (_BRANCH, _LEAF))
    for (place,) in struct.iter_unpack("<H", data[_HEAD.size : lower]):
        low, high, more, key_bytes = _NODE.unpack_from(data, place)
        if flags & _BRANCH:
            below = low | high << 16 | more << 32
            _walk(descriptor, meta, below, lists, kept, depth - 1)
            continue
        _require(key_bytes == _WORD.size)
        (freed_by,) = _WORD.unpack_from(data, place + _NODE.size)
        value = data[place + _NODE.size + key_bytes :]
        if more & _BIG:
            (first,) = _WORD.unpack_from(value)
            value = _big(descriptor, meta, first, low | high << 16, kept)
        lists.append((freed_by, _list(value)))


def _big(descriptor: int, meta: _Meta, page: int, size: int, kept: set[int]) -> memoryview:
    count = -(-(_HEAD.size + size) // meta.page_bytes)
    data = _pages(descriptor, meta, page, count, kept)
    number, flags, low, high = _HEAD.unpack_from(data)
    _require(number == page and flags & _KIND == _OVERFLOW and low | high << 16 == count)
    return data[_HEAD.size :]


def _pages(descriptor: int, meta: _Meta, page: int, count: int, kept: set[int]) -> memoryview:
    _require(page > 1 and page + count - 1 <= meta.last_page)
    _require(kept.isdisjoint(range(page, page + count)))
    kept.update(range(page, page + count))
    data = os.pread(descriptor, count * meta.page_bytes, page * meta.page_bytes)
    _require(len(data) == count * meta.page_bytes)
    return memoryview(data)


def _list(value: memoryview) -> memoryview:
    (count,) = _WORD.unpack_from(value)
    pages = value[_WORD.size : _WORD.size * (1 + count)]
    _require(len(pages) == _WORD.size * count)
    return pages.cast("Q")


def _runs(lists: Iterable[memoryview]) -> list[tuple[int, int]]:
    """First page and count of each run of free pages, ascending."""
    ascending = sorted(chain.from_iterable(lists))
    gaps = [at for at, (one, next_) in enumerate(pairwise(ascending), 1) if next_ != one + 1]
    ends = [*gaps, len(ascending)] if ascending else []
    runs = [(ascending[begin], end - begin) for begin, end in zip([0, *gaps], ends, strict=False)]
    _require(all(first + count < second for (first, count), (second, _) in pairwise(runs)))
    return runs


def _pieces_from_the_end(runs: list[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    for first, count in reversed(runs):
        for end in range(first + count, first, -most):
            begin = max(first, end - most)
            yield begin, end - begin


def _has(runs: list[tuple[int, int]], page: int) -> bool:
    at = bisect_right(runs, (page, _NO_ROOT)) - 1
    return at >= 0 and page < sum(runs[at])


def _require(well: bool) -> None:
    if not well:
        raise _UnexpectedError
