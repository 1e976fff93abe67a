"""Checks of the row sets of a tablet: each against status.db, block by block, and all together; and
giving up what a damaged tablet has lost, so that the rest of it works again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import apsw
import pyarrow as pa

from txnkv import core
from txnkv.coordinator import DAMAGE, Loss, LostRows, Timestamp, held, payload, status_table
from txnkv.core import compute as pc
from txnkv.errors import InvalidTxnStateError, TxnkvError
from txnkv.storage import Environment, mend
from txnkv.tables import table_catalog
from txnkv.tables.maintenance import flush
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    BLOCKS_DB,
    BLOOM,
    COLUMNS,
    FENCE_DB,
    INSERTS,
    KEYS,
    KIND,
    ROWS,
    Header,
    Pages,
    RowSet,
    RowSetInfo,
    RowSetRetired,
    Source,
    Tablet,
    TabletState,
    delete_row_set,
    manifest,
    merged,
    stored_counts,
)

_NAMED = 3
"""Keys that a problem names."""


@dataclass
class Counted:
    """The numbers of row sets, blocks and rows that a check has looked at."""

    row_sets: int = 0
    blocks: int = 0
    rows: int = 0


def check_row_set(tablet: Tablet, info: RowSetInfo, counted: Counted) -> Iterator[str]:
    """Read every block of a row set.

    Args:
        info: as status.db has it.
        counted: takes what was looked at.

    Yields:
        What is wrong, one line each.

    Raises:
        UnavailableError: it could not be looked at.
    """
    name = f"{tablet.label}, row set {info.id}"
    row_set = RowSet(tablet, info)  # a known one would not read its header again
    try:
        with tablet.read() as pages:
            header = row_set.header(pages)
        if header.rows != info.rows:
            yield f"{name}: its header has {header.rows} rows, status.db {info.rows}"
        last = b""
        for number in range(len(header.blocks)):
            with tablet.read() as pages:
                for problem in _block(row_set, pages, header, number, last, counted):
                    yield f"{name}, block {number}: {problem}"
            last = header.blocks[number].last
        if header.blocks and (header.blocks[0].first, last) != (info.min_key, info.max_key):
            yield f"{name}: its key range is not that of status.db"
        for problem in _deletes(tablet, info):
            yield f"{name}: {problem}"
    except (InvalidTxnStateError, RowSetRetired):
        return  # aborted or replaced while we looked
    except DAMAGE as error:
        yield str(error)
    counted.row_sets += 1


def _block(
    row_set: RowSet, pages: Pages, header: Header, number: int, last: bytes, counted: Counted
) -> Iterator[str]:
    info, block = row_set.info, header.blocks[number]
    sections = [KEYS, BLOOM, *(COLUMNS + column for column in header.columns)]
    if not info.uniform and info.kind == ROWS:
        sections.append(INSERTS)
    for section in sections:
        data = row_set.block(pages, section, number, again=True)
        if section != BLOOM and core.block_rows(data) != block.rows:
            yield f"rows are missing in section {section}"
    keys = row_set.keys(pages, number)
    order = core.sort_keys(keys)
    ascends = order is None or (
        info.versioned and order.to_arrow().equals(core.Rows.range(keys.n).to_arrow())
    )
    if not ascends or (number and keys.key(0) < (last if info.versioned else last + b"\0")):
        yield "its keys are not ascending"
    if (keys.key(0), keys.key(keys.n - 1)) != (block.first, block.last):
        yield "its keys are not those of the header"
    if core.bloom_probe(row_set.block(pages, BLOOM, number), keys).count != keys.n:
        yield "its Bloom filter denies a key"
    yield from _stamps(row_set, pages, number, keys)
    counted.blocks += len(sections)
    counted.rows += block.rows


def _stamps(row_set: RowSet, pages: Pages, number: int, keys: core.Keys) -> Iterator[str]:
    info = row_set.info
    if info.stamp is None:
        return
    rows = core.Rows.range(keys.n).to_arrow()
    inserts, deletes = row_set.stamps_of(pages, number, rows)
    least = pc.min_max(inserts).as_py()
    if least["max"] > info.stamp or least["min"] < (info.min_stamp or 0):
        yield f"rows were inserted at {least}, outside of what status.db says"
    if pc.any(pc.less(deletes, inserts)).as_py():
        yield "a row was deleted before it was inserted"
    same = core.mark_duplicates(keys, None)
    if same.count:
        if core.version_order(same, inserts) is not None:
            yield "versions of a key are not newest first"
        newer = pa.concat_arrays([inserts.slice(0, 1), inserts.slice(0, keys.n - 1)])
        both = pc.and_(same.to_arrow(), pc.greater(deletes, newer))
        if both.true_count:
            at = pc.index(both, True).as_py()
            yield f"{both.true_count} versions live on beside a newer one, as of {keys.key(at)!r}"


def _deletes(tablet: Tablet, info: RowSetInfo) -> Iterator[str]:
    # More than status.db knows are fine: they are noted after they are written.
    rows, highest = stored_counts(tablet, [info.id])[info.id]
    if rows < info.deleted or highest < info.max_delete:
        yield (
            f"{rows} rows are deleted, the last at {highest}; by status.db {info.deleted}, "
            f"the last at {info.max_delete}"
        )


def check_together(tablet: Tablet, state: TabletState) -> Iterator[str]:
    """No key is alive in two row sets, or twice in one.

    Args:
        state: of the tablet. What a commit replaced that is still being finalized lies alive beside
            what came in its place, then or later: those row sets are left out.

    Yields:
        What is wrong, one line.
    """
    never = Timestamp(core.STAMP_NEVER - 1)
    first = min((int(info.stamp or 0) for info in state.unresolved), default=core.STAMP_NEVER)
    infos = [info for info in state.settled if int(info.stamp or 0) < first]
    try:
        sources = [Source(tablet, info, [], never, len(infos)) for info in infos]
        count = 0
        named: list[bytes] = []
        for part in merged(sources, lambda: None):
            twice = core.mark_duplicates(part.keys, None)
            count += twice.count
            for at in twice.positions().to_arrow().slice(0, _NAMED - len(named)):
                named.append(part.keys.key(at.as_py()))
    except (InvalidTxnStateError, RowSetRetired):
        return
    except TxnkvError:
        return  # said of the row set already
    if count:
        yield f"{tablet.label}: {count} keys are alive twice, as {named}"


def row_set_ids(tablet: Tablet) -> set[int]:
    """Row sets that a tablet's environment has blocks of."""
    ids = set()
    with tablet.read() as pages, pages.txn.cursor(db=pages.blocks) as cursor:
        found = cursor.first()
        while found:
            id = int.from_bytes(bytes(cursor.key())[:8], "big")
            ids.add(id)
            found = cursor.set_range((id + 1).to_bytes(8, "big"))
    return ids


