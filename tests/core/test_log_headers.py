"""Headers of messages as columns, against the same one by one."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv import core

HEADERS = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=9)), max_size=4)


@given(st.lists(st.none() | HEADERS, min_size=1, max_size=30), st.integers(0, 5))
def test_headers_as_columns(rows: list[list[tuple[str, bytes]] | None], skip: int) -> None:
    blobs = [core.encode_headers(row) or None if row else None for row in rows]
    whole = pa.array(blobs, pa.binary()).slice(skip)
    if len(whole) == 0:
        return
    made = core.split_headers(whole)
    made.validate(full=True)
    assert [
        None if row is None else [(pair["key"], pair["value"]) for pair in row]
        for row in made.to_pylist()
    ] == [None if blob is None else core.decode_headers(blob) for blob in blobs[skip:]]


@pytest.mark.parametrize("blob", [b"\1", b"\1\0", b"\1\0\5\0ab", b"\0\0x", b"\1\0\0\0\1\0\0\0"])
def test_damaged_headers_are_refused(blob: bytes) -> None:
    with pytest.raises(core.CoreError, match="looking at the headers"):
        core.split_headers(pa.array([None, blob], pa.binary()))


def test_a_name_that_is_no_utf_8() -> None:
    blob = b"\2\0" + b"\1\0a" + bytes(4) + b"\2\0\xc3(" + bytes(4)
    column = pa.array([blob, None], pa.binary())
    made = core.split_headers(column)
    made.validate(full=True)
    names = [pair["key"] for pair in made.to_pylist()[0]]
    assert names == [name for name, _ in core.decode_headers(blob)] == ["a", "\ufffd("]
    with pytest.raises(UnicodeDecodeError):
        core.split_headers(column, errors="strict")


PAIRS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))


@pytest.mark.parametrize("kind", [PAIRS, pa.map_(pa.string(), pa.binary())], ids=["pairs", "map"])
@given(rows=st.lists(st.none() | HEADERS, max_size=30), skip=st.integers(0, 5))
def test_columns_as_headers(
    kind: pa.DataType, rows: list[list[tuple[str, bytes]] | None], skip: int
) -> None:
    made = core.join_headers(pa.array(rows, kind).slice(skip))
    assert made.to_pylist() == [core.encode_headers(row) if row else None for row in rows[skip:]]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("a", None)], "not null"),
        ([(None, b"")], "not null"),
        ([None], "not null"),
        ([("a" * 65536, b"")], "65536 bytes of a header's name; 65535 are the most"),
        ([("a", b"")] * 65536, "65536 headers on a message; 65535 are the most"),
    ],
)
def test_columns_that_are_no_headers_are_refused(pairs: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core.join_headers(pa.array([pairs], PAIRS))
