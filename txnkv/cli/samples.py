"""The numbers that `txnkv ui` plots: a ring of samples in the runtime folder of a store.

So they outlive the server that took them, and another one goes on with them. Each second has a
place:

    place   at % 900      f64 at | f64 x 6 numbers, NaN where there is none | u32 checksum

Where two servers look at one store, both write the same numbers to the same places. The folder
is volatile, as what is in it may be: what does not check is no sample, and where nothing can be
written the ring is of this process alone.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from txnkv.storage import new_lock

NAMES: Final = ("commits", "p99", "conflicts", "lag", "memory", "files")
KEPT: Final = 900
"""Seconds of the ring."""

Sample = dict[str, float | None]

_PLACE: Final = struct.Struct(f"<d{len(NAMES)}dI")


class Samples:
    """The samples of the last quarter of an hour. Shared by threads.

    Args:
        folder: of the store's runtime.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = new_lock()
        self._places: dict[int, Sample] = {}
        self._file: int | None = None
        with suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(folder / "ui-samples", flags, 0o600)
            self._read(os.pread(self._file, KEPT * _PLACE.size, 0))

    def close(self) -> None:
        """Leave the file to the next one."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)

    def add(self, at: float, numbers: Sample) -> None:
        """Keep the numbers of a time, in seconds since 1970."""
        place = int(at) % KEPT
        values = [_number(numbers[name]) for name in NAMES]
        packed = _PLACE.pack(at, *values, 0)[:-4]
        with self._lock:
            self._places[place] = {"at": at, **numbers}
            if self._file is not None:
                with suppress(OSError):
                    line = packed + struct.pack("<I", zlib.crc32(packed))
                    os.pwrite(self._file, line, place * _PLACE.size)

    def since(self, time: float, now: float) -> list[Sample]:
        """The samples behind a time, of the last quarter of an hour, in their order."""
        begin = max(time, now - KEPT)
        with self._lock:
            found = [(each["at"] or 0.0, each) for each in self._places.values()]
        found.sort(key=lambda each: each[0])
        return [each for at, each in found if begin < at <= now]

    def _read(self, data: bytes) -> None:
        for place in range(len(data) // _PLACE.size):
            packed = data[place * _PLACE.size : (place + 1) * _PLACE.size]
            at, *values, checksum = _PLACE.unpack(packed)
            if checksum == zlib.crc32(packed[:-4]) and int(at) % KEPT == place:
                numbers = (None if math.isnan(value) else value for value in values)
                self._places[place] = {"at": at, **dict(zip(NAMES, numbers, strict=True))}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
