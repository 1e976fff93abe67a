"""The begin of a transaction: in memory, without any I/O."""

from __future__ import annotations

from txnkv.coordinator import Timestamp
from txnkv.instance import Instance
from txnkv.tables import history
from txnkv.transaction.context import TxnContext
from txnkv.transaction.heartbeats import Holding


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
    holding = Holding(instance)
    coordinator = instance.coordinator
    row = coordinator.begin(
        timeout=timeout,
        isolation=isolation,
        locking=locking,
        keepalive=keepalive,
        age_ts=age_ts,
        snapshot=history.pin_latest(coordinator, holding.held),
        held=holding.held,
    )
    return TxnContext(instance, row, stored=False, transactional=transactional, holding=holding)
