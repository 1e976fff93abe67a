"""Small transactions: in memory until they commit, then one row of the log; large when need be."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.threads import at_once
from txnkv.storage.faults import arm, disarm
from txnkv.tables.maintenance import history

OPEN, ABORTED, COMMITTED = (txnkv.TxnState[name] for name in ("OPEN", "ABORTED", "COMMITTED"))


def _rows(client: txnkv.Client, sql: str) -> int:
    with internals.status(client).read() as cur:
        return int(cur.execute(sql).fetchone()[0])


def stored(client: txnkv.Client) -> int:
    return _rows(client, "SELECT count(*) FROM transactions")


def logged(client: txnkv.Client) -> int:
    return _rows(client, "SELECT count(*) FROM commit_log")


# -- no I/O before the commit, one row then --------------------------------------------


def test_nothing_is_written_before_the_commit(client: txnkv.Client, table: txnkv.Table) -> None:
    client.new_transaction().rollback()  # the range of ids
    runtime = internals.store(client).runtime
    before = runtime.change_number()
    txn = client.new_transaction()
    for id in range(20):
        txn.insert(table, (id, "a"))
    txn.flush()
    txn.update(table, {"id": 3, "v": "b"})
    txn.delete(table, 4)
    txn.write(table, pa.table({"id": [50, 51]}))
    assert txn.get(table, 3) == {"id": 3, "v": "b"}
    assert txn.scan(table).to_arrow().num_rows == 21
    assert (table.count(), table.get(3)) == (0, None)
    assert runtime.change_number() == before
    assert (stored(client), logged(client)) == (0, 0)
    stamp = txn.commit()
    assert (stored(client), logged(client)) == (0, 1)
    assert table.count() == 21
    with client.snapshot(stamp) as at:
        assert at.get(table, 3) == {"id": 3, "v": "b"}
    with client.snapshot(txnkv.Timestamp(stamp - 1)) as earlier:
        assert earlier.get(table, 3) is None


def test_a_rollback_writes_nothing(client: txnkv.Client, table: txnkv.Table) -> None:
    client.new_transaction().rollback()
    before = internals.store(client).runtime.change_number()
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.flush()
    txn.rollback()
    txn.rollback()
    assert txn.state is ABORTED
    assert client.transaction_state(txn.id) is ABORTED
    assert internals.store(client).runtime.change_number() == before
    assert table.count() == 0
    with pytest.raises(txnkv.InvalidTxnStateError, match="rolled back"):
        txn.commit()


def test_its_states_and_its_stamp(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.flush()
    assert txn.state is client.transaction_state(txn.id) is OPEN
    with pytest.raises(txnkv.InvalidTxnStateError, match="still open"):
        txn.is_commit_complete()
    stamp = txn.commit()
    assert txn.commit() == stamp > txn.snapshot
    assert txn.is_commit_complete()
    assert txn.state is client.transaction_state(txn.id) is COMMITTED
    with pytest.raises(txnkv.InvalidTxnStateError, match="COMMITTED"):
        txn.rollback()
    with pytest.raises(txnkv.InvalidTxnStateError, match="not open: COMMITTED"):
        txn.insert(table, (2, "a"))


def test_other_processes_see_it_and_ask_for_it(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Any
) -> None:
    with client.transaction() as txn:
        txn.insert(table, (1, "a"))
    code = "say((client.table('t').get(1), client.transaction_state(id).name))"
    assert elsewhere(code, id=int(txn.id)) == ({"id": 1, "v": "a"}, "COMMITTED")
    code = """
        with client.transaction() as txn:
            txn.update("t", {"id": 1, "v": "b"})
        say(txn.id)
    """
    other = elsewhere(code)
    assert table.get(1) == {"id": 1, "v": "b"}
    assert client.transaction_state(other) is COMMITTED


def test_a_store_opened_again_has_what_was_committed(connect: Any) -> None:
    client = connect()
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    for id in range(30):
        with client.transaction() as txn:
            txn.insert(table, (id,))
    client.close()
    assert connect().table("t").count() == 30


def test_start_commit_goes_on_by_itself(
    client: txnkv.Client, table: txnkv.Table, until: Any
) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    with pytest.raises(txnkv.InvalidTxnStateError, match="not flushed"):
        txn.start_commit()
    txn.flush()
    txn.start_commit()
    txn.start_commit()
    until(txn.is_commit_complete)
    assert table.count() == 1
    assert txn.commit() > txn.snapshot


# -- who comes first -------------------------------------------------------------------


def _two(client: txnkv.Client) -> tuple[txnkv.Transaction, txnkv.Transaction]:
    return client.new_transaction(), client.new_transaction()


@pytest.mark.parametrize("op", ["insert", "upsert", "insert_ignore"])
def test_the_first_to_write_a_new_key_wins(
    client: txnkv.Client, table: txnkv.Table, op: str
) -> None:
    a, b = _two(client)
    for txn in (a, b):
        getattr(txn, op)(table, (1, "a"))
        txn.insert(table, (int(txn.id.local) + 100, "own"))
    b.commit()
    with pytest.raises(txnkv.TransactionConflictError, match="table 't', key 1: another"):
        a.commit()
    assert a.state is client.transaction_state(a.id) is ABORTED
    with pytest.raises(txnkv.InvalidTxnStateError, match="ABORTED"):
        a.commit()
    with pytest.raises(txnkv.TransactionConflictError):
        a.is_commit_complete()
    assert table.count() == 2


@pytest.mark.parametrize("op", ["update", "delete", "upsert"])
@pytest.mark.parametrize("other", ["update", "delete", "upsert"])
def test_the_first_to_change_a_row_wins(
    client: txnkv.Client, table: txnkv.Table, op: str, other: str
) -> None:
    with client.transaction() as txn:
        txn.insert(table, (1, "old"))
    a, b = _two(client)
    for txn, verb in ((a, op), (b, other)):
        getattr(txn, verb)(table, 1 if verb == "delete" else (1, verb))
    a.commit()
    with pytest.raises(txnkv.TransactionConflictError):
        b.commit()
    assert table.get(1) == (None if op == "delete" else {"id": 1, "v": op})


def test_different_rows_do_not_meet(client: txnkv.Client, table: txnkv.Table) -> None:
    a, b = _two(client)
    a.insert(table, (1, "a"))
    b.insert(table, (2, "b"))
    a.commit()
    b.commit()
    assert table.count() == 2


def test_a_small_one_and_a_large_one_meet(client: txnkv.Client, table: txnkv.Table) -> None:
    for first, second in ((0, 1), (1, 0)):
        pair = _two(client)
        pair[0].serialize()  # large from here on
        for txn in pair:
            txn.upsert(table, (first, "x"))
        pair[first].commit()
        with pytest.raises(txnkv.TransactionConflictError):
            pair[second].commit()
    assert table.count() == 2


def test_a_write_outside_of_transactions_looks_again(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No snapshot was promised to it: what others committed meanwhile it meets."""
    session = client.new_session()
    session.upsert(table, {"id": 1, "v": "mine"})
    session.insert_ignore(table, (2, "mine"))
    log = internals.coordinator(client).log
    commit = log.commit_alone

    def late(*what: Any) -> Any:
        monkeypatch.undo()
        with client.new_session() as other:
            other.insert(table, (1, "other"))
        return commit(*what)

    monkeypatch.setattr(log, "commit_alone", late)
    assert session.flush() == txnkv.WriteResult(inserted=1, updated=1)
    assert table.get(1) == {"id": 1, "v": "mine"}


