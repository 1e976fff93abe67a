"""Tablets that a filter rules out: as few as it names are read, and what is found is as without."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import txnkv
from tests import internals
from tests.tables.test_key_types import VALUES
from txnkv.tables.read import scan, short_scan, sources
from txnkv.tables.read.predicate import parse

HASH, RANGE = txnkv.hash_partition, txnkv.range_partition
FIVE = datetime(2000, 1, 1, 5, tzinfo=UTC)
ODD: dict[str, list[Any]] = {
    "bool": [1, 0, "true"],
    "int8": [5.0, 127.0, 128, -129, 1.5, "1", True],
    "int64": [5.0, 1.5, 1 << 70, -(1 << 63), "1", b"1", True, Decimal(2), pa.scalar(1), math.nan],
    "uint64": [-1, (1 << 64) - 1, 2.0, pa.scalar(2, pa.int8())],
    "float32": [0, -0.0, math.nan, 0.1, 1e300, "0", 1.5],
    "float64": [0, -0.0, math.nan, -math.inf, 1 << 60, Decimal("1.5")],
    "string": [b"a", 1, "\ud800", pa.scalar("a"), "e\u0301", "\u00e9"],
    "binary": ["a", "\u00e9", bytearray(b"a"), memoryview(b"ab")],
    "date32": [FIVE, "1970-01-01", 0],
    "timestamp[us]": [FIVE, FIVE.replace(tzinfo=None), 0, "1970-01-01"],
    "timestamp[us, tz=UTC]": [
        FIVE.replace(tzinfo=None),
        datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))),
        0,
    ],
    "decimal128(38, 10)": [0, Decimal("-0"), Decimal("1E-10"), 0.0, "0", Decimal("NaN"), 1e-10],
    "uuid": [b"\0" * 16, str(VALUES["uuid"][1]), 1],
}


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tablets each read has looked into."""
    counts: list[int] = []
    real = sources.tablets_for

    def noted(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        counts.append(len(found))
        return found

    for module in (scan, short_scan):
        monkeypatch.setattr(module, "tablets_for", noted)
    return counts


def _outcome(read: Callable[[], Any]) -> Any:
    try:
        return sorted(map(repr, read()))
    except (txnkv.TxnkvError, TypeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_every_type_are_found_where_they_are(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Those that fit, those that are made to, those that do not, in comparisons and in lists."""
    schema = txnkv.Schema({"k": kind, "n": "int32"}, primary_key=["k"])
    table = client.create_table("t", schema, HASH("k", 40))
    values = [*VALUES[kind], *([math.nan] if kind.startswith("float") else [])]
    with client.new_session() as session:
        for n, value in enumerate(values):
            session.insert(table, (value, n))
    odd = [*values, *ODD.get(kind, ()), None]
    wheres: list[Any] = [[("k", "=", value)] for value in odd]
    wheres += [[("k", "in", some)] for value in odd for some in ([value], [value, values[0], None])]
    wheres += [[("k", "in", [])], [("k", "in", values), ("k", "in", values[:1])]]
    wheres += [[("k", "=", values[0]), ("k", "=", values[1])], pc.field("k") == values[0]]
    reads: list[Callable[[Any], Any]] = [
        lambda where: table.scan(where=where),
        lambda where: table.scan(where=where, ordered=True, limit=3),
        lambda where: table.scan(where=where).to_arrow().to_pylist(),
        lambda where: [table.count(where=where)],
    ]
    asked = [partial(read, where) for where in wheres for read in reads]
    found = list(map(_outcome, asked))
    assert found[0] == [repr({"k": values[0], "n": 0})]
    for module in (scan, short_scan):
        monkeypatch.setattr(module, "tablets_for", lambda table, filter, tablets, **_: tablets)
    assert found == list(map(_outcome, asked))


PAIR = [HASH(["a", "b"], 40)]
APART = [HASH("a", 10), HASH("b", 10)]
BOTH = [HASH("b", 10), RANGE("a", [10, 20, 30])]
A, B = ("a", "=", 15), ("b", "=", "x")
FEWEST = [
    ([HASH("a", 40)], [A], 1),
    ([HASH("a", 40)], [A, B], 1),
    ([HASH("a", 40)], [B], 40),
    ([HASH("a", 40)], [("a", ">", 15)], 40),
    ([HASH("a", 40)], [("a", "in", [15, 15])], 1),
    ([HASH("a", 40)], [A, ("a", "in", list(range(60)))], 1),
    ([HASH("a", 40)], [("a", "in", list(range(65)))], 40),
    ([HASH("a", 40)], [("v", "=", 1)], 40),
    ([HASH("a", 40)], [A, pc.field("v") + 1 > 2], 1),
    (PAIR, [A], 40),
    (PAIR, [A, B], 1),
    (APART, [A], 10),
    (APART, [B], 10),
    (APART, [A, B], 1),
    (BOTH, [A], 10),
    (BOTH, [B], 4),
    (BOTH, [A, B], 1),
    (BOTH, [("a", "in", [5, 15, 16]), B], 2),
]


@pytest.mark.parametrize(("parts", "where", "fewest"), FEWEST)
def test_as_few_tablets_as_the_values_name_are_read(
    client: txnkv.Client, looked: list[int], parts: Any, where: Any, fewest: int
) -> None:
    schema = txnkv.Schema({"a": "int64", "b": "string", "v": "int64"}, primary_key=["a", "b"])
    table = client.create_table("t", schema, parts)
    rows = [(a, b, a) for a in range(70) for b in "xyz"]
    with client.new_session() as session:
        for row in rows:
            session.insert(table, row)
    info, tablets = table.info, internals.tables(client).tablets(table.info)
    assert len(sources.tablets_for(info, parse(where, info.schema), tablets)) == fewest
    wanted = table.scan().to_arrow().filter(_expression(where)).sort_by("a").to_pylist()
    looked.clear()
    assert table.scan(where=where)._all_in_arrow().sort_by("a").to_pylist() == wanted
    assert table.scan(where=where).to_arrow().sort_by("a").to_pylist() == wanted
    assert sorted(table.scan(where=where), key=lambda row: row["a"]) == wanted
    assert looked[0] == fewest


def _expression(where: Any) -> pc.Expression:
    made = pc.scalar(True)
    for each in where:
        if isinstance(each, pc.Expression):
            made &= each
            continue
        name, op, value = each
        field = pc.field(name)
        made &= field.isin(value) if op == "in" else field > value if op == ">" else field == value
    return made


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("where", [[("id", "=", 5)], [("id", "in", [5])]], ids=["=", "in"])
@pytest.mark.parametrize("other", [5, 6])
def test_a_serializable_transaction_has_read_the_tablets_of_the_values(
    client: txnkv.Client, where: Any, other: int
) -> None:
    """A row that comes with one of them lies there; it does not wait for those of the others."""
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]), HASH("id", 40))
    seen = client.create_table("seen", txnkv.Schema({"id": "int64"}, ["id"]))
    txn = client.new_transaction(isolation="serializable")
    assert txn.scan(table, where=where).to_arrow().num_rows == 0
    txn.insert(seen, (1,))
    table.insert((other,))
    if other == 5:
        with pytest.raises(txnkv.TransactionConflictError):
            txn.commit()
    else:
        txn.commit()


def test_tokens_of_a_few_values_are_their_rows(client: txnkv.Client) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]), HASH("id", 40))
    with client.new_session() as session:
        for id in range(200):
            session.insert(table, (id,))
    tokens = table.scan(where=[("id", "in", [3, 5, 300])]).tokens(1)
    found = [row["id"] for token in tokens for row in token.open(client)]
    assert sorted(found) == [3, 5]


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Rows are to be found without a plan, which reads all tablets."""

    def plan(*args: Any) -> Any:
        raise AssertionError("a scan of all was planned")

    monkeypatch.setattr(scan, "plan", plan)
    return monkeypatch


MANY = [*range(-40, 190), None, 7, 7, 1000, 5]  # of 300 rows
ONE_KEY: list[list[Any]] = [
    [("id", "in", MANY)],
    [("id", "in", range(100))],
    [("id", "in", MANY), ("v", "=", "1")],
    [("id", "in", MANY), ("id", ">", 150)],
    [("id", "in", MANY), ("id", "=", 6)],
    [("id", "in", MANY), ("v", "is null")],
    [("id", "in", MANY), ("id", "in", [3, 4, 500])],
]


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("parts", [None, HASH("id", 40), [HASH("id", 3), RANGE("id", [50, 120])]])
@pytest.mark.parametrize("where", ONE_KEY)
def test_each_of_many_keys_is_looked_for_in_its_tablet(
    client: txnkv.Client, unplanned: pytest.MonkeyPatch, flushed: bool, parts: Any, where: Any
) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "string?"}, ["id"]), parts)
    with client.transaction() as txn:
        for id in range(300):
            txn.insert(table, (id, str(id % 2) if id % 5 else None))
    if flushed:
        internals.flush(client)
    with client.transaction() as txn:
        for id in range(10, 20):
            txn.delete(table, id)
        txn.upsert(table, (30, "1"))
    found = list(table.scan(where=where, ordered=True))
    assert table.count(where=where) == len(found)
    assert sorted(table.scan(where=where), key=lambda row: row["id"]) == found
    assert list(table.scan(["v"], where, limit=9)) == [{"v": row["v"]} for row in found[:9]]
    with client.transaction() as txn:
        txn.delete(table, 30)
        own = list(txn.scan(table, where=where, ordered=True))
        assert own == [row for row in found if row["id"] != 30]
        txn.upsert(table, (30, "1"))
    unplanned.undo()
    assert table.scan(where=where).to_arrow().sort_by("id").to_pylist() == found


