"""Reads of LMDB as `with` blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lmdb

from txnkv.storage.lmdb_handles import Scope

if TYPE_CHECKING:
    from txnkv.storage.environment import Environment


class ReadScope:
    """A read transaction as a `with` block."""

    __slots__ = ("_environment", "_scope")

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._scope: Scope | None = None

    def __enter__(self) -> Any:
        self._scope = self._environment.begin_read()
        return self._scope.txn

    def __exit__(self, *reason: object) -> None:
        assert self._scope is not None
        self._environment.end_read(self._scope)
        for error in reason:
            if isinstance(error, lmdb.Error):
                self._environment.fail(error)
