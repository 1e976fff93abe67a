"""Running the mix, a thread for each warehouse, and looking at what it left."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa

from benchmarks.crews import Crew
from benchmarks.harness import EACH, Contestant, Line, race

from .checks import totals, violations
from .load import population
from .schema import Scale
from .stores import SqliteTpcc, TpccStore, TxnkvTpcc
from .transactions import plan


def tpcc(scale: Scale, count: int, rounds: int, base: Path | None) -> list[Line]:
    """New-order and payment, half and half, and TPC-C's consistency conditions after.

    Args:
        scale: size of the tables; a thread for each warehouse.
        count: transactions of each thread a round.
        rounds: counted rounds.
        base: where the stores are made.
    """
    with _loaded(scale, base) as stores:
        with ExitStack() as stack:
            ours, *peers = [
                Contestant(store.name, stack.enter_context(_running(store, scale, count)))
                for store in stores
            ]
            lines = race(
                f"TPC-C new-order and payment, {scale.warehouses} warehouses",
                ours,
                peers,
                rounds=rounds,
                unit=EACH,
            )
        for store in stores:
            assert violations(store) == []
            assert totals(store) == totals(stores[0]), f"{store.name} differs"
    for line in lines:
        line.extra["new orders a minute"] = f"{line.rate * 30:,.0f}"
        line.extra["consistency conditions 1 to 4"] = "hold"
    return lines


@contextmanager
def _loaded(scale: Scale, base: Path | None) -> Iterator[list[TpccStore]]:
    kinds: list[Callable[[Path], TpccStore]] = [TxnkvTpcc, SqliteTpcc]
    with ExitStack() as stack:
        stores = []
        for kind in kinds:
            path = Path(tempfile.mkdtemp(prefix="txnkv-bench-", dir=base))
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            store = kind(path)
            stack.callback(store.close)
            stores.append(store)
        parts: dict[str, list[pa.Table]] = {}
        for table, data in population(scale):
            parts.setdefault(table, []).append(data)
        for table, some in parts.items():
            for store in stores:
                store.load(table, pa.concat_tables(some))
        yield stores


@contextmanager
def _running(store: TpccStore, scale: Scale, count: int) -> Iterator[Callable[[], int]]:
    def work(handle: TpccStore, thread: int, number: int) -> Callable[[], None]:
        mine = plan(scale, thread + 1, number, count)

        def do_all() -> None:
            for transaction in mine:
                handle.run(transaction)

        return do_all

    def run() -> int:
        crew.round()
        return scale.warehouses * count

    with Crew(scale.warehouses, store.for_thread, work) as crew:
        yield run
