"""Removing the files of topics that were dropped."""

from __future__ import annotations

from collections.abc import Collection

from txnkv.coordinator.query import one
from txnkv.coordinator.states import TxnState
from txnkv.storage import dropped, extents
from txnkv.storage.store import Store
from txnkv.topics import side_own
from txnkv.topics.topics import Topics


def purge(topics: Topics) -> None:
    """Remove the files of dropped topics that nobody reads any more."""
    store = topics.store
    dropped.settle()
    pin = store.runtime.least_pin()
    with store.status.read() as cur:
        (floor,) = one(
            cur,
            "SELECT min(snapshot_ts) FROM transactions WHERE state = ?",
            (int(TxnState.OPEN),),
        )
        least = min((ts for ts in (pin, floor) if ts is not None), default=None)
        gone = [
            (topic_id, id)
            for topic_id, id in cur.execute(
                "SELECT topics.id, partitions.id FROM topics "
                "JOIN partitions ON topic_id = topics.id "
                "WHERE dropped_ts < coalesce(?, dropped_ts + 1)",
                (least,),
            )
        ]
    if not gone:
        return
    _forget_extents(store, [id for _, id in gone])
    for _, id in gone:
        topics.forget(id)
        _remove(store, id)
    with store.status.write() as cur:
        cur.executemany("DELETE FROM topics WHERE id = ?", {(topic,) for topic, _ in gone})


def remove_strays(topics: Topics) -> None:
    """Remove folders of partitions that are not in the catalog: a writer that was stopped while
    its topic was dropped and purged makes one anew.
    """
    store = topics.store
    folder = store.directory.log_dir(0).parent
    there = {int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()}
    with store.status.read() as cur:
        known = {id for (id,) in cur.execute("SELECT id FROM partitions")}
        strays = extents.strays(cur, "logs", known)
    _forget_extents(store, strays | (there - known))
    for id in there - known:
        _remove(store, id)


def _forget_extents(store: Store, ids: Collection[int]) -> None:
    # Before the files go; not synced, for what comes back is of no topic that is there.
    if ids:
        with store.status.write(sync=False) as cur:
            extents.forget(cur, [f"logs/{id}" for id in ids])


def _remove(store: Store, id: int) -> None:
    side_own.close_all(store.environments, store.directory.log_dir(id), f"logs/{id}")
    store.environments.drop(f"logs/{id}")
    store.directory.remove_log_dir(id)
