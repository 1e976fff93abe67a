"""The payload of a small commit: its changes, as they lie in its row of the commit log.

Little-endian:

    directory | the bytes of each section | the directory again | u32 length of a directory

    directory   u32 crc | u16 version | u16 reserved | u32 sections | sections x entry
    entry       u8 kind | u8[3] reserved | u32 length | u32 crc | u32 count | u64 id | u64 first

A section's checksum is its own and one damaged byte leaves one directory whole, so that damage says
which tablet or partition it is of. All checksums are CRC32C, seeded with the commit timestamp's low
32 bits, so that a payload in another's row is found; that of a directory covers the rest of it.
`first` and `count` are the offsets that messages take, 0 for rows. The meaning of a section's bytes
is its kind's affair.

Version 1 had one directory, entries without checksum, count and first, and one checksum over all.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from functools import partial
from typing import Final, NamedTuple, Protocol

import apsw

from txnkv import core
from txnkv.coordinator.ids import Timestamp

TABLET: Final = 1
"""A section of rows of one tablet."""

TOPIC: Final = 2
"""A section of batches of one partition of a topic."""

_VERSION: Final = 2
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<HHI")
_ENTRY = struct.Struct("<B3xIIIQQ")
_ENTRY_1 = struct.Struct("<B3xIQ")
_LENGTH = struct.Struct("<I")


class Section(NamedTuple):
    """The changes of a commit in one participant.

    Attributes:
        kind, id: of the participant.
        data: the bytes.
        first, offsets: of messages, the first offset and how many are taken.
        crc: of `data` as it was stored; None where it is not stored yet, or was verified.
    """

    kind: int
    id: int
    data: bytes
    first: int = 0
    offsets: int = 0
    crc: int | None = None

    def is_whole(self, commit_ts: int) -> bool:
        """Tell whether the bytes are those that were stored."""
        return self.crc is None or self.crc == _crc(self.data, commit_ts)


class LogMember(Protocol):
    """The memory of what small commits change; one member for each kind of section."""

    def apply(self, id: int, data: bytes, stamp: int) -> None:
        """Take one section in. The same section may come twice, with the same stamp."""

    def lose(self, section: Section, stamp: int, error: str) -> None:
        """Take in that a section is damaged: whoever reads there is told, and others are not."""

    def forget(self, id: int) -> None:
        """Forget all of one part; it comes again, if it is not gone for good."""

    def undo(self, ids: set[int], upto: int) -> None:
        """Drop from these what has a stamp above `upto`: its COMMIT failed."""

    def write_out(self, upto: Timestamp) -> dict[tuple[int, int], str]:
        """See to it that what has a stamp at or below `upto` is durable outside of the log.

        Returns:
            Parts that are damaged, and why: what is to be held of them.
        """

    def flushed(self, upto: Timestamp, held: Collection[int]) -> None:
        """Hear that commits at or below `upto` are found outside of the log from now on, but for
        parts that are held.
        """

    def reset(self) -> None:
        """Forget all; it comes again."""


section_of: Final = partial(tuple.__new__, Section)
"""A section of a tuple of all its fields: each commit makes some."""


def differs(payload: bytes, commit_ts: int) -> bool:
    """Tell whether any byte is another one than was stored, also of what no reader has to have.

    Raises:
        PayloadError: as `unpack`.
    """
    sections = unpack(payload, commit_ts)
    if _of_version_1(payload, commit_ts) is not None:
        return False
    whole = all(section.is_whole(commit_ts) for section in sections)
    return not whole or pack(sections, commit_ts) != payload


class PayloadError(Exception):
    """The bytes make no sense."""


pack: Final = core.pack
"""`pack(sections, commit_ts)` is the payload of a commit. A section keeps the checksum it has."""

take_in: Final = core.take_in
"""`take_in(members, sections, commit_ts)`: `pack`, and the members, by kind, have applied them."""


unpack_whole: Final = core.unpack
"""`unpack_whole(payload, commit_ts)` are kind, id and bytes of each section; None where anything of
them is damaged, or of another version: `unpack` tells.
"""


def unpack(payload: bytes, commit_ts: int) -> list[Section]:
    """Return the sections of a payload. The caller asks each of them whether it is whole.

    Raises:
        PayloadError: no section can be told from the others, it is of another commit, or of a
            version not known.
    """
    entries = _entries(payload, 0, commit_ts)
    if entries is None and (sections := _of_version_1(payload, commit_ts)) is not None:
        return sections
    if entries is None and len(payload) > _LENGTH.size:
        at = len(payload) - _LENGTH.size
        entries = _entries(payload, at - _LENGTH.unpack_from(payload, at)[0], commit_ts)
    if entries is None:
        raise PayloadError("its checksum does not match")
    at = _CRC.size + _HEAD.size + len(entries) * _ENTRY.size
    if len(payload) != 2 * at + sum(entry[1] for entry in entries) + _LENGTH.size:
        raise PayloadError("it has another length")
    sections = []
    for kind, length, crc, count, id, first in entries:
        sections.append(Section(kind, id, payload[at : at + length], first, count, crc))
        at += length
    return sections


def _crc(data: bytes, commit_ts: int) -> int:
    return core.crc32c(data, commit_ts & 0xFFFFFFFF)


def _entries(payload: bytes, at: int, commit_ts: int) -> list[tuple[int, ...]] | None:
    """The entries of the directory at a place; None where there is none that is whole."""
    begin = at + _CRC.size + _HEAD.size
    if at < 0 or begin > len(payload):
        return None
    version, _, count = _HEAD.unpack_from(payload, at + _CRC.size)
    if version == 1 or begin + count * _ENTRY.size > len(payload):
        return None
    body = payload[at + _CRC.size : begin + count * _ENTRY.size]
    if _CRC.unpack_from(payload, at)[0] != _crc(body, commit_ts):
        return None
    if version != _VERSION:
        raise PayloadError(f"it has version {version}, this program reads {_VERSION}")
    return list(_ENTRY.iter_unpack(body[_HEAD.size :]))


def _of_version_1(payload: bytes, commit_ts: int) -> list[Section] | None:
    """The sections of a payload of version 1; None where it is none, or is damaged."""
    body = payload[_CRC.size :]
    if len(body) < _HEAD.size or _CRC.unpack_from(payload)[0] != _crc(body, commit_ts):
        return None
    _, _, count = _HEAD.unpack_from(body)
    sections = []
    at = _HEAD.size
    for _ in range(count):
        kind, length, id = _ENTRY_1.unpack_from(body, at)
        at += _ENTRY_1.size
        sections.append(Section(kind, id, body[at : at + length]))
        at += length
    return sections


def logged(cur: apsw.Cursor, after: int, upto: int) -> Iterable[tuple[int, bytes]]:
    """Timestamps and payloads of the commits in (after, upto], ascending."""
    return cur.execute(
        "SELECT commit_ts, payload FROM commit_log WHERE commit_ts > ? AND commit_ts <= ? "
        "ORDER BY commit_ts",
        (after, upto),
    )


def find(cur: apsw.Cursor, txn_id: int) -> Timestamp | None:
    """Return when a small transaction committed; None when the log does not have it (any more)."""
    found = cur.execute("SELECT commit_ts FROM commit_log WHERE txn_id = ?", (txn_id,)).fetchone()
    return None if found is None else Timestamp(found[0])
