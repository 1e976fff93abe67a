"""Topics: partitions that are logs of record batches, written by transactions, read in order.

topics, topic_engine   the ground: catalog, partitions, tails; and the wiring: work on topics, in
                       transactions and in rounds
topic_catalog          what topics there are, and the tables of status.db
tail, outbox           what is given and in no log yet; what a small transaction will add to it
log                    a log: chunks, state, indexes, segments
sidecar                batches of open transactions beside the log
write                  batches into logs; producers; what attempts of jobs send
read                   batches out: in order of offsets, commits or transactions, and pinned ranges
messages               what a batch is made of and becomes
acks, delivery         subscriptions: what is kept of them, and how they work
retention              a log's beginning given up, or its end
follower               a copy of a log in another store
partition_backup       a log into a backup or a dump, and back
overview, waiting      topics as people see them, with checks; waiting for what comes
ranges                 sets of offsets
"""

from txnkv.topics import outbox, topic_catalog
from txnkv.topics.acks import Cursor, Exclusive, ack_rows
from txnkv.topics.delivery import (
    Belongings,
    ExclusiveReader,
    KeySharedReader,
    LeaseReader,
    Standby,
    Subscriptions,
    refuse,
)
from txnkv.topics.follower import Follower
from txnkv.topics.log import OpenTxn
from txnkv.topics.messages import (
    TIME,
    Encoded,
    Message,
    MessageId,
    Outgoing,
    Pending,
    Plain,
    Sticky,
    ValueCodec,
    ValueStage,
    as_arrow,
    message_input,
    messages_from_arrow,
    messages_to_arrow,
    outgoing,
    pending,
    spread,
    topic_number,
)
from txnkv.topics.outbox import Outbox
from txnkv.topics.overview import (
    HeldMessages,
    Holders,
    PartitionOverview,
    SentTo,
    SubscriptionOverview,
    TopicOverview,
    accept_loss,
    check_partition,
    held_messages,
    live_partition_ids,
    look_at_partition,
    overview_of,
    sent_to,
    subscription_stats,
    topic_stats,
)
from txnkv.topics.partition_backup import (
    back_up_partition,
    dumped_messages,
    next_offsets,
    restore_messages,
    restore_partition,
    restore_subscriptions,
    restore_topic,
    topic_document,
)
from txnkv.topics.read import (
    EARLIEST,
    HELD_BYTES,
    LATEST,
    READ_AHEAD,
    READ_BYTES,
    TASKS_A_CORE,
    AbortedTxn,
    BatchDecoder,
    Bounds,
    CommitReader,
    Ends,
    FetchIsolation,
    FetchResult,
    OffsetReader,
    Order,
    PartitionReader,
    PinnedRange,
    Position,
    ReadIsolation,
    Start,
    TopicOffset,
    TopicPart,
    TopicPlanner,
    TopicReading,
    TransactionOrder,
    between_commits,
    bounds,
    cuts,
    fetch,
    next_timestamp,
    offset_for_time,
    pin,
    pinned_range,
    reach_at,
    timestamp_before,
    torn_before,
    weight,
)
from txnkv.topics.retention import delete_after, delete_below
from txnkv.topics.subscription_catalog import (
    EXCLUSIVE,
    KEY_SHARED,
    MANY,
    OPTIONS,
    Place,
    SubscriptionInfo,
    SubscriptionOptions,
    SubscriptionType,
    chosen_partitions,
)
from txnkv.topics.topic_catalog import (
    MAX_PARTITIONS,
    Buffer,
    Cleanup,
    Compression,
    TopicChanges,
    TopicInfo,
    TopicOptions,
    ValuesOf,
)
from txnkv.topics.topic_engine import TopicEngine, abort_unknown, open_in
from txnkv.topics.topics import Hold, Partition
from txnkv.topics.waiting import Waiting, deadline, require_time
from txnkv.topics.write import (
    PATIENCE,
    Delivered,
    Sender,
    StagedLots,
    StagedSends,
    append,
    producers,
    regain,
    staged_files,
)
