"""`--where`: the small language, beside SQLite's, and how much of it a scan is told."""

from __future__ import annotations

import sqlite3

import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import txnkv
from txnkv.cli.conditions import where

SCHEMA = txnkv.Schema(
    {"id": "int64", "n": "int32?", "f": "float64?", "s": "string?", "order id": "int64?"}, ["id"]
)
TEXTS = [
    "",
    "a",
    "ab",
    "abc",
    "b",
    "B",
    "ba",
    "a%",
    "a_c",
    "and",
    "x or y",
    "it's",
    "zz",
    "ü",
    None,
]
ROWS = [
    (i, None if i % 7 == 0 else i % 5, None if i % 6 == 0 else i % 9 / 2, TEXTS[i % len(TEXTS)], i)
    for i in range(180)
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A table and the same in SQLite, asked by condition: ids, each."""
    with txnkv.connect(tmp_path_factory.mktemp("conditions") / "store") as client:
        table = client.create_table("t", SCHEMA)
        with client.transaction() as txn:
            for row in ROWS[:90]:
                txn.insert(table, row)
        client.compact()  # half of them in blocks, half in memory
        with client.transaction() as txn:
            for row in ROWS[90:]:
                txn.insert(table, row)
        lite = sqlite3.connect(":memory:")
        lite.execute('CREATE TABLE t (id, n, f, s, "order id")')
        lite.execute("PRAGMA case_sensitive_like = on")
        lite.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?)", ROWS)

        def asked(text):
            scan = table.scan(["id"], where([text], SCHEMA), ordered=True)
            mine = scan.to_arrow()["id"].to_pylist()
            wanted = [id for (id,) in lite.execute(f"SELECT id FROM t WHERE {text} ORDER BY id")]
            return mine, wanted

        yield asked
        lite.close()


def quoted(text):
    return "'" + text.replace("'", "''") + "'"


numbers = st.integers(-1, 6).map(str)
words = st.sampled_from([text for text in TEXTS if text is not None]).map(quoted)
patterns = st.text(alphabet="abc%_", max_size=4).map(quoted)
compared = st.sampled_from(["=", "==", "!=", "<>", "<", "<=", ">", ">="])
denied = st.sampled_from(["", "not "])


def on(column, values):
    return st.one_of(
        st.builds("{} {} {}".format, column, compared, values),
        st.builds("{} {}in ({}, {})".format, column, denied, values, values),
        st.builds("{} {}between {} and {}".format, column, denied, values, values),
        st.builds("{} is {}null".format, column, denied),
    )


conditions = st.recursive(
    on(st.sampled_from(["id", "n", "f", '"order id"']), numbers)
    | on(st.just("s"), words)
    | st.builds("s {}like {}".format, denied, patterns),
    lambda inner: st.one_of(
        st.builds("{} and {}".format, inner, inner),
        st.builds("{} OR {}".format, inner, inner),
        st.builds("not ({})".format, inner),
        st.builds("({})".format, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(text=conditions)
def test_it_finds_what_sqlite_finds(both, text):
    mine, wanted = both(text)
    assert mine == wanted


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("id = 1 and n between 2 and 5", [("id", "=", 1), ("n", ">=", 2), ("n", "<=", 5)]),
        ("id = 1 or (id in 2, 3)", [("id", "in", [1, 2, 3])]),
        ("not (id < 1 or n is null)", [("id", ">=", 1), ("n", "is not null")]),
        ("s like 'ab%'", [("s", ">=", "ab"), ("s", "<", "ac")]),
        ("s like ab", [("s", "=", "ab")]),
        (r"s like a\%", [("s", "=", "a%")]),
        ("s = rock 'n' roll", [("s", "=", "rock 'n' roll")]),
        ("s = f(x, y) and id > 1", [("s", "=", "f(x, y)"), ("id", ">", 1)]),
        ("""s in "it's", 'a, b', c d""", [("s", "in", ["it's", "a, b", "c d"])]),
        ('"order id" >= -3', [("order id", ">=", -3)]),
        ("not not s != 'x'", [("s", "!=", "x")]),
    ],
)
def test_what_a_scan_can_use_is_told_as_such(text, entries):
    assert where([text], SCHEMA) == entries


def test_what_it_cannot_is_an_expression_beside_the_rest():
    first, second = where(["id > 5 and (n = 1 or s = x)"], SCHEMA)
    assert first == ("id", ">", 5)
    assert isinstance(second, pc.Expression)
    *bounds, pattern = where(["s like 'ab%c'"], SCHEMA)[::-1]
    assert bounds == [("s", "<", "ac"), ("s", ">=", "ab")]
    assert isinstance(pattern, pc.Expression)
    # NaN is neither below 1 nor at least 1: the denial of one is not the other.
    (denial,) = where(["not f < 1"], SCHEMA)
    assert isinstance(denial, pc.Expression)
    assert where([], SCHEMA) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "is no condition"),
        ("id", "is no condition"),
        ("(id = 1", "a ) is missing"),
        ("id = 1)", "is no condition (at ')')"),
        ("id = 1 and", "is no condition"),
        ("id between 1", "between takes two values"),
        ("id in (1, 2", "a ) is missing"),
        ("s =", "a value is missing"),
        ("s = and id = 1", "a value is missing"),
        ("id is 5", "is no condition"),
        ("id like '1%'", "like is for text, and column 'id' is int64"),
        ("nope = 1", "there is no column 'nope'"),
        ("id between a and b", "column 'id' is int64, and 'a' is none"),
    ],
)
def test_what_is_no_condition(text, wanted, orders, misuse):
    store = orders
    with txnkv.connect(store) as client:
        client.create_table("t", SCHEMA)
    assert wanted in misuse("scan", store, "t", "--where", text)
