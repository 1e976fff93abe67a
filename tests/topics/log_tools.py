"""Logs for tests: batches in one line each, a log that places them, and a plain model of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from txnkv import core
from txnkv.core import ControlType
from txnkv.storage import Environments, StoreDirectory
from txnkv.topics.log.log_check import problems
from txnkv.topics.log.partition_log import CommitEntry, LogOptions, OpenTxn, PartitionLog
from txnkv.topics.log.partition_state import AbortedEntry, unpack_entries

ABORT, COMMIT, FILLER = ControlType.ABORT, ControlType.COMMIT, ControlType.FILLER
_NUMBERS = count(1)


def data(
    txn: int = 0,
    n: int = 1,
    *,
    time: int = 1000,
    decided: bool = False,
    size: int = 8,
    values: Sequence[bytes] | None = None,
) -> bytes:
    """A batch of n messages; plain when there is no transaction."""
    if values is None:
        values = [b"%d" % next(_NUMBERS) + b"." * size for _ in range(n)]
    messages = pa.record_batch({"value": pa.array(values, pa.binary())})
    return core.encode_batch(messages, timestamp=time, txn_id=txn, decided=decided)


def piece(
    value: bytes, number: int, of: int, *, txn: int = 1, id: int = 5, key: bytes | None = None
) -> bytes:
    """A piece of a large message."""
    columns: dict[str, Any] = {"value": pa.array([value], pa.binary())}
    if key is not None:
        columns["key"] = pa.array([key], pa.binary())
    return core.encode_batch(
        pa.record_batch(columns), timestamp=1000 + number, txn_id=txn,
        chunk=core.Chunk(id, number, of, 100),
    )  # fmt: skip


def marker(
    kind: ControlType, txn: int = 0, *, mark: int = 0, time: int = 1000, offsets: int = 1
) -> bytes:
    """A control batch."""
    return core.encode_control(kind, txn_id=txn, timestamp=time, low_water_mark=mark, count=offsets)


def script(text: str) -> list[bytes]:
    """Batches by words: P1 a message of transaction 1, N one of none, D7 a decided one, C1 and
    A1 markers; P1*3 is one batch of three.
    """
    made = []
    for word in text.split():
        name, _, n = word.partition("*")
        kind, txn = name[0], int(name[1:] or 0)
        if kind in "PND":
            made.append(data(txn, int(n or 1), decided=kind == "D"))
        else:
            made.append(marker({"C": COMMIT, "A": ABORT}[kind], txn))
    return made


class Log:
    """A log in a store of its own. A context manager."""

    def __init__(self, folder: Path, options: LogOptions | None = None, **more: Any) -> None:
        self.folder = folder
        self.options = options or LogOptions()
        self.more = more
        self.open()

    def open(self) -> None:
        self.environments = Environments(StoreDirectory.open(self.folder))
        self.environment = self.environments.get("logs/1", create=True)
        self.log = PartitionLog(self.environment, self.options, **self.more)
        self.log.prepare()

    def reopen(self) -> None:
        self.close()
        self.open()

    def close(self) -> None:
        self.environments.close_all()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        found = self.problems()
        self.close()
        if kind is None and found:
            raise AssertionError(found)

    def append(self, *batches: bytes, commit_ts: int = 0, together: bool = False) -> int:
        """Puts batches at the end; the offset of the first."""

        def put(txn: Any) -> int:
            at = first = self.log.end(txn)
            placed = []
            for batch in [b"".join(batches)] if together else batches:
                placed.append(core.place(batch, at, commit_ts))
                at += sum(header.count for _, header in core.walk(batch))
            self.log.put(txn, placed)
            return first

        return self.environment.write(put)

    def write(self, name: str, *args: Any) -> Any:
        """A method of the log inside a write."""
        return self.environment.write(lambda txn: getattr(self.log, name)(txn, *args))

    def ask(self, name: str, *args: Any, **more: Any) -> Any:
        """A method of the log inside a read; buffers are copied."""
        with self.environment.read() as txn:
            found = getattr(self.log, name)(txn, *args, **more)
            return b"".join(found) if name == "read" else found

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """One read transaction: what it sees stays."""
        with self.environment.read() as txn:
            yield Reader(self.log, txn)

    @property
    def end(self) -> int:
        return int(self.ask("end"))

    @property
    def start(self) -> int:
        return int(self.ask("start"))

    @property
    def lso(self) -> int:
        return int(self.ask("last_stable_offset"))

    def open_firsts(self) -> dict[int, int]:
        return {txn.txn_id: txn.first_offset for txn in self.ask("open_transactions")}

    def index(self) -> list[AbortedEntry]:
        """The aborted index of all segments."""
        with self.environment.read() as txn:
            parts = [self.log.aborted_index(txn, s.base) for s in self.log.segments(txn)]
        return unpack_entries(b"".join(parts))

    def committed(self, offset: int, max_bytes: int = 1 << 20) -> list[tuple[int, bytes]]:
        """(offset, value) that a READ_COMMITTED reader gets from an offset on."""
        kept = core.CommittedFilter()
        found: list[tuple[int, bytes]] = []
        while True:
            with self.environment.read() as txn:
                lso = self.log.last_stable_offset(txn)
                if offset >= lso:
                    return found
                records = b"".join(self.log.read(txn, offset, max_bytes, lso))
                last = core.walk(records)[-1][1]
                aborted = self.log.aborted(txn, offset, last.next_offset)
            pairs = [(entry.txn_id, entry.first_offset) for entry in aborted]
            spans = kept.keep(records, pairs, offset, lso)
            rows = core.decode(records, spans, offset, None)
            found += zip(rows["offset"].to_pylist(), rows["value"].to_pylist(), strict=True)
            assert spans.next_offset > offset
            offset = spans.next_offset

    def problems(self) -> list[str]:
        """Return the problems that a check of the log finds."""
        with self.environment.read() as txn:
            return list(problems(self.log, txn))


class Reader:
    """A log as one read transaction sees it."""

    def __init__(self, log: PartitionLog, txn: Any) -> None:
        self.log = log
        self.txn = txn

    @property
    def lso(self) -> int:
        return self.log.last_stable_offset(self.txn)

    @property
    def first_open(self) -> int | None:
        found = self.log.open_transactions(self.txn)
        return found[0].first_offset if found else None


# -- the model -------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One batch of a `ModelLog`."""

    kind: str  # "data", "decided", "plain", "commit", "abort", "filler"
    base: int
    count: int
    txn: int = 0
    mark: int = 0
    values: tuple[bytes, ...] = ()


