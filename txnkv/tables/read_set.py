"""The read set of a serializable transaction: keys and ranges of keys, by tablet.

At commit nothing of it may have been changed by others since the snapshot. Keys that were asked
for and not found are in it too, and whole ranges: a row that appears where a scan saw none is a
change as well.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from txnkv import core
from txnkv.storage import new_lock

Range = tuple[bytes | None, bytes | None]
"""low <= key < high; None is unbounded."""


_FEW: Final = 64
"""So many ranges are not joined before somebody asks."""


@dataclass
class _Tablet:
    """The reads of one tablet.

    Attributes:
        ranges: as they came, those behind the first `joined`.
        joined: so many ranges are in order, and apart from each other.
    """

    keys: set[bytes] = field(default_factory=set)
    bulk: list[core.Keys] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    joined: int = 0

    def add(self, found: Range) -> None:
        """Put a range in. They are joined when they have doubled: n of them cost n log n."""
        self.ranges.append(found)
        if len(self.ranges) > max(_FEW, 2 * self.joined):
            self.join()

    def join(self) -> list[Range]:
        """The ranges, ascending, apart from each other."""
        if self.joined < len(self.ranges):
            self.ranges = _joined(self.ranges)
            self.joined = len(self.ranges)
        return self.ranges


class ReadSet:
    """Keys and ranges read. Shared by threads."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._tablets: dict[int, _Tablet] = {}

    # -- recording ---------------------------------------------------------------------

    def add_key(self, tablet_id: int, key: bytes) -> None:
        """An encoded key that was asked for, found or not."""
        with self._lock:
            self._of(tablet_id).keys.add(key)

    def add_keys(self, tablet_id: int, keys: core.Keys) -> None:
        """Encoded keys that were asked for, in any order."""
        if keys.n:
            with self._lock:
                self._of(tablet_id).bulk.append(core.Keys.concat([keys]))

    def add_range(self, tablet_id: int, low: bytes | None, high: bytes | None) -> None:
        """All keys with low <= key < high; None is unbounded."""
        if low is None or high is None or low < high:
            with self._lock:
                self._of(tablet_id).add((low, high))

    def _of(self, tablet_id: int) -> _Tablet:
        return self._tablets.setdefault(tablet_id, _Tablet())

    # -- asking ------------------------------------------------------------------------

    @property
    def tablet_ids(self) -> list[int]:
        """Tablets of which something was read."""
        with self._lock:
            return sorted(self._tablets)

    def keys(self, tablet_id: int) -> core.Keys:
        """The keys read, strictly ascending, without those that lie in a range."""
        with self._lock:
            tablet = self._tablets.get(tablet_id, _Tablet())
            ranges = tablet.join()
            single = sorted(key for key in tablet.keys if not _covers(ranges, key))
            parts = list(tablet.bulk)
        if single:
            parts.append(_keys_of(single, parts[0].width if parts else None))
        if not parts:
            return core.Keys.of([])
        keys = core.Keys.concat(parts) if len(parts) > 1 else parts[0]
        order = core.sort_keys(keys)
        if order is None:
            return keys
        keys = keys.gather(order)
        doubles = core.mark_duplicates(keys, None)
        return keys.gather(doubles.zeros()) if doubles.count else keys

    def ranges(self, tablet_id: int) -> list[Range]:
        """The ranges read, ascending, apart from each other."""
        with self._lock:
            tablet = self._tablets.get(tablet_id)
            return list(tablet.join()) if tablet is not None else []


def _keys_of(keys: list[bytes], width: int | None) -> core.Keys:
    """Return keys as the core takes them: of fixed width where those they are joined with are, or
    where they can be.
    """
    if width is None:
        width = len(keys[0]) if len({len(key) for key in keys}) == 1 else 0
    return core.Keys.fixed(b"".join(keys), width) if width else core.Keys.of(keys)


def _joined(ranges: list[Range]) -> list[Range]:
    joined: list[Range] = []
    for low, high in sorted(ranges, key=lambda found: found[0] or b""):
        if joined:
            before, reach = joined[-1]
            if reach is None:
                break
            if low is None or low <= reach:
                joined[-1] = (before, None if high is None else max(reach, high))
                continue
        joined.append((low, high))
    return joined


def _covers(ranges: list[Range], key: bytes) -> bool:
    at = bisect_left(ranges, True, key=lambda found: (found[0] or b"") > key) - 1
    if at < 0:
        return False
    high = ranges[at][1]
    return high is None or key < high
