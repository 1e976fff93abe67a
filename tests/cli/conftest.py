"""Fixtures for the command line: a runner, and a store that is checked at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

import txnkv
from txnkv.cli import main


class Ran:
    """The end of a command: its status and its output."""

    def __init__(self, result: click.testing.Result) -> None:
        self.status = result.exit_code
        self.out = result.stdout
        self.err = result.stderr
        self.bytes = result.stdout_bytes

    @property
    def json(self) -> Any:
        """Stdout as one JSON document."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Stdout as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


def _invoke(*args: object, input: bytes | str | None = None) -> Ran:
    """Run a command in this process, whatever comes of it; no traceback may."""
    result = click.testing.CliRunner().invoke(main, [str(arg) for arg in args], input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result)


@pytest.fixture
def invoke() -> Callable[..., Ran]:
    """Runs a command and tells how it ended; no traceback may come."""
    return _invoke


@pytest.fixture
def run() -> Callable[..., Ran]:
    """Runs a command that succeeds."""

    def succeed(*args: object, input: bytes | str | None = None) -> Ran:
        ran = _invoke(*args, input=input)
        assert ran.status == 0, ran.err
        return ran

    return succeed


@pytest.fixture
def fail() -> Callable[..., str]:
    """Runs a command that fails with exit status 1; its one line on stderr, without 'Error: '."""

    def refuse(*args: object, input: bytes | str | None = None) -> str:
        ran = _invoke(*args, input=input)
        assert ran.status == 1, ran.out
        assert ran.out == ""
        assert ran.err.startswith("Error: ")
        assert ran.err.count("\n") == 1
        return ran.err.removeprefix("Error: ").strip()

    return refuse


@pytest.fixture
def misuse() -> Callable[..., str]:
    """Runs a command that is called wrongly: exit status 2; what it says on stderr."""

    def refuse(*args: object) -> str:
        ran = _invoke(*args)
        assert ran.status == 2, ran.err
        return ran.err

    return refuse


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """An empty store; at the end everything in it is checked, and nothing is staged."""
    path = tmp_path / "store"
    txnkv.connect(path).close()
    yield path
    with txnkv.connect(path) as client:
        assert client.check().problems == []
        assert client.stats()["staged_row_sets"] == 0


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Writes a file of this name."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture
def orders(store: Path, file: Any, run: Any, large: None) -> Path:
    """The store with a table `orders` of four rows, loaded as if they were many."""
    rows = "id,region,total,day\n1,eu,9.5,2026-01-31\n2,us,,2026-02-01\n3,eu,2,2026-02-02\n4,,7,\n"
    run("load", store, "orders", file("orders.csv", rows), "--key", "id")
    return store


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[txnkv.Client]:
    with txnkv.connect(tmp_path_factory.mktemp("shared") / "store") as client:
        yield client


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    """A copy of the store that a module has made."""
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"
