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
