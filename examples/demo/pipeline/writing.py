"""Somebody who writes: appends real text to files, until told to stop."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from examples.demo.sources import Input
from txnkv.storage.locks import new_event

FILES: Final = 8
_TICK: Final = 0.05


class Writer(threading.Thread):
    """Appends documents to the files of a directory, a few lines at a time.

    Args:
        source: whose documents are written, in random order, again and again.
        directory: where to.
        rate: lines a second, about.
    """

    def __init__(self, source: Input, directory: Path, rate: float) -> None:
        super().__init__(name="writer", daemon=True)
        self._source = source
        self._directory = directory
        self._rate = rate
        self._stopped = new_event()
        self.lines = 0

    def run(self) -> None:
        begin = time.monotonic()
        random_ = random.Random(0)
        files = [
            (self._directory / f"part-{number}.txt").open("ab", buffering=0)
            for number in range(FILES)
        ]
        lines = self._lines(random_)
        while not self._stopped.is_set():
            due = int((time.monotonic() - begin) * self._rate) - self.lines
            for _ in range(due):
                # Not whole lines at a time: a reader has to cope with half of one.
                line = next(lines)
                file = random_.choice(files)
                half = random_.randrange(len(line))
                file.write(line[:half])
                file.write(line[half:])
            self.lines += max(due, 0)
            self._stopped.wait(_TICK)
        for file in files:
            file.close()

    def stop(self) -> None:
        """No more."""
        self._stopped.set()
        self.join()

    def _lines(self, random_: random.Random) -> Iterator[bytes]:
        while True:
            name = random_.choice(self._source.files)
            for line in (self._source.root / name).read_bytes().splitlines():
                yield line + b"\n"
