"""The log of a partition: chunks, state, indexes, segments, snapshots."""

from txnkv.topics.log import log_check
from txnkv.topics.log.log_chunks import (
    KEY,
    behind,
    damaged,
    first_length,
    is_side_list,
    position_of,
    seek_at_or_below,
    unlike,
    whole,
)
from txnkv.topics.log.log_state import DATABASES, LOG, STATE
from txnkv.topics.log.log_times import first_not_older
from txnkv.topics.log.partition_log import Buffer, LogOptions, PartitionLog
from txnkv.topics.log.partition_state import CommitEntry, OpenTxn
from txnkv.topics.log.segments import NEVER, Segment
from txnkv.topics.log.side_format import (
    OWN,
    SHARED,
    SideRun,
    batches_of,
    decided,
    gathered,
    key,
    pack_runs,
    read_key,
    read_marker,
)

__all__ = [
    "Buffer",
    "CommitEntry",
    "DATABASES",
    "KEY",
    "LOG",
    "LogOptions",
    "NEVER",
    "OWN",
    "OpenTxn",
    "PartitionLog",
    "SHARED",
    "STATE",
    "Segment",
    "SideRun",
    "batches_of",
    "behind",
    "damaged",
    "decided",
    "first_length",
    "first_not_older",
    "gathered",
    "is_side_list",
    "key",
    "log_check",
    "pack_runs",
    "position_of",
    "read_key",
    "read_marker",
    "seek_at_or_below",
    "unlike",
    "whole",
]
