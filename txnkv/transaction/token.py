"""Transaction tokens: a transaction's name in a form that other processes can join by.

Layout, big-endian, then the HMAC-SHA256 of all of it under a key that the store holds:

     0   1           17        25            33              41      42          74
    +---+-----------+---------+-------------+---------------+-------+-----------+
    | 1 | store id  | txn id  | expires, us | keepalive, us | flags | HMAC      |
    +---+-----------+---------+-------------+---------------+-------+-----------+

Byte 0 is the format version; `expires` is microseconds since 2020-01-01 UTC, 0 for never;
flag 1 says that whoever joins also keeps the transaction alive. As text it is URL-safe
base64, 99 characters, short enough for a Spark option.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Final

from txnkv.coordinator import Coordinator, TxnRow, late_by
from txnkv.errors import InvalidTokenError, TxnNotFoundError
from txnkv.storage import clock

_VERSION: Final = 1
_BODY: Final = struct.Struct(">B16sQQQB")
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
    """

    store_id: str
    txn_id: int
    expires: int | None
    keepalive_time: int
    keepalive: bool


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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TxnToken) and hmac.compare_digest(self._data, other._data)

    def __hash__(self) -> int:
        return hash(self._data)

    def __reduce__(self) -> tuple[type[TxnToken], tuple[bytes]]:
        return (TxnToken, (self._data,))


def seal(content: TokenContent, key: bytes) -> TxnToken:
    body = _BODY.pack(
        _VERSION,
        bytes.fromhex(content.store_id),
        content.txn_id,
        content.expires or 0,
        content.keepalive_time,
        _KEEPALIVE if content.keepalive else 0,
    )
    return TxnToken(body + hmac.digest(key, body, hashlib.sha256))


def unseal(token: TxnToken | bytes | str, store_id: str, key: bytes) -> TokenContent:
    """Return the content of a token, once it is known to be of this store and unaltered.

    Raises:
        InvalidTokenError: it is cut short, altered, forged, of another store, or of another
            format version.
    """
    data = _raw(token)
    if not data:
        raise InvalidTokenError("the token is empty: pass what Transaction.serialize() returned")
    if data[0] != _VERSION:
        raise InvalidTokenError(
            f"the token has format version {data[0]}, this program reads {_VERSION}: "
            "serialize and deserialize with the same version of txnkv"
        )
    if len(data) != _BODY.size + _HMAC_BYTES:
        raise InvalidTokenError(
            f"the token has {len(data)} bytes, a whole one has {_BODY.size + _HMAC_BYTES}: "
            "it was cut or is no token"
        )
    _, store, txn_id, expires, keepalive_time, flags = _BODY.unpack_from(data)
    if store.hex() != store_id:
        raise InvalidTokenError(
            f"the token is of store {store.hex()}, this is {store_id}: connect to its own store"
        )
    if not hmac.compare_digest(
        hmac.digest(key, data[: _BODY.size], hashlib.sha256), data[_BODY.size :]
    ):
        raise InvalidTokenError("the token's signature does not match: it was altered or forged")
    return TokenContent(store_id, txn_id, expires or None, keepalive_time, bool(flags & _KEEPALIVE))


def issue(coordinator: Coordinator, store_id: str, row: TxnRow, keepalive: bool) -> TxnToken:
    """Return the token of a transaction."""
    expires = None if row.timeout is None else row.begin_ts.micros + row.timeout
    content = TokenContent(store_id, row.txn_id, expires, row.keepalive, keepalive)
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
        return bytes(token)
    if isinstance(token, str):
        try:
            return base64.b64decode(
                token.encode() + b"=" * (-len(token) % 4), altchars=b"-_", validate=True
            )
        except (binascii.Error, ValueError, UnicodeEncodeError):
            raise InvalidTokenError("the token is not URL-safe base64: it was altered") from None
    raise TypeError(f"a token is TxnToken, bytes or str, not {type(token).__name__}")
