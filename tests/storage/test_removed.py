"""Stores that are removed, moved or replaced under those who have them open.

After `rm -rf` commits returned as if they were durable: the files lived on, for nobody else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.maintenance import Maintenance

ID = txnkv.Schema({"id": "int64"}, primary_key=["id"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def client(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[txnkv.Client]:
    """A client of a store with table t and topic e; no background round runs."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    client = txnkv.connect(path)
    client.create_table("t", ID)
    client.create_topic("e")
    _insert(client, 1)
    yield client
    client.close()


def _insert(client: txnkv.Client, key: int, *, large: bool = False) -> None:
    with client.transaction() as txn:
        txn.insert("t", (key,))
        if large:
            txn.write("t", pa.table({"id": range(100, 20_000)}))


GONE: dict[str, Callable[[Path], Any]] = {
    "removed": shutil.rmtree,
    "moved": lambda path: path.rename(path.with_name("elsewhere")),
}
WRITES: dict[str, Callable[[txnkv.Client], Any]] = {
    "small": lambda client: _insert(client, 2),
    "large": lambda client: _insert(client, 2, large=True),
    "session": lambda client: client.new_session("auto_sync").insert("t", (2,)),
    "create_table": lambda client: client.create_table("u", ID),
    "producer": lambda client: client.topic("e").producer(patience=0).send(b"1").result(timeout=60),
    "next_id": lambda client: client.table("t").next_id(),
}


@pytest.mark.parametrize("write", WRITES)
def test_no_write_returns_as_if_it_were_durable(
    client: txnkv.Client, path: Path, write: str
) -> None:
    shutil.rmtree(path)
    with pytest.raises(txnkv.StoreNotFoundError, match="removed, moved or replaced"):
        WRITES[write](client)


def test_a_commit_that_is_refused_is_not_made(client: txnkv.Client, path: Path) -> None:
    txn = client.new_transaction()
    txn.insert("t", (2,))
    shutil.rmtree(path)
    with pytest.raises(txnkv.StoreNotFoundError):
        txn.commit()
    assert txn.state is not txnkv.TxnState.COMMITTED


@pytest.mark.parametrize("gone", GONE)
def test_maintenance_finds_out(client: txnkv.Client, path: Path, gone: str) -> None:
    """Also what the write itself cannot see: a folder that was moved."""
    GONE[gone](path)
    with pytest.raises(txnkv.StoreNotFoundError):
        internals.maintenance(client).round()
    with pytest.raises(txnkv.StoreNotFoundError):
        _insert(client, 2)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("gone", [*GONE, "replaced"])
def test_reads_find_no_damage_in_it(
    client: txnkv.Client, path: Path, gone: str, read_only: bool
) -> None:
    """The files are not gone alone. One that stays is damage."""
    client.create_topic("side", buffer="sidecar")
    with client.transaction() as txn:
        txn.send("e", b"1")
        txn.send("side", b"1")
        txn.flush()
    internals.flush(client)
    shutil.copytree(path, path.with_name("older"))
    _insert(client, 2, large=True)
    internals.flush(client)
    client.close()
    with txnkv.connect(path, read_only=read_only) as opened:
        table, topics = opened.table("t"), [opened.topic(name) for name in ("e", "side")]
        (tablet,) = table.info.tablets
        file = path / f"tablets/{tablet}/data.mdb"
        file.rename(file.with_name("aside"))
        with pytest.raises(txnkv.CorruptionError, match="gone or empty"):
            table.count()
        file.with_name("aside").rename(file)
        GONE["moved" if gone == "replaced" else gone](path)
        if gone == "replaced":
            path.with_name("older").rename(path)
        reads = [table.count, lambda: table.get(1), lambda: table.scan().to_arrow()]
        if gone != "replaced":  # what is in the older logs is all that there was
            reads += [lambda topic=each: topic.consumer().poll(timeout=0) for each in topics]
        for read in [*reads, opened.check]:
            with pytest.raises(txnkv.StoreNotFoundError, match="moved or replaced"):
                read()


