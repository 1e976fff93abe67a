"""Reads through all that lies above the blocks: own writes, memory, deletes, unfinished commits.

What is read is compared with a plain dict in every place where rows can be at the time: in the
transaction's memory, staged, in committed memory, in row sets of a commit that is not finalized,
in row sets with deletes, and in those that a flush or a compaction wrote.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage.faults import InjectedFault, arm, disarm
from txnkv.storage.threads import WhenDropped
from txnkv.tables.maintenance import history
from txnkv.tables.read import sources
from txnkv.tables.write import write_buffer

SCHEMA = txnkv.Schema(
    {"a": "int32", "b": "string", "v": "float64?", "l": "list<int32>?"}, primary_key=["b", "a"]
)
Key = tuple[str, int]
Rows = dict[Key, float | None]


def data(rows: Rows) -> pa.Table:
    return pa.table(
        {
            "a": pa.array([a for _, a in rows], pa.int32()),
            "b": pa.array([b for b, _ in rows], pa.string()),
            "v": pa.array(list(rows.values()), pa.float64()),
            "l": pa.array([None if v is None else [int(v)] for v in rows.values()],
                          pa.list_(pa.int32())),
        }
    )  # fmt: skip


def row(key: Key, v: float | None) -> dict[str, Any]:
    return {"a": key[1], "b": key[0], "v": v, "l": None if v is None else [int(v)]}


def keys(*numbers: int) -> list[Key]:
    return [("x" * (n % 3), n) for n in numbers]


def rows(v: float | None, *numbers: int) -> Rows:
    return dict.fromkeys(keys(*numbers), v)


def same(reader: Any, table: txnkv.Table, expected: Rows) -> None:
    """Everything that `reader` can ask of the table: a client's snapshot, or a transaction."""
    wanted = [row(key, expected[key]) for key in sorted(expected)]
    assert reader.scan(table, ordered=True).to_arrow().to_pylist() == wanted
    found = reader.scan(table, ["v", "b", "a", "l"]).to_arrow().to_pylist()
    assert sorted(found, key=lambda each: (each["b"], each["a"])) == wanted
    few = reader.scan(table, ["a"], [("b", "=", "xx"), ("v", ">=", 2.0)], ordered=True).to_arrow()
    assert few["a"].to_pylist() == [
        each["a"] for each in wanted if each["b"] == "xx" and (each["v"] or 0) >= 2
    ]
    asked = [*expected, ("", 10**6), ("y", 0), *list(expected)[:3]]
    nothing = dict.fromkeys(SCHEMA.names)
    assert reader.get_many(table, asked).to_pylist() == [
        row(key, expected[key]) if key in expected else nothing for key in asked
    ]
    for key in [*list(expected)[::7], *keys(0, 5, 12, 49, 60, 1000)]:
        assert reader.get(table, key) == (row(key, expected[key]) if key in expected else None)


