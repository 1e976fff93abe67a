"""Changes between two snapshots: of each operation, net, over flush and compaction, and how far
back.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage.faults import InjectedFault, arm, disarm
from txnkv.tables.write import write_buffer

SCHEMA = txnkv.Schema({"k": "string", "v": "int64?"}, primary_key=["k"])
Change = tuple[str, str, int | None, int]


@pytest.fixture
def table(client: txnkv.Client, small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> txnkv.Table:
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    return client.create_table("t", SCHEMA)


@pytest.fixture(params=["small", "large"])
def change(
    request: pytest.FixtureRequest, client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Commits operations (op, key, value); answers the timestamp."""
    if request.param == "large":
        monkeypatch.setattr(write_buffer, "MAX_ROWS", -1)

    def run(*operations: tuple[str, str, int | None]) -> int:
        with client.transaction() as txn:
            for op, k, v in operations:
                row = {"k": [k]} if op.startswith("delete") else {"k": [k], "v": pa.array([v])}
                txn.write("t", pa.table(row), op)
        return int(txn.commit())

    return run


def changes(table: txnkv.Table, start: int, end: int) -> list[Change]:
    found = table.diff(txnkv.Timestamp(start), txnkv.Timestamp(end)).read_all()
    assert found.schema.names == ["k", "v", "_op", "_commit_timestamp"]
    rows = found.to_pylist()
    return sorted((row["_op"], row["k"], row["v"], row["_commit_timestamp"]) for row in rows)


def test_every_kind_of_change(table: txnkv.Table, client: txnkv.Client, change: Any) -> None:
    """The picture at the head of `diff`, and it stays when its rows move."""
    t5 = change(
        ("insert", "bee", 5), ("insert", "cat", 5), ("insert", "dog", 5), ("insert", "x", 0)
    )
    t11 = change(("update", "dog", 11))
    t12 = change(("insert", "ant", 12), ("insert", "eel", 12))
    t13 = change(("delete", "cat", None))
    t14 = change(("update", "bee", 14))
    t15 = change(("delete", "dog", None), ("delete", "eel", None))
    t16 = change(("insert", "cat", 16))
    t17 = change(("upsert", "bee", 17))
    kept = client.snapshot(txnkv.Timestamp(t5))

    def look() -> None:
        assert changes(table, t5, t17) == [
            ("delete", "dog", 5, t15),
            ("insert", "ant", 12, t12),
            ("update", "bee", 17, t17),
            ("update", "cat", 16, t16),
        ]
        assert changes(table, t5, t13) == [
            ("delete", "cat", 5, t13),
            ("insert", "ant", 12, t12),
            ("insert", "eel", 12, t12),
            ("update", "dog", 11, t11),
        ]
        assert changes(table, t13, t16) == [
            ("delete", "dog", 11, t15),
            ("delete", "eel", 12, t15),
            ("insert", "cat", 16, t16),
            ("update", "bee", 14, t14),
        ]
        assert changes(table, t14, t14) == changes(table, t17, t17) == []
        assert changes(table, t16, t17) == [("update", "bee", 17, t17)]

    look()
    internals.flush(client)
    look()
    internals.compact(client)
    look()
    kept.close()


def test_of_a_commit_that_is_not_finalized(
    table: txnkv.Table, client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_buffer, "MAX_ROWS", -1)
    with client.transaction() as txn:
        txn.write(table, pa.table({"k": list("abcdefgh"), "v": range(8)}))
    start = int(txn.commit())
    txn = client.new_transaction()
    txn.write(table, pa.table({"k": ["b", "z"], "v": [10, 11]}), "upsert")
    txn.write(table, pa.table({"k": ["c"]}), "delete")
    arm("commit.decided", "error")
    with pytest.raises((InjectedFault, txnkv.TxnkvError)):
        txn.commit()
    disarm()
    end = int(client.snapshot().timestamp)
    wanted = [("delete", "c", 2, end), ("insert", "z", 11, end), ("update", "b", 10, end)]
    assert changes(table, start, end) == wanted
    internals.maintenance(client).round(resume_all=True)
    assert changes(table, start, end) == wanted


