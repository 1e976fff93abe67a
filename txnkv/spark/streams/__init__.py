"""Streams of Spark: sources of topics and of changes of tables, and the sink.

    stream_readers     topics, and the changes of tables, as sources; the plan of a batch of changes
                       (`reading` has those of topics)
    stream_writer      the sink: a transaction for each micro batch, staged as `writing` does

All that needs Spark 4.2 or later: batches do without this room.
"""

from txnkv.spark.streams.stream_readers import (
    ChangesStreamReader,
    TopicStreamReader,
    changes_schema,
)
from txnkv.spark.streams.stream_writer import stream_writer_of
