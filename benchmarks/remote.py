"""A store over a server: scans, bulk writes, one-row transactions and gets, many clients at once.

Each beside the same work in a folder, beside what Arrow Flight does without a store (batches from
memory, batches that are thrown away, an empty action), and beside PostgreSQL where that is there.
Everything over the loopback address.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.flight as fl

import txnkv

from . import data, rows
from .crews import Crew
from .harness import EACH, MICROSECONDS, Contestant, Line, race
from .latency import Operation, percentile, race_each
from .postgres import POSTGRES, Postgres

SERVED: Final = "txnkv, over a server"
HERE: Final = "txnkv, in a folder"
MEMORY: Final = "pyarrow.flight, from memory"
NOWHERE: Final = "pyarrow.flight, thrown away"
EMPTY: Final = "pyarrow.flight, an empty action"

_STREAMS: Final = 4
_BATCH_ROWS: Final = 1 << 16


def peer(count: int) -> None:
    """Serve what Flight does without a store; print the port, and go on until killed."""
    batches = data.ascending(0, count).to_batches(max_chunksize=_BATCH_ROWS)
    shares = [batches[n::_STREAMS] for n in range(_STREAMS)]

    class Peer(fl.FlightServerBase):  # type: ignore[misc]
        def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
            return iter([b""])

        def do_get(self, context: Any, ticket: Any) -> Any:
            found = batches if ticket.ticket == b"all" else shares[int(ticket.ticket)]
            return fl.RecordBatchStream(pa.Table.from_batches(found, data.SCHEMA.arrow))

        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            taken = 0
            with suppress(StopIteration):
                while True:
                    taken += reader.read_chunk().data.num_rows
            writer.write(pa.py_buffer(str(taken).encode()))

    server = Peer("grpc://127.0.0.1:0")
    print(server.port, flush=True)
    server.serve()


class Places:
    """A store, a server of it, a client of each, and the peers.

    Attributes:
        here: the store's client in this process.
        there: a client of the server.
        flight: a client of the peer without a store.
        server: the server's process.
    """

    def __init__(self, stack: ExitStack, base: Path | None, rows_from_memory: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="txnkv-bench-", dir=base))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self.folder = folder / "store"
        self.here = stack.enter_context(txnkv.connect(self.folder))
        serve = ["-m", "txnkv", "serve", str(self.folder), "--listen", "grpc://127.0.0.1:0"]
        self.server, port = started(stack, serve)
        self.address = f"grpc://127.0.0.1:{port}"
        self.there = stack.enter_context(txnkv.connect(self.address))
        _, port = started(stack, ["-c", f"from {__name__} import peer; peer({rows_from_memory})"])
        self.peer_address = f"grpc://127.0.0.1:{port}"
        self.flight = stack.enter_context(fl.FlightClient(self.peer_address))


def started(stack: ExitStack, arguments: list[str]) -> tuple[subprocess.Popen[str], int]:
    """A process that prints its port when it listens; killed at the end."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    popen = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=os.environ | path
    )
    stack.callback(popen.wait)
    stack.callback(popen.kill)
    assert popen.stdout is not None
    stack.callback(popen.stdout.close)
    line = popen.stdout.readline().strip()
    found = re.search(r"(\d+)$", line)
    assert found, f"{arguments} says {line!r}"
    return popen, int(found[1])


def _empty_action(client: Any) -> None:
    for _ in client.do_action("empty"):
        pass


# -- bulk ------------------------------------------------------------------------------


