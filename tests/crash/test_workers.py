"""Workers that stage under a token and die, and transactions whose process died."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from tests import internals
from tools.children import Children
from tools.crash import leftovers, run_child
from tools.crash_scenarios import BEFORE, ROWS, rows
from txnkv import TxnState

pytestmark = pytest.mark.usefixtures("large")

Connect = Callable[..., txnkv.Client]

DEATHS = [
    "stage.claimed=kill",
    "stage.blocks=kill",
    "stage.blocks=kill@3",
    "stage.written=kill",
    "stage.staged=kill",
    "lmdb.before_commit=kill@2",
    "lmdb.after_commit=kill@3",
    "status.before_commit=kill@1",
    "status.before_commit=kill@2",
    "status.after_commit=kill@2",
]


def blocks_of_nothing(client: txnkv.Client) -> list[str]:
    return [problem for problem in client.check().problems if "belong to nothing" in problem]


@pytest.mark.parametrize("end", ["rollback", "commit"])
@pytest.mark.parametrize("fault", DEATHS)
def test_driver_goes_on_after_the_death_of_a_worker(
    fault: str, end: str, store: Path, connect: Connect
) -> None:
    client = connect()
    txn = client.new_transaction()
    txn.write("right", rows(BEFORE, 10))
    death = run_child("work", store, fault, str(txn.serialize()))
    assert death.killed
    getattr(txn, end)()
    left, right = client.table("left").count(), client.table("right").count()
    assert right == BEFORE + (10 if end == "commit" else 0)
    # One write of a worker stages its rows in all tablets at once, or in none.
    assert left in ((BEFORE, BEFORE + ROWS) if end == "commit" else (BEFORE,))
    assert leftovers(client) == []
    assert client.check().problems == []
    with client.transaction() as after:
        after.write("left", rows(BEFORE + ROWS, 10))
    assert client.table("left").count() == left + 10


@pytest.mark.parametrize("end", ["rollback", "commit"])
def test_rows_of_a_worker_that_died_after_its_answer_count(
    end: str, store: Path, connect: Connect
) -> None:
    client = connect()
    txn = client.new_transaction()
    death = run_child("work", store, "", str(txn.serialize()))
    assert death.acknowledged
    getattr(txn, end)()
    assert client.table("left").count() == BEFORE + (ROWS if end == "commit" else 0)


ABANDON = """
    client = txnkv.connect(args[0], create=False, keepalive_time=float(args[1]))
    txn = client.new_transaction(timeout=None)
    txn.write("left", rows(BEFORE, ROWS))
    say(int(txn.id))
    wait()
"""


@pytest.mark.parametrize("watching", [True, False], ids=["watched", "opened later"])
def test_open_transaction_of_a_dead_process_is_aborted(
    watching: bool, children: Children, store: Path, connect: Connect
) -> None:
    watcher = connect(keepalive_time=3.0) if watching else None
    child = children.start(ABANDON, store, 3.0)
    id = int(child.line())
    child.kill()
    client = watcher or connect(keepalive_time=3.0)
    mine = client.new_transaction(timeout=None)
    mine.write("right", rows(BEFORE, 10))
    deadline = time.monotonic() + 60
    while client.transaction_state(id) is not TxnState.ABORTED:
        assert time.monotonic() < deadline, client.transactions()
        time.sleep(0.02)
    assert mine.state is TxnState.OPEN
    mine.commit()
    assert client.table("left").count() == BEFORE
    assert leftovers(client) == []
    assert client.check().problems == []


def test_open_transaction_of_a_living_process_is_left_alone(
    children: Children, store: Path, connect: Connect
) -> None:
    child = children.start(ABANDON, store, 30)
    id = int(child.line())
    client = connect()
    assert internals.maintenance(client).round(resume_all=True) in (True, False)
    assert client.transaction_state(id) is TxnState.OPEN
    child.kill()
    internals.maintenance(client).round(resume_all=True)
    assert client.transaction_state(id) is TxnState.OPEN, "30 s have not passed"
    client.abort_transaction(id)
    assert leftovers(client) == []


COMMIT_AND_STOP = """
    arm(args[1], stop)
    commit(args[0])
"""


@pytest.mark.parametrize("point", ["commit.started", "commit.decided", "commit.finalized"])
def test_another_process_finishes_the_commit_of_a_dead_one(
    point: str, children: Children, store: Path, connect: Connect
) -> None:
    client = connect()
    child = children.start(COMMIT_AND_STOP, store, point)
    child.until_stopped()
    txn = max(client.transactions(), key=lambda info: info.id)
    child.kill()
    deadline = time.monotonic() + 60
    while client.transaction_state(txn.id) is not TxnState.COMMITTED:
        assert time.monotonic() < deadline, client.transactions()
        internals.maintenance(client).round()
        time.sleep(0.02)
    assert [client.table(name).count() for name in ("left", "right")] == [BEFORE + ROWS] * 2
    assert leftovers(client) == []
    assert blocks_of_nothing(client) == []


@pytest.mark.parametrize("op", ["insert", "insert_ignore"])
def test_write_of_known_keys_tells_of_an_abort_elsewhere(
    op: str, store: Path, connect: Connect
) -> None:
    """Nothing would be staged, so nothing but a look at the state can refuse it."""
    client = connect()
    txn = client.new_transaction()
    txn.write("left", rows(BEFORE, 10))
    client.abort_transaction(txn.id)
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.write("left", rows(0, 10), op)
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.scan("left").to_arrow()
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.get("left", BEFORE)
