"""Rows and messages of a transaction without a session at hand: they go through one of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from txnkv.options import FlushMode, Operation
from txnkv.transaction.message_operations import Acknowledged, AnySubscription, MessageOperations
from txnkv.transaction.row_operations import RowOperations
from txnkv.transaction.write_result import WriteResult

if TYPE_CHECKING:
    import threading

    from txnkv.client.table import Table
    from txnkv.client.topic import Topic
    from txnkv.transaction.session import Session


class OwnSession(RowOperations, MessageOperations):
    """Every operation of a session, on one that is made at the first of them."""

    _lock: threading.RLock
    _own_session: Session | None = None

    @abstractmethod
    def _new_session(self, flush_mode: FlushMode, buffer_bytes: int | None) -> Session: ...

    def _session(self) -> Session:
        with self._lock:
            found = self._own_session
            if found is None:
                found = self._own_session = self._new_session("manual", None)
                # Rows and messages by the thousand go straight there.
                self.__dict__["insert"] = found.insert
                self.__dict__["send"] = found.send
            return found

    # -- rows --------------------------------------------------------------------------

    def insert(self, table: str | Table, row: Any) -> None:
        """A new row; refused when its key is there already."""
        self._session().insert(table, row)

    def _add(self, table: str | Table, op: str, row: Any) -> None:
        (self._own_session or self._session())._add(table, op, row)

    def write(self, table: str | Table, data: Any, op: Operation = "insert") -> WriteResult:
        """See `Session.write`."""
        return self._session().write(table, data, op)

    # -- messages ----------------------------------------------------------------------

    def send(
        self,
        topic: str | Topic,
        value: Any,
        key: bytes | str | None = None,
        partition: int | None = None,
        headers: Any = None,
        timestamp: Any = None,
    ) -> None:
        """Send one message; see `MessageOperations.send`."""
        self._session().send(topic, value, key, partition, headers, timestamp)

    def send_batch(self, topic: str | Topic, data: Any) -> WriteResult:
        """Send Arrow data; see `MessageOperations.send_batch`."""
        return self._session().send_batch(topic, data)

    def _acknowledge(
        self, subscription: AnySubscription, message: Acknowledged, *, cumulative: bool
    ) -> None:
        self._session()._acknowledge(subscription, message, cumulative=cumulative)

    # -- both --------------------------------------------------------------------------

    def flush(self) -> WriteResult:
        """Flush the transaction's own session."""
        return self._session().flush()

    def pending_errors(self) -> list[Any]:
        """See `Session.pending_errors`, of the transaction's own session."""
        return self._session().pending_errors()
