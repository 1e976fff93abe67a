"""Calls that finalizers make when the interpreter ends: no thread of the library runs any more.

Each waited for one without end, also `close` of a client that was closed before.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, txnkv
client = txnkv.connect({store!r})
table = client.create_table("t", txnkv.Schema({{"id": "int64"}}, ["id"]), exists_ok=True)
topic = client.create_topic("m", exists_ok=True)

class Last:
    def __del__(self):
        try:
            print({call})
        except Exception as error:
            print(type(error).__name__)

last = Last()
"""


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        ("client.close()", "None"),
        ("client.tables()", "ClosedError"),
        ("client.compact()", "ClosedError"),
        ("client.run(lambda txn: txn.upsert(table, (1,)))", "ClosedError"),
        ("table.upsert((1,))", "ClosedError"),
        ("table.get(1)", "ClosedError"),
        ("client.create_topic('x')", "ClosedError"),
        ("txnkv.connect(client.path)", "ClosedError"),
    ],
)
def test_a_call_behind_the_end(tmp_path: Path, call: str, outcome: str) -> None:
    code = PROGRAM.format(store=str(tmp_path / "store"), call=call)
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ran.stdout, ran.returncode) == (f"{outcome}\n", 0), ran.stderr
