"""Transaction tokens: a transaction's name in a form that other processes can join by.

Layout, big-endian, then the HMAC-SHA256 of all of it under a key that the store holds:

     0   1           17        25            33              41      42          74
    +---+-----------+---------+-------------+---------------+-------+-----------+
    | 1 | store id  | txn id  | expires, us | keepalive, us | flags | HMAC      |
    +---+-----------+---------+-------------+---------------+-------+-----------+

Byte 0 is the format version; `expires` is microseconds since 2020-01-01 UTC, 0 for never;
flag 1 says that whoever joins also keeps the transaction alive. As text it is URL-safe
base64, 99 characters, short enough for a Spark option.

Version 2 is for a store that is served. It also tells addresses of its servers, and they stand
before the HMAC:

    42          44
    +-----------+---------------------+------+
    | n         | n bytes: addresses, | HMAC |
    |           | a line each         |      |
    +-----------+---------------------+------+

Never a credential: who joins by an address has its own. And who has a token from somebody that is
not trusted sends none to the addresses in it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import struct
from dataclasses import dataclass
from typing import Final

from txnkv.coordinator import Coordinator, TxnRow, late_by
from txnkv.errors import InvalidTokenError, NotSupportedError, TxnNotFoundError
from txnkv.storage import clock

_VERSION: Final = 1
_TEXT: Final = re.compile(rb"\s*[\w-]+=*\s*")
_WITH_ADDRESSES: Final = 2
_BODY: Final = struct.Struct(">B16sQQQB")
_SIZE: Final = struct.Struct(">H")
_HMAC_BYTES: Final = 32
_KEEPALIVE: Final = 1


@dataclass(frozen=True)
class TokenContent:
    """The content of a token.

    Attributes:
        txn_id: local id.
        expires: microseconds since 2020-01-01 UTC, or None. It counts where the transaction is
            forgotten: else its token expires by the same clock as the transaction.
        keepalive_time: microseconds without heartbeat until the transaction is aborted.
        keepalive: whether a process that joins also sends heartbeats.
        addresses: of servers of the store.
    """

    store_id: str
    txn_id: int
    expires: int | None
    keepalive_time: int
    keepalive: bool
    addresses: tuple[str, ...] = ()


class TxnToken:
    """A serialized transaction: `bytes(token)`, `str(token)`, picklable, comparable."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)

    def __bytes__(self) -> bytes:
        return self._data

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self._data).decode().rstrip("=")

    def __repr__(self) -> str:
        return "TxnToken(...)"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of servers of the store, as who made it knew them; none for a local one.

        They are as trustworthy as who gave you the token.

        Raises:
            InvalidTokenError: it is cut short, or of another format version.
        """
        return _parted(self._data)[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TxnToken) and hmac.compare_digest(self._data, other._data)

    def __hash__(self) -> int:
        return hash(self._data)

    def __reduce__(self) -> tuple[type[TxnToken], tuple[bytes]]:
        return (TxnToken, (self._data,))


def seal(content: TokenContent, key: bytes) -> TxnToken:
    text = "\n".join(content.addresses).encode()
    body = _BODY.pack(
        _WITH_ADDRESSES if text else _VERSION,
        bytes.fromhex(content.store_id),
        content.txn_id,
        content.expires or 0,
        content.keepalive_time,
        _KEEPALIVE if content.keepalive else 0,
    )
    if text:
        body += _SIZE.pack(len(text)) + text
    return TxnToken(body + hmac.digest(key, body, hashlib.sha256))


def unseal(token: TxnToken | bytes | str, store_id: str, key: bytes) -> TokenContent:
    """Return the content of a token, once it is known to be of this store and unaltered.

    Raises:
        InvalidTokenError: it is cut short, altered, forged, of another store, or of another
            format version.
    """
    data = _raw(token)
    body, addresses = _parted(data)
    _, store, txn_id, expires, keepalive_time, flags = _BODY.unpack_from(data)
    if store.hex() != store_id:
        raise InvalidTokenError(
            f"the token is of store {store.hex()}, this is {store_id}: connect to its own store"
        )
    if not hmac.compare_digest(hmac.digest(key, body, hashlib.sha256), data[len(body) :]):
        raise InvalidTokenError("the token's signature does not match: it was altered or forged")
    keepalive = bool(flags & _KEEPALIVE)
    return TokenContent(store_id, txn_id, expires or None, keepalive_time, keepalive, addresses)


def _parted(data: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Return what is signed, and the addresses.

    Raises:
        InvalidTokenError: it is cut short, or of another format version.
    """
    if not data:
        raise InvalidTokenError("the token is empty: pass what Transaction.serialize() returned")
    if len(data) < _BODY.size + _HMAC_BYTES:  # of any version
        raise InvalidTokenError(
            f"the token has {len(data)} bytes: it was cut, or is no token. Pass what "
            "Transaction.serialize() returned"
        )
    if data[0] not in (_VERSION, _WITH_ADDRESSES):
        raise InvalidTokenError(
            f"the token has format version {data[0]}, this program reads up to {_WITH_ADDRESSES}: "
            "serialize and deserialize with the same version of txnkv"
        )
    size = whole = _BODY.size
    if data[0] == _WITH_ADDRESSES and len(data) >= size + _SIZE.size:
        whole = size + _SIZE.size + _SIZE.unpack_from(data, size)[0]
    if len(data) != whole + _HMAC_BYTES:
        raise InvalidTokenError(
            f"the token has {len(data)} bytes, a whole one has {whole + _HMAC_BYTES}: "
            "it was cut or is no token"
        )
    text = data[size + _SIZE.size : whole].decode(errors="replace")
    return data[:whole], tuple(text.split("\n")) if text else ()


