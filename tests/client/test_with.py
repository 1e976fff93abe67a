"""With blocks: what they end, and what they tell."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

import txnkv
from txnkv.storage import settle_dropped
from txnkv.transaction import instance as instances

OPEN, ABORTED = txnkv.TxnState.OPEN, txnkv.TxnState.ABORTED
COMMITTED = txnkv.TxnState.COMMITTED
deserialize = txnkv.Transaction.deserialize
Connect = Callable[[], txnkv.Client]


class Broken(Exception):
    pass


# -- with blocks -----------------------------------------------------------------------


def test_with_commits(client: txnkv.Client, table: txnkv.Table) -> None:
    with client.transaction() as txn:
        txn.insert(table, (1, None))
    assert txn.state is COMMITTED
    assert table.count() == 1


def test_with_rolls_back_on_an_exception(client: txnkv.Client, table: txnkv.Table) -> None:
    with suppress(Broken), client.transaction() as txn:
        txn.write(table, pa.record_batch({"id": pa.array([1, 2], pa.int64())}))
        raise Broken
    assert txn.state is ABORTED
    assert table.count() == 0
    assert client.stats()["staged_row_sets"] == 0


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("broken", [False, True])
def test_with_does_nothing_after_an_end_inside(
    client: txnkv.Client, table: txnkv.Table, end: str, broken: bool
) -> None:
    try:
        with client.transaction() as txn:
            txn.insert(table, (1, None))
            getattr(txn, end)()
            if broken:
                raise Broken
    except Broken:
        assert broken
    assert txn.state is (COMMITTED if end == "commit" else ABORTED)


def test_with_rolls_back_and_raises_row_errors(client: txnkv.Client, table: txnkv.Table) -> None:
    """A `with` block rolls back and raises what commit would have raised."""
    with client.transaction() as txn:
        txn.insert(table, (1, None))
    txn = client.new_transaction()
    txn.insert(table, (2, None))
    with pytest.raises(txnkv.RowErrors, match="key 1"), txn:
        txn.insert(table, (1, "again"))
    assert txn.state is ABORTED
    assert table.scan().to_arrow()["id"].to_pylist() == [1]


@pytest.mark.parametrize("broken", [False, True])
def test_with_of_a_joined_handle_ends_nothing(
    client: txnkv.Client, table: txnkv.Table, broken: bool
) -> None:
    txn = client.new_transaction()
    token = txn.serialize()
    try:
        with deserialize(client, token) as joined:
            joined.insert(table, (1, None))
            if broken:
                raise Broken
    except Broken:
        assert broken
    assert txn.state is OPEN
    txn.commit()
    assert table.count() == (0 if broken else 1)  # flushed at a good end, dropped at a bad one


def test_with_of_a_joined_handle_tells_of_row_errors(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, None))
    with (
        pytest.raises(txnkv.RowErrors, match="key 1"),
        deserialize(client, _token(txn)) as joined,
    ):
        joined.insert(table, (1, "again"))
    assert txn.state is OPEN
    txn.commit()
    assert table.get(1) == {"id": 1, "v": None}


def _token(txn: txnkv.Transaction) -> txnkv.TxnToken:
    txn.flush()
    return txn.serialize()


@pytest.mark.parametrize("taken_by", ["any thread", "another thread"])
def test_an_interrupt_ends_a_load_without_end(
    taken_by: str, client: txnkv.Client, table: txnkv.Table
) -> None:
    """It went on behind the back of who had interrupted it, and the rollback waited for it.
    A signal that the main thread did not take itself woke it only when the transaction ran out.
    """

    def endless() -> Iterator[pa.RecordBatch]:
        for n in count():
            ids = pa.array(range(n * 1000, n * 1000 + 1000), pa.int64())
            yield pa.record_batch({"id": ids})
            if n == 10 and taken_by == "any thread":
                os.kill(os.getpid(), signal.SIGINT)
            elif n == 10:
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    schema = pa.schema([("id", pa.int64())])
    with pytest.raises(KeyboardInterrupt), client.transaction() as txn:
        txn.write(table, pa.RecordBatchReader.from_batches(schema, endless()))
    assert txn.state is ABORTED
    assert table.count() == 0
    assert client.stats()["staged_row_sets"] == 0


@pytest.mark.parametrize("what", ["ack", "applied", "table"])
@pytest.mark.parametrize("by", ["with", "run"])
def test_an_abort_that_the_block_has_swallowed_is_told_at_its_end(
    client: txnkv.Client, table: txnkv.Table, what: str, by: str
) -> None:
    """It returned, and what was written beside was gone."""
    topic = client.create_topic("e")
    other = client.create_table("other", table.schema)
    with client.transaction() as txn:
        txn.send(topic, b"x")
        txn.mark_applied("app", 3)
    sub = topic.subscribe("s")
    message = sub.receive(timeout=0)
    assert message is not None
    sub.ack(message)

    def work(txn: txnkv.Transaction) -> None:
        txn.upsert(table, (1, "x"))
        with suppress(txnkv.TxnkvError):
            if what == "ack":
                txn.ack(sub, message)
            elif what == "applied":
                txn.mark_applied("app", 3)
            else:
                txn.upsert(other, (1, "x"))
                client.drop_table("other")
                txn.new_session().flush()

    def block() -> None:
        with client.transaction() as txn:
            work(txn)

    with pytest.raises(txnkv.TxnkvError, match=r"is not open: ABORTED|was dropped"):
        client.run(work, attempts=2) if by == "run" else block()
    assert table.count() == 0


def test_a_block_that_has_ended_its_transaction_itself(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """By a rollback, or by a commit whose error it was told."""
    with client.transaction() as txn:
        txn.rollback()
    table.upsert((1, "x"))
    with client.transaction() as txn:
        txn.upsert(table, (1, "y"))
        table.upsert((1, "z"))
        with pytest.raises(txnkv.TransactionConflictError):
            txn.commit()
    assert table.get(1) == {"id": 1, "v": "z"}


# -- sessions outside of transactions ---------------------------------------------------


@pytest.mark.parametrize("mode", ["manual", "auto_background", "auto_sync"])
def test_a_close_of_the_client_flushes_what_would_flush_by_itself(
    connect: Connect,
    client: txnkv.Client,
    table: txnkv.Table,
    caplog: Any,
    mode: str,
) -> None:
    """Of what waits in others it tells that it is lost."""
    topic = client.create_topic("e")
    with connect() as other:
        session = other.new_session(mode)
        session.insert("t", (1, "a"))
        session.send("e", "b")
    kept = mode != "manual"
    assert (table.count(), topic.end_offsets()) == (int(kept), {0: int(kept)})
    assert ("rows or messages that are lost (2)" in caplog.text) is not kept
    with pytest.raises(txnkv.ClosedError):
        session.insert("t", (2, "a"))


def test_a_flush_at_the_close_that_fails_is_told_and_does_not_fail_the_close(
    connect: Connect, client: txnkv.Client, table: txnkv.Table, caplog: Any
) -> None:
    client.create_table("gone", table.schema)
    table.insert((1, "a"))
    other = connect()
    session = other.new_session("auto_background")
    session.insert("t", (1, "b"))
    session.insert("t", (2, "b"))
    session.insert("gone", (3, "b"))
    client.drop_table("gone")
    other.close()
    assert table.count() == 2
    assert "in which 3 rows or messages waited, failed as its client was closed: " in caplog.text


def test_a_block_of_the_client_that_fails_flushes_nothing(
    connect: Connect, client: txnkv.Client, table: txnkv.Table, caplog: Any
) -> None:
    other = connect()
    session = other.new_session("auto_background")
    session.insert("t", (1, "a"))
    with suppress(Broken), other:
        raise Broken
    assert table.count() == 0
    assert "lost" not in caplog.text


def test_a_session_that_is_dropped_tells_what_is_lost(
    client: txnkv.Client, table: txnkv.Table, caplog: Any
) -> None:
    for mode in ("manual", "auto_background"):
        session = client.new_session(mode)
        session.insert(table, (1, "a"))
        del session
        gc.collect()
        settle_dropped()
    assert caplog.text.count("dropped with rows or messages that are lost (1)") == 2
    assert table.count() == 0


# -- a client that is closed beside other threads ----------------------------------------


def elsewhere(call: Callable[[], object]) -> BaseException | None:
    """Call in another thread; the error that it met."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).exception(60)


