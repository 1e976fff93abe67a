"""The log of a partition: record batches with dense offsets, in an LMDB environment of its own.

partition_log      the whole: batches in, batches out, and what they say of transactions
partition_state    what that is: open transactions, the last stable offset, the aborted index
log_chunks         batches as LMDB has them, and markers that stand for side batches
log_state          the databases: the log's record, open transactions, segments, snapshots
log_indexes        commits, and what was aborted, by offset
log_writer         batches in at the end; the end, or the start, away
log_rewriter       a piece of it with fewer messages, which keep their offsets
log_check          a check that all of it is what the batches say
"""

from txnkv.topics.log import log_check
from txnkv.topics.log.log_chunks import (
    CHUNK_BYTES,
    KEY,
    OWN,
    SHARED,
    SideRun,
    behind,
    damaged,
    declare_places,
    first_length,
    gathered,
    is_side_list,
    next_offset,
    pack_runs,
    position_of,
    read_marker,
    seek_at_or_below,
    unlike,
    whole,
)
from txnkv.topics.log.log_rewriter import NOTHING, LogPiece
from txnkv.topics.log.log_state import DATABASES, LOG, NEVER, STATE, Rewritten, Segment
from txnkv.topics.log.log_writer import LogOptions
from txnkv.topics.log.partition_log import Buffer, PartitionLog, first_not_older
from txnkv.topics.log.partition_state import CommitEntry, OpenTxn
