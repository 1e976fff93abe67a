"""The interface of a transaction's context to the parts of it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from txnkv.coordinator.states import TxnState
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import TxnkvError
from txnkv.instance import Instance
from txnkv.transaction.local_state import LocalState
from txnkv.transaction.small_parts import SmallParts


class ContextPart(ABC):
    """A part of a transaction's context."""

    instance: Instance
    row: TxnRow
    local: LocalState
    has_written: bool
    lock: threading.RLock

    @abstractmethod
    def require_open(self, what: str) -> None:
        """Refuse what only an open transaction admits."""

    @property
    @abstractmethod
    def stored(self) -> bool:
        """Tell whether the transaction's row is in status.db."""

    @abstractmethod
    def ensure_large(self, what: str = "write") -> object:
        """Store the OPEN row and stage what is in memory."""

    @abstractmethod
    def end(
        self, state: TxnState, reason: str | None = None, error: TxnkvError | None = None
    ) -> None:
        """Note that the transaction has ended."""

    @property
    @abstractmethod
    def _may_be_small(self) -> bool: ...

    @abstractmethod
    def _parts(self, what: str = "write") -> SmallParts: ...
