"""Mapped files: 64-bit atomics in memory that processes share, and pages given back."""

from __future__ import annotations

from typing import Any

from txnkv.core.native import lib, readable, writable

_MASK = 0xFFFFFFFFFFFFFFFF


class SharedWords:
    """The 64-bit words of a buffer. All operations are sequentially consistent.

    They are on the way of every commit, so the address is asked for once.
    """

    __slots__ = ("_memory", "_size", "_words")

    def __init__(self, buf: Any) -> None:
        """Holds a writable buffer as long as this object lives.

        Args:
            buf: its length in bytes is a multiple of 8.
        """
        self._memory = writable(buf)
        self._size = len(self._memory)
        self._words = self._size // 8

    def load(self, word: int) -> int:
        """The word of this number."""
        if 0 <= word < self._words:
            number: int = lib.shared_load(self._memory, self._size, word * 8)
            return number
        raise self._outside(word)

    def store(self, word: int, value: int) -> None:
        """Sets a word."""
        if not 0 <= word < self._words:
            raise self._outside(word)
        lib.shared_store(self._memory, self._size, word * 8, value)

    def add(self, word: int, delta: int) -> int:
        """Adds to a word, modulo 2^64; `delta` may be negative.

        Returns:
            The value before.
        """
        if 0 <= word < self._words:
            return int(lib.shared_add(self._memory, self._size, word * 8, delta & _MASK))
        raise self._outside(word)

    def swap(self, word: int, expected: int, desired: int) -> bool:
        """Sets a word to `desired` if it is `expected`; says whether it did."""
        if 0 <= word < self._words:
            return bool(lib.shared_cas(self._memory, self._size, word * 8, expected, desired))
        raise self._outside(word)

    def _outside(self, word: int) -> IndexError:
        return IndexError(f"word {word} of {self._words}")


def release_pages(view: memoryview) -> None:
    """Take the pages of a value in LMDB's map out of this process's resident memory.

    Only for views of a read-only file mapping, whose bytes stay in the page cache: other
    memory would lose its content.
    """
    memory = readable(view)
    lib.pages_release(memory, len(memory))
