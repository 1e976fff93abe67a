"""Batches out: fetch, offset order, commit order, transaction order, pinned ranges."""

from txnkv.topics.read import pinned_range
from txnkv.topics.read.commit_places import (
    between_commits,
    next_timestamp,
    reach_at,
    timestamp_before,
)
from txnkv.topics.read.commit_reader import CommitReader, torn_before
from txnkv.topics.read.ends import Ends
from txnkv.topics.read.log_view import Bounds, bounds, offset_for_time
from txnkv.topics.read.offset_reader import OffsetReader, PartitionReader
from txnkv.topics.read.partition_fetch import (
    FETCH_BYTES,
    HELD_BYTES,
    READ_UNCOMMITTED,
    AbortedTxn,
    FetchResult,
    fetch,
)
from txnkv.topics.read.pinned_range import READ_BYTES, PinnedRange, pin
from txnkv.topics.read.range_cuts import cuts, weight
from txnkv.topics.read.transaction_order import WholeOrder

__all__ = [
    "AbortedTxn",
    "Bounds",
    "CommitReader",
    "Ends",
    "FETCH_BYTES",
    "FetchResult",
    "HELD_BYTES",
    "OffsetReader",
    "PartitionReader",
    "PinnedRange",
    "READ_BYTES",
    "READ_UNCOMMITTED",
    "WholeOrder",
    "between_commits",
    "bounds",
    "cuts",
    "fetch",
    "next_timestamp",
    "offset_for_time",
    "pin",
    "pinned_range",
    "reach_at",
    "timestamp_before",
    "torn_before",
    "weight",
]
