"""A table as a dataset of Arrow: other engines read it, and say what they need of it.

    orders = client.table("orders").dataset()
    duckdb.sql("SELECT region, sum(total) FROM orders WHERE id < 100 GROUP BY region")

DuckDB asks the dataset for a scanner of the columns `region` and `total`, with the filter
`id < 100` as an expression of Arrow; so do polars (`scan_pyarrow_dataset`) and others. A scan makes
much of comparisons: it reads the keys from 0 to 100 alone, or skips blocks by their least and
greatest values. But of an expression Arrow tells nothing except its text. So the text is read,
conditions are made of it, and of these an expression again. Where both are equal, the scan gets the
conditions; where not, or where the text is of another kind, it gets the expression, and tries it on
each row. A text that was read wrongly makes another expression, never another answer.

    text         ((id < 100) and is_valid(total))
    conditions   id < 100, total is not null
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as arrow

from txnkv.errors import NotSupportedError
from txnkv.tables import Schema

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

Read = Callable[[Sequence[str] | None, list[Any] | None], Any]
"""Gives the scan of columns, all by default, where conditions hold."""


class TableDataset(arrow.Dataset):  # type: ignore[misc]
    """A table for whoever reads datasets of Arrow; made by `Table.dataset`.

    What reads rows works: `scanner`, `to_table`, `to_batches`, `head`, `take`, `count_rows`. There
    are no fragments, and no joins of Arrow's own.
    """

    def __init__(self, table: Schema, read: Read) -> None:
        self._table = table
        self._read = read

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the table."""
        return self._table.arrow

    def scanner(
        self, columns: Any = None, filter: pc.Expression | None = None, **options: Any
    ) -> arrow.Scanner:
        """One reading of the table.

        Args:
            columns: names, or names with expressions; all by default.
            filter: rows for which it is true.
            options: of Arrow's scanner; those of files mean nothing here.

        Raises:
            SchemaError: there is no such column, or the filter does not fit the columns.
        """
        where = None if filter is None else conditions(filter, self._table) or [filter]
        plain = columns is not None and not isinstance(columns, dict) and len(columns) > 0
        scan = self._read(list(columns) if plain else None, where)
        kept = {} if plain or columns is None else {"columns": columns}
        return arrow.Scanner.from_batches(
            scan.to_batches(),
            schema=scan.schema,
            use_threads=options.get("use_threads", True),
            **kept,
        )

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse what asks for files.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError(
            "a table has no files that Arrow could take on: read it by scanner(), to_table() or "
            "to_batches()"
        )

    filter = get_fragments = join = join_asof = replace_schema = sort_by = _refuse
    _get_fragments = __reduce__ = _refuse
    partition_expression = property(_refuse)


def conditions(filter: pc.Expression, table: Schema) -> list[tuple[Any, ...]] | None:
    """Return the conditions that are equal to an expression; None when it is no list of them."""
    try:
        found: list[tuple[Any, ...]] = []
        made = _parse(str(filter), table, found)
    except (ValueError, KeyError, pa.ArrowException):
        return None
    return found if made.equals(filter) else None


def _parse(text: str, table: Schema, found: list[tuple[Any, ...]]) -> pc.Expression:
    """Note the conditions of a text, and return the expression that they are.

    Raises:
        ValueError, KeyError, ArrowException: the text is none of those that are known.
    """
    text = _inner(text)
    parts = _split(text)
    if parts is not None:
        return _parse(parts[0], table, found) & _parse(parts[1], table, found)
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
    (scalar,) = pa.array([_plain(value)]).cast(table.columns[name].type)
    found.append((name, "=" if op == "==" else op, scalar.as_py()))
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
