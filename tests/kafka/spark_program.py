"""Spark's own connector for Kafka, as a program: what it reads, copies, or sends.

    python -m tests.kafka.spark_program batch SERVERS STORE FOLDER
    python -m tests.kafka.spark_program stream SERVERS STORE FOLDER [once]

`batch` sends the rows of table `sent` to topic `from_spark`, reads them again, and copies topic
`in` into table `read`. `stream` copies topic `in` into table `copied`, each message once by
`foreach_batch`, and from there to topic `echo` by the connector's sink; with `once` it ends when
all is copied that was there at its begin. The jars are those of TXNKV_SPARK_KAFKA_JARS.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import txnkv.spark

VALUES = ["CAST(value AS STRING) AS value", "offset"]


class Program:
    """One session, with the options of the connector."""

    def __init__(self, servers: str, store: str, folder: str) -> None:
        jars = Path(os.environ["TXNKV_SPARK_KAFKA_JARS"]).glob("*.jar")
        builder = SparkSession.builder.master("local[2]").config(
            "spark.jars", ",".join(map(str, sorted(jars)))
        )
        for key, value in (
            ("spark.ui.enabled", "false"),
            ("spark.sql.shuffle.partitions", "2"),
            ("spark.driver.memory", "700m"),
            ("spark.log.level", "ERROR"),
        ):
            builder = builder.config(key, value)
        self.spark = builder.getOrCreate()
        txnkv.spark.register(self.spark)
        self.servers, self.store, self.folder = servers, store, folder

    def kafka(self, source: Any, topic: str) -> Any:
        told = {"kafka.bootstrap.servers": self.servers, "subscribe": topic}
        told |= {"startingOffsets": "earliest", "kafka.isolation.level": "read_committed"}
        return source.format("kafka").options(**told)

    def table(self, name: str) -> dict[str, str]:
        return {"path": self.store, "table": name}

    def batch(self) -> None:
        sent = self.spark.read.format("txnkv").options(**self.table("sent")).load()
        pairs = sent.selectExpr("CAST(id AS STRING) AS key", "v AS value")
        pairs.write.format("kafka").option("kafka.bootstrap.servers", self.servers).option(
            "topic", "from_spark"
        ).save()
        found = self.kafka(self.spark.read, "from_spark").load()
        print("read", found.count(), found.select("key").distinct().count(), flush=True)
        copied = self.kafka(self.spark.read, "in").load().selectExpr("offset AS id", VALUES[0])
        copied = copied.withColumnRenamed("value", "v")
        copied.write.format("txnkv").options(**self.table("read")).mode("append").save()

    def stream(self, *, once: bool) -> None:
        source = self.kafka(self.spark.readStream, "in").option("maxOffsetsPerTrigger", 150)

        def copy(frame: DataFrame, batch_id: int, txn: Any) -> None:
            rows = frame.selectExpr("offset AS id", VALUES[0]).withColumnRenamed("value", "v")
            into = txnkv.spark.options(txn, table="copied")
            rows.write.format("txnkv").options(**into, operation="insert").mode("append").save()

        do = txnkv.spark.foreach_batch(self.store, copy, app_id="copier")
        query = source.load().writeStream.foreachBatch(do)
        query = query.option("checkpointLocation", f"{self.folder}/copied")
        echo = self.kafka(self.spark.readStream, "in").load().select("key", "value").writeStream
        echo = echo.format("kafka").option("kafka.bootstrap.servers", self.servers)
        echo = echo.option("topic", "echo").option("checkpointLocation", f"{self.folder}/echo")
        if once:
            query, echo = query.trigger(availableNow=True), echo.trigger(availableNow=True)
        for running in (query.start(), echo.start()):
            running.awaitTermination()


def main(mode: str, servers: str, store: str, folder: str, once: str = "") -> None:
    program = Program(servers, store, folder)
    if mode == "batch":
        program.batch()
    else:
        program.stream(once=bool(once))
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
