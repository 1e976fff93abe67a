"""Damage: bytes that changed, files that are gone, stores of other versions."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lmdb
import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tools.crash_scenarios import BEFORE, rows
from txnkv.tables.tablets import row_set_format
from txnkv.tables.tablets.row_set_format import BLOOM, COLUMNS, HEADER, KEYS, block_key

Connect = Callable[..., txnkv.Client]

SECTIONS = {
    "header": HEADER,
    "key": KEYS,
    "Bloom filter": BLOOM,
    "'number'": COLUMNS + 1,
    "'text'": COLUMNS + 2,
}


def make(path: Path, *, blocks: int = 3) -> None:
    """Two tables of one tablet each, with row sets of a few blocks."""
    schema = txnkv.Schema({"id": "int64", "number": "int64", "text": "string?"}, primary_key=["id"])
    ids = range(64 * blocks)
    data = pa.table({"id": ids, "number": [i * 7 for i in ids], "text": [f"text {i}" for i in ids]})
    with txnkv.connect(path) as client:
        for name in ("hurt", "sound"):
            client.create_table(name, schema)
            with client.transaction() as txn:
                txn.write(name, data)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_set_format, "BLOCK_ROWS", 64)


@pytest.fixture
def path(tmp_path: Path, cut: None, large: None) -> Path:
    path = tmp_path / "store"
    make(path)
    return path


def tablet_and_row_set(path: Path, table: str) -> tuple[int, int]:
    with txnkv.connect(path, create=False) as client:
        (tablet,) = client.table(table).info.tablets
        with internals.status(client).read() as cur:
            (row_set,) = cur.execute(
                "SELECT id FROM row_sets WHERE tablet_id = ?", (tablet,)
            ).fetchone()
    return tablet, row_set


def flip(path: Path, tablet: int, key: bytes, where: float) -> None:
    """Change one bit of a stored value, in the file, as a failing disk does.

    Args:
        where: at which part of the value, from 0 to 1.
    """
    folder = path / "tablets" / str(tablet)
    env = lmdb.open(str(folder), readonly=True, max_dbs=8)
    with env.begin(db=env.open_db(b"blocks", create=False)) as txn:
        value = bytes(txn.get(key))
    env.close()
    data = bytearray((folder / "data.mdb").read_bytes())
    at = data.find(value)
    assert at >= 0
    while at >= 0:  # LMDB leaves old copies of a page behind
        data[at + int(where * (len(value) - 1))] ^= 0x10
        at = data.find(value, at + 1)
    (folder / "data.mdb").write_bytes(data)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(
    ("column", "block"),
    [(column, n) for column in SECTIONS for n in (0, 1) if column != "header" or n == 0],
)
def test_flipped_bit_is_found_and_named(column: str, block: int, where: float, path: Path) -> None:
    tablet, row_set = tablet_and_row_set(path, "hurt")
    flip(path, tablet, block_key(row_set, SECTIONS[column], block), where)
    with txnkv.connect(path, create=False) as client:
        hurt = client.table("hurt")
        # A scan asks no Bloom filter.
        look = partial(hurt.get, 64 * block + 5) if "Bloom" in column else hurt.scan().to_arrow
        with pytest.raises(txnkv.CorruptionError) as raised:
            look()
        text = str(raised.value)
        for name in (
            str(path.resolve()),
            "table 'hurt'",
            f"tablet {tablet}",
            f"row set {row_set}",
            f"column {column}",
            f"block {block}",
        ):
            assert name in text
        report = client.check()
        assert not report.ok
        assert len(report.problems) == 1
        assert f"column {column}, block {block}" in report.problems[0]
        sound = client.table("sound")
        assert sound.scan().to_arrow().num_rows == 192
        assert sound.get(7) == {"id": 7, "number": 49, "text": "text 7"}
        with client.transaction() as txn:
            txn.insert("sound", {"id": 1000, "number": 1, "text": None})


def test_no_batch_comes_after_damage(path: Path) -> None:
    """A scan may give the blocks before the damaged one, never a row of it."""
    tablet, row_set = tablet_and_row_set(path, "hurt")
    flip(path, tablet, block_key(row_set, SECTIONS["'text'"], 1), 0.5)
    with txnkv.connect(path, create=False) as client:
        got = []
        batches = client.table("hurt").scan(ordered=True).to_batches()
        with pytest.raises(txnkv.CorruptionError):
            got.extend(id for batch in batches for id in batch.column("id").to_pylist())
        assert got in ([], list(range(64)))
        number = client.table("hurt").scan(columns=["id", "number"]).to_arrow()
        assert number["number"].to_pylist() == [i * 7 for i in range(192)], "columns it needs not"
        with pytest.raises(txnkv.CorruptionError):
            client.table("hurt").get(70)
        with pytest.raises(txnkv.CorruptionError):
            client.table("hurt").get_many([1, 70])
        assert client.table("hurt").get(1) is not None


def test_insert_is_not_checked_against_damaged_keys(path: Path) -> None:
    tablet, row_set = tablet_and_row_set(path, "hurt")
    flip(path, tablet, block_key(row_set, KEYS, 1), 0.5)
    with txnkv.connect(path, create=False) as client:
        data = {"id": range(60, 140), "number": range(80), "text": ["x"] * 80}
        txn = client.new_transaction()
        with pytest.raises(txnkv.CorruptionError):
            txn.write("hurt", pa.table(data))
        txn.rollback()
        assert len(client.check().problems) == 1


def test_block_in_the_place_of_another_is_found(path: Path) -> None:
    """Two blocks that are each whole, exchanged: a checksum is good in its place alone."""
    tablet, row_set = tablet_and_row_set(path, "hurt")
    env = lmdb.open(str(path / "tablets" / str(tablet)), max_dbs=8)
    first, second = (block_key(row_set, SECTIONS["'number'"], block) for block in (0, 1))
    db = env.open_db(b"blocks")
    with env.begin(write=True, db=db) as txn:
        one, two = bytes(txn.get(first)), bytes(txn.get(second))
        txn.put(first, two)
        txn.put(second, one)
    env.close()
    with txnkv.connect(path, create=False) as client:
        with pytest.raises(txnkv.CorruptionError, match="checksum"):
            client.table("hurt").scan().to_arrow()
        assert len(client.check().problems) >= 1


@pytest.mark.parametrize("column", SECTIONS)
def test_missing_block_is_found(column: str, path: Path) -> None:
    tablet, row_set = tablet_and_row_set(path, "hurt")
    env = lmdb.open(str(path / "tablets" / str(tablet)), max_dbs=8)
    with env.begin(write=True, db=env.open_db(b"blocks")) as txn:
        assert txn.delete(block_key(row_set, SECTIONS[column], 0))
    env.close()
    with txnkv.connect(path, create=False) as client:
        with pytest.raises(txnkv.CorruptionError, match="missing"):
            client.table("hurt").get(5)
        (problem,) = client.check().problems
        assert f"column {column}" in problem
        assert "missing" in problem


def test_check_finds_blocks_that_belong_to_nothing(path: Path) -> None:
    tablet, _ = tablet_and_row_set(path, "hurt")
    env = lmdb.open(str(path / "tablets" / str(tablet)), max_dbs=8)
    with env.begin(write=True, db=env.open_db(b"blocks")) as txn:
        txn.put(block_key(4711, KEYS, 0), b"late")
    env.close()
    with txnkv.connect(path, create=False) as client:
        (problem,) = client.check().problems
        assert "row set 4711" in problem


@pytest.mark.parametrize("length", [0, 1, 100, 4096, 8192, 16384])
def test_truncated_environment_is_corruption(length: int, path: Path) -> None:
    tablet, _ = tablet_and_row_set(path, "hurt")
    with open(path / "tablets" / str(tablet) / "data.mdb", "r+b") as file:
        assert length < file.seek(0, 2)
        file.truncate(length)
    _expect_corrupt_tablet(path)


@pytest.mark.parametrize("page", [0, 1], ids=["first meta page", "both meta pages"])
def test_garbage_in_the_head_of_an_environment_is_corruption(page: int, path: Path) -> None:
    tablet, _ = tablet_and_row_set(path, "hurt")
    with open(path / "tablets" / str(tablet) / "data.mdb", "r+b") as file:
        file.write(b"\x5a" * 4096 * (page + 1))
    _expect_corrupt_tablet(path)


def test_missing_environment_is_reported(path: Path) -> None:
    tablet, _ = tablet_and_row_set(path, "hurt")
    shutil.rmtree(path / "tablets" / str(tablet))
    with txnkv.connect(path, create=False) as client:
        with pytest.raises(txnkv.TxnkvError):
            client.table("hurt").scan().to_arrow()
        assert not client.check().ok
        assert client.table("sound").count() == 192


def _expect_corrupt_tablet(path: Path) -> None:
    with txnkv.connect(path, create=False) as client:
        with pytest.raises(txnkv.CorruptionError):
            client.table("hurt").scan().to_arrow()
        assert not client.check().ok
        assert client.table("sound").scan().to_arrow().num_rows == 192


# -- the store's own files -------------------------------------------------------------


def change_format(path: Path, **changes: object) -> None:
    content = json.loads((path / "FORMAT").read_text())
    (path / "FORMAT").write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 1000}, "version 1000"),
        ({"version": "1"}, "'1'"),
        ({"features": ["time machine"]}, "time machine"),
        ({"format": "other"}, "other"),
    ],
)
def test_store_of_another_format_is_refused(
    changes: dict[str, object], named: str, path: Path
) -> None:
    change_format(path, **changes)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for read_only in (False, True):
        with pytest.raises(txnkv.IncompatibleStoreError, match=named):
            txnkv.connect(path, read_only=read_only)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": "txnkv", "version": 1}']
)
def test_damaged_format_is_corruption(text: bytes, path: Path) -> None:
    (path / "FORMAT").write_bytes(text)
    with pytest.raises(txnkv.CorruptionError, match="FORMAT"):
        txnkv.connect(path)


@pytest.mark.parametrize("kind", ["garbage", "truncated", "empty pages"])
def test_damaged_status_database_is_corruption(kind: str, path: Path) -> None:
    database = path / "status.db"
    size = 4096
    with txnkv.connect(path, create=False) as client:
        internals.status(client).checkpoint()
        size = database.stat().st_size
    for extra in path.glob("status.db-*"):
        extra.unlink()
    if kind == "garbage":
        database.write_bytes(b"no database at all " * 1000)
    elif kind == "truncated":
        database.write_bytes(database.read_bytes()[: size // 2])
    else:
        content = bytearray(database.read_bytes())
        content[4096:] = bytes(len(content) - 4096)
        database.write_bytes(content)
    with pytest.raises(txnkv.CorruptionError, match=r"status\.db"):
        _use(path)


def _use(path: Path) -> None:
    with txnkv.connect(path, create=False) as client:
        client.table("hurt").scan().to_arrow()
        report = client.check()
        if not report.ok:
            raise txnkv.CorruptionError("; ".join(report.problems))


def test_missing_status_database_loses_nothing_silently(path: Path) -> None:
    """Without status.db there is no catalog; a new empty one must not pass for the store."""
    for file in path.glob("status.db*"):
        file.unlink()
    with pytest.raises((txnkv.CorruptionError, txnkv.StoreNotFoundError)):
        txnkv.connect(path, create=False)


@pytest.mark.usefixtures("large")
def test_store_opens_without_its_runtime_folder(store: Path, connect: Connect) -> None:
    client = connect()
    open_ = client.new_transaction()
    open_.write("left", rows(BEFORE, 10))
    client.close()
    shutil.rmtree(store / "runtime")
    again = connect()
    assert again.table("left").count() == BEFORE
    with again.transaction() as txn:
        txn.write("right", rows(BEFORE, 10))
    again.abort_transaction(open_.id)
    assert again.check().problems == []


def test_no_store_is_not_made_by_accident(tmp_path: Path) -> None:
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(txnkv.StoreNotFoundError, match="nowhere"):
            txnkv.connect(tmp_path / "nowhere", **options)
    assert not (tmp_path / "nowhere").exists()


def test_read_only_client_changes_nothing(store: Path) -> None:
    names = {file: file.stat().st_size for file in store.rglob("*.mdb")}
    with txnkv.connect(store, read_only=True) as client:
        assert client.table("left").count() == BEFORE
        assert client.table("left").get(3) == {"id": 3, "text": "row 3"}
        assert client.check().problems == []
        assert client.stats()["tables"]["right"]["rows"] == BEFORE
        for refused in (
            client.new_transaction,
            client.new_session,
            lambda: client.drop_table("left"),
            lambda: client.create_table("new", client.table("left").schema),
            lambda: client.abort_transaction(1),
        ):
            with pytest.raises(txnkv.NotSupportedError):
                refused()
    assert {file: file.stat().st_size for file in store.rglob("*.mdb")} == names


def test_store_is_private_to_its_owner(store: Path) -> None:
    for entry in [store, *store.rglob("*")]:
        mode = stat.S_IMODE(entry.stat().st_mode)
        assert mode & 0o077 == 0, f"{entry} has mode {mode:o}"
