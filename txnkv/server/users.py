"""Users of a server: who they are, by their tokens, and what they may do.

The file of users is TOML, one table for each:

    [users.ann]
    token = "scrypt$16384$8$1$<salt>$<hash>"       # never the token itself
    rights = "write"                               # read, write or admin
    tables = ["orders", "cust_*"]                  # patterns as of a shell; all by default
    topics = []                                    # none

A token is "name.secret": 32 random bytes, of which the file has a salted hash. So who reads the
file has no token, and who guesses has 2^256 of them. A hash takes a while on purpose, so a token
that was right is remembered, in memory, by a fast hash under a key of this process.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal, NamedTuple, cast

from txnkv.errors import AuthenticationError
from txnkv.remote import RIGHTS, Right
from txnkv.storage import new_lock

_log = logging.getLogger("txnkv.server")

_N, _R, _P = 1 << 14, 8, 1
_SLOW_SECONDS: Final = 0.5
_SLOWEST: Final = 8
"""So many failures wait at once; the others are refused at once, unread."""

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

    def may(self, right: Right, about: About | None = None) -> bool:
        """Tell whether the user has a right: to a table or topic, or at all."""
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
            raise AuthenticationError(
                f"user {self.name!r} has no right to {right}{to}: who runs the server gives it, in "
                "the file of users"
            )


EVERYBODY: Final = User("everybody", "admin")
"""The user where a server has no file of users."""


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
        self._stamp: tuple[int, int] = (0, 0)
        self._users: dict[str, tuple[User, str]] = {}
        self._key = os.urandom(32)
        self._right: dict[bytes, tuple[str, str]] = {}
        self._failing = 0
        self._read()

    def of_token(self, token: str) -> User:
        """Return the user of a token.

        Raises:
            AuthenticationError: it is nobody's; after a while.
        """
        self._read()
        name, _, secret = token.partition(".")
        user, stored = self._users.get(name, (None, _NOBODY))
        digest = hmac.digest(self._key, token.encode(), hashlib.sha256)
        if user is not None and self._right.get(digest) == (name, stored):
            return user
        with self._lock:
            slow = self._failing < _SLOWEST
            self._failing += slow
        if not slow:
            raise AuthenticationError("too many wrong tokens at once; try again later")
        try:
            if _is_right(secret, stored) and user is not None:
                if len(self._right) > 10_000:
                    self._right.clear()
                self._right[digest] = (name, stored)
                return user
            known = name if user is not None else "nobody that is known"
            _log.warning("a wrong token, for %s", known)
            time.sleep(_SLOW_SECONDS)
        finally:
            with self._lock:
                self._failing -= 1
        raise AuthenticationError("the token is nobody's: ask who runs the server for one")

    def named(self, name: str) -> User:
        """Return the user of a name that a certificate has proved.

        Raises:
            AuthenticationError: there is none.
        """
        self._read()
        found = self._users.get(name)
        if found is None:
            raise AuthenticationError("the certificate is of nobody that the file of users has")
        return found[0]

    def _read(self) -> None:
        found = self._path.stat()
        stamp = (found.st_mtime_ns, found.st_size)
        if stamp != self._stamp:
            self._users = {user.name: (user, stored) for user, stored in read_users(self._path)}
            self._stamp = stamp


def read_users(path: Path) -> list[tuple[User, str]]:
    """Return the users of a file, each with the hash of its token.

    Raises:
        ValueError: it is no such file.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no file of users: {error}") from None
    found = []
    for name, told in document.get("users", {}).items():
        right = told.get("rights")
        if right not in RIGHTS[1:]:
            raise ValueError(f"{path}: rights of user {name!r} are one of {', '.join(RIGHTS[1:])}")
        patterns = {}
        for kind in ("tables", "topics"):
            given = told.get(kind, ["*"])
            if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
                raise ValueError(f"{path}: {kind} of user {name!r} is a list of patterns")
            patterns[kind] = tuple(given)
        user = User(name, cast("Right", right), patterns["tables"], patterns["topics"])
        found.append((user, str(told.get("token", _NOBODY))))
    return found


def add_user(
    path: Path, name: str, right: Right, tables: Sequence[str], topics: Sequence[str]
) -> str:
    """Add a user to a file, which is made when it is missing; return the token.

    Raises:
        ValueError: there is a user of this name, or it is no sound one.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"a user's name is letters, digits, _ and -, up to 64, not {name!r}")
    before = path.read_text() if path.exists() else ""
    if before and any(user.name == name for user, _ in read_users(path)):
        raise ValueError(f"{path} has a user {name!r}: take it out there, to give it a new token")
    secret = secrets.token_urlsafe(32)
    lines = [
        f"[users.{name}]",
        f'token = "{_hashed(secret)}"',
        f'rights = "{right}"',
        f"tables = {json.dumps(list(tables))}",
        f"topics = {json.dumps(list(topics))}",
    ]
    text = before.rstrip() + ("\n\n" if before.strip() else "") + "\n".join(lines) + "\n"
    beside = path.with_name(f"{path.name}.new")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    return f"{name}.{secret}"


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
