"""Users of a server: who they are, by their tokens, and what they may do.

The file of users is TOML, one table for each:

    [users.ann]
    token = "scrypt$16384$8$1$<salt>$<hash>"       # never the token itself
    scram = "SCRAM-SHA-256$4096:<salt>$<stored key>:<server key>"    # as PostgreSQL has it
    rights = "write"                               # read, write or admin
    tables = ["orders", "cust_*"]                  # patterns as of a shell; all by default
    topics = []                                    # none

A token is "name.secret": 32 random bytes, of which the file has a salted hash. So who reads the
file has no token, and who guesses has 2^256 of them. A hash takes a while on purpose, so a token
that was right is remembered, in memory, by a fast hash under a key of this process.

**SCRAM-SHA-256** (RFC 5802, RFC 7677) proves to each side that the other knows the token, which is
never sent: the client's proof fits the stored key, and the server's signature the server key.

    client   n,,n=ann,r=<its nonce>
    server   r=<both nonces>,s=<salt>,i=4096        of nobody too, under a salt that stays the same
    client   c=biws,r=<both nonces>,p=<proof>
    server   v=<signature>

Who reads the file cannot log in with what it has of this, but could pose as the server. Users from
before that have no `scram`, and log in by their token alone.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import time
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from txnkv.errors import AuthenticationError
from txnkv.remote import RIGHTS, Right
from txnkv.storage import disk_errors, is_there, new_lock, opened, sync
from txnkv.transaction import Transaction

_log = logging.getLogger("txnkv.server")

_N, _R, _P = 1 << 14, 8, 1
_SLOW_SECONDS: Final = 0.5
_SLOWEST: Final = 64
"""So many failures wait at once; the others are told at once. Who is right waits for none."""
_QUIET_SECONDS: Final = 10.0
"""Between two lines of the log about failures of one user."""

SCRAM: Final = "SCRAM-SHA-256"
SCRAM_ITERATIONS: Final = 4096
"""The fewest that clients take: more make no token of 32 random bytes harder to find."""

_MOST_TOLD: Final = 1000
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class About(NamedTuple):
    """The table or topic that a right is to."""

    kind: Literal["table", "topic"]
    name: str


@dataclass(frozen=True)
class User:
    """One user.

    Attributes:
        rights: the most that the user may do.
        tables, topics: patterns of the names that the rights are to.
    """

    name: str
    rights: Right
    tables: tuple[str, ...] = ("*",)
    topics: tuple[str, ...] = ("*",)
    _told: dict[tuple[Right, About | None], bool] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def may(self, right: Right, about: About | None = None) -> bool:
        """Tell whether the user has a right: to a table or topic, or at all."""
        told = self._told.get((right, about))
        if told is None:
            if len(self._told) >= _MOST_TOLD:
                self._told.clear()
            told = self._told[right, about] = self._has(right, about)
        return told

    def _has(self, right: Right, about: About | None) -> bool:
        if RIGHTS.index(right) > RIGHTS.index(self.rights):
            return False
        if about is None:
            return True
        patterns = self.tables if about.kind == "table" else self.topics
        return any(fnmatchcase(about.name, pattern) for pattern in patterns)

    def require(self, right: Right, about: About | None = None) -> None:
        """Refuse what the user may not do.

        Raises:
            AuthenticationError: it is so.
        """
        if not self.may(right, about):
            to = "" if about is None else f" to {about.kind} {about.name!r}"
            what = "any" if right == "none" else f"to {right}"
            raise AuthenticationError(
                f"user {self.name!r} has no right {what}{to}: who runs the server gives it, in "
                "the file of users"
            )


EVERYBODY: Final = User("everybody", "admin")
"""The user where a server has no file of users."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what one user may take of a server.

    Attributes:
        message_bytes: of one request, and of one batch of a stream.
        handles: of all clients of a user.
        transactions: of those.
        streams: batches that are read or written at once, and requests under way.
        guests: clients of a user.
        columns: of a batch.
    """

    message_bytes: int = 256 << 20
    handles: int = 20_000
    transactions: int = 5_000
    streams: int = 1_000
    guests: int = 2_000
    columns: int = 10_000


class Taken:
    """Counts of what one user has of a server. Shared by threads."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self.handles = 0
        self._transactions: set[Transaction] = set()

    def add(self, value: Any, count: int) -> None:
        """Count a handle that is made (1) or given up (-1)."""
        with self._lock:
            self.handles += count
            if isinstance(value, Transaction):
                (self._transactions.add if count > 0 else self._transactions.discard)(value)

    def transactions(self, most: int) -> int:
        """Return how many transactions are open; which have ended is seen where they are many."""
        with self._lock:
            if len(self._transactions) >= most:
                ended = {each for each in self._transactions if each.context.local.ended}
                self._transactions -= ended
            return len(self._transactions)


