"""How Spark's Python processes come to a store and into a transaction.

Spark forks its workers from a daemon that never opened a store, uses each for many tasks,
and kills it when it has been idle: so a process opens a store once, at its first task, and
never closes it. Whoever opens the store next clears up after it, as after any killed process.
"""

from __future__ import annotations

import os
import threading
from typing import Final

from txnkv.client import Client
from txnkv.coordinator.states import TxnState
from txnkv.errors import InvalidTxnStateError
from txnkv.spark.settings import Settings
from txnkv.transaction import Transaction

_lock: Final = threading.Lock()
_clients: Final[dict[tuple[int, str, float], Client]] = {}


def client_of(settings: Settings) -> Client:
    """This process's client of the store.

    Raises:
        StoreNotFoundError: there is none.
    """
    key = (os.getpid(), settings.path, settings.keepalive_time)
    with _lock:
        if key not in _clients:
            _clients[key] = settings.connect()
        return _clients[key]


def join_open(client: Client, token: str, what: str) -> Transaction:
    """The transaction of a token.

    Raises:
        InvalidTokenError: the token is forged, altered, of another store or expired.
        InvalidTxnStateError: the transaction is not open.
    """
    txn = Transaction.deserialize(client, token)
    state = txn.state
    if state is not TxnState.OPEN:
        raise InvalidTxnStateError(
            f"cannot {what}: transaction {txn.id} of the token is {state.name}. Spark plans at "
            "the action, so run it before the commit; or begin a new transaction"
        )
    return txn
