"""A batch read of a topic: from one point of it to another, both fixed when Spark plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from txnkv.spark.reading.topic_planner import TopicPlanner
from txnkv.spark.reading.topic_task import read_task
from txnkv.spark.settings_topics import TopicRead


class TopicReader(DataSourceReader):
    """Reads a topic.

    Args:
        settings: of the read.
        expected: the Arrow schema that Spark expects.
    """

    def __init__(self, settings: TopicRead, expected: pa.Schema) -> None:
        self._settings = settings
        self._expected = expected

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks that read what lies between options startingOffsets and endingOffsets.

        Raises:
            OffsetOutOfRangeError: one of them names an offset that is not there.
            ValueError: one of them makes no sense for this topic.
        """
        planner = TopicPlanner(self._settings)
        start = planner.initial()
        return list(planner.tasks(start, planner.final(start)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one part, as Arrow batches."""
        return read_task(self._settings, self._expected, partition)
