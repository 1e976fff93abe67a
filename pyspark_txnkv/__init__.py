"""Makes format "txnkv" known to Spark, which looks for modules named `pyspark_*` by itself."""

from txnkv.spark.source import TxnkvDataSource as DefaultSource

__all__ = ["DefaultSource"]
