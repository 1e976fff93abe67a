"""A batch write into a topic; see `job_writer`.

Columns are those of messages: value, and where wanted key, headers, timestamp, partition. A
message goes to the partition that it names, else to that of its key; the messages of a task keep
their order in it.
"""

from __future__ import annotations

from pyspark.sql.types import StructType

from txnkv.spark.settings_sinks import TopicWrite
from txnkv.spark.writing.job_writer import JobWriter
from txnkv.spark.writing.targets import TopicTarget


class TopicWriter(JobWriter):
    """Writes a topic."""

    @classmethod
    def start(cls, settings: TopicWrite, schema: StructType) -> TopicWriter:
        """Check that the data fits, then begin the job; see `JobWriter.begin`."""
        target = TopicTarget(settings.topic)
        return cls.begin(settings, target, schema, token=settings.token, timeout=settings.timeout)
