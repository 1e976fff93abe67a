"""The demo: it runs, it proves what it claims, and it fails when that is not so."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import examples.demo.job
import txnkv
import txnkv.errors
import txnkv.spark
from examples.demo.job import _each_row_once, _retried
from examples.demo.look import Look
from examples.demo.report import Claim, Event, Report, print_report
from examples.demo.sources import find_input

CSV = "id,text\n" + "".join(f"{i},a word and word {i % 7}\n" for i in range(500))


def has_java():
    try:
        return bool(txnkv.spark.require_java())
    except txnkv.errors.NotSupportedError:
        return False


needs_java = pytest.mark.skipif(not has_java(), reason="needs Java 17 or later")


def run_demo(*args):
    ran = subprocess.run(
        [sys.executable, "-m", "txnkv", "demo", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    return ran


@pytest.fixture
def texts(tmp_path):
    """A directory of 40 text files, one that is none, and a hidden one."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for i in range(40):
        (folder / "deep" / f"{i}.txt").write_text("Hello world, hello\n" * (i + 1))
    (folder / "binary").write_bytes(b"\0\1")
    (folder / ".hidden").write_text("hello")
    return folder


@pytest.mark.slow  # `make demo` runs it, on what it makes itself
@pytest.mark.spark
@needs_java
def test_the_demo_on_a_directory(texts, tmp_path, run):
    store = tmp_path / "store"
    report = json.loads(run_demo("--input", texts, "--store", store, "--json").stdout)
    assert report["ok"] is True
    assert all(claim["holds"] for claim in report["claims"])
    assert len(report["claims"]) == 5
    assert report["rows"] == {"files": 40, "words": 80}
    assert [look["counts"] for look in report["reader"]] == [[0, 0], [40, 80]]
    assert run("scan", store, "files", "-w", "path = deep/1.txt", "--json").lines == [
        {"path": "deep/1.txt", "bytes": 38, "lines": 2}
    ]
    assert run("scan", store, "words", "-w", "path = deep/1.txt", "--ordered", "--json").lines == [
        {"path": "deep/1.txt", "word": "hello", "count": 4},
        {"path": "deep/1.txt", "word": "world", "count": 2},
    ]


@pytest.mark.slow
@pytest.mark.spark
@needs_java
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_demo_on_rows(kind, tmp_path, file, run):
    path = file("rows.csv", CSV)
    if kind == "parquet":
        run("load", tmp_path / "other", "t", path, "--key", "id")
        path = tmp_path / "rows.parquet"
        run("scan", tmp_path / "other", "t", "-o", path)
    ran = run_demo("--input", path, "--store", tmp_path / "store")
    assert "both tables appeared at one instant" in ran.stdout
    assert f"txnkv scan {tmp_path / 'store'} words" in ran.stdout
    assert run("tables", tmp_path / "store", "--json").json[0]["rows"] == 500


def test_inputs(texts, file, fail, tmp_path):
    found = find_input(str(texts))
    assert (found.kind, len(found.files)) == ("text", 40)
    standard = find_input(None)
    assert "json/decoder.py" in standard.files
    assert not any("site-packages" in name for name in standard.files)
    assert find_input(str(file("a.csv.gz", ""))).kind == "csv"
    with pytest.raises(ValueError, match="reads a directory"):
        find_input(str(file("a.doc", "")))
    with pytest.raises(ValueError, match="no such file"):
        find_input(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text files"):
        find_input(str(tmp_path / "empty"))


def test_without_the_examples_it_says_where_they_are(tmp_path):
    """As where only the wheel is: the package stands by itself."""
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(txnkv.__file__).parent, tmp_path / "txnkv", ignore=compiled)
    ran = subprocess.run(
        [sys.executable, "-m", "txnkv", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        "Error: the demo is an example, and only the library is installed here: "
        "run `make demo` in a clone of the repository\n"
    )


def test_without_java_it_says_so(fail, texts, monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))
    message = fail("demo", "--input", texts, "--store", tmp_path / "store")
    assert message.startswith("Spark needs Java 17 or later, and JAVA_HOME is ")
    assert not (tmp_path / "store").exists()


@needs_java
def test_a_store_with_such_tables_is_left_alone(orders, run, fail, texts, file):
    run("load", orders, "words", file("a.csv", "id\n1\n"), "--key", "id")
    assert "has a table words already" in fail("demo", "--input", texts, "--store", orders)
    assert run("scan", orders, "words", "--json").lines == [{"id": 1}]


REPORT = Report(
    input="3 text files",
    store="a store",
    kept=True,
    rows={"files": 3, "words": 7000},
    write_seconds={"words": 1.5, "files": 0.5},
    events=[Event(0.5, "begun"), Event(2.5, "ended")],
    looks=[Look(0.1, 1.9, 10, (0, 0)), Look(2.0, 3.0, 5, (3, 7000))],
    claims=[Claim("it is whole", True, "7,003 rows")],
)


def shown(report):
    console = Console(file=io.StringIO(), width=120)
    print_report(report, console)
    return console.file.getvalue()


def test_the_report_shows_when_what_was_seen():
    lines = [line.split() for line in shown(REPORT).splitlines()]
    assert ["0.50", "begun", "none", "none"] in lines
    assert ["2.00", "the", "reader", "sees", "them,", "all", "at", "once", "3", "7,000"] in lines
    assert ["2.50", "ended", "3", "7,000"] in lines
    assert "✓ it is whole: 7,003 rows" in shown(REPORT)
    assert "txnkv tables 'a store'" in shown(REPORT)


def test_a_claim_that_does_not_hold_is_exit_status_1(monkeypatch, invoke):
    broken = dataclasses.replace(REPORT, claims=[Claim("it is whole", False, "it is not")])
    monkeypatch.setattr(examples.demo.job, "run", lambda *_: broken)
    ran = invoke("demo")
    assert ran.status == 1
    assert "✗ it is whole: it is not" in ran.out
    assert ran.err == "Error: not everything was as it should be\n"
    assert invoke("demo", "--json").json["ok"] is False


def note(partition, attempt, pid, killed=False):
    return {"partition": partition, "attempt": attempt, "rows": 5, "pid": pid, "killed": killed}


@pytest.mark.parametrize(
    ("notes", "holds"),
    [
        ([note(0, 0, 1), note(1, 0, 2, killed=True), note(1, 1, 3)], True),
        ([note(0, 0, 1), note(1, 0, 2)], False),
        ([note(0, 0, 1), note(1, 0, 2, killed=True)], False),
        ([note(1, 0, 1, killed=True), note(1, 1, 1)], False),
        ([], False),
    ],
)
def test_the_claim_of_a_retry_wants_a_kill_another_attempt_and_two_workers(notes, holds):
    assert _retried(notes).holds is holds


def test_the_claim_of_each_row_once_compares_with_what_spark_counted(store):
    with txnkv.connect(store) as client:
        client.create_table("files", examples.demo.job.FILES)
        client.create_table("words", examples.demo.job.WORDS)
        with client.transaction() as txn:
            txn.insert("files", ("a", 5, 2))
            txn.insert("words", ("a", "b", 3))
        assert _each_row_once(client, {"files": (1, 2), "words": (1, 3)}).holds
        assert not _each_row_once(client, {"files": (1, 2), "words": (2, 6)}).holds
