"""The state that all clients of a store share in a process: store, coordinator, tables, topics."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from txnkv.coordinator import MAX_TIMESTAMP, Coordinator, TxnId, status_schema
from txnkv.coordinator import coordinator as coordination
from txnkv.errors import ClosedError, TxnkvError, TxnNotFoundError, as_index
from txnkv.storage import (
    Store,
    brief,
    caller,
    later,
    new_baton,
    new_rlock,
    not_waiting,
    require_same,
    settle_dropped,
    store_path,
)
from txnkv.tables import TableEngine, table_catalog
from txnkv.topics import TopicEngine, abort_unknown, regain
from txnkv.topics import topic_catalog as topics_schema

_log = logging.getLogger("txnkv")

HISTORY: Final = 900.0
"""Seconds, when nobody says otherwise."""

_lock = new_rlock()
_instances: dict[tuple[Store, bool], Instance] = {}


class Instance:
    """The engine of one store in this process, counted by its clients.

    Attributes:
        expires: rows whose time is over are deleted.
        pid: of this process.
        names: those of transactions, as they were last used in this process.
    """

    def __init__(self, store: Store, read_only: bool, history: float) -> None:
        self.store = store
        self.read_only = read_only
        self.coordinator = Coordinator(store, history)
        self.engine = TableEngine(self.coordinator)
        self.topics = TopicEngine(self.coordinator)
        self.clients = 0
        self._watched: set[weakref.ref[Any]] = set()
        self._dropped: deque[weakref.ref[Any]] = deque()
        self.expires = False
        self.names: dict[str, Any] = {}
        self.pid = os.getpid()
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._contexts: set[weakref.ref[Any]] = set()
        self._forget = self._contexts.discard
        if not read_only:
            self.coordinator.maintenance.metrics = self.coordinator.metrics
            regain(self.topics)
            self.coordinator.recover()

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads for commits and flushes in the background."""
        return self._threads("background", 4)

    @property
    def waiting(self) -> ThreadPoolExecutor:
        """Threads for commits that wait for a lock; who has it may need one of the others."""
        return self._threads("waiting", 256)

    def _threads(self, name: str, most: int) -> ThreadPoolExecutor:
        with _lock:
            if name not in self._pools:
                self._pools[name] = ThreadPoolExecutor(most, thread_name_prefix=f"txnkv-{name}")
            return self._pools[name]

    def know(self, context: object) -> None:
        """Have a transaction of this process found, as long as it is referred to."""
        # What drops one is C, as of finalizers.
        self._contexts.add(weakref.ref(context, self._forget))

    @property
    def contexts(self) -> list[Any]:
        """The transactions of this process."""
        return [context for each in list(self._contexts) if (context := each()) is not None]

    def unstored(self, local: int) -> Any:
        """The context of a transaction of this process of which status.db knows nothing, or not
        yet; None for any other.
        """
        known = (each for each in self.contexts if each.row.txn_id == local and not each.stored)
        return next(known, None)

    def local_id(self, id: int) -> int:
        """The number inside of this store of a transaction's id.

        Raises:
            TxnNotFoundError: it is one of another store.
            TypeError: it is no integer.
        """
        number, coordinator = TxnId(as_index("a transaction's id", id)), self.coordinator
        if number.tcid not in (0, coordinator.tcid) or number.local > MAX_TIMESTAMP:
            raise TxnNotFoundError(
                f"{number!r} was not found: the ids of this store begin with {coordinator.tcid}, "
                f"the highest id given so far is {coordinator.highest_id()}"
            )
        return number.local

    def abort_by_hand(self, txn_id: int) -> None:
        """Abort a transaction of any process.

        Raises:
            TxnNotFoundError: no transaction has this id.
            InvalidTxnStateError: it is committed.
        """
        try:
            self.coordinator.abort(txn_id, "aborted by hand")
        except TxnNotFoundError:
            # A log may have it open all the same, and keep its readers waiting.
            if not abort_unknown(self.topics, txn_id):
                raise

    def watch(self, client: object) -> None:
        """Count a client as closed once it is dropped, too."""
        self._watched.add(weakref.ref(client, self._dropped.append))

    def leave(self, client: object | None) -> bool:
        """Count a client as closed; True for the last."""
        if client is not None:
            self._watched.discard(weakref.ref(client))
        self.clients -= 1
        return self.clients <= 0

    @property
    def is_left(self) -> bool:
        """Its clients were all dropped, and nothing that they gave reads it."""
        while self._dropped:
            self._watched.discard(self._dropped.popleft())
            self.clients -= 1
        runtime = self.store.runtime
        return self.clients <= 0 and not runtime.snapshots and not runtime.manifests

    def close(self) -> None:
        for pool in list(self._pools.values()):
            pool.shutdown(wait=True)
        try:
            if not self.read_only:
                with not_waiting():
                    self.engine.close()
                    self.coordinator.close()
            else:
                self.coordinator.maintenance.close()
        except TxnkvError as error:
            # Lease and ids that could not be given back (a full disk) go with this process's slot.
            _log.warning(
                "%s was closed without giving back all: %s", self.store.directory.path, error
            )
        finally:
            self.store.close()

    def after_fork_in_child(self) -> None:
        self.pid = os.getpid()
        self._pools = {}
        self.names = {}
        for context in self.contexts:
            context.local.withdraw()
        self.coordinator.after_fork_in_child()
        self.engine.after_fork_in_child()
        self.topics.after_fork_in_child()


