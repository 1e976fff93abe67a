"""One `connect` for all: a folder is a store of this host, an address the server of one on another.

txnkv.connect("data/shop")
txnkv.connect("grpc://127.0.0.1:8815")
txnkv.connect("grpc+tls://store-host:8815", credentials="ann.Jk3...")
txnkv.connect("grpc+tls://store-host:8815", credentials={"token": ..., "ca": "ca.pem"})
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from txnkv.client import Client
from txnkv.client import connect as connect_here
from txnkv.coordinator import KEEPALIVE_TIME

Credentials: TypeAlias = str | Mapping[str, str]
"""A token, or: token, ca, cert and key, each of the latter three a file or its text."""

_ADDRESS: Final = re.compile(r"(grpc|grpc\+tcp|grpc\+tls)://[^/]+:\d+")
_WORDS: Final = ("token", "ca", "cert", "key")


def is_address(path: object) -> bool:
    """Tell an address of a server from the folder of a store."""
    return isinstance(path, str) and path.startswith("grpc") and "://" in path


def connect(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    read_only: bool = False,
    history: float | None = None,
    cache_bytes: int | None = None,
    keepalive_time: float = KEEPALIVE_TIME,
    credentials: Credentials | None = None,
) -> Client:
    """Open a store; it is made when it is missing.

    Args:
        path: the store's directory, or the address of a server of one on another host, as
            "grpc://127.0.0.1:8815" or "grpc+tls://host:8815"; see `txnkv serve`.
        create: make it when there is none, in a directory.
        read_only: refuse to write.
        history: seconds that can be read back, and for which ended transactions are remembered;
            None for 900, or for what this process has the store open with; math.inf for all,
            and a day of ended transactions. Of several processes the shortest counts. The
            server's own counts at an address, as for `cache_bytes`.
        cache_bytes: of status.db that each connection to it keeps in memory, one for each thread
            that is at it; None for 8 MiB, or for what this process has the store open with.
        keepalive_time: seconds without heartbeat after which a transaction begun by this
            client is aborted; at least 0.5. Heartbeats come from a thread of this process: one that
            keeps Python's lock for longer (C code, a hundred threads that compute) needs more.
        credentials: for an address: the token of a user, or a mapping of "token", and "ca", "cert"
            and "key", which are files in PEM or their text: whom to trust, and who this is.

    Raises:
        StoreNotFoundError: there is none, and `create` is false or `read_only` is true; or this
            process has it open, and it was removed or replaced since.
        IncompatibleStoreError: the store is of a newer format, or the path is no store.
        UnavailableError: no server answers at the address.
        AuthenticationError: it refused the credentials.
        ValueError: the path is empty or ":memory:", or an option makes no sense, or this process
            has the store open with another.
    """
    if not is_address(path):
        if credentials is not None:
            raise ValueError(f"credentials are for a server's address; {path!r} is a folder")
        return connect_here(
            path,
            create=create,
            read_only=read_only,
            history=history,
            cache_bytes=cache_bytes,
            keepalive_time=keepalive_time,
        )
    address = str(path)
    if not _ADDRESS.fullmatch(address):
        raise ValueError(
            f"{address!r} is no address: take grpc://host:port or grpc+tls://host:port"
        )
    for name, value in (("history", history), ("cache_bytes", cache_bytes)):
        if value is not None:
            raise ValueError(f"{name} is for who opens the folder: give it to `txnkv serve`")
    from txnkv.remote.remote_client import RemoteClient  # it takes a while, and few need it

    headers, tls = _of(credentials)
    return RemoteClient(address, headers, tls, keepalive_time, read_only)


def _of(credentials: Credentials | None) -> tuple[list[tuple[bytes, bytes]], dict[str, Any]]:
    """The header of calls, and the options of the connection."""
    given = {"token": credentials} if isinstance(credentials, str) else dict(credentials or {})
    unknown = given.keys() - set(_WORDS)
    if unknown:
        raise ValueError(f"credentials have {', '.join(_WORDS)}, not {', '.join(unknown)}")
    if ("cert" in given) != ("key" in given):
        raise ValueError("credentials have cert and key, or neither")
    token = given.get("token")
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    names = {"ca": "tls_root_certs", "cert": "cert_chain", "key": "private_key"}
    return headers, {names[word]: _pem(given[word]) for word in names if word in given}


def _pem(given: str) -> bytes:
    return given.encode() if "-----BEGIN" in given else Path(given).read_bytes()
