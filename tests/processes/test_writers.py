"""Several processes that write at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import txnkv
from tools.children import Children
from tools.crash import leftovers
from tools.crash_scenarios import BEFORE

Connect = Callable[..., txnkv.Client]

BULK = """
cut_small()
client = txnkv.connect(args[0], create=False)
say("ready")
while (first := wait()):
    txn = client.new_transaction(locking=args[1])
    try:
        for name in TABLES:
            txn.write(name, rows(int(first), 300))
        say("staged")
        wait()
        txn.commit()
        say("committed")
    except txnkv.TxnkvError as error:
        txn.rollback()
        say(type(error).__name__)
"""


def race(children: Children, store: Path, firsts: list[int], rounds: int) -> list[list[str]]:
    """Two processes stage bulks, and commit at the same moment; again with other keys."""
    both = [children.start(BULK, store, "optimistic") for _ in firsts]
    for child in both:
        assert child.line() == "ready"
    outcomes = []
    for number in range(rounds):
        for child, first in zip(both, firsts, strict=True):
            child.tell(str(first + number * 1000))
        assert [child.line() for child in both] == ["staged", "staged"]
        for child in both:
            child.tell()
        outcomes.append([child.line() for child in both])
    for child in both:
        child.finish()
    return outcomes


def test_of_two_overlapping_bulks_the_first_to_commit_wins(
    children: Children, store: Path, connect: Connect
) -> None:
    outcomes = race(children, store, [1000, 1150], rounds=6)
    for outcome in outcomes:
        assert sorted(outcome) == ["TransactionConflictError", "committed"]
    client = connect()
    expected: set[int] = set(range(BEFORE))
    for number, outcome in enumerate(outcomes):
        first = [1000, 1150][outcome.index("committed")] + number * 1000
        expected |= set(range(first, first + 300))
    for name in ("left", "right"):
        ids = client.table(name).scan(columns=["id"]).to_arrow()["id"].to_pylist()
        assert Counter(ids) == Counter(expected)
    assert leftovers(client) == []
    assert client.check().problems == []


def test_disjoint_bulks_both_commit(children: Children, store: Path, connect: Connect) -> None:
    outcomes = race(children, store, [1000, 1500], rounds=4)
    assert outcomes == [["committed", "committed"]] * 4
    client = connect()
    for name in ("left", "right"):
        assert client.table(name).count() == BEFORE + 2 * 4 * 300
    assert leftovers(client) == []
    assert client.check().problems == []


def test_partition_lock_is_met_in_another_process(
    children: Children, store: Path, connect: Connect
) -> None:
    child = children.start(BULK, store, "partition")
    assert child.line() == "ready"
    child.tell("1000")
    assert child.line() == "staged"
    client = connect()
    with pytest.raises(txnkv.TransactionLockedError):
        client.new_transaction(locking="partition").write("left", _one(5000))
    with pytest.raises(txnkv.TransactionLockedError):
        client.new_session("auto_sync").insert("left", {"id": 5001, "text": None})
    child.tell()
    assert child.line() == "committed"
    child.finish()
    with client.transaction(locking="partition") as txn:
        txn.write("left", _one(5000))
    assert client.table("left").count() == BEFORE + 301
    assert leftovers(client) == []


def test_lock_of_a_dead_process_goes_with_its_transaction(
    children: Children, store: Path, connect: Connect
) -> None:
    child = children.start(BULK, store, "partition")
    child.line()
    child.tell("1000")
    assert child.line() == "staged"
    child.kill()
    client = connect()
    with pytest.raises(txnkv.TransactionLockedError):
        client.new_transaction(locking="partition").write("left", _one(5000))
    (dead,) = [info for info in client.transactions() if info.state is txnkv.TxnState.OPEN]
    client.abort_transaction(dead.id)
    with client.transaction(locking="partition") as txn:
        txn.write("left", _one(5000))
    assert leftovers(client) == []


INSERTER = """
client = txnkv.connect(args[0], create=False)
number = int(args[1])
say("ready")
wait()
for turn in range(12):
    first = 10_000 * (number + 1) + 100 * turn
    kind = (number + turn) % 3
    if kind == 0:
        with client.transaction() as txn:
            for name in TABLES:
                for i in range(20):
                    txn.insert(name, {"id": first + i, "text": args[1]})
    elif kind == 1:
        def load(txn):
            for name in TABLES:
                txn.write(name, rows(first, 20))
        client.run(load)
    else:
        session = client.new_session()
        for name in TABLES:
            for i in range(20):
                session.insert(name, (first + i, args[1]))
        session.flush()
say("done")
"""


def test_rows_of_many_processes_are_all_there_once(
    children: Children, store: Path, connect: Connect
) -> None:
    processes = [children.start(INSERTER, store, number) for number in range(6)]
    for process in processes:
        assert process.line() == "ready"
    for process in processes:
        process.tell()
    client = connect()
    for process in processes:
        assert process.finish()[-1] == "done"
    expected = Counter(range(BEFORE)) + Counter(
        10_000 * (number + 1) + 100 * turn + i
        for number in range(6)
        for turn in range(12)
        for i in range(20)
    )
    for name in ("left", "right"):
        table = client.table(name).scan(columns=["id"]).to_arrow()
        assert Counter(table["id"].to_pylist()) == expected
    assert leftovers(client) == []
    assert client.check().problems == []


CONTENDER = """
client = txnkv.connect(args[0], create=False)
say("ready")
wait()
mine = 0
for id in range(1000, 1040):
    try:
        with client.transaction() as txn:
            txn.insert("left", {"id": id, "text": args[1]})
        mine += 1
    except (txnkv.RowErrors, txnkv.TransactionConflictError):
        pass
say(mine)
"""


def test_one_process_gets_each_contended_key(
    children: Children, store: Path, connect: Connect
) -> None:
    processes = [children.start(CONTENDER, store, number) for number in range(3)]
    for process in processes:
        process.line()
    for process in processes:
        process.tell()
    won = {str(number): int(child.finish()[-1]) for number, child in enumerate(processes)}
    client = connect()
    found = client.table("left").scan(where=[("id", ">=", 1000)]).to_arrow()
    assert sorted(found["id"].to_pylist()) == list(range(1000, 1040))
    counted = Counter(found["text"].to_pylist())
    assert {key: counted[key] for key in won} == won
    assert client.check().problems == []


CREATOR = """
say("ready")
wait()
client = txnkv.connect(args[0])
schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
table = client.create_table("shared", schema, exists_ok=True)
with client.transaction() as txn:
    txn.insert(table, {"id": int(args[1])})
say("done")
"""


def test_processes_that_make_one_store_at_once(children: Children, tmp_path: Path) -> None:
    path = tmp_path / "new"
    processes = [children.start(CREATOR, path, number) for number in range(5)]
    for process in processes:
        process.line()
    for process in processes:
        process.tell()
    for process in processes:
        assert process.finish()[-1] == "done"
    with txnkv.connect(path, create=False) as client:
        found = client.table("shared").scan().to_arrow()["id"].to_pylist()
        assert sorted(found) == list(range(5))
        assert client.check().problems == []


def _one(id: int) -> pa.Table:
    return pa.table({"id": pa.array([id], pa.int64()), "text": ["x"]})
