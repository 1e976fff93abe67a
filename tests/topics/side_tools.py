"""A log with its side logs, driven as the engine does, for tests of side logs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.topics.log_tools import Log, data
from txnkv import core
from txnkv.core import ControlType
from txnkv.topics.log.partition_log import LogOptions, PartitionLog
from txnkv.topics.sidecar import side_problems
from txnkv.topics.sidecar.side_logs import SideLogs
from txnkv.topics.sidecar.side_sweep import SideSwept


class SideLog(Log):
    """A log of a sidecar topic in a store of its own. A context manager."""

    def __init__(self, folder: Path, options: LogOptions | None = None) -> None:
        self.clock = 1 << 40
        super().__init__(folder, options)

    def open(self) -> None:
        super().open()
        self.side = SideLogs(self.environment, self.environments, "logs/1")
        self.log = PartitionLog(self.environment, self.options, self.side.expand)

    def problems(self) -> list[str]:
        with self.environment.read() as txn:
            return super().problems() + list(side_problems(self.side, self.log, txn))

    def send(self, txn_id: int, *values: bytes, batch: int = 1 << 30) -> None:
        """Appends messages of a transaction, so many to a batch."""
        parts = [values[at : at + batch] for at in range(0, len(values), batch)]
        batches = [data(txn_id, values=part) for part in parts]
        self.environment.write(lambda txn: self.side.append(txn, txn_id, batches))

    def plain(self, *values: bytes) -> int:
        """Messages of no transaction, in the log; the offset of the first."""
        return self.append(data(values=values), commit_ts=self.tick())

    def tick(self) -> int:
        self.clock += 1 << 20
        return self.clock

    def commit(self, txn_id: int) -> int | None:
        """Commits a transaction; where its messages begin, None: it had none."""
        commit_ts = self.tick()

        def write(txn: Any) -> int | None:
            count = self.side.count(txn, txn_id)
            if not count:
                return None
            at = self.log.end(txn)
            batch = core.encode_control(
                ControlType.SIDE_LIST,
                txn_id=txn_id,
                count=count,
                timestamp=self.side.max_timestamp(txn, txn_id),
                body=self.side.marker_body(txn, txn_id),
            )
            self.log.put(txn, [core.place(batch, at, commit_ts)])
            self.side.committed(txn, txn_id, at, commit_ts)
            return at

        return self.environment.write(write)

    def abort(self, txn_id: int) -> None:
        self.environment.write(lambda txn: self.side.abort(txn, txn_id))

    def truncate(self, offset: int) -> int:
        def write(txn: Any) -> int:
            self.side.truncate(txn, offset)
            return self.log.truncate(txn, offset)

        return self.environment.write(write)

    def advance_start(self, offset: int) -> None:
        self.environment.write(lambda txn: self.log.advance_start(txn, offset))

    def sweep(self) -> SideSwept:
        return self.side.sweep(self.log)

    def look(self, name: str, *args: Any) -> Any:
        """A method of the side logs inside a read."""
        with self.environment.read() as txn:
            return getattr(self.side, name)(txn, *args)

    def raw(self, offset: int | None = None, max_bytes: int = 1 << 40) -> bytes:
        """Return the bytes that a reader gets."""
        at = self.start if offset is None else offset
        return bytes(self.ask("read", at, max_bytes))

    def values(self, offset: int | None = None, max_bytes: int = 1 << 20) -> dict[int, bytes]:
        """All messages from an offset on, read piece by piece."""
        at = self.start if offset is None else offset
        return dict(self.committed(at, max_bytes))

    @property
    def folders(self) -> list[str]:
        """Side logs of their own, on the disk."""
        side = self.environment.path / "side"
        return sorted(each.name for each in side.iterdir()) if side.exists() else []
