"""pytest fixtures of the tests that need the scenarios' store and other processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tools.children import Children
from tools.crash_scenarios import prepare
from txnkv.storage import disarm

__all__ = ["children", "connect", "store", "template"]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the scenarios' tables, to be copied."""
    path = tmp_path_factory.mktemp("template") / "store"
    prepare(str(path))
    return path


@pytest.fixture
def children() -> Iterator[Children]:
    """Starts processes; they are gone at the end of the test."""
    with Children() as started:
        yield started


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    """A store with the scenarios' tables."""
    return Path(shutil.copytree(template, tmp_path / "store"))


@pytest.fixture
def connect(store: Path) -> Iterator[Callable[..., txnkv.Client]]:
    """Connects clients to `store`; all are closed at the end of the test."""
    opened: list[txnkv.Client] = []

    def open_(**options: Any) -> txnkv.Client:
        client = txnkv.connect(store, create=False, **options)
        opened.append(client)
        return client

    yield open_
    for client in opened:
        client.close()
    disarm()
