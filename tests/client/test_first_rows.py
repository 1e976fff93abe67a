"""The first rows of a transaction, which go into memory at the call, and those behind them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import txnkv
from tests import internals
from txnkv.storage import clock
from txnkv.tables import OPERATIONS as OPERATIONS_OF_ROWS
from txnkv.tables import write_buffer

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?", "n": "int32?"}, primary_key="id")
PARTITIONS = {
    "one tablet": None,
    "by hash": txnkv.hash_partition("id", 3),
    "by range": txnkv.range_partition("id", [5, 100]),
}


@pytest.fixture(params=PARTITIONS)
def table(client: txnkv.Client, request: pytest.FixtureRequest) -> txnkv.Table:
    table = client.create_table("t", SCHEMA, partition_by=PARTITIONS[request.param])
    table.insert((1, "a", 1))
    table.insert((2, "b", None))
    return table


def rows(found: txnkv.Scan) -> dict[int, tuple[object, object]]:
    return {row["id"]: (row["v"], row["n"]) for row in found}


OPERATIONS: dict[str, Callable[[txnkv.Transaction, txnkv.Table], None]] = {
    "insert": lambda txn, t: txn.insert(t, (7, "new", None)),
    "insert ignored": lambda txn, t: txn.insert_ignore(t, (1, "new", 5)),
    "upsert of a new row": lambda txn, t: txn.upsert(t, (8, "new", 2)),
    "upsert of one that is there": lambda txn, t: txn.upsert(t, (1, "other", None)),
    "upsert of some columns": lambda txn, t: txn.upsert(t, {"id": 1, "n": 9}),
    "upsert of some columns, new": lambda txn, t: txn.upsert(t, {"id": 9, "n": 9}),
    "update": lambda txn, t: txn.update(t, {"id": 2, "v": "c"}),
    "update ignored": lambda txn, t: txn.update_ignore(t, {"id": 50, "v": "c"}),
    "delete": lambda txn, t: txn.delete(t, 2),
    "delete ignored": lambda txn, t: txn.delete_ignore(t, 50),
}
FOUND = {
    "insert": ({1: ("a", 1), 2: ("b", None), 7: ("new", None)}, (1, 0, 0, 0)),
    "insert ignored": ({1: ("a", 1), 2: ("b", None)}, (0, 0, 0, 1)),
    "upsert of a new row": ({1: ("a", 1), 2: ("b", None), 8: ("new", 2)}, (1, 0, 0, 0)),
    "upsert of one that is there": ({1: ("other", None), 2: ("b", None)}, (0, 1, 0, 0)),
    "upsert of some columns": ({1: ("a", 9), 2: ("b", None)}, (0, 1, 0, 0)),
    "upsert of some columns, new": ({1: ("a", 1), 2: ("b", None), 9: (None, 9)}, (1, 0, 0, 0)),
    "update": ({1: ("a", 1), 2: ("c", None)}, (0, 1, 0, 0)),
    "update ignored": ({1: ("a", 1), 2: ("b", None)}, (0, 0, 0, 1)),
    "delete": ({1: ("a", 1)}, (0, 0, 1, 0)),
    "delete ignored": ({1: ("a", 1), 2: ("b", None)}, (0, 0, 0, 1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_counts_at_the_flush_and_is_there(
    client: txnkv.Client, table: txnkv.Table, name: str
) -> None:
    after, counts = FOUND[name]
    with client.transaction() as txn:
        OPERATIONS[name](txn, table)
        told = txn.flush()
        assert (told.inserted, told.updated, told.deleted, told.ignored) == counts
        assert txn.flush() == txnkv.WriteResult()
        assert rows(txn.scan(table)) == after
        assert rows(table.scan()) == FOUND["delete ignored"][0]
    assert rows(table.scan()) == after


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_nobody_flushes(
    client: txnkv.Client, table: txnkv.Table, name: str
) -> None:
    with client.transaction() as txn:
        OPERATIONS[name](txn, table)
    assert rows(table.scan()) == FOUND[name][0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_is_rolled_back(
    client: txnkv.Client, table: txnkv.Table, name: str
) -> None:
    txn = client.new_transaction()
    OPERATIONS[name](txn, table)
    txn.rollback()
    assert rows(table.scan()) == FOUND["delete ignored"][0]


def test_rows_behind_one_that_is_refused_keep_their_order(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    txn = client.new_transaction()
    txn.insert(table, (3, "first", 0))
    txn.insert(table, (1, "refused", 0))
    txn.upsert(table, (3, "second", 0))
    txn.delete(table, 2)
    txn.insert(table, (2, "again", 0))
    with pytest.raises(txnkv.RowErrors) as refused:
        txn.commit()
    assert [(each.op, each.key) for each in refused.value.errors] == [("insert", 1)]
    txn.commit()
    assert rows(table.scan()) == {1: ("a", 1), 2: ("again", 0), 3: ("second", 0)}


def test_a_row_that_is_refused_alone_leaves_a_transaction_that_wrote_nothing(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, "refused", 0))
    with pytest.raises(txnkv.RowErrors):
        txn.flush()
    assert txn.commit() == txn.snapshot


def test_a_transaction_of_which_rows_wait_is_known(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    txn = client.new_transaction()
    with pytest.raises(txnkv.TxnNotFoundError):
        client.transaction_state(txn.id)
    txn.insert(table, (1, "refused", 0))
    assert client.transaction_state(txn.id) is txnkv.TxnState.OPEN
    txn.rollback()


def test_many_rows_behind_the_first_ones(client: txnkv.Client, table: txnkv.Table) -> None:
    with client.transaction() as txn:
        for id in range(10, 1000):
            txn.insert(table, (id, str(id), id))
        told = txn.flush()
        assert told.inserted == 990
    assert table.count() == 992


def test_rows_at_the_call_are_not_flushed(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (3, "c", 0))
    with pytest.raises(txnkv.InvalidTxnStateError, match=r"not\s+flushed"):
        txn.start_commit()
    txn.flush()
    txn.start_commit()
    while not txn.is_commit_complete():
        pass
    assert table.count() == 3


def test_a_large_row_is_not_staged_by_the_call(client: txnkv.Client, table: txnkv.Table) -> None:
    """No call but a flush waits for the disk; what comes behind it is in order all the same."""
    txn = client.new_transaction()
    txn.insert(table, (3, "x" * (2 << 20), 0))
    txn.upsert(table, (3, "small", 0))
    assert txn.id not in [each.id for each in client.transactions()]
    txn.commit()
    assert rows(table.scan())[3] == ("small", 0)


def test_a_row_of_a_table_that_was_altered_since(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (3, "c", 0))
    table.alter(add={"more": "int64?"})
    with pytest.raises(txnkv.SchemaChangedError):
        txn.commit()
    assert table.count() == 2


def test_a_row_of_a_table_that_was_dropped_since(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (3, "c", 0))
    client.drop_table("t")
    gone = (txnkv.InvalidTxnStateError, txnkv.TableNotFoundError)
    with pytest.raises(gone, match="was dropped"):
        txn.commit()
    assert txn.state is txnkv.TxnState.ABORTED


# -- rows that go there at the call ----------------------------------------------------


class Model:
    """Rows of a transaction, and what a flush is to tell of them."""

    def __init__(self, rows: dict[int, tuple[object, object]]) -> None:
        self.rows = dict(rows)
        self.has_read = False
        self.told = [0, 0, 0, 0]  # inserted, updated, deleted, ignored

    def do(self, op: str, key: int, value: tuple[object, object]) -> str:
        """Do it; the operation that is to do the same, and that refuses nothing."""
        there, name = key in self.rows, op.removesuffix("_ignore")
        if (name == "insert" and there) or (name in ("update", "delete") and not there):
            self.told[3] += 1
            return f"{name}_ignore"
        if name == "delete":
            del self.rows[key]
            self.told[2] += 1
        else:
            self.rows[key] = value
            self.told[there] += 1
        return op

    def hear(self, told: txnkv.WriteResult) -> None:
        """After a read that had to write what waited a flush does not tell of that."""
        if not self.has_read:
            assert [told.inserted, told.updated, told.deleted, told.ignored] == self.told
        self.told, self.has_read = [0, 0, 0, 0], False


@pytest.mark.parametrize("large", [False, True], ids=["small", "grows large"])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls(
    client: txnkv.Client,
    table: txnkv.Table,
    seed: int,
    large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reads let the short ways know the table; a flush tells of all since the one before."""
    chance, model = random.Random(seed), Model(rows(table.scan()))
    if large:
        monkeypatch.setattr(write_buffer, "MAX_ROWS", 20)
    with client.transaction() as txn:
        for step in range(120):
            key, value = chance.randrange(12), (f"{step}", step)
            match chance.randrange(10):
                case 0:
                    if chance.random() < 0.7:
                        model.hear(txn.flush())
                    model.has_read = model.told != [0, 0, 0, 0]
                    found = txn.get(table, key)
                    wanted = model.rows.get(key)
                    assert (None if found is None else (found["v"], found["n"])) == wanted
                case 1 if chance.random() < 0.5:
                    model.hear(txn.flush())
                case _:
                    op = model.do(chance.choice(list(OPERATIONS_OF_ROWS)), key, value)
                    given = key if op.startswith("delete") else (key, *value)
                    getattr(txn, op)(chance.choice([table, "t"]), given)
        model.hear(txn.flush())
        assert rows(txn.scan(table)) == model.rows
    assert rows(table.scan()) == model.rows


