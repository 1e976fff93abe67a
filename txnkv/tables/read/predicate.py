"""Predicates of a scan: checked, turned into key ranges, tried on zone maps, then on rows.

A predicate list is ANDed. For a primary key (a, b, c) the list `a = 1, b >= 5` becomes the
range of encoded keys [1|5, successor(1)), which picks blocks by the sparse index and rows
by binary search; every other predicate skips blocks by their zone maps (min, max, null
count) and is then applied to whole columns by Arrow.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.errors import SchemaError
from txnkv.storage import CachedProperty
from txnkv.tables.read.expressions import columns_of, conditions
from txnkv.tables.schema import Schema, column_array
from txnkv.tables.table_index import TableIndex

Said: TypeAlias = tuple[tuple[str, str], ...]
"""Columns and operators."""

Where: TypeAlias = Any
"""A list of (column, op, value) and pyarrow.compute expressions, one expression, or None."""

_COMPARE: Final = {
    "=": ("equal", operator.eq),
    "!=": ("not_equal", operator.ne),
    "<": ("less", operator.lt),
    "<=": ("less_equal", operator.le),
    ">": ("greater", operator.gt),
    ">=": ("greater_equal", operator.ge),
}
"""Operators as functions of Arrow, and of Python."""
_ORDER: Final = ("<", "<=", ">", ">=")
_OF_NULLS: Final = ("is null", "is not null")
OPERATORS: Final = (*_COMPARE, "in", *_OF_NULLS)
_MOST_VALUES: Final = 64
"""Values of "in", of which each has a range of keys of its own."""
_ENTRIES: Final = (tuple, list)
_MOST_SHAPES: Final = 256
"""Kept by a schema."""


@dataclass  # frozen ones are made in twice the time, a part of that of a short scan
class Predicate:
    """One condition on a column. Not to be changed.

    Attributes:
        type: of the column.
        given: the constants, one for a comparison, any number for "in", none for the null tests: as
            an Arrow array, or values that fit the type.
    """

    column: str
    op: str
    type: pa.DataType
    given: pa.Array | tuple[Any, ...]

    @CachedProperty
    def values(self) -> pa.Array:
        """The constants as an Arrow array of the column's type."""
        given = self.given
        return pa.array(given, self.type) if isinstance(given, tuple) else given

    @property
    def constants(self) -> tuple[Any, ...]:
        """The constants as values of Python."""
        given = self.given
        return given if isinstance(given, tuple) else self._listed

    @CachedProperty
    def _listed(self) -> tuple[Any, ...]:
        return tuple(self.values.to_pylist())

    @property
    def in_key(self) -> Any:
        """The constant as a key takes it: of a time that Python has not the number."""
        try:
            return self.constants[0]
        except (OverflowError, ValueError):
            return self.values[0].cast(core.number_type(self.type)).as_py()

    @CachedProperty
    def keys(self) -> tuple[bytes, ...] | None:
        """The constants key-encoded, for comparison with zone maps; None for lists."""
        if not core.may_be_key(self.type):
            return None
        encoded = core.key_codec(self.type).encode([self.values])
        return tuple(encoded.key(i) for i in range(encoded.n))

    def mask(self, column: pa.Array) -> pa.Array:
        """Which rows satisfy it; null where that is unknown."""
        if self.op == "is null":
            return pc.is_null(column)
        if self.op == "is not null":
            return pc.is_valid(column)
        column, values = core.comparable(column), core.comparable(self.values)
        if self.op == "in":
            return pc.is_in(one_zero(column), value_set=one_zero(values), skip_nulls=True)
        return getattr(pc, _COMPARE[self.op][0])(column, values[0])

    def among(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of some rows that satisfy it, of a type whose values Python compares as Arrow."""
        name, op, constants = self.column, self.op, self.constants
        if op in _OF_NULLS:
            return [row for row in rows if (row[name] is None) == (op == "is null")]
        if op == "in":
            several = frozenset(constants)
            return [row for row in rows if row[name] in several]
        compare, constant = _COMPARE[op][1], constants[0]
        return [
            row for row in rows if (value := row[name]) is not None and compare(value, constant)
        ]

    def may_hold(self, zone: core.Zone, rows: int) -> bool:
        """False when no row of a block with this zone map satisfies it."""
        if self.op == "is null":
            return zone.null_count > 0
        if zone.null_count == rows:
            return False
        if self.op == "is not null":
            return True
        if zone.min is None or zone.max is None or self.keys is None:
            return True
        if self.op == "!=" and _is_nan(self):
            return True  # NaN is not even NaN
        return any(_may_compare(self.op, key, zone) for key in self.keys)


def one_zero(column: pa.Array) -> pa.Array:
    """The same without -0.0, which equals 0.0, is not in [0.0] for Arrow, and in no key."""
    if pa.types.is_floating(column.type):
        return pc.add(column, pa.scalar(0, column.type))
    return column


def _may_compare(op: str, key: bytes, zone: core.Zone) -> bool:
    """Bounds may be cut short: a cut minimum is still at or below the true one, and the true
    maximum is below the successor of a cut one.
    """
    assert zone.min is not None
    assert zone.max is not None
    below = key < zone.min
    above = key > zone.max and (zone.exact or not key.startswith(zone.max))
    if op in ("=", "in"):
        return not (below or above)
    if op == "!=":
        return not (zone.exact and zone.min == zone.max == key)
    if op == "<":
        return zone.min < key
    if op == "<=":
        return not below
    if op == ">":
        return zone.max > key if zone.exact else not above
    return not above


class KeyRange(NamedTuple):
    """low <= encoded key < high; None is unbounded."""

    low: bytes | None = None
    high: bytes | None = None

    @property
    def empty(self) -> bool:
        return self.low is not None and self.high is not None and self.low >= self.high

    def within(self, other: KeyRange) -> KeyRange:
        """The keys that are in both."""
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        return KeyRange(max(lows, default=None), min(highs, default=None))


class Shape(NamedTuple):
    """All that the columns and operators of predicates tell, whatever the constants; a schema keeps
    those that came up.

    Attributes:
        kinds: types of the predicates' columns.
        columns: that it needs to see, in the order of the schema.
        first: so many predicates, the first ones, want one value each of the first columns of the
            key, and no other wants more of it.
        is_key_range: all rows in the key range satisfy it, so that no row need be looked at.
        is_of_values: `among` knows, of values that Python compares as Arrow does.
        several: there is an "in".
        floating: a constant may be NaN, of which all is otherwise.
        narrow: how narrow the ranges of some keys are (`narrowness`), where none is floating.
        equal: each column is compared by "=", once, and none is floating.
        constant: the columns that have one value in all rows that satisfy it.
    """

    kinds: tuple[pa.DataType, ...]
    columns: tuple[str, ...]
    first: int
    is_key_range: bool
    is_of_values: bool
    several: bool
    floating: bool
    narrow: dict[tuple[str, ...], int]
    equal: bool = False
    constant: frozenset[str] = frozenset()

    @classmethod
    def of(cls, schema: Schema, said: Said, seen: Iterable[str], *, expression: bool) -> Shape:
        """The shape of some columns and operators; `seen`: others, that an expression needs."""
        wanted = {*seen, *(name for name, _ in said)}
        columns = tuple(name for name in schema.names if name in wanted)  # in order: by place, too
        kinds = tuple(schema.columns[name].type for name, _ in said)
        of_values = not expression and not any(
            (pa.types.is_floating(kind) and op == "in")  # which finds NaN
            or kind == core.JSON
            or getattr(kind, "tz", None) not in (None, "UTC")  # Python compares what clocks show
            for kind, (_, op) in zip(kinds, said, strict=True)
        )
        floating = any(map(pa.types.is_floating, kinds))
        return cls(
            kinds,
            columns,
            0 if expression else _first(said, schema.primary_key),
            not expression and _is_key_range(said, schema),
            of_values,
            any(op == "in" for _, op in said),
            floating,
            {},
            len(said) == len(wanted) and not floating and all(op == "=" for _, op in said),
            frozenset(
                name
                for kind, (name, op) in zip(kinds, said, strict=True)
                if op == "=" and not pa.types.is_floating(kind)
            ),
        )


_EVERYTHING: Final = Shape((), (), 0, True, True, False, False, {})


@dataclass
class Filter:
    """The conditions of a scan on a row. Not to be changed.

    Attributes:
        predicates: ANDed.
        expression: an Arrow expression, applied after them.
        shape: what is known of them without their constants.
        first: values of the first columns of the key, known at sight, where it asks for no more of
            the key.
    """

    predicates: tuple[Predicate, ...] = ()
    expression: pc.Expression | None = None
    shape: Shape = _EVERYTHING
    first: tuple[Any, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it needs to see."""
        return self.shape.columns

    def key_range(self, schema: Schema, codec: core.KeyCodec) -> KeyRange:
        """The range of encoded keys outside of which nothing satisfies it."""
        return key_range(self.predicates, schema.primary_key, codec)

    def key_ranges(self, schema: Schema, codec: core.KeyCodec) -> list[KeyRange]:
        """The same in pieces, ascending: one for each of a few values."""
        choices = self.choices(schema.primary_key)
        ranges = [key_range(one, schema.primary_key, codec) for one in choices]
        return ranges if len(ranges) == 1 else sorted(ranges, key=lambda each: each.low or b"")

    def index_ranges(self, index: TableIndex) -> tuple[int, list[KeyRange]] | None:
        """The ranges of an index's keys outside of which nothing satisfies it, and how narrow they
        are (`narrowness`); None where the index lacks rows that may, or does not help.
        """
        choices = self.choices(index.key)
        spread = choices[0] is not self.predicates
        narrow = narrowness(choices[0], index.key) if spread else self.narrowness(index.key)
        if not narrow:
            return None
        if self.admits_null(index):
            return None
        codec = index.tablet.codec
        return narrow, [key_range(one, index.key, codec) for one in choices]

    def admits_null(self, index: TableIndex) -> bool:
        """Tell whether a row without an entry in an index may satisfy it."""
        refusing = {p.column for p in self.predicates if p.op != "is null"}
        return not refusing.issuperset(index.nullable)

    def choices(self, key: Sequence[str]) -> list[tuple[Predicate, ...]]:
        """Its predicates; or several lists, one of which holds: see `_spread`."""
        return _spread(self.predicates, key) if self.shape.several else [self.predicates]

    def narrowness(self, key: tuple[str, ...]) -> int:
        """See the function of this name."""
        shape = self.shape
        if shape.floating:
            return narrowness(self.predicates, key)
        known = shape.narrow.get(key)
        if known is None:
            known = shape.narrow[key] = narrowness(self.predicates, key)
        return known

    def may_hold(self, zones: dict[int, core.Zone], ids: dict[str, int], rows: int) -> bool:
        return all(
            predicate.may_hold(zones[ids[predicate.column]], rows)
            for predicate in self.predicates
            if ids[predicate.column] in zones
        )

    @property
    def is_empty(self) -> bool:
        """All rows satisfy it."""
        return not self.predicates and self.expression is None

    def mask(self, columns: dict[str, pa.Array], n: int) -> pa.Array | None:
        """Which of n rows satisfy it, null where that is unknown; None for all.

        Raises:
            SchemaError: its expression cannot be told of a row.
        """
        found: pa.Array | None = None
        for predicate in self.predicates:
            mask = predicate.mask(columns[predicate.column])
            found = mask if found is None else pc.and_(found, mask)
        if self.expression is None:
            return found
        seen = [columns[name] for name in self.columns]
        number = "".join(self.columns) + "#"  # the name of none of them
        rows = [*seen, core.Rows.range(n).to_arrow()]
        batch = pa.record_batch(rows, names=[*self.columns, number])
        if found is not None:  # it may fail for others
            batch = batch.filter(found)
        try:
            rows_left = batch.filter(self.expression).column(number)
        except pa.ArrowInvalid as error:  # of a value, as a division by zero
            failed = f"the expression {self.expression} fails for a row: {error}"
            raise SchemaError(failed) from None
        return core.Bitmap.of(n, rows_left).to_arrow()


def parse(where: Where, schema: Schema) -> Filter:
    """Check a `where` against the schema.

    Raises:
        SchemaError: a column or operator is unknown, or a constant does not fit.
        TypeError: it is neither a list of tuples nor an Arrow expression.
    """
    if where is None:
        return Filter()
    if where.__class__ is list and (known := _known(where, schema)) is not None:
        return known
    if isinstance(where, pc.Expression):
        where = [where]
    if not isinstance(where, list) and (
        isinstance(where, (str, bytes)) or not isinstance(where, Sequence)
    ):
        raise TypeError(
            "where is a list of (column, op, value), as [('total', '>', 5)], "
            "or a pyarrow.compute expression"
        )
    expression: pc.Expression | None = None
    predicates, columns = [], []
    for entry in where:
        if isinstance(entry, pc.Expression):
            if (same := _as_predicates(entry, schema)) is not None:
                predicates += same
                continue
            columns += columns_of(entry, schema)
            expression = entry if expression is None else expression & entry
        else:
            predicates.append(_predicate(entry, schema))
    said = tuple((p.column, p.op) for p in predicates)
    shape = Shape.of(schema, said, columns, expression=expression is not None)
    if expression is None:
        if len(schema.shapes) >= _MOST_SHAPES:
            schema.shapes.clear()
        schema.shapes[said] = shape
    return _filter(predicates, expression, shape)


def _known(where: list[Any], schema: Schema) -> Filter | None:
    """The filter of comparisons whose constants are seen to fit, of a shape that came up before;
    None for all else.
    """
    try:
        said = [(name, op) for name, op, _ in where]
        shape: Shape | None = schema.shapes.get(tuple(said))
    except (TypeError, ValueError):  # entries of another form, which are told about elsewhere
        return None
    if shape is None:
        return None
    predicates = []
    for entry, kind in zip(where, shape.kinds, strict=True):
        name, op, value = entry
        given = _at_sight(kind, op, value)
        if given is None or entry.__class__ not in _ENTRIES:
            return None
        predicates.append(Predicate(name, op, kind, given))
    return _filter(predicates, None, shape)


def _filter(
    predicates: Sequence[Predicate], expression: pc.Expression | None, shape: Shape
) -> Filter:
    first = []
    for p in predicates[: shape.first]:
        if p.given.__class__ is not tuple:  # of a type whose values are not compared as bytes
            return Filter(tuple(predicates), expression, shape)
        first.append(p.given[0])
    return Filter(tuple(predicates), expression, shape, tuple(first))


def _first(said: Said, key: Sequence[str]) -> int:
    """See `Shape`."""
    found = 0
    for each, name in zip(said, key, strict=False):
        if each != (name, "="):
            break
        found += 1
    return 0 if any(name in key for name, _ in said[found:]) else found


def _is_key_range(said: Said, schema: Schema) -> bool:
    """See `Shape`."""
    left = len(said)
    for name in schema.primary_key:
        mine = [op for column, op in said if column == name]
        left -= len(mine)
        if pa.types.is_floating(schema.columns[name].type) and mine:
            return False  # NaN has a place among keys, and satisfies nothing
        if mine != ["="]:
            return left == 0 and all(op in _ORDER for op in mine)
    return left == 0


def _as_predicates(where: pc.Expression, schema: Schema) -> list[Predicate] | None:
    try:
        entries = conditions(where, schema)
        return None if entries is None else [_predicate(entry, schema) for entry in entries]
    except SchemaError:  # a constant that the column cannot hold, though they can be compared
        return None


def _predicate(entry: Any, schema: Schema) -> Predicate:
    if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
        raise TypeError(f"a predicate is (column, op, value) or (column, 'is null'), not {entry!r}")
    name, op = entry[0], entry[1]
    schema.position(name)
    kind = schema.columns[name].type
    if op not in OPERATORS:
        hint = ": write '='" if op == "==" else ""
        raise SchemaError(f"{op!r} is no operator{hint}; there are {', '.join(OPERATORS)}")
    if len(entry) == 3 and (at_sight := _at_sight(kind, op, entry[2])) is not None:
        return Predicate(name, op, kind, at_sight)
    if (op in _OF_NULLS) != (len(entry) == 2):
        raise SchemaError(f"{entry!r}: {op!r} takes {'no value' if len(entry) == 3 else 'a value'}")
    values: pa.Array | tuple[Any, ...] = ()
    if len(entry) == 3:
        given = _several(entry) if op == "in" else [entry[2]]
        values = column_array(name, kind, [value for value in given if value is not None])
        if values.null_count:  # Arrow's
            values = values.drop_null()
        if op != "in" and not len(values):
            raise SchemaError(f"{entry!r}: compare with None by 'is null' or 'is not null'")
    if not core.may_be_key(kind) and op not in _OF_NULLS:
        raise SchemaError(
            f"column {name!r} is {core.type_name(kind)}: only 'is null' and 'is not null' work on "
            "it"
        )
    return Predicate(name, op, kind, values)


def _several(entry: Sequence[Any]) -> list[Any]:
    values = entry[2]
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{tuple(entry)!r}: 'in' takes a list of values, not {values!r}")
    return list(values)


_BOUNDS: Final = {
    kind.id: (-(1 << (kind.bit_width - 1)), 1 << (kind.bit_width - 1))
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())
}


