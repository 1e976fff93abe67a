"""Queries of status.db that have exactly one row."""

from __future__ import annotations

from typing import Any

import apsw

from txnkv.errors import CorruptionError


def one(cur: apsw.Cursor, sql: str, values: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """The first row of a query that always has one.

    Raises:
        CorruptionError: it has none: a row of the status database is gone.
    """
    found = cur.execute(sql, values).fetchone()
    if found is None:
        raise CorruptionError(f"status.db: no row for {sql!r}. Restore the store from a backup")
    return tuple(found)
