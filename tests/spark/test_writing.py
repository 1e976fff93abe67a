"""Writes: whole or not at all, each row once, whatever Spark does with the tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pyspark import InheritableThread

import txnkv
import txnkv.spark
from txnkv import TxnState

from .conftest import SCHEMA, batch

pytestmark = pytest.mark.spark

Ids = Callable[..., list[int]]


def test_a_job_without_a_token_commits_itself(
    client: txnkv.Client,
    save: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    save(rows(1, 100))
    assert ids() == list(range(1, 101))
    assert client.table("t").get(7) == {"id": 7, "v": "v7"}
    assert [info.state for info in client.transactions()] == [TxnState.COMMITTED]
    nothing_is_left()


def test_nothing_is_written_from_nothing(
    save: Callable[..., None], rows: Callable[..., Any], ids: Ids
) -> None:
    save(rows(1, 0))
    save(rows(1, 3, partitions=8))
    assert ids() == [1, 2, 3]


def test_several_tables_under_one_token_and_one_commit(
    client: txnkv.Client,
    save: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    client.create_table("u", SCHEMA)
    with client.transaction(timeout=None) as txn:
        save(rows(1, 50), **txnkv.spark.options(txn, "t"))
        save(rows(51, 60), **txnkv.spark.options(txn, "u"))
        save(rows(51, 60), **txnkv.spark.options(txn, "t"))
        txn.insert("t", {"id": 1000})
        assert (ids("t"), ids("u")) == ([], [])
        assert txn.scan("u").to_arrow().num_rows == 10
        committed = txn.commit()

    assert (ids("t"), ids("u")) == ([*range(1, 61), 1000], list(range(51, 61)))
    with client.snapshot(txnkv.Timestamp(committed - 1)) as before:
        assert before.scan("t").to_arrow().num_rows == before.scan("u").to_arrow().num_rows == 0
    nothing_is_left()


@pytest.mark.parametrize("kind", [threading.Thread, InheritableThread])
def test_a_thread_without_a_session_finds_the_source(
    client: txnkv.Client,
    spark: Any,
    save: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
    kind: Callable[..., threading.Thread],
) -> None:
    def by_options() -> None:
        with client.transaction(timeout=None) as txn:
            save(rows(1, 3), **txnkv.spark.options(txn, "t"))

    def by_register() -> None:
        txnkv.spark.register(spark)
        save(rows(4, 5))

    for write in (by_options, by_register):
        thread = kind(target=write)
        thread.start()
        thread.join()
    assert ids() == [1, 2, 3, 4, 5]


def test_rolled_back_after_a_job(
    client: txnkv.Client,
    save: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    txn = client.new_transaction(timeout=None)
    save(rows(1, 50), **txnkv.spark.options(txn, "t"))
    assert client.stats()["staged_row_sets"] > 0
    txn.rollback()
    assert ids() == []
    nothing_is_left()


def test_a_token_of_an_ended_transaction(
    client: txnkv.Client, save: Callable[..., None], rows: Callable[..., Any], ids: Ids
) -> None:
    from pyspark.errors import AnalysisException

    txn = client.new_transaction()
    options = txnkv.spark.options(txn, "t")
    txn.rollback()
    with pytest.raises(AnalysisException, match=r"InvalidTxnStateError: cannot write.*ABORTED"):
        save(rows(1, 2), **options)
    assert ids() == []


# -- keys that are there already -------------------------------------------------------


def test_keys_that_are_there_fail_the_job_or_are_ignored(
    save: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    save(rows(1, 10))
    with pytest.raises(Exception, match="a row with this key is in the table"):
        save(rows(5, 15))
    assert ids() == list(range(1, 11))
    save(rows(5, 15), operation="insert_ignore")
    assert ids() == list(range(1, 16))
    nothing_is_left()


def test_a_key_of_two_tasks_fails_the_job(
    save: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    twice = rows(1, 20).selectExpr("v", "if(id = 20, 1, id) AS id")
    with pytest.raises(Exception, match=r"two workers .*tasks, .* wrote the key"):
        save(twice)
    assert ids() == []
    nothing_is_left()


def test_a_null_in_a_column_that_admits_none(
    spark: Any, save: Callable[..., None], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    with pytest.raises(Exception, match="column 'id' is not nullable, and 1 of the 2 values"):
        save(spark.createDataFrame([(1, "a"), (None, "b")], "id long, v string").coalesce(1))
    assert ids() == []
    nothing_is_left()


# -- attempts --------------------------------------------------------------------------


@pytest.fixture
def flaky(spark: Any) -> str:
    """A format whose tasks stage their rows and fail, except in their last attempt but one."""
    from txnkv.spark.source import TxnkvDataSource
    from txnkv.spark.writing import JobWriter, Written

    # Local classes travel to the workers by value, who cannot import this file.
    class FlakyWriter(JobWriter):
        def write(self, iterator: Iterator[Any]) -> Written:
            from pyspark import TaskContext

            done = super().write(iterator)
            task = TaskContext.get()
            assert task is not None
            if task.attemptNumber() < 2 - task.partitionId():
                raise RuntimeError("this attempt fails after it staged its rows")
            return done

    class Flaky(TxnkvDataSource):
        @classmethod
        def name(cls) -> str:
            return "flaky"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            made = super().writer(schema, overwrite)
            made.__class__ = FlakyWriter
            return made

    spark.dataSource.register(Flaky)
    return "flaky"


@pytest.mark.parametrize("with_token", [False, True])
def test_failed_attempts_leave_one_copy_of_each_row(
    client: txnkv.Client,
    save: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
    flaky: str,
    with_token: bool,
    nothing_is_left: Callable[[], None],
) -> None:
    if with_token:
        with client.transaction(timeout=None) as txn:
            save(rows(1, 100), flaky, **txnkv.spark.options(txn, "t"))
            staged = client.stats()["staged_row_sets"]
            assert staged > 4  # two tablets, two tasks, and the copies of the failed attempts
    else:
        save(rows(1, 100), flaky)
    assert ids() == list(range(1, 101))
    nothing_is_left()


@pytest.mark.parametrize("with_token", [False, True])
def test_a_job_that_fails_leaves_nothing(
    client: txnkv.Client,
    save: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
    with_token: bool,
    nothing_is_left: Callable[[], None],
) -> None:
    fails = "if(id = 100, raise_error('this task always fails'), v) AS v"
    frame = rows(1, 100).selectExpr("id", fails)
    if with_token:
        with client.transaction(timeout=None) as txn:
            with pytest.raises(Exception, match="this task always fails"):
                save(frame, **txnkv.spark.options(txn, "t"))
            txn.insert("t", {"id": 1, "v": "the caller's"})
        assert client.table("t").get(1) == {"id": 1, "v": "the caller's"}
        assert ids() == [1]
    else:
        with pytest.raises(Exception, match="this task always fails"):
            save(frame)
        assert ids() == []
        assert [info.state for info in client.transactions()] == [TxnState.ABORTED]
    nothing_is_left()


def start(
    client: txnkv.Client, where: dict[str, str], txn: txnkv.Transaction | None, **options: str
) -> Any:
    """A writer into table t as Spark would make it, under the caller's transaction, if any."""
    from txnkv.spark.columns import spark_schema
    from txnkv.spark.settings import Settings
    from txnkv.spark.writing import JobWriter

    place = where if txn is None else txnkv.spark.options(txn, "t")
    settings = Settings.of_write(place | options)
    return JobWriter.start(settings, spark_schema(client.table("t").schema, ["v", "id"]))


