"""The parts of a store behind a client, by name: the one place of the tests that knows the way."""

from __future__ import annotations

import weakref

import txnkv
from txnkv.coordinator import Coordinator, Timestamp
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage import Runtime, StatusDatabase, Store
from txnkv.storage.runtime_file import CHANGE, PENDING
from txnkv.tables import TableEngine
from txnkv.tables.maintenance.compactor import Compacted
from txnkv.topics import TopicEngine
from txnkv.transaction import Instance

BEHIND: weakref.WeakKeyDictionary[txnkv.Client, txnkv.Client] = weakref.WeakKeyDictionary()
"""For a client of a server in this process, one that has the store open."""


def _instance(client: txnkv.Client) -> Instance:
    return BEHIND.get(client, client).instance


def store(client: txnkv.Client) -> Store:
    return _instance(client).store


def status(client: txnkv.Client) -> StatusDatabase:
    return _instance(client).store.status


def runtime(client: txnkv.Client) -> Runtime:
    return _instance(client).store.runtime


def coordinator(client: txnkv.Client) -> Coordinator:
    return _instance(client).coordinator


def maintenance(client: txnkv.Client) -> Maintenance:
    return _instance(client).coordinator.maintenance


def latest(client: txnkv.Client) -> Timestamp:
    """The snapshot that a new reader gets."""
    return _instance(client).coordinator.latest()


def tables(client: txnkv.Client) -> TableEngine:
    return _instance(client).engine


def topics(client: txnkv.Client) -> TopicEngine:
    return _instance(client).topics


def flush(client: txnkv.Client) -> Timestamp:
    """Write the committed memory of all tables and the tails of all topics."""
    return _instance(client).engine.flush()


def compact(client: txnkv.Client) -> Compacted:
    """Compact whatever can be compacted."""
    return _instance(client).engine.compactor.compact_all()


def die_in_commit(runtime: Runtime) -> None:
    """Leave the words of the runtime as a writer does that was killed in its COMMIT."""
    words = runtime.shared
    words.add(PENDING, 1)
    words.store(CHANGE, words.load(CHANGE) | 1)
