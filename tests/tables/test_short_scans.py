"""Scans of short ranges of keys: read in the published layers, as single keys are.

Rows lie in every place where they can: in the transaction's memory, staged, in committed memory, in
row sets one above the other, some of them replaced or deleted. What a scan gives is compared with a
dict; that it went the short way is seen by its plan.
"""

from __future__ import annotations

from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.coordinator.maintenance import Maintenance
from txnkv.tables.read.sources import ShortPart
from txnkv.transaction.table_scan import Scan

SCHEMA = txnkv.Schema(
    {"w": "int32", "d": "string", "v": "int64", "l": "list<int32>?"}, primary_key=["w", "d"]
)
PLACES = [None, txnkv.hash_partition("d", 3), txnkv.range_partition("w", [1, 3])]
Rows = dict[tuple[int, str], int]


def row(key: tuple[int, str], v: int) -> dict[str, Any]:
    return {"w": key[0], "d": key[1], "v": v, "l": [v, -v] if v % 2 else None}


def is_short(scan: Scan) -> bool:
    return all(isinstance(part, ShortPart) for part in scan._planned().parts)


def same(reader: Any, table: txnkv.Table, rows: Rows, short: bool) -> None:
    """Prefixes, ranges and limits, of the whole table too."""
    keys = sorted(rows)
    for w in range(-1, 6):
        wanted = [row(key, rows[key]) for key in keys if key[0] == w]
        scan = reader.scan(table, where=[("w", "=", w)], ordered=True)
        assert scan.to_arrow().to_pylist() == wanted
        assert is_short(scan) or not short
        where = [("w", "=", w), ("d", ">=", "k3"), ("d", "<", "k7")]
        inside = [each for each in wanted if "k3" <= each["d"] < "k7"]
        scan = reader.scan(table, columns=["v", "d"], where=where, ordered=True)
        assert list(scan) == [{"v": each["v"], "d": each["d"]} for each in inside]
        odd = reader.scan(table, where=[*where, ("v", ">", 10)], ordered=True, limit=2)
        assert list(odd) == [each for each in inside if each["v"] > 10][:2]
        for limit in (0, 1, 3, 500):
            where = [("w", ">=", w)]
            scan = reader.scan(table, where=where, ordered=True, limit=limit)
            wanted = [row(key, rows[key]) for key in keys if key[0] >= w][:limit]
            assert scan.to_arrow().to_pylist() == wanted
            assert is_short(scan)
            some = list(reader.scan(table, where=where, limit=limit))
            assert len(some) == len(wanted)
            assert all(each["w"] >= w and each in map(row, rows, rows.values()) for each in some)
    whole = reader.scan(table, limit=len(keys) + 5, ordered=True).to_arrow().to_pylist()
    assert whole == [row(key, rows[key]) for key in keys]


@pytest.mark.parametrize(("partition", "short"), [(each, each is None) for each in PLACES])
def test_wherever_rows_lie(
    client: txnkv.Client,
    partition: Any,
    short: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`short`: blocks are of a common size; else of five rows, and ranges over many are long."""
    if not short:
        request.getfixturevalue("small_blocks")
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    table = client.create_table("t", SCHEMA, partition)
    rows: Rows = {}

    def put(txn: txnkv.Transaction, **changed: int) -> None:
        """`w1=5` replaces the rows of w = 1 whose number is odd, or by -1 deletes them."""
        for name, v in changed.items():
            for n in range(0 if v % 2 == 0 else 1, 9, 2):
                key = int(name[1:]), f"k{n}"
                if v < 0:
                    txn.delete(table, key)
                    rows.pop(key, None)
                else:
                    txn.upsert(table, row(key, v))
                    rows[key] = v

    steps: list[dict[str, int]] = [
        {"w0": 10, "w1": 11, "w2": 10},
        {"w1": 12, "w2": 13, "w4": 14},
        {"w1": -1, "w3": 15, "w0": 16},
    ]
    for changed in steps:
        with client.transaction() as txn:
            put(txn, **changed)
        same(client.snapshot(), table, rows, short)
        internals.flush(client)
        same(client.snapshot(), table, rows, short)
    with client.transaction() as txn:
        put(txn, w2=-2, w4=18)
    before, kept = client.snapshot(), dict(rows)
    with client.transaction() as txn:
        put(txn, w0=20, w3=-1)
        same(txn, table, rows, short)
        txn.serialize()  # staged from here on
        put(txn, w1=22)
        same(txn, table, rows, short)
        put(txn, w1=-2)
        same(txn, table, rows, short)
    same(client.snapshot(), table, rows, short)
    same(before, table, kept, short)
    internals.compact(client)
    same(client.snapshot(), table, rows, short)
    same(before, table, kept, short)


def test_many_rows_are_scanned_as_ever(client: txnkv.Client) -> None:
    """Up to where a range is short: as many rows, or as many deleted ones before the first."""
    table = client.create_table("t", SCHEMA)
    with client.transaction() as txn:
        for n in range(6000):
            txn.insert(table, row((1, f"{n:05}"), n))
    for flushed in (False, True):
        if flushed:
            internals.flush(client)
        for bound, short in (("00900", True), ("01023", True), ("01024", False), ("05000", False)):
            where = [("w", "=", 1), ("d", "<", bound)]
            scan = table.scan(columns=["v"], where=where, ordered=True)
            assert scan.to_arrow().column("v").to_pylist() == list(range(int(bound)))
            assert is_short(scan) == short
        scan = table.scan(columns=["v"], limit=1500, ordered=True)
        assert scan.to_arrow().column("v").to_pylist() == list(range(1500))
    with client.transaction() as txn:
        for n in range(5500):
            txn.delete(table, (1, f"{n:05}"))
    for limit in (1, 700):
        scan = table.scan(columns=["v"], limit=limit, ordered=True)
        assert scan.to_arrow().column("v").to_pylist() == list(range(5500, 6000))[:limit]


def test_a_scan_that_was_read_stays_as_it_was(client: txnkv.Client) -> None:
    """It is repeatable, and hands on tokens that are all of it."""
    table = client.create_table("t", SCHEMA)
    for n in range(5):
        table.insert(row((1, str(n)), n))
    scan = table.scan(where=[("w", "=", 1)], ordered=True)
    wanted = scan.to_arrow()
    table.delete((1, "2"))
    internals.flush(client)
    internals.compact(client)
    assert scan.to_arrow() == wanted
    tokens = scan.tokens(rows=2)
    found = [each for token in tokens for each in token.open(client)]
    assert found == wanted.to_pylist()
    limited = table.scan(where=[("w", "=", 1)], limit=2, ordered=True)
    assert [each["d"] for each in limited] == ["0", "1"]
    assert [each["d"] for each in limited.tokens()[0].open(client)] == ["0", "1"]


def test_a_serializable_transaction_is_told_of_changes_in_its_range(client: txnkv.Client) -> None:
    table = client.create_table("t", SCHEMA)
    table.insert(row((1, "b"), 1))
    txn = client.new_transaction(isolation="serializable")
    assert len(list(txn.scan(table, where=[("w", "=", 1)]))) == 1
    table.insert(row((1, "a"), 1))
    txn.upsert(table, row((2, "c"), 1))
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
