"""Writers that were stopped and go on after their transaction is over: nobody sees their messages.

    writer        OPEN? yes ... stopped .............................. appends
    leader                               aborts, it is past its timeout

The check and the append are one, under the log's write lock: a writer that was stopped before it
had the lock is refused; one that was stopped while it had it made the abort wait, and its batch
lies before the abort marker.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.conftest import is_stopped, until
from tools.crash_topics import committed
from tools.topic_contents import raw
from tools.topic_writers import abort, batch, begin, commit, create, send, small
from txnkv import core
from txnkv.errors import InvalidTxnStateError
from txnkv.storage import arm
from txnkv.topics import topic_catalog
from txnkv.topics.write import append, roll_forward

WRITER = """
import signal, threading
from tools.topic_writers import begin, send
from txnkv.storage import arm
partition = client.instance.topics.partition(id)
row = begin(client, timeout=0.5 if timed else 60)
send(client, row, partition, [b"before"])
def stop():
    say(("stopped", row.txn_id))
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread at once
"""


def wait_stopped(pid: int) -> None:
    """Until the kernel says so."""
    until(lambda: is_stopped(pid))


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    monkeypatch.setenv("PYTHONPATH", root)


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_one_that_was_stopped_before_it_appends(
    client: txnkv.Client,
    process: Callable[..., Any],
    by_hand: Callable[[txnkv.Client], None],
    until: Callable[..., Any],
    paths: None,
    buffer: str,
) -> None:
    """Its transaction passes its timeout meanwhile and is aborted."""
    (partition,) = create(client, buffer=buffer)
    writer = process(
        WRITER + "stop()\n"
        "try:\n"
        "    send(client, row, partition, [b'late'])\n"
        "    say('sent')\n"
        "except txnkv.InvalidTxnStateError:\n"
        "    say('refused')\n",
        id=partition.id,
        timed=True,
    )
    _, txn_id = writer.hear()
    wait_stopped(writer.popen.pid)

    def ended() -> bool:
        by_hand(client)
        return client.transaction_state(txn_id) is txnkv.TxnState.ABORTED

    until(ended)
    small(client, [partition], [b"after"])
    os.kill(writer.popen.pid, signal.SIGCONT)
    assert writer.hear() == "refused"
    writer.finish()
    small(client, [partition], [b"and after"])
    assert committed(client, partition) == [b"after", b"and after"]
    if buffer == "marker":
        with partition.environment.read() as txn:
            assert partition.log.open_transactions(txn) == []


@pytest.mark.parametrize("end", ["goes on", "is killed"])
@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_one_that_was_stopped_while_it_appends(
    client: txnkv.Client, process: Callable[..., Any], paths: None, buffer: str, end: str
) -> None:
    """It has seen its transaction OPEN and holds the log's lock; the abort waits for it."""
    (partition,) = create(client, buffer=buffer)
    writer = process(
        WRITER + "arm('lmdb.before_commit', stop)\nsend(client, row, partition, [b'late'])\n",
        id=partition.id,
        timed=False,
    )
    _, txn_id = writer.hear()
    wait_stopped(writer.popen.pid)
    aborted = threading.Event()

    def end_it() -> None:
        internals.coordinator(client).abort(txn_id, "by hand")
        aborted.set()

    thread = threading.Thread(target=end_it)
    thread.start()
    assert not aborted.wait(0.2)
    if end == "goes on":
        os.kill(writer.popen.pid, signal.SIGCONT)
    else:
        writer.kill()
    thread.join(timeout=60)
    assert aborted.is_set()
    small(client, [partition], [b"after"])
    assert committed(client, partition) == [b"after"]
    with partition.environment.read() as txn:
        assert partition.log.last_stable_offset(txn) == partition.log.end(txn)


def test_a_commit_waits_for_an_append_that_saw_it_open(
    client: txnkv.Client, process: Callable[..., Any], paths: None
) -> None:
    """A worker under a token is in the middle of an append when the commit begins."""
    (partition,) = create(client)
    worker = process(
        WRITER + "arm('lmdb.before_commit', stop)\nsend(client, row, partition, [b'in time'])\n",
        id=partition.id,
        timed=False,
    )
    _, txn_id = worker.hear()
    wait_stopped(worker.popen.pid)
    row = internals.coordinator(client).get(txn_id)
    thread = threading.Thread(target=commit, args=(client, row))
    thread.start()
    thread.join(timeout=0.2)
    assert thread.is_alive()
    os.kill(worker.popen.pid, signal.SIGCONT)
    thread.join(timeout=60)
    assert client.transaction_state(txn_id) is txnkv.TxnState.COMMITTED
    assert committed(client, partition) == [b"before", b"in time"]
    worker.finish()


def test_a_batch_that_comes_late_all_the_same_is_dropped(client: txnkv.Client) -> None:
    """Put into the log behind the engine's back: the low water mark of later markers tells."""
    (partition,) = create(client)
    old = begin(client)
    send(client, old, partition, [b"committed"])
    commit(client, old)
    gone = begin(client)
    send(client, gone, partition, [b"rolled back"])
    abort(client, gone)

    def force(txn_id: int) -> None:
        base = roll_forward.complete(internals.topics(client), partition)
        with internals.status(client).write() as cur:
            topic_catalog.take_offsets(cur, partition.id, 1)
        late = core.place(batch([b"late"], txn_id), base)
        partition.environment.write(lambda txn: partition.log.put(txn, [late]))

    force(old.txn_id)
    force(gone.txn_id)
    new = begin(client)
    send(client, new, partition, [b"new"])
    # Ids are alive until their process says otherwise: it does when it stores its ranges.
    with internals.status(client).write() as cur:
        internals.coordinator(client).ids.record(cur)
    commit(client, new)
    force(old.txn_id)
    small(client, [partition], [b"small"])
    assert committed(client, partition) == [b"committed", b"new", b"small"]
    assert raw(client, "events").count(b"late") == 3


def test_an_append_that_the_fork_cut_off_is_refused_after_the_end(client: txnkv.Client) -> None:
    """The transaction is over by the time the lock is had."""
    (partition,) = create(client)
    row = begin(client)
    send(client, row, partition, [b"a"])
    engine = internals.topics(client)
    entered, go_on = threading.Event(), threading.Event()

    def hold(txn: Any) -> None:
        entered.set()
        assert go_on.wait(30)

    holder = threading.Thread(target=lambda: partition.environment.write(hold))
    holder.start()
    assert entered.wait(30)
    errors: list[Exception] = []

    def late() -> None:
        try:
            append.append(engine, row, partition, [batch([b"late"], row.txn_id)])
        except InvalidTxnStateError as error:
            errors.append(error)

    internals.coordinator(client).orchestrator.start_abort(row.txn_id, "by hand")
    writer = threading.Thread(target=late)
    writer.start()
    go_on.set()
    writer.join()
    holder.join()
    assert len(errors) == 1
    internals.coordinator(client).orchestrator.finish(row.txn_id)
    assert committed(client, partition) == []


def test_an_abort_that_dies_is_done_again(client: txnkv.Client) -> None:
    (partition,) = create(client)
    row = begin(client)
    send(client, row, partition, [b"a"])
    arm("marker.aborting", "error@1")
    assert abort(client, row).state is txnkv.TxnState.ABORTED  # decided; the rest is tried again
    assert client.transaction_state(row.txn_id) is not txnkv.TxnState.ABORTED
    small(client, [partition], [b"b"])
    internals.coordinator(client).orchestrator.finish(row.txn_id)
    assert committed(client, partition) == [b"b"]
    assert client.transaction_state(row.txn_id) is txnkv.TxnState.ABORTED
