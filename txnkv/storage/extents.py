"""Extents: how far each LMDB environment was written, kept in status.db so that a loss is seen.

A file says nothing of what it lost: an older copy is as sound as any, and one that is gone would be
made anew, empty. So status.db has, for each environment, which file it is and how far it was
written durably:

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
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import apsw
import lmdb

from txnkv.errors import CorruptionError
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
    env.copy(str(folder), compact=True)
    copied = lmdb.open(str(folder), lock=False, sync=False, map_size=map_size, create=False)
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
            found = cur.execute(
                "SELECT identity, written FROM extents WHERE name = ?", (name,)
            ).fetchone()
        return None if found is None else Extent(*found)

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
            f"last, or give up what is lost: txnkv repair STORE --accept-loss {part or 'PART'}"
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
        if entry.name.isdigit() and (entry / "data.mdb").exists()
    ]
    cur.executemany(
        "INSERT INTO extents (name, identity, written) VALUES (?, ?, 0) "
        "ON CONFLICT (name) DO NOTHING",
        [(name, _NOBODY) for name in names],
    )
