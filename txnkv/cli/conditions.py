r"""The conditions of `--where`: a small language of rows, as in SQL.

    total > 5 and (region in (eu, us) or not note like 'paid%')

    either     := both {or both}
    both       := denied {and denied}
    denied     := not denied | ( either ) | condition
    condition  := column = value                    also != <> < <= > >= ==
                | column [not] in value, ...        also in parentheses
                | column [not] between value and value
                | column [not] like pattern         % is any text, _ any letter, \% and \_ these
                | column is [not] null

Names and values stand in quotes where they hold what ends them: a column "order id", a value
'rock and roll'. A value is of its column's type. With null a comparison is neither true nor false,
nor is its denial: the row is left out.

A scan skips row sets, blocks and keys by the conditions that all must hold, and tries an expression
on what is left. So as much as can be is told as the former:

    a = 1 and b between 2 and 5      a = 1, b >= 2, b <= 5
    a = 1 or a = 2                   a in (1, 2)
    not (a < 1 or b is null)         a >= 1, b is not null      (but for floats: NaN is neither)
    name like 'ab%'                  name >= 'ab', name < 'ac'
    a = 1 or b = 2                   an expression
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, TypeAlias

import click
import pyarrow as pa

from txnkv.cli.command_group import given
from txnkv.cli.message_lines import value_of
from txnkv.core import compute as pc
from txnkv.core import type_name
from txnkv.tables import Schema

where_option = click.option(
    "-w",
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="As 'total > 5', 'region in eu,us and not total is null', \"note like 'a%' or total "
    'between 1 and 5"; all of them must hold.',
)

_WORD: Final = re.compile(r"\s*(and|or|not|in|between|like|is|null)\b", re.IGNORECASE)
_COLUMN: Final = re.compile(r"""\s*(?:"([^"]+)"|([^\s=!<>"'(),]+))""")
_OPERATOR: Final = re.compile(r"\s*(==|=|!=|<>|<=|>=|<|>)")
_QUOTED: Final = re.compile(r"""\s*(?:'((?:[^']|'')*)'|"((?:[^"]|"")*)")(?=\s|[),]|$)""")
_ENDING: Final = re.compile(r"\s+(?:and|or)\b|[(),]", re.IGNORECASE)
_SAME: Final = {"==": "=", "<>": "!="}
_OPPOSITE: Final = {
    "=": "!=",
    "!=": "=",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
    "is null": "is not null",
    "is not null": "is null",
}
_ORDER: Final = ("<", "<=", ">", ">=")
_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class _Test:
    """A condition on one column; `values` are Python's, of the column's type."""

    column: str
    op: str
    kind: pa.DataType
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _All:
    parts: tuple[_Node, ...]


@dataclass(frozen=True)
class _Any:
    parts: tuple[_Node, ...]


@dataclass(frozen=True)
class _Not:
    part: _Node


_Node: TypeAlias = "_Test | _All | _Any | _Not"


@given()
def where(texts: Sequence[str], table: Schema) -> list[Any] | None:
    """Turn texts, all of which must hold, into the `where` of a scan; none into None.

    Raises:
        click.UsageError: one is not written as it should be, there is no such column, or a value
            does not fit its column.
    """
    return [entry for text in texts for entry in _entries(_Parser(text, table).parse())] or None


