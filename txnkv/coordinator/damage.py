"""Parts of a store that fail, each for itself: whatever is done for many goes on for the others.

    for partition in partitions:
        with damage.guard(partition.label, "retention"):
            ...                                             an error is noted, and told once

A part is a partition, a tablet, a transaction or a sweep. It is tried again with each round, and
forgotten when that goes well. What is noted here is what this process has met; that a part takes
no writes any more is for all processes, in status.db: `held`.

A `Loss` names the data of a damaged part that is given up, or would be.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from txnkv.coordinator.ids import Timestamp
from txnkv.core import CoreError
from txnkv.errors import ClosedError, CorruptionError, StoreNotFoundError, TxnkvError
from txnkv.metrics import Gauge
from txnkv.storage import (
    GATE,
    BusyError,
    DeniedError,
    descriptor_limit,
    new_lock,
    patience,
    waiting_for,
)

_log = logging.getLogger("txnkv")

Kinds: TypeAlias = tuple[type[Exception], ...]

DAMAGE: Final = (CorruptionError, CoreError, IndexError, struct.error)
"""Errors that come of bytes which are not those that were written."""
FAILING: Final = (*DAMAGE, DeniedError)
"""Errors of a part that fails by itself: of such bytes, or of files that this user may not open."""
EVERY: Final = (TxnkvError, *DAMAGE)

_OF_THE_STORE: Final = (ClosedError, StoreNotFoundError)
"""Nothing goes on after these."""

BUSY_SECONDS: Final = 60.0
"""So long a flush or compaction of another one may last before it is told as a failure."""

SIDE_BY_SIDE: Final = 8
"""Parts on which `Damage.each` works at once, at most: some wait for the disk, others go on."""
_FEW: Final = 4
"""Parts for which no thread is begun."""
_DESCRIPTORS: Final = 64
"""For each thread the process may have so many, else there are less threads."""


class _Part(Protocol):
    id: int

    @property
    def label(self) -> str: ...


P = TypeVar("P", bound=_Part)


class Damage:
    """The failures of this process, by part and by what is done there. Shared by threads.

    Args:
        gauge: of parts that fail.
    """

    def __init__(self, gauge: Gauge | None = None) -> None:
        self._errors: dict[tuple[str, str], Exception] = {}
        self._busy_since: dict[tuple[str, str], float] = {}
        self._gauge = gauge

    def guard(self, part: str, work: str, only: Kinds = EVERY) -> Guard:
        """`with damage.guard(part, work):` an error inside is noted and goes no further.

        Args:
            part: as messages to people name it.
            work: what is done there.
            only: errors of these kinds; others go on.
        """
        return Guard(self, part, work, only)

    def error(self, part: str, work: str | None = None) -> Exception | None:
        """Return why a part fails; None when it does not."""
        found = list(self._errors.items())
        return next((e for at, e in found if at[0] == part and work in (None, at[1])), None)

    def parts(self) -> dict[str, str]:
        """The parts that fail, and why."""
        return {part: str(error) for (part, _), error in list(self._errors.items())}

    def note(self, part: str, work: str, error: Exception) -> None:
        """A part fails; while another one works there, only if that lasts."""
        if isinstance(error, BusyError):
            began = self._busy_since.setdefault((part, work), time.monotonic())
            if time.monotonic() - began < BUSY_SECONDS:
                return
        if (part, work) not in self._errors:
            _log.warning(
                "%s is left alone, all else goes on; `txnkv check` says more: %s: %s",
                part, work, error,
            )  # fmt: skip
        self._errors[part, work] = error.with_traceback(None)
        self._count()

    def each(
        self,
        parts: Iterable[P],
        work: str,
        do: Callable[[P], object],
        lives: Callable[[P], bool] = lambda _: True,
        only: Kinds = EVERY,
        *,
        side_by_side: bool = False,
    ) -> dict[int, Exception]:
        """Do a piece of work on every part, whatever fails in one of them.

        Args:
            parts: on which.
            work: what is done.
            do: does it.
            lives: what fails in others, as those that were dropped, is no matter, of any kind.
            only: as in `guard`.
            side_by_side: on several at once, where there are many; in no order.

        Returns:
            The errors, by id of the part.
        """
        errors: dict[int, Exception] = {}

        def one_by_one(parts: Iterable[P]) -> None:
            for part in parts:
                self._one(part, work, do, lives, only, errors)

        if side_by_side:
            parts = list(parts)
            _share(one_by_one, parts, min(len(parts) // _FEW, SIDE_BY_SIDE))
        else:
            one_by_one(parts)
        return errors

    def _one(
        self,
        part: P,
        work: str,
        do: Callable[[P], object],
        lives: Callable[[P], bool],
        only: Kinds,
        errors: dict[int, Exception],
    ) -> None:
        try:
            do(part)
        except Exception as error:
            if not lives(part):
                self.clear(part.label)
                return
            if not isinstance(error, only) or isinstance(error, _OF_THE_STORE):
                raise
            self.note(part.label, work, error)
            errors[part.id] = error
        else:
            self.clear(part.label, work)

    def clear(self, part: str, work: str | None = None) -> None:
        """A part is well, or gone."""
        for at in list(self._busy_since):
            if at[0] == part and work in (None, at[1]):
                self._busy_since.pop(at, None)
        if self._errors:
            for at in list(self._errors):
                if at[0] == part and work in (None, at[1]):
                    self._errors.pop(at, None)
                    _log.info("%s: %s is well again", *at)
            self._count()

    def _count(self) -> None:
        if self._gauge is not None:
            self._gauge.set(len(self.parts()))


class Guard:
    """One piece of work on one part.

    Attributes:
        error: that ended it, once it is over.
    """

    __slots__ = ("_at", "_damage", "_only", "error")

    def __init__(self, damage: Damage, part: str, work: str, only: Kinds) -> None:
        self._damage = damage
        self._only = only
        self._at = (part, work)
        self.error: Exception | None = None

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if error is None:
            self._damage.clear(*self._at)
            return False
        if not isinstance(error, self._only) or isinstance(error, _OF_THE_STORE):
            return False
        self.error = error
        self._damage.note(*self._at, error)
        return True


def raise_first(errors: Mapping[int, Exception]) -> None:
    """Raise the first of what `Damage.each` answered, if there is any."""
    for error in errors.values():
        raise error


def _share(do: Callable[[Iterable[P]], object], parts: list[P], threads: int) -> None:
    """Have several threads do a piece of work, each on what no other has taken."""
    threads = min(threads, descriptor_limit() // _DESCRIPTORS)
    if threads <= 1:
        do(parts)
        return
    left, lock = iter(parts), new_lock()
    raised: list[BaseException] = []

    def taken() -> Iterator[P]:
        while True:
            with lock:
                part = None if raised else next(left, None)
            if part is None:
                return
            yield part

    waiting = patience()

    def run() -> None:
        try:
            # A fork that waits for all of it would keep newcomers out.
            with GATE.use(), waiting_for(waiting):
                do(taken())
        except BaseException as error:
            raised.append(error)

    workers: list[threading.Thread] = []
    with suppress(RuntimeError):  # no more threads are to be had
        while len(workers) < threads - 1:
            worker = threading.Thread(target=run, name="txnkv-each")
            worker.start()
            workers.append(worker)
    run()
    for worker in workers:
        worker.join()
    if raised:
        raise raised[0]


@dataclass(frozen=True)
class LostRows:
    """A row set.

    Attributes:
        id: of the row set.
        rows, live: row versions, and those that were not deleted.
        min_key, max_key: the values of their columns, inclusive.
        first_commit, last_commit: of its rows; None where its transaction has not ended.
    """

    id: int
    rows: int
    live: int
    min_key: tuple[Any, ...]
    max_key: tuple[Any, ...]
    first_commit: Timestamp | None
    last_commit: Timestamp | None

    def __str__(self) -> str:
        when = "of a transaction that has not ended"
        if self.first_commit is not None and self.last_commit is not None:
            first, last = self.first_commit.datetime, self.last_commit.datetime
            when = f"committed from {first.isoformat()} to {last.isoformat()}"
        return (
            f"row set {self.id}: {self.live:,} rows ({self.rows:,} versions), keys "
            f"{_key(self.min_key)} to {_key(self.max_key)}, {when}"
        )


def _key(values: tuple[Any, ...]) -> str:
    return repr(values[0] if len(values) == 1 else values)


@dataclass(frozen=True)
class Loss:
    """The data that is given up, or would be.

    Attributes:
        part: whose.
        offsets: [first, end) of messages; fillers stand there.
        rows: row sets of a tablet.
        transactions: that had touched it; those that are not decided are aborted.
        commits: small ones whose rows of a tablet are damaged in the commit log.
        indexes: of the tablet's table, by their columns: they have entries of what is lost, and are
            dropped.
    """

    part: str
    offsets: tuple[tuple[int, int], ...] = ()
    rows: tuple[LostRows, ...] = ()
    transactions: tuple[int, ...] = ()
    commits: tuple[Timestamp, ...] = ()
    indexes: tuple[tuple[str, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.offsets or self.rows or self.commits)

    def lines(self) -> Iterator[str]:
        """For people."""
        for first, end in self.offsets:
            yield f"{self.part}: offsets {first:,} to {end - 1:,}"
        for row_set in self.rows:
            yield f"{self.part}: {row_set}"
        for commit in self.commits:
            when = commit.datetime.isoformat()
            yield f"{self.part}: what commit {commit} changed there, at {when}"
        for txn_id in self.transactions:
            yield f"{self.part}: transaction {txn_id} is aborted, if it is not decided"
        for columns in self.indexes:
            yield (
                f"{self.part}: the index of the table by {', '.join(columns)} is dropped, for it "
                "has entries of these rows; make it again with client.create_index, unique=True if "
                "it was"
            )
