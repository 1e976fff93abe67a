"""When the tables of a store are looked after: the leader's part of each round.

Flush when the log is long or old; compact in a thread of its own, for that takes long and the
round has transactions to look after; collect what nobody reads any more. What another process
began and did not finish is removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.query import one
from txnkv.storage.seam import clock
from txnkv.tables import flush, history, replacing

if TYPE_CHECKING:
    from txnkv.tables.engine import TableEngine

FLUSH_BYTES: Final = 16 << 20
FLUSH_COMMITS: Final = 1 << 16
FLUSH_AGE: Final = 60 * 1_000_000
"""Microseconds for which a small commit may be in the log alone."""


def look_after(engine: TableEngine) -> None:
    """One round: what is due is done, or begun."""
    guard = engine.coordinator.damage.guard
    with guard("tables", "flush"):
        if flush_due(engine):
            flush.flush(engine)
        else:
            _remove_leftovers(engine)
    with guard("tables", "collection of old row sets"):
        history.collect(engine)
    with guard("tables", "compaction"):
        engine.compactor.wake()


def flush_due(engine: TableEngine) -> bool:
    """Return True when the commit log is long or old enough to be flushed."""
    log = engine.log
    log.latest()
    lag = _lag(engine)
    metrics = engine.coordinator.metrics
    metrics.flush_lag_seconds.set(lag / 1e6)
    metrics.memory_bytes.set(engine.memory.nbytes)
    return log.pending_bytes > FLUSH_BYTES or log.pending_commits > FLUSH_COMMITS or lag > FLUSH_AGE


def _lag(engine: TableEngine) -> int:
    """Age in microseconds of the oldest commit that is in the log alone; 0 when there is none."""
    with engine.store.status.read() as cur:
        (oldest,) = one(
            cur,
            "SELECT min(commit_ts) FROM commit_log "
            "WHERE commit_ts > (SELECT flushed_ts FROM clock)",
        )
    return 0 if oldest is None else max(clock.now_micros() - Timestamp(oldest).micros, 0)


def _remove_leftovers(engine: TableEngine) -> None:
    with engine.store.status.read() as cur:
        left = replacing.unfinished(cur, flush.WHO)
    if left:
        with engine.maintenance():
            flush.sweep(engine)
