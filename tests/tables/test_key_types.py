"""Every key type, alone and composite: what goes in comes out, in the order of its values."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import txnkv

_DAY = date(2000, 2, 29)
_TIME = datetime(2000, 2, 29, 12, 30, 15, 123456)


def _ints(bits: int, signed: bool) -> list[int]:
    low = -(1 << (bits - 1)) if signed else 0
    high = (1 << (bits - 1)) - 1 if signed else (1 << bits) - 1
    some = [low, low + 1, high - 1, high, 1, 2, 100]
    return sorted({*some, *([-1, 0] if signed else [0])})


def _floats(text: str) -> list[float]:
    values = [-math.inf, -1e30, -1.5, -1e-30, 0.0, 1e-30, 1.5, 1e30, math.inf]
    return [struct.unpack(text, struct.pack(text, value))[0] for value in values]


# Ascending values of each type.
VALUES: dict[str, list[Any]] = {
    "bool": [False, True],
    **{f"int{bits}": _ints(bits, True) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": _ints(bits, False) for bits in (8, 16, 32, 64)},
    "float32": _floats("f"),
    "float64": _floats("d"),
    "string": ["", "\0", "\0\0", "\0a", "A", "a", "a\0", "a\0b", "aa", "b" * 300, "é", "€", "𝄞"],
    "binary": [b"", b"\0", b"\0\0", b"\0\1", b"\1", b"a", b"a\0", b"ab", b"\xff", b"\xff\xff"],
    "date32": [date(1, 1, 1), date(1969, 12, 31), date(1970, 1, 1), _DAY, date(9999, 12, 31)],
    "timestamp[us]": [datetime(1900, 1, 1), datetime(1970, 1, 1), _TIME, datetime(9999, 1, 1)],
    "timestamp[us, tz=UTC]": [
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(1970, 1, 1, tzinfo=UTC),
        _TIME.replace(tzinfo=UTC),
    ],
    "decimal128(38, 10)": [
        Decimal("-" + "9" * 28 + "." + "9" * 10),
        Decimal("-1.0000000001"),
        Decimal("-0.0000000001"),
        Decimal("0E-10"),
        Decimal("0.0000000001"),
        Decimal("9" * 28 + "." + "9" * 10),
    ],
    "time32[s]": [time(0), time(0, 0, 1), time(12, 30, 15), time(23, 59, 59)],
    "time32[ms]": [time(0), time(0, 0, 0, 1000), time(12), time(23, 59, 59, 999000)],
    "time64[us]": [time(0), time(0, 0, 0, 1), time(12), time(23, 59, 59, 999999)],
    "duration[us]": [
        timedelta(days=-100_000),
        timedelta(microseconds=-1),
        timedelta(0),
        timedelta(microseconds=1),
        timedelta(days=100_000, hours=3),
    ],
    "uuid": [
        UUID(int=0),
        UUID(int=1),
        UUID("00000000-0000-0000-0000-000100000000"),
        UUID("7fffffff-ffff-ffff-ffff-ffffffffffff"),
        UUID("80000000-0000-0000-0000-000000000000"),
        UUID(int=(1 << 128) - 1),
    ],
}


@pytest.mark.parametrize("kind", VALUES)
def test_key_of_every_type(client: txnkv.Client, put: Callable[..., Any], kind: str) -> None:
    values = VALUES[kind]
    schema = txnkv.Schema({"k": kind, "n": "int32"}, primary_key=["k"])
    table = client.create_table("keys", schema)
    order = list(range(len(values)))
    random.Random(1).shuffle(order)
    half = len(order) // 2
    put(table, [(values[n], n) for n in order[:half]])
    put(table, _batch(kind, values, order[half:]))
    rows = table.scan(ordered=True).to_arrow()
    assert rows["k"].to_pylist() == values
    assert rows["n"].to_pylist() == list(range(len(values)))
    for n, value in enumerate(values):
        assert table.get(value) == {"k": value, "n": n}
        for op, wanted in (
            ("=", [n]),
            ("<", list(range(n))),
            ("<=", list(range(n + 1))),
            (">", list(range(n + 1, len(values)))),
            (">=", list(range(n, len(values)))),
            ("!=", [i for i in range(len(values)) if i != n]),
        ):
            found = table.scan(["n"], where=[("k", op, value)], ordered=True).to_arrow()
            assert found["n"].to_pylist() == wanted, (op, value)
    assert table.get_many(values)["n"].to_pylist() == list(range(len(values)))
    with client.new_session() as session:
        session.insert_ignore(table, (values[0], 999))
        assert session.flush().ignored == 1


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_equal_floats_are_one_key(client: txnkv.Client, kind: str) -> None:
    """-0.0 is 0.0, and every NaN the same, greatest key."""
    table = client.create_table("keys", txnkv.Schema({"k": kind}, primary_key=["k"]))
    with client.new_session() as session:
        for value in (0.0, math.inf, math.nan):
            session.insert(table, (value,))
    for value in (-0.0, -math.nan):
        session = client.new_session()
        session.insert(table, (value,))
        with pytest.raises(txnkv.RowErrors):
            session.flush()
    found = [row["k"] for row in table.scan(ordered=True)]
    assert found[:2] == [0.0, math.inf]
    assert math.isnan(found[2])
    assert math.isnan(table.get(math.nan)["k"])
    assert table.get(-0.0) is not None


COMPOSITES = [
    ("int64", "string"),
    ("string", "string"),
    ("string", "int8", "binary"),
    ("binary", "float64"),
    ("bool", "date32", "decimal128(38, 10)"),
    ("timestamp[us]", "uint16"),
    ("string", "bool", "string", "int32"),
]


@pytest.mark.parametrize("kinds", COMPOSITES, ids="-".join)
def test_composite_keys(
    client: txnkv.Client, put: Callable[..., Any], kinds: tuple[str, ...]
) -> None:
    names = [f"k{i}" for i in range(len(kinds))]
    schema = txnkv.Schema(
        {"n": "int32"} | dict(zip(names, kinds, strict=True)), primary_key=list(reversed(names))
    )
    chance = random.Random(7)
    keys = sorted(
        {tuple(chance.choice(VALUES[kind]) for kind in reversed(kinds)) for _ in range(60)}
    )
    table = client.create_table("keys", schema)
    rows = [{"n": n} | dict(zip(reversed(names), key, strict=True)) for n, key in enumerate(keys)]
    chance.shuffle(rows)
    for part in (rows[::3], rows[1::3], rows[2::3]):
        put(table, part)
    found = table.scan(ordered=True).to_arrow()
    assert found["n"].to_pylist() == list(range(len(keys)))
    got = list(zip(*(found[name].to_pylist() for name in reversed(names)), strict=True))
    assert got == keys
    for n in (0, len(keys) // 2, len(keys) - 1):
        assert table.get(keys[n])["n"] == n
        assert table.get(list(keys[n]))["n"] == n
    first = keys[len(keys) // 2][0]
    for op, test in (("=", first.__eq__), (">=", lambda v: v >= first), ("<", lambda v: v < first)):
        where = [(names[-1], op, first)]
        assert table.count(where=where) == sum(1 for key in keys if test(key[0]))
    assert table.get_many(keys)["n"].to_pylist() == list(range(len(keys)))


BAD_KEYS = [
    (1, "2 values, not 1"),
    ((1,), "2 values, not 1"),
    ((1, "a", 2), "2 values, not 3"),
    ((None, "a"), "no nulls"),
    (("a", 1), "'a' is int64"),
    ((1.5, "a"), "'a' is int64"),
]


@pytest.mark.parametrize(("key", "words"), BAD_KEYS, ids=[str(key) for key, _ in BAD_KEYS])
def test_keys_that_do_not_fit(client: txnkv.Client, key: Any, words: str) -> None:
    schema = txnkv.Schema({"a": "int64", "b": "string"}, primary_key=["a", "b"])
    table = client.create_table("keys", schema)
    with pytest.raises(txnkv.SchemaError, match=words):
        table.get(key)
    with pytest.raises(txnkv.SchemaError, match=words):
        table.get_many([(1, "a"), key])


def test_keys_of_dates_and_times_a_step_apart(client: txnkv.Client) -> None:
    times = [_TIME + timedelta(microseconds=n) for n in range(-3, 4)]
    schema = txnkv.Schema({"k": "timestamp[us]"}, primary_key=["k"])
    table = client.create_table("keys", schema)
    with client.new_session() as session:
        for when in reversed(times):
            session.insert(table, (when,))
    assert [row["k"] for row in table.scan(ordered=True)] == times
    assert table.count(where=[("k", ">", times[2]), ("k", "<=", times[4])]) == 2


def _batch(kind: str, values: list[Any], order: list[int]) -> pa.RecordBatch:
    schema = txnkv.Schema({"k": kind}, primary_key=["k"]).arrow
    keys = pa.array([values[n] for n in order], schema.field("k").type)
    return pa.record_batch({"k": keys, "n": pa.array(order, pa.int32())})
