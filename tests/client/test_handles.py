"""Handles: joined ones, heartbeats, closing, threads, forks, laziness."""

from __future__ import annotations

import gc
import os
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.threads import at_once

OPEN, ABORTED = txnkv.TxnState.OPEN, txnkv.TxnState.ABORTED
COMMITTED = txnkv.TxnState.COMMITTED
deserialize = txnkv.Transaction.deserialize


# -- heartbeats ------------------------------------------------------------------------


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("keepalive", [False, True])
def test_joined_handle_heartbeats_only_if_asked(connect: Any, keepalive: bool, until: Any) -> None:
    """testKeepaliveForDeserializedHandle, TxnKeepAlive."""
    client = connect(keepalive_time=3.0 if keepalive else 0.6)
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    txn = client.new_transaction(timeout=None)
    txn.insert(table, (1,))
    txn.flush()
    joined = deserialize(client, txn.serialize(keepalive=keepalive))
    id = txn.id
    del txn
    gc.collect()
    if not keepalive:
        until(lambda: client.transaction_state(id) is ABORTED)
        with pytest.raises(txnkv.TransactionTimedOutError, match="not open: ABORT"):
            joined.start_commit()
        joined.rollback()
        return
    witness = client.new_transaction(timeout=None, keepalive=False)
    witness.insert(table, (2,))
    witness.flush()
    until(lambda: client.transaction_state(witness.id) is ABORTED)
    assert joined.state is OPEN
    joined.commit()
    assert table.count() == 1


@pytest.mark.usefixtures("large")
def test_transaction_without_keepalive_is_kept_alive_by_hand(
    client: txnkv.Client, table: txnkv.Table, now: Any, by_hand: Any
) -> None:
    """KeepTransactionAlive by any process; AbortedTransactionLifecycle."""
    txn = client.new_transaction(timeout=None, keepalive=False)
    txn.insert(table, (1, None))
    txn.flush()
    for _ in range(5):
        now.forward(20)
        client.keep_transaction_alive(txn.id)
        by_hand(client)
    assert txn.state is OPEN
    now.forward(31)
    by_hand(client)
    assert txn.state is ABORTED
    with pytest.raises(txnkv.InvalidTxnStateError, match="is not available for further commits"):
        client.keep_transaction_alive(txn.id)
    assert txn.state is ABORTED


def test_timeout_is_none_or_positive(client: txnkv.Client) -> None:
    for timeout in (0, -1):
        with pytest.raises(ValueError, match="above 0, or None"):
            client.new_transaction(timeout=timeout)


TIMED_OUT = [
    ("insert", lambda txn: txn.insert("t", (2, None))),
    ("commit", lambda txn: txn.commit()),
    ("start_commit", lambda txn: txn.start_commit()),
    ("get", lambda txn: txn.get("t", 1)),
    ("new_session", lambda txn: txn.new_session()),
    ("serialize", lambda txn: txn.serialize()),
]


@pytest.mark.parametrize("call", [t[1] for t in TIMED_OUT], ids=[t[0] for t in TIMED_OUT])
def test_past_the_timeout_before_anything_was_written(
    client: txnkv.Client, table: txnkv.Table, now: Any, call: Any
) -> None:
    txn = client.new_transaction(timeout=5)
    now.forward(6)
    with pytest.raises(txnkv.TransactionTimedOutError, match="5 s") as caught:
        call(txn)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, txnkv.InvalidTxnStateError)


@pytest.mark.usefixtures("size")
def test_past_the_timeout_with_rows_staged(
    client: txnkv.Client, table: txnkv.Table, now: Any, by_hand: Any
) -> None:
    txn = client.new_transaction(timeout=5)
    txn.write(table, _batch(1))
    now.forward(6)
    with pytest.raises(txnkv.TransactionTimedOutError, match="timed out"):
        txn.commit()
    assert txn.state is ABORTED
    assert client.stats()["staged_row_sets"] == 0
    txn.rollback()


# -- closing ---------------------------------------------------------------------------


CLOSED = [
    ("commit", lambda client, txn, session: txn.commit()),
    ("start_commit", lambda client, txn, session: txn.start_commit()),
    ("rollback", lambda client, txn, session: txn.rollback()),
    ("state", lambda client, txn, session: txn.state),
    ("is_commit_complete", lambda client, txn, session: txn.is_commit_complete()),
    ("serialize", lambda client, txn, session: txn.serialize()),
    ("new_session", lambda client, txn, session: txn.new_session()),
    ("insert", lambda client, txn, session: txn.insert("t", (9, None))),
    ("get", lambda client, txn, session: txn.get("t", 1)),
    ("session.insert", lambda client, txn, session: session.insert("t", (9, None))),
    ("session.flush", lambda client, txn, session: session.flush()),
    ("new_transaction", lambda client, txn, session: client.new_transaction()),
    ("client.new_session", lambda client, txn, session: client.new_session()),
    ("snapshot", lambda client, txn, session: client.snapshot()),
    ("tables", lambda client, txn, session: client.tables()),
    ("transactions", lambda client, txn, session: client.transactions()),
    ("mark_applied", lambda client, txn, session: txn.mark_applied("daily", 1)),
    ("applied", lambda client, txn, session: client.applied("daily")),
    ("applications", lambda client, txn, session: client.applications()),
    ("forget_applied", lambda client, txn, session: client.forget_applied("daily")),
    ("stats", lambda client, txn, session: client.stats()),
    ("check", lambda client, txn, session: client.check()),
]


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("stored", [False, True], ids=["unstored", "stored"])
@pytest.mark.parametrize("call", [c[1] for c in CLOSED], ids=[c[0] for c in CLOSED])
def test_handles_of_a_closed_client(
    client: txnkv.Client, table: txnkv.Table, call: Any, stored: bool
) -> None:
    """TxnHandleLifecycle: the client is gone, every call of its handles says so."""
    txn = client.new_transaction()
    session = txn.new_session()
    session.insert(table, (1, None))
    if stored:
        session.flush()
        session.insert(table, (2, None))
    client.close()
    with pytest.raises(txnkv.ClosedError, match="closed"):
        call(client, txn, session)
    txn.close()
    client.close()


