"""The C core as cffi sees it, and what every binding shares: statuses and memory.

Memory goes two ways only. In: the bytes of any buffer object, borrowed for the call. Out:
buffers that pyarrow allocated, so that nothing given to a caller points into LMDB.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

try:
    from txnkv._core import ffi, lib
except ModuleNotFoundError:
    from txnkv.core import zipped

    zipped.load()
    from txnkv._core import ffi, lib

__all__ = ["CoreError", "allocate", "check", "ffi", "lib", "pointer", "readable", "writable"]


class CoreError(Exception):
    """Bytes that the core was given are damaged, or pass a limit of the format.

    Nothing was changed, and no data of them was returned.
    """


def check(status: int, what: str) -> None:
    """Raises what a status says; callers whose `what` takes time ask for the status first.

    Args:
        status: what the core returned.
        what: the operation and its object, to begin the message with.

    Raises:
        CoreError: the bytes are damaged, or the result passes a limit of the format.
        IndexError: a row number is outside of its array.
        MemoryError: there is no memory.
        ValueError: an Arrow array is shorter than it says, or its offsets fall.
    """
    if status == 0:
        return
    if status == lib.STATUS_CORRUPT:
        raise CoreError(f"{what}: the bytes are damaged. Check the store that they came from.")
    if status == lib.STATUS_LIMIT:
        raise CoreError(f"{what}: more data than offsets can say. Take fewer rows at a time.")
    if status == lib.STATUS_RANGE:
        raise IndexError(f"{what}: a row number is outside of the array. Check the row list.")
    if status == lib.STATUS_INPUT:
        raise ValueError(f"{what}: an Arrow array is broken. Its validate(full=True) says how.")
    raise MemoryError(f"{what}: no memory")


def readable(buffer: Any) -> Any:
    """A `uint8_t[]` over the bytes of a buffer object; holds the object."""
    return ffi.from_buffer("uint8_t[]", buffer)


def writable(buffer: Any) -> Any:
    """Return a `uint8_t[]` over a buffer object that may be written; holds the object."""
    return ffi.from_buffer("uint8_t[]", buffer, require_writable=True)


def allocate(size: int) -> pa.Buffer:
    """A buffer of `size` bytes, not cleared, that Arrow owns."""
    return pa.allocate_buffer(size)


_BYTES = ffi.typeof("uint8_t *")


def pointer(buffer: pa.Buffer | None, kind: Any = _BYTES) -> Any:
    """The address of an Arrow buffer; the caller keeps the buffer. None is NULL."""
    return ffi.NULL if buffer is None else ffi.cast(kind, buffer.address)