@pytest.fixture
def table(client: txnkv.Client, small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> txnkv.Table:
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    return client.create_table("t", SCHEMA)


@pytest.fixture
def look(client: txnkv.Client, table: txnkv.Table) -> Callable[[Rows], None]:
    def run(expected: Rows) -> None:
        with client.snapshot() as snapshot:
            same(snapshot, table, expected)
        assert table.count() == len(expected)
        count = sum(1 for key in expected if key[0] == "x")
        assert table.count([("b", "=", "x")]) == count

    return run


@contextmanager
def undone(point: str) -> Iterator[None]:
    """Stop the block at a fault point, as if the process had died there."""
    arm(point, "error")
    try:
        with pytest.raises((InjectedFault, txnkv.TxnkvError)):
            yield
    finally:
        disarm()


def test_every_place_where_rows_are(
    client: txnkv.Client,
    table: txnkv.Table,
    look: Callable[[Rows], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = internals.tables(client)
    expected = rows(1.0, *range(50))
    with client.transaction() as txn:
        txn.write(table, data(expected))
    look(expected)  # in committed memory
    engine.flush()
    look(expected)  # in a row set

    with client.transaction() as txn:
        txn.write(table, data(rows(2.0, *range(5, 20), 60)), "upsert")
        txn.write(table, data(rows(None, *range(10, 15))).select(["a", "b"]), "delete")
        own = expected | rows(2.0, *range(5, 10), *range(15, 20), 60)
        own = {key: v for key, v in own.items() if key not in keys(*range(10, 15))}
        same(txn, table, own)
        look(expected)
    expected = own
    look(expected)  # memory hides rows on disk
    engine.flush()
    look(expected)  # deletes and a versioned row set
    internals.compact(client)
    look(expected)

    monkeypatch.setattr(write_buffer, "MAX_ROWS", -1)
    txn = client.new_transaction()
    txn.write(table, data(rows(3.0, *range(0, 50, 3))), "upsert")
    txn.write(table, data(rows(None, *range(0, 50, 6))).select(["a", "b"]), "delete_ignore")
    txn.write(table, data(rows(4.0, 0, 6, 70)), "insert")
    own = expected | rows(3.0, *range(0, 50, 3))
    own = {key: v for key, v in own.items() if key not in keys(*range(0, 50, 6))}
    own |= rows(4.0, 0, 6, 70)
    same(txn, table, own)
    look(expected)  # staged, for its transaction alone
    before = client.snapshot()
    with undone("commit.decided"):
        txn.commit()
    look(own)  # committed, not finalized: its keys hide what is older
    same(before, table, expected)

    monkeypatch.setattr(write_buffer, "MAX_ROWS", 10_000)
    with client.transaction() as later:
        later.write(table, data(rows(5.0, 0, 1, 2, 3)), "upsert")
        later.write(table, data(rows(None, 6, 70)).select(["a", "b"]), "delete")
    expected = own | rows(5.0, 0, 1, 2, 3)
    expected = {key: v for key, v in expected.items() if key not in keys(6, 70)}
    look(expected)  # memory over that
    internals.maintenance(client).round(resume_all=True)
    look(expected)
    engine.flush()
    look(expected)
    internals.compact(client)
    look(expected)


def test_an_unfinished_commit_and_one_that_came_after_it(
    client: txnkv.Client,
    table: txnkv.Table,
    look: Callable[[Rows], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two commits past their commit points, of which neither is finalized, over one another."""
    monkeypatch.setattr(write_buffer, "MAX_ROWS", -1)
    with client.transaction() as txn:
        txn.write(table, data(rows(1.0, *range(30))))
    stamps = [client.snapshot()]
    states = [rows(1.0, *range(30))]
    for v, change, gone in ((2.0, range(0, 20), range(0, 5)), (3.0, range(3, 9), range(15, 18))):
        txn = client.new_transaction()
        txn.write(table, data(rows(v, *change)), "upsert")
        txn.write(table, data(rows(v, *gone)).select(["a", "b"]), "delete")
        with undone("commit.decided"):
            txn.commit()
        left = {key: old for key, old in states[-1].items() if key not in keys(*gone)}
        states.append(left | {key: v for key in keys(*change) if key not in keys(*gone)})
        stamps.append(client.snapshot())
        for snapshot, expected in zip(stamps, states, strict=True):
            same(snapshot, table, expected)
    look(states[-1])
    internals.maintenance(client).round(resume_all=True)
    for snapshot, expected in zip(stamps, states, strict=True):
        same(snapshot, table, expected)
    internals.compact(client)
    for snapshot, expected in zip(stamps, states, strict=True):
        same(snapshot, table, expected)


def test_a_row_that_a_transaction_made_and_deleted_itself(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row set that replaces nothing, below the tombstones of the same transaction."""
    monkeypatch.setattr(write_buffer, "MAX_ROWS", -1)
    txn = client.new_transaction()
    txn.write(table, data(rows(1.0, *range(10))))
    txn.write(table, data(rows(1.0, 3, 4)).select(["a", "b"]), "delete")
    expected = rows(1.0, 0, 1, 2, *range(5, 10))
    same(txn, table, expected)
    with undone("commit.decided"):
        txn.commit()
    with client.snapshot() as snapshot:
        same(snapshot, table, expected)
    internals.maintenance(client).round(resume_all=True)
    with client.snapshot() as snapshot:
        same(snapshot, table, expected)


def test_a_scan_goes_on_while_flush_and_compaction_replace_its_row_sets(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    for n in range(4):
        with client.transaction() as txn:
            txn.write(table, data(rows(float(n), *range(n * 10, n * 10 + 10))))
        internals.flush(client)
    with client.transaction() as txn:
        txn.write(table, data(rows(9.0, *range(0, 40, 5))), "upsert")
    scan = table.scan(ordered=True)
    batches = scan.to_batches()
    seen = next(batches).to_pylist()
    with client.transaction() as txn:
        txn.write(table, data(rows(0.0, *range(40))).select(["a", "b"]), "delete")
    for _ in range(2):
        internals.flush(client)
        internals.compact(client)
    seen += [each for batch in batches for each in batch.to_pylist()]
    expected = {key: float(key[1] // 10) for key in keys(*range(40))} | rows(9.0, *range(0, 40, 5))
    assert seen == [row(key, expected[key]) for key in sorted(expected)]
    assert scan.to_arrow().to_pylist() == seen
    scan.close()
    assert scan.to_arrow().num_rows == table.count() == 0


def test_old_row_sets_go_when_the_last_scan_of_them_has_ended(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    engine = internals.tables(client)
    for first in (0, 1):
        with client.transaction() as txn:
            txn.write(table, data(rows(1.0, *range(first, 40, 2))))
        engine.flush()
    scan = table.scan()
    assert scan.to_arrow().num_rows == 40
    merged = engine.compactor.compact_all().sources
    assert merged > 0
    assert history.collect(engine) == 0  # the scan reads them
    assert scan.to_arrow().num_rows == 40
    WhenDropped(type("Owner", (), {})(), time.sleep, 0.2)  # who tidies up is busy
    scan.close()
    assert history.collect(engine) == merged
    assert table.count() == 40


def test_a_read_in_the_middle_of_a_commit_sees_all_of_it_or_nothing(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step of a bulk update's commit, and of the flush before it."""
    monkeypatch.setattr(write_buffer, "MAX_ROWS", -1)
    with client.transaction() as txn:
        txn.write(table, data(rows(1.0, *range(30))))
    monkeypatch.setattr(write_buffer, "MAX_ROWS", 10_000)
    with client.transaction() as txn:
        txn.write(table, data(rows(2.0, *range(0, 30, 2))), "upsert")
    before = rows(1.0, *range(30)) | rows(2.0, *range(0, 30, 2))
    after = rows(3.0, *range(30))
    monkeypatch.setattr(write_buffer, "MAX_ROWS", -1)
    met: list[tuple[str, float]] = []

    def look(name: str) -> Callable[[], None]:
        def run() -> None:
            with client.snapshot() as snapshot:
                v = snapshot.get(table, keys(1)[0])["v"]
                same(snapshot, table, after if v == 3.0 else before)
                met.append((name, v))

        return run

    points = ("commit.started", "flush.published", "commit.validated", "commit.decided",
              "resolve.put", "commit.finalized", "commit.ended")  # fmt: skip
    txn = client.new_transaction()
    txn.write(table, data(after), "upsert")
    for name in points:
        arm(name, look(name))
    txn.commit()
    disarm()
    assert dict(met)["commit.started"] == 1.0
    assert dict(met)["commit.decided"] == dict(met)["commit.ended"] == 3.0


def test_scans_of_a_transaction_with_many_flushes(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies above each flush is no list of its own: scans grow with what was flushed."""
    table = client.create_table("often", txnkv.Schema({"k": "int64", "v": "int64"}, ["k"]))
    made = Counter[str]()
    make = sources.RowSetMask.__init__

    def counted(self: sources.RowSetMask, *args: Any) -> None:
        made["masks"] += 1
        make(self, *args)

    with client.transaction() as first:
        first.insert(table, (0, 0))
    rng, want = random.Random(1), {0: 0}
    driver = client.new_transaction()
    txn = txnkv.Transaction.deserialize(client, driver.serialize())
    for n in range(150):
        for _ in range(4):
            k = rng.randrange(60)
            if rng.random() < 0.3:
                txn.delete_ignore(table, k)
                want.pop(k, None)
            else:
                txn.upsert(table, (k, n))
                want[k] = n
        if n % 10 == 0:
            txn.write(table, pa.table({"k": range(1000 + n, 1003 + n), "v": [n, n, n]}))
            want |= dict.fromkeys(range(1000 + n, 1003 + n), n)
        txn.flush()
    monkeypatch.setattr(sources.RowSetMask, "__init__", counted)
    rows = [{"k": k, "v": v} for k, v in sorted(want.items())]
    for _ in range(2):  # the second time keys are known
        made.clear()
        assert list(txn.scan(table, ordered=True)) == rows
        assert made["masks"] < 1000
    assert sorted(row["k"] for row in txn.scan(table)) == sorted(want)
    assert (
        list(txn.scan(table, where=[("k", ">", 30)], ordered=True, limit=7))
        == [row for row in rows if row["k"] > 30][:7]
    )
    driver.commit()
    assert list(table.scan(ordered=True)) == rows
