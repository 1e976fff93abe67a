"""Single rows: every form and type, checked at the call."""

from __future__ import annotations

import dataclasses
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.tables import lookup

MODES = ["manual", "auto_background", "auto_sync"]

# -- rows ------------------------------------------------------------------------------

EVENT = txnkv.Schema(
    {
        "id": "int64",
        "name": "string",
        "score": "float64?",
        "kind": txnkv.Column("string", default="plain"),
        "count": txnkv.Column("int32", nullable=True, default=7),
    },
    primary_key=["id"],
)


@dataclasses.dataclass
class Event:
    id: int
    name: str
    score: float | None = None


WHOLE = {"id": 1, "name": "a", "score": None, "kind": "plain", "count": 7}
GOOD_ROWS: list[tuple[str, Any, dict[str, Any]]] = [
    ("dict with defaults", {"id": 1, "name": "a"}, WHOLE),
    ("dict in another order", {"name": "a", "id": 1, "score": None}, WHOLE),
    ("dict in full", {**WHOLE, "score": 2.5}, {**WHOLE, "score": 2.5}),
    ("tuple", (1, "a", None, "plain", 7), WHOLE),
    ("list", [1, "a", None, "plain", 7], WHOLE),
    ("dataclass", Event(1, "a"), WHOLE),
    ("null instead of a default", {"id": 1, "name": "a", "count": None}, {**WHOLE, "count": None}),
    ("null in a tuple", (1, "a", None, "plain", None), {**WHOLE, "count": None}),
    ("int for a float", {"id": 1, "name": "a", "score": 3}, {**WHOLE, "score": 3.0}),
    ("empty string", {"id": 1, "name": ""}, {**WHOLE, "name": ""}),
    ("nul in a string", {"id": 1, "name": "a\0b"}, {**WHOLE, "name": "a\0b"}),
]


@pytest.mark.parametrize(
    ("row", "stored"), [case[1:] for case in GOOD_ROWS], ids=[case[0] for case in GOOD_ROWS]
)
def test_rows(make: Any, client: txnkv.Client, row: Any, stored: dict[str, Any]) -> None:
    events = client.create_table("events", EVENT)
    session, end = make()
    session.insert(events, row)
    end()
    assert events.get(1) == stored


BAD_ROWS: list[tuple[str, Any, type[Exception], str]] = [
    ("unknown column", {"id": 1, "name": "a", "nam": 1}, txnkv.SchemaError, "no column 'nam'"),
    ("missing column", {"id": 1}, txnkv.SchemaError, "'name' is not nullable"),
    ("missing key", {"name": "a"}, txnkv.SchemaError, "'id' is not nullable"),
    ("null in a key", {"id": None, "name": "a"}, txnkv.SchemaError, "'id' is not nullable"),
    (
        "null where none may be",
        {"id": 1, "name": None},
        txnkv.SchemaError,
        "'name' is not nullable",
    ),
    (
        "null instead of a default that may not be",
        {"id": 1, "name": "a", "kind": None},
        txnkv.SchemaError,
        "'kind' is not nullable",
    ),
    ("string for an int", {"id": "1", "name": "a"}, txnkv.SchemaError, "'id' is int64"),
    ("float for an int", {"id": 1.5, "name": "a"}, txnkv.SchemaError, "'id' is int64"),
    ("bool for an int", {"id": True, "name": "a"}, txnkv.SchemaError, "'id' is int64"),
    ("int for a string", {"id": 1, "name": 5}, txnkv.SchemaError, "'name' is string"),
    ("bytes for a string", {"id": 1, "name": b"a"}, txnkv.SchemaError, "is a bytes"),
    ("too large", {"id": 1 << 63, "name": "a"}, txnkv.SchemaError, "'id' is int64"),
    (
        "too large for int32",
        {"id": 1, "name": "a", "count": 1 << 31},
        txnkv.SchemaError,
        "'count' is int32",
    ),
    ("short tuple", (1, "a"), txnkv.SchemaError, "a row has 5 values"),
    ("long tuple", (1, "a", None, "b", 1, 2), txnkv.SchemaError, "this one has 6"),
    (
        "null in a tuple",
        (1, None, None, "plain", 7),
        txnkv.SchemaError,
        "'name' is not nullable",
    ),
    ("a scalar", 5, TypeError, "a row is a dict"),
    ("a dataclass itself", Event, TypeError, "a row is a dict"),
    ("a string", "abcde", TypeError, "a row is a dict"),
]


