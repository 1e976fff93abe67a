"""Loads: every format in, whole or not at all."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import gzip
import json
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet
import pytest

import txnkv

CSV = "id,name,total\n2,b,2.5\n1,a,\n3,,1\n"
ROWS = [
    {"id": 1, "name": "a", "total": None},
    {"id": 2, "name": "b", "total": 2.5},
    {"id": 3, "name": None, "total": 1.0},
]
JSON = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = pa.Table.from_pylist(ROWS)


def rows_of(store, table):
    with txnkv.connect(store) as client:
        return client.table(table).scan(ordered=True).to_arrow().to_pylist()


def tables_of(store):
    with txnkv.connect(store) as client:
        return client.tables()


def arrow_bytes(new):
    sink = pa.BufferOutputStream()
    with new(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue().to_pybytes()


def parquet_bytes():
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(TABLE, sink)
    return sink.getvalue().to_pybytes()


FORMATS = {
    "rows.csv": CSV,
    "rows.tsv": CSV.replace(",", "\t"),
    "rows.csv.gz": gzip.compress(CSV.encode()),
    "rows.jsonl": JSON,
    "rows.json": JSON,
    "rows.ndjson.gz": gzip.compress(JSON.encode()),
    "rows.parquet": parquet_bytes(),
    "rows.arrow": arrow_bytes(pa.ipc.new_file),
    "rows.arrows": arrow_bytes(pa.ipc.new_stream),
}


@pytest.mark.parametrize("name", FORMATS)
def test_loads_each_format(name, store, file, run):
    run("load", store, "t", file(name, FORMATS[name]), "--key", "id")
    assert rows_of(store, "t") == ROWS


# Parquet and files of Arrow IPC need to be seekable.
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"rows.parquet", "rows.arrow"}))
def test_loads_from_stdin(name, store, run):
    content = FORMATS[name]
    kind = "csv" if "sv" in name else "json" if "json" in name else "arrow"
    extra = ["--delimiter", "\t"] if "tsv" in name else []
    run("load", store, "t", "-", "--format", kind, "--key", "id", *extra, input=content)
    assert rows_of(store, "t") == ROWS


def test_tells_people_and_programs_what_it_did(store, file, run):
    path = file("rows.csv", CSV)
    assert run("load", store, "t", path, "--key", "id").out.startswith(
        "loaded 3 rows into t (made) in "
    )
    ran = run("load", store, "t", path, "--operation", "insert_ignore", "--json").json
    assert ran.pop("seconds") > 0
    assert ran.pop("commit_timestamp") > 0
    counts = {"rows": 3, "inserted": 0, "updated": 0, "deleted": 0, "ignored": 3}
    assert ran == {"table": "t", "made": False} | counts


def test_a_file_without_the_columns_that_csv_cannot_hold(store, file, run, fail):
    with txnkv.connect(store) as client:
        columns = {"id": "int64", "name": "string?", "tags": "list<string>?"}
        client.create_table("t", txnkv.Schema(columns, primary_key=["id"]))
    run("load", store, "t", file("rows.csv", "id,name\n1,a\n"))
    assert rows_of(store, "t") == [{"id": 1, "name": "a", "tags": None}]
    for content, more in (("id,tags\n2,b\n", ()), ("2,a,b\n", ("--no-header",))):
        message = fail("load", store, "t", file("more.csv", content), *more)
        assert "column 'tags' is list<item: string>: CSV cannot hold it" in message


def test_updates_and_deletes_by_file(store, file, run, fail):
    run("load", store, "t", file("rows.csv", "id,name,n\n1,a,10\n2,b,20\n3,c,30\n"), "--key", "id")
    some = file("some.csv", "id,n\n2,-2\n4,-4\n")
    ran = run("load", store, "t", some, "--operation", "upsert")
    assert ran.out.startswith("loaded 1 row into t, updated 1 row in ")
    more = file("more.csv", "id,n\n1,-1\n9,-9\n")
    message = fail("load", store, "t", more, "--operation", "update")
    assert "no row has this key" in message
    assert "--operation update_ignore leaves out keys that are not there" in message
    ran = run("load", store, "t", more, "--operation", "update_ignore")
    assert ran.out.startswith("updated 1 row of t (1 were not there) in ")
    ran = run("load", store, "t", file("gone.csv", "id,n\n3,0\n"), "--operation", "delete")
    assert ran.out.startswith("deleted 1 row from t in ")
    assert rows_of(store, "t") == [
        {"id": 1, "name": "a", "n": -1},
        {"id": 2, "name": "b", "n": -2},
        {"id": 4, "name": None, "n": -4},
    ]
    message = fail("load", store, "u", more, "--operation", "delete")
    assert "there is no table 'u': nothing to delete" in message


def test_makes_the_store_when_it_is_missing(tmp_path, file, run):
    run("load", tmp_path / "new", "t", file("rows.csv", CSV), "--key", "id")
    assert rows_of(tmp_path / "new", "t") == ROWS


def test_makes_the_table_as_the_schema_says(store, file, run):
    schema = (
        "id:int32,name:string,total:decimal128(5, 2)?,list:list<int64>?,at:timestamp[us, tz=UTC]?"
    )
    lines = '{"id":1,"name":"a","total":"1.5","list":[1,2],"at":"2026-01-01T10:00:00Z"}\n'
    run("load", store, "t", file("a.jsonl", lines), "--schema", schema, "--key", "id")
    with txnkv.connect(store) as client:
        assert client.table("t").schema == txnkv.Schema(
            {
                "id": "int32",
                "name": "string",
                "total": "decimal128(5,2)?",
                "list": "list<int64>?",
                "at": "timestamp[us, tz=UTC]?",
            },
            primary_key=["id"],
        )
    assert rows_of(store, "t") == [
        {
            "id": 1,
            "name": "a",
            "total": decimal.Decimal("1.50"),
            "list": [1, 2],
            "at": dt.datetime(2026, 1, 1, 10, tzinfo=dt.UTC),
        }
    ]


def test_a_composite_key_and_hash_partitions(store, file, run):
    csv = "a,b,c\n" + "".join(f"{i},{i % 3},x\n" for i in range(100))
    options = ["--key", "b,a", "--partition-hash", "a:4", "--partition-hash", "b:2"]
    run("load", store, "t", file("a.csv", csv), *options)
    with txnkv.connect(store) as client:
        table = client.table("t")
        assert table.schema.primary_key == ("b", "a")
        assert len(table.info.tablets) == 8
        assert table.count() == 100


def test_several_files_are_one_transaction(store, file, run, fail):
    first, second = file("1.csv", "id,v\n1,a\n"), file("2.csv", "id,v\n2,b\n")
    run("load", store, "t", first, second, "--key", "id")
    assert [row["id"] for row in rows_of(store, "t")] == [1, 2]
    assert "key 2" in fail("load", store, "t", file("3.csv", "id,v\n3,c\n"), second)
    assert [row["id"] for row in rows_of(store, "t")] == [1, 2]


def test_what_stands_for_null_in_csv(store, file, run):
    csv = 'id,name,v\n1,"",1\n2,,NA\n3,NA,2\n'
    schema = "id:int64,name:string?,v:int64?"
    options = ["--schema", schema, "--key", "id", "--null", "NA"]
    run("load", store, "na", file("a.csv", csv), *options)
    assert [row["name"] for row in rows_of(store, "na")] == ["", "", None]
    csv = 'id,name,need\n1,"",\n2,,x\n'
    schema = "id:int64,name:string?,need:string"
    run("load", store, "empty", file("b.csv", csv), "--schema", schema, "--key", "id")
    assert [row["name"] for row in rows_of(store, "empty")] == ["", None]
    assert [row["need"] for row in rows_of(store, "empty")] == ["", "x"]


def test_csv_with_newlines_in_values_and_without_a_header(store, file, run, fail):
    path = file("a.csv", '1,"two\nlines"\n2,x\n')
    run("load", store, "t", path, "--no-header", "--schema", "id:int64,v:string", "--key", "id")
    assert rows_of(store, "t") == [{"id": 1, "v": "two\nlines"}, {"id": 2, "v": "x"}]
    assert "--no-header needs --schema" in fail(
        "load", store, "u", path, "--no-header", "--key", "id"
    )


def test_types_of_text_that_no_column_has_become_text(store, file, run):
    csv = "id,at,none\n1,10:00:00,\n2,11:00:00,\n"
    run("load", store, "t", file("a.csv", csv), "--key", "id")
    assert rows_of(store, "t")[0] == {"id": 1, "at": dt.time(10), "none": None}
    run("load", store, "u", file("a.jsonl", '{"id": 1, "none": [[null], []]}'), "--key", "id")
    assert rows_of(store, "u")[0] == {"id": 1, "none": [[None], []]}


TYPED = (
    "id:uuid,j:json?,s:struct<at: timestamp[us], n: int8>?,m:map<string, decimal128(5, 2)>?,"
    "l:list<struct<b: binary>>?,t:time?,d:duration?,n:int64?"
)
TYPED_LINE = (
    '{"id": "0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b", "j": {"a": [1.10, null]}, '
    '"s": {"at": "2026-01-31T12:00:00", "n": 7}, "m": {"x": "1.50"}, '
    '"l": [{"b": "/w=="}, null], "t": "10:00:00.500000", "d": "P1DT2H", "n": 5}'
)


def test_every_type_of_json_comes_back_as_it_was(store, file, run):
    lines = TYPED_LINE + "\n\n" + '{"id": "0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5c"}\n'
    run("load", store, "t", file("a.jsonl", lines), "--key", "id", "--schema", TYPED)
    first, second = rows_of(store, "t")
    assert first == {
        "id": UUID("0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"),
        "j": '{"a": [1.10, null]}',
        "s": {"at": dt.datetime(2026, 1, 31, 12), "n": 7},
        "m": [("x", decimal.Decimal("1.50"))],
        "l": [{"b": b"\xff"}, None],
        "t": dt.time(10, 0, 0, 500000),
        "d": dt.timedelta(days=1, hours=2),
        "n": 5,
    }
    assert set(second.values()) == {second["id"], None}
    out = run("scan", store, "t", "--json", "--limit", "1").out
    assert out == TYPED_LINE + "\n"
    run("load", store, "u", file("b.jsonl", out), "--key", "id", "--schema", TYPED)
    assert rows_of(store, "u") == [first]
    assert run("get", store, "t", str(first["id"]), "--json").json == json.loads(TYPED_LINE)
    assert run("scan", store, "t", "-w", "d >= PT26H and t < 11:00", "--json").out == out


def test_every_type_of_csv_comes_back_as_it_was(store, file, run, tmp_path):
    csv = 'id,j,t,d\n0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b,"{""a"": [1]}",10:00:00,-PT0.5S\n'
    schema = "id:uuid,j:json?,t:time32[s]?,d:duration?"
    run("load", store, "t", file("a.csv", csv), "--key", "id", "--schema", schema)
    run("scan", store, "t", "-o", tmp_path / "b.csv")
    run("load", store, "u", tmp_path / "b.csv", "--key", "id", "--schema", schema)
    assert (
        rows_of(store, "u")
        == rows_of(store, "t")
        == [
            {
                "id": UUID("0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"),
                "j": '{"a": [1]}',
                "t": dt.time(10),
                "d": -dt.timedelta(seconds=0.5),
            }
        ]
    )


def test_objects_are_columns_of_json_and_stay_as_they_are_written(store, file, run):
    lines = '{"id": 1, "a": {"b": 1.000}, "l": [{"c": 2}]}\n{"id": 2, "l": [ ]}\n'
    run("load", store, "t", file("a.jsonl", lines), "--key", "id")
    assert rows_of(store, "t") == [
        {"id": 1, "a": '{"b": 1.000}', "l": '[{"c": 2}]'},
        {"id": 2, "a": None, "l": "[ ]"},
    ]


def test_objects_and_lists_of_mixed_types_are_json_too(store, file, run, fail):
    lines = (
        '{"a": {"b": 1}, "id": 1, "l": [1, "x"], "s": {"d": 1.50}, "n": 7}\n'
        '{"id": 2, "a": 5, "s": {"d": [{}]}, "late": {"z": 1}, "day": "2026-01-31 10:00:00"}\n'
        '\n{"id": 3, "a": "y", "l": null, "late": "z"}\n'
    )
    run("load", store, "t", file("a.jsonl", lines), "--key", "id")
    nothing = dict.fromkeys(("a", "l", "s", "n", "late", "day"))
    assert rows_of(store, "t") == [
        nothing | {"a": '{"b": 1}', "id": 1, "l": '[1, "x"]', "s": '{"d": 1.50}', "n": 7},
        nothing
        | {"id": 2, "a": "5", "s": '{"d": [{}]}', "late": '{"z": 1}'}
        | {"day": dt.datetime(2026, 1, 31, 10)},
        nothing | {"id": 3, "a": '"y"', "late": '"z"'},
    ]
    scalars = file("b.jsonl", '{"id": 1, "m": 1, "a": {}}\n{"id": 2, "m": "x", "a": 1}\n')
    assert "line 2: column 'm': a string where a number" in fail(
        "load", store, "u", scalars, "--key", "id"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": 3, "x": 1}', "line 3: there is no column 'x'; the columns are id, j, n"),
        ('{"id": 3, "\\u006a": 1}', "(its name is written with an escape)"),
        ('{"id": 3, "j": {"a" 1}}', "line 3: "),
        ('{"id": 3, "n": "x"}', "line 3: column 'n'"),
        ('{"id": 3}, x', "line 3: ', x' behind its object"),
        ("[3]", "line 3: [3] is no object"),
    ],
)
def test_lines_with_json_that_are_wrong_are_named(store, file, fail, line, words):
    lines = '{"id": 1, "j": {}}\n{"id": 2}\n' + line + "\n"
    schema = ("--key", "id", "--schema", "id:int64,j:json?,n:int64?")
    assert words in fail("load", store, "t", file("a.jsonl", lines), *schema)
    assert tables_of(store) == []


def test_dates_and_bytes_of_json(store, file, run):
    line = {"id": 1, "day": "2026-01-31", "raw": base64.b64encode(b"\xff\0").decode()}
    schema = "id:int64,day:date32,raw:binary?"
    path = file("a.jsonl", json.dumps(line) + "\n" + '{"id":2,"day":"2026-02-01"}')
    run("load", store, "t", path, "--schema", schema, "--key", "id")
    assert rows_of(store, "t") == [
        {"id": 1, "day": dt.date(2026, 1, 31), "raw": b"\xff\0"},
        {"id": 2, "day": dt.date(2026, 2, 1), "raw": None},
    ]


def test_lines_that_scan_wrote_come_back(store, file, run, fail):
    """Binary in lists, decimals of any length, and JSON that Arrow's reader refuses."""
    schema = "id:int64,l:list<decimal128(20, 2)>?,j:json?,b:list<binary>?,m:map<int64, binary>?"
    schema += ",s:struct<d: decimal128(20, 2)>?"
    lines = (
        '{"id": 1, "l": ["123456789012345678.91", null], "j": {"a":1e400,"x":"\\ud800"}, '
        '"b": ["AAE=", null], "m": {"7": "/w=="}, "s": {"d": "123456789012345678.91"}}\n'
        '{"id": 2, "l": null, "j": null, "b": null, "m": null, "s": null}\n'
    )
    given = lines.replace('"123456789012345678.91"', "123456789012345678.91")
    run("load", store, "t", file("a.jsonl", given), "--schema", schema, "--key", "id")
    assert rows_of(store, "t")[0]["b"] == [b"\0\1", None]
    assert run("scan", store, "t", "--json", "--ordered").out == lines
    run("load", store, "u", file("b.jsonl", lines), "--schema", schema, "--key", "id")
    assert rows_of(store, "u") == rows_of(store, "t")
    wrong = file("c.jsonl", lines + '\n{"id": 3, "b": ["!!"]}\n')
    assert "'!!' is not base64" in fail(
        "load", store, "v", wrong, "--schema", schema, "--key", "id"
    )
    wrong = file("d.jsonl", lines + '\n{"id": "x"}\n')
    assert "line 1: " in fail("load", store, "v", wrong, "--schema", schema, "--key", "id")


