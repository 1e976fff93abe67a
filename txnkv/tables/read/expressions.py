"""Arrow's expressions as conditions: which columns they need to see, and plain ones as tuples."""

from __future__ import annotations

import operator
import re
from functools import reduce
from typing import Final, TypeAlias

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.errors import SchemaError
from txnkv.tables.schema import Schema

Entry: TypeAlias = tuple[str, str, int | str]
"""Column, operator and constant."""

_OPERATORS: Final = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""By the text of an Arrow expression."""
_SIMPLE: Final = re.compile(r'\((\w+) (==|!=|<=|>=|<|>) (?:(-?\d+)|"([^"\\]*)")\)')


def columns_of(where: pc.Expression, schema: Schema) -> list[str]:
    """The columns that an expression needs to see, in the order of the schema.

    It is refused at the call, and not when the first block is read. Arrow tells by its text alone
    of what it is made: more columns may be found there than are meant, none by their place.

    Raises:
        SchemaError: it does not fit the columns.
    """
    text, failed = str(where), None
    some = [name for name in schema.names if name in text]
    for names in ([] if "FieldPath(" in text else [some]) + [schema.names]:
        try:
            row = [pa.nulls(1, schema.columns[name].type) for name in names]
            pa.record_batch(row, names=names).filter(where)
            return list(names)
        except (pa.ArrowException, TypeError, ValueError) as error:
            failed = error
    raise SchemaError(f"the expression {where} does not fit the table's columns: {failed}")


def entries_of(where: pc.Expression, schema: Schema) -> list[Entry] | None:
    """The same as tuples, which pick keys and blocks: of comparisons of integers and strings with
    constants, ANDed; None for all else.

    They are taken from its text, and made into an expression again that must be equal.
    """
    entries: list[Entry] = [
        (name, op, int(number) if number else text)
        for name, op, number, text in _SIMPLE.findall(str(where))
    ]
    conditions = [_OPERATORS[op](pc.field(name), value) for name, op, value in entries]
    if not entries or not reduce(operator.and_, conditions).equals(where):
        return None
    kinds = [schema.columns[name].type for name, _, _ in entries if name in schema.columns]
    if len(kinds) < len(entries) or not all(
        pa.types.is_integer(kind) or pa.types.is_string(kind) for kind in kinds
    ):
        return None
    return [(name, "=" if op == "==" else op, value) for name, op, value in entries]
