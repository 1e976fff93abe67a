"""Backups in other file systems: whole ones or none, through deaths, errors and damage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

import txnkv
from tests.crash.test_backup import BACKUP_POINTS, make, names, require_whole
from tests.property.machine_tools import in_child
from txnkv.storage import arm, check_backup, disarm, place_of


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    make(tmp_path / "shop")
    return tmp_path / "shop"


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def distant(bucket: Path) -> fs.FileSystem:
    """Not a LocalFileSystem: nothing of it has a path on this machine."""
    return fs.SubTreeFileSystem(str(bucket), fs.LocalFileSystem())


class Failing(fs.FileSystemHandler):
    """A file system in memory that refuses the calls of some names."""

    def __init__(self) -> None:
        self.inner = fs._MockFileSystem()
        self.refused: set[str] = set()

    def _of(self, name: str) -> Any:
        if name in self.refused:
            raise OSError(f"{name} is refused")
        return getattr(self.inner, name)

    def get_type_name(self) -> str:
        return "failing"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self._of("get_file_info")(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        return self._of("get_file_info")(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._of("create_dir")(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._of("delete_dir")(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        self._of("delete_dir_contents")(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        self._of("delete_dir_contents")("/", accept_root_dir=True)

    def delete_file(self, path: str) -> None:
        self._of("delete_file")(path)

    def move(self, src: str, dest: str) -> None:
        self._of("move")(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        self._of("copy_file")(src, dest)

    def open_input_stream(self, path: str) -> Any:
        return self._of("open_input_stream")(path)

    def open_input_file(self, path: str) -> Any:
        return self._of("open_input_file")(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._of("open_output_stream")(path)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        return self._of("open_append_stream")(path)


def test_one_after_the_other_each_whole_by_itself(
    shop: Path, bucket: Path, distant: fs.FileSystem, tmp_path: Path
) -> None:
    with txnkv.connect(shop) as client:
        first = client.backup("shop/first", filesystem=distant)
        assert (first.path, first.linked) == ("shop/first", 0)
        client.table("t").upsert({"id": 1000, "n": 0})
        second = client.backup("shop/second", base="shop/first", filesystem=distant)
        assert second.linked > 0
        with pytest.raises(ValueError, match="not empty: it holds BACKUP"):
            client.backup("shop/second", filesystem=distant)
    assert sorted(names(bucket / "shop")) == ["first", "second"]
    for path in (bucket / "shop" / "first").rglob("*"):
        if path.is_file():
            path.unlink()
    latest = txnkv.restore("shop", tmp_path / "latest", filesystem=distant)
    assert (latest.backup, latest.timestamp) == ("shop/second", second.timestamp)
    with txnkv.connect(latest.path) as client:
        assert client.check().problems == []
        assert client.table("t").get(1000) == {"id": 1000, "n": 0}
    assert names(tmp_path) == ["bucket", "latest", "shop"]


def test_of_several_the_last_until_then(shop: Path, distant: fs.FileSystem, tmp_path: Path) -> None:
    with txnkv.connect(shop) as client:
        first = client.backup("shop/first", filesystem=distant)
        client.table("t").upsert({"id": 1000, "n": 0})
        client.backup("shop/second", filesystem=distant)
    txnkv.restore("shop", tmp_path / "made", at=first.timestamp, filesystem=distant)
    require_whole(tmp_path / "made")
    early = datetime(2020, 1, 1, 1, tzinfo=UTC)
    with pytest.raises(txnkv.StoreNotFoundError, match="at or before 2020-01-01"):
        txnkv.restore("shop", tmp_path / "early", at=early, filesystem=distant)


@pytest.mark.parametrize("point", BACKUP_POINTS)
def test_a_killed_one_is_none_and_the_one_before_stays(
    point: str, shop: Path, bucket: Path, distant: fs.FileSystem, tmp_path: Path
) -> None:
    with txnkv.connect(shop) as client:
        client.backup("first", filesystem=distant)

    def work(say: Callable[[object], object]) -> None:
        with txnkv.connect(shop) as client:
            client.backup("second", base="first", filesystem=distant)
        say("done")

    assert not in_child(work, point, 1)
    assert (bucket / "second" / "BACKUP").exists() == (point == "backup.renamed")
    if point == "backup.renamed":
        txnkv.restore("second", tmp_path / "second", filesystem=distant)
        require_whole(tmp_path / "second")
    else:
        with pytest.raises(txnkv.IncompatibleStoreError, match="its writer died, or is at it"):
            txnkv.restore("second", tmp_path / "second", filesystem=distant)
        with (
            txnkv.connect(shop) as client,
            pytest.raises(txnkv.UnavailableError, match="second is an unfinished backup"),
        ):
            client.backup("second", filesystem=distant)
    with txnkv.connect(shop) as client:
        client.backup("third", base="first", filesystem=distant)
    for name in ("first", "third"):
        txnkv.restore(name, tmp_path / name, filesystem=distant)
        require_whole(tmp_path / name)


@pytest.mark.parametrize("refused", ["create_dir", "open_output_stream", "move", "get_file_info"])
def test_a_file_system_that_fails_is_named_and_nothing_is_left(
    refused: str, shop: Path, tmp_path: Path
) -> None:
    failing = Failing()
    distant = fs.PyFileSystem(failing)
    with txnkv.connect(shop) as client:
        failing.refused = {refused}
        with pytest.raises(txnkv.UnavailableError, match=f"bucket/first .*{refused} is refused"):
            client.backup("bucket/first", filesystem=distant)
        failing.refused = {"copy_file"}  # what cannot be copied there is put again
        assert failing.inner.get_file_info("bucket/first").type is fs.FileType.NotFound
        client.backup("bucket/first", filesystem=distant)
        assert client.backup("bucket/two", base="bucket/first", filesystem=distant).linked == 0
    failing.refused = {"open_input_stream"}
    with pytest.raises(txnkv.UnavailableError, match="open_input_stream is refused"):
        txnkv.restore("bucket/two", tmp_path / "made", filesystem=distant)
    failing.refused = set()
    txnkv.restore("bucket/two", tmp_path / "made", filesystem=distant)
    require_whole(tmp_path / "made")


def test_each_damaged_file_is_named(
    shop: Path, bucket: Path, distant: fs.FileSystem, tmp_path: Path
) -> None:
    with txnkv.connect(shop) as client:
        client.backup("b", filesystem=distant)
    files = sorted(path for path in (bucket / "b").rglob("*") if path.is_file())
    assert len(files) > 6
    for file in files:
        whole = file.read_bytes()
        at = len(whole) // 2
        flipped = whole[:at] + bytes(byte ^ 1 for byte in whole[at : at + 1]) + whole[at + 1 :]
        for damaged in {flipped, whole[:-1], whole + b"x"} - {whole}:
            file.write_bytes(damaged)
            with pytest.raises(txnkv.CorruptionError, match=file.name):
                txnkv.restore("b", tmp_path / "made", filesystem=distant)
            with pytest.raises(txnkv.CorruptionError, match=file.name):
                check_backup(place_of("b", distant), lambda done, total: None)
        file.unlink()
        gone = txnkv.IncompatibleStoreError if file.name == "BACKUP" else txnkv.CorruptionError
        with pytest.raises(gone, match=file.name):
            txnkv.restore("b", tmp_path / "made", filesystem=distant)
        assert names(tmp_path) == ["bucket", "shop"]
        file.write_bytes(whole)
    told: list[tuple[int, int]] = []
    found = check_backup(place_of("b", distant), lambda *done: told.append(done))
    assert told[-1] == (found.size, found.size)
    txnkv.restore("b", tmp_path / "made", filesystem=distant)
    require_whole(tmp_path / "made")


def test_a_full_disk_and_no_temporary_folder(
    shop: Path, bucket: Path, distant: fs.FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were told as failures of the address, to be tried again."""

    def fail() -> None:
        raise OSError(28, "No space left on device")

    with txnkv.connect(shop) as client:
        arm("backup.file", fail)
        try:
            with pytest.raises(txnkv.StorageFullError, match=r"a backup at b: .*No space left"):
                client.backup("b", filesystem=distant)
        finally:
            disarm()
        monkeypatch.setattr(tempfile, "tempdir", str(bucket / "none"))
        with pytest.raises(txnkv.NotSupportedError, match=r"bucket/none.*Have TMPDIR name"):
            client.backup("b", filesystem=distant)
        assert names(bucket) == []


def test_addresses(shop: Path, tmp_path: Path) -> None:
    with txnkv.connect(shop) as client:
        told = client.backup(f"file://{tmp_path}/b")
        assert told.path == str(tmp_path / "b")
        for address, text in (
            ("nothing://x/y", "names no file system"),
            ("mock:///", "no folder in it"),
        ):
            with pytest.raises(ValueError, match=text):
                client.backup(address)
        with pytest.raises(ValueError, match="lies in the store"):
            client.backup(str(shop / "b"), filesystem=fs.LocalFileSystem())
    with pytest.raises(txnkv.StoreNotFoundError, match="no backup at mock:///x: there is nothing"):
        txnkv.restore("mock:///x", tmp_path / "made")
    txnkv.restore(f"file://{tmp_path}/b", tmp_path / "made")
    require_whole(tmp_path / "made")


def test_a_dump_is_fetched_too(shop: Path, bucket: Path, distant: Any, tmp_path: Path) -> None:
    txnkv.dump(shop, bucket / "dump")
    txnkv.restore("dump", tmp_path / "made", filesystem=distant)
    with txnkv.connect(tmp_path / "made") as client:
        assert client.table("t").count() == 99
    assert names(tmp_path) == ["bucket", "made", "shop"]