LISTS = {
    "list<date32>": '["2026-01-31", null]',
    "list<time64[us]>": '["01:02:03.500000", null]',
    "list<time32[ms]>": '["01:02:03.500000"]',
    "list<duration[us]>": '["PT1S", null]',
    "list<decimal128(5, -2)>": '["9.9999E+6", null]',
    "list<list<date32>>": '[["2026-01-31"], null, [], [null]]',
    "list<list<list<duration[us]>>>": '[[["-P1DT0.5S"]], null]',
    "list<map<string, int8>>": '[{}, {"a": 1}]',
    "struct<m: map<string, map<date32, int8>>>": '{"m": {"a": {}, "b": {"2026-01-31": 1}}}',
    "map<string, list<date32>>": '{"a": ["2026-01-31"], "b": null}',
    "struct<d: list<duration[us]>, t: time64[us]>": '{"d": ["PT1S"], "t": "01:02:03"}',
    "list<struct<d: date32, l: list<time64[us]>>>": '[{"d": "2026-01-31", "l": ["01:02:03"]}]',
}


@pytest.mark.parametrize("kind", LISTS)
def test_nested_values_that_scan_wrote_come_back(store, file, run, kind):
    """Arrow's reader takes no text for dates in lists, and no durations."""
    with txnkv.connect(store) as client:
        for name in ("t", "u"):
            client.create_table(name, txnkv.Schema({"id": "int64", "l": f"{kind}?"}, ["id"]))
    only_null = "[null]" if kind.startswith("list") else "null"
    values = (LISTS[kind], "null", only_null)
    lines = "".join(f'{{"id": {i}, "l": {value}}}\n' for i, value in enumerate(values))
    run("load", store, "t", file("a.jsonl", lines))
    assert run("scan", store, "t", "--json", "--ordered").out == lines
    run("load", store, "u", file("b.jsonl", lines.splitlines()[2]))
    assert run("scan", store, "u", "--json").out == lines.splitlines()[2] + "\n"


