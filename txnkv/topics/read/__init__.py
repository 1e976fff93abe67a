"""Batches out: one reader of a partition, in the order of offsets or of commits.

log_view        one look at a partition: log and tail as one row of offsets
offset_reader   fetch, filter, decode, give; large messages; which partitions have something new
commit_reader   the order of commits; several partitions in the order of transactions
batch_places    for it: where the batches of transactions lie that stand mixed
pinned_range    the offset reader with an end, elsewhere; ranges cut, ranges up to a timestamp
topic_planner   reads of many processes, in such ranges
"""

from txnkv.topics.read import pinned_range
from txnkv.topics.read.commit_reader import CommitReader, TransactionOrder, torn_before
from txnkv.topics.read.log_view import Bounds, bounds, look_at, offset_for_time
from txnkv.topics.read.offset_reader import (
    FETCH_BYTES,
    HELD_BYTES,
    READ_AHEAD,
    READ_UNCOMMITTED,
    AbortedTxn,
    BatchDecoder,
    Ends,
    FetchIsolation,
    FetchResult,
    OffsetReader,
    Order,
    PartitionReader,
    ReadIsolation,
    Start,
    fetch,
)
from txnkv.topics.read.pinned_range import (
    READ_BYTES,
    PinnedRange,
    between_commits,
    cuts,
    next_timestamp,
    pin,
    reach_at,
    timestamp_before,
    weight,
)
from txnkv.topics.read.topic_planner import (
    EARLIEST,
    LATEST,
    TASKS_A_CORE,
    Position,
    TopicOffset,
    TopicPart,
    TopicPlanner,
    TopicReading,
)
