"""Values at the ends of what there is: one line for an error, and files that load as they were."""

from __future__ import annotations

import gzip
import itertools
import random
import subprocess
import sys
from datetime import UTC, datetime, time
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

import txnkv
from txnkv.cli import main
from txnkv.cli.text_sources import TextFile
from txnkv.cli.text_types import Quotes, last_line_end, raw_columns

SCHEMA = txnkv.Schema(
    {
        "id": "int64",
        "d": "date32?",
        "z": "timestamp[us, tz=UTC]?",
        "du": "duration[us]?",
        "j": "json?",
    },
    primary_key=["id"],
)
DEEP = "[" * 5000
LISTS = "list<" * 5000 + "int8" + ">" * 5000
NESTED = {
    "LISTS": "[" * 20_000 + "]" * 20_000,
    "OBJECTS": '\n{"a":' * 20_000 + "1" + "}" * 20_000,
    "TEXT": '"' + "[" * 20_000 + '"',
    "DIGITS": "9" * 5000,
}


@pytest.fixture
def store(tmp_path: Path) -> str:
    with txnkv.connect(tmp_path / "store") as client:
        client.create_table("t", SCHEMA)
        client.create_topic("e")
    return str(tmp_path / "store")


def run(*args: str, given: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, args, input=given)


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (["+41791234567", "5", ""], ["+41791234567", "5", None]),
        (["7", "007"], ["7", "007"]),
        (["00000000000000000000012"], ["00000000000000000000012"]),
        (["0x1F", "5"], ["0x1F", "5"]),
        (["0", "-7", " 10"], [0, -7, 10]),
        (["+1", "-2.5", "007.5"], [1.0, -2.5, 7.5]),
        (["1e+10"], [1e10]),
        (["-0", "5"], [0, 5]),
        (["-0", "18446744073709551615"], ["-0", "18446744073709551615"]),
    ],
)
def test_numbers_with_signs_and_zeros_before_them_lose_none(written, wanted, store, tmp_path):
    """Arrow makes reals of whole numbers with a plus sign, and leaves out zeros."""
    path = tmp_path / "a.csv"
    path.write_text("id,n\n" + "".join(f"{i},{text}\n" for i, text in enumerate(written)))
    for name in ("first", "second"):  # and what is written loads as the same again
        assert run("load", store, name, str(path), "--key", "id").exit_code == 0
        with txnkv.connect(store) as client:
            rows = client.table(name).scan(ordered=True).to_arrow()
        assert rows["n"].to_pylist() == wanted
        assert run("scan", store, name, "--ordered", "-o", str(path)).exit_code == 0


