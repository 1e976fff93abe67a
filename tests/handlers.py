"""Calls that read or write the store where a signal handler may come between.

A method of a public handle that is not shielded (`txnkv.storage.threads`) works in every test and
leaves locks taken when Ctrl-C comes in the midst of it: `Client.compact` did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txnkv
from txnkv.storage.environment import Environment
from txnkv.storage.status_db import StatusDatabase
from txnkv.storage.threads import is_exposed
from txnkv.storage.write_queue import WriteQueue

PACKAGE = Path(txnkv.__file__).parent
PUBLIC = (
    "client",
    "transaction/transaction.py",
    "transaction/session.py",
    "transaction/connection.py",
)
WATCHED = (
    (WriteQueue, "acquire"),
    (WriteQueue, "acquire_here"),
    (StatusDatabase, "begin_write"),
    (StatusDatabase, "read"),
    (Environment, "write"),
)


def watch(patch: pytest.MonkeyPatch) -> list[str]:
    """Have such calls noted from here on: which, and the public method that came to it."""
    found: list[str] = []
    for kind, name in WATCHED:
        patch.setattr(kind, name, _noting(getattr(kind, name), f"{kind.__name__}.{name}", found))
    return found


def _noting(fn: Callable[..., Any], name: str, found: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_exposed() and (public := _public_caller()) is not None:
            found.append(f"{name} in {public}")
        return fn(*args, **kwargs)

    return call


def _public_caller() -> str | None:
    """Return the outermost function of the package, where it is one of a public handle."""
    frame: Any = sys._getframe(2)
    outer = None
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            outer = path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname
        frame = frame.f_back
    return " ".join(outer) if outer is not None and outer[0].startswith(PUBLIC) else None
