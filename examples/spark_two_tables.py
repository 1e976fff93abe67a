"""Two DataFrames into two tables under one token, and read back through Spark.

python examples/spark_two_tables.py [STORE]
"""

from __future__ import annotations

import sys
import tempfile

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import txnkv
import txnkv.spark


def main(path: str) -> None:
    spark = SparkSession.builder.master("local[2]").appName("two tables").getOrCreate()
    txnkv.spark.register(spark)
    with txnkv.connect(path) as client:
        readings = client.create_table(
            "readings",
            txnkv.Schema({"id": "int64", "sensor": "int64", "value": "float64"}, ["id"]),
            partition_by=txnkv.hash_partition("id", 4),
        )
        sensors = client.create_table(
            "sensors", txnkv.Schema({"sensor": "int64", "readings": "int64"}, ["sensor"])
        )
        raw = spark.range(0, 100_000, numPartitions=4).select(
            "id", (f.col("id") % 10).alias("sensor"), (f.col("id") / 7).alias("value")
        )
        counts = raw.groupBy("sensor").agg(f.count("*").alias("readings"))

        txn = client.new_transaction(timeout=None)
        for frame, table in ((raw, readings), (counts, sensors)):
            options = txnkv.spark.options(txn, table=table)
            frame.write.format("txnkv").options(**options).mode("append").save()
        print(f"before the commit: {readings.count():,} readings, {sensors.count()} sensors")
        txn.commit()
        print(f"after it: {readings.count():,} readings, {sensors.count()} sensors")

        back = spark.read.format("txnkv").option("path", path).option("table", "readings").load()
        print(f"Spark reads {back.where('sensor = 3').count():,} of sensor 3")
    spark.stop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/store")