@pytest.mark.parametrize("part", ["status.db", "runtime", "runtime/shared"])
def test_parts_are_looked_at_too(client: txnkv.Client, path: Path, part: str) -> None:
    """Without the runtime file processes do not hear of each other's commits."""
    target = path / part
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    with pytest.raises(txnkv.StoreNotFoundError, match=part.split("/")[0]):
        txnkv.connect(path)
    with pytest.raises(txnkv.StoreNotFoundError):
        _insert(client, 2)


def test_it_is_opened_anew_when_its_clients_are_closed(client: txnkv.Client, path: Path) -> None:
    shutil.rmtree(path)
    with pytest.raises(txnkv.StoreNotFoundError):
        txnkv.connect(path)
    client.close()
    with txnkv.connect(path) as again:
        assert again.tables() == []


def test_at_its_new_place_it_is_opened_once_its_clients_are_closed(
    client: txnkv.Client, path: Path, elsewhere: Any
) -> None:
    """It was opened a second time. The first client's end took the locks of both: another process
    was given the exclusive subscription that this one had, and the message.
    """
    moved = path.with_name("elsewhere")
    path.rename(moved)
    with pytest.raises(txnkv.StoreNotFoundError, match=f"{path} was .* Close its clients"):
        txnkv.connect(moved)
    client.close()
    with txnkv.connect(moved) as again:
        subscription = again.topic("e").subscribe("s")
        code = """
            with txnkv.connect(path) as client:
                try:
                    client.topic("e").subscribe("s")
                    say("given")
                except txnkv.TxnkvError as error:
                    say(str(error))
        """
        path.mkdir()  # where the process has a client of its own
        assert "exclusive" in elsewhere(code, path=str(moved))
        subscription.close()


def test_a_dropped_client_keeps_no_moved_store(path: Path) -> None:
    txnkv.connect(path).create_table("t", ID)
    moved = path.with_name("elsewhere")
    path.rename(moved)
    with txnkv.connect(moved) as again:
        assert again.tables() == ["t"]


def test_another_store_in_its_place_is_left_alone(path: Path, process: Any) -> None:
    """Made by another process; this one goes on, over a fork that closes its connections."""
    client = txnkv.connect(path)
    client.create_table("t", ID)
    _insert(client, 1)
    shutil.rmtree(path)
    other = process(
        """
        with txnkv.connect(path) as made:
            made.create_table("other", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
        say()
        """,
        path=str(path),
    )
    other.hear()
    with pytest.raises(txnkv.StoreNotFoundError):
        _insert(client, 2)
    pid = os.fork()
    if pid == 0:
        try:
            client.tables()
        except txnkv.StoreNotFoundError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    with pytest.raises(txnkv.StoreNotFoundError):
        _insert(client, 3)
    client.close()
    with txnkv.connect(path) as again:
        assert again.tables() == ["other"]
        assert again.check().problems == []


def test_all_who_have_it_open_find_out(path: Path, process: Any) -> None:
    """A process that is refused holds no lock that the next one would wait for."""
    client = txnkv.connect(path)
    client.create_table("t", ID)
    other = process(
        """
        say()
        wait()
        try:
            with client.transaction() as txn:
                txn.insert("t", (1,))
        except txnkv.StoreNotFoundError as error:
            say(str(error))
        os._exit(0)
        """
    )
    other.hear()
    shutil.rmtree(path)
    with pytest.raises(txnkv.StoreNotFoundError):
        _insert(client, 2)
    other.tell()
    assert "removed" in other.finish()
    client.close()


def test_background_work_ends_with_one_line(
    path: Path, caplog: pytest.LogCaptureFixture, until: Any
) -> None:
    client = txnkv.connect(path)
    client.create_table("t", ID)
    _insert(client, 1)
    shutil.rmtree(path)
    thread = internals.maintenance(client)._thread
    assert thread is not None
    until(lambda: not thread.is_alive())
    with pytest.raises(txnkv.StoreNotFoundError):
        _insert(client, 2)
    said = [r for r in caplog.records if "background work" in r.message and str(path) in r.message]
    assert [r.levelname for r in said] == ["ERROR"]
    client.close()
