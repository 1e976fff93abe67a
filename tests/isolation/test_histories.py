"""Random transactions of threads and processes, and what the checker makes of their history.

Snapshot isolation is to show nothing but write skew, serializable nothing at all; both with
real time: who begins after another's commit was answered sees it. The store's own timestamps
are held against it too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import txnkv
from tests.threads import at_once
from tools.children import Children
from tools.isolation.checker import check
from tools.isolation.histories import Outcome, Txn, dump, parse
from tools.isolation.interleaving import LEVELS
from tools.isolation.replay import replay
from tools.isolation.workload import KEYS, Load, prepare, read_all, work

PROCESS = """
from pathlib import Path
from tools.isolation.histories import dump
from tools.isolation.workload import Load, work
threads = int(args[2])
with txnkv.connect(args[0], create=False) as client:
    say("ready")
    wait()
    loads = [
        Load(f"{args[1]}t{n}", int(args[3]) + n, args[4], seconds=float(args[5]), least=60)
        for n in range(threads)
    ]
    histories = [[] for _ in loads]
    def run(n):
        histories[n] = work(client, loads[n])
    started = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    Path(args[6]).write_text(dump(sum(histories, [])))
"""


@contextmanager
def flushes(client: txnkv.Client, every: float) -> Iterator[None]:
    """Flush and compact in the background, as a busy store does in minutes."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.wait(every):
                client.compact()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


def by_threads(client: txnkv.Client, level: str, seconds: float, seed: int) -> list[Txn]:
    def run(number: int) -> list[Txn]:
        return work(client, Load(f"t{number}", seed + number, level, seconds=seconds, least=60))

    histories = at_once(*(partial(run, number) for number in range(4)))
    return [txn for history in histories for txn in history]


def by_processes(
    client: txnkv.Client, level: str, seconds: float, seed: int, threads: int, folder: Path
) -> list[Txn]:
    files = [folder / f"history{number}" for number in range(3)]
    with Children() as children:
        started = [
            children.start(
                PROCESS, client.path, f"p{n}", threads, seed + 100 * n, level, seconds, file
            )
            for n, file in enumerate(files)
        ]
        for child in started:
            assert child.line() == "ready"
        for child in started:
            child.tell()
        for child in started:
            child.finish()
    return [txn for file in files for txn in parse(file.read_text())]


def examine(history: list[Txn], client: txnkv.Client, level: str, folder: Path) -> None:
    """The history is kept beside the store, for whoever looks at a failure."""
    history.append(read_all(client))
    kept = folder / "history"
    kept.write_text(dump(history))
    report = check(history)
    wrong = [*report.violations(level), *replay(history, level)]
    assert not wrong, f"{kept}:\n" + "\n".join(map(str, wrong[:20]))


def assert_it_was_busy(history: list[Txn], least: int) -> None:
    """Each session committed something, and they met."""
    committed = Counter(txn.session for txn in history if txn.outcome is Outcome.COMMITTED)
    assert min(committed.values()) >= least, committed
    assert any(txn.outcome is Outcome.ABORTED for txn in history)
    read = {op.key for txn in history for op in txn.ops}
    assert read == {f"{kind}{key}" for kind in "lr" for key in range(KEYS)}


@pytest.fixture
def prepared(connect: Callable[..., txnkv.Client]) -> txnkv.Client:
    client = connect()
    prepare(client)
    return client


@pytest.mark.parametrize("level", LEVELS)
def test_threads(prepared: txnkv.Client, level: str, tmp_path: Path) -> None:
    with flushes(prepared, 0.2):
        history = by_threads(prepared, level, 0.8, seed=1)
    assert_it_was_busy(history, 5)
    examine(history, prepared, level, tmp_path)


@pytest.mark.parametrize("level", LEVELS)
def test_processes(prepared: txnkv.Client, level: str, tmp_path: Path) -> None:
    with flushes(prepared, 0.2):
        history = by_processes(prepared, level, 0.8, 1, 1, tmp_path)
    assert_it_was_busy(history, 5)
    examine(history, prepared, level, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1000, 2000])
@pytest.mark.parametrize("level", LEVELS)
def test_threads_for_long(prepared: txnkv.Client, level: str, seed: int, tmp_path: Path) -> None:
    with flushes(prepared, 1.0):
        history = by_threads(prepared, level, 30.0, seed)
    assert_it_was_busy(history, 100)
    examine(history, prepared, level, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1000, 2000])
@pytest.mark.parametrize("level", LEVELS)
def test_processes_for_long(prepared: txnkv.Client, level: str, seed: int, tmp_path: Path) -> None:
    with flushes(prepared, 1.0):
        history = by_processes(prepared, level, 30.0, seed, 2, tmp_path)
    assert_it_was_busy(history, 100)
    examine(history, prepared, level, tmp_path)
