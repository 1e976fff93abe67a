"""The client that one of Spark's Python processes has, and its way into a transaction.

Spark forks its workers from a daemon that never opened a store, uses each for many tasks,
and kills it when it has been idle: so a process opens a store once, at its first task, and
never closes it. Whoever opens the store next clears up after it, as after any killed process.
A worker may also outlive a store that was removed and made anew at its path.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from txnkv.client import Client, Planning
from txnkv.coordinator import TxnState
from txnkv.errors import InvalidTxnStateError, UnavailableError
from txnkv.remote import is_address
from txnkv.spark.settings import Settings, StorePlace
from txnkv.storage import new_lock
from txnkv.tables import Schema
from txnkv.transaction import Transaction

T = TypeVar("T")
Identity = tuple[int, ...]
_PAUSE: Final = 0.2
_lock: Final = new_lock()
_clients: Final[dict[tuple[Any, ...], tuple[Identity, Client]]] = {}


def client_of(settings: StorePlace) -> Client:
    """This process's client of the store.

    Raises:
        StoreNotFoundError: there is none.
    """
    own = (settings.keepalive_time, settings.history, str(settings.credentials), settings.direct)
    key = (settings.path, *own)
    with _lock:
        found = _clients.get(key)
        # Behind an address there may be a folder, which was removed or replaced since.
        path = settings.path if found is None else found[1].path
        identity = _identity(path)
        if found is None or found[0] != identity:
            _close_others(path, identity)
            patience = settings.keepalive_time if _in_task() else 0.0
            client = _patiently(settings.connect, patience)
            found = _clients[key] = (_identity(client.path), client)
        elif found[1].elsewhere is not None:
            planning = Planning.of(found[1])
            _patiently(lambda: planning.timestamp_of(None), settings.keepalive_time)
        return found[1]


def _in_task() -> bool:
    from pyspark import TaskContext  # it takes a while, and a driver may do without

    return TaskContext.get() is not None


def _patiently(ask: Callable[[], T], seconds: float) -> T:
    """Ask a server that may be about to be started again.

    Spark tries a task again at once, and not often: so it had better wait here than fail.
    """
    give_up = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except UnavailableError:
            if time.monotonic() >= give_up:
                raise
            time.sleep(_PAUSE)


def schema_of(settings: Settings) -> Schema:
    """The schema of a table as it is read: in a transaction, at a snapshot, or now.

    Raises:
        TableNotFoundError: there is no such table.
        InvalidTokenError, InvalidTxnStateError: as `join_open`.
    """
    client = client_of(settings)
    at = settings.snapshot
    txn = None if settings.token is None else join_open(client, settings.token, "read")
    return Planning.of(client).schema_of(settings.table, at if txn is None else txn)


def _identity(path: str) -> Identity:
    """Tells a store from another that was made at the same path; empty where there is none."""
    if is_address(path):
        return (os.getpid(),)
    try:
        there = os.stat(os.path.join(path, "FORMAT"))
    except OSError:
        return ()
    return (os.getpid(), there.st_dev, there.st_ino, there.st_ctime_ns)


def _close_others(path: str, identity: Identity) -> None:
    for key, (known, client) in list(_clients.items()):
        if client.path == path and known != identity:
            del _clients[key]
            if known[0] == os.getpid():
                client.close()


def runs(program: str) -> bool:
    """Tell whether this process runs a worker program of Spark's, named by its module."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return program in sys.modules or (spec is not None and spec.name == program)


def join_open(client: Client, token: str, what: str) -> Transaction:
    """The transaction of a token.

    Raises:
        InvalidTokenError: the token is forged, altered, of another store or expired.
        InvalidTxnStateError: the transaction is not open.
    """
    txn = Transaction.deserialize(client, token)
    require_open(txn, what)
    return txn


def require_open(txn: Transaction, what: str) -> None:
    """Refuse a transaction that is not open.

    Raises:
        InvalidTxnStateError: it is so.
    """
    state = txn.state
    if state is not TxnState.OPEN:
        raise InvalidTxnStateError(
            f"cannot {what}: transaction {txn.id} of the token is {state.name}. Spark plans at "
            "the action, so run it before the commit; or begin a new transaction"
        )
