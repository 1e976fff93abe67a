"""The seven operations on Arrow batches, staged as row sets: counts, errors, what is there then.

Every case is done row by row in a model, and must come out the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.storage.faults import arm
from txnkv.tables import arrow_input
from txnkv.tables.operations import OPERATIONS
from txnkv.tables.tablets import RowSetInfo, row_set_writer
from txnkv.tables.tablets.row_set import RowSet, RowSetRetired
from txnkv.tables.tablets.tablet import Tablet, TabletState
from txnkv.transaction.job import Job
from txnkv.transaction.transaction import Transaction

SCHEMA = txnkv.Schema(
    {"id": "int64", "s": "string?", "n": txnkv.Column("int32", default=7), "tags": "list<int64>?"},
    primary_key=["id"],
)
DEFAULTS = {"s": None, "n": 7, "tags": None}
Rows = dict[int, dict[str, Any]]


@dataclass
class Model:
    """Some rows, and the outcome of operations on them, row by row."""

    rows: Rows = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("inserted", "updated", "deleted", "ignored"), 0)
    )
    refused: list[tuple[int, str]] = field(default_factory=list)

    def apply(self, op: str, data: list[dict[str, Any]]) -> None:
        for row in data:
            self._one(op, row)

    def _one(self, op: str, row: Mapping[str, Any]) -> None:
        key = row["id"]
        there = key in self.rows
        verb = op.removesuffix("_ignore")
        if there if verb == "insert" else not there and verb != "upsert":
            if op.endswith("_ignore"):
                self.counts["ignored"] += 1
            else:
                error = "AlreadyPresentError" if verb == "insert" else "NotFoundError"
                self.refused.append((key, error))
        elif verb == "delete":
            del self.rows[key]
            self.counts["deleted"] += 1
        else:
            self.rows[key] = {**self.rows.get(key, DEFAULTS), **row}
            self.counts["updated" if there else "inserted"] += 1

    def result(self) -> txnkv.WriteResult:
        return txnkv.WriteResult(**self.counts)


def arrow(data: list[dict[str, Any]]) -> pa.Table:
    names = list(data[0]) if data else ["id"]
    fields = [SCHEMA.arrow.field(name) for name in names]
    return pa.Table.from_pylist(data, pa.schema(fields))


def rows_of(found: pa.Table) -> Rows:
    return {row["id"]: row for row in found.to_pylist()}


def staged(client: txnkv.Client) -> int:
    """Row sets that are neither committed nor on their way out."""
    with internals.status(client).read() as cur:
        (count,) = cur.execute("SELECT count(*) FROM row_sets WHERE state < 2").fetchone()
    return int(count)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 5 rows, chunks of 23."""
    monkeypatch.setattr(row_set_writer, "rows_per_block", lambda widths: 5)
    monkeypatch.setattr(arrow_input, "CHUNK_ROWS", 23)


@pytest.fixture(params=[1, 3], ids=["one tablet", "three tablets"])
def goods(client: txnkv.Client, request: Any) -> txnkv.Table:
    return client.create_table("goods", SCHEMA, txnkv.hash_partition("id", request.param))


@pytest.fixture
def begin(client: txnkv.Client) -> Callable[..., txnkv.Transaction]:
    """Begins a large transaction: what it writes is staged at once."""

    def run(**options: Any) -> txnkv.Transaction:
        txn = client.new_transaction(**options)
        txn.serialize()
        return txn

    return run


def write(
    txn: txnkv.Transaction, table: txnkv.Table, op: str, data: list[dict[str, Any]], model: Model
) -> None:
    """One write, compared with the model's counts and errors."""
    expected = Model(model.rows)
    expected.apply(op, data)
    if not expected.refused:
        assert txn.write(table, arrow(data), op) == expected.result()
        return
    with pytest.raises(txnkv.RowErrors) as caught:
        txn.write(table, arrow(data), op)
    errors = caught.value.errors
    assert {(row.op, row.table) for row in errors} == {(op, table.name)}
    assert [(row.key, type(row.error).__name__) for row in errors] == expected.refused


