"""The cost of each of many small tables in a store, or of many partitions in a topic.

And the memory and descriptors that a process keeps that lives long: while it commits, makes and
drops tables, and compacts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

import txnkv

from .harness import EACH, MICROSECONDS, MILLISECONDS, Line
from .svg import Series, chart

_SCHEMA = txnkv.Schema({"id": "int64", "value": "int64"}, primary_key=["id"])
_AT_ONCE = 500
_POINTS = 20


@contextmanager
def _folder(base: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="many-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def many(sizes: list[int], base: Path | None, plots: Path | None) -> list[Line]:
    """One row in each of so many tables, one message in each of so many partitions.

    Args:
        sizes: tables, and partitions, ascending.
        base: where the stores are made.
        plots: a directory for `many-*.svg`; None for none.
    """
    for kind in ("tables", "partitions"):  # what the first of all pays alone
        list(_measured(kind, 2, base))
    found = [
        line
        for size in sizes
        for line in (*_measured("tables", size, base), *_measured("partitions", size, base))
    ]
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for what, y_label in (
            ("flush", "ms of each, the store new"),
            ("round", "ms, nothing to do"),
            ("open", "ms"),
            ("poll", "ms, nothing new"),
        ):
            _plot(what, y_label, found, plots / f"many-{what}.svg")
    return found


def _measured(kind: str, size: int, base: Path | None) -> Iterator[Line]:
    def line(what: str, seconds: float, **extra: float) -> Line:
        unit = MICROSECONDS if what in ("flush", "round") else MILLISECONDS
        rate = 1 / max(seconds, 1e-9)
        return Line(
            f"{what}, {size:,}", f"txnkv, {kind}", rate, (rate, rate), extra=extra, unit=unit
        )

    with _folder(base) as folder:
        client = txnkv.connect(folder / "store")
        fill = _fill_tables if kind == "tables" else _fill_partitions
        fill(client, size)
        seconds = _timed(client.instance.engine.flush)
        process = psutil.Process()
        extra = {"MB": process.memory_info().rss / 1e6, "files": float(process.num_fds())}
        yield line("flush", seconds / size, **extra)
        maintenance = client.instance.coordinator.maintenance
        maintenance.round()
        yield line("round", min(_timed(maintenance.round) for _ in range(_POINTS)))
        if kind == "partitions":
            consumers = [client.topic(name).consumer() for name in client.topics()]
            given = 0
            for consumer in consumers:
                while messages := consumer.poll(max_messages=10_000, timeout=0):
                    given += len(messages)
            assert given == size, f"{given} of {size} messages were given"

            def poll() -> None:
                for consumer in consumers:
                    consumer.poll(timeout=0)

            yield line("poll", min(_timed(poll) for _ in range(_POINTS)))
        client.close()
        began = time.perf_counter()
        client = txnkv.connect(folder / "store")
        seconds = time.perf_counter() - began
        if kind == "tables":
            assert client.table(f"t{size - 1}").get(1) == {"id": 1, "value": size - 1}
        client.close()
        yield line("open", seconds)


def _fill_tables(client: txnkv.Client, size: int) -> None:
    for first in range(0, size, _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, size))
        for number in numbers:
            client.create_table(f"t{number}", _SCHEMA)
        with client.transaction() as txn:
            for number in numbers:
                txn.insert(f"t{number}", (1, number))


def _fill_partitions(client: txnkv.Client, size: int) -> None:
    for first in range(0, size, _AT_ONCE):  # a topic has at most 1,024
        partitions = min(_AT_ONCE, size - first)
        topic = client.create_topic(f"many {first}", partitions=partitions)
        with client.transaction() as txn:
            for number in range(partitions):
                txn.send(topic, b"value", partition=number)


def _timed(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def _plot(what: str, y_label: str, lines: list[Line], file: Path) -> None:
    named: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        title, size = line.race.split(", ", 1)
        if title == what:
            named.setdefault(line.name, []).append((int(size.replace(",", "")), 1e3 / line.rate))
    series = [Series(name, points) for name, points in named.items()]
    file.write_text(chart(f"many small parts: {what}", "tables, or partitions", y_label, series))


def life(
    commits: int, tables: int, compactions: int, base: Path | None, plots: Path | None
) -> list[Line]:
    """Memory and descriptors of one process, while it commits, makes and drops tables, compacts.

    Args:
        commits: one-row commits, over 1,000 keys.
        tables: made, written, flushed and dropped, one after the other.
        compactions: with a flush before each.
        base: where the store is made.
        plots: a directory for `life-*.svg`; None for none.
    """
    lines: list[Line] = []
    drawn: dict[str, list[Series]] = {"memory": [], "descriptors": []}
    with _folder(base) as folder:
        client = txnkv.connect(folder / "store", history=0)
        client.create_table("t", _SCHEMA)
        for what, count, do in (
            ("commits", commits, lambda number: _commit(client, number)),
            ("tables", tables, lambda number: _come_and_go(client, number)),
            ("compactions", compactions, lambda number: _compact(client, number)),
        ):
            points = _lived(what, count, do)
            rate = count / points[-1][1]
            extra = {
                "MB first": points[0][2],
                "MB last": points[-1][2],
                "files first": points[0][3],
                "files last": points[-1][3],
            }
            line = Line(f"life: {count:,} {what}", "txnkv", rate, (rate, rate), unit=EACH)
            line.extra = extra
            lines.append(line)
            drawn["memory"].append(Series(f"txnkv, {what}", [(p[0], p[2]) for p in points]))
            drawn["descriptors"].append(Series(f"txnkv, {what}", [(p[0], p[3]) for p in points]))
        client.close()
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for what, unit in (("memory", "MB"), ("descriptors", "open files")):
            text = chart(
                f"{what} of one process",
                "share of the work done, %",
                unit,
                drawn[what],
                logarithmic=False,
            )
            (plots / f"life-{what}.svg").write_text(text)
    return lines


def _lived(
    what: str, count: int, do: Callable[[int], object]
) -> list[tuple[float, float, float, float]]:
    """Percent of the work, seconds, MB and open files, after each part of it."""
    process, began, points = psutil.Process(), time.perf_counter(), []
    for part in range(_POINTS):
        for number in range(count * part // _POINTS, count * (part + 1) // _POINTS):
            do(number)
        files = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
        seconds = max(time.perf_counter() - began, 1e-9)
        percent = 100 * (part + 1) / _POINTS
        points.append((percent, seconds, process.memory_info().rss / 1e6, float(files)))
    return points


def _commit(client: txnkv.Client, number: int) -> None:
    with client.transaction() as txn:
        txn.upsert("t", (number % 1000, number))


def _come_and_go(client: txnkv.Client, number: int) -> None:
    client.create_table("passing", _SCHEMA)
    with client.transaction() as txn:
        txn.insert("passing", (1, number))
    client.instance.engine.flush()
    client.drop_table("passing")


def _compact(client: txnkv.Client, number: int) -> None:
    _commit(client, number)
    client.instance.engine.flush()
    client.instance.engine.compactor.compact_all()
