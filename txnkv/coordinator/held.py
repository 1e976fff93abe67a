"""Small commits that no flush could write, for their tablet or partition is damaged: kept here.

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

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import apsw

from txnkv.coordinator import payload
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.payload import Section
from txnkv.coordinator.status_schema import one
from txnkv.errors import CorruptionError, TxnkvError
from txnkv.storage import DatabaseDamagedError, DeniedError, extents

Key: TypeAlias = tuple[int, int]
"""The kind of a section, and the id of a tablet or partition."""

_FOLDERS: Final = {payload.TABLET: "tablets", payload.TOPIC: "logs"}
_DENIED: Final = " cannot be opened: "
_QUOTED: Final = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_IS_DENIED: Final = re.compile(rf"(?:\w+ (?:{_QUOTED}), )?\w+ \d+{_DENIED}")
"""Behind the label: a name may have these words, too."""


class HeldPart(NamedTuple):
    """A part that is held.

    Attributes:
        flushed: small commits at or below are in its files.
        error: why.
    """

    flushed: Timestamp
    error: str


def parts(cur: apsw.Cursor) -> dict[Key, HeldPart]:
    """All that are held."""
    return {
        (kind, id): HeldPart(Timestamp(flushed), error)
        for kind, id, flushed, error in cur.execute(
            "SELECT kind, id, flushed_ts, error FROM held_parts"
        )
    }


def ids(cur: apsw.Cursor, kind: int) -> dict[int, str]:
    """Those of one kind, and why."""
    return {id: held.error for (each, id), held in parts(cur).items() if each == kind}


def why(label: str, error: Exception) -> str:
    """Return why a part is to be held, as status.db keeps it: it is damaged, or nobody knows.

    Raises:
        CorruptionError: it is status.db that is damaged.
    """
    if isinstance(error, DatabaseDamagedError):
        raise error
    return f"{label}{_DENIED if isinstance(error, DeniedError) else ' is damaged: '}{error}"


def refusal(error: str, damaged: str) -> TxnkvError:
    """Return the error for who wants a part that is held.

    Args:
        error: why it is.
        damaged: what to do where it is damaged.
    """
    if _IS_DENIED.match(error):
        return DeniedError(f"{error}; then `txnkv compact`")
    return CorruptionError(f"{error}. {damaged}")


def refuse(held: Mapping[int, str], ids: Iterable[int]) -> None:
    """Refuse to write to parts that are held.

    Raises:
        CorruptionError: one of them is.
        DeniedError: a user who may not open it would have flushed it.
    """
    for id in ids if held else ():
        if id in held:
            raise refusal(
                held[id],
                "It takes no writes: `txnkv check` says more; restore its files from a backup and "
                "flush, or drop it",
            )


def accept_loss(part: str) -> str:
    """Return the end of a message about a damaged commit: what to do.

    Args:
        part: as people name it to `txnkv repair`.
    """
    return f". Restore the store from a backup, or {extents.giving_up(part)}"


def sections(cur: apsw.Cursor, after: Timestamp) -> Iterator[tuple[Section, int]]:
    """Yield the held sections of commits above `after`, by commit, and their timestamps."""
    for stamp, *section in cur.execute(
        "SELECT commit_ts, kind, id, data, first, offsets, crc FROM held_sections "
        "WHERE commit_ts > ? ORDER BY commit_ts",
        (after,),
    ):
        yield Section(*section), stamp


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
    cur.executemany(
        "UPDATE held_parts SET error = ? WHERE kind = ? AND id = ?",
        [(error, *key) for key, error in failed.items()],
    )
    if before.keys() != failed.keys():
        # Whoever is about to write looks at the catalog again.
        cur.execute("UPDATE clock_row SET catalog_version = catalog_version + 1")
        extents.hold(cur, [f"{_FOLDERS[kind]}/{id}" for kind, id in failed])
    if not failed:
        return
    log: list[Any] = cur.execute(
        "SELECT commit_ts, payload FROM commit_log WHERE commit_ts > ? AND commit_ts <= ?",
        (after, upto),
    ).fetchall()
    cur.executemany(
        "INSERT INTO held_sections VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (stamp, *section)
            for stamp, data in log
            for section in payload.unpack(data, stamp)
            if (section.kind, section.id) in failed
        ],
    )


def damaged(cur: apsw.Cursor, key: Key) -> list[Timestamp]:
    """Return the small commits whose section of a part is damaged, where nothing else has it."""
    flushed = one(cur, "SELECT flushed_ts FROM clock")[0]
    stored = [(stamp, found) for stamp, found in _log(cur) if stamp > flushed]
    stored += [(stamp, [section]) for section, stamp in sections(cur, Timestamp(0))]
    return sorted({Timestamp(stamp) for stamp, found in stored if _lost(found, key, stamp)})


def give_up(cur: apsw.Cursor, key: Key) -> None:
    """Remove the damaged sections of a part, from the commit log and from those that are held."""
    for stamp, found in _log(cur):
        lost = _lost(found, key, stamp)
        if lost:
            kept = [section for section in found if section not in lost]
            cur.execute(
                "UPDATE commit_log SET payload = ? WHERE commit_ts = ?",
                (payload.pack(kept, stamp), stamp),
            )
    for section, stamp in list(sections(cur, Timestamp(0))):
        if _lost([section], key, stamp):
            cur.execute(
                "DELETE FROM held_sections WHERE commit_ts = ? AND kind = ? AND id = ?",
                (stamp, *key),
            )
    # All processes read again what they have of the part.
    cur.execute("UPDATE clock_row SET catalog_version = catalog_version + 1")


def _log(cur: apsw.Cursor) -> list[tuple[int, list[Section]]]:
    rows: list[Any] = cur.execute("SELECT commit_ts, payload FROM commit_log").fetchall()
    return [(stamp, payload.unpack(data, stamp)) for stamp, data in rows]


def _lost(found: Iterable[Section], key: Key, stamp: int) -> list[Section]:
    return [s for s in found if (s.kind, s.id) == key and not s.is_whole(stamp)]
