"""Batches byte by byte: a change of the format shows here. docs/format-topics.md draws them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tools import log_reference as reference
from txnkv.core import Chunk, ControlType, encode_batch, encode_control, encode_headers, place

HEADERS = encode_headers([("k", b"v")])

# Two values at offset 10, committed at 9.
PLAIN = """
    0a00000000000000 0900000000000000
    9494cc1f 68000000 0100 0000 02000000
    0000000000000000 6400000000000000
    6400000000000000 0000000000000000
    ffffffff 0000 0000 02000000 18000000
    00000000 01000000 03000000 00000000
    6162630000000000
"""

# Everything that a batch can have but compression.
FULL = """
    0000000000000000 0000000000000000
    f1e9d234 e0000000 0100 e807 03000000
    0700000000000000 0500000000000000
    0700000000000000 0800000000000000
    04000000 0300 0000 03000000 78000000
    0100000000000000 02000000 03000000 0400000000000000
    00000000 01000000 01000000 04000000
    0500000000000000
    0600000000000000
    00000000 00000000 01000000 01000000
    00000000 0a000000 0a000000 0a000000
    0500000000000000 0600000000000000 0700000000000000
    6163636300000000
    6b00000000000000
    0100 0100 6b 01000000 76 000000000000
"""

COMMIT = """
    0000000000000000 0000000000000000
    f06b6d2b 68000000 0100 1800 01000000
    0700000000000000 0300000000000000
    0300000000000000 0000000000000000
    ffffffff 0000 0000 00000000 18000000
    0000 0100 00000000 0600000000000000 0200000000000000
"""

SIDE_LIST = """
    0000000000000000 0000000000000000
    01e691b5 6c000000 0100 1800 05000000
    0700000000000000 0300000000000000
    0300000000000000 0000000000000000
    ffffffff 0000 0000 00000000 1c000000
    0000 0300 00000000 0000000000000000 0000000000000000
    6c697374
"""


def plain() -> bytes:
    values = pa.array([b"a", b"bc"], pa.binary())
    return place(encode_batch(pa.record_batch({"value": values}), timestamp=100), 10, 9)


def full() -> bytes:
    messages = pa.record_batch(
        {
            "value": pa.array([b"a", None, b"ccc"], pa.binary()),
            "key": pa.array([None, b"k", b""], pa.binary()),
            "headers": pa.array([HEADERS, None, b""], pa.binary()),
            "timestamp": pa.array([5, None, 7], pa.timestamp("us", "UTC")),
        }
    )
    return encode_batch(
        messages,
        timestamp=6,
        txn_id=7,
        decided=True,
        producer_id=8,
        epoch=3,
        base_sequence=4,
        chunk=Chunk(1, 2, 3, 4),
    )


def commit() -> bytes:
    return encode_control(
        ControlType.COMMIT, txn_id=7, timestamp=3, low_water_mark=6, first_offset=2
    )


def side_list() -> bytes:
    return encode_control(ControlType.SIDE_LIST, txn_id=7, count=5, timestamp=3, body=b"list")


CASES = [(plain, PLAIN), (full, FULL), (commit, COMMIT), (side_list, SIDE_LIST)]


@pytest.mark.parametrize(("made", "golden"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_bytes(made, golden):
    assert made().hex() == "".join(golden.split())


def test_the_plain_reference_gives_the_same():
    rows = [reference.Row(b"a"), reference.Row(b"bc")]
    assert reference.place(reference.encode_batch(rows, 100), 10, 9) == plain()
    rows = [
        reference.Row(b"a", None, HEADERS, 5),
        reference.Row(None, b"k", None, None),
        reference.Row(b"ccc", b"", b"", 7),
    ]
    assert reference.encode_batch(rows, 6, 7, True, 8, 3, 4, (1, 2, 3, 4)) == full()
    assert reference.encode_control(1, 3, 7, 1, 6, 2) == commit()
    assert reference.encode_control(3, 3, 7, 5, body=b"list") == side_list()
