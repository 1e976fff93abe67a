"""Workers of several processes that send in attempts of jobs: speculation, deaths, stragglers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.transaction.job import Job

WORKER = """
import pyarrow as pa
from txnkv.transaction.job import Job
say("ready")
while (line := wait()):
    token, job, task, attempt = line.split()
    try:
        txn = txnkv.Transaction.deserialize(client, token)
        with Job.join(txn, job).session(attempt) as session:
            for part in range(4):
                values = [b"%d %d" % (int(task), part * 10 + i) for i in range(10)]
                session.send_batch("marker", pa.table({"value": values, "partition": [0, 1] * 5}))
                session.send_batch("sidecar", pa.table({"value": values, "partition": [1, 0] * 5}))
            session.insert("t", (int(task), attempt))
        say(attempt)
    except (txnkv.InvalidTxnStateError, txnkv.TxnNotFoundError):
        say(None)
"""
TASKS = 5
WORKERS = 3


class _Round:
    """One job: each worker does all tasks, the first attempt of a task that is done counts."""

    def __init__(self, txn: txnkv.Transaction, job: Job) -> None:
        self.order = f"{txn.serialize()} {job.id}"
        self.chosen: dict[int, str] = {}
        self.late = 0
        self.complete = threading.Event()
        self._lock = threading.Lock()

    def work(self, worker: Any, number: int) -> None:
        for i in range(TASKS):
            task = (i + number * 2) % TASKS
            try:
                worker.tell(f"{self.order} {task} {task}.{number}")
                attempt = worker.hear()
            except (BrokenPipeError, pytest.fail.Exception):
                return  # it was killed
            with self._lock:
                if attempt is None:
                    self.late += 1
                elif not self.complete.is_set():
                    self.chosen.setdefault(task, attempt)
                if len(self.chosen) == TASKS:
                    self.complete.set()


@pytest.mark.parametrize("fault", ["staged.written", "staged.counted"])
def test_each_task_counts_once(
    fault: str, client: txnkv.Client, table: txnkv.Table, process: Callable[..., Any]
) -> None:
    for name in ("marker", "sidecar"):
        client.create_topic(name, partitions=2, buffer=name)
    orders = []
    good = [process(WORKER) for _ in range(WORKERS - 1)]
    for number in range(2):
        bad = process(WORKER, fault=f"{fault}=kill@{1 + number}")
        workers = [*good, bad]
        assert [worker.hear() for worker in workers if worker is bad or not number] == (
            ["ready"] if number else ["ready"] * WORKERS
        )
        txn = client.new_transaction(timeout=None)
        job = Job.start(txn)
        doing = _Round(txn, job)
        threads = [
            threading.Thread(target=doing.work, args=(worker, at))
            for at, worker in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        assert doing.complete.wait(60)
        orders.append([doing.chosen[task] for task in sorted(doing.chosen, reverse=True)])
        job.commit(orders[-1])  # others are at it still
        txn.commit()
        for thread in threads:
            thread.join()
        bad.end()  # it may have come too late to die
        assert {row["id"]: row["v"] for row in table.scan()} == doing.chosen
        with client.transaction() as after:
            for task in range(TASKS):
                after.delete(table, task)
    internals.maintenance(client).round(resume_all=True)
    staged = internals.topics(client).staged
    assert (staged.files(), list(staged.folder.iterdir())) == ([], [])
    for name in ("marker", "sidecar"):
        for partition in (0, 1):
            first = partition if name == "marker" else 1 - partition
            assert _values(client.topic(name), partition) == [
                b"%d %d" % (task, i)
                for _ in orders
                for task in reversed(range(TASKS))
                for i in range(first, 40, 2)
            ]


def _values(topic: txnkv.Topic, partition: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    with topic.consumer(partitions=[partition]) as consumer:
        while some := consumer.poll(timeout=0):
            found += [message.value for message in some]
    return found