def test_many_rows_come_by_tablet_and_key(client: txnkv.Client, small_blocks: None) -> None:
    table = client.create_table("m", SCHEMA, txnkv.range_partition("k", ["k0500"]))
    names = [f"k{n:04}" for n in range(1000)]
    with client.transaction() as txn:
        txn.write(table, pa.table({"k": names, "v": range(1000)}))
    start = txn.commit()
    internals.flush(client)
    with client.transaction() as txn:
        txn.write(table, pa.table({"k": names[::3], "v": range(0, 2000, 6)}), "update")
        txn.write(table, pa.table({"k": names[1::3]}), "delete")
    end = txn.commit()
    found = table.diff(start, end)
    assert isinstance(found, pa.RecordBatchReader)
    read = found.read_all()
    assert read["k"].to_pylist() == sorted([*names[::3], *names[1::3]])
    assert set(read["_commit_timestamp"].to_pylist()) == {int(end)}
    ops = dict(zip(read["k"].to_pylist(), read["_op"].to_pylist(), strict=True))
    assert all(ops[name] == "update" for name in names[::3])
    assert all(ops[name] == "delete" for name in names[1::3])


def test_by_datetime_and_by_snapshot(table: txnkv.Table, client: txnkv.Client, change: Any) -> None:
    first = change(("insert", "a", 1))
    with client.snapshot() as snapshot:
        change(("insert", "b", 2))
        assert [row["k"] for row in table.diff(snapshot).read_all().to_pylist()] == ["b"]
    at = txnkv.Timestamp(first).datetime
    assert table.diff(at - timedelta(seconds=1), at + timedelta(microseconds=1)).read_all()[
        "k"
    ].to_pylist() == ["a"]
    with pytest.raises(ValueError, match="no time zone"):
        table.diff(datetime.now())


def test_what_cannot_be_asked(table: txnkv.Table, client: txnkv.Client, change: Any) -> None:
    first = change(("insert", "a", 1))
    second = change(("insert", "b", 1))
    with pytest.raises(ValueError, match="earlier to a later"):
        table.diff(txnkv.Timestamp(second), txnkv.Timestamp(first))
    with pytest.raises(ValueError, match="future"):
        table.diff(txnkv.Timestamp(first), datetime.now(UTC) + timedelta(days=1))
    client.drop_table("t")
    with pytest.raises(txnkv.TableNotFoundError):
        table.diff(txnkv.Timestamp(first))


def test_no_further_than_the_history(connect: Any, now: Any, monkeypatch: Any) -> None:
    """A snapshot that is open keeps what it needs; what nobody needs is refused, not wrong."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    client = connect(history=60.0)
    table = client.create_table("t", SCHEMA)
    stamps = []
    for n in range(4):
        with client.transaction() as txn:
            txn.upsert(table, ("a", n))
        stamps.append(txn.commit())
        now.forward(1)
    kept = client.snapshot(stamps[2])
    now.forward(3600)
    internals.flush(client)
    internals.compact(client)
    assert changes(table, stamps[2], stamps[3]) == [("update", "a", 3, stamps[3])]
    assert kept.get(table, "a") == {"k": "a", "v": 2}
    for ask in (
        lambda: table.diff(stamps[0]),
        lambda: client.snapshot(stamps[1]),
        lambda: table.get("a", snapshot=stamps[1]),
        lambda: table.get_many(["a"], snapshot=stamps[1]),
        lambda: table.count(snapshot=stamps[1]),
        lambda: table.scan(snapshot=stamps[1]).to_arrow(),
    ):
        with pytest.raises(txnkv.HistoryExpiredError, match="history goes back to"):
            ask()
    kept.close()
    internals.flush(client)
    internals.compact(client)
    with pytest.raises(txnkv.HistoryExpiredError):
        client.snapshot(stamps[2])
    assert table.get("a") == {"k": "a", "v": 3}
