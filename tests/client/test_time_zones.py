"""Times without a zone do not become instants, nor the other way round, wherever one is given.

pyarrow takes a naive datetime for UTC and drops the zone of an aware one, in silence; so did rows,
keys, predicates, defaults, bounds and typed values before each went through one look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import txnkv

NAIVE = datetime(2026, 1, 31, 12)
AWARE = NAIVE.replace(tzinfo=UTC)
EAST = datetime(2026, 1, 31, 14, tzinfo=timezone(timedelta(hours=2)))
ZONED, PLAIN = "timestamp[us, tz=UTC]", "timestamp[us]"
REFUSALS = [(ZONED, NAIVE, "replace\\(tzinfo"), (PLAIN, AWARE, "astimezone")]


@dataclass
class Row:
    id: int
    at: Any
    all: Any = None


class Store:
    """A table and a topic with times of one kind, and a table whose key is one."""

    def __init__(self, client: txnkv.Client, kind: str) -> None:
        self.client = client
        columns = {"id": "int64", "at": f"{kind}?", "all": f"list<{kind}>?"}
        self.rows = client.create_table("rows", txnkv.Schema(columns, primary_key=["id"]))
        self.keys = client.create_table("keys", txnkv.Schema({"at": kind}, primary_key=["at"]))
        self.topic = client.create_topic("topic", value_schema=columns)

    def write(self, data: Any, op: str = "insert") -> None:
        self.client.new_session().write(self.rows, data, op)


def _insert(store: Store, row: Any) -> None:
    with store.client.transaction() as txn:
        txn.insert(store.rows, row)


def _arrow(value: datetime) -> pa.Table:
    return pa.table({"id": [1], "at": pa.array([value])})


WAYS: dict[str, Callable[[Store, Any], Any]] = {
    "dict": lambda store, value: _insert(store, {"id": 1, "at": value}),
    "tuple": lambda store, value: _insert(store, (1, value, None)),
    "dataclass": lambda store, value: _insert(store, Row(1, value)),
    "list": lambda store, value: _insert(store, (1, None, [None, value])),
    "pandas value": lambda store, value: _insert(store, (1, pd.Timestamp(value), None)),
    "update": lambda store, value: store.client.new_session().update(
        store.rows, {"id": 1, "at": value}
    ),
    "arrow": lambda store, value: store.write(_arrow(value)),
    "arrow list": lambda store, value: store.write(
        pa.table({"id": [1], "all": pa.array([[value]])})
    ),
    "arrow upsert": lambda store, value: store.write(_arrow(value), "upsert"),
    "pandas": lambda store, value: store.write(pd.DataFrame({"id": [1], "at": [value]})),
    "polars": lambda store, value: store.write(pl.DataFrame({"id": [1], "at": [value]})),
    "get": lambda store, value: store.keys.get(value),
    "get_many": lambda store, value: store.keys.get_many([value]),
    "get_many arrow": lambda store, value: store.keys.get_many(pa.array([value])),
    "txn.get": lambda store, value: store.client.new_transaction().get(store.keys, value),
    "delete": lambda store, value: store.client.new_session().delete(store.keys, value),
    "delete arrow": lambda store, value: store.client.new_session().write(
        store.keys, pa.table({"at": [value]}), "delete_ignore"
    ),
    "where": lambda store, value: store.rows.scan(where=[("at", ">", value)]),
    "where in": lambda store, value: store.rows.scan(where=[("at", "in", [value])]),
    "count": lambda store, value: store.rows.count([("at", "=", value)]),
    "range": lambda store, value: store.client.create_table(
        "cut", store.keys.schema, txnkv.range_partition("at", [value])
    ),
    "default": lambda store, value: txnkv.Schema(
        {"id": "int64", "at": txnkv.Column(store.keys.schema.columns["at"].type, default=value)},
        primary_key=["id"],
    ),
    "send": lambda store, value: store.client.new_session().send(
        store.topic, {"id": 1, "at": value, "all": None}
    ),
    "send list": lambda store, value: store.client.new_session().send(
        store.topic, {"id": 1, "at": None, "all": [value]}
    ),
    "producer": lambda store, value: store.topic.producer("p").send((1, value, None)),
}
IN_ARROW = {
    "arrow", "arrow list", "arrow upsert", "pandas", "polars", "delete arrow",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "value", "hint"), REFUSALS, ids=["naive", "aware"])
def test_refused_at_the_call_with_the_way_to_do_it(
    client: txnkv.Client, way: str, kind: str, value: datetime, hint: str
) -> None:
    store = Store(client, kind)
    in_arrow = "assume_timezone" if value is NAIVE else "local_timestamp"
    with pytest.raises(txnkv.SchemaError, match=in_arrow if way in IN_ARROW else hint):
        WAYS[way](store, value)
    assert store.rows.count() == 0
    assert client.transactions() == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "value"), [(ZONED, AWARE), (ZONED, EAST), (PLAIN, NAIVE)])
def test_what_fits_is_taken(client: txnkv.Client, way: str, kind: str, value: datetime) -> None:
    store = Store(client, kind)
    WAYS[way](store, value)
    for row in store.rows.scan():
        assert row["at"] in (None, value)
        assert row["all"] in (None, [value], [None, value])


@pytest.mark.parametrize(("kind", "value", "hint"), REFUSALS, ids=["naive", "aware"])
def test_expressions_and_batches_of_messages(
    client: txnkv.Client, kind: str, value: datetime, hint: str
) -> None:
    store = Store(client, kind)
    with pytest.raises(txnkv.SchemaError, match="does not fit the table's columns"):
        store.rows.scan(where=pc.field("at") > value)
    with pytest.raises(txnkv.SchemaError, match=r"assume_timezone|local_timestamp"):
        client.new_session().send_batch(store.topic, pa.table({"id": [1], "at": [value]}))


def test_numpy_times_have_no_zone(client: txnkv.Client) -> None:
    with pytest.raises(txnkv.SchemaError, match="no time zone"):
        _insert(Store(client, ZONED), (1, np.datetime64("2026-01-31T12:00", "us"), None))


def test_a_snapshot_is_named_by_an_aware_datetime(client: txnkv.Client) -> None:
    with pytest.raises(ValueError, match="no time zone"):
        client.snapshot(at=NAIVE)


def test_a_time_is_a_snapshot_a_timestamp_or_a_datetime(client):
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]))
    for ask in (
        lambda: client.snapshot("2026-01-31"),
        lambda: table.get(1, snapshot="2026-01-31"),
        lambda: table.scan(snapshot=1.5),
        lambda: table.diff("a", "b"),
        lambda: table.restore("2026-01-31"),
        lambda: txnkv.restore("somewhere", "elsewhere", at="2026-01-31"),
    ):
        with pytest.raises(TypeError, match="a time is a Snapshot, Timestamp or aware datetime"):
            ask()
