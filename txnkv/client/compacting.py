"""Compaction of a whole store on demand, and space given back to the file system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from txnkv.coordinator import one
from txnkv.instance import Instance
from txnkv.storage import shrink
from txnkv.tables import Tablet, manifest

SLACK: Final = 1.1
"""A file that is longer than what is in it by this factor is copied."""

LEAST_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class CompactReport:
    """The result of `compact`.

    Attributes:
        row_sets_before, row_sets_after: row sets that were merged, and those they became.
        rows_before, rows_after: row versions in them; those that no snapshot sees are gone.
        collected: row sets whose space is free for use again.
        files_before, files_after: bytes of the tables' files.
        in_use: tablets whose files another process has open, so that they were not cut.
    """

    row_sets_before: int = 0
    row_sets_after: int = 0
    rows_before: int = 0
    rows_after: int = 0
    collected: int = 0
    files_before: int = 0
    files_after: int = 0
    in_use: int = 0


def compact_store(
    instance: Instance, progress: Callable[[int, int], None] | None = None
) -> CompactReport:
    """Flush, merge whatever overlaps or has dead rows, collect, and cut the files.

    Args:
        instance: the store.
        progress: called with (row versions done, row versions in all).

    Raises:
        StorageFullError: the disk is full; what is done is done.
    """
    engine = instance.engine
    metrics = engine.coordinator.metrics
    collected = metrics.collected_row_sets.value
    tablets = engine.compactor.tablets()
    before = sum(map(_file_bytes, (_folder(instance, tablet) for tablet in tablets)))
    done = engine.compactor.compact_all(progress)
    in_use = sum(not _cut(instance, tablet) for tablet in tablets)
    return CompactReport(
        row_sets_before=done.sources,
        row_sets_after=done.results,
        rows_before=done.rows_before,
        rows_after=done.rows_after,
        collected=metrics.collected_row_sets.value - collected,
        files_before=before,
        files_after=sum(map(_file_bytes, (_folder(instance, tablet) for tablet in tablets))),
        in_use=in_use,
    )


def _cut(instance: Instance, tablet: Tablet) -> bool:
    """Make a tablet's file as short as what is in it; False when it is open elsewhere."""
    if not instance.store.environments.was_made(f"tablets/{tablet.id}", tablet.label, tablet.part):
        return True
    with instance.store.status.read() as cur:
        (needed,) = one(
            cur,
            "SELECT coalesce(sum(bytes), 0) FROM row_sets WHERE tablet_id = ? AND state != ?",
            (tablet.id, manifest.WRITING),
        )
    if _file_bytes(_folder(instance, tablet)) <= max(SLACK * needed, LEAST_BYTES):
        return True
    return shrink(tablet.environment()) is not None


def _folder(instance: Instance, tablet: Tablet) -> Path:
    return instance.store.directory.tablet_dir(tablet.id)


def _file_bytes(folder: Path) -> int:
    try:
        return (folder / "data.mdb").stat().st_blocks * 512
    except FileNotFoundError:
        return 0
