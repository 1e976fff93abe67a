"""Scans: projection, order, limit, snapshots, tokens, what stays when the table changes."""

from __future__ import annotations

import gc
import operator
import pickle
import random
import threading
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import txnkv
from tests import internals
from txnkv.tables.read.scan import Plan
from txnkv.tables.write import write_buffer

SCHEMA = txnkv.Schema(
    {"k": "int64", "s": "string?", "v": "float64?", "l": "list<int32>?"}, primary_key=["k"]
)


def rows(*keys: int) -> pa.Table:
    """Rows whose values follow from their keys, some of them null."""
    return pa.table(
        {
            "k": pa.array(keys, pa.int64()),
            "s": pa.array([None if k % 7 == 0 else f"s{k}" for k in keys], pa.string()),
            "v": pa.array([None if k % 5 == 0 else k / 2 for k in keys], pa.float64()),
            "l": pa.array([None if k % 3 == 0 else [k, None] * (k % 3) for k in keys],
                          pa.list_(pa.int32())),
        }
    )  # fmt: skip


SIXTEENTHS = pc.equal(pc.bit_wise_and(pc.field("k"), 15), 3)
EMPTY = SCHEMA.arrow.empty_table()


def same(found: pa.Table, *keys: int) -> bool:
    return found.to_pylist() == rows(*keys).to_pylist()