class _Parser:
    """Reads one text from the left; `_at` is how far it came."""

    def __init__(self, text: str, table: Schema) -> None:
        self._text = text
        self._table = table
        self._at = 0

    def parse(self) -> _Node:
        found = self._either()
        if self._text[self._at :].strip():
            raise self._wrong()
        return found

    def _either(self) -> _Node:
        parts = [self._both()]
        while self._word("or"):
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else _Any(tuple(parts))

    def _both(self) -> _Node:
        parts = [self._denied()]
        while self._word("and"):
            parts.append(self._denied())
        return parts[0] if len(parts) == 1 else _All(tuple(parts))

    def _denied(self) -> _Node:
        if self._word("not"):
            return _Not(self._denied())
        if self._sign("("):
            found = self._either()
            if not self._sign(")"):
                raise self._wrong("a ) is missing")
            return found
        return self._condition()

    def _condition(self) -> _Node:
        match = self._take(_COLUMN)
        if match is None:
            raise self._wrong()
        name = match[1] or match[2]
        self._table.position(name)
        kind = self._table.columns[name].type
        assert isinstance(kind, pa.DataType)
        if self._word("is"):
            denied = self._word("not")
            if not self._word("null"):
                raise self._wrong()
            return _Test(name, "is not null" if denied else "is null", kind)
        denied = self._word("not")
        found = self._test(name, kind)
        return _Not(found) if denied else found

    def _test(self, name: str, kind: pa.DataType) -> _Node:
        if self._word("in"):
            return _Test(name, "in", kind, tuple(self._list(name, kind)))
        if self._word("between"):
            low = self._value(name, kind)
            if not self._word("and"):
                raise self._wrong("between takes two values, as 'total between 1 and 5'")
            high = self._value(name, kind)
            return _All((_Test(name, ">=", kind, (low,)), _Test(name, "<=", kind, (high,))))
        if self._word("like"):
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise ValueError(f"--where: like is for text, and column {name!r} is {kind}")
            return _like(name, kind, self._value(name, kind))
        match = self._take(_OPERATOR)
        if match is None:
            raise self._wrong()
        return _Test(name, _SAME.get(match[1], match[1]), kind, (self._value(name, kind),))

    def _list(self, name: str, kind: pa.DataType) -> list[Any]:
        closed = self._sign("(")
        values = [self._value(name, kind, ",")]
        while self._sign(","):
            values.append(self._value(name, kind, ","))
        if closed and not self._sign(")"):
            raise self._wrong("a ) is missing")
        return values

    def _value(self, name: str, kind: pa.DataType, end: str = "") -> Any:
        """Read a value: in quotes, or up to `and`, `or`, a bracket that was open before it, `end`
        or the end.
        """
        quoted = self._take(_QUOTED)
        if quoted is not None:
            one, two = quoted.groups()
            text = two.replace('""', '"') if one is None else one.replace("''", "'")
            return constant(name, text, kind)
        depth, start = 0, self._at
        for match in _ENDING.finditer(self._text, start):
            sign = match[0]
            if sign == "," and end != ",":
                continue
            if depth == 0 and sign != "(":
                self._at = match.start()
                break
            depth += (sign == "(") - (sign == ")")
        else:
            self._at = len(self._text)
        text = self._text[start : self._at].strip()
        if not text:
            raise self._wrong("a value is missing")
        if text.lower() == "null":
            raise self._wrong(f"nothing compares with null: write '{name} is null', or \"'null'\"")
        return constant(name, text, kind)

    def _word(self, word: str) -> bool:
        match = _WORD.match(self._text, self._at)
        if match is None or match[1].lower() != word:
            return False
        self._at = match.end()
        return True

    def _sign(self, sign: str) -> bool:
        rest = self._text[self._at :].lstrip()
        if not rest.startswith(sign):
            return False
        self._at = len(self._text) - len(rest) + 1
        return True

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _wrong(self, why: str = "") -> ValueError:
        rest = self._text[self._at :].strip()
        near = f" (at {rest!r})" if rest and self._at else ""
        return ValueError(
            f"--where: {self._text!r} is no condition{near}; "
            + (why or "write column operator value, as 'total > 5', 'region in eu,us', ")
            + ("" if why else "'total is null', joined by and, or, not and brackets")
        )


def constant(name: str, text: str, kind: pa.DataType, option: str = "--where") -> Any:
    """The value of a column's type that a text stands for.

    Raises:
        ValueError: it stands for none.
    """
    try:
        return value_of(text, kind)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        hint = ""
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            hint = " (give a time zone, as 2026-01-31T12:00Z)"
        elif pa.types.is_binary(kind):
            hint = " (give base64)"
        raise ValueError(
            f"{option}: column {name!r} is {type_name(kind)}, and {text!r} is none{hint}"
        ) from error


