"""One `connect` for all: a folder is a store of this host, an address the server of one on another.

txnkv.connect("data/shop")
txnkv.connect("grpc://127.0.0.1:8815")
txnkv.connect("grpc+tls://store-host:8815", credentials="ann.Jk3...")
txnkv.connect("grpc+tls://store-host:8815", credentials={"token": ..., "ca": "ca.pem"})
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, TypeAlias

from txnkv.client import Client
from txnkv.client import connect as connect_here
from txnkv.coordinator import KEEPALIVE_TIME

Credentials: TypeAlias = str | Mapping[str, str]
"""A token, or: token, ca, cert and key, each of the latter three a file or its text."""

_ADDRESS: Final = re.compile(r"(grpc|grpc\+tcp|grpc\+tls)://[^/]+:\d+")
CREDENTIAL_WORDS: Final = ("token", "ca", "cert", "key")
_UNTIMELY: Final = (9, 10)
"""Numbers of OpenSSL: not yet valid, and expired."""


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
            process has it open, and it was removed, moved or replaced since.
        IncompatibleStoreError: the store is of a newer format, or the path is no store.
        UnavailableError: no server answers at the address.
        AuthenticationError: it refused the credentials, or its certificate is not of `ca`, or of
            another name.
        ValueError: the path is empty or ":memory:", or an option makes no sense, or this process
            has the store open with another; or cert and key are no PEM, or do not fit, or the
            token is none that a server gives.
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
    if not isinstance(credentials, str | Mapping | None):
        raise TypeError(
            f"credentials are a token as a str, or a mapping of {', '.join(CREDENTIAL_WORDS)}, not "
            f"{type(credentials).__name__}"
        )
    given = {"token": credentials} if isinstance(credentials, str) else dict(credentials or {})
    unknown = given.keys() - set(CREDENTIAL_WORDS)
    if unknown:
        raise ValueError(
            f"credentials have {', '.join(CREDENTIAL_WORDS)}, not {', '.join(unknown)}"
        )
    if ("cert" in given) != ("key" in given):
        raise ValueError("credentials have cert and key, or neither")
    for word, value in given.items():
        if not isinstance(value, str) and (value, word) != (None, "token"):
            raise TypeError(f"credentials: {word} is a str, not {type(value).__name__}")
    token = given.get("token")
    if token is not None:
        token = token.strip()  # as it comes from a file
        if not (token.isascii() and token.isprintable()):
            raise ValueError(
                "credentials: a token has no characters but ASCII's, on one line: give it as "
                "`txnkv serve --add-user` printed it"
            )
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    names = {"ca": "tls_root_certs", "cert": "cert_chain", "key": "private_key"}
    tls = {names[word]: _pem(given[word]) for word in names if word in given}
    if "ca" in given:
        require_certificates(given["ca"], "credentials: ca")
    if "cert" in given:
        require_pair(given["cert"], given["key"], "credentials: cert", "credentials: key")
    return headers, tls


# -- certificates and keys -------------------------------------------------------------
# gRPC does not say what is wrong with them.


def _pem(given: str) -> bytes:
    """Return the bytes of a file, or of its text."""
    return given.encode() if _is_text(given) else Path(given).read_bytes()


def require_certificates(given: str, name: str) -> None:
    """Refuse what is no certificate.

    Raises:
        ValueError: it is so.
    """
    import ssl  # it takes a while, and few need it

    try:
        text = _pem(given).decode("ascii", "ignore")  # comments may be anything
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        text = "is no certificate in PEM, which begins with -----BEGIN CERTIFICATE-----"
        raise ValueError(f"{name} {text}") from None


def require_pair(cert: str, key: str, cert_name: str, key_name: str) -> None:
    """Refuse a certificate and a key that are none, or do not fit.

    Raises:
        ValueError: it is so.
    """
    import ssl

    require_certificates(cert, cert_name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("ALL:@SECLEVEL=0")  # how strong they are is no question of this
    try:
        with _file(cert) as cert_file, _file(key) as key_file:
            context.load_cert_chain(cert_file, key_file, password="")
    except ssl.SSLError as error:
        text = "is no private key in PEM, or has a password: take one without"
        if "MISMATCH" in (error.reason or ""):
            text = f"is not the key of {cert_name}: take that one"
        raise ValueError(f"{key_name} {text}") from None


def why_untimely(cert: str, key: str) -> str | None:
    """Return why nobody trusts a server's certificate now, for the time that it is made for: what a
    client says in a handshake; None where it says nothing of that.

    Args:
        cert, key: files that fit.
    """
    import ssl

    server, client = map(ssl.SSLContext, (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it is trusted but for its time
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        server.load_cert_chain(cert, key, password="")
        client.load_verify_locations(cert)
        asks = client.wrap_bio(to_client, to_server)
        answers = server.wrap_bio(to_server, to_client, server_side=True)
        for end in (asks, answers, asks):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message if error.verify_code in _UNTIMELY else None
    except ssl.SSLError:
        pass
    return None


def _is_text(given: str) -> bool:
    return "-----BEGIN" in given


@contextmanager
def _file(given: str) -> Iterator[str]:
    """A path; to text, in a file without a name, so that no key stays on the disk."""
    if not _is_text(given):
        yield given
        return
    with TemporaryFile() as file:
        file.write(given.encode())
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"
