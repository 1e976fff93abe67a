"""The client that one of Spark's Python processes has, and its way into a transaction.

Spark forks its workers from a daemon that never opened a store, uses each for many tasks,
and kills it when it has been idle: so a process opens a store once, at its first task, and
never closes it. Whoever opens the store next clears up after it, as after any killed process.
A worker may also outlive a store that was removed and made anew at its path.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from txnkv.client import Client
from txnkv.coordinator import TxnState
from txnkv.errors import InvalidTxnStateError
from txnkv.spark.settings import Settings, StorePlace
from txnkv.storage import new_lock
from txnkv.tables import Schema
from txnkv.transaction import Transaction

Identity = tuple[int, ...]
_lock: Final = new_lock()
_clients: Final[dict[tuple[str, float, float | None], tuple[Identity, Client]]] = {}


def client_of(settings: StorePlace) -> Client:
    """This process's client of the store.

    Raises:
        StoreNotFoundError: there is none.
    """
    key = (settings.path, settings.keepalive_time, settings.history)
    with _lock:
        identity = _identity(settings.path)
        found = _clients.get(key)
        if found is None or found[0] != identity:
            _close_others(settings.path, identity)
            found = _clients[key] = (identity, settings.connect())
        return found[1]


def schema_of(settings: Settings) -> Schema:
    """The schema of a table as it is read: in a transaction, at a snapshot, or now.

    Raises:
        TableNotFoundError: there is no such table.
        InvalidTokenError, InvalidTxnStateError: as `join_open`.
    """
    client = client_of(settings)
    table = client.table_info(settings.table)
    if settings.token is not None:
        return join_open(client, settings.token, "read").context.table_at_begin(table).schema
    if settings.snapshot is not None:
        table = client.instance.engine.at(table, client.timestamp_of(settings.snapshot))
    return table.schema


def _identity(path: str) -> Identity:
    """Tells a store from another that was made at the same path; empty where there is none."""
    try:
        there = os.stat(os.path.join(path, "FORMAT"))
    except OSError:
        return ()
    return (os.getpid(), there.st_dev, there.st_ino, there.st_ctime_ns)


def _close_others(path: str, identity: Identity) -> None:
    for key, (known, client) in list(_clients.items()):
        if key[0] == path and known != identity:
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
    state = txn.state
    if state is not TxnState.OPEN:
        raise InvalidTxnStateError(
            f"cannot {what}: transaction {txn.id} of the token is {state.name}. Spark plans at "
            "the action, so run it before the commit; or begin a new transaction"
        )
    return txn
