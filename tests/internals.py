"""The parts of a store behind a client, by name: the one place of the tests that knows the way."""

from __future__ import annotations

import txnkv
from txnkv.coordinator import Coordinator, Timestamp
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage import Runtime, StatusDatabase, Store
from txnkv.tables import TableEngine
from txnkv.tables.maintenance.compactor import Compacted
from txnkv.topics import TopicEngine


def store(client: txnkv.Client) -> Store:
    return client.instance.store


def status(client: txnkv.Client) -> StatusDatabase:
    return client.instance.store.status


def runtime(client: txnkv.Client) -> Runtime:
    return client.instance.store.runtime


def coordinator(client: txnkv.Client) -> Coordinator:
    return client.instance.coordinator


def maintenance(client: txnkv.Client) -> Maintenance:
    return client.instance.coordinator.maintenance


def latest(client: txnkv.Client) -> Timestamp:
    """The snapshot that a new reader gets."""
    return client.instance.coordinator.latest()


def tables(client: txnkv.Client) -> TableEngine:
    return client.instance.engine


def topics(client: txnkv.Client) -> TopicEngine:
    return client.instance.topics


def flush(client: txnkv.Client) -> Timestamp:
    """Write the committed memory of all tables and the tails of all topics."""
    return client.instance.engine.flush()


def compact(client: txnkv.Client) -> Compacted:
    """Compact whatever can be compacted."""
    return client.instance.engine.compactor.compact_all()
