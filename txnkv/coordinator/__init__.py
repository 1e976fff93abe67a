"""Transactions: their states, the status table, and how they are driven to their end.

    ids                        transaction ids, hybrid time
    status_schema, status_table, partition_locks, jobs    rows of status.db and the moves on them
    orchestration              the participant interface, and the protocol over all of these
    commit_log, commit_queue, payload    one-phase commits of small transactions
    catalog                    tables and topics as a process remembers them, and what was dropped
    applications               versions of applications, which commit with a transaction
    damage, held               parts that fail, and what is held for them
    liveness, maintenance      lease and heartbeats; the work that nobody waits for
    coordinator                all of it, for the layers above

It knows no tables: they register as participants.
"""

from txnkv.coordinator import (
    applications,
    commit_log,
    coordinator,
    held,
    jobs,
    partition_locks,
    payload,
    status_schema,
    status_table,
)
from txnkv.coordinator.applications import Applied, Mark, Marks
from txnkv.coordinator.catalog import Catalog, forget_extents, least_snapshot, remove_strays
from txnkv.coordinator.commit_log import CommitLog
from txnkv.coordinator.commit_queue import CommitRequest, ShieldedFuture, SmallCommit, commit_of
from txnkv.coordinator.coordinator import KEEPALIVE_TIME, Coordinator, renew
from txnkv.coordinator.damage import DAMAGE, EVERY, FAILING, Kinds, Loss, LostRows, raise_first
from txnkv.coordinator.held import Key
from txnkv.coordinator.ids import (
    EPOCH,
    MAX_TIMESTAMP,
    Timestamp,
    TxnId,
    aging_micros,
    ahead_of_clock,
    latest_snapshot,
    low_water_mark,
    next_timestamp,
    reach,
    repair_clock,
    stamp_of,
    wall_timestamp,
    warn_ahead,
)
from txnkv.coordinator.jobs import name_transaction, names_below
from txnkv.coordinator.liveness import MIN_KEEPALIVE, Lease
from txnkv.coordinator.maintenance import watch
from txnkv.coordinator.orchestration import Participants
from txnkv.coordinator.partition_locks import LOCK_TIMEOUT, Verdict
from txnkv.coordinator.payload import Section, section_of
from txnkv.coordinator.status_schema import one
from txnkv.coordinator.status_table import (
    PARTITION,
    PartIds,
    TxnRow,
    TxnState,
    ending_error,
    late_by,
    past_timeout,
)
