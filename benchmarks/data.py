"""The rows of the benchmarks: 24 bytes each, int64 key, float64, int64."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

import txnkv

SCHEMA: Final = txnkv.Schema({"id": "int64", "x": "float64", "n": "int64"}, primary_key=["id"])


def rows(ids: np.ndarray) -> pa.Table:
    """Rows with these keys; the other columns follow from the key."""
    return pa.table({"id": ids, "x": ids * 0.5, "n": ids[::-1].copy()}, schema=SCHEMA.arrow)


def ascending(first: int, count: int) -> pa.Table:
    return rows(np.arange(first, first + count, dtype=np.int64))


def shuffled_odd(count: int, seed: int) -> pa.Table:
    """`count` odd keys in random order, for a table that holds even ones."""
    return rows(np.random.default_rng(seed).permutation(count).astype(np.int64) * 2 + 1)


def even(count: int) -> pa.Table:
    return rows(np.arange(count, dtype=np.int64) * 2)
