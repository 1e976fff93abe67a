"""The keepalive of a Spark job's own transaction: heartbeats that outlive its planner.

    0 s          the planner's own heartbeats
    PATIENCE     still open: a keeper is started, a process of this module, and says when it beats
    after that   the keeper's heartbeats; the planner may be stopped

Most writes are over before that, and need no keeper: Spark keeps an idle planner for a minute.
Where it is told not to (spark.python.worker.reuse), the keeper is started at once.

The keeper, `python -m txnkv.spark.keepalive`, reads its order from standard input (the store, a
token, what to watch: the JVM, or the planner if there is none to be seen), says "beating" when its
heartbeats have begun, and ends by itself:

    the transaction is no longer open       the job's commit or abort came: nothing to do
    what it watches is gone                 nobody will ever commit: abort it if it is open
    this process is killed                  it dies of missing heartbeats, as any other does
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import fields
from typing import Any, Final

from txnkv.client import Client, Planning
from txnkv.coordinator import TxnState
from txnkv.errors import TxnkvError, TxnNotFoundError, UnavailableError
from txnkv.spark import java
from txnkv.spark.settings import StorePlace
from txnkv.transaction import Transaction

PATIENCE: Final = 10.0
_HAND_OVER_PAUSE: Final = 0.2
_WATCH_PAUSE: Final = 0.5
_THREAD: Final = "txnkv-hand-over"
_log = logging.getLogger("txnkv")
_held: Final[list[Transaction]] = []


def hand_over(txn: Transaction, place: StorePlace) -> None:
    """Keep a transaction alive that this process began, beyond the life of this process."""
    java.jvm()  # while it is to be seen: the daemon between it and this process may be killed
    reused = bool(os.environ.get("SPARK_REUSE_WORKER"))
    keeper = None if reused else _start(txn, place)
    threading.Thread(target=_see_to, args=(txn, place, keeper), name=_THREAD, daemon=True).start()
    if keeper is not None:
        _await_beats(keeper, txn)


def at_work() -> bool:
    """Tell whether a thread of this process still sees to a transaction."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def _see_to(txn: Transaction, place: StorePlace, keeper: subprocess.Popen[Any] | None) -> None:
    """Holds the transaction, and with it its heartbeats, until a keeper does."""
    if keeper is None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if not _is_open(txn):
                return
            time.sleep(_HAND_OVER_PAUSE)
        try:
            keeper = _start(txn, place)
        except TxnkvError as error:  # it ended, or its store was closed, since it was last asked
            _log.debug("no keeper for transaction %s: %s", txn.id, error)
            return
        _await_beats(keeper, txn)
    keeper.wait()


def _is_open(txn: Transaction) -> bool:
    try:
        return txn.state is TxnState.OPEN
    except UnavailableError:  # its server is started again, perhaps
        return True
    except TxnkvError:
        return False


def _start(txn: Transaction, place: StorePlace) -> subprocess.Popen[Any]:
    watched = _watched()
    order = {
        "place": {each.name: getattr(place, each.name) for each in fields(StorePlace)},
        "token": str(txn.serialize(keepalive=True)),
        "watch": None if watched is None else [watched.pid, watched.started],
    }
    # In a session of its own: neither Ctrl-C in a shell nor the end of Spark's worker daemon,
    # which hangs up its process group, may end it before it has seen to the transaction.
    keeper = subprocess.Popen(
        [sys.executable, "-m", "txnkv.spark.keepalive"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        # Where this process found txnkv, which --py-files may have brought.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert keeper.stdin is not None
    keeper.stdin.write(json.dumps(order))  # a token is a secret: not for the argument list
    keeper.stdin.close()
    return keeper


def _watched() -> java.Process | None:
    """The JVM; this process where none is its ancestor: what took an orphan in lives for ever."""
    found = java.jvm()
    return found if found is not None and found.name == java.NAME else java.find(os.getpid())


def _await_beats(keeper: subprocess.Popen[Any], txn: Transaction) -> None:
    """Stop this process's heartbeats once the keeper has begun with its own."""
    assert keeper.stdout is not None
    with keeper.stdout:
        answer = keeper.stdout.readline().strip()
    if answer == "beating":
        txn.close()
    elif _is_open(txn):
        _log.warning(
            "no keeper for transaction %s (%s): it lives as long as this planner process does",
            txn.id,
            answer or f"exit status {keeper.wait()}",
        )
        _held.append(txn)


# -- the keeper ------------------------------------------------------------------------


def main() -> int:
    """Do as ordered. Returns the exit status."""
    order = json.load(sys.stdin)
    try:
        client = StorePlace(**order["place"]).connect()
        txn = Transaction.deserialize(client, order["token"])
        print("beating", flush=True)
        sys.stdout.close()
        keep(client, txn, order["watch"])
        client.close()
    except Exception as error:  # whatever it is, it is the planner that has a log for it
        with suppress(ValueError):  # standard output is closed when it was beating
            print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    return 0


def keep(client: Client, txn: Transaction, watch: tuple[int, str] | None) -> None:
    """Return when the transaction is no longer open."""
    while _state(txn) is TxnState.OPEN:
        if watch is None or not _lives(*watch):
            _abort(client, txn)
            return
        time.sleep(min(_WATCH_PAUSE, client.keepalive_time / 4))


def _state(txn: Transaction) -> TxnState | None:
    try:
        return txn.state
    except UnavailableError:  # its server is started again, perhaps: then it is joined again
        return TxnState.OPEN
    except TxnNotFoundError:
        return None


def _lives(pid: int, started: str) -> bool:
    found = java.find(pid)
    return found is not None and found.started == started


def _abort(client: Client, txn: Transaction) -> None:
    """Abort, unless the committer, which may outlive the JVM, has begun to commit."""
    Planning.of(client).abandon(txn, "its Spark ended", timed_out=True)


if __name__ == "__main__":
    sys.exit(main())