def test_text_longer_than_a_block_is_read_whole(store, file, run, monkeypatch):
    """The reader cuts text into blocks at line ends; values and errors must not notice."""
    monkeypatch.setattr("txnkv.cli.text_sources.HEAD", 3000)
    monkeypatch.setattr("txnkv.cli.text_sources.BLOCK", 1000)
    wanted = [{"id": i, "v": f"{i}," * (i % 50)} for i in range(1000)]
    csv = "id,v\n" + "".join(f'{row["id"]},"{row["v"]}"\n' for row in wanted)
    lines = "\n".join(json.dumps(row) for row in wanted)
    for name, text in {
        "a.csv": csv,
        "b.csv.gz": gzip.compress(csv.encode()),
        "c.jsonl": lines,
    }.items():
        run("load", store, name, file(name, text), "--key", "id")
        assert rows_of(store, name) == wanted


BAD = {
    "type.csv": ("id,v\n1,2\n2,x\n", "type.csv: line 3: column 'v': 'x' is no int64"),
    "short.csv": ("id,v\n1,2\n2\n", "short.csv: line 3: Expected 2 columns, got 1"),
    "unknown.csv": ("id,w\n1,2\n", "unknown.csv: there is no column 'w'; the columns are id, v"),
    "unknown_no_rows.csv": ("id,w\n", "there is no column 'w'"),
    "missing.csv": ("v\n1\n", "no column 'id'"),
    "twice.csv": ("id,id\n1,2\n", "twice.csv: it has column 'id' twice"),
    "twice_no_rows.csv": ("id,v,v\n", "it has column 'v' twice"),
    "utf8.csv": (b"id,v\n1,2\n\xff,3\n", "utf8.csv: "),
    "cut.csv.gz": (gzip.compress(b"id,v\n1,2\n" * 1000)[:-20], "Truncated"),
    "key.csv": ("id,v\n1,2\n1,3\n", "1 row refused: key 1: "),
    "syntax.jsonl": ('{"id":1}\n{"id":2\n', "syntax.jsonl: line 2: Missing a comma"),
    "type.jsonl": ('{"id":1}\n\n{"id":"q"}\n', "column 'id': a string where a number was expected"),
    "field.jsonl": ('{"id":1}\n{"id":2,"w":5}\n', "field.jsonl: line 2: there is no column 'w'"),
    "null.jsonl": ('{"id":1}\n{"v":5}\n', "'id' is not nullable"),
    "array.json": ('[{"id":1}]', "one JSON array, not JSON lines"),
    "bad.parquet": ("hello", "bad.parquet: this is no Parquet file"),
    "bad.arrow": ("hello", "bad.arrow: this is no Arrow IPC file or stream"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_load_that_fails_leaves_nothing(name, store, file, fail):
    content, wanted = BAD[name]
    schema = ["--schema", "id:int64,v:int64?", "--key", "id"]
    assert wanted in fail("load", store, "t", file(name, content), *schema)
    assert tables_of(store) == []


def test_a_load_that_fails_late_leaves_nothing_and_says_how_far_it_came(
    store, file, run, fail, monkeypatch
):
    monkeypatch.setattr("txnkv.cli.text_sources.HEAD", 3000)
    monkeypatch.setattr("txnkv.cli.text_sources.BLOCK", 1000)
    good, bad = "".join(f"{i},{i}\n" for i in range(1000)), "1000,x\n"
    path = file("a.csv", "id,v\n" + good + bad)
    message = fail("load", store, "t", path, "--key", "id")
    assert "a.csv: line 1,002: column 'v': 'x' is no int64" in message
    read = int(message.split("nothing was loaded (")[1].split(" rows")[0].replace(",", ""))
    assert 0 < read < 1001
    assert tables_of(store) == []
    run("load", store, "t", file("b.csv", "id,v\n5000,1\n"), "--key", "id")
    assert "nothing was loaded" in fail("load", store, "t", path)
    assert rows_of(store, "t") == [{"id": 5000, "v": 1}]


def test_keys_that_are_there_are_refused_or_left_out(store, file, run, fail):
    path = file("a.csv", CSV)
    run("load", store, "t", path, "--key", "id")
    more = file("b.csv", CSV + "4,d,4\n")
    message = fail("load", store, "t", more)
    assert message.startswith("3 rows refused: key ")
    assert "--operation insert_ignore" in message
    assert "(4 rows had been read)" in message
    assert run("load", store, "t", more, "--operation", "insert_ignore").out.startswith(
        "loaded 1 row into t (3 were there already) in "
    )
    assert [row["id"] for row in rows_of(store, "t")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], "to make it name its key, as --key id"),
        (["--key", "nope"], "the primary key names 'nope'"),
        (["--key", "id", "--partition-hash", "name:4"], "not of the primary key"),
    ],
)
def test_options_that_do_not_fit(options, wanted, store, file, fail):
    assert wanted in fail("load", store, "t", file("a.csv", CSV), *options)
    assert tables_of(store) == []


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--key", "id,"], "separated by single commas"),
        (["--key", "id", "--schema", "id"], "'id' is no column"),
        (["--key", "id", "--schema", "id:int64,id:int64"], "twice"),
        (["--key", "id", "--schema", "id:text"], "'text' is not a column type"),
        (["--key", "id", "--schema", "id:int64?"], "cannot be nullable"),
        (["--key", "id", "--partition-hash", "id"], "is not column:buckets"),
        (["--key", "id", "--partition-hash", "id:0"], "1 to 1024 buckets"),
    ],
)
def test_options_that_make_no_sense(options, wanted, store, file, misuse):
    assert wanted in misuse("load", store, "t", file("a.csv", CSV), *options)
    assert tables_of(store) == []