def _like(name: str, kind: pa.DataType, pattern: str) -> _Node:
    """A pattern: what stands before its first wildcard is a range of texts."""
    start = re.match(r"(?:[^%_\\]|\\.)*", pattern, re.DOTALL)
    assert start is not None
    prefix, rest = re.sub(r"\\(.)", r"\1", start[0], flags=re.DOTALL), pattern[start.end() :]
    if not rest:
        return _Test(name, "=", kind, (prefix,))
    parts = [] if rest == "%" and prefix else [_Test(name, "like", kind, (pattern,))]
    if prefix:
        parts.append(_Test(name, ">=", kind, (prefix,)))
        after = _after(prefix)
        if after is not None:
            parts.append(_Test(name, "<", kind, (after,)))
    return parts[0] if len(parts) == 1 else _All(tuple(parts))


def _after(prefix: str) -> str | None:
    """The least text above all that begin with the prefix; None when there is none."""
    for end in range(len(prefix), 0, -1):
        code = ord(prefix[end - 1]) + 1
        if code <= 0x10FFFF:
            # Surrogates stand for no letter.
            return prefix[: end - 1] + chr(0xE000 if 0xD800 <= code < 0xE000 else code)
    return None


# -- what a scan takes -----------------------------------------------------------------


def _entries(node: _Node) -> list[Any]:
    """Conditions and expressions, all of which must hold."""
    if isinstance(node, _Not):
        denied = _denial(node.part)
        return [_expression(node)] if denied is None else _entries(denied)
    if isinstance(node, _All):
        return [entry for part in node.parts for entry in _entries(part)]
    if isinstance(node, _Any):
        return [_one_of(node) or _expression(node)]
    if node.op == "like":
        return [_expression(node)]
    if node.op == "in":
        return [(node.column, "in", list(node.values))]
    return [(node.column, node.op, *node.values)]


def _one_of(node: _Any) -> tuple[str, str, list[Any]] | None:
    """`a = 1 or a in (2, 3)` as a list of values."""
    tests = [part for part in node.parts if isinstance(part, _Test) and part.op in ("=", "in")]
    if len(tests) < len(node.parts) or len({test.column for test in tests}) > 1:
        return None
    # With NaN `=` is never true, and `in` is.
    if any(value != value for test in tests for value in test.values):
        return None
    return tests[0].column, "in", [value for test in tests for value in test.values]


def _denial(node: _Node) -> _Node | None:
    """The denial of a part, told without `not`; None when it cannot be."""
    if isinstance(node, _Not):
        return node.part
    if isinstance(node, _All):
        return _Any(tuple(_Not(part) for part in node.parts))
    if isinstance(node, _Any):
        return _All(tuple(_Not(part) for part in node.parts))
    opposite = _OPPOSITE.get(node.op)
    if opposite is None or (node.op in _ORDER and pa.types.is_floating(node.kind)):
        return None
    return _Test(node.column, opposite, node.kind, node.values)


def _expression(node: _Node) -> pc.Expression:
    if isinstance(node, _All):
        return reduce(operator.and_, map(_expression, node.parts))
    if isinstance(node, _Any):
        return reduce(operator.or_, map(_expression, node.parts))
    if isinstance(node, _Not):
        denied = _denial(node.part)
        if denied is not None:
            return _expression(denied)
        assert isinstance(node.part, _Test)
        # In Arrow null is in no list, and so would be outside of each.
        return ~_expression(node.part) & pc.field(node.part.column).is_valid()
    column = pc.field(node.column)
    if node.op == "is null":
        return column.is_null()
    if node.op == "is not null":
        return column.is_valid()
    if node.op == "in":
        return column.isin(pa.array(node.values, node.kind))
    if node.op == "like":
        return pc.match_like(column, node.values[0])
    return _COMPARE[node.op](column, pa.scalar(node.values[0], node.kind))
