"""Prints what is in a store, for people who look for a fault.

    python -m tools.dump STORE                the rows of status.db, and the row sets by tablet
    python -m tools.dump STORE --blocks       also every block with its rows, bytes and keys

The store is opened to read only, so that looking changes nothing: nothing is recovered and
nobody's transaction is aborted. Damage is printed where it is met.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any, Final

import txnkv
from txnkv import core
from txnkv.errors import TxnkvError
from txnkv.tables.tablets import manifest
from txnkv.tables.tablets.manifest import RowSetInfo
from txnkv.tables.tablets.row_set import RowSet
from txnkv.tables.tablets.row_set_format import BLOOM, COLUMNS, KEYS, BlockInfo, Header
from txnkv.tables.tablets.tablet import Tablet
from txnkv.tables.tablets.tablet_files import FENCE_DB, Pages

_SECRET: Final = ("token_key",)
_BY_TABLET: Final = ("row_sets",)
_ROW_SET_STATES: Final = {
    manifest.WRITING: "writing",
    manifest.STAGED: "staged",
    manifest.COMMITTED: "committed",
}


def dump(path: str, *, blocks: bool = False) -> Iterator[str]:
    """The lines that describe a store.

    Args:
        path: of the store.
        blocks: also each block of each row set.

    Raises:
        StoreNotFoundError: there is none.
        IncompatibleStoreError: it is of a format that this version does not know.
    """
    with txnkv.connect(path, read_only=True) as client:
        store = client.instance.store
        yield f"store {path}, id {store.store_id}"
        with store.status.read() as cur:
            yield from _status_rows(cur)
        for name in client.tables():
            for tablet in client.instance.engine.tablets(client.table(name).info):
                yield from _tablet(client, tablet, blocks)


# -- status.db -------------------------------------------------------------------------


def _status_rows(cur: Any) -> Iterator[str]:
    names = [
        name
        for (name,) in cur.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' "
            "ORDER BY rowid"
        )
    ]
    for name in names:
        if name in _BY_TABLET:
            continue
        columns = [column for _, column, *_ in cur.execute(f"PRAGMA table_info({name})")]
        rows = cur.execute(f"SELECT * FROM {name}").fetchall()
        yield ""
        yield f"{name}: {len(rows)}"
        for row in rows:
            fields = zip(columns, row, strict=True)
            yield "  " + "  ".join(
                f"{column}={_value(name, column, value)}"
                for column, value in fields
                if value is not None and column not in _SECRET
            )


def _value(table: str, column: str, value: Any) -> str:
    if column == "state" and table in ("transactions", "participants"):
        return txnkv.TxnState(value).name
    if column.endswith("_ts") and value:
        return f"{value} ({txnkv.Timestamp(value).datetime:%H:%M:%S.%f})"
    return value.hex() if isinstance(value, bytes) else str(value)


# -- tablets ---------------------------------------------------------------------------


def _tablet(client: txnkv.Client, tablet: Tablet, blocks: bool) -> Iterator[str]:
    yield ""
    rows: list[tuple[Any, ...]]
    yield f"{tablet.label} (number {tablet.number}), environment tablets/{tablet.id}"
    with client.instance.store.status.read() as cur:
        rows = cur.execute(
            "SELECT id, state, stamp, txn_id, job_id, attempt, counts, rows, bytes "
            "FROM row_sets WHERE tablet_id = ? ORDER BY id",
            (tablet.id,),
        ).fetchall()
        infos = {info.id: info for info in manifest.readable(cur, tablet.id)}
    try:
        yield from _fence(tablet)
    except (TxnkvError, KeyError) as error:
        yield f"  {error}"
    for row in rows:
        id, state, stamp, txn_id, job_id, attempt, counts, count, size = row
        line = f"  row set {id}: {_ROW_SET_STATES.get(state, state)}"
        line += "" if stamp is None else f", stamp {stamp}"
        line += "" if txn_id is None else f", transaction {txn_id}"
        line += "" if job_id is None else f", job {job_id}, attempt {attempt}"
        line += "" if counts else ", does not count"
        yield line + ("" if count is None else f", {count} rows, {size} bytes")
        if id in infos:
            yield from _row_set(tablet, infos[id], blocks)


def _fence(tablet: Tablet) -> Iterator[str]:
    environment = tablet.environment()
    with environment.read() as txn, txn.cursor(db=environment.db(FENCE_DB)) as cursor:
        entries = [(bytes(key), bytes(value)) for key, value in cursor]
    for key, value in entries:
        name = key.rstrip(b"\0") if len(key) < 8 else key[: len(key) - 8]
        number = int.from_bytes(value or key[-8:], "big")
        yield f"  fence: {name.decode('ascii', 'replace')} {number}"


def _row_set(tablet: Tablet, info: RowSetInfo, blocks: bool) -> Iterator[str]:
    row_set = RowSet(tablet, info)
    try:
        with tablet.read() as pages:
            header = row_set.header(pages)
            low, high = (_readable(tablet, key) for key in (info.min_key, info.max_key))
            yield f"    {len(header.blocks)} blocks, keys {low} to {high}"
            if blocks:
                for number, block in enumerate(header.blocks):
                    yield from _block(tablet, row_set, pages, header, number, block)
    except TxnkvError as error:
        yield f"    {error}"


def _block(
    tablet: Tablet, row_set: RowSet, pages: Pages, header: Header, number: int, block: BlockInfo
) -> Iterator[str]:
    first, last = (_readable(tablet, key) for key in (block.first, block.last))
    yield f"    block {number}: rows {block.start} to {block.start + block.rows - 1}, " + (
        f"keys {first} to {last}"
    )
    for section in (KEYS, BLOOM, *(COLUMNS + column for column in header.columns)):
        name = tablet.section_name(section)
        try:
            size = len(row_set.block(pages, section, number))
        except TxnkvError as error:
            yield f"      {name}: {error}"
            continue
        yield f"      {name}: {size} bytes{_zone(block.zones.get(section - COLUMNS))}"


def _readable(tablet: Tablet, key: bytes) -> str:
    values = tablet.codec.decode_one(key)
    return repr(values[0] if len(values) == 1 else values)


def _zone(zone: core.Zone | None) -> str:
    if zone is None:
        return ""
    bounds = ""
    if zone.min is not None and zone.max is not None:
        bounds = f", {zone.min.hex()} to {zone.max.hex()}{'' if zone.exact else ' (cut off)'}"
    return f", {zone.null_count} nulls{bounds}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.dump", description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--blocks", action="store_true", help="also each block")
    asked = parser.parse_args()
    try:
        for line in dump(asked.store, blocks=asked.blocks):
            print(line)
    except TxnkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
