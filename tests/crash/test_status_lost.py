"""A status.db or a WAL that is gone, empty or damaged: SQLite would begin anew, and did."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from tests import internals
from tests.conftest import Process

SMALL = """
import sys, txnkv
from txnkv.storage import StatusDatabase
StatusDatabase.checkpoint = lambda *_, **__: None
client = txnkv.connect(sys.argv[1])
table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
for i in range(20):
    client.run(lambda txn: txn.insert(table, (i,)))
if len(sys.argv) > 2:
    client.compact()
client.close()
"""
DATABASE, WAL = "status.db", "status.db-wal"


def _contents(path: Path) -> dict[str, bytes | None]:
    return {
        name: (path / name).read_bytes() if (path / name).exists() else None
        for name in (DATABASE, WAL)
    }


def _garble(file: Path) -> None:
    """In the first frame: SQLite takes all of the WAL for nothing."""
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _assert_refused(path: Path, names: list[str]) -> None:
    found = _contents(path)
    for read_only in (True, False, True):
        with pytest.raises(txnkv.CorruptionError, match=r"one database.*put back") as caught:
            txnkv.connect(path, read_only=read_only)
        assert all(str(path / name) in str(caught.value) for name in names)
        assert _contents(path) == found


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize(
    ("names", "hurt"),
    [([DATABASE], Path.unlink), ([WAL], Path.unlink), ([DATABASE, WAL], Path.unlink),
     ([DATABASE], _empty), ([WAL], _empty), ([WAL], _garble)],
)  # fmt: skip
def test_nothing_is_begun_anew_and_what_is_put_back_is_whole(
    store_path: Path, names: list[str], hurt: Callable[[Path], None], flushed: bool
) -> None:
    """Nothing of it is in status.db itself while no checkpoint was made: all is in the WAL."""
    arguments = [str(store_path), *(["flushed"] if flushed else [])]
    subprocess.run([sys.executable, "-c", SMALL, *arguments], check=True)
    whole = _contents(store_path)
    assert whole[DATABASE] is not None
    assert len(whole[DATABASE]) == 4096
    for name in names:
        hurt(store_path / name)
    _assert_refused(store_path, names)
    if not flushed:  # what a leader makes once
        (store_path / "maintenance.lock").touch()
    if flushed or names == [WAL]:  # the machine was started, too
        shutil.rmtree(store_path / "runtime")
        _assert_refused(store_path, names)
    for name, content in whole.items():
        assert content is not None
        (store_path / name).write_bytes(content)
    with txnkv.connect(store_path) as client:
        assert client.table("t").count() == 20


@pytest.mark.parametrize("hurt", [Path.unlink, _empty])
def test_without_a_wal_when_all_is_in_the_database(
    store_path: Path, hurt: Callable[[Path], None]
) -> None:
    """A copy that SQLite made, or one after a checkpoint."""
    subprocess.run([sys.executable, "-c", SMALL, str(store_path)], check=True)
    with txnkv.connect(store_path) as client:
        internals.status(client).checkpoint()
    hurt(store_path / WAL)
    for read_only in (True, False):
        with txnkv.connect(store_path, read_only=read_only) as client:
            assert client.table("t").count() == 20


@pytest.mark.parametrize("left", [[], [DATABASE]])
def test_a_store_whose_maker_was_killed_is_made(
    store_path: Path, process: Callable[..., Process], left: list[str]
) -> None:
    process("", fault="status.before_commit=kill").finish(-9)
    assert (store_path / "FORMAT").exists()
    for name in {DATABASE, WAL} - set(left):
        (store_path / name).unlink(missing_ok=True)
    with pytest.raises(txnkv.StoreNotFoundError, match=r"status\.db is not made yet; open"):
        txnkv.connect(store_path, read_only=True)
    with txnkv.connect(store_path) as client:
        client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    with txnkv.connect(store_path, read_only=True) as client:
        assert client.tables() == ["t"]
