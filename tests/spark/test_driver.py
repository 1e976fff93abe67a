"""A driver that dies loses its transactions, and what they staged; keepers see to that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from tools import processes
from txnkv import TxnState
from txnkv.spark import java, keepalive
from txnkv.spark.settings import StorePlace

from .conftest import KEEP_QUIET

pytestmark = pytest.mark.spark

Until = Callable[..., Any]

DRIVER = """
import txnkv.spark
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.python.worker.reuse", keep_planner)
for key, value in quiet:
    builder = builder.config(key, value)
spark = builder.getOrCreate()
client.create_table("u", client.table("t").schema)

# One job under the driver's own transaction, that ended; its rows are staged.
txn = client.new_transaction(timeout=None)
ended = spark.range(100).selectExpr("id", "'v' AS v")
ended.write.format("txnkv").options(**txnkv.spark.options(txn, "t")).mode("append").save()
say()

# And one in a transaction of its own: one task ends, the other never does.
hang = "if(id = 99, java_method('java.lang.Thread', 'sleep', 600000L), 'v') AS v"
running = spark.range(0, 100, numPartitions=2).selectExpr("id", hang)
options = {"path": client.path, "table": "u", "keepaliveTime": "5"}
running.write.format("txnkv").options(**options).mode("append").save()
"""


@pytest.mark.slow
@pytest.mark.parametrize("keep_planner", ["true", "false"])
def test_a_driver_that_is_killed_loses_its_transactions(
    client: txnkv.Client,
    where: dict[str, str],
    process: Callable[..., Any],
    by_hand: Callable[[txnkv.Client], None],
    until: Until,
    keep_planner: str,
) -> None:
    """The driver is killed while a job runs. Its transactions, one joined by a job and one of
    a job's own, are aborted by whoever leads, here the test, and their space comes back. So it
    is when the planner heartbeats for the job, and when it ended at once and a keeper does.
    """
    driver = process(
        DRIVER, options={"keepalive_time": 5.0}, quiet=KEEP_QUIET, keep_planner=keep_planner
    )
    driver.hear()
    before = client.stats()["staged_row_sets"]
    assert before > 0
    until(lambda: client.stats()["staged_row_sets"] > before, 300)
    assert [info.state for info in client.transactions()] == [TxnState.OPEN, TxnState.OPEN]

    driver.kill()

    def over() -> bool:
        internals.maintenance(client).round(resume_all=True)
        return {info.state for info in client.transactions()} == {TxnState.ABORTED}

    until(over, 300)
    assert client.stats()["staged_row_sets"] == 0
    assert client.table("t").count() == client.table("u").count() == 0
    assert client.check().ok


# -- keepers ---------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, to be watched."""
    popen = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield popen
    popen.kill()
    popen.communicate()


def named(pid: int) -> list[Any]:
    found = java.find(pid)
    assert found is not None
    return [found.pid, found.started]


