"""One row of a table, written outside of any transaction: durable at the return."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.conftest import Process
from txnkv import core
from txnkv.storage.faults import arm, disarm


def test_each_call_is_a_commit(table: txnkv.Table, connect: Callable[..., txnkv.Client]) -> None:
    other = connect().table(table.name)
    table.insert((1, "a"))
    assert other.get(1) == {"id": 1, "v": "a"}
    table.upsert({"id": 1, "v": "b"})
    table.upsert((2, None))
    assert list(other.scan(ordered=True)) == [{"id": 1, "v": "b"}, {"id": 2, "v": None}]
    table.update({"id": 2, "v": "c"})
    table.delete(1)
    assert list(other.scan()) == [{"id": 2, "v": "c"}]


@pytest.mark.parametrize(
    ("op", "row", "why"),
    [("insert", (1, "b"), "key 1"), ("update", (2, "b"), "key 2"), ("delete", 2, "key 2")],
)
def test_a_refused_row_is_told_at_the_call(table: txnkv.Table, op: str, row: Any, why: str) -> None:
    table.insert((1, "a"))
    with pytest.raises(txnkv.RowErrors, match=why) as refused:
        getattr(table, op)(row)
    assert refused.value.count == 1
    assert list(table.scan()) == [{"id": 1, "v": "a"}]


def test_what_does_not_fit_is_refused(
    table: txnkv.Table, connect: Callable[..., txnkv.Client]
) -> None:
    with pytest.raises(txnkv.SchemaError, match="'id'"):
        table.insert(("one", None))
    reader = connect(read_only=True).table(table.name)
    with pytest.raises(txnkv.NotSupportedError, match="read_only"):
        reader.insert((1, None))
    assert table.count() == 0


def test_threads_insert_one_key_once(table: txnkv.Table) -> None:
    def insert(number: int) -> bool:
        try:
            table.insert((7, str(number)))
        except txnkv.RowErrors:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(insert, range(16))) == 1


def test_the_disk_is_hurried_where_nobody_else_writes(
    client: txnkv.Client,
    table: txnkv.Table,
    monkeypatch: pytest.MonkeyPatch,
    process: Callable[..., Process],
) -> None:
    """Others would wait for the turn meanwhile."""
    status, hurried = internals.status(client), []
    put = status.put

    def noted(*row: Any, hasten: bool) -> None:
        hurried.append(hasten)
        put(*row, hasten=hasten)

    monkeypatch.setattr(status, "put", noted)
    for id in range(3):
        table.insert((id, None))
    process("client.table('t').insert((3, None))").finish(0)
    table.insert((4, None))
    table.insert((5, None))
    assert hurried[1:] == [True, True, False, True]
    assert table.count() == 6


@pytest.mark.parametrize("point", ["log.written", "log.durable"])
def test_killed_beside_the_commit(
    client: txnkv.Client, table: txnkv.Table, process: Callable[..., Process], point: str
) -> None:
    child = process("client.table('t').insert((1, 'a'))", fault=f"{point}=kill")
    child.finish(-9)
    assert table.get(1) == (None if point == "log.written" else {"id": 1, "v": "a"})


@pytest.mark.parametrize("several", [False, True], ids=["one table", "a topic too"])
def test_a_commit_that_broke_off_leaves_nothing_where_memory_is_short(
    client: txnkv.Client, table: txnkv.Table, process: Callable[..., Process], several: bool
) -> None:
    """To take it back wants memory, too: what is held is then forgotten, and read again."""
    topic = client.create_topic("mail")
    for number in range(5):
        table.insert((number, "there"))

    def fail() -> None:
        raise MemoryError("no memory")

    txn = client.new_transaction()
    txn.insert(table, (10, "ghost"))
    txn.delete(table, 2)
    if several:
        txn.send(topic, b"ghost")
    arm("log.written", fail)
    with pytest.MonkeyPatch.context() as short:
        short.setattr(core.MemRowSet, "copy", lambda *_: fail())
        with pytest.raises((txnkv.UnavailableError, txnkv.CommitOutcomeUnknownError)):
            txn.commit()
        disarm()
    if txn.state is txnkv.TxnState.OPEN:  # it may be tried again
        txn.rollback()
    assert txn.state is txnkv.TxnState.ABORTED
    wanted = [{"id": number, "v": "there"} for number in range(5)]
    assert [row for number in range(11) if (row := table.get(number))] == wanted
    assert table.scan(ordered=True).to_arrow().to_pylist() == wanted
    table.insert((5, "next"))
    internals.flush(client)
    wanted.append({"id": 5, "v": "next"})
    assert table.scan(ordered=True).to_arrow().to_pylist() == wanted
    process("assert client.table('t').count() == 6 and client.table('t').get(2)").finish(0)
    with topic.consumer() as consumer:
        assert consumer.poll(timeout=0) == []
    assert client.check().problems == []
