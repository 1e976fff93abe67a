"""Scans that begin with the last rows by primary key, beside the same rows ascending."""

from __future__ import annotations

import pickle
import random
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.tables.read import scan

TYPES = {"a": "int8", "at": "timestamp[us, tz=UTC]", "v": "string?"}
KEY = ["a", "at"]
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
PARTS: list[Any] = [
    None,
    [txnkv.hash_partition("at", 3)],
    [txnkv.range_partition("a", [2]), txnkv.hash_partition("at", 2)],
]
WHERE: list[Any] = [
    None,
    [("a", "=", 1)],
    [("a", "in", [3, 0])],
    [("a", ">", 1)],
    [("a", "=", 1), ("at", "<", BEGIN + timedelta(hours=300))],
    [("v", "=", "x")],
    [("a", "=", 2), ("v", "!=", "x")],
    [("a", "=", 9)],
    [("v", "is null")],
]


def at(hours: int) -> datetime:
    return BEGIN + timedelta(hours=hours)


def fill(client: txnkv.Client, table: txnkv.Table, rnd: random.Random) -> None:
    """Rows in several row sets that overlap, in memory, and deleted ones in both."""
    for turn in range(5):
        with client.transaction() as txn:
            for _ in range(150):
                key = rnd.randrange(4), at(rnd.randrange(500))
                if rnd.random() < 0.3:
                    txn.upsert(table, (*key, None))
                    txn.delete(table, key)
                else:
                    txn.upsert(table, (*key, rnd.choice(["x", "y", None])))
        if turn < 4:
            internals.flush(client)


@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        (PARTS[0], 50),
        pytest.param(PARTS[1], 50, marks=pytest.mark.slow),
        (PARTS[2], 50),
        (PARTS[1], 1 << 16),
    ],
    ids=["one, by pieces", "three, by pieces", "four, by pieces", "three, at once"],
)
def test_they_are_the_ascending_ones_turned_round(
    client: txnkv.Client, parts: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "BATCH_ROWS", rows)
    table = client.create_table("t", txnkv.Schema(TYPES, KEY), parts)
    client.create_index(table, "v")
    fill(client, table, random.Random(f"{parts} {rows}"))
    names: list[Any] = [None, ["v"], []]
    with client.snapshot() as before, client.transaction() as txn:
        for hours in range(0, 500, 7):
            txn.upsert(table, (1, at(hours), "x"))
            if (row := table.get((2, at(hours)))) is not None:
                txn.delete(table, (2, row["at"]))
        for reader in (table, before, txn):
            look: Any = partial(reader.scan, *(() if reader is table else (table,)))
            for where in WHERE:
                for columns in names:
                    asked = {"columns": columns, "where": where}
                    rows_of = list(look(**asked, ordered=True))[::-1]
                    for limit in (None, 0, 3, 60):
                        found = look(**asked, ordered="descending", limit=limit)
                        assert list(found) == rows_of[:limit], (asked, limit)
                        arrow = found.to_arrow()
                        assert arrow.num_rows == len(rows_of[:limit])
                        if columns != []:
                            assert arrow.to_pylist() == rows_of[:limit], (asked, limit)
                        anew = look(**asked, ordered="descending", limit=limit)
                        assert anew.to_arrow().num_rows == len(rows_of[:limit])


@pytest.mark.parametrize("parts", [None, [txnkv.hash_partition("id", 3)]], ids=["one", "three"])
@pytest.mark.parametrize("flushed", [False, True], ids=["memory", "disk"])
def test_the_last_ones_want_no_plan(
    client: txnkv.Client, parts: Any, flushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {"s": "int8", "id": "int64", "v": "int8"}
    table = client.create_table("t", txnkv.Schema(types, ["s", "id"]), parts)
    client.create_index(table, "v")
    with client.transaction() as txn:
        for id in range(20_000):
            txn.insert(table, (id % 2, id, id % 5))
    if flushed:
        internals.flush(client)
    with client.transaction() as txn:
        txn.delete(table, (1, 19_999))
        txn.upsert(table, (1, 20_001, 7))

    def plan(*args: Any) -> Any:
        raise AssertionError("a scan of all was planned")

    with monkeypatch.context() as patch:
        patch.setattr(scan, "plan", plan)
        check_last(table)


def check_last(table: txnkv.Table) -> None:
    last = table.scan(["id"], [("s", "=", 1)], ordered="descending", limit=3)
    assert [row["id"] for row in last] == [20_001, 19_997, 19_995]
    before = table.scan(["id"], [("s", "=", 1), ("id", "<", 9_000)], ordered="descending", limit=2)
    assert [row["id"] for row in before] == [8_999, 8_997]
    beside = table.scan(["id"], [("s", "=", 0), ("v", "=", 3)], ordered="descending", limit=2)
    assert [row["id"] for row in beside] == [19_998, 19_988]
    by_index = table.scan(["s", "id"], [("v", "=", 7)], ordered="descending", limit=2)
    assert list(by_index) == [{"s": 1, "id": 20_001}]


def test_where_many_versions_and_deletes_are_last(client: txnkv.Client) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "int64"}, ["id"]))
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": range(12_000), "v": [0] * 12_000}))
    then = client.snapshot()
    for turn in range(1, 40):
        table.upsert((5, turn))
        table.upsert((11_999, turn))
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": range(100, 12_000)}), op="delete")
    for _ in range(2):
        assert [row["id"] for row in table.scan(ordered="descending", limit=2)] == [99, 98]
        old = list(table.scan(ordered="descending", limit=2, snapshot=then))
        assert old == [{"id": 11_999, "v": 0}, {"id": 11_998, "v": 0}]
        five = list(table.scan(where=[("id", "<=", 5)], ordered="descending", limit=1))
        assert five == [{"id": 5, "v": 39}]
        internals.flush(client)
    then.close()


def test_tokens_keep_the_order(client: txnkv.Client) -> None:
    table = client.create_table(
        "t", txnkv.Schema({"id": "int64"}, ["id"]), [txnkv.hash_partition("id", 2)]
    )
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": range(1_000)}))
    tokens = table.scan(ordered="descending").tokens()
    parts = [pickle.loads(pickle.dumps(token)).open(client).to_arrow() for token in tokens]
    found = [part["id"].to_pylist() for part in parts]
    assert all(each == sorted(each, reverse=True) for each in found)
    assert sorted(id for each in found for id in each) == list(range(1_000))


def test_few_blocks_are_read_for_the_first_batch(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "int8"}, ["id"]))
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": range(300_000), "v": pa.array([1] * 300_000, pa.int8())}))
    internals.flush(client)
    read, real = [], scan.Plan._read

    def counted(self: scan.Plan, unit: Any) -> Any:
        read.append(unit)
        return real(self, unit)

    monkeypatch.setattr(scan.Plan, "_read", counted)
    found = table.scan(["id"], [("v", "=", 1)], ordered="descending", limit=5_000).to_arrow()
    assert found["id"].to_pylist() == list(range(299_999, 294_999, -1))
    assert len(read) == 1
