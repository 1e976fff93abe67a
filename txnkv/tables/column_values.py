"""Python values as columns: taken when they fit without loss, refused when they would change.

pyarrow takes more than that: a bool for an integer, a naive datetime for an instant of UTC, an
aware one for a wall clock's time. Everything that is given one value at a time goes through here:
rows, keys, constants of predicates, defaults, bounds of ranges, values of typed topics. Arrow
data is cast by `core.column_types`, by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import pyarrow as pa

from txnkv.errors import SchemaError

_Complaint: TypeAlias = Callable[[Any], str | None]
"""A function that says what is wrong with a value; None when nothing is known to be."""


def column_array(name: str, kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Python values as a column, when they fit without loss.

    Raises:
        SchemaError: one does not.
    """
    complaint = _complaint(kind)
    if complaint is not None:
        for value in values:
            wrong = None if value is None else complaint(value)
            if wrong is not None:
                raise SchemaError(f"column {name!r} is {kind}: {wrong}")
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise SchemaError(f"column {name!r} is {kind}: {error}") from None


def _complaint(kind: pa.DataType) -> _Complaint | None:
    """Return the function that finds values which pyarrow would take for this type, and change
    without a word; None when there are none.
    """
    if pa.types.is_integer(kind):
        return _of_type(lambda value: isinstance(value, bool) or not hasattr(value, "__index__"))
    if pa.types.is_string(kind):
        return _of_type(lambda value: isinstance(value, bytes))
    if pa.types.is_date(kind):
        return _of_type(lambda value: isinstance(value, datetime))
    if pa.types.is_timestamp(kind):
        return _without_zone if kind.tz is not None else _with_zone
    if pa.types.is_list(kind):
        return _in_list(_complaint(kind.value_type))
    return None


def _of_type(unfit: Callable[[Any], bool]) -> _Complaint:
    return lambda value: f"{value!r} is a {type(value).__name__}" if unfit(value) else None


def _without_zone(value: Any) -> str | None:
    naive = isinstance(value, datetime) and value.tzinfo is None
    if naive or getattr(getattr(value, "dtype", None), "kind", "") == "M":  # numpy's have no zone
        return (
            f"{value!r} has no time zone and so names no instant. Say whose time it is, as "
            "value.replace(tzinfo=timezone.utc); a column of timestamp[us] takes it as it is"
        )
    return None


def _with_zone(value: Any) -> str | None:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return (
            f"{value!r} has a time zone, which would be lost. Say whose clock is meant, as "
            "value.astimezone(timezone.utc).replace(tzinfo=None); a column of "
            "timestamp[us, tz=UTC] takes it as it is"
        )
    return None


def _in_list(complaint: _Complaint | None) -> _Complaint | None:
    if complaint is None:
        return None

    def look(values: Any) -> str | None:
        if not isinstance(values, Iterable):
            return None  # pyarrow says what it is
        found = (complaint(value) for value in values if value is not None)
        return next((wrong for wrong in found if wrong is not None), None)

    return look
