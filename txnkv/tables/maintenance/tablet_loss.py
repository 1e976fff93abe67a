"""Giving up what a damaged tablet has lost, so that the rest of it works again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

from txnkv import core
from txnkv.coordinator import Loss, LostRows, held, payload, status_table
from txnkv.storage import Environment, mend
from txnkv.tables.maintenance import flush
from txnkv.tables.maintenance.table_check import Counted, check_row_set, row_set_ids
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    BLOCKS_DB,
    FENCE_DB,
    KIND,
    RowSetInfo,
    Tablet,
    delete_row_set,
    manifest,
)


class _Aside(Tablet):
    """A tablet whose environment is aside."""

    def __init__(self, tables: Tables, tablet: Tablet, environment: Environment) -> None:
        super().__init__(tables.store, tablet.table, tablet.number, tables.log, tables.memory)
        self._aside = environment
        environment.db(BLOCKS_DB)
        environment.db(FENCE_DB)

    def environment(self, *, create: bool = False) -> Environment:
        """Return the environment that is aside."""
        return self._aside


def accept_loss(tables: Tables, tablet: Tablet, *, really: bool) -> Loss:
    """Give up the row sets and small commits of a tablet that are not whole.

    Args:
        tables: the tables.
        tablet: a damaged one.
        really: else it is only looked at, and nothing changes.

    Raises:
        UnavailableError: another process has its files open.
    """
    store, name = tables.store, f"tablets/{tablet.id}"
    key = (payload.TABLET, tablet.id)
    with store.compaction(), store.maintenance():
        environment = store.environments.known(name, tablet.label, tablet.part)
        with mend(environment, name) as it:
            aside = _Aside(tables, tablet, it.environment)
            with store.status.read() as cur:
                infos = manifest.readable(cur, tablet.id)
                touched = status_table.transactions_of(cur, KIND, [tablet.id])
                commits = held.damaged(cur, key)
            lost = [info for info in infos if any(check_row_set(aside, info, Counted()))]
            loss = Loss(
                tablet.label,
                rows=tuple(_described(tablet, info) for info in lost),
                commits=tuple(commits),
                transactions=tuple(touched),
            )
            if not really:
                return loss
            kept = {info.id for info in infos} - {info.id for info in lost}
            gone = row_set_ids(aside) - kept

            def delete(txn: Any) -> None:
                for id in gone:
                    delete_row_set(txn, aside, id)

            it.environment.write(delete)
            it.put_in_place(store.status, lambda cur: _forget(cur, key, lost))
        tablet.forget(info.id for info in lost)
    tables.coordinator.orchestrator.give_up(touched, f"{tablet.label} lost what was written to it")
    tables.coordinator.damage.clear(tablet.label)
    flush.flush(tables)
    return loss


def _forget(cur: apsw.Cursor, key: held.Key, lost: Sequence[RowSetInfo]) -> None:
    held.give_up(cur, key)
    manifest.forget(cur, [info.id for info in lost])
    manifest.bump(cur)


def _described(tablet: Tablet, info: RowSetInfo) -> LostRows:
    first, last = _values(tablet, info.min_key), _values(tablet, info.max_key)
    return LostRows(info.id, info.rows, info.live_rows, first, last, info.min_stamp, info.stamp)


def _values(tablet: Tablet, key: bytes) -> tuple[Any, ...]:
    try:
        return tablet.codec.decode_one(key)
    except core.CoreError:
        return (key,)  # damaged, as all may be here
