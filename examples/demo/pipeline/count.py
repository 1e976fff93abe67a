"""Count words with Spark: totals, alerts and acknowledgements of a micro batch are one commit.

Spark's checkpoint says which lines a batch has; the store says which batches are in it. So a
driver that is killed before Spark has noted that a batch is done runs it again, finds it done,
and goes on.

python -m examples.demo.pipeline.count STORE CHECKPOINT
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any, Final

import txnkv
import txnkv.spark
from examples.demo.pipeline import layout
from examples.demo.session import local_spark

MOST: Final = 50_000
"""Lines of a micro batch."""


def count(lines: Any, batch_id: int, txn: txnkv.Transaction) -> None:
    """Add the words of a micro batch to the totals; alert where one has passed a threshold."""
    from pyspark.sql import functions as f

    def place(name: str) -> Any:
        return lines.sparkSession.read.format("txnkv").options(**txnkv.spark.options(txn, name))

    text = f.lower(f.col("value").cast("string"))
    words = lines.select(f.explode(f.split(text, "[^a-z_]+")).alias("word")).where("word <> ''")
    more = words.groupBy("word").agg(f.count("*").alias("more"))
    sums = (
        more.join(place(layout.COUNTS).load(), "word", "left")
        .select("word", f.coalesce("total", f.lit(0)).alias("before"), "more")
        .selectExpr("word", "before", "before + more AS total")
        .persist()
    )
    options = txnkv.spark.options(txn, layout.COUNTS) | {"operation": "upsert"}
    sums.select("word", "total").write.format("txnkv").options(**options).mode("append").save()
    passed = sums.withColumn("passed", f.explode(f.array(*map(f.lit, layout.THRESHOLDS))))
    alerts = passed.where("before < passed AND passed <= total").selectExpr(
        "word AS key", "CAST(passed AS string) AS value"
    )
    options = txnkv.spark.options(txn, topic=layout.ALERTS)
    alerts.write.format("txnkv").options(**options).mode("append").save()
    sums.unpersist()


def main() -> None:
    parser = argparse.ArgumentParser(description="Count words with Spark.")
    parser.add_argument("store")
    parser.add_argument("checkpoint", type=Path)
    given = parser.parse_args()
    with txnkv.connect(given.store) as client:
        layout.make(client)
    given.checkpoint.mkdir(parents=True, exist_ok=True)
    with local_spark(given.checkpoint) as spark:
        txnkv.spark.register(spark)
        lines = (
            spark.readStream.format("txnkv")
            .option("path", given.store)
            .option("topic", layout.LINES)
            .option("maxOffsetsPerTrigger", str(MOST))
            .load()
        )
        each = txnkv.spark.foreach_batch(
            given.store, count, app_id="count", subscription=layout.COUNTING
        )
        query = (
            lines.writeStream.foreachBatch(each)
            .option("checkpointLocation", str(given.checkpoint / "query"))
            .start()
        )
        signal.signal(signal.SIGTERM, lambda *_: query.stop())
        query.awaitTermination()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
