"""Rows in the order of columns, by an index or sorted, beside a plain model."""

from __future__ import annotations

import operator
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.tables.read import ordering, scan, short_scan

NAN = float("nan")
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
TYPES = {
    "id": "int64", "s": "string", "a": "int32", "f": "float64", "t": "timestamp[us, tz=UTC]",
    "b": "string", "d": "decimal128(8, 2)", "z": "bool",
}  # fmt: skip
COMPARE = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
INDEXES = ["a"], ["b"], ["t"], ["a", "t"], ["b", "a"], ["f"], ["d", "z"], ["z", "t"], ["s", "a"]


def row_of(rnd: random.Random, id: int, *, nulls: bool) -> dict[str, Any]:
    row = {
        "id": id,
        "s": rnd.choice("xyz"),
        "a": rnd.randint(-3, 3),
        "f": rnd.choice([0.0, -0.0, 1.5, NAN, -2.0, float("inf")]),
        "t": BEGIN + timedelta(seconds=rnd.randrange(300)),
        "b": rnd.choice(["", "a", "ab", "b\0", "b", "é"]),
        "d": Decimal(rnd.randint(-300, 300)).scaleb(-2),
        "z": rnd.random() < 0.5,
    }
    return {
        k: None if nulls and k not in "ids" and rnd.random() < 0.1 else v for k, v in row.items()
    }


def place(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    """Nulls below all values, NaN above, texts by their bytes."""
    value = row[name]
    if value is None:
        return (0,)
    if isinstance(value, float):
        return 1, value != value, 0.0 if value != value else value
    return 1, value.encode() if isinstance(value, str) else value


def in_order(rows: Any, ordered: list[str], key: list[str]) -> list[dict[str, Any]]:
    last = ordered[-1][:1] == "-"
    rows = list(rows)
    for each in reversed([*ordered, *(f"-{name}" if last else name for name in key)]):
        rows.sort(key=partial(place, each.lstrip("-")), reverse=each[0] == "-")
    return rows


def holds(row: dict[str, Any], each: tuple[Any, ...]) -> bool:
    value = row[each[0]]
    if len(each) == 2:
        return (value is None) == (each[1] == "is null")
    if value is None:
        return False
    return value in each[2] if each[1] == "in" else bool(COMPARE[each[1]](value, each[2]))


def condition(rnd: random.Random, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    name = rnd.choice([*TYPES])
    values = [row[name] for row in rnd.sample(rows, 3) if row[name] is not None]
    op = rnd.choice([*COMPARE, "=", "in", "is null", "is not null"])
    if op[:2] == "is" or not values:
        return name, "is not null"
    if op == "in":
        return name, op, [value for value in values if value == value]
    return name, op, values[0]


def same(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: "NaN" if v != v else v for k, v in row.items()} for row in rows]


@pytest.mark.parametrize("nulls", [False, True], ids=["no nulls", "nulls"])
@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (["id"], None),
        (["s", "id"], None),
        (["f", "id"], None),
        (["id"], [txnkv.hash_partition("id", 3)]),
    ],
    ids=["id", "s id", "f id", "three parts"],
)
@pytest.mark.parametrize("indexes", [0, pytest.param(3, marks=pytest.mark.slow), len(INDEXES)])
def test_they_are_sorted(
    client: txnkv.Client, key: list[str], parts: Any, indexes: int, nulls: bool
) -> None:
    rnd = random.Random(f"{key} {parts} {indexes} {nulls}")
    types = {k: f"{v}?" if nulls and k not in ("id", "s", *key) else v for k, v in TYPES.items()}
    table = client.create_table("t", txnkv.Schema(types, key), parts)
    for columns in rnd.sample(INDEXES, indexes):
        client.create_index(table, columns)
    rows: dict[Any, dict[str, Any]] = {}
    for turn in range(3):
        with client.transaction() as txn:
            for id in rnd.sample(range(600), 200):
                row = row_of(rnd, id, nulls=nulls and "f" not in key)
                old = next((k for k, each in rows.items() if each["id"] == id), None)
                if old is not None:
                    del rows[old]
                    txn.delete(table, old if len(key) > 1 else old[0])
                if rnd.random() < 0.9:
                    txn.upsert(table, row)
                    rows[tuple(row[name] for name in key)] = row
        if turn == 1:
            internals.flush(client)
    with client.snapshot() as before, client.transaction() as txn:
        seen = dict(rows)
        for id in range(600, 620):
            row = row_of(rnd, id, nulls=nulls and "f" not in key)
            txn.insert(table, row)
            seen[id] = row
        for reader, there in ((table, rows), (before, rows), (txn, seen)):
            look = partial(reader.scan, *(() if reader is table else (table,)))
            for _ in range(10):
                check(rnd, look, list(there.values()), key)
        txn.rollback()


