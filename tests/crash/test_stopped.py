"""Processes that are stopped while they hold a lock: what the others' background work does.

The story: a process is stopped inside of a flush, with the maintenance lock. The leader finds the
row sets that it claimed, and waits for that lock to remove them; from then on no abandoned
transaction is aborted, and close() waits for the leader's thread. Nothing that runs by itself may
wait for a lock that a stopped process may hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import txnkv
from tests import internals
from tools.children import Children
from tools.crash_scenarios import rows
from txnkv import TxnState
from txnkv.coordinator import damage
from txnkv.coordinator.ids import TxnId
from txnkv.storage import write_queue
from txnkv.storage.write_queue import BusyError, WriteQueue, not_waiting
from txnkv.tables.maintenance import compaction

LONG = 60.0
SCHEMA = txnkv.Schema({"id": "int64", "text": "string?"}, primary_key=["id"])

BEGIN = """
def stop_once():
    txnkv.storage.disarm()
    stop()
client = txnkv.connect(args[0], create=False, keepalive_time=3600)
"""
FLUSH = """
with client.transaction() as txn:
    txn.insert("hurt", {"id": 1000, "text": "new"})
arm(args[1], stop_once)
client.instance.engine.flush()
say("done")
"""
COMPACT = """
arm(args[1], stop_once)
client.compact()
say("done")
"""
STAGE = """
stage_all()
txn = client.new_transaction(timeout=None)
arm(args[1], stop_once)
txn.write("hurt", rows(1000, 1))
txn.commit()
say("done")
"""
APPEND = """
from txnkv.topics import outbox
outbox.MAX_BYTES = -1
txn = client.new_transaction(timeout=None)
arm(args[1], stop_once)
txn.send("hurt topic", b"new", partition=0)
txn.commit()
say("done")
"""
DROP = """
stage_all()
txn = client.new_transaction(timeout=None)
txn.write("hurt", rows(1000, 1))
arm(args[1], stop_once)
client.drop_table("hurt")
say("done")
"""
DEAD = """
stage_all()
client = txnkv.connect(args[0], create=False, keepalive_time=3600)
ids = []
for name in ("hurt", "sound"):
    txn = client.new_transaction(timeout=None)
    txn.send(f"{name} topic", b"dead", partition=0)
    if args[1] == "all" or name == "sound":
        txn.write(name, rows(5000, 1))
    txn.serialize()
    ids.append(int(txn.id))
say(*ids)
wait()
"""


class Place(NamedTuple):
    """A place where a process is stopped, and what others can do by themselves meanwhile."""

    code: str
    point: str
    flushes: bool = True
    compacts: bool = True


PLACES = [
    Place(FLUSH, "flush.claimed", flushes=False, compacts=False),
    Place(FLUSH, "lmdb.before_commit", flushes=False, compacts=False),
    Place(FLUSH, "flush.deleted", flushes=False, compacts=False),
    Place(COMPACT, "compact.blocks", compacts=False),
    Place(COMPACT, "compact.caught_up", flushes=False, compacts=False),
    Place(STAGE, "lmdb.before_commit"),
    Place(APPEND, "append.written"),
    Place(DROP, "abort.started"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two tables that have something to be compacted, and two topics."""
    path = tmp_path / "store"
    with txnkv.connect(path) as client:
        for name, row_sets in (("hurt", 2), ("sound", compaction.DEPTH - 1)):
            client.create_table(name, SCHEMA)
            client.create_topic(f"{name} topic")
            for _ in range(row_sets):
                with client.transaction() as txn:
                    txn.write(name, rows(0, 40), op="upsert")
                internals.flush(client)
    return path


