"""How a transaction begins: in memory, without any I/O."""

from __future__ import annotations

from txnkv.context import TxnContext
from txnkv.coordinator.ids import Timestamp
from txnkv.instance import Instance
from txnkv.tables import history


def begin(
    instance: Instance,
    *,
    timeout: float | None,
    isolation: str,
    locking: str,
    keepalive: float,
    age_ts: Timestamp | None = None,
    transactional: bool = True,
) -> TxnContext:
    """A new transaction at the latest snapshot, which stays pinned until its end. No I/O."""
    coordinator = instance.coordinator
    snapshot = history.pin_latest(coordinator)
    try:
        row = coordinator.begin(
            timeout=timeout,
            isolation=isolation,
            locking=locking,
            keepalive=keepalive,
            age_ts=age_ts,
            snapshot=snapshot,
        )
    except BaseException:
        instance.store.runtime.unpin(snapshot)
        raise
    return TxnContext(instance, row, stored=False, transactional=transactional)