CASES: dict[str, tuple[list[int], list[int]]] = {
    "all new": ([], [3, 1, 2]),
    "all there": ([1, 2, 3], [3, 1, 2]),
    "some there": ([1, 3, 5], [4, 3, 2, 1]),
    "doubles of new": ([], [2, 1, 2, 2, 1]),
    "doubles of those there": ([1, 2], [2, 1, 2, 2, 1]),
    "doubles of both": ([2, 4], [4, 1, 2, 1, 4, 3, 2]),
    "nothing": ([1], []),
}


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_as_if_row_by_row(
    client: txnkv.Client, goods: txnkv.Table, begin: Any, op: str, case: Any
) -> None:
    there, ids = case
    data = [{"id": i, **_column(op, at)} for at, i in enumerate(ids)]
    model = Model()
    with begin() as txn:
        write(txn, goods, "insert", [{"id": i, "s": f"old {i}", "n": i} for i in there], model)
    with begin() as txn:
        write(txn, goods, op, data, model)
        assert rows_of(txn.scan(goods).to_arrow()) == model.rows
        assert goods.count() == len(there)
    assert rows_of(goods.scan().to_arrow()) == model.rows
    assert goods.count() == len(model.rows)
    assert staged(client) == 0


def test_what_the_same_transaction_wrote(goods: txnkv.Table, begin: Any) -> None:
    """Every operation meets what the ones before it left, staged and not committed."""
    model = Model()
    ids = range(20)
    with begin() as txn:
        write(txn, goods, "insert", [{"id": i, "s": "a", "n": i} for i in ids], model)
    with begin() as txn:
        write(txn, goods, "delete", [{"id": i} for i in ids[::2]], model)
        write(txn, goods, "insert", [{"id": i, "s": "b"} for i in ids[:8]], model)
        write(txn, goods, "update", [{"id": i, "n": -i} for i in ids], model)
        write(txn, goods, "upsert", [{"id": i, "tags": [i, i]} for i in ids[5:]], model)
        write(txn, goods, "delete_ignore", [{"id": i} for i in ids[1::3]], model)
        write(txn, goods, "insert_ignore", [{"id": i, "s": "c"} for i in ids[:4]], model)
        write(txn, goods, "update_ignore", [{"id": i, "s": None} for i in ids[3:9]], model)
        assert rows_of(txn.scan(goods).to_arrow()) == model.rows
        for i in ids:
            assert txn.get(goods, i) == model.rows.get(i)
    assert rows_of(goods.scan().to_arrow()) == model.rows


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.usefixtures("small_chunks")
def test_any_operations_in_any_order(
    client: txnkv.Client, goods: txnkv.Table, begin: Any, seed: int
) -> None:
    """Large and small transactions, writes of several chunks, commits and rollbacks."""
    rng = random.Random(seed)
    model = Model()
    for _ in range(12):
        before = dict(model.rows)
        txn = begin() if rng.random() < 0.7 else client.new_transaction()
        for _ in range(rng.randint(1, 5)):
            write(txn, goods, *_some(rng), model)
            assert rows_of(txn.scan(goods).to_arrow()) == model.rows
        assert rows_of(goods.scan().to_arrow()) == before
        if rng.random() < 0.2:
            txn.rollback()
            model.rows = before
        else:
            txn.commit()
        assert rows_of(goods.scan(ordered=True).to_arrow()) == model.rows
        assert goods.count() == len(model.rows)
        keys = rng.sample(range(80), 10)
        assert [goods.get(key) for key in keys] == [model.rows.get(key) for key in keys]


def _some(rng: random.Random) -> tuple[str, list[dict[str, Any]]]:
    op = rng.choice(OPERATIONS)
    ids = [rng.randrange(80) for _ in range(rng.choice([1, 6, 30, 70]))]
    names = [name for name in ("s", "n", "tags") if rng.random() < 0.6]
    if op.startswith("delete"):
        names = []

    def value(name: str, i: int) -> Any:
        stamp = rng.randrange(1000)
        return {"s": f"{i} {stamp}", "n": stamp, "tags": [i, stamp]}[name]

    return op, [{"id": i, **{name: value(name, i) for name in names}} for i in ids]


