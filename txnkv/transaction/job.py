"""Jobs: many task attempts that stage under one transaction, of which only some count.

    driver    job = Job.start(txn)                       a token and job.id go to the workers
    worker    session = Job.join(txn, id).session("3.0") what it writes carries the attempt's name
    driver    job.commit(["0.0", "1.1", "2.0", "3.0"])   these attempts count, no others
              txn.commit()

An attempt writes rows and sends messages. Rows are staged in the tablets, messages in files: only
`commit` appends those of the attempts that it is given to the logs (`topics.staged_sends`). While
a job runs its transaction does not commit. Attempts that come after the job's end, or that
`commit` does not name, leave nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import apsw

from txnkv.coordinator import TxnState, ending_error, jobs, status_table
from txnkv.errors import CorruptionError
from txnkv.storage import StatusDatabase, declare_fault_point, fault_point, shielded
from txnkv.tables import Scope, manifest
from txnkv.topics import StagedLots, staged_files
from txnkv.transaction import token as tokens
from txnkv.transaction.session import Session
from txnkv.transaction.transaction import Transaction

declare_fault_point("job.ending", "a job is ENDING, none of its messages is in a log")
declare_fault_point("job.appended", "all messages of a job are in their logs, it is ENDING")
declare_fault_point("job.ended", "a job is COMMITTED, its staged files are there")


class Job:
    """One job under a transaction.

    Attributes:
        txn: the transaction.
    """

    def __init__(self, txn: Transaction, id: str) -> None:
        self.id = id
        self.txn = txn

    def __repr__(self) -> str:
        return f"<Job {self.id} of {self.txn!r}>"

    @classmethod
    @shielded
    def start(cls, txn: Transaction) -> Job:
        """Begin a job; its transaction does not commit while it runs.

        Raises:
            InvalidTxnStateError: the transaction is not open.
        """
        if txn.connection.elsewhere is not None:
            made: Job = txn.connection.elsewhere("start_job", txn)
            return made
        job = cls(txn, uuid.uuid4().hex)
        tokens.require_shareable(txn.context.row, "start a job under")
        row = txn.context.share("start a job")
        with txn.context.instance.store.status.write() as cur:
            jobs.start(cur, row.txn_id, job.id)
        return job

    @classmethod
    def join(cls, txn: Transaction, id: str) -> Job:
        """A job that another process started."""
        if txn.connection.elsewhere is not None:
            joined: Job = txn.connection.elsewhere("join_job", (txn, id))
            return joined
        return cls(txn, id)

    @shielded
    def session(self, attempt: str, *, alone: bool = False) -> Session:
        """A session whose rows and messages count only if the job is committed with this attempt.

        What it has sent is on its way with the answer of `flush` or `send_batch`.

        Args:
            attempt: the attempt's name, never used again within the job.
            alone: it sees no rows but its own: the job's first attempt deletes all others.
        """
        context = self.txn.context
        scope = Scope(context.row.txn_id, self.id, self._scoped(attempt), alone)
        return Session(self.txn.connection, context.with_scope(scope), "manual", None)

    @shielded
    def commit(self, attempts: Iterable[str], *, first: Iterable[str] = ()) -> None:
        """End the job: what these attempts wrote and sent now counts, durably. Again is harmless,
        and changes nothing: those that the first commit named count, whichever are named then.

        In a partition their messages stand in the order of the attempts here, those of `first`
        before them, and those of an attempt as it sent them.

        Args:
            attempts: their names.
            first: attempts that count too, below these, which were made knowing of them.

        Raises:
            InvalidTxnStateError: the job was aborted, or the transaction is not open.
            CorruptionError: messages of an attempt are lost, or damaged.
            TopicNotFoundError: a topic that one of them has sent to was dropped.
            StorageFullError: no room for the messages.

        An error may come when some of the messages are in the logs already. Then the job cannot
        be ended any more: its transaction has to be rolled back, and they go with it.
        """
        below = [self._scoped(attempt) for attempt in dict.fromkeys(first)]
        named = [self._scoped(attempt) for attempt in dict.fromkeys(attempts)]
        sent = self._begin_to_end(below, named)
        if sent is not None and sent.files:
            fault_point("job.ending")
            with self._if_open():
                sent.append(self.txn.context.row)
            fault_point("job.appended")
            with self._status.write() as cur:
                self._require_open(cur)
                jobs.ended(cur, self._txn_id, self.id)
                self._accept(cur, below, named)
        fault_point("job.ended")
        self._remove_files()

    def _begin_to_end(self, below: list[str], named: list[str]) -> StagedLots | None:
        """RUNNING -> ENDING, where messages are to be appended; else COMMITTED at once.

        Returns:
            The messages; None when it was committed before.
        """
        order = [*below, *(name for name in named if name not in below)]
        staged = self.txn.context.instance.topics.staged
        while True:
            with self._status.read() as cur:
                if not self._may_commit(cur):
                    return None
                files = staged_files.of_attempts(cur, self._txn_id, order)
            with self._if_open():  # what can be seen to be wrong is seen while the job runs
                found = StagedLots(staged, files)
            with self._status.write() as cur:
                if not self._may_commit(cur):
                    return None
                if staged_files.of_attempts(cur, self._txn_id, order) != files:
                    continue  # an attempt went on
                if files:
                    jobs.ending(cur, self.id)
                else:
                    jobs.end(cur, self._txn_id, self.id, jobs.COMMITTED)
                    self._accept(cur, below, named)
            return found

    def _may_commit(self, cur: apsw.Cursor) -> bool:
        if not jobs.may_end(cur, self._txn_id, self.id, jobs.COMMITTED):
            return False
        self._require_open(cur)
        return True

    def _require_open(self, cur: apsw.Cursor) -> None:
        row = status_table.get(cur, self._txn_id)
        if row.state is not TxnState.OPEN:
            raise ending_error(row, "commit a job")

    @contextmanager
    def _if_open(self) -> Iterator[None]:
        """Files that are missing since the transaction has ended meanwhile are no damage."""
        try:
            yield
        except CorruptionError:
            with self._status.read() as cur:
                self._require_open(cur)
            raise

    def _accept(self, cur: apsw.Cursor, below: list[str], named: list[str]) -> None:
        manifest.accept_attempts(cur, self._txn_id, below, in_place=True)
        manifest.accept_attempts(cur, self._txn_id, named)

    @shielded
    def abort(self) -> None:
        """End the job: nothing of it counts. Its space comes back when the transaction ends.

        Raises:
            InvalidTxnStateError: the job was committed, or its commit has begun: then nothing but
                to roll the transaction back takes its messages away, and it does not commit.
        """
        with self._status.write() as cur:
            revoked = jobs.revoke(cur, self._txn_id, self.id)
            if not revoked:
                jobs.end(cur, self._txn_id, self.id, jobs.ABORTED)
        self._remove_files()
        if revoked:
            raise jobs.revoked(self._txn_id, self.id)

    def _remove_files(self) -> None:
        with self._status.read() as cur:
            files = staged_files.of_job(cur, self._txn_id, self.id)
        self.txn.context.instance.topics.staged.remove(files)

    def _scoped(self, attempt: str) -> str:
        return f"{self.id}/{attempt}"

    @property
    def _txn_id(self) -> int:
        return self.txn.context.row.txn_id

    @property
    def _status(self) -> StatusDatabase:
        return self.txn.context.instance.store.status
