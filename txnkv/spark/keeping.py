"""Handing a transaction over to a keeper; what the planner does."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from typing import Any

from txnkv.spark import processes
from txnkv.transaction import Transaction

_log = logging.getLogger("txnkv")
_kept: set[Transaction] = set()


def hand_over(txn: Transaction, path: str) -> None:
    """Start a keeper. Until that says that it beats, this process goes on doing so."""
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
    )
    assert keeper.stdin is not None
    keeper.stdin.write(json.dumps(order))  # a token is a secret: not for the argument list
    keeper.stdin.close()
    _kept.add(txn)
    threading.Thread(target=_wait, args=(keeper, txn), name="txnkv-hand-over", daemon=True).start()


def _wait(keeper: subprocess.Popen[Any], txn: Transaction) -> None:
    assert keeper.stdout is not None
    with keeper.stdout:
        answer = keeper.stdout.readline().strip()
    if answer == "beating":
        txn.close()
        _kept.discard(txn)
    else:
        _log.warning(
            "no keeper for transaction %s (%s): it lives as long as this planner process does",
            txn.id,
            answer or f"exit status {keeper.wait()}",
        )
    keeper.wait()
