"""Memory, descriptors and sizes of a soak, sampled; whether they stay flat; the picture."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

from benchmarks.svg import Series, chart

_SLACK: Final = {"memory": 60.0, "descriptors": 40.0, "disk": 80.0, "wal": 80.0}
"""Slack for what may come and go: descriptors by count, the others in MB."""

_OPENINGS: Final = 2
"""Descriptors LMDB holds of one file: for reading, and for synchronous writing of its meta page."""


def _suspects(pid: int) -> int:
    """Count the descriptors that no file of the store accounts for.

    A process that becomes the leader opens every log and tablet, each file once; a leak is a file
    opened once more, a deleted file still open, a pipe or a socket.
    """
    targets: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            targets[str(descriptor.readlink())] += 1
        except FileNotFoundError:
            continue
    return sum(
        max(0, count - _OPENINGS) if target[0] == "/" and "(deleted)" not in target else count
        for target, count in targets.items()
    )


class Samples:
    """The measured values: a quantity of somebody at some seconds."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

    def process(self, name: str, pid: int, at: float) -> None:
        """Take the memory that is a process's own (MB), and the descriptors that may be leaks."""
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            files = _suspects(pid)
        except OSError:
            return
        own = re.search(r"RssAnon:\s+(\d+)", status)
        if own:
            self._seen["memory", name].append((at, int(own[1]) / 1000))
            self._seen["descriptors", name].append((at, files))

    def store(self, store: Path, at: float) -> None:
        """Take the size of the store, and of status.db's write-ahead log (MB)."""
        size = 0
        for file in store.rglob("*"):
            try:
                size += file.stat().st_blocks * 512
            except OSError:
                continue
        self._seen["disk", "store"].append((at, size / 1e6))
        wal = store / "status.db-wal"
        self._seen["wal", "status.db"].append((at, wal.stat().st_size / 1e6 if wal.exists() else 0))

    def growth(self) -> list[str]:
        """List what grew: its median in the last fifth beside that of the second."""
        found = []
        for (what, name), seen in self._seen.items():
            fifth = len(seen) // 5
            if fifth < 3:
                continue
            before = statistics.median(y for _, y in seen[fifth : 2 * fifth])
            after = statistics.median(y for _, y in seen[-fifth:])
            if after > 1.5 * before + _SLACK[what]:
                found.append(f"{what} of {name} grew from {before:.0f} to {after:.0f}")
        return found

    def lines(self) -> list[str]:
        """A line for each: its median in each fifth."""
        lines = []
        for (what, name), seen in sorted(self._seen.items()):
            fifth = max(1, len(seen) // 5)
            parts = [seen[each : each + fifth] for each in range(0, fifth * 5, fifth)]
            medians = [f"{statistics.median(y for _, y in part):8.0f}" for part in parts if part]
            lines.append(f"{what:12} {name:20} {''.join(medians)}")
        return lines

    def picture(self) -> str:
        """Memory and size over the time, as SVG."""
        series = [
            Series(f"{what}, {name}", [(at / 60, y) for at, y in seen])
            for (what, name), seen in self._seen.items()
            if what != "descriptors"
        ]
        return chart("An hour of everything", "minutes", "MB", series, logarithmic=False)
