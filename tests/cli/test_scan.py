"""Scans: what is asked, in each format."""

from __future__ import annotations

import csv
import datetime as dt
import io
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest

import txnkv
from txnkv.cli import console


def ids(run, store, *options):
    return [
        row["id"] for row in run("scan", store, "orders", "--json", "--ordered", *options).lines
    ]


def test_a_table_for_people(orders, run):
    ran = run("scan", orders, "orders", "--ordered")
    lines = [line.rstrip() for line in ran.out.splitlines()]
    assert lines[0].split() == ["id", "region", "total", "day"]
    assert lines[2].split() == ["1", "eu", "9.5", "2026-01-31"]
    assert lines[5].split() == ["4", "7.0"]
    assert len(lines) == 6
    assert ran.err == "4 rows\n"


def test_a_table_for_people_says_that_there_is_more(store, file, run):
    rows = "id\n" + "".join(f"{i}\n" for i in range(200))
    run("load", store, "t", file("a.csv", rows), "--key", "id")
    ran = run("scan", store, "t")
    assert len(ran.out.splitlines()) == 102
    assert ran.err.startswith("the first 100 rows; --limit N shows more")
    assert len(run("scan", store, "t", "--limit", 150).out.splitlines()) == 152
    assert len(run("scan", store, "t", "--json").lines) == 200


@pytest.mark.parametrize("command", ["scan", "query"])
def test_more_columns_than_a_terminal_is_wide_are_pairs(command, store, run, monkeypatch):
    """They were as narrow as a digit, and beyond 31 of them they were gone."""
    if command == "query":
        pytest.importorskip("duckdb")
    monkeypatch.setattr(console, "_PIPE_WIDTH", 80)
    for count, lines in ((8, 4), (11, 4), (24, 2 * 24 + 1), (41, 2 * 41 + 1)):
        names, name = [f"c{i:02}" for i in range(count)], f"t{count}"
        with txnkv.connect(store) as client:
            table = client.create_table(name, txnkv.Schema(dict.fromkeys(names, "int64"), ["c00"]))
            for id in (0, 1):
                table.insert([id, *(i * 1000 for i in range(1, count))])
        args = [name, "--ordered"] if command == "scan" else [f"SELECT * FROM {name} ORDER BY c00"]
        out = run(command, store, *args).out
        assert len(out.splitlines()) == lines
        assert max(map(len, out.splitlines())) <= 80
        for word in [*names, *(f"{i * 1000}" for i in range(1, count))]:
            assert word in out.split()


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_names_are_whole_in_narrow_terminals(width, store, run, monkeypatch):
    monkeypatch.setattr(console, "_PIPE_WIDTH", width)
    kinds = "id:int64,customer:string,note:string?,raw:binary?"
    run("create", store, "customer_orders", "--schema", kinds, "--key", "id")
    run("topics", "create", store, "customer_events")
    tables, topics = run("tables", store).out, run("topics", "list", store).out
    for out in (tables, topics):
        assert max(map(len, out.splitlines())) <= width
    if width > 20:
        assert {"customer_orders", "tablets", "primary", "customer"} < set(tables.split())
        assert {"customer_events", "partitions", "buffer", "marker"} < set(topics.split())
    assert tables.replace("\n", "").replace(" ", "").count("binary?") == 1


@pytest.mark.parametrize(
    ("conditions", "wanted"),
    [
        (["total > 5"], [1, 4]),
        (["total>=7", "id = 4"], [4]),
        (["total <= 2.0"], [3]),
        (["id != 1"], [2, 3, 4]),
        (["id <> 1", "id == 2"], [2]),
        (["region = eu"], [1, 3]),
        (["region = 'eu'"], [1, 3]),
        (["region in (eu, 'us')"], [1, 2, 3]),
        (["id in 1,4"], [1, 4]),
        (["region is null"], [4]),
        (["total IS NOT NULL"], [1, 3, 4]),
        (["day >= 2026-02-01"], [2, 3]),
        (['"id" < 2'], [1]),
        (["id < 0"], []),
    ],
)
def test_conditions(conditions, wanted, orders, run):
    assert ids(run, orders, *(word for text in conditions for word in ("-w", text))) == wanted


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("total", "is no condition"),
        ("total ~ 5", "is no condition"),
        ("nope > 5", "there is no column 'nope'"),
        ("id > x", "column 'id' is int64, and 'x' is none"),
        ("id > 1.5", "column 'id' is int64, and '1.5' is none"),
    ],
)
def test_conditions_that_make_no_sense(condition, wanted, orders, misuse):
    assert wanted in misuse("scan", orders, "orders", "--where", condition)