def test_keys_of_several_columns_are_looked_for_in_their_tablets(
    client: txnkv.Client, unplanned: pytest.MonkeyPatch
) -> None:
    schema = txnkv.Schema({"a": "string", "b": "uuid", "c": "date32"}, ["a", "b", "c"])
    table = client.create_table("t", schema, [HASH("b", 30), RANGE("a", ["m"])])
    ids, day = [uuid.UUID(int=n << 64) for n in range(100)], date(2000, 1, 1)
    with client.transaction() as txn:
        for a in ("a", "x"):
            for id in ids:
                txn.insert(table, (a, id, day))
    where = [("c", "=", day), ("a", "=", "x"), ("b", "in", ids[5:90])]
    assert {(row["a"], row["b"]) for row in table.scan(where=where)} == {
        ("x", id) for id in ids[5:90]
    }


def test_the_first_rows_of_many_tablets_are_merged(
    client: txnkv.Client, unplanned: pytest.MonkeyPatch
) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]), HASH("id", 64))
    with client.transaction() as txn:
        for id in range(3000):
            txn.insert(table, (id,))
    for limit in (1, 17, 40, 500):
        found = table.scan(ordered=True, limit=limit, where=[("id", ">=", 100)])
        assert [row["id"] for row in found] == list(range(100, 100 + limit))
