"""One part is damaged: it fails by name, and everything else goes on."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa
import pytest
from click.testing import CliRunner

import txnkv
from tests import internals
from tools.children import Children
from txnkv.cli import main
from txnkv.coordinator import status_table
from txnkv.coordinator.maintenance import Maintenance
from txnkv.core import walk
from txnkv.storage import clock
from txnkv.storage.environment import Environment
from txnkv.tables.maintenance import flush
from txnkv.tables.tablets import row_set_format
from txnkv.tables.tablets.row_set_format import KEYS, block_key
from txnkv.topics import Buffer
from txnkv.topics.overview import check_partition
from txnkv.topics.topics import Partition

SCHEMA = txnkv.Schema({"id": "int64", "text": "string"}, primary_key=["id"])


def spoil(folder: Path, db: bytes, key: bytes) -> None:
    """Flip a bit of a value; no process has the store open."""
    env = lmdb.open(str(folder), max_dbs=16)
    with env.begin(write=True, db=env.open_db(db, create=False)) as txn:
        value = bytearray(txn.get(key))
        value[len(value) // 2] ^= 0x10
        txn.put(key, bytes(value))
    env.close()


def spoil_topic(path: Path) -> None:
    """Flip a bit in the state record of the partition of "hurt"."""
    spoil(path / "logs" / "1", b"state", b"log")


def spoil_table(path: Path) -> None:
    """Flip a bit in the first block of keys of the first row set of "hurt table"."""
    spoil(path / "tablets" / "1", b"blocks", block_key(1, KEYS, 0))


def rows(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    return pa.table({"id": ids, "text": [f"text {i}" for i in ids]})


def store_it(txn: txnkv.Transaction) -> None:
    """Stage what was written, so that another process can end the transaction."""
    txn.flush()
    txn.context.ensure_large("commit")


def maintain(client: txnkv.Client) -> None:
    """A round of the leader, which resumes what others have left."""
    assert internals.maintenance(client).round(resume_all=True)


def values(client: txnkv.Client, topic: str) -> list[bytes | None]:
    with client.topic(topic).consumer() as consumer:
        return [message.value for message in consumer.poll(max_messages=100, timeout=0.0)]


def states(client: txnkv.Client) -> dict[int, str]:
    with internals.status(client).read() as cur:
        return dict(cur.execute("SELECT txn_id, state FROM transactions WHERE state != 4"))


def failing(client: txnkv.Client) -> str:
    assert client.metrics()["failing_parts"] > 0
    return "; ".join(internals.coordinator(client).damage.parts())


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background works when the test says so, and blocks are short."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    monkeypatch.setattr(row_set_format, "BLOCK_ROWS", 64)


@pytest.fixture(params=["marker", "sidecar"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two topics and two tables, with something on the disk in each."""
    path = tmp_path / "store"
    buffer: Buffer = request.param
    with txnkv.connect(path) as client:
        for name in ("hurt", "sound"):
            client.create_topic(name, buffer=buffer)
            client.create_table(f"{name} table", SCHEMA)
        with client.transaction() as txn:
            for name in ("hurt", "sound"):
                txn.send(name, b"first", partition=0)
                txn.write(f"{name} table", rows(0, 200))
        internals.flush(client)
        assert client.topic("hurt").info.partitions == (1,)
        assert client.table("hurt table").info.tablets == (1,)
    return path


def leave(path: Path, *, commit: bool) -> None:
    """A transaction over all of it that is decided, and whose process is gone."""
    with txnkv.connect(path) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr("txnkv.tables.write.write_buffer.MAX_ROWS", -1)
        patch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
        txn = client.new_transaction(timeout=None)
        for name in ("hurt", "sound"):
            txn.send(name, b"second", partition=0)
            txn.upsert(f"{name} table", {"id": 7, "text": "new"})
        store_it(txn)
        coordinator, id = internals.coordinator(client), txn.context.row.txn_id
        if commit:
            row = coordinator.orchestrator.start_commit(id)
            with coordinator.store.status.read() as cur:
                parts = status_table.participants(cur, id)
            coordinator.orchestrator.decide(row, parts)
        else:
            coordinator.orchestrator.start_abort(id, "by the test")


