"""client.run: what it repeats, how often, and how old the attempts are."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.threads import at_once


def test_run_returns_the_result(client: txnkv.Client, table: txnkv.Table) -> None:
    assert client.run(lambda txn: txn.insert(table, (1, None)) or "done") == "done"
    assert table.count() == 1


async def _coroutine(txn: txnkv.Transaction) -> None:
    txn.insert("t", (1, None))


def _generator(txn: txnkv.Transaction) -> Iterator[None]:
    txn.insert("t", (1, None))
    yield


async def _both(txn: txnkv.Transaction) -> AsyncIterator[None]:
    txn.insert("t", (1, None))
    yield


@pytest.mark.parametrize("fn", [_coroutine, _generator, _both])
def test_run_refuses_what_has_not_run(
    client: txnkv.Client, table: txnkv.Table, fn: Callable[[txnkv.Transaction], Any]
) -> None:
    """An `async def` committed nothing, in silence."""
    begun: list[txnkv.Transaction] = []
    with pytest.raises(TypeError, match=f"{fn.__name__} gave a .*generator|coroutine.*txnkv.aio"):
        client.run(lambda txn: begun.append(txn) or fn(txn))
    assert [txn.state for txn in begun] == [txnkv.TxnState.ABORTED]
    assert list(client.run(lambda txn: (row for row in [txn.get(table, 1)]))) == [None]


def decorated(fn: Any) -> Any:
    @functools.wraps(fn)
    def call(*args: Any, **named: Any) -> Any:
        yield from fn(*args, **named)

    return call


class Work:
    def __init__(self, txn: txnkv.Transaction) -> None:
        self.txn = txn

    def insert(self) -> Iterator[None]:
        yield self.txn.insert("t", (1, None))


@pytest.mark.parametrize(
    "work", [decorated(lambda txn: Work(txn).insert()), lambda txn: Work(txn).insert()]
)
def test_run_refuses_a_generator_that_reaches_the_transaction(
    client: txnkv.Client, table: txnkv.Table, work: Any
) -> None:
    with pytest.raises(TypeError, match="of which nothing has run"):
        client.run(work)
    assert table.count() == 0


def test_run_gives_back_a_generator_over_what_was_done(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    def doubled(numbers: list[int]) -> Iterator[int]:
        yield from (2 * number for number in numbers)

    result = client.run(lambda txn: txn.insert(table, (1, None)) or doubled([1, 2]))
    assert (list(result), table.count()) == ([2, 4], 1)


def test_run_tries_again_what_is_retriable(client: txnkv.Client, table: txnkv.Table) -> None:
    attempts: list[txnkv.Transaction] = []

    def work(txn: txnkv.Transaction) -> int:
        attempts.append(txn)
        rows = txn.scan(table).to_arrow().num_rows
        txn.insert(table, (rows, None))
        if len(attempts) < 3:
            with client.new_session() as session:
                session.insert(table, (rows, "first"))
        return rows

    assert client.run(work) == 2
    assert [txn.state.name for txn in attempts] == ["ABORTED", "ABORTED", "COMMITTED"]
    assert len({txn.id for txn in attempts}) == 3
    assert len({txn.age for txn in attempts}) == 1  # it keeps its age
    assert len({txn.snapshot for txn in attempts}) == 3
    assert table.count() == 3


@pytest.mark.parametrize(
    ("ended_by", "tries"),
    [(txnkv.TransactionLockedError, 2), (txnkv.TransactionConflictError, 2), (None, 1)],
)
def test_run_tries_again_what_others_have_ended(
    client: txnkv.Client, table: txnkv.Table, ended_by: Any, tries: int
) -> None:
    """By its token, where that had to give way: a flush finds it over."""
    tried: list[txnkv.TxnId] = []

    def work(txn: txnkv.Transaction) -> None:
        tried.append(txn.id)
        txn.insert(table, (len(tried), None))
        txn.serialize()
        if len(tried) == 1:
            others = internals.coordinator(client).orchestrator
            with ThreadPoolExecutor(1) as pool:
                pool.submit(others.start_abort, txn.id.local, "gave way", ended_by).result()
                pool.submit(others.finish, txn.id.local).result()
        txn.insert(table, (9, None))
        txn.flush()

    if tries == 1:
        with pytest.raises(txnkv.InvalidTxnStateError, match="gave way"):
            client.run(work)
    else:
        client.run(work)
        assert sorted(row["id"] for row in table.scan()) == [2, 9]
    assert len(tried) == tries


def test_run_gives_up_after_its_attempts(client: txnkv.Client, table: txnkv.Table) -> None:
    tried: list[int] = []

    def work(txn: txnkv.Transaction) -> None:
        tried.append(1)
        txn.insert(table, (len(tried), None))
        with client.new_session() as session:
            session.insert(table, (len(tried), None))

    with pytest.raises(txnkv.TransactionConflictError):
        client.run(work, attempts=3)
    assert len(tried) == 3


@pytest.mark.parametrize("error", [ValueError, txnkv.SchemaError, txnkv.RowErrors])
def test_run_does_not_repeat_what_is_not_retriable(
    client: txnkv.Client, table: txnkv.Table, error: type[Exception]
) -> None:
    tried: list[txnkv.Transaction] = []

    def work(txn: txnkv.Transaction) -> None:
        tried.append(txn)
        txn.write(table, pa.record_batch({"id": pa.array([1], pa.int64())}))
        raise error([]) if error is txnkv.RowErrors else error("no")

    with pytest.raises(error):
        client.run(work)
    assert [txn.state.name for txn in tried] == ["ABORTED"]
    assert table.count() == 0


class Later(Exception):
    """A program's own."""

    retriable = True


