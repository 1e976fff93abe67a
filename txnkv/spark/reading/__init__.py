"""Readers for Spark: of tables at a snapshot, of topics, of changes of tables."""

from txnkv.spark.reading import pushdown
from txnkv.spark.reading.changes_stream import ChangesStreamReader, changes_schema
from txnkv.spark.reading.table_reader import PushingReader, TxnkvReader
from txnkv.spark.reading.topic_columns import topic_schema
from txnkv.spark.reading.topic_lag import lag
from txnkv.spark.reading.topic_reader import TopicReader
from txnkv.spark.reading.topic_stream import TopicStreamReader

__all__ = [
    "ChangesStreamReader",
    "PushingReader",
    "TopicReader",
    "TopicStreamReader",
    "TxnkvReader",
    "changes_schema",
    "lag",
    "pushdown",
    "topic_schema",
]
