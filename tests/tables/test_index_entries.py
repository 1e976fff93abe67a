"""Entries of indexes: of rows with a null, of values that move on, of rows that go meanwhile."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.tables.people import SCHEMA, batch, ids
from txnkv.client import indexes
from txnkv.tables.read import short_scan
from txnkv.tables.row_writer import RowWriter
from txnkv.tables.write import index_changes


def test_a_null_beside_a_value_is_found_by_no_index(client: txnkv.Client) -> None:
    """Rows with a null have no entry, so a filter that wants one is left to the scan."""
    schema = txnkv.Schema({"id": "int64", "a": "int32?", "b": "int32?"}, primary_key=["id"])
    table = client.create_table("t", schema)
    client.create_index(table, ["a", "b"])
    with client.new_session() as session:
        for row in [(1, 1, None), (2, 1, 1), (3, None, None)]:
            session.insert(table, row)
    assert ids(table.scan(where=[("a", "=", 1), ("b", "is null")])) == [1]


def test_an_index_with_all_of_the_key(client: txnkv.Client) -> None:
    """Its last column has no end mark: a longer text or bytes began as the values asked for did."""
    types = {"k": "string", "b": "binary", "c": "int64"}
    table = client.create_table("t", txnkv.Schema(types, primary_key=["k", "b"]))
    client.create_index(table, ["c", "k", "b"])
    client.create_index(table, ["b", "k"])
    client.create_index(table, ["c", "k"])
    table.insert(row := ("ab", b"x\xff\xff", 5))
    internals.flush(client)
    rows = [dict(zip(types, row, strict=True))]
    with client.transaction(isolation="serializable") as txn:
        for has in (table.get_by, partial(txn.get_by, table)):
            for longer in (b"", b"x", b"x\xff", b"x\xff\xff\0"):
                assert has(["c", "k", "b"], (5, "ab", longer)) == []
            for longer in ("", "a", "ab\0"):
                assert has(["b", "k"], (b"x\xff\xff", longer)) == has(["c", "k"], (5, longer)) == []
            assert has(["c", "k", "b"], (5, "ab", b"x\xff\xff")) == rows
            assert has(["b", "k"], (b"x\xff\xff", "ab")) == has(["c", "k"], (5, "ab")) == rows


def test_a_long_chain_of_moves_ends_soon(
    client: txnkv.Client, unique: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row it would take a look at all of them for each."""
    taken, looks = index_changes._Entries.taken, []

    def counted(*what: Any) -> Any:
        looks.append(what)
        return taken(*what)

    monkeypatch.setattr(index_changes._Entries, "taken", counted)
    with client.transaction() as txn:
        txn.write(unique, batch(range(100, 200), [f"x{i}" for i in range(100, 200)]))
    moved = batch(range(100, 200), [f"x{i + 1}" for i in range(100, 199)] + ["m1"])
    with client.new_session() as session, pytest.raises(txnkv.RowErrors):
        session.write(unique, moved, "upsert")
    assert len(looks) < 4 * index_changes._ROUNDS


@pytest.mark.parametrize("gone", [[2], [1, 2]], ids=str)
def test_rows_that_go_while_an_index_is_built_leave_entries_of_others(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, gone: list[int]
) -> None:
    """Two had one value, of which the first has the entry by then."""
    table = client.create_table("t", SCHEMA)
    with client.transaction() as txn:
        txn.write(table, batch([1, 2, 3], ["x", "x", "y"]))
    step = indexes._Build._step

    def then(build: Any, *what: Any) -> Any:
        last = step(build, *what)
        if table.get(2) is not None:
            with client.transaction() as txn:
                txn.write(table, pa.table({"id": gone}), "delete")
        return last

    monkeypatch.setattr(indexes, "_FIRST_ROWS", 1)
    monkeypatch.setattr(indexes._Build, "_step", then)
    client.create_index(table, "mail", unique=True)
    assert ids(table.get_by("mail", "x")) == ([] if 1 in gone else [1])
    assert client.check().problems == []


def test_rows_of_one_look_that_have_one_value(client: txnkv.Client) -> None:
    table = client.create_table("t", SCHEMA)
    with client.transaction() as txn:
        txn.write(table, batch([1, 2, 3], ["x", "x", "y"]))
    with pytest.raises(txnkv.RowErrors, match="several rows have it"):
        client.create_index(table, "mail", unique=True)
    assert table.indexes == []


