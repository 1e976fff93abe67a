"""Kudu's txn_commit-itest.cc and txn_write_ops-itest.cc as scripts; ids are the peer's names.

Their transactions go through the states one by one, so here all of them are large.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.scripts import scripts

pytestmark = pytest.mark.usefixtures("large")

COMMIT = scripts("""
== TestBasicCommits
begin a; write a 1..20 @u -> 20; write a 1..20 -> 20; count @u -> 0; start a; await a
count @u -> 20; count -> 20
== TestBasicAborts
begin a; write a 1..20 @u; write a 1..20; rollback a
complete a -> InvalidTxnStateError: ABORTED; count @u -> 0; count -> 0; staged -> 0
== TestBackgroundAborts
begin a; write a 1..5; forget a; forward 20; round; state a -> OPEN; forward 11; round
state a -> ABORTED; staged -> 0
== TestCommitAfterDeletingParticipant
begin a; write a 1..5; write a 1..5 @u; drop @t
commit a -> InvalidTxnStateError: table 't' was dropped; count @u -> 0; staged -> 0
== TestAbortRacingWithBotchedCommit
begin a; write a 1..5; write a 1..5 @u; arm abort.started error; drop @t -> OSError; disarm
start a -> InvalidTxnStateError: table 't' was dropped; rollback a
complete a -> InvalidTxnStateError: ABORTED; count @u -> 0
== TestRestartingWhileCommittingAndDeleting
begin a; write a 1..5; write a 1..5 @u; arm commit.started error; start a -> OSError; disarm
state a -> COMMIT_IN_PROGRESS; drop @t; restart; state a -> ABORTED; count @u -> 0
== TestDontBackgroundAbortIfCommitInProgress
begin a; write a 1..5; arm commit.started error; start a -> OSError; disarm; close a
forward 100000; complete a -> False; round; complete a -> True; keys -> 1 2 3 4 5
== TestAbortInProgress
begin a; write a 1..5; join b a; arm abort.started error; rollback a -> OSError; disarm
state a -> ABORT_IN_PROGRESS; complete b -> InvalidTxnStateError: not open: ABORT_IN_PROGRESS
write b 6 -> InvalidTxnStateError: not open: ABORT_IN_PROGRESS; restart; state a -> ABORTED
staged -> 0; count -> 0
== TestRestartingWhileCommitting
begin a; write a 1..5 @u; arm commit.started error; start a -> OSError; disarm
complete a -> False; count @u -> 0; restart; state a -> COMMITTED; count @u -> 5
== TestStartTasksDuringStartup
begin a; begin b; begin c; write a 1..5 @u; write b 11..15 @u; write c 21..25 @u
arm commit.started error; start a -> OSError; start b -> OSError; disarm
arm abort.started error; rollback c -> OSError; disarm; restart; state a -> COMMITTED
state b -> COMMITTED; state c -> ABORTED; count @u -> 10
== TestCommitWhileShuttingDownTxnStatusManager
begin a; write a 1..5 @u; arm commit.decided error; commit a -> OSError; disarm
state a -> FINALIZE_IN_PROGRESS; count @u -> 5
rollback a -> InvalidTxnStateError: FINALIZE_IN_PROGRESS; restart; state a -> COMMITTED
count @u -> 5
== TestCommitWhileShuttingDown-point-not-durable
begin a; write a 1..5 @u; arm commit.in_point error; commit a -> UnavailableError: injected
disarm; state a -> ABORTED; commit a -> InvalidTxnStateError: ABORTED; count @u -> 0; restart
state a -> ABORTED; count @u -> 0; staged -> 0
== TestCommitWhileShuttingDown-point-not-durable-start-commit
begin a; write a 1..5 @u; arm commit.started error; start a -> OSError; disarm
arm commit.in_point error@1; round; disarm; state a -> COMMIT_IN_PROGRESS; count @u -> 0; round
state a -> COMMITTED; count @u -> 5
== TestAbortAfterBeginCommit
begin a; write a 1..5 @u; arm commit.validated error; commit a -> OSError; disarm
state a -> COMMIT_IN_PROGRESS
write a 6 @u -> InvalidTxnStateError: not open: COMMIT_IN_PROGRESS; rollback a
state a -> ABORTED; commit a -> InvalidTxnStateError: ABORTED; count @u -> 0; staged -> 0
""")

WRITE_OPS = scripts("""
== TxnMultipleSingleRowWritesCommit
begin a; session s a auto_sync; apply s 1..50; commit a; count -> 50
== TxnWriteAfterCommit
begin a; write a 1; join b a; commit a; write b 2 -> InvalidTxnStateError: not open: COMMITTED
restart; state a -> COMMITTED; keys -> 1
== BeginTxnLockAbort
begin a locking=partition; begin b locking=partition; write a 1
plain 9 -> TransactionLockedError: locked by transaction
write b 2 -> TransactionLockedError: wait-die; state b -> ABORTED
complete b -> TransactionLockedError: older
write b 2 -> InvalidTxnStateError: not open: ABORTED; commit a; keys -> 1
== TestRetryWaitDieAbortsWhenTServerUnavailable
begin a locking=partition; begin b locking=partition; write a 1; write b 2 @u
arm abort.started error; write b 2 -> OSError; disarm; state b -> ABORT_IN_PROGRESS; round
state b -> ABORTED; commit a; keys -> 1; count @u -> 0
== ErrorInProcessingWriteOp
begin a; write a 1..8 -> 8; insert a 1..8; flush a -> RowErrors: 8 rows refused
errors a -> 1 2 3 4 5 6 7 8; commit a; count -> 8
== testRetryCommitAfterSessionFlushError
begin a; insert a 1..5; insert a 1..5 @u; arm stage.claimed error@2; commit a -> OSError; disarm
commit a; count -> 5; count @u -> 5
== testRetryFlushAfterError
begin a; session s a; apply s 1..5; arm stage.written error; push s -> OSError
push s -> OSError; disarm; start a -> InvalidTxnStateError: not flushed; push s -> 5; commit a
count -> 5
== BeginTxnLockRetry-then-commit
begin a locking=partition; begin b locking=partition; write b 1; shortwait; insert a 2
commit a -> TransactionLockedError: younger; commit b; commit a; keys -> 1 2
== PreliminaryTasksTimeout
begin a; arm stage.claimed error; write a 1..5 -> OSError; disarm; staged -> 1; commit a
staged -> 0; count -> 0
== DuplicateTxnParticipantRegistration
begin a; arm stage.claimed error; write a 1..5 -> OSError; write a 1..5 -> OSError; disarm
write a 1..5 -> 5; commit a; count -> 5; staged -> 0
== RollbackWriteOpPendingParticipantNotYetRegistered
begin a; insert a 1..5; rollback a; count -> 0; staged -> 0; flush a -> 0
== RollbackWriteOpPendingParticipantRegistered
begin a; write a 1..5; insert a 6..9; rollback a
insert a 10 -> InvalidTxnStateError: not open: ABORTED
complete a -> InvalidTxnStateError: ABORTED; count -> 0; staged -> 0
== TestBeginAbortTransactionalTestWorkload
begin a; begin b; write a 1..50 @u; write b 51..99 @u; rollback a; rollback b; count @u -> 0
staged -> 0
== TestBeginCommitTransactionalTestWorkload
begin a; begin b; write a 1..50 @u; write b 51..99 @u; commit a; count @u -> 50; commit b
count @u -> 99
""")


@COMMIT
def test_commit(script: Any, text: str) -> None:
    script(text)


@WRITE_OPS
def test_write_ops(script: Any, text: str) -> None:
    script(text)
