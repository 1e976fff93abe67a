"""Room of an LMDB file that is given back to the disk while processes use it: holes for free pages.

LMDB uses pages again but never makes its file shorter, so that a file keeps the size of its worst
moment. A page that LMDB calls free, and that no reader sees any more, is overwritten by whichever
writer comes next; whoever has the write lock is that writer, and may as well leave a hole there.
To LMDB it is a transaction that wrote to free pages and was never committed, which it expects of
every process that dies. The file is as long as before; the disk has the room.

    two meta pages     the younger one: number of the last transaction, last page, root of the
                       tree of free pages (database 0)
    that tree          number of a transaction -> count, pages that it freed (u64 each)

LMDB's rule for who may take a page (`mdb_page_alloc`, `mdb_find_oldest`): it was freed by a
transaction older than the last one and than all that are read. A hole costs the next writer of that
page a new block of the disk, so some free pages stay as they are: those that LMDB takes first, with
the lowest numbers. Whatever is not as expected here leaves the file alone.
"""

from __future__ import annotations

import os
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final

from txnkv.core import punch_hole
from txnkv.storage.faults import declare_fault_point, fault_point

declare_fault_point("holes.made", "some free pages of an LMDB file are holes, others not yet")

LEAST: Final = 4 << 20
"""Bytes of free pages that a file keeps, beside a part of what is in use."""

_PIECE: Final = 256 << 10
"""Bytes of the largest hole that is made at once."""

_MAGIC: Final = 0xBEEFC0DE
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


def readers(env: Any) -> Iterator[int]:
    """Numbers of the transactions that are read, by all processes."""
    for line in env.readers().splitlines()[1:]:
        number = line.split()[-1]
        if number.isdecimal():  # else the slot is idle
            yield int(number)


def make_holes(descriptor: int, writer: int, read: Iterator[int], go_on: Callable[[], bool]) -> int:
    """Make holes of free pages where a file has more of them than it should keep.

    Args:
        descriptor: of data.mdb, to read and write. The caller has LMDB's write lock.
        writer: number of the caller's write transaction, which has written nothing.
        read: the numbers of what is read.
        go_on: asked after each hole that gave something.

    Returns:
        Bytes that the disk has again.

    Raises:
        OSError: the file system makes no holes (EOPNOTSUPP), or the disk failed.
    """
    before = _allocated(descriptor)
    if before <= LEAST or sys.byteorder != "little":
        return 0
    try:
        meta, lists, kept = _free_pages(descriptor, writer - 1)
        free = sum(len(pages) for _, pages in lists)
        used = (meta.last_page + 1 - free) * meta.page_bytes
        if before <= 2 * (used + LEAST):
            return 0
        oldest = min([writer - 1, *read])
        runs = _runs(each for number, each in lists if number < oldest)
        _require(all(1 < first <= first + count - 1 <= meta.last_page for first, count in runs))
        _require(not any(_has(runs, page) for page in kept))
    except (_UnexpectedError, struct.error, ValueError):
        return 0
    enough = used + used // 2 + LEAST
    for first, count in _pieces_from_the_end(runs, _PIECE // meta.page_bytes):
        punch_hole(descriptor, first * meta.page_bytes, count * meta.page_bytes)
        fault_point("holes.made")
        now = _allocated(descriptor)
        if now <= enough or (now < before and not go_on()):  # else it was a hole before
            break
    return before - _allocated(descriptor)


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
    _require((meta.last_page + 1) * meta.page_bytes <= os.fstat(descriptor).st_size)
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
    _require((magic, version) == (_MAGIC, 1) and page_bytes in (1 << n for n in range(9, 17)))
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