@pytest.mark.parametrize(
    ("late", "words"),
    [
        ("00069", "line {}: column 'n': '00069' has zeros that int64 does not keep (--schema"),
        ("-07", "'-07' has zeros"),
        ("0x1F", "'0x1F' is hexadecimal, which int64 does not keep"),
        ("+5", "'+5' is no int64"),
        ("99999999999999999999", "'99999999999999999999' is no int64"),
        (" 7 ", 7),
        ("", None),
        ("-0", 0),
    ],
)
@pytest.mark.parametrize("files", [1, 2])
def test_codes_behind_what_types_were_inferred_from(
    late, words, files, store, tmp_path, monkeypatch
):
    """They lost their zeros, in silence."""
    monkeypatch.setattr("txnkv.cli.text_sources.HEAD", 3000)
    monkeypatch.setattr("txnkv.cli.text_sources.BLOCK", 1000)
    rows, end = "".join(f"{i},{i},a\n" for i in range(1000)), f"1000,{late},b\n"
    texts = [rows + end] if files == 1 else [rows, end]
    paths = [str(tmp_path / f"{number}.csv") for number in range(files)]
    for path, text in zip(paths, texts, strict=True):
        Path(path).write_text(f"id,n,v\n{text}")
    found = run("load", store, "u", *paths, "--key", "id")
    if isinstance(words, str):
        assert found.exit_code == 1
        assert words.format("1,002" if files == 1 else "2") in found.output
        found = run(
            "load", store, "u", *paths, "--key", "id", "--schema", "id:int64,n:string,v:string"
        )
        words = late
    assert found.exit_code == 0, found.output
    with txnkv.connect(store) as client:
        assert client.table("u").get(1000)["n"] == words


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"d": 1.5, "s": "de12", "price10": 1E+40}', []),
        ('{"u": "1e23-45", "d": null, "x": 2.5e-17}', []),
        ('{"dd": 1E-40, "sd": 1E-40, "l": [1.5], "x": [1e10]}', []),
        ('{"d": 1E-40}', ["d"]),
        ('{"d" :\t"-1.5e+40"}', ["d"]),
        ('{"l": [1.5, null, 1E-40]}', ["l"]),
        ('{"\\u00e9": 1.' + 40 * "0" + "}", ["é"]),
    ],
)
def test_decimals_alone_are_looked_at_for_exponents(line, found):
    """Text as de12 in another column made all of a file slow, and some refused."""
    decimals = pa.decimal128(10, 2)
    schema = pa.schema({"d": decimals, "l": pa.list_(decimals), "é": decimals, "s": pa.string()})
    assert raw_columns(schema, line.encode()) == found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1.5", "1.50"),
        ("1e2", "100.00"),
        ("1E-1", "0.10"),
        ("25E+01", "250.00"),
        ("1.500", "1.50"),
        ("1.505", None),
        ("1E-77", None),
        ("1E-999999999", None),
        ("0." + 50 * "0" + "1", None),
        ("893745792724047795050971218510", None),  # it became 9011638729607790046197239187.40
    ],
)
@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_decimals_of_any_exponent(text, wanted, ending, store, file, run, fail):
    """1E-77 was loaded as 0.00, and 1E-999999999 ended the process, both by Arrow's readers."""
    kind = "decimal128(38, 10)" if len(text) == 30 else "decimal128(10, 2)"
    lines = [(1, "2.5"), (2, text), (3, " 7 ")]
    if ending == "csv":
        content = "id,n\n" + "".join(f"{id},{n}\n" for id, n in lines)
    else:
        content = "".join(f'{{"id": {id}, "n": {n}}}\n' for id, n in lines)
    given, name = file(f"a.{ending}", content), f"{ending} {text}"
    of = ["--key", "id", "--schema", f"id:int64,n:{kind}?"]
    if wanted is None:
        message = fail("load", store, name, given, *of)
        assert kind in message or "decimal of scale 2: 1.505" in message
        assert "line" in message or "requires scale" in message or "precision 38" in message
        return
    run("load", store, name, given, *of)
    with txnkv.connect(store) as client:
        found = [str(row["n"]) for row in client.table(name).scan(ordered=True)]
    assert found == ["2.50", wanted, "7.00"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("id,n\n1,2\n".encode("utf-16"), "this is UTF-16, not UTF-8"),
        (b"id,n\n1,inf\n2,1e400\n", "column 'n' has numbers larger than any float64"),
        (b"id,n\n1,inf\n2,-Infinity\n3,\n", ""),
        (b"id,n\n1,caf\xe9\n", "column 'n' is not UTF-8: use iconv"),
        (b'id,n\n1,"a\n2,b\n3,c\n', "line 2: a quote is opened here and never closed"),
        (b'id,n\n1,a\n2,"b""', "line 3: a quote is opened here and never closed"),
        (b'"id,n\n1,a\n', "line 1: a quote is opened here and never closed"),
        (b'id,n\n1,5" pipe\n2,"b\n""c"""', ""),
    ],
)
def test_what_csv_is_not_taken_for(content, words, store, tmp_path):
    (tmp_path / "a.csv").write_bytes(content)
    found = run("load", store, "u", str(tmp_path / "a.csv"), "--key", "id")
    assert (found.exit_code, words in found.output) == (bool(words), True), found.output


