"""Documents say where a promise is tested: every file and test that they name is there."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import txnkv

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


# -- the site of the documentation: what `make docs` would say, as far as it is quick ------

DOCS = TESTS.parent / "docs"
REFERENCES = sorted((DOCS / "reference").glob("*.md"))


def test_every_page_is_in_the_navigation() -> None:
    text = (TESTS.parent / "mkdocs.yml").read_text()
    named = re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def named_in(page: Path) -> list[Any]:
    """The objects whose docstrings stand on a page."""
    found = []
    for path in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
        parts = path.split(".")
        known: Any = txnkv
        for n in range(2, len(parts) + 1):
            module = ".".join(parts[:n])
            known = vars(known).get(parts[n - 1]) or import_module(module)
        found.append(known)
    return found


def test_the_reference_has_every_public_name() -> None:
    found = [each for page in REFERENCES for each in named_in(page)]
    assert txnkv.errors in found
    for name in txnkv.__all__:
        value = getattr(txnkv, name)
        of = getattr(value, "__module__", "a module")
        assert value in found or of in ("txnkv.errors", "a module"), name