def test_options_that_contradict_the_table(store, file, run, fail):
    path = file("a.csv", CSV)
    run("load", store, "t", path, "--key", "id")
    assert "exists with the key id" in fail("load", store, "t", path, "--key", "name")
    assert "exists with other columns" in fail("load", store, "t", path, "--schema", "id:int64")
    assert "exists; leave the option out" in fail(
        "load", store, "t", path, "--partition-hash", "id:2"
    )


def test_files_that_cannot_be_read(store, file, fail, misuse, tmp_path):
    assert "nothing.csv: No such file" in fail(
        "load", store, "t", tmp_path / "nothing.csv", "--key", "id"
    )
    assert "does not tell the format" in fail("load", store, "t", file("a", CSV), "--key", "id")
    assert "no rows to infer" in fail("load", store, "t", file("b.csv", ""), "--key", "id")
    assert "no rows to infer" in fail("load", store, "t", file("c.csv", "id\n"), "--key", "id")
    assert "no rows to infer" in fail("load", store, "t", file("d.json", "\n"), "--key", "id")
    twice = file("e.csv", "id,v,id\n1,2,3\n")
    assert "e.csv: it has column 'id' twice" in fail("load", store, "t", twice, "--key", "id")
    assert "one character" in misuse("load", store, "t", "a.csv", "--delimiter", "--")
    assert "Missing argument" in misuse("load", store, "t")


