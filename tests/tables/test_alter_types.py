"""Columns that are widened, get other defaults, or may be null or not; tables that are renamed."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals

SCHEMA = txnkv.Schema(
    {
        "id": "int64",
        "n": "int8",
        "u": "uint16?",
        "f": txnkv.Column("float32", default=0.1),
        "d": "decimal128(5, 2)?",
        "t": "string?",
    },
    primary_key=["id"],
)
WIDER = {"n": "int64", "u": "uint64", "f": "float64", "d": pa.decimal128(12, 2)}


def row(id: int) -> dict[str, Any]:
    d = None if id % 3 == 0 else Decimal(id) / 4
    f = pa.scalar(id / 3, pa.float32()).as_py()
    return {"id": id, "n": id - 5, "u": id or None, "f": f, "d": d, "t": f"t{id}"}


@pytest.fixture
def table(client: txnkv.Client) -> txnkv.Table:
    """Rows 0 to 4 are in a row set, 5 to 8 in memory."""
    made = client.create_table("t", SCHEMA)
    for ids in (range(5), range(5, 9)):
        with client.transaction() as txn:
            for id in ids:
                txn.insert(made, row(id))
        if ids[0] == 0:
            internals.flush(client)
    return made


def rows(table: txnkv.Table, **options: Any) -> list[dict[str, Any]]:
    return table.scan(ordered=True, **options).to_arrow().to_pylist()


# -- widened ---------------------------------------------------------------------------


def test_rows_of_before_are_read_in_the_wider_type(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    was = [row(id) for id in range(9)]
    before = client.snapshot()
    schema = table.alter(widen=WIDER)
    assert schema.type_names() == {
        "id": "int64",
        "n": "int64",
        "u": "uint64?",
        "f": "double",
        "d": "decimal128(12, 2)?",
        "t": "string?",
    }
    large = {"id": 9, "n": 2**60, "u": 2**63, "f": 1 / 3, "d": Decimal("1234567890.12"), "t": "-"}
    with client.transaction() as txn:
        txn.insert(table, large)
        txn.update(table, {"id": 1, "n": -(2**60)})
        txn.update(table, {"id": 6, "t": "kept"})
    now = [*was, large]
    now[1] |= {"n": -(2**60)}
    now[6] |= {"t": "kept"}
    for do in (lambda _: None, internals.flush, internals.compact, internals.compact):
        do(client)
        assert rows(table) == now
        assert [table.get(id) for id in (1, 3, 6, 9)] == [now[id] for id in (1, 3, 6, 9)]
        assert table.get_many([9, 0, 8]).to_pylist() == [now[9], now[0], now[8]]
        assert table.scan().to_arrow().schema == schema.arrow
        assert before.scan(table, ordered=True).to_arrow().to_pylist() == was[:1] + [row(1)] + [
            row(id) for id in range(2, 9)
        ]
        assert before.scan(table).schema.field("n").type == pa.int8()
        assert before.get(table, 6) == row(6)
    before.close()


@pytest.mark.parametrize(
    "where", [("n", ">", 1), ("n", "=", -5), ("u", "is null"), ("f", "<", 1.0)]
)
def test_conditions(client: txnkv.Client, table: txnkv.Table, where: tuple[Any, ...]) -> None:
    ids = [each["id"] for each in rows(table, where=[where])]
    assert ids
    table.alter(widen=WIDER)
    for do in (lambda _: None, internals.flush, internals.compact):
        do(client)
        assert [each["id"] for each in rows(table, where=[where])] == ids
        assert table.count(where=[where]) == len(ids)


def test_twice_and_renamed(client: txnkv.Client, table: txnkv.Table) -> None:
    seen = []
    for change in ({"widen": {"n": "int16"}}, {"widen": {"n": "int32"}, "rename": {"n": "m"}}):
        table.alter(**change)  # type: ignore[arg-type]
        seen.append(client.snapshot())
        internals.flush(client)
        with client.transaction() as txn:
            txn.upsert(table, tuple(row(len(seen)).values()))
    table.alter(widen={"m": "int64"})
    internals.compact(client)
    assert [each["m"] for each in rows(table)] == [id - 5 for id in range(9)]
    first, second = seen
    assert first.get(table, 3)["n"] == -2
    assert second.get(table, 3)["m"] == -2
    for snapshot in seen:
        snapshot.close()


def test_diff_and_tokens_over_it(client: txnkv.Client, table: txnkv.Table) -> None:
    before = internals.latest(client)
    tokens = table.scan(columns=["id", "n"]).tokens()
    with client.transaction() as txn:
        txn.delete(table, 3)
    table.alter(widen=WIDER)
    with client.transaction() as txn:
        txn.update(table, {"id": 4, "n": 1000})
    internals.flush(client)
    found = table.diff(before).read_all()
    assert found.schema.field("n").type == pa.int64()
    changes = {each["id"]: (each["_op"], each["n"]) for each in found.to_pylist()}
    assert changes == {3: ("delete", -2), 4: ("update", 1000)}
    read = [each for token in tokens for each in token.open(client)]
    assert {each["id"]: each["n"] for each in read} == {id: id - 5 for id in range(9)}


def test_a_large_transaction_of_before(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.serialize()
    txn.insert(table, row(10))
    txn.flush()
    table.alter(widen=WIDER)
    txn.insert(table, row(11))
    with pytest.raises(txnkv.SchemaError):
        txn.insert(table, {**row(12), "n": 1000})  # it has the columns of its begin
    txn.commit()
    assert [table.get(id) for id in (10, 11)] == [row(10), row(11)]


def test_rows_that_wait(client: txnkv.Client, table: txnkv.Table) -> None:
    session = client.new_session()
    session.insert(table, row(10))
    table.alter(widen=WIDER)
    session.insert(table, {**row(11), "n": 1000})
    assert session.flush().inserted == 2
    assert [table.get(id) for id in (10, 11)] == [row(10), {**row(11), "n": 1000}]


NOT_WIDER = [
    ("n", "int8", None),
    ("n", "uint64", "'n' is int8, and not all its values are uint64"),
    ("n", "float64", "not all its values are double"),
    ("u", "int16", "not all its values are int16"),
    ("u", "int32", None),
    ("f", "float32", None),
    ("d", "decimal128(4, 2)", "not all its values are decimal128(4, 2)"),
    ("d", "decimal128(12, 3)", "with the same scale"),
    ("t", "binary", "not all its values are binary"),
    ("n", "int64?", "widen takes the type alone, as 'int64'; nullable={'n': True}"),
    ("n", "int65", "column 'n': 'int65' is not a column type"),
    ("id", "int64", "'id' is of the primary key, which stays"),
    ("x", "int64", "no column 'x'"),
]


@pytest.mark.parametrize(("name", "kind", "message"), NOT_WIDER)
def test_wider_means_all_values(
    table: txnkv.Table, name: str, kind: str, message: str | None
) -> None:
    if message is None:
        assert pa.types.is_primitive(table.alter(widen={name: kind}).columns[name].type)
        return
    with pytest.raises(txnkv.SchemaError) as raised:
        table.alter(widen={name: kind})
    assert message in str(raised.value)
    assert table.schema == SCHEMA


# -- defaults --------------------------------------------------------------------------


def test_a_later_default_is_that_of_later_rows(client: txnkv.Client, table: txnkv.Table) -> None:
    table.alter(add={"x": txnkv.Column("int32", default=7)})
    with client.transaction() as txn:
        txn.insert(table, {"id": 10, "n": 0})
    table.alter(default={"x": 8, "n": 1})
    with client.transaction() as txn:
        txn.insert(table, {"id": 11})
        txn.upsert(table, {"id": 12})
        txn.upsert(table, {"id": 3, "n": 5})
    data = pa.table({"id": pa.array(range(100, 60_100))})
    client.new_session().write(table, data)
    client.new_session().write(table, pa.table({"id": [2, 99]}), "upsert")
    table.alter(default={"x": None, "f": None}, widen={"x": "int64"})
    wanted = {0: 7, 2: 7, 3: 7, 8: 7, 10: 7, 11: 8, 12: 8, 99: 8, 100: 8, 60_099: 8}
    for do in (lambda _: None, internals.flush, internals.compact):
        do(client)
        assert {id: table.get(id)["x"] for id in wanted} == wanted
        assert table.get_many(list(wanted)).column("x").to_pylist() == list(wanted.values())
        assert table.count(where=[("x", "=", 8)]) == 60_003
        assert table.count(where=[("x", "=", 7)]) == 10
    assert table.get(3)["n"] == 5
    assert table.get(11)["n"] == 1
    txn = client.new_transaction()
    with pytest.raises(txnkv.SchemaError, match="'f'"):
        txn.insert(table, {"id": 13, "x": 1})
    txn.rollback()


def test_a_default_fits_its_column(table: txnkv.Table) -> None:
    with pytest.raises(txnkv.SchemaError, match="the default of column 'n' is int8"):
        table.alter(default={"n": 1000})
    assert table.alter(default={"n": 1000}, widen={"n": "int16"}).columns["n"].default == 1000


# -- null or not -----------------------------------------------------------------------


def test_a_column_that_is_null_somewhere_stays_nullable(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    for do in (lambda _: None, internals.flush):
        do(client)
        with pytest.raises(txnkv.SchemaError) as raised:
            table.alter(nullable={"d": False})
        assert (
            "column 'd' of table 't' cannot be made not nullable: rows without a value there: 3"
            in str(raised.value)
        )
    table.alter(add={"late": "int32?"})
    with pytest.raises(txnkv.SchemaError, match="without a value there: 9"):
        table.alter(nullable={"late": False})
    before = client.snapshot()
    with client.transaction() as txn:
        for id in range(9):
            txn.update(table, {"id": id, "late": id, "d": 1})
    schema = table.alter(nullable={"d": False, "late": False}, rename={"late": "there"})
    assert not schema.columns["d"].nullable
    assert not table.scan().to_arrow().schema.field("there").nullable
    internals.compact(client)
    assert [each["late"] for each in before.scan("t")] == [None] * 9
    before.close()
    assert sorted(each["there"] for each in table.scan()) == list(range(9))
    with pytest.raises(txnkv.SchemaError, match="'there'"), client.transaction() as txn:
        txn.insert(table, {**row(10), "d": 1})
    table.alter(nullable={"there": True})
    table.insert({**row(10), "d": 1})
    assert table.get(10)["there"] is None


def test_a_large_transaction_of_before_brings_no_null(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    table.alter(drop=["d"])
    nulls, others = client.new_transaction(), client.new_transaction()
    for id, txn in ((10, nulls), (11, others)):
        txn.serialize()
        txn.insert(table, {"id": id, "n": 1, "u": None if txn is nulls else 1})
        txn.flush()
    with client.transaction() as txn:
        txn.update(table, {"id": 0, "u": 1})
    elsewhere = client.create_table("other", txnkv.Schema({"id": "int64"}, ["id"]))
    fine = client.new_transaction()
    fine.serialize()
    fine.insert(elsewhere, (1,))
    table.alter(nullable={"u": False})
    for txn in (nulls, others):
        with pytest.raises(txnkv.SchemaChangedError, match="table 't' was altered"):
            txn.commit()
        assert txn.state is txnkv.TxnState.ABORTED
    fine.commit()
    assert table.count() == 9
    assert table.count(where=[("u", "is null")]) == 0


def test_no_null_comes_in_between_look_and_change(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is committed by somebody else when most was looked through."""
    table.alter(drop=["d"])
    with client.transaction() as txn:
        txn.update(table, {"id": 0, "u": 1})
    engine = internals.tables(client)
    look, looks = engine._require_values, []

    def slowly(*args: Any) -> None:
        look(*args)
        looks.append(1)
        if len(looks) == 1:
            table.insert({"id": 10, "n": 1})

    monkeypatch.setattr(engine, "_require_values", slowly)
    with pytest.raises(txnkv.SchemaError, match="without a value there: 1"):
        table.alter(nullable={"u": False})
    assert table.schema.columns["u"].nullable


