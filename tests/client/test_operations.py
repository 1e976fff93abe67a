"""The seven operations by row, small and large, against a dict that does them one by one."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

import txnkv
from txnkv.tables.operations import OPERATIONS

SCHEMA = txnkv.Schema(
    {
        "id": "int64",
        "s": "string?",
        "n": txnkv.Column("int32", default=7),
        "x": "float64?",
    },
    primary_key=["id"],
)
DEFAULTS = {"s": None, "n": 7, "x": None}
pytestmark = pytest.mark.usefixtures("size")


@dataclasses.dataclass
class Whole:
    id: int
    s: str | None
    n: int
    x: float | None


class Model:
    """A table, and the outcome of operations on it, row by row."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.result = txnkv.WriteResult()
        self.refused: list[tuple[str, int, str]] = []

    def apply(self, op: str, key: int, given: dict[str, Any]) -> None:
        there = key in self.rows
        verb = op.removesuffix("_ignore")
        if (verb == "insert" and there) or (verb in ("update", "delete") and not there):
            if op.endswith("_ignore"):
                self.result.ignored += 1
            else:
                error = "AlreadyPresentError" if verb == "insert" else "NotFoundError"
                self.refused.append((op, key, error))
        elif verb == "delete":
            del self.rows[key]
            self.result.deleted += 1
        else:
            self.rows[key] = {**self.rows.get(key, {"id": key, **DEFAULTS}), **given}
            if there:
                self.result.updated += 1
            else:
                self.result.inserted += 1

    def take(self) -> tuple[txnkv.WriteResult, list[tuple[str, int, str]]]:
        found = self.result, self.refused
        self.result, self.refused = txnkv.WriteResult(), []
        return found


def _row(rng: random.Random, op: str, key: int) -> tuple[Any, dict[str, Any]]:
    """A row in some form, and the columns that it gives."""
    if op.startswith("delete"):
        return rng.choice([key, (key,), {"id": key}]), {}
    whole = {
        "s": rng.choice([None, "", "zwölf", "x" * 40]),
        "n": rng.randrange(-5, 5),
        "x": rng.choice([None, 0.5, -1e300]),
    }
    form = rng.randrange(4)
    if form == 0:
        return (key, *whole.values()), whole
    if form == 1:
        return Whole(key, **whole), whole
    some = {name: whole[name] for name in whole if form == 2 or rng.random() < 0.5}
    return {"id": key, **some}, some


@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_any_operations_in_any_order(
    make: Any, client: txnkv.Client, seed: int, partitions: int | None
) -> None:
    by = txnkv.hash_partition("id", partitions) if partitions else None
    table = client.create_table("rows", SCHEMA, by)
    rng = random.Random(seed)
    model = Model()
    session, end = make()
    for _ in range(25):
        for _ in range(rng.choice([1, 2, 5, 30])):
            op = rng.choice(OPERATIONS)
            key = rng.randrange(25)
            row, given = _row(rng, op, key)
            getattr(session, op)(table, row)
            model.apply(op, key, given)
        wanted, refused = model.take()
        if refused:
            with pytest.raises(txnkv.RowErrors) as caught:
                session.flush()
            told = [(e.op, e.key, type(e.error).__name__) for e in caught.value.errors]
            assert sorted(told) == sorted(refused)
            assert caught.value.count == len(refused)
        else:
            assert session.flush() == wanted
    end()
    assert {row["id"]: row for row in table.scan()} == model.rows
    assert table.count() == len(model.rows)
    for key in range(25):
        assert table.get(key) == model.rows.get(key)


def test_a_transaction_sees_what_each_statement_left(client: txnkv.Client) -> None:
    table = client.create_table("rows", SCHEMA)
    with client.transaction() as txn:
        txn.insert(table, {"id": 1, "s": "a"})
        assert txn.get(table, 1) == {"id": 1, "s": "a", "n": 7, "x": None}
        txn.update(table, {"id": 1, "n": 8})
        assert txn.get(table, 1) == {"id": 1, "s": "a", "n": 8, "x": None}
        txn.delete(table, 1)
        assert txn.get(table, 1) is None
        assert txn.scan(table).to_arrow().num_rows == 0
        txn.upsert(table, {"id": 1, "x": 2.0})
        assert txn.get_many(table, [2, 1]).to_pylist()[1] == {"id": 1, "s": None, "n": 7, "x": 2.0}
        txn.upsert(table, {"id": 1, "s": None, "n": 9})
    assert table.get(1) == {"id": 1, "s": None, "n": 9, "x": 2.0}


def test_an_update_keeps_what_it_does_not_name(client: txnkv.Client) -> None:
    """UPDATE touches only columns explicitly set; None is null, and a value like any other."""
    table = client.create_table("rows", SCHEMA)
    with client.new_session() as session:
        session.insert(table, (1, "a", 1, 1.0))
        session.insert(table, (2, "b", 2, 2.0))
    with client.new_session() as session:
        session.update(table, {"id": 1, "s": None})
        session.upsert(table, {"id": 2, "x": None})
        session.update(table, {"id": 2})
    assert table.get(1) == {"id": 1, "s": None, "n": 1, "x": 1.0}
    assert table.get(2) == {"id": 2, "s": "b", "n": 2, "x": None}


