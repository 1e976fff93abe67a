from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from txnkv.errors import CorruptionError, IncompatibleStoreError, StoreNotFoundError
from txnkv.storage import StoreDirectory, arm
from txnkv.storage.directory import FORMAT_VERSION
from txnkv.storage.faults import InjectedFault


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_store_has_its_layout_and_an_id(tmp_path: Path) -> None:
    store = StoreDirectory.open(tmp_path / "a" / "b")
    assert {entry.name for entry in store.path.iterdir()} == {
        "FORMAT",
        "tablets",
        "logs",
        "runtime",
    }
    content = json.loads((store.path / "FORMAT").read_text())
    assert content == {
        "format": "txnkv",
        "version": FORMAT_VERSION,
        "features": [],
        "store_id": store.store_id,
    }
    assert len(bytes.fromhex(store.store_id)) == 16


def test_opening_again_gives_the_same_store(tmp_path: Path) -> None:
    first = StoreDirectory.open(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path / "s")
    assert StoreDirectory.open(tmp_path / "link", create=False) == first


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_new_store_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = StoreDirectory.open(tmp_path / "s")
    finally:
        os.umask(before)
    assert mode(store.path / "FORMAT") == 0o600
    for name in (".", "tablets", "logs", "runtime"):
        assert mode(store.path / name) == 0o700, name


def test_empty_directory_is_taken_and_made_private(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o755)
    assert mode(StoreDirectory.open(tmp_path / "s").path) == 0o700


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: None, "no store at"),
        (lambda p: p.mkdir(), "no store at"),
        (lambda p: p.write_text(""), "is a file; a store is a directory"),
    ],
)
def test_missing_store_is_not_found_without_create(tmp_path: Path, make, said: str) -> None:
    make(tmp_path / "s")
    with pytest.raises(StoreNotFoundError, match=said):
        StoreDirectory.open(tmp_path / "s", create=False)
    with pytest.raises(StoreNotFoundError):
        StoreDirectory.open(tmp_path / "s", create=True, read_only=True)


def test_file_at_the_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("hello")
    with pytest.raises(StoreNotFoundError, match="is a file"):
        StoreDirectory.open(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "hello"


def foreign_note(path: Path) -> None:
    (path / "notes.txt").write_text("mine")


def foreign_tablets(path: Path) -> None:
    (path / "CREATING").touch()
    (path / "tablets" / "1").mkdir(parents=True)


def lost_format(path: Path) -> None:
    (path / "CREATING").touch()
    (path / "status.db").write_bytes(b"precious")


def folders_of_the_same_name(path: Path) -> None:
    (path / "logs").mkdir()


@pytest.mark.parametrize(
    "make", [foreign_note, foreign_tablets, lost_format, folders_of_the_same_name]
)
def test_directory_with_other_content_is_refused_and_left_alone(tmp_path: Path, make) -> None:
    path = tmp_path / "s"
    path.mkdir(mode=0o755)
    make(path)
    before = sorted(path.rglob("*"))
    with pytest.raises(IncompatibleStoreError, match="no FORMAT file"):
        StoreDirectory.open(path)
    assert sorted(path.rglob("*")) == before
    assert mode(path) == 0o755


def write_format(path: Path, **changes: object) -> None:
    content = json.loads((path / "FORMAT").read_text())
    (path / "FORMAT").write_text(json.dumps({**content, **changes}))


def test_unknown_version_is_refused_by_name(directory: StoreDirectory) -> None:
    newer = FORMAT_VERSION + 1
    write_format(directory.path, version=newer, features="anything", store_id=None)
    with pytest.raises(
        IncompatibleStoreError, match=f"version {newer}; this is version {FORMAT_VERSION}"
    ):
        StoreDirectory.open(directory.path)


def test_unknown_feature_is_refused_with_the_version(directory: StoreDirectory) -> None:
    write_format(directory.path, features=["zeta", "alpha"])
    with pytest.raises(
        IncompatibleStoreError, match=rf"version {FORMAT_VERSION}\) uses .* alpha, zeta"
    ):
        StoreDirectory.open(directory.path)


def test_other_format_is_refused(directory: StoreDirectory) -> None:
    write_format(directory.path, format="other")
    with pytest.raises(IncompatibleStoreError, match="'other'"):
        StoreDirectory.open(directory.path)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_damaged_format_is_corruption(directory: StoreDirectory, text: bytes) -> None:
    (directory.path / "FORMAT").write_bytes(text)
    with pytest.raises(CorruptionError, match="FORMAT"):
        StoreDirectory.open(directory.path)


@pytest.mark.parametrize("store_id", ["", "xyz", 7, None, "0" * 31])
def test_damaged_store_id_is_corruption(directory: StoreDirectory, store_id: object) -> None:
    write_format(directory.path, store_id=store_id)
    with pytest.raises(CorruptionError, match="FORMAT"):
        StoreDirectory.open(directory.path)


def test_half_made_store_is_completed(tmp_path: Path) -> None:
    arm("directory.before_format", "error@1")
    with pytest.raises(InjectedFault):
        StoreDirectory.open(tmp_path / "s")
    assert not (tmp_path / "s" / "FORMAT").exists()
    with pytest.raises(StoreNotFoundError):
        StoreDirectory.open(tmp_path / "s", create=False)
    store = StoreDirectory.open(tmp_path / "s")
    assert not (store.path / "CREATING").exists()


def test_creator_killed_half_way_is_followed_by_another(tmp_path: Path, python) -> None:
    code = "StoreDirectory.open(sys.argv[1])"
    python(code, tmp_path / "s", fault="directory.before_format=kill").finish(code=-9)
    assert not (tmp_path / "s" / "FORMAT").exists()
    assert StoreDirectory.open(tmp_path / "s").store_id


def test_many_creators_make_one_store(tmp_path: Path, python) -> None:
    code = """
    say("ready"); wait()
    say(StoreDirectory.open(sys.argv[1]).store_id)
    """
    creators = [python(code, tmp_path / "s") for _ in range(4)]
    for creator in creators:
        assert creator.line() == "ready"
    for creator in creators:
        creator.tell()
    assert len({creator.line() for creator in creators}) == 1
    assert not (tmp_path / "s" / "CREATING").exists()


def test_runtime_folder_comes_back(directory: StoreDirectory) -> None:
    (directory.path / "runtime").rmdir()
    StoreDirectory.open(directory.path, create=False)
    assert mode(directory.runtime_path) == 0o700


def test_removing_a_tablet_leaves_nothing(directory: StoreDirectory) -> None:
    folder = directory.tablet_dir(12)
    assert folder == directory.path / "tablets" / "12"
    folder.mkdir()
    (folder / "data.mdb").write_bytes(b"x")
    directory.remove_tablet_dir(12)
    directory.remove_tablet_dir(12)
    assert list((directory.path / "tablets").iterdir()) == []


def test_what_a_crash_left_of_a_removal_is_swept(directory: StoreDirectory) -> None:
    left = directory.path / "logs" / ".removed-3-abc"
    left.mkdir()
    (left / "data.mdb").write_bytes(b"x")
    StoreDirectory.open(directory.path, read_only=True)
    assert left.exists()
    StoreDirectory.open(directory.path)
    assert not left.exists()
