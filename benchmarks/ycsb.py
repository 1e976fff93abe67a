"""YCSB's workloads A, B, C and F: four threads, scrambled Zipfian keys, durable writes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from .crews import Crew
from .harness import EACH, Contestant, Line, race
from .ycsb_stores import FIELDS, LENGTH, YcsbStore, keys_of, records, ycsb_kinds
from .zipfian import ScrambledZipfian

THREADS = 4

Action = Literal["read", "update", "modify"]

_STEP: Final = 100_000


@dataclass(frozen=True)
class Workload:
    """A mix of operations: the share of reads, and the action of the others."""

    name: str
    reads: float
    other: Action


WORKLOADS: Final = (
    Workload("A, 50% reads, 50% updates", 0.50, "update"),
    Workload("B, 95% reads, 5% updates", 0.95, "update"),
    Workload("C, reads alone", 1.00, "read"),
    Workload("F, 50% reads, 50% read-modify-writes", 0.50, "modify"),
)


@dataclass(frozen=True)
class Request:
    """One operation: of which record, and for a write, of which field and with what."""

    action: Action
    key: str
    field: int = 0
    value: str = ""


def ycsb(there: int, count: int, rounds: int, base: Path | None) -> list[Line]:
    """The workloads one after the other on the same stores.

    Args:
        there: records.
        count: operations of each thread a round.
        rounds: counted rounds.
        base: where the stores are made.
    """
    lines = []
    with _loaded(there, base) as stores:
        for place, workload in enumerate(WORKLOADS):
            written: list[Request] = []
            plan = _plan(workload, there, count, place)
            with ExitStack() as stack:
                ours, *peers = [
                    Contestant(
                        store.name, stack.enter_context(_running(store, plan, count, written))
                    )
                    for store in stores
                ]
                lines += race(
                    f"YCSB {workload.name}, {there:,} records",
                    ours,
                    peers,
                    rounds=rounds,
                    unit=EACH,
                )
            _require_written(stores, written)
    return lines


@contextmanager
def _loaded(there: int, base: Path | None) -> Iterator[list[YcsbStore]]:
    with ExitStack() as stack:
        stores: list[YcsbStore] = []
        for kind in ycsb_kinds():
            path = Path(tempfile.mkdtemp(prefix="txnkv-bench-", dir=base))
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            store = kind(path)
            stack.callback(store.close)
            stores.append(store)
        for first in range(0, there, _STEP):
            some = records(first, min(_STEP, there - first))
            for store in stores:
                store.load(some)
        yield stores


Plan = Callable[[int, int], list[Request]]


def _plan(workload: Workload, there: int, count: int, place: int) -> Plan:
    """Make the plan of a thread's requests in a round: the same for each store."""

    def plan(thread: int, number: int) -> list[Request]:
        seed = (place * 1000 + number) * THREADS + thread
        chance = np.random.default_rng(seed)
        keys = keys_of(ScrambledZipfian(there, seed).take(count))
        reads = (chance.random(count) < workload.reads).tolist()
        fields = chance.integers(0, FIELDS, count).tolist()
        return [
            Request("read", key)
            if read
            else Request(workload.other, key, field, f"{seed} {at} ".ljust(LENGTH, "v"))
            for at, (key, read, field) in enumerate(zip(keys, reads, fields, strict=True))
        ]

    return plan


@contextmanager
def _running(
    store: YcsbStore, plan: Plan, count: int, written: list[Request]
) -> Iterator[Callable[[], int]]:
    def work(handle: YcsbStore, thread: int, number: int) -> Callable[[], None]:
        requests = plan(thread, number)
        writes = [request for request in requests if request.action != "read"]

        def do_all() -> None:
            for request in requests:
                if request.action == "read":
                    assert len(handle.read(request.key)) >= FIELDS
                elif request.action == "update":
                    handle.update(request.key, request.field, request.value)
                else:
                    handle.modify(request.key, request.field, request.value)
            written.extend(writes)

        return do_all

    def run() -> int:
        crew.round()
        return THREADS * count

    with Crew(THREADS, store.for_thread, work) as crew:
        yield run


def _require_written(stores: list[YcsbStore], written: list[Request]) -> None:
    """Each field that was written holds one of the values written to it, in every store.

    Threads race for the hot keys, so which of them came last differs; RocksDB puts whole records
    and may lose the write of a field, so only its records' form is looked at.
    """
    values: dict[tuple[str, int], set[str]] = {}
    for request in written:
        values.setdefault((request.key, request.field), set()).add(request.value)
    for store in stores:
        for (key, field), some in values.items():
            found = store.fields(key)[field]
            assert len(found) == LENGTH, (store.name, key, found)
            assert found in some or store.name.startswith("rocksdb"), (store.name, key, found)