def test_an_upsert_of_a_new_row_needs_its_columns(make: Any, client: txnkv.Client) -> None:
    schema = txnkv.Schema({"id": "int64", "must": "string", "may": "int64?"}, primary_key=["id"])
    table = client.create_table("needy", schema)
    session, end = make()
    session.insert(table, (1, "a", 1))
    session.flush()
    session.upsert(table, {"id": 1, "may": 2})
    session.upsert(table, {"id": 2, "may": 2})
    with pytest.raises(txnkv.RowErrors, match="a new one needs a value for must") as caught:
        session.flush()
    assert [(e.key, type(e.error)) for e in caught.value.errors] == [(2, txnkv.SchemaError)]
    end()
    assert list(table.scan()) == [{"id": 1, "must": "a", "may": 2}]


def test_a_table_of_nothing_but_its_key(make: Any, client: txnkv.Client) -> None:
    schema = txnkv.Schema({"a": "string", "b": "int16"}, primary_key=["b", "a"])
    table = client.create_table("keys", schema)
    session, end = make()
    for n in range(40):
        session.insert(table, {"a": str(n % 3), "b": n})
    session.upsert(table, ("0", 0))
    session.delete(table, (3, "0"))
    session.delete_ignore(table, {"a": "0", "b": 3})
    result = session.flush()
    assert (result.inserted, result.updated, result.deleted, result.ignored) == (40, 1, 1, 1)
    end()
    assert table.get((5, "2")) == {"a": "2", "b": 5}
    assert table.get((3, "0")) is None
    assert table.count() == 39


BAD_KEYS = [
    ("too many values", (1, 2), txnkv.SchemaError, "1 values, not 2"),
    ("null", None, txnkv.SchemaError, "a key has no nulls"),
    ("another type", "1", txnkv.SchemaError, "'id' is int64"),
    ("unknown column", {"id": 1, "idd": 2}, txnkv.SchemaError, "no column 'idd'"),
]


@pytest.mark.parametrize(
    ("key", "kind", "words"), [case[1:] for case in BAD_KEYS], ids=[case[0] for case in BAD_KEYS]
)
def test_bad_keys_are_refused_at_the_call(
    make: Any, client: txnkv.Client, key: Any, kind: type[Exception], words: str
) -> None:
    table = client.create_table("rows", SCHEMA)
    session, end = make()
    with pytest.raises(kind, match=words):
        session.delete(table, key)
    end()


def test_an_update_names_its_key(make: Any, client: txnkv.Client) -> None:
    table = client.create_table("rows", SCHEMA)
    session, end = make()
    for op in ("update", "upsert", "update_ignore"):
        with pytest.raises(txnkv.SchemaError, match="'id' is not nullable"):
            getattr(session, op)(table, {"s": "a"})
    end()


def test_rows_by_the_columns_of_an_index(client: txnkv.Client) -> None:
    """A transaction sees what it wrote, a snapshot what was there; each as `Table.get_by`."""
    schema = txnkv.Schema({"id": "int64", "mail": "string?", "n": "int64"}, ["id"])
    table = client.create_table("people", schema)
    client.create_index(table, "mail", unique=True)
    client.create_index(table, ["n", "mail"])
    old = [{"id": i, "mail": f"m{i}", "n": i % 2} for i in range(4)]
    for row in old:
        table.insert(row)
    with client.snapshot() as snapshot, client.transaction() as txn:
        txn.update(table, {"id": 1, "mail": "new"})
        txn.insert(table, {"id": 9, "mail": "m1", "n": 1})
        txn.delete(table, 3)
        table.delete(2)
        assert txn.get_by(table, "mail", "new") == [{"id": 1, "mail": "new", "n": 1}]
        assert txn.get_by("people", ["mail"], ("m1",)) == [{"id": 9, "mail": "m1", "n": 1}]
        assert txn.get_by(table, ["n", "mail"], (1, "m1")) == [{"id": 9, "mail": "m1", "n": 1}]
        assert txn.get_by(table, "mail", "m2") == [old[2]]  # its snapshot has it
        assert txn.get_by(table, "mail", "m3") == txn.get_by(table, "mail", None) == []
        for seen in (txn, snapshot):
            with pytest.raises(txnkv.SchemaError, match="no index by n; there are: mail; n, mail"):
                seen.get_by(table, "n", 1)
        assert snapshot.get_by("people", "mail", "new") == []
        assert [snapshot.get_by(table, "mail", f"m{i}") for i in range(4)] == [[r] for r in old]
    assert table.get_by("mail", "m2") == table.get_by("mail", "m3") == []
    assert table.get_by("mail", "m1") == [{"id": 9, "mail": "m1", "n": 1}]
