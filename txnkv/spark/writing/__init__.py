"""Writers for Spark: of tables and topics, in batches and streams."""

from txnkv.spark.writing.job_writer import TopicWriter, TxnkvWriter
from txnkv.spark.writing.stream_writer import stream_writer_of

__all__ = ["TopicWriter", "TxnkvWriter", "stream_writer_of"]
