"""Streaming queries into tables and topics: what Spark makes of the sinks.

Batches come from files of a directory, one file each. A batch is run again as after a crash
when its entry in Spark's log of commits is taken away.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txnkv
import txnkv.spark

from .conftest import KEEP_QUIET, SCHEMA

pytestmark = pytest.mark.spark

Ids = Callable[..., list[int]]


class Files:
    """A directory of JSON lines that a stream reads, a file a batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, *ids: int) -> None:
        number = len(list(self.folder.iterdir()))
        lines = "".join(json.dumps({"id": id, "v": f"v{id}"}) + "\n" for id in ids)
        path = self.folder / f"{number:04}.json"
        path.write_text(lines)
        # Spark takes the oldest first, by milliseconds.
        os.utime(path, (time.time() - 1000 + number, time.time() - 1000 + number))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path / "in")
    made.add(1, 2, 3)
    made.add(4, 5)
    return made


@pytest.fixture
def stream(spark: Any, files: Files) -> Callable[[], Any]:
    def read() -> Any:
        rows = spark.readStream.schema("id long, v string").option("maxFilesPerTrigger", 1)
        return rows.json(str(files.folder))

    return read


@pytest.fixture
def run(tmp_path: Path, client: txnkv.Client) -> Callable[..., Any]:
    """Runs a query until it has read all files."""
    client.create_table("t", SCHEMA, txnkv.hash_partition("id", 2))

    def until_done(frame: Any, mode: str = "append", checkpoint: str = "c", **options: str) -> Any:
        place = {"path": client.path, "checkpointLocation": str(tmp_path / checkpoint)}
        if "topic" not in options:
            place["table"] = "t"
        writer = frame.writeStream.format("txnkv").outputMode(mode).options(**place | options)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    return until_done


@pytest.fixture
def forget(tmp_path: Path) -> Callable[..., None]:
    """Spark did not come to write down that a batch was done."""

    def remove(batch: int, checkpoint: str = "c") -> None:
        for name in (f"{batch}", f".{batch}.crc"):
            (tmp_path / checkpoint / "commits" / name).unlink()

    return remove


def read(topic: txnkv.Topic) -> list[bytes | None]:
    """All committed messages, partition by partition."""
    found = []
    with topic.consumer() as consumer:
        while some := consumer.poll(timeout=0):
            found += some
    return [m.value for m in sorted(found, key=lambda m: (m.partition, m.offset))]


