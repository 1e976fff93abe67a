"""The rules of csrc/: includes point down, and a shared header is fit to be a cdef."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
LEVELS = ["common", "codec", "rowset", "memory", "log", "tablet"]
FILES = sorted(path for level in LEVELS for path in (CSRC / level).glob("*.[ch]"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_includes_point_down(path):
    allowed = LEVELS[: LEVELS.index(path.parent.name) + 1]
    for included in re.findall(r'#include "(\w+)/', path.read_text()):
        assert included in allowed


def shared_headers():
    text = (CSRC / "build_core.py").read_text()
    return re.findall(r'^    "(\w+/\w+\.h)",$', text, re.M)


@pytest.mark.parametrize("header", shared_headers())
def test_shared_headers_declare_and_nothing_else(header):
    lines = (CSRC / header).read_text().splitlines()
    directives = [line.split()[0] for line in lines if line.startswith("#")]
    assert directives[:2] == ["#ifndef", "#define"]
    assert directives[-1] == "#endif"
    assert set(directives[2:-1]) <= {"#include"}
    assert "inline" not in "\n".join(line for line in lines if not line.lstrip().startswith("*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 400
