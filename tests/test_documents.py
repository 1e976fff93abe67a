"""Documents say where a promise is tested: every file and test that they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCUMENTS = [
    TESTS.parent / "docs" / "guarantees.md",
    TESTS / "INVARIANTS.md",
    TESTS / "peers_not_applicable.md",
]
QUOTED = re.compile(r"`(?:((?:[a-z_]+/)*test_\w+\.py)(?:::)?)?(test_\w+)?`")
FUNCTION = re.compile(r"^ *def (test_\w+)", re.MULTILINE)

EVERY = {path: set(FUNCTION.findall(path.read_text())) for path in TESTS.rglob("test_*.py")}


def meant(file: str) -> list[set[str]]:
    """The tests of each file that a name means, with its folders or without."""
    name = f"/{file.removeprefix('tests/')}"
    return [found for path, found in EVERY.items() if path.as_posix().endswith(name)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_tests_that_it_names_are_there(document: Path) -> None:
    quoted = [pair for pair in QUOTED.findall(document.read_text()) if any(pair)]
    assert len(quoted) > 20
    for file, test in quoted:
        files = meant(file) if file else list(EVERY.values())
        assert files, file
        assert not test or any(test in found for found in files), (file, test)
