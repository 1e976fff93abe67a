"""Peak memory of loading and scanning a table that streams by.

Measured in a process of its own, as growth of resident memory over what it was before: the
caller makes batches as they are asked for, and keeps none.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa

import txnkv

from .data import SCHEMA
from .harness import Line

_LIMIT_MB = 600.0


class Peak:
    """Samples this process's resident memory every few milliseconds."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._base = self._process.memory_info().rss
        self._most = self._base
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self._most = max(self._most, self._process.memory_info().rss)

    @property
    def megabytes(self) -> float:
        return float(self._most - self._base) / 1e6


def measure(rows: int, path: Path, shuffled: bool) -> dict[str, float]:
    """Load and scan, in this process."""
    step = 1 << 20

    def batches() -> Iterator[pa.RecordBatch]:
        rng = np.random.default_rng(3)
        for first in range(0, rows, step):
            ids = np.arange(first, min(first + step, rows), dtype=np.int64)
            if shuffled:
                # 2**26 values, each hit once: every batch spreads over all keys.
                ids = (ids * 48271 + 11) % (1 << 26)
            yield pa.record_batch([ids, rng.random(len(ids)), ids], schema=SCHEMA.arrow)

    with txnkv.connect(path) as client:
        table = client.create_table("t", SCHEMA)
        source = pa.RecordBatchReader.from_batches(SCHEMA.arrow, batches())
        with Peak() as loading, client.transaction(timeout=None) as txn:
            inserted = txn.write(table, source).inserted
        assert inserted == rows
        seen = 0
        with Peak() as scanning:
            for batch in table.scan().to_batches():
                seen += batch.num_rows
        assert seen == rows
    return {"load": loading.megabytes, "scan": scanning.megabytes}


def memory(rows: int, base: Path | None) -> list[Line]:
    """Peak memory beyond the caller's own data, loading sorted and random keys."""
    lines = []
    for shuffled in (False, True):
        path = Path(tempfile.mkdtemp(prefix="txnkv-bench-", dir=base))
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.memory",
                    str(rows),
                    str(path),
                    str(int(shuffled)),
                ],
                check=True,
                capture_output=True,
                text=True,
            )
        finally:
            shutil.rmtree(path)
        for what, peak in json.loads(done.stdout).items():
            keys = "random" if shuffled else "sorted"
            line = Line(f"peak memory, {rows:,} rows", f"{what}, {keys} keys", 0.0, (0.0, 0.0))
            line.goal, line.reached = f"< {_LIMIT_MB:g} MB", peak < _LIMIT_MB
            line.extra = {"resident memory grew by": f"{peak:.0f} MB"}
            lines.append(line)
    return lines


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), Path(sys.argv[2]) / "store", sys.argv[3] == "1")))
