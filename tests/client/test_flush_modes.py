"""Flush modes and pending errors: the peer's table of what a session does, and its bounds."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import txnkv
from txnkv.errors import RowErrors

MODES = ["manual", "auto_background", "auto_sync"]


@pytest.mark.parametrize("mode", MODES)
def test_a_session_says_its_mode(client: txnkv.Client, mode: str) -> None:
    assert client.new_session(mode).flush_mode == mode


@pytest.mark.parametrize("mode", MODES)
def test_every_operation_in_every_mode(make: Any, table: txnkv.Table, mode: str) -> None:
    session, end = make(mode)
    session.insert(table, (1, "a"))
    session.insert(table, (2, "a"))
    session.insert_ignore(table, (1, "b"))
    session.upsert(table, {"id": 2, "v": "c"})
    session.update(table, {"id": 1, "v": "d"})
    session.update_ignore(table, (9, "x"))
    session.insert(table, (3, "e"))
    session.delete(table, 3)
    session.delete_ignore(table, 3)
    end()
    assert list(table.scan(ordered=True)) == [{"id": 1, "v": "d"}, {"id": 2, "v": "c"}]


@pytest.mark.parametrize("mode", MODES)
def test_an_error_is_told_once_in_every_mode(make: Any, table: txnkv.Table, mode: str) -> None:
    """At the call in auto_sync, else at the flush; the other rows stand."""
    session, end = make(mode)
    session.insert(table, (1, "a"))
    if mode == "auto_sync":
        with pytest.raises(txnkv.RowErrors, match="insert into 't', key 1"):
            session.insert(table, (1, "b"))
        with pytest.raises(txnkv.RowErrors, match="no row has this key"):
            session.update(table, (5, "b"))
    else:
        session.insert(table, (1, "b"))
        session.update(table, (5, "b"))
        with pytest.raises(txnkv.RowErrors) as caught:
            session.flush()
        assert [(e.op, e.key) for e in caught.value.errors] == [("insert", 1), ("update", 5)]
    session.insert(table, (2, "c"))
    end()
    assert table.count() == 2


@pytest.mark.parametrize("mode", MODES)
def test_the_errors_that_are_kept_are_bounded(
    make: Any, table: txnkv.Table, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are counted, the last ones kept: a session that nobody asks does not grow."""
    monkeypatch.setattr(RowErrors, "KEPT", 10)
    session, end = make(mode)
    for id in range(30):
        try:
            session.update(table, (id, "x"))
        except txnkv.RowErrors:
            assert mode == "auto_sync"
    if mode == "auto_sync":
        assert [error.key for error in session.pending_errors()] == list(range(20, 30))
    else:
        with pytest.raises(txnkv.RowErrors) as caught:
            session.flush()
        assert caught.value.count == 30
        assert len(caught.value.errors) == 10
        assert len(session.pending_errors()) == 10
    assert session.pending_errors() == []
    end()


def test_who_adds_faster_than_the_disk_takes_waits(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the buffers of auto_background full, the call blocks; no row is lost."""
    monkeypatch.setattr("txnkv.session._BACKGROUND_ROWS", 5)
    go_on, inside = threading.Event(), threading.Event()
    instance = client.instance
    commit = instance.coordinator.log.commit

    def slow(what: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return commit(what)

    monkeypatch.setattr(instance.coordinator.log, "commit", slow)
    session = client.new_session("auto_background")
    added = []

    def add() -> None:
        for id in range(60):
            session.insert(table, (id, None))
            added.append(id)

    thread = threading.Thread(target=add)
    thread.start()
    assert inside.wait(30)
    thread.join(0.2)
    assert thread.is_alive()
    assert len(added) <= 5 + 5 * 5  # one flush on its way, the buffer, and those that came between
    go_on.set()
    thread.join(30)
    session.close()
    assert table.count() == 60


@pytest.mark.parametrize("mode", MODES)
def test_commit_tells_what_nobody_was_told(
    client: txnkv.Client, table: txnkv.Table, mode: str
) -> None:
    """The transaction stays open, and commits when it is asked again."""
    txn = client.new_transaction()
    session = txn.new_session(mode)
    session.insert(table, (1, None))
    if mode == "auto_sync":
        with pytest.raises(txnkv.RowErrors):
            session.delete(table, 2)
    else:
        session.delete(table, 2)
        with pytest.raises(txnkv.RowErrors, match="delete into 't', key 2"):
            txn.commit()
        assert txn.state is txnkv.TxnState.OPEN
    txn.commit()
    assert table.count() == 1


def test_a_rollback_forgets_rows_and_errors(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    session = txn.new_session("auto_background")
    session.insert(table, (1, None))
    session.delete(table, 7)
    txn.rollback()
    assert not session.has_pending
    session.close()
    assert table.count() == 0


def test_rows_wait_on_while_the_disk_is_away(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client.new_session()
    session.insert(table, (1, None))
    session.delete_ignore(table, 3)

    def away(what: Any) -> Any:
        raise txnkv.UnavailableError("the disk is away")

    monkeypatch.setattr(client.instance.coordinator.log, "commit", away)
    with pytest.raises(txnkv.UnavailableError):
        session.flush()
    assert session.has_pending
    monkeypatch.undo()
    assert session.flush() == txnkv.WriteResult(inserted=1, ignored=1)
