"""Shared words: wrap-around, compare-and-set, bounds, threads."""

from __future__ import annotations

import mmap

import pytest

from tests.threads import at_once
from txnkv.core import SharedWords


def test_load_store_add_swap() -> None:
    words = SharedWords(mmap.mmap(-1, 4096))
    words.store(511, (1 << 64) - 1)
    assert words.add(511, 2) == (1 << 64) - 1
    assert words.load(511) == 1
    assert words.add(511, -1) == 1
    assert words.load(511) == 0
    assert words.swap(511, 0, 5)
    assert not words.swap(511, 0, 6)
    assert words.load(511) == 5
    assert words.load(510) == 0


def test_threads_lose_no_addition() -> None:
    words = SharedWords(mmap.mmap(-1, 4096))

    def add() -> None:
        for _ in range(20_000):
            words.add(1, 1)

    at_once(*[add] * 4)
    assert words.load(1) == 80_000


@pytest.mark.parametrize("word", [-1, 512, 1 << 61])
def test_outside_of_the_memory(word: int) -> None:
    words = SharedWords(mmap.mmap(-1, 4096))
    with pytest.raises(IndexError, match="of 512"):
        words.load(word)
    with pytest.raises(IndexError, match="of 512"):
        words.store(word, 1)


def test_memory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises((BufferError, TypeError)):
        SharedWords(bytes(64))


def test_words_keep_their_memory() -> None:
    """A thread may be at a word when another one gives the memory up."""
    memory = mmap.mmap(-1, 4096)
    words = SharedWords(memory)
    with pytest.raises(BufferError):
        memory.close()
    del memory
    words.store(1, 5)
    assert words.load(1) == 5
