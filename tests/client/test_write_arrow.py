"""session.write: every kind of Arrow data, casts that lose nothing, and those refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pandas
import polars
import pyarrow as pa
import pytest

import txnkv

SCHEMA = txnkv.Schema(
    {"id": "int64", "s": "string?", "n": txnkv.Column("int32", default=7)}, primary_key=["id"]
)
DATA = pa.table({"id": pa.array([3, 1, 2], pa.int64()), "s": ["c", None, "b"]})
STORED = [
    {"id": 1, "s": None, "n": 7},
    {"id": 2, "s": "b", "n": 7},
    {"id": 3, "s": "c", "n": 7},
]


class Stream:
    """An object that has nothing but an Arrow stream."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


class Array:
    """An object that has nothing but an Arrow array."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def __arrow_c_array__(self, requested_schema: object = None) -> Any:
        return self._batch.__arrow_c_array__(requested_schema)


def _batch() -> pa.RecordBatch:
    return DATA.to_batches()[0]


SOURCES = {
    "table": lambda: DATA,
    "table of chunks": lambda: pa.concat_tables([DATA.slice(0, 1), DATA.slice(1)]),
    "batch": _batch,
    "slice of a batch": lambda: pa.concat_batches([_batch(), _batch()]).slice(3),
    "reader": lambda: DATA.to_reader(max_chunksize=2),
    "stream": lambda: Stream(DATA),
    "array": lambda: Array(_batch()),
    "pandas": lambda: pandas.DataFrame({"id": [3, 1, 2], "s": ["c", None, "b"]}),
    "polars": lambda: polars.DataFrame({"id": [3, 1, 2], "s": ["c", None, "b"]}),
    "columns in another order": lambda: DATA.select(["s", "id"]),
    "with an empty chunk": lambda: pa.concat_tables([DATA.slice(0, 0), DATA, DATA.slice(0, 0)]),
}  # fmt: skip


@pytest.fixture
def goods(client: txnkv.Client) -> txnkv.Table:
    return client.create_table("goods", SCHEMA)


@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_sources(
    client: txnkv.Client, goods: txnkv.Table, source: Any, transactional: bool
) -> None:
    if transactional:
        with client.transaction() as txn:
            assert txn.write(goods, source()) == txnkv.WriteResult(inserted=3)
    else:
        assert client.new_session().write(goods, source()).inserted == 3
    assert list(goods.scan(ordered=True)) == STORED


@pytest.mark.parametrize("nothing", ["table", "reader", "pandas", "batch"])
def test_nothing_to_write(client: txnkv.Client, goods: txnkv.Table, nothing: str) -> None:
    empty = DATA.slice(0, 0)
    data = {
        "table": empty,
        "reader": empty.to_reader(),
        "pandas": empty.to_pandas().astype({"id": "int64"}),
        "batch": _batch().slice(0, 0),
    }[nothing]
    assert client.new_session().write(goods, data).inserted == 0
    assert goods.count() == 0
    assert client.stats()["staged_row_sets"] == 0


def test_a_scan_is_a_source(client: txnkv.Client, goods: txnkv.Table) -> None:
    client.new_session().write(goods, DATA)
    copy = client.create_table("copy", SCHEMA)
    with client.transaction() as txn:
        assert txn.write(copy, goods.scan()).inserted == 3
    assert list(copy.scan(ordered=True)) == STORED


def test_rows_that_wait_go_first(client: txnkv.Client, goods: txnkv.Table) -> None:
    with client.transaction() as txn:
        txn.insert_ignore(goods, {"id": 1, "s": "first"})
        assert txn.write(goods, DATA, op="insert_ignore") == txnkv.WriteResult(
            inserted=2, ignored=1
        )
    assert goods.get(1)["s"] == "first"


NO_TABLES = {
    "list": [{"id": 1}],
    "dict": {"id": [1]},
    "number": 5,
    "None": None,
    "string": "x",
    "array": pa.array([1]),
    "chunked array": pa.chunked_array([[1]]),
    "series": pandas.Series([1]),
}


@pytest.mark.parametrize("data", NO_TABLES.values(), ids=NO_TABLES.keys())
def test_what_is_no_arrow_data(client: txnkv.Client, goods: txnkv.Table, data: Any) -> None:
    with pytest.raises(TypeError, match="write takes"):
        client.new_session().write(goods, data)
    assert goods.count() == 0
    topic = client.create_topic("events")
    with pytest.raises(TypeError, match="send_batch takes"):
        client.new_session().send_batch(topic, data)


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown column": ({"id": [1], "x": [1]}, "columns that the table does not have: x"),
    "unknown columns, one of them but for its case": (
        {"Id": [1], "x": [1]},
        "does not have: Id, x; the table has .*[a-z]$",
    ),
    "another case": ({"ID": [1], "S": ["a"]}, r"ID, S; the table has .* \(names differ in case"),
    "no key": ({"s": ["a"]}, "no column 'id'"),
    "null key": ({"id": pa.array([1, None], pa.int64())}, "'id' is not nullable"),
    "null where none may be": (
        {"id": [1], "n": pa.array([None], pa.int32())},
        "'n' is not nullable",
    ),
    "string for an int": ({"id": ["1"]}, "'id' is int64, the data has string"),
    "float for an int": ({"id": [1.0]}, "'id' is int64, the data has double"),
    "too large": ({"id": [1], "n": pa.array([1 << 40], pa.int64())}, "does not fit"),
    "too large unsigned": ({"id": pa.array([1 << 63], pa.uint64())}, "does not fit"),
    "int for a string": ({"id": [1], "s": [5]}, "'s' is string"),
    "binary for a string": ({"id": [1], "s": [b"a"]}, "'s' is string"),
}


@pytest.mark.parametrize(("data", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(client: txnkv.Client, goods: txnkv.Table, data: Any, words: str) -> None:
    """A wrong type or column raises at the call; nothing of the call is written."""
    table = pa.table({name: pa.array(v) if isinstance(v, list) else v for name, v in data.items()})
    with client.transaction() as txn:
        txn.insert(goods, {"id": 50})
        with pytest.raises(txnkv.SchemaError, match=words):
            txn.write(goods, table)
    assert [row["id"] for row in goods.scan()] == [50]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["x", 5], "5 is a int, 'x' is a str"),
        ([None, [1], 5], "5 is a int, .1. is a list"),
        ([["x"], [5]], "list; convert it first .Could not"),
    ],
)
def test_mixed_objects_of_pandas(
    client: txnkv.Client, goods: txnkv.Table, column: list[Any], words: str
) -> None:
    """They were pyarrow's own error, or said to have no names of columns."""
    frame = pandas.DataFrame({"id": range(len(column)), "s": column})
    with pytest.raises(txnkv.SchemaError, match=f"column 's' has no one type: .*{words}"):
        client.new_session().write(goods, frame)
    topic = client.create_topic("events")
    with pytest.raises(txnkv.SchemaError, match=words):
        client.new_session().send_batch(topic, frame.rename(columns={"s": "value"}))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (pandas.DataFrame({"id": [1, 2]}, pandas.Index(["x", 5], name="s")), "'s' .*: 5 is a int"),
        (pandas.DataFrame({"id": [1, 2], "s": ["x", 5]}).set_index(["id", "s"]), "'s' .*: 5 is a"),
        (pandas.DataFrame({"id": [1, 1 << 70]}), "'id' has .* from 1 to 1180591620717411303424"),
        (pandas.DataFrame({"id": [1 << 63, -1]}), "'id' has .* from -1 to 92.*: make decimals"),
        (pandas.DataFrame({"id": [1], "s": [[1 << 70]]}), "'s' has .* numbers within its values"),
        (pandas.DataFrame({"s": [1j]}), "'s' has values that no column takes: 1j is a complex"),
        (pandas.DataFrame({"s\nx": ["x", 5]}), "5 is a int"),
    ],
)
def test_odd_frames_of_pandas(
    client: txnkv.Client, goods: txnkv.Table, frame: pandas.DataFrame, words: str
) -> None:
    """They were a ValueError of a list, an OverflowError, or pyarrow's own error."""
    with pytest.raises(txnkv.SchemaError, match=words):
        client.new_session().write(goods, frame)
    with pytest.raises(txnkv.SchemaError, match=words):
        client.new_session().send_batch(client.create_topic("events"), frame)