def _at_sight(kind: pa.DataType, op: str, value: Any) -> tuple[Any, ...] | None:
    """The constants of a comparison, where they are seen to fit; None: they are to be tried."""
    if op in _COMPARE:
        return (value,) if _fits(kind, value) else None
    if op == "in" and value.__class__ in (list, tuple) and 0 < len(value) <= _MOST_VALUES:
        return tuple(value) if all(_fits(kind, each) for each in value) else None
    return None


def _fits(kind: pa.DataType, value: Any) -> bool:
    """Return True where a constant is seen to be of a type; others are tried."""
    if value.__class__ is str:
        return bool(kind.id == pa.lib.Type_STRING) and value.isascii()
    if value.__class__ is float and value == value:
        return bool(kind.id == pa.lib.Type_DOUBLE)
    if value.__class__ is datetime and kind.id == pa.lib.Type_TIMESTAMP:
        return kind.tz is value.tzinfo is None or (kind.tz == "UTC" and value.tzinfo is UTC)
    low, high = _BOUNDS.get(kind.id, (0, 0))
    return value.__class__ is int and low <= value < high


_NOTHING: Final = KeyRange(b"", b"")


def narrowness(predicates: Sequence[Predicate], key: Sequence[str]) -> int:
    """Two for each of the first columns of a key with one value, and one for a range behind."""
    narrow = 0
    for name in key:
        ops = {p.op for p in predicates if p.column == name and not _is_nan(p)}
        if "=" not in ops:
            return narrow + (not ops.isdisjoint(_ORDER))
        narrow += 2
    return narrow


