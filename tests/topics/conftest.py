"""The tools of these tests, importable, and what is required of each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent))


@pytest.fixture(autouse=True)
def always_calm(calm: None) -> None:
    """See `calm`."""
