"""The C core as cffi sees it, and what every binding shares: statuses, memory, checksums.

Beside it stands `txnkv._native`, the same core as a module of C: for what each small transaction
and each point read does, where a call through cffi costs more than the work.

Memory goes two ways only. In: the bytes of any buffer object, borrowed for the call. Out:
buffers that pyarrow allocated, so that nothing given to a caller points into LMDB.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any
from zipimport import zipimporter

import pyarrow as pa


def _load_from_zip(name: str) -> None:
    """Make a module of native code importable from a zip file, as Spark's `--py-files` gives it.

    The system loads native code from a file of its own only. So the module is unpacked, loaded, and
    the file removed: what is loaded stays.

    Raises:
        ImportError: txnkv is in no zip file, or in one without it for this Python on this platform.
    """
    with _unpacked(name) as path:
        loader = ExtensionFileLoader(name, path)
        spec = spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
    sys.modules[name] = module


@contextmanager
def _unpacked(name: str) -> Iterator[str]:
    """A module of native code in a zip file, as a file for the block."""
    suffix, code = _find_in_zip(sys.modules["txnkv"].__loader__, name.rpartition(".")[2])
    with tempfile.TemporaryDirectory(prefix="txnkv-core-") as folder:
        path = os.path.join(folder, name + suffix)
        with open(path, "wb") as file:
            file.write(code)
        yield path


def _find_in_zip(loader: object, base: str) -> tuple[str, bytes]:
    if not isinstance(loader, zipimporter):
        raise ImportError("the C core of txnkv is not built: pip install .", name=base)
    for suffix in EXTENSION_SUFFIXES:
        try:
            return suffix, loader.get_data(os.path.join(loader.archive, "txnkv", base + suffix))
        except OSError:
            continue
    raise ImportError(
        f"{loader.archive} has no C core for this Python on this platform: make the wheel here "
        "(pip wheel --no-deps txnkv), or install it",
        name=base,
    )


try:
    import txnkv._native as _native
    from txnkv._core import ffi, lib
except ModuleNotFoundError:
    for _name in ("txnkv._core", "txnkv._native"):
        _load_from_zip(_name)
    import txnkv._native as _native
    from txnkv._core import ffi, lib

AckRun = _native.AckRun
Delivery = _native.Delivery
Handlers = _native.Handlers
IdSet = _native.IdSet
HistogramBase = _native.Histogram
Holding = _native.Holding
MemRowSetBase = _native.MemRowSet
MessageFields = _native.MessageFields
PinSet = _native.PinSet
PublishedRows = _native.Published
RowCheck = _native.RowCheck
RowReader = _native.Reader
RowTable = _native.Table
SharedWords = _native.Words
SqliteWriter = _native.SqliteWriter
StoreWords = _native.StoreWords
Turn = _native.Turn
WriterLock = _native.WriterLock
Writes = _native.Writes
fill_holes = _native.fill_holes
message_batch = _native.message_batch
message_size = _native.message_size
messages = _native.messages
monotonic_micros = _native.monotonic_micros
pack = _native.pack
place_batches = _native.place
punch_hole = _native.punch_hole
put_message = _native.put_message
take_in = _native.take_in
unpack = _native.unpack
wall_micros = _native.wall_micros
wire_pack = _native.wire_pack
wire_unpack = _native.wire_unpack

__all__ = [
    "AckRun",
    "CoreError",
    "Delivery",
    "Handlers",
    "HistogramBase",
    "LimitError",
    "MemRowSetBase",
    "MessageFields",
    "PublishedRows",
    "RowReader",
    "RowCheck",
    "RowTable",
    "SharedWords",
    "SqliteWriter",
    "StoreWords",
    "Turn",
    "WriterLock",
    "Writes",
    "allocate",
    "check",
    "crc32c",
    "ffi",
    "hash64",
    "lib",
    "fill_holes",
    "message_batch",
    "message_size",
    "messages",
    "monotonic_micros",
    "pack",
    "place_batches",
    "pointer",
    "punch_hole",
    "put_message",
    "readable",
    "release_pages",
    "sqlite_api",
    "wall_micros",
    "wire_pack",
    "wire_unpack",
    "writable",
]


class CoreError(Exception):
    """Bytes that the core was given are damaged, or pass a limit of the format.

    Nothing was changed, and no data of them was returned.
    """


class LimitError(CoreError):
    """Data that passes a limit of the format, and is sound."""


def check(status: int, what: str) -> None:
    """Raises what a status says; callers whose `what` takes time ask for the status first.

    Args:
        status: what the core returned.
        what: the operation and its object, to begin the message with.

    Raises:
        CoreError: the bytes are damaged, or the result passes a limit of the format (LimitError).
        IndexError: a row number is outside of its array.
        MemoryError: there is no memory.
        ValueError: an Arrow array is shorter than it says, or its offsets fall.
    """
    if status == 0:
        return
    if status == lib.STATUS_CORRUPT:
        raise CoreError(f"{what}: the bytes are damaged. Check the store that they came from.")
    if status == lib.STATUS_LIMIT:
        raise LimitError(f"{what}: more data than offsets can say. Take fewer rows at a time.")
    if status == lib.STATUS_RANGE:
        raise IndexError(f"{what}: a row number is outside of the array. Check the row list.")
    if status == lib.STATUS_INPUT:
        raise ValueError(f"{what}: an Arrow array is broken. Its validate(full=True) says how.")
    raise MemoryError(f"{what}: no memory")


_BYTES = ffi.typeof("uint8_t *")


def readable(buffer: Any) -> Any:
    """A `uint8_t[]` over the bytes of a buffer object; the caller keeps the object.

    It holds no export: a memoryview that has one, and is dropped in a circle, takes the interpreter
    with it when the collector clears it (seen in CPython 3.11), and views of LMDB are memoryviews.
    """
    view = ffi.from_buffer("uint8_t[]", buffer)
    return ffi.cast(_BYTES, view)[0 : len(view)]


def writable(buffer: Any) -> Any:
    """Return a `uint8_t[]` over a buffer object that may be written; holds the object."""
    return ffi.from_buffer("uint8_t[]", buffer, require_writable=True)


def release_pages(view: memoryview) -> None:
    """Take the pages of a value in LMDB's map out of this process's resident memory.

    Only for views of a read-only file mapping, whose bytes stay in the page cache: other
    memory would lose its content.
    """
    memory = readable(view)
    lib.pages_release(memory, len(memory))


def allocate(size: int) -> pa.Buffer:
    """A buffer of `size` bytes, not cleared, that Arrow owns."""
    return pa.allocate_buffer(size)


def pointer(buffer: pa.Buffer | None, kind: Any = _BYTES) -> Any:
    """The address of an Arrow buffer; the caller keeps the buffer. None is NULL."""
    return ffi.NULL if buffer is None else ffi.cast(kind, buffer.address)


def sqlite_api(load: Callable[[str, str], object]) -> int:
    """Return the address of SQLite's functions, for `SqliteWriter`.

    Args:
        load: has SQLite load an extension, of a file and the name of its entry.
    """
    if _native.sqlite_api == 0:
        path = _native.__file__
        with nullcontext(path) if os.path.exists(path) else _unpacked("txnkv._native") as there:
            load(there, "txnkv_sqlite_api")
    return _native.sqlite_api


def crc32c(data: Any, seed: int = 0) -> int:
    """CRC-32C of a buffer object, continued from `seed`.

    The checksum of a + b is `crc32c(b, crc32c(a))`.
    """
    memory = ffi.from_buffer("uint8_t[]", data)
    return int(lib.crc32c(seed, memory, len(memory)))


def hash64(data: Any) -> int:
    """XXH64, seed 0, of a buffer object. Frozen: stored filters and partitions rest on it."""
    memory = readable(data)
    return int(lib.hash64(memory, len(memory)))