# -- chunks ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.usefixtures("small_chunks")
def test_doubles_between_chunks(goods: txnkv.Table, begin: Any, op: str) -> None:
    """A key comes again in the next chunk, which is looked at while the one before is written."""
    model = Model()
    with begin() as txn:
        write(txn, goods, "insert", [{"id": i, "n": i} for i in range(0, 60, 2)], model)
    ids = [*range(30), *range(20, 50), *range(25), 20, 20]
    with begin() as txn:
        write(txn, goods, op, [{"id": i, **_column(op, at)} for at, i in enumerate(ids)], model)
        assert rows_of(txn.scan(goods).to_arrow()) == model.rows
    assert rows_of(goods.scan().to_arrow()) == model.rows


def _column(op: str, at: int) -> dict[str, Any]:
    return {} if op.startswith("delete") else {"s": f"at {at}"}


@pytest.mark.parametrize("op", ["upsert", "update", "delete"])
@pytest.mark.usefixtures("small_chunks")
def test_chunks_count_together_or_not_at_all(
    client: txnkv.Client, goods: txnkv.Table, begin: Any, op: str
) -> None:
    model = Model()
    with begin() as txn:
        write(txn, goods, "insert", [{"id": i} for i in range(100)], model)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from arrow([{"id": i, **_column(op, i)} for i in range(90)]).to_batches()
        raise OSError("the other end hung up")

    schema = arrow([{"id": 1, **_column(op, 1)}]).schema
    with begin() as txn:
        with pytest.raises(OSError, match="hung up"):
            txn.write(goods, pa.RecordBatchReader.from_batches(schema, batches()), op)
        assert rows_of(txn.scan(goods).to_arrow()) == model.rows
        write(txn, goods, "delete", [{"id": 1}], model)
    assert rows_of(goods.scan().to_arrow()) == model.rows
    assert staged(client) == 0


@pytest.mark.usefixtures("small_chunks")
def test_attempts_of_a_job(client: txnkv.Client, goods: txnkv.Table, begin: Any) -> None:
    """Changes of an attempt count when the job names the attempt; their order is kept."""
    model = Model()
    with begin() as txn:
        write(txn, goods, "insert", [{"id": i, "s": "a"} for i in range(60)], model)
    with begin() as txn:
        job = Job.start(txn)
        for attempt in ("0.0", "0.1"):
            with job.session(attempt) as session:
                session.write(goods, arrow([{"id": i} for i in range(40)]), "delete")
                session.write(goods, arrow([{"id": i, "s": attempt} for i in range(30)]), "upsert")
                session.write(goods, arrow([{"id": i, "n": 1} for i in range(20)]), "update")
        assert rows_of(txn.scan(goods).to_arrow()) == model.rows
        job.commit(["0.1"])
        model.apply("delete", [{"id": i} for i in range(40)])
        model.apply("upsert", [{"id": i, "s": "0.1"} for i in range(30)])
        model.apply("update", [{"id": i, "n": 1} for i in range(20)])
        assert rows_of(txn.scan(goods).to_arrow()) == model.rows
    assert rows_of(goods.scan().to_arrow()) == model.rows


