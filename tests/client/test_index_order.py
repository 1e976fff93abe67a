"""Rows that are given singly count one after the other where values are unique, however many."""

from __future__ import annotations

from typing import Any

import pytest

import txnkv

SCHEMA = txnkv.Schema({"k": "int64", "f": "int64?", "s": "string?"}, ["k"])
Row = tuple[Any, ...]
Step = tuple[str, dict[str, Any]]

CASES: dict[str, tuple[list[Row], list[Step], list[Row], int]] = {
    "an update that stands": (
        [(1, 1, "z"), (2, 2, "y")],
        [("update", {"k": 1, "f": 5}), ("update", {"k": 1, "f": 2})],
        [(1, 5, "z"), (2, 2, "y")],
        1,
    ),
    "an upsert that stands": (
        [(9, 7, None)],
        [("upsert", {"k": 1, "f": 8, "s": "a"}), ("upsert", {"k": 1, "f": 7, "s": "b"})],
        [(1, 8, "a"), (9, 7, None)],
        1,
    ),
    "an insert behind one that is refused": (
        [(9, 7, None)],
        [("insert", {"k": 1, "f": 7}), ("insert", {"k": 1, "f": 8})],
        [(1, 8, None), (9, 7, None)],
        1,
    ),
    "the same, ignored": (
        [(9, 7, None)],
        [("insert_ignore", {"k": 1, "f": 7}), ("insert_ignore", {"k": 1, "f": 8})],
        [(1, 8, None), (9, 7, None)],
        0,
    ),
    "a value that one did not take": (
        [(2, None, "x"), (5, None, "b")],
        [("upsert", {"k": 2, "f": 9, "s": "b"}), ("upsert", {"k": 5, "f": 9, "s": "c"})],
        [(2, None, "x"), (5, 9, "c")],
        1,
    ),
}


def begin(client: txnkv.Client, how: str) -> txnkv.Transaction:
    options: dict[str, Any] = {"locking": "partition"} if how == "locks" else {}
    txn = client.new_transaction(**options)
    if how == "token":
        txn.serialize()
    return txn


def outcome(client: txnkv.Client, how: str, rows: list[Row], steps: list[Step]) -> Any:
    """What rows there are behind the steps of one flush, and how many of these were refused."""
    table = client.create_table("t", SCHEMA)
    for name in ("f", "s"):
        client.create_index(table, name, unique=True)
    for row in rows:
        table.insert(row)
    with begin(client, how) as txn:
        session = txn.new_session()
        for op, row in steps:
            getattr(session, op)(table, row)
        refused = 0
        try:
            session.flush()
        except txnkv.RowErrors as errors:
            refused = len(errors.errors)
        return [tuple(row.values()) for row in txn.scan(table, ordered=True)], refused


@pytest.mark.parametrize("how", ["few", "many", "token", "locks"])
@pytest.mark.parametrize("case", CASES)
def test_rows_count_one_after_the_other(client: txnkv.Client, how: str, case: str) -> None:
    rows, steps, wanted, refused = CASES[case]
    if how == "many":
        op = steps[0][0]
        steps = [*steps, *((op, {"k": 100 + i, "f": 100 + i}) for i in range(20))]
        if op != "update":
            wanted = [*wanted, *((100 + i, 100 + i, None) for i in range(20))]
        else:
            refused += 20
    assert outcome(client, how, rows, steps) == (wanted, refused)


@pytest.mark.parametrize("count", [2, 40])
def test_a_value_is_not_taken_before_it_is_given_up(client: txnkv.Client, count: int) -> None:
    rows = [(i, i, None) for i in range(count)]
    steps = [("update", {"k": i, "f": (i + 1) % count}) for i in range(count)]
    assert outcome(client, "many", rows, steps) == (rows, count)
