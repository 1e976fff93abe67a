"""The parts of a side log: the list in a marker, keys, batches that count once they are seen.

The list is the body of a SIDE_LIST control batch. It names side batches by runs, for those of
one transaction stand one behind the other under its id:

     0          8           16          24          32
    +----------+-----------+-----------+-----------+
    | which    | index of  | messages  | bytes of  |     little-endian, one entry a run
    | log      | the first | in it     | batches   |
    +----------+-----------+-----------+-----------+

The log is 0 for the partition's side log, 1 for the transaction's own. The index is that of a
message in the transaction, from 0: the message's offset is the marker's first offset and that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from txnkv.core import (
    Attributes,
    BatchHeader,
    Control,
    ControlType,
    CoreError,
    crc32c,
    read_control,
    read_header,
    walk,
)
from txnkv.errors import CorruptionError

SHARED: Final = 0
OWN: Final = 1
CHUNK_BYTES: Final = (64 << 10) - 16
"""Small batches are gathered to so many bytes; it is what LMDB stores in 16 pages."""

_ENTRY: Final = struct.Struct("<QQQQ")
_KEY: Final = struct.Struct(">QQ")
_ATTRIBUTES: Final = struct.Struct("<H")
_CRC: Final = struct.Struct("<I")


class SideRun(NamedTuple):
    """One entry of a list: side batches that stand one behind the other.

    Attributes:
        log: SHARED or OWN.
        first: the index in the transaction of the first message.
        count: how many messages.
        bytes: of their batches.
    """

    log: int
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    bytes: int

    @property
    def end(self) -> int:
        """The index behind its last message."""
        return self.first + self.count


class Marker(NamedTuple):
    """A SIDE_LIST marker as it lies in a log.

    Attributes:
        header: of the control batch.
        runs: what it stands for, by index.
    """

    header: BatchHeader
    runs: tuple[SideRun, ...]


def pack_runs(runs: Sequence[SideRun]) -> bytes:
    """The body of a marker."""
    return b"".join(_ENTRY.pack(*run) for run in runs if run.count)


def read_marker(marker: Any) -> Marker:
    """A SIDE_LIST control batch.

    Raises:
        CorruptionError: it is damaged, is none, or its list and its offsets differ in number.
    """
    try:
        header, control = read_header(marker), read_control(marker)
    except CoreError as error:
        raise CorruptionError(f"marker of a side log: {error}") from None
    runs = _runs(control)
    if not runs or sum(run.count for run in runs) != header.count:
        raise CorruptionError(
            f"marker at offset {header.base_offset}: it takes {header.count} offsets and lists "
            f"{sum(run.count for run in runs)} messages. Check the store, or restore a backup"
        )
    return Marker(header, runs)


def _runs(control: Control) -> tuple[SideRun, ...]:
    body = control.body
    if control.type is not ControlType.SIDE_LIST or len(body) % _ENTRY.size:
        return ()
    return tuple(SideRun(*fields) for fields in _ENTRY.iter_unpack(body))


def side_bytes(marker: Any) -> int:
    """Count the bytes of the batches that a SIDE_LIST marker stands for.

    Raises:
        CorruptionError: it is none, or damaged.
    """
    return sum(run.bytes for run in read_marker(marker).runs)


# -- keys ------------------------------------------------------------------------------


def key(txn_id: int, index: int) -> bytes:
    """Return the key of a chunk of side batches, by the index of its first message."""
    return _KEY.pack(txn_id, index)


def read_key(stored: Any) -> tuple[int, int]:
    """The transaction and the index of a key."""
    txn_id, index = _KEY.unpack(stored)
    return txn_id, index


# -- batches ---------------------------------------------------------------------------


def decided(batch: bytes, txn_id: int) -> bytes:
    """A batch of a transaction as a side log holds it: DECIDED.

    Nobody sees it before the marker stands in the log, so whoever sees it sees a decided one.

    Raises:
        ValueError: it is no data batch of this transaction.
    """
    header = read_header(batch)
    if header.txn_id != txn_id or header.is_control or header.length != len(batch):
        raise ValueError(
            f"append to the side log of transaction {txn_id}: one data batch of it each, not "
            f"{len(batch)} bytes that begin with a batch of {header.txn_id}"
        )
    if header.is_decided:
        return batch
    sealed = bytearray(batch)
    _ATTRIBUTES.pack_into(sealed, 26, header.attributes | Attributes.DECIDED)
    _CRC.pack_into(sealed, 16, crc32c(memoryview(sealed)[20:]))
    return bytes(sealed)


def gathered(buffers: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Buffers in order, small ones together, as they become one chunk."""
    chunk: list[bytes] = []
    size = 0
    for buffer in buffers:
        if chunk and size + len(buffer) > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(buffer)
        size += len(buffer)
    if chunk:
        yield chunk


def batches_of(chunk: Any) -> list[tuple[int, BatchHeader]]:
    """The batches of a chunk of a side log, with where they begin.

    Raises:
        CorruptionError: there is something else in it.
    """
    try:
        return walk(chunk)
    except CoreError as error:
        raise CorruptionError(f"side log: {error}") from None