def test_row_sets_that_a_compaction_removes_meanwhile(
    client: txnkv.Client,
    goods: txnkv.Table,
    begin: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are looked for in what took their place, at once; nothing is counted twice, or told as
    damage.
    """
    model = Model()
    with begin() as txn:
        write(txn, goods, "insert", [{"id": i, "s": "a"} for i in range(30)], model)
    real, old = Tablet.row_set, Tablet.reload
    raised: list[RowSetInfo] = []
    reloaded, decided = [], []

    def row_set(self: Tablet, info: RowSetInfo) -> RowSet:
        if decided and not raised:
            raised.append(info)
            raise RowSetRetired(f"row set {info.id}")
        return real(self, info)

    def reload(self: Tablet) -> TabletState:
        reloaded.extend(raised)
        return old(self)

    monkeypatch.setattr(Tablet, "row_set", row_set)
    monkeypatch.setattr(Tablet, "reload", reload)
    with begin() as txn:
        write(txn, goods, "upsert", [{"id": i, "n": 1} for i in [*range(20, 40), 20]], model)
        arm("commit.decided", lambda: decided.append(True))
    assert txn.state is txnkv.TxnState.COMMITTED
    assert client.metrics()["failing_parts"] == 0
    assert not caplog.messages
    assert reloaded
    assert rows_of(goods.scan().to_arrow()) == model.rows


def test_a_row_set_that_is_gone_for_good_is_told_as_damage(
    client: txnkv.Client, goods: txnkv.Table, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked for without end."""
    model = Model()
    with begin() as txn:
        write(txn, goods, "insert", [{"id": i, "s": "a"} for i in range(30)], model)

    def retired(self: Tablet, info: RowSetInfo) -> RowSet:
        raise RowSetRetired(f"row set {info.id}")

    with begin() as txn:
        write(txn, goods, "upsert", [{"id": i, "n": 1} for i in range(20, 40)], model)
        arm("commit.decided", lambda: monkeypatch.setattr(Tablet, "row_set", retired))
    assert client.metrics()["failing_parts"] > 0
    monkeypatch.undo()


# -- columns ---------------------------------------------------------------------------


def test_columns_left_out_keep_their_values(goods: txnkv.Table, begin: Any) -> None:
    """From rows on disk, staged rows, rows in memory; new rows take defaults and nulls."""
    model = Model()
    with begin() as txn:
        write(txn, goods, "insert", [{"id": i, "s": "disk", "n": i} for i in range(10)], model)
    for i in range(5, 15):
        goods_row = {"id": i, "s": "memory", "n": i, "tags": [i]}
        model.apply("upsert", [goods_row])
        with Transaction.begin(goods._connection) as txn:
            txn.upsert(goods, goods_row)
    with begin() as txn:
        write(txn, goods, "upsert", [{"id": i, "s": "staged"} for i in range(8, 20)], model)
        write(txn, goods, "upsert", [{"id": i, "n": 100 + i} for i in range(25)], model)
        assert rows_of(txn.scan(goods).to_arrow()) == model.rows
    assert rows_of(goods.scan().to_arrow()) == model.rows


def test_a_column_that_new_rows_need(client: txnkv.Client, begin: Any) -> None:
    """An upsert may leave it out where the row is there; where not, the row is refused."""
    schema = txnkv.Schema({"id": "int64", "a": "string", "b": "int64?"}, primary_key=["id"])
    table = client.create_table("needs", schema)
    with begin() as txn:
        txn.write(table, pa.table({"id": [1, 2], "a": ["x", "y"]}))
    with begin() as txn:
        with pytest.raises(txnkv.RowErrors) as caught:
            txn.write(table, pa.table({"id": [1, 3, 3, 2], "b": [10, 30, 30, 20]}), "upsert")
        assert [(error.key, type(error.error)) for error in caught.value.errors] == [
            (3, txnkv.SchemaError)
        ] * 2
        assert "needs a value for a" in str(caught.value.errors[0])
    assert table.scan(ordered=True).to_arrow().to_pylist() == [
        {"id": 1, "a": "x", "b": 10},
        {"id": 2, "a": "y", "b": 20},
    ]


def test_a_null_is_a_value(goods: txnkv.Table, begin: Any) -> None:
    model = Model()
    with begin() as txn:
        write(txn, goods, "insert", [{"id": 1, "s": "a", "tags": [1]}], model)
        write(txn, goods, "update", [{"id": 1, "s": None}], model)
    assert goods.get(1) == {"id": 1, "s": None, "n": 7, "tags": [1]}


@pytest.mark.parametrize("op", ["upsert", "update", "delete"])
def test_the_key_is_needed(goods: txnkv.Table, begin: Any, op: str) -> None:
    with begin() as txn, pytest.raises(txnkv.SchemaError, match="'id', which is of the primary"):
        txn.write(goods, pa.table({"s": ["a"]}), op)


def test_a_delete_takes_any_columns_of_the_table(goods: txnkv.Table, begin: Any) -> None:
    model = Model()
    with begin() as txn:
        write(txn, goods, "insert", [{"id": i, "s": "a"} for i in range(4)], model)
        found = txn.write(goods, txn.scan(goods, where=[("id", "<", 2)]), "delete")
        assert found.deleted == 2
        with pytest.raises(txnkv.SchemaError, match="does not have: x"):
            txn.write(goods, pa.table({"id": [3], "x": [1]}), "delete")
    assert [row["id"] for row in goods.scan(ordered=True)] == [2, 3]


def test_no_such_operation(goods: txnkv.Table, begin: Any) -> None:
    with begin() as txn, pytest.raises(ValueError, match="'replace' is no operation; there are"):
        txn.write(goods, pa.table({"id": [1]}), "replace")


@pytest.mark.parametrize("op", ["insert", "update", "delete"])
def test_many_refused_rows(goods: txnkv.Table, begin: Any, op: str) -> None:
    """All are counted, the first thousand of the input kept, whatever is wrong with each."""
    ids = [*range(2999, -1, -1), 5000, 5000]
    with begin() as txn:
        if op == "insert":
            txn.write(goods, pa.table({"id": range(3000)}), op)
        with pytest.raises(txnkv.RowErrors) as caught:
            txn.write(goods, pa.table({"id": ids}), op)
        assert caught.value.count == 3001 if op == "insert" else 3002
        assert [error.key for error in caught.value.errors] == ids[: txnkv.RowErrors.KEPT]


# -- snapshots -------------------------------------------------------------------------


def test_older_snapshots_keep_what_they_saw(
    client: txnkv.Client, goods: txnkv.Table, begin: Any
) -> None:
    model = Model()
    seen = []
    for op, ids in [("insert", range(30)), ("update", range(10, 20)), ("delete", range(5, 15)),
                    ("upsert", range(0, 40, 3))]:  # fmt: skip
        with begin() as txn:
            write(txn, goods, op, [{"id": i, **_column(op, i)} for i in ids], model)
        seen.append((client.snapshot(), dict(model.rows)))
    for snapshot, rows in seen:
        with snapshot:
            assert rows_of(snapshot.scan(goods).to_arrow()) == rows
            assert snapshot.get(goods, 12) == rows.get(12)


def test_a_large_table(client: txnkv.Client, begin: Any) -> None:
    """Whole blocks, in one row set and over several, with gaps."""
    n = 150_000
    schema = txnkv.Schema({"id": "int64", "a": "int64", "b": "string?"}, primary_key=["id"])
    table = client.create_table("large", schema)
    ids = pa.array(range(n), pa.int64())
    with begin() as txn:
        assert txn.write(table, pa.table({"id": ids, "a": ids})).inserted == n
    with begin() as txn:
        some = ids.take(pa.array(range(0, n, 3)))
        assert txn.write(table, pa.table({"id": some, "b": some.cast("string")}), "update") == (
            txnkv.WriteResult(updated=n // 3)
        )
        gone = pa.table({"id": ids.slice(n // 2)})
        assert txn.write(table, gone, "delete") == txnkv.WriteResult(deleted=n // 2)
        assert txn.write(table, gone, "delete_ignore") == txnkv.WriteResult(ignored=n // 2)
    found = table.scan(ordered=True).to_arrow()
    assert found.num_rows == table.count() == n // 2
    assert found["id"].to_pylist() == list(range(n // 2))
    assert found["a"].to_pylist() == list(range(n // 2))
    assert found["b"].to_pylist() == [None if i % 3 else str(i) for i in range(n // 2)]