def test_columns_limit_order(orders, run, misuse):
    rows = run("scan", orders, "orders", "-c", "total, id", "--limit", 2, "--ordered", "--json")
    assert rows.lines == [{"total": 9.5, "id": 1}, {"total": None, "id": 2}]
    assert run("scan", orders, "orders", "--limit", 0, "--json").out == ""
    assert "there is no column 'nope'" in misuse("scan", orders, "orders", "-c", "nope")
    assert "single commas" in misuse("scan", orders, "orders", "-c", "id,,total")
    for by, wanted in (
        ("-total", [1, 4, 3, 2]),
        ("region,-id", [4, 3, 1, 2]),
        ("-id", [4, 3, 2, 1]),
    ):
        assert [
            row["id"] for row in run("scan", orders, "orders", "--by", by, "--json").lines
        ] == wanted
    for also in ("--ordered", "--descending"):
        assert "--by tells the order" in misuse("scan", orders, "orders", "--by", "id", also)
    assert "single commas" in misuse("scan", orders, "orders", "--by", "")
    assert "no column 'nope' to order by" in misuse("scan", orders, "orders", "--by", "nope")


def test_snapshots(orders, file, run, misuse):
    before = run("stats", orders, "--json").json["snapshot"]
    when = txnkv.Timestamp(before).datetime.isoformat()
    run("load", orders, "orders", file("more.csv", "id,region\n9,uk\n"))
    assert ids(run, orders) == [1, 2, 3, 4, 9]
    assert ids(run, orders, "--snapshot", before) == [1, 2, 3, 4]
    assert ids(run, orders, "--snapshot", when) == [1, 2, 3, 4]
    assert ids(run, orders, "--snapshot", dt.datetime.now(dt.UTC).isoformat()) == [1, 2, 3, 4, 9]
    for when, wanted in (
        ("2026-01-01T00:00", "has no time zone"),
        ("yesterday", "is neither a timestamp"),
        ("2080-01-01T00:00Z", "in the future"),
        ("2500-01-01T00:00Z", "in the future"),
        ("9" * 30, "does not fit"),
    ):
        assert wanted in misuse("scan", orders, "orders", "--snapshot", when)


def test_csv_on_stdout(orders, run):
    out = run("scan", orders, "orders", "--format", "csv", "--ordered").out
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["id"] for row in rows] == ["1", "2", "3", "4"]
    assert rows[1] == {"id": "2", "region": "us", "total": "", "day": "2026-02-01"}


@pytest.mark.parametrize("name", ["o.csv", "o.json", "o.parquet", "o.arrow"])
def test_files_hold_what_was_read_and_load_again(name, orders, run, tmp_path):
    ran = run("scan", orders, "orders", "--output", tmp_path / name)
    assert ran.out == ""
    assert ran.err == f"wrote 4 rows to {tmp_path / name}\n"
    schema = "id:int64,region:string?,total:float64?,day:date32?"
    run("load", orders, "again", tmp_path / name, "--schema", schema, "--key", "id")
    with txnkv.connect(orders) as client:
        assert (
            client.table("again").scan(ordered=True).to_arrow()
            == client.table("orders").scan(ordered=True).to_arrow()
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "orders.csv", "store"])


