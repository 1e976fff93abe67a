"""Rows by one value of an index: found without a step of Python where all of it is at hand, else by
its entries, or by a plan. However they are found, they are those of a dict.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals

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


@pytest.mark.parametrize("place", PLACES, ids=["one", "three"])
@pytest.mark.parametrize("kind", TYPES)
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
        for snapshot, rows in seen[-3:]:
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
