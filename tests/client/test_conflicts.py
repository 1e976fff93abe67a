"""Two transactions, one table: who wins, what the other is told, what is seen when."""

from __future__ import annotations

from typing import Any

import pytest

# Scripts as in the peers' tests; see conftest.
CASES = {
    "overlapping keys: the first to commit wins": """
        begin a
        begin b
        write a 1..10
        write b 10..20
        commit a
        commit b -> TransactionConflictError: key 10: another transaction committed it first
        keys -> 1 2 3 4 5 6 7 8 9 10
        state b -> ABORTED
        staged -> 0
        commit b -> InvalidTxnStateError: not open: ABORTED
        rollback b
    """,
    "the later begun may win": """
        begin a
        begin b
        write a 1
        write b 1
        commit b
        commit a -> TransactionConflictError
        keys -> 1
    """,
    "disjoint keys: both commit": """
        begin a
        begin b
        write a 1 3 5 7
        write b 2 4 6 8
        commit a
        commit b
        keys -> 1 2 3 4 5 6 7 8
    """,
    "one key of many tablets: the whole is refused": """
        begin a
        begin b
        write a 1..40 @u
        write b 100..140 @u
        write b 40 @u
        write b 1..5
        commit a
        commit b -> TransactionConflictError: table 'u', key 40
        count -> 0
        count @u -> 40
        staged -> 0
    """,
    "three at once: one wins": """
        begin a
        begin b
        begin c
        write a 1 2
        write b 2 3
        write c 3 4
        commit b
        commit a -> TransactionConflictError: key 2
        commit c -> TransactionConflictError: key 3
        keys -> 2 3
    """,
    "a conflict with a write outside of transactions": """
        begin a
        write a 1
        plain 1
        commit a -> TransactionConflictError: key 1
        keys -> 1
    """,
    "a key that came after the snapshot is not seen, and refused at commit": """
        begin a
        sees a -> none
        plain 1
        sees a -> none
        write a 1 2 -> 2
        commit a -> TransactionConflictError: key 1
        keys -> 1
    """,
    "a key that was there at the snapshot is a row error": """
        plain 1
        begin a
        write a 1 2 -> RowErrors: key 1: a row with this key is in the table
        commit a
        keys -> 1 2
    """,
    "insert_ignore of a key that came after the snapshot conflicts too": """
        begin a
        ignore a 1
        plain 1
        commit a -> TransactionConflictError: key 1
    """,
    "insert_ignore of a key that was there": """
        plain 1
        begin a
        ignore a 1 2
        commit a
        keys -> 1 2
    """,
    "who was rolled back is no conflict": """
        begin a
        begin b
        write a 1
        write b 1
        rollback a
        commit b
        keys -> 1
    """,
    "who read only is no conflict": """
        begin a
        sees a -> none
        plain 1
        commit a
        keys -> 1
    """,
    "the same key in two tables": """
        begin a
        begin b
        write a 1 @t
        write b 1 @u
        commit a
        commit b
        count @u -> 1
    """,
    "reading own writes, and not those of others": """
        plain 1
        begin a
        begin b
        write a 2
        insert a 3
        write b 4
        sees a -> 1 2 3
        sees b -> 1 4
        plain 5
        sees a -> 1 2 3
        commit a
        sees b -> 1 4
        commit b
        keys -> 1 2 3 4 5
    """,
    "TestInsertIgnoreInTransactionMRS": """
        begin a
        write a 1 -> 1
        write a 1 -> RowErrors: this transaction has staged the key already
        ignore a 1
        flush a -> 0
        commit a
        count -> 1
    """,
    "TestInsertIgnoreInMainMRS": """
        plain 1
        begin a
        ignore a 1
        flush a -> 0
        write a 1 -> RowErrors: in the table
        commit a
        count -> 1
    """,
    "TestInsertToTransactionMRS": """
        begin a
        begin b
        write a 1
        write b 2 3
        count -> 0
        commit a
        count -> 1
        commit b
        count -> 3
    """,
    "TestDontReadAbortedInserts": """
        begin a
        write a 1
        rollback a
        count -> 0
        begin b
        write b 1
        arm commit.validated error
        commit b -> OSError
        disarm
        rollback b
        count -> 0
        plain 1
        count -> 1
    """,
    "two workers of one transaction stage one key": """
        begin a
        join b a
        session s b
        apply s 1 2
        insert a 2 3
        flush a -> 2
        push s -> RowErrors: staged the key already
        commit a
        keys -> 1 2 3
    """,
}

LOCKED = {
    "a partition lock wins the race": """
        begin a locking=partition
        begin b
        write b 2
        write a 1
        commit b -> TransactionLockedError: locked by transaction
        state b -> ABORTED
        commit a
        keys -> 1
    """,
    "its snapshot is taken when the lock is granted": """
        begin a locking=partition
        plain 1
        write a 1 2 -> RowErrors: key 1: a row with this key is in the table
        commit a
        keys -> 1 2
    """,
    "the younger dies": """
        begin a locking=partition
        begin b locking=partition
        write a 1
        write b 2 -> TransactionLockedError: wait-die
        commit b -> TransactionLockedError
        commit a
        keys -> 1
    """,
    "the older stays open": """
        begin a locking=partition
        begin b locking=partition
        write b 1
        shortwait
        write a 2 -> TransactionLockedError: is younger, and did not end
        state a -> OPEN
        commit b
        write a 2
        commit a
        keys -> 1 2
    """,
    "a younger optimist dies at the lock": """
        begin a locking=partition
        write a 1
        begin b
        write b 2 -> TransactionLockedError: wait-die
        rollback a
        begin c
        write c 2
        commit c
        keys -> 2
    """,
    "a write outside of transactions dies at once": """
        begin a locking=partition
        write a 1
        plain 2 -> TransactionLockedError: outside of a transaction does not wait
        plain 2 @u
        rollback a
        plain 2
        keys -> 2
    """,
    "other tablets are free": """
        begin a locking=partition
        begin b locking=partition
        write a 1
        write b 1 @u
        commit b
        commit a
        keys @u -> 1
    """,
    "a lock survives a restart": """
        begin a locking=partition
        write a 1
        close a
        restart
        plain 2 -> TransactionLockedError: locked by transaction
        forward 31
        round
        state a -> ABORTED
        plain 2
        keys -> 2
    """,
    "a lock goes with the transaction that expires": """
        begin a locking=partition timeout=5
        write a 1
        forward 6
        round
        plain 2
        keys -> 2
    """,
    "the waiting one gets what it waited for": """
        begin a locking=partition
        begin b locking=partition
        write b 1
        rollback b
        write a 1
        commit a
        keys -> 1
    """,
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_optimistic(script: Any, text: str) -> None:
    script(text)


@pytest.mark.parametrize("text", LOCKED.values(), ids=LOCKED.keys())
def test_partition_locks(script: Any, text: str) -> None:
    script(text)
