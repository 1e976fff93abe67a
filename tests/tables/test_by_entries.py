"""Rows by one value of an index: found without a step of Python where all of it is at hand, else by
its entries, or by a plan. However they are found, they are those of a dict.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.tables.read import lookup

TYPES = {
    "numbers": ({"a": "int64", "b": "int32", "v": "int64?", "t": "string"}, ["a", "b"]),
    "texts": ({"a": "string", "b": "string", "v": "int64?", "t": "string"}, ["a", "b"]),
    "mixed": ({"a": "int32", "b": "string", "v": "int64?", "t": "string"}, ["b", "a"]),
}
PLACES = [None, txnkv.hash_partition("a", 3)]
TEXTS = ["", "x", "x\0", "x\0y", "xy", "\u00e9t\u00e9", "long " * 20]
Key = tuple[Any, Any]


def in_order(rows: list[dict[str, Any]], key: list[str]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: tuple(row[name] for name in key))


class Both:
    """A table and a dict of the same rows."""

    def __init__(self, client: txnkv.Client, kind: str, place: Any, seed: int) -> None:
        columns, self.key = TYPES[kind]
        schema = txnkv.Schema(columns, primary_key=self.key)
        self.client, self.chance = client, random.Random(seed)
        self.table = client.create_table("t", schema, place)
        client.create_index(self.table, "t")
        client.create_index(self.table, ["v", "t"])
        client.create_index(self.table, ["t", "a"])
        client.create_index(self.table, "v")
        self.rows: dict[Key, dict[str, Any]] = {}
        self.text = columns["a"] == "string", columns["b"] == "string"

    def pick(self) -> dict[str, Any]:
        of = self.chance.choice
        a, b = (of(TEXTS) if text else self.chance.randrange(-9, 9) for text in self.text)
        return {"a": a, "b": b, "v": of([None, 0, 1, -1]), "t": of(TEXTS)}

    def write(self, some: int) -> None:
        with self.client.transaction() as txn:
            for _ in range(some):
                row = self.pick()
                at = row[self.key[0]], row[self.key[1]]
                if self.chance.random() < 0.3:
                    txn.delete_ignore(self.table, at)
                    self.rows.pop(at, None)
                else:
                    txn.upsert(self.table, row)
                    self.rows[at] = row

    def compare(self, rows: dict[Key, dict[str, Any]], snapshot: Any = None) -> None:
        table, every = self.table, list(rows.values())
        for low, high in ((-1, 9), (0, 9), (0, 1), (2, 9)):
            numbers = [row for row in every if row["v"] is not None and low <= row["v"] < high]
            wanted, range_of = in_order(numbers, self.key), [("v", ">=", low), ("v", "<", high)]
            for where in (range_of, range_of[:1]) if high == 9 else (range_of,):
                assert in_order(list(table.scan(None, where, snapshot)), self.key) == wanted
                assert list(table.scan(None, where, snapshot, ordered=True)) == wanted
                last = table.scan(None, where, snapshot, ordered="descending", limit=2)
                assert list(last) == wanted[::-1][:2]
                assert table.count(where, snapshot) == len(wanted)
        for text in (*TEXTS, "none"):
            wanted = in_order([row for row in every if row["t"] == text], self.key)
            where = [("t", "=", text)]
            assert table.get_by("t", text, snapshot) == wanted
            assert in_order(list(table.scan(None, where, snapshot)), self.key) == wanted
            assert list(table.scan(None, where, snapshot, ordered=True)) == wanted
            for limit in (0, 1, 3):
                some = list(table.scan(None, where, snapshot, limit=limit))
                assert len(some) == min(limit, len(wanted))
                assert all(row in wanted for row in some)
            assert table.count(where, snapshot) == len(wanted)
            for v in (0, 1):
                both = [row for row in wanted if row["v"] == v]
                assert in_order(table.get_by(["v", "t"], (v, text), snapshot), self.key) == both
                asked = table.scan(None, [*where, ("v", "=", v)], snapshot)
                assert in_order(list(asked), self.key) == both
            for a in {row["a"] for row in wanted}:
                of = [row for row in wanted if row["a"] == a]
                assert in_order(table.get_by(["t", "a"], (text, a), snapshot), self.key) == of


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(kind, place, marks=[pytest.mark.slow] if (n + k) % 2 else [])
        for n, kind in enumerate(TYPES)
        for k, place in enumerate(PLACES)
    ],
)
def test_rows_by_a_value_of_an_index(
    connect: Callable[..., txnkv.Client], kind: str, place: Any
) -> None:
    """In memory, in row sets one above the other, of now and of snapshots before."""
    both = Both(connect(), kind, place, seed=len(kind))
    seen = []
    for round in range(6):
        both.write(60)
        if round % 2:
            internals.flush(both.client)
        if round == 4:
            internals.compact(both.client)
        both.compare(both.rows)
        seen.append((both.client.snapshot(), dict(both.rows)))
        for snapshot, rows in seen[-3::3]:
            both.compare(rows, snapshot)
    for snapshot, _ in seen:
        snapshot.close()


def test_rows_that_are_many(connect: Callable[..., txnkv.Client]) -> None:
    """About as many as are looked for one by one, and more."""
    client = connect()
    schema = txnkv.Schema({"id": "int64", "t": "string"}, primary_key=["id"])
    table = client.create_table("t", schema)
    client.create_index(table, "t")
    for some in (1022, 1, 1, 1, 3000):
        first = table.count()
        with client.transaction() as txn:
            for number in range(first, first + some):
                txn.insert(table, (number, "same"))
        wanted = [{"id": number, "t": "same"} for number in range(first + some)]
        for _ in range(2):  # in memory, and on disk
            assert table.get_by("t", "same") == wanted
            assert list(table.scan(where=[("t", "=", "same")], ordered=True)) == wanted
            assert list(table.scan(where=[("t", "=", "same")], limit=2)) == wanted[:2]
            internals.flush(client)


@pytest.mark.parametrize("rows", [300, 1_100])
def test_a_range_of_an_index_is_read_without_its_entries(
    client: txnkv.Client, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry was made a dict, and of more than 256 the rows came by a plan."""
    types = {"id": "int64", "at": "timestamp[us, tz=UTC]"}
    table = client.create_table("t", txnkv.Schema(types, ["id"]))
    client.create_index(table, "at")
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    with client.new_session() as session:
        for id in range(3 * rows):
            session.insert(table, (id, begin + timedelta(seconds=id * 7_919 % (3 * rows))))
    where = [("at", ">=", begin + timedelta(seconds=2 * rows))]
    wanted = {id for id in range(3 * rows) if id * 7_919 % (3 * rows) >= 2 * rows}
    found, by_entries = [], lookup.point.by_entries

    def spy(*args: Any) -> Any:
        found.append(by_entries(*args))
        return found[-1]

    assert table.get_by("at", begin)
    assert table.get(0)  # from here on both are at hand
    monkeypatch.setattr(lookup.point, "by_entries", spy)
    assert {row["id"] for row in table.scan(where=where)} == wanted
    assert len(found) == 1
    assert (found[0] is None) == (rows > 1_000)
    at = {row["id"]: row["at"] for row in table.scan()}
    assert at == {id: begin + timedelta(seconds=id * 7_919 % (3 * rows)) for id in at}
    assert {each.tzinfo for each in at.values()} == {UTC}