class ModelLog:
    """A log as a list of batches. Everything else is looked for, from the beginning on."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.start = 0

    @property
    def end(self) -> int:
        return self.items[-1].base + self.items[-1].count if self.items else 0

    def truncate(self, offset: int) -> int:
        self.items = [item for item in self.items if item.base + item.count <= offset]
        self.start = min(self.start, self.end)  # it may lie inside of the batch that goes
        return self.end

    def told(self) -> Told:
        """The story of the log, told once more from its first batch."""
        return Told(self.items)


class Told:
    """The outcome of each batch, by a plain walk: no index, nothing kept from before."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.open: dict[int, int] = {}
        self.mark = 0
        self.index: list[AbortedEntry] = []
        self.commits: list[CommitEntry] = []
        self.shown: set[int] = set()  # base offsets of batches that a reader gets
        waiting: dict[int, list[int]] = {}
        for item in items:
            last = item.base + item.count - 1
            if item.kind in ("decided", "plain"):
                self.shown.add(item.base)
                self.commits.append(CommitEntry(item.base, item.count, item.txn, item.base, 0))
            elif item.kind == "data":
                if item.txn in self.open:
                    waiting[item.txn].append(item.base)
                elif item.txn < self.mark:
                    self._entry(item.txn, item.base, last)
                else:
                    self.open[item.txn] = item.base
                    waiting[item.txn] = [item.base]
            else:
                ending = {item.txn} if item.kind in ("commit", "abort") else set()
                self.mark = max(self.mark, item.mark)
                over = [t for t in self.open if t in ending or t < self.mark]
                for txn in sorted(over, key=lambda t: self.open[t]):
                    first = self.open.pop(txn)
                    if txn in ending and item.kind == "commit":
                        self.shown.update(waiting[txn])
                        self.commits.append(CommitEntry(item.base, item.count, txn, first, 0))
                    else:
                        self._entry(txn, first, last)
        self.end = items[-1].base + items[-1].count if items else 0

    def _entry(self, txn: int, first: int, last: int) -> None:
        lso = min(self.open.values(), default=last + 1)
        self.index.append(AbortedEntry(txn, first, last, lso))

    @property
    def lso(self) -> int:
        return min(self.open.values(), default=self.end)


__all__ = [
    "ABORT",
    "COMMIT",
    "FILLER",
    "Item",
    "Log",
    "LogOptions",
    "ModelLog",
    "OpenTxn",
    "Reader",
    "Told",
    "data",
    "marker",
    "script",
]


def collect(entries: Sequence[AbortedEntry], offset: int, upto: int) -> list[AbortedEntry]:
    """The aborted transactions of [offset, upto), as a reader finds them that goes by the stable
    offsets alone: it stops at the first entry that says that no later one begins in the range.
    """
    found = []
    for entry in entries:
        if entry.last_offset >= offset and entry.first_offset < upto:
            found.append(entry)
        if entry.last_stable_offset >= upto:
            break
    return found
