"""Transactions: their states, the status table, and how they are driven to their end.

    ids, states, clock        names and time
    status_table, locks, jobs rows of status.db and the moves on them
    participant               what is asked of those who hold the data
    orchestration             the protocol, over all of these
    lease, id_ranges, liveness, maintenance   who does the work that nobody waits for
    coordinator               all of it, for the layers above

It knows no tables: they register as participants.
"""

from txnkv.coordinator import (
    applications,
    clock,
    commit_log,
    coordinator,
    held,
    id_ranges,
    jobs,
    locks,
    named,
    payload,
    purge,
    status_schema,
    status_table,
)
from txnkv.coordinator.applications import Applied, Mark, Marks
from txnkv.coordinator.catalog import Catalog
from txnkv.coordinator.clock import latest_snapshot, next_timestamp, raise_clock
from txnkv.coordinator.commit_log import CommitLog
from txnkv.coordinator.commit_queue import SmallCommit
from txnkv.coordinator.coordinator import KEEPALIVE_TIME, Coordinator
from txnkv.coordinator.damage import DAMAGE, EVERY, Kinds, raise_first
from txnkv.coordinator.held import Key
from txnkv.coordinator.id_ranges import Held
from txnkv.coordinator.ids import EPOCH, MAX_TIMESTAMP, Timestamp, TxnId
from txnkv.coordinator.lease import Lease
from txnkv.coordinator.liveness import MIN_KEEPALIVE
from txnkv.coordinator.locks import LOCK_TIMEOUT, Verdict
from txnkv.coordinator.loss import Loss, LostRows
from txnkv.coordinator.metadata_store import PARTITION, late_by, past_timeout
from txnkv.coordinator.orchestration import ending_error
from txnkv.coordinator.participant import Participants
from txnkv.coordinator.payload import Section
from txnkv.coordinator.query import one
from txnkv.coordinator.states import TxnState
from txnkv.coordinator.status_table import TxnRow

__all__ = [
    "Applied",
    "Catalog",
    "CommitLog",
    "Coordinator",
    "DAMAGE",
    "EPOCH",
    "EVERY",
    "Held",
    "KEEPALIVE_TIME",
    "Key",
    "Kinds",
    "LOCK_TIMEOUT",
    "Lease",
    "Loss",
    "LostRows",
    "MAX_TIMESTAMP",
    "MIN_KEEPALIVE",
    "Mark",
    "Marks",
    "PARTITION",
    "Participants",
    "Section",
    "SmallCommit",
    "Timestamp",
    "TxnId",
    "TxnRow",
    "TxnState",
    "Verdict",
    "applications",
    "clock",
    "commit_log",
    "coordinator",
    "ending_error",
    "held",
    "id_ranges",
    "jobs",
    "late_by",
    "latest_snapshot",
    "locks",
    "named",
    "next_timestamp",
    "one",
    "past_timeout",
    "payload",
    "purge",
    "raise_clock",
    "raise_first",
    "status_schema",
    "status_table",
]
