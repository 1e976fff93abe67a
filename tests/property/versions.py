"""The model of a table: a dict of versions, and what each open transaction saw and did.

What an operation does is written down here once, row by row, as the documentation has it; small
and large transactions, rows and batches, memory and disk are all compared with this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

DEFAULT_N = 7
COLUMNS = ("text", "n")

Row = tuple[str | None, int]
Given = dict[str, Any]
"""A row as it is given: id, and those of the other columns that are given."""


@dataclass
class Result:
    """The result of some operations."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    ignored: int = 0
    refused: list[int] = field(default_factory=list)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.inserted, self.updated, self.deleted, self.ignored


class Versions:
    """All versions of all rows: by key (commit timestamp, row or None), ascending."""

    def __init__(self) -> None:
        self.of: dict[int, list[tuple[int, Row | None]]] = {}
        self.last = 0

    def commit(self, own: dict[int, Row | None], stamp: int) -> None:
        assert stamp > self.last
        self.last = stamp
        for key, row in own.items():
            self.of.setdefault(key, []).append((stamp, row))

    def get(self, key: int, snapshot: int) -> Row | None:
        row = None
        for stamp, version in self.of.get(key, ()):
            if stamp <= snapshot:
                row = version
        return row

    def at(self, snapshot: int) -> dict[int, Row]:
        seen = {key: self.get(key, snapshot) for key in self.of}
        return {key: row for key, row in seen.items() if row is not None}

    def changed(self, key: int, after: int) -> bool:
        return any(stamp > after for stamp, _ in self.of.get(key, ()))

    def diff(self, start: int, end: int) -> dict[int, tuple[str, Row, int]]:
        """The net change of each key: op, row, timestamp of the last change."""
        found = {}
        for key, versions in self.of.items():
            stamps = [stamp for stamp, _ in versions if start < stamp <= end]
            if not stamps:
                continue
            old, new = self.get(key, start), self.get(key, end)
            if new is not None:
                found[key] = ("insert" if old is None else "update", new, stamps[-1])
            elif old is not None:
                # A delete of a key that is not there any more is no change of it.
                last = max(s for s in stamps if self.get(key, s - 1) is not None)
                found[key] = ("delete", old, last)
        return found

    @property
    def stamps(self) -> list[int]:
        return sorted({0, *(stamp for versions in self.of.values() for stamp, _ in versions)})


@dataclass
class Txn:
    """An open transaction.

    Attributes:
        own: what it wrote; None for a deleted row.
        read: keys that it asked for and that decide about a serializable commit.
        read_all: it scanned.
        unsure: keys that may have been recorded as read, by operations that did nothing.
    """

    handle: Any
    snapshot: int
    serializable: bool = False
    own: dict[int, Row | None] = field(default_factory=dict)
    buffered: list[tuple[str, Given]] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)
    read_all: bool = False
    over: bool = False

    def get(self, versions: Versions, key: int) -> Row | None:
        return self.own[key] if key in self.own else versions.get(key, self.snapshot)

    def seen(self, versions: Versions) -> dict[int, Row]:
        merged: dict[int, Row | None] = {**versions.at(self.snapshot), **self.own}
        return {key: row for key, row in merged.items() if row is not None}

    def conflicts(self, versions: Versions) -> bool | None:
        """Tell whether the transaction must be refused at commit; None when it may be."""
        if any(versions.changed(key, self.snapshot) for key in self.own):
            return True
        if not self.serializable or not self.own:
            return False
        if self.read_all and versions.last > self.snapshot:
            return any(versions.changed(key, self.snapshot) for key in versions.of)
        if any(versions.changed(key, self.snapshot) for key in self.read):
            return True
        return None if any(versions.changed(key, self.snapshot) for key in self.unsure) else False


def apply(txn: Txn, versions: Versions, op: str, rows: Iterable[Given]) -> Result:
    """One operation on some rows, one after the other."""
    result = Result()
    ignoring = op.endswith("_ignore")
    kind = op.removesuffix("_ignore")
    for given in rows:
        key = given["id"]
        old = txn.get(versions, key)
        if (kind == "insert" and old is not None) or (kind in ("update", "delete") and old is None):
            txn.unsure.add(key)
            if ignoring:
                result.ignored += 1
            else:
                result.refused.append(key)
        elif kind == "delete":
            txn.own[key] = None
            result.deleted += 1
        else:
            text, n = (None, DEFAULT_N) if old is None else old
            txn.own[key] = (given.get("text", text), given.get("n", n))
            if old is None:
                result.inserted += 1
            else:
                result.updated += 1
    return result