# -- numbers ---------------------------------------------------------------------------

TOO_LARGE = "column 'n' has numbers larger than any float64: --schema"
NEITHER = "column 'n' has whole numbers that neither int64 nor uint64 holds all: --schema"


@pytest.mark.parametrize("ending", ["csv", "jsonl", "lists"])
@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (["9223372036854775807", "-9223372036854775808"], [2**63 - 1, -(2**63)]),
        (["9223372036854775808", "9223372036854775809"], [2**63, 2**63 + 1]),
        (["5", "null", "18446744073709551615"], [5, None, 2**64 - 1]),
        (["9223372036854775808", "-1"], NEITHER),
        (["18446744073709551616"], NEITHER),
        (["9007199254740993", "2.5"], [2.0**53, 2.5]),
        (["10000000000000000000000", "1e300", "-2.5E-3"], [1e22, 1e300, -0.0025]),
        (["1" * 400], TOO_LARGE),
        (["2.5", "-" + "1" * 400], TOO_LARGE),
    ],
)
def test_whole_numbers_are_not_rounded(store, file, run, fail, ending, texts, wanted):
    """Arrow makes doubles of those beyond int64: two of them were one key."""
    if ending == "csv":
        options = ["--null", "null"]
        lines = "id,n\n" + "".join(f"{i},{text}\n" for i, text in enumerate(texts))
    else:
        options = []
        values = (f"[[{text}], null]" if ending == "lists" else text for text in texts)
        lines = "".join(f'{{"id": {i}, "n": {text}}}\n' for i, text in enumerate(values))
    path = file("a.jsonl" if ending == "lists" else f"a.{ending}", lines)
    if isinstance(wanted, str):
        assert wanted in fail("load", store, "t", path, "--key", "id", *options)
        return
    run("load", store, "t", path, "--key", "id", *options)
    if ending == "lists":
        wanted = [[[value], None] for value in wanted]
    assert [row["n"] for row in rows_of(store, "t")] == wanted


