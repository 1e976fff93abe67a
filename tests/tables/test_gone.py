"""Things a process gives up once others replace or remove them: memory, descriptors, disk space."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tools.children import Children
from txnkv.client import admin
from txnkv.tables.maintenance import flush
from txnkv.topics import overview

SCHEMA = txnkv.Schema({"id": "int64", "text": "string?"}, primary_key=["id"])

CHANGE = """
client = txnkv.connect(args[0], create=False, history=0.0)
while wait() == "go":
    with client.transaction() as txn:
        txn.write("t", rows(0, 400, "new"), op="upsert")
    client.compact()
    say("done")
client.close()
"""
DROP = """
client = txnkv.connect(args[0], create=False, history=0.0)
wait()
for number in range(3):
    client.drop_table(f"t{number}")
    client.drop_topic(f"e{number}")
client.instance.coordinator.maintenance.round()
left = [*os.listdir(args[0] + "/tablets"), *os.listdir(args[0] + "/logs")]
say(len(left))
wait()
"""


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


def test_a_reader_keeps_nothing_of_row_sets_that_were_replaced(
    tmp_path: Path, children: Children
) -> None:
    """The story: it read 42 row sets one after the other, of which one was left, and had the
    deltas of all.
    """
    path = tmp_path / "store"
    with txnkv.connect(path) as client:
        client.create_table("t", SCHEMA)
        other = children.start(CHANGE, path)
        (tablet,) = internals.tables(client).tablets(client.table("t").info)
        for _ in range(6):
            other.tell()
            assert other.line() == "done"
            assert client.table("t").get(7) == {"id": 7, "text": "new 7"}
            assert client.table("t").count() == 400
        live = {info.id for info in tablet.state(internals.latest(client)).infos}
        assert set(tablet._row_sets) <= live
        other.tell("end")
        other.finish()


@pytest.mark.parametrize(
    ("look", "drop"), [("row_set_ids", "drop_table('t')"), ("check_partition", "drop_topic('e')")]
)
def test_a_check_beside_a_drop_finds_no_damage(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch, look: str, drop: str
) -> None:
    """Its file is open here, with all that was in it, when it is in status.db no more."""
    program = f"""
    client = txnkv.connect(args[0], create=False, history=0.0)
    client.{drop}
    client.instance.coordinator.maintenance.round()
    """
    with txnkv.connect(tmp_path / "store", history=0.0) as client:
        client.create_table("t", SCHEMA).insert({"id": 0})
        with client.transaction() as txn:
            txn.send(client.create_topic("e"), b"0")
        client.compact()
        seen, really = [], getattr(admin, look)

        def looked(*args: Any) -> Any:
            seen.append(really(*args))
            if len(seen) == 1:
                children.start(program, tmp_path / "store").finish()
            return seen[-1]

        monkeypatch.setattr(admin, look, looked)
        assert client.check().problems == []
        assert seen


@pytest.mark.parametrize("read_only", [False, True])
def test_a_process_closes_what_another_dropped(
    tmp_path: Path,
    children: Children,
    until: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
    read_only: bool,
) -> None:
    """Also one that is idle, and one that reads only."""
    monkeypatch.setattr("txnkv.coordinator.maintenance.LOOK_EVERY", 0)
    path = tmp_path / "store"
    with txnkv.connect(path) as client:
        client.create_table("stays", SCHEMA)
        for number in range(3):
            client.create_table(f"t{number}", SCHEMA)
            client.create_topic(f"e{number}", buffer="sidecar")
            with client.transaction() as txn:
                txn.insert(f"t{number}", {"id": 1, "text": None})
                txn.insert("stays", {"id": number, "text": None})
                txn.send(f"e{number}", b"one")
        internals.flush(client)
    other = children.start(DROP, path)
    with txnkv.connect(path, read_only=read_only) as client:
        engine, topics = internals.tables(client), internals.topics(client)
        for number in range(3):
            assert client.table(f"t{number}").count() == 1
            with client.topic(f"e{number}").consumer() as consumer:
                assert len(consumer.poll(timeout=10.0)) == 1
        assert client.table("stays").count() == 3
        assert len(engine._tablets) == 4
        del consumer
        other.tell()
        assert other.line() == "1"

        until(
            lambda: len(engine._tablets) == 1 and not topics._partitions and not _deleted(),
            seconds=60.0,
        )
        assert set(engine.memory._sets) <= set(client.table("stays").info.tablets)
        assert client.table("stays").count() == 3
        other.tell()
        other.finish()


def _deleted() -> list[str]:
    """Files that this process has open and that have no name any more; none without /proc."""
    found: list[str] = []
    if not os.path.isdir("/proc/self/fd"):
        return found
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
        if name.endswith("(deleted)") and ".mdb" in name:
            found.append(name)
    return found


FORGET = """
client = txnkv.connect(args[0], create=False, history=0.0)
assert wait() == "go"
for name in ("a", "b"):
    client.drop_table(name)
client.instance.coordinator.maintenance.round()
say("done")
client.close()
"""


Beside = tuple[txnkv.Client, Callable[..., None]]


@pytest.fixture
def beside(tmp_path: Path, children: Children) -> Iterator[Beside]:
    """A client of tables a, b and c, and a call that has another process purge two of them."""
    with txnkv.connect(tmp_path / "store", history=0.0) as client:
        for name in "abc":
            table = client.create_table(name, SCHEMA)
            for first in (0, 1):
                with client.transaction() as txn:
                    rows = {"id": range(first, 40_000, 2), "text": ["x"] * 20_000}
                    txn.write(table, pa.table(rows, schema=SCHEMA.arrow))
        other = children.start(FORGET, tmp_path / "store")

        called: list[bool] = []

        def forget(*_: object) -> None:
            if not called:
                called.append(True)
                other.tell()
                assert other.line() == "done"
                other.finish()

        yield client, forget
        assert client.check().problems == []
        assert client.tables() == ["c"]
        assert client.table("c").count() == 40_000


def test_a_compaction_beside_who_drops_what_it_is_to_merge(beside: Beside) -> None:
    client, forget = beside
    report = client.compact(progress=forget)
    assert (report.row_sets_before, report.row_sets_after, report.rows_after) == (2, 1, 40_000)
    assert internals.coordinator(client).damage.parts() == {}


def test_a_flush_beside_who_drops_what_it_is_to_write(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, forget = beside
    for name in "abc":
        client.table(name).upsert((1, "small"))
    write = flush._flush
    monkeypatch.setattr(flush, "_flush", lambda *args: [forget(), write(*args)])
    internals.flush(client)
    assert client.table("c").get(1) == {"id": 1, "text": "small"}


def test_statistics_beside_who_drops_a_table(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, forget = beside
    about = admin._table_stats
    monkeypatch.setattr(admin, "_table_stats", lambda *args: [forget(), about(*args)][1])
    assert client.stats()["tables"].keys() == {"c"}


def test_statistics_beside_who_drops_a_topic(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, forget = beside
    for name in ("gone", "here"):
        client.create_topic(name)
    about = overview._topic_stats

    def late(engine: Any, topic: Any) -> Any:
        if topic.name == "gone":
            forget()
            client.drop_topic("gone")
            raise FileNotFoundError("its log")
        return about(engine, topic)

    monkeypatch.setattr(overview, "_topic_stats", late)
    assert client.stats()["topics"].keys() == {"here"}