@pytest.fixture(
    params=[
        (None, "row sets"),
        (txnkv.hash_partition("k", 3), "row sets"),
        (txnkv.range_partition("k", [30, 60]), "row sets"),
        (txnkv.hash_partition("k", 2), "memory"),
        (None, "flushed"),
    ],
    ids=["one tablet", "hash", "range", "hash, memory", "one tablet, flushed"],
)
def many(
    request: pytest.FixtureRequest,
    client: txnkv.Client,
    put: Any,
    small_blocks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> txnkv.Table:
    """100 rows in four overlapping commits, and the blocks of many row sets; or in memory, or
    half in memory over blocks with deletes.
    """
    partitioning, where = request.param
    table = client.create_table("many", SCHEMA, partitioning)
    keys = list(range(100))
    random.Random(3).shuffle(keys)
    if where != "row sets":
        monkeypatch.setattr(write_buffer, "MAX_ROWS", 10_000)
    if where == "flushed":
        put(table, rows(*range(90)))
        internals.flush(client)
        gone = {"k": pa.array(range(0, 90, 3), pa.int64())}
        with client.transaction() as txn:
            txn.write(table, pa.table(gone), "delete")
        internals.flush(client)
        with client.transaction() as txn:
            txn.write(table, rows(*range(0, 100, 2)), "upsert")
        keys = [k for k in range(0, 100) if k % 2 and (k % 3 == 0 or k >= 90)]
    for part in range(4):
        put(table, rows(*keys[part::4]))
    return table


def test_ordered_scan_merges_overlapping_row_sets(many: txnkv.Table) -> None:
    found = many.scan(ordered=True).to_arrow()
    assert same(found, *range(100))
    assert found.schema == SCHEMA.arrow


def test_unordered_scan_has_each_row_once(many: txnkv.Table) -> None:
    found = many.scan().to_arrow().sort_by("k")
    assert same(found, *range(100))


def test_blocks_are_read_ahead_by_threads_in_key_order_too(
    client: txnkv.Client, put: Any, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = client.create_table("many", SCHEMA)
    put(table, rows(*range(100)))
    threads, read = [], Plan._read

    def told(self: Plan, unit: Any) -> Any:
        threads.append(threading.current_thread().name)
        time.sleep(0.003 * (len(threads) % 3))  # not in the order in which they began
        return read(self, unit)

    monkeypatch.setattr(Plan, "_read", told)
    assert same(table.scan(ordered=True).to_arrow(), *range(100))
    assert sum(name.startswith("txnkv-scan") for name in threads) > 8
    threads.clear()
    assert same(table.scan(ordered=True, limit=3).to_arrow(), 0, 1, 2)
    assert len(threads) <= 1, "a few rows need no more than their block"


def test_one_that_is_broken_off_waits_for_nobody(
    client: txnkv.Client, put: Any, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector drops it in any thread, also in one that has what its readers wait for."""
    table = client.create_table("many", SCHEMA)
    put(table, rows(*range(200)))
    go_on, begun, read = threading.Event(), [], Plan._read

    def waits(self: Plan, unit: Any) -> Any:
        begun.append(unit)
        if len(begun) > 3:
            assert go_on.wait(60)
        return read(self, unit)

    monkeypatch.setattr(Plan, "_read", waits)
    batches = table.scan()._planned().batches(threads=2)
    assert isinstance(batches, Generator)
    assert next(batches).num_rows
    dropped = threading.Thread(target=batches.close)
    dropped.start()
    dropped.join(30)
    still = dropped.is_alive()
    go_on.set()
    assert not still
    assert same(table.scan().to_arrow().sort_by("k"), *range(200))


@pytest.mark.parametrize("ordered", [False, True])
def test_limit(many: txnkv.Table, ordered: bool) -> None:
    for limit in (0, 1, 5, 23, 99, 100, 1000):
        found = many.scan(ordered=ordered, limit=limit).to_arrow()
        assert found.num_rows == min(limit, 100)
        if ordered:
            assert same(found, *range(min(limit, 100)))
    with pytest.raises(ValueError, match="limit is a number of rows"):
        many.scan(limit=-1)


@pytest.mark.parametrize("ordered", [False, True])
def test_projection(many: txnkv.Table, ordered: bool) -> None:
    """test_scanner projections, incl. the empty one."""
    for columns in (["k"], ["v", "k"], ["s"], ["l", "s"], [], ["k", "s", "v", "l"]):
        scan = many.scan(columns, where=[("k", ">=", 10), ("k", "<", 50)], ordered=ordered)
        found = scan.to_arrow()
        assert (found.num_rows, found.column_names) == (40, columns)
        if columns:
            assert found.schema == scan.schema
            wanted = rows(*range(10, 50)).select(columns).to_pylist()
            assert found.to_pylist() == wanted if ordered else True
            assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, wanted))


@pytest.mark.parametrize(
    ("columns", "kind"), [(["x"], txnkv.SchemaError), ("k", TypeError)], ids=["unknown", "string"]
)
def test_projection_is_checked(many: txnkv.Table, columns: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        many.scan(columns)


def test_every_way_out(many: txnkv.Table) -> None:
    """to_arrow, to_batches, iter, pandas, polars, the C stream: the same rows, again."""
    scan = many.scan(["k", "s", "v"], ordered=True)
    wanted = rows(*range(100)).select(["k", "s", "v"])
    for _ in range(2):
        assert scan.to_arrow().to_pylist() == wanted.to_pylist()
    assert pa.Table.from_batches(scan.to_batches(), scan.schema).to_pylist() == wanted.to_pylist()
    assert list(scan) == wanted.to_pylist()
    assert scan.to_pandas()["k"].tolist() == list(range(100))
    assert scan.to_polars()["s"].to_list() == wanted["s"].to_pylist()
    assert pa.table(scan).to_pylist() == wanted.to_pylist()
    assert pa.RecordBatchReader.from_stream(scan).read_all().to_pylist() == wanted.to_pylist()
    assert polars.DataFrame(scan)["k"].to_list() == list(range(100))
    assert sorted(pa.table(many)["k"].to_pylist()) == list(range(100))


def test_empty_tables(client: txnkv.Client) -> None:
    table = client.create_table("empty", SCHEMA, txnkv.hash_partition("k", 2))
    for ordered in (False, True):
        scan = table.scan(ordered=ordered)
        assert scan.to_arrow() == EMPTY
        assert list(scan.to_batches()) == []
        assert pa.table(scan) == EMPTY
        assert scan.tokens() == []
    assert table.scan([]).to_arrow().num_rows == 0
    assert table.count() == table.count(where=[("k", ">", 0)]) == 0
    assert table.get(1) is None
    assert table.get_many([]).num_rows == 0
    assert table.get_many([1, 2])["k"].to_pylist() == [None, None]
    assert client.snapshot().scan(table).to_arrow() == EMPTY


def test_where_and_nothing_is_left(many: txnkv.Table) -> None:
    for where in ([("k", "<", -1)], [("s", "=", "none")], pc.field("k") > 1000):
        for ordered in (False, True):
            assert many.scan(where=where, ordered=ordered).to_arrow() == EMPTY
    assert many.scan(where=[]).to_arrow().num_rows == 100


def test_expressions(many: txnkv.Table) -> None:
    found = many.scan(["k"], SIXTEENTHS | (pc.field("s") == "s4"), ordered=True)
    assert found.to_arrow()["k"].to_pylist() == [3, 4, *range(19, 100, 16)]
    with pytest.raises((pa.ArrowInvalid, txnkv.SchemaError)):
        many.scan(where=pc.field("nowhere") == 1).to_arrow()


# -- snapshots -------------------------------------------------------------------------


def test_a_scan_is_lazy_and_pinned_at_its_first_read(
    client: txnkv.Client, many: txnkv.Table, put: Any
) -> None:
    lazy, pinned = many.scan(["k"]), many.scan(["k"])
    before = pinned.snapshot
    put(many, rows(1000))
    assert lazy.to_arrow().num_rows == 101
    put(many, rows(1001))
    assert lazy.to_arrow().num_rows == 101
    assert pinned.to_arrow().num_rows == 100
    assert lazy.snapshot > before
    assert many.scan(snapshot=before).to_arrow().num_rows == 100
    assert many.count() == 102
    assert many.count(snapshot=before) == 100


def test_a_reader_under_way_sees_no_later_commit(many: txnkv.Table, put: Any) -> None:
    """Snapshots already taken never change their answer, block by block."""
    for ordered in (False, True):
        batches = many.scan(["k"], ordered=ordered).to_batches()
        found = next(batches)["k"].to_pylist()
        put(many, rows(*range(10_000 + 100 * ordered, 10_050 + 100 * ordered)))
        for batch in batches:
            found += batch["k"].to_pylist()
        assert not [k for k in found if k >= 10_000 + 100 * ordered]
        assert len(found) == (150 if ordered else 100)


def test_snapshot_reads_two_tables_at_one_instant(
    client: txnkv.Client, many: txnkv.Table, table: txnkv.Table
) -> None:
    with client.snapshot() as snapshot:
        with client.transaction() as txn:
            txn.insert(many, {"k": 500})
            txn.insert(table, {"id": 500})
        assert snapshot.get(many, 500) is None
        assert snapshot.get("t", 500) is None
        assert snapshot.get_many(many, [1, 500])["k"].to_pylist() == [1, None]
        assert snapshot.scan("many", ["k"], [("k", ">", 90)], ordered=True).to_arrow()[
            "k"
        ].to_pylist() == list(range(91, 100))
        assert many.get(500, snapshot=snapshot) is None
        assert many.get(500)["k"] == table.get(500)["id"] == 500
    with pytest.raises(txnkv.ClosedError):
        many.scan(snapshot=snapshot)


def test_what_was_read_stays_as_it_was(many: txnkv.Table, client: txnkv.Client, put: Any) -> None:
    """No buffer points into the store: it stays when LMDB's pages are written again."""
    kept = [many.scan(ordered=True).to_arrow(), many.scan(["l", "s"]).to_arrow()]
    batches = list(many.scan(ordered=True).to_batches())
    one = many.get_many([7, 8, 9])
    texts = [table.to_pylist() for table in kept], [b.to_pylist() for b in batches]
    for n in range(5):
        txn = client.new_transaction()
        txn.write(many, rows(*range(2000 + 100 * n, 2060 + 100 * n)))
        txn.rollback()
        put(many, rows(*range(3000 + 100 * n, 3060 + 100 * n)))
    client.drop_table("many")
    gc.collect()
    assert texts == ([table.to_pylist() for table in kept], [b.to_pylist() for b in batches])
    assert same(one, 7, 8, 9)
    for table in (*kept, one):
        table.validate(full=True)


# -- tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("ordered", [False, True])
def test_tokens_together_are_the_scan(
    client: txnkv.Client, many: txnkv.Table, put: Any, size: int, ordered: bool
) -> None:
    where = [("k", ">=", 5), ("v", "is not null")]
    scan = many.scan(["k", "v"], where, ordered=ordered)
    tokens = pickle.loads(pickle.dumps(scan.tokens(rows=size)))
    put(many, rows(500, 501))
    found: list[int] = []
    for token in tokens:
        part = token.open(client).to_arrow()
        assert part.column_names == ["k", "v"]
        keys = part["k"].to_pylist()
        assert keys == sorted(keys) or not ordered
        found += keys
    assert sorted(found) == [k for k in range(5, 100) if k % 5]
    if size == 1 and not ordered:
        assert len(tokens) >= 20


def test_tokens_open_in_another_process(
    client: txnkv.Client, many: txnkv.Table, put: Any, elsewhere: Any
) -> None:
    where = pc.field("k") < 50
    tokens = many.scan(["k"], where).tokens(rows=10)
    put(many, rows(-1))
    found = elsewhere(
        "say([token.open(client).to_arrow()['k'].to_pylist() for token in tokens])", tokens=tokens
    )
    assert sorted(key for part in found for key in part) == list(range(50))


def test_tokens_of_a_transaction_see_its_rows(
    client: txnkv.Client, many: txnkv.Table, elsewhere: Any
) -> None:
    txn = client.new_transaction()
    txn.insert(many, {"k": 500})
    tokens = txn.scan(many, ["k"], [("k", ">", 97)]).tokens()
    code = "say([k for token in tokens for k in token.open(client).to_arrow()['k'].to_pylist()])"
    assert sorted(elsewhere(code, tokens=tokens)) == [98, 99, 500]
    txn.rollback()
    with pytest.raises(txnkv.TxnkvError):
        [token.open(client).to_arrow() for token in tokens]


def test_token_of_another_store(many: txnkv.Table, tmp_path: Any) -> None:
    token = many.scan().tokens()[0]
    with (
        txnkv.connect(tmp_path / "other") as other,
        pytest.raises(txnkv.InvalidTokenError, match="of store"),
    ):
        token.open(other)


def test_token_of_a_dropped_table(
    client: txnkv.Client, many: txnkv.Table, until: Callable[..., Any]
) -> None:
    tokens = many.scan().tokens()
    client.drop_table(many)
    gc.collect()
    runtime, engine = internals.runtime(client), internals.tables(client)
    until(lambda: runtime.least_pin() is None)
    engine.purge()
    with pytest.raises(txnkv.TableNotFoundError, match="dropped"):
        tokens[0].open(client).to_arrow()


# -- point reads -----------------------------------------------------------------------


def test_get(many: txnkv.Table) -> None:
    for key in range(100):
        assert many.get(key) == rows(key).to_pylist()[0]
    for key in (-1, 100, 1 << 62):
        assert many.get(key) is None


def test_get_many_in_the_order_asked(many: txnkv.Table) -> None:
    """Duplicates and absent keys, over blocks, row sets and tablets."""
    keys = [99, 5, 5, 1000, 0, 64, -7, 5, 99]
    found = many.get_many(keys)
    wanted = [rows(k).to_pylist()[0] if 0 <= k < 100 else dict.fromkeys("ksvl") for k in keys]
    assert found.to_pylist() == wanted
    assert all(field.nullable for field in found.schema)
    assert many.get_many(pa.array(keys)).to_pylist() == wanted
    assert many.get_many(pa.chunked_array([keys[:4], keys[4:]])).to_pylist() == wanted
    shuffled = list(range(100)) * 2
    random.Random(5).shuffle(shuffled)
    assert many.get_many(shuffled)["k"].to_pylist() == shuffled
    assert many.get_many([1000, 1001])["k"].to_pylist() == [None, None]


def test_reads_in_a_transaction(client: txnkv.Client, many: txnkv.Table, put: Any) -> None:
    """Its snapshot and its own rows, also those not flushed yet."""
    txn = client.new_transaction()
    put(many, rows(200))
    txn.insert(many, {"k": 300, "s": "mine"})
    assert txn.get(many, 200) is None
    assert txn.get(many, 300)["s"] == "mine"
    txn.insert(many, {"k": 301})
    assert txn.get_many(many, [300, 200, 301, 1])["k"].to_pylist() == [300, None, 301, 1]
    txn.insert(many, {"k": 302})
    assert txn.scan(many, ["k"], [("k", ">", 98)], ordered=True).to_arrow()["k"].to_pylist() == [
        99,
        300,
        301,
        302,
    ]
    assert many.get(300) is None
    txn.commit()
    assert many.count() == 104


def test_count(many: txnkv.Table, client: txnkv.Client) -> None:
    assert many.count() == 100
    assert many.count(where=[("k", "in", [1, 2, 2, 500])]) == 2
    assert many.count(where=pc.field("v").is_null()) == 20
    # Of the history that is kept, whatever the background does meanwhile.
    assert many.count(snapshot=datetime.now(UTC) - timedelta(minutes=10)) == 0


@pytest.mark.parametrize("how", ["write", "insert"])
def test_doubles_in_one_write(client: txnkv.Client, many: txnkv.Table, how: str) -> None:
    """Found inside the batch, in a chunk before, inside the transaction, in the table."""
    keys = [200, 50, 201, 200, *range(202, 260), 201, 230, 51]
    session = client.new_session()
    if how == "insert":
        for key in keys:
            session.insert(many, {"k": key})
    with pytest.raises(txnkv.RowErrors) as caught:
        session.write(many, rows(*keys)) if how == "write" else session.flush()
    assert sorted(error.key for error in caught.value.errors) == [50, 51, 200, 201, 230]
    assert {type(error.error) for error in caught.value.errors} == {txnkv.AlreadyPresentError}
    assert many.count() == 160
    assert session.write(many, rows(*keys, 300), op="insert_ignore").ignored == len(keys)
    assert many.count() == 161


@pytest.mark.parametrize("many", [(None, "row sets")], ids=["one tablet"], indirect=True)
@pytest.mark.parametrize(
    ("read", "error", "says"),
    [
        (lambda t: t.scan(limit="1"), TypeError, "limit is a number of rows, not '1'"),
        (lambda t: t.scan(limit=1.5), TypeError, "limit is a number of rows, not 1.5"),
        (lambda t: t.scan(5), TypeError, "columns is a list of names, .* not 5"),
        (lambda t: t.scan("k"), TypeError, "columns is a list of names, .* not 'k'"),
        (lambda t: t.scan([1]), txnkv.SchemaError, "there is no column 1"),
        (lambda t: t.scan(where=[(None, "=", 1)]), txnkv.SchemaError, "there is no column None"),
        (lambda t: t.scan(where=[("k", "in", 5)]), TypeError, "'in' takes a list of values, not 5"),
        (
            lambda t: t.scan(where=[("s", "in", "ab")]),
            TypeError,
            "takes a list of values, not 'ab'",
        ),
        (lambda t: t.get_many(5), TypeError, "keys is a list of keys, not 5"),
        (lambda t: t.get_many(pa.table({"id": [1]})), TypeError, "keys is a list of keys, not "),
        (lambda t: t.get_by(5, 1), TypeError, "columns is a name or a list of names, not 5"),
    ],
)
def test_arguments_of_a_wrong_type(many: txnkv.Table, read: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        read(many)


def test_a_limit_of_numpy(many: txnkv.Table) -> None:
    assert many.scan(limit=np.int64(3)).to_arrow().num_rows == 3
    assert len(list(many.scan(where=[("k", "<", 9)], limit=np.uint8(3)))) == 3


def test_keys_from_any_iterable(many: txnkv.Table) -> None:
    for keys in ({5}, iter([5]), dict.fromkeys([5])):
        assert same(many.get_many(keys), 5)


EXPRESSIONS: list[tuple[Any, list[int]]] = [
    (pc.field(0) == 5, [5]),
    ([pc.field("v") > 3, pc.field(0) < 9, ("s", "!=", "s8")], []),
    ([("v", ">", 3), pc.field(0) < 9, pc.field(1) != "s8"], []),
    (pc.scalar(True) & (pc.field("s") == "s96"), [96]),
    ([("k", ">", 97), pc.divide(pc.scalar(1), pc.subtract(pc.field("k"), 50)) == 0], [98, 99]),
    ([("v", ">", 48), pc.list_value_length(pc.field("l")) == 2], [97]),
    (pc.scalar(False), []),
    (pc.is_in(pc.field("s"), pa.array(["s1", "s2", "v"])), [1, 2]),
]


@pytest.mark.parametrize("columns", [None, ["v"]], ids=str)
def test_what_expressions_need_alone_is_read(many: txnkv.Table, columns: Any) -> None:
    """Of columns that are not read otherwise, by their places, and of rows that are left alone."""
    for where, keys in EXPRESSIONS:
        found = many.scan(columns, where).to_arrow()
        wanted = rows(*keys).select(columns or SCHEMA.names)
        assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, wanted.to_pylist()))
        assert many.count(where) == len(keys)


@pytest.mark.parametrize("gone", [1000, 31, 2], ids="one row in {} was deleted".format)
@pytest.mark.parametrize("low", [None, 1001])
def test_a_few_rows_of_a_large_block(client: txnkv.Client, gone: int, low: int | None) -> None:
    table = client.create_table("large", SCHEMA)
    keys = range(4000)
    with client.transaction() as txn:
        txn.write(table, rows(*keys))
    deleted = [key for key in keys if key % gone == 1]
    with client.transaction() as txn:
        txn.write(table, pa.table({"k": deleted}), op="delete")
    where: list[Any] = [("v", "in", [key / 2 for key in keys if key % 61 == 0])]
    left = [k for k in keys if k % gone != 1 and k % 61 == 0 and k % 5 and k >= (low or 0)]
    for _ in range(2):
        scan = table.scan(where=where + ([] if low is None else [("k", ">=", low)]))
        assert same(scan.to_arrow().sort_by("k"), *left)
        client.compact()


def test_a_place_is_one_of_all_columns(client: txnkv.Client) -> None:
    """The text of the expression has the name of another column in it."""
    schema = txnkv.Schema({"k": "int64", "e": "int64"}, primary_key=["k"])
    table = client.create_table("places", schema)
    where = pc.equal(pc.field(0), 3)
    assert "e" in str(where)
    with client.new_session() as session:
        for row in [(1, 3), (3, 1)]:
            session.insert(table, row)
    assert table.scan(["k"], where).to_arrow()["k"].to_pylist() == [3]


def test_conditions_on_decimals_of_hundreds(client: txnkv.Client) -> None:
    """Arrow compares none of a scale below zero."""
    columns = {"d": "decimal128(5, -2)", "n": "decimal128(5, -2)?"}
    table = client.create_table("hundreds", txnkv.Schema(columns, ["d"]))
    values = [Decimal(n) for n in (-700, 0, 300, 1200, 9_999_900)]
    with client.transaction() as txn:
        txn.write(table, pa.table({"d": values, "n": [None, *values[1:]]}))
    compares = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    for op, compare in zip(("=", "!=", "<", "<=", ">", ">="), compares, strict=True):
        for name in columns:
            wanted = [v for v in values if compare(v, 300) and (name == "d" or v >= 0)]
            found = table.scan(["d"], [(name, op, 300)], ordered=True).to_arrow()
            assert found["d"].to_pylist() == wanted, (op, name)


def test_a_merge_takes_no_reader_for_each_row_set(
    client: txnkv.Client, by_hand: Callable[[txnkv.Client], None]
) -> None:
    """LMDB has 1,024 slots of readers: beyond so many row sets nothing was read in key order."""
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    for n in range(12):
        for key in (n, 1000 - n):
            table.insert({"id": key})
        internals.flush(client)
    assert client.stats()["tables"]["t"]["row_sets"] == 12
    found = table.scan(ordered=True).to_arrow().column("id").to_pylist()
    assert found == [*range(12), *range(989, 1001)]
    (tablet,) = internals.tables(client).tablets(table.info)
    opened = tablet.environment()._lmdb
    assert opened is not None
    assert opened.env.info()["num_readers"] <= 4  # the most that there were


def test_a_read_that_is_broken_off_leaves_nothing_to_the_collector(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in any thread, the main one too, where an alarm that comes just then is lost."""
    table = client.create_table("wide", txnkv.Schema({"k": "int64", "v": "int64"}, ["k"]))
    count = 600_000
    with client.transaction() as txn:
        txn.write(table, pa.table({"k": range(count), "v": range(count)}))

    def reading() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith("txnkv-scan")]

    def interrupted() -> None:
        assert reading()
        raise RuntimeError("nobody waits any more")

    monkeypatch.setattr("txnkv.tables.read.scan.go_on", interrupted)
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="nobody waits") as kept:
            table.scan().to_arrow()
        give_up = time.monotonic() + 60
        while reading():
            assert time.monotonic() < give_up
            time.sleep(0.01)
        assert kept.tb is not None  # which has the frames that were broken off
    finally:
        gc.enable()