@pytest.mark.parametrize("way", ["file", "gz", "stdin"])
@pytest.mark.parametrize(("last", "line"), [(10, 702), (5_000, 702), (0, None)])
def test_a_quote_behind_what_types_were_inferred_from(
    last, line, way, store, tmp_path, monkeypatch
):
    monkeypatch.setattr("txnkv.cli.text_sources.HEAD", 3000)
    monkeypatch.setattr("txnkv.cli.text_sources.BLOCK", 1000)
    rows = [f'{i},"{i},\n ""x"""\n' for i in range(350)]
    rows += ['350,"oops\n', *(f"{350 + i},y\n" for i in range(last))] * bool(last)
    text = ("id,v\n" + "".join(rows)).encode()
    path = tmp_path / ("a.csv.gz" if way == "gz" else "a.csv")
    path.write_bytes(gzip.compress(text) if way == "gz" else text)
    given = ("-", "--format", "csv") if way == "stdin" else (str(path),)
    found = run("load", store, "u", *given, "--key", "id", given=text if way == "stdin" else None)
    if line is None:
        assert found.exit_code == 0, found.output
    else:
        far = way == "stdin" and last == 5000  # which is not read again to its end
        words = "and the row is longer than 1,000 bytes" if far else "and never closed"
        assert f"line {line}: a quote is opened here{',' * far} {words}" in found.output
        assert "nothing was loaded" in found.output
    with txnkv.connect(store) as client:
        assert ("u" in client.tables()) == (line is None)


def test_a_row_of_csv_that_is_too_long(store, tmp_path, monkeypatch):
    monkeypatch.setattr("txnkv.cli.text_sources.BLOCK", 1000)
    (tmp_path / "a.csv").write_text('id,v\n1,"' + "x\n" * 5000 + '"\n2,y\n')
    found = run("load", store, "u", str(tmp_path / "a.csv"), "--key", "id")
    assert "row is longer than 1,000 bytes; JSON lines" in found.output


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("list<struct<a: int64>>", "[[1, 2]]", "[1, 2] is no object"),
        ("list<date32>", '{"2024-01-01": 1}', '{"2024-01-01": 1} is no list'),
        ("list<date32>", '""', '"" is no list'),
        ("list<date32>", "[5]", "5 is no text"),
        ("list<duration>", "[1.5]", "1.5 is no text"),
        ("list<binary>", '{"PT1S": 1}', '{"PT1S": 1} is no list'),
        ("struct<a: int64>", '{"a": 1, "b": 2}', "has 'b'; the fields are a"),
        ("struct<a: int64>", "[]", "[] is no object"),
        ("struct<a: int64>", '{"a": 1.5}', "1.5 is no whole number"),
        ("map<string, int64>", "[]", "[] is no object"),
    ],
)
def test_lists_and_objects_are_taken_for_no_others(kind, value, words, store, tmp_path):
    """Python makes lists of texts and objects too, and Arrow whole numbers of 1.5."""
    path = tmp_path / "a.json"
    path.write_text(f'{{"id": 1}}\n\n{{"id": 2, "v": {value}}}\n')
    found = run("load", store, "u", str(path), "--key", "id", "--schema", f"id:int64,v:{kind}?")
    assert found.exit_code == 1
    assert "line 3: column 'v' is " in found.output
    assert words in found.output


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"id": 1,\n "v": 1e17}\n', [1e17]),
        ('\n{"id": 1, "v": 1e17}{"id": 2, "v": 2}', [1e17, 2.0]),
        ('\r\n{"id": 1,\r\n "v": 18446744073709551615}\r\n', [2**64 - 1]),
        ('\n{"id": 1, "v": {}} {"id": 2}', """line 2: '{"id": 2}' behind its object: one a line"""),
        ('{"id": 1, "v": {}}\n{"id": 2, "v": 3}\n[3]', "line 3: [3] is no object"),
        ('null\n{"id": 1}\n', "line 1: null is no object"),
        ('{"id": 1}\n\nnull\n', "line 3: null is no object"),
        ('{"id": 1, "v": 1},\n{"id": 2}', "line 1: ',' behind its object"),
        ('{"id": 1, "v": {}} 7\n', "line 1: '7' behind its object"),
        ('{"id": 1}\n{"id": 2, "v": LISTS}', "line 2: it is nested more than 512"),
        ('{"id": 1, "v": OBJECTS}', "line 1: it is nested more than 512"),
        ('{"id": 1, "v": TEXT}', [NESTED["TEXT"].strip('"')]),
        ('{"id": 1, "v": {}}\n {"id": 2, "v": [DIGITS]}', ["{}", f"[{NESTED['DIGITS']}]"]),
        ('{"id": 1, "v": {}}\n{"id": 2, "v": [DIGITS]} 7\n', "line 2: '7' behind its object"),
        ('{"id": 1, "v": "a"}\n{"id": 2, "v":\n{"id": 3}\n', "line 2: Expecting ','"),
        ('{"id": 1, "id": 2, "v": 1}', "line 1: it has column 'id' twice"),
        ('{"id": 1, "v": {"v": 1}}\n{"id": 2, "v": {}, "v": 3}', "line 2: it has column 'v' twi"),
        ('{"id": 1, "v": {"v": 1}}\n{"id": 2, "v": {}}', ['{"v": 1}', "{}"]),
    ],
)
def test_objects_of_several_lines_and_lines_of_several(text, wanted, store, tmp_path):
    path = tmp_path / "a.json"
    for name, nested in NESTED.items():
        text = text.replace(name, nested)
    path.write_text(text, newline="")
    found = run("load", store, "u", str(path), "--key", "id")
    if isinstance(wanted, str):
        assert (found.exit_code, wanted in found.output) == (1, True), found.output
        return
    with txnkv.connect(store) as client:
        assert client.table("u").scan(ordered=True).to_arrow()["v"].to_pylist() == wanted


