"""Rows given one by one whose operation or columns change from row to row, in a large transaction:
each counts after those before it, as in a small one, and few of them ask status.db.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.tables.tablets import manifest
from txnkv.tables.write import write_buffer

OPERATIONS = (
    "insert", "insert_ignore", "upsert", "update", "update_ignore", "delete", "delete_ignore",
)  # fmt: skip
SCHEMA = txnkv.Schema({"id": "int64", "u": "int64", "v": "string?"}, primary_key=["id"])
NAMED = txnkv.Schema({"id": "string", "u": "int64", "v": "string?"}, primary_key=["id"])
KEYS = 60
Rows = dict[Any, dict[str, Any]]


@pytest.fixture(params=["large", "small"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether transactions stage what they write, again and again, or none of it."""
    if request.param == "large":
        monkeypatch.setattr(write_buffer, "MAX_ROWS", 40)
    return str(request.param)


def becomes(rows: Rows, op: str, given: Any, *, unique: bool) -> str:
    """Do an operation on rows as a dict; what became of it, or the name of the error."""
    id = given if op.startswith("delete") else given["id"]
    old, ignored = rows.get(id), op.endswith("_ignore") and "ignored"
    if op.startswith("delete"):
        if old is None:
            return ignored or "NotFoundError"
        del rows[id]
        return "deleted"
    if op.startswith("insert") and old is not None:
        return ignored or "AlreadyPresentError"
    if op.startswith("update") and old is None:
        return ignored or "NotFoundError"
    new = {"v": None, **(old or {}), **given}
    if "u" not in new:
        return "SchemaError"
    if unique and any(each["u"] == new["u"] for key, each in rows.items() if key != id):
        return ignored or "AlreadyPresentError"
    rows[id] = new
    return "inserted" if old is None else "updated"


def some_row(chance: random.Random, op: str, key: Callable[[int], Any]) -> Any:
    id = key(chance.randrange(KEYS))
    if op.startswith("delete"):
        return id
    row = {"id": id, "u": chance.randrange(3 * KEYS), "v": f"{chance.random()}"}
    if op.startswith("up"):
        return {name: row[name] for name in row if name == "id" or chance.random() < 0.7}
    return row if chance.random() < 0.7 else {**row, "v": None}


