"""Forks in the middle of use: with an open client, transactions and threads.

Each program runs in a process of its own, so that what it forks is small and known.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import txnkv
from tools.children import Children
from tools.crash import leftovers
from tools.crash_scenarios import BEFORE

Connect = Callable[..., txnkv.Client]

FORKING = """
client = txnkv.connect(args[0], create=False)
left = client.table("left")
with client.snapshot() as kept:
    scan = iter(kept.scan("left").to_batches())
    next(scan, None)
stopping = threading.Event()
written, failed = [], []

def keep_writing(number):
    turn = 0
    while not stopping.is_set():
        first = 100_000 * (number + 1) + 10 * turn
        try:
            with client.transaction() as txn:
                for name in TABLES:
                    txn.write(name, rows(first, 10))
        except BaseException as error:
            failed.append(repr(error))
            return
        written.append(first)
        turn += 1

threads = [threading.Thread(target=keep_writing, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()

txn = client.new_transaction()
txn.write("left", rows(2000, 50))
token = txn.serialize()
children = []
for number in range(int(args[1])):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            try:
                txn.write("left", rows(3000, 1))
                say("the child used its parent's handle")
            except txnkv.InvalidTxnStateError:
                pass
            with client.transaction() as own:
                for name in TABLES:
                    own.write(name, rows(5000 + 100 * number, 25))
            assert left.get(0)["text"] == "row 0"
            assert left.get(2000) is None, "not committed yet"
            joined = txnkv.Transaction.deserialize(client, token)
            joined.write("right", rows(2000 + 10 * number, 10))
            assert client.check().problems == []
            code = 0
        except BaseException as error:
            say("child:", repr(error))
        os._exit(code)
    children.append(pid)
    txn.write("left", rows(2100 + 10 * number, 10))
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
txn.commit()
stopping.set()
for thread in threads:
    thread.join()
say(codes, failed)
say(sorted(written))
client.close()
"""


@pytest.mark.parametrize("forks", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_fork_in_the_middle_of_use(
    children: Children, store: Path, connect: Connect, forks: int
) -> None:
    program = children.start(FORKING, store, forks)
    said = program.finish()
    assert said[:-1] == [f"{[0] * forks} []"]
    background = [first + i for first in json.loads(said[-1]) for i in range(10)]
    assert background, "the threads wrote while the process forked"
    own = [5000 + 100 * number + i for number in range(forks) for i in range(25)]
    expected = {
        "left": [
            *range(BEFORE),
            *background,
            *own,
            *range(2000, 2050),
            *range(2100, 2100 + 10 * forks),
        ],
        "right": [*range(BEFORE), *background, *own, *range(2000, 2000 + 10 * forks)],
    }
    client = connect()
    for name, ids in expected.items():
        found = client.table(name).scan(columns=["id"]).to_arrow()["id"].to_pylist()
        assert Counter(found) == Counter(ids)
    assert leftovers(client) == []
    assert client.check().problems == []


PARENT_DIES = """
client = txnkv.connect(args[0], create=False)
with client.transaction() as txn:
    txn.insert("left", {"id": 1000, "text": None})
pid = os.fork()
if pid:
    os.kill(os.getpid(), signal.SIGKILL)
with client.transaction() as txn:
    txn.insert("left", {"id": 1001, "text": None})
say("child done")
sys.stdout.flush()
client.close()
os._exit(0)
"""


def test_child_goes_on_when_its_parent_is_killed(
    children: Children, store: Path, connect: Connect
) -> None:
    program = children.start(PARENT_DIES, store)
    assert program.line() == "child done"
    client = connect()
    assert client.table("left").count() == BEFORE + 2
    assert client.check().problems == []


KEEPALIVE = """
client = txnkv.connect(args[0], create=False, keepalive_time=3.0)
txn = client.new_transaction(timeout=None)
txn.write("left", rows(2000, 10))
pid = os.fork()
if pid == 0:
    with client.transaction() as own:
        own.insert("left", {"id": 1000, "text": None})
    client.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
for _ in range(3):
    time.sleep(1.2)
    client.instance.coordinator.maintenance.round()
txn.commit()
say("committed")
"""


def test_parent_keeps_its_transaction_alive_after_a_fork(
    children: Children, store: Path, connect: Connect
) -> None:
    assert children.start(KEEPALIVE, store).finish() == ["committed"]
    assert connect().table("left").count() == BEFORE + 11


MULTIPROCESSING = """
import multiprocessing

def work(task):
    path, token, number = task
    with txnkv.connect(path, create=False) as client:
        txn = txnkv.Transaction.deserialize(client, token)
        session = txn.new_session()
        session.write("left", rows(1000 + 100 * number, 100))
        for i in range(5):
            session.insert("right", {"id": 1000 + 5 * number + i, "text": None})
        session.flush()
    return os.getpid()

if __name__ == "__main__":
    client = txnkv.connect(args[0], create=False)
    txn = client.new_transaction(timeout=None)
    txn.insert("left", {"id": 999, "text": "driver"})
    txn.flush()
    with multiprocessing.get_context(args[1]).Pool(2) as pool:
        pids = set(pool.map(work, [(args[0], txn.serialize(), number) for number in range(6)]))
    assert os.getpid() not in pids
    txn.commit()
    say(client.table("left").count(), client.table("right").count())
    client.close()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_pool_stages_under_one_token(
    method: str, children: Children, store: Path, tmp_path: Path, connect: Connect
) -> None:
    program = tmp_path / "program.py"
    said = children.start_file(program, MULTIPROCESSING, store, method).finish()
    assert said[-1] == f"{BEFORE + 601} {BEFORE + 30}"
    client = connect()
    assert client.table("left").count() == BEFORE + 601
    assert leftovers(client) == []
    assert client.check().problems == []


EXEC = """
import subprocess
client = txnkv.connect(args[0], create=False)
txn = client.new_transaction()
txn.write("left", rows(2000, 10))
code = '''
import sys, txnkv
with txnkv.connect(sys.argv[1], create=False) as client:
    with client.transaction() as txn:
        txn.insert("left", {"id": 1000, "text": None})
    print(client.table("left").count())
'''
out = subprocess.run([sys.executable, "-c", code, args[0]], capture_output=True, text=True)
say(out.stdout.strip() + out.stderr.strip())
txn.commit()
say(client.table("left").count())
"""


def test_subprocess_opens_the_store_beside_its_parent(children: Children, store: Path) -> None:
    assert children.start(EXEC, store).finish() == [str(BEFORE + 1), str(BEFORE + 11)]


DAEMON = """
client = txnkv.connect(args[0], create=False)
left = client.create_table("daemons", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
with client.transaction() as txn:
    txn.insert(left, {"id": 1})
pid = os.fork()
if pid == 0:
    os.closerange(3, 256)
    mine = [os.open(os.devnull, os.O_RDWR) for _ in range(100)]
    with client.transaction() as txn:
        txn.insert(left, {"id": 2})
    client.close()
    for descriptor in mine:
        os.fstat(descriptor)
    os._exit(0)
say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), left.count())
"""


def test_a_daemon_that_closed_all_keeps_files_of_its_own(children: Children, store: Path) -> None:
    assert children.start(DAEMON, store).finish() == ["0 2"]


WAITING = """
client = txnkv.connect(args[0], create=False)
client.create_topic("events")
sessions = [client.new_session(flush_mode=mode) for mode in ("manual", "auto_background")]
for number, session in enumerate(sessions):
    session.insert("left", {"id": 5000 + number, "text": "before the fork"})
    session.send("events", b"before the fork")
txn = client.new_transaction()
joined = txnkv.Transaction.deserialize(client, txn.serialize())
joined.insert("left", {"id": 5002, "text": "before the fork"})
pid = os.fork()
if pid == 0:
    joined.close()
    for number, session in enumerate(sessions):
        assert session.flush() == txnkv.WriteResult()
        session.insert("left", {"id": 6000 + number, "text": "of the child"})
        session.close()
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
for session in sessions:
    session.close()
joined.close()
txn.commit()
with client.topic("events").consumer(start="earliest") as consumer:
    sent = len(consumer.poll(timeout=1))
texts = [row["text"] for row in client.table("left").scan() if row["id"] >= 5000]
say(code, sent, texts.count("before the fork"), texts.count("of the child"))
"""


def test_what_waits_in_a_session_is_written_by_its_own_process(
    children: Children, store: Path
) -> None:
    assert children.start(WAITING, store).finish() == ["0 2 3 2"]


BUSY = """
import faulthandler
client = txnkv.connect(args[0], create=False)
left = client.table("left")
client.create_topic("events", partitions=2)
stopping = threading.Event()
failed = []

def busy(work, number):
    turn = 0
    while not stopping.is_set():
        try:
            work(100_000 * (number + 1) + turn)
        except txnkv.TransactionConflictError:
            pass
        except BaseException as error:
            failed.append(repr(error))
            return
        turn += 1

def commit(id):
    with client.transaction() as txn:
        txn.upsert("left", {"id": id % 1000, "text": "x"})
        txn.send("events", b"x")

def look(id):
    left.get(id % BEFORE)
    client.table("right").scan(columns=["id"]).to_arrow()

def stage(id):
    with client.transaction() as txn:
        txn.write("right", rows(10 * id, 10))

works = [commit, commit, look, stage, lambda id: client.compact()]
threads = [threading.Thread(target=busy, args=each) for each in zip(works, range(5))]
for thread in threads:
    thread.start()
codes = []
for number in range(int(args[1])):
    pid = os.fork()
    if pid == 0:
        faulthandler.enable()
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(100)  # one that hangs tells where, and is killed
        code = 1
        try:
            assert left.get(0) is not None
            with client.transaction() as txn:
                txn.insert("left", {"id": 10_000_000 + number, "text": None})
            client.table("right").scan(columns=["id"], limit=1).to_arrow()
            code = 0
        except BaseException as error:
            say("child:", repr(error))
        os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stopping.set()
for thread in threads:
    thread.join()
say([code for code in codes if code], failed)
with client.snapshot() as snapshot:
    ids = snapshot.scan("left", columns=["id"]).to_arrow()["id"].to_pylist()
say(sum(id >= 10_000_000 for id in ids))
client.close()
sys.exit(any(codes))  # with what the children told
"""


@pytest.mark.parametrize("forks", [20, pytest.param(3000, marks=pytest.mark.slow)])
def test_forks_beside_busy_threads(
    children: Children, store: Path, connect: Connect, forks: int
) -> None:
    """A committer was inside of the gate and waited for a lock whose holder waited at the gate:
    the fork stood for 30 s, and its child was refused. Others inherited a lock that was held: ours,
    and the one under which pyarrow loads pandas.
    """
    program = children.start(BUSY, store, forks)
    assert [program.line(), *program.finish()] == ["[] []", str(forks)]
    assert connect().check().problems == []


ALLOCATING = """
client = txnkv.connect(args[0], create=False)
left = client.table("left")
default, stopping = pa.default_memory_pool(), threading.Event()

def allocate():
    while not stopping.is_set():
        kept = [pa.allocate_buffer(size, default) for size in (8, 1000, 40_000, 3_000_000)]

def come_and_go():
    while not stopping.is_set():
        thread = threading.Thread(target=pa.allocate_buffer, args=(300_000, default))
        thread.start()
        thread.join()

threads = [threading.Thread(target=work) for work in (allocate, allocate, come_and_go)]
for thread in threads:
    thread.start()
codes = []
for number in range(int(args[1])):
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)  # of a second's work
        code = 1
        try:
            taken = default.num_allocations()
            assert left.get(0) is not None
            with client.transaction() as txn:
                txn.upsert("left", {"id": 1000 + number, "text": "of a child"})
            assert client.table("left").scan(columns=["id"]).to_arrow().num_rows > number
            assert pa.default_memory_pool().backend_name == "system"
            assert default.num_allocations() == taken, "from the pool whose locks may be held"
            code = 0
        except BaseException as error:
            say("child:", repr(error))
        os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stopping.set()
for thread in threads:
    thread.join()
assert pa.default_memory_pool().backend_name == default.backend_name, "the parent's stays"
say([code for code in codes if code], left.count())
client.close()
"""


@pytest.mark.skipif(
    pa.default_memory_pool().backend_name != "mimalloc", reason="pyarrow's default has no such lock"
)
@pytest.mark.parametrize("forks", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_child_does_not_allocate_where_threads_of_its_parent_did(
    children: Children, store: Path, connect: Connect, forks: int
) -> None:
    """A get in a child stood still in mimalloc, whose lock another thread had at the fork."""
    program = children.start(ALLOCATING, store, forks)
    assert [program.line(), *program.finish()] == [f"[] {BEFORE + forks}"]
    assert connect().check().problems == []
