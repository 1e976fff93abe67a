"""Values of pandas, numpy and others that no column takes: refused over a server as in a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

import txnkv

from .test_same_answers import _run

TIMES = """
t = c.create_table("t", TYPES)
t.insert({"id": 1, "at": pd.NaT})
t.insert((1, None, pd.NaT, None))
t.upsert({"id": 1, "took": pd.NaT})
t.upsert({"id": 1, "at": np.datetime64("NaT")})
t.upsert({"id": 1, "at": np.datetime64("NaT", "us")})
t.upsert({"id": 1, "utc": np.datetime64("NaT", "ns")})
c.run(lambda x: x.insert(t, {"id": 1, "at": pd.NaT}))
t.get(pd.NaT)
t.count([("at", ">=", pd.NaT)])
t.count([("at", "in", [pd.NaT, pd.Timestamp("2024-01-01")])])
t.count([("utc", "<", pd.NaT)])
t.upsert({"id": 1, "at": 1.9})
t.upsert({"id": 1, "utc": np.float64(2)})
t.upsert({"id": 1, "took": -0.5})
t.upsert({"id": 1, "at": pd.Timestamp(5)})
t.upsert({"id": 1, "took": pd.Timedelta(5, "ns")})
t.count([("at", ">", pd.Timestamp(5))])
t.count([("took", ">", pd.Timedelta(5, "ns"))])
t.count([("at", "<", 5.0)])
t.insert({"id": 2, "at": pd.Timestamp("2024-01-01"), "utc": pd.Timestamp("2024-01-01", tz="UTC")})
t.upsert({"id": 3, "took": pd.Timedelta(5, "us")})
t.scan(ordered=True).to_arrow()
"""


def test_times(tmp_path: Path) -> None:
    """As text pandas' NaT is the first day of year 1, which was stored; of others the whole part
    was.
    """
    _run(TIMES, tmp_path, _names())


def _names() -> dict[str, object]:
    types = {"id": "int64", "at": "timestamp[us]?", "utc": "timestamp[us, tz=UTC]?"}
    types |= {"took": "duration[us]?"}
    return {"np": np, "pd": pd, "TYPES": txnkv.Schema(types, primary_key=["id"])}
