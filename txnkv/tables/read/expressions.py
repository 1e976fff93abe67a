"""Arrow's expressions as conditions: which columns they need to see, and what they are as tuples.

A scan makes much of conditions: it reads the keys from 0 to 100 alone, or skips blocks by their
least and greatest values. But of an expression Arrow tells nothing except its text. So the text is
read, conditions are made of it, and of these an expression again. Where both are equal, the scan
gets the conditions; where not, or where the text is of another kind, it tries the expression on
each row. A text that was read wrongly makes another expression, never another answer.

    text         ((id < 100) and is_valid(total))
    conditions   id < 100, total is not null
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.errors import SchemaError
from txnkv.tables.schema import Schema

_COMPARED: Final = re.compile(r"(.+?) (==|!=|<=|>=|<|>) (.+)", re.DOTALL)
_VALID: Final = re.compile(r"is_valid\((.+)\)", re.DOTALL)
_LISTED: Final = re.compile(
    r"if_else\(is_valid\((.+)\), is_in\(\1, \{value_set=[^\[]*:\[(.*)\], "
    r"null_matching_behavior=MATCH\}\), null\[bool\]\)",
    re.DOTALL,
)
_MAKE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


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


def conditions(where: pc.Expression, schema: Schema) -> list[tuple[Any, ...]] | None:
    """Return the conditions that are equal to an expression; None when it is no list of them."""
    for typed in (True, False):
        found: list[tuple[Any, ...]] = []
        with suppress(ValueError, KeyError, OverflowError, pa.ArrowException):
            if _parse(str(where), schema, found, typed).equals(where):
                return found
    return None


def _parse(text: str, table: Schema, found: list[tuple[Any, ...]], typed: bool) -> pc.Expression:
    """Note the conditions of a text, and return the expression that they are.

    Args:
        typed: constants have the types of their columns; else those of integers and strings are as
            Python has them.

    Raises:
        ValueError, KeyError, OverflowError, ArrowException: the text is none of those that are
            known.
    """
    text = _inner(text)
    parts = _split(text)
    if parts is not None:
        return _parse(parts[0], table, found, typed) & _parse(parts[1], table, found, typed)
    valid, listed = _VALID.fullmatch(text), _LISTED.fullmatch(text)
    if valid is not None:
        found.append((valid[1], "is not null"))
        return pc.field(valid[1]).is_valid()
    if listed is not None:
        name = listed[1]
        kind = table.columns[name].type
        values = pa.array([_plain(each.strip()) for each in listed[2].split(",\n")]).cast(kind)
        found.append((name, "in", values.to_pylist()))
        column = pc.field(name)
        never = pa.scalar(None, pa.bool_())
        return pc.if_else(pc.is_valid(column), pc.is_in(column, value_set=values), never)
    compared = _COMPARED.fullmatch(text)
    if compared is None:
        raise ValueError(text)
    name, op, value = compared.groups()
    kind = table.columns[name].type
    scalar = pa.scalar(_plain(value)).cast(kind)
    found.append((name, "=" if op == "==" else op, scalar.as_py()))
    if not typed and (pa.types.is_integer(kind) or pa.types.is_string(kind)):
        scalar = pa.scalar(scalar.as_py())
    return _MAKE[op](pc.field(name), scalar)


def _plain(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _inner(text: str) -> str:
    """Leave out brackets around the whole."""
    while text.startswith("(") and _closing(text) == len(text) - 1:
        text = text[1:-1]
    return text


def _closing(text: str) -> int:
    """Return the place of the bracket that ends what the first one opens."""
    return next((at for at, depth in _depths(text) if depth == 0 and text[at] == ")"), -1)


def _split(text: str) -> tuple[str, str] | None:
    """The two sides of `(...) and (...)`; None when it is something else."""
    for at, depth in _depths(text):
        if depth == 0 and text.startswith(" and ", at):
            return text[:at], text[at + 5 :]
    return None


def _depths(text: str) -> Any:
    """Yield each place outside of quotes, and how many brackets are open behind it."""
    depth, at = 0, 0
    while at < len(text):
        if text[at] == '"':
            at += 1
            while at < len(text) and text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        else:
            depth += (text[at] in "([{") - (text[at] in ")]}")
            yield at, depth
        at += 1
