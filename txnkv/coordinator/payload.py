"""The payload of a small commit: what it changes, in its row of the commit log.

Little-endian:

    u32 crc | u16 version | u16 reserved | u32 sections
    sections x { u8 kind, u8[3] reserved, u32 length, u64 id, bytes }

The CRC32C covers all behind it and is seeded with the commit timestamp's low 32 bits, so that
a payload in another's row is found. What the bytes of a section mean is its kind's affair.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from txnkv.core import crc32c

TABLET: Final = 1
"""A section of rows of one tablet."""

TOPIC: Final = 2
"""A section of batches of one partition of a topic."""

_VERSION: Final = 1
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<HHI")
_SECTION = struct.Struct("<B3xIQ")


class Section(NamedTuple):
    """What a commit changes in one participant."""

    kind: int
    id: int
    data: bytes


class PayloadError(Exception):
    """The bytes make no sense."""


def pack(sections: Iterable[Section], commit_ts: int) -> bytes:
    """The payload of a commit."""
    parts: list[bytes] = []
    count = 0
    for kind, id, data in sections:
        parts += (_SECTION.pack(kind, len(data), id), data)
        count += 1
    body = b"".join((_HEAD.pack(_VERSION, 0, count), *parts))
    return _CRC.pack(crc32c(body, commit_ts & 0xFFFFFFFF)) + body


def unpack(payload: bytes, commit_ts: int) -> list[Section]:
    """The sections of a payload.

    Raises:
        PayloadError: it is damaged, of another commit, or of a version not known.
    """
    body = payload[_CRC.size :]
    if len(body) < _HEAD.size or _CRC.unpack_from(payload)[0] != crc32c(
        body, commit_ts & 0xFFFFFFFF
    ):
        raise PayloadError("its checksum does not match")
    version, _, count = _HEAD.unpack_from(body)
    if version != _VERSION:
        raise PayloadError(f"it has version {version}, this program reads {_VERSION}")
    sections = []
    at = _HEAD.size
    for _ in range(count):
        kind, length, id = _SECTION.unpack_from(body, at)
        at += _SECTION.size
        sections.append(Section(kind, id, body[at : at + length]))
        at += length
    return sections
