"""A disk that fails one call: who called gets an error of txnkv, or none where all is done."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

import txnkv
from tests import internals
from tools.children import Children
from txnkv.coordinator import Coordinator
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage import extents, sqlite_connection

SCHEMA = txnkv.Schema({"id": "int64", "text": "string"}, primary_key=["id"])
CODES = {errno.EIO: txnkv.UnavailableError, errno.ENOSPC: txnkv.StorageFullError}

Fail = Callable[..., None]


@pytest.fixture(autouse=True)
def background_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maintenance, "start", lambda self: None)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Has the next call of a function of `os` fail whose path ends so."""

    def arm(name: str, path: str, code: int = errno.EIO) -> None:
        real, left = getattr(os, name), [1]

        def once(at: Any, *args: Any, **options: Any) -> Any:
            if left and isinstance(at, str | os.PathLike) and os.fspath(at).endswith(path):
                left.pop()
                raise OSError(code, os.strerror(code), os.fspath(at))
            return real(at, *args, **options)

        monkeypatch.setattr(os, name, once)

    return arm


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with something on the disk."""
    path = tmp_path / "store"
    with txnkv.connect(path) as client:
        client.create_table("t", SCHEMA)
        client.create_index("t", "text")
        client.create_topic("q")
        with client.transaction() as txn:
            txn.upsert("t", {"id": 1, "text": "one"})
            txn.send("q", b"one")
        internals.flush(client)
    return path


DROPS: dict[str, Callable[[txnkv.Client], object]] = {
    "table": lambda client: client.drop_table("t"),
    "index": lambda client: client.drop_index("t", "text"),
    "topic": lambda client: client.drop_topic("q"),
}


def parts(path: Path) -> int:
    """Folders of tablets and logs, those on their way out too."""
    return sum(len(os.listdir(path / folder)) for folder in ("tablets", "logs"))


@pytest.mark.parametrize("call", ["rename", "open"])
@pytest.mark.parametrize("what", DROPS)
def test_what_is_dropped_is_dropped(path: Path, fail: Fail, what: str, call: str) -> None:
    """The files could not be removed yet: an OSError said that the drop had failed."""
    with txnkv.connect(path) as client:
        before = parts(path)
        if call == "rename":
            fail(call, {"table": "tablets/1", "index": "tablets/2", "topic": "logs/1"}[what])
        else:
            fail(call, "logs" if what == "topic" else "tablets")
        DROPS[what](client)
        assert client.metrics()["failing_parts"] == 1
        with pytest.raises(txnkv.TxnkvError, match=r"no (table|topic|index)"):
            DROPS[what](client)
        assert internals.maintenance(client).round(resume_all=True)
        assert client.metrics()["failing_parts"] == 0
        assert parts(path) < before
        assert client.check().problems == []


@pytest.mark.parametrize("code", CODES)
def test_errors_of_an_index_that_is_made(path: Path, fail: Fail, code: int) -> None:
    with txnkv.connect(path) as client:
        client.create_table("other", SCHEMA)
        directory = internals.store(client).directory
        for feature in directory.features:  # as if it were the first
            (path / "FORMAT").write_text((path / "FORMAT").read_text().replace(f'"{feature}"', ""))
        fail("open", "FORMAT.new", code)
        with pytest.raises(CODES[code], match="FORMAT"):
            client.create_index("other", "text")
        assert client.table("other").indexes == []
        client.create_index("other", "text")
        assert client.check().problems == []


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("call", "at"), [("open", "FORMAT.new"), ("mkdir", "tablets")])
def test_errors_of_connect(tmp_path: Path, fail: Fail, code: int, call: str, at: str) -> None:
    fail(call, at, code)
    with pytest.raises(CODES[code], match="store"):
        txnkv.connect(tmp_path / "store")
    with txnkv.connect(tmp_path / "store") as client:
        client.create_table("t", SCHEMA)


def test_errors_of_restore(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with txnkv.connect(path) as client:
        client.backup(tmp_path / "backup")

    def broken(file: Path) -> bytes:
        raise OSError(errno.EIO, "injected", str(file))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        with pytest.raises(txnkv.UnavailableError, match="BACKUP failed"):
            txnkv.restore(tmp_path / "backup", tmp_path / "restored")
    txnkv.restore(tmp_path / "backup", tmp_path / "restored")


def test_a_with_block_whose_rollback_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transaction stayed open, and readers waited, until it had no heartbeat for 30 s."""

    def full(*_: object) -> None:
        raise txnkv.StorageFullError("injected")

    def use(txn: txnkv.Transaction) -> None:
        txn.send("q", b"v", partition=0)
        txn.serialize()  # so it is stored
        raise LookupError("mine")

    with txnkv.connect(path) as client:
        txn = client.transaction()
        with monkeypatch.context() as patch:
            patch.setattr(Coordinator, "abort", full)
            with pytest.raises(LookupError, match="mine"), txn:
                use(txn)
        assert client.transaction_state(txn.id) is txnkv.TxnState.OPEN
        assert internals.maintenance(client).round()
        assert client.transaction_state(txn.id) is txnkv.TxnState.ABORTED


