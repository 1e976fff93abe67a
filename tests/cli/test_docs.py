"""README, docs and examples tell the truth: their programs run, the help stands as it is."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import txnkv.errors
import txnkv.spark
from txnkv.cli import main

ROOT = Path(__file__).resolve().parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(PYTHON.pattern.replace("python", "sh"), PYTHON.flags)
SPARK_EXAMPLE = ROOT / "examples" / "spark_two_tables.py"
README = PYTHON.findall((ROOT / "README.md").read_text())
WIDTH = {"terminal_width": 90, "max_content_width": 90}


def java():
    try:
        return txnkv.spark.require_java()
    except txnkv.errors.NotSupportedError:
        return None


needs_java = pytest.mark.skipif(java() is None, reason="needs Java 17 or later")


def run_program(text, folder):
    """Run a program as a user does: a file, run from a directory of one's own.

    The virtual environment is not activated: another python3, without txnkv, comes first in PATH.
    """
    path = folder / "program.py"
    path.write_text(text)
    other = folder / "bin" / "python3"
    other.parent.mkdir(exist_ok=True)
    other.write_text("#!/bin/sh\necho this is not the Python that txnkv is in >&2\nexit 1\n")
    other.chmod(0o755)
    environment = {**os.environ, "PATH": f"{other.parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYSPARK_PYTHON", None)
    ran = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_programs_in_the_readme_run_and_run_again(tmp_path):
    program, _ = README
    for runs in (1, 2):
        assert run_program(program, tmp_path).splitlines() == [
            f"{{'id': 1, 'region': 'eu', 'total': 9.5}} {[b'order 1'] * runs}",
            "None",
        ]
    assert len(program.strip().splitlines()) <= 20


@pytest.mark.slow
@pytest.mark.spark
@needs_java
def test_the_spark_example(tmp_path):
    assert run_program(SPARK_EXAMPLE.read_text(), tmp_path).splitlines()[-3:] == [
        "before the commit: 0 readings, 0 sensors",
        "after it: 100,000 readings, 10 sensors",
        "Spark reads 10,000 of sensor 3",
    ]


@pytest.mark.slow
@pytest.mark.spark
@needs_java
def test_the_spark_program_in_the_readme_runs_and_runs_again(tmp_path):
    plain, spark = README
    run_program(plain, tmp_path)
    for _ in range(2):
        assert run_program(spark, tmp_path).splitlines()[-1] == "3 2"


def run_commands(folder):
    """Run the commands of the howto on what its programs left, with numbers that are there."""
    lines = "".join(SHELL.findall((ROOT / "docs" / "howto.md").read_text()))
    with gzip.open(folder / "orders-1.csv.gz", "wt") as file:
        file.write("id,region,total\n70000,eu,1\n")
    with txnkv.connect(folder / "shop") as client:
        left = client.new_transaction()
        left.serialize()  # so that it is known to others
        lines = lines.replace("2026-01-31T12:00:00Z", str(client.stats()["snapshot"]))
        lines = lines.replace("4711", str(left.id.local))
        lines = f'txnkv() {{ "{sys.executable}" -m txnkv "$@"; }}\n{lines}'
        ran = subprocess.run(
            ["sh", "-ec", lines], cwd=folder, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert client.table("orders").get(70_000) is None  # it was reverted
        assert left.state is txnkv.TxnState.ABORTED


def test_the_programs_and_the_commands_in_the_howto(tmp_path):
    blocks = PYTHON.findall((ROOT / "docs" / "howto.md").read_text())
    assert run_program("\n".join(blocks), tmp_path).splitlines() == [
        "1000",
        "{'id': UUID('00000000-0000-0000-0000-000000000007'), "
        "'event': '{\"page\": \"/\", \"ms\": 1.50}', 'took': None, 'tags': [('a', 1)]}",
        "[(999, 'AlreadyPresentError')]",
        "1 1",
        "{'id': 5, 'region': 'us', 'total': 9.0} None",
        "3",
        "3",
        "{'id': 5, 'area': 'us', 'total': 9.0, 'note': None, 'discount': 0.0}",
        "['id', 'region', 'total']",
        "1 None",
        "['id', 'region', 'total', 'coupon']",
        "[{'id': 1, 'mail': 'ann@x', 'town': 'Bern'}]",
        "1",
        "another row has mail = 'ann@x', and the index by mail is unique",
        "[Index(columns=('mail',), unique=True, state='ready')]",
        "0",
        "WriteResult(inserted=996, updated=0, deleted=0, ignored=0, sent=0, acked=0)",
        "996",
        "WriteResult(inserted=0, updated=1, deleted=0, ignored=0, sent=0, acked=0)",
        "TimeToLive(column='seen', seconds=7200)",
        "{'id': 10001, 'region': 'eu', 'total': 3.0}",
        "[{'number': 2, 'what': 'dry'}]",
        "True",
        "3",
        "[{'id': 6, 'total': 1.5}, {'id': 1000, 'total': 2.5}]",
        "494",
        "2",
        "[499, 498, 497]",
        "[{'id': 1, 'region': 'us'}, {'id': 0, 'region': 'eu'}]",
        "3",
        "1",
        "delete 21 True",
        "insert 1000000 True",
        "update 20 True",
        "3600.0",
        "[(10,)]",
        "0",
        "True",
        "20",
        "ABORTED",
        "1",
        "[b'home', b'pay']",
        "5 0",
        "a value of columns (id int64, total decimal128(9, 2)?, tags list<item: string>?): "
        "column 'id' is int64: '4' is a str",
        "[{'id': 1, 'total': None, 'tags': ['new']}, None, {'id': 2, 'total': None, 'tags': None}, "
        "{'id': 3, 'total': None, 'tags': None}]",
        "[{'id': 1, 'tags': ['new'], 'key': b'ann'}, {'id': None, 'tags': None, 'key': b'bob'}, "
        "{'id': 2, 'tags': None, 'key': b'ann'}, {'id': 3, 'tags': None, 'key': b'cid'}]",
        "{'id': 1, 'total': None, 'tags': ['new'], 'pieces': 1}",
        "{'who': 'ann', 'n': 2} 5 None",
        "0 3",
        "b'welcome' None",
        "5 [0, 1] [0, 1]",
        "['loaded', 'loaded', 'there already', 'loaded', 'there already'] 3",
        "True",
        "1",
        "ProducerFencedError",
        "ProducerFencedError",
        "6 [b'???'] b'2'",
        "b'second'",
        "b'first'",
        "{0: 0} {0: 0} 0",
        "2",
        "[(2, b'apple', b'9.90'), (3, b'plum', None)]",
        "{'compression': 'zstd', 'retention_seconds': 7200, 'retention_bytes': None, "
        "'retain_unacknowledged': True, 'cleanup': 'delete', 'tombstone_seconds': 86400.0}",
        "{0: 0}",
        "[6]",
        "True",
        "7",
        "[1]",
        "True",
        "True",
        "True",
        "True",
        "True",
    ]
    run_commands(tmp_path)


def commands(command, *names):
    yield names
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), *names, name)


@pytest.mark.parametrize("names", list(commands(main)), ids=" ".join)
def test_the_help_of_every_command_stands_in_the_docs(names):
    context = click.Context(main, info_name="txnkv", **WIDTH, **main.context_settings)
    for name in names:
        command = context.command.get_command(context, name)
        context = click.Context(command, info_name=name, parent=context, **WIDTH)
    wanted = f"```text\n{context.command.get_help(context)}\n```"
    # Line breaks differ between versions of click.
    assert " ".join(wanted.split()) in " ".join((ROOT / "docs" / "cli.md").read_text().split())


EXAMPLES = sorted({*(ROOT / "examples").glob("[!_]*.py")} - {SPARK_EXAMPLE})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples(path, tmp_path):
    assert run_program(path.read_text(), tmp_path).strip()


def test_links_in_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        path, _, heading = target.partition("#")
        assert (ROOT / path).exists(), target
        if heading:
            found = re.findall(r"(?m)^#+ (.+)$", (ROOT / path).read_text())
            assert heading in [title.lower().replace(" ", "-") for title in found], target
