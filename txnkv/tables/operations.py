"""The seven row operations, by what they want of the table.

                      key is there            key is not there
    insert            refused                 new row
    insert_ignore     ignored                 new row
    upsert            new version             new row
    update            new version             refused
    update_ignore     new version             ignored
    delete            gone                    refused
    delete_ignore     gone                    ignored

A row that has a key of an earlier one in the same data meets what that one left.
"""

from __future__ import annotations

from typing import Final, cast, get_args

from txnkv.options import Operation

INSERTS: Final = ("insert", "insert_ignore")
UPDATES: Final = ("update", "update_ignore")
DELETES: Final = ("delete", "delete_ignore")
OPERATIONS: Final = get_args(Operation)

PARTIAL: Final = ("upsert", *UPDATES)
"""May leave columns out, which keep the values they have."""

IGNORING: Final = ("insert_ignore", "update_ignore", "delete_ignore")
"""Pass over in silence what others refuse."""


def require_operation(op: str) -> Operation:
    """The operation of this name.

    Raises:
        ValueError: there is none.
    """
    if op not in OPERATIONS:
        raise ValueError(f"{op!r} is no operation; there are {', '.join(OPERATIONS)}")
    return cast(Operation, op)
