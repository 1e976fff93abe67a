"""Makes the tools importable; the library that records is built once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tools.powerloss.recording import Recording, build, unavailable


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that is preloaded into recorded processes."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("record"))


@pytest.fixture
def new_recording(library: Path, tmp_path: Path) -> Callable[[str], Recording]:
    """Makes a recording by its name."""
    return lambda name: Recording(tmp_path / name, library)