class Users:
    """The users of a file, which is read again when it has changed.

    Args:
        path: of the file.

    Raises:
        ValueError: it is no such file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = new_lock()
        self._stamp: tuple[int, ...] = ()
        self._users: dict[str, StoredUser] = {}
        self._key = os.urandom(32)
        self._right: dict[bytes, tuple[str, str]] = {}
        self._failing = 0
        self._quiet: dict[str, float] = {}
        self._hashing = new_lock()
        self._look()

    def of_token(self, token: str) -> User:
        """Return the user of a token.

        Raises:
            AuthenticationError: it is nobody's; after a while.
        """
        self._read()
        name, _, secret = token.partition(".")
        found = self._users.get(name)
        user, stored = (None, _NOBODY) if found is None else (found.user, found.token)
        digest = hmac.digest(self._key, token.encode(), hashlib.sha256)
        if user is not None and self._right.get(digest) == (name, stored):
            return user
        if found is not None and found.scram is None:
            with self._hashing:  # one at a time: it takes 16 MiB
                right = _is_right(secret, stored)
        else:  # what a client that knows it could prove, which is found fast
            right = self.scram_of(name).is_of(token)
        if user is None or not right:
            raise self._wrong(name)
        if len(self._right) > 10_000:
            self._right.clear()
        self._right[digest] = (name, stored)
        return user

    def _wrong(self, name: str) -> AuthenticationError:
        """The error of a wrong token, after a while."""
        with self._lock:
            slow = self._failing < _SLOWEST
            self._failing += slow
        if slow:
            time.sleep(_SLOW_SECONDS)
            with self._lock:
                self._failing -= 1
        known = name if name in self._users else "nobody that is known"
        self._warn(f"a wrong token, for {known}")
        return AuthenticationError("the token is nobody's: ask who runs the server for one")

    def _warn(self, text: str) -> None:
        """Log once in a while: whoever tries again and again fills no log."""
        now = time.monotonic()
        with self._lock:
            loud = now >= self._quiet.get(text, now)
            if loud:
                self._quiet[text] = now + _QUIET_SECONDS
        if loud:
            _log.warning(text)

    def scram_of(self, name: str) -> ScramVerifier:
        """Return what proves that a client knows the token of a user; of nobody, what nothing fits.

        The salt of a name stays the same, so that it does not tell whether there is such a user.
        """
        self._read()
        found = self._users.get(name)
        if found is not None and found.scram is not None:
            return found.scram
        salt = hmac.digest(self._key, name.encode(), hashlib.sha256)[:16]
        return ScramVerifier(SCRAM_ITERATIONS, salt, os.urandom(32), os.urandom(32))

    def by_proof(self, name: str, verifier: ScramVerifier, message: bytes, proof: bytes) -> User:
        """Return the user whose token a client has proved to know.

        Raises:
            AuthenticationError: it has not; after a while.
        """
        found = self._users.get(name)
        right = verifier.is_proved(message, proof)
        if not right or found is None or found.scram != verifier:
            raise self._wrong(name)
        return found.user

    def entry_of(self, name: str) -> StoredUser | None:
        """Return what the file has of a name now."""
        self._read()
        return self._users.get(name)

    def named(self, name: str) -> User:
        """Return the user of a name that a certificate has proved.

        Raises:
            AuthenticationError: there is none.
        """
        self._read()
        found = self._users.get(name)
        if found is None:
            text = f"the certificate is of {name!r}, whom the file of users has not"
            self._warn(text)
            raise AuthenticationError(text)
        return found.user

    def _read(self) -> None:
        """Read the file again, if it has changed.

        Raises:
            AuthenticationError: it cannot be read; the log alone is told why.
        """
        try:
            self._look()
        except (OSError, ValueError) as error:
            _log.error("the file of users cannot be read: %s", error)
            raise AuthenticationError("nobody can be let in now") from None

    def _look(self) -> None:
        found = self._path.stat()
        # Times can be set, but for that of the change; a rename keeps that, and has another inode.
        stamp = (found.st_ino, found.st_ctime_ns, found.st_mtime_ns, found.st_size)
        if stamp != self._stamp:
            self._users = {each.user.name: each for each in read_users(self._path)}
            self._stamp = stamp


class ScramVerifier(NamedTuple):
    """The keys that a server has of a token, for SCRAM-SHA-256."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    @classmethod
    def of(cls, token: str, salt: bytes, iterations: int) -> ScramVerifier:
        """Make that of a token."""
        salted = hashlib.pbkdf2_hmac("sha256", token.encode(), salt, iterations)
        client_key = _mac(salted, b"Client Key")
        stored_key = hashlib.sha256(client_key).digest()
        return cls(iterations, salt, stored_key, _mac(salted, b"Server Key"))

    @classmethod
    def parse(cls, text: str) -> ScramVerifier:
        """Read what `str` gives.

        Raises:
            ValueError: it is nothing of the kind.
        """
        kind, _, rest = text.partition("$")
        iterations, salt, keys = rest.replace("$", ":", 1).split(":", 2)
        stored_key, server_key = (base64.b64decode(each, validate=True) for each in keys.split(":"))
        if kind != SCRAM or len(stored_key) != 32 or len(server_key) != 32:
            raise ValueError(f"{kind} is not {SCRAM}, or its keys are too short")
        return cls(int(iterations), base64.b64decode(salt, validate=True), stored_key, server_key)

    def __str__(self) -> str:
        salt, *keys = map(_text, self[1:])
        return f"{SCRAM}${self.iterations}:{salt}${':'.join(keys)}"

    def is_of(self, token: str) -> bool:
        """Tell whether it was made of a token; in constant time."""
        told = self.of(token, self.salt, self.iterations)
        return hmac.compare_digest(told.stored_key, self.stored_key)

    def is_proved(self, message: bytes, proof: bytes) -> bool:
        """Tell whether a proof shows that its client knows the token; in constant time."""
        signature = _mac(self.stored_key, message)
        if len(proof) != len(signature):
            return False
        key = bytes(one ^ other for one, other in zip(proof, signature, strict=True))
        return hmac.compare_digest(hashlib.sha256(key).digest(), self.stored_key)

    def signature(self, message: bytes) -> bytes:
        """Return what shows a client that this server knows its token."""
        return _mac(self.server_key, message)