@pytest.mark.parametrize(
    ("columns", "type", "goes"),
    [
        (["due"], "float64?", True),
        (["due", "kind"], "float64", True),
        (["due", "kind"], "float64?", True),  # it lacks rows that the range refuses, too
        (["due", "note"], "float64", False),  # it lacks rows that another condition has to refuse
        (["kind", "due"], "float64", False),
    ],
)
def test_a_range_of_its_first_column_goes_by_an_index(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, columns: Any, type: str, goes: bool
) -> None:
    types = {"id": "int64", "due": type, "kind": "string", "note": "string?"}
    schema = txnkv.Schema(types, ["id"])
    table = client.create_table("t", schema)
    client.create_index(table, columns)
    with client.transaction() as txn:
        due = [float(i * 7 % 2000) for i in range(2000)]
        ids, kinds = pa.array(range(2000)), pa.array(["k"] * 2000)
        txn.write(table, pa.table({"id": ids, "due": due, "kind": kinds, "note": kinds}))
    used = []

    def enough(asked: Any, rows: Any, most: float, of: Any = short_scan._enough) -> Any:
        used.append(len(rows))
        return of(asked, rows, most)

    monkeypatch.setattr(short_scan, "_enough", enough)
    few, some = [("due", "<=", 4.0)], [("due", ">", 99.0), ("due", "<", 105.0)]
    for where, wanted in ((few, range(5)), (some, range(100, 105))):
        assert sorted(row["due"] for row in table.scan(where=where)) == list(wanted)
    assert used == [5, 5] * goes


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("kind", ["date32", "timestamp[us]", "timestamp[us, tz=UTC]"])
def test_indexed_times_that_python_has_not(client: txnkv.Client, kind: str, unique: bool) -> None:
    """A row with one could be changed by Arrow alone, and no filter could name one."""
    types = {"id": kind, "at": kind + "?", "n": "int64"}
    table = client.create_table("t", txnkv.Schema(types, primary_key=["id"]))
    index = client.create_index(table, "at", unique=unique)
    last = 2**31 - 1 if kind == "date32" else 2**62
    of_schema = table.schema.arrow
    raw = pa.int32() if kind == "date32" else pa.int64()
    rows = {"id": pa.array([last - 1], raw), "at": pa.array([last], raw), "n": pa.array([1])}
    with client.transaction() as txn:
        txn.write(table, pa.table(rows).cast(of_schema))
    table.update({"id": last - 1, "n": 2})  # its entry is as Arrow made it
    assert table.count(where=[("at", "=", last)]) == 1
    if unique:
        with pytest.raises(txnkv.RowErrors, match="another row has at"):
            table.insert({"id": last - 2, "at": last, "n": 3})
    with client.transaction() as txn:
        txn.upsert(table, {"id": last - 1, "at": last - 5, "n": 3})
        txn.insert(table, {"id": last - 2, "at": last, "n": 4})
        txn.insert(table, {"id": last - 3, "at": None, "n": 5})
    for at, n in ((last, 4), (last - 5, 3)):
        assert table.scan(columns=["n"], where=[("at", "=", at)]).to_arrow()["n"].to_pylist() == [n]
    assert table.count(where=[("at", "in", [last, last - 5, 0])]) == 2
    assert table.count(where=[("id", ">=", last - 2), ("at", "<", last)]) == 1
    table.update({"id": last - 2, "at": 0})
    moved = table.scan(columns=["n"], where=[("at", "in", [0, last])]).to_arrow()
    assert moved["n"].to_pylist() == [4]
    for key in range(last - 3, last):
        table.delete(key)
    table.insert({"id": 0, "at": last, "n": 6})
    assert table.count(where=[("at", "=", last)]) == table.count() == 1
    assert [each.columns for each in table.indexes] == [index.columns]


def test_decimals_of_hundreds_in_the_key_and_indexed(client: txnkv.Client) -> None:
    """Arrow compares none of a scale below zero."""
    columns = {"k": "decimal128(5, -2)", "d": "decimal128(5, -2)?", "u": "int64?"}
    table = client.create_table("hundreds", txnkv.Schema(columns, ["k"]))
    client.create_index(table, "d")
    client.create_index(table, "u", unique=True)
    keys, us = [Decimal(n) for n in (-700, 300, 1200)], [1, 2, 3]
    kind = pa.decimal128(5, -2)
    for op, ds in [("insert", keys), ("upsert", keys[::-1]), ("update", [None, *keys[1:]])]:
        rows = {"k": pa.array(keys, kind), "d": pa.array(ds, kind), "u": us}
        with client.transaction() as txn:
            txn.write(table, pa.table(rows), op)
        assert table.get_by("d", 300) == [{"k": 300, "d": 300, "u": 2}]
    assert [len(table.get_by("d", key)) for key in keys] == [0, 1, 1]
    with client.transaction() as txn:
        txn.write(table, pa.table({"k": rows["k"], "u": [2, 3, 1]}), "update")
    assert table.get_by("u", 1) == [{"k": 1200, "d": 1200, "u": 1}]
    assert client.check().problems == []


