"""Micro batches count once, whoever retries, replays and dies; played without Spark.

`Query` does what Spark does with a batch: a planner's writer goes to tasks by pickle, and what
they answer to a committer, which makes its writer anew. `test_stream_queries` has Spark do it.
"""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv import TxnState
from txnkv.spark import java, worker_client
from txnkv.spark.streams import stream_writer

from .conftest import batch

pytestmark = pytest.mark.spark

Ids = Callable[..., list[int]]


class Query:
    """A streaming query into a table or topic, whose batches are run by hand."""

    def __init__(self, options: dict[str, str], id: str, overwrite: bool = False) -> None:
        from txnkv.spark.settings import StreamWrite

        self.settings = StreamWrite.of_stream(options, overwrite=overwrite)
        self.id = id

    def plan(self, like: pa.RecordBatch) -> Any:
        """The writer of the next batch, as its tasks get it."""
        from pyspark.sql.pandas.types import from_arrow_schema

        from txnkv.spark.streams.stream_writer import stream_writer_of

        return pickle.loads(
            pickle.dumps(stream_writer_of(self.settings, from_arrow_schema(like.schema)))
        )

    def committer(self) -> Any:
        from txnkv.spark.streams.stream_writer import StreamWriter

        return StreamWriter(self.settings)

    def task(self, writer: Any, number: int, *batches: pa.RecordBatch) -> Any:
        """One attempt of a task of batch `number`."""
        before = stream_writer._query_and_batch
        stream_writer._query_and_batch = lambda: (self.id, number)
        try:
            return pickle.loads(pickle.dumps(writer.write(iter(batches))))
        finally:
            stream_writer._query_and_batch = before

    def run(self, number: int, *tasks: Sequence[pa.RecordBatch]) -> list[Any]:
        """A whole batch; what its tasks answered."""
        writer = self.plan(tasks[0][0])
        told = [self.task(writer, number, *some) for some in tasks]
        self.committer().commit(told, number)
        return told


@pytest.fixture(autouse=True)
def as_a_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is all of Spark's: no keepers; it gives up its clients at the end."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    yield
    while worker_client._clients:
        worker_client._clients.popitem()[1][1].close()


@pytest.fixture
def query(where: dict[str, str]) -> Callable[..., Query]:
    """A query into table t, or with other options."""

    def make(id: str = "q", overwrite: bool = False, **options: str) -> Query:
        return Query(where | {"checkpointLocation": "c"} | options, id, overwrite)

    return make


@pytest.fixture(params=["marker", "sidecar"])
def events(client: txnkv.Client, request: pytest.FixtureRequest) -> txnkv.Topic:
    """Topic e of two partitions."""
    return client.create_topic("e", partitions=2, buffer=request.param)


@pytest.fixture
def to_topic(client: txnkv.Client, events: txnkv.Topic) -> Callable[..., Query]:
    """A query into topic e."""

    def make(id: str = "q", **options: str) -> Query:
        place = {"path": client.path, "topic": "e", "checkpointLocation": "c"}
        return Query(place | options, id)

    return make


def messages(*values: str, key: str | None = None) -> pa.RecordBatch:
    return pa.record_batch(
        {"value": list(values), "key": pa.array([key] * len(values), pa.string())}
    )


def read(topic: txnkv.Topic) -> list[bytes | None]:
    """All committed messages, partition by partition."""
    found = []
    with topic.consumer() as consumer:
        while some := consumer.poll(timeout=0):
            found += some
    return [m.value for m in sorted(found, key=lambda m: (m.partition, m.offset))]


# -- once ------------------------------------------------------------------------------