@pytest.mark.parametrize("attempts", [2, 3])
def test_run_tries_again_what_a_program_calls_retriable(
    client: txnkv.Client, table: txnkv.Table, attempts: int
) -> None:
    tried: list[int] = []

    def work(txn: txnkv.Transaction) -> None:
        tried.append(1)
        txn.insert(table, (len(tried), None))
        if len(tried) < 3:
            raise Later("again")

    if attempts == 2:
        with pytest.raises(Later):
            client.run(work, attempts=2)
    else:
        client.run(work, attempts=3)
    assert len(tried) == attempts
    assert [row["id"] for row in table.scan()] == ([3] if attempts == 3 else [])


@pytest.mark.parametrize("options", [{"attempts": 0}, {"deadline": -1.0}])
def test_run_wants_an_attempt(client: txnkv.Client, options: Any) -> None:
    with pytest.raises(ValueError, match="at least"):
        client.run(lambda txn: None, **options)


def test_run_goes_on_until_its_deadline(client: txnkv.Client, table: txnkv.Table, now: Any) -> None:
    """Ten attempts were not enough for 8 threads on 3 hot keys; time is what a caller has."""
    tried: list[int] = []

    def work(txn: txnkv.Transaction) -> None:
        tried.append(len(tried))
        txn.insert(table, (len(tried), None))
        with client.new_session() as session:
            session.insert(table, (len(tried), None))
        if len(tried) == 15:
            now.forward(31)

    with pytest.raises(txnkv.TransactionConflictError) as caught:
        client.run(work)
    assert len(tried) == 15
    assert any("gave up after 15 attempts" in note for note in caught.value.__notes__)


