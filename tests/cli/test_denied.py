"""Files that the user may not open, as those that were made under another one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import txnkv

# Root may open all; without these rights it is as another user.
RIGHTS = "-dac_override,-dac_read_search"
WITHOUT = ["setpriv", "--bounding-set", RIGHTS, "--inh-caps", RIGHTS] if os.geteuid() == 0 else []

pytestmark = pytest.mark.skipif(bool(WITHOUT) and not shutil.which("setpriv"), reason="no setpriv")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "store"
    with txnkv.connect(path) as client:
        schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
        tables = [client.create_table(name, schema) for name in ("hurt", "sound")]
        client.create_topic("events", partitions=2)
        with client.transaction() as txn:
            for table in tables:
                txn.write(table, pa.table({"id": range(5000)}))
            for number in range(2):
                txn.send("events", b"value", partition=number)
        client.compact()
    return path


def told(path: Path, file: str, command: str) -> str:
    """Run a command, with a file of the store closed to it; what it says."""
    mode = (path / file).stat().st_mode
    (path / file).chmod(0)
    words = [str(path) if word == "STORE" else word for word in command.split()]
    try:
        ran = subprocess.run(
            [*WITHOUT, sys.executable, "-m", "txnkv", *words], capture_output=True, text=True
        )
    finally:
        (path / file).chmod(mode)
    assert "Traceback" not in ran.stderr
    return ran.stdout + ran.stderr


TABLET, LOG = "tablets/1/data.mdb", "logs/1/data.mdb"


@pytest.mark.parametrize(
    ("file", "command", "place"),
    [
        (TABLET, "count STORE hurt", "tablets/1"),
        (TABLET, "insert STORE hurt id=9000", "tablets/1"),
        (TABLET, "backup STORE STORE.backup", "tablets/1"),
        (TABLET, "check STORE", "tablets/1"),
        (TABLET, "repair STORE --accept-loss hurt/0 --yes", TABLET),
        (LOG, "consume STORE events", "logs/1"),
        (LOG, "backup STORE STORE.backup", "logs/1"),
        (LOG, "check STORE", "logs/1"),
        ("tablets/1", "count STORE hurt", TABLET),
        ("tablets/1", "compact STORE", TABLET),
        ("logs/1", "consume STORE events", LOG),
        ("status.db", "tables STORE", "status.db"),
        ("status.db", "compact STORE", "status.db"),
        ("status.db-wal", "tables STORE", "status.db-wal"),
        ("status.lock", "compact STORE", "status.lock"),
        ("status.lock", "backup STORE STORE.backup", "status.lock"),
    ],
)
def test_who_may_not_open_a_file_is_told(path: Path, file: str, command: str, place: str) -> None:
    """And nothing is lost of it."""
    said = told(path, file, command.replace("STORE.backup", str(path.with_name("backup"))))
    assert f"user {os.geteuid()} cannot open {path / place}: Permission denied. Go on as" in said
    assert "Name another place" not in said
    with txnkv.connect(path) as client:
        assert client.table("hurt").count() == 5000
        assert len(client.topic("events").consumer().poll()) == 2


@pytest.mark.parametrize(
    ("file", "command", "expected"),
    [
        (TABLET, "tables STORE", ["hurt damaged", "sound 5,000"]),
        (TABLET, "stats STORE", ["hurt damaged", "sound 5,000"]),
        (TABLET, "count STORE sound", ["5000"]),
        ("tablets/1", "stats STORE", ["hurt damaged", "sound 5,000"]),
        (LOG, "stats STORE", ["sound 5,000"]),
        (LOG, "topics list STORE", ["events/0 is damaged: user"]),
    ],
)
def test_all_else_goes_on(path: Path, file: str, command: str, expected: list[str]) -> None:
    said = " ".join(told(path, file, command).split())
    assert [text for text in expected if text not in said] == []


def test_a_flush_of_another_user_loses_nothing(path: Path) -> None:
    """The rest is flushed; the user who may does it later."""
    with txnkv.connect(path) as client, client.transaction() as txn:
        txn.upsert("hurt", {"id": 9000})
        txn.send("events", b"small", partition=0)
    for file, end in {TABLET: "; then `txnkv compact`\n", LOG: "all files there\n"}.items():
        told(path, file, "compact STORE")
        said = told(path, file, f"backup STORE {path.with_name('backup')}")
        assert f"cannot open {path / Path(file).parent}" in said
        assert said.endswith(end)
        assert [word for word in ("damaged", "repair") if word in said] == []
    with txnkv.connect(path) as client:
        client.compact()
        assert client.check().problems == []
        assert client.table("hurt").count() == 5001
        assert len(client.topic("events").consumer().poll()) == 3


OTHER = 65533

ROOTS_CALLS = """
import pyarrow as pa, sys, txnkv
store, = sys.argv[1:]
with txnkv.connect(store) as client:
    client.compact()
    client.backup(store + ".bk")
    txnkv.dump(client, store + ".dump")
    made = client.create_table("made", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    with client.transaction() as txn:
        txn.write(made, pa.table({"id": range(20_000)}))
        txn.send(client.create_topic("side", buffer="sidecar"), b"value")
    topic = client.create_topic("compacted", cleanup="compact")
    topic.producer("p").send(b"value", key=b"key").result()
    client.compact()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")
def test_what_root_makes_in_a_store_belongs_to_its_owner(tmp_path: Path) -> None:
    """A backup that root made took the store away from its owner: locks and folders were root's."""
    store = tmp_path / "store"
    with txnkv.connect(store) as client:
        table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
        table.insert({"id": 1})
    for path in (store, *store.rglob("*")):
        if path.suffix == ".lock" or path.parent.name == "runtime":
            path.unlink()  # made by the first who needs it
        else:
            os.chown(path, OTHER, OTHER)
    (tmp_path / "beyond").write_bytes(b"")
    (store / "cuts.lock").hardlink_to(tmp_path / "beyond")
    subprocess.run([sys.executable, "-c", ROOTS_CALLS, store], check=True)
    subprocess.run([sys.executable, "-m", "txnkv", "top", "--once", store], check=True)
    others = {p.relative_to(store): p.stat().st_uid for p in (store, *store.rglob("*"))}
    assert {str(name) for name, uid in others.items() if uid != OTHER} == {"cuts.lock"}
    for made in ("beyond", "store.bk", "store.dump"):
        assert (tmp_path / made).stat().st_uid == 0