def check(rnd: random.Random, look: Any, rows: list[dict[str, Any]], key: list[str]) -> None:
    where = [condition(rnd, rows) for _ in range(rnd.choice([0, 0, 1, 2]))]
    ordered = [rnd.choice(["", "-"]) + name for name in rnd.sample([*TYPES], rnd.randint(1, 3))]
    if rnd.random() < 0.6:
        way = rnd.choice(["", "-"])
        ordered = [way + each.lstrip("-") for each in ordered]
    wanted = in_order([row for row in rows if all(holds(row, w) for w in where)], ordered, key)
    columns = rnd.choice([None, None, ["id"], ["t", "id", "s"]])
    names = [*TYPES] if columns is None else columns
    limit = rnd.choice([None, 0, 1, 3, 10, 60])
    these = same([{name: row[name] for name in names} for row in wanted[:limit]])
    for given in [ordered] if len(ordered) > 1 else [ordered, ordered[0]]:
        asked = {"columns": columns, "where": where, "ordered": given, "limit": limit}
        assert same(list(look(**asked))) == these, asked
        assert same(look(**asked).to_arrow().to_pylist()) == these, asked
        batches = look(**asked).to_batches()
        assert same([row for batch in batches for row in batch.to_pylist()]) == these, asked


def queue(client: txnkv.Client) -> txnkv.Table:
    """A queue with 5,000 jobs that wait, and as many that are done."""
    types = {"id": "int64", "state": "string", "due": "timestamp[us, tz=UTC]", "kind": "int8"}
    table = client.create_table("queue", txnkv.Schema(types, ["id"]))
    client.create_index(table, ["state", "due"])
    client.create_index(table, "kind")
    ids = range(10_000)
    data = {
        "id": ids,
        "state": ["done" if id % 2 else "waits" for id in ids],
        "due": [due(id) for id in ids],
        "kind": [id % 100 for id in ids],
    }
    with client.transaction() as txn:
        txn.write(table, pa.table(data, table.schema.arrow))
    return table


def due(id: int) -> datetime:
    return BEGIN + timedelta(seconds=id * 7919 % 10_007)