@pytest.mark.parametrize("index", ["plain", "index", "unique"])
@pytest.mark.parametrize("how", ["snapshot", "serializable", "alone"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_all_operations_in_any_order(
    client: txnkv.Client,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    index: str,
    seed: int,
) -> None:
    """As those on a dict, in two tables at a time: what is there, the counts and the errors."""
    chance, unique, stored = random.Random(f"{seed} {how} {index}"), index == "unique", 0
    monkeypatch.setattr(write_buffer, "_AHEAD", chance.choice([1, 7, 50, 500]))
    client.create_table("t", SCHEMA, txnkv.hash_partition("id", 2))
    client.create_table("named", NAMED)
    if index != "plain":
        client.create_index("t", "u", unique=unique)
        client.create_index("named", "v")
    tables: dict[str, tuple[Callable[[int], Any], Rows]] = {"t": (int, {}), "named": (str, {})}

    def give(session: txnkv.Session) -> tuple[Counter[str], list[Any]]:
        told, refused = Counter[str](), list[Any]()
        stay = chance.choice([0.0, 0.5, 0.95])
        op, name = chance.choice(OPERATIONS), "t"
        for _ in range(chance.choice([1, 10, 80, 150])):
            if chance.random() >= stay:
                op, name = chance.choice(OPERATIONS), chance.choice([*tables])
            key, rows = tables[name]
            given = some_row(chance, op, key)
            getattr(session, op)(name, given)
            made = becomes(rows, op, given, unique=unique and name == "t")
            if made.endswith("Error"):
                refused.append((op, name, given if "delete" in op else given["id"], made))
            else:
                told[made] += 1
        return told, refused

    for _ in range(3):
        for name, (key, rows) in tables.items():  # what others have committed
            for id in set(map(key, chance.sample(range(KEYS), 20))) - rows.keys():
                rows[id] = {"id": id, "u": 1000 + int(id), "v": "before"}
                client.table(name).upsert(rows[id])
        txn = None if how == "alone" else client.new_transaction(isolation=how)
        session = client.new_session() if txn is None else txn.new_session()
        for last in [False] * 5 + [txn is not None]:
            if txn is not None and chance.random() < 0.2:  # by another session
                id = chance.randrange(KEYS)
                txn.write("t", pa.table({"id": [id]}), op="delete_ignore")
                tables["t"][1].pop(id, None)
            told, refused = give(session)
            found = list[Any]()
            try:
                if last and txn is not None:
                    txn.commit()  # looks at no counts
                    stored += txn.context.stored
                else:
                    done = session.flush()
                    assert told == +Counter(vars(done))
            except txnkv.RowErrors as errors:
                found = [(e.op, e.table, e.key, type(e.error).__name__) for e in errors.errors]
            assert found == refused
        if txn is None:
            session.close()
        elif txn.state is txnkv.TxnState.OPEN:
            stored += txn.context.stored
            txn.commit()
        for name, (_, rows) in tables.items():
            assert list(client.table(name).scan(ordered=True)) == [rows[id] for id in sorted(rows)]
    assert bool(stored) == (kind == "large" and how != "alone")
    assert client.check().problems == []


@pytest.mark.parametrize("op", ["delete_ignore", "upsert", "update"])
@pytest.mark.parametrize("tables", [1, 2])
def test_few_rows_ask_status_db(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, op: str, tables: int
) -> None:
    """Each did that was in a run by itself."""
    names = [f"t{i}" for i in range(tables)]
    for name in names:
        client.create_table(name, SCHEMA)
    with monkeypatch.context() as patched:
        patched.setattr(write_buffer, "MAX_ROWS", 100)
        txn = client.new_transaction()
        txn.insert(names[0], {"id": 0, "u": 0, "v": "old"})
    for id in range(1, 101):
        txn.insert(names[0], {"id": id, "u": id, "v": "old"})
    txn.flush()
    assert txn.context.stored
    asked, real = [], manifest.staged

    def staged(*args: Any, **named: Any) -> Any:
        asked.append(args)
        return real(*args, **named)

    monkeypatch.setattr(manifest, "staged", staged)
    for i in range(1000):
        name, id = names[i % tables], i // tables
        txn.upsert(name, {"id": id, "u": i, "v": "new"})
        txn.upsert(name, {"id": 5000 + i, "u": i})
        if op == "update":
            txn.update(name, {"id": id, "v": "newer"})
        elif op == "upsert":
            txn.upsert(name, {"id": id, "u": 0})
        else:
            txn.delete_ignore(name, 10_000 + id)
    done = txn.flush()
    assert done.inserted == 2000 - 101
    assert len(asked) <= 20 * tables
    txn.commit()
    assert sum(client.table(name).count() for name in names) >= 2000


def test_large_rows_are_looked_up_few_at_a_time(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many bytes, not rows: 500 of a megabyte were read for each, and kept."""
    table = client.create_table("t", SCHEMA)
    with client.transaction() as txn:
        for id in range(200):
            txn.insert(table, {"id": id, "u": id, "v": "v" * 300_000 if id < 100 else "v"})
    with monkeypatch.context() as patched:
        patched.setattr(write_buffer, "MAX_ROWS", 0)
        txn = client.new_transaction()
        txn.insert(table, {"id": 1000, "u": 0, "v": None})
        txn.insert(table, {"id": 1001, "u": 0, "v": None})
        txn.flush()
    assert txn.context.stored
    looked: list[int] = []
    real = write_buffer.lookup.find_some

    def find_some(*args: Any) -> Any:
        looked.append(len(args[3]))
        return real(*args)

    monkeypatch.setattr(write_buffer.lookup, "find_some", find_some)
    for id in range(100):
        (txn.delete, txn.delete_ignore)[id % 2](table, id)
    txn.flush()
    assert sum(looked) < 400
    assert max(looked[1:]) < 16
    del looked[:]
    for id in range(100, 200):
        (txn.delete, txn.delete_ignore)[id % 2](table, id)
    txn.flush()
    assert max(looked) > 16
    txn.commit()
    assert table.count() == 2


@pytest.mark.parametrize("again", [1, 50, 400])
def test_a_row_that_is_only_staged_is_not_told_to_be_in_the_table(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    client.create_table("t", SCHEMA)
    with client.transaction() as before:
        before.insert("t", {"id": -1, "u": 0, "v": None})
    monkeypatch.setattr(write_buffer, "MAX_ROWS", 100)
    txn = client.new_transaction()
    for id in range(500):
        txn.insert("t", {"id": id, "u": id, "v": None})
    txn.flush()
    assert txn.context.stored
    for id in range(-1, again):
        txn.insert("t", {"id": id, "u": id, "v": None})
    with pytest.raises(txnkv.RowErrors) as caught:
        txn.flush()
    first, *rest = (str(each.error) for each in caught.value.errors)
    assert first == "a row with this key is in the table"
    assert {*rest} == {"this transaction has staged the key already"}
    txn.rollback()
