"""txnkv alter."""

from __future__ import annotations

import pytest

import txnkv


@pytest.fixture
def table(store):
    with txnkv.connect(store) as client:
        made = client.create_table("t", txnkv.Schema({"id": "int64", "a": "string?"}, ["id"]))
        with client.transaction() as txn:
            txn.insert(made, (1, "x"))
    return store


def test_all_at_once(table, run):
    zoned = "timestamp[us, tz=UTC]?"
    changes = ["--add", "n int64 = 4", "--add", f'"a b":{zoned}', "--rename", "a = b"]
    done = run("alter", table, "t", *changes)
    assert done.out == f"t has the columns id int64, b string?, n int64, a b {zoned}\n"
    assert run("scan", table, "t", "--json").lines == [{"id": 1, "b": "x", "n": 4, "a b": None}]
    done = run("alter", table, "t", "--drop", "b", "--drop", "a b", "--json")
    assert done.json == {"name": "t", "columns": {"id": "int64", "n": "int64"}}


def test_a_history_of_its_own(table, run, misuse):
    run("alter", table, "t", "--history", "unlimited")
    run("create", table, "u", "--schema", "id:int64", "--key", "id", "--history", 60)
    with txnkv.connect(table) as client:
        assert [client.table(name).history for name in "tu"] == [float("inf"), 60.0]
    run("alter", table, "t", "--history", "store")
    with txnkv.connect(table) as client:
        assert client.table("t").history is None
    for wrong in ("long", "-1"):
        assert "history" in misuse("alter", table, "t", "--history", wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to change: give --add, --rename, --drop or another option"),
        (["--widen", "n"], "--widen: 'n' is not old=new, as total=int64"),
        (["--default", "a"], "--default: 'a' is not old=new, as total=0"),
        (["--default", "x=1"], "no column 'x'"),
        (["--default", "id=x", "--drop", "a"], "--default: column 'id' is int64, and 'x' is none"),
        (["--add", "n"], "'n' is no column; write name and type, as 'note string?'"),
        (["--add", "n int65"], "'int65' is not a column type"),
        (["--add", "n int64 = x"], "--add: column 'n' is int64, and 'x' is none"),
        (["--rename", "a"], "--rename: 'a' is not old=new"),
    ],
)
def test_called_wrongly(table, words, message, misuse):
    assert message in misuse("alter", table, "t", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--add", "n int64"], "the new column 'n' has no value for rows that are there"),
        (["--drop", "id"], "'id' is of the primary key, which stays"),
    ],
)
def test_refused(table, words, message, fail):
    assert message in fail("alter", table, "t", *words)


def test_no_such_table(table, fail):
    assert "there is no table 'u'" in fail("alter", table, "u", "--drop", "a")


def test_what_a_column_is(table, run, fail):
    done = run("alter", table, "t", "--add", "n int32?", "--default", "a=-")
    assert done.out == "t has the columns id int64, a string?, n int32?\n"
    words = ["--widen", "n=int64", "--default", "n=5000000000", "--no-default", "a"]
    assert run("alter", table, "t", *words, "--json").json["columns"]["n"] == "int64?"
    run("insert", table, "t", "id=2", "a=y")
    rows = [{"id": 1, "a": "x", "n": None}, {"id": 2, "a": "y", "n": 5_000_000_000}]
    assert run("scan", table, "t", "--json").lines == rows
    assert run("alter", table, "t", "--not-null", "a").out.startswith(
        "t has the columns id int64, a string,"
    )
    assert "without a value there: 1" in fail("alter", table, "t", "--not-null", "n")
    assert "not all its values are int8" in fail("alter", table, "t", "--widen", "n=int8")
    assert run("alter", table, "t", "--nullable", "a", "--json").json["columns"]["a"] == "string?"


def test_rename(table, run, fail):
    assert run("rename", table, "t", "u").out == "t is u now\n"
    assert "the tables are: u" in fail("rename", table, "t", "v")
    with txnkv.connect(table) as client:
        client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]))
    assert "there is a table 't' already" in fail("rename", table, "u", "t")
    assert run("rename", table, "u", "v", "--json").json == {"name": "v", "was": "u"}
    assert run("scan", table, "v", "--json").lines == [{"id": 1, "a": "x"}]


def test_indexes(table, run, fail):
    assert (
        run("index", "create", table, "t", "a", "--unique").out == "made a unique index of t by a\n"
    )
    done = run("index", "create", table, "t", "a,id", "--json")
    assert done.json == {"table": "t", "columns": ["a", "id"], "unique": False, "state": "ready"}
    assert "another row has a = 'x'" in fail("insert", table, "t", "id=2", "a=x")
    assert run("index", "list", table, "t", "--json").json == [
        {"table": "t", "columns": ["a"], "unique": True, "state": "ready"},
        {"table": "t", "columns": ["a", "id"], "unique": False, "state": "ready"},
    ]
    listed = run("index", "list", table).out.splitlines()
    assert [line.split() for line in listed if line.startswith("t ")] == [
        ["t", "a", "yes", "ready"],
        ["t", "a,", "id", "no", "ready"],
    ]
    assert run("index", "drop", table, "t", "a").out == "dropped the index of t by a\n"
    assert "no index by a; there are: a, id" in fail("index", "drop", table, "t", "a")


def test_rows_that_live_for_a_while(store, run, fail, misuse):
    columns = "id:int64,seen:timestamp[us]?"
    run("create", store, "t", "--schema", columns, "--key", "id", "--ttl", "seen:3600")
    with txnkv.connect(store) as client:
        assert client.table("t").schema.ttl == ("seen", 3600)
    run("alter", store, "t", "--rename", "seen=at", "--ttl", "at:60.5")
    with txnkv.connect(store) as client:
        assert client.table("t").schema.ttl == ("at", 60.5)
    run("alter", store, "t", "--ttl", "none")
    with txnkv.connect(store) as client:
        assert client.table("t").schema.ttl is None
    assert "'id' is int64" in fail("alter", store, "t", "--ttl", "id:1")
    assert "is not column:seconds" in misuse("alter", store, "t", "--ttl", "at")
    assert "'id' is int64" in misuse(
        "create", store, "u", "--schema", columns, "--key", "id", "--ttl", "id:1"
    )