# -- a damaged partition ---------------------------------------------------------------


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_end_of_a_transaction_over_a_damaged_partition(
    path: Path, commit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends everywhere else, the store opens, and the topic can be dropped."""
    leave(path, commit=commit)
    spoil_topic(path)
    with txnkv.connect(path) as client:
        with caplog.at_level(logging.WARNING, "txnkv"):
            for _ in range(3):
                maintain(client)
        told = [
            text
            for text in caplog.messages
            if text.startswith("topic 'hurt', partition 0 is left alone")
        ]
        assert told
        assert len(told) == len(set(told)), "each is told once"
        assert "topic 'hurt', partition 0" in failing(client)
        assert len(states(client)) == 1
        assert values(client, "sound") == [b"first", *([b"second"] if commit else [])]
        sound = client.table("sound table")
        assert sound.get(7) == {"id": 7, "text": "new" if commit else "text 7"}
        with client.transaction() as txn:
            txn.write("sound table", rows(1000, 10))
            txn.send("sound", b"third", partition=0)
        with pytest.raises(txnkv.CorruptionError):
            values(client, "hurt")
        client.drop_topic("hurt")
        maintain(client)
        assert states(client) == {} if commit else set(states(client).values()) == {2}
        assert client.metrics()["failing_parts"] == 0
        assert client.check().problems == []


def test_expired_transactions_are_aborted_beside_damage(
    path: Path, until: Callable[..., Any]
) -> None:
    with txnkv.connect(path) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
        kept = []
        for name in ("hurt", "sound"):
            txn = client.new_transaction(timeout=60.0)
            txn.send(name, b"second", partition=0)
            store_it(txn)
            kept.append(txn)
    spoil_topic(path)
    now = clock.monotonic_micros
    with clock.replaced(monotonic=lambda: now() + 61_000_000), txnkv.connect(path) as client:

        def both_have_run_out() -> bool:
            maintain(client)
            # In a side log the abort of another one is noted without its log.
            return sorted(states(client).values()) in ([2, 2], [2, 5])

        until(both_have_run_out)
        assert values(client, "sound") == [b"first"]


# -- a damaged tablet ------------------------------------------------------------------


def test_commit_over_a_damaged_tablet(path: Path) -> None:
    """Its rows are found in all other tablets; the damaged one answers with errors alone."""
    leave(path, commit=True)
    spoil_table(path)
    with txnkv.connect(path) as client:
        maintain(client)
        assert "table 'hurt table', tablet 1" in failing(client)
        assert list(states(client).values()) == [6]
        assert client.table("sound table").get(7) == {"id": 7, "text": "new"}
        assert client.table("sound table").count() == 200
        for _ in range(2):  # later commits find their place, too
            with client.transaction() as txn:
                txn.write("sound table", rows(1000, 10), op="upsert")
        with pytest.raises(txnkv.CorruptionError):
            client.table("hurt table").scan().to_arrow()
        client.drop_table("hurt table")
        maintain(client)
        assert states(client) == {}
        assert client.check().problems == []


def test_disk_that_is_full_behind_the_commit_point(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store opens, so that something can be dropped."""
    leave(path, commit=True)
    with monkeypatch.context() as full:

        def write(self: Environment, fn: object, *args: object, **kwargs: object) -> None:
            raise txnkv.StorageFullError("no room")

        full.setattr(Environment, "write", write)
        with txnkv.connect(path) as client:
            assert list(states(client).values()) == [6]
            assert failing(client)
            client.drop_table("hurt table")
            client.drop_topic("hurt")
            assert client.table("sound table").get(7) == {"id": 7, "text": "new"}
    with txnkv.connect(path) as client:
        maintain(client)
        assert states(client) == {}
        assert values(client, "sound") == [b"first", b"second"]
        assert client.check().problems == []


# -- a flush ---------------------------------------------------------------------------


def small(client: txnkv.Client, n: int, *names: str) -> None:
    """A commit in the log: a row that is there already gets another text, and a message."""
    with client.transaction() as txn:
        for name in names or ("hurt", "sound"):
            txn.upsert(f"{name} table", {"id": n, "text": f"new {n}"})
            txn.send(name, b"small %d" % n, partition=0)


def write(client: txnkv.Client, table: str, data: pa.Table) -> None:
    with client.new_session() as session:
        session.write(table, data, op="upsert")


def produce(client: txnkv.Client, topic: str) -> None:
    with client.topic(topic).producer() as producer:
        producer.send(b"more", partition=0).result(timeout=10)


def held(client: txnkv.Client) -> tuple[int, int]:
    with internals.status(client).read() as cur:
        (parts,) = cur.execute("SELECT count(*) FROM held_parts").fetchone()
        (sections,) = cur.execute("SELECT count(*) FROM held_sections").fetchone()
    return parts, sections


def forget_flushed(client: txnkv.Client) -> None:
    """Make it a minute later: the commit log has only what no flush has taken."""
    with internals.status(client).write() as cur:
        cur.execute("DELETE FROM commit_log WHERE commit_ts <= (SELECT flushed_ts FROM clock)")


READER = """
import sys, txnkv
with txnkv.connect(sys.argv[1], read_only=True) as client:
    print(client.table("hurt table").get(3)["text"], flush=True)
    sys.stdin.read()
    print(client.table("hurt table").get(70)["text"], flush=True)
"""
"""Sees the first commit, and hears of the second when that is flushed."""


def test_flush_beside_damage(path: Path, tmp_path: Path) -> None:
    """All else is flushed, nothing is lost, and what is damaged takes no writes."""
    with txnkv.connect(path) as client:
        small(client, 3)
    lags = subprocess.Popen(
        [sys.executable, "-c", READER, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert lags.stdout is not None
    assert lags.stdout.readline() == "new 3\n"
    with txnkv.connect(path) as client:
        small(client, 70)
    backup = tmp_path / "backup"
    for folder in ("logs", "tablets"):
        shutil.copytree(path / folder, backup / folder)
    spoil_topic(path)
    spoil_table(path)
    with txnkv.connect(path) as client:
        internals.flush(client)
        assert held(client) == (2, 4)
        forget_flushed(client)
        with internals.status(client).read() as cur:
            assert cur.execute("SELECT count(*) FROM commit_log").fetchone() == (0,)
        assert client.table("hurt table").get(3) == {"id": 3, "text": "new 3"}
        assert lags.communicate("go on", timeout=30)[0] == "new 70\n"
        with pytest.raises(txnkv.CorruptionError):
            client.table("hurt table").scan().to_arrow()
        for refused in (
            lambda: small(client, 5),
            lambda: write(client, "hurt table", rows(5000, 10)),
            lambda: write(client, "hurt table", rows(5000, 20_000)),
            lambda: produce(client, "hurt"),
        ):
            with pytest.raises(txnkv.CorruptionError, match=r"hurt.* is damaged: .* drop it"):
                refused()
        small(client, 71, "sound")
        write(client, "sound table", pa.table({"id": [70], "text": ["new 70"]}))
        internals.flush(client)
        assert held(client) == (2, 4)
    with txnkv.connect(path) as client:  # another process knows it all
        assert client.table("hurt table").get(70) == {"id": 70, "text": "new 70"}
        with pytest.raises(txnkv.CorruptionError, match="is damaged"):
            small(client, 5)
    for folder in ("logs/1", "tablets/1"):
        shutil.rmtree(path / folder)
        shutil.copytree(backup / folder, path / folder)
    with txnkv.connect(path) as client:
        internals.flush(client)
        assert held(client) == (0, 0)
        small(client, 71, "hurt")
        for name in ("hurt", "sound"):
            table = client.table(f"{name} table")
            assert [table.get(n)["text"] for n in (3, 70, 71)] == ["new 3", "new 70", "new 71"]  # type: ignore[index]
            assert table.scan().to_arrow().num_rows == 200
            assert values(client, name) == [b"first", b"small 3", b"small 70", b"small 71"]
        assert client.check().problems == []


@pytest.fixture
def hurt(path: Path) -> Path:
    """A store with a small commit in its log, and then a damaged topic and table."""
    with txnkv.connect(path) as client:
        small(client, 3)
    spoil_topic(path)
    spoil_table(path)
    return path


@pytest.mark.parametrize(
    "point", ["flush.claimed", "flush.written", "flush.deleted", "flush.published"]
)
def test_killed_while_it_flushes_beside_damage(hurt: Path, children: Children, point: str) -> None:
    program = "txnkv.connect(args[0], create=False).instance.engine.flush()"
    children.start(program, hurt, fault=f"{point}=kill").finish(-9)
    with txnkv.connect(hurt) as client:
        internals.flush(client)
        assert held(client) == (2, 2)
        forget_flushed(client)
    with txnkv.connect(hurt) as client:
        assert client.table("sound table").get(3) == {"id": 3, "text": "new 3"}
        assert values(client, "sound") == [b"first", b"small 3"]
        assert held(client) == (2, 2)


def test_what_is_held_goes_with_a_drop(hurt: Path) -> None:
    with txnkv.connect(hurt) as client:
        internals.flush(client)
        assert held(client) == (2, 2)
        client.drop_topic("hurt")
        client.drop_table("hurt table")
        internals.flush(client)
        assert held(client) == (0, 0)
        assert client.check().problems == []
    with txnkv.connect(hurt) as client:
        assert values(client, "sound") == [b"first", b"small 3"]


def test_staged_rows_of_a_damaged_tablet_do_not_commit(path: Path) -> None:
    with txnkv.connect(path) as client, pytest.MonkeyPatch.context() as patch:
        small(client, 3)
        patch.setattr("txnkv.tables.write.write_buffer.MAX_ROWS", -1)
        txn = client.new_transaction()
        txn.upsert("hurt table", {"id": 70, "text": "staged"})
        txn.upsert("sound table", {"id": 70, "text": "staged"})
        store_it(txn)
        patch.setattr(flush, "_kill", _damaged)
        internals.flush(client)
        assert held(client)[0] == 2
        with pytest.raises(txnkv.CorruptionError):
            txn.commit()
        assert txn.state is txnkv.TxnState.ABORTED
        assert client.table("sound table").get(70) == {"id": 70, "text": "text 70"}


def _damaged(load: object) -> None:
    raise txnkv.CorruptionError("a block is damaged")


# -- check -----------------------------------------------------------------------------


def mixed(client: txnkv.Client, buffer: Buffer) -> Partition:
    """A log of one partition with everything that a log can have."""
    client.create_topic("mixed", buffer=buffer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
        for ends in (True, False, True):
            txn = client.new_transaction()
            txn.send("mixed", b"large", partition=0)
            store_it(txn)
            txn.commit() if ends else txn.rollback()
    for n in range(2):
        with client.transaction() as txn:
            txn.send("mixed", b"small %d" % n, partition=0)
    internals.flush(client)
    topics = internals.topics(client)
    return topics.partitions(topics.get("mixed"))[0]


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_check_finds_each_byte_that_changed(buffer: Buffer, tmp_path: Path) -> None:
    """In the log, its state and its indexes: a problem is named, and no other error comes."""
    with txnkv.connect(tmp_path / "store") as client:
        partition = mixed(client, buffer)
        environment = partition.environment

        def problems() -> list[str]:
            return list(check_partition(internals.topics(client), partition.id))

        assert problems() == []
        count = 0
        for name in (b"log", b"state", b"commits", b"aborted"):
            db = environment.db(name)
            with environment.read() as txn, txn.cursor(db=db) as cursor:
                stored = [(bytes(key), bytes(value)) for key, value in cursor]
            assert stored or (name, buffer) == (b"aborted", "sidecar")
            for key, value in stored:
                batches = walk(value) if name == b"log" else []
                # Where no commit timestamp stands nobody looks for one: an end marker has it.
                unread = {at + i for at, h in batches if not h.commit_ts for i in range(8, 16)}
                for at in set(range(len(value))) - unread:
                    spoiled = value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :]
                    environment.write(lambda txn, db=db, key=key, v=spoiled: txn.put(key, v, db=db))  # type: ignore[misc]
                    assert problems(), (name, key, at)
                    count += 1
                environment.write(lambda txn, db=db, key=key, v=value: txn.put(key, v, db=db))  # type: ignore[misc]
        assert problems() == []
        assert count > 400


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_check_compares_the_index_of_commits(buffer: Buffer, tmp_path: Path) -> None:
    with txnkv.connect(tmp_path / "store") as client:
        environment = mixed(client, buffer).environment

        def lose_first(txn: lmdb.Transaction) -> None:
            with txn.cursor(db=environment.db(b"commits")) as cursor:
                assert cursor.first()
                assert cursor.delete()

        environment.write(lose_first)
        (problem,) = client.check().problems
        assert "topic 'mixed', partition 0: the index of commits lacks" in problem


def test_check_names_what_is_held(hurt: Path) -> None:
    with txnkv.connect(hurt) as client:
        internals.flush(client)
        found = "\n".join(client.check().problems)
        for part in ("topic 'hurt', partition 0", "table 'hurt table', tablet 1"):
            assert f"{part} is damaged: " in found


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["check"], "topic 'hurt', partition 0: log: the record of its state is damaged"),
        (["topics"], "hurt/0 is damaged: log: the record of its state is damaged"),
        (["topics", "hurt"], "hurt/0 is damaged: log: the record of its state is damaged"),
        (["stats"], "sound table"),
        (["tables"], "sound table"),
        (["txn", "list"], ""),
    ],
    ids=" ".join,
)
def test_commands_beside_damage(path: Path, command: list[str], said: str) -> None:
    """They say what is damaged, and everything of the rest."""
    with txnkv.connect(path) as client, client.topic("hurt").subscribe("reader"):
        pass
    leave(path, commit=True)
    spoil_topic(path)
    spoil_table(path)
    name = command[0] if command[0] != "txn" else command[1]
    words = [*command[: command.index(name) + 1], str(path), *command[command.index(name) + 1 :]]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == (1 if name == "check" else 0), result.output
    assert said in result.output


