"""The dump shows what is there, also of a damaged store, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from tests import internals
from tools.crash import run_child
from tools.crash_scenarios import BEFORE, prepare, rows
from tools.dump import dump

pytestmark = pytest.mark.usefixtures("large")


@pytest.fixture
def store(tmp_path: Path, large: None) -> Path:
    """A store whose transactions were large ones."""
    prepare(str(tmp_path / "store"))
    return tmp_path / "store"


def test_dump_names_transactions_row_sets_and_blocks(
    store: Path, connect: Callable[..., txnkv.Client]
) -> None:
    client = connect()
    txn = client.new_transaction()
    txn.write("left", rows(BEFORE, 100))
    lines = list(dump(str(store), blocks=True))
    text = "\n".join(lines)
    assert "state=OPEN" in text
    assert "state=COMMITTED" in text
    assert f"transaction {txn.id.local}, 2" in text, "a staged row set with its rows"
    assert sum("row set" in line and ": staged" in line for line in lines) == 4
    assert sum("row set" in line and ": committed" in line for line in lines) == 8
    assert sum(line.startswith("    block 0") for line in lines) == 12
    assert "'text':" in text
    assert internals.coordinator(client).token_key.hex() not in text
    txn.commit()


def test_dump_leaves_a_dead_transaction_as_it_is(store: Path) -> None:
    assert run_child("commit", store, "commit.decided=kill").killed
    for _ in range(2):
        assert "state=FINALIZE_IN_PROGRESS" in "\n".join(dump(str(store)))


def test_dump_of_a_damaged_store_goes_on(store: Path) -> None:
    folder = next(folder for folder in (store / "tablets").iterdir() if folder.name == "2")
    (folder / "data.mdb").write_bytes(b"\x5a" * 40_000)
    lines = list(dump(str(store), blocks=True))
    assert any("damaged" in line for line in lines)
    assert sum(": committed" in line for line in lines) == 8
    assert sum(line.startswith("    block 0") for line in lines) == 7