def test_writes_outside_of_transactions_all_count(client: txnkv.Client, table: txnkv.Table) -> None:
    with client.new_session() as session:
        session.insert(table, (1, "0"))

    def work(n: int) -> None:
        with client.new_session("auto_sync") as mine:
            for i in range(20):
                mine.upsert(table, (1, f"{n}.{i}"))
                mine.insert_ignore(table, (100 + i, str(n)))

    at_once(*(partial(work, n) for n in range(6)))
    assert table.count() == 21


# -- outgrowing ------------------------------------------------------------------------


def _many(txn: txnkv.Transaction, table: txnkv.Table) -> None:
    for id in range(10, 10_200):
        txn.upsert(table, (id, "new"))
    txn.flush()


def _wide(txn: txnkv.Transaction, table: txnkv.Table) -> None:
    for id in range(10, 24):
        txn.upsert(table, (id, "x" * 100_000))
        txn.flush()


def _batch(txn: txnkv.Transaction, table: txnkv.Table) -> None:
    txn.write(table, pa.table({"id": range(10, 20_000), "v": ["b"] * 19_990}), op="upsert")


def _token(txn: txnkv.Transaction, table: txnkv.Table) -> None:
    txn.serialize()


def _tokens(txn: txnkv.Transaction, table: txnkv.Table) -> None:
    assert txn.scan(table).tokens()