def run_keeper(order: dict[str, Any]) -> subprocess.Popen[str]:
    popen = subprocess.Popen(
        [sys.executable, "-m", "txnkv.spark.keepalive"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert popen.stdin is not None
    popen.stdin.write(json.dumps(order))
    popen.stdin.close()
    return popen


def joined(connect: Callable[..., txnkv.Client]) -> tuple[txnkv.Client, txnkv.Transaction]:
    """An open transaction with staged rows that this process does not keep alive."""
    client = connect(keepalive_time=30.0)  # a keeper takes a while to start
    client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    txn = client.new_transaction(timeout=None, keepalive=False)
    txn.insert("t", {"id": 1})
    txn.flush()
    return client, txn


def beats(client: txnkv.Client, txn: txnkv.Transaction) -> int:
    """The last heartbeat."""
    slot = txn.context.row.heartbeat_slot
    assert slot is not None
    id, at = internals.runtime(client).heartbeat_read(slot)
    assert id == txn.id.local
    return at


@pytest.fixture
def kept(
    connect: Callable[..., txnkv.Client], by_hand: Any, sleeper: subprocess.Popen[bytes]
) -> Iterator[tuple[txnkv.Client, txnkv.Transaction, subprocess.Popen[str]]]:
    """A transaction and its keeper, which watches `sleeper`."""
    client, txn = joined(connect)
    token = str(txn.serialize(keepalive=True))
    popen = run_keeper(
        {"place": {"path": client.path}, "token": token, "watch": named(sleeper.pid)}
    )
    assert popen.stdout is not None
    assert popen.stdout.readline() == "beating\n"
    yield client, txn, popen
    popen.kill()
    popen.wait()
    popen.stdout.close()


def test_a_keeper_beats_until_the_transaction_ends(kept: Any, until: Until) -> None:
    client, txn, popen = kept
    first = beats(client, txn)
    until(lambda: beats(client, txn) > first, 300)
    txn.commit()
    assert popen.wait(300) == 0
    assert client.table("t").count() == 1


def test_a_keeper_aborts_when_what_it_watches_ends(
    kept: Any, sleeper: subprocess.Popen[bytes]
) -> None:
    client, txn, popen = kept
    sleeper.kill()
    sleeper.wait()
    assert popen.wait(300) == 0
    assert txn.state is TxnState.ABORTED
    assert client.stats()["staged_row_sets"] == 0
    with pytest.raises(txnkv.TransactionTimedOutError, match="its Spark ended"):
        txn.commit()


@pytest.mark.usefixtures("large")
def test_a_keeper_does_not_abort_what_is_committing(
    client: txnkv.Client, table: txnkv.Table, sleeper: subprocess.Popen[bytes]
) -> None:
    """The committer outlives the JVM: it has begun when the keeper finds the JVM gone."""
    txn = client.new_transaction()
    txn.insert(table, {"id": 1})
    txn.flush()
    watch = named(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    internals.coordinator(client).orchestrator.start_commit(txn.id.local)
    keepalive._abort(client, txn)
    assert txn.state is TxnState.COMMIT_IN_PROGRESS
    keepalive.keep(client, txn, (watch[0], watch[1]))
    txn.commit()
    assert table.count() == 1


def test_a_keeper_that_cannot_join_says_why(client: txnkv.Client) -> None:
    popen = run_keeper({"place": {"path": client.path}, "token": "forged", "watch": None})
    assert popen.stdout is not None
    with popen.stdout:
        assert popen.stdout.read().startswith("InvalidTokenError: ")
    assert popen.wait(300) == 1


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("reuse", [False, True])
def test_the_planner_hands_its_transaction_over(
    connect: Callable[..., txnkv.Client],
    by_hand: Any,
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
    reuse: bool,
) -> None:
    monkeypatch.setattr(keepalive, "PATIENCE", 0.0)
    monkeypatch.setitem(os.environ, "SPARK_REUSE_WORKER", "1" if reuse else "")
    client = connect(keepalive_time=5.0)
    client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    txn = client.new_transaction(timeout=None)
    txn.insert("t", {"id": 1})
    txn.flush()

    keepalive.hand_over(txn, StorePlace(path=client.path))
    until(lambda: txn._heart is None)  # this process has stopped its own heartbeats
    first = beats(client, txn)
    until(lambda: beats(client, txn) > first, 300)
    txn.rollback()
    until(lambda: not keepalive.at_work())


def test_a_short_job_needs_no_keeper(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a keeper was started")

    monkeypatch.setattr(keepalive, "_start", refuse)
    monkeypatch.setitem(os.environ, "SPARK_REUSE_WORKER", "1")
    txn = client.new_transaction()
    txn.serialize()
    keepalive.hand_over(txn, StorePlace(path=client.path))
    assert keepalive.at_work()
    txn.commit()
    until(lambda: not keepalive.at_work())


INIT, JVM = java.Process(1, 0, "systemd", "a"), java.Process(7, 1, "java", "b")
DAEMON, USERS = java.Process(8, 7, "python", "c"), java.Process(5, 1, "systemd", "a")


@pytest.fixture
def parents(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this process other ancestors, the parent first."""
    real = java.find

    def give(*above: java.Process) -> None:
        there = {each.pid: each for each in above}
        monkeypatch.setattr(os, "getppid", lambda: above[0].pid)
        monkeypatch.setattr(java, "find", lambda pid: there.get(pid) or real(pid))

    monkeypatch.setattr(java, "_first_seen", {})
    return give


@pytest.mark.parametrize(
    ("above", "found"),
    [
        ([DAEMON, JVM, INIT], JVM),
        ([replace(DAEMON, parent=1), replace(JVM, pid=1, parent=0)], replace(JVM, pid=1, parent=0)),
        ([INIT], None),  # the daemon was killed
        ([USERS, INIT], None),  # the same, and a process of the user's takes orphans in
    ],
)
def test_a_keeper_watches_no_init(
    parents: Callable[..., None], above: list[java.Process], found: java.Process | None
) -> None:
    mine = java.find(os.getpid())
    parents(*above)
    assert keepalive._watched() == (found or mine)


def test_a_keeper_watches_the_jvm_though_the_daemon_was_killed(
    client: txnkv.Client,
    parents: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
) -> None:
    monkeypatch.setitem(os.environ, "SPARK_REUSE_WORKER", "1")
    parents(DAEMON, JVM, INIT)
    txn = client.new_transaction()
    keepalive.hand_over(txn, StorePlace(path=client.path))
    parents(INIT)
    assert keepalive._watched() == JVM
    txn.rollback()
    until(lambda: not keepalive.at_work())


def test_a_list_of_columns_is_not_asked_of_ps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of BSDs takes all behind the first = for a title."""
    script = tmp_path / "ps"
    script.write_text(f"""#!/bin/sh
case "$*" in *=,*) exit 1;; esac
exec {shutil.which("ps")} "$@"
""")
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = java._from_ps(os.getpid())
    assert found is not None
    assert found.parent == os.getppid()
    assert os.getpid() in processes.processes()


def test_processes_are_told_apart(sleeper: subprocess.Popen[bytes]) -> None:
    mine = java.find(os.getpid())
    assert mine is not None
    assert mine.parent == os.getppid()
    child = java.find(sleeper.pid)
    assert child is not None
    assert child.parent == os.getpid()
    assert child.name.startswith("python")
    assert java.find(sleeper.pid) == child
    assert java._from_ps(os.getpid()) is not None
    sleeper.kill()
    sleeper.wait()
    assert java.find(sleeper.pid) is None


def test_history_is_raised_where_the_store_is_open(client: txnkv.Client) -> None:
    """Spark's processes are used again: what reads a stream of changes may have read a table."""
    place = StorePlace(path=client.path)
    with place.connect() as first, replace(place, history=7200.0).connect() as second:
        assert first.instance is second.instance
        assert second.instance.coordinator.history == 7200
        with replace(place, history=60.0).connect():
            assert second.instance.coordinator.history == 7200
