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


POOLED = """
import gc, sys, pyarrow as pa, txnkv
client = txnkv.connect(sys.argv[1])
topic = client.create_topic("m")
client.run(lambda txn: txn.send(topic, b"one"))
pool = pa.proxy_memory_pool(pa.default_memory_pool())
pa.set_memory_pool(pool)
consumer = topic.consumer()
print(consumer.poll_batch(timeout=60).num_rows)
consumer.close()
del consumer
gc.collect()
pa.set_memory_pool(pa.system_memory_pool())
del pool
client.close()
"""


def test_nothing_is_kept_of_a_memory_pool_of_the_programs_own(tmp_path: Path) -> None:
    """It was freed at the end, when the pool was gone."""
    ran = subprocess.run(
        [sys.executable, "-c", POOLED, str(tmp_path / "store")],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (ran.stdout, ran.returncode) == ("1\n", 0), ran.stderr