class _Aside(Tablet):
    """A tablet whose environment is aside."""

    def __init__(self, tables: Tables, tablet: Tablet, environment: Environment) -> None:
        super().__init__(tables.store, tablet.table, tablet.number, tables.log, tables.memory)
        self._aside = environment
        environment.db(BLOCKS_DB)
        environment.db(FENCE_DB)

    def environment(self, *, create: bool = False) -> Environment:
        """Return the environment that is aside."""
        return self._aside


def accept_loss(tables: Tables, tablet: Tablet, *, really: bool) -> Loss:
    """Give up the row sets and small commits of a tablet that are not whole.

    Args:
        tables: the tables.
        tablet: a damaged one.
        really: else it is only looked at, and nothing changes.

    Raises:
        UnavailableError: another process has its files open.
    """
    store, name = tables.store, f"tablets/{tablet.id}"
    schema = tables.current(tablet.table).schema
    with store.compaction(), store.maintenance():
        environment = store.environments.known(name, tablet.label, tablet.part)
        with mend(environment, name, store.status) as it:
            aside = _Aside(tables, tablet, it.environment)
            with store.status.read() as cur:
                infos = manifest.readable(cur, tablet.id)
                touched = status_table.transactions_of(cur, KIND, [tablet.id])
                commits = held.damaged(cur, (payload.TABLET, tablet.id))
            lost = [info for info in infos if any(check_row_set(aside, info, Counted()))]
            loss = Loss(
                tablet.label,
                rows=tuple(_described(tablet, info) for info in lost),
                commits=tuple(commits),
                transactions=tuple(touched),
                indexes=tuple(map(schema.names_of, schema.indexes if lost or commits else ())),
            )
            if not really:
                return loss
            kept = {info.id for info in infos} - {info.id for info in lost}
            gone = row_set_ids(aside) - kept

            def delete(txn: Any) -> None:
                for id in gone:
                    delete_row_set(txn, aside, id)

            it.environment.write(delete)
            altered: list[Timestamp] = []
            it.put_in_place(lambda cur: altered.extend(_forget(cur, tablet, loss)))
        for since in altered:
            store.runtime.raise_durable(since)
        tablet.forget(info.id for info in lost)
    tables.coordinator.orchestrator.give_up(touched, f"{tablet.label} lost what was written to it")
    tables.coordinator.damage.clear(tablet.label)
    flush.flush(tables)
    return loss


def _forget(cur: apsw.Cursor, tablet: Tablet, loss: Loss) -> Iterator[Timestamp]:
    """Forget what is lost; yields since when the table has no indexes, if it had some."""
    held.give_up(cur, (payload.TABLET, tablet.id))
    manifest.forget(cur, [row_set.id for row_set in loss.rows])
    table = table_catalog.by_id(cur, tablet.table.id) if loss else None
    if table is not None and table.schema.indexes:  # they have entries of what is lost
        altered = table_catalog.alter(cur, table, lambda now: now.schema.with_indexes(()))
        table_catalog.drop_hidden(cur, table.schema.indexes, altered.since)
        yield altered.since
    manifest.bump(cur)


def _described(tablet: Tablet, info: RowSetInfo) -> LostRows:
    first, last = _values(tablet, info.min_key), _values(tablet, info.max_key)
    return LostRows(info.id, info.rows, info.live_rows, first, last, info.min_stamp, info.stamp)


def _values(tablet: Tablet, key: bytes) -> tuple[Any, ...]:
    try:
        return tablet.codec.decode_one(key)
    except core.CoreError:
        return (key,)  # damaged, as all may be here
