"""Row sets and their deletes, on their way into a backup, at one commit timestamp.

    tablets/12/4711      blocks of row set 4711, all but its deletes: never changed
    tablets/12/deletes   the deletes of all of them, at or below the timestamp

A row set has its deletes beside it, and they go on growing. Each has its commit's timestamp, so
what came later is told and left out. What a commit at or below it has not yet stamped, a restored
store stamps when it is opened, as any store does after a death: `intents`, `flush`.
"""

from __future__ import annotations

from collections.abc import Sequence

import apsw
import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError
from txnkv.storage import BackupWriter, EntryFile, each_between, giving_up
from txnkv.tables import table_catalog
from txnkv.tables.tablets import (
    BLOCKS_DB,
    DELETES,
    HEADER,
    INSERTS,
    ROWS,
    Header,
    HeaderError,
    RowSetInfo,
    Tablet,
    block_key,
    delta_summary,
    manifest,
    pack_delta,
    unpack_delta,
)


def committed_row_sets(cur: apsw.Cursor) -> dict[int, tuple[RowSetInfo, ...]]:
    """The committed row sets of all tablets that are not dropped, by tablet."""
    ids = sorted(table_catalog.live_tablets(cur))
    found = {id: manifest.committed_state(cur, id).infos for id in ids}
    return {id: infos for id, infos in found.items() if infos}


def back_up_tablet(
    tablet: Tablet, infos: Sequence[RowSetInfo], upto: Timestamp, backup: BackupWriter
) -> None:
    """Copy row sets, which a pinned version of the manifest has.

    Args:
        tablet: of the row sets.
        infos: committed at or below `upto`.
        upto: a commit timestamp.
        backup: takes them.

    Raises:
        CorruptionError: one of them is damaged.
        StorageFullError: there is no room for them.
    """
    for info in infos:
        name = f"tablets/{tablet.id}/{info.id}"
        if not backup.link(name):
            backup.entries(name, _Blocks(tablet, info).copy)

    def copy_deletes(file: EntryFile) -> None:
        for info in infos:
            _Blocks(tablet, info).copy_deletes(upto, file)

    backup.entries(f"tablets/{tablet.id}/deletes", copy_deletes)


class _Blocks:
    """The blocks of one row set, each compared with its checksum before it is copied."""

    def __init__(self, tablet: Tablet, info: RowSetInfo) -> None:
        self._tablet = tablet
        self._info = info
        self._environment = tablet.environment()

    def copy(self, file: EntryFile) -> None:
        """Copy what a reader asks for, but the deletes."""
        header = self._header()
        # A compaction that left rows of one stamp alone may have written it for each: not needed.
        has_stamps = not self._info.uniform and self._info.kind == ROWS
        left_out = [_section(each) for each in ([DELETES] if has_stamps else [DELETES, INSERTS])]
        seen = 0

        def take(key: bytes, value: bytes) -> None:
            nonlocal seen
            if key[8:10] in left_out:
                return
            if key[8:10] != _section(HEADER) and not core.verify_block(value, core.crc32c(key)):
                raise self._damaged(f"a block of section {key[8:10].hex()}")
            seen += 1
            file.put(BLOCKS_DB, key, value)

        id = self._info.id
        self._each(block_key(id, HEADER, 0), block_key(id + 1, HEADER, 0), take)
        wanted = 1 + len(header.blocks) * (2 + len(header.columns) + has_stamps)
        if seen != wanted:
            raise self._damaged(f"it has {seen} blocks of {wanted}: one")

    def copy_deletes(self, upto: Timestamp, file: EntryFile) -> None:
        """Copy the deletes at or below a timestamp."""
        header: Header | None = None

        def take(key: bytes, value: bytes) -> None:
            nonlocal header
            header = header or self._header()
            number = int.from_bytes(key[10:14], "big")
            try:
                delta = unpack_delta(value, core.crc32c(key), header.blocks[number].rows)
            except (HeaderError, IndexError):
                raise self._damaged(f"the deletes of block {number}") from None
            if delta_summary(value)[1] > upto:
                early = pc.less_equal(delta.stamps, pa.scalar(int(upto), pa.uint64()))
                delta = core.Delta(delta.rows.filter(early), delta.stamps.filter(early))
                value = pack_delta(delta, core.crc32c(key))
            if delta.n:
                file.put(BLOCKS_DB, key, value)

        id = self._info.id
        self._each(block_key(id, DELETES, 0), block_key(id, DELETES + 1, 0), take)

    def _each(self, low: bytes, high: bytes, take: object) -> None:
        each_between(self._environment, BLOCKS_DB, low, high, take)  # type: ignore[arg-type]

    def _header(self) -> Header:
        key = block_key(self._info.id, HEADER, 0)
        with self._tablet.read() as pages:
            data = pages.get(key)
            copy = None if data is None else bytes(data)
            del data
        try:
            return Header.unpack(copy or b"", core.crc32c(key))
        except HeaderError:
            raise self._damaged("the header") from None

    def _damaged(self, what: str) -> CorruptionError:
        return CorruptionError(
            f"store {self._tablet.store_path}, {self._tablet.label}, row set {self._info.id}: "
            f"{what} is damaged or missing, so that there is no backup of it. `txnkv check` lists "
            "all damage; restore the store from an earlier backup, or "
            + giving_up(self._tablet.part)
        )


def _section(number: int) -> bytes:
    return number.to_bytes(2, "big")
