"""The tables and topics of the soak, and the files beside the store.

A chain is a topic of orders, what is billed of them, and their receipts, which are mailed:

    feeder -> orders -> biller -> receipts -> mailer
      sent              billed               mailed, streamed (Spark)

Each number is in each table once, if nothing is lost or doubled.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

import txnkv

CHAINS: Final = ("marker", "sidecar")
"""Each by its transaction buffer."""
STAGES: Final = ("sent", "billed", "mailed")
STREAMED: Final = "streamed"
"""The table that Spark makes of the receipts of the first chain."""
ACCOUNTS: Final = 24
START: Final = 1000
GENERATION: Final = 20_000
"""Rows of a bulk load, which takes the place of the one before."""
HISTORY: Final = 60.0
RETENTION: Final = 600.0
NUMBERS: Final = txnkv.Schema({"number": "int64"}, primary_key=["number"])
_RANGE: Final = struct.Struct("<qq")


class Place:
    """The folder of a soak: the store on a disk of its own, the rest beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.store = self.disk / "store"
        self.errors = folder / "errors"
        self.checkpoints = folder / "checkpoints"

    def make(self) -> None:
        for each in (self.disk, self.errors, self.checkpoints):
            each.mkdir(parents=True, exist_ok=True)

    def beat(self, role: str) -> Path:
        """Touched at each step of a role."""
        return self.folder / f"beat-{role}"

    def clock(self, role: str) -> Path:
        """Holds the seconds that the clock of a role is off by."""
        return self.folder / f"clock-{role}"

    def tolerated(self) -> Path:
        """Has a line for each error that was to be expected."""
        return self.folder / "tolerated"

    def acknowledge(self, chain: str, first: int, last: int) -> None:
        """Write down that these numbers are committed."""
        file = os.open(self._acknowledged(chain), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, _RANGE.pack(first, last))
        finally:
            os.close(file)

    def acknowledged(self, chain: str) -> list[tuple[int, int]]:
        """The ranges of numbers that are committed, ascending."""
        try:
            return list(_RANGE.iter_unpack(self._acknowledged(chain).read_bytes()))
        except FileNotFoundError:
            return []

    def _acknowledged(self, chain: str) -> Path:
        return self.folder / f"acknowledged-{chain}"


def connect(place: Place) -> txnkv.Client:
    return txnkv.connect(place.store, history=HISTORY)


def build(client: txnkv.Client, spark: bool) -> None:
    """Make all tables and topics."""
    for chain in CHAINS:
        for stage in STAGES:
            client.create_table(f"{stage}_{chain}", NUMBERS, txnkv.hash_partition("number", 2))
        for topic in ("orders", "receipts"):
            client.create_topic(
                f"{topic}_{chain}",
                partitions=2,
                buffer=chain,
                retention_seconds=RETENTION,
                retain_unacknowledged=True,
            )
    floors = txnkv.Schema({"chain": "string", "floor": "int64"}, primary_key=["chain"])
    client.create_table("floors", floors)
    accounts = txnkv.Schema({"id": "int64", "balance": "int64"}, primary_key=["id"])
    client.create_table("accounts", accounts, txnkv.hash_partition("id", 3))
    bulk = txnkv.Schema({"id": "int64", "generation": "int64"}, primary_key=["id"])
    for name in ("loaded", "painted") if spark else ("loaded",):
        client.create_table(name, bulk, txnkv.hash_partition("id", 2))
    if spark:
        client.create_table(STREAMED, NUMBERS)
    with client.transaction() as txn:
        for id in range(ACCOUNTS):
            txn.insert("accounts", (id, START))


def floor(reader: txnkv.Transaction | txnkv.Snapshot, chain: str) -> int:
    """The number up to which all have gone all the way, and were taken away."""
    row = reader.get("floors", chain)
    return row["floor"] if row else 0