def held_up(patch: pytest.MonkeyPatch, folder: str, at: int) -> list[str]:
    """Have one opening of an LMDB file in such a folder find no descriptor left, idle files closed
    or not; those that were asked for.
    """
    real, asked = lmdb.open, []

    def opened(place: str, *args: Any, **options: Any) -> Any:
        if str(place).endswith(folder):
            asked.append(place)
            if len(asked) in (at, at + 1):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), place)
        return real(place, *args, **options)

    patch.setattr(lmdb, "open", opened)
    return asked


PARTS = {"table:t/0": "tablets/1", "topic:q/0": "logs/1"}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("aside", [False, True])
def test_what_cannot_be_looked_at_is_not_given_up(path: Path, part: str, aside: bool) -> None:
    """Without a descriptor, or room for a copy, all of a part that had lost nothing was gone."""
    folder = f"{PARTS[part]}/mended" if aside else PARTS[part]
    with txnkv.connect(path) as client:
        refused = 0
        for at in range(1, 20):
            with pytest.MonkeyPatch.context() as patch:
                asked = held_up(patch, folder, at)
                try:
                    assert not client.accept_loss(part)
                except txnkv.UnavailableError:
                    refused += 1
            if len(asked) < at:
                break
        assert refused
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(extents, "copy", no_room)
            with pytest.raises(txnkv.StorageFullError):
                client.accept_loss(part)
        assert not os.path.exists(path / PARTS[part] / "mended")
        whole(client)


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def whole(client: txnkv.Client) -> None:
    """Nothing of what the store had is lost."""
    assert client.table("t").get(1) == {"id": 1, "text": "one"}
    with client.topic("q").consumer() as consumer:
        assert [message.value for message in consumer.poll(timeout=0.0)] == [b"one"]
    assert client.check().problems == []


@pytest.mark.parametrize("part", PARTS)
def test_the_only_whole_file_stays(path: Path, children: Children, part: str) -> None:
    """It is aside after a death. One error of its opening, and it was removed as of no use."""
    program = "txnkv.connect(args[0]).accept_loss(args[1])"
    child = children.start(program, path, part, fault="mending.named=kill")
    assert child.popen.wait(120) == -signal.SIGKILL
    with txnkv.connect(path) as client:
        with pytest.MonkeyPatch.context() as patch:
            held_up(patch, "mended", 1)
            with pytest.raises(txnkv.UnavailableError):
                client.accept_loss(part)
        assert not client.accept_loss(part)
        whole(client)


@pytest.mark.parametrize("syncs", [1, 2, 3])
@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("by", ["run", "commit"])
def test_syncs_that_fail_do_nothing_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch, by: str, first: int, syncs: int
) -> None:
    """A commit that had begun went on behind who was told to try it again."""
    failing, at = range(first, first + syncs), itertools.count()
    real = sqlite_connection.sync_data

    def sync(descriptor: int) -> None:
        if next(at) in failing:
            raise OSError(errno.EIO, "injected")
        real(descriptor)

    def work(txn: txnkv.Transaction) -> None:
        txn.upsert("t", {"id": 1, "text": "again"})
        txn.send("q", b"again")
        txn.serialize()  # it is stored, and committed in two phases

    with txnkv.connect(path) as client:
        done: bool | None = None
        with monkeypatch.context() as patch:
            patch.setattr(sqlite_connection, "sync_data", sync)
            try:
                if by == "run":
                    client.run(work)
                else:
                    work(txn := client.new_transaction())
                    txn.commit()
                done = True
            except txnkv.CommitOutcomeUnknownError:
                assert syncs > 1
            except txnkv.UnavailableError:
                assert by == "commit"
                done = False
        assert internals.maintenance(client).round(resume_all=True)
        messages = client.topic("q").consumer().poll(timeout=0)
        came = len(messages) == 2
        assert came or len(messages) == 1
        assert done in (None, came)
        assert client.table("t").get(1) == {"id": 1, "text": "again" if came else "one"}
        assert client.check().problems == []