@pytest.mark.parametrize("place", PLACES, ids=lambda each: each.point)
def test_background_work_goes_on_beside_a_stopped_process(
    place: Place,
    path: Path,
    children: Children,
    until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(write_queue, "PATIENCE", 0.1)
    monkeypatch.setattr("txnkv.coordinator.maintenance._TRY_AGAIN", 100_000)
    with txnkv.connect(path) as client:
        maintenance = internals.maintenance(client)
        assert maintenance.round(), "it leads"
        maintenance.set_pace(0.02)
        dead = children.start(DEAD, path, "sound" if place.code == DROP else "all")
        stuck, sound = map(int, dead.line().split())
        stopped = children.start(BEGIN + place.code, path, place.point)
        stopped.until_stopped()
        dead.kill()
        with internals.status(client).write() as cur:  # it was silent for as long
            ids = (TxnId(stuck).local, TxnId(sound).local)
            cur.execute("UPDATE transactions SET keepalive = 1 WHERE txn_id IN (?, ?)", ids)
        until(lambda: client.transaction_state(sound) is TxnState.ABORTED, seconds=LONG)
        until(lambda: client.transaction_state(stuck) is not TxnState.OPEN, seconds=LONG)
        with client.transaction() as txn:
            txn.write("sound", rows(0, 40, "new"), op="upsert")
        if place.flushes:
            _soon(internals.tables(client).flush)
        if place.flushes and place.compacts:
            until(lambda: _compacted(client), seconds=LONG)
        come_and_gone = children.start(BEGIN + "client.close(); say('gone')", path)
        assert come_and_gone.finish() == ["gone"]
        _soon(txnkv.connect(path).close)
        stopped.go_on()
        assert stopped.finish()[-1:] == ["done"]
        until(lambda: client.transaction_state(stuck) is TxnState.ABORTED, seconds=LONG)
        assert client.table("sound").get(7) == {"id": 7, "text": "new 7"}
        if place.code != DROP:
            expected = 40 if place.code in (COMPACT, APPEND) else 41
            assert client.table("hurt").count() == expected
    with txnkv.connect(path) as client:
        assert client.check().problems == []


def test_close_beside_a_stopped_flush(
    path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's threads come back from the lock by themselves."""
    monkeypatch.setattr(write_queue, "PATIENCE", 0.1)
    client = txnkv.connect(path)
    assert internals.maintenance(client).round()
    stopped = children.start(BEGIN + FLUSH, path, "flush.claimed")
    stopped.until_stopped()
    _soon(internals.maintenance(client).round)
    assert internals.coordinator(client).damage.parts() == {}, "it may be at work"
    monkeypatch.setattr(damage, "BUSY_SECONDS", 0.0)
    _soon(internals.maintenance(client).round)
    assert "tables" in internals.coordinator(client).damage.parts()
    _soon(client.close)
    stopped.go_on()
    assert stopped.finish() == ["done"]


def test_a_queue_that_is_stuck_is_only_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece of work has waited; those behind it do not, until it was had again."""
    mine, other = WriteQueue(tmp_path / "lock"), WriteQueue(tmp_path / "lock")
    other.acquire()
    monkeypatch.setattr(write_queue, "PATIENCE", 0.05)
    with not_waiting(), pytest.raises(BusyError, match="stopped"):
        mine.acquire()
    monkeypatch.setattr(write_queue, "PATIENCE", 3600.0)
    with not_waiting(), pytest.raises(BusyError):
        mine.acquire()  # at once
    other.release()
    with not_waiting():
        mine.acquire()
    mine.release()
    with not_waiting():
        end = mine.until()
    assert end is not None
    assert end - write_queue.time.monotonic() > 3000
    mine.close()
    other.close()


def _compacted(client: txnkv.Client) -> bool:
    engine = internals.tables(client)
    engine.compactor.wake()
    (tablet_id,) = client.table("sound").info.tablets
    with internals.status(client).read() as cur:
        ((left,),) = cur.execute(
            "SELECT count(*) FROM row_sets WHERE tablet_id = ? AND state = 2", (tablet_id,)
        )
    return bool(left == 1)


def _soon(do: Callable[[], object]) -> None:
    """Do it, and fail when it does not return."""
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive(), f"{do} does not return"
