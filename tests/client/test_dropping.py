"""Objects that are dropped without close, wherever the collector happens to run.

A test of many threads stood still once: the collector ran in a thread that held the lock of
the ids and the write lock of status.db, and dropped a transaction whose finalizer wanted the
first. Every process of the store waited with it.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.conftest import until
from txnkv.coordinator import ids
from txnkv.storage.fork import GATE
from txnkv.storage.threads import WhenDropped
from txnkv.transaction import instance


def _transaction(client: txnkv.Client) -> Any:
    return client.new_transaction()


def _session(client: txnkv.Client) -> Any:
    return client.new_transaction().new_session()


def _snapshot(client: txnkv.Client) -> Any:
    return client.snapshot()


def _scan(client: txnkv.Client) -> Any:
    scan = client.table("t").scan()
    next(scan.to_batches(), None)
    return scan


LOCKS = {
    "of the ids": lambda client: internals.coordinator(client).ids._reserving,
    "of the pins": lambda client: internals.runtime(client)._lock,
    "of the gate": lambda client: GATE._joining,
    "of the heartbeats": lambda client: internals.coordinator(client).heartbeats._lock,
    "to write status.db": lambda client: internals.status(client).write(),
}


@pytest.mark.parametrize("make", [_transaction, _session, _snapshot, _scan])
@pytest.mark.parametrize("lock", LOCKS.values(), ids=LOCKS.keys())
def test_dropped_by_a_thread_with_a_lock(
    client: txnkv.Client, table: txnkv.Table, make: Any, lock: Any
) -> None:
    done = threading.Event()

    def drop() -> None:
        dropped = [make(client)]
        gc.collect()
        gc.disable()
        try:
            with lock(client):
                dropped.clear()
                gc.collect()
        finally:
            gc.enable()
        done.set()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    assert done.wait(10), "the finalizer waits for a lock of its own thread"


def test_a_dropped_snapshot_gives_its_pin_back(client: txnkv.Client, until: Any) -> None:
    runtime = internals.runtime(client)
    snapshot = client.snapshot()
    assert runtime.least_pin() == snapshot.timestamp
    del snapshot
    gc.collect()
    until(lambda: runtime.least_pin() is None)


def test_a_closed_snapshot_gives_its_pin_back_at_once(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    runtime = internals.runtime(client)
    with client.snapshot() as snapshot, client.snapshot() as other:
        assert runtime.least_pin() == snapshot.timestamp == other.timestamp
        snapshot.close()
        snapshot.close()
        assert runtime.least_pin() == other.timestamp
        with pytest.raises(txnkv.ClosedError, match="take a new one"):
            snapshot.get(table, 1)
    assert runtime.least_pin() is None


def test_a_dropped_transaction_gives_its_id_back(client: txnkv.Client, until: Any) -> None:
    coordinator = internals.coordinator(client)
    client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    txn = client.new_transaction()
    id = txn.id.local
    del txn
    gc.collect()
    assert id not in coordinator.ids.numbers
    with client.transaction() as other:
        other.insert("t", (1,))
        other.serialize()  # the mark is brought up to date when a transaction is stored
    assert coordinator.low_water_mark() > id


def test_a_forked_child_gives_nothing_back(client: txnkv.Client) -> None:
    """The parent's snapshot stays pinned, though the child drops its copy."""
    snapshot = client.snapshot()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            del snapshot
            gc.collect()
            with client.snapshot():
                pass
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert internals.runtime(client).least_pin() == snapshot.timestamp


