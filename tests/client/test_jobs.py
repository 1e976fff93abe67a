"""Jobs: attempts that stage under one transaction, of which only the named ones count."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.transaction.job import Job


@pytest.fixture
def txn(client: txnkv.Client, table: txnkv.Table) -> txnkv.Transaction:
    return client.new_transaction(timeout=None)


def stage(job: Job, attempt: str, *ids: int) -> None:
    with job.session(attempt) as session:
        for id in ids:
            session.insert("t", (id, attempt))


def test_only_named_attempts_count(txn: txnkv.Transaction, table: txnkv.Table) -> None:
    job = Job.start(txn)
    stage(job, "0.0", 1, 2)
    stage(job, "1.0", 3)
    stage(job, "1.1", 3, 4)
    job.commit(["0.0", "1.1"])
    txn.commit()
    assert {row["id"]: row["v"] for row in table.scan()} == {1: "0.0", 2: "0.0", 3: "1.1", 4: "1.1"}


def test_space_of_other_attempts_comes_back(
    client: txnkv.Client, txn: txnkv.Transaction, table: txnkv.Table
) -> None:
    job = Job.start(txn)
    for attempt in ("0.0", "0.1", "0.2"):
        stage(job, attempt, 1, 2)
    assert client.stats()["staged_row_sets"] == 3
    job.commit(["0.1"])
    txn.commit()
    stats = client.stats()
    assert (stats["staged_row_sets"], stats["tables"]["t"]["row_sets"]) == (0, 1)


def test_the_transaction_waits_for_its_job(txn: txnkv.Transaction, table: txnkv.Table) -> None:
    job = Job.start(txn)
    stage(job, "0.0", 1)
    with pytest.raises(txnkv.InvalidTxnStateError, match=f"job that still runs: {job.id}"):
        txn.commit()
    assert txn.state is txnkv.TxnState.OPEN
    job.commit(["0.0"])
    job.commit(["0.0"])
    txn.commit()
    assert table.count() == 1


def test_those_that_were_named_first_count(txn: txnkv.Transaction, table: txnkv.Table) -> None:
    job = Job.start(txn)
    for id, attempt in enumerate(("0.0", "0.1")):
        stage(job, attempt, id)
    job.commit(["0.0"])
    Job.join(txn, job.id).commit(["0.1"])
    txn.commit()
    assert [row["v"] for row in table.scan()] == ["0.0"]


def test_an_aborted_job_leaves_nothing(txn: txnkv.Transaction, table: txnkv.Table) -> None:
    job, other = Job.start(txn), Job.start(txn)
    stage(job, "0.0", 1)
    stage(other, "0.0", 2)
    job.abort()
    job.abort()
    with pytest.raises(txnkv.InvalidTxnStateError, match="aborted, not running"):
        job.commit(["0.0"])
    other.commit(["0.0"])
    txn.commit()
    with pytest.raises(txnkv.InvalidTxnStateError, match="committed, not running"):
        other.abort()
    assert [row["id"] for row in table.scan()] == [2]


def test_a_committed_job_that_is_aborted_can_only_be_rolled_back(
    txn: txnkv.Transaction, table: txnkv.Table
) -> None:
    """Whoever asks was told that it failed, and may have run it again."""
    job = Job.start(txn)
    stage(job, "0.0", 1)
    job.commit(["0.0"])
    for call in (job.abort, job.abort, lambda: job.commit(["0.0"]), txn.commit):
        with pytest.raises(txnkv.InvalidTxnStateError, match=f"{job.id} was committed, .* back"):
            call()
    txn.rollback()
    assert table.count() == 0


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_late_attempt_stages_nothing(
    client: txnkv.Client, txn: txnkv.Transaction, table: txnkv.Table, end: str
) -> None:
    job = Job.start(txn)
    late = job.session("0.1")
    late.insert("t", (1, "late"))
    job.commit([]) if end == "commit" else job.abort()
    with pytest.raises(txnkv.InvalidTxnStateError, match="too late"):
        late.flush()
    assert client.stats()["staged_row_sets"] == 0
    txn.commit()
    assert table.count() == 0


def test_attempts_do_not_see_each_other(txn: txnkv.Transaction, table: txnkv.Table) -> None:
    """Two attempts of a task stage the same keys; that is no error but of those that count."""
    job = Job.start(txn)
    stage(job, "0.0", 1, 2)
    stage(job, "0.1", 1, 2)
    job.commit(["0.0", "0.1"])
    with pytest.raises(txnkv.RowErrors) as caught:
        txn.commit()
    assert sorted(error.key for error in caught.value.errors) == [1, 2]
    assert txn.state is txnkv.TxnState.OPEN
    txn.rollback()
    assert table.count() == 0


@pytest.mark.parametrize("by_hash", [False, True])
@pytest.mark.parametrize("keys", ["int64", "string"])
@pytest.mark.parametrize("seed", range(5))
def test_a_key_of_two_attempts_is_found_however_they_are_compared(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, seed: int, keys: Any, by_hash: bool
) -> None:
    """In pairs, or of many by the hashes of their keys, in shares of those."""
    if by_hash:
        monkeypatch.setattr("txnkv.tables.commit.tablet_participants._LOOK", 1e9)
        monkeypatch.setattr("txnkv.tables.commit.tablet_participants._NOTED_AT_ONCE", 40)
    at_random = random.Random(seed)
    schema = txnkv.Schema({"id": keys, "v": "int64"}, primary_key=["id"])
    wide = client.create_table("wide", schema, partition_by=txnkv.hash_partition("id", 2))
    name: Any = int if keys == "int64" else "{:030}".format

    def write(session: txnkv.Session, some: set[int]) -> None:
        rows = {"id": [name(key) for key in some], "v": [len(some)] * len(some)}
        session.write(wide, pa.table(rows), op="upsert")

    txn = client.new_transaction()
    write(txn.new_session(), {*range(0, 600, 7)})  # which all attempts see
    job = Job.start(txn)
    by_attempt = [{at_random.randrange(600) for _ in range(8)} for _ in range(12)]
    for number, some in enumerate(by_attempt):
        session = job.session(str(number))
        write(session, some)
        write(session, set(at_random.sample(sorted(some), 3)))  # it sees its own
    counted = at_random.sample(range(12), 6 if seed else 2)
    job.commit([str(number) for number in counted])
    write(txn.new_session(), set().union(*by_attempt))  # which sees them
    had = Counter(key for number in counted for key in by_attempt[number])
    twice = {name(key) for key, n in had.items() if n > 1}
    if twice:
        with pytest.raises(txnkv.RowErrors) as caught:
            txn.commit()
        assert {error.key for error in caught.value.errors} == twice
        txn.rollback()
    else:
        txn.commit()
    assert wide.count() == (0 if twice else len({*range(0, 600, 7)}.union(*by_attempt)))


def test_a_key_of_the_same_hash_hides_none(
    txn: txnkv.Transaction, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upper 40 bits of the hashes of these two are the same."""
    monkeypatch.setattr("txnkv.tables.commit.tablet_participants._LOOK", 1e9)
    job = Job.start(txn)
    for number, id in enumerate((1_518_592, 1_625_265, 1_518_592)):
        stage(job, str(number), id, 10_000_000 + number)
    job.commit(["0", "1", "2"])
    with pytest.raises(txnkv.RowErrors) as caught:
        txn.commit()
    assert [error.key for error in caught.value.errors] == [1_518_592]


