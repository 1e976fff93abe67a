"""Handing a transaction over to a keeper; what the planner does.

    0 s          the planner's own heartbeats
    PATIENCE     still open: a keeper is started, and says when it beats
    after that   the keeper's heartbeats; the planner may be stopped

Most writes are over before that, and need no keeper: Spark keeps an idle planner for a
minute. Where it is told not to (spark.python.worker.reuse), the keeper is started at once.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from typing import Any, Final

from txnkv.coordinator import TxnState
from txnkv.errors import TxnkvError
from txnkv.spark import processes
from txnkv.transaction import Transaction

PATIENCE: Final = 10.0
_POLL: Final = 0.2
_THREAD: Final = "txnkv-hand-over"
_log = logging.getLogger("txnkv")
_held: Final[list[Transaction]] = []


def hand_over(txn: Transaction, path: str) -> None:
    """Keep a transaction alive that this process began, beyond the life of this process."""
    reused = bool(os.environ.get("SPARK_REUSE_WORKER"))
    keeper = None if reused else _start(txn, path)
    threading.Thread(target=_see_to, args=(txn, path, keeper), name=_THREAD, daemon=True).start()
    if keeper is not None:
        _await_beats(keeper, txn)


def at_work() -> bool:
    """Tell whether a thread of this process still sees to a transaction."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def _see_to(txn: Transaction, path: str, keeper: subprocess.Popen[Any] | None) -> None:
    """Holds the transaction, and with it its heartbeats, until a keeper does."""
    if keeper is None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if not _is_open(txn):
                return
            time.sleep(_POLL)
        try:
            keeper = _start(txn, path)
        except TxnkvError as error:  # it ended, or its store was closed, since it was last asked
            _log.debug("no keeper for transaction %s: %s", txn.id, error)
            return
        _await_beats(keeper, txn)
    keeper.wait()


def _is_open(txn: Transaction) -> bool:
    try:
        return txn.state is TxnState.OPEN
    except TxnkvError:
        return False


def _start(txn: Transaction, path: str) -> subprocess.Popen[Any]:
    jvm = processes.jvm()
    order = {
        "path": path,
        "token": str(txn.serialize(keepalive=True)),
        "watch": None if jvm is None else [jvm.pid, jvm.started],
    }
    # In a session of its own: neither Ctrl-C in a shell nor the end of Spark's worker daemon,
    # which hangs up its process group, may end it before it has seen to the transaction.
    keeper = subprocess.Popen(
        [sys.executable, "-m", "txnkv.spark.keeper"],
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