@pytest.mark.parametrize("twice", ["id", "v", "w"])
def test_a_name_twice_beside_json(twice, store, tmp_path):
    """The last one was taken."""
    path = tmp_path / "a.json"
    path.write_text(f'{{"id": 1, "v": [1]}}\n\n{{"id": 2, "v": {{}}, "w": 1, "{twice}": 3}}\n')
    schema = ["--schema", "id:int64,v:json?,w:int64?"]
    found = run("load", store, "u", str(path), "--key", "id", *schema)
    assert (found.exit_code, f"line 3: it has column '{twice}' twice" in found.output) == (1, True)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["insert", "{}", "t", "id=1", "d=0000-01-01"], 2, "'0000-01-01' is none"),
        (["scan", "{}", "t", "-w", "z < 0001-01-01T00:00+01:00"], 2, "is none"),
        (["count", "{}", "t", "-w", "du > P99999999999D"], 2, "is none"),
        (["alter", "{}", "t", "--default", "d=0000-01-01"], 2, "is none"),
        (["insert", "{}", "t", "id=1", f"j={DEEP}"], 2, "column 'j' is json"),
        (["scan", "{}", "t", "-w", "(" * 5000 + "id = 1"], 2, "nested too deeply"),
        (["index", "create", "{}", "t", "a\nb"], 2, "is no list with commas"),
        (["insert", "{}", "t", "id=4", "id=5"], 2, "column 'id' is given twice"),
        (["insert", "{}", "t", '{"id": 4, "j": {}, "id": 5}'], 2, "it has column 'id' twice"),
        (["insert", "{}", "t", "--upsert", "--update", "id=5"], 2, "--upsert or --update"),
        (["insert", "{}", "t", '{"id": 4, "j": "\udcff"}'], 2, "row 1 is no row: it is no UTF-8"),
        (["count", "{}", "t", "-w", "j != null"], 2, "write 'j is null'"),
        (["count", "{}", "t", "-w", "id in (1, NULL)"], 2, "write 'id is null'"),
        (["create", "{}", "u", "--schema", f"l:{LISTS}", "--key", "l"], 2, "deeply"),
    ],
)
def test_an_odd_value_is_an_error_of_few_words(
    store: str, command: list[str], code: int, words: str
) -> None:
    found = run(*(each.format(store) if each == "{}" else each for each in command))
    assert found.exit_code == code, found.output
    assert words in found.output
    assert "Traceback" not in found.output


