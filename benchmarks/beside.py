"""The cost of small transactions to a scan, and of a compaction to small transactions."""

from __future__ import annotations

import multiprocessing
import threading
import time
from contextlib import closing
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import numpy as np

import txnkv

from . import rows
from .data import ascending
from .harness import MICROSECONDS, Contestant, Line, compare, race
from .latency import percentile, times
from .row_stores import TxnkvRows, opened
from .stores import TxnkvStore

PACE: Final = 1000
"""Transactions a second beside the scan."""

_WARM: Final = 50


def scan_beside(there: int, scans: int, rounds: int, base: Path | None) -> list[Line]:
    """Scans while a thread, then another process, commits 1,000 times a second.

    Args:
        there: rows of the table.
        scans: of a round.
        rounds: counted rounds.
        base: where the store is made.
    """
    lines = []
    for where in ("thread", "process"):
        with TxnkvStore(base) as store:
            store.insert(ascending(0, there))

            def scan(store: TxnkvStore = store) -> int:
                found = [store.table.scan().to_arrow().num_rows for _ in range(scans)]
                assert found == [there] * scans
                return there * scans

            with closing(Committer(store, there, where == "process")) as committer:
                some = race(
                    f"scan of {there:,} rows, commits of another {where}",
                    Contestant(f"txnkv, {PACE:,} commits/s", scan, committer.start),
                    [Contestant("txnkv, quiet", scan, committer.stop)],
                    rounds=rounds,
                    ratios={"txnkv, quiet": 0.8},
                )
                some[0].extra["commits a second"] = f"{committer.pace:,.0f}"
            lines += some
    return lines


class Committer:
    """Commits one row after the other at an even pace, while it is on.

    It is a thread, or a process of its own. The store is told apart by its path alone.
    """

    def __init__(self, store: TxnkvStore, there: int, process: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._on, self._off, self._over = spawn.Event(), spawn.Event(), spawn.Event()
        self._done = spawn.Value("q", 0)
        self._since: tuple[float, int] | None = None
        self._seconds, self._commits = 0.0, 0
        kind = spawn.Process if process else threading.Thread
        self._worker = kind(
            target=_commit,
            args=(store.path / "store", there, self._on, self._off, self._over, self._done),
        )
        self._off.set()
        self._worker.start()

    def start(self) -> None:
        """Start, and return when it has begun to commit."""
        if self._since is None:
            first = self._done.value
            self._off.clear()
            self._on.set()
            while self._done.value < first + _WARM:
                assert self._worker.is_alive(), "the committer failed"
                time.sleep(0.001)
            self._since = time.perf_counter(), self._done.value

    def stop(self) -> None:
        """Stop; twice is fine."""
        if self._since is not None:
            begin, first = self._since
            self._seconds += time.perf_counter() - begin
            self._commits += self._done.value - first
            self._since = None
            self._on.clear()
            while not self._off.wait(0.1):
                assert self._worker.is_alive(), "the committer failed"

    @property
    def pace(self) -> float:
        """Commits a second while it was on."""
        return self._commits / self._seconds

    def close(self) -> None:
        """End the worker."""
        self._over.set()
        self._on.set()
        self._worker.join()


def _commit(path: Path, there: int, on: Event, off: Event, over: Event, done: Any) -> None:
    keys = np.random.default_rng(7).integers(0, there, 1 << 16).tolist()
    with txnkv.connect(path) as client:
        table = client.table("t")
        while on.wait() and not over.is_set():
            begin, first = time.perf_counter(), done.value
            while on.is_set() and not over.is_set():
                early = (done.value - first) / PACE - (time.perf_counter() - begin)
                if early > 0:
                    time.sleep(early)
                number = done.value
                key = keys[number % len(keys)]
                with client.transaction() as txn:
                    txn.upsert(table, (key, float(number), number))
                done.value = number + 1
            off.set()


def compaction_latency(there: int, count: int, rounds: int, base: Path | None) -> list[Line]:
    """Commits of one row while `client.compact()` runs in another thread, and while it is quiet.

    Args:
        there: rows of the table; a quarter of them is overwritten four times before each
            compaction, so that there is something to merge.
        count: quiet transactions of a round.
        rounds: counted rounds.
        base: where the store is made.
    """
    names = "txnkv, p99 beside a compaction", "txnkv, p99 quiet"
    rates: dict[str, list[float]] = {name: [] for name in names}
    seen = {name: list[float]() for name in names}
    with opened([TxnkvRows], base) as (store,):
        assert isinstance(store, TxnkvRows)
        store.load(np.arange(there))
        for number in range(rounds + 1):
            _overlap(store, there, number)
            chance = np.random.default_rng(number)
            some = [rows.row(key, 1) for key in chance.integers(0, there, count).tolist()]
            quiet = times(store.put, some)
            beside = _beside_compaction(store, some)
            if number:
                for name, found in zip(names, (beside, quiet), strict=True):
                    rates[name].append(1 / percentile(found, 0.99))
                    seen[name] += found
        assert store.table.count() == there
    lines = compare(
        f"one-row transaction beside a compaction of {there:,} rows",
        rates,
        ratios={names[1]: 1 / 3},
        unit=MICROSECONDS,
    )
    for line in lines:
        found = seen[line.name]
        line.extra["median"] = f"{percentile(found, 0.5) * 1e6:,.1f} us of {len(found):,}"
        line.extra["slowest"] = f"{max(found) * 1e6:,.0f} us"
    return lines


def _overlap(store: TxnkvRows, there: int, number: int) -> None:
    for part in range(4):
        chance = np.random.default_rng(number * 4 + part)
        keys = chance.choice(there, there // 4, replace=False)
        with store.client.transaction(timeout=None) as txn:
            txn.write(store.table, rows.table(keys), op="upsert")


def _beside_compaction(store: TxnkvRows, some: list[rows.Row]) -> list[float]:
    """The times of the commits that were made while it ran."""
    failed: list[BaseException] = []

    def compact() -> None:
        try:
            store.client.compact()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=compact)
    thread.start()
    found: list[float] = []
    while thread.is_alive() or not found:
        found += times(store.put, some[len(found) % len(some) :][:10])
    thread.join()
    if failed:
        raise failed[0]
    return found
