"""Space of what was rolled back, or left by the dead, is used again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import txnkv
from tools.crash import Nursery, leftovers, settle
from tools.crash_scenarios import BEFORE
from txnkv.tables import row_set_format

Connect = Callable[..., txnkv.Client]


def bulk(first: int = 1000, count: int = 60_000) -> pa.Table:
    ids = pa.array(range(first, first + count), pa.int64())
    return pa.table({"id": ids, "text": pa.array([f"{i:080}" for i in range(count)])})


def file_bytes(store: Path) -> int:
    return sum(file.stat().st_size for file in store.rglob("data.mdb"))


@pytest.mark.parametrize(("block_rows", "loads"), [(2048, 2.5), (1 << 16, 3.2)])
def test_space_of_rollbacks_is_used_again(
    block_rows: int, loads: float, store: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About two loads: LMDB keeps pages for one commit more before it uses them again. Where a
    load is a single block in each tablet, one page taken from its run costs a third.
    """
    monkeypatch.setattr(row_set_format, "BLOCK_ROWS", block_rows)
    client = connect()
    empty = file_bytes(store)
    sizes = []
    for _ in range(8):
        txn = client.new_transaction()
        txn.write("left", bulk())
        txn.rollback()
        sizes.append(file_bytes(store) - empty)
    assert sizes[-1] <= loads * sizes[0], sizes
    assert sizes[-1] <= 1.05 * sizes[4], "it does not grow any more"
    assert client.table("left").count() == BEFORE
    with client.transaction() as txn:
        txn.write("left", bulk())
    assert file_bytes(store) - empty <= loads * sizes[0]
    assert client.check().problems == []


def test_status_database_does_not_grow_with_rollbacks(store: Path) -> None:
    with txnkv.connect(store, create=False, history=0.0) as client:
        sizes = []
        for _ in range(6):
            for _ in range(8):
                txn = client.new_transaction()
                txn.write("left", bulk(count=10))
                txn.rollback()
            client.instance.coordinator.maintenance.round()
            client.instance.store.status.checkpoint()
            sizes.append((store / "status.db").stat().st_size)
        assert sizes[-1] <= sizes[1], sizes
        with client.instance.store.status.read() as cur:
            (left,) = cur.execute("SELECT count(*) FROM transactions").fetchone()
        assert left <= 8


@pytest.mark.parametrize("fault", ["stage.written=kill", "lmdb.after_commit=kill@2"])
def test_space_of_the_dead_is_used_again(
    fault: str, nursery: Nursery, store: Path, connect: Connect
) -> None:
    sizes = []
    for _ in range(6):
        assert nursery.run("commit", store, fault).killed
        with txnkv.connect(store, create=False) as client:
            settle(client)
            assert leftovers(client) == []
        sizes.append(file_bytes(store))
    assert sizes[-1] <= 2 * sizes[0], sizes
    client = connect()
    assert client.table("left").count() == BEFORE
    assert client.check().problems == []


def test_space_of_dropped_tables_comes_back(store: Path, connect: Connect) -> None:
    client = connect()
    with client.transaction() as txn:
        txn.write("left", bulk())
    before = file_bytes(store)
    client.drop_table("left")
    client.instance.coordinator.maintenance.round()
    assert file_bytes(store) < before / 4
    assert client.check().problems == []