def test_rows_that_wait_with_nulls(client: txnkv.Client, table: txnkv.Table) -> None:
    table.alter(drop=["d"])
    with client.transaction() as txn:
        txn.update(table, {"id": 0, "u": 1})
    session = client.new_session()
    session.insert(table, {"id": 10, "n": 1})
    session.insert(table, {"id": 11, "n": 1, "u": 1})
    table.alter(nullable={"u": False})
    with pytest.raises(txnkv.RowErrors, match="column 'u' may not be null any more") as caught:
        session.flush()
    assert [error.key for error in caught.value.errors] == [10]
    assert session.flush().inserted == 0
    assert table.get(10) is None
    assert table.get(11) is not None


def test_not_a_bool(table: txnkv.Table) -> None:
    with pytest.raises(TypeError, match="nullable is True or False"):
        table.alter(nullable={"u": "no"})  # type: ignore[dict-item]


# -- evolve ----------------------------------------------------------------------------


def test_evolve_widens(client: txnkv.Client, table: txnkv.Table) -> None:
    columns = dict(SCHEMA.columns) | {"n": txnkv.Column("int64", nullable=True), "new": "int8?"}
    wanted = txnkv.Schema(columns, ["id"])
    assert client.create_table("t", wanted, evolve=True).schema == wanted
    assert table.get(3) == {**row(3), "new": None}
    narrow = dict(columns) | {"n": "int8?"}
    with pytest.raises(txnkv.TableExistsError, match="its column 'n' is int64\\?, not int8\\?"):
        client.create_table("t", txnkv.Schema(narrow, ["id"]), evolve=True)