def test_odd_lines(store: str, tmp_path: Path) -> None:
    lines = tmp_path / "x.json"
    lines.write_text('{"id": 1, "du": "P99999999999D"}\n')
    found = run("load", store, "t", str(lines))
    assert (found.exit_code, "is longer than durations are" in found.output) == (1, True)
    found = run("produce", store, "e", "--json", given=f'{{"value": {DEEP}}}\n')
    assert (found.exit_code, "line 1 is no message" in found.output) == (1, True)
    found = run("insert", store, "t", given=b'{"id": 1}\n\n\xff\xfe\n')
    assert (found.exit_code, "line 3 is no row: it is no UTF-8: " in found.output) == (1, True)
    found = run("insert", store, "t", given='{"id": 1, "j": {"a": 1, "a": 2}}\n')
    assert found.exit_code == 0, found.output  # what is JSON stands as it is written


def test_dates_that_python_has_not(store: str) -> None:
    with txnkv.connect(store) as client:
        days = pa.array([6585322, 0], pa.int32()).cast(pa.date32())
        times = pa.array([1 << 60, 0]).cast(pa.timestamp("us", "UTC"))
        with client.transaction() as txn:
            txn.write("t", pa.table({"id": [1, 2], "d": days, "z": times}))
    for command in (["scan"], ["get"]):
        found = run(*command, store, "t", *(["1"] if command == ["get"] else []))
        assert (found.exit_code, "scan --json" in found.output) == (1, True), found.output
    found = run("scan", store, "t", "--json")
    assert '"d": "20000-01-01", "z": "38504-08-17T21:30:06.846976+00:00"' in found.output
    found = run("scan", store, "t", "--format", "csv")
    assert found.exit_code == 1
    assert "column 'z' has dates of which CSV is not made" in found.output


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_instants_before_zones_had_whole_minutes(store: str, tmp_path: Path, form: str) -> None:
    """Their offsets have seconds, which a text of minutes loses."""
    zone = "timestamp[us, tz=America/New_York]"
    schema = txnkv.Schema({"id": "int64", "t": zone}, primary_key=["id"])
    years = [1800, 1883, 1900, 1972, 2026]
    with txnkv.connect(store) as client:
        table = client.create_table("ny", schema)
        for year in years:
            table.insert((year, datetime(year, 7, 1, 12, tzinfo=UTC)))
        rows = table.scan(ordered=True).to_arrow()
    file = str(tmp_path / f"ny.{form}")
    assert run("scan", store, "ny", "-o", file).exit_code == 0
    made = run("load", store, "again", file, "--key", "id", "--schema", f"id:int64,t:{zone}")
    assert made.exit_code == 0, made.output
    with txnkv.connect(store) as client:
        assert client.table("again").scan(ordered=True).to_arrow() == rows


def test_times_of_files_keep_their_units(store: str, tmp_path: Path) -> None:
    """Parquet has none of seconds; those of texts are inferred, and more may have fractions."""
    kinds = ["time32[s]", "time32[ms]", "time64[us]"]
    with txnkv.connect(store) as client:
        times = txnkv.Schema({"id": "int64", **{kind[6:]: kind for kind in kinds}}, ["id"])
        client.create_table("times", times).insert((1, *[time(10, 30)] * 3))
    for form, found in (("arrow", kinds), ("parquet", [kinds[1], *kinds[1:]])):
        file = str(tmp_path / f"t.{form}")
        assert run("scan", store, "times", "-o", file).exit_code == 0
        assert run("load", store, form, file, "--key", "id").exit_code == 0
        with txnkv.connect(store) as client:
            table = client.table(form)
            assert [str(column.type) for column in table.schema.columns.values()][1:] == found
            assert table.get(1) == client.table("times").get(1)
    (tmp_path / "t.csv").write_text("id,t\n1,10:30:00\n")
    assert run("load", store, "csv", str(tmp_path / "t.csv"), "--key", "id").exit_code == 0
    with txnkv.connect(store) as client:
        assert client.table("csv").schema.columns["t"].type == pa.time64("us")