@pytest.mark.usefixtures("clients_are_closed")
def test_row_errors_say_that_nothing_counts(
    client: txnkv.Client, where: dict[str, str], ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They said that the others are in the transaction, which is still open."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    with client.transaction() as txn:
        writer = start(client, where, txn)
        with pytest.raises(txnkv.RowErrors, match=r"nothing of this task counts: .* keys\.$"):
            writer.write(iter([batch(1, 1)]))
        writer.abort([None])
    own = start(client, where, None)
    told = [own.write(iter([batch(1)])), own.write(iter([batch(1)]))]
    with pytest.raises(txnkv.RowErrors, match=r"nothing of the job counts: .* keys\.$"):
        own.commit(told)
    own.abort(told)
    assert ids() == []


@pytest.mark.usefixtures("clients_are_closed")
def test_a_write_that_passes_its_timeout(
    client: txnkv.Client, where: dict[str, str], ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its abort raised as well, so Spark showed both, and spoke of a token nobody gave."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    own = start(client, where, None, timeout="0.3")
    told = own.write(iter([batch(1)]))
    txn = client.new_transaction(timeout=0.3)
    joined = start(client, where, txn)
    time.sleep(0.5)
    for late in (lambda: own.write(iter([batch(2)])), lambda: own.commit([told])):
        with pytest.raises(txnkv.TransactionTimedOutError, match=r"than 0\.3 s, .* timeout,"):
            late()
    own.abort([None])
    joined.abort([None])
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.commit()
    joined.abort([None])
    assert ids() == []


def test_two_attempts_of_one_task_at_once(
    client: txnkv.Client, where: dict[str, str], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    """A speculative copy runs to its end beside the first; Spark names one of them."""
    with client.transaction() as txn:
        writer = start(client, where, txn)
        first = writer.write(iter([batch(1, 2), batch(3)]))
        second = writer.write(iter([batch(1, 2), batch(3)]))
        other = writer.write(iter([batch(4)]))
        assert len({first.attempt, second.attempt, other.attempt}) == 3
        assert (first.inserted, second.inserted) == (3, 3)
        writer.commit([second, other])
        assert txn.scan("t").to_arrow().num_rows == 4
    assert ids() == [1, 2, 3, 4]
    nothing_is_left()


def test_two_messages_of_one_partition_count_once(
    client: txnkv.Client, where: dict[str, str], ids: Ids
) -> None:
    with client.transaction() as txn:
        writer = start(client, where, txn)
        copies = [replace(writer.write(iter([batch(1)])), partition=0) for _ in range(2)]
        writer.commit(copies)
    assert ids() == [1]


def test_an_attempt_that_comes_after_the_job(
    client: txnkv.Client, where: dict[str, str], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    with client.transaction() as txn:
        writer = start(client, where, txn)
        writer.commit([writer.write(iter([batch(1)]))])
        with pytest.raises(txnkv.InvalidTxnStateError, match="came too late"):
            writer.write(iter([batch(2)]))
    with pytest.raises(txnkv.InvalidTxnStateError):
        writer.write(iter([batch(3)]))
    assert ids() == [1]
    nothing_is_left()


def test_no_commit_while_a_job_runs(client: txnkv.Client, where: dict[str, str], ids: Ids) -> None:
    txn = client.new_transaction()
    writer = start(client, where, txn)
    done = writer.write(iter([batch(1)]))
    with pytest.raises(txnkv.InvalidTxnStateError, match="a job that still runs"):
        txn.commit()
    with pytest.raises(txnkv.InvalidTxnStateError, match="a task answered None"):
        writer.commit([done, None])
    writer.abort([done, None])
    writer.abort([done, None])
    txn.commit()
    assert ids() == []
