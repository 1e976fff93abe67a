"""Record batches in plain Python, from docs/format-topics.md alone: what the C core is held to.

No code is shared with txnkv.core. Without compression, and slow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

HEADER = struct.Struct("<QQIIHHIQqqQiHHII")
TRANSACTIONAL, CONTROL, DECIDED, KEYS, HEADERS, TIMES, NULL_VALUES, CHUNK, PLACES = (
    1 << bit for bit in range(3, 12)
)
MAGIC, ABORT = 1, 0


class Row(NamedTuple):
    """A message; time None: that of the batch."""

    value: bytes | None
    key: bytes | None = None
    headers: bytes | None = None
    time: int | None = None


class Seen(NamedTuple):
    """A message as a reader sees it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: bytes | None
    txn_id: int


class Batch(NamedTuple):
    """A batch taken apart."""

    at: int
    base_offset: int
    taken: int
    attributes: int
    txn_id: int
    rows: int
    length: int
    control_type: int
    messages: list[Seen]


def crc32c(data: bytes) -> int:
    """CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def _ends(items: Sequence[bytes]) -> bytes:
    ends = [sum(len(item) for item in items[:i]) for i in range(len(items) + 1)]
    return struct.pack(f"<{len(ends)}I", *ends)


def _bitmap(items: Sequence[bytes | None]) -> bytes:
    number = sum(1 << i for i, item in enumerate(items) if item is not None)
    return number.to_bytes((len(items) + 7) // 8, "little")


def _seal(fields: Sequence[int], body: bytes) -> bytes:
    flags, *others = fields
    batch = HEADER.pack(0, 0, 0, HEADER.size + len(body), MAGIC, flags, *others) + body
    return batch[:16] + struct.pack("<I", crc32c(batch[20:])) + batch[20:]


def encode_batch(
    rows: Sequence[Row],
    timestamp: int,
    txn_id: int = 0,
    decided: bool = False,
    producer_id: int = 0,
    epoch: int = 0,
    base_sequence: int = -1,
    chunk: tuple[int, int, int, int] | None = None,
    places: Sequence[int] | None = None,
    count: int | None = None,
) -> bytes:
    """Messages as a batch at offset 0."""
    values = [row.value for row in rows]
    keys = [row.key for row in rows]
    headers = [row.headers for row in rows]
    times = [timestamp if row.time is None else row.time for row in rows]
    flags = (TRANSACTIONAL if txn_id else 0) | (DECIDED if decided else 0)
    parts = [_ends([v or b"" for v in values])]
    if None in values:
        flags |= NULL_VALUES
        parts.append(_bitmap(values))
    if any(key is not None for key in keys):
        flags |= KEYS
        parts += [_bitmap(keys), _ends([k or b"" for k in keys])]
    if any(headers):
        flags |= HEADERS
        parts.append(_ends([h or b"" for h in headers]))
    if len(set(times)) > 1:
        flags |= TIMES
        parts.append(struct.pack(f"<{len(times)}q", *times))
    if places is not None and list(places) != list(range(len(rows))):
        flags |= PLACES
        parts.append(struct.pack(f"<{len(places)}I", *places))
    parts += [b"".join(item or b"" for item in column) for column in (values, keys, headers)]
    body = b"".join(_padded(part) for part in parts)
    n, before = len(rows), b""
    if chunk is not None:
        flags |= CHUNK
        before = struct.pack("<QIIQ", *chunk)
    ids = (producer_id, base_sequence, epoch, 0)
    taken = n if count is None else count
    return _seal((flags, taken, txn_id, min(times), max(times), *ids, n, len(body)), before + body)


def encode_control(
    type: int,
    timestamp: int,
    txn_id: int = 0,
    count: int = 1,
    low_water_mark: int = 0,
    first_offset: int = 0,
    body: bytes = b"",
) -> bytes:
    """A control batch at offset 0."""
    content = struct.pack("<HHIQQ", 0, type, 0, low_water_mark, first_offset) + body
    flags = CONTROL | (TRANSACTIONAL if txn_id else 0)
    times = (timestamp, timestamp)
    return _seal((flags, count, txn_id, *times, 0, -1, 0, 0, 0, len(content)), content)


def place(buf: bytes, base_offset: int, commit_ts: int = 0) -> bytes:
    """Batches with their offsets."""
    out = b""
    for batch in batches(buf):
        head = struct.pack("<Q", base_offset)
        old = buf[batch.at + 8 : batch.at + 16]
        out += head + (struct.pack("<Q", commit_ts) if commit_ts else old)
        out += buf[batch.at + 16 : batch.at + batch.length]
        base_offset += batch.taken
    return out


def batches(buf: bytes) -> Iterator[Batch]:
    """The batches of a buffer, checksums checked."""
    at = 0
    while at < len(buf):
        base, _, crc, length, magic, flags, count, txn, base_time, *rest = HEADER.unpack_from(
            buf, at
        )
        rows = rest[5]
        assert magic == MAGIC
        assert crc == crc32c(buf[at + 20 : at + length])
        body = buf[at + HEADER.size + (24 if flags & CHUNK else 0) : at + length]
        control = struct.unpack_from("<H", body, 2)[0] if flags & CONTROL else -1
        messages = [] if flags & CONTROL else _messages(body, flags, rows, base, txn, base_time)
        yield Batch(at, base, count, flags, txn, rows, length, control, messages)
        at += length


def _messages(body: bytes, flags: int, n: int, base: int, txn_id: int, time: int) -> list[Seen]:
    parts = iter(_parts(body, flags, n))
    ends = next(parts)
    valid = next(parts) if flags & NULL_VALUES else [1] * n
    keyed, key_ends = (next(parts), next(parts)) if flags & KEYS else ([0] * n, [0] * (n + 1))
    header_ends = next(parts) if flags & HEADERS else [0] * (n + 1)
    times = next(parts) if flags & TIMES else [time] * n
    places = next(parts) if flags & PLACES else range(n)
    at = sum(_widths(flags, n))
    columns = []
    for column in (ends, key_ends, header_ends):
        columns.append([body[at + a : at + b] for a, b in pairwise(column)])
        at += -(-column[n] // 8) * 8
    assert at == len(body)
    values, keys, headers = columns
    return [
        Seen(
            base + places[i],
            times[i],
            keys[i] if keyed[i] else None,
            values[i] if valid[i] else None,
            headers[i] or None,
            txn_id,
        )
        for i in range(n)
    ]


def _kinds(flags: int) -> str:
    """The arrays before the bytes: ends, bits, times or places."""
    return (
        "e"
        + ("b" if flags & NULL_VALUES else "")
        + ("be" if flags & KEYS else "")
        + ("e" if flags & HEADERS else "")
        + ("t" if flags & TIMES else "")
        + ("p" if flags & PLACES else "")
    )


def _widths(flags: int, n: int) -> list[int]:
    sizes = {"e": 4 * (n + 1), "b": (n + 7) // 8, "t": 8 * n, "p": 4 * n}
    return [-(-sizes[kind] // 8) * 8 for kind in _kinds(flags)]


def _parts(body: bytes, flags: int, n: int) -> Iterator[list[int]]:
    at = 0
    for kind, width in zip(_kinds(flags), _widths(flags, n), strict=True):
        if kind == "b":
            number = int.from_bytes(body[at : at + width], "little")
            yield [number >> i & 1 for i in range(n)]
        elif kind == "e":
            yield list(struct.unpack_from(f"<{n + 1}I", body, at))
        elif kind == "p":
            yield list(struct.unpack_from(f"<{n}I", body, at))
        else:
            yield list(struct.unpack_from(f"<{n}q", body, at))
        at += width


def committed(
    buf: bytes, aborted: Sequence[tuple[int, int]], from_offset: int, upto: int
) -> list[Seen]:
    """Return what a READ_COMMITTED reader is shown of one whole fetch, by Kafka's rule."""
    waiting = sorted((first, txn_id) for txn_id, first in aborted)
    inside: set[int] = set()
    seen: list[Seen] = []
    for batch in batches(buf):
        if batch.base_offset + batch.taken > upto:
            break
        while waiting and waiting[0][0] <= batch.base_offset + batch.taken - 1:
            inside.add(waiting.pop(0)[1])
        if batch.attributes & CONTROL:
            if batch.control_type == ABORT:
                inside.discard(batch.txn_id)
        elif batch.txn_id not in inside:
            seen += [message for message in batch.messages if message.offset >= from_offset]
    return seen
