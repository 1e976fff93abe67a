"""The bytes between hosts: what goes in comes out, and what is anybody's is refused or a value."""

from __future__ import annotations

import math
import struct
import tracemalloc
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import txnkv
from txnkv.coordinator import Timestamp, TxnState
from txnkv.remote import pack, unpack
from txnkv.remote.wire import UnsendableError
from txnkv.topics import MessageId

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=20,
)
OTHERS = [
    (1, (2.5, None)), {3: [()]}, {"!": ["t", [1]]}, "\ud800", -(2**63), 2**63 - 1, 2**63, -(2**200),
    -0.0, math.inf, b"", bytes(300), "ä" * 300,
    Decimal("1.10"), datetime(2026, 1, 2, 3, tzinfo=UTC), date(2026, 1, 2), timedelta(days=-1),
    UUID(int=5), Timestamp(7), TxnState.OPEN, MessageId(1, 2), pa.int64(),
    pa.schema([("a", pa.string())]), pa.table({"a": [1, None]}), pa.record_batch({"a": ["x"]}),
    txnkv.Schema({"id": "int64"}, primary_key=["id"]),
    pa.scalar(1, pa.int8()), pa.scalar(None, pa.string()), pa.scalar(5, pa.timestamp("ns", "UTC")),
    pa.scalar([1, None]), pa.scalar(UUID(int=7).bytes, pa.uuid()), pa.array([1, None], pa.int16()),
    pa.array([], pa.string()), pa.array(["a"], pa.string_view()),
    pa.record_batch({"d": pa.array([date(2026, 1, 2)]).dictionary_encode()})[:0],
]  # fmt: skip
REQUEST = pack({"first": [[0, "begin", 3, None]], "drop": [7], "x": (Decimal(1), b"bytes", 2**70)})


def same(found: Any, value: Any) -> bool:
    return type(found) is type(value) and found == value


@given(PLAIN)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert same(unpack(pack(value)), value)


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: f"{type(value).__name__} {value}"[:40])
def test_values_of_other_kinds(value: Any) -> None:
    assert same(unpack(pack(value)), value)


def test_what_comes_out_as_a_plainer_value() -> None:
    assert unpack(pack(np.int16(5))) == 5
    assert unpack(pack(np.array([1.5]))) == [1.5]
    assert unpack(pack({1}.union())) == [1]
    assert unpack(pack(bytearray(b"a"))) == b"a"
    assert math.isnan(unpack(pack(math.nan)))
    with pytest.raises(UnsendableError, match="a object cannot be sent"):
        pack(object())


def test_an_error_comes_out_as_one() -> None:
    found = unpack(pack(txnkv.StorageFullError("no room")))
    assert type(found) is txnkv.StorageFullError
    assert str(found) == "no room"
    refused = txnkv.RowErrors([], 3, 7)
    refused.mendable = False
    found = unpack(pack(refused))
    assert (str(found), found.mendable) == (str(refused), False)


@pytest.mark.parametrize("cut", range(len(REQUEST)))
def test_every_cut_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match=r"a message"):
        unpack(REQUEST[:cut])


def test_more_than_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="goes on behind its value"):
        unpack(REQUEST + b"N")


@given(st.integers(0, len(REQUEST) - 1), st.integers(0, 255), st.binary(max_size=9))
def test_other_bytes_are_a_value_or_refused(at: int, byte: int, more: bytes) -> None:
    data = bytearray(REQUEST)
    data[at] = byte
    data[at + 1 : at + 1 + len(more)] = more
    with suppress(ValueError):
        unpack(bytes(data))


@pytest.mark.parametrize("kind", [b"l", b"m", b"s", b"b", b"I"])
def test_a_length_is_not_believed(kind: bytes) -> None:
    with pytest.raises(ValueError, match="ends before a value does"):
        unpack(kind + struct.pack("<I", 2**32 - 1) + b"N" * 100)


def test_lists_that_are_not_there_take_no_memory() -> None:
    """Each says that it has as many items as there are bytes behind it."""
    size, deep = 1 << 20, 90
    heads = b"".join(b"l" + struct.pack("<I", size - 5 * (n + 1)) for n in range(deep))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="kind 0"):
            unpack(heads.ljust(size, b"\0"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * size


def test_a_message_gives_no_more_bytes_than_it_has() -> None:
    """A message of 200 MiB was a million copies of one part, of anybody who was let in."""
    data = pack([b"part"] * 10)
    assert sum(map(len, unpack(data))) < len(data)
    with pytest.raises(ValueError, match="a value of kind"):
        unpack(b"!" + pack("b") + pack(0))


def test_depth_is_limited() -> None:
    deep: Any = 0
    for _ in range(100):
        deep = [deep]
    assert unpack(pack(deep)) == deep
    for deeper in ([deep], {"a": deep}, (deep,)):
        with pytest.raises(ValueError, match="nested deeper than 100"):
            pack(deeper)
    with pytest.raises(ValueError, match="nested deeper than 100"):
        unpack(b"l\x01\0\0\0" * 200_000 + b"N")
    with pytest.raises(ValueError, match="nested deeper than 100"):
        unpack(b"!s\1\0\0\0v" * 200_000 + b"N")


@pytest.mark.parametrize("kind", ["rb", "tb", "sc", "ty", "enc", "token", "x"])
@pytest.mark.parametrize("content", ["/etc/hostname", 1 << 40, None, [1]])
def test_only_bytes_are_taken_for_bytes(kind: str, content: Any) -> None:
    tagged = pack(kind), pack(content)
    with pytest.raises(ValueError, match="no bytes where some belong"):
        unpack(b"!" + b"".join(tagged))


@pytest.mark.parametrize(
    "data",
    [
        b"q", b"mx\0\0\0", b"m\1\0\0\0ii", b"I\2\0\0\0x1", b"I\4\0\0\x001\x002a", b"s\1\0\0\0\xff",
        b"!s\1\0\0\0?", b"!i", b"!" + pack("c") + pack(["TxnInfo", {}]),
        b"!" + pack("who") + pack(1), b"!" + pack("c") + pack(["MessageId", {"nobody": 1}]),
        b"!" + pack("i") + pack(["int", 5]),
    ],
)  # fmt: skip
def test_what_makes_no_sense(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack(data)
