"""The table that a Spark writes and reads."""

from __future__ import annotations

from pathlib import Path

import txnkv

from .data import SCHEMA, ascending


class Tables:
    """A store with one table, emptied at will."""

    def __init__(self, path: Path) -> None:
        self.client = txnkv.connect(path)
        self.options = {"path": str(path), "table": "rows"}
        self.client.create_table("rows", SCHEMA)

    def empty(self) -> None:
        """Begin anew."""
        self.client.drop_table("rows")
        self.client.create_table("rows", SCHEMA)

    def check(self, rows: int) -> None:
        """Every row is there once."""
        found = self.client.table("rows").scan(ordered=True).to_arrow()
        assert found["id"].equals(ascending(0, rows)["id"]), "rows are missing, or doubled"