@pytest.mark.parametrize("flushed", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize(
    ("where", "ordered", "limit"),
    [
        ([("state", "=", "waits")], "due", 1),
        ([("state", "=", "waits")], "-due", 20),
        ([("state", "=", "waits")], ["state", "-due", "-id"], 2),
        ([("state", "=", "waits"), ("due", "<", due(17))], "-due", 3),
        ([("state", "=", "waits"), ("kind", "=", 42)], "due", 2),
        ([("state", "in", ["waits", "done"])], ["due"], 10),
        ([("state", "in", ["waits", "done"])], ["state", "due"], 10),
        ([("state", "=", "waits"), ("id", ">", 7000)], ["due", "id"], 1),
        (None, ["state", "due"], 5),
        (None, ["-state", "-due"], 5),
        (None, "kind", 150),
    ],
    ids=str,
)
def test_an_index_leads_to_the_first_ones(
    client: txnkv.Client,
    where: Any,
    ordered: Any,
    limit: int,
    flushed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = queue(client)
    if flushed:
        internals.flush(client)
    names = [ordered] if isinstance(ordered, str) else ordered
    rows = [row for row in table.scan() if all(holds(row, each) for each in where or ())]
    wanted = in_order(rows, names, ["id"])[:limit]

    def plan(*args: Any) -> Any:
        raise AssertionError("a scan of all was planned")

    with monkeypatch.context() as patch, client.transaction() as txn:
        patch.setattr(scan, "plan", plan)
        scans = [table.scan(where=where, ordered=ordered, limit=limit) for _ in range(2)]
        assert list(scans[0]) == wanted
        found = scans[1].to_arrow()
        assert found.schema == table.schema.arrow
        assert same(found.to_pylist()) == wanted
        batches = table.scan(["due", "id"], where, ordered=ordered, limit=limit).to_batches()
        assert pa.Table.from_batches(batches)["id"].to_pylist() == [row["id"] for row in wanted]
        assert list(txn.scan(table, ["id"], where, ordered, limit)) == [
            {"id": row["id"]} for row in wanted
        ]


def test_few_rows_are_sorted_without_a_plan(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = queue(client)
    with monkeypatch.context() as patch:
        patch.setattr(scan, "plan", None)
        kinds = table.scan(["id"], [("kind", "=", 3)], ordered=["-kind", "-id"], limit=2)
        assert list(kinds) == [{"id": 9903}, {"id": 9803}]
        assert [row["id"] for row in table.scan(where=[("id", "=", 5)], ordered="-due")] == [5]
        some = table.scan(["id"], [("id", "<", 4)], ordered=["-state", "due"])
        assert [row["id"] for row in some] == sorted([0, 2], key=due) + sorted([1, 3], key=due)


def test_two_who_take_the_first_job_at_once(client: txnkv.Client) -> None:
    """A job that comes before the first one is a phantom to who took that."""
    table = queue(client)
    first = {"where": [("state", "=", "waits")], "ordered": "due", "limit": 1}
    one = client.new_transaction(isolation="serializable")
    (job,) = one.scan(table, **first)
    one.update(table, {"id": job["id"], "state": "done"})
    table.insert((20_000, "waits", BEGIN - timedelta(days=1), 0))
    with pytest.raises(txnkv.TransactionConflictError):
        one.commit()
    (job,) = table.scan(**first)
    assert job["id"] == 20_000


@pytest.mark.parametrize("first", ["state due", "due"])
def test_of_two_indexes_the_narrower_one_is_read(client: txnkv.Client, first: str) -> None:
    """It was the one that was made first: all jobs that are done were looked at, and conflicts."""
    table = queue(client)
    if first == "due":
        client.drop_index(table, ["state", "due"])
        client.create_index(table, "due")
        client.create_index(table, ["state", "due"])
    else:
        client.create_index(table, "due")
    txn = client.new_transaction(isolation="serializable")
    (job,) = txn.scan(table, where=[("state", "=", "waits")], ordered="due", limit=1)
    txn.update(table, {"id": job["id"], "state": "taken"})
    table.update({"id": 1, "due": BEGIN - timedelta(days=1)})  # one that is done
    txn.commit()


def test_a_transaction_of_its_own_rows_looks_at_few(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, looked = queue(client), 0
    rows_of = short_scan.rows_of

    def counted(tables: Any, writer: Any, view: Any, keys: Any, *args: Any) -> Any:
        nonlocal looked
        keys = list(keys)
        looked += len(keys)
        return rows_of(tables, writer, view, keys, *args)

    monkeypatch.setattr(short_scan, "rows_of", counted)
    where = [("state", "in", ["done", "waits", "taken"]), ("kind", "=", 101)]
    with client.transaction() as txn:
        txn.insert(table, (10_000, "waits", BEGIN, 101))
        asked = {"where": where, "ordered": "due", "limit": 2}
        assert [row["id"] for row in txn.scan(table, **asked)] == [10_000]
        assert looked <= 600


def test_rows_that_are_wide(client: txnkv.Client) -> None:
    """At 1 MB of those that an index had found it sorted all, in memory."""
    types = {"id": "int64", "v": "int64", "s": "string"}
    table = client.create_table("t", txnkv.Schema(types, ["id"]))
    client.create_index(table, "v")
    with client.transaction() as txn:
        for id in range(60):
            txn.insert(table, (id, -id, "x" * 100_000))
    first = {"ordered": "v", "limit": 30}
    assert [row["id"] for row in table.scan(**first)] == list(range(59, 29, -1))
    assert table.scan(["id"], **first).to_arrow()["id"].to_pylist() == list(range(59, 29, -1))


def test_a_column_twice_and_limits_of_numpy(client: txnkv.Client) -> None:
    table = queue(client)
    assert table.scan(limit=10**30).to_arrow().num_rows == 10_000
    for limit in (np.int8(5), np.uint8(250), 2000):
        for ordered in ("due", ["-kind", "due"]):
            scan = table.scan(["id", "id"], ordered=ordered, limit=limit)
            (column, again) = scan.to_arrow().columns
            assert column.equals(again)
            assert len(column) == limit
            assert [row["id"] for row in scan] == column.to_pylist()
            assert all(batch.schema == scan.schema for batch in scan.to_batches())


def test_parts_of_it_are_each_in_order(client: txnkv.Client) -> None:
    parts = [txnkv.hash_partition("id", 3)]
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "int64"}, ["id"]), parts)
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": range(900), "v": [id * 7 % 900 for id in range(900)]}))
    tokens = table.scan(["v"], ordered="-v").tokens(100)
    found = [token.open(client).to_arrow()["v"].to_pylist() for token in tokens]
    assert len(found) == 3
    assert [sorted(part, reverse=True) for part in found] == found
    assert {v for part in found for v in part} == {*range(900)}


@pytest.mark.parametrize("limit", [3, 400, None])
def test_only_as_many_as_are_wanted_are_kept(
    limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows are taken in pieces, of which Arrow takes no more than 2 GiB."""
    monkeypatch.setattr(ordering, "_MORE", 50)
    monkeypatch.setattr(ordering, "_BYTES", 800)
    monkeypatch.setattr(ordering, "_AT_ONCE", 800)
    schema = pa.schema({"v": pa.int64(), "s": pa.string()})
    whole: list[int] = []
    sorting = ordering._sorted

    def counted(batches: Any, *args: Any) -> Any:
        whole.append(sum(batch.num_rows for batch in batches))
        return sorting(batches, *args)

    monkeypatch.setattr(ordering, "_sorted", counted)
    rnd = random.Random(limit)
    values = [rnd.randrange(500) for _ in range(3000)]
    data = pa.table({"v": values, "s": [str(i) for i in range(3000)]}, schema)
    by = [ordering.By("v", True), ordering.By("s", False)]
    found = list(ordering.in_order(data.to_batches(max_chunksize=7), schema, by, limit))
    rows = pa.Table.from_batches(found, schema).to_pylist()
    assert rows == in_order(data.to_pylist(), ["-v", "s"], [])[:limit]
    assert max(batch.num_rows for batch in found) <= 50
    assert max(whole) <= (3000 if limit is None else 2 * limit + 50 + 7)


@pytest.mark.parametrize(
    ("ordered", "where", "order"),
    [
        ("id", None, True),
        (["a", "-id"], None, ("a", "-id")),
        ("-a", None, ("-a",)),
        (["a", "id"], None, ("a", "id")),
        (["-id", "a"], None, "descending"),
        ("a", [("a", "=", 1)], True),
        (["-a", "id"], [("a", "=", 1)], True),
        (["a", "-id"], [("a", "=", 1)], "descending"),
        ("f", [("f", "=", NAN)], ("f",)),
        ((), None, False),
    ],
    ids=str,
)
def test_the_order_by_key_is_known(ordered: Any, where: Any, order: Any) -> None:
    schema = txnkv.Schema({"id": "int64", "a": "int64", "f": "float64"}, ["id"])
    constant = scan.parse(where, schema).shape.constant
    assert ordering.checked(schema, ordered, constant) == order


@pytest.mark.parametrize(
    ("ordered", "kind", "said"),
    [
        (
            "desc",
            txnkv.SchemaError,
            "no column 'desc' to order by; there are id, l, -x. By primary",
        ),
        (["-l"], txnkv.SchemaError, "column 'l' is list<item: int64>, whose values have no order"),
        ([1], TypeError, r"ordered names columns, as \['-total', 'id'\], and 1 is no name"),
    ],
)
def test_what_is_no_order(client: txnkv.Client, ordered: Any, kind: Any, said: str) -> None:
    types = {"id": "int64", "l": "list<int64>", "-x": "int64"}
    table = client.create_table("t", txnkv.Schema(types, ["id"]))
    with pytest.raises(kind, match=said):
        table.scan(ordered=ordered)
    table.insert((1, [], 2))
    table.insert((2, [], 1))
    assert [row["id"] for row in table.scan(ordered="-x")] == [2, 1]
    assert [row["id"] for row in table.scan(ordered="--x")] == [1, 2]
