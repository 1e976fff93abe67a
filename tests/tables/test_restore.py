"""Tables that get the rows of a time before."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import txnkv
from tests import internals

SCHEMA = txnkv.Schema({"id": "int64", "n": "int64", "t": "string?"}, primary_key=["id"])


@pytest.fixture
def table(client: txnkv.Client) -> txnkv.Table:
    return client.create_table("t", SCHEMA, partition_by=txnkv.hash_partition("id", 2))


def put(table: txnkv.Table, ids: range, n: int) -> None:
    data = pa.table({"id": list(ids), "n": [n] * len(ids), "t": [f"t{id}" for id in ids]})
    table._connection.new_session().write(table, data, "upsert")


def rows(table: txnkv.Table) -> list[dict[str, Any]]:
    return table.scan(ordered=True).to_arrow().to_pylist()


def change(client: txnkv.Client, table: txnkv.Table) -> None:
    """Insert, update and delete, in memory and in row sets."""
    put(table, range(90, 130), 2)
    internals.flush(client)
    with client.transaction() as txn:
        for id in range(10):
            txn.delete(table, id)
        txn.update(table, {"id": 50, "t": None})
        txn.insert(table, (200, 1, None))


def test_all_is_as_it_was(client: txnkv.Client, table: txnkv.Table) -> None:
    put(table, range(100), 1)
    was = rows(table)
    before = client.snapshot()
    change(client, table)
    now = rows(table)
    between = client.snapshot()
    done = table.restore(before)
    assert (done.inserted, done.updated, done.deleted) == (10, 11, 31)
    assert rows(table) == was
    assert table.restore(before).deleted == 0
    assert rows(table) == was
    assert between.scan(table, ordered=True).to_arrow().to_pylist() == now
    internals.compact(client)
    assert rows(table) == was
    done = table.restore(between.timestamp)
    assert (done.inserted, done.deleted) == (31, 10)
    assert rows(table) == now
    before.close()
    between.close()


def test_with_other_columns(client: txnkv.Client, table: txnkv.Table) -> None:
    put(table, range(5), 1)
    before = client.snapshot()
    put(table, range(3), 2)
    new = txnkv.Column("int8", default=7)
    table.alter(add={"new": new}, rename={"n": "m"}, drop=["t"])
    with client.transaction() as txn:
        txn.delete(table, 4)
        txn.update(table, {"id": 3, "new": 8})
    table.restore(before)
    assert rows(table) == [{"id": id, "m": 1, "new": 7} for id in range(5)]
    before.close()


def test_a_null_that_may_not_be_any_more(client: txnkv.Client, table: txnkv.Table) -> None:
    table.insert((1, 1, None))
    before = client.snapshot()
    table.update({"id": 1, "t": "x"})
    table.alter(nullable={"t": False})
    with pytest.raises(txnkv.SchemaError, match="'t' is not nullable"):
        table.restore(before)
    assert rows(table) == [{"id": 1, "n": 1, "t": "x"}]
    before.close()


def test_in_a_transaction_with_others(client: txnkv.Client, table: txnkv.Table) -> None:
    other = client.create_table("other", SCHEMA)
    with client.snapshot() as before:
        for each in (table, other):
            put(each, range(10), 1)
        txn = client.new_transaction()
        txn.upsert(table, (3, 5, None))
        txn.insert(table, (11, 5, None))
        for each in (table, other):
            assert each.restore(before, txn).deleted == 10
        assert [row["id"] for row in txn.scan(table)] == [11]  # of its own alone
        assert table.count() == other.count() == 10
        txn.commit()
        assert rows(table) == [{"id": 11, "n": 5, "t": None}]
        assert other.count() == 0


def test_who_changes_a_row_meanwhile(client: txnkv.Client, table: txnkv.Table) -> None:
    put(table, range(10), 1)
    with client.snapshot() as before:
        put(table, range(3, 6), 2)
        tries = []

        def work(txn: txnkv.Transaction) -> None:
            table.restore(before, txn)
            tries.append(1)
            if len(tries) == 1:
                table.update({"id": 4, "n": 3})
                table.insert((20, 1, None))  # of which it cannot know

        client.run(work)
        assert len(tries) == 2
        assert [row["n"] for row in rows(table)] == [1] * 10


def test_times(client: txnkv.Client, table: txnkv.Table) -> None:
    put(table, range(3), 1)
    at = internals.latest(client)
    put(table, range(3), 2)
    with pytest.raises(ValueError, match="takes a time"):
        table.restore(None)
    before = rows(table)
    assert table.restore(datetime.now(UTC)) == txnkv.WriteResult()  # nothing came after it
    assert rows(table) == before
    assert table.restore(datetime(2021, 1, 1, tzinfo=UTC)).deleted == 3
    with pytest.raises(ValueError):
        table.restore(datetime.now(UTC) + timedelta(days=1))
    table.restore(at)
    assert [row["n"] for row in rows(table)] == [1] * 3


def test_no_further_than_the_history(
    client: txnkv.Client, table: txnkv.Table, connect: Callable[..., txnkv.Client]
) -> None:
    put(table, range(3), 1)
    at = internals.latest(client)
    put(table, range(3), 2)
    client.close()
    with connect(history=0.0) as alone:
        internals.flush(alone)
        internals.compact(alone)
        with pytest.raises(txnkv.HistoryExpiredError):
            alone.table("t").restore(at)
        assert [row["n"] for row in rows(alone.table("t"))] == [2] * 3


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["upsert", "delete_ignore"]), st.integers(0, 9), st.booleans()),
        max_size=25,
    ),
    st.integers(0, 24),
)
def test_against_what_was_seen(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bool]], at: int
) -> None:
    with txnkv.connect(tmp_path_factory.mktemp("restored") / "store") as client:
        table = client.create_table("t", SCHEMA)
        seen = [(client.snapshot(), rows(table))]
        for number, (op, id, flush) in enumerate(steps):
            with client.transaction() as txn:
                getattr(txn, op)(table, id if op == "delete_ignore" else (id, number, None))
            if flush:
                internals.flush(client)
            seen.append((client.snapshot(), rows(table)))
        before, wanted = seen[min(at, len(seen) - 1)]
        table.restore(before)
        assert rows(table) == wanted
