"""The cases of Hermitage (Kleppmann 2014) in which both isolation levels promise the same, or
nearly: dirty, lost and skewed reads and writes. See test_write_skew.py for the others.

Nobody waits here: of two that write a key at once, the first to commit wins. Two answers to a
line are those of snapshot isolation and of serializable. 1 and 2 have begun, and the table has
the rows 1=10 and 2=20; see `tools.isolation.interleaving` for the scripts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scripts import scripts
from tools.isolation.interleaving import CASTS, LEVELS

WRITES = scripts("""
== G0, write cycles
1 update 1 11; 2 update 1 12; 1 update 2 21; 1 commit; rows -> 1=11 2=21; 2 update 2 22
2 commit -> TransactionConflictError: key 1; rows -> 1=11 2=21
== G0, in the other order
1 update 1 11; 2 update 2 22; 1 update 2 21; 2 update 1 12; 2 commit
1 commit -> TransactionConflictError; rows -> 1=12 2=22
== G0, inserts of one key
1 insert 3 31; 2 insert 3 32; 2 commit; 1 commit -> TransactionConflictError: key 3
rows -> 1=10 2=20 3=32
== G0, deletes of one key
1 delete 1; 2 delete 1; 1 commit; 2 commit -> TransactionConflictError: key 1; rows -> 2=20
== G0, a delete and an upsert
1 delete 1; 2 upsert 1 12; 1 commit; 2 commit -> TransactionConflictError: key 1; rows -> 2=20
== P4, lost update
1 get 1 -> 10; 2 get 1 -> 10; 1 update 1 11; 2 update 1 11; 1 commit
2 commit -> TransactionConflictError: key 1; rows -> 1=11 2=20
== P4, and the second has another value
1 get 1 -> 10; 2 get 1 -> 10; 2 update 1 15; 2 commit; 1 get 1 -> 10; 1 update 1 11
1 commit -> TransactionConflictError: key 1; rows -> 1=15 2=20
== P4, of a key that was not there
1 get 3 -> -; 2 get 3 -> -; 1 upsert 3 31; 2 upsert 3 32; 1 commit
2 commit -> TransactionConflictError: key 3; rows -> 1=10 2=20 3=31
== P4, of a key that was deleted meanwhile
1 get 1 -> 10; 2 delete 1; 2 commit; 1 update 1 11; 1 commit -> TransactionConflictError: key 1
rows -> 2=20
== who was rolled back is no conflict
1 update 1 11; 2 update 1 12; 1 rollback; 2 commit; rows -> 1=12 2=20
== other keys are no conflict
1 get 1 -> 10; 2 get 2 -> 20; 1 update 1 11; 2 update 2 22; 1 commit; 2 commit
rows -> 1=11 2=22
""")

READS = scripts("""
== G1a, aborted reads
1 update 1 101; 2 all -> 1=10 2=20; 1 rollback; 2 all -> 1=10 2=20; rows -> 1=10 2=20; 2 commit
== G1b, intermediate reads
1 update 1 101; 2 all -> 1=10 2=20; 1 update 1 11; 1 all -> 1=11 2=20; 1 commit
2 all -> 1=10 2=20; 2 commit; rows -> 1=11 2=20
== G1c, circular information flow
1 update 1 11; 2 update 2 22; 1 get 2 -> 20; 2 get 1 -> 10; 1 commit
2 commit -> ok | TransactionConflictError
== OTV, observed transaction vanishes
3 begin; 1 update 1 11; 1 update 2 19; 2 update 1 12; 1 commit; 3 get 1 -> 10; 2 update 2 18
3 get 2 -> 20; 2 commit -> TransactionConflictError; 3 get 2 -> 20; 3 get 1 -> 10; 3 commit
rows -> 1=11 2=19
== OTV, begun between both
1 update 1 11; 1 update 2 19; 1 commit; 3 begin; 3 get 1 -> 11; 2 update 1 12
2 commit -> TransactionConflictError: key 1; 3 get 2 -> 19; 3 commit
== PMP, predicate-many-preceders
1 where value = 30 -> none; 2 insert 3 30; 2 commit; 1 where value in 3,30,33 -> none
1 all -> 1=10 2=20; 1 commit; rows -> 1=10 2=20 3=30
== PMP, for write predicates
1 addwhere 10 value >= 0 -> 1=10 2=20; 2 deletewhere value = 20 -> 2=20; 1 commit
2 commit -> TransactionConflictError: key 2 | TransactionConflictError; rows -> 1=20 2=30
== PMP, for write predicates, in the other order
1 addwhere 10 value >= 0 -> 1=10 2=20; 2 deletewhere value = 20 -> 2=20; 2 commit
1 commit -> TransactionConflictError; rows -> 1=10
== PMP, for a write predicate that another's row comes to match
1 addwhere 10 value >= 0 -> 1=10 2=20; 1 commit; 2 deletewhere value = 30 -> none; 2 commit
rows -> 1=20 2=30
== G-single, read skew
1 get 1 -> 10; 2 get 1 -> 10; 2 get 2 -> 20; 2 update 1 12; 2 update 2 18; 2 commit
1 get 2 -> 20; 1 many 1 2 3 -> 10 20 -; 1 commit; rows -> 1=12 2=18
== G-single, with predicate dependencies
1 where value in 5,10,15,20 -> 1=10 2=20; 2 addwhere 2 value = 10 -> 1=10; 2 commit
1 where value in 3,6,9,12 -> none; 1 commit; rows -> 1=12 2=20
== G-single, with a write predicate
1 get 1 -> 10; 2 all -> 1=10 2=20; 2 update 1 12; 2 update 2 18; 2 commit
1 deletewhere value = 20 -> 2=20; 1 commit -> TransactionConflictError; rows -> 1=12 2=18
== G-single, with an interleaved write predicate
1 get 1 -> 10; 2 all -> 1=10 2=20; 2 update 1 12; 1 deletewhere value = 20 -> 2=20
2 update 2 18; 1 rollback; 2 commit; rows -> 1=12 2=18
== G-single, with an interleaved write predicate that commits
1 get 1 -> 10; 2 all -> 1=10 2=20; 2 update 1 12; 1 deletewhere value = 20 -> 2=20
2 update 2 18; 1 commit; 2 commit -> TransactionConflictError; rows -> 1=10
== G-single, and the reader writes what was not changed
1 get 1 -> 10; 2 update 1 12; 2 update 2 18; 2 commit; 1 get 2 -> 20; 1 insert 3 30
1 commit -> ok | TransactionConflictError
== own writes are read, others' are not
1 update 1 11; 1 insert 3 30; 1 delete 2; 2 update 2 22; 1 all -> 1=11 3=30; 1 get 2 -> -
2 all -> 1=10 2=22; 1 where value >= 11 -> 1=11 3=30; 2 many 3 2 1 -> - 22 10; 1 rollback
2 commit; rows -> 1=10 2=22
""")


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("level", LEVELS)
@WRITES
def test_writes(perform: Callable[..., None], text: str, level: str, cast: str) -> None:
    perform(text, level, cast)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("level", LEVELS)
@READS
def test_reads(perform: Callable[..., None], text: str, level: str, cast: str) -> None:
    perform(text, level, cast)
