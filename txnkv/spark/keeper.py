"""Keeps a Spark job's own transaction alive: `python -m txnkv.spark.keeper`.

Reads its order from standard input (the store, a token, the JVM to watch), says "beating"
when its heartbeats have begun, and ends by itself:

    the transaction is no longer open       the job's commit or abort came: nothing to do
    the JVM is gone                         nobody will ever commit: abort it if it is open
    this process is killed                  it dies of missing heartbeats, as any other does
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Final

from txnkv.client import Client, connect
from txnkv.coordinator import TxnState
from txnkv.errors import (
    InvalidTxnStateError,
    TransactionTimedOutError,
    TxnNotFoundError,
)
from txnkv.spark import processes
from txnkv.transaction import Transaction

_POLL: Final = 0.5


def main() -> int:
    """Do as ordered. Returns the exit status."""
    order = json.load(sys.stdin)
    try:
        client = connect(order["path"], create=False)
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
        time.sleep(min(_POLL, txn.context.row.keepalive / 4e6))


def _state(txn: Transaction) -> TxnState | None:
    try:
        return txn.state
    except TxnNotFoundError:
        return None


def _lives(pid: int, started: str) -> bool:
    found = processes.find(pid)
    return found is not None and found.started == started


def _abort(client: Client, txn: Transaction) -> None:
    """Abort, unless the committer, which may outlive the JVM, has begun to commit."""
    orchestrator = client.instance.coordinator.orchestrator
    with suppress(InvalidTxnStateError, TxnNotFoundError):
        orchestrator.start_abort(
            txn.context.row.txn_id, "its Spark ended", TransactionTimedOutError, only_open=True
        )
        orchestrator.finish(txn.context.row.txn_id)


if __name__ == "__main__":
    sys.exit(main())
