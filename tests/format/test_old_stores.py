"""Stores that earlier versions wrote are kept, and opened by this one."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

import txnkv
from tools.make_old_store import messages_of, rows
from txnkv.storage.directory import FORMAT_VERSION, OLDER_VERSIONS

STORES = Path(__file__).parent / "stores"


def unpack(version: str, folder: Path) -> Path:
    with tarfile.open(STORES / f"store-{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "store"


def test_an_older_one_is_not_opened_to_read_only(tmp_path: Path) -> None:
    store = unpack("v1", tmp_path)
    with pytest.raises(txnkv.IncompatibleStoreError, match="open it once to write"):
        txnkv.connect(store, read_only=True)
    txnkv.connect(store).close()
    with txnkv.connect(store, read_only=True) as client:
        assert client.table("ranged").get(316) == {"id": 316, "name": "name 79"}


def test_an_upgrade_that_was_cut_short_is_done_again(tmp_path: Path) -> None:
    """status.db is of the new version, FORMAT does not say so yet."""
    store = unpack("v1", tmp_path)
    before = (store / "FORMAT").read_bytes()
    txnkv.connect(store).close()
    (store / "FORMAT").write_bytes(before)
    with txnkv.connect(store) as client:
        assert client.check().ok
    assert json.loads((store / "FORMAT").read_bytes())["version"] == FORMAT_VERSION


def test_each_older_version_has_a_store() -> None:
    assert {path.stem for path in STORES.glob("*.json")} == {f"store-v{n}" for n in OLDER_VERSIONS}


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9"])
def test_opens(version: str, tmp_path: Path) -> None:
    expected = json.loads((STORES / f"store-{version}.json").read_text())
    with txnkv.connect(unpack(version, tmp_path), create=False) as client:
        report = client.check()
        assert report.ok, report.problems
        assert client.tables() == ["all_types", "ranged"]
        table, ranged = client.table("all_types"), client.table("ranged")
        found = table.scan(ordered=True).to_arrow().to_pylist()
        wanted = [
            {name: row.get(name) for name in table.schema.names}
            for row in sorted(rows(0, expected["rows"]), key=lambda row: (row["k"], row["n"]))
        ]
        assert found == wanted
        for timestamp, count, ranged_count in expected["snapshots"]:
            at = txnkv.Timestamp(timestamp)
            assert table.count(snapshot=at) == count
            assert ranged.count(snapshot=at) == ranged_count
        assert ranged.get(316) == {"id": 316, "name": "name 79"}
        with client.transaction() as txn:
            txn.insert(ranged, (1, "one more"))
            txn.mark_applied("reader of old stores", 1)
        assert ranged.get(1) == {"id": 1, "name": "one more"}
        ranged.alter(add={"note": txnkv.Column("string", default="none")}, drop=["name"])
        assert ranged.get(316) == {"id": 316, "note": "none"}
        assert list(client.applications()) == ["reader of old stores"]


@pytest.mark.parametrize("version", ["v3", "v4", "v5", "v6", "v7", "v8", "v9"])
def test_topics(version: str, tmp_path: Path) -> None:
    expected = json.loads((STORES / f"store-{version}.json").read_text())["topics"]
    with txnkv.connect(unpack(version, tmp_path), create=False) as client:
        assert client.topics() == sorted(expected)
        for name, wanted in expected.items():
            topic = client.topic(name)
            assert messages_of(topic) == wanted["messages"]
            with topic.subscribe("reader") as subscription:
                found = [[m.partition, m.offset] for m in subscription.receive_many(100, timeout=1)]
            known = [message[:2] for message in wanted["messages"]]
            assert sorted(found) == [id for id in known if id not in wanted["acked"]]
            with topic.producer("old") as producer:
                producer.send("one more", partition=0).result(timeout=10)
            assert len(messages_of(topic)) == len(known) + 1
        report = client.check()
        assert report.ok, report.problems
