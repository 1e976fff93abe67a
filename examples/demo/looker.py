"""The process that looks on: counts both tables in one snapshot, again and again.

It is told nothing about the job. It writes a line of JSON whenever it sees something else
than before, and one at the end, when its stdin is closed.
"""

from __future__ import annotations

import json
import select
import sys
import time
from typing import Final

import txnkv
from examples.demo.look import Look

PAUSE: Final = 0.01


def watch(store: str, tables: list[str]) -> None:
    """Look on until stdin is closed."""
    seen: Look | None = None
    with txnkv.connect(store, create=False, read_only=True) as client:
        while True:
            with client.snapshot() as snapshot:
                now = time.monotonic()  # that it is of; the counts take their time
                counts = tuple(client.table(name).count(snapshot=snapshot) for name in tables)
            if seen is None:
                print("ready", flush=True)
                seen = Look(now, now, 1, counts)
            elif counts == seen.counts:
                seen = Look(seen.first, now, seen.looks + 1, counts)
            else:
                _say(seen)
                seen = Look(now, now, 1, counts)
            if select.select([sys.stdin], [], [], PAUSE)[0]:
                _say(seen)
                return


def _say(look: Look) -> None:
    print(json.dumps(look.__dict__), flush=True)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2:])
