"""Values of pandas, numpy and others that no column takes: refused over a server as in a folder."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import txnkv

from .test_same_answers import _run

TIMES = """
t = c.create_table("t", TYPES)
t.insert({"id": 1, "at": pd.NaT})
t.insert((1, None, pd.NaT, None))
t.upsert({"id": 1, "took": pd.NaT})
t.upsert({"id": 1, "at": np.datetime64("NaT")})
t.upsert({"id": 1, "at": np.datetime64("NaT", "us")})
t.upsert({"id": 1, "utc": np.datetime64("NaT", "ns")})
c.run(lambda x: x.insert(t, {"id": 1, "at": pd.NaT}))
t.get(pd.NaT)
t.count([("at", ">=", pd.NaT)])
t.count([("at", "in", [pd.NaT, pd.Timestamp("2024-01-01")])])
t.count([("utc", "<", pd.NaT)])
t.upsert({"id": 1, "at": 1.9})
t.upsert({"id": 1, "utc": np.float64(2)})
t.upsert({"id": 1, "took": -0.5})
t.upsert({"id": 1, "at": pd.Timestamp(5)})
t.upsert({"id": 1, "took": pd.Timedelta(5, "ns")})
t.count([("at", ">", pd.Timestamp(5))])
t.count([("took", ">", pd.Timedelta(5, "ns"))])
t.count([("at", "<", 5.0)])
t.insert({"id": 2, "at": pd.Timestamp("2024-01-01"), "utc": pd.Timestamp("2024-01-01", tz="UTC")})
t.upsert({"id": 3, "took": pd.Timedelta(5, "us")})
t.scan(ordered=True).to_arrow()
"""


SCALARS = [
    "np.int64(5)", "np.float32(1.5)", "np.float64(2)", "np.bool_(True)",
    'np.datetime64("2020-01-01")', 'np.datetime64("2020-01-01", "us")', "np.timedelta64(5, 's')",
    'np.datetime64("2020-01-01", "ns")', "np.timedelta64(5, 'ns')", "np.uint64(2**64 - 1)",
    "{1, 2}", "set()", "object()", "pd.NA", "range(3)", "bytearray(b'1')", "1+2j",
]  # fmt: skip
TYPES = [
    "bool", "int8", "float64", "string", "binary", "date32", "timestamp[us]", "duration[us]",
    "timestamp[us, tz=UTC]", "time64[us]", "decimal128(9, 2)", "uuid", "json", "list<int64>",
]  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_values_of_others(tmp_path: Path, kind: str) -> None:
    lines = [f"t = c.create_table('t', Schema({{'id': 'int64', 'v': '{kind}?'}}, ['id']))"]
    for at, value in enumerate(SCALARS):
        if not (kind == "json" and value == "range(3)"):
            lines.append(f"t.insert({{'id': {at}, 'v': {value}}})")
            lines.append(f"t.upsert(({at}, {value}))")
        lines += [f"t.get({at})", f"t.count([('v', '=', {value})])", f"t.update({value})"]
        lines += [f"t.get({value})", f"t.delete({value})", "t.get_many([1])"]
    _run("\n".join(lines), tmp_path, _names())


DAYS = pa.array([date(2026, 1, 2), None, date(2026, 1, 3)])
DICTIONARIES = {
    "date32": DAYS.dictionary_encode(),
    "timestamp[us]": DAYS.cast(pa.timestamp("us")).dictionary_encode(),
    "decimal128(5, -2)": pa.array([Decimal(700), None], pa.decimal128(5, -2)).dictionary_encode(),
    "list<date32>": pa.ListArray.from_arrays([0, 2, 3], DAYS.dictionary_encode()),
    "struct<a: date32>": pa.StructArray.from_arrays([DAYS.dictionary_encode()], ["a"]),
    "uuid": pa.DictionaryArray.from_arrays([1, None], pa.array([UUID(int=5).bytes] * 2, pa.uuid())),
}


@pytest.mark.parametrize("kind", DICTIONARIES)
def test_dictionaries_of_every_value(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], kind: str
) -> None:
    """As a table and as a stream, which ends with a batch without rows."""
    values = DICTIONARIES[kind]
    store.create_table("d", txnkv.Schema({"id": "int64", "v": f"{kind}?"}, primary_key=["id"]))
    data = pa.table({"id": range(len(values)), "v": values})
    for client in (store, remote()):
        table = client.table("d")
        for given in (data, data.to_reader()):
            with client.transaction() as txn:
                txn.write(table, given, "upsert")
                assert table.count() == 0
                assert txn.scan(table).to_arrow()["v"].to_pylist() == values.to_pylist()
                txn.rollback()


def test_plainer_values_of_numpy(client: txnkv.Client) -> None:
    types = {"id": "date32", "m": "decimal128(9, 2)", "at": "timestamp[us]", "took": "duration[us]"}
    table = client.create_table("t", txnkv.Schema(types, primary_key=["id"]))
    day, five = np.datetime64("2026-01-02"), np.int64(5)
    table.insert((day, five, np.datetime64("2026-01-02T03", "s"), np.timedelta64(5, "s")))
    at = datetime(2026, 1, 2, 3)
    wanted = {"id": at.date(), "m": Decimal(5), "at": at, "took": timedelta(seconds=5)}
    assert table.get(day) == table.get(at.date()) == wanted
    assert table.count([("m", "in", [five, 7]), ("took", "=", np.timedelta64(5000, "ms"))]) == 1


def test_a_row_for_columns_that_are_there_by_now(
    store: txnkv.Client, remote: Callable[..., txnkv.Client]
) -> None:
    """It is checked here, by the columns that this client knows, and then by the present ones."""
    table = remote().table("t")
    store.table("t").alter(add={"n": "int64?"}, drop=["v"])
    table.insert({"id": 1, "n": 5})
    table.upsert((2, 6))
    assert [row["n"] for row in table.scan(ordered=True)] == [5, 6]
    with pytest.raises(txnkv.SchemaError, match="there is no column 'v'"):
        table.insert({"id": 3, "v": "a"})
    with pytest.raises(txnkv.SchemaError, match=r"7\.5 is a float"):
        table.delete(7.5)


NAMES = """
e = c.create_topic("e")
e.subscribe(5)
e.subscribe(5, type="x")
e.subscribe(None, type="shared")
e.subscribe(b"s")
e.subscribe("")
e.drop_subscription(5)
"""


def test_names_that_are_no_text(tmp_path: Path, client: txnkv.Client) -> None:
    _run(NAMES, tmp_path, {})
    topic = client.create_topic("e")
    with pytest.raises(TypeError, match="a subscription's name is a string, not the int 5"):
        topic.subscribe(5)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("wrong", [float("nan"), "5", True])
def test_a_wait_for_no_number_of_seconds(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], there: bool, wrong: Any
) -> None:
    """One for nan had no end."""
    client = remote() if there else store
    topic = client.topic("events")
    consumer, subscription = topic.consumer(), topic.subscribe("s")
    with client.consumer(topic, group="g") as member:
        for wait in (member.poll, consumer.poll, consumer.poll_batch, subscription.receive):
            with pytest.raises((TypeError, ValueError), match="timeout is a number of seconds"):
                wait(timeout=wrong)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("option", ["timeout", "lock_timeout"])
def test_a_transaction_for_no_number_of_seconds(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], there: bool, option: str
) -> None:
    client: Any = remote() if there else store
    with pytest.raises(TypeError, match=f"{option} is a number of seconds, not the str 'a'"):
        client.new_transaction(**{option: "a"})


@pytest.mark.parametrize("there", [False, True])
def test_numbers_of_numpy_are_numbers(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], there: bool
) -> None:
    """Some were refused, others kept as they were, and one was no JSON."""
    client, one = remote() if there else store, np.int64(1)
    topic = client.create_topic("e", retention_seconds=np.float32(60), segment_seconds=one)
    client.run(lambda txn: [txn.send(topic, b"v") for _ in range(3)])
    options: Any = {"max_deliveries": np.int64(3), "lease_seconds": np.float32(5)}
    subscription, consumer = topic.subscribe("s", "shared", **options), topic.consumer()
    assert subscription.info.max_deliveries == 3
    with client.consumer(topic, group="g") as member:
        member.poll(timeout=0)
        for seek in (subscription.seek, consumer.seek, member.seek):
            seek(np.int64(0), one)
        assert type(consumer.lag()) is type(member.position(0)) is int
        assert (consumer.lag(), member.lag(), subscription.lag()) == (2, 2, {0: 2})
    assert topic.truncate({np.int64(0): one}) == {0: 1}
    for wrong in (True, 1.5):
        for call in (consumer.seek, subscription.seek, lambda *at: topic.truncate(dict([at]))):
            with pytest.raises(TypeError, match="offset is a number, not the"):
                call(0, wrong)


def test_times(tmp_path: Path) -> None:
    """As text pandas' NaT is the first day of year 1, which was stored; of others the whole part
    was.
    """
    _run(TIMES, tmp_path, _names())


def _names() -> dict[str, object]:
    types = {"id": "int64", "at": "timestamp[us]?", "utc": "timestamp[us, tz=UTC]?"}
    types |= {"took": "duration[us]?"}
    return {"np": np, "pd": pd, "TYPES": txnkv.Schema(types, primary_key=["id"])}
