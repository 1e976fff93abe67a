"""The cases of Hermitage that snapshot isolation allows and serializable does not.

Scripts as in test_hermitage.py. Serializable transactions are in the order of their commits:
one that wrote, and read what another changed since its snapshot, does not commit. One that
only read is where its snapshot is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scripts import scripts
from tools.isolation.interleaving import CASTS, LEVELS

SKEWS = scripts("""
== G2-item, write skew
1 many 1 2 -> 10 20; 2 many 1 2 -> 10 20; 1 update 1 11; 2 update 2 21; 1 commit
2 commit -> ok | TransactionConflictError: 1; rows -> 1=11 2=21 | 1=11 2=20
== G2-item, the other commits first
1 get 1 -> 10; 1 get 2 -> 20; 2 get 1 -> 10; 2 get 2 -> 20; 1 update 1 11; 2 update 2 21
2 commit; 1 commit -> ok | TransactionConflictError: 2; rows -> 1=11 2=21 | 1=10 2=21
== G2-item, of keys that were not there
1 get 3 -> -; 2 get 4 -> -; 1 insert 4 40; 2 insert 3 30; 1 commit
2 commit -> ok | TransactionConflictError
== G2-item, by a delete
1 get 2 -> 20; 2 get 1 -> 10; 1 delete 1; 2 delete 2; 1 commit
2 commit -> ok | TransactionConflictError; rows -> none | 2=20
== G2, anti-dependency cycles
1 where value in 3,30,42 -> none; 2 where value in 3,30,42 -> none; 1 insert 3 30; 2 insert 4 42
1 commit; 2 commit -> ok | TransactionConflictError
rows -> 1=10 2=20 3=30 4=42 | 1=10 2=20 3=30
== G2, of a range of keys
1 where id >= 3 and id < 9 -> none; 2 where id >= 3 and id < 9 -> none; 1 insert 3 30
2 insert 4 42; 2 commit; 1 commit -> ok | TransactionConflictError
== G2, of a row that comes to match
1 where value = 30 -> none; 2 where value = 40 -> none; 1 update 2 40; 2 update 1 30; 1 commit
2 commit -> ok | TransactionConflictError; rows -> 1=30 2=40 | 1=10 2=40
== G2, of a row that goes
1 where value = 20 -> 2=20; 2 where value = 10 -> 1=10; 1 delete 1; 2 delete 2; 1 commit
2 commit -> ok | TransactionConflictError; rows -> none | 2=20
== G2, of a scan that stops early
1 first 1 id >= 1 -> 1=10; 2 first 1 id >= 2 -> 2=20; 1 update 2 21; 2 update 1 11; 1 commit
2 commit -> ok | TransactionConflictError; rows -> 1=11 2=21 | 1=10 2=21
== G2, Fekete's two edges
1 all -> 1=10 2=20; 2 addwhere 5 id = 2 -> 2=20; 2 commit; 3 begin; 3 all -> 1=10 2=25; 3 commit
1 update 1 0; 1 commit -> ok | TransactionConflictError; rows -> 1=0 2=25 | 1=10 2=25
== G2, Fekete's two edges, and the reader is late
1 all -> 1=10 2=20; 2 addwhere 5 id = 2 -> 2=20; 2 commit; 3 begin; 1 update 1 0
1 commit -> ok | TransactionConflictError; 3 all -> 1=10 2=25; 3 commit
== G2, of three
3 begin; 1 get 1 -> 10; 2 get 2 -> 20; 3 get 3 -> -; 1 update 2 21; 2 insert 3 30; 3 update 1 11
1 commit; 2 commit -> ok | TransactionConflictError; 3 commit
== reads of other keys than those written are no conflict
1 where id >= 2 and id < 5 -> 2=20; 2 where id >= 5 and id < 9 -> none; 1 insert 3 30
2 insert 6 60; 1 commit; 2 commit; rows -> 1=10 2=20 3=30 6=60
== who only read may commit, whatever changed
1 all -> 1=10 2=20; 2 update 1 11; 2 commit; 1 get 3 -> -; 1 commit
== reads of what it wrote itself are no conflict
1 insert 3 30; 1 get 3 -> 30; 2 insert 4 40; 2 get 4 -> 40; 1 commit; 2 commit
rows -> 1=10 2=20 3=30 4=40
""")


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("level", LEVELS)
@SKEWS
def test_write_skew(perform: Callable[..., None], text: str, level: str, cast: str) -> None:
    perform(text, level, cast)
