"""Versions of applications, as transactions and clients know them.

What they are: `coordinator.applications`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from txnkv.coordinator import applications
from txnkv.coordinator.applications import Applied, Mark
from txnkv.coordinator.states import TxnState
from txnkv.errors import AlreadyAppliedError
from txnkv.instance import Instance
from txnkv.storage.seam import fault_point
from txnkv.storage.shield import shielded
from txnkv.transaction.context_parts import ContextPart

if TYPE_CHECKING:
    from txnkv.client.client import Client
    from txnkv.transaction.context import TxnContext


class MarkWrites(ContextPart):
    """The part of a transaction's context that is about applications."""

    def mark(self, mark: Mark) -> None:
        """Take a mark; see `Transaction.mark_applied`."""
        status = self.instance.store.status
        with self.lock, self._abort_when_applied():
            self.require_open("mark it as a version of an application")
            with status.read() as cur:
                applications.refuse_applied(cur, mark)
            if self._may_be_small:
                self._parts().marks.add(mark)
            else:
                self.ensure_large()
                with status.write() as cur:
                    applications.stage(cur, self.row.txn_id, mark)
                fault_point("applications.staged")
            self.has_written = True

    @contextmanager
    def _abort_when_applied(self) -> Iterator[None]:
        """Abort where the version is applied already: nobody is to commit without the mark."""
        try:
            yield
        except AlreadyAppliedError as error:
            if self.stored:
                orchestrator = self.instance.coordinator.orchestrator
                orchestrator.start_abort(self.row.txn_id, str(error), AlreadyAppliedError)
                orchestrator.finish(self.row.txn_id)
            self.end(TxnState.ABORTED, str(error), error)
            raise


class Marking:
    """The part of a transaction that is about applications."""

    client: Client
    context: TxnContext

    @shielded
    def mark_applied(self, app_id: str, version: int, source: str | None = None) -> None:
        """This transaction is version `version` of application `app_id`.

        When it has committed, `client.applied(app_id)` says so, and no other transaction commits
        this version or one below it. A transaction may be a version of several applications.

        Args:
            app_id: the application, any text.
            version: 0 or above; versions only grow, with gaps where there are some.
            source: who drives the application, as a streaming query's id. Another source than the
                one that is known is refused; None is not compared.

        Raises:
            AlreadyAppliedError: this version or a later one is committed. The transaction was
                aborted. `commit` raises it too, where another one was faster.
            ValueError: the application is driven by another source, or the transaction is another
                version of it; or an argument makes no sense. Nothing was marked.
            InvalidTxnStateError: the transaction is not open.
        """
        self.client.require_open()
        self.context.mark(Mark(app_id, version, source))


class ApplicationOperations(ABC):
    """The part of a client that is about applications."""

    instance: Instance

    @abstractmethod
    def require_open(self) -> None:
        """Refuse a closed client."""

    @abstractmethod
    def require_writable(self) -> None:
        """Refuse to write where this client was opened to read only."""

    @shielded
    def applied(self, app_id: str) -> Applied | None:
        """The last version of an application that is committed; None when there is none.

        See `Transaction.mark_applied`.
        """
        self.require_open()
        with self.instance.store.status.read() as cur:
            return applications.find(cur, app_id, self.instance.coordinator.tcid)

    @shielded
    def applications(self) -> dict[str, Applied]:
        """The last version of every application, by its id."""
        self.require_open()
        with self.instance.store.status.read() as cur:
            return applications.every(cur, self.instance.coordinator.tcid)

    @shielded
    def forget_applied(self, app_id: str) -> bool:
        """Let an application begin anew, from any version and with any source.

        What its versions committed stays. A driver that still runs commits its next version as
        the first one.

        Returns:
            Whether anything was known of it.
        """
        self.require_writable()
        with self.instance.store.status.write() as cur:
            return applications.forget(cur, app_id)
