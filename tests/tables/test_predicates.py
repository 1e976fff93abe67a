"""Predicates against a plain Python model, over small blocks and overlapping row sets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import txnkv
from txnkv.tables.read import predicate
from txnkv.tables.tablets import row_set_writer

TYPES = {
    "a": "int16",
    "b": "string",
    "i": "int64?",
    "f": "float64?",
    "s": "string?",
    "d": "date32?",
    "y": "binary?",
    "o": "bool?",
    "u": "uint8?",
}
SCHEMA = txnkv.Schema(TYPES, primary_key=["a", "b"])
SOME: dict[str, list[Any]] = {
    "a": [-300, -2, -1, 0, 1, 2, 3, 300],
    "b": ["", "a", "aa", "ab", "b", "z" * 40, "z" * 41],
    "i": [-(1 << 63), -5, 0, 1, 2, 3, (1 << 63) - 1],
    "f": [-1e300, -1.5, 0.0, 0.5, 2.0, 1e300],
    "s": ["", "a", "a\0", "ab", "b", "x" * 60, "x" * 59 + "y"],
    "d": [date(1969, 1, 1), date(1970, 1, 1), date(2026, 7, 1)],
    "y": [b"", b"\0", b"\xff", b"ab", b"\xff" * 50],
    "o": [False, True],
    "u": [0, 1, 127, 128, 255],
}
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

rows = st.lists(
    st.fixed_dictionaries(
        {
            name: st.sampled_from(SOME[name])
            if name in "ab"
            else st.one_of(st.none(), st.sampled_from(SOME[name]))
            for name in TYPES
        }
    ),
    max_size=40,
    unique_by=lambda row: (row["a"], row["b"]),
)


@st.composite
def predicates(draw: Any) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(list(TYPES)))
        op = draw(st.sampled_from([*COMPARE, "in", "is null", "is not null"]))
        if op == "in":
            made.append((name, op, draw(st.lists(st.sampled_from(SOME[name]), max_size=4))))
        elif op in COMPARE:
            made.append((name, op, draw(st.sampled_from(SOME[name]))))
        else:
            made.append((name, op))
    return made


def holds(row: dict[str, Any], predicate: tuple[Any, ...]) -> bool:
    value, op = row[predicate[0]], predicate[1]
    if op == "is null":
        return value is None
    if op == "is not null":
        return value is not None
    if value is None:
        return False
    return value in predicate[2] if op == "in" else COMPARE[op](value, predicate[2])


def expression(where: list[tuple[Any, ...]]) -> pc.Expression:
    made = pc.scalar(True)
    for name, op, *constant in where:
        field = pc.field(name)
        if op == "is null":
            made &= field.is_null()
        elif op == "is not null":
            made &= field.is_valid()
        elif op == "in":
            made &= field.isin(_typed(name, constant[0]))
        else:
            made &= COMPARE[op](field, _typed(name, constant)[0])  # type: ignore[operator]
    return made


def _typed(name: str, values: list[Any]) -> Any:
    import pyarrow as pa

    return pa.array(values, SCHEMA.columns[name].type)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[txnkv.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_set_writer, "rows_per_block", lambda widths: 3)
        path: Path = tmp_path_factory.mktemp("predicates") / "store"
        with txnkv.connect(path) as client:
            yield client
            assert client.check().ok


PARTITIONS = [
    None,
    txnkv.hash_partition("b", 3),
    txnkv.range_partition("a", [-1, 2]),
    [txnkv.hash_partition("a", 2), txnkv.range_partition(["a", "b"], [(0, "a"), (2, "")])],
]


@settings(max_examples=80, deadline=None)
@given(
    data=rows,
    where=predicates(),
    columns=st.one_of(st.none(), st.lists(st.sampled_from(list(TYPES)), unique=True, min_size=1)),
    ordered=st.booleans(),
    limit=st.one_of(st.none(), st.integers(0, 20)),
    cuts=st.integers(1, 4),
    partition=st.sampled_from(PARTITIONS),
    told=st.integers(0, 4),
    index=st.sampled_from([None, None, ["s"], ["u", "i"], ["d", "a"], ["f"]]),
    few=st.sampled_from([0, 8]),
)
def test_scans_are_as_the_model(
    shop: txnkv.Client,
    data: list[dict[str, Any]],
    where: list[tuple[Any, ...]],
    columns: list[str] | None,
    ordered: bool,
    limit: int | None,
    cuts: int,
    partition: Any,
    told: int,
    index: list[str] | None,
    few: int,
) -> None:
    """`told` is how many of the predicates are told as such, before an expression of the others;
    with `few` at 0 the other columns are always read of those rows alone that are wanted.

    Read as rows and as columns, which go different ways.
    """
    shop.drop_table("p", missing_ok=True)
    table = shop.create_table("p", SCHEMA, partition)
    if index is not None:
        shop.create_index("p", index)
    for n in range(cuts):
        with shop.transaction() as txn:
            for row in data[n::cuts]:
                txn.insert(table, row)
    wanted = sorted(
        (row for row in data if all(holds(row, p) for p in where)),
        key=lambda row: (row["a"], row["b"].encode()),
    )
    asked: Any = [*where[:told], expression(where[told:])] if where[told:] else where
    if told == 0 and where:
        asked = expression(where)
    names = columns or list(TYPES)
    expected = [{name: row[name] for name in names} for row in wanted]
    scan = table.scan(columns, asked, ordered=ordered, limit=limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txnkv.tables.read.scan._FEW", few)
        found_twice = list(scan), scan.to_arrow().to_pylist()
    for found in found_twice:
        if limit is not None and not ordered:
            assert len(found) == min(limit, len(expected))
            assert all(row in expected for row in found)
        elif ordered:
            assert found == expected[:limit]
        else:
            assert sorted(map(repr, found)) == sorted(map(repr, expected))
    assert table.count(where=asked) == len(wanted)


@pytest.mark.parametrize(
    ("where", "same"),
    [
        (pc.field("a") == 5, [("a", "=", 5)]),
        (pc.field("a") != -5, [("a", "!=", -5)]),
        ((pc.field("a") >= 1) & (pc.field("b") < "x y"), [("a", ">=", 1), ("b", "<", "x y")]),
        (pc.field("b") == "5) and (a == 7", [("b", "=", "5) and (a == 7")]),
        (pc.field("b") == "(a == 7)", [("b", "=", "(a == 7)")]),
        (pc.field("b") == 'a "quote"', [("b", "=", 'a "quote"')]),
        (pc.field("i").is_valid(), [("i", "is not null")]),
        (pc.field("d") >= pa.scalar(date(1970, 1, 1)), [("d", ">=", date(1970, 1, 1))]),
        ((pc.field("a") == 1) | (pc.field("a") == 2), None),
        (~(pc.field("a") == 1), None),
        (pc.field("a") == 1 << 20, None),  # more than int16 has
        (pc.field("f") == 1, None),
        (pc.field("a") == 1.5, None),
        (pc.field("a") == pc.field("i"), None),
    ],
    ids=str,
)
def test_a_plain_expression_is_as_predicates_are(where: Any, same: Any) -> None:
    """So that it picks keys and blocks; what is not plain is left to Arrow."""
    found = predicate.parse(where, SCHEMA)
    if same is None:
        assert (found.predicates, found.expression is None) == ((), False)
    else:
        assert found == predicate.parse(same, SCHEMA)


@pytest.mark.parametrize(
    ("where", "kind", "words"),
    [
        ([("z", "=", 1)], txnkv.SchemaError, "no column 'z'"),
        ([("a", "~", 1)], txnkv.SchemaError, "'~' is no operator; there are"),
        ([("a", "=", "x")], txnkv.SchemaError, "'a' is int16"),
        ([("a", "=", 1 << 20)], txnkv.SchemaError, "'a' is int16"),
        ([("a", "=", None)], txnkv.SchemaError, "is null"),
        ([("a", "in", [1, "x"])], txnkv.SchemaError, "'a' is int16"),
        ([("i", "is null", 5)], txnkv.SchemaError, "takes no value"),
        ([("i", "=")], txnkv.SchemaError, "takes a value"),
        ([("l", "=", [1])], txnkv.SchemaError, "only 'is null'"),
        ([5], TypeError, "a predicate is"),
        ([("a",)], TypeError, "a predicate is"),
        ("a = 5", TypeError, "where is a list"),
        (5, TypeError, "where is a list"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_predicates_are_checked_at_the_call(
    client: txnkv.Client, where: Any, kind: type[Exception], words: str
) -> None:
    schema = txnkv.Schema({"a": "int16", "i": "int64?", "l": "list<int64>?"}, primary_key=["a"])
    table = client.create_table("p", schema)
    with pytest.raises(kind, match=words):
        table.scan(where=where)
    with pytest.raises(kind, match=words):
        table.count(where=where)


@pytest.mark.parametrize(
    "wheres",
    [
        pytest.param([[("a", "=", 1)], [("a", "=", 300)], [("a", "=", 1 << 20)]], id="of the key"),
        pytest.param([[("b", "=", "a")], [("b", "=", "\u00e9")], [("b", "=", 5)]], id="of texts"),
        pytest.param([[("i", "=", 5)], [("i", "=", None)], [("i", "=", True)]], id="null"),
        pytest.param([[("i", "in", [5])], [("i", "in", [])], [("i", "in", [None, 5])]], id="in"),
        pytest.param([[("i", "in", (5, 5))], [("i", "in", "5")], [("i", "in", 5)]], id="in what"),
        pytest.param([[("f", "=", 0.5)], [("f", "=", float("nan"))]], id="of floats"),
        pytest.param([[("b", "=", "a")], ["b=a"], [["b", "=", "a"]], [{1, 2, 3}]], id="no tuples"),
        pytest.param([[("a", "=", 1), ("b", ">", "a")], [("a", "=", 1), "b>a"]], id="the second"),
    ],
)
def test_the_shape_of_conditions_says_nothing_of_their_constants(wheres: list[Any]) -> None:
    def outcome(where: Any, schema: txnkv.Schema) -> Any:
        try:
            found = predicate.parse(where, schema)
            parts = [(p.column, p.op, p.type, p.constants) for p in found.predicates]
            return repr(parts), found.first, found.shape
        except (TypeError, txnkv.SchemaError) as error:
            return type(error), str(error)

    schema = txnkv.Schema(TYPES, primary_key=["a", "b"])
    for where in [*wheres, *wheres]:
        fresh = txnkv.Schema(TYPES, primary_key=["a", "b"])  # to which no shape came up before
        assert outcome(where, schema) == outcome(where, fresh)


@pytest.mark.parametrize("index", [None, ["s"], ["s", "i"], ["f"]])
def test_few_rows_by_parts_of_a_key_or_index(client: txnkv.Client, index: list[str] | None) -> None:
    """Others of the key are asked for more than a value, and an index lacks rows with a null."""
    table = client.create_table("p", SCHEMA)
    if index is not None:
        client.create_index(table, index)
    rows = [
        dict.fromkeys(TYPES)
        | {"a": a, "b": b, "s": "x" if a else None, "i": a if b > "a" else None, "f": float(a)}
        for a in range(3)
        for b in ("a", "b", "c")
    ]
    with client.transaction() as txn:
        for row in rows:
            txn.insert(table, row)
    for where in (
        [("a", "=", 1), ("b", ">=", "b")],
        [("a", "=", 1), ("b", "in", ["a", "c"])],
        [("a", "=", 1), ("a", ">", 1)],
        [("a", "in", [1, 1, 2]), ("s", "=", "x")],
        [("s", "=", "x")],
        [("s", "=", "x"), ("i", "is null")],
        [("s", "is null"), ("i", "=", 0)],
        [("f", "=", 1.0)],
        [("f", "=", float("nan"))],
        [("f", "=", 2.0), ("b", "<", "c")],
    ):
        wanted = [row for row in rows if all(holds(row, each) for each in where)]
        for _ in range(2):  # the second time its shape is known
            assert list(table.scan(where=where, ordered=True)) == wanted, where
            assert table.scan(where=where, ordered=True).to_arrow().to_pylist() == wanted
            assert table.count(where) == len(wanted)
            for names in (["i"], ["f", "a"], ["b", "s"], []):
                cut = [{name: row[name] for name in names} for row in wanted]
                assert list(table.scan(names, where, ordered=True)) == cut, (where, names)
                assert list(table.scan(names, where, ordered=True, limit=1)) == cut[:1]


@pytest.mark.parametrize("op", [*COMPARE, "in"])
def test_nan_compares_as_in_arrow(
    client: txnkv.Client, put: Any, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN is equal to nothing; neither a key range nor a block of NaN cuts rows off for it."""
    monkeypatch.setattr(row_set_writer, "rows_per_block", lambda widths: 3)
    nan = float("nan")
    schema = txnkv.Schema({"k": "float64", "f": "float64?"}, primary_key=["k"])
    table = client.create_table("p", schema)
    put(table, [(1.0, nan), (2.0, None), (3.0, 3.0), (nan, nan)])
    for name in ("k", "f"):
        values = [row[name] for row in table.scan(ordered=True)]
        for constant in (nan, 2.0):
            given_ = [constant] if op == "in" else constant
            if op == "in" and constant != constant:
                continue  # in Arrow NaN is in [NaN]
            wanted = sum(
                1
                for value in values
                if value is not None
                and (value in given_ if op == "in" else COMPARE[op](value, constant))
            )
            assert table.count(where=[(name, op, given_)]) == wanted, (name, constant)


