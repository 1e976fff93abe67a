"""Flush modes and pending errors: the peer's table of what a session does, and its bounds."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.errors import RowErrors
from txnkv.storage.faults import arm, disarm

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
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_ROWS", 5)
    go_on, inside = threading.Event(), threading.Event()
    instance = client.instance
    commit = instance.coordinator.log.offer

    def slow(*what: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return commit(*what)

    monkeypatch.setattr(instance.coordinator.log, "commit_alone", lambda commit: None)
    monkeypatch.setattr(instance.coordinator.log, "offer", slow)
    session = client.new_session("auto_background")
    added = []

    def add() -> None:
        for id in range(60):
            session.insert(table, (id, None))
            added.append(id)

    thread = threading.Thread(target=add)
    thread.start()
    try:
        assert inside.wait(30)
        thread.join(0.2)
        assert thread.is_alive()
        # Full buffers twice: those of the flush, which may have begun late, and those after it.
        assert len(added) < 2 * 4 * 5
    finally:
        go_on.set()
        thread.join(30)
    session.close()
    assert table.count() == 60


def test_where_no_thread_is_to_be_had_who_adds_flushes(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that has taken its row says so: who repeats one that raised has it twice."""
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_ROWS", 5)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    session = client.new_session("auto_background")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for id in range(60):
        session.insert(table, (id, None))
    assert 0 < table.count() <= 60
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


def test_what_a_failed_close_has_left_is_committed(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*what: Any, **more: Any) -> Any:
        raise txnkv.StorageFullError("the disk is full")

    own = client.new_transaction()
    joined = txnkv.Transaction.deserialize(client, own.serialize())
    sessions = []
    for id, txn in enumerate((own, joined)):
        sessions.append(txn.new_session())
        sessions[-1].insert(table, (id, None))
        with monkeypatch.context() as patched:
            patched.setattr("txnkv.transaction.context.TxnContext.write_rows", full)
            with pytest.raises(txnkv.StorageFullError):
                sessions[-1].close()
        with pytest.raises(txnkv.ClosedError):
            sessions[-1].insert(table, (7, None))
        assert txn.context.sessions == (sessions[-1],)
    with joined.new_session() as more:
        more.insert(table, (2, None))
    assert len(joined.context.buffers or ()) == 3  # of the closed one none
    joined.close()
    own.commit()
    assert table.count() == 3


