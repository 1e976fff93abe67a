"""Transactions that outgrow memory: rows that come later wait there again while they are few, as
long as nobody else may read them.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.storage.faults import arm, disarm
from txnkv.tables.write import write_buffer
from txnkv.transaction.job import Job

SCHEMA = txnkv.Schema({"id": "int64", "u": "int64", "v": "string?"}, primary_key=["id"])
LIMIT = 40


@pytest.fixture
def table(client: txnkv.Client, monkeypatch: pytest.MonkeyPatch) -> txnkv.Table:
    monkeypatch.setattr(write_buffer, "MAX_ROWS", LIMIT)
    return client.create_table("t", SCHEMA, txnkv.hash_partition("id", 2))


def row(id: int, v: str | None = "v") -> dict[str, Any]:
    return {"id": id, "u": id, "v": v}


def large(client: txnkv.Client) -> txnkv.Transaction:
    txn = client.new_transaction()
    for id in range(LIMIT + 1):
        txn.insert("t", row(id))
    txn.flush()
    assert txn.context.stored
    return txn


def staged(client: txnkv.Client) -> int:
    with client.instance.store.status.read() as cur:
        ((count,),) = cur.execute("SELECT count(*) FROM row_sets")
    return int(count)


def test_rows_that_are_read_and_written_one_by_one(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """They are staged once there are many, not one by one."""
    txn = large(client)
    before = staged(client)
    for id in range(LIMIT + 1):
        found = txn.get(table, id)
        assert found == row(id)
        txn.upsert(table, {**found, "v": f"new {id}"})
        assert txn.get(table, id) == row(id, f"new {id}")
        if id < LIMIT - 1:
            assert staged(client) == before
    assert staged(client) == before + 2  # a row set for each tablet
    txn.commit()
    assert [each["v"] for each in table.scan(ordered=True)] == [f"new {id}" for id in range(41)]


def test_each_operation_sees_what_is_staged(client: txnkv.Client, table: txnkv.Table) -> None:
    table.insert(row(100))
    txn = large(client)
    for op, given in [
        ("insert", row(3)),
        ("insert", row(100)),
        ("update", row(77)),
        ("delete", 77),
    ]:
        getattr(txn, op)(table, given)
        with pytest.raises(txnkv.RowErrors):
            txn.flush()
    for op, given in [("insert_ignore", row(3, "no")), ("update", {"id": 4, "v": None})]:
        getattr(txn, op)(table, given)
    txn.delete(table, 5)
    txn.delete(table, 100)
    txn.insert(table, row(5, "again"))
    result = txn.flush()
    assert (result.inserted, result.updated, result.deleted, result.ignored) == (1, 1, 2, 1)
    found = txn.get_many(table, [3, 4, 5, 100]).to_pylist()
    assert found[:3] == [row(3), row(4, None), row(5, "again")]
    assert txn.get(table, 100) is None
    assert len(txn.scan(table, where=[("id", "<", 9)]).to_arrow()) == 9
    txn.commit()
    assert table.get(5) == row(5, "again")
    assert table.count() == LIMIT + 1


@pytest.mark.parametrize("how", ["token", "job", "tokens of a scan"])
def test_what_others_read_is_staged(
    client: txnkv.Client, table: txnkv.Table, connect: Callable[..., txnkv.Client], how: str
) -> None:
    txn = large(client)
    txn.upsert(table, row(1, "new"))
    txn.flush()
    if how == "tokens of a scan":
        tokens = txn.scan(table, where=[("id", "=", 1)]).tokens()
        found = [each for token in tokens for each in token.open(connect())]
        assert found == [row(1, "new")]
    elif how == "job":
        Job.start(txn).abort()
    token = txn.serialize()
    joined = txnkv.Transaction.deserialize(connect(), token)
    assert joined.get("t", 1) == row(1, "new")
    txn.upsert(table, row(2, "later"))
    txn.flush()
    assert joined.get("t", 2) == row(2, "later")
    joined.upsert("t", row(3, "theirs"))
    joined.flush()
    assert txn.get(table, 3) == row(3, "theirs")
    joined.close()
    txn.commit()
    assert [table.get(id)["v"] for id in (1, 2, 3)] == ["new", "later", "theirs"]


def test_one_that_was_aborted_elsewhere_commits_nothing(
    client: txnkv.Client, table: txnkv.Table, connect: Callable[..., txnkv.Client]
) -> None:
    txn = large(client)
    connect().abort_transaction(txn.id)
    txn.upsert(table, row(1, "new"))
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.commit()
    assert table.count() == 0


@pytest.mark.parametrize("end", ["commit", "outgrow"])
@pytest.mark.parametrize("point", ["stage.claimed", "stage.written", "stage.staged"])
def test_a_death_while_what_waited_is_staged(
    client: txnkv.Client, table: txnkv.Table, process: Callable[..., Any], point: str, end: str
) -> None:
    table.insert(row(500))
    code = """
        from txnkv.storage.faults import arm
        from txnkv.tables.write import write_buffer
        write_buffer.MAX_ROWS = limit
        txn = client.new_transaction()
        for id in range(limit + 1):
            txn.insert("t", {"id": id, "u": id, "v": "staged"})
        txn.flush()
        arm(point, "kill")
        for id in range(1000, 1000 + (limit - 1 if end == "commit" else limit + 1)):
            txn.insert("t", {"id": id, "u": id, "v": "waits"})
            txn.flush()
        txn.commit()
    """
    process(code, point=point, end=end, limit=LIMIT).finish(-9)
    assert list(table.scan()) == [row(500)]
    table.insert(row(1000))
    internals.compact(client)
    assert client.check().problems == []
    assert [each["id"] for each in table.scan(ordered=True)] == [500, 1000]


def test_messages_beside_rows(client: txnkv.Client, table: txnkv.Table) -> None:
    """What is sent goes to the log at once, in its order; the rows wait on."""
    topic = client.create_topic("e")
    txn = large(client)
    before = staged(client)
    for id in range(9):
        txn.upsert(table, row(id, "new"))
        txn.send(topic, b"%d" % id)
        assert txn.get(table, id) == row(id, "new")
    assert staged(client) == before
    txn.commit()
    with topic.consumer(isolation="read_committed") as consumer:
        assert [each.value for each in consumer.poll(timeout=0)] == [b"%d" % id for id in range(9)]
    assert table.count(where=[("v", "=", "new")]) == 9


def test_a_scan_that_is_read_twice(client: txnkv.Client, table: txnkv.Table) -> None:
    """What is staged, or waits, since the first time is left out."""
    txn = large(client)
    scan = txn.scan(table, where=[("id", "<", 9)], ordered=True)
    wanted = list(scan)
    for id in range(3):
        txn.upsert(table, row(id, "new"))
    txn.delete(table, 3)
    txn.write(table, pa.table({"id": [4], "u": [4], "v": ["new"]}), op="upsert")
    assert list(scan) == wanted
    txn.serialize()
    assert list(scan) == wanted
    assert scan.to_arrow().to_pylist() == wanted
    txn.rollback()


def test_a_table_that_is_dropped_aborts(client: txnkv.Client, table: txnkv.Table) -> None:
    other = client.create_table("x", SCHEMA)
    txn = large(client)
    txn.insert(other, row(1))
    txn.flush()
    client.drop_table("x")
    with pytest.raises(txnkv.TableNotFoundError, match="dropped"):
        txn.commit()
    assert txn.state is txnkv.TxnState.ABORTED
    assert table.count() == 0


def test_a_batch_that_failed_is_not_seen(client: txnkv.Client, table: txnkv.Table) -> None:
    """Nor where it could not be taken back at once."""
    txn = large(client)
    some = range(1000, 1000 + LIMIT + 1)
    data = pa.table({"id": some, "u": some, "v": ["dead"] * len(some)})
    syncs: list[int] = []

    def fail_to_sync() -> None:
        syncs.append(1)
        if len(syncs) > 1:  # the first is that of the claim
            raise OSError(errno.EIO, "no")

    def be_full() -> None:
        if len(syncs) > 1:
            raise txnkv.StorageFullError("full")

    arm("status.unsynced", fail_to_sync)
    arm("status.before_commit", be_full)
    with pytest.raises(txnkv.UnavailableError):
        txn.write(table, data)
    disarm()
    txn.insert_ignore(table, row(1000, "mine"))
    assert txn.flush().inserted == 1
    txn.commit()
    assert table.count() == LIMIT + 2
    assert table.get(1000) == row(1000, "mine")


@pytest.mark.parametrize("seed", range(3))
def test_two_threads(client: txnkv.Client, table: txnkv.Table, seed: int) -> None:
    """One writes single rows, the other batches, each its own keys: all of them are committed."""
    txn, failed = large(client), list[BaseException]()

    def singly() -> None:
        chance = random.Random(seed)
        session = txn.new_session()
        for n in range(150):
            id = 100 + chance.randrange(20)
            session.upsert(table, row(id, f"{n}"))
            session.flush()
            assert txn.get(table, id) == row(id, f"{n}")

    def batches() -> None:
        for n in range(8):
            some = range(1000, 1000 + 2 * LIMIT)
            data = {"id": some, "u": some, "v": [f"{n}"] * len(some)}
            txn.write(table, pa.table(data), op="upsert")

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in (singly, batches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    txn.commit()
    assert table.count(where=[("id", ">=", 1000), ("v", "=", "7")]) == 2 * LIMIT
    assert client.check().problems == []


@pytest.mark.parametrize("index", [None, "u", "v"], ids=["plain", "unique index", "index"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
)
def test_all_operations(
    client: txnkv.Client, table: txnkv.Table, connect: Any, seed: int, index: str | None
) -> None:
    """Of large transactions one after the other, some handed on in between: as a dict."""
    chance, committed = random.Random(seed), dict[int, dict[str, Any]]()
    if index is not None:
        client.create_index(table, index, unique=index == "u")
    for _ in range(4):
        txn, rows, joined = client.new_transaction(), dict(committed), None
        for _ in range(150):
            who = joined if joined is not None and chance.random() < 0.5 else txn
            id = chance.randrange(70)
            match chance.randrange(10):
                case 0 | 1 | 2:
                    assert who.get("t", id) == rows.get(id)
                    rows[id] = row(id, f"{chance.random()}")
                    who.upsert("t", rows[id])
                case 3:
                    who.delete_ignore("t", id)
                    rows.pop(id, None)
                case 4:
                    who.insert_ignore("t", row(id, "new"))
                    rows.setdefault(id, row(id, "new"))
                case 5 if id in rows:
                    who.update("t", {"id": id, "v": "other"})
                    rows[id] = {**rows[id], "v": "other"}
                case 6:
                    some = chance.sample(range(70), chance.choice([3, 20, 60]))
                    data = {"id": some, "u": some, "v": ["many"] * len(some)}
                    who.write("t", pa.table(data), op="upsert")
                    rows |= {id: row(id, "many") for id in some}
                case 7:
                    assert who.scan("t", ordered=True).to_arrow().to_pylist() == [
                        rows[id] for id in sorted(rows)
                    ]
                case 8 if index is not None:
                    by = chance.choice([id, 0]) if index == "u" else "many"
                    wanted = [rows[id] for id in sorted(rows) if rows[id][index] == by]
                    assert sorted(who.get_by("t", index, by), key=itemgetter("id")) == wanted
                    found = who.scan("t", where=[(index, "=", by)], ordered=True)
                    assert list(found) == wanted
                case 9 if joined is None and chance.random() < 0.1:
                    joined = txnkv.Transaction.deserialize(connect(), txn.serialize())
            who.flush()
        if joined is not None:
            joined.close()
        if chance.random() < 0.7:
            txn.commit()
            committed = rows
        else:
            txn.rollback()
        assert [*table.scan(ordered=True)] == [committed[id] for id in sorted(committed)]
