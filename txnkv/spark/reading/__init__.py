"""Reading by Spark's batches, and the plans of topics that streams share.

readers          of a table at a snapshot, and of a topic; `pushdown` has filters of Spark
topic_planner    where reads of a topic begin and end, and their tasks, which `topic_rows` read
"""

from txnkv.spark.reading import pushdown
from txnkv.spark.reading.readers import PushingReader, TopicReader, TxnkvReader, cut
from txnkv.spark.reading.topic_planner import TopicOffset, TopicPlanner
from txnkv.spark.reading.topic_rows import read_task, topic_schema
