"""Writes of a transaction to topics and subscriptions: taken at once, and staged where they may
not stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from txnkv.coordinator.states import TxnState
from txnkv.errors import (
    AckConflictError,
    NotSupportedError,
    StorageFullError,
    UnavailableError,
)
from txnkv.tables.manifest import Scope
from txnkv.topics.catalog import TopicInfo
from txnkv.topics.message import MessageId
from txnkv.topics.messages import as_arrow
from txnkv.topics.staged_writer import StagedSends
from txnkv.transaction.context_parts import ContextPart
from txnkv.transaction.small_parts import Parts, SmallParts

if TYPE_CHECKING:
    from txnkv.topics.subscription_info import SubscriptionInfo


class TopicWrites(ContextPart):
    """The part of a transaction's context that is about topics."""

    scope: Scope | None
    transactional: bool
    _storing: bool
    _own: SmallParts | None
    _staged_sends: StagedSends | None = None
    _unsure_acks: set[tuple[int, tuple[MessageId, ...], bool]]

    def send(self, topic: TopicInfo, parts: Parts, *, more: bool = False) -> None:
        """Take messages for partitions of a topic; all or, after an error, none of them.

        They are in memory then: `settle` comes next. Those of an attempt are staged, and count
        from now on; with `more`, only with those that come next.

        Raises:
            TopicNotFoundError: it was dropped.
            InvalidTxnStateError: the transaction is not open, or the attempt's job has ended.
            StorageFullError: no room to stage them.
        """
        with self.lock:
            self.require_open("send")
            if self.scope is not None:
                self._sends_of(self.scope).send(topic, [(n, as_arrow(some)) for n, some in parts])
                self.settle(more=more)
                return
            outbox = self._parts().outbox
            outbox.require_live(topic)
            self.has_written = True
            for number, messages in parts:
                outbox.add(topic, number, messages)

    def _sends_of(self, scope: Scope) -> StagedSends:
        if self._staged_sends is None:
            assert scope.job_id is not None
            assert scope.attempt is not None
            self._staged_sends = StagedSends(
                self.instance.topics, self.row, scope.job_id, scope.attempt
            )
        return self._staged_sends

    def acknowledge(
        self, info: SubscriptionInfo, ids: Sequence[MessageId], *, cumulative: bool
    ) -> None:
        """Take acknowledgements of a subscription; `settle` comes next.

        Raises:
            AckConflictError: another transaction has one of them.
            InvalidTxnStateError: the transaction is not open.
            NotSupportedError: in an attempt of a job.
        """
        self.refuse_attempt("acknowledge")
        with self.lock:
            self.require_open("acknowledge")
            if self.unsettled:
                self.settle()
            self.has_written = True
            call = info.id, tuple(ids), cumulative
            again = call in self._unsure_acks
            outbox = self._parts().outbox
            try:
                outbox.acknowledge(info, ids, cumulative=cumulative, again=again)
            except AckConflictError as error:
                self._abort_on_conflict(error)
                raise
            except (StorageFullError, UnavailableError):
                self._unsure_acks.add(call)
                raise
            self._unsure_acks.discard(call)

    @contextmanager
    def taking_back(self) -> Iterator[None]:
        """If the block fails, nothing counts that an attempt has sent in it."""
        try:
            yield
        except BaseException:
            if self._staged_sends is not None:
                self._staged_sends.take_back()
            raise

    def settle(self, *, more: bool = False) -> None:
        """Stage what was sent and acknowledged, where it may not stay in memory.

        What could not be staged is staged the next time, at the latest by the commit.

        Args:
            more: what comes next belongs to it; of an attempt it counts with that.
        """
        with self.lock:
            if self._staged_sends is not None and not more:
                self._staged_sends.settle()
            if self.unsettled:
                self.ensure_large()

    def settle_if_possible(self) -> None:
        """Stage what has become too large. It is taken already: what fails here, the next
        operation or the commit tries again, and tells of.
        """
        if self.unsettled:
            with suppress(StorageFullError, UnavailableError):
                self.settle()

    @property
    def unsettled(self) -> bool:
        """Something is in memory that may not stay there, or the OPEN row may not be stored."""
        own = self._own
        if own is None:
            return self._storing and not self.stored
        return not self._may_be_small or own.too_large

    def _abort_on_conflict(self, error: AckConflictError) -> None:
        """Another transaction has the message: this one, which came later, ends here."""
        if self.transactional:
            self.instance.coordinator.metrics.ack_conflicts.add()
            if self.stored:
                orchestrator = self.instance.coordinator.orchestrator
                orchestrator.start_abort(self.row.txn_id, str(error), AckConflictError)
                orchestrator.finish(self.row.txn_id)
            self.end(TxnState.ABORTED, str(error), error)

    def refuse_attempt(self, what: str) -> None:
        """Refuse what an attempt of a job cannot take back."""
        if self.scope is not None:
            raise NotSupportedError(
                f"cannot {what} in an attempt of a job: should the attempt fail, that could not "
                "be taken back. Do it in the transaction itself"
            )
