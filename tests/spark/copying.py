"""The programs that are killed: a producer, a Spark that copies, and a reader beside them.

    producer      750 messages a transaction    -> TOPIC in, TABLE produced (how far it has come)
    spark         queries, one for each target  -> TOPIC out, TABLES copied and counted
    reader        READ_COMMITTED, of in and out -> what it saw, when it is told to end

    python -m tests.spark.copying producer|spark|reader '{"path": ...}'

They say and are told lines of JSON. Message n has the value `n`, the key `k(n mod 17)`, and, when
order is kept by partition, partition n mod their number.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa

import txnkv

KEYS: Final = 17
KEEPALIVE: Final = 5.0
"""Seconds after which what a killed program left open is aborted."""
PRODUCED: Final = txnkv.Schema({"id": "int64", "n": "int64"}, primary_key=["id"])
COPIED: Final = txnkv.Schema({"n": "int64", "key": "string"}, primary_key=["n"])
COUNTED: Final = txnkv.Schema({"key": "string", "n": "int64"}, primary_key=["key"])


def say(**what: Any) -> None:
    """A line for whoever started this."""
    with suppress(OSError):
        os.write(1, json.dumps(what).encode() + b"\n")


def messages(first: int, count: int, partitions: int | None) -> pa.RecordBatch:
    """Messages of these numbers, for `send_batch`."""
    numbers = range(first, first + count)
    columns: dict[str, Any] = {
        "value": pa.array([b"%d" % n for n in numbers], pa.binary()),
        "key": pa.array([b"k%d" % (n % KEYS) for n in numbers], pa.binary()),
    }
    if partitions is not None:
        columns["partition"] = pa.array([n % partitions for n in numbers], pa.int32())
    return pa.record_batch(columns)


# -- producer --------------------------------------------------------------------------


class Ended(BaseException):
    """By SIGTERM."""


def producer(
    path: str, total: int, chunk: int, ahead: int, partitions: int | None, follow: str
) -> None:
    """Send messages, from where it has come before; some transactions are rolled back first.

    Args:
        total: how many in all.
        chunk: how many a transaction.
        ahead: of the copies in topic `follow` at most by so many.
        partitions: of topic `in`, when messages name theirs; None: they go by key.
    """

    def end(*_: Any) -> None:
        raise Ended

    signal.signal(signal.SIGTERM, end)
    with suppress(Ended), txnkv.connect(path, create=False, keepalive_time=KEEPALIVE) as client:
        follower = client.topic(follow)
        row = client.table("produced").get(0)
        at = 0 if row is None else int(row["n"])
        while at < total:
            while at - sum(follower.end_offsets().values()) > ahead:
                time.sleep(0.02)
            count = min(chunk, total - at)
            if random.random() < 0.15:
                with suppress(ZeroDivisionError):
                    produce(client, at, count, partitions, fail=True)
            try:
                produce(client, at, count, partitions)
            except txnkv.TxnkvError as error:
                if not error.retriable:
                    raise
                continue
            at += count
            say(at=at)
        say(done=at)


def produce(
    client: txnkv.Client, at: int, count: int, partitions: int | None, fail: bool = False
) -> None:
    """One transaction. It is in the log as it goes: a kill leaves some of it there."""
    with client.transaction(timeout=None) as txn:
        txn.serialize()
        step = -(-count // 3)
        for first in range(at, at + count, step):
            some = min(step, at + count - first)
            txn.send_batch("in", messages(first, some, partitions))
            time.sleep(random.uniform(0, 0.01))
        txn.upsert("produced", {"id": 0, "n": at + count})
        if fail:
            raise ZeroDivisionError


# -- spark -----------------------------------------------------------------------------


def spark(conf: dict[str, str], master: str = "local[2,4]") -> None:
    """Start and stop queries, as told; say when one ends."""
    from pyspark.sql import SparkSession

    from tests.spark.stalling import Stalling

    builder = SparkSession.builder.master(master)
    for key, value in conf.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.dataSource.register(Stalling)
    running: dict[str, Any] = {}

    def end(*_: Any) -> None:
        raise Ended

    signal.signal(signal.SIGTERM, end)
    say(ready=True)
    try:
        for line in sys.stdin:
            order = json.loads(line)
            name, do = order.pop("name"), order.pop("do")
            if do == "start":
                running[name] = start(session, **order)
                threading.Thread(target=watch, args=(name, running[name]), daemon=True).start()
            elif name in running:
                finish(name, running.pop(name), drain=do == "finish")
    except Ended:  # let them end: a batch that is running is not waited for
        for query in running.values():
            query.stop()
    session.stop()


def watch(name: str, query: Any) -> None:
    """Say how a query ends."""
    try:
        query.awaitTermination()
        say(ended=name, error=None)
    except Exception as error:
        say(ended=name, error=str(error)[-2000:])


def finish(name: str, query: Any, drain: bool) -> None:
    """No more; with `drain` all that is there, first."""
    with suppress(Exception):  # `watch` says how it ended
        if drain:
            query.processAllAvailable()
        query.stop()
        say(finished=name)


def start(
    session: Any,
    *,
    path: str,
    kind: str,
    checkpoint: str,
    most: int,
    by_key: bool,
    order: str,
    app: str,
    suffix: str = "",
    format: str = "txnkv",
    spread: int = 0,
) -> Any:
    """A query that copies topic `in`.

    Args:
        kind: to the topic, to the table, or to both by foreach_batch, which counts, too.
        checkpoint: its directory.
        most: offsets a batch.
        by_key: copies go where their keys belong; else to the partition of the original.
        order: of the source.
        app: id of the application.
        suffix: of the names of the targets.
        format: of the sink: "stalling", for one whose tasks hang or fail.
        spread: into so many tasks; 0: as the source cuts it.
    """
    stream = session.readStream.format("txnkv").option("path", path).option("topic", "in")
    frame = stream.options(maxOffsetsPerTrigger=str(most), order=order).load()
    frame = frame.repartition(spread) if spread else frame
    columns = ["value", "key"] if by_key else ["value", "key", "partition"]
    if kind == "each":
        subscription = "copier" if order == "offset" and not suffix else None
        do = txnkv.spark.foreach_batch(path, Each(columns, suffix), app, subscription)
        writer = frame.writeStream.foreachBatch(do)
    else:
        writer = frame.selectExpr(*(columns if kind == "topic" else ROW)).writeStream
        target = f"out{suffix}" if kind == "topic" else f"mirror{suffix}"
        writer = writer.format(format).options(path=path, appId=app, **{kind: target})
    writer = writer.option("checkpointLocation", checkpoint)
    return writer.trigger(processingTime="100 milliseconds").start()


ROW: Final = ("BIGINT(STRING(value)) AS n", "STRING(key) AS key")


class Each:
    """Copies a batch to topic and table, and counts by key, in one transaction."""

    def __init__(self, columns: list[str], suffix: str) -> None:
        self.columns = columns
        self.suffix = suffix

    def __call__(self, df: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        """Copy and count a batch, as the function of foreach_batch."""
        df = df.persist()
        to = txnkv.spark.options(txn, topic=f"each{self.suffix}")
        df.select(*self.columns).write.format("txnkv").options(**to).mode("append").save()
        to = txnkv.spark.options(txn, table=f"copied{self.suffix}")
        df.selectExpr(*ROW).write.format("txnkv").options(**to).mode("append").save()
        for row in df.selectExpr(ROW[1]).groupBy("key").count().collect():
            table = f"counted{self.suffix}"
            old = txn.get(table, row["key"])
            count = row["count"] + (old["n"] if old else 0)
            txn.upsert(table, {"key": row["key"], "n": count})
        df.unpersist()


# -- reader ----------------------------------------------------------------------------


def reader(path: str, topics: list[str], into: str) -> None:
    """Read what is committed as it comes; when told to, read to the end and write it down.

    A file for each topic, of columns partition, offset, value, as they came.
    """
    asked = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
    with txnkv.connect(path, create=False) as client:
        consumers = {name: client.topic(name).consumer() for name in topics}
        seen: dict[str, list[pa.RecordBatch]] = {name: [] for name in topics}
        while True:
            last = asked.is_set()
            found = 0
            for name, consumer in consumers.items():
                batch = consumer.poll_batch(timeout=0).select(["partition", "offset", "value"])
                found += batch.num_rows
                seen[name].append(batch)
            if last and not found:
                break
            if not found:
                time.sleep(0.02)
        for name, batches in seen.items():
            with pa.OSFile(f"{into}/{name}.arrow", "wb") as file:
                table = pa.Table.from_batches(batches)
                with pa.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table)
    say(read=True)


if __name__ == "__main__":
    import txnkv.spark

    {"producer": producer, "spark": spark, "reader": reader}[sys.argv[1]](**json.loads(sys.argv[2]))
