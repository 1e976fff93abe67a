"""Kudu's client tests of transactions (client-test.cc, TestKuduTransaction.java) as scripts.

The id of a case is the peer's name for it.
"""

from __future__ import annotations

from typing import Any

from tests.scripts import scripts

CLIENT_TEST = scripts("""
== TxnBasicOperations
begin a; rollback a; rollback a; begin b; insert b 1..5; rollback b; rollback b; count -> 0
start b -> InvalidTxnStateError: not open: ABORTED; begin c; insert c 1..123; count -> 0
commit c; count -> 123; errors c -> none; rollback c -> InvalidTxnStateError: COMMITTED
commit c -> as c
== TxnCommit
begin a; complete a -> InvalidTxnStateError: still open; rollback a
complete a -> InvalidTxnStateError: ABORTED; begin b; insert b 1; flush b
complete b -> InvalidTxnStateError: still open; rollback b
complete b -> InvalidTxnStateError: ABORTED; begin c; insert c 1; join d c; commit c; forget c
complete d -> True; begin e; insert e 2; flush e; start e; await e; complete e -> True
keys -> 1 2
== FlushTxnSessionsOnCommit-manual
begin a; session s a manual; apply s 1..3; count -> 0; commit a; keys -> 1 2 3
== FlushTxnSessionsOnCommit-auto_background
begin a; session s a auto_background; apply s 1..3; commit a; keys -> 1 2 3
== FlushTxnSessionsOnCommit-auto_sync
large; begin a; session s a auto_sync; apply s 1..3; staged -> 3; commit a; keys -> 1 2 3
== FlushTxnSessionsOnCommit-ten-sessions
begin a; session s0 a; apply s0 0; session s1 a; apply s1 1; session s2 a; apply s2 2
session s3 a; apply s3 3; session s4 a; apply s4 4; session s5 a; apply s5 5; session s6 a
apply s6 6; session s7 a; apply s7 7; session s8 a; apply s8 8; session s9 a; apply s9 9
commit a; keys -> 0 1 2 3 4 5 6 7 8 9
== FlushTxnSessionsOnCommit-out-of-scope
begin a; session s a; apply s 1 2; forget s; commit a; keys -> 1 2
== StartCommitWithFlushedTxnSessions
begin a; session s a; session r a; apply s 1; push s -> 1; start a; await a; keys -> 1
== TxnCreateSessionAfterCommit
begin a; insert a 1; commit a; session s a -> InvalidTxnStateError: commit has already started
begin b; commit b; session s b -> InvalidTxnStateError: commit has already started
== TxnCreateSessionAfterStartCommit
begin a; insert a 1; flush a; start a
session s a -> InvalidTxnStateError: commit has already started; begin b; start b
session s b -> InvalidTxnStateError: commit has already started; await a
== SubmitWriteOpAfterTxnCommit
begin a; session s a; apply s 1; commit a
apply s 2 -> InvalidTxnStateError: not open: COMMITTED; keys -> 1
== SubmitWriteOpAfterTxnCommit-elsewhere
begin a; insert a 1; join b a; session s b; apply s 2; commit a
push s -> InvalidTxnStateError: not open: COMMITTED; push s -> 0; keys -> 1; staged -> 0
== TxnToken-states
begin a; insert a 1; flush a; join b a; insert b 2; commit b
rollback a -> InvalidTxnStateError: COMMITTED; commit a -> as b; keys -> 1 2
== TxnToken-rows-of-another-handle
begin a; join b a; insert a 1; commit b
commit a -> InvalidTxnStateError: cannot .*: transaction .* is not open: COMMITTED; count -> 0
""")

JAVA_CLIENT = scripts("""
== testRollbackAnEmptyTransaction
begin a; rollback a; rollback a; open a -> ABORTED
commit a -> InvalidTxnStateError: not open: ABORTED
== testRollbackAnEmptyTransaction-deserialized
begin a; join b a; rollback a; rollback b; rollback b; state a -> ABORTED
commit b -> InvalidTxnStateError: not open: ABORTED
== testCommitAnEmptyTransaction
begin a; commit a; open a -> COMMITTED; commit a -> as a; start a
rollback a -> InvalidTxnStateError: COMMITTED; count -> 0
== testCommitAnEmptyTransaction-deserialized
begin a; join b a; start a; complete a -> True; commit b; commit b -> as b; complete b -> True
rollback b -> InvalidTxnStateError: COMMITTED
== testTxnSessionClose
large; begin a; session s a; finish s; finish s; session r a; apply r 1; finish r; staged -> 1
apply r 2 -> ClosedError: session was closed; rollback a; errors r -> none; count -> 0
staged -> 0
== testIsCommitComplete
begin a; insert a 1; flush a; complete a -> InvalidTxnStateError: still open; start a; await a
== testIsCommitCompleteSpecialCases
begin a; join b a; rollback a; complete a -> InvalidTxnStateError: ABORTED
complete b -> InvalidTxnStateError: ABORTED
== testKeepaliveBasic-closed
begin a; insert a 1; flush a; join b a; close a; forward 91; round
commit b -> TransactionTimedOutError: not open: ABORT; rollback b; state a -> ABORTED
count -> 0
== testFlushSessionsOnCommit
begin a; session s a; session r a auto_background; apply s 1; apply r 2 @u; commit a; keys -> 1
keys @u -> 2
== testStartCommitWithNonFlushedSessions
begin a; session s a; apply s 1; start a -> InvalidTxnStateError: not flushed
complete a -> InvalidTxnStateError: still open; push s -> 1; start a; await a; keys -> 1
== testRetryCommitAfterSessionFlushError
plain 1; begin a; insert a 1 2; commit a -> RowErrors: 1 row refused; state a -> OPEN
session s a -> InvalidTxnStateError: commit has already started; commit a; keys -> 1 2
== testNewSessionAfterCommit
plain 1; begin a; insert a 1; commit a -> RowErrors: key 1
session s a -> InvalidTxnStateError: commit has already started; rollback a
session s a -> InvalidTxnStateError: commit has already started; count -> 1
== testSubmitWriteOpAfterCommit
begin a; insert a 1; commit a; insert a 2 -> InvalidTxnStateError: not open: COMMITTED
write a 2 -> InvalidTxnStateError: not open: COMMITTED; keys -> 1
== writeAfterRollback
begin a; insert a 1; rollback a; insert a 2 -> InvalidTxnStateError: not open: ABORTED
write a 2 -> InvalidTxnStateError: not open: ABORTED; staged -> 0
== rollbackElsewhere
begin a; insert a 1; flush a; join b a; rollback b
write a 2 -> InvalidTxnStateError: not open: ABORTED
commit a -> InvalidTxnStateError: not open: ABORTED; rollback a; staged -> 0; count -> 0
""")


@CLIENT_TEST
def test_client_test(script: Any, text: str) -> None:
    script(text)


@JAVA_CLIENT
def test_java_client(script: Any, text: str) -> None:
    script(text)
