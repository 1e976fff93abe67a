"""An index of a table: its entries, and which rows have one.

An index is a hidden table of one tablet, whose rows are the entries. A transaction that writes a
row writes the row's entry too, as it writes any other row; so an entry is seen by who sees its row,
and snapshots, crashes, backups and compaction are no affair of an index.

    orders     id*  email      total         index by total       index by email, unique
               1    ant@x      10            total*  id*          email*   id
               2    bee@x      10            10      1            ant@x    1
               3    null       30            10      2            bee@x    2
                                             30      3
    (* is the key)

The key of a unique one leaves out the row's key, so that two rows with one value are two writers of
one entry: the transactions that write them conflict as any two that write one key. A row with a
null in an indexed column has no entry.

While an index is being built (`ready` is false) some rows have no entry yet, and these rules hold:

- Who writes a row writes its entry, whether it changed or not. So a row without one was not written
  since the index was made, and whoever fills in entries needs to look at such rows alone.
- Two rows may have one value, as long as one of them has no entry. So the entry of a unique index
  goes with a row only if it is that row's; else it is written again as it is, so that who makes it
  the row's meanwhile is a conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from txnkv import core
from txnkv.errors import AlreadyPresentError, SchemaError
from txnkv.tables.schema import IndexInfo, Schema
from txnkv.tables.tablets import Tablet

Values: TypeAlias = tuple[Any, ...]
Entry: TypeAlias = tuple[bytes, bytes | None]
"""The key of an entry, and the bytes of the rest of it; None where it goes."""

Find: TypeAlias = Callable[[Tablet, bytes], bytes | None]
"""From a key of a tablet to the bytes of the row that is there, for who writes."""


def tuple_getter(positions: Sequence[int]) -> Callable[[Values], Values]:
    """Return the function that picks values of a tuple."""
    if not positions:
        return itemgetter(slice(0))
    if list(positions) == list(range(positions[0], positions[0] + len(positions))):
        return itemgetter(slice(positions[0], positions[0] + len(positions)))
    return itemgetter(*positions)


def entry_columns(schema: Schema, columns: Sequence[str], *, unique: bool) -> tuple[str, ...]:
    """Return the key of an index: the indexed columns, and the row's key where others may have the
    same values.
    """
    rest = [] if unique else [name for name in schema.primary_key if name not in columns]
    return (*columns, *rest)


def entry_schema(schema: Schema, columns: Sequence[str], *, unique: bool) -> Schema:
    """Return the schema of the entries of an index."""
    key = entry_columns(schema, columns, unique=unique)
    rest = [name for name in schema.primary_key if name not in key]
    return Schema({name: schema.columns[name].type for name in (*key, *rest)}, primary_key=key)


def no_index(table: str, schema: Schema, columns: Sequence[str]) -> SchemaError:
    """Return the error for an index that is not there."""
    there = "; ".join(", ".join(schema.names_of(each)) for each in schema.indexes) or "none"
    return SchemaError(
        f"table {table!r} has no index by {', '.join(columns)}; there are: {there}. Make one "
        f"with client.create_index({table!r}, {list(columns)})"
    )


def find_index(schema: Schema, columns: Sequence[str]) -> IndexInfo | None:
    """Return the index of a table over these columns, in their order; None where there is none.

    Raises:
        SchemaError: there is no such column, or none is named; one is named twice; or its values
            have no order, so that it cannot be in an index.
    """
    for name in columns:
        schema.position(name)
        if not core.may_be_key(schema.columns[name].type):
            kind = core.type_name(schema.columns[name].type)
            raise SchemaError(f"column {name!r} is {kind}, whose values have no order: no index")
    if not columns or len(set(columns)) < len(columns):
        raise SchemaError(f"an index is by one or more columns, each once, not {list(columns)}")
    return next((each for each in schema.indexes if schema.names_of(each) == tuple(columns)), None)


class TableIndex:
    """An index as a schema of its table has it. Shared by threads.

    Attributes:
        columns: names of the indexed ones, as that schema has them.
        key: the columns of an entry's key, by the same names.
        rest: those of the row's key that are not in it.
        beside: the indexed ones that are not of the row's key.
        checked: two rows may not have the same values, and may try to.
        nullable: those of the indexed ones without which a row has no entry.
        positions: of the indexed columns in the schema.
        tablet: that has the entries.
        widths: bytes, in an entry, of the indexed columns without the first 0, 1, ...; None where
            they differ.
    """

    def __init__(self, schema: Schema, info: IndexInfo, tablet: Tablet) -> None:
        self.info, self.tablet, self.ready = info, tablet, info.ready
        self.columns = schema.names_of(info)
        self.key = entry_columns(schema, self.columns, unique=info.unique)
        self.rest = tuple(name for name in schema.primary_key if name not in self.key)
        self.beside = tuple(name for name in self.columns if name not in schema.primary_key)
        self.checked = bool(self.rest)
        self.nullable = [name for name in self.columns if schema.columns[name].nullable]
        self.positions = [schema.position(name) for name in self.columns]
        entry = [*self.key, *self.rest]
        self._row_key = tuple_getter([entry.index(name) for name in schema.primary_key])
        self._lone = len(schema.primary_key) == 1
        types = {name: schema.columns[name].type for name in self.key}
        types |= {name: core.number_type(types[name]) for name in self.beside}
        self._codec = core.key_codec(*types.values())
        stored = [*schema.primary_key, *schema.value_columns]
        of = [[stored.index(name) for name in names] for names in (self.columns, self.key)]
        self._indexed, self._key = map(tuple_getter, of)
        of_columns = [schema.columns[name].type for name in self.columns]
        self.widths = [
            core.key_codec(*of_columns[i:]).width or None for i in range(len(of_columns))
        ]
        self.widths.append(0)
        self._rest = tuple_getter([stored.index(name) for name in self.rest])

    def entry(self, row: Values) -> tuple[bytes, bytes] | None:
        """Return the entry of a row: key and rest; None where it has none.

        Args:
            row: the values of its key, and of the other columns behind them, with dates and times
                as numbers there.
        """
        if self.nullable and None in self._indexed(row):
            return None
        key = self._codec.encode_one(self._key(row))
        return key, self.tablet.layout.encode_one(self._rest(row))

    def row_key(self, entry: Values) -> Any:
        """Return the key of the row of an entry, as `get` takes it."""
        key = self._row_key(entry)
        return key[0] if self._lone else key

    def row_keys(self, entries: Iterable[dict[str, Any]]) -> Iterator[Any]:
        """Yield the same of several."""
        return (self.row_key(tuple(entry.values())) for entry in entries)

    def changes(self, old: Values | None, new: Values | None, find: Find) -> list[Entry]:
        """Return the entries to write for a row that changes.

        Args:
            old: the row that is there, as `entry` takes it; None for none.
            new: the row that is to be there; None for none.
            find: looks for entries.

        Raises:
            AlreadyPresentError: another row has the same values, and the index is unique.
        """
        gone = None if old is None else self.entry(old)
        come = None if new is None else self.entry(new)
        if gone == come and self.ready:
            return []
        moves = gone is None or come is None or gone[0] != come[0]
        if come is not None and self.checked and (moves or not self.ready):
            there = find(self.tablet, come[0])
            if there is not None and there != come[1]:
                raise self.taken(come[0])
        made: list[Entry] = []
        if gone is not None and moves:
            there = find(self.tablet, gone[0]) if self.checked and not self.ready else None
            made.append((gone[0], None if there == gone[1] else there))
        if come is not None:
            made.append(come)
        return made

    def taken(self, key: bytes, *, earlier: bool = False) -> AlreadyPresentError:
        """Return the error for a row with values that another row has.

        Args:
            key: of the entry.
            earlier: it is another one of the same data.
        """
        whose = "another row of the same data" if earlier else "another row"
        columns = ", ".join(self.columns)
        return AlreadyPresentError(
            f"{whose} has {columns} = {self.tablet.readable_key(key)!r}, and the index by "
            f"{columns} is unique"
        )