def test_a_handle_of_another_store(connect: Callable[..., txnkv.Client], tmp_path: Path) -> None:
    """It read the other store from then on."""
    ours = connect()
    with txnkv.connect(tmp_path / "other") as other:
        for client, value in ((ours, "ours"), (other, "theirs")):
            client.create_table("t", SCHEMA).insert((1, value, 1))
        table = other.table("t")
        with ours.transaction() as txn:
            txn.upsert("t", (2, "x", 2))
            for call in (lambda: txn.get(table, 1), lambda: txn.upsert(table, (3, "y", 3))):
                with pytest.raises(ValueError, match=r"is one of the store .*other"):
                    call()
        assert table.get(1) == {"id": 1, "v": "theirs", "n": 1}
        assert rows(table.scan()) == {1: ("theirs", 1)}
    assert set(rows(ours.table("t").scan())) == {1, 2}


def test_calls_in_a_forked_child(client: txnkv.Client, table: txnkv.Table) -> None:
    """Once the child knew the table, they went into rows that nobody commits."""
    txn = client.new_transaction()
    txn.upsert(table, (3, "c", 3))
    assert txn.get(table, 1) is not None
    child = os.fork()
    if child == 0:
        refused = 0
        with suppress(BaseException):
            with client.transaction() as own:
                own.upsert(table, (4, "d", 4))
            for call in (lambda: txn.upsert(table, (5, "e", 5)), lambda: txn.get(table, 1)):
                try:
                    call()
                except txnkv.InvalidTxnStateError:
                    refused += 1
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    txn.commit()
    assert set(rows(table.scan())) == {1, 2, 3, 4}


