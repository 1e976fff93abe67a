"""Side logs of their own, for huge transactions: each an LMDB environment, dropped whole.

Measured with 512 MiB in batches of 1 MiB: appends go at 458 MB/s, against 679 MB/s in the
partition's side log, for each commits twice. What that buys is the end: LMDB never makes a file
shorter, so the partition's stayed 512 MiB longer for good, while the folder of an own one goes
in 0.1 s with all its space. Making one takes 1-4 ms, so it is worth it from `OWN_BYTES` on.

    logs/7/                  the partition's environment
    logs/7/side/4711/        the own side log of transaction 4711

What counts is written in the partition's environment, in the transaction that takes a batch;
batches in the own log that are beyond it are of a writer that died, and are written over.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import lmdb

from txnkv.core import place
from txnkv.errors import ClosedError, CorruptionError, StoreNotFoundError, UnavailableError
from txnkv.storage import (
    Environment,
    Environments,
    declare_fault_point,
    fault_point,
    make_private_directory,
    sync_directory,
)
from txnkv.topics.sidecar.side_chunks import SideChunks
from txnkv.topics.sidecar.side_index import SIDE

OWN_BYTES = 64 << 20
"""A transaction that has more than that in a partition goes on in a side log of its own."""

declare_fault_point("side.own_written", "batches are in an own side log, they do not count yet")
declare_fault_point("side.own_renamed", "an own side log is on its way out, its files are there")

_FOLDER: Final = "side"
_REMOVED: Final = ".removed-"


class OwnLogs:
    """The own side logs of a partition.

    Args:
        environment: the partition's.
        environments: of the store.
        name: of the partition's environment.
    """

    def __init__(self, environment: Environment, environments: Environments, name: str) -> None:
        self._folder = environment.path / _FOLDER
        self._environments = environments
        self._name = f"{name}/{_FOLDER}"

    def put(
        self, txn_id: int, index: int, batches: Sequence[bytes], *, begun: bool = False
    ) -> None:
        """Puts batches from an index on; durable when it returns.

        Args:
            txn_id: of the transaction.
            index: of the first message.
            batches: of the transaction.
            begun: what is before the index counts already; else the log is made if need be.

        Raises:
            CorruptionError: what is before the index is not there; nothing was put.
        """
        if not self._folder.exists() and not begun:
            make_private_directory(self._folder)
            sync_directory(self._folder.parent)

        def put(txn: lmdb.Transaction) -> None:
            chunks = SideChunks(txn, own.db(SIDE))
            if begun and chunks.end(txn_id) < index:
                raise self.lost(txn_id)
            chunks.put(txn_id, index, batches)

        try:
            own = self._environments.get(f"{self._name}/{txn_id}", create=not begun)
            own.write(put)
        except StoreNotFoundError:
            raise self.lost(txn_id) from None
        fault_point("side.own_written")

    def read(
        self, txn_id: int, index: int, upto: int, max_bytes: int, offset: int, commit_ts: int
    ) -> list[bytes]:
        """Copies of the batches of [index, upto), placed; at least one, until so many bytes.

        Args:
            txn_id: of the transaction.
            index: of the first message.
            upto: the index to stop at.
            max_bytes: to stop after.
            offset: of the transaction's message of index 0.
            commit_ts: of the commit.

        Raises:
            UnavailableError: the log was dropped after the marker was read; read anew.
            CorruptionError: a part of it is missing.
        """
        found: list[bytes] = []
        try:
            own = self._environments.get(f"{self._name}/{txn_id}", create=False)
            with own.read() as txn:
                for at, chunk in SideChunks(txn, own.db(SIDE)).read(txn_id, index, upto):
                    found.append(place(chunk, offset + at, commit_ts))
                    max_bytes -= len(chunk)
                    if max_bytes <= 0:
                        break
        except KeyError:
            raise self.lost(txn_id) from None  # it was made anew, empty
        except (StoreNotFoundError, ClosedError) as error:
            raise UnavailableError(
                f"the side log of transaction {txn_id} in {self._folder} was dropped while a "
                "reader was on its way to it: retention, or a truncation, took it; read anew"
            ) from error
        return found

    def lost(self, txn_id: int) -> CorruptionError:
        """The error for one that is gone, or of an earlier time."""
        return CorruptionError(
            f"the side log of transaction {txn_id} in {self._folder} is gone, or of an earlier "
            "time. What it held is not made up for. Restore it as it was last"
        )

    def names(self) -> list[int]:
        """The transactions that have one."""
        return _names(self._folder)

    def drop(self, txn_id: int) -> None:
        """Removes one with its files; twice is fine. Waits for readers of this process."""
        self._environments.drop(f"{self._name}/{txn_id}")
        folder = self._folder / str(txn_id)
        aside = folder.with_name(f"{_REMOVED}{txn_id}-{uuid.uuid4().hex}")
        try:
            folder.rename(aside)
        except FileNotFoundError:
            return
        sync_directory(self._folder)
        fault_point("side.own_renamed")
        shutil.rmtree(aside, ignore_errors=True)

    def remove_left(self) -> None:
        """Removes what somebody who died had begun to remove."""
        left = self._folder.glob(f"{_REMOVED}*") if self._folder.exists() else ()
        for each in left:
            shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        """Closes all in this process for good, before the files of the partition go."""
        close_all(self._environments, self._folder.parent, self._name.removesuffix(f"/{_FOLDER}"))


def close_all(environments: Environments, folder: Path, name: str) -> None:
    """Closes the own side logs of a partition in this process for good.

    Args:
        environments: of the store.
        folder: of the partition.
        name: of its environment.
    """
    for txn_id in _names(folder / _FOLDER):
        environments.drop(f"{name}/{_FOLDER}/{txn_id}")


def _names(folder: Path) -> list[int]:
    if not folder.exists():
        return []
    return [int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()]