def _spread(predicates: tuple[Predicate, ...], key: Sequence[str]) -> list[tuple[Predicate, ...]]:
    """The same as several lists, one of which holds: of "in" for a first column each value."""
    equal = {p.column for p in predicates if p.op == "="}
    name = next((name for name in key if name not in equal), None)
    for p in predicates:
        if p.column != name or p.op != "in" or _is_nan(p):  # NaN narrows nothing
            continue
        if p.given.__class__ is tuple:
            if p.given:
                alone = dict.fromkeys(p.given)
                return [(*predicates, Predicate(name, "=", p.type, (one,))) for one in alone]
        elif p.keys and len(p.keys) <= _MOST_VALUES:
            places = {encoded: i for i, encoded in enumerate(p.keys)}.values()
            return [
                (*predicates, Predicate(name, "=", p.type, p.values.slice(i, 1))) for i in places
            ]
    return [predicates]


def key_range(
    predicates: Sequence[Predicate], key: Sequence[str], codec: core.KeyCodec
) -> KeyRange:
    equal = equal_to(predicates, key)
    if len(equal) == len(key):
        whole = codec.encode_prefix(equal)
        return KeyRange(whole, whole + b"\0")
    low = codec.encode_prefix(equal) if equal else None
    high = core.successor(low) if low is not None else None
    for p in predicates:
        if p.column != key[len(equal)] or p.op not in _ORDER or _is_nan(p):
            continue
        bound = codec.encode_prefix([*equal, p.in_key])
        after = past(bound, codec, len(equal) + 1)
        if p.op == ">=":
            low = bound if low is None else max(low, bound)
        elif p.op == ">":
            if after is None:
                return _NOTHING
            low = after if low is None else max(low, after)
        elif p.op == "<":
            high = bound if high is None else min(high, bound)
        elif after is not None:
            high = after if high is None else min(high, after)
    return KeyRange(low, high)


def equal_to(predicates: Sequence[Predicate], key: Sequence[str]) -> list[Any]:
    """The values of the first columns of a key that have one each."""
    values: list[Any] = []
    for name in key:
        mine = (p for p in predicates if p.column == name and p.op == "=" and not _is_nan(p))
        if (fixed := next(mine, None)) is None:
            break
        values.append(fixed.in_key)
    return values


def past(bound: bytes, codec: core.KeyCodec, columns: int) -> bytes | None:
    """The least key above every key that begins with these columns' values."""
    if columns == len(codec.types):
        return bound + b"\0"
    return core.successor(bound)


def _is_nan(predicate: Predicate) -> bool:
    """Return True when a constant of it is NaN."""
    if isinstance(predicate.given, tuple):
        return False  # seen to be of another type
    return pa.types.is_floating(predicate.type) and any(map(math.isnan, predicate.constants))
