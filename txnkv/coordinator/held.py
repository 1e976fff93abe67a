"""What a flush could not write, for a tablet or a partition is damaged: kept until it can.

A flush goes on for all others, and the commit log is trimmed behind it. So what it had for the
damaged part is copied out of the log first, in the SQLite transaction that publishes the flush:

    commit log      (F, F']   tablet 1 | tablet 2 | partition 3         F' is the new flushed_ts
    row sets, logs            tablet 1              partition 3
    held_sections                        tablet 2                       its own flushed_ts stays F

A held part takes no writes, in any process, so that what is held does not grow. What it has in
memory stays there, and who opens the store reads it from here. Each flush tries it again; when
that goes well, or when the part is dropped, nothing of it is held any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import apsw

from txnkv.coordinator import payload
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.payload import Section
from txnkv.errors import CorruptionError
from txnkv.storage import extents

Key: TypeAlias = tuple[int, int]
"""The kind of a section, and the id of a tablet or partition."""

_FOLDERS: Final = {payload.TABLET: "tablets", payload.TOPIC: "logs"}

SCHEMA = """
CREATE TABLE held_parts (               -- damaged: no flush can write to them
    kind        INTEGER NOT NULL,       -- as in payloads
    id          INTEGER NOT NULL,
    flushed_ts  INTEGER NOT NULL,       -- small commits at or below are in its files
    error       TEXT    NOT NULL,
    PRIMARY KEY (kind, id)
) WITHOUT ROWID;
CREATE TABLE held_sections (            -- of small commits that are flushed elsewhere
    commit_ts   INTEGER NOT NULL,
    kind        INTEGER NOT NULL,
    id          INTEGER NOT NULL,
    data        BLOB    NOT NULL,
    PRIMARY KEY (commit_ts, kind, id)
);
"""


class Held(NamedTuple):
    """A part that is held.

    Attributes:
        flushed: small commits at or below are in its files.
        error: why.
    """

    flushed: Timestamp
    error: str


def parts(cur: apsw.Cursor) -> dict[Key, Held]:
    """All that are held."""
    return {
        (kind, id): Held(Timestamp(flushed), error)
        for kind, id, flushed, error in cur.execute(
            "SELECT kind, id, flushed_ts, error FROM held_parts"
        )
    }


def ids(cur: apsw.Cursor, kind: int) -> dict[int, str]:
    """Those of one kind, and why."""
    return {id: held.error for (each, id), held in parts(cur).items() if each == kind}


def refuse(held: Mapping[int, str], ids: Iterable[int]) -> None:
    """Refuse to write to parts that are held.

    Raises:
        CorruptionError: one of them is.
    """
    for id in ids if held else ():
        if id in held:
            raise CorruptionError(
                f"{held[id]}. It takes no writes: `txnkv check` says more; restore its files from "
                "a backup and flush, or drop it"
            )


def sections(cur: apsw.Cursor, after: Timestamp) -> Iterator[tuple[Section, int]]:
    """What is held of commits above `after`, by commit, and their timestamps."""
    for stamp, kind, id, data in cur.execute(
        "SELECT commit_ts, kind, id, data FROM held_sections WHERE commit_ts > ? "
        "ORDER BY commit_ts",
        (after,),
    ):
        yield Section(kind, id, data), stamp


def replace(cur: apsw.Cursor, failed: Mapping[Key, str], after: Timestamp, upto: Timestamp) -> None:
    """Hold exactly these parts: what a flush of (after, upto] could not write.

    Args:
        cur: of the write that publishes the flush.
        failed: why, beginning with the part's name.
        after: what was flushed before.
        upto: what is flushed now.
    """
    before = parts(cur)
    gone = before.keys() - failed.keys()
    cur.executemany("DELETE FROM held_parts WHERE kind = ? AND id = ?", gone)
    cur.executemany("DELETE FROM held_sections WHERE kind = ? AND id = ?", gone)
    for kind, id in failed.keys() - before.keys():
        cur.execute(
            "INSERT INTO held_parts VALUES (?, ?, ?, ?)", (kind, id, after, failed[kind, id])
        )
    if before.keys() != failed.keys():
        # Whoever is about to write looks at the catalog again.
        cur.execute("UPDATE clock SET catalog_version = catalog_version + 1")
        extents.hold(cur, [f"{_FOLDERS[kind]}/{id}" for kind, id in failed])
    if not failed:
        return
    log: list[Any] = cur.execute(
        "SELECT commit_ts, payload FROM commit_log WHERE commit_ts > ? AND commit_ts <= ?",
        (after, upto),
    ).fetchall()
    cur.executemany(
        "INSERT INTO held_sections VALUES (?, ?, ?, ?)",
        [
            (stamp, section.kind, section.id, section.data)
            for stamp, data in log
            for section in payload.unpack(data, stamp)
            if (section.kind, section.id) in failed
        ],
    )
