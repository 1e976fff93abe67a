"""The seven row operations: what each does with a key that is there, and with one that is not.

                      key is there            key is not there
    insert            refused                 new row
    insert_ignore     ignored                 new row
    upsert            new version             new row
    update            new version             refused
    update_ignore     new version             ignored
    delete            gone                    refused
    delete_ignore     gone                    ignored

A row that has a key of an earlier one in the same data meets what that one left. `RULES` is this
table; single rows (`write_buffer`) and batches (`mutations`) both go by it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, NamedTuple, TypeAlias, cast, get_args

from txnkv.errors import AlreadyPresentError, NotFoundError, SchemaError

Operation: TypeAlias = Literal[
    "insert", "insert_ignore", "upsert", "update", "update_ignore", "delete", "delete_ignore"
]


class Effect(Enum):
    """The effect of an operation on one key."""

    WRITTEN = "written"
    GONE = "gone"
    REFUSED = "refused"


class Rule(NamedTuple):
    """One operation.

    Attributes:
        there: its effect on a key that is there: counted as updated or deleted.
        absent: its effect on one that is not: counted as inserted.
        ignores: what is refused is counted as ignored, without an error.
    """

    there: Effect
    absent: Effect
    ignores: bool = False


_WRITTEN, _GONE, _REFUSED = Effect

RULES: Final = {
    "insert": Rule(_REFUSED, _WRITTEN),
    "insert_ignore": Rule(_REFUSED, _WRITTEN, ignores=True),
    "upsert": Rule(_WRITTEN, _WRITTEN),
    "update": Rule(_WRITTEN, _REFUSED),
    "update_ignore": Rule(_WRITTEN, _REFUSED, ignores=True),
    "delete": Rule(_GONE, _REFUSED),
    "delete_ignore": Rule(_GONE, _REFUSED, ignores=True),
}

OPERATIONS: Final = get_args(Operation)
INSERTS: Final = frozenset(op for op in RULES if RULES[op].there is _REFUSED)
DELETES: Final = frozenset(op for op in RULES if RULES[op].there is _GONE)
PARTIAL: Final = frozenset(op for op in RULES if RULES[op].there is _WRITTEN)
"""May leave columns out, which keep the values they have."""

UPDATES: Final = frozenset(op for op in PARTIAL if RULES[op].absent is _REFUSED)


def already_there(*, earlier: bool = False, own: bool = False) -> AlreadyPresentError:
    """The error for a key that is there.

    Args:
        earlier: a row of the same call wrote it.
        own: the transaction wrote it before.
    """
    if earlier:
        return AlreadyPresentError("an earlier row of the same data has this key")
    if own:
        return AlreadyPresentError("this transaction has staged the key already")
    return AlreadyPresentError("a row with this key is in the table")


def not_there(*, earlier: bool = False) -> NotFoundError:
    """The error for a key that is not there.

    Args:
        earlier: a row of the same call deleted it.
    """
    if earlier:
        return NotFoundError("an earlier row of the same data deleted this key")
    return NotFoundError("no row has this key")


def incomplete(columns: str) -> SchemaError:
    """The error for a new row without values that it needs.

    Args:
        columns: their names.
    """
    return SchemaError(
        f"no row has this key, and a new one needs a value for {columns}: not nullable and "
        "without a default"
    )


def require_operation(op: str) -> Operation:
    """The operation of this name.

    Raises:
        ValueError: there is none.
    """
    if op not in RULES:
        raise ValueError(f"{op!r} is no operation; there are {', '.join(OPERATIONS)}")
    return cast(Operation, op)


INSERT, UPSERT, UPDATE, DELETE, PUT = range(5)
"""The operations of `core.Writes`. A PUT is an upsert of which nobody asks so far whether the row
was there: a whole row is written without a look.
"""
NATIVE: Final = {
    "insert": INSERT,
    "insert_ignore": INSERT,
    "upsert": UPSERT,
    "update": UPDATE,
    "update_ignore": UPDATE,
    "delete": DELETE,
    "delete_ignore": DELETE,
}