@pytest.mark.parametrize("grow", [_many, _wide, _batch, _token, _tokens])
def test_a_transaction_outgrows_the_small_path(
    client: txnkv.Client, table: txnkv.Table, grow: Any
) -> None:
    with client.transaction() as txn:
        for id in range(12):
            txn.insert(table, (id, "old"))
    txn = client.new_transaction()
    txn.update(table, {"id": 0, "v": "changed"})
    txn.delete(table, 1)
    txn.insert(table, (7_000_000, "mine"))
    txn.flush()
    assert stored(client) == 0
    grow(txn, table)
    assert stored(client) == 1
    txn.delete(table, 2)
    txn.upsert(table, (0, "again"))
    wanted = {row["id"]: row for row in txn.scan(table)}
    assert wanted[0] == {"id": 0, "v": "again"}
    assert {1, 2}.isdisjoint(wanted)
    assert 7_000_000 in wanted
    assert txn.get(table, 1) is None
    assert table.get(0) == {"id": 0, "v": "old"}
    txn.commit()
    assert {row["id"]: row for row in table.scan()} == wanted


def test_a_joined_process_writes_with_it(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Any
) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, "here"))
    code = """
        txn = txnkv.Transaction.deserialize(client, token)
        before = txn.get("t", 1)
        txn.insert("t", (2, "there"))
        txn.flush()
        say(before)
    """
    assert elsewhere(code, token=txn.serialize()) == {"id": 1, "v": "here"}
    assert txn.get(table, 2) == {"id": 2, "v": "there"}
    txn.commit()
    assert table.count() == 2