def acquire(
    path: str | os.PathLike[str],
    create: bool,
    read_only: bool,
    history: float | None = None,
    cache_bytes: int | None = None,
) -> Instance:
    """The shared instance of a store, opened when it is not yet.

    Raises:
        ValueError: the path is none, or an option makes no sense, or is not that of the instance
            that is open.
        ClosedError: the interpreter ends.
    """
    if sys.is_finalizing():
        raise ClosedError(f"cannot open {path}: the interpreter ends, and starts no threads")
    if history is not None and not history >= 0:
        raise ValueError(f"history={history}: it is in seconds, 0 or more")
    _close_left(store_path(path), read_only)
    with _lock:
        store = Store.open(
            path,
            create=create,
            read_only=read_only,
            schema_sql=status_schema.SCHEMA + table_catalog.SCHEMA + topics_schema.SCHEMA,
            initialise=coordination.initialise,
            upgrades=[
                status_schema.UPGRADE_1_TO_2 + table_catalog.UPGRADE_1_TO_2,
                topics_schema.UPGRADE_2_TO_3,
                status_schema.UPGRADE_3_TO_4 + topics_schema.UPGRADE_3_TO_4,
                status_schema.UPGRADE_4_TO_5,
                status_schema.UPGRADE_5_TO_6,
                status_schema.UPGRADE_6_TO_7,
                table_catalog.UPGRADE_7_TO_8,
                status_schema.UPGRADE_8_TO_9,
            ],
            cache_bytes=cache_bytes,
        )
        found = _instances.get((store, read_only))
        if found is None:
            kept = HISTORY if history is None else history
            try:
                found = Instance(store, read_only, kept)
            except BaseException:
                store.close()
                raise
            _instances[store, read_only] = found
        else:
            store.close()  # the instance has it open
            require_same("history", history, found.coordinator.history)
        found.coordinator.maintenance.start()  # in a forked child it has no thread yet
        found.clients += 1
        return found


def _close_left(path: Path, read_only: bool) -> None:
    """Close the stores, but that one, whose clients were dropped without `close`, on the library's
    thread: a program that opens one store after the other has few of them open.
    """
    with _lock:
        left = {
            key: each
            for key, each in _instances.items()
            if (each.store.directory.path, each.read_only) != (path, read_only) and each.is_left
        }
        for key in left:
            del _instances[key]
    for instance in left.values():
        later(instance.close)
    if left:
        settle_dropped()


def release(instance: Instance, client: object | None = None) -> None:
    """Give back a reference; the last one closes the store, those aside that were dropped."""
    with _lock:
        if not instance.leave(client) and not instance.is_left:
            return
        for key, known in list(_instances.items()):
            if known is instance:
                del _instances[key]
    instance.close()


def keep_longer(path: str | os.PathLike[str], seconds: float) -> bool:
    """Have this process keep at least so much of a store's past, from now on. False: it has not
    the store open.
    """
    place = Path(path).resolve()
    with _lock:
        found = [each for each in _instances.values() if each.store.is_at(place)]
        for each in found:
            each.coordinator.history = max(each.coordinator.history, seconds)
    return bool(found)


def open_instances() -> list[Instance]:
    """Those of all stores that are open in this process."""
    with _lock:
        return list(_instances.values())


@brief
def _close_all() -> None:
    with _lock:
        left = list(_instances.values())
        _instances.clear()
    for instance in left:
        try:
            instance.close()
        except Exception:  # the other stores are closed all the same
            _log.exception("%s could not be closed", instance.store.directory.path)


def _after_fork_in_child() -> None:
    for instance in _instances.values():
        instance.after_fork_in_child()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)


@contextmanager
def closing_once(client: Any) -> Iterator[bool]:
    """Tell in the block whether it is for the caller to close a client. Else that is closed, unless
    the close may wait for the caller: by a thread that is at it, or one of the library's, where
    callbacks are called.
    """
    who, here = caller(), threading.current_thread()
    mine = os.getpid(), who, new_baton()
    found = vars(client).setdefault("_closing", mine)
    if found[0] != mine[0]:  # the parent of this process was at it
        found = client._closing = mine
    if found is not mine:
        for_itself = who == here.ident and here.name.startswith("txnkv-")
        if who != found[1] and (not for_itself or here.name.startswith("txnkv-aio")):
            found[2].acquire()
            found[2].release()
        yield False
        return
    try:
        yield True
    except BaseException:
        if not client._is_over:
            vars(client).pop("_closing", None)  # the next one tries again
        raise
    finally:
        mine[2].release()