def test_work_that_fails_does_not_stop_the_rest(
    until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Owner:
        pass

    done: list[int] = []
    owners = [Owner() for _ in range(3)]
    kept = [
        WhenDropped(owner, fn)
        for owner, fn in zip(
            owners, (lambda: done.append(1), lambda: 1 / 0, lambda: done.append(3)), strict=True
        )
    ]
    assert all(one.alive for one in kept)
    owners.clear()
    gc.collect()
    until(lambda: sorted(done) == [1, 3])
    assert not any(one.alive for one in kept)
    assert "tidying up" in caplog.text
    assert "Traceback" in caplog.text


def test_a_subscription_dropped_behind_its_store_is_one_line(
    tmp_path: Path, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = txnkv.connect(tmp_path / "s")
    subscription = client.create_topic("q").subscribe("w", type="shared")
    assert subscription.receive(timeout=0) is None
    shutil.rmtree(tmp_path / "s")
    del client, subscription
    gc.collect()
    until(lambda: "tidying up" in caplog.text)
    assert "was removed" in caplog.text
    assert "Traceback" not in caplog.text


def test_ids_and_the_status_database_are_locked_in_one_order(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that reserved a range held the lock of the ids and wanted to write; one that stored
    its first row wrote and wanted the lock of the ids.
    """
    monkeypatch.setattr(ids, "RANGE", 2)
    failed: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for n in range(40):
                txn = client.new_transaction()
                txn.serialize()
                if n % 8 == 0:
                    txn.insert(table, (first + n, None))
                    txn.commit()
                else:
                    txn.rollback()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(1000 * n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []
    assert table.count() == 20


# -- clients ---------------------------------------------------------------------------


def _open_one(path: Path) -> Any:
    """The client of a store of three rows, on the disk."""
    client = txnkv.connect(path)
    schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
    table = client.create_table("t", schema, exists_ok=True)
    for key in range(3):
        table.upsert((key,))
    internals.flush(client)
    return client


def _of(path: Path) -> int:
    """The descriptors that a store has."""
    links = (os.path.realpath(f"/dev/fd/{each}") for each in os.listdir("/dev/fd"))
    return sum(str(path) in link for link in links)


def test_stores_whose_clients_are_dropped_are_closed_by_the_next(
    tmp_path: Path, until: Any
) -> None:
    """110 of them took all descriptors that a process may have."""
    for number in range(6):
        _open_one(tmp_path / str(number))
    gc.collect()
    with txnkv.connect(tmp_path / "0") as client:
        assert client.table("t").count() == 3
        until(lambda: not any(_of(tmp_path / str(number)) for number in range(1, 6)))


def test_at_exit_a_store_that_cannot_be_closed_keeps_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, _second = _open_one(tmp_path / "one"), _open_one(tmp_path / "two")
    with monkeypatch.context() as patch:
        patch.setattr(internals.store(first), "close", lambda: 1 / 0)
        instance._close_all()
    assert _of(tmp_path / "two") == 0
    assert f"{tmp_path / 'one'} could not be closed" in caplog.text
    internals.store(first).close()


KEPT: dict[str, tuple[Any, Any]] = {
    "batches": (lambda client: client.table("t").scan().to_batches(), pa.Table.from_batches),
    "a scan": (lambda client: client.table("t").scan(), lambda scan: scan.to_arrow()),
    "a snapshot": (
        lambda client: client.snapshot(),
        lambda snapshot: snapshot.scan("t").to_arrow(),
    ),
    "a transaction": (
        lambda client: client.new_transaction(),
        lambda txn: txn.scan("t").to_arrow(),
    ),
    "a table": (lambda client: client.table("t"), lambda table: table.scan().to_arrow()),
}


@pytest.mark.parametrize(("keep", "read"), KEPT.values(), ids=KEPT.keys())
def test_what_a_dropped_client_gave_keeps_its_store_open(
    tmp_path: Path, keep: Any, read: Any
) -> None:
    kept = keep(_open_one(tmp_path / "one"))
    gc.collect()
    for name in ("two", "three"):
        txnkv.connect(tmp_path / name).close()
    assert read(kept).num_rows == 3


def test_a_log_handler_that_fails_ends_no_thread_of_the_library(
    client: txnkv.Client,
) -> None:
    """What was dropped later was never given back."""

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)
            raise ValueError(record.getMessage())

    seen: list[logging.LogRecord] = []
    handler, log = Failing(), logging.getLogger("txnkv")
    log.addHandler(handler)
    try:
        WhenDropped(Owner(), _fail)
        assert until(lambda: seen)
    finally:
        log.removeHandler(handler)
    done = threading.Event()
    WhenDropped(Owner(), done.set)
    assert done.wait(60)


class Owner:
    """What is dropped at once."""


def _fail() -> None:
    raise KeyError("of a test")


def test_a_close_closes_the_store_whose_other_clients_were_dropped(tmp_path: Path) -> None:
    path = tmp_path / "store"
    reading = txnkv.connect(path).snapshot()  # which keeps its client
    txnkv.connect(path).close()
    assert [each for each in instance.open_instances() if each.store.is_at(path)]
    reading.close()
    del reading
    gc.collect()
    txnkv.connect(path).close()
    assert not [each for each in instance.open_instances() if each.store.is_at(path)]