def scan(count: int, rounds: int, base: Path | None, postgres: Path | None) -> list[Line]:
    """Rows of 24 bytes, all of a table: in one stream, and in four."""
    with ExitStack() as stack:
        places = Places(stack, base, count)
        table = data.ascending(0, count)
        places.here.create_table("t", data.SCHEMA)
        with places.here.transaction(timeout=None) as txn:
            txn.write("t", table)
        there, here, flight = places.there.table("t"), places.here.table("t"), places.flight
        copied: list[Contestant] = []
        pg = Postgres.found(stack, base, postgres)
        if pg is not None:
            pg.empty("t")
            pg.copy_in("t", table)
            copied = [Contestant(f"{POSTGRES}, COPY", lambda: pg.copy_out("t", count))]
        lines = race(
            "scan over a server, one stream",
            Contestant(SERVED, lambda: _read(there.scan().to_batches(), count)),
            [
                Contestant(MEMORY, lambda: _read(_chunks(flight, b"all"), count)),
                Contestant(HERE, lambda: _read(here.scan().to_batches(), count)),
                *copied,
            ],
            rounds=rounds,
            ratios={MEMORY: 0.7},
        )
        with ThreadPoolExecutor(_STREAMS) as pool:

            def many(streams: list[Callable[[], Iterator[pa.RecordBatch]]]) -> int:
                found = sum(pool.map(lambda stream: _rows_of(stream()), streams))
                assert found == count, f"{found} of {count} rows came"
                return found

            def ours() -> int:
                tokens = there.scan().tokens(max(1, -(-count // _STREAMS)))
                scans = [token.open(places.there) for token in tokens]
                return many([scan.to_batches for scan in scans])

            def memory() -> int:
                tickets = [str(number).encode() for number in range(_STREAMS)]
                return many([lambda ticket=ticket: _chunks(flight, ticket) for ticket in tickets])  # type: ignore[misc]

            lines += race(
                "scan over a server, four streams",
                Contestant(SERVED, ours),
                [Contestant(MEMORY, memory)],
                rounds=rounds,
                ratios={MEMORY: 0.7},
            )
    return lines


def _chunks(client: Any, ticket: bytes) -> Iterator[pa.RecordBatch]:
    for chunk in client.do_get(fl.Ticket(ticket)):
        yield chunk.data


def _rows_of(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def _read(batches: Iterator[pa.RecordBatch], count: int) -> int:
    found = _rows_of(batches)
    assert found == count, f"{found} of {count} rows came"
    return found


def write(count: int, rounds: int, base: Path | None, postgres: Path | None) -> list[Line]:
    """Rows of 24 bytes into an empty table, in one transaction."""
    table = data.ascending(0, count)
    pieces = table.to_batches(max_chunksize=_BATCH_ROWS)
    with ExitStack() as stack:
        places = Places(stack, base, 0)

        def empty(name: str) -> None:
            places.here.drop_table(name, missing_ok=True)
            places.here.create_table(name, data.SCHEMA)

        def insert(client: txnkv.Client, name: str) -> int:
            with client.transaction(timeout=None) as txn:
                return txn.write(name, table).inserted

        def thrown_away() -> int:
            path = fl.FlightDescriptor.for_path("t")
            writer, answer = places.flight.do_put(path, table.schema)
            for piece in pieces:
                writer.write_batch(piece)
            writer.done_writing()
            taken = int(answer.read().to_pybytes())
            writer.close()
            return taken

        copied: list[Contestant] = []
        pg = Postgres.found(stack, base, postgres)
        if pg is not None:
            copied = [
                Contestant(
                    f"{POSTGRES}, COPY",
                    lambda: pg.copy_in("t", table),
                    lambda: pg.empty("t"),
                )
            ]
        lines = race(
            "bulk write over a server",
            Contestant(SERVED, lambda: insert(places.there, "there"), lambda: empty("there")),
            [
                Contestant(HERE, lambda: insert(places.here, "here"), lambda: empty("here")),
                Contestant(NOWHERE, thrown_away),
                *copied,
            ],
            rounds=rounds,
            ratios={HERE: 0.5},
        )
        for name in ("here", "there"):
            assert places.here.table(name).count() == count, f"{name} has not all rows"
    return lines


# -- one row ---------------------------------------------------------------------------


def transaction(
    count: int, clients: list[int], rounds: int, base: Path | None, postgres: Path | None
) -> list[Line]:
    """One-row transactions, of one client and of many, each with a connection of its own.

    Args:
        count: transactions of one client a round; many share four times as many.
        clients: how many at once, in turn.
        rounds: counted rounds.
        base: where the stores are made.
        postgres: its programs; None: look for them.
    """
    with ExitStack() as stack:
        places = Places(stack, base, 0)
        pg = Postgres.found(stack, base, postgres)
        for name in ("here", "there"):
            places.here.create_table(name, rows.SCHEMA)

        def put(client: txnkv.Client, name: str) -> Callable[[rows.Row], None]:
            table = client.table(name)

            def one(row: rows.Row) -> None:
                with client.transaction() as txn:
                    txn.upsert(table, row)

            return one

        kinds: dict[str, Callable[[], Any]] = {
            SERVED: lambda: _client_of(places.address, lambda client: put(client, "there")),
            EMPTY: lambda: _empty_of(places.peer_address),
            HERE: lambda: _client_of(places.folder, lambda client: put(client, "here")),
        }
        if pg is not None:
            kinds[POSTGRES] = pg.upserts
        lines = _one_row("one-row transaction over a server", kinds, count, clients, rounds)
        held = {name: places.here.table(name).count() for name in ("here", "there")}
        if pg is not None:
            held[POSTGRES] = pg.count("r")
        assert len(set(held.values())) == 1, f"not all rows are there: {held}"
    return lines


def get(
    count: int,
    known: int,
    clients: list[int],
    rounds: int,
    base: Path | None,
    postgres: Path | None,
) -> list[Line]:
    """A row by its key, of one client and of many; arguments as of `transaction`.

    Args:
        known: rows that are there.
    """
    with ExitStack() as stack:
        places = Places(stack, base, 0)
        places.here.create_table("r", rows.SCHEMA)
        with places.here.transaction(timeout=None) as txn:
            txn.write("r", rows.table(np.arange(known)))
        pg = Postgres.found(stack, base, postgres)

        def find(client: txnkv.Client) -> Callable[[rows.Row], None]:
            table = client.table("r")

            def one(row: rows.Row) -> None:
                found = table.get(row[0] % known)
                assert found is not None
                assert found["id"] == row[0] % known

            return one

        kinds: dict[str, Callable[[], Any]] = {
            SERVED: lambda: _client_of(places.address, find),
            EMPTY: lambda: _empty_of(places.peer_address),
            HERE: lambda: _client_of(places.folder, find),
        }
        if pg is not None:
            pg.load(known)
            kinds[POSTGRES] = lambda: pg.gets(known)
        return _one_row("get over a server", kinds, count, clients, rounds)


def _one_row(
    title: str,
    kinds: dict[str, Callable[[], Any]],
    count: int,
    clients: list[int],
    rounds: int,
) -> list[Line]:
    lines: list[Line] = []
    for many in clients:
        named = f"{title}, {many} client{'s' if many > 1 else ''}"
        with ExitStack() as stack:
            if many == 1:
                operations = [
                    Operation(name, stack.enter_context(kind()), _arguments(many, 0, count))
                    for name, kind in kinds.items()
                ]
                ratios = {EMPTY: 1 / 3}
                lines += race_each(named, operations, rounds=rounds, ratios=ratios)
                continue
            each = max(1, 4 * count // many)
            ours, *peers = [
                Contestant(name, _together(stack, kind, many, each)) for name, kind in kinds.items()
            ]
            lines += race(named, ours, peers, rounds=rounds, unit=EACH)
    return lines


def _arguments(many: int, number: int, count: int) -> Callable[[int], list[rows.Row]]:
    """The rows of one client in a round: keys of its own."""

    def of(version: int) -> list[rows.Row]:
        first = (many * 1000 + number) * count
        return [rows.row(first + n, version) for n in range(count)]

    return of


def _together(
    stack: ExitStack, kind: Callable[[], Any], many: int, count: int
) -> Callable[[], int]:
    def work(one: Callable[[rows.Row], None], number: int, version: int) -> Callable[[], None]:
        mine = _arguments(many, number, count)(version)

        def run() -> None:
            for row in mine:
                one(row)

        return run

    crew = stack.enter_context(Crew(many, kind, work))

    def run() -> int:
        crew.round()
        return many * count

    return run


@contextmanager
def _client_of(path: Any, make: Callable[[txnkv.Client], Any]) -> Iterator[Any]:
    with txnkv.connect(path) as client:
        yield make(client)


@contextmanager
def _empty_of(address: str) -> Iterator[Any]:
    with fl.FlightClient(address) as client:
        yield lambda _: _empty_action(client)


# -- many clients ----------------------------------------------------------------------


def clients(most: int, committing: int, seconds: float, base: Path | None) -> list[Line]:
    """So many clients with an open transaction each, some of which commit at once and begin again.

    Memory and descriptors of the server are looked at after a tenth of the time, and at the end.

    Args:
        most: clients.
        committing: how many commit at once.
        seconds: how long.
        base: where the store is made.
    """
    with ExitStack() as stack:
        places = Places(stack, base, 0)
        places.here.create_table("r", rows.SCHEMA)
        every = [stack.enter_context(txnkv.connect(places.address)) for _ in range(most)]
        tables = [client.table("r") for client in every]
        opened: list[Any] = [None] * most

        def begin(number: int) -> None:
            txn = opened[number] = every[number].new_transaction(timeout=None)
            assert txn.get(tables[number], -1) is None  # it has begun at the server

        def commit(number: int) -> float:
            opened[number].upsert(tables[number], rows.row(number))
            gate.wait()
            began = time.perf_counter()
            opened[number].commit()
            return time.perf_counter() - began

        process = psutil.Process(places.server.pid)
        took: list[float] = []
        looks: list[tuple[float, int]] = []
        with ThreadPoolExecutor(committing) as pool:
            list(pool.map(begin, range(most)))
            until = time.monotonic() + seconds
            early, rounds = time.monotonic() + seconds / 10, 0
            while time.monotonic() < until or not rounds:
                gate = threading.Barrier(committing)
                some = [(rounds * committing + n) % most for n in range(committing)]
                took += pool.map(commit, some)
                list(pool.map(begin, some))
                rounds += 1
                if not looks and time.monotonic() > early:
                    looks.append((process.memory_info().rss / 1e6, process.num_fds()))
            looks.append((process.memory_info().rss / 1e6, process.num_fds()))
        assert places.here.table("r").count() == min(most, rounds * committing)
        typical = 1 / percentile(took, 0.5)
        spread = (1 / percentile(took, 0.99), 1 / min(took))
        line = Line(
            f"{most:,} clients, {committing} commits at once",
            SERVED, typical, spread, unit=MICROSECONDS,
        )  # fmt: skip
        line.extra = {
            "commits": len(took),
            "p99": f"{percentile(took, 0.99) * 1e3:,.1f} ms",
            "MB early": looks[0][0],
            "MB late": looks[-1][0],
            "files early": looks[0][1],
            "files late": looks[-1][1],
        }
    return [line]
