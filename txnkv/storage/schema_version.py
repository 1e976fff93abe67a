"""The version of a SQLite schema, and the way to the current one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import apsw


def schema_version(cursor: apsw.Cursor) -> int:
    """0: there is no schema yet."""
    return int(cursor.execute("PRAGMA user_version").get)


def bring_up_to_date(
    cursor: apsw.Cursor,
    script: str,
    initialise: Callable[[apsw.Cursor], None] | None,
    upgrades: Sequence[str],
) -> None:
    """Make the schema, or upgrade it.

    Args:
        cursor: of a write.
        script: makes the current schema.
        initialise: fills what `script` has made.
        upgrades: from version 1 to 2, from 2 to 3 and so on.
    """
    version = schema_version(cursor)
    if version == 0:
        cursor.execute(script)
        if initialise is not None:
            initialise(cursor)
    else:
        for upgrade in upgrades[version - 1 :]:
            cursor.execute(upgrade)
    cursor.execute(f"PRAGMA user_version = {len(upgrades) + 1}")
