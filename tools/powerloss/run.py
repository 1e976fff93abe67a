"""Does a workload, in the recorded process; marks say what was acknowledged, and what was seen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

import txnkv
from tools.crash_scenarios import cut_small
from tools.powerloss.recording import mark
from tools.powerloss.watch import Watcher
from tools.powerloss.workload import (
    BRIEF,
    BRIEF_ROWS,
    DELETE,
    SCHEMA,
    TABLES,
    WINDOW,
    Transaction,
    Workload,
    Write,
    from_text,
    history,
    to_text,
)
from txnkv.client import admin
from txnkv.storage import extents
from txnkv.tables import Operation


def run(store: Path, workload: Workload) -> None:
    """The whole run; marks say what was acknowledged."""
    _cut_small()
    with txnkv.connect(store, history=workload.history) as client:
        mark("store")
        for table, tablets in zip(TABLES, (2, 1), strict=True):
            client.create_table(table, SCHEMA, partition_by=txnkv.hash_partition("id", tablets))
            mark(f"table {table}")
        with Watcher(client, workload):
            _threads(client, workload)
            _brief(client)
            keep_up(client)
            _processes(store, workload)
    with txnkv.connect(store, create=False, history=workload.history) as client:
        keep_up(client)


def _threads(client: txnkv.Client, workload: Workload) -> None:
    with ThreadPoolExecutor(workload.threads) as pool:
        # All begin at once, so that they commit together.
        start = threading.Barrier(workload.threads)
        for done in [
            pool.submit(_thread, client, workload, writer, start)
            for writer in range(workload.threads)
        ]:
            done.result()


def _cut_small() -> None:
    """Make little data do what much data does: several chunks and blocks, files that shrink."""
    cut_small()
    admin.LEAST_BYTES = 0  # type: ignore[misc]
    extents.LEAST_FREE_BYTES = 0  # type: ignore[misc]


def recover(state: Path, root: Path, store: Path, workload: Workload) -> None:
    """Another run: a state that a power loss left is put into the root, opened and tidied up."""
    _cut_small()
    copy_durably(state, root)
    mark("put")
    with txnkv.connect(store, history=workload.history) as client:
        keep_up(client)


def copy_durably(source: Path, target: Path) -> None:
    """Copies what is in a folder into one that is there, and syncs all of it."""
    for entry in sorted(source.iterdir()):
        copied = target / entry.name
        if entry.is_dir():
            copied.mkdir(mode=0o700)
            copy_durably(entry, copied)
        else:
            copied.write_bytes(entry.read_bytes())
            copied.chmod(0o600)
            _sync(copied)
    _sync(target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _thread(
    client: txnkv.Client, workload: Workload, writer: int, start: threading.Barrier
) -> None:
    start.wait()
    if workload.pipelined(writer):
        _pipeline(client, workload, writer)
    else:
        write(client, workload, writer)


def write(client: txnkv.Client, workload: Workload, writer: int) -> None:
    """All transactions of one writer."""
    for transaction in history(workload, writer)[0]:
        fill = _filling(transaction)
        if transaction.commits:
            client.run(fill)
        else:
            txn = client.new_transaction()
            fill(txn)
            txn.rollback()
        mark(f"done {writer} {transaction.number}")
        if writer == 0 and transaction.number % workload.upkeep == workload.upkeep - 1:
            keep_up(client)


def _pipeline(client: txnkv.Client, workload: Workload, writer: int) -> None:
    flying: deque[tuple[int, Future[txnkv.Timestamp]]] = deque()
    for transaction in history(workload, writer)[0]:
        txn = client.new_transaction()
        _filling(transaction)(txn)
        flying.append((transaction.number, txn.commit_async()))
        if len(flying) == WINDOW:
            _land(writer, *flying.popleft())
    for number, commit in flying:
        _land(writer, number, commit)


def _land(writer: int, number: int, commit: Future[txnkv.Timestamp]) -> None:
    commit.result()
    mark(f"done {writer} {number}")


def _filling(transaction: Transaction) -> Callable[[txnkv.Transaction], object]:
    groups: dict[tuple[Operation, str], list[Write]] = {}
    for write in transaction.writes:
        groups.setdefault((write.op, write.table), []).append(write)

    def fill(txn: txnkv.Transaction) -> None:
        for (op, table), writes in groups.items():
            if transaction.bulk:
                txn.write(table, _batch(op, writes), op=op)
                continue
            for each in writes:
                key_or_row = each.id if op == DELETE else {"id": each.id, "text": each.text}
                getattr(txn, op)(table, key_or_row)

    return fill


def _batch(op: str, writes: list[Write]) -> pa.Table:
    columns: dict[str, Any] = {"id": pa.array([write.id for write in writes], pa.int64())}
    if op != DELETE:
        columns["text"] = pa.array([write.text for write in writes])
    return pa.table(columns)


def keep_up(client: txnkv.Client) -> None:
    """Do the leader's upkeep: rounds, flush, checkpoints, compaction, collection."""
    instance = client.instance
    instance.coordinator.maintenance.round(resume_all=True)
    instance.engine.flush()
    instance.store.status.checkpoint(cut=False)
    client.compact()
    instance.store.status.checkpoint()


def _brief(client: txnkv.Client) -> None:
    client.create_table(BRIEF, SCHEMA)
    mark(f"table {BRIEF}")
    with client.transaction() as txn:
        txn.write(BRIEF, pa.table({"id": pa.array(range(BRIEF_ROWS), pa.int64())}))
    mark(f"filled {BRIEF}")
    client.drop_table(BRIEF)
    mark(f"dropped {BRIEF}")


def _processes(store: Path, workload: Workload) -> None:
    code = "import sys\nfrom tools.powerloss.run import process\nprocess(*sys.argv[1:])"
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(store), to_text(workload), str(writer)])
        for writer in range(workload.threads, workload.all_writers)
    ]
    for each in started:
        if each.wait() != 0:
            raise RuntimeError(f"a writing process ended with {each.returncode}")


def process(store: str, workload: str, writer: str) -> None:
    """Run the work of a further process; arguments as texts."""
    _cut_small()
    does = from_text(workload)
    with txnkv.connect(store, create=False, history=does.history) as client:
        write(client, does, int(writer))
