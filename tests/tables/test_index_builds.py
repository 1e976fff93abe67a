"""Indexes built beside those who write, in every way."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.tables.people import SCHEMA, batch, ids
from txnkv.client import indexes
from txnkv.storage import right_of_way

ROWS = 300
WRITER = """
import random
import pyarrow as pa

def value(turn, id):
    return f"{id}.{turn.randrange(4)}"  # of this row alone, and some of them again

def write(client, table, turn):
    some = sorted(turn.sample(range(300), 20))
    id, kind = some[turn.randrange(20)], turn.randrange(7)
    row = {"id": id, "mail": value(turn, id), "n": turn.randrange(3)}
    new = pa.table({
        "id": pa.array(some, pa.int64()), "mail": [value(turn, i) for i in some],
        "n": pa.array([turn.randrange(3) for _ in some], pa.int32()),
    })
    if kind == 0:
        table.upsert(row)
    elif kind == 1:
        client.run(lambda txn: txn.delete_ignore(table, id))
    elif kind == 2:
        client.run(lambda txn: txn.insert_ignore(table, row))
    elif kind == 3:
        client.run(lambda txn: txn.write(table, new, "upsert"))
    elif kind == 4:
        client.run(lambda txn: txn.write(table, new.select(["id"]), "delete_ignore"))
    elif kind == 5:
        with client.transaction() as txn:  # it waits for nobody
            txn.upsert(table, row)
            txn.delete_ignore(table, some[0])
    else:
        with client.transaction() as txn:
            txn.serialize()
            txn.write(table, new, "update_ignore")
            txn.delete_ignore(table, id)
"""
CHILD = """
import threading
import txnkv
exec(writer)
turn, over = random.Random(seed), threading.Event()
table = client.table("people")
threading.Thread(target=lambda: (wait(), over.set()), daemon=True).start()
while not over.is_set():
    try:
        write(client, table, turn)
    except txnkv.TxnkvError as error:
        if not error.retriable:
            raise
say("done")
"""


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_built_beside_writers_of_every_kind(
    client: txnkv.Client, process: Callable[..., Any], seed: int, unique: bool
) -> None:
    """Threads and another process insert, update and delete, row by row and many at a time."""
    table = client.create_table("people", SCHEMA, txnkv.hash_partition("id", 2))
    with client.transaction() as txn:
        txn.write(table, batch(range(ROWS), [f"{id}.0" for id in range(ROWS)]))
    space: dict[str, Any] = {}
    exec(WRITER, space)
    over, failed = threading.Event(), list[BaseException]()

    def work(turn: random.Random) -> None:
        while not over.is_set():
            try:
                space["write"](client, table, turn)
            except txnkv.TxnkvError as error:
                if not error.retriable:
                    failed.append(error)

    other = process(CHILD, writer=WRITER, seed=seed)
    threads = [threading.Thread(target=work, args=(random.Random(seed + n),)) for n in (10, 20)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            client.create_index(table, "mail", unique)
            client.create_index(table, ["n", "id"])
            with client.snapshot() as now:
                compare(table, now)
            assert client.check().problems == []
            client.drop_index(table, "mail")
            client.drop_index(table, ["n", "id"])
        client.create_index(table, "mail", unique)
        client.create_index(table, ["n", "id"])
    finally:
        over.set()
        for thread in threads:
            thread.join()
        other.tell()
        assert other.hear() == "done"
    assert failed == []
    with client.snapshot() as now:
        compare(table, now)
    assert client.check().problems == []


def compare(table: txnkv.Table, now: txnkv.Snapshot) -> None:
    """Each row is found by each index once, and nothing else is."""
    rows = list(now.scan(table))
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert now.get_by(table, "mail", row["mail"]) == [row]
    for n in range(3):
        found = now.scan(table, where=[("n", "=", n)])
        assert ids(found) == sorted(row["id"] for row in rows if row["n"] == n)


def test_a_steady_writer_does_not_keep_a_build(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever others need not wait, one of the rows is changed before their entries are there."""
    monkeypatch.setattr(right_of_way, "LEASE", 60_000_000)
    table = client.create_table("people", SCHEMA)
    with client.transaction() as txn:
        txn.write(table, batch(range(2000), [f"m{id}" for id in range(2000)]))
    write_lacking, left, tries = indexes._Build._write_lacking, list(range(2000)), [0]

    def then(*args: Any) -> Any:
        found = write_lacking(*args)
        tries[0] += 1
        if not internals.runtime(client).way_until:
            table.upsert({"id": left.pop(0), "mail": f"new{tries}", "n": 0})
        return found

    monkeypatch.setattr(indexes._Build, "_write_lacking", then)
    client.create_index(table, "mail", unique=True)
    assert tries[0] == right_of_way.CONFLICTS + 1
    assert not internals.runtime(client).way_until
    assert client.check().problems == []


def test_a_lock_is_waited_for(
    client: txnkv.Client, people: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else waits with it."""
    write_lacking, held, seen = indexes._Build._write_lacking, list[Any](), list[int]()

    def then(build: Any, context: Any, *args: Any) -> Any:
        context.lock_timeout = 0.0
        found = write_lacking(build, context, *args)
        if not held:
            held.append(client.new_transaction(locking="partition"))
            held[0].upsert(people, {"id": 99, "mail": "new", "n": 0})
            held[0].flush()
        return found

    def pause(*_: Any) -> float:
        seen.append(internals.runtime(client).way_until)
        if len(seen) == 3:
            held[0].commit()
        return 0.0

    monkeypatch.setattr(indexes._Build, "_write_lacking", then)
    monkeypatch.setattr(indexes, "back_off", pause)
    client.create_index(people, "mail")
    assert seen == [0, 0, 0]
    assert ids(people.get_by("mail", "new")) == [99]


def test_dropped_in_the_midst(client: txnkv.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    table = client.create_table("people", SCHEMA)
    with client.transaction() as txn:
        txn.write(table, batch(range(40)))
    write_lacking = indexes._Build._write_lacking

    def then(*args: Any) -> Any:
        found = write_lacking(*args)
        client.drop_index(table, "mail")
        return found

    monkeypatch.setattr(indexes._Build, "_write_lacking", then)
    with pytest.raises(txnkv.SchemaError, match="was dropped while it was built"):
        client.create_index(table, "mail")
    assert table.indexes == []