def test_nothing_is_flushed_in_the_background_in_mode_manual(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    session = client.new_session("auto_background")
    session.insert(table, (1, None))
    session.flush()
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    session.flush_mode = "manual"
    session.insert(table, (2, None))
    for timer in timers:
        timer.join()
    assert session.has_pending
    assert table.count() == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("alone", [True, False])
def test_a_fault_while_much_is_staged_loses_nothing(
    client: txnkv.Client, table: txnkv.Table, code: int, *, alone: bool
) -> None:
    """A write of more than a MiB was told as done, and was gone: nobody tried again to stage it."""
    topic, session = client.create_topic("e"), client.new_session()
    faults = [OSError(code, "injected")]

    def fail() -> None:
        if faults:
            raise faults.pop()

    arm("lmdb.before_commit", fail)
    try:
        if alone:
            table.upsert((1, "x" * (2 << 20)))
        else:
            session.insert(table, (1, "x" * (2 << 20)))
            session.send(topic, b"y")
            session.flush()
    except txnkv.TxnkvError:
        assert session.has_pending or alone
        disarm()
        session.flush()
    else:
        disarm()
        assert table.get(1) is not None
        assert topic.end_offsets()[0] >= (not alone)
    assert not faults


def test_rows_wait_on_while_the_disk_is_away(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client.new_session()
    session.insert(table, (1, None))
    session.delete_ignore(table, 3)

    def away(*what: Any) -> Any:
        raise txnkv.UnavailableError("the disk is away")

    monkeypatch.setattr(internals.coordinator(client).log, "commit_alone", away)
    with pytest.raises(txnkv.UnavailableError):
        session.flush()
    assert session.has_pending
    monkeypatch.undo()
    assert session.flush() == txnkv.WriteResult(inserted=1, ignored=1)


# -- limits ------------------------------------------------------------------------------


def _insert(session: txnkv.Session, id: int) -> None:
    session.insert("t", (id, "v" * 84))  # 8 for each column, and the text: 100 bytes


def _insert_dict(session: txnkv.Session, id: int) -> None:
    session.insert("t", {"id": id, "v": "v" * 84})


def _upsert(session: txnkv.Session, id: int) -> None:
    session.upsert("t", (id, "v" * 84))


def _send(session: txnkv.Session, id: int) -> None:
    session.send("o", b"v" * 92)


def _send_with_key(session: txnkv.Session, id: int) -> None:
    session.send("o", b"v" * 80, key=b"kkkk")


def _send_to_a_place(session: txnkv.Session, id: int) -> None:
    session.send("o", "v" * 60, partition=0)


ADDS = [_insert, _insert_dict, _upsert, _send, _send_with_key, _send_to_a_place]


@pytest.mark.parametrize("add", ADDS)
def test_a_full_buffer_refuses_more_and_loses_nothing(
    client: txnkv.Client, make: Any, table: txnkv.Table, add: Any
) -> None:
    """TestCheckMutationBufferSpaceLimitInEffect, TestApplyTooMuchWithoutFlushing."""
    topic = client.create_topic("o")
    session, end = make("manual", buffer_bytes=1000)
    for turn in range(3):
        for id in range(10):
            add(session, 10 * turn + id)
        for _ in range(2):
            with pytest.raises(txnkv.InvalidTxnStateError, match=r"1000 bytes.*flush the session"):
                add(session, 10 * turn + 10)
        result = session.flush()
        assert result.inserted + result.updated + result.sent == 10
    end()
    assert table.count() + len(topic.consumer().poll()) == 30


def test_rows_and_messages_share_the_buffer(client: txnkv.Client, table: txnkv.Table) -> None:
    client.create_topic("o")
    session = client.new_session(buffer_bytes=1000)
    for id in range(5):
        _insert(session, id)
        _send(session, id)
    for add in ADDS:
        with pytest.raises(txnkv.InvalidTxnStateError, match="1000 bytes"):
            add(session, 9)
    assert session.flush() == txnkv.WriteResult(inserted=5, sent=5)


def test_a_row_larger_than_the_buffer_is_taken_alone(make: Any, table: txnkv.Table) -> None:
    """The peer refuses it: here nothing that a table takes is beyond every session."""
    session, end = make("manual", buffer_bytes=1)
    for id in range(3):
        _insert(session, id)
        with pytest.raises(txnkv.InvalidTxnStateError):
            _insert(session, 9)
        session.flush()
    end()
    assert table.count() == 3


def test_what_could_not_be_flushed_fills_the_buffer_again(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client.new_session(buffer_bytes=1000)
    for id in range(10):
        _insert(session, id)

    def away(*what: Any) -> Any:
        raise txnkv.UnavailableError("the disk is away")

    monkeypatch.setattr(internals.coordinator(client).log, "commit_alone", away)
    with pytest.raises(txnkv.UnavailableError):
        session.flush()
    with pytest.raises(txnkv.InvalidTxnStateError, match="1000 bytes"):
        _insert(session, 10)
    monkeypatch.undo()
    assert session.flush().inserted == 10
    _insert(session, 10)
    session.close()
    assert table.count() == 11


@pytest.mark.parametrize("add", ADDS)
def test_a_thread_flushes_a_buffer_that_fills(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch, add: Any
) -> None:
    """TestAutoFlushBackgroundApplyBlocks: nothing is refused, and who adds waits."""
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 600.0)
    topic = client.create_topic("o")
    session = client.new_session("auto_background", buffer_bytes=1000)
    for id in range(60):
        add(session, id)
        assert session.waiting() <= 10
    session.close()
    assert table.count() + len(topic.consumer().poll()) == 60


def test_a_session_that_is_switched_keeps_its_limit(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    session = client.new_session("auto_background", buffer_bytes=1000)
    for id in range(30):
        _insert(session, id)
    session.flush()
    session.flush_mode = "manual"
    for id in range(30, 40):
        _insert(session, id)
    with pytest.raises(txnkv.InvalidTxnStateError, match="1000 bytes"):
        _insert(session, 40)
    session.flush()
    session.flush_mode = "auto_sync"
    for id in range(40, 60):
        _insert(session, id)
    assert table.count() == 60


def test_a_session_without_a_limit(client: txnkv.Client, table: txnkv.Table) -> None:
    """So is that of a transaction itself: its rows are the caller's to bound."""
    session, txn = client.new_session(buffer_bytes=None), client.new_transaction()
    for id in range(100):
        _upsert(session, id)
        txn.upsert(table, (id, "v" * 84))
    session.discard()
    txn.rollback()


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_buffer_of_nothing_is_refused(client: txnkv.Client, wrong: int) -> None:
    with pytest.raises(ValueError, match="buffer_bytes is bytes above 0, or None"):
        client.new_session(buffer_bytes=wrong)


# -- switching ---------------------------------------------------------------------------


def test_the_mode_is_switched_when_nothing_waits(make: Any, table: txnkv.Table) -> None:
    """TestSwitchFlushModes."""
    session, end = make("manual")
    session.insert(table, (1, None))
    with pytest.raises(txnkv.InvalidTxnStateError, match="from manual to auto_sync"):
        session.flush_mode = "auto_sync"
    assert session.flush_mode == "manual"
    session.flush()
    session.flush_mode = "auto_sync"
    session.insert(table, (2, None))
    assert not session.has_pending
    session.flush_mode = "auto_background"
    session.insert(table, (3, None))
    session.flush()
    session.flush_mode = "manual"
    session.insert(table, (4, None))
    assert session.has_pending
    with pytest.raises(ValueError, match="flush_mode is one of"):
        session.flush_mode = "never"
    end()
    assert table.count() == 4
    session.close()
    with pytest.raises(txnkv.ClosedError):
        session.flush_mode = "manual"


def test_a_session_knows_its_transaction(client: txnkv.Client) -> None:
    """TxnIdOfTransactionalSession."""
    txn = client.new_transaction()
    assert txn.new_session().txn_id == txn.id
    assert client.new_session().txn_id is None


def test_the_end_of_the_process_flushes_what_would_flush_by_itself(
    store_path: Path, client: txnkv.Client, table: txnkv.Table
) -> None:
    program = (
        f"import txnkv\ns = txnkv.connect({str(store_path)!r}).new_session('auto_background')\n"
        "s.insert('t', (1, 'a'))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert table.count() == 1
