"""The row operations that sessions and transactions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txnkv.table import Table


class RowOperations(ABC):
    """insert, and its siblings, by row."""

    @abstractmethod
    def _add(self, table: str | Table, op: str, row: Any) -> None:
        """Take one row of an operation."""

    def insert(self, table: str | Table, row: Any) -> None:
        """Insert a row: a dict, a tuple in schema order or a dataclass.

        Raises:
            SchemaError: a column is unknown or missing, or a value does not fit.
            RowErrors: in auto_sync, the key is there already.
        """
        self._add(table, "insert", row)

    def insert_ignore(self, table: str | Table, row: Any) -> None:
        """Insert a row, or do nothing when its key is there already."""
        self._add(table, "insert_ignore", row)

    def upsert(self, table: str | Table, row: Any) -> None:
        """Not in this version: raises NotSupportedError."""
        self._add(table, "upsert", row)

    def update(self, table: str | Table, row: Any) -> None:
        """Not in this version: raises NotSupportedError."""
        self._add(table, "update", row)

    def update_ignore(self, table: str | Table, row: Any) -> None:
        """Not in this version: raises NotSupportedError."""
        self._add(table, "update_ignore", row)

    def delete(self, table: str | Table, key: Any) -> None:
        """Not in this version: raises NotSupportedError."""
        self._add(table, "delete", key)

    def delete_ignore(self, table: str | Table, key: Any) -> None:
        """Not in this version: raises NotSupportedError."""
        self._add(table, "delete_ignore", key)
