"""A process that is killed while it opens an environment as the first.

LMDB's first opener holds its lock file alone while it fills it in; the others wait, and go on
when they get the lock that the kernel gave back: in a file that is empty still, which LMDB calls
damaged ("File is not an LMDB file"). Found by the bank of `tests/isolation`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from txnkv.storage import lmdb_open

FIRST = """
import fcntl
lock = os.open(sys.argv[1] + "/lock.mdb", os.O_RDWR)
fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)  # as LMDB's first opener
say("alone")
wait()
"""


def test_the_next_opener_takes_its_place(tmp_path: Path, python: Callable[..., Any]) -> None:
    path = tmp_path / "environment"
    lmdb_open.make_environment_files(path)
    first = python(FIRST, path)
    assert first.line() == "alone"
    opened: list[Any] = []

    def open_() -> None:
        options = lmdb_open.EnvironmentOptions(initial_map_size=1 << 20)
        opened.append(lmdb_open.OpenLmdb.open(path, options, 1 << 20, True))

    waiter = threading.Thread(target=open_)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    first.kill()
    waiter.join(30)
    (environment,) = opened
    assert environment.begin(False).stat()["entries"] == 1  # its mark
    environment.close()


def test_what_stays_damaged_is_told(tmp_path: Path) -> None:
    path = tmp_path / "environment"
    lmdb_open.make_environment_files(path)
    (path / "data.mdb").write_bytes(b"no pages of LMDB" * 4096)
    with pytest.raises(lmdb.InvalidError):
        lmdb_open.OpenLmdb.open(path, lmdb_open.EnvironmentOptions(), 1 << 20, True)