def test_a_value_beside_the_index_is_not_decoded(client: txnkv.Client) -> None:
    """A time that Python has not kept its row from being changed there, too."""
    types = {"id": "int64", "at": "timestamp[us]?", "d": "decimal128(9, 2)?", "n": "int64?"}
    table = client.create_table("t", txnkv.Schema(types, primary_key=["id"]))
    client.create_index(table, ["d", "n"])
    table.upsert({"id": 1, "at": 2**62, "d": 2, "n": 3})
    table.update({"id": 1, "n": 4})
    assert table.count(where=[("d", "=", 2), ("n", "=", 4)]) == 1
    table.delete(1)
    assert table.count() == 0


SHAPES = {
    "one key": ({"id": "int64"}, None),
    "two keys, in parts": ({"t": "string", "id": "int16"}, txnkv.hash_partition("id", 3)),
    "times": ({"at": "timestamp[us, tz=UTC]", "id": "int64"}, txnkv.hash_partition("at", 2)),
}
INDEXES = {"s": True, ("g", "b"): False, ("f", "s"): True, ("x",): False}
OF_TIMES = {"z": True, ("m", "d"): True, ("d", "z"): False, ("m",): False, ("at", "b"): False}


def program(path: Path, shape: str, seed: int, isolation: Any) -> list[str]:
    """What became of calls of every kind, rows and entries at the end included."""
    chance, said = random.Random(seed), list[str]()
    key, partitioning = SHAPES[shape]
    others = {"s": "string?", "g": "int32?", "b": "bool", "f": "float64?", "x": "binary?"}
    chosen: dict[Any, bool] = INDEXES
    if shape == "times":
        others = {"z": "timestamp[us, tz=Europe/Berlin]?", "d": "date32?", "b": "bool"}
        others |= {"m": "decimal128(6,2)?", "t": "time64[us]?"}
        chosen = OF_TIMES
    values: dict[str, list[Any]] = {
        "t": ["", "a\0", "a"],
        "id": list(range(12)),
        "s": [None, "", *map(str, range(8))],
        "g": [None, 1, 2],
        "b": [True, False],
        "f": [None, 0.0, -0.0, 1.5, float("nan")],
        "x": [None, b"", b"x"],
        "at": [datetime(2026, 1, day, tzinfo=UTC) for day in range(1, 6)],
        "z": [None, *(datetime(1969, 12, 31, hour, tzinfo=UTC) for hour in range(9))],
        "d": [None, date(1, 1, 1), date(2026, 1, 1)],
        "m": [None, Decimal("1.5"), Decimal("1.50"), Decimal("-0"), Decimal("2"), 2],
    }
    if shape == "times":
        values["t"] = [None, time(1), time(2)]
    schema = txnkv.Schema({**key, **others}, primary_key=[*key])
    with txnkv.connect(path) as client:
        table = client.create_table("t", schema, partition_by=partitioning)
        for columns, unique in chosen.items():
            client.create_index(table, columns, unique=unique)

        def call(to: Any) -> None:
            op = chance.choice(["insert", "upsert", "update", "delete"])
            op += chance.choice(["", "", "_ignore"]) if op != "upsert" else ""
            row = {name: chance.choice(values[name]) for name in key}
            if op.startswith("delete"):
                getattr(to, op)(table, tuple(row.values()) if len(row) > 1 else row["id"])
                return
            whole = op.startswith("insert") or chance.random() < 0.5
            row |= {n: chance.choice(values[n]) for n in others if whole or chance.random() < 0.4}
            getattr(to, op)(table, row)

        def transaction() -> None:
            with client.transaction(isolation=isolation) as txn:
                to = txn.new_session() if chance.random() < 0.3 else txn
                for _ in range(chance.choice([1, 2, 5, 40])):
                    call(to)
                    if chance.random() < 0.3:
                        said.append(str(txn.get(table, tuple(values[name][0] for name in key))))
                if chance.random() < 0.5:
                    said.append(str(txn.flush() if to is txn else to.flush()))
                if chance.random() < 0.2:
                    txn.rollback()

        for _ in range(60):
            try:
                transaction()
            except txnkv.RowErrors as error:
                said += [f"{each.op} {each.key} {each.error}" for each in error.errors]
            except txnkv.SchemaError as error:
                said.append(str(error))
            if chance.random() < 0.1:
                internals.flush(client)
        assert client.check().ok
        said += map(str, table.scan(ordered=True))
        for columns in chosen:
            names = (columns,) if isinstance(columns, str) else columns
            for wanted in product(*(values[name] for name in names)):
                said += map(str, table.get_by(names, wanted))
    return said


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_written_with_their_entries_as_by_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, isolation: str
) -> None:
    """C writes the entries of rows that come one by one; where it may not, Python does."""
    for seed in range(2):
        native = program(tmp_path / f"{seed}", shape, seed, isolation)
        with monkeypatch.context() as patch:
            patch.setattr(RowWriter, "native_entries", property(lambda _: False, lambda *_: None))
            patch.setattr(RowWriter, "is_plain", False)
            patch.setattr(RowWriter, "is_flat", False)
            slow = program(tmp_path / f"{seed} slow", shape, seed, isolation)
        assert native == slow
