"""Giving mapped pages back that were read and are not needed again soon."""

from __future__ import annotations

from txnkv.core.native import lib, readable


def release_pages(view: memoryview) -> None:
    """Take the pages of a value in LMDB's map out of this process's resident memory.

    Only for views of a read-only file mapping, whose bytes stay in the page cache: other
    memory would lose its content.
    """
    memory = readable(view)
    lib.pages_release(memory, len(memory))