def test_not_a_number_is_a_real_one(store, file, run):
    run("load", store, "t", file("a.csv", "id,n\n1,9007199254740993\n2,inf\n3,\n"), "--key", "id")
    assert [row["n"] for row in rows_of(store, "t")] == [2.0**53, float("inf"), None]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_decimals_of_hundreds_come_back(store, file, run, fail, tmp_path, ending):
    """They are written as 9.9999E+6, in which Arrow's readers counted seven digits."""
    schema = ["--key", "id", "--schema", "id:int64,n:decimal128(5, -2)?"]
    lines = "1,9999900\n2,\n3,-1E+2\n4,0\n"
    if ending == "jsonl":
        lines = '{"id":1,"n":9999900}\n{"id":2}\n{"id":3,"n":"-1E+2"}\n{"id":4,"n":"0"}\n'
    run("load", store, "t", file(f"a.{ending}", "id,n\n"[: 5 * (ending == "csv")] + lines), *schema)
    wanted = [decimal.Decimal(9999900), None, decimal.Decimal(-100), decimal.Decimal(0)]
    assert [row["n"] for row in rows_of(store, "t")] == wanted
    run("scan", store, "t", "-o", tmp_path / f"b.{ending}")
    run("load", store, "u", tmp_path / f"b.{ending}", *schema)
    assert rows_of(store, "u") == rows_of(store, "t")
    row = "id,n\n1,150\n" if ending == "csv" else '{"id":1,"n":150}\n'
    message = fail("load", store, "u", file(f"c.{ending}", row))
    assert "column 'n' is decimal128(5, -2): " in message


