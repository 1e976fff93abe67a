"""The words of the commands about a store with damage, and whether their advice leads on."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with an index, and a topic; blanks in their names."""
    path = tmp_path_factory.mktemp("made") / "store"
    with txnkv.connect(path) as client:
        schema = txnkv.Schema({"id": "int64", "area": "string"}, primary_key=["id"])
        table = client.create_table("my orders", schema)
        client.create_table("sound", schema)
        client.create_index(table, ["area", "id"])
        client.create_topic("events")
        with client.transaction() as txn:
            areas = [f"a{number % 7}" for number in range(5000)]
            txn.write(table, pa.table({"id": range(5000), "area": areas}))
            txn.send("events", b"value")
        client.compact()
    return path


TABLET, INDEX, LOG = ("tablets/1", "tablets/3", "logs/1")
NAMES = {
    TABLET: "table 'my orders', tablet 1",
    INDEX: "table 'my orders (index by area, id)', tablet 3",
    LOG: "topic 'events', partition 0",
}


def lose(path: Path, folder: str) -> None:
    (path / folder / "data.mdb").unlink()


def cut(path: Path, folder: str) -> None:
    os.truncate(path / folder / "data.mdb", 12288)


def spoil(path: Path, folder: str) -> None:
    with open(path / folder / "data.mdb", "r+b") as file:
        file.write(b"\x5a" * 8192)


@pytest.mark.parametrize("damage", [lose, cut, spoil])
@pytest.mark.parametrize("folder", NAMES)
def test_check_names_damage_once(path: Path, invoke: Any, folder: str, damage: Any) -> None:
    damage(path, folder)
    ran = invoke("check", path)
    assert ran.status == 1
    assert re.match(rf"{re.escape(NAMES[folder])}(, row set \d)?: ", ran.out)
    assert str(path / folder) in ran.out
    assert ran.out.count("\n") == 1
    assert "Error(" not in ran.out
    assert ran.out.count("partition 0: ") == (folder == LOG)


@pytest.mark.parametrize("folder", [TABLET, INDEX])
@pytest.mark.parametrize("words", [["check"], ["compact"], ["backup"]])
def test_advice_leads_on(path: Path, invoke: Any, run: Any, folder: str, words: list[str]) -> None:
    lose(path, folder)
    more = [path.with_name("backup")] if words == ["backup"] else []
    ran = invoke(*words, path, *more)
    said = next(line for line in (ran.out + ran.err).splitlines() if "txnkv" in line)
    for advice in re.findall(r"txnkv ((?:repair|index) .*?)(?:, then|$)", said):
        asked = [str(path) if word == "STORE" else word for word in shlex.split(advice)]
        run(*asked, *(["--yes"] if asked[0] == "repair" else []))
    assert run("check", path).out.startswith("ok: ")


def test_compact_that_fails_says_so_in_one_line(path: Path, fail: Any, capfd: Any) -> None:
    lose(path, TABLET)
    assert fail("compact", path).startswith(f"{NAMES[TABLET]}: ")
    assert capfd.readouterr().err == ""


def test_check_counts_rows_alone(path: Path, run: Any) -> None:
    assert run("check", path).out.startswith("ok: 5,000 rows, ")


@pytest.mark.parametrize("command", ["tables", "check", "compact"])
def test_a_store_without_its_format_file(path: Path, fail: Any, command: str) -> None:
    (path / "FORMAT").unlink()
    expected = f"no store at {path}: there is all but its FORMAT file; put that back"
    assert fail(command, path) == expected
