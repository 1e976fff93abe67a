"""The row operations that sessions and transactions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txnkv.client.table import Table


class RowOperations(ABC):
    """The seven operations, by row.

    A row is a dict, a tuple in schema order or a dataclass. A column that a dict does not name
    has its default, or null, in a new row, and keeps its value in one that is there; None is
    null. Rows are checked at the call; whether their keys are there shows when they are flushed.

    Every operation raises SchemaError when a column is unknown or missing or a value does not
    fit, and in a session with flush mode auto_sync RowErrors when the row is refused.
    """

    @abstractmethod
    def _add(self, table: str | Table, op: str, row: Any) -> None:
        """Take one row of an operation."""

    def insert(self, table: str | Table, row: Any) -> None:
        """A new row; refused when its key is there already."""
        self._add(table, "insert", row)

    def insert_ignore(self, table: str | Table, row: Any) -> None:
        """A new row; ignored when its key is there already."""
        self._add(table, "insert_ignore", row)

    def upsert(self, table: str | Table, row: Any) -> None:
        """A new row, or new values for the row that is there."""
        self._add(table, "upsert", row)

    def update(self, table: str | Table, row: Any) -> None:
        """New values for the row with this key; refused when there is none."""
        self._add(table, "update", row)

    def update_ignore(self, table: str | Table, row: Any) -> None:
        """New values for the row with this key; ignored when there is none."""
        self._add(table, "update_ignore", row)

    def delete(self, table: str | Table, key: Any) -> None:
        """Delete the row with this key, a scalar or a tuple; refused when there is none."""
        self._add(table, "delete", key)

    def delete_ignore(self, table: str | Table, key: Any) -> None:
        """Delete the row with this key; ignored when there is none."""
        self._add(table, "delete_ignore", key)