def require_shareable(row: TxnRow, what: str) -> None:
    """Refuse to share what only one process can validate.

    Raises:
        NotSupportedError: the transaction is serializable.
    """
    if row.isolation == "serializable":
        raise NotSupportedError(
            f"cannot {what} a serializable transaction: what other processes read under it "
            "could not be validated at commit. Use isolation='snapshot' for those that "
            "several processes share"
        )


def issue(
    coordinator: Coordinator,
    store_id: str,
    row: TxnRow,
    keepalive: bool,
    addresses: tuple[str, ...] = (),
) -> TxnToken:
    """Return the token of a transaction."""
    expires = None if row.timeout is None else row.begin_ts.micros + row.timeout
    content = TokenContent(store_id, row.txn_id, expires, row.keepalive, keepalive, addresses)
    return seal(content, coordinator.token_key)


def admit(
    coordinator: Coordinator, store_id: str, token: TxnToken | bytes | str
) -> tuple[TxnRow, bool]:
    """Return the row of the transaction that a token names, and whether who joins keeps it alive.

    Raises:
        InvalidTokenError: as `unseal`; or its transaction passed its timeout.
        TxnNotFoundError: the transaction ended so long ago that it was forgotten.
    """
    content = unseal(token, store_id, coordinator.token_key)
    try:
        row = coordinator.get(content.txn_id)
        late = late_by(row)
    except TxnNotFoundError:
        late = -1 if content.expires is None else clock.now_micros() - content.expires
        if late <= 0:
            raise
    if late > 0:
        raise InvalidTokenError(
            f"the token expired {late / 1e6:.1f} s ago, with the timeout of transaction "
            f"{content.txn_id}: begin a new transaction, with a longer timeout or timeout=None"
        )
    return row, content.keepalive


def _raw(token: TxnToken | bytes | str) -> bytes:
    if isinstance(token, TxnToken):
        return bytes(token)
    if isinstance(token, (bytes, bytearray, memoryview)):
        given = bytes(token)
        if not _TEXT.fullmatch(given):
            return given
        token = given.decode()
    if isinstance(token, str):
        token = token.strip()
        try:
            return base64.b64decode(
                token.encode() + b"=" * (-len(token) % 4), altchars=b"-_", validate=True
            )
        except (binascii.Error, ValueError, UnicodeEncodeError):
            raise InvalidTokenError(
                "the token is not URL-safe base64: it was altered, or is no token. Pass what "
                "Transaction.serialize() returned"
            ) from None
    raise TypeError(f"a token is TxnToken, bytes or str, not {type(token).__name__}")
