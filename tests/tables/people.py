"""Rows of a table with indexes, for the tests of these."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import txnkv

SCHEMA = txnkv.Schema(
    {"id": "int64", "mail": "string?", "n": "int32", "tags": "list<string>?"}, primary_key=["id"]
)


def batch(ids: Any, mails: Any = None) -> pa.Table:
    ids = list(ids)
    mails = [f"m{i}" if i % 4 else None for i in ids] if mails is None else list(mails)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "mail": pa.array(mails, pa.string()),
            "n": pa.array([i % 5 for i in ids], pa.int32()),
            "tags": pa.nulls(len(ids), pa.list_(pa.string())),
        }
    )


def ids(rows: Any) -> list[int]:
    return sorted(row["id"] for row in rows)
