"""Atomics in mapped memory."""

from __future__ import annotations

import mmap
from threading import Thread

import pytest

from txnkv.core import shared_add, shared_cas, shared_load, shared_store


def test_words():
    memory = mmap.mmap(-1, 4096)
    shared_store(memory, 4088, (1 << 64) - 1)
    assert shared_add(memory, 4088, 2) == (1 << 64) - 1
    assert shared_load(memory, 4088) == 1
    assert shared_add(memory, 4088, -1) == 1
    assert shared_cas(memory, 4088, 0, 5)
    assert not shared_cas(memory, 4088, 0, 6)
    assert shared_load(memory, 4088) == 5
    memory.close()


def test_no_addition_is_lost():
    memory = mmap.mmap(-1, 4096)
    threads = [
        Thread(target=lambda: [shared_add(memory, 8, 1) for _ in range(20_000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared_load(memory, 8) == 80_000


@pytest.mark.parametrize("offset", [-8, 4, 4096, 4092])
def test_offsets_outside_are_refused(offset):
    with pytest.raises(IndexError):
        shared_load(mmap.mmap(-1, 4096), offset)


def test_memory_that_is_read_only_is_not_written():
    assert shared_load(b"\1" + bytes(63), 0) == 1
    with pytest.raises((BufferError, ValueError)):
        shared_store(bytes(64), 0, 1)
