"""The first rows that satisfy conditions, by keys or entries of indexes, beside a plain model."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.tables.read import scan

NAN = float("nan")
TYPES = {"a": "int8", "f": "float64", "id": "int64", "s": "int8", "x": "float32?", "t": "string?"}
KEYS = ["a", "f", "id"], ["id"], ["f", "id"]
INDEXES: list[list[list[str]]] = [
    [],
    [["s"]],
    [["s", "id"]],
    [["s", "x"], ["t"]],
    [["x"], ["a", "s"]],
    [["x", "s"]],
]
PARTS = None, [txnkv.hash_partition("id", 3)]
COMPARE = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip


def row_of(rnd: random.Random, id: int) -> dict[str, Any]:
    floats = [0.5, -0.0, 0.0, 3.0, -7.25, 1e300, NAN, float("inf")]
    return {
        "a": rnd.randrange(3),
        "f": rnd.choice(floats),
        "id": id,
        "s": rnd.choice([0, 0, 0, 0, 1, 2]),
        "x": rnd.choice([None, 0.5, 3.0, NAN, -7.25]),
        "t": rnd.choice([None, "a", "b"]),
    }


def condition(rnd: random.Random) -> tuple[Any, ...]:
    name = rnd.choice([*TYPES])
    if name in ("x", "t") and rnd.random() < 0.2:
        return name, rnd.choice(["is null", "is not null"])
    constants = {
        "a": [0, 1, 2, 5], "f": [0.5, 0.0, -0.0, 3, NAN, 1e300], "id": [0, 7, 300, 4000],
        "s": [0, 1, 2], "x": [0.5, 3.0, 0.1, NAN, 3], "t": ["a", "b", "c"],
    }[name]  # fmt: skip
    if rnd.random() < 0.15:
        return name, "in", rnd.sample(constants, 2)
    return name, rnd.choice([*COMPARE, "="]), rnd.choice(constants)


def holds(row: dict[str, Any], each: tuple[Any, ...]) -> bool:
    value, op = row[each[0]], each[1]
    if op in ("is null", "is not null"):
        return (value is None) == (op == "is null")
    if value is None:
        return False
    if op == "in":
        return any(value == one or (value != value and one != one) for one in each[2])
    return bool(COMPARE[op](value, each[2]))


def place(key: list[str]) -> Any:
    def of(row: dict[str, Any]) -> list[Any]:
        return [
            (row[name] != row[name], 0 if row[name] != row[name] else row[name]) for name in key
        ]

    return of


def same(rows: list[dict[str, Any]]) -> list[str]:
    return [repr(row).replace("-0.0", "0.0") for row in rows]


@pytest.mark.parametrize(
    ("indexes", "key", "parts"),
    [
        pytest.param(indexes, key, parts, marks=[pytest.mark.slow] if (i + k + n) % 2 else [])
        for i, indexes in enumerate(INDEXES)
        for k, key in enumerate(KEYS)
        for n, parts in enumerate(PARTS)
    ],
)
def test_they_are_the_first_by_key(
    client: txnkv.Client, key: list[str], indexes: list[list[str]], parts: Any
) -> None:
    rnd = random.Random(f"{key} {indexes} {parts}")
    table = client.create_table("t", txnkv.Schema(TYPES, key), parts)
    for columns in indexes:
        client.create_index(table, columns)
    rows = [row_of(rnd, id) for id in range(400)]
    for part in (rows[:250], rows[250:350], rows[350:]):
        with client.transaction() as txn:
            for row in part:
                txn.insert(table, row)
        if part[0]["id"] < 300:
            internals.flush(client)
    rows.sort(key=place(key))
    names: list[Any] = [None, ["id"], ["x", "t"], []]
    for _ in range(20):
        where = [condition(rnd) for _ in range(rnd.choice([1, 2, 2, 3]))]
        limit, columns = rnd.choice([None, 0, 1, 2, 20, 399]), rnd.choice(names)
        wanted = [row for row in rows if all(holds(row, each) for each in where)]
        if columns is not None:
            wanted = [{name: row[name] for name in columns} for row in wanted]
        asked = {"columns": columns, "where": where, "limit": limit}
        for isolation in ("snapshot", "serializable"):
            with client.transaction(isolation=isolation) as txn:
                found = list(txn.scan(table, ordered=True, **asked))
            assert same(found) == same(wanted[:limit]), (asked, isolation)
        assert same(list(table.scan(ordered=True, **asked))) == same(wanted[:limit]), asked
        last = same(list(table.scan(ordered="descending", **asked)))
        assert last == same(wanted[::-1][:limit]), asked
        some = same(list(table.scan(**asked)))
        assert len(some) == len(wanted[:limit])
        assert not set(some) - set(same(wanted)), asked
        assert table.count(where) == len(wanted)
        assert table.scan(ordered=True, **asked).to_arrow().num_rows == len(wanted[:limit])


@pytest.mark.parametrize("parts", [None, [txnkv.range_partition("a", [2])], PARTS[1]], ids=str)
def test_several_values_of_several_columns_of_a_key(client: txnkv.Client, parts: Any) -> None:
    """They were taken in pairs: of 4 rows there were 2."""
    table = client.create_table("t", txnkv.Schema({"a": "int8", "id": "int8"}, ["a", "id"]), parts)
    with client.transaction() as txn:
        for a in range(4):
            for id in range(4):
                txn.insert(table, (a, id))
    for firsts, seconds in (([1, 2], [1, 2]), ([3, 0], [2]), ([1], [0, 3, 9]), ([2, 1, 0], [3, 0])):
        where = [("a", "in", firsts), ("id", "in", seconds)]
        wanted = [(a, id) for a in sorted(firsts) for id in sorted(seconds) if id < 4]
        rows = [{"a": a, "id": id} for a, id in wanted]
        assert list(table.scan(where=where, ordered=True)) == rows
        assert table.scan(where=where, ordered=True).to_arrow().to_pylist() == rows
        assert list(table.scan(where=where, ordered=True, limit=3)) == rows[:3]
        assert table.count(where) == len(rows)
        with client.transaction() as txn:
            txn.upsert(table, wanted[0])
            assert list(txn.scan(table, where=where, ordered=True)) == rows


@pytest.mark.parametrize(
    ("key", "index", "where"),
    [
        (["id"], None, [("id", ">", 300), ("s", "=", 0)]),
        (["id"], None, [("s", "=", 0)]),
        (["a", "id"], None, [("a", "=", 1), ("s", "=", 0)]),
        (["id"], ["s"], [("s", "=", 0)]),
        (["id"], ["s"], [("s", "=", 0), ("id", ">", 1000)]),
        (["id"], ["s", "id"], [("s", "=", 0)]),
        (["id"], ["s", "id"], [("s", "=", 0), ("id", ">", 1000)]),
        (["f", "id"], None, [("f", "<=", 3.0)]),
        (["id"], ["f"], [("f", "=", 3.0)]),
    ],
    ids=str,
)
def test_they_are_found_without_a_plan(
    client: txnkv.Client, key: list[str], index: Any, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = client.create_table("t", txnkv.Schema(TYPES, key))
    if index is not None:
        client.create_index(table, index)
    with client.new_session() as session:
        for id in range(4000):
            row = {"a": 1, "f": float(id % 5), "id": id, "s": id % 2, "x": None, "t": "a"}
            session.insert(table, row)
    internals.flush(client)
    wanted = list(table.scan(where=where, ordered=True).to_arrow().slice(0, 3).to_pylist())

    def plan(*args: Any) -> Any:
        raise AssertionError("a scan of all was planned")

    with monkeypatch.context() as patch, client.transaction() as txn:
        patch.setattr(scan, "plan", plan)
        assert list(table.scan(where=where, ordered=True, limit=3)) == wanted
        assert list(txn.scan(table, ["id"], where, limit=3)) == [
            {"id": row["id"]} for row in wanted
        ]


@pytest.mark.parametrize("priorities", [1, 2, 5, 20])
@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
def test_a_queue_gives_the_first_row_that_is_left(
    client: txnkv.Client, isolation: Any, priorities: int
) -> None:
    rnd, left = random.Random(priorities), list[tuple[int, int]]()
    schema = txnkv.Schema({"q": "string", "p": "int8", "id": "int64"}, ["q", "p", "id"])
    queue = client.create_table("queue", schema)
    before: list[tuple[txnkv.Snapshot, list[tuple[int, int]]]] = []

    def first(reader: Any, descending: bool = False) -> Any:
        order = "descending" if descending else True
        asked = reader.scan(queue, ["p", "id"], [("q", "=", "a")], ordered=order, limit=1)
        return [(row["p"], row["id"]) for row in asked]

    for turn in range(1500):
        with client.transaction() as txn:
            for n in range(rnd.choice([0, 1, 1, 4])):
                left.append((rnd.randrange(priorities), 10 * turn + n))
                txn.insert(queue, ("a", *left[-1]))
        left.sort()
        for _ in range(rnd.choice([0, 1, 2, 3])):
            with client.transaction(isolation=isolation) as txn:
                assert first(txn) == left[:1]
                if left:
                    txn.delete(queue, ("a", *left.pop(0)))
                    assert first(txn) == left[:1]
        if turn % 100 == 0:
            before.append((client.snapshot(), left[:]))
        if turn == 700:
            internals.flush(client)
    for snapshot, rows in before:
        with snapshot:
            assert first(snapshot) == rows[:1]
            assert first(snapshot, descending=True) == rows[-1:]
