"""Space of what was rolled back, or left by the dead, is used again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tools.children import Children
from tools.crash import later, leftovers, run_child, settle
from tools.crash_scenarios import BEFORE
from txnkv.tables.tablets import row_set_format

pytestmark = pytest.mark.usefixtures("large")

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
        maintenance = internals.maintenance(client)
        counts = []
        for _ in range(4):
            for _ in range(8):
                txn = client.new_transaction()
                txn.write("left", bulk(count=10))
                txn.rollback()
            assert maintenance.round(resume_all=True)
            counts.append(status_rows(client))
        for later in counts[1:]:  # the commit log may have been trimmed meanwhile
            assert not {name for name, n in later.items() if n > counts[0][name]}


def status_rows(client: txnkv.Client) -> dict[str, int]:
    """Count the rows of each table of status.db."""
    with internals.status(client).read() as cur:
        names = [
            name
            for (name,) in cur.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            )
        ]
        return {name: cur.execute(f"SELECT count(*) FROM {name}").get for name in names}


@pytest.mark.parametrize("fault", ["stage.written=kill", "lmdb.after_commit=kill@2"])
def test_space_of_the_dead_is_used_again(fault: str, store: Path, connect: Connect) -> None:
    sizes = []
    for _ in range(6):
        assert run_child("commit", store, fault).killed
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
    internals.maintenance(client).round()
    assert file_bytes(store) < before / 4
    assert client.check().problems == []


HOLD_A_READ = """
client = txnkv.connect(args[0], create=False)
with client.instance.engine.tablets(client.table("left").info)[0].read() as pages:
    say("reading")
    wait()
"""


def test_dead_reader_does_not_keep_space(children: Children, store: Path, connect: Connect) -> None:
    """LMDB uses no page again that a reader may see, and a reader killed in the middle of a
    read looks like one that reads for ever, until somebody checks whether it lives.
    """
    client = connect()
    with client.transaction() as txn:
        txn.write("left", bulk(count=100))
    reader = children.start(HOLD_A_READ, store)
    assert reader.line() == "reading"
    reader.kill()
    sizes = []
    for _ in range(8):
        txn = client.new_transaction()
        txn.write("left", bulk(first=100_000))
        txn.rollback()
        with later(20):
            internals.maintenance(client).round()
        sizes.append(file_bytes(store))
    assert sizes[-1] <= 1.1 * sizes[4], sizes


def test_results_outlive_the_pages_they_came_from(store: Path, connect: Connect) -> None:
    client = connect()
    txn = client.new_transaction()
    txn.write("left", bulk(count=5000))
    kept = txn.scan("left", ordered=True).to_arrow()
    one = txn.get_many("left", [1000, 1001])
    expected, expected_one = kept.to_pylist(), one.to_pylist()
    txn.rollback()
    for turn in range(4):
        again = client.new_transaction()
        again.write("left", bulk(first=50_000 + turn, count=5000))
        again.rollback()
    assert kept.to_pylist() == expected
    assert one.to_pylist() == expected_one