def test_what_comes_while_the_client_is_closed_is_refused(
    connect: Connect,
    client: txnkv.Client,
    table: txnkv.Table,
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was taken behind the last flush, and lost without a word; two who closed closed twice."""
    client.create_topic("e")
    other, released = connect(), list[object]()
    session = other.new_session("auto_background")
    session.insert("t", (1, "a"))
    step = "_request" if other.elsewhere else "flush"  # of the close
    flush, refused = getattr(session, step), list[BaseException | None]()
    second, seconds = ThreadPoolExecutor(1), list[Future[bool]]()

    def beside(*calls: Any) -> Any:
        found = flush(*calls)
        refused.append(elsewhere(lambda: session.insert("t", (2, "b"))))
        refused.append(elsewhere(lambda: session.send("e", "b")))
        refused.append(elsewhere(lambda: other.new_session("auto_background")))
        seconds.append(second.submit(close_too))
        with pytest.raises(TimeoutError):
            seconds[0].result(0.05)
        other.close()  # by whoever closes it, as a callback may
        return found

    def close_too() -> bool:
        other.close()
        return other.is_open

    release = instances.release
    monkeypatch.setattr(instances, "release", lambda *of: (released.append(of), release(*of)))
    monkeypatch.setattr(session, step, beside)
    other.close()
    with second:
        assert not seconds[0].result(60)
    assert [type(each) for each in refused] == [txnkv.ClosedError] * 3
    assert (table.count(), caplog.text) == (1, "")
    assert len(released) <= 1


def test_acks_and_what_a_server_has_are_lost_with_a_word(
    connect: Connect, client: txnkv.Client, table: txnkv.Table, caplog: Any
) -> None:
    topic, other = client.create_topic("e"), connect()
    client.run(lambda txn: txn.send(topic, b"a"))
    message, session = topic.subscribe("s").receive(timeout=5), other.new_session()
    session.ack(other.topic("e").subscribe("other", "shared").info, message.id)
    if other.elsewhere is not None:
        for number in range(30):  # more than is kept here
            session.insert("t", (number, "x" * 100_000))
    assert session.has_pending
    other.close()
    lost = 1 if other.elsewhere is None else 31
    assert f"messages that are lost ({lost})" in caplog.text
    assert table.count() == 0


def test_a_close_that_was_broken_off_is_begun_again(
    connect: Connect, client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = connect()
    with monkeypatch.context() as patched:
        patched.setattr(other, "close_handles", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            other.close()
    other.close()
    assert not other.is_open
    with pytest.raises(txnkv.ClosedError):
        other.new_session()


def test_a_client_that_the_collector_closes_while_a_session_is_made(tmp_path: Path) -> None:
    """A lock was held, which the close wanted, too."""
    path = tmp_path / "own"

    class Owner:
        def __init__(self) -> None:
            self.client, self.own = txnkv.connect(path), self

        def __del__(self) -> None:
            self.client.close()

    before = gc.get_threshold()
    with txnkv.connect(path) as client:
        gc.set_threshold(1)
        try:
            for _ in range(20):
                Owner()
                client.new_session("auto_background").close()
        finally:
            gc.set_threshold(*before)


@pytest.mark.parametrize("call", ["send", "insert"])
def test_a_session_of_a_transaction_that_is_closed_takes_no_more(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A thread that was within a call left a short cut behind, and the commit did not ask it."""
    topic, txn = client.create_topic("e"), client.new_transaction()
    session: Any = txn.new_session()
    asks, asked_of = {"send": "topic_info", "insert": "writer"}[call], client
    if client.elsewhere is not None:
        asks, asked_of = {"send": "_topic_of", "insert": "_table_of"}[call], session
    ask = getattr(asked_of, asks)

    def asked(*of: Any) -> Any:
        found = ask(*of)
        session.close()
        return found

    monkeypatch.setattr(asked_of, asks, asked)
    with pytest.raises(txnkv.ClosedError):
        session.send(topic, "b") if call == "send" else session.insert(table, (2, "b"))
    assert not session.has_pending
    monkeypatch.undo()
    txn.commit()
    assert (table.count(), topic.end_offsets()) == (0, {0: 0})


@pytest.mark.parametrize("mode", ["manual", "auto_background"])
def test_a_close_that_comes_before_a_row_is_kept_refuses_it(
    connect: Connect,
    client: txnkv.Client,
    table: txnkv.Table,
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
) -> None:
    client.create_topic("e")
    calls: list[Callable[[txnkv.Session], object]] = [
        lambda session: session.insert("t", (1, "a")),
        lambda session: session.send("e", "a"),
    ]
    for n, call in enumerate(calls):
        other = connect()
        session: Any = other.new_session(mode)
        asked_of: Any = other
        names = ("writer", "topic_info")
        if other.elsewhere is not None:
            asked_of = session
            names = ("_table_of", "_topic_of")
        asks = names[n]
        ask = getattr(asked_of, asks)

        def asked(*of: Any, other: Any = other, ask: Any = ask) -> Any:
            found = ask(*of)
            other.close()
            return found

        monkeypatch.setattr(asked_of, asks, asked)
        with pytest.raises(txnkv.ClosedError):
            call(session)
        assert not session.has_pending


def test_a_row_that_waits_when_the_client_is_closed_is_told_and_none_is_kept_behind(
    connect: Connect, table: txnkv.Table, caplog: Any
) -> None:
    other = connect()
    if other.elsewhere is not None:
        return  # it has no short way there
    session = other.new_session()
    session.insert("t", (1, "a"))
    more = session._rows.more  # as another thread has it
    more((2, "a"))
    other.close()
    assert "rows or messages that are lost (2)" in caplog.text
    with pytest.raises(txnkv.ClosedError):
        more((3, "a"))


def test_a_program_that_fails_tells_what_its_sessions_lose(
    client: txnkv.Client, table: txnkv.Table, store_path: Path
) -> None:
    program = (
        f"import txnkv; session = txnkv.connect({str(store_path)!r}).new_session('auto_background')"
        "\nsession.insert('t', (1, 'a')); raise ValueError('at the end')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert b"ValueError: at the end" in ended.stderr
    assert b"rows or messages that are lost (1)" in ended.stderr
    assert table.count() == 0
