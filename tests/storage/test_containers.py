"""Processes of several containers: namespaces of their own, which take root and unshare."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import txnkv

ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""In a PID namespace: the process is pid 1 there."""

CONNECT = """
import txnkv
say(os.getpid())
wait()
try:
    client = txnkv.connect(sys.argv[1])
except txnkv.NotSupportedError as error:
    say(error)
    wait()
    client = txnkv.connect(sys.argv[1])
else:
    say("open")
table = client.table("t")
"""


@pytest.fixture(autouse=True)
def _root() -> None:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("namespaces take root and unshare")
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to make namespaces")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with txnkv.connect(tmp_path / "s") as client:
        schema = txnkv.Schema({"id": "int64", "v": "int64"}, primary_key=["id"])
        table = client.create_table("t", schema)
        for _ in range(3):
            client.run(lambda txn: [txn.upsert(table, (id, 0)) for id in range(2000)])
            client.compact()
    return tmp_path / "s"


def test_of_two_with_one_pid_one_is_refused(path: Path, python) -> None:
    """Every read of the second one failed, for want of a thread as it was told."""
    code = CONNECT + "say(table.count()); wait(); client.close()"
    both = [python(code, path, under=ALONE) for _ in range(2)]
    assert [one.line() for one in both] == ["1", "1"]
    for one in both:
        one.tell()
    said = [one.line() for one in both]
    (refused,) = (one for one, word in zip(both, said, strict=True) if word != "open")
    (there,) = (one for one in both if one is not refused)
    assert "shareProcessNamespace" in said[both.index(refused)]
    with txnkv.connect(path) as client:  # of another pid
        client.table("t").insert((2000, 1))
    there.tell()
    assert there.finish()[:1] in (["2000"], ["2001"])
    refused.tell()
    assert refused.line() == "2001"
