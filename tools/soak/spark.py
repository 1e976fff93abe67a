"""The Spark of the soak: a stream of receipts into a table, and batches under a token."""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import txnkv
import txnkv.spark
from tools.soak.roles import TOLERATED, Step, go_on, off_clock, reported
from tools.soak.scene import CHAINS, GENERATION, STREAMED, Place


def painter(client: txnkv.Client, place: Place, spark: Any, chance: random.Random) -> Step:
    """Keeps a stream running, and paints generations of rows by batch jobs."""
    query = _stream(place, spark)

    def step() -> None:
        nonlocal query
        if not query.isActive:
            _refuse_unknown(query.exception())
            query = _stream(place, spark)
        number = chance.randrange(1 << 30)
        rows = spark.range(GENERATION, numPartitions=2).selectExpr("id", f"{number}L generation")
        try:
            with client.transaction(timeout=None) as txn:
                options = txnkv.spark.options(txn, table="painted")
                writer = rows.write.format("txnkv").options(**options)
                writer.option("operation", "upsert").mode("append").save()
                if chance.random() < 0.2:
                    txn.rollback()
        except Exception as error:
            if not isinstance(error, TOLERATED):
                _refuse_unknown(error)
        time.sleep(2.0)

    return step


def _stream(place: Place, spark: Any) -> Any:
    source = spark.readStream.format("txnkv").option("path", str(place.store))
    frame = source.option("topic", f"receipts_{CHAINS[0]}").load()
    numbers = frame.selectExpr("CAST(CAST(value AS STRING) AS BIGINT) AS number")
    sink = numbers.writeStream.format("txnkv").option("path", str(place.store))
    sink = sink.option("table", STREAMED).option("appId", "soak").option("operation", "insert")
    sink = sink.option("checkpointLocation", str(place.checkpoints / "stream"))
    return sink.trigger(processingTime="3 seconds").start()


def _refuse_unknown(error: BaseException | None) -> None:
    """Raise what comes of txnkv, and what kills, stops and full disks do not explain."""
    text = str(error)
    known = (*TOLERATED, txnkv.InvalidTokenError)
    # The rest is Spark's: a worker that it waited for was stopped.
    if error is not None and "/txnkv/" in text and not any(k.__name__ in text for k in known):
        raise error


def run(folder: str, seed: str) -> None:
    from pyspark.sql import SparkSession

    place, name = Place(Path(folder)), "spark"
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.log.level", "OFF").config("spark.driver.memory", "768m")
    # Its workers begin beside twenty busy processes. For those that read a stream it waits 10 s,
    # whatever is configured, and gives the stream up.
    builder = builder.config("spark.python.authenticate.socketTimeout", "300s")
    with suppress(PermissionError):
        os.nice(-10)
    chance = random.Random(f"spark {seed}")
    with off_clock(place, name), reported(place, name):
        spark = builder.getOrCreate()
        go_on(place, name, lambda client: painter(client, place, spark, chance))


if __name__ == "__main__":
    run(*sys.argv[1:])
