"""Jobs: many task attempts that stage under one transaction, of which only some count.

    driver    job = Job.start(txn)                       a token and job.id go to the workers
    worker    session = Job.join(txn, id).session("3.0") rows carry the attempt's name
    driver    job.commit(["0.0", "1.1", "2.0", "3.0"])   these attempts count, no others
              txn.commit()

While a job runs its transaction does not commit. Attempts that come after the job's end, or
that `commit` does not name, leave nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from txnkv.coordinator import jobs
from txnkv.session import Session
from txnkv.tables import manifest
from txnkv.tables.manifest import Scope
from txnkv.transaction import Transaction


class Job:
    """One job under a transaction."""

    def __init__(self, txn: Transaction, id: str) -> None:
        self.id = id
        self._txn = txn

    @classmethod
    def start(cls, txn: Transaction) -> Job:
        """Begin a job; its transaction does not commit while it runs.

        Raises:
            InvalidTxnStateError: the transaction is not open.
        """
        job = cls(txn, uuid.uuid4().hex)
        txn.require_shareable("start a job under")
        row = txn.context.ensure_large().row
        with txn.context.instance.store.status.write() as cur:
            jobs.start(cur, row.txn_id, job.id)
        return job

    @classmethod
    def join(cls, txn: Transaction, id: str) -> Job:
        """A job that another process started."""
        return cls(txn, id)

    def session(self, attempt: str, *, alone: bool = False) -> Session:
        """A session whose rows count only if the job is committed with this attempt.

        Args:
            attempt: the attempt's name, never used again within the job.
            alone: it sees no rows but its own: the job's first attempt deletes all others.
        """
        context = self._txn.context
        scope = Scope(context.row.txn_id, self.id, f"{self.id}/{attempt}", alone)
        return Session(self._txn.client, context.with_scope(scope), "manual")

    def commit(self, attempts: Iterable[str], *, first: Iterable[str] = ()) -> None:
        """End the job: the rows of these attempts now count, durably. Again is harmless.

        Args:
            attempts: their names.
            first: attempts that count too, below these, which were made knowing of them.

        Raises:
            InvalidTxnStateError: the job was aborted, or the transaction is not open.
        """
        txn_id = self._txn.context.row.txn_id
        with self._txn.context.instance.store.status.write() as cur:
            if jobs.end(cur, txn_id, self.id, jobs.COMMITTED):
                named = [f"{self.id}/{attempt}" for attempt in first]
                manifest.accept_attempts(cur, txn_id, named, in_place=True)
                named = [f"{self.id}/{attempt}" for attempt in attempts]
                manifest.accept_attempts(cur, txn_id, named)

    def abort(self) -> None:
        """End the job: nothing of it counts. Its space comes back when the transaction ends.

        Raises:
            InvalidTxnStateError: the job was committed.
        """
        txn_id = self._txn.context.row.txn_id
        with self._txn.context.instance.store.status.write() as cur:
            jobs.end(cur, txn_id, self.id, jobs.ABORTED)
