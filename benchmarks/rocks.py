"""RocksDB through rocksdict when that is installed, and through its C library when that is.

Both are asked, since rocksdict keeps the GIL while it writes: threads that use it queue for the
GIL and never share a sync. The C library called through ctypes shows what RocksDB itself can do.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from . import rows
from .row_stores import CACHE_BYTES, RowStore
from .rows import Row

try:
    import rocksdict
except ImportError:
    rocksdict = None  # type: ignore[assignment]

__all__ = ["RocksRows", "open_rocks", "rocks_kinds", "rocksdict", "rocksdict_kinds", "synced"]

_LIBRARY: Final = os.environ.get("TXNKV_BENCH_ROCKSDB") or ctypes.util.find_library("rocksdb")


def open_rocks(path: Path) -> Any:
    """A database whose writes are synced, with a Bloom filter and a large block cache."""
    options = rocksdict.Options(raw_mode=True)
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(rocksdict.Cache(CACHE_BYTES))
    blocks.set_bloom_filter(10, False)
    options.set_block_based_table_factory(blocks)
    db = rocksdict.Rdict(str(path / "rocks"), options)
    db.set_write_options(synced())
    return db


def synced(on: bool = True) -> Any:
    """Write options with or without a sync of the log."""
    options = rocksdict.WriteOptions()
    options.sync = on
    return options


class RocksRows(RowStore):
    """RocksDB through rocksdict, sync on."""

    name = "rocksdb, rocksdict"
    many_processes = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.db = open_rocks(path)

    def load(self, keys: np.ndarray) -> None:
        unsynced = synced(False)
        for some in rows.chunks(keys):
            batch = rocksdict.WriteBatch(raw_mode=True)
            for row in some:
                batch.put(rows.pack_key(row[0]), rows.pack(row))
            self.db.write(batch, unsynced)
        self.db.flush()

    def put(self, row: Row) -> None:
        self.db.put(rows.pack_key(row[0]), rows.pack(row))

    def get(self, key: int) -> Any:
        value = self.db.get(rows.pack_key(key))
        return None if value is None else rows.unpack(key, value)

    def all(self) -> list[Row]:
        return [rows.unpack(int.from_bytes(key, "big"), v) for key, v in self.db.items()]

    def close(self) -> None:
        self.db.close()


class _Library:
    """The functions that are used of RocksDB's C interface. Every call releases the GIL."""

    def __init__(self, name: str) -> None:
        self._dll = ctypes.CDLL(name)
        pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
        errors = ctypes.POINTER(text)
        for made in ("options", "writeoptions", "readoptions"):
            self._declare(f"{made}_create", pointer)
        self._declare("options_set_create_if_missing", None, pointer, ctypes.c_ubyte)
        self._declare("writeoptions_set_sync", None, pointer, ctypes.c_ubyte)
        self._declare("open", pointer, pointer, text, errors)
        self._declare("close", None, pointer)
        self._declare("put", None, pointer, pointer, text, size, text, size, errors)
        self._declare("create_iterator", pointer, pointer, pointer)
        self._declare("iter_seek_to_first", None, pointer)
        self._declare("iter_next", None, pointer)
        self._declare("iter_destroy", None, pointer)
        self._declare("iter_valid", ctypes.c_ubyte, pointer)
        for part in ("iter_key", "iter_value"):
            self._declare(part, pointer, pointer, ctypes.POINTER(size))

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self._dll, f"rocksdb_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class NativeRocksRows(RowStore):
    """RocksDB through its C library, sync on; it only takes part in races of single writes."""

    name = "rocksdb, C library"
    many_processes = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        assert _LIBRARY is not None
        self._lib = _Library(_LIBRARY)
        options = self._lib.options_create()
        self._lib.options_set_create_if_missing(options, 1)
        self._synced = self._lib.writeoptions_create()
        self._lib.writeoptions_set_sync(self._synced, 1)
        self._unsynced = self._lib.writeoptions_create()
        error = ctypes.c_char_p()
        self._db = self._lib.open(options, os.fsencode(path / "native"), ctypes.byref(error))
        _require_none(error)

    def load(self, keys: np.ndarray) -> None:
        for some in rows.chunks(keys):
            for row in some:
                self._put(row, self._unsynced)

    def put(self, row: Row) -> None:
        self._put(row, self._synced)

    def _put(self, row: Row, options: Any) -> None:
        key, value, error = rows.pack_key(row[0]), rows.pack(row), ctypes.c_char_p()
        self._lib.put(self._db, options, key, len(key), value, len(value), ctypes.byref(error))
        _require_none(error)

    def get(self, key: int) -> Any:
        return next((row for row in self._rows() if row[0] == key), None)

    def all(self) -> list[Row]:
        return list(self._rows())

    def _rows(self) -> Iterator[Row]:
        lib = self._lib
        found = lib.create_iterator(self._db, lib.readoptions_create())
        lib.iter_seek_to_first(found)
        while lib.iter_valid(found):
            key, value = (self._part(part, found) for part in (lib.iter_key, lib.iter_value))
            yield rows.unpack(int.from_bytes(key, "big"), value)
            lib.iter_next(found)
        lib.iter_destroy(found)

    @staticmethod
    def _part(part: Any, found: Any) -> bytes:
        length = ctypes.c_size_t()
        return ctypes.string_at(part(found, ctypes.byref(length)), length.value)

    def close(self) -> None:
        self._lib.close(self._db)


def _require_none(error: ctypes.c_char_p) -> None:
    if error.value is not None:
        raise OSError(error.value.decode())


def rocksdict_kinds() -> list[type[RowStore]]:
    """RocksDB through rocksdict, when that is there."""
    return [RocksRows] if rocksdict is not None else []


def rocks_kinds() -> list[type[RowStore]]:
    """RocksDB in the ways that are there: none, one or two."""
    return rocksdict_kinds() + ([NativeRocksRows] if _LIBRARY is not None else [])
