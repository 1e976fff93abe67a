"""Some keys at once, looked for in all row sets of a tablet as if they were one.

Row sets whose key ranges do not overlap follow one another like the blocks of one; most row sets
of a tablet do, those of a load and those that compaction has merged. So their blocks are strung
together, and what is asked for is found and read in a call for each column, not in one for each
column and block. Row sets that overlap make a chain each.

    row set 7    blocks from  a, f
    row set 4    blocks from  m, p, t         one chain: a f m p t w
    row set 9    blocks from  w
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.tables.read.point_blocks import PointBlock, at_hand
from txnkv.tables.tablets import Pages, RowSet, RowSetInfo, Tablet, TabletState


@dataclass(frozen=True)
class Chain:
    """Blocks of row sets that do not overlap, in key order.

    Attributes:
        firsts: the first key of each.
        blocks: of which row set each is, and its number there.
        deleted: some of their rows are.
    """

    firsts: core.Keys
    blocks: Sequence[tuple[RowSet, int]]
    deleted: bool


@dataclass(frozen=True)
class Chains:
    """The settled row sets of a state: strung together, and those that cannot be, as they may
    hold several versions of a key.
    """

    state: TabletState
    chains: Sequence[Chain]
    others: Sequence[RowSetInfo]


def chains_of(tablet: Tablet, state: TabletState, pages: Pages) -> Chains:
    """The chains of a state, remembered while it stays the same."""
    known: Chains | None = tablet.chains
    if known is None or known.state is not state:
        known = tablet.chains = _made(tablet, state, pages)
    return known


def _made(tablet: Tablet, state: TabletState, pages: Pages) -> Chains:
    strung: list[list[RowSetInfo]] = []
    others = []
    for info in sorted(state.settled, key=lambda info: info.min_key):
        if info.versioned:
            others.append(info)
            continue
        chain = next((c for c in strung if c[-1].max_key < info.min_key), None)
        if chain is None:
            strung.append([info])
        else:
            chain.append(info)
    chains = []
    for infos in strung:
        row_sets = [tablet.row_set(info) for info in infos]
        numbers = [range(len(row_set.header(pages).blocks)) for row_set in row_sets]
        chains.append(
            Chain(
                tablet.keys_of([first for row_set in row_sets for first in row_set.firsts]),
                [(r, n) for r, each in zip(row_sets, numbers, strict=True) for n in each],
                any(info.deleted for info in infos),
            )
        )
    return Chains(state, chains, others)


def find_some(
    tablet: Tablet,
    chain: Chain,
    pages: Pages,
    keys: core.Keys,
    names: Sequence[str],
    snapshot: int,
) -> Iterator[tuple[pa.UInt32Array, list[pa.Array]]]:
    """Rows of some keys (ascending) in a chain, of which a snapshot sees all row sets.

    Yields:
        Positions of keys, and columns of their rows; nothing when none is there.
    """
    held: list[PointBlock | None] = [None] * len(chain.blocks)
    for number in pc.unique(core.range_partition(keys, chain.firsts)).to_pylist():
        if number:
            row_set, block = chain.blocks[number - 1]
            held[number - 1] = at_hand(tablet, row_set, pages, block)
    if not any(held):
        return
    probes = core.BlockTable([None if block is None else block.probe for block in held])
    which, rows = core.find_in_blocks(probes.column(0), chain.firsts, keys)
    there = pc.not_equal(which, pa.scalar(core.NULL_ROW, pa.uint32()))
    if chain.deleted:
        for number, (row_set, block) in enumerate(chain.blocks):
            delta = None if held[number] is None else row_set.delta(pages, block)
            if delta is not None:
                there = pc.and_(there, _alive(which, rows, number, delta, snapshot))
    positions = core.Bitmap.from_arrow(there).positions()
    if positions.n == 0:
        return
    if positions.n < keys.n:
        which, rows = which.filter(there), rows.filter(there)
        keys = keys.gather(positions)
    yield positions.to_arrow(), _columns(tablet, held, keys, names, which, rows)


def _columns(
    tablet: Tablet,
    held: Sequence[PointBlock | None],
    keys: core.Keys,
    names: Sequence[str],
    which: pa.UInt32Array,
    rows: pa.UInt32Array,
) -> list[pa.Array]:
    key = tablet.schema.primary_key
    table = core.BlockTable([None if block is None else block.columns for block in held])
    numbers = core.Rows.from_arrow(which), core.Rows.from_arrow(rows)
    columns = []
    for name in names:
        if name in key:
            columns.append(tablet.codec.decode(keys, key.index(name)))
            continue
        at = tablet.value_names.index(name)
        column = core.gather_blocks(table.column(at), tablet.layout.types[at], *numbers)
        columns.append(_filled(column, held, at, which))
    return columns


def _filled(
    column: pa.Array, held: Sequence[PointBlock | None], at: int, which: pa.UInt32Array
) -> pa.Array:
    """Defaults where a block has not the column."""
    for number, block in enumerate(held):
        if block is None or block.fill is None or block.columns.blocks[at] is not None:
            continue
        if block.fill[at] is not None:
            here = pc.equal(which, pa.scalar(number, pa.uint32()))
            column = pc.if_else(here, pa.scalar(block.fill[at], column.type), column)
    return column


def _alive(
    which: pa.UInt32Array, rows: pa.UInt32Array, block: int, delta: core.Delta, snapshot: int
) -> pa.BooleanArray:
    """False for rows of one block that are deleted at a snapshot."""
    dead = delta.rows.filter(pc.less_equal(delta.stamps, pa.scalar(snapshot, pa.uint64())))
    here = pc.equal(which, pa.scalar(block, pa.uint32()))
    return pc.invert(pc.and_(here, pc.is_in(rows, value_set=dead)))
