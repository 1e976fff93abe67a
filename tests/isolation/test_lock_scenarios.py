"""Partition locks and wait-die where small transactions and bulk loads meet.

As in Kudu's txn_write_ops-itest (BeginTxnLockAbort, BeginTxnLockRetry) and what its design says
of locks, with small transactions beside: they take no lock, and meet those of others when
they commit. Scripts as in test_hermitage.py; nobody has begun. `locking=partition` is the
locker; all of them are at both isolation levels, in one process and in two.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scripts import scripts
from tools.isolation.interleaving import LEVELS

SMALL_AND_LOCKER = scripts("""
== BeginTxnLockAbort: a younger small one dies at its commit
1 begin locking=partition; 1 update 1 11; 1 flush; 2 begin; 2 update 2 22; 2 all -> 1=10 2=22
2 commit -> TransactionLockedError: older; 2 state -> ABORTED; 1 commit; rows -> 1=11 2=20
== BeginTxnLockAbort: the next try of it is no matter of the lock that is gone
1 begin locking=partition; 1 update 1 11; 1 flush; 2 begin; 2 update 2 22
2 commit -> TransactionLockedError; 1 commit; 2 begin; 2 get 1 -> 11; 2 update 2 22; 2 commit
rows -> 1=11 2=22
== BeginTxnLockRetry: an older small one waits for the end of the younger
2 begin; 2 update 2 22; 1 begin locking=partition; 1 update 1 11; 1 flush; 2 commit &; 2 waits
1 commit; 2 answers; rows -> 1=11 2=22
== BeginTxnLockRetry: when the younger is rolled back too
2 begin; 2 update 1 12; 1 begin locking=partition; 1 update 1 11; 1 flush; 2 commit &; 2 waits
1 rollback; 2 answers; rows -> 1=12 2=20
== an older small one that waited for the same key conflicts
2 begin; 2 update 1 12; 1 begin locking=partition; 1 update 1 11; 1 flush; 2 commit &; 2 waits
1 commit; 2 answers -> TransactionConflictError: key 1; rows -> 1=11 2=20
== a small one that committed before the lock is in the locker's snapshot
1 begin locking=partition; 2 begin; 2 update 1 12; 2 commit; 1 update 2 22; 1 flush
1 get 1 -> 12; 1 commit; rows -> 1=12 2=22
== a locker writes what a small one wrote since it began
1 begin locking=partition; 2 begin; 2 update 1 12; 2 delete 2; 2 commit; 1 insert 2 21
1 update 1 11; 1 flush; 1 commit; rows -> 1=11 2=21
== a locker that read before it locked loses no update
1 begin locking=partition; 1 get 1 -> 10; 2 begin; 2 update 1 12; 2 commit; 1 update 1 11
1 commit -> TransactionConflictError: key 1; rows -> 1=12 2=20
== a locker that read before it locked, and nobody wrote
1 begin locking=partition; 1 get 1 -> 10; 1 update 1 11; 1 commit; rows -> 1=11 2=20
== readers meet no lock
1 begin locking=partition; 1 update 1 11; 1 flush; 2 begin; 2 all -> 1=10 2=20; 2 get 1 -> 10
2 commit; rows -> 1=10 2=20; 1 commit; rows -> 1=11 2=20
== a write of a row outside of transactions does not wait
1 begin locking=partition; 1 update 1 11; 1 flush
outside plain update 2 22 -> TransactionLockedError: outside of a transaction does not wait
outside plain delete 2 -> TransactionLockedError: outside of a transaction does not wait
outside load upsert 2..9 22 -> TransactionLockedError: outside of a transaction does not wait
1 commit; outside plain update 2 22; rows -> 1=11 2=22
== a lock that is given back is nobody's
1 begin locking=partition; 1 update 1 11; 1 flush; 1 rollback; 2 begin; 2 update 1 12; 2 commit
rows -> 1=12 2=20
== a small one that is rolled back while another holds the lock
1 begin locking=partition; 1 update 1 11; 1 flush; 2 begin; 2 update 1 12; 2 rollback; 1 commit
rows -> 1=11 2=20
== a small one that outgrows itself meets the lock at once
1 begin locking=partition; 1 update 1 11; 1 flush; 2 begin
2 insert 1000..12999 7 -> TransactionLockedError: wait-die; 2 state -> ABORTED; 1 commit
rows -> 1=11 2=20
== one that outgrew itself goes after a locker of other keys
2 begin; 2 delete 1; 2 insert 1000..12999 7; 2 delete 1000..12999; 1 begin locking=partition
1 update 2 22; 1 flush; 1 commit; 2 commit; rows -> 2=22
""")

LOCKERS = scripts("""
== BeginTxnLockAbort: the younger dies at its first write
1 begin locking=partition; 2 begin locking=partition; 1 update 1 11; 1 flush; 2 update 2 22
2 flush -> TransactionLockedError: wait-die; 2 state -> ABORTED; 1 commit; rows -> 1=11 2=20
== BeginTxnLockRetry: the older waits, and sees what the younger committed
1 begin locking=partition; 2 begin locking=partition; 2 update 1 12; 2 delete 2; 2 insert 3 30
2 flush; 1 upsert 3 31; 1 flush &; 1 waits; 2 commit; 1 answers; 1 all -> 1=12 3=31; 1 commit
rows -> 1=12 3=31
== BeginTxnLockRetry: a row of the younger stands in the older's way
1 begin locking=partition; 2 begin locking=partition; 2 insert 3 30; 2 flush; 1 insert 3 31
1 flush &; 1 waits; 2 commit; 1 answers -> RowErrors: key 3: a row with this key is in the table
1 commit; rows -> 1=10 2=20 3=30
== the older waits for one that is rolled back
1 begin locking=partition; 2 begin locking=partition; 2 delete 1; 2 flush; 1 update 1 11
1 flush &; 1 waits; 2 rollback; 1 answers; 1 commit; rows -> 1=11 2=20
== an optimistic load of other keys that came first
2 begin large; 2 update 2 22; 1 begin locking=partition; 1 update 1 11; 1 flush; 1 commit
2 commit; rows -> 1=11 2=22
== an optimistic load of the same key that came first
2 begin large; 2 update 1 12; 1 begin locking=partition; 1 update 1 11; 1 flush; 1 commit
2 commit -> TransactionConflictError: key 1; rows -> 1=11 2=20
""")


@pytest.mark.parametrize("cast", ["small", "elsewhere"])
@pytest.mark.parametrize("level", LEVELS)
@SMALL_AND_LOCKER
def test_small_and_locker(perform: Callable[..., None], text: str, level: str, cast: str) -> None:
    perform(text, level, cast, begun=False)


@pytest.mark.parametrize("cast", ["small", "elsewhere"])
@pytest.mark.parametrize("level", LEVELS)
@LOCKERS
def test_lockers(perform: Callable[..., None], text: str, level: str, cast: str) -> None:
    perform(text, level, cast, begun=False)
