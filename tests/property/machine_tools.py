"""Values that the machine draws, results that it compares, and processes that die."""

from __future__ import annotations

import os
import pickle
import signal
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

import txnkv
from tests import internals
from tests.property.versions import COLUMNS, DEFAULT_N, Given, Row
from txnkv.storage.faults import arm

SCHEMA = txnkv.Schema(
    {"id": "int64", "text": "string?", "n": txnkv.Column("int64", default=DEFAULT_N)},
    primary_key=["id"],
)
OPS = ("insert", "insert_ignore", "upsert", "update", "update_ignore", "delete", "delete_ignore")
OPERATORS = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}

KEYS = st.integers(-5, 40)
TEXTS = st.one_of(st.none(), st.text("ab\0é", max_size=3))
PARTS = st.sets(st.sampled_from(COLUMNS))


@st.composite
def givens(draw: Any, columns: set[str] | None = None) -> Given:
    """A row with its key and some of the other columns."""
    chosen = draw(PARTS) if columns is None else columns
    row: Given = {"id": draw(KEYS)}
    if "text" in chosen:
        row["text"] = draw(TEXTS)
    if "n" in chosen:
        row["n"] = draw(st.integers(-9, 9))
    return row


@st.composite
def batches(draw: Any, most: int = 24) -> tuple[str, list[str], list[Given]]:
    """An operation, the columns that are given, and rows."""
    op = draw(st.sampled_from(OPS))
    columns = draw(PARTS)
    rows = draw(st.lists(givens(columns), min_size=1, max_size=most))
    return op, ["id", *(name for name in COLUMNS if name in columns)], rows


def compact_all(client: Any) -> None:
    internals.compact(client)


def in_child(work: Any, point: str, hit: int) -> list[Any]:
    """Runs `work(say)` in a forked process that dies at a fault point; what it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            arm(point, f"kill@{hit}")
            work(lambda value: os.write(writing, pickle.dumps(value)))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the child ended with {status}"
    return [pickle.loads(data)] if data else []


def as_table(columns: list[str], rows: list[Given]) -> pa.Table:
    return pa.table(
        {name: pa.array([row[name] for row in rows], SCHEMA.columns[name].type) for name in columns}
    )


def as_rows(table: pa.Table) -> dict[int, Row]:
    rows = table.to_pylist()
    found = {row["id"]: (row["text"], row["n"]) for row in rows}
    assert len(found) == len(rows), "no key comes twice"
    return found


def as_dict(key: int, rows: dict[int, Row]) -> dict[str, Any] | None:
    return {"id": key, "text": rows[key][0], "n": rows[key][1]} if key in rows else None


def holds(op: str, found: Any, value: Any) -> bool:
    if "null" in op:
        return (found is None) == (op == "is null")
    return found is not None and bool(OPERATORS[op](found, value))
