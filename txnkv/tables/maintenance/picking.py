"""Which row sets of a tablet are worth a compaction. Pure: decided from what status.db knows.

    overlap   a point read asks every row set whose key range has the key. Where DEPTH of them
              lie over one key, the small ones among them are merged: each is taken while it is
              not larger than all before it together twice, so that a large one is written again
              only when there is as much to merge it with.
    deleted   a row set of which so much was dead at the history floor is written without it.
    crumbs    small neighbours, as flushes of rising keys leave them, become one.

A result is never larger than a limit a row set, so merged large ones lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from txnkv.coordinator import Timestamp
from txnkv.tables.tablets import RowSetInfo

DEPTH: Final = 4
DELETED_SHARE: Final = 0.25
CRUMBS: Final = 8
CRUMB_ROWS: Final = 1 << 18
MOST_SOURCES: Final = 32
MOST_ROWS: Final = 1 << 24
"""Rows of one compaction in the background."""

_GROWTH: Final = 2


@dataclass(frozen=True)
class Pick:
    """Row sets to be merged, and why."""

    infos: tuple[RowSetInfo, ...]
    reason: str


def pick(infos: Sequence[RowSetInfo], collectable: Callable[[RowSetInfo], int]) -> Pick | None:
    """The next compaction of a tablet, or None when there is nothing worth it.

    Args:
        infos: committed, resolved row sets.
        collectable: how many rows of a row set no snapshot sees any more.
    """
    for info in infos:
        least = max(DELETED_SHARE * info.rows, 1)
        if info.deleted >= least and collectable(info) >= least:
            return Pick((info,), "deleted")
    over = _small_ones(deepest(infos))
    if over is not None:
        return Pick(over, "overlap")
    some = _crumbs(infos)
    return None if some is None else Pick(some, "crumbs")


def deepest(infos: Sequence[RowSetInfo]) -> list[RowSetInfo]:
    """The most row sets that lie over one key."""
    best: list[RowSetInfo] = []
    open_: list[RowSetInfo] = []
    for info in sorted(infos, key=lambda info: info.min_key):
        open_ = [other for other in open_ if other.max_key >= info.min_key]
        open_.append(info)
        if len(open_) > len(best):
            best = list(open_)
    return best


def _small_ones(infos: Sequence[RowSetInfo]) -> tuple[RowSetInfo, ...] | None:
    if len(infos) < DEPTH:
        return None
    ordered = sorted(infos, key=lambda info: info.rows)
    # The smallest may stand alone below a group of equals that is worth it.
    for start in range(len(ordered) - DEPTH + 1):
        taken, rows = [ordered[start]], ordered[start].rows
        for info in ordered[start + 1 :]:
            if info.rows > _GROWTH * rows or len(taken) == MOST_SOURCES:
                break
            if rows + info.rows > MOST_ROWS and len(taken) >= DEPTH:
                break
            taken.append(info)
            rows += info.rows
        if len(taken) >= DEPTH:
            return tuple(ordered[:start]) + tuple(taken)
    return None


def _crumbs(infos: Sequence[RowSetInfo]) -> tuple[RowSetInfo, ...] | None:
    """Neighbours by key that are small, when they are many."""
    run: list[RowSetInfo] = []
    for info in sorted(infos, key=lambda info: info.min_key):
        if info.rows < CRUMB_ROWS:
            run.append(info)
            if len(run) == MOST_SOURCES:
                break
        elif len(run) >= CRUMBS:
            break
        else:
            run = []
    return tuple(run) if len(run) >= CRUMBS else None


def clusters(
    infos: Sequence[RowSetInfo], floor: Timestamp, collectable: Callable[[RowSetInfo], int]
) -> list[tuple[RowSetInfo, ...]]:
    """All that a full compaction has to do: what overlaps, has dead rows or is a crumb."""
    groups: list[list[RowSetInfo]] = []
    reach = b""
    for info in sorted(infos, key=lambda info: info.min_key):
        if groups and (info.min_key <= reach or _both_crumbs(groups[-1], info)):
            groups[-1].append(info)
            reach = max(reach, info.max_key)
        else:
            groups.append([info])
            reach = info.max_key
    return [
        tuple(group)
        for group in groups
        if len(group) > 1 or _worth(group[0], floor, collectable(group[0]))
    ]


def _both_crumbs(group: Sequence[RowSetInfo], info: RowSetInfo) -> bool:
    return info.rows < CRUMB_ROWS and sum(other.rows for other in group) < CRUMB_ROWS


def _worth(info: RowSetInfo, floor: Timestamp, dead: int) -> bool:
    plain = info.uniform or info.stamp is None or info.stamp > floor
    return dead > 0 or not plain
