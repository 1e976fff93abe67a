"""The tools of these tests, importable, and what is required of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import txnkv

sys.path.insert(0, str(Path(__file__).parent.parent.parent))


@pytest.fixture(autouse=True)
def always_calm(calm: None) -> None:
    """See `calm`."""


@pytest.fixture
def dest(tmp_path: Path) -> Iterator[txnkv.Client]:
    """A store that copies are made in."""
    with txnkv.connect(tmp_path / "follower") as opened:
        yield opened
        assert opened.check().problems == []
