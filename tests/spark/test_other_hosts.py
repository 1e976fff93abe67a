"""Spark by the address of a server: each row once, or nothing, whoever dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import txnkv
import txnkv.spark
from tests.remote.conftest import Serving, Wire
from tools.processes import send, tree
from tools.spark_cluster import blind, spark_cluster
from txnkv.client import Planning, inode_of
from txnkv.server import Server, Users, add_user
from txnkv.spark import settings, worker_client
from txnkv.spark.settings import Settings

from .changes_tools import Query
from .conftest import KEEP_QUIET, SCHEMA

pytest.importorskip("pyspark.sql.streaming.datasource")
pytestmark = pytest.mark.spark


@pytest.fixture
def served(store_path: Path, where: dict[str, str]) -> Iterator[str]:
    """The address of a server of the test's store, which has table t."""
    server = Server(str(store_path), "grpc://127.0.0.1:0")
    yield f"grpc://127.0.0.1:{server.port}"
    server.close()


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    yield
    while worker_client._clients:
        worker_client._clients.popitem()[1][1].close()


def test_a_job_in_a_transaction(
    spark: Any,
    served: str,
    rows: Callable[..., Any],
    ids: Callable[..., list[int]],
    nothing_is_left: Callable[[], None],
) -> None:
    far = {"path": served, "direct": "false"}
    with txnkv.connect(served) as there, there.transaction(timeout=None) as txn:
        options = txnkv.spark.options(txn, table="t") | far
        rows(1, 100).write.format("txnkv").options(**options).mode("append").save()
        seen = spark.read.format("txnkv").options(**options).load()
        assert (seen.count(), ids()) == (100, [])
    assert ids() == list(range(1, 101))
    nothing_is_left()


