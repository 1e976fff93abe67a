"""Helpers for tests of the storage layer: other processes, in step with the test."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.forked import Popen
from txnkv.storage import Environments, Store, StoreDirectory, disarm
from txnkv.storage.fork import GATE

SCHEMA = "CREATE TABLE t (id INTEGER PRIMARY KEY, value INTEGER)"

_PRELUDE = """
import os, sys
from txnkv.storage import *
def say(*words): print(*words, flush=True)
def wait(): return sys.stdin.readline().strip()
SCHEMA = "CREATE TABLE t (id INTEGER PRIMARY KEY, value INTEGER)"
"""


class Process:
    """A Python process that says lines and is told lines."""

    def __init__(
        self, code: str, args: tuple[object, ...], fault: str, under: tuple[str, ...]
    ) -> None:
        self.popen = Popen(
            [*under, sys.executable, "-c", _PRELUDE + textwrap.dedent(code), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TXNKV_FAULT": fault},
        )

    def line(self) -> str:
        assert self.popen.stdout is not None
        text = self.popen.stdout.readline()
        if not text:
            self.popen.wait(60)
            assert self.popen.stderr is not None
            pytest.fail(f"the process ended: {self.popen.stderr.read()}")
        return text.strip()

    def tell(self, word: str = "go") -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(word + "\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate(timeout=60)

    def finish(self, code: int = 0) -> list[str]:
        out, err = self.popen.communicate(timeout=120)
        assert self.popen.returncode == code, err
        return out.splitlines()


@pytest.fixture
def python() -> Iterator[Callable[..., Process]]:
    """Starts a process that runs some code; it is gone at the end of the test."""
    started: list[Process] = []

    def start(code: str, *args: object, fault: str = "", under: tuple[str, ...] = ()) -> Process:
        process = Process(code, args, fault, under)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


@pytest.fixture
def in_child() -> Callable[[Callable[[], object]], int]:
    """Forks, runs a function in the child, and returns its exit status; 0 means it returned."""

    def run(fn: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                fn()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return run


@pytest.fixture
def directory(tmp_path: Path) -> StoreDirectory:
    return StoreDirectory.open(tmp_path / "store")


@pytest.fixture
def environments(directory: StoreDirectory) -> Iterator[Environments]:
    """With a map of 16 pages, so that growth is near."""
    made = Environments(directory, initial_map_size=16 * mmap.PAGESIZE)
    yield made
    made.close_all()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", schema_sql=SCHEMA) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    disarm()
    assert not GATE.refused