def test_clients_of_one_store_share_it(connect: Any) -> None:
    first, second = connect(), connect()
    first.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    txn = second.new_transaction()
    txn.insert("t", (1,))
    first.close()
    txn.commit()
    assert second.table("t").count() == 1


@pytest.mark.usefixtures("size")
def test_close_ends_nothing(client: txnkv.Client, table: txnkv.Table) -> None:
    """testKeepaliveBasic: close() stops heartbeats, twice is fine, no abort."""
    txn = client.new_transaction()
    txn.insert(table, (1, None))
    txn.flush()
    txn.close()
    txn.close()
    assert txn.state is OPEN
    txn.commit()
    assert table.count() == 1


# -- laziness --------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback", "start_commit", "with"])
def test_a_transaction_that_writes_nothing_costs_no_write(
    client: txnkv.Client, table: txnkv.Table, end: str
) -> None:
    """The OPEN row is lazy: begin and end of an empty transaction do no write to status.db."""
    client.new_transaction().rollback()  # the range of ids
    runtime = internals.store(client).runtime
    before = runtime.change_number()
    if end == "with":
        with client.transaction() as txn:
            assert txn.get(table, 1) is None
    else:
        txn = client.new_transaction()
        assert txn.scan(table).to_arrow().num_rows == 0
        getattr(txn, end)()
    assert runtime.change_number() == before
    assert client.transactions() == []
    with pytest.raises(txnkv.TxnNotFoundError, match="never wrote anything"):
        client.transaction_state(txn.id)


def test_commit_of_nothing_answers_the_snapshot(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    assert txn.commit() == txn.commit() == txn.snapshot
    assert txn.is_commit_complete()


# -- threads, processes, forks ---------------------------------------------------------


@pytest.mark.usefixtures("size")
def test_threads_share_a_transaction(client: txnkv.Client, table: txnkv.Table) -> None:
    """TestConcurrentWrites, TestConcurrentDisjointInsertsTxn."""
    txn = client.new_transaction()

    def work(first: int) -> None:
        with txn.new_session() as session:
            for id in range(first, first + 50):
                session.insert(table, (id, None))
                if id % 10 == 0:
                    session.flush()

    at_once(*(partial(work, n * 100) for n in range(4)))
    txn.commit()
    assert table.count() == 200


def test_a_forked_child_cannot_use_the_parents_transaction(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    txn = client.new_transaction()
    session = txn.new_session()
    txn.insert(table, (1, None))
    txn.flush()
    token = txn.serialize()
    refused = (
        txn.commit,
        txn.rollback,
        txn.serialize,
        txn.new_session,
        lambda: txn.get(table, 1),
        lambda: txn.insert(table, (3, None)),
        lambda: session.insert(table, (3, None)),
    )
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for call in refused:
                with pytest.raises(txnkv.InvalidTxnStateError, match="belongs to process"):
                    call()
            joined = deserialize(client, token)
            joined.insert(table, (2, None))
            joined.flush()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    txn.commit()
    assert table.count() == 2


# -- what is shown ---------------------------------------------------------------------


@pytest.mark.usefixtures("large")
def test_transactions_lists_them(client: txnkv.Client, table: txnkv.Table) -> None:
    a = client.new_transaction(timeout=7, locking="partition")
    b = client.new_transaction(timeout=None)
    for n, txn in enumerate((a, b)):
        txn.insert(table, (n, None))
    a.flush()
    a.rollback()
    b.commit()
    found = {info.id: info for info in client.transactions()}
    assert set(found) == {a.id, b.id}
    assert (found[a.id].state, found[a.id].timeout, found[a.id].locking) == (
        ABORTED,
        7,
        "partition",
    )
    assert (found[a.id].commit, found[a.id].reason) == (None, "rolled back")
    assert (found[b.id].state, found[b.id].timeout, found[b.id].participants) == (
        COMMITTED,
        None,
        1,
    )
    assert found[b.id].commit == b.commit()
    assert found[b.id].begin == b.age


@pytest.mark.usefixtures("size")
def test_abort_transaction_of_another_handle(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, None))
    txn.flush()
    client.abort_transaction(txn.id)
    client.abort_transaction(txn.id.local)
    with pytest.raises(txnkv.InvalidTxnStateError, match="aborted by hand"):
        txn.commit()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"isolation": "chaos"}, ValueError, "isolation is one of"),
        ({"locking": "hope"}, ValueError, "locking is one of"),
    ],
    ids=["isolation", "locking"],
)
def test_options_are_checked(
    client: txnkv.Client, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        client.new_transaction(**options)


def _batch(*ids: int) -> Any:
    return pa.record_batch({"id": pa.array(ids, pa.int64())})