@pytest.mark.parametrize("mode", MODES)
def test_bad_rows_are_refused_at_the_call(make: Any, client: txnkv.Client, mode: str) -> None:
    """WritingRowsWithUnsetNonNullableColumns, and others of the kind."""
    events = client.create_table("events", EVENT)
    session, end = make(mode)
    for id, (_, row, kind, words) in enumerate(BAD_ROWS):
        with pytest.raises(kind, match=words):
            session.insert(events, row)
        session.insert(events, {"id": id, "name": "good"})
    end()
    assert sorted(row["id"] for row in events.scan()) == [*range(len(BAD_ROWS))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_rows_of_all_forms_stay_in_their_order(
    make: Any, client: txnkv.Client, mode: str, seed: int
) -> None:
    """Whole ones and ones with columns left out, at sight and not, one behind the other."""
    events, dice = client.create_table("events", EVENT), random.Random(seed)
    session, end = make(mode)
    model: dict[int, dict[str, Any]] = {}
    op = "upsert"
    for number in range(60):
        if dice.random() < 0.3:
            op = dice.choice(
                ["upsert", "upsert", "update_ignore", "delete_ignore", "insert_ignore"]
            )
        id, score = dice.randrange(3), dice.choice([None, number + 0.5, number])
        row: dict[str, Any] = {"id": id, "name": f"n{number}", "score": score}
        if dice.random() < 0.6:
            row |= {"kind": dice.choice("ab"), "count": number}
        given: Any = tuple(row.values()) if len(row) == 5 and dice.random() < 0.5 else row
        getattr(session, op)(events, id if op == "delete_ignore" else given)
        there = id in model
        if op == "delete_ignore":
            model.pop(id, None)
        elif op == "upsert" or there == (op == "update_ignore"):
            model[id] = {**(model[id] if there else WHOLE), **row}
    end()
    assert {row["id"]: row for row in events.scan()} == model


@pytest.mark.parametrize("count", [20, 200, 600])
@pytest.mark.parametrize("type", ["int64?", "list<int64>?"], ids=["known to C", "not known to C"])
def test_many_rows_of_which_some_are_refused(
    make: Any, client: txnkv.Client, type: str, count: int
) -> None:
    """One by one or together, as they are few or many: the others stand, each is told of."""
    table = client.create_table("t", txnkv.Schema({"k": "int64", "v": type}, primary_key=["k"]))
    session, end = make()
    one, two = (1, 2) if type == "int64?" else ([1], [2, None])
    for number in range(0, count, 2):
        session.insert(table, (number, one))
    assert session.flush().inserted == count // 2
    keys = [number // 2 for number in range(2 * count)]
    for key in keys:
        session.insert(table, (key, two))
    with pytest.raises(txnkv.RowErrors) as refused:
        session.flush()
    refused_keys = [key for at, key in enumerate(keys) if at % 2 or not key % 2]
    assert sorted(error.key for error in refused.value.errors) == refused_keys[:1000]
    for key in range(count):
        session.upsert(table, {"k": key} if key % 3 else {"k": key, "v": two})
    for key in range(0, count, 5):
        session.delete(table, key)
    end()
    assert [(row["k"], row["v"]) for row in table.scan(ordered=True)] == [
        (key, two if key % 2 or key % 3 == 0 else one) for key in range(count) if key % 5
    ]


def test_values_of_every_type(client: txnkv.Client) -> None:
    values = {
        "bool": True,
        "int8": -128,
        "uint64": (1 << 64) - 1,
        "float32": 0.5,
        "float64": 1e300,
        "string": "zwölf",
        "binary": b"\0\xff",
        "date32": date(1969, 12, 31),
        "timestamp[us]": datetime(1900, 1, 1, 1, 2, 3, 4),
        "timestamp[us, tz=UTC]": datetime(2026, 1, 1, tzinfo=UTC),
        "decimal128(10, 2)": Decimal("-12345678.90"),
        "list<int64>": [1, None, 3],
        "list<string>": [],
    }
    columns = {"id": "int64"} | {f"c{n}": f"{name}?" for n, name in enumerate(values)}
    table = client.create_table("all", txnkv.Schema(columns, primary_key=["id"]))
    row = {f"c{n}": value for n, value in enumerate(values.values())}
    with client.new_session() as session:
        session.insert(table, {"id": 1, **row})
        session.insert(table, {"id": 2})
    assert table.get(1) == {"id": 1, **row}
    assert table.get(2) == {"id": 2} | dict.fromkeys(row)
    assert list(table.scan(ordered=True)) == [table.get(1), table.get(2)]


def test_the_first_row_of_a_scan_waits_for_few_others(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a batch, up to 64 Ki, were made dicts before the first was given."""
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    with client.new_session() as session:
        session.write(table, pa.table({"id": range(3_000)}))
    made, dicts = [], lookup.dicts

    def counted(batch: pa.RecordBatch) -> list[dict[str, Any]]:
        made.append(batch.num_rows)
        return dicts(batch)

    monkeypatch.setattr(lookup, "dicts", counted)
    rows = iter(table.scan())
    assert next(rows) == {"id": 0}
    assert sum(made) < 1_000
    assert [row["id"] for row in rows] == list(range(1, 3_000))
    assert sum(made) == 3_000
    assert list(table.scan(columns=[])) == [{}] * 3_000