def test_a_replayed_batch_is_there_once(
    client: txnkv.Client,
    stream: Callable[[], Any],
    run: Callable[..., Any],
    forget: Callable[..., None],
    files: Files,
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    query = run(stream())
    assert ids() == [1, 2, 3, 4, 5]
    ((app_id, applied),) = client.applications().items()
    assert (app_id, applied.version, applied.source) == (query.id, 1, query.id)
    forget(1)
    files.add(6)
    run(stream())
    assert ids() == [1, 2, 3, 4, 5, 6]
    assert client.applications()[query.id].version == 2
    nothing_is_left()


def test_a_checkpoint_that_lost_its_last_batch(
    client: txnkv.Client,
    stream: Callable[[], Any],
    run: Callable[..., Any],
    files: Files,
    ids: Ids,
    tmp_path: Path,
    nothing_is_left: Callable[[], None],
) -> None:
    """A copy of before it was put back: Spark plans a batch of its number, with other rows."""
    query = run(stream())
    older = tmp_path / "older"
    shutil.copytree(tmp_path / "c", older)
    files.add(6)
    run(stream())
    files.add(7)
    time.sleep(2.1)  # more than is allowed for a clock that was set back
    with pytest.raises(Exception, match=r"batch 2 of application .* was planned later"):
        run(stream(), checkpoint="older")
    assert ids() == [1, 2, 3, 4, 5, 6]
    run(stream())
    assert ids() == [1, 2, 3, 4, 5, 6, 7]
    assert client.applications()[query.id].version == 3
    nothing_is_left()


@pytest.mark.parametrize("buffer", ["marker", pytest.param("sidecar", marks=pytest.mark.slow)])
def test_a_replayed_batch_of_messages_is_there_once(
    client: txnkv.Client,
    stream: Callable[[], Any],
    run: Callable[..., Any],
    forget: Callable[..., None],
    files: Files,
    buffer: str,
    nothing_is_left: Callable[[], None],
) -> None:
    topic = client.create_topic("e", partitions=2, buffer=buffer)
    frame = stream().selectExpr("v AS value", "'k' AS key")
    run(frame, topic="e", appId="copy")
    forget(1)
    files.add(6, 7)
    run(frame, topic="e", appId="copy")
    assert read(topic) == [f"v{id}".encode() for id in (1, 2, 3, 4, 5, 6, 7)]
    assert client.applications()["copy"].version == 2
    nothing_is_left()


def test_what_is_wrong_is_told_by_the_first_batch(
    client: txnkv.Client, stream: Callable[[], Any], run: Callable[..., Any]
) -> None:
    with pytest.raises(Exception, match=r"SchemaError: .*the table does not have: w"):
        run(stream().selectExpr("id", "v AS w"))
    with pytest.raises(Exception, match="does not support Update mode"):  # says Spark
        run(stream(), "update")
    assert client.transactions() == []


# -- slow ------------------------------------------------------------------------------


@pytest.mark.slow
def test_output_mode_complete(
    client: txnkv.Client,
    stream: Callable[[], Any],
    run: Callable[..., Any],
    forget: Callable[..., None],
    nothing_is_left: Callable[[], None],
) -> None:
    schema = txnkv.Schema({"odd": "int64", "count": "int64"}, primary_key=["odd"])
    table = client.create_table("n", schema)
    client.new_session("auto_sync").insert("n", {"odd": 7, "count": 7})
    counts = stream().selectExpr("id % 2 AS odd").groupBy("odd").count()
    for _ in range(2):
        run(counts, "complete", table="n")
        assert {row["odd"]: row["count"] for row in table.scan()} == {0: 2, 1: 3}
        if _ == 0:
            forget(1)
    nothing_is_left()


@pytest.mark.slow
def test_output_mode_update_by_foreach_batch(
    client: txnkv.Client,
    tmp_path: Path,
    stream: Callable[[], Any],
    run: Callable[..., Any],
    forget: Callable[..., None],
    files: Files,
) -> None:
    schema = txnkv.Schema({"odd": "int64", "count": "int64"}, primary_key=["odd"])
    table = client.create_table("n", schema)

    def upsert(frame: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        options = txnkv.spark.options(txn, table="n") | {"operation": "upsert"}
        frame.write.format("txnkv").options(**options).mode("append").save()

    for _ in range(2):
        counts = stream().selectExpr("id % 2 AS odd").groupBy("odd").count()
        do = txnkv.spark.foreach_batch(client.path, upsert, app_id="counts")
        writer = counts.writeStream.outputMode("update").foreachBatch(do)
        writer = writer.option("checkpointLocation", str(tmp_path / "c"))
        writer.trigger(availableNow=True).start().awaitTermination()
        if _ == 0:
            assert {row["odd"]: row["count"] for row in table.scan()} == {0: 2, 1: 3}
            forget(1)
            files.add(6)
    assert {row["odd"]: row["count"] for row in table.scan()} == {0: 3, 1: 3}


@pytest.mark.slow
def test_failed_attempts_leave_one_copy(
    spark: Any,
    client: txnkv.Client,
    stream: Callable[[], Any],
    tmp_path: Path,
    files: Files,
    ids: Ids,
    run: Callable[..., Any],
    nothing_is_left: Callable[[], None],
) -> None:
    """Attempts fail when they have staged, the last but one excepted."""
    from txnkv.spark.source import TxnkvDataSource
    from txnkv.spark.streams.stream_writer import StreamWriter

    class FlakyWriter(StreamWriter):
        def write(self, iterator: Any) -> Any:
            from pyspark import TaskContext

            done = super().write(iterator)
            task = TaskContext.get()
            assert task is not None
            if task.attemptNumber() < 2:
                raise RuntimeError("this attempt fails after it staged")
            return done

    class Flaky(TxnkvDataSource):
        @classmethod
        def name(cls) -> str:
            return "flaky"

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
            made = super().streamWriter(schema, overwrite)
            made.__class__ = FlakyWriter
            return made

    spark.dataSource.register(Flaky)
    topic = client.create_topic("e")
    messages = stream().selectExpr("v AS value")
    for frame, target in ((stream(), {"table": "t"}), (messages, {"topic": "e"})):
        checkpoint = str(tmp_path / f"c{len(target)}{'topic' in target}")
        place = {"path": client.path, "checkpointLocation": checkpoint}
        writer = frame.writeStream.format("flaky").options(**place | target)
        writer.trigger(availableNow=True).start().awaitTermination()
    assert ids() == [1, 2, 3, 4, 5]
    assert read(topic) == [b"v1", b"v2", b"v3", b"v4", b"v5"]
    nothing_is_left()


@pytest.mark.slow
def test_a_query_is_stopped_in_the_middle_of_a_batch(
    spark: Any,
    client: txnkv.Client,
    stream: Callable[[], Any],
    run: Callable[..., Any],
    tmp_path: Path,
    until: Callable[..., Any],
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    place = {"path": client.path, "table": "t", "checkpointLocation": str(tmp_path / "c")}
    hang = "if(id = 5, java_method('java.lang.Thread', 'sleep', 600000L), v) AS v"
    query = stream().selectExpr("id", hang).writeStream.format("txnkv").options(**place).start()
    until(lambda: ids() == [1, 2, 3], 300)
    until(lambda: any(i.state is txnkv.TxnState.OPEN for i in client.transactions()), 300)
    query.stop()
    nothing_is_left()
    run(stream())
    assert ids() == [1, 2, 3, 4, 5]
    nothing_is_left()


def test_a_query_fails_whose_checkpoint_is_of_the_conf(
    spark: Any,
    client: txnkv.Client,
    where: dict[str, str],
    stream: Callable[[], Any],
    tmp_path: Path,
    nothing_is_left: Callable[[], None],
) -> None:
    bad = stream().selectExpr("id", "if(id > 0, raise_error('boom'), v) AS v")
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "all"))
    try:
        with pytest.raises(Exception, match="boom"):
            bad.writeStream.format("txnkv").options(**where).start().awaitTermination()
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    assert [info.state for info in client.transactions()] == [txnkv.TxnState.ABORTED]
    nothing_is_left()


@pytest.mark.slow
def test_a_checkpoint_that_was_deleted(
    client: txnkv.Client,
    stream: Callable[[], Any],
    run: Callable[..., Any],
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    run(stream(), appId="daily")
    with pytest.raises(Exception, match=r"application 'daily' is driven by"):
        run(stream(), checkpoint="d", appId="daily")
    nothing_is_left()
    client.forget_applied("daily")
    run(stream(), checkpoint="e", appId="daily", operation="insert_ignore")
    assert ids() == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_batches_without_rows(
    client: txnkv.Client,
    stream: Callable[[], Any],
    run: Callable[..., Any],
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    query = run(stream().where("id > 4"))
    assert ids() == [5]
    run(stream().where("id > 9"), checkpoint="d")
    assert client.applications()[query.id].version == 1
    nothing_is_left()


@pytest.mark.slow
def test_a_query_keeps_its_state_when_a_batch_is_replayed(
    stream: Callable[[], Any],
    run: Callable[..., Any],
    forget: Callable[..., None],
    files: Files,
    ids: Ids,
) -> None:
    """Rows of a committed batch are read to their end all the same: what was seen, was seen."""
    run(stream().dropDuplicates(["id"]))
    forget(1)
    files.add(4, 5, 6)
    run(stream().dropDuplicates(["id"]))
    assert ids() == [1, 2, 3, 4, 5, 6]


DRIVER = """
import os, signal
import txnkv.spark
from pyspark.sql import SparkSession
from txnkv.spark import java
from txnkv.spark.source import TxnkvDataSource
from txnkv.spark.streams.stream_writer import StreamWriter

builder = SparkSession.builder.master("local[2]")
for key, value in quiet:
    builder = builder.config(key, value)
spark = builder.getOrCreate()

class DyingWriter(StreamWriter):
    def commit(self, messages, batchId):
        if batchId == 1 and not after:
            os.kill(java.jvm().pid, signal.SIGKILL)
        super().commit(messages, batchId)
        if batchId == 1:
            os.kill(java.jvm().pid, signal.SIGKILL)

class Dying(TxnkvDataSource):
    @classmethod
    def name(cls):
        return "dying"
    def streamWriter(self, schema, overwrite):
        made = super().streamWriter(schema, overwrite)
        made.__class__ = DyingWriter
        return made

spark.dataSource.register(Dying)
rows = spark.readStream.schema("id long, v string").option("maxFilesPerTrigger", 1).json(folder)
if "topic" in place:
    rows = rows.selectExpr("v AS value")
rows.writeStream.format("dying").options(**place).start().awaitTermination()
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("kind", ["table", "topic"])
def test_spark_is_killed_beside_the_commit(
    client: txnkv.Client,
    stream: Callable[[], Any],
    run: Callable[..., Any],
    files: Files,
    process: Callable[..., Any],
    tmp_path: Path,
    ids: Ids,
    until: Callable[..., Any],
    kind: str,
    after: bool,
    nothing_is_left: Callable[[], None],
) -> None:
    """All of Spark, before its committer commits, or after and before Spark writes that down."""
    topic = client.create_topic("e")
    target = {kind: "t" if kind == "table" else "e"}
    place = {"path": client.path, "checkpointLocation": str(tmp_path / "c")} | target
    driver = process(
        DRIVER, place={k: str(v) for k, v in place.items()}, folder=str(files.folder),
        after=after, quiet=KEEP_QUIET,
    )  # fmt: skip
    _, said = driver.popen.communicate(timeout=300)
    assert (tmp_path / "c" / "commits" / "0").exists(), said
    assert not (tmp_path / "c" / "commits" / "1").exists()
    files.add(6)
    run(stream() if kind == "table" else stream().selectExpr("v AS value"), **target)
    if kind == "table":
        assert ids() == [1, 2, 3, 4, 5, 6]
    else:
        assert read(topic) == [b"v1", b"v2", b"v3", b"v4", b"v5", b"v6"]
    nothing_is_left()