def test_a_column_twice(client: txnkv.Client, goods: txnkv.Table) -> None:
    data = pa.table([pa.array([1]), pa.array([2])], names=["id", "id"])
    with pytest.raises(txnkv.SchemaError, match="twice"):
        client.new_session().write(goods, data)


_runs = pa.RunEndEncodedArray.from_arrays

LARGE = Decimal("893745792724047795050971218510")
LARGE_MAP = pa.map_(pa.string(), pa.decimal128(30, 0))

# column type, what is given, what is stored; None when it must be refused
CASTS: list[tuple[str, Any, Any]] = [
    ("int64", pa.array([1, None], pa.int8()), [1, None]),
    ("int64", pa.array([1], pa.uint32()), [1]),
    ("int8", pa.array([127, -128], pa.int64()), [127, -128]),
    ("int8", pa.array([128], pa.int64()), None),
    ("uint8", pa.array([255], pa.int64()), [255]),
    ("uint8", pa.array([-1], pa.int64()), None),
    ("int64", pa.array([1.0]), None),
    ("int64", pa.array([True]), None),
    ("int64", pa.array([Decimal(1)]), None),
    ("bool", pa.array([1]), None),
    ("float64", pa.array([0.5], pa.float32()), [0.5]),
    ("float64", pa.array([3], pa.int32()), [3.0]),
    ("float64", pa.array([(1 << 53) + 1]), None),
    ("float32", pa.array([0.5], pa.float64()), None),
    ("float32", pa.array([1 << 24], pa.int64()), [float(1 << 24)]),
    ("float32", pa.array([(1 << 24) + 1], pa.int64()), None),
    ("string", pa.array(["a"], pa.large_string()), ["a"]),
    ("string", pa.array(["a"], pa.string_view()), ["a"]),
    ("string", pa.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
    ("string", pa.array([b"a"]), None),
    ("binary", pa.array([b"a"], pa.large_binary()), [b"a"]),
    ("binary", pa.array([b"b", b"a", None], pa.binary(1))[1:], [b"a", None]),
    ("binary", pa.array(["b", "a", None])[1:], [b"a", None]),
    ("binary", pa.array(["b", "a", None], pa.string_view())[1:], [b"a", None]),
    ("binary", pa.array([b"a", None], pa.binary(1)).dictionary_encode(), [b"a", None]),
    ("binary", pa.array(["b", "a", None]).dictionary_encode()[1:], [b"a", None]),
    ("uuid", pa.array([b"a"], pa.binary(1)), None),
    ("date32", pa.array([date(2026, 1, 2)]), [date(2026, 1, 2)]),
    ("date32", pa.array([date(2026, 1, 2)], pa.date64()), [date(2026, 1, 2)]),
    ("date32", pa.array([datetime(2026, 1, 2)]), None),
    ("timestamp[us]", pa.array([date(2026, 1, 2)]), [datetime(2026, 1, 2)]),
    ("timestamp[us]", pa.array([datetime(2026, 1, 2)], pa.timestamp("s")), [datetime(2026, 1, 2)]),
    ("timestamp[us]", pa.array([1_000], pa.timestamp("ns")), [datetime(1970, 1, 1, 0, 0, 0, 1)]),
    ("timestamp[us]", pa.array([1_001], pa.timestamp("ns")), None),
    ("timestamp[us]", pa.array([datetime(2026, 1, 2)], pa.timestamp("us", tz="UTC")), None),
    ("timestamp[us, tz=UTC]", pa.array([datetime(2026, 1, 2)]), None),
    ("decimal128(10, 2)", pa.array([Decimal("1.50")]), [Decimal("1.50")]),
    ("decimal128(10, 2)", pa.array([Decimal("1.505")]), None),
    ("decimal128(10, 2)", pa.array([5], pa.int32()), [Decimal("5.00")]),
    ("decimal128(10, 2)", pa.array([10**8], pa.int64()), None),
    ("decimal128(38, 0)", pa.array([(1 << 64) - 1], pa.uint64()), [Decimal((1 << 64) - 1)]),
    ("decimal128(3, 2)", pa.array([Decimal("123.45")]), None),
    ("decimal128(38, 10)", pa.array([LARGE]), None),  # these overflowed in silence
    ("decimal128(38, 10)", pa.array([str(LARGE)]), None),
    ("decimal128(38, 10)", pa.array([LARGE], pa.decimal256(70, 0)), None),
    ("decimal128(38, 10)", pa.array(["9.178630299E+34"]), None),
    ("decimal128(38, 30)", pa.array(["1e9"]), None),
    ("decimal128(38, 38)", pa.array([Decimal(5)]), None),
    ("decimal128(38, 10)", pa.array([str(LARGE / 100)]), [LARGE / 100]),
    ("decimal128(38, 10)", pa.array([LARGE / 100]), [LARGE / 100]),
    ("list<decimal128(38, 10)>", pa.array([[LARGE]]), None),
    ("list<decimal128(38, 10)>", pa.array([[None, LARGE / 100]]), [[None, LARGE / 100]]),
    ("struct<a: decimal128(38, 10)>", pa.array([{"a": LARGE}]), None),
    ("map<string, decimal128(38, 10)>", pa.array([[("a", LARGE)]], LARGE_MAP), None),
    ("list<int64>", pa.array([[1, None], None], pa.list_(pa.int16())), [[1, None], None]),
    ("list<int64>", pa.array([[1]], pa.large_list(pa.int64())), [[1]]),
    ("list<int64>", pa.array([[2], [1], None], pa.list_(pa.int8(), 1))[1:], [[1], None]),
    ("list<list<binary>>", pa.array([[["a"]]], pa.list_(pa.list_(pa.string(), 1))), [[[b"a"]]]),
    ("list<int8>", pa.array([[1000]], pa.list_(pa.int64(), 1)), None),
    ("list<int64>", pa.array([[1]], pa.list_view(pa.int64())), None),
    ("list<int8>", pa.array([[1000]]), None),
    ("list<int64>", pa.array([["a"]]), None),
    ("int8", _runs([1, 3, 4], pa.array([7, None, 8]))[:3], [7, None, None]),
    ("int8", _runs([1], pa.array([128])), None),
    ("string", _runs([2, 3], pa.array(["a", "b"]))[1:], ["a", "b"]),
    ("string", _runs([2], pa.array(["a"], pa.string_view())), None),
    ("list<int64>", _runs([2], pa.array([[1]])), [[1], [1]]),
    ("int64", pa.nulls(2), [None, None]),
    ("string", pa.nulls(1), [None]),
]


@pytest.mark.parametrize(
    ("kind", "given", "stored"),
    CASTS,
    ids=[f"{kind} from {given.type}" for kind, given, _ in CASTS],
)
def test_casts(client: txnkv.Client, kind: str, given: pa.Array, stored: Any) -> None:
    """Lossless casts are made, others are a SchemaError."""
    schema = txnkv.Schema({"id": "int64", "c": f"{kind}?"}, primary_key=["id"])
    table = client.create_table("c", schema)
    data = pa.table({"id": pa.array(range(len(given)), pa.int64()), "c": given})
    if stored is None:
        with pytest.raises(txnkv.SchemaError, match="column 'c'"):
            client.new_session().write(table, data)
        assert table.count() == 0
        return
    client.new_session().write(table, data)
    found = table.scan(ordered=True).to_arrow()["c"]
    assert found.to_pylist() == stored
    assert found.type == schema.columns["c"].type


def test_a_stream_that_breaks_off(client: txnkv.Client, goods: txnkv.Table) -> None:
    """Its batches came one by one; nothing of the call counts."""

    def batches() -> Any:
        yield _batch()
        raise OSError("the other end hung up")

    for transactional in (True, False):
        reader = pa.RecordBatchReader.from_batches(DATA.schema, batches())
        if transactional:
            with client.transaction() as txn, pytest.raises(OSError, match="hung up"):
                txn.write(goods, reader)
        else:
            with pytest.raises(OSError, match="hung up"):
                client.new_session().write(goods, reader)
        assert goods.count() == 0
    assert client.stats()["staged_row_sets"] == 0


def test_a_large_write_in_chunks(
    client: txnkv.Client, goods: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks, row sets and blocks in one call, with keys twice in neighbours."""
    monkeypatch.setattr("txnkv.tables.arrow_input.CHUNK_ROWS", 100)
    ids = [*range(0, 1000, 2), *range(990, 1010), *range(1, 500, 2)]
    with client.transaction() as txn:
        with pytest.raises(txnkv.RowErrors) as caught:
            txn.write(goods, pa.table({"id": ids}))
        assert sorted(error.key for error in caught.value.errors) == [990, 992, 994, 996, 998]
    assert goods.count() == len(set(ids))
    assert [row["id"] for row in goods.scan(["id"], ordered=True)] == sorted(set(ids))


def test_what_was_given_is_not_changed_nor_kept(client: txnkv.Client, goods: txnkv.Table) -> None:
    import numpy

    values = numpy.arange(100, dtype="int64")
    frame = pandas.DataFrame({"id": values})
    with client.transaction() as txn:
        txn.write(goods, frame)
        values += 1000
        assert [row["id"] for row in txn.scan(goods, ["id"], ordered=True)] == list(range(100))
    assert list(frame["id"]) in (list(range(100)), list(range(1000, 1100)))
    assert goods.count() == 100


def test_a_stream_that_met_a_conflict_is_not_written_again(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """Outside of transactions, too: what was read of it is gone, and the rest is not all of it."""
    schema = pa.schema([("id", pa.int64())])

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([[1]], schema=schema)
        table.insert((1, "first"))
        yield pa.record_batch([[2]], schema=schema)

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    with client.new_session() as session, pytest.raises(txnkv.TransactionConflictError):
        session.write(table, reader, "upsert")
    assert [row["id"] for row in table.scan()] == [1]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_uuids_as_others_hold_them(client: txnkv.Client, kind: pa.DataType) -> None:
    """Sixteen bytes of no fixed size, as polars makes of them."""
    ids = [UUID(int=n) for n in (1, 2)]
    table = client.create_table("t", txnkv.Schema({"id": "uuid"}, primary_key=["id"]))
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": pa.array([id.bytes for id in ids], kind)}))
        for wrong in ([b"x" * 15], [b"x" * 16, b"x" * 17], [b""]):
            with pytest.raises(txnkv.SchemaError, match="'id' is uuid, and a value of the data"):
                txn.write(table, pa.table({"id": pa.array(wrong, kind)}))
    assert [row["id"] for row in table.scan(ordered=True)] == ids


@pytest.mark.parametrize(("kind", "value"), [("int64", -(2**53) - 1), ("uint64", 2**64 - 1)])
def test_pandas_has_whole_numbers_as_they_are(client: txnkv.Client, kind: str, value: int) -> None:
    """A float, as it is beside a null, has not all digits of them."""
    schema = txnkv.Schema({"id": "int64", "v": kind + "?"}, primary_key=["id"])
    table = client.create_table("t", schema)
    table.insert({"id": 1, "v": 7})
    table.insert({"id": 2})
    assert table.scan().to_pandas()["v"].dtype == "float64"
    table.insert({"id": 3, "v": value})
    frame = table.scan(ordered=True).to_pandas()
    assert [None if pandas.isna(each) else int(each) for each in frame["v"]] == [7, None, value]
    with client.transaction() as txn:
        txn.write(table, frame, "upsert")
    assert table.get(3) == {"id": 3, "v": value}
    assert table.scan(where=[("id", "=", 3)]).to_pandas()["v"].dtype == kind
