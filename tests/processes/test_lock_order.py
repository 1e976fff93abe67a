"""No two threads can wait for each other's locks, nor for a fork that waits for them.

The story: a reader held the lock of the commit log and waited at the fork gate; a committer was
inside of the gate and waited for that lock; the fork waited for the committer, for 30 s.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.children import PATIENCE, ROOT

WATCHED = """
import sys
sys.path.insert(0, sys.argv[2])
from tests import lock_order
lock_order.watch()
import os, threading
import pyarrow as pa
import txnkv

client = txnkv.connect(sys.argv[1])
schema = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])
table = client.create_table("t", schema)
events = client.create_topic("events", partitions=2)
client.create_topic("side", buffer="sidecar")
errors = []

def rows(first, n):
    return pa.table({"id": pa.array(range(first, first + n), pa.int64()), "v": ["x"] * n})

def small(turn):
    with client.transaction() as txn:
        txn.upsert("t", {"id": turn % 7, "v": "x"})
        txn.send("events", b"x")
        txn.send("side", b"x")

def large(turn):
    with client.transaction(locking="partition") as txn:
        txn.write("t", rows(1000 * turn, 20), op="upsert")
        token = txn.serialize()
        joined = txnkv.Transaction.deserialize(client, token)
        joined.send("events", b"y")
        joined.flush()

def replace(turn):
    with client.transaction() as txn:
        txn.serialize()
        txn.write("t", rows(7 * (turn % 2), 14), op="upsert")

def look(turn):
    table.get(turn % 7)
    with client.snapshot() as snapshot:
        snapshot.scan("t").to_arrow()

def own(turn):
    with client.new_session() as session:
        session.upsert(table, {"id": 50 + turn, "v": "o"})
        session.flush()
    client.compact()

def consume(kind):
    with events.subscribe(kind, type=kind) as sub:
        for message in sub.receive_many(max_messages=10, timeout=1):
            with client.transaction() as txn:
                txn.upsert("t", {"id": 90, "v": kind})
                sub.ack(message, txn)

def read(turn):
    with events.consumer(isolation="serializable") as consumer:
        consumer.poll(timeout=0.1)

def produce(turn):
    with events.producer(f"p{turn}") as producer:
        producer.send(b"z").result()

works = [small, small, large, replace, replace, look, own, read, produce,
         lambda turn: consume(["exclusive", "shared"][turn % 2])]

def run(work):
    for turn in range(4):
        try:
            work(turn)
        except (txnkv.TransactionConflictError, txnkv.TransactionLockedError):
            pass
        except BaseException as error:
            errors.append(repr(error))

threads = [threading.Thread(target=run, args=(work,)) for work in works]
for thread in threads:
    thread.start()
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        table.get(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
for thread in threads:
    thread.join()
client.instance.coordinator.maintenance.round()
client.close()
for problem in lock_order.problems():
    print(problem)
for error in errors:
    print(error)
"""

CIRCLES = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from tests import lock_order
lock_order.watch()
from txnkv.storage.fork import GATE
from txnkv.storage.locks import new_event, new_lock

lock = new_lock()
other = new_lock()
third = new_lock()
def has(words):
    found = [problem for problem in lock_order.problems() if problem.startswith(words)]
    print(len(found))

with GATE.use(), lock: pass
has("a circle")
with lock, GATE.use(): pass
has("a circle")
with lock, other: pass
with other, third: pass
has("a circle")
with third, lock: pass
has("a circle")
GATE.enter()
new_event().wait(0.01)
has("a wait")
event = new_event()
threading.Timer(0.1, event.set).start()
event.wait()
has("a wait")
"""


def run(code: str, *args: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *map(str, args)],
        capture_output=True, text=True, timeout=5 * PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_locks_are_taken_in_one_order(tmp_path: Path) -> None:
    assert run(WATCHED, tmp_path / "store", ROOT) == ""


def test_the_watch_finds_circles_and_waits_inside_of_the_gate() -> None:
    assert run(CIRCLES, ROOT).split() == ["0", "1", "1", "2", "0", "1"]
