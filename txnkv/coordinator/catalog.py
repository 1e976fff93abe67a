"""The catalog of tables, and that of topics, as a process remembers them.

status.db has the truth, and a version that goes up with each change. What is remembered is of one
version; `CommitLog.refresh`, which every operation asks, tells which one counts.

What was dropped is removed: its files go when no snapshot reads them, its rows after them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import apsw

from txnkv.coordinator import held
from txnkv.coordinator.commit_log import CommitLog
from txnkv.coordinator.status_schema import one
from txnkv.coordinator.status_table import TxnState
from txnkv.errors import TxnkvError
from txnkv.storage import Store, brief, extents, numbers_in


class Entry(Protocol):
    """A table or topic."""

    @property
    def id(self) -> int:
        """Never given again."""


E = TypeVar("E", bound=Entry)


class CatalogRows(Protocol[E]):
    """The rows of a catalog in status.db: a module of functions."""

    KIND: int
    """That of its parts in payloads."""

    def find(self, cur: apsw.Cursor, name: str) -> E | None:
        """Return the one of this name, if there is one."""

    def get(self, cur: apsw.Cursor, name: str) -> E:
        """Return the one of this name; an error names those that there are."""

    def names(self, cur: apsw.Cursor) -> list[str]:
        """Return the names, sorted."""

    def live(self, cur: apsw.Cursor) -> Mapping[int, int]:
        """Return the ids of those that are not dropped, and since when each is as it is."""

    def dropped(self, entry: E) -> TxnkvError:
        """Return the error for one that was dropped."""


class _Version(Generic[E]):
    """Facts of one version of the catalog, or of a later one.

    Attributes:
        live: ids of those that are not dropped, and since when each is as it is.
        held: ids of parts that take no writes, and why.
        named: by name, those that were asked for.
    """

    __slots__ = ("held", "live", "named", "number")

    def __init__(self, number: int, live: Mapping[int, int], held: Mapping[int, str]) -> None:
        self.number = number
        self.live = live
        self.held = held
        self.named: dict[str, E] = {}


class Catalog(Generic[E]):
    """Tables or topics by name. Shared by threads; no I/O while the catalog does not change.

    Args:
        store: the store.
        log: tells the version.
        rows: what status.db has.
    """

    def __init__(self, store: Store, log: CommitLog, rows: CatalogRows[E]) -> None:
        self.store = store
        self.log = log
        self._rows = rows
        self._seen: _Version[E] | None = None

    def find(self, name: str) -> E | None:
        """Return the one of this name, or None."""
        named = self._now().named
        return named.get(name) or self._find(name, named)

    @brief
    def _find(self, name: str, named: dict[str, E]) -> E | None:
        with self.store.status.read() as cur:
            found = self._rows.find(cur, name)
        if found is not None:
            named[name] = found
        return found

    def get(self, name: str) -> E:
        """Return the one of this name.

        Raises:
            TableNotFoundError, TopicNotFoundError: there is none.
        """
        return self.find(name) or self._look_again(name)

    @brief
    def _look_again(self, name: str) -> E:
        with self.store.status.read() as cur:
            return self._rows.get(cur, name)

    def names(self) -> list[str]:
        """Return the names, sorted."""
        with self.store.status.read() as cur:
            return self._rows.names(cur)

    def is_live(self, entry: E) -> bool:
        """Tell whether one was not dropped."""
        return entry.id in self._now().live

    def require_live(self, entry: E) -> int:
        """Refuse one that was dropped.

        Returns:
            The version of the catalog in which it was seen.

        Raises:
            TableNotFoundError, TopicNotFoundError: it was dropped.
        """
        self.log.refresh()
        now = self._seen
        if now is None or now.number != self.log.catalog_version:
            now = self._now()
        if entry.id not in now.live:
            raise self._rows.dropped(entry)
        return now.number

    def refuse_held(self, part_ids: Iterable[int]) -> None:
        """Refuse to write to damaged tablets or partitions; the commit asks again, where the
        catalog has changed since.

        Raises:
            CorruptionError: one of them takes no writes.
        """
        seen = self._seen
        if seen is None or seen.held:
            held.refuse(self._now().held, part_ids)

    def _now(self) -> _Version[E]:
        self.log.refresh()
        number = self.log.catalog_version
        seen = self._seen
        if seen is None or seen.number != number:
            return self._read(number)
        return seen

    @brief
    def _read(self, number: int) -> _Version[E]:
        with self.store.status.read() as cur:
            seen: _Version[E] = _Version(
                number, self._rows.live(cur), held.ids(cur, self._rows.KIND)
            )
        self._seen = seen
        return seen


def least_snapshot(store: Store, cur: apsw.Cursor) -> int | None:
    """Return the oldest snapshot that may be read at, of a pin or an open transaction; or None."""
    pin = store.runtime.least_pin()
    (floor,) = one(
        cur,
        "SELECT min(snapshot_ts) FROM transactions WHERE state = ?",
        (int(TxnState.OPEN),),
    )
    return min((ts for ts in (pin, floor) if ts is not None), default=None)


def forget_extents(store: Store, folder: str, ids: Collection[int]) -> None:
    """Forget how far parts were written, before their files go.

    Args:
        store: the store.
        folder: "tablets" or "logs".
        ids: of the parts.
    """
    # Not synced, for what comes back is of nothing that is there.
    if ids:
        with store.status.write(sync=False) as cur:
            extents.forget(cur, [f"{folder}/{id}" for id in ids])


def remove_strays(
    store: Store,
    folder: Path,
    known: Callable[[apsw.Cursor], set[int]],
    remove: Callable[[int], None],
) -> None:
    """Remove the folders of parts that are not in the catalog: a writer that was stopped while its
    table or topic was dropped and purged makes one anew.

    Args:
        store: the store.
        folder: that has a folder for each part.
        known: ids of the parts in the catalog.
        remove: removes the files of one part.
    """
    there = numbers_in(folder)
    with store.status.read() as cur:
        ids = known(cur)
        strays = extents.strays(cur, folder.name, ids)
    forget_extents(store, folder.name, strays | (there - ids))
    for id in there - ids:
        remove(id)
