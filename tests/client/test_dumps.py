"""Dumps: a store in plain files, and another one made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyarrow import parquet

import txnkv
from tests import internals
from tests.property.machine_tools import in_child
from txnkv.storage import arm, disarm

COLUMNS = {
    "id": "int64", "b": "bool?", "u": "uint8?", "f": "float32?", "s": "string?", "x": "binary?",
    "d": "date32?", "t": "timestamp[us, tz=UTC]?", "n": "decimal128(9, 2)?", "l": "list<string>?",
    "j": "json?", "g": "uuid?", "c": "time?", "p": "duration?", "m": "map<string, int64>?",
    "r": "struct<a: int64, b: list<string>>?",
}  # fmt: skip
ROW = {
    "b": True, "u": 200, "s": "é", "x": b"\0", "d": datetime(2026, 1, 31).date(),
    "t": datetime(2026, 1, 31, tzinfo=UTC), "n": "12.50", "l": ["a", None], "j": '{"a": 1.50}',
    "g": UUID(int=7), "m": {"k": 1}, "r": {"a": 1, "b": ["x"]},
}  # fmt: skip
SCHEMA = txnkv.Schema({"id": "int64"}, ["id"])
HISTORIES = (None, 0, 5000, "unlimited")
KEPT = ("partition", "offset", "timestamp", "key", "value", "headers")


def tables_of(client: txnkv.Client) -> None:
    columns = {**COLUMNS, "k": txnkv.Column("int32", default=5)}
    parts = [txnkv.hash_partition("id", 2), txnkv.range_partition("id", [(100,)])]
    table = client.create_table("rows/1", txnkv.Schema(columns, ["id"]), parts)
    client.create_table("none", txnkv.Schema({"id": "string"}, ["id"]))
    with client.transaction() as txn:
        for id in range(98, 103):
            txn.insert(table, {"id": id, "f": id / 2, **(ROW if id % 2 else {})})
    table.next_id()
    table.alter(add={"later": txnkv.Column("string", default="was not")}, rename={"k": "kk"})
    table.delete(99)
    client.create_index(table, ["s", "u"])
    client.create_index(table, "f", unique=True)


def topics_of(client: txnkv.Client) -> txnkv.Transaction:
    """Topics with all that makes gaps; returns a transaction that is open."""
    e = client.create_topic("e", partitions=2, retention_bytes=1 << 40, compression="zstd")
    client.create_topic("side", buffer="sidecar")
    typed = client.create_topic("typed", value_schema={"a": "int64", "b": "string?"})
    for n in range(3):
        with client.transaction() as txn:
            txn.send(e, b"small %d" % n, key=b"k", partition=0, headers=[("h", b"v"), ("h", b"")])
    open_one = client.new_transaction(timeout=None)
    open_one.send(e, b"open", partition=0)
    open_one.serialize()
    open_one.flush()
    for n, end in enumerate(["commit", "rollback", "commit"]):
        txn = client.new_transaction()
        txn.send(e, b"large %d" % n, partition=0, timestamp=datetime(2026, 1, n + 1, tzinfo=UTC))
        txn.send(e, b"p" * (3 << 20), key=b"pieces", partition=1)
        txn.send("side", b"large %d" % n)
        txn.serialize()
        txn.flush()
        txn.send(e, None, key=b"tombstone", partition=0)
        txn.flush()
        getattr(txn, end)()
    with client.transaction() as txn:
        txn.send_batch(typed, pa.table({"a": [1, 2], "b": ["x", None], "key": [b"1", None]}))
        txn.send(typed, None, key=b"1")
    e.truncate({0: 1})
    return open_one


def subscriptions_of(client: txnkv.Client) -> None:
    e = client.topic("e")
    with e.subscribe("one", start={0: 2}, redelivery_delay=2.0) as one:
        found = one.receive()
        assert found.offset == 2
    with e.subscribe("many", type="shared", max_deliveries=3, partitions=[1]) as many:
        first, second = many.receive(), many.receive()
        many.ack(second)
        assert first.offset < second.offset
    client.topic("side").subscribe("late", type="failover", start="latest").close()


def everything(client: txnkv.Client) -> dict[str, Any]:
    """What a dump keeps, as a user asks for it."""
    found: dict[str, Any] = {"applications": {}}
    for name in client.tables():
        table = client.table(name)
        schema = [repr(table.schema), [each.default for each in table.schema.columns.values()]]
        rows = table.scan(ordered=True).to_arrow().to_pylist()
        found[f"table {name}"] = schema, str(table.info.partitioning), table.indexes, rows
    for name in client.topics():
        topic = client.topic(name)
        messages = []
        consumer = topic.consumer(order="commit")
        while some := consumer.poll(timeout=0.05):
            messages += [tuple(getattr(message, each) for each in KEPT) for message in some]
        options = topic.options, topic.buffer, topic.partitions, topic.value_schema
        found[f"topic {name}"] = options, topic.end_offsets(), sorted(messages)
        for info in client.instance.topics.subscriptions.of_topic(topic.info):
            positions = client.instance.topics.subscriptions.committed(info)
            kept = info.type, info.changed({}).redelivery_delay, info.max_deliveries
            found[f"subscription {info.name}"] = kept, info.dead_letter, positions
    for app, applied in client.applications().items():
        found["applications"][app] = applied.version, applied.source
    return found


@pytest.fixture
def shop(tmp_path: Path):
    with txnkv.connect(tmp_path / "shop") as client:
        yield client
        disarm()
        assert client.check().problems == []


def restored(folder: Path, name: str = "made") -> txnkv.Client:
    txnkv.restore(folder, folder.with_name(name))
    client = txnkv.connect(folder.with_name(name), create=False)
    assert client.check().problems == []
    return client


def test_everything_comes_back(shop: txnkv.Client, tmp_path: Path) -> None:
    """At its offsets too, though markers and aborted messages have gone."""
    tables_of(shop)
    open_one = topics_of(shop)
    subscriptions_of(shop)
    with shop.transaction() as txn:
        txn.mark_applied("app", 7, "me")
    told: list[tuple[int, int]] = []
    report = txnkv.dump(shop, tmp_path / "d", progress=lambda *step: told.append(step))
    assert (report.tables, report.rows, report.topics) == (2, 4, 4)
    assert told == sorted(told)
    assert told[-1] == (1000, 1000)
    open_one.rollback()  # as it is in what was restored
    wanted = everything(shop)
    with restored(tmp_path / "d") as made:
        found = everything(made)
        for name, value in wanted.items():
            assert found.pop(name) == value, name
        assert not found
        table = made.table("rows/1")
        assert table.get(101)["m"] == [("k", 1)]
        assert table.next_id() > 1000
        assert [row["id"] for row in table.get_by("f", 50.0)] == [100]
        e = made.topic("e")
        with e.subscribe("many", type="shared", max_deliveries=3) as many:
            assert len(many.receive_many(timeout=0.2)) == len(wanted["topic e"][2]) - 1
        with made.transaction() as txn:
            txn.send(e, b"next", partition=0)
            txn.insert(table, {"id": 7})
        assert e.end_offsets()[0] == shop.topic("e").end_offsets()[0] + 1
        whole = e.consumer(isolation="serializable", start={0: 1, 1: 0}).poll(max_messages=99)
        assert whole[-1].value == b"next"
        assert len(whole) == len(wanted["topic e"][2]) + 1
        assert table.get(7)["later"] == "was not"


def test_the_files_are_plain(shop: txnkv.Client, tmp_path: Path) -> None:
    tables_of(shop)
    topics_of(shop).rollback()
    txnkv.dump(tmp_path / "shop", tmp_path / "d")
    content = json.loads((tmp_path / "d" / "dump.json").read_text())
    (of,) = [each for each in content["tables"] if each["name"] == "rows/1"]
    rows = parquet.read_table(tmp_path / "d" / of["file"])
    assert rows.column("id").to_pylist() == [98, 100, 101, 102]
    (of,) = [each for each in content["topics"] if each["name"] == "typed"]
    messages = parquet.read_table(tmp_path / "d" / of["partitions"][0]["file"])
    assert messages.select(["offset", "key", "a", "b"]).to_pylist() == [
        {"offset": 0, "key": b"1", "a": 1, "b": "x"},
        {"offset": 1, "key": None, "a": 2, "b": None},
        {"offset": 2, "key": b"1", "a": None, "b": None},
    ]
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [
        "BACKUP", "dump.json", "tables", "topics"
    ]  # fmt: skip


def test_all_of_it_is_of_one_instant(shop: txnkv.Client, tmp_path: Path) -> None:
    table = shop.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]))
    topic = shop.create_topic("e")

    def add(id: int) -> None:
        with shop.transaction() as txn:
            txn.insert(table, (id,))
            txn.send(topic, b"%d" % id)

    add(0)
    numbers = iter(range(1, 99))
    points = ("backup.status", "backup.logs", "dump.copied")
    for point in points:
        arm(point, lambda: add(next(numbers)))
    txnkv.dump(shop, tmp_path / "d")
    assert table.count() == 1 + len(points)
    with restored(tmp_path / "d") as made:
        assert made.table("t").scan().to_arrow().to_pylist() == [{"id": 0}]
        assert [each.value for each in made.topic("e").consumer().poll()] == [b"0"]


def test_times_before_the_restore_are_gone(shop: txnkv.Client, tmp_path: Path, now: Any) -> None:
    """They read as if nothing had been there, and `Table.restore` deleted every row."""
    tables = [shop.create_table(f"t{kept}", SCHEMA, history=kept) for kept in HISTORIES]
    for table in tables:
        table.insert({"id": 1})
    with shop.snapshot() as snapshot:
        then = snapshot.timestamp
    now.ahead -= 3600  # all of it is of the future of who restores
    txnkv.dump(shop, tmp_path / "d")
    with restored(tmp_path / "d") as made:
        for number in range(len(tables)):
            table = made.table(tables[number].name)
            for each in (then, txnkv.Timestamp(then - 1), then.datetime - timedelta(days=1)):
                with pytest.raises(txnkv.HistoryExpiredError, match="is gone"):
                    table.count(snapshot=each)
                with pytest.raises(txnkv.HistoryExpiredError, match="is gone"):
                    table.restore(each)
            with made.snapshot() as snapshot:
                table.delete(1)
                assert table.count(snapshot=snapshot) == 1
                assert table.restore(snapshot).inserted == 1


def test_many_messages_and_a_batch_of_the_future(shop: txnkv.Client, tmp_path: Path) -> None:
    """Batches and row groups are cut anew; the next commit is later than all that came back."""
    topic = shop.create_topic("e")
    n = 70_000
    with shop.transaction() as txn:
        txn.send_batch(topic, pa.table({"value": pa.array([b"%d" % i for i in range(n)])}))
        txn.send(topic, b"later", timestamp=datetime(2080, 1, 1, tzinfo=UTC))
    internals.flush(shop)
    assert txnkv.dump(shop, tmp_path / "d").messages == n + 1
    with restored(tmp_path / "d") as made:
        topic = made.topic("e")
        consumer = topic.consumer(isolation="serializable")
        assert sum(len(consumer.poll(max_messages=n)) for _ in range(4)) >= n
        with made.transaction() as txn:
            txn.send(topic, b"now")
        with made.snapshot() as snap:
            assert snap.timestamp.datetime.year < 2079
        assert topic.consumer(start={0: n}, order="commit").poll()[-1].value == b"now"


def test_what_is_damaged_or_of_a_later_version_is_refused(
    shop: txnkv.Client, tmp_path: Path
) -> None:
    tables_of(shop)
    txnkv.dump(shop, tmp_path / "d")
    with pytest.raises(ValueError, match="is not empty"):
        txnkv.dump(shop, tmp_path / "d")
    with pytest.raises(ValueError, match="lies in the store"):
        txnkv.dump(shop, tmp_path / "shop" / "d")
    file = next((tmp_path / "d" / "tables").glob("*.parquet"))
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"x")
    with pytest.raises(txnkv.CorruptionError, match=r"tables/\d.parquet is damaged: its checksum"):
        txnkv.restore(tmp_path / "d", tmp_path / "made")
    file.unlink()
    with pytest.raises(txnkv.CorruptionError, match="it is missing"):
        txnkv.restore(tmp_path / "d", tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "shop"]


@pytest.mark.parametrize("point", ["dump.copied", "dump.renamed", "backup.listed"])
def test_a_dump_that_is_killed_is_none(point: str, tmp_path: Path) -> None:
    with txnkv.connect(tmp_path / "shop") as client:
        tables_of(client)
        topics_of(client).rollback()

    def work(say: Callable[[object], object]) -> None:
        txnkv.dump(tmp_path / "shop", tmp_path / "d")
        say("done")

    assert not in_child(work, point, 1)
    assert (tmp_path / "d").exists() == (point == "dump.renamed")
    if not (tmp_path / "d").exists():
        txnkv.dump(tmp_path / "shop", tmp_path / "d")
    with restored(tmp_path / "d") as made, txnkv.connect(tmp_path / "shop") as client:
        assert everything(made) == everything(client)
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_restore_of_a_dump_that_is_killed_leaves_no_store(tmp_path: Path) -> None:
    with txnkv.connect(tmp_path / "shop") as client:
        tables_of(client)
        topics_of(client).rollback()
    txnkv.dump(tmp_path / "shop", tmp_path / "d")

    def work(say: Callable[[object], object]) -> None:
        txnkv.restore(tmp_path / "d", tmp_path / "made")
        say("done")

    for point in ("restore.part", "restore.opened"):
        assert not in_child(work, point, 1)
        assert not (tmp_path / "made").exists()
    with restored(tmp_path / "d") as made, txnkv.connect(tmp_path / "shop") as client:
        assert everything(made) == everything(client)


def test_an_index_that_is_not_built_is_left_out(shop: txnkv.Client, tmp_path: Path) -> None:
    """Nobody knows yet whether the rows fit it."""
    schema = txnkv.Schema({"id": "int64", "a": "string"}, primary_key=["id"])
    table = shop.create_table("t", schema)
    table.upsert({"id": 1, "a": "twice"})
    table.upsert({"id": 2, "a": "twice"})

    def break_off() -> None:
        raise KeyboardInterrupt

    arm("index.added", break_off)
    with pytest.raises(KeyboardInterrupt):
        shop.create_index(table, "a", unique=True)
    disarm()
    txnkv.dump(shop, tmp_path / "d")
    txnkv.restore(tmp_path / "d", tmp_path / "again")
    with txnkv.connect(tmp_path / "again") as again:
        assert again.table("t").indexes == []
        assert again.table("t").count() == 2
    shop.drop_index(table, "a")


@pytest.mark.parametrize("gone", [True, False])
def test_dead_letters_of_other_values(shop: txnkv.Client, tmp_path: Path, gone: bool) -> None:
    """Their topic was dropped, or made again, since the subscription named it: such a dump was
    never to be restored.
    """
    topic = shop.create_topic("q", value_schema={"a": "int64"})
    topic.subscribe("s", type="shared", max_deliveries=2, dead_letter="dead").close()
    shop.drop_topic("dead")
    if not gone:
        shop.create_topic("dead", value_schema={"b": "string"})
    txnkv.dump(shop, tmp_path / "dump")
    txnkv.restore(tmp_path / "dump", tmp_path / "made")
    with txnkv.connect(tmp_path / "made") as made:
        assert made.topics() == (["q"] if gone else ["dead", "q"])
        assert made.topic("q").subscriptions() == ["s"]


@pytest.mark.parametrize("kind", ["decimal128(5, -2)", "list<decimal128(5, -2)>"])
def test_a_type_that_the_files_have_not_is_named(
    shop: txnkv.Client, tmp_path: Path, kind: str
) -> None:
    shop.create_table("t", txnkv.Schema({"id": "int64", "v": kind + "?"}, ["id"]))
    with pytest.raises(txnkv.NotSupportedError, match=r"table 't' has a column .* v .*decimal128"):
        txnkv.dump(shop, tmp_path / "dump")
    assert not (tmp_path / "dump").exists()
