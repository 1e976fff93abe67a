"""64-bit atomics in memory that processes share, as a mapped file."""

from __future__ import annotations

from typing import Any

from txnkv.core.native import ffi, lib, writable

_MASK = 0xFFFFFFFFFFFFFFFF


class SharedWords:
    """The 64-bit words of a buffer. All operations are sequentially consistent.

    They are on the way of every commit, so the address is asked for once.
    """

    __slots__ = ("_memory", "_size")

    def __init__(self, buf: Any) -> None:
        """Holds a writable buffer until `release`.

        Args:
            buf: its length in bytes is a multiple of 8.
        """
        self._memory = writable(buf)
        self._size = len(self._memory)

    def load(self, word: int) -> int:
        """The word of this number."""
        number: int = lib.shared_load(self._memory, self._size, self._at(word))
        return number

    def store(self, word: int, value: int) -> None:
        """Sets a word."""
        lib.shared_store(self._memory, self._size, self._at(word), value)

    def add(self, word: int, delta: int) -> int:
        """Adds to a word, modulo 2^64; `delta` may be negative.

        Returns:
            The value before.
        """
        return int(lib.shared_add(self._memory, self._size, self._at(word), delta & _MASK))

    def swap(self, word: int, expected: int, desired: int) -> bool:
        """Sets a word to `desired` if it is `expected`; says whether it did."""
        return bool(lib.shared_cas(self._memory, self._size, self._at(word), expected, desired))

    def release(self) -> None:
        """Gives the buffer up; no use comes after."""
        ffi.release(self._memory)
        self._size = 0

    def _at(self, word: int) -> int:
        at = word * 8
        if word < 0 or at + 8 > self._size:
            raise IndexError(f"word {word} of {self._size // 8}")
        return at
