"""Reading by Spark's batches, and the plans and tasks of topics that streams share.

readers     of a table at a snapshot, and of a topic
pushdown    filters of Spark
"""

from txnkv.spark.reading import pushdown
from txnkv.spark.reading.readers import (
    PushingReader,
    TopicReader,
    TxnkvReader,
    cut,
    planned,
    read_task,
    tasks,
    topic_schema,
)