def test_an_attempt_meets_the_rows_of_the_transaction(
    txn: txnkv.Transaction, table: txnkv.Table
) -> None:
    txn.insert(table, (1, "driver"))
    txn.flush()
    job = Job.start(txn)
    with pytest.raises(txnkv.RowErrors, match="key 1"):
        stage(job, "0.0", 1, 2)
    job.commit(["0.0"])
    txn.commit()
    assert {row["id"]: row["v"] for row in table.scan()} == {1: "driver", 2: "0.0"}


def test_workers_in_other_processes(
    txn: txnkv.Transaction, table: txnkv.Table, process: Any
) -> None:
    """One worker dies in the middle of its attempt and is run again; one copy of each row."""
    job = Job.start(txn)
    code = """
        from txnkv.transaction.job import Job
        with txnkv.Transaction.deserialize(client, token) as txn:
            with Job.join(txn, job).session(attempt) as session:
                for id in ids:
                    session.insert("t", (id, attempt))
    """
    values = {"token": txn.serialize(), "job": job.id}
    dead = process(code, fault="stage.written=kill", attempt="0.0", ids=[1, 2], **values)
    alive = process(code, attempt="1.0", ids=[3, 4], **values)
    dead.finish(code=-9)
    again = process(code, attempt="0.1", ids=[1, 2], **values)
    for worker in (alive, again):
        worker.finish()
    job.commit(["0.1", "1.0"])
    txn.commit()
    assert {row["id"]: row["v"] for row in table.scan()} == {
        1: "0.1",
        2: "0.1",
        3: "1.0",
        4: "1.0",
    }


def test_a_job_goes_with_its_transaction(
    client: txnkv.Client, txn: txnkv.Transaction, table: txnkv.Table
) -> None:
    job = Job.start(txn)
    stage(job, "0.0", 1)
    txn.rollback()
    assert client.stats()["staged_row_sets"] == 0
    with pytest.raises(txnkv.InvalidTxnStateError):
        Job.start(txn)
    with pytest.raises(txnkv.InvalidTxnStateError, match="not open: ABORTED"):
        stage(job, "0.1", 1)