class ScramExchange:
    """One log in by SCRAM-SHA-256, at the server. One thread at a time.

    Args:
        users: of the server.
        nonce: of the server; anew for each by default.

    Attributes:
        user: None before the client's proof was right.
    """

    def __init__(self, users: Users, nonce: str = "") -> None:
        self._users = users
        self._nonce = nonce or secrets.token_urlsafe(24)
        self._verifier: ScramVerifier | None = None
        self._before = self._header = self._name = ""
        self.user: User | None = None

    @property
    def name(self) -> str:
        """The name that the client has said."""
        return self._name

    def answer(self, message: bytes) -> bytes:
        """Answer the client's first message, or its last.

        Raises:
            AuthenticationError: the proof is wrong; after a while.
            ValueError: it makes no sense.
        """
        text = message.decode()
        return self._first(text) if self._verifier is None else self._last(text, self._verifier)

    def _first(self, text: str) -> bytes:
        binding, _, bare = text.split(",", 2)
        if binding not in ("n", "y"):
            raise ValueError("channel binding is not known here")
        parts = _parts(bare)
        if not parts["n"] or not parts["r"]:
            raise ValueError("it names nobody, or has no nonce")
        self._name, self._header = parts["n"], text[: len(text) - len(bare)]
        self._nonce = parts["r"] + self._nonce
        self._verifier = self._users.scram_of(self._name)
        salt = _text(self._verifier.salt)
        answer = f"r={self._nonce},s={salt},i={self._verifier.iterations}"
        self._before = f"{bare},{answer}"
        return answer.encode()

    def _last(self, text: str, verifier: ScramVerifier) -> bytes:
        parts = _parts(text)
        if parts["r"] != self._nonce or parts["c"] != _text(self._header.encode()):
            raise ValueError("it is of another exchange")
        unproved = text[: text.rindex(",p=")]
        message = f"{self._before},{unproved}".encode()
        proof = base64.b64decode(parts["p"], validate=True)
        self.user = self._users.by_proof(self._name, verifier, message, proof)
        return b"v=" + _text(verifier.signature(message)).encode()


def _parts(text: str) -> dict[str, str]:
    """The attributes of a message of SCRAM."""
    try:
        parts = dict(each.split("=", 1) for each in text.split(","))
    except ValueError:
        raise ValueError("it is no message of SCRAM") from None
    return defaultdict(str, parts)


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256)