def test_what_fails_before_the_commit_point(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    txn = client.new_transaction()
    txn.upsert(table, (3, "c", 3))

    def short(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("txnkv.coordinator.commit_log.payloads.take_in", short)
    with pytest.raises(txnkv.UnavailableError, match="Nothing was committed"):
        txn.commit()
    monkeypatch.undo()
    assert txn.state is txnkv.TxnState.OPEN
    assert table.get(3) is None
    txn.commit()
    assert table.get(3) == {"id": 3, "v": "c", "n": 3}


def test_a_full_disk_moves_the_wal(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that there is room for what comes next."""
    status, moved = internals.status(client), []
    checkpointer = status._checkpointer
    monkeypatch.setattr(checkpointer, "after_write", moved.append)

    def full(*_: object, **__: object) -> None:
        raise txnkv.StorageFullError("no room")

    monkeypatch.setattr(status, "put", full)
    txn = client.new_transaction()
    txn.upsert(table, (3, "c", 3))
    with pytest.raises(txnkv.StorageFullError):
        txn.commit()
    assert moved == [True]
    monkeypatch.undo()
    txn.commit()
    assert set(rows(table.scan())) == {1, 2, 3}


@pytest.mark.parametrize("end", ["commit", "rollback", "close", "session", "serialize", "timeout"])
def test_calls_after_the_end(connect: Callable[..., txnkv.Client], end: str) -> None:
    """What has gone straight to the rows goes there no more."""
    client = connect()
    table = client.create_table("t", SCHEMA)
    table.insert((1, "a", 1))
    txn = client.new_transaction(timeout=60)
    txn.upsert(table, (2, "b", 2))
    assert txn.get(table, 1) is not None
    txn.upsert(table, (3, "c", 3))
    later = clock.monotonic_micros() + 61_000_000
    with ExitStack() as stack:
        errors: dict[str, type[Exception]] = {
            "commit": txnkv.InvalidTxnStateError,
            "rollback": txnkv.InvalidTxnStateError,
            "close": txnkv.ClosedError,
            "timeout": txnkv.TransactionTimedOutError,
        }
        if end == "session":
            txn.new_session().insert(table, (4, "d", 4))
        elif end == "timeout":
            stack.enter_context(clock.replaced(monotonic=lambda: later))
        else:
            getattr(client if end == "close" else txn, end)()
        if end in errors:
            for call in (
                lambda: txn.upsert(table, (5, "e", 5)),
                lambda: txn.delete("t", 1),
                lambda: txn.get(table, 1),
            ):
                with pytest.raises(errors[end]):
                    call()
            return
        txn.upsert(table, (5, "e", 5))
        assert txn.get(table, 5) == {"id": 5, "v": "e", "n": 5}
        txn.commit()
    kept = {1, 2, 3, 5} | ({4} if end == "session" else set())
    assert set(rows(table.scan())) == kept
