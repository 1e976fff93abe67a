"""One-row durable transactions: of one thread, of many, of many processes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import numpy as np

from . import rows
from .crews import PATIENCE, Crew
from .harness import EACH, Contestant, Line, race
from .latency import Operation, race_each
from .rocks import rocks_kinds
from .row_stores import LmdbRows, RowStore, SqliteRows, TxnkvRows, opened, require_equal
from .rows import Row

THREADS = 16
PROCESSES = 4

_PAGE = 4096
_PLACES = 1000


def commit(count: int, known: int, rounds: int, base: Path | None) -> list[Line]:
    """One thread, one row a transaction: new keys in order, then random keys of many.

    Args:
        count: transactions a round.
        known: rows that are there before the second race.
        rounds: counted rounds.
        base: where the stores are made.
    """
    goals = {"sqlite": 0.8, "lmdb": 1.0}
    kinds: list[type[RowStore]] = [TxnkvRows, SqliteRows, LmdbRows, *rocks_kinds()]
    with opened(kinds, base) as stores, closing(Disk(stores[0].path)) as disk:

        def new(number: int) -> list[Row]:
            return [rows.row(known + number * count + i) for i in range(count)]

        def known_keys(number: int) -> list[Row]:
            keys = np.random.default_rng(number).integers(0, known, count).tolist()
            return [rows.row(key, number + 1) for key in keys]

        lines = race_each(
            "one-row transaction, new keys",
            [
                *(Operation(store.name, store.put, new) for store in stores),
                Operation("the disk, 4 KiB synced", disk.write, lambda _: range(count)),
            ],
            rounds=rounds,
            ratios=goals,
        )
        for store in stores:
            store.load(np.arange(known))
        lines += race_each(
            f"one-row transaction, {known:,} keys",
            [Operation(store.name, store.put, known_keys) for store in stores],
            rounds=rounds,
            ratios=goals,
        )
        require_equal(stores)
    return lines


class Disk:
    """The least that a commit has to do: write 4 KiB over what a file has, and sync."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path / "disk", os.O_RDWR | os.O_CREAT)
        os.write(self._file, bytes(_PLACES * _PAGE))
        os.fsync(self._file)

    def write(self, place: int) -> None:
        """Write one page and wait for the disk."""
        os.pwrite(self._file, bytes([place % 256]) * _PAGE, place % _PLACES * _PAGE)
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file; it goes with its directory."""
        os.close(self._file)


def commit_threads(count: int, rounds: int, base: Path | None) -> list[Line]:
    """Sixteen threads, each committing one row after the other, of keys of its own.

    Args:
        count: transactions of each thread a round.
        rounds: counted rounds.
        base: where the stores are made.
    """
    goals = {"sqlite": 4.0} | {kind.name: 1.0 for kind in rocks_kinds()}
    with opened([TxnkvRows, SqliteRows, LmdbRows, *rocks_kinds()], base) as stores:
        with ExitStack() as stack:
            ours, *peers = [
                Contestant(store.name, _round(stack.enter_context(_crew(store, count)), count))
                for store in stores
            ]
            lines = race(
                f"one-row transactions of {THREADS} threads",
                ours,
                peers,
                rounds=rounds,
                ratios=goals,
                unit=EACH,
            )
        require_equal(stores)
    return lines


def _crew(store: RowStore, count: int) -> Crew[RowStore]:
    def work(handle: RowStore, number: int, version: int) -> Callable[[], None]:
        mine = _own_rows(number, count, version)

        def put_all() -> None:
            for row in mine:
                handle.put(row)

        return put_all

    return Crew(THREADS, store.for_thread, work)


def _round(crew: Crew[RowStore], count: int) -> Callable[[], int]:
    def run() -> int:
        crew.round()
        return THREADS * count

    return run


def _own_rows(number: int, count: int, version: int) -> list[Row]:
    """Rows of keys that no other worker writes, in random order."""
    keys = list(range(number * count, (number + 1) * count))
    random.Random(version).shuffle(keys)
    return [rows.row(key, version) for key in keys]


def commit_processes(count: int, rounds: int, base: Path | None) -> list[Line]:
    """Four processes, each committing one row after the other, of keys of its own.

    Args:
        count: transactions of each process a round.
        rounds: counted rounds.
        base: where the stores are made.
    """
    with opened([TxnkvRows, SqliteRows, LmdbRows], base) as stores:
        with Processes(stores, count) as crew:
            ours, *peers = [
                Contestant(store.name, crew.run, functools.partial(crew.prepare, place))
                for place, store in enumerate(stores)
            ]
            lines = race(
                f"one-row transactions of {PROCESSES} processes",
                ours,
                peers,
                rounds=rounds,
                ratios={"sqlite": 1.0},
                unit=EACH,
            )
        require_equal(stores)
    return lines


class Processes:
    """Processes that commit rows, to one store after the other, round after round.

    They and whoever runs them take each step together:

        prepare   [a store is chosen]   they make the rows   [all have theirs]
        run       [go]                  they commit          [all have done]
    """

    def __init__(self, stores: list[RowStore], count: int) -> None:
        self._count = count
        spawn = multiprocessing.get_context("spawn")
        self._stop, self._turn = spawn.Event(), spawn.Value("i", 0)
        self._step = spawn.Barrier(PROCESSES + 1, timeout=PATIENCE)
        places = [(type(store), store.path) for store in stores]
        self._processes = [
            spawn.Process(
                target=_process,
                args=(places, number, count, self._stop, self._turn, self._step),
            )
            for number in range(PROCESSES)
        ]
        for process in self._processes:
            process.start()

    def prepare(self, place: int) -> None:
        """Let them make the rows for one of the stores."""
        self._turn.value = place
        self._step.wait()
        self._step.wait()

    def run(self) -> int:
        """One round of all."""
        self._step.wait()
        self._step.wait()
        return PROCESSES * self._count

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        if kind is None:
            self._step.wait()
        else:
            self._step.abort()
        for process in self._processes:
            process.join()
        if kind is None and any(process.exitcode for process in self._processes):
            raise RuntimeError("a process of the race failed; see above")


def _process(
    places: list[tuple[type[RowStore], Path]],
    number: int,
    count: int,
    stop: Event,
    turn: Any,
    step: Barrier,
) -> None:
    try:
        with ExitStack() as stack:
            stores = [stack.enter_context(kind(path)) for kind, path in places]
            versions = [0] * len(stores)
            while True:
                step.wait()
                if stop.is_set():
                    return
                place = turn.value
                work = _own_rows(number, count, versions[place])
                versions[place] += 1
                step.wait()
                put = stores[place].put
                step.wait()
                for row in work:
                    put(row)
                step.wait()
    except BaseException:
        step.abort()
        raise
