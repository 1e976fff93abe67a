"""The way in: a client of a store on this host."""

from __future__ import annotations

import operator
import os
from typing import Final

from txnkv.client.client import Client
from txnkv.coordinator import KEEPALIVE_TIME, MIN_KEEPALIVE
from txnkv.errors import NotSupportedError, require_number
from txnkv.storage import shielded
from txnkv.transaction import expiring
from txnkv.transaction import instance as instances

_LONGEST: Final = 1e9
"""Seconds that a transaction may be without heartbeat at most."""


@shielded
def connect(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    read_only: bool = False,
    history: float | None = None,
    cache_bytes: int | None = None,
    keepalive_time: float = KEEPALIVE_TIME,
) -> Client:
    """Open a store; it is made when it is missing.

    Args:
        path: the store's directory.
        create: make it when there is none.
        read_only: refuse to write.
        history: seconds that can be read back, and for which ended transactions are remembered;
            None for 900, or for what this process has the store open with; math.inf for all,
            and a day of ended transactions. Of several processes the shortest counts.
        cache_bytes: of status.db that each connection to it keeps in memory, one for each thread
            that is at it; None for 8 MiB, or for what this process has the store open with.
        keepalive_time: seconds without heartbeat after which a transaction begun by this
            client is aborted; at least 0.5. Heartbeats come from a thread of this process: one that
            keeps Python's lock for longer (C code, a hundred threads that compute) needs more.

    Raises:
        StoreNotFoundError: there is none, and `create` is false or `read_only` is true; or this
            process has it open, and it was removed, moved or replaced since.
        IncompatibleStoreError: the store is of a newer format, or the path is no store.
        CorruptionError: what is needed to open it is damaged, or lacks what was durable.
        NotSupportedError: this user may not open it; or another process that has it open, as in
            another container, has the same pid.
        ValueError: the path is empty or ":memory:", too long or not UTF-8, or an option makes no
            sense, or this process has the store open with another.
    """
    require_number("keepalive_time", keepalive_time)
    require_number("history", 0 if history is None else history)
    if cache_bytes is not None:
        require_number("cache_bytes", cache_bytes, "bytes", whole=True)
        cache_bytes = operator.index(cache_bytes)
    if not keepalive_time >= MIN_KEEPALIVE:
        raise ValueError(
            f"keepalive_time={keepalive_time:g}: at least {MIN_KEEPALIVE:g} s, for heartbeats may "
            "be late behind threads that compute"
        )
    if isinstance(path, str) and "\0" in path:
        raise ValueError(f"a path has no NUL, as {path!r}")
    if isinstance(path, str) and "://" in path:
        raise NotSupportedError(
            f"{path!r} is no folder of this machine; a server's address is grpc://HOST:PORT or "
            "grpc+tls://HOST:PORT"
        )
    make = create and not read_only
    instance = instances.acquire(path, make, read_only, history, cache_bytes)
    client = Client(expiring(instance), min(keepalive_time, _LONGEST))
    instance.watch(client)
    return client
