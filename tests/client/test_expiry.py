"""Rows whose time is over are deleted, in transactions as any other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.transaction import autocommit

COLUMNS = {"id": "int64", "seen": "timestamp[us, tz=UTC]?"}
NOW = datetime.now(UTC)


@pytest.fixture(autouse=True)
def each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round looks, and nobody makes one but the test."""
    monkeypatch.setattr(autocommit, "EXPIRY_EVERY", 0)
    monkeypatch.setattr("txnkv.coordinator.maintenance.Maintenance.start", lambda _: None)


def made(client: txnkv.Client, seconds: float = 86400) -> txnkv.Table:
    return client.create_table("t", txnkv.Schema(COLUMNS, ["id"], ttl=("seen", seconds)))


def expire(client: txnkv.Client) -> None:
    internals.maintenance(client).round(resume_all=True)


def ids(table: txnkv.Table, **options: Any) -> list[int]:
    return table.scan(["id"], ordered=True, **options).to_arrow()["id"].to_pylist()


@pytest.mark.usefixtures("size")
def test_rows_go_when_their_time_is_over_and_no_others(client: txnkv.Client) -> None:
    """Small and large alike; a snapshot of before has them, and a difference tells of it."""
    table = made(client)
    ages = [900_000, 90_000, 43_200, 0, -90_000]
    with client.transaction() as txn:
        for id, age in enumerate(ages):
            txn.insert(table, (id, NOW - timedelta(seconds=age)))
        txn.insert(table, (9, None))
    with client.snapshot() as before:
        expire(client)
        assert ids(table) == [2, 3, 4, 9]
        assert ids(table, snapshot=before) == [0, 1, 2, 3, 4, 9]
        gone = table.diff(before).read_all().to_pylist()
        assert {(row["id"], row["_op"]) for row in gone} == {(0, "delete"), (1, "delete")}
    assert table.get(0) is None
    table.insert((0, NOW))
    expire(client)
    assert ids(table) == [0, 2, 3, 4, 9]


def test_rows_of_several_tablets_flushed_or_not_a_part_at_a_time(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autocommit, "EXPIRY_ROWS", 40)
    monkeypatch.setattr(autocommit, "EXPIRY_EVERY", 1 << 40)
    parts = txnkv.hash_partition("id", 3)
    schema = txnkv.Schema({"id": "int64", "at": "timestamp[us]"}, ["id"], ttl=("at", 0))
    table = client.create_table("t", schema, parts)
    past = datetime(2026, 1, 1)
    with client.transaction() as txn:
        times = pa.array([past] * 90 + [datetime(2090, 1, 1)] * 10, pa.timestamp("us"))
        txn.write(table, pa.table({"id": range(100), "at": times}))
    internals.flush(client)
    table.insert((100, past))
    left = []
    for _ in range(4):
        expire(client)
        left.append(table.count())
    assert left == [61, 21, 10, 10], "a full one is followed by another at once"
    table.insert((200, past))
    expire(client)
    assert table.count() == 11, "the next look is later"


def test_a_row_that_gets_another_time_meanwhile_stays(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The story: looked up as expired, refreshed by a user, deleted by what was looked up."""
    table = made(client)
    for id in (1, 2):
        table.insert((id, NOW - timedelta(days=10)))
    chunks = autocommit.arrow_input.chunks

    def refreshed(*args: Any) -> Any:
        monkeypatch.setattr(autocommit.arrow_input, "chunks", chunks)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(table.update, {"id": 1, "seen": NOW}).result()
        return chunks(*args)

    monkeypatch.setattr(autocommit.arrow_input, "chunks", refreshed)
    expire(client)
    assert ids(table) == [1, 2]
    expire(client)
    assert ids(table) == [1]
    assert client.check().problems == []


def test_it_is_part_of_the_table_and_altered(tmp_path: Path) -> None:
    with txnkv.connect(tmp_path / "s") as client:
        table = made(client)
        with pytest.raises(txnkv.TableExistsError, match="its rows live 86400 s"):
            client.create_table("t", txnkv.Schema(COLUMNS, ["id"]), exists_ok=True)
        with pytest.raises(txnkv.SchemaError, match="rows live by column 'seen'"):
            table.alter(drop=["seen"])
        client.create_index(table, "seen")
        table.alter(rename={"seen": "at"}, add={"more": "timestamp[us]?"})
    with txnkv.connect(tmp_path / "s") as client:
        table = client.table("t")
        assert table.schema.ttl == ("at", 86400)
        assert [index.columns for index in table.indexes] == [("at",)]
        assert eval(repr(table.schema), {"Schema": txnkv.Schema}).ttl == ("at", 86400)
        old = NOW - timedelta(days=10)
        table.insert({"id": 1, "at": old})
        assert table.alter(ttl=("more", 0)).ttl == ("more", 0)
        expire(client)
        assert ids(table) == [1]
        table.alter(drop=["more"], ttl=None)
        expire(client)
        assert ids(table) == [1]
        assert table.alter(ttl=("at", 8640000)).ttl == ("at", 8640000)
        expire(client)
        assert ids(table) == [1]
        table.alter(ttl=("at", 86400))
        expire(client)
        assert ids(table) == table.get_by("at", old) == []
        assert client.check().problems == []


@pytest.mark.parametrize(
    ("ttl", "text"),
    [
        (("none", 1), "there is no column 'none'"),
        (("id", 1), "'id' is int64"),
        (("seen", -1), "a column and seconds"),
        (("seen", float("inf")), "a column and seconds"),
        ("seen", "a column and seconds"),
        (("seen", "1"), "a column and seconds"),
    ],
)
def test_what_makes_no_sense_is_refused(client: txnkv.Client, ttl: Any, text: str) -> None:
    with pytest.raises(txnkv.SchemaError, match=text):
        txnkv.Schema(COLUMNS, ["id"], ttl=ttl)
    table = client.create_table("t", txnkv.Schema(COLUMNS, ["id"]))
    with pytest.raises(txnkv.SchemaError, match=text):
        table.alter(ttl=ttl)
    assert table.schema.ttl is None
