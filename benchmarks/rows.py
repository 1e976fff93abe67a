"""The rows of a service: five columns, some 70 bytes, all of them following from key and version.

`row` makes one in Python, `table` many in Arrow, and both agree: what was written can be checked
without having been kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import txnkv

SCHEMA: Final = txnkv.Schema(
    {"id": "int64", "region": "string", "total": "float64", "n": "int64", "note": "string"},
    primary_key=["id"],
)
REGIONS: Final = ("africa", "america", "antarctica", "asia", "europe", "oceania")

Row = tuple[int, str, float, int, str]

_CHUNK: Final = 100_000
_VALUE: Final = struct.Struct("<dqB")


def row(key: int, version: int = 0) -> Row:
    """The row of a key."""
    note = f"what there is to say of {key}"
    return key, REGIONS[key % len(REGIONS)], key * 0.25, version, note


def table(keys: np.ndarray) -> pa.Table:
    """The rows of these keys, version 0."""
    ids = pa.array(keys, pa.int64())
    columns = [
        ids,
        pc.take(pa.array(REGIONS), pa.array(keys % len(REGIONS))),
        pa.array(keys * 0.25, pa.float64()),
        pa.array(np.zeros(len(keys), np.int64)),
        pc.binary_join_element_wise("what there is to say of", ids.cast(pa.string()), " "),
    ]
    return pa.table(columns, schema=SCHEMA.arrow)


def chunks(keys: np.ndarray) -> Iterator[list[Row]]:
    """The rows of these keys as tuples, some at a time."""
    for first in range(0, len(keys), _CHUNK):
        some = table(keys[first : first + _CHUNK])
        yield list(zip(*(column.to_pylist() for column in some.columns), strict=True))


def pack_key(key: int) -> bytes:
    """Bytes that sort as the keys do, for stores that know bytes alone."""
    return key.to_bytes(8, "big")


def pack(row: Row) -> bytes:
    """All but the key."""
    region = row[1].encode()
    return _VALUE.pack(row[2], row[3], len(region)) + region + row[4].encode()


def unpack(key: int, value: bytes) -> Row:
    total, n, length = _VALUE.unpack_from(value)
    rest = value[_VALUE.size :].decode()  # ASCII: lengths in bytes are lengths in characters
    return key, rest[:length], total, n, rest[length:]