@pytest.mark.parametrize("left", ["garbage", "nothing"])
def test_environment_that_cannot_be_opened(path: Path, left: str) -> None:
    """The same where whole files are spoilt: all else goes on, and they can be dropped."""
    with txnkv.connect(path) as client:
        small(client, 3)
    leave(path, commit=True)
    for folder in ("logs/1", "tablets/1"):
        with open(path / folder / "data.mdb", "r+b") as file:
            file.write(b"\x5a" * 8192)
            if left == "nothing":
                file.truncate(0)
    with txnkv.connect(path) as client:
        maintain(client)
        internals.flush(client)
        assert client.table("sound table").get(7) == {"id": 7, "text": "new"}
        assert values(client, "sound")[:2] == [b"first", b"small 3"]
        with pytest.raises(txnkv.CorruptionError):
            client.table("hurt table").scan().to_arrow()
        assert len(client.check().problems) >= 2
        client.drop_topic("hurt")
        client.drop_table("hurt table")
        maintain(client)
        assert states(client) == {}
        assert client.check().problems == []


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_transaction_that_only_a_log_knows(buffer: Buffer, tmp_path: Path) -> None:
    """It is found, and can be ended by hand."""
    with txnkv.connect(tmp_path / "store") as client:
        client.create_topic("t", buffer=buffer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
            lost = client.new_transaction()
            lost.send("t", b"lost", partition=0)
            store_it(lost)
        with client.transaction() as txn:
            txn.send("t", b"behind", partition=0)
        internals.flush(client)
        assert client.check().problems == []
        id = lost.context.row.txn_id
        with internals.status(client).write() as cur:
            cur.execute("DELETE FROM transactions WHERE txn_id = ?", (id,))
        (problem,) = client.check().problems
        assert f"transaction {id} is open in its log" in problem
        assert values(client, "t") == ([] if buffer == "marker" else [b"behind"])
        client.abort_transaction(id)
        assert values(client, "t") == [b"behind"]
        assert client.check().problems == []
        with pytest.raises(txnkv.TxnNotFoundError):
            client.abort_transaction(id)


def test_next_offset_that_went_back(tmp_path: Path) -> None:
    with txnkv.connect(tmp_path / "store") as client:
        client.create_topic("t")
        with client.transaction() as txn:
            txn.send("t", b"one", partition=0)
        with internals.status(client).write() as cur:
            cur.execute("UPDATE partitions SET next_offset = 0")
        assert "topic 't', partition 0: a small commit has offset 0" in client.check().problems[0]


def test_held_tablet_is_not_compacted(path: Path) -> None:
    """Its rows would look younger than what replaces them, which waits in memory."""
    with txnkv.connect(path) as client:
        write(client, "hurt table", rows(100, 20_000))
        small(client, 150, "hurt")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flush, "_kill", _damaged)
            internals.flush(client)
            write(client, "sound table", rows(100, 20_000))
            with pytest.raises(txnkv.CorruptionError, match="tablet 1 is damaged"):
                client.compact()
        internals.flush(client)
        assert held(client) == (0, 0)
        client.compact()
        table = client.table("hurt table")
        assert table.get(150) == {"id": 150, "text": "new 150"}
        assert table.scan().to_arrow().num_rows == table.count() == 20_100
        assert client.check().problems == []
