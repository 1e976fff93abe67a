"""A change of leaders, and tables: it costs nothing in a tablet, and who led before harms none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.tables.maintenance import history


@pytest.fixture
def taken(connect: Callable[..., txnkv.Client], by_hand: Callable[..., None]) -> txnkv.Client:
    """A client without history, whose rounds are run by hand."""
    return connect(history=0.0)


def replace_rows(client: txnkv.Client, rounds: int) -> None:
    """Flushed row sets, all but the last of which are replaced by a compaction in the end."""
    for number in range(rounds):
        with client.transaction() as txn:
            for key in range(3):
                txn.upsert("t", {"id": key, "v": str(number)})
        internals.flush(client)


def test_a_new_leader_writes_into_no_tablet(
    taken: txnkv.Client, connect: Callable[..., txnkv.Client], by_hand: Callable[..., None]
) -> None:
    """With thousands of tablets a write in each took longer than the lease holds."""
    table = taken.create_table(
        "t",
        txnkv.Schema({"id": "int64", "v": "string"}, primary_key=["id"]),
        partition_by=txnkv.hash_partition("id", 4),
    )
    replace_rows(taken, 1)
    by_hand(taken)
    term = internals.maintenance(taken).lease.term
    assert term is not None
    folder = internals.store(taken).directory.path / "tablets"
    taken.close()
    before = {file: file.read_bytes() for file in folder.glob("*/data.mdb")}
    assert before

    leader = connect()
    by_hand(leader)
    assert internals.maintenance(leader).lease.term == term + 1
    assert internals.store(leader).environments.open_count == 0
    assert {file: file.read_bytes() for file in folder.glob("*/data.mdb")} == before
    assert leader.table(table.name).count() == 3


def test_an_old_leader_that_goes_on_collecting_harms_nothing(
    taken: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped before it removes a row set; another collects, flushes and compacts."""
    taken.create_table("t", txnkv.Schema({"id": "int64", "v": "string"}, primary_key=["id"]))
    replace_rows(taken, 3)
    engine = internals.tables(taken)
    monkeypatch.setattr(history, "collect", lambda engine: 0)
    taken.compact()
    monkeypatch.undo()
    tablet_of = engine.tablet
    went_on = 0

    def stopped(id: int) -> Any:
        nonlocal went_on
        monkeypatch.setattr(engine, "tablet", tablet_of)
        went_on = history.collect(engine)
        replace_rows(taken, 2)
        taken.compact()
        return tablet_of(id)

    monkeypatch.setattr(engine, "tablet", stopped)
    assert history.collect(engine) == went_on == 3
    assert [row["v"] for row in taken.table("t").scan()] == ["1"] * 3
    assert taken.check().problems == []
