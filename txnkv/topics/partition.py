"""A partition of a topic in this process: its LMDB environment, its log, its side logs."""

from __future__ import annotations

from typing import NamedTuple

from txnkv.storage import Environment, Store
from txnkv.topics.log import DATABASES, LogOptions, PartitionLog
from txnkv.topics.sidecar import SideLogs
from txnkv.topics.topic_catalog import TopicInfo


class Opened(NamedTuple):
    """A partition's environment, and what is in it."""

    environment: Environment
    log: PartitionLog
    side: SideLogs | None


class Partition:
    """One partition. Shared by threads; nothing is opened before it is used.

    Attributes:
        id: by which status.db, the commit log and the folder know it.
        topic: its topic.
        number: in the topic, from 0.
    """

    def __init__(self, store: Store, topic: TopicInfo, number: int) -> None:
        self.id = topic.partitions[number]
        self.topic = topic
        self.number = number
        self._store = store
        self._opened: Opened | None = None

    @property
    def label(self) -> str:
        """The partition, as messages to people name it."""
        return f"topic {self.topic.name!r}, partition {self.number}"

    @property
    def part(self) -> str:
        """The partition as `txnkv repair` takes it."""
        return f"topic:{self.topic.name}/{self.number}"

    @property
    def exists(self) -> bool:
        """Tell whether the environment was made; only a store open to write makes it.

        Raises:
            CorruptionError: it was made, and is gone.
        """
        return self._store.environments.was_made(f"logs/{self.id}", self.label, self.part)

    @property
    def is_made(self) -> bool:
        """The same as `exists`; no I/O once the partition was opened."""
        return self._opened is not None or self.exists

    @property
    def environment(self) -> Environment:
        """The LMDB environment in which the log lies.

        Raises:
            StoreNotFoundError: it was never written to, and the store is open to read only.
        """
        return self._parts().environment

    @property
    def log(self) -> PartitionLog:
        """The log of what was written to the partition."""
        return self._parts().log

    @property
    def side(self) -> SideLogs | None:
        """The side logs, with batches of open transactions; None where the log itself has them."""
        return self._parts().side

    def _parts(self) -> Opened:
        opened = self._opened
        if opened is None or opened.environment.is_retired:
            opened = self._opened = self._open()
        return opened

    def _open(self) -> Opened:
        options = self.topic.options
        environment = self._store.environments.get(
            f"logs/{self.id}", label=self.label, part=self.part, databases=DATABASES
        )
        limits = LogOptions(
            segment_bytes=options.segment_bytes, segment_seconds=options.segment_seconds
        )
        side = None
        if self.topic.buffer == "sidecar":
            side = SideLogs(environment, self._store.environments, f"logs/{self.id}")
        log = PartitionLog(environment, limits, None if side is None else side.expand)
        if not self._store.directory.read_only:
            log.prepare()
        return Opened(environment, log, side)