# -- time zones ------------------------------------------------------------------------

ZONED, PLAIN = "timestamp[us, tz=UTC]", "timestamp[us]"


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("kind", "text"), [(ZONED, "2026-01-31T12:00:00"), (PLAIN, "2026-01-31T12:00:00+02:00")]
)
def test_a_time_zone_is_neither_added_nor_dropped(invoke, store, tmp_path, ending, kind, text):
    """JSON lines took a time without a zone for UTC, and dropped the zone of one with it."""
    file = tmp_path / f"times.{ending}"
    file.write_text(f"id,at\n1,{text}\n" if ending == "csv" else f'{{"id": 1, "at": "{text}"}}\n')
    ran = invoke("load", store, "t", file, "--key", "id", "--schema", f"id:int64,at:{kind}")
    assert ran.status == 1
    assert "zone offset" in ran.err
    assert tables_of(store) == []


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["2026-01-31T12:00:00", None], [dt.datetime(2026, 1, 31, 12), None]),
        (["2026-01-31T12:00:00+02:00"], [dt.datetime(2026, 1, 31, 10, tzinfo=dt.UTC)]),
        (["2026-01-31T12:00:00", "2026-01-31T12:00:00Z"], None),
        ([["2026-01-31T12:00:00Z"]], [[dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)]]),
    ],
)
def test_zones_of_json_are_inferred(run, store, tmp_path, texts, found):
    file = tmp_path / "times.jsonl"
    rows = ({"id": i, "at": text} for i, text in enumerate(texts))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("load", store, "t", file, "--key", "id")
    assert [row["at"] for row in rows_of(store, "t")] == (texts if found is None else found)
