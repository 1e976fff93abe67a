"""A topic as the source of a stream.

Spark asks for the end of the next batch, writes it into its checkpoint, has the batch planned,
and runs it: again, from the checkpoint, if it did not see it end. One long-lived process plans;
tasks get what it pinned. See `topic_planner` for what makes a batch the same each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from txnkv.errors import NotSupportedError
from txnkv.spark.reading.topic_offsets import TopicOffset
from txnkv.spark.reading.topic_planner import TopicPlanner
from txnkv.spark.reading.topic_task import read_task
from txnkv.spark.settings_topics import TopicRead


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic as a stream.

    Args:
        settings: of the read.
        expected: the Arrow schema that Spark expects.
    """

    def __init__(self, settings: TopicRead, expected: pa.Schema) -> None:
        self._settings = settings
        self._expected = expected
        self._target: TopicOffset | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the point where a new query begins.

        Raises:
            OffsetOutOfRangeError: option startingOffsets names an offset that is not there.
        """
        return TopicPlanner(self._settings).initial().json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Option maxOffsetsPerTrigger."""
        most = self._settings.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the batch that begins at `start`; `start` when there is nothing.

        Raises:
            OffsetOutOfRangeError: what comes next is gone, or the log ends before the start.
            TopicNotFoundError: the topic was dropped.
        """
        if not isinstance(limit, ReadAllAvailable | ReadMaxRows):
            raise NotSupportedError(f"a topic is read by offsets, not by {type(limit).__name__}")
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        begun = self._parsed(start)
        end = TopicPlanner(self._settings).latest(begun, most, self._target)
        # Spark compares texts: the same place must be the same text.
        return start if end is begun else end.json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Up to where there is something to read, for the query's progress."""
        return TopicPlanner(self._settings).ends().json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on nothing new is read."""
        self._target = TopicPlanner(self._settings).ends()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks that read what lies between two points, pinned.

        Raises:
            OffsetOutOfRangeError: some of it is gone, or never was in this store.
            TopicNotFoundError: the topic was dropped.
        """
        planner = TopicPlanner(self._settings)
        return list(planner.tasks(self._parsed(start), self._parsed(end)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one part, as Arrow batches."""
        return read_task(self._settings, self._expected, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to be done: topics are kept by retention, not by readers."""

    def stop(self) -> None:
        """Nothing is held: the process keeps its client, and ends with the query."""

    def _parsed(self, given: dict[str, Any]) -> TopicOffset:
        return TopicOffset.parse(given, self._settings.topic, self._settings.order)