def test_a_batch_is_one_transaction_and_a_version(
    client: txnkv.Client, query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    told = query().run(0, [batch(1, 2), batch(3)], [batch(4)])
    assert [some.inserted for some in told] == [3, 1]
    assert ids() == [1, 2, 3, 4]
    (info,) = client.transactions()
    applied = client.applied("q")
    assert applied is not None
    assert (applied.version, applied.source, applied.txn_id) == (0, "q", info.id)
    query().run(1, [batch(5)])
    query(appId="daily").run(0, [batch(6)])
    assert {name: one.version for name, one in client.applications().items()} == {
        "q": 1,
        "daily": 0,
    }
    nothing_is_left()


def test_a_batch_without_rows_is_a_version(
    client: txnkv.Client, query: Callable[..., Query], ids: Ids
) -> None:
    one = query()
    writer = one.plan(batch(1))
    one.committer().commit([one.task(writer, 0)], 0)
    assert ids() == []
    assert client.applications()["q"].version == 0


def test_a_batch_that_is_committed_is_not_written_again(
    client: txnkv.Client, query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    query().run(0, [batch(1, 2)])
    told = query().run(0, [batch(1, 2, 3)])  # nobody even looks at the rows
    assert told[0].inserted == 0
    assert ids() == [1, 2]
    assert [info.state for info in client.transactions()] == [
        TxnState.COMMITTED,
        TxnState.ABORTED,
    ]
    nothing_is_left()


def test_messages_of_a_replayed_batch_come_once(
    client: txnkv.Client, events: txnkv.Topic, to_topic: Callable[..., Query]
) -> None:
    for _ in range(3):
        to_topic().run(0, [messages("a", "b", key="k")], [messages("c", key="k")])
    for _ in range(3):
        to_topic().run(1, [messages("d", key="k")])
    assert read(events) == [b"a", b"b", b"c", b"d"]
    assert client.check().ok


def test_two_drivers_run_the_same_batch_at_once(
    client: txnkv.Client, query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    """Neither knows of the other, and both stage before one of them commits."""
    drivers = [query(checkpointLocation=name) for name in ("c", "c, by another path")]
    writers = [driver.plan(batch(1)) for driver in drivers]
    told = [
        [driver.task(writer, 0, batch(1, 2))]
        for driver, writer in zip(drivers, writers, strict=True)
    ]
    for driver, some in zip(drivers, told, strict=True):
        driver.committer().commit(some, 0)
    assert ids() == [1, 2]
    nothing_is_left()


def test_another_query_may_not_go_on_with_an_application(
    client: txnkv.Client, query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    """Its checkpoint was deleted, say: its first batches would be taken for those of before."""
    query("q", appId="daily").run(0, [batch(1)])
    other = query("r", appId="daily")
    writer = other.plan(batch(2))
    with pytest.raises(ValueError, match=r"application 'daily' is driven by 'q'.*forget_applied"):
        other.task(writer, 0, batch(2))
    other.committer().abort([None], 0)
    nothing_is_left()
    client.forget_applied("daily")
    other.run(0, [batch(2)])
    assert ids() == [1, 2]


def test_a_store_that_was_restored_to_before_its_checkpoint(
    client: txnkv.Client, query: Callable[..., Query], ids: Ids
) -> None:
    """Batches that Spark took for done are not there: to go on would lose them in silence."""
    query().run(0, [batch(1)])
    later = query()
    writer = later.plan(batch(3))
    with pytest.raises(ValueError, match=r"batches 1 to 1 are not in the store.*forget_applied"):
        later.task(writer, 2, batch(3))
    later.committer().abort([None], 2)
    client.forget_applied("q")
    later.run(2, [batch(3)])
    assert ids() == [1, 3]


def test_an_application_that_is_forgotten_inside_a_batch(
    client: txnkv.Client, query: Callable[..., Query], ids: Ids
) -> None:
    """One task has written nothing, as the batch was there; the other would write its part."""
    query().run(0, [batch(1)], [batch(2)])
    one = query(operation="upsert")
    writer = one.plan(batch(1))
    told = [one.task(writer, 0, batch(1))]
    client.forget_applied("q")
    told.append(one.task(writer, 0, batch(2)))
    with pytest.raises(txnkv.InvalidTxnStateError, match="and is not any more"):
        one.committer().commit(told, 0)
    one.committer().abort(told, 0)
    one.run(0, [batch(1)], [batch(2)])
    assert ids() == [1, 2]


# -- attempts --------------------------------------------------------------------------


def test_attempts_that_are_not_named_leave_nothing(
    query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    one = query()
    writer = one.plan(batch(1))
    copies = [replace(one.task(writer, 0, batch(1, 2)), partition=0) for _ in range(2)]
    one.task(writer, 0, batch(3))  # failed after it had staged
    other = replace(one.task(writer, 0, batch(3)), partition=1)
    one.committer().commit([*copies, other], 0)
    assert ids() == [1, 2, 3]
    nothing_is_left()


def test_messages_of_attempts_that_are_not_named(
    client: txnkv.Client, events: txnkv.Topic, to_topic: Callable[..., Query]
) -> None:
    """In a partition they stand in the order of the tasks, whichever was done first."""
    one = to_topic()
    writer = one.plan(messages("a"))
    last = replace(one.task(writer, 0, messages("c", "d", key="k")), partition=1)
    one.task(writer, 0, messages("a", key="k"))
    first = replace(one.task(writer, 0, messages("a", "b", key="k")), partition=0)
    assert read(events) == []
    one.committer().commit([first, last], 0)
    assert read(events) == [b"a", b"b", b"c", b"d"]
    assert client.check().ok


def test_a_zombie_writes_after_its_batch_was_committed(
    query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    one = query()
    writer = one.plan(batch(1))
    one.committer().commit([one.task(writer, 0, batch(1))], 0)
    assert one.task(writer, 0, batch(2)).inserted == 0  # it looked, and the batch was there

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_writer, "is_committed", lambda client, mark: False)
        with pytest.raises(txnkv.InvalidTxnStateError):  # it looked too early
            one.task(writer, 0, batch(2))
    query().run(1, [batch(3)])
    assert ids() == [1, 3]
    nothing_is_left()


def test_a_zombie_sends_after_its_batch_was_committed(
    client: txnkv.Client,
    events: txnkv.Topic,
    to_topic: Callable[..., Query],
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    one = to_topic()
    writer = one.plan(messages("a"))
    told = one.task(writer, 0, messages("a"))

    def slow() -> Any:
        yield messages("a")
        one.committer().commit([told], 0)  # meanwhile
        yield messages("b")

    monkeypatch.setattr(stream_writer, "_query_and_batch", lambda: ("q", 0))
    with pytest.raises(txnkv.InvalidTxnStateError):
        writer.write(slow())
    assert read(events) == [b"a"]
    assert client.check().ok


def test_a_task_without_an_answer_is_no_commit(
    query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    one = query()
    told = one.task(one.plan(batch(1)), 0, batch(1))
    with pytest.raises(txnkv.InvalidTxnStateError, match="a task answered None"):
        one.committer().commit([told, None], 0)
    one.committer().abort([told, None], 0)
    assert ids() == []
    nothing_is_left()


# -- what fails ------------------------------------------------------------------------


def test_a_batch_that_fails_leaves_nothing(
    query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    """No task has answered, so only the name tells which transaction it was."""
    query().run(0, [batch(1)])
    for options in ({}, {"checkpointLocation": "d"}):
        one = query(**options)
        writer = one.plan(batch(1))
        with pytest.raises(txnkv.RowErrors, match=r"nothing of this task counts.*is in the table"):
            one.task(writer, 1, batch(1))
        one.committer().abort([None], 1)
        nothing_is_left()
    assert ids() == [1]


def test_a_batch_that_passes_its_timeout(query: Callable[..., Query], ids: Ids) -> None:
    """Its abort raised as well."""
    stream = query(timeout="0.3")
    writer = stream.plan(batch(1))
    told = stream.task(writer, 0, batch(1))
    time.sleep(0.5)
    for late in (
        lambda: stream.task(writer, 0, batch(2)),
        lambda: stream.committer().commit([told], 0),
    ):
        with pytest.raises(txnkv.TransactionTimedOutError, match=r"than 0\.3 s, .* timeout,"):
            late()
    stream.committer().abort([told], 0)
    assert ids() == []


def test_a_commit_that_fails_is_followed_by_an_abort(
    client: txnkv.Client, query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    one = query()
    writer = one.plan(batch(1))
    told = [one.task(writer, 0, batch(1)), one.task(writer, 0, batch(1))]
    with pytest.raises(txnkv.RowErrors, match=r"nothing of the batch counts.*two workers"):
        one.committer().commit(told, 0)
    one.committer().abort(told, 0)
    assert ids() == []
    assert client.applications() == {}
    nothing_is_left()


def test_a_batch_that_another_transaction_was_faster_than(
    client: txnkv.Client, query: Callable[..., Query], nothing_is_left: Callable[[], None]
) -> None:
    one = query(operation="upsert")
    told = [one.task(one.plan(batch(1)), 0, batch(1))]
    client.new_session("auto_sync").upsert("t", {"id": 1, "v": "mine"})
    with pytest.raises(txnkv.TransactionConflictError):
        one.committer().commit(told, 0)
    one.committer().abort(told, 0)
    one.run(0, [batch(1)])
    row = client.table("t").get(1)
    assert row is not None
    assert row["v"] == "v1"
    nothing_is_left()


def test_the_next_driver_ends_what_a_killed_one_left(
    client: txnkv.Client, query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    one = query()
    one.task(one.plan(batch(1)), 0, batch(1))
    assert [info.state for info in client.transactions()] == [TxnState.OPEN]
    query().run(0, [batch(1)])
    assert ids() == [1]
    assert [info.state for info in client.transactions()] == [
        TxnState.ABORTED,
        TxnState.COMMITTED,
    ]
    nothing_is_left()


def test_a_driver_that_was_replaced_does_not_end_what_its_successor_began(
    query: Callable[..., Query], ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = query(), query()
    writer = old.plan(batch(1))
    real = java.find(os.getpid())
    assert real is not None
    with monkeypatch.context() as patch:
        patch.setattr(java, "jvm", lambda: replace(real, pid=real.pid + 1))
        told = new.task(new.plan(batch(1)), 0, batch(1))
    with pytest.raises(txnkv.InvalidTxnStateError):
        old.task(writer, 0, batch(1))
    old.committer().abort([None], 0)
    new.committer().commit([told], 0)
    assert ids() == [1]


KILLED = """
from tests.spark.test_stream_writing import Query, batch, messages
query = Query(place, "q")
query.run(0, [messages("a", "b", key="k")] if "topic" in place else [batch(1, 2), batch(3)])
"""


TABLE = ("applications.staged", "commit.started", "applications.written", "commit.ended")
TOPIC = ("job.ending", *TABLE, "commit.decided")


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("table", "commit.decided"),
        ("topic", "job.appended"),
        *(pytest.param("table", fault, marks=pytest.mark.slow) for fault in TABLE),
        *(pytest.param("topic", fault, marks=pytest.mark.slow) for fault in TOPIC),
    ],
)
def test_a_committer_is_killed(
    client: txnkv.Client,
    events: txnkv.Topic,
    where: dict[str, str],
    process: Callable[..., Any],
    until: Callable[..., Any],
    ids: Ids,
    kind: str,
    fault: str,
) -> None:
    """Spark runs the batch again, whether it was committed or not."""
    place = {"path": where["path"], kind: "t" if kind == "table" else "e"}
    place["checkpointLocation"] = "c"
    process(KILLED, fault=f"{fault}=kill", place=place).finish(-9)
    query = Query(place, "q")
    for _ in range(2):
        data = messages("a", "b", key="k") if kind == "topic" else batch(1, 2, 3)
        query.run(0, [data])
    assert ids() == ([1, 2, 3] if kind == "table" else [])
    # What the killed one began may stand before the messages until a leader has ended it.
    there = [] if kind == "table" else [b"a", b"b"]
    until(lambda: read(events) == there)
    internals.maintenance(client).round(resume_all=True)
    assert read(events) == there
    assert client.check().ok


# -- what is done with the rows --------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "left"),
    [
        ("insert_ignore", {1: "old", 2: "old", 3: "v3"}),
        ("upsert", {1: "old", 2: "v2", 3: "v3"}),
        ("update_ignore", {1: "old", 2: "v2"}),
        ("delete_ignore", {1: "old"}),
    ],
)
def test_operations(
    client: txnkv.Client, query: Callable[..., Query], operation: str, left: dict[int, str]
) -> None:
    with client.transaction() as txn:
        for id in (1, 2):
            txn.insert("t", {"id": id, "v": "old"})
    data = batch(2, 3)
    one = query(operation=operation)
    one.run(0, [data.select(["id"]) if operation == "delete_ignore" else data])
    assert {row["id"]: row["v"] for row in client.table("t").scan()} == left


def test_each_batch_replaces_the_rows_in_output_mode_complete(
    client: txnkv.Client, query: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    one = query(overwrite=True)
    one.run(0, [batch(1, 2)], [batch(3)])
    one.run(1, [batch(2)], [batch(5)])
    assert ids() == [2, 5]
    one.run(1, [batch(7)])
    assert ids() == [2, 5]
    failed = one.plan(batch(1))
    one.task(failed, 2, batch(1))
    one.committer().abort([None], 2)
    assert ids() == [2, 5]
    nothing_is_left()


def test_rows_that_say_what_is_done_with_them(
    client: txnkv.Client, query: Callable[..., Query], nothing_is_left: Callable[[], None]
) -> None:
    """Rows as from a stream of changes, compared with a dict."""
    chance = random.Random(7)
    model: dict[int, str] = {}
    one = query(operationColumn="_op")
    for number in range(6):
        tasks: list[list[pa.RecordBatch]] = [[], []]
        for step in range(40):
            id = chance.randrange(30)
            op = chance.choice(["insert", "update", "upsert", "delete"])
            value = f"{number}.{step}"
            row = {"id": [id], "v": [value], "_op": [op]}
            tasks[id % 2].append(pa.record_batch(row))
            if op == "delete":
                model.pop(id, None)
            else:
                model[id] = value
        one.run(number, *tasks)
        found = {row["id"]: row["v"] for row in client.table("t").scan()}
        assert found == model
    nothing_is_left()


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()])
def test_operations_in_other_types_of_text(
    query: Callable[..., Query], ids: Ids, kind: pa.DataType
) -> None:
    """Tasks have them where spark.sql.execution.arrow.useLargeVarTypes says so."""
    one = query(operationColumn="_op")
    for number, (ops, left) in enumerate(((["insert"] * 2, [1, 2]), (["delete", "update"], [2]))):
        plain = batch(1, 2).append_column("_op", pa.array(ops))
        large = batch(1, 2).append_column("_op", pa.array(ops, kind))
        told = one.task(one.plan(plain), number, large)
        one.committer().commit([told], number)
        assert ids() == left


# -- refused while planning ------------------------------------------------------------


def test_data_that_does_not_fit_is_refused_by_the_planner(
    client: txnkv.Client, query: Callable[..., Query], to_topic: Callable[..., Query]
) -> None:
    rows = batch(1)
    changes = rows.append_column("_op", pa.array([1]))
    for one, data, says in [
        (query(), rows.rename_columns(["w", "id"]), "columns that the table does not have: w"),
        (query(), rows.set_column(1, "id", pa.array(["1"])), "column 'id'"),
        (query(operation="delete"), rows.select(["v"]), "delete needs the whole key"),
        (query(operationColumn="_op"), rows, "the data has no such column"),
        (query(operationColumn="_op"), changes, "'_op' .* is a string, not int64"),
        (query(operationColumn="_op"), changes.append_column("_op", ["a"]), "twice: v, id, _op, _"),
        (query(operationColumn="v"), rows, "'v', which is a column of the table"),
        (to_topic(), rows, "messages have value, key"),
        (to_topic(), messages("a").select(["key"]), "no column 'value'"),
    ]:
        with pytest.raises(txnkv.SchemaError, match=says):
            one.plan(data)
    with pytest.raises(txnkv.TableNotFoundError):
        query(table="nowhere").plan(rows)
    assert client.transactions() == []


def test_modes_that_make_no_sense(query: Callable[..., Query]) -> None:
    with pytest.raises(ValueError, match="mode overwrite leaves no rows to delete"):
        query(overwrite=True, operation="delete")
    with pytest.raises(ValueError, match="operationColumn is of changes"):
        query(overwrite=True, operationColumn="_op").plan(batch(1))


@pytest.mark.parametrize("said", [["merge"], ["merge", "delete"], ["delete", "merge"]])
def test_an_operation_that_nobody_knows(query: Callable[..., Query], said: list[str]) -> None:
    """Also of a row that others of its key follow."""
    one = query(operationColumn="_op")
    data = batch(*(1 for _ in said)).append_column("_op", pa.array(said))
    writer = one.plan(data)
    with pytest.raises(txnkv.SchemaError, match="insert, update, upsert or delete, not 'merge'"):
        one.task(writer, 0, data)
    one.committer().abort([None], 0)
