"""Follow the text files of a directory: each whole line becomes one message, once.

Where it is in each file changes in the transaction that sends the lines. So after a kill it goes
on after the last line that was sent, neither before nor behind it.

python -m examples.demo.pipeline.feed STORE DIRECTORY
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

import txnkv
from examples.demo.pipeline import layout

MOST: Final = 1 << 20
"""Bytes of a file that go into one transaction."""
PAUSE: Final = 0.1


def feed(client: txnkv.Client, directory: Path) -> int:
    """Send what was appended to the files of a directory. Returns the number of lines."""
    sent = 0
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            send = partial(_send, path=path, name=path.relative_to(directory).as_posix())
            while count := client.run(send):
                sent += count
    return sent


def _send(txn: txnkv.Transaction, path: Path, name: str) -> int:
    """Send a block of a file's lines, and note where it ends."""
    row = txn.get(layout.FILES, name)
    position = 0 if row is None else row["position"]
    with path.open("rb") as file:
        there = os.fstat(file.fileno())
        if row is not None and (there.st_ino != row["inode"] or there.st_size < position):
            print(f"{name} is another file now: read from its beginning", file=sys.stderr)
            position = 0
        file.seek(position)
        block = file.read(MOST)
    whole = block.rfind(b"\n") + 1
    if not whole and len(block) < MOST:
        return 0
    block = block[: whole or MOST]  # a line longer than a block is cut
    lines = block.removesuffix(b"\n").split(b"\n")
    batch = {"value": pa.array(lines, pa.binary()), "key": pa.repeat(name, len(lines))}
    txn.send_batch(layout.LINES, pa.record_batch(batch))
    place = {"name": name, "inode": there.st_ino, "position": position + len(block)}
    txn.upsert(layout.FILES, place)
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Follow the text files of a directory.")
    parser.add_argument("store")
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    with txnkv.connect(given.store) as client:
        layout.make(client)
        while True:
            if not feed(client, given.directory):
                time.sleep(PAUSE)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
