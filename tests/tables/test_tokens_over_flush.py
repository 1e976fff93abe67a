"""Scan tokens name keys, not blocks: they are good while rows move, in any process."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.maintenance import Maintenance
from txnkv.tables.write import write_buffer
from txnkv.transaction import Job

SCHEMA = txnkv.Schema({"k": "int64", "v": "string?"}, primary_key=["k"])
READ = "say(sorted(row['k'] for t in tokens for row in t.open(client)))"


def data(*keys: int) -> pa.Table:
    return pa.table({"k": pa.array(keys, pa.int64()), "v": [f"v{k}" for k in keys]})


@pytest.fixture(params=[None, txnkv.hash_partition("k", 2)], ids=["one tablet", "hash"])
def table(
    request: pytest.FixtureRequest,
    client: txnkv.Client,
    small_blocks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> txnkv.Table:
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    return client.create_table("t", SCHEMA, request.param)


def put(client: txnkv.Client, op: str, *keys: int) -> None:
    with client.transaction() as txn:
        txn.write("t", data(*keys) if "delete" not in op else data(*keys).select(["k"]), op)


def test_rows_in_memory_are_cut_too(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Any
) -> None:
    put(client, "insert", *range(100))
    tokens = table.scan().tokens(10)
    assert 5 <= len(tokens) <= 30
    assert sum(token.rows for token in tokens) == 100
    assert elsewhere(READ, tokens=tokens) == list(range(100))


def test_they_outlive_flush_and_compaction(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Any
) -> None:
    put(client, "insert", *range(0, 100, 2))
    internals.flush(client)
    put(client, "insert", *range(1, 100, 2))
    put(client, "delete", *range(20, 30))
    scan = table.scan(["k"])
    tokens = pickle.loads(pickle.dumps(scan.tokens(7)))
    wanted = [k for k in range(100) if not 20 <= k < 30]
    put(client, "delete_ignore", *range(50))
    put(client, "insert", 1000)
    for _ in range(2):
        internals.flush(client)
        internals.compact(client)
        assert elsewhere(READ, tokens=tokens) == wanted
        assert sorted(row["k"] for token in tokens for row in token.open(client)) == wanted
    assert table.count() == 51


def test_an_ordered_scan_is_cut_by_tablet(client: txnkv.Client, table: txnkv.Table) -> None:
    put(client, "insert", *range(60))
    internals.flush(client)
    put(client, "upsert", *range(30, 90))
    tokens = table.scan(ordered=True).tokens(5)
    assert len(tokens) == len(table.info.tablets)
    parts = [[row["k"] for row in token.open(client)] for token in tokens]
    assert all(part == sorted(part) for part in parts)
    assert sorted(k for part in parts for k in part) == list(range(90))


def test_predicates_go_with_them(client: txnkv.Client, table: txnkv.Table, elsewhere: Any) -> None:
    put(client, "insert", *range(60))
    internals.flush(client)
    put(client, "insert", *range(60, 90))
    tokens = table.scan(["k"], [("k", ">=", 13), ("k", "<", 70), ("v", "!=", "v40")]).tokens(9)
    assert elsewhere(READ, tokens=tokens) == [k for k in range(13, 70) if k != 40]


@pytest.mark.parametrize("rows", [3, 10_000], ids=["large", "small"])
def test_of_a_transaction_with_its_own_writes(
    client: txnkv.Client,
    table: txnkv.Table,
    elsewhere: Any,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
) -> None:
    put(client, "insert", *range(30))
    monkeypatch.setattr(write_buffer, "MAX_ROWS", rows)
    with client.transaction() as txn:
        txn.write(table, data(*range(30, 40)))
        txn.write(table, data(5, 6, 31).select(["k"]), "delete")
        tokens = txn.scan(table).tokens(10)
        wanted = [k for k in range(40) if k not in (5, 6, 31)]
        assert elsewhere(READ, tokens=tokens) == wanted
    assert table.count() == 37


def test_of_a_transaction_that_goes_on_to_write(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Any
) -> None:
    """Each part was read as it was when it was opened: two of one flush, one old and one new."""
    put(client, "insert", *range(30))
    internals.flush(client)
    with client.transaction() as txn:
        txn.write(table, data(*range(30, 40)))
        done, runs = Job.start(txn), Job.start(txn)
        for job, first in ((done, 40), (runs, 50)):
            with job.session("1") as session:
                session.write(table, data(*range(first, first + 10)))
        with runs.session("all") as session:  # comes to count below what is staged
            session.write(table, data(*range(30)).select(["k"]), "delete")
        done.commit(["1"])
        tokens = txn.scan(table).tokens(10)
        txn.write(table, data(*range(5)).select(["k"]), "delete")
        txn.write(table, data(*range(10)), "upsert")
        txn.insert(table, {"k": 1000, "v": "later"})
        txn.flush()
        runs.commit(["1"], first=["all"])
        assert elsewhere(READ, tokens=tokens) == list(range(50))
        parts = [scan for token in tokens for scan in [token.open(client).to_arrow()]]
        assert sorted(pa.concat_tables(parts)["k"].to_pylist()) == list(range(50))
        now = [*range(10), *range(30, 60), 1000]
        assert elsewhere(READ, tokens=txn.scan(table).tokens(10)) == now
        whole = [txnkv.ScanToken(replace(token.parts, upto=None)) for token in tokens]
        assert len(elsewhere(READ, tokens=whole)) > 0  # of an elder version
        txn.rollback()


def test_too_late(connect: Any, now: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens one when its snapshot is gone is told so."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    client = connect(history=60.0)
    table = client.create_table("t", SCHEMA)
    put(client, "insert", *range(30))
    scan = table.scan()
    tokens = scan.tokens(10)
    put(client, "delete", *range(10))
    now.forward(3600)
    internals.flush(client)
    assert sum(len(list(token.open(client))) for token in tokens) == 30  # the scan holds it
    scan.close()
    put(client, "delete", 20)
    now.forward(3600)
    internals.flush(client)
    internals.compact(client)
    with pytest.raises(txnkv.HistoryExpiredError):
        tokens[0].open(client)
