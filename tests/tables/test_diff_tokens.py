"""Parts of a diff in other processes: together they are the diff, whatever happens meanwhile."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.maintenance import Maintenance
from txnkv.tables.read import diff

SCHEMA = txnkv.Schema({"k": "int64", "v": "int64?", "w": "string?"}, primary_key=["k"])
READ = "say([row for token in tokens for row in token.open(client).read_all().to_pylist()])"


@pytest.fixture(autouse=True)
def _by_hand(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maintenance, "start", lambda self: None)


@pytest.fixture
def table(client: txnkv.Client) -> txnkv.Table:
    """Rows 0 to 99 in two tablets, on the disk."""
    table = client.create_table("t", SCHEMA, txnkv.hash_partition("k", 2))
    upsert(client, range(100))
    internals.flush(client)
    return table


def upsert(client: txnkv.Client, keys: Any, value: int = 0) -> txnkv.Timestamp:
    with client.transaction() as txn:
        txn.write("t", pa.table({"k": list(keys), "v": [value] * len(keys)}), "upsert")
    return txn.commit()


def delete(client: txnkv.Client, keys: Any) -> txnkv.Timestamp:
    with client.transaction() as txn:
        txn.write("t", pa.table({"k": list(keys)}), "delete")
    return txn.commit()


def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len({row["k"] for row in rows}) == len(rows)
    return sorted(rows, key=lambda row: int(row["k"]))


def of(reader: pa.RecordBatchReader) -> list[dict[str, Any]]:
    return by_key(reader.read_all().to_pylist())


@pytest.mark.usefixtures("size")
def test_tokens_together_are_the_diff(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Callable[..., Any]
) -> None:
    """Cut while the changes are in memory, or staged; read by others then and when they moved."""
    with client.snapshot() as start:
        upsert(client, range(50, 150), 1)
        end = delete(client, range(0, 150, 3))
        tokens = table.diff_tokens(start, end, rows=16)
        upsert(client, range(200), 2)  # later than the end
        wanted = of(table.diff(start, end))
        assert {row["_op"] for row in wanted} == {"insert", "update", "delete"}
        assert len(tokens) >= 4
        assert all(0 < token.rows <= 64 for token in tokens)
        assert by_key(elsewhere(READ, tokens=tokens)) == wanted
        internals.flush(client)
        assert by_key(elsewhere(READ, tokens=tokens)) == wanted
        internals.compact(client)
        assert by_key(elsewhere(READ, tokens=tokens)) == wanted
        assert by_key([row for token in tokens for row in of(token.open(client))]) == wanted
        again = table.diff_tokens(start, end, rows=16)
        assert by_key([row for token in again for row in of(token.open(client))]) == wanted


def test_a_process_that_is_open_hears_of_commits_of_others(
    client: txnkv.Client, table: txnkv.Table, process: Callable[..., Any]
) -> None:
    """A worker that has had the store open for long reads what was committed just now."""
    worker = process("""
        table = client.table("t")
        say(table.count())
        tokens = pickle.loads(base64.b64decode(wait()))
        say([row for token in tokens for row in token.open(client).read_all().to_pylist()])
    """)
    assert worker.hear() == 100
    with client.snapshot() as start:
        end = upsert(client, [5, 105], 7)
        tokens = table.diff_tokens(start, end)
        worker.tell(base64.b64encode(pickle.dumps(tokens)).decode())
        assert by_key(worker.hear()) == of(table.diff(start, end))


def test_costs_by_what_changed(client: txnkv.Client, table: txnkv.Table) -> None:
    """Nothing changed: no tokens. One row did: one token, cut for it alone."""
    start = client.snapshot()
    assert table.diff_tokens(start) == []
    end = upsert(client, [42], 1)
    (token,) = table.diff_tokens(start)
    assert token.rows == 1
    internals.flush(client)
    (token,) = table.diff_tokens(start, end)
    assert token.rows == 2, "the delete of the old version, and the new one"
    assert [row["v"] for row in of(token.open(client))] == [1]
    start.close()


def test_whether_anything_changed(client: txnkv.Client, table: txnkv.Table) -> None:
    engine = internals.tables(client)
    other = client.create_table("other", SCHEMA)
    with client.snapshot() as start:

        def changed(since: int = start.timestamp) -> bool:
            return diff.changed(
                engine, table.info, txnkv.Timestamp(since), client.snapshot().timestamp
            )

        with client.transaction() as txn:
            txn.insert(other, (1, 1, "x"))
        assert not changed()
        first = upsert(client, [1], 1)
        assert changed()
        assert not changed(first)
        second = delete(client, [2])
        assert changed(first)
        engine.flush()
        assert (changed(), changed(first), changed(second)) == (True, True, False)
        engine.compactor.compact_all()
        assert (changed(), changed(first), changed(second)) == (True, True, False)


def test_some_columns(client: txnkv.Client, table: txnkv.Table) -> None:
    with client.snapshot() as start:
        at = upsert(client, [1, 200], 9)
        assert of(table.diff(start, columns=["v", "k"])) == [
            {"v": 9, "k": 1, "_op": "update", "_commit_timestamp": at},
            {"v": 9, "k": 200, "_op": "insert", "_commit_timestamp": at},
        ]
        (token,) = table.diff_tokens(start, columns=["k"])
        assert token.open(client).schema.names == ["k", "_op", "_commit_timestamp"]
        with pytest.raises(txnkv.SchemaError, match="nope"):
            table.diff(start, columns=["nope"])
        with pytest.raises(TypeError, match="list of names"):
            table.diff(start, columns="k")


def test_a_column_of_the_same_name(client: txnkv.Client) -> None:
    schema = txnkv.Schema({"k": "int64", "_op": "string?"}, primary_key=["k"])
    table = client.create_table("u", schema)
    start = client.snapshot().timestamp
    with client.transaction() as txn:
        txn.insert(table, (1, "mine"))
    with pytest.raises(txnkv.SchemaError, match="columns="):
        table.diff(start)
    assert table.diff(start, columns=["k"]).read_all()["_op"].to_pylist() == ["insert"]


def test_what_a_token_is_not_good_for(
    client: txnkv.Client, table: txnkv.Table, tmp_path: Any, connect: Any, now: Any
) -> None:
    start = client.snapshot()
    end = upsert(client, [1], 1)
    tokens = table.diff_tokens(start, end)
    with (
        txnkv.connect(tmp_path / "other") as other,
        pytest.raises(txnkv.InvalidTokenError, match="its own store"),
    ):
        tokens[0].open(other)
    # While the snapshot is open the history is kept, for whoever reads; then no longer.
    now.forward(3600)
    delete(client, [1])
    internals.flush(client)
    internals.compact(client)
    assert [row["k"] for row in of(tokens[0].open(client))] == [1]
    start.close()
    later = upsert(client, [3], 1)
    internals.flush(client)
    with pytest.raises(txnkv.HistoryExpiredError, match="goes back to"):
        tokens[0].open(client)
    with pytest.raises(txnkv.HistoryExpiredError, match="goes back to"):
        table.diff_tokens(txnkv.Timestamp(0), end)
    upsert(client, [4], 1)
    (fresh,) = table.diff_tokens(later)
    client.drop_table("t")
    with pytest.raises(txnkv.TableNotFoundError):
        fresh.open(client)