DEFAULTS = [("int8?", 7), ("int16?", 300), ("int16?", None)]  # 300 is too much for the first type


def test_evolve_sets_and_drops_defaults(client: txnkv.Client, table: txnkv.Table) -> None:
    before = rows(table)
    for key, (kind, default) in enumerate(DEFAULTS, 1000):
        column = txnkv.Column(kind, default=default)
        wanted = txnkv.Schema(dict(SCHEMA.columns) | {"n": column}, ["id"])
        assert client.create_table("t", wanted, evolve=True).schema == wanted
        table.insert({"id": key, "t": "x"})
    assert rows(table, columns=["id", "n"], where=[("id", ">=", 1000)]) == [
        {"id": key, "n": default} for key, (_, default) in enumerate(DEFAULTS, 1000)
    ]
    assert rows(table)[: len(before)] == before


# -- another name ----------------------------------------------------------------------


def test_renamed(
    client: txnkv.Client, table: txnkv.Table, connect: Callable[..., txnkv.Client]
) -> None:
    elsewhere = connect()
    other, tokens = elsewhere.table("t"), table.scan().tokens()
    small, large = client.new_transaction(), client.new_transaction()
    large.serialize()
    for id, txn in ((10, small), (11, large)):
        txn.insert(table, row(id))
        txn.flush()
    with client.snapshot() as before:
        renamed = client.rename_table("t", "u")
        assert renamed.name == table.name == other.name == "u"
        assert client.tables() == elsewhere.tables() == ["u"]
        assert before.get("u", 3) == row(3)
    assert other.get(3) == table.get(3) == elsewhere.table("u").get(3) == row(3)
    with pytest.raises(txnkv.SchemaChangedError):
        small.commit()
    large.commit()
    assert table.get(11) == row(11)
    assert len([each for token in tokens for each in token.open(elsewhere)]) == 9
    with pytest.raises(txnkv.TableNotFoundError, match="the tables are: u"):
        client.table("t")
    again = client.create_table("t", SCHEMA)
    with pytest.raises(txnkv.TableExistsError, match="there is a table 't' already"):
        client.rename_table(table, "t")
    assert again.count() == 0
    client.drop_table(table)
    assert client.tables() == ["t"]
    assert client.check().ok


def test_wrong_names(client: txnkv.Client, table: txnkv.Table) -> None:
    with pytest.raises(ValueError, match="non-empty string"):
        client.rename_table(table, "")
    with pytest.raises(txnkv.TableNotFoundError):
        client.rename_table("nothing", "u")
    assert client.rename_table("t", "t").name == "t"


def test_a_large_transaction_from_before_a_column_brings_no_null(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """It has none of a column that was added, and made not nullable, since."""
    txn = client.new_transaction()
    txn.serialize()
    txn.insert(table, row(10))
    txn.flush()
    with client.transaction() as empty:
        for each in table.scan(["id"]):
            empty.delete(table, each["id"])
    table.alter(add={"late": "int32?"})
    table.alter(nullable={"late": False})
    with pytest.raises(txnkv.SchemaChangedError, match="table 't' was altered"):
        txn.commit()
    assert table.count() == 0