class StoredUser(NamedTuple):
    """A user of a file.

    Attributes:
        token: the hash of its token.
        scram: for SCRAM; None in entries of before.
    """

    user: User
    token: str
    scram: ScramVerifier | None


def read_users(path: Path) -> list[StoredUser]:
    """Return the users of a file.

    Raises:
        ValueError: it is no such file.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no file of users: {error}") from None
    found = []
    for name, told in _table(document.get("users", {}), f"{path}: users").items():
        told = _table(told, f"{path}: user {name!r}")
        right = told.get("rights")
        if right not in RIGHTS[1:]:
            dots = any(isinstance(each, dict) for each in told.values())
            hint = "; a name with dots stands in quotes" * dots
            rights = ", ".join(RIGHTS[1:])
            raise ValueError(f"{path}: rights of user {name!r} are one of {rights}{hint}")
        patterns = {}
        for kind in ("tables", "topics"):
            given = told.get(kind, ["*"])
            if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
                raise ValueError(f"{path}: {kind} of user {name!r} is a list of patterns")
            patterns[kind] = tuple(given)
        user = User(name, cast("Right", right), patterns["tables"], patterns["topics"])
        try:
            scram = None if "scram" not in told else ScramVerifier.parse(str(told["scram"]))
        except ValueError as error:
            raise ValueError(f"{path}: scram of user {name!r} is none: {error}") from None
        found.append(StoredUser(user, str(told.get("token", _NOBODY)), scram))
    return found


def _table(found: Any, what: str) -> dict[str, Any]:
    """Return what is a table of TOML.

    Raises:
        ValueError: it is another thing.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{what} is a table, not of type {type(found).__name__}")
    return found


def add_user(
    path: Path, name: str, right: Right, tables: Sequence[str], topics: Sequence[str]
) -> str:
    """Add a user to a file, which is made when it is missing; return the token.

    Any number of processes may do this at once. The file keeps its owner and its mode.

    Raises:
        ValueError: there is a user of this name, or it is no sound one.
        StorageFullError, UnavailableError: the disk is full, or failed; the file is as it was.
        DeniedError: this user may not read it, or may not give it its owner.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"a user's name is letters, digits, _ and -, up to 64, not {name!r}")
    real = Path(os.path.realpath(path))
    with disk_errors(path), opened(real.parent, os.O_RDONLY | os.O_DIRECTORY) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = real.read_text() if is_there(real) else ""
        if before and any(each.user.name == name for each in read_users(path)):
            text = f"{path} has a user {name!r}: take it out there, to give it a new token"
            raise ValueError(text)
        secret = secrets.token_urlsafe(32)
        lines = [
            f"[users.{name}]",
            f'token = "{_hashed(secret)}"',
            f'scram = "{ScramVerifier.of(f"{name}.{secret}", os.urandom(16), SCRAM_ITERATIONS)}"',
            f'rights = "{right}"',
            f"tables = {json.dumps(list(tables))}",
            f"topics = {json.dumps(list(topics))}",
        ]
        text = before.rstrip() + ("\n\n" if before.strip() else "") + "\n".join(lines) + "\n"
        _replace(real, text)
    return f"{name}.{secret}"


def _replace(path: Path, text: str) -> None:
    """Put a text in the place of a file, durably; its owner and mode stay."""
    beside = path.with_name(f"{path.name}.new")
    try:
        with opened(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            if is_there(path):
                found = path.stat()
                os.fchown(descriptor, found.st_uid, found.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
            with open(descriptor, "w", closefd=False) as file:
                file.write(text)
            sync(descriptor)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _hashed(secret: str) -> str:
    salt = os.urandom(16)
    found = hashlib.scrypt(secret.encode(), salt=salt, n=_N, r=_R, p=_P)
    return f"scrypt${_N}${_R}${_P}${_text(salt)}${_text(found)}"


def _is_right(secret: str, stored: str) -> bool:
    """Compare in constant time; a hash of another form is nobody's."""
    try:
        kind, n, r, p, salt, hashed = stored.split("$")
        wanted = base64.b64decode(hashed)
        found = hashlib.scrypt(
            secret.encode(), salt=base64.b64decode(salt), n=int(n), r=int(r), p=int(p)
        )
    except ValueError:
        return False
    return kind == "scrypt" and hmac.compare_digest(found, wanted)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


_NOBODY: Final = _hashed(secrets.token_urlsafe(32))