@pytest.mark.slow
def test_topics_and_streams(
    spark: Any,
    client: txnkv.Client,
    served: str,
    tmp_path: Path,
    rows: Callable[..., Any],
    ids: Callable[..., list[int]],
    nothing_is_left: Callable[[], None],
) -> None:
    client.create_topic("e", partitions=2)
    client.create_table("u", txnkv.Schema({"offset": "int64"}, primary_key=["offset"]))
    far = {"path": served, "direct": "false"}
    with txnkv.connect(served) as there, there.transaction(timeout=None) as txn:
        frame = rows(1, 100).selectExpr("v AS value")
        options = txnkv.spark.options(txn, topic="e") | far
        frame.write.format("txnkv").options(**options).mode("append").save()
    rows(101, 150).write.format("txnkv").options(**far, table="t").mode("append").save()
    assert ids() == list(range(101, 151))
    read = spark.read.format("txnkv").options(**far)
    assert read.option("topic", "e").load().count() == 100
    stream = spark.readStream.format("txnkv").options(**far, topic="e").load()
    query = (
        stream.selectExpr("offset * 2 + partition AS offset")
        .writeStream.format("txnkv")
        .options(**far, table="u", operation="upsert", checkpointLocation=str(tmp_path / "c"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert client.table("u").count() == 100
    nothing_is_left()


@pytest.mark.parametrize("planned", [False, True])
def test_changes_that_nothing_is_left_of(
    client: txnkv.Client, store_path: Path, planned: bool
) -> None:
    """A server that kept the history was started again: a stream tells so, and misses none."""
    table = client.create_table("brief", SCHEMA, history=0.0)
    table.insert((1, "a"))
    server = Server(str(store_path), "grpc://127.0.0.1:0")
    address = f"grpc://127.0.0.1:{server.port}"
    query = Query({"path": address, "direct": "false", "table": "brief", "changes": "true"})
    assert query.trigger()
    if planned:
        table.insert((2, "b"))
    tasks = query.plan()
    assert bool(tasks) == planned
    server.close()
    table.delete(1)
    client.compact()
    server = Server(str(store_path), address)
    with pytest.raises(txnkv.HistoryExpiredError, match="changes of table 'brief' are gone"):
        query.read(tasks) if tasks else query.plan()
    query.stop()
    server.close()


def test_addresses_of_a_token(client: txnkv.Client, served: str) -> None:
    with txnkv.connect(served) as there, there.transaction() as txn:
        token = txn.serialize()
        assert token.addresses == (served,)
        assert txnkv.spark.options(txn, table="t")["path"] == served
        with txnkv.Transaction.deserialize(client, token) as joined:
            assert joined.id == txn.id
            assert joined.serialize().addresses == ()
            joined.insert("t", (1, "a"))
    assert client.table("t").count() == 1


def test_who_can_open_the_folder_does(
    client: txnkv.Client, served: str, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path(**more: Any) -> str:
        return worker_client.client_of(Settings(path=served, table="t", **more)).path

    assert path() == client.path
    assert path(direct=False) == served
    with worker_client.client_of(Settings(path=served, table="t")).transaction() as txn:
        assert txnkv.spark.options(txn, table="t")["path"] == served
        assert txn.serialize().addresses == (served,)
    monkeypatch.setattr(settings, "boot_id", lambda: "another machine")
    assert path(history=None, keepalive_time=7.0) == served
    monkeypatch.undo()
    shutil.copytree(store_path, store_path.with_name("another"))
    format_file = store_path.with_name("another") / "FORMAT"
    told = json.loads(format_file.read_text())
    format_file.write_text(json.dumps(told | {"store_id": "0" * 32}))
    monkeypatch.setattr(txnkv.Client, "path", str(format_file.parent))
    assert path(keepalive_time=8.0) == served
    monkeypatch.undo()
    # A copy of the store lies where the server says, as in another container.
    copy = store_path.with_name("copy")
    shutil.copytree(store_path, copy)
    elsewhere = Planning.of(client)
    elsewhere.folder = str(copy)
    assert settings._folder_here(elsewhere) is None
    elsewhere.inode = inode_of(str(copy))
    assert settings._folder_here(elsewhere) == str(copy)


def test_credentials(
    client: txnkv.Client,
    store_path: Path,
    where: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    users = tmp_path / "users.toml"
    token = add_user(users, "ann", "write", ["t"], [])
    server = Server(str(store_path), "grpc://127.0.0.1:0", Users(users))
    try:
        place = {"path": f"grpc://127.0.0.1:{server.port}", "table": "t", "direct": "false"}
        with pytest.raises(txnkv.AuthenticationError):
            worker_client.client_of(Settings.of_read(place))
        for given in (token, json.dumps({"token": token})):
            found = Settings.of_read(place | {"credentials": given})
            assert token not in repr(found)
            assert worker_client.schema_of(found).names == ["id", "v"]
        monkeypatch.setenv("TXNKV_CREDENTIALS", token)
        assert worker_client.schema_of(Settings.of_write(place)).names == ["id", "v"]
        with pytest.raises(ValueError, match="option credentials: a token, or JSON"):
            Settings.of_read(place | {"credentials": "{token}"})
    finally:
        server.close()


# -- a cluster that does not see the store ---------------------------------------------

ROWS = 1600
PATIENCE = 900.0
"""Seconds for what takes some twenty on cores that nothing else is at work on."""

LATENCY = 0.001
"""Between the cluster and the server, either way."""

DRIVER = """
import json, os, sys, time
from pathlib import Path
import txnkv, txnkv.spark
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

master, address, folder, rows, conf = sys.argv[1:]
folder, rows = Path(folder), int(rows)
builder = SparkSession.builder.master(master)
for key, value in json.loads(conf).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()

@udf("string")
def slowly(id):
    if id % 100 == 0:
        (folder / "begun").touch()
        time.sleep(0.5)
    return f"v{id}"

frame = spark.range(rows, numPartitions=8)
frame = frame.select("id", slowly("id").alias("v"))
client = txnkv.connect(address)

def batch():
    with client.transaction(timeout=None) as txn:
        for what, names in (({"table": "t"}, ["id", "v"]), ({"topic": "e"}, ["v AS value"])):
            options = txnkv.spark.options(txn, **what)
            frame.selectExpr(*names).write.format("txnkv").options(**options).mode("append").save()

try:
    if not (folder / "streaming").exists():  # else an earlier driver did it
        batch()
        print("committed", flush=True)
except Exception as error:
    print("failed", type(error).__name__, str(error)[-1500:], flush=True)

place = dict(path=address, checkpointLocation=str(folder / "checkpoint"), table="u")
for attempt in range(8):
    log = spark.readStream.format("txnkv").options(
        path=address, topic="e", maxOffsetsPerTrigger=400
    ).load()
    out = log.selectExpr("offset * 4 + partition AS id", "CAST(value AS STRING) AS v")
    stream = out.writeStream.format("txnkv").options(**place).trigger(availableNow=True).start()
    (folder / "streaming").touch()
    try:
        stream.awaitTermination()
        print("streamed", flush=True)
        break
    except Exception as error:
        print("again", str(error)[-300:].replace(chr(10), " "), flush=True)
        time.sleep(1)
spark.stop()
"""


def kill_an_executor(folder: Path, serving: Serving, until: Any) -> None:
    """Kill one when the first job is at work."""
    until((folder / "begun").exists, PATIENCE)
    found = [each for each in tree(os.getpid()) if "CoarseGrainedExecutor" in each.command]
    send(signal.SIGKILL, tree(found[0].pid))


def kill_the_driver(folder: Path, serving: Serving, until: Any) -> None:
    """Kill it when the first job is at work; another one begins anew."""
    until((folder / "begun").exists, PATIENCE)


def kill_the_driver_at_a_stream(folder: Path, serving: Serving, until: Any) -> None:
    """Kill it in the midst of the stream; another one goes on from the checkpoint."""
    until((folder / "streaming").exists, PATIENCE)
    until(lambda: any((folder / "checkpoint" / "offsets").glob("[0-9]*")), PATIENCE)


DRIVERS_THAT_DIE = (kill_the_driver, kill_the_driver_at_a_stream)


def restart_the_server(folder: Path, serving: Serving, until: Any) -> None:
    """Kill it in the midst of the first job, and start it again."""
    until((folder / "begun").exists, PATIENCE)
    serving.kill()
    serving.start()


def restart_it_at_a_stream(folder: Path, serving: Serving, until: Any) -> None:
    """Kill it in the midst of the stream, and start it again."""
    until((folder / "streaming").exists, PATIENCE)
    serving.kill()
    serving.start()


@contextmanager
def driver(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver, which is gone at the end with all that it started."""
    with (folder / "driver.log").open("a") as log:
        popen = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        )
    try:
        yield popen
    finally:
        send(signal.SIGKILL, tree(popen.pid))
        popen.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fail",
    [
        kill_an_executor, kill_the_driver, kill_the_driver_at_a_stream, restart_the_server,
        restart_it_at_a_stream,
    ],
)  # fmt: skip
def test_a_cluster_that_does_not_see_the_store(
    client: txnkv.Client,
    where: dict[str, str],
    store_path: Path,
    tmp_path: Path,
    until: Any,
    nothing_is_left: Callable[[], None],
    fail: Callable[..., None],
) -> None:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("hides the store's folder by a mount namespace, which takes root and unshare")
    client.create_topic("e", partitions=2)
    client.create_table("u", client.table("t").schema)
    folder = tmp_path / "work"
    folder.mkdir()
    serving = Serving(store_path)
    serving.start()
    conf = dict(KEEP_QUIET) | {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.speculation": "true",
        "spark.speculation.multiplier": "1.5",
        "spark.speculation.quantile": "0.25",
        "spark.task.maxFailures": "8",
    }
    wire = Wire(serving.port, LATENCY)
    said = ""
    with spark_cluster(folder, hidden=store_path) as master:
        arguments = [master, wire.address, str(folder), str(ROWS), json.dumps(conf)]
        command = blind(store_path, [sys.executable, "-c", DRIVER, *arguments])
        try:
            with driver(command, folder) as popen:
                fail(folder, serving, until)
                if fail in DRIVERS_THAT_DIE:
                    send(signal.SIGKILL, tree(popen.pid))
                said, _ = popen.communicate(timeout=PATIENCE)
            if fail in DRIVERS_THAT_DIE:
                with driver(command, folder) as popen:
                    said += popen.communicate(timeout=PATIENCE)[0]
        finally:
            serving.kill()
            wire.close()
    there = client.table("t").count()
    assert said.startswith(("committed", "failed")), said + (folder / "driver.log").read_text()
    assert there == (ROWS if said.startswith("committed") else 0), said
    if fail is not restart_the_server:
        assert there == ROWS, said
    sent = client.topic("e").consumer().poll_batch(max_messages=10 * ROWS, timeout=0)
    assert sorted(sent["value"].to_pylist()) == sorted(b"v%d" % n for n in range(there))
    assert "streamed" in said, said
    streamed = client.table("u").scan(["v"]).to_arrow()["v"].to_pylist()
    assert sorted(streamed) == sorted(f"v{n}" for n in range(there))
    until(lambda: all(info.state.ended for info in client.transactions()))
    nothing_is_left()
