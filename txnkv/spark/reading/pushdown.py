"""Spark's filters as predicates of a scan, where both mean the same.

They differ on floats: to Spark NaN equals NaN and is above every number, to Arrow it is
neither; and zone maps tell -0.0 from 0.0. So of floats only those filters are pushed down
that no NaN satisfies, with constants that are neither NaN nor zero. A filter that is not
pushed down Spark evaluates itself, which is always right.

Spark 4.1 to 4.3 keeps one plan for each `load()`, not for each query. With one data frame df,

    df.where("id > 5").count()      plans a read of id > 5, and keeps it
    df.count()                      has no filter to push, so it takes the plan that is there,
                                    and counts the rows with id > 5

and so does `df.where("id > 5").union(df)`. No data source can see that coming. So filters are
pushed down where the caller says, by option pushFilters, that the data frame is for one query.
"""

from __future__ import annotations

import math
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import datasource

from txnkv.core import UUID, uuid_of
from txnkv.errors import SchemaError
from txnkv.spark.worker_client import runs
from txnkv.tables import Schema, parse

_COMPARE: Final[dict[type, str]] = {
    datasource.EqualTo: "=",
    datasource.GreaterThan: ">",
    datasource.GreaterThanOrEqual: ">=",
    datasource.LessThan: "<",
    datasource.LessThanOrEqual: "<=",
    datasource.In: "in",
}
_NULL: Final[dict[type, str]] = {
    datasource.IsNull: "is null",
    datasource.IsNotNull: "is not null",
}
_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"


def asked_for() -> bool:
    """Tell whether this process plans a read with filter pushdown.

    Spark refuses a reader that implements `pushFilters` while its setting is off, and tells
    the reader nothing of the setting; but with it on, another worker program plans the read.
    """
    return runs(_WORKER)


def predicate(asked: datasource.Filter, table: Schema) -> tuple[Any, ...] | None:
    """The predicate that means the same as a filter of Spark, or None."""
    attribute: tuple[str, ...] = getattr(asked, "attribute", ())
    if len(attribute) != 1 or attribute[0] not in table.columns:
        return None
    name = attribute[0]
    if type(asked) in _NULL:
        return (name, _NULL[type(asked)])
    op = _COMPARE.get(type(asked))
    if op is None:
        return None
    kind = table.columns[name].type
    value: Any = asked.value  # type: ignore[attr-defined]
    constants = [_constant(item, kind) for item in (value if op == "in" else [value])]
    if op == "in":
        constants = [constant for constant in constants if constant is not None]
    if not all(_same_meaning(constant, op, kind) for constant in constants):
        return None
    found = (name, op, constants if op == "in" else constants[0])
    try:
        parse([found], table)
    except (SchemaError, TypeError):
        return None
    return found


def _constant(value: Any, kind: pa.DataType) -> Any:
    """Spark holds uint64 as a decimal."""
    if pa.types.is_integer(kind) and isinstance(value, Decimal) and value == int(value):
        return int(value)
    return value


_GAP: Final = date(1582, 10, 4), date(1582, 10, 26)
"""Java's calendar has no October 5 to 14 of this year: Spark gives later days for them."""


def _same_meaning(constant: Any, op: str, kind: pa.DataType) -> bool:
    if constant is None:
        return False
    if pa.types.is_floating(kind):
        number = isinstance(constant, float) and not math.isnan(constant) and constant != 0
        return number and op in ("=", "in", "<", "<=")
    if isinstance(constant, date) and _GAP[0] <= date(*constant.timetuple()[:3]) < _GAP[1]:
        return False
    if pa.types.is_date(kind):
        return not isinstance(constant, datetime)
    if kind == UUID:  # Spark compares texts
        return isinstance(constant, str) and _is_as_printed(constant)
    return True


def _is_as_printed(text: str) -> bool:
    try:
        return str(uuid_of(text)) == text
    except ValueError:
        return False