def test_null_lists(client: txnkv.Client, put: Any) -> None:
    schema = txnkv.Schema({"k": "int64", "l": "list<string>?"}, primary_key=["k"])
    table = client.create_table("p", schema)
    put(table, [(1, ["a", None]), (2, None), (3, [])])
    assert [row["k"] for row in table.scan(where=[("l", "is null")])] == [2]
    assert table.scan(where=[("l", "is not null")], ordered=True).to_arrow()["l"].to_pylist() == [
        ["a", None],
        [],
    ]


def test_a_key_range_reads_few_blocks(
    client: txnkv.Client, put: Any, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predicates on the key choose blocks by the sparse index, others by zone maps."""
    import pyarrow as pa

    schema = txnkv.Schema({"k": "int64", "v": "int64"}, primary_key=["k"])
    table = client.create_table("p", schema)
    put(table, pa.table({"k": range(1000), "v": [n // 10 for n in range(1000)]}))
    for where, rows_, blocks in (
        ([("k", "=", 500)], 1, 1),
        ([("k", ">=", 100), ("k", "<", 120)], 20, 6),
        ([("v", "=", 7)], 10, 4),
        ([("v", "is null")], 0, 0),
        ([("k", ">", 5000)], 0, 0),
        ([("k", "=", 1), ("k", "=", 2)], 0, 1),
    ):
        scan = table.scan(where=where)
        plan = scan._planned()
        assert len(list(plan.units(plan.parts))) <= blocks, where
        assert scan.to_arrow().num_rows == rows_


@pytest.mark.parametrize(
    ("op", "bound"), [(">", "x" * 60), (">=", "x" * 60), ("=", "x" * 59 + "y"), ("!=", "x" * 60)]
)
def test_the_greatest_of_a_block_is_longer_than_its_zone_map_has(
    client: txnkv.Client, put: Any, op: str, bound: str
) -> None:
    """The maximum is cut short there: what begins with it may be above the bound."""
    table = client.create_table("t", SCHEMA)
    put(table, [{**dict.fromkeys(TYPES), "a": 1, "b": "b", "s": "x" * 59 + "y"}])
    assert table.count([("s", op, bound)]) == 1


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("where", "keys"),
    [
        ([("a", ">=", 5), ("a", ">=", 3)], [5, 6, 7]),
        ([("a", ">", 5), ("a", ">=", 3)], [6, 7]),
        ([("a", ">", 5), ("a", ">", 3)], [6, 7]),
        ([("a", "<", 2), ("a", "<", 4)], [0, 1]),
        ([("a", "<=", 2), ("a", "<=", 4)], [0, 1, 2]),
        ([("a", "<", 2), ("a", "<=", 4)], [0, 1]),
    ],
    ids=str,
)
def test_of_several_bounds_of_a_key_the_narrowest_counts(
    client: txnkv.Client, put: Any, where: list[Any], keys: list[int], swapped: bool
) -> None:
    """All rows of a key range are given without a look at them."""
    table = client.create_table("t", txnkv.Schema({"a": "int16"}, primary_key=["a"]))
    put(table, [{"a": key} for key in range(8)])
    found = table.scan(where=where[::-1] if swapped else where, ordered=True)
    assert found.to_arrow()["a"].to_pylist() == keys


def test_expressions_with_numbers_that_int64_has_not(client: txnkv.Client) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64", "u": "uint64?"}, ["id"]))
    for row in ((0, 5), (1, 2**63), (2, None)):
        table.insert(row)
    u, least = pc.field("u"), pa.scalar(2**63, pa.uint64())
    for where in (u >= least, (u >= least) & ~u.is_null(), (u >= least) & (u == u)):
        assert [row["id"] for row in table.scan(where=where)] == [1]
    small = pa.scalar(0, pa.int32())
    assert table.count((pc.field("id") >= small) & (u < least)) == 1


def test_an_expression_that_fails_for_a_row(client: txnkv.Client) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64", "u": "uint64?"}, ["id"]))
    table.insert((0, 2**63))
    for where in (pc.field("u") == pa.scalar(2.0**63), pc.scalar(1) / pc.field("id") == 1):
        for read in (lambda where: table.scan(where=where).to_arrow(), table.count):
            with pytest.raises(txnkv.SchemaError, match=r"the expression .* fails for a row: "):
                read(where)


@pytest.mark.parametrize(
    ("kind", "instant", "at_sight"),
    [
        ("timestamp[us, tz=UTC]", datetime(2026, 1, 1, tzinfo=UTC), True),
        ("timestamp[us]", datetime(2026, 1, 1), True),
        (
            "timestamp[us, tz=UTC]",
            datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))),
            False,
        ),
        ("timestamp[us, tz=UTC]", datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")), False),
        ("timestamp[us, tz=Europe/Paris]", datetime(2026, 1, 1, tzinfo=UTC), False),
        ("timestamp[us, tz=UTC]", datetime(2026, 1, 1), None),
        ("timestamp[us]", datetime(2026, 1, 1, tzinfo=UTC), None),
    ],
    ids=str,
)
def test_instants_that_fit_are_not_tried_in_arrow(
    client: txnkv.Client, kind: str, instant: datetime, at_sight: bool | None
) -> None:
    table = client.create_table("t", txnkv.Schema({"t": kind, "v": kind}, ["t"]))
    where = [("t", ">=", instant)]
    if at_sight is None:
        with pytest.raises(txnkv.SchemaError, match="time zone"):
            table.scan(where=where)
        return
    table.insert((instant, instant))
    table.insert((instant + timedelta(hours=1), instant))
    for name, op, count in (("t", ">=", 2), ("t", ">", 1), ("v", ">=", 2), ("t", "=", 1)):
        for _ in range(2):  # the second one is of a shape that is known
            assert table.count([(name, op, instant)]) == count
    (found,) = predicate.parse(where, table.schema).predicates
    assert isinstance(found.given, tuple) == at_sight