def test_threads_on_hot_keys_all_get_through(client: txnkv.Client, table: txnkv.Table) -> None:
    with client.new_session() as session:
        for key in range(3):
            session.insert(table, (key, "0"))

    def work(txn: txnkv.Transaction, key: int) -> None:
        row = txn.get(table, key)
        assert row is not None
        txn.update(table, {"id": key, "v": str(int(row["v"]) + 1)})

    def add(first: int) -> None:
        for i in range(25):
            client.run(partial(work, key=(first + i) % 3), deadline=300.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    assert sum(int(row["v"]) for row in table.scan()) == 200


@pytest.mark.parametrize("look", ["get", "get_many", "scan", "serialize", "flush"])
def test_threads_share_a_transaction(client: txnkv.Client, table: txnkv.Table, look: str) -> None:
    """Each row and message is in it once, whoever reads or flushes meanwhile; it begins once."""
    topic = client.create_topic("e")
    txn = client.new_transaction()
    looks: dict[str, Callable[[int], object]] = {
        "get": lambda key: txn.get(table, key),
        "get_many": lambda key: txn.get_many(table, [key]),
        "scan": lambda key: txn.scan(table, where=[("id", "=", key)]).to_arrow(),
        "serialize": lambda _: txn.serialize(),
        "flush": lambda _: txn.flush(),
    }

    def work(first: int) -> None:
        for key in range(first, first + 12):
            txn.insert(table, (key, None))
            txn.send(topic, str(key))
            if key % 3 == 2:
                looks[look](key)

    at_once(*(partial(work, 12 * n) for n in range(8)))
    txn.commit()
    assert [row["id"] for row in table.scan(ordered=True)] == [*range(96)]
    assert sorted(int(m.value) for m in topic.consumer().poll()) == [*range(96)]


def test_run_grows_old_enough_for_its_lock(client: txnkv.Client, table: txnkv.Table) -> None:
    """Dead for being younger, a retry is as old as its first attempt, and waits."""
    holder = client.new_transaction(locking="partition")
    holder.insert(table, (1, None))
    holder.flush()
    began = threading.Event()
    ages: list[int] = []

    def work(txn: txnkv.Transaction) -> None:
        ages.append(txn.age)
        began.set()
        txn.insert(table, (2, None))
        txn.flush()

    runner = threading.Thread(
        target=client.run, args=(work,), kwargs={"locking": "partition", "attempts": 100}
    )
    runner.start()
    began.wait(10)
    holder.commit()
    younger = client.new_transaction(locking="partition")
    runner.join(20)
    assert len(set(ages)) == 1
    assert ages[0] < younger.age
    assert table.count() == 2


def test_run_asks_for_the_outcome_when_it_is_unknown(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CommitOutcomeUnknownError: run never runs blindly again."""
    commit = txnkv.Transaction.commit
    tried: list[int] = []

    def lost(txn: txnkv.Transaction) -> Any:
        commit(txn)
        raise txnkv.CommitOutcomeUnknownError("the answer was lost", int(txn.id))

    monkeypatch.setattr(txnkv.Transaction, "commit", lost)

    def work(txn: txnkv.Transaction) -> str:
        tried.append(1)
        txn.insert(table, (1, None))
        return "done"

    assert client.run(work) == "done"
    assert tried == [1]
    assert table.count() == 1


def test_run_takes_no_other_outcome_for_its_own(client: txnkv.Client, table: txnkv.Table) -> None:
    """That of a transaction inside of the function says nothing of the one around it."""
    other = client.new_transaction()
    other.insert(table, (2, None))
    other.commit()

    def work(txn: txnkv.Transaction) -> str:
        txn.insert(table, (1, None))
        raise txnkv.CommitOutcomeUnknownError("the answer was lost", int(other.id))

    with pytest.raises(txnkv.CommitOutcomeUnknownError):
        client.run(work)
    assert table.get(1) is None


@pytest.mark.parametrize("fails", [txnkv.UnavailableError, txnkv.StorageFullError])
def test_an_outcome_that_cannot_be_asked_for_stays_unknown(
    client: txnkv.Client,
    table: txnkv.Table,
    monkeypatch: pytest.MonkeyPatch,
    fails: type[txnkv.TxnkvError],
) -> None:
    """What is retriable would be done again, and this one is committed."""
    commit = txnkv.Transaction.commit

    def lost(txn: txnkv.Transaction) -> Any:
        commit(txn)
        raise txnkv.CommitOutcomeUnknownError("the answer was lost", int(txn.id))

    def unasked(client: txnkv.Client, txn_id: int) -> Any:
        raise fails("the disk fails still")

    monkeypatch.setattr(txnkv.Transaction, "commit", lost)
    monkeypatch.setattr(type(client), "outcome", unasked)
    with pytest.raises(txnkv.CommitOutcomeUnknownError) as caught:
        client.run(lambda txn: txn.insert(table, (1, None)))
    assert not caught.value.retriable
    assert isinstance(caught.value.__cause__, fails)
    assert table.count() == 1