def test_a_file_that_fails_is_not_there(orders, fail, tmp_path):
    with txnkv.connect(orders) as client:
        client.create_table("raw", txnkv.Schema({"id": "int64", "raw": "binary"}, ["id"]))
    message = fail("scan", orders, "raw", "-o", tmp_path / "raw.csv")
    assert "column 'raw' is binary: CSV cannot hold it; leave it out, or write json" in message
    with txnkv.connect(orders) as client:
        columns = {"id": "int64", "ok": "json?", "big": "list<decimal128(5, -2)>?"}
        client.create_table("hundreds", txnkv.Schema(columns, ["id"]))
    message = fail("scan", orders, "hundreds", "-o", tmp_path / "raw.parquet")
    assert "column 'big' is list<item: decimal128(5, -2)>: Parquet cannot hold it" in message
    assert not list(tmp_path.glob("*raw*"))


def test_json_has_every_type_and_stays_json(store, run):
    kinds = {
        "id": "int64",
        "f": "float64",
        "b": "binary",
        "d": "decimal128(5, 2)",
        "t": "timestamp[us, tz=UTC]",
        "l": "list<string>",
        "y": "bool",
    }
    at = dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC)
    with txnkv.connect(store) as client:
        table = client.create_table("t", txnkv.Schema(kinds, primary_key=["id"]))
        with client.transaction() as txn:
            txn.insert(table, (1, math.nan, b"\xff", Decimal("1.5"), at, ["ü", "\n"], True))
    assert run("scan", store, "t", "--json").lines == [
        {
            "id": 1,
            "f": None,
            "b": "/w==",
            "d": "1.50",
            "t": "2026-01-02T03:00:00+00:00",
            "l": ["ü", "\n"],
            "y": True,
        }
    ]


@pytest.mark.parametrize("command", ["scan", "query"])
def test_values_in_a_table_are_as_get_prints_them_and_insert_takes_them(command, store, run):
    """Binary was hexadecimal, which `insert` took for the base64 of other bytes."""
    if command == "query":
        pytest.importorskip("duckdb")
    kinds = {"id": "int64", "b": "binary", "l": "list<string>", "m": "map<string, binary>"}
    row = {"id": 1, "b": b"\0\xffab", "l": ["ü", "'\n"], "m": [("k", b"\xff")]}
    with txnkv.connect(store) as client:
        table = client.create_table("t", txnkv.Schema(kinds, ["id"]))
        table.insert(row)
        asked = "t" if command == "scan" else "SELECT * FROM t"
        shown = re.split(r" {2,}", run(command, store, asked).out.splitlines()[2].strip())
        assert shown == ["1", "AP9hYg==", '["ü", "\'\\n"]', '{"k": "/w=="}']
        got = run("get", store, "t", 1).out
        assert all(each in got for each in shown)
        run("insert", store, "t", "id=2", *map("{}={}".format, "blm", shown[1:]))
        assert table.get(2) == {**row, "id": 2}


def test_what_cannot_be_asked(orders, fail, misuse, tmp_path):
    assert "no table 'nope'" in fail("scan", orders, "nope")
    assert "goes to a file" in misuse("scan", orders, "orders", "--format", "parquet")
    assert "exclude each other" in misuse("scan", orders, "orders", "--json", "--format", "csv")
    assert "does not tell" in misuse("scan", orders, "orders", "-o", tmp_path / "x")
    assert "goes to stdout" in misuse(
        "scan", orders, "orders", "--format", "table", "-o", tmp_path / "x.csv"
    )
    assert "not compressed" in misuse("scan", orders, "orders", "-o", tmp_path / "x.csv.gz")


def test_output_goes_into_a_pipe_and_to_where_a_link_leads(orders, run, tmp_path):
    """As root, `-o /dev/null` put a file in the place of the device."""
    (folder := tmp_path / "out").mkdir()
    pipe, link, file = (folder / name for name in ("pipe", "link", "file"))
    os.mkfifo(pipe)
    link.symlink_to(file)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        run("scan", orders, "orders", "--ordered", "--format", "csv", "-o", pipe)
        assert pipe.is_fifo()
        for name in (link, file):
            run("scan", orders, "orders", "--ordered", "--format", "csv", "-o", name)
            assert link.is_symlink()
            assert file.read_bytes() == read.result()
            file.write_bytes(b"old")
    assert len(list(folder.iterdir())) == 3