def test_a_rollback_after_outgrowing(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.flush()
    txn.serialize()
    txn.rollback()
    assert table.count() == 0
    assert client.stats()["staged_row_sets"] == 0


# -- what goes wrong -------------------------------------------------------------------


def test_a_dropped_table_aborts_it(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.flush()
    client.drop_table(table)
    with pytest.raises(txnkv.InvalidTxnStateError, match="table 't' was dropped"):
        txn.commit()
    assert txn.state is ABORTED


@pytest.mark.usefixtures("size")
def test_rows_of_a_dropped_table_abort_it(client: txnkv.Client, table: txnkv.Table) -> None:
    """The commit flushes them, and cannot: what else there is does not commit without them."""
    doomed = client.create_table("doomed", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.insert(doomed, (1,))
    client.drop_table(doomed)
    with pytest.raises(txnkv.TableNotFoundError, match="'doomed' was dropped"):
        txn.commit()
    assert txn.state is ABORTED
    with pytest.raises(txnkv.InvalidTxnStateError, match=r"ABORTED .*'doomed' was dropped"):
        txn.commit()
    assert table.count() == 0


@pytest.mark.parametrize("waiting", [False, True])
def test_it_times_out(client: txnkv.Client, table: txnkv.Table, now: Any, waiting: bool) -> None:
    txn = client.new_transaction(timeout=5)
    for id in range(40 if waiting else 1):
        txn.insert(table, (id, "a"))
    if not waiting:
        txn.flush()
    now.forward(6)
    with pytest.raises(txnkv.TransactionTimedOutError, match="5 s"):
        txn.commit()
    assert internals.runtime(client).least_pin() is None
    assert txn.state is client.transaction_state(txn.id) is ABORTED
    assert table.count() == 0


@pytest.mark.parametrize("flushed", [False, True])
def test_who_looked_first_is_told_that_it_timed_out(
    client: txnkv.Client, table: txnkv.Table, now: Any, flushed: bool
) -> None:
    txn = client.new_transaction(timeout=5)
    txn.insert(table, (1, "a"))
    if flushed:
        txn.flush()
    now.forward(6)
    assert txn.state is ABORTED
    for use in (txn.commit, txn.commit, txn.serialize, lambda: txn.get(table, 1)):
        with pytest.raises(txnkv.TransactionTimedOutError):
            use()


def test_it_times_out_behind_a_writer_that_is_stopped(
    client: txnkv.Client, table: txnkv.Table, process: Any
) -> None:
    """It waited for as long as the writer stood still, 8 s where it had asked for 3."""
    client.new_transaction().rollback()  # the range of ids
    other = process(
        """
        with client.instance.store.status.write():
            say("writing")
            wait()
        """
    )
    assert other.hear() == "writing"
    txns = [client.new_transaction(timeout=0.5) for _ in range(3)]
    for id, txn in enumerate(txns):
        txn.insert(table, (id, "late"))

    def commit(txn: txnkv.Transaction) -> None:
        with pytest.raises(txnkv.TransactionTimedOutError, match="not written"):
            txn.commit()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(commit, txns))
    assert [txn.state for txn in txns] == [ABORTED] * 3
    patient = client.new_transaction(timeout=None)
    patient.insert(table, (9, "patient"))
    future = patient.commit_async()
    other.tell()
    other.finish()
    future.result(60)
    assert [row["id"] for row in table.scan()] == [9]


def test_what_is_being_written_at_the_deadline_is_told(
    client: txnkv.Client, table: txnkv.Table, now: Any
) -> None:
    txn = client.new_transaction(timeout=5)
    txn.insert(table, (1, "a"))
    arm("log.written", lambda: now.forward(10))
    assert txn.commit() > txn.snapshot
    assert txn.state is COMMITTED


def test_a_disk_that_fails_before_the_commit(client: txnkv.Client, table: txnkv.Table) -> None:
    """A commit not known to be durable is asked for: here it is not, and never comes to light."""
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.flush()
    arm("status.before_commit", "error@1")
    with pytest.raises(txnkv.CommitOutcomeUnknownError) as caught:
        txn.commit()
    disarm()
    assert client.transaction_state(caught.value.txn_id) is ABORTED
    assert txn.state is ABORTED
    assert table.count() == 0
    with client.transaction() as other:
        other.insert(table, (1, "b"))
    assert table.get(1) == {"id": 1, "v": "b"}


def test_a_disk_that_fails_after_the_commit(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.flush()
    arm("status.after_commit", "error@1")
    with pytest.raises(txnkv.CommitOutcomeUnknownError) as caught:
        txn.commit()
    disarm()
    assert client.transaction_state(caught.value.txn_id) is COMMITTED
    assert txn.state is COMMITTED
    assert txn.commit() > txn.snapshot
    assert table.get(1) == {"id": 1, "v": "a"}


@pytest.mark.parametrize("flushed", [False, True])
def test_what_was_forgotten_is_not_known(
    client: txnkv.Client, table: txnkv.Table, now: Any, by_hand: Any, flushed: bool
) -> None:
    """A minute after its commit broke off it said ABORTED, and its row was there."""
    txn = client.new_transaction(timeout=None)
    txn.insert(table, (1, "a"))
    arm("status.after_commit", "error@1")
    with pytest.raises(txnkv.CommitOutcomeUnknownError):
        txn.commit()
    disarm()
    now.forward(120)
    if flushed:
        internals.flush(client)
        by_hand(client)
        history.trim(internals.tables(client))
        for ask in (lambda: txn.state, lambda: client.transaction_state(txn.id), txn.rollback):
            with pytest.raises(txnkv.CommitOutcomeUnknownError, match="look for what it wrote"):
                ask()
    else:
        assert txn.state is COMMITTED
    assert table.get(1) == {"id": 1, "v": "a"}


def test_run_asks_how_it_ended(client: txnkv.Client, table: txnkv.Table) -> None:
    client.new_transaction().rollback()  # the range of ids
    arm("status.after_commit", "error@1")
    calls = []

    def work(txn: txnkv.Transaction) -> int:
        calls.append(txn.id)
        txn.insert(table, (1, "a"))
        return len(calls)

    assert client.run(work) == 1
    assert table.count() == 1


def test_a_statement_that_fails_leaves_nothing(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    from txnkv.tables.write.write_buffer import SmallWrites

    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.flush()
    take = SmallWrites.write
    left = iter(range(3))

    def failing(*args: Any) -> Any:
        if next(left, None) is None:
            raise txnkv.UnavailableError("the disk is away")
        return take(*args)

    monkeypatch.setattr(SmallWrites, "write", failing)
    for id in range(2, 8):
        txn.insert(table, (id, "a"))
    with pytest.raises(txnkv.UnavailableError):
        txn.flush()
    monkeypatch.undo()
    assert [row["id"] for row in txn.scan(table, ordered=True)] == list(range(1, 8))
    txn.commit()
    assert table.count() == 7


# -- locks -----------------------------------------------------------------------------


def test_a_younger_one_dies_at_the_lock_of_an_older(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    holder = client.new_transaction(locking="partition")
    small = client.new_transaction()
    holder.insert(table, (1, "a"))
    holder.flush()
    small.insert(table, (2, "b"))
    said = f"table:t/0 is locked by transaction {holder.id.local}, which is older"
    with pytest.raises(txnkv.TransactionLockedError, match=said):
        small.commit()
    assert small.state is ABORTED
    with client.new_session() as session:
        session.insert(table, (3, "c"))
        with pytest.raises(txnkv.TransactionLockedError, match=r"table:t/0 .* does not wait"):
            session.flush()
        session.discard()
    holder.commit()
    assert table.count() == 1


def test_an_older_one_waits_for_the_lock_of_a_younger(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    small = client.new_transaction()
    small.insert(table, (2, "b"))
    small.flush()
    holder = client.new_transaction(locking="partition")
    holder.insert(table, (1, "a"))
    holder.flush()
    future = small.commit_async()
    assert not future.done()
    holder.commit()
    assert future.result(20) > small.snapshot
    assert table.count() == 2


def test_an_older_one_gives_up_and_stays_open(client: txnkv.Client, table: txnkv.Table) -> None:
    small = client.new_transaction(lock_timeout=0.02)
    small.insert(table, (2, "b"))
    holder = client.new_transaction(locking="partition")
    holder.insert(table, (1, "a"))
    holder.flush()
    with pytest.raises(txnkv.TransactionLockedError, match="still open: commit it again"):
        small.commit()
    assert small.state is OPEN
    small.insert(table, (3, "c"))
    holder.rollback()
    small.commit()
    assert list(table.scan(ordered=True)) == [{"id": 2, "v": "b"}, {"id": 3, "v": "c"}]


# -- handles ---------------------------------------------------------------------------


def test_a_dropped_handle_leaves_no_pin(
    client: txnkv.Client, table: txnkv.Table, until: Any
) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.flush()
    assert internals.runtime(client).least_pin() == txn.snapshot
    id = txn.id.local
    del txn
    gc.collect()
    until(lambda: internals.runtime(client).least_pin() is None)
    assert not client.instance.contexts
    with pytest.raises(txnkv.TxnNotFoundError):
        client.transaction_state(id)


def test_an_ended_one_leaves_no_pin(client: txnkv.Client, table: txnkv.Table) -> None:
    for end in ("commit", "rollback"):
        txn = client.new_transaction()
        txn.insert(table, (1, "a"))
        getattr(txn, end)()
        assert internals.runtime(client).least_pin() is None
