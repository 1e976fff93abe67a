"""Processes of several containers: namespaces of their own, which take root and unshare."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
    assert there.line() in ("2000", "2001")
    there.tell()
    there.finish()
    refused.tell()
    assert refused.line() == "2001"


READ_AND_DIE = """
import lmdb
env = lmdb.open(sys.argv[1], readonly=True, max_dbs=16)
txn = env.begin()
os._exit(0)  # no signal of its own kills pid 1
"""


def slots(path: Path) -> list[list[str]]:
    """Pid, thread and transaction of each reader, as another process sees them."""
    code = "import lmdb, sys; print(lmdb.open(sys.argv[1], readonly=True, max_dbs=16).readers())"
    run = [sys.executable, "-c", code, str(path / "tablets" / "1")]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    return [line.split() for line in said.splitlines()[1:] if line]


def test_a_reader_that_is_started_again_frees_the_slot_that_it_left(path: Path, python) -> None:
    """It has the pid of before, so that everyone took the slot for that of who lives: the file grew
    with every write.
    """
    code = """
    import txnkv
    client = txnkv.connect(sys.argv[1])
    say(client.table("t").count())
    wait()
    client.close()
    """
    with txnkv.connect(path) as client:
        client.table("t").count()  # the first that opens an environment forgets all slots
        python(READ_AND_DIE, path / "tablets" / "1", under=ALONE).finish()
        (left,) = (slot for slot in slots(path) if slot[0] == "1")
        assert left[2].isdecimal()
        again = python(code, path, under=ALONE)
        assert again.line() == "2000"
        assert left not in slots(path)
        again.tell()
        again.finish()


OVERLAY = 'mount -t overlay none -o "$1" "$2" && shift 2 && exec "$@"'

WRITE = """
import sys, txnkv
with txnkv.connect(sys.argv[1]) as client:
    table = client.table("t")
    for v in range(1, 5):
        client.run(lambda txn: [txn.upsert(table, (id, v)) for id in range(2000)])
        client.compact()
"""


def test_a_store_in_the_lower_layer_of_an_overlay(path: Path, python) -> None:
    """As in an image: a reader kept the lower file when another process wrote, and told damage."""
    for name in ("upper", "work", "m"):
        (path.parent / name).mkdir()
    layers = f"lowerdir={path},upperdir={path.parent}/upper,workdir={path.parent}/work"
    layered = ("unshare", "--mount", "sh", "-c", OVERLAY, "sh", layers, str(path.parent / "m"))
    if subprocess.run([*layered, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount an overlay")
    code = """
    import subprocess, txnkv
    client = txnkv.connect(sys.argv[1])
    values = lambda: {row["v"] for row in client.table("t").scan()}
    say(values())
    subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]], check=True)
    say(values())
    client.close()
    """
    said = python(code, path.parent / "m", WRITE, under=layered).finish()
    assert said == ["{0}", "{4}"]


def test_slots_of_this_process_stay(path: Path) -> None:
    """Another client, and threads, come to an environment that is read here."""
    with txnkv.connect(path) as client, client.snapshot() as snapshot:
        rows = iter(client.table("t").scan(snapshot=snapshot))
        next(rows)
        with txnkv.connect(path) as other, ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda _: other.table("t").count(), range(8))) == {2000}
            assert {slot[0] for slot in slots(path)} == {str(os.getpid())}
        assert sum(1 for _ in rows) == 1999
