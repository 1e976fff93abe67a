"""Staged sends: the messages of a job's attempts, until the job ends.

A job runs in tasks, a task in attempts, and an attempt may fail, be tried again or run twice. Its
messages count only if the driver names it when it commits the job; so they may not be in a log
before. They wait in staged files (`staged_file`), one for each session of an attempt:

    attempts    3.0  [file 1: P0 a b | P1 c]         RUNNING: they come and go as they like
                3.1  [file 2: P0 a b | P1 c]         the same task again
                4.0  [file 3: P0 d]
    driver      commit(["3.1", "4.0"])               RUNNING -> ENDING: what counts is fixed
                P0:  a b d      P1: c                appended to the logs, attempt by attempt
                                                     ENDING -> COMMITTED, rows of the tables too
                files 1, 2, 3 are removed            and the transaction may commit

So the last stable offset of a log is not held back while a job runs, what an attempt sent in vain
never touches a log, and the late file of one that was thought dead is never read.

A commit of the transaction is refused while a job is RUNNING or ENDING. When the driver dies in
ENDING some of its messages are in the logs, open; the transaction can only abort, and they with
it. Files go when the job ends, or with the abort; what the dead leave is swept by the leader.

    row in status.db, file                  a session began to send
    file, then bytes in the row             each flush, or batch: these count now
    job over, file gone, row gone           in this order
    no row, a file                          of a writer that was stopped in between: garbage
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from txnkv.coordinator import CommitLog, Lease, Participants, TxnRow
from txnkv.errors import TxnkvError
from txnkv.storage import boot_id, declare_fault_point, fault_point
from txnkv.topics.staged import staged_file, staged_rows
from txnkv.topics.staged.staged_rows import KIND, StagedFile
from txnkv.topics.topics import Topics

declare_fault_point("staged.removed", "staged files of a job are gone, status.db still has them")


class StagedSendsFolder:
    """The staged files of a store. Shared by threads.

    Attributes:
        handler: removes those of a transaction that aborts.
    """

    def __init__(self, topics: Topics) -> None:
        self.topics = topics
        self._store = topics.store
        self.folder = topics.store.directory.path / "staged"
        self.handler = StagedParticipants(self, topics.log)

    def path(self, file: StagedFile) -> Path:
        """Return the path where a file is, or would be."""
        return self.folder / str(file.id)

    # -- removing ----------------------------------------------------------------------

    def remove(self, files: Iterable[StagedFile]) -> None:
        """Remove files that nobody will read, then forget them; twice is fine."""
        gone = list(files)
        if not gone:
            return
        for file in gone:
            self.path(file).unlink(missing_ok=True)
        fault_point("staged.removed")
        # Not synced: a row that comes back is of a job that has ended, and is swept.
        with self._store.status.write(sync=False) as cur:
            staged_rows.forget(cur, gone)

    def remove_transaction(self, txn_id: int) -> None:
        """Remove all files of a transaction that has ended, or will abort."""
        with self._store.status.read() as cur:
            files = staged_rows.of_transaction(cur, txn_id)
        self.remove(files)

    def remove_unknown(self, file: StagedFile) -> None:
        """Remove a file that status.db has forgotten: no other will ever have its id."""
        with self._store.status.read() as cur:
            known = {other.id for other in staged_rows.of_transaction(cur, file.txn_id)}
        if file.id not in known:
            self.path(file).unlink(missing_ok=True)

    def sweep(self, lease: Lease) -> None:
        """Remove what dead processes left: garbage stays garbage, so no term is asked for."""
        there = self._names()  # first: a row comes before its file
        with self._store.status.read() as cur:
            known = staged_rows.all_files(cur)
            wanted = {file.id for file in staged_rows.wanted(cur)} if known else set()
        for id in there - {file.id for file in known}:
            (self.folder / str(id)).unlink(missing_ok=True)
        self.remove(file for file in known if file.id not in wanted)

    def _names(self) -> set[int]:
        try:
            return {int(each.name) for each in self.folder.iterdir() if each.name.isdigit()}
        except FileNotFoundError:
            return set()

    # -- looking -----------------------------------------------------------------------

    def files(self) -> list[StagedFile]:
        """Those that may still come to count."""
        with self._store.status.read() as cur:
            return staged_rows.wanted(cur)

    def problem(self, file: StagedFile) -> str | None:
        """Read what counts of a file: what is wrong with it.

        Of one from before the machine was started anew something may be missing; no job takes it.
        """
        if not file.bytes or file.boot != boot_id():
            return None
        try:
            for frame in staged_file.frames(self.path(file), file):
                memory = memoryview(bytearray(frame.bytes))
                staged_file.read(self.path(file), file, [frame], memory)
        except TxnkvError as error:
            still = {other.id for other in self.files()}  # else its job ended meanwhile
            return str(error) if file.id in still else None
        return None


class StagedParticipants(Participants):
    """Files of attempts: an abort removes them. A commit finds none, for it is refused while a job
    that may have some has not ended.
    """

    kind = KIND

    def __init__(self, staged: StagedSendsFolder, log: CommitLog) -> None:
        super().__init__(log)
        self._staged = staged

    def finalize_commit(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Remove what a job that was aborted has left."""
        self._staged.remove_transaction(row.txn_id)

    def abort(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Remove all files of the transaction."""
        self._staged.remove_transaction(row.txn_id)
