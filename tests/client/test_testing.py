"""The plugin of pytest: what its fixtures do for the tests of others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from txnkv.testing import MovedClock

SCHEMA = txnkv.Schema({"id": "int64", "n": "int64"}, primary_key=["id"])


def test_the_clock(txnkv_client: txnkv.Client, txnkv_clock: MovedClock) -> None:
    table = txnkv_client.create_table("t", SCHEMA)
    txn = txnkv_client.new_transaction(timeout=60.0)
    txn.insert(table, (1, 1))
    txnkv_clock.forward(61)
    with pytest.raises(txnkv.TransactionTimedOutError):
        txn.commit()
    with pytest.raises(ValueError, match="time goes forward"):
        txnkv_clock.forward(-1)


def test_several_clients(txnkv_connect: Callable[..., txnkv.Client], txnkv_path: Path) -> None:
    writer = txnkv_connect(history=0.0)
    table = writer.create_table("t", SCHEMA)
    table.insert((1, 1))
    assert Path(writer.path) == txnkv_path
    assert txnkv_connect(read_only=True).table("t").count() == 1


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("at", "count"), [("before commit", 2), ("after commit", 3)])
def test_a_child_is_killed_at_a_commit(
    txnkv_client: txnkv.Client,
    txnkv_killed: Callable[..., None],
    at: str,
    count: int,
    large: bool,
) -> None:
    txnkv_client.create_table("t", SCHEMA).insert((0, 0))

    def work(client: txnkv.Client) -> None:
        for number in range(1, 4):
            with client.transaction() as txn:
                if large:
                    txn.serialize()
                txn.insert("t", (number, 0))

    txnkv_killed(work, at, 2)
    assert txnkv_client.table("t").count() == count


@pytest.mark.parametrize(
    ("work", "raises"), [(lambda client: None, False), (lambda client: 1 / 0, True)]
)
def test_a_child_that_was_not_killed_fails_the_test(
    txnkv_client: txnkv.Client,
    txnkv_killed: Callable[..., None],
    work: Callable[[txnkv.Client], object],
    raises: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(pytest.fail.Exception, match="ended before its commit 1"):
        txnkv_killed(work, "before commit")
    with pytest.raises(ValueError, match="killed 'before commit' or 'after commit', not 'there'"):
        txnkv_killed(work, "there")
    assert ("ZeroDivisionError" in capfd.readouterr().err) is raises


USED = """
import txnkv

def test_writes(txnkv_client):
    table = txnkv_client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]))
    table.insert((1,))
    assert table.count() == 1

def test_damages(txnkv_client, txnkv_path):
    table = txnkv_client.create_table("t", txnkv.Schema({"id": "int64", "t": "string"}, ["id"]))
    with txnkv_client.transaction() as txn:
        txn.serialize()
        txn.insert(table, (1, "a needle"))
    (path,) = (txnkv_path / "tablets").glob("*/data.mdb")
    with path.open("r+b") as file:
        file.seek(file.read().index(b"a needle"))
        file.write(b"NEEDLESS")
"""


def test_in_the_tests_of_others(tmp_path: Path) -> None:
    (tmp_path / "test_used.py").write_text(USED)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert "2 passed, 1 error" in ran.stdout, ran.stdout
    assert "its checksum does not match" in ran.stdout
