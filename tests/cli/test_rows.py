"""`txnkv create, drop, count, get, insert, delete, query`, and `topics create, drop`."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import click
import pytest
from pyarrow import feather, parquet

import txnkv
from txnkv.cli import main

COLUMNS = "region:string,id:int64,total:float64?,at:timestamp[us, tz=UTC]?,raw:binary?"


@pytest.fixture
def sales(store, run):
    """The store with a table of a key of two columns and two rows."""
    assert run("create", store, "sales", "--schema", COLUMNS, "--key", "region,id").out == (
        "made sales\n"
    )
    row = '{"region": "eu", "id": 1, "total": 9.5, "at": "2026-01-31T12:00:00Z", "raw": "/w=="}'
    assert run("insert", store, "sales", row, '{"region": "us", "id": 2}').out == (
        "inserted 2 rows into sales\n"
    )
    return store


def test_tables_are_made_and_dropped(tmp_path, run, fail, misuse):
    store = tmp_path / "new"
    options = ["--schema", "id:int64,n:int32?", "--key", "id", "--partition-hash", "id:3"]
    assert run("create", store, "t", *options).out == "made t of 3 tablets\n"
    assert run("create", store, "t", *options, "--exists-ok", "--json").json == {
        "name": "t", "made": False, "tablets": 3,
    }  # fmt: skip
    assert "'t' already: take another name, or pass --exists-ok" in fail(
        "create", store, "t", *options
    )
    other = ["--schema", "id:int64", *options[2:]]
    assert "it has a column 'n'" in fail("create", store, "t", *other, "--exists-ok")
    assert "drop t with 0 rows? Say --yes" in misuse("drop", store, "t")
    assert run("tables", store, "--json").json[0]["name"] == "t"
    assert run("drop", store, "t", "--yes").out == "dropped t\n"
    assert run("drop", store, "t", "--yes", "--missing-ok").out == "there is no t\n"
    assert "there is no table 't' to drop" in fail("drop", store, "t", "--yes")


def test_a_table_goes_back_in_time_and_is_emptied_only_where_that_is_said(sales, run, misuse):
    with txnkv.connect(sales) as client:
        before = client.snapshot().timestamp
        client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]))
        client.table("t").insert({"id": 1})
        one = client.snapshot().timestamp
        client.table("t").insert({"id": 2})
        told = misuse("revert", sales, "t", "--to", int(before))
        assert "t had no rows then. Delete 2 rows of now? Say --yes" in told
        assert client.table("t").count() == 2
        reverted = run("revert", sales, "t", "--to", int(one))
        assert reverted.out == "t is as it was: 0 inserted, 0 updated, 1 deleted\n"
        assert run("revert", sales, "t", "--to", int(before), "--yes", "--json").json == {
            "inserted": 0, "updated": 0, "deleted": 1,
        }  # fmt: skip
        run("revert", sales, "t", "--to", int(before))  # it is empty by now


def test_a_time_after_a_jump_of_the_clock_reverts_nothing_unasked(sales, run, misuse, now):
    """`--to` a second ago meant the table of before the jump."""
    with txnkv.connect(sales) as client:
        table = client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]))
        table.insert({"id": 1})
        now.ahead = 86_400
        table.insert({"id": 2})
        now.ahead = 0
        table.insert({"id": 3})
        last = client.snapshot().timestamp
        table.insert({"id": 4})
        second = datetime.now(UTC).isoformat()
        told = misuse("revert", sales, "t", "--to", second)
        assert f"is later than {second}. Undo that in t, too? Say --yes" in told
        assert table.count() == 4
        run("revert", sales, "t", "--to", int(last))
        assert table.count() == 3
        run("revert", sales, "t", "--to", second, "--yes")
        assert table.count() == 1


def test_topics_are_made_and_dropped(store, run, fail, misuse):
    options = ["--partitions", 2, "--buffer", "sidecar", "--compression", "lz4"]
    options += ["--retention-seconds", 60, "--value-schema", "id:int64"]
    made = run("topics", "create", store, "events", *options)
    assert made.out == "made events of 2 partitions\n"
    (found,) = run("topics", store, "--json").json
    assert (found["buffer"], found["compression"], found["retention_seconds"]) == (
        "sidecar", "lz4", 60.0,
    )  # fmt: skip
    assert found["value_schema"] == {"id": "int64"}
    assert found == run("topics", "list", store, "events", "--json").json
    assert "'events'" in fail("topics", "create", store, "events")
    run("produce", store, "events", "-p", 0, input='{"id": 1}\n')
    assert "Say --yes" in misuse("topics", "drop", store, "events")
    assert run("topics", "drop", store, "events", "--yes", "--json").json == {"dropped": "events"}
    assert "'events'" in fail("topics", "drop", store, "events", "--yes")
    assert run("topics", "drop", store, "events", "--yes", "--missing-ok").out == (
        "there is no events\n"
    )
    assert "Missing argument 'STORE'" in misuse("topics")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--partitions", 100_000, "1 to 1024 partitions"),
        ("--retention-seconds", "nan", "not nan"),
        ("--value-schema", "id:nope", "'nope' is not a column type"),
    ],
)
def test_a_topics_option_that_is_wrong(option, value, words, store, run, misuse):
    assert words in misuse("topics", "create", store, "e", option, value)
    run("topics", "create", store, "e")
    assert words in misuse("topics", "alter", store, "e", option, value)


def test_rows_are_shown_by_their_keys(sales, run, invoke, misuse):
    lines = run("get", sales, "sales", "eu,1").out.splitlines()
    assert [line.split() for line in lines] == [
        ["region", "eu"], ["id", "1"], ["total", "9.5"], ["at", "2026-01-31T12:00:00+00:00"],
        ["raw", "/w=="],
    ]  # fmt: skip
    ran = invoke("get", sales, "sales", "us, 2", "uk,3", "--json")
    assert ran.status == 1
    assert ran.lines == [{"region": "us", "id": 2, "total": None, "at": None, "raw": None}]
    assert ran.err == "Error: sales has no row uk,3\n"
    assert "give region,id, with commas between" in misuse("get", sales, "sales", "eu")
    assert "column 'id' is int64, and 'x' is none" in misuse("get", sales, "sales", "eu,x")


def test_rows_are_inserted_and_changed(sales, run, fail, misuse):
    assert "refused: key" in fail("insert", sales, "sales", "region=eu", "id=1")
    told = run("insert", sales, "sales", "region=eu", "id=1", "total=", "--upsert").out
    assert told == "inserted 0 rows, updated 1 row in sales\n"
    row = run("get", sales, "sales", "eu,1", "--json").json
    assert (row["total"], row["raw"]) == (None, "/w==")
    row = ["region=us", "id=2", "total=3.5"]
    assert run("insert", sales, "sales", *row, "--update", "--json").json == {
        "table": "sales",
        "inserted": 0,
        "updated": 1,
    }
    assert "no row has this key" in fail("insert", sales, "sales", "region=us", "id=9", "--update")
    assert "neither column=value nor a JSON object" in misuse("insert", sales, "sales", "eu")
    assert "there is no column 'nope'" in misuse("insert", sales, "sales", "nope=1")
    assert "row 1 is no row" in misuse("insert", sales, "sales", '{"region": ')


def test_rows_from_stdin_are_one_transaction(sales, run, fail):
    lines = "".join(f'{{"region": "uk", "id": {i}}}\n' for i in range(500))
    assert run("insert", sales, "sales", input=lines).out == "inserted 500 rows into sales\n"
    error = fail("insert", sales, "sales", input='{"region": "x", "id": 1}\n[]\n')
    assert error == (
        "line 2 is no row: write an object of the columns region, id, total, at, raw: []"
    )
    assert run("count", sales, "sales").out == "502\n"


def test_rows_are_counted_at_a_time(sales, run):
    before = run("stats", sales, "--json").json["snapshot"]
    run("delete", sales, "sales", "eu,1")
    assert run("count", sales, "sales").out == "1\n"
    assert run("count", sales, "sales", "--snapshot", before).out == "2\n"
    assert run("count", sales, "sales", "--snapshot", before, "-w", "id > 1", "--json").json == {
        "table": "sales", "rows": 1,
    }  # fmt: skip
    assert run("get", sales, "sales", "eu,1", "--snapshot", before, "--json").json["id"] == 1


def test_rows_are_deleted_by_key_or_by_condition(sales, run, fail, misuse):
    lines = "".join(f'{{"region": "uk", "id": {i}}}\n' for i in range(500))
    run("insert", sales, "sales", input=lines)
    assert "refused" in fail("delete", sales, "sales", "uk,1", "uk,1000")
    assert run("delete", sales, "sales", "uk,1", "uk,2").out == "deleted 2 rows from sales\n"
    told = run("delete", sales, "sales", "-w", "region = uk and (id < 10 or total > 1)", "--json")
    assert told.json == {"table": "sales", "deleted": 8}
    assert run("count", sales, "sales").out == "492\n"
    assert "give KEYs, or conditions" in misuse("delete", sales, "sales")
    assert "give KEYs, or conditions" in misuse("delete", sales, "sales", "uk,3", "-w", "id = 1")
    with txnkv.connect(sales) as client:
        assert client.table("sales").count([("region", "=", "uk"), ("id", "<", 10)]) == 0


# -- query -----------------------------------------------------------------------------


def test_tables_are_asked_in_sql(sales, run, misuse, tmp_path):
    pytest.importorskip("duckdb")
    before = run("stats", sales, "--json").json["snapshot"]
    run("create", sales, "regions", "--schema", "code:string,name:string", "--key", "code")
    run("insert", sales, "regions", '{"code": "eu", "name": "Europe"}')
    sql = "SELECT name, sum(id) AS ids FROM sales JOIN regions ON code = region GROUP BY name"
    assert run("query", sales, sql, "--json").lines == [{"name": "Europe", "ids": 1}]
    ran = run("query", sales, "-", input=sql)
    assert [line.split() for line in ran.out.splitlines()[::2]] == [
        ["name", "ids"],
        ["Europe", "1"],
    ]
    assert ran.err == "1 row\n"
    run("delete", sales, "sales", "eu,1")
    count = "SELECT count(*) AS n FROM sales"
    assert run("query", sales, count, "--json").json == {"n": 1}
    assert run("query", sales, count, "--json", "--snapshot", before).json == {"n": 2}
    run("query", sales, "FROM sales", "-o", tmp_path / "sales.parquet")
    assert parquet.read_table(tmp_path / "sales.parquet")["id"].to_pylist() == [2]
    ran = run("query", sales, "SELECT unnest(range(1000)) AS i")
    assert len(ran.out.splitlines()) == 102
    assert "nope" in misuse("query", sales, "SELECT * FROM nope")
    assert "exclude each other" in misuse("query", sales, count, "--json", "--format", "csv")


def test_columns_of_one_name_keep_their_values(sales, run, tmp_path):
    """Rows went by names of columns, so that the last of a name stood for all of them."""
    pytest.importorskip("duckdb")
    sql = "SELECT 1 AS a, 'x' AS b, 2 AS a, 3 AS a_1, 'y' AS b"
    grid, _, row = run("query", sales, sql).out.splitlines()
    assert (grid.split(), row.split()) == (["a", "b", "a", "a_1", "b"], ["1", "x", "2", "3", "y"])
    assert run("query", sales, sql, "--format", "csv").out == (
        '"a","b","a","a_1","b"\n1,"x",2,3,"y"\n'
    )
    as_duckdb = {"a": 1, "b": "x", "a_1": 2, "a_1_1": 3, "b_1": "y"}
    assert run("query", sales, sql, "--json").json == as_duckdb
    for name, read in (("o.parquet", parquet.read_table), ("o.arrow", feather.read_table)):
        run("query", sales, sql, "-o", tmp_path / name)
        assert read(tmp_path / name).to_pylist() == [as_duckdb]
    twice = ["scan", sales, "sales", "-c", "id,region,id", "--limit", 1, "--ordered"]
    assert run(*twice).out.splitlines()[2].split() == ["1", "eu", "1"]
    assert run(*twice, "--json").json == {"id": 1, "region": "eu", "id_1": 1}


@pytest.mark.parametrize(
    ("interval", "wanted"),
    [
        ("INTERVAL 6 SECOND", "PT6S"),
        ("INTERVAL '-36:00:01.5'", "-P1DT12H1.5S"),
        ("INTERVAL 14 MONTH + INTERVAL 3 DAY - INTERVAL 4 SECOND", "P14M3DT-4S"),
        ("INTERVAL 2000000000 DAY", "P2000000000D"),
    ],
)
def test_intervals_are_text(interval, wanted, store, run):
    pytest.importorskip("duckdb")
    sql = f"SELECT {interval} AS i"
    assert run("query", store, sql).out.splitlines()[2].split() == [wanted]
    assert run("query", store, sql, "--json").json == {"i": wanted}
    assert run("query", store, sql, "--format", "csv").out == f'"i"\n"{wanted}"\n'
    assert run("query", store, f"SELECT [{interval}] AS l", "--json").json == {"l": [wanted]}


def test_without_duckdb_it_says_what_to_install(store, fail, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert fail("query", store, "SELECT 1") == (
        "txnkv query needs DuckDB: pip install 'txnkv[duckdb]'"
    )


EXACT = "id:int64,d:decimal128(20, 2)?,x:float64?,j:json?,m:map<int64, binary>?,u:duration[us]?"
AS_WRITTEN = '{"id": 1, "d": "123456789012345678.91", "x": 0.1, "j": {"a":1e400,"a":1.50}, '
AS_WRITTEN += '"m": {"7": "AAE="}, "u": null}'


def test_what_is_typed_is_what_is_kept(store, run):
    run("create", store, "t", "--schema", EXACT, "--key", "id")
    given = AS_WRITTEN.replace('"123456789012345678.91"', "123456789012345678.91")
    run("insert", store, "t", given)
    assert run("scan", store, "t", "--json").out == AS_WRITTEN + "\n"
    run("insert", store, "t", "--upsert", input=AS_WRITTEN)
    assert run("scan", store, "t", "--json").out == AS_WRITTEN + "\n"
    assert run("get", store, "t", "1", "--json").out == AS_WRITTEN + "\n"
    typed = EXACT.replace("map<int64, binary>", "list<binary>")
    given, written = (each.replace('{"7": "AAE="}', '["AAE="]') for each in (given, AS_WRITTEN))
    run("produce", store, "e", "--partitions", 1, "--value-schema", typed, input=given)
    assert run("consume", store, "e").out == written + "\n"
    run("produce", store, "e", "--json", input=run("consume", store, "e", "--json").out)
    assert run("consume", store, "e").out == 2 * (written + "\n")
    assert run("consume", store, "e", "-s", "s", "-n", 1).out == written + "\n"
    assert written in run("consume", store, "e", "-s", "s", "-n", 1, "--json").out


@pytest.mark.parametrize(
    ("name", "value"),
    [("d", '"abc"'), ("d", "true"), ("d", "[1]"), ("u", "5"), ("m", "[]"), ("m", '{"x": "AAE="}')],
)
def test_a_value_that_does_not_fit_is_named(store, run, misuse, name, value):
    run("create", store, "t", "--schema", EXACT, "--key", "id")
    error = misuse("insert", store, "t", f'{{"id": 1, "{name}": {value}}}')
    assert f"is no row: column {name!r} is " in error
    assert run("count", store, "t").out == "0\n"


def test_binary_is_typed_as_it_is_shown(store, run, misuse):
    run("create", store, "t", "--schema", "b:binary,c:binary?", "--key", "b")
    run("insert", store, "t", "b=AAE=", "c=/w==")
    with txnkv.connect(store) as client:
        assert client.table("t").get(b"\0\1") == {"b": b"\0\1", "c": b"\xff"}
    assert run("get", store, "t", "AAE=", "--json").json["c"] == "/w=="
    assert run("count", store, "t", "-w", "c = /w==").out == "1\n"
    assert "'hello' is none (give base64)" in misuse("insert", store, "t", "b=hello")


def test_names_of_columns_in_quotes(store, run, misuse):
    run("create", store, "t", "--schema", '"my col":string, x : int64?', "--key", '"my col"')
    run("insert", store, "t", '{"my col": "a", "x": 1}')
    assert run("scan", store, "t", "--json").out == '{"my col": "a", "x": 1}\n'
    for wrong in (":int64", "x:", '"":int64', '"a:int64', "x"):
        assert "is no column" in misuse("create", store, "u", "--schema", wrong, "--key", "x")


@pytest.mark.parametrize(
    "command",
    [
        "insert {} sales",
        "load {} sales - --format csv",
        "load {} sales - --format arrow",
        "produce {} e",
        "query {} -",
    ],
)
def test_stdin_may_be_closed(command, sales, run, monkeypatch):
    pytest.importorskip("duckdb")
    run("topics", "create", sales, "e")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(click.ClickException, match="stdin is closed: there is nothing to read"):
        main(command.format(sales).split(), standalone_mode=False)
    with pytest.raises(click.UsageError, match="Say --yes"):
        main(["drop", str(sales), "sales"], standalone_mode=False)


def test_stdout_may_be_closed(sales):
    line = f"{sys.executable} -m txnkv scan {sales} sales --json >&-"
    ended = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "Error: stdout is closed: there is nowhere to write to\n"
