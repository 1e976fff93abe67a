"""Rows on their way in: placed in tablets, in key order, without those that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from txnkv import core
from txnkv.errors import AlreadyPresentError, NotSupportedError, RowError, RowErrors
from txnkv.tables.manifest import RowSetInfo
from txnkv.tables.partitioning import Partitioning
from txnkv.tables.row_set_writer import SortedRows
from txnkv.tables.tablet import Tablet

OPERATIONS: Final = ("insert", "insert_ignore")
_LATER: Final = ("upsert", "update", "update_ignore", "delete", "delete_ignore")


def require_operation(op: str) -> None:
    """Refuse an operation that this version does not have.

    Raises:
        NotSupportedError: it comes in a later version.
        ValueError: there is no such operation.
    """
    if op in _LATER:
        raise NotSupportedError(
            f"{op} is not there yet: this version has {' and '.join(OPERATIONS)}"
        )
    if op not in OPERATIONS:
        raise ValueError(f"{op!r} is no operation; there are {', '.join(OPERATIONS + _LATER)}")


@dataclass
class Outcome:
    """What became of some rows."""

    inserted: int = 0
    ignored: int = 0
    errors: list[RowError] = field(default_factory=list)
    refused: int = 0

    def add(self, other: Outcome) -> None:
        self.inserted += other.inserted
        self.ignored += other.ignored
        self.errors.extend(other.errors[: RowErrors.KEPT - len(self.errors)])
        self.refused += other.refused


Present = tuple[RowSetInfo | None, pa.UInt32Array]
"""A row set, None for the chunk in flight, and the positions of the keys that it has."""


@dataclass(frozen=True)
class Incoming:
    """Rows of one tablet, in key order and without doubles among them."""

    tablet: Tablet
    rows: SortedRows


def arrange(
    tablets: Sequence[Tablet],
    partitioning: Partitioning,
    batch: pa.RecordBatch,
    op: str,
    outcome: Outcome,
) -> list[Incoming]:
    """Place, encode and sort the rows of a batch; a key's first row stands, others are refused.

    Args:
        tablets: of the table, by number.
        partitioning: of the table.
        batch: in the table's schema.
        op: "insert" or "insert_ignore".
        outcome: takes what is refused.
    """
    key = [batch.column(name) for name in tablets[0].schema.primary_key]
    keys = tablets[0].codec.encode(key)
    prepared = []
    for tablet, rows in zip(tablets, partitioning.place(batch), strict=True):
        if rows is not None and rows.n == 0:
            continue
        order = core.sort_keys(keys, rows)
        if order is None:
            ordered = keys if rows is None else keys.gather(rows)
            prepared.append(Incoming(tablet, SortedRows(ordered, batch, rows)))
            continue
        ordered = keys.gather(order)
        doubles = core.mark_duplicates(ordered, None)
        if doubles.count:
            again = doubles.positions()
            _refuse(
                outcome,
                op,
                tablet,
                [ordered.key(i.as_py()) for i in _first(again.to_arrow())],
                again.n,
                "an earlier row of the same data has this key",
            )
            once = doubles.zeros()
            ordered = ordered.gather(once)
            order = core.Rows.from_arrow(order.to_arrow().take(once.to_arrow()))
        prepared.append(Incoming(tablet, SortedRows(ordered, batch, order)))
    return prepared


def leave_out(
    part: Incoming,
    present: Sequence[Present],
    op: str,
    outcome: Outcome,
) -> Incoming:
    """The rows whose keys are not `present`; the others are refused or ignored."""
    rows = part.rows
    for info, positions in present:
        why = (
            "this transaction has staged the key already"
            if info is None or info.stamp is None
            else "a row with this key is in the table"
        )
        _refuse(
            outcome,
            op,
            part.tablet,
            [rows.keys.key(i.as_py()) for i in _first(positions)],
            len(positions),
            why,
        )
    gone = core.Bitmap.of(
        rows.keys.n, pc.unique(pa.concat_arrays([positions for _, positions in present]))
    )
    kept = gone.zeros()
    order = kept
    if rows.order is not None:
        order = core.Rows.from_arrow(rows.order.to_arrow().take(kept.to_arrow()))
    return replace(part, rows=SortedRows(rows.keys.gather(kept), rows.batch, order))


def _first(array: pa.Array) -> pa.Array:
    return array.slice(0, RowErrors.KEPT)


def _refuse(
    outcome: Outcome, op: str, tablet: Tablet, keys: Sequence[bytes], count: int, why: str
) -> None:
    if op == "insert_ignore":
        outcome.ignored += count
        return
    errors = [
        RowError(op, tablet.table.name, readable_key(tablet, key), AlreadyPresentError(why))
        for key in keys
    ]
    outcome.add(Outcome(errors=errors, refused=count))


def readable_key(tablet: Tablet, key: bytes) -> Any:
    """An encoded key as users write it: a scalar, or a tuple of several."""
    values = tablet.codec.decode_one(key)
    return values[0] if len(values) == 1 else values
