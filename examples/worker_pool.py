"""A pool of processes writes one transaction; tasks may fail and are tried again.

Every attempt of a task stages under a name of its own. The driver commits the job with the
attempts that came through, so what the failed ones left counts for nothing.

python examples/worker_pool.py [STORE]
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

import pyarrow as pa

import txnkv
from txnkv.transaction.job import Job

TASKS, ROWS = 4, 10_000


def work(path: str, token: str, job: str, task: int, attempt: int) -> str:
    """One attempt of a task; its name."""
    name = f"{task}.{attempt}"
    rows = pa.table({"id": range(task * ROWS, (task + 1) * ROWS), "task": [task] * ROWS})
    with txnkv.connect(path, create=False) as client:
        txn = txnkv.Transaction.deserialize(client, token)
        with Job.join(txn, job).session(name) as session:
            session.write("results", rows)
    if task == 2 and attempt == 0:
        raise RuntimeError("task 2 fails after it has written")
    return name


def main(path: str) -> None:
    with txnkv.connect(path) as client:
        schema = txnkv.Schema({"id": "int64", "task": "int64"}, primary_key=["id"])
        results = client.create_table("results", schema)
        txn = client.new_transaction(timeout=None)
        job = Job.start(txn)
        token = str(txn.serialize())
        came_through = []
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=2, mp_context=fresh) as pool:
            waiting = {
                task: pool.submit(work, path, token, job.id, task, 0) for task in range(TASKS)
            }
            for task, future in waiting.items():
                try:
                    came_through.append(future.result())
                except RuntimeError as error:
                    print(f"{error}; again")
                    again = pool.submit(work, path, token, job.id, task, 1)
                    came_through.append(again.result())
        print(f"before the commit others see {results.count():,} rows")
        job.commit(came_through)
        txn.commit()
        print(f"after it {results.count():,}, from the attempts {', '.join(came_through)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/store")