def test_values_for_people_do_nothing_to_their_terminal(store: str) -> None:
    with txnkv.connect(store) as client:
        odd = client.create_table("odd", txnkv.Schema({"id": "string", "v": "string?"}, ["id"]))
        odd.insert({"id": "a", "v": "\x1b[31mred\0\tz\u202e \u3000\u200d"})
    for command in (["scan", store, "odd"], ["get", store, "odd", "a"]):
        shown = run(*command).stdout
        assert r"\x1b[31mred\x00\tz\u202e" in shown
        assert "\x1b" not in shown
        assert "\u200d" in shown
    assert r"\u001b[31m" in run("scan", store, "odd", "--json").stdout


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_closed_stdout_is_an_error(form: list[str], store: str) -> None:
    command = [sys.executable, "-m", "txnkv", "tables", store, *form]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    found = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert (found.returncode, "stdout is closed" in found.stderr) == (1, True), found.stderr


def test_what_is_not_there_is_told_with_a_command_that_makes_it(store: str) -> None:
    assert "`txnkv create` or `txnkv load` makes one" in run("count", store, "none").output
    assert "`txnkv topics create` makes one" in run("topics", "list", store, "none").output


def test_a_path_with_a_nul_is_named() -> None:
    with pytest.raises(ValueError, match=r"a path has no NUL, as 'a\\x00b'"):
        txnkv.connect("a\0b")


def opened(data: bytes) -> int | None:
    """The line of the quote that is open behind some CSV, byte by byte."""
    line, at, state, found = 1, 0, "start", None
    while at < len(data):
        byte = data[at : at + 1]
        if state == "quoted" and data[at : at + 2] == b'""':
            at += 1
        elif state == "quoted":
            state, found = ("field", None) if byte == b'"' else (state, found)
        elif byte == b'"' and state == "start":
            state, found = "quoted", line
        else:
            state = "start" if byte in b",\r\n" else "field"
        line += byte == b"\n"
        at += 1
    return found


def test_quotes_of_csv_are_followed_however_it_comes() -> None:
    at_random = random.Random(1)
    for _ in range(3000):
        data = bytes(at_random.choices(b'"",\r\na', k=at_random.randrange(24)))
        quotes, at = Quotes(","), 0
        while at < len(data):
            size = at_random.randrange(1, 6)
            quotes.read(data[at : at + size])
            at += size
        quotes.read(b"")
        assert quotes.opened == opened(data)
        ends = [n + 1 for n in range(len(data)) if data[n] == 10 and opened(data[:n]) is None]
        assert last_line_end(data, ",") == (ends[-1] if ends else len(data))


def test_a_block_does_not_end_between_the_two_bytes_of_a_line_end(tmp_path: Path) -> None:
    """Arrow drops a newline at the beginning of the next one, in quotes too."""
    data = b'id,v\r\n1,"a\r\nb"\r\n2,c\r\r\r\n' * 5 + b"\r"
    path = tmp_path / "t.csv"
    path.write_bytes(data)
    for size in range(2, 20):
        with TextFile(str(path)) as file:
            blocks = list(iter(partial(file.read, size), b""))
        assert b"".join(blocks) == data
        borders = itertools.pairwise(blocks)
        assert not any(a.endswith(b"\r") and b.startswith(b"\n") for a, b in borders)
