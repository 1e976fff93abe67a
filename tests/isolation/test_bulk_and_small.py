"""Bulk transactions against small ones, and those that begin small and outgrow themselves.

Scripts as in test_hermitage.py; `1000..12999` are 12,000 rows in one batch, which no small
transaction holds.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pyarrow as pa
import pytest

import txnkv
from tests.scripts import scripts
from tools.isolation.interleaving import LEVELS, SCHEMA

OUTGROWN = scripts("""
== what was written while it was small is validated
1 update 1 11; 1 insert 1000..12999 7; 2 update 1 12; 2 commit
1 commit -> TransactionConflictError: key 1; rows -> 1=12 2=20
== what was deleted while it was small is validated
1 delete 1; 1 insert 1000..12999 7; 2 update 1 12; 2 commit
1 commit -> TransactionConflictError: key 1; rows -> 1=12 2=20
== what was written while it was small wins
1 update 1 11; 1 delete 2; 2 upsert 2 22; 1 insert 1000..12999 7; 1 delete 1000..12999; 1 commit
2 commit -> TransactionConflictError: key 2; rows -> 1=11
== it reads all that it wrote, small and large
1 update 1 11; 1 delete 2; 1 insert 1000..12999 7; 1 update 12999 8; 1 delete 1001..12998
1 all -> 1=11 1000=7 12999=8; 2 all -> 1=10 2=20; 1 get 2 -> -; 1 rollback; 2 commit
rows -> 1=10 2=20
== what was read while it was small is validated
1 get 1 -> 10; 1 where value = 30 -> none; 1 update 2 21; 1 insert 1000..12999 7
1 delete 1000..12999; 2 update 1 12; 2 commit; 1 commit -> ok | TransactionConflictError: key 1
rows -> 1=12 2=21 | 1=12 2=20
== a key inside of a bulk, and the bulk is first
2 insert 5000 1; 1 insert 1000..12999 7; 1 commit
2 commit -> TransactionConflictError: key 5000
== a key inside of a bulk, and the bulk is second
2 insert 5000 1; 1 insert 1000..12999 7; 2 commit
1 commit -> TransactionConflictError: key 5000; rows -> 1=10 2=20 5000=1
== a key that is updated in a bulk
1 upsert 1..12999 7; 2 addwhere 1 id = 2 -> 2=20; 1 commit
2 commit -> TransactionConflictError: key 2
== a range that a bulk writes to
2 where id >= 5000 and id < 6000 -> none; 2 update 2 22; 1 insert 1000..12999 7; 1 commit
2 commit -> ok | TransactionConflictError
== a range that a bulk does not write to
2 where id >= 500 and id < 600 -> none; 2 update 2 22; 1 insert 1000..12999 7; 1 commit
2 commit
== a key of a range that a bulk has read
1 where id >= 1 and id < 500 -> 1=10 2=20; 1 insert 1000..12999 7; 2 insert 3 30; 2 commit
1 commit -> ok | TransactionConflictError: key 3
== two bulks that overlap
1 insert 1000..12999 7; 2 insert 12000..23999 8; 2 commit; 1 commit -> TransactionConflictError
== two bulks that do not overlap
1 insert 1000..12999 7; 2 insert 13000..24999 8; 2 delete 13000..24999; 1 delete 1000..12999
2 commit; 1 commit; rows -> 1=10 2=20
""")


@pytest.mark.parametrize("cast", ["small", "on disk", "elsewhere"])
@pytest.mark.parametrize("level", LEVELS)
@OUTGROWN
def test_outgrown(perform: Callable[..., None], text: str, level: str, cast: str) -> None:
    perform(text, level, cast)


# -- many commits at one moment --------------------------------------------------------------


@pytest.fixture
def counters(client: txnkv.Client) -> txnkv.Table:
    """Rows 0..39, each 0."""
    table = client.create_table("counters", SCHEMA, txnkv.hash_partition("id", 2))
    client.new_session().write(table, pa.table([range(40), [0] * 40], schema=SCHEMA.arrow))
    return table


def outcomes(futures: list[Future[txnkv.Timestamp]]) -> list[bool]:
    """Return for each commit whether it came through; the others lost a conflict."""
    found = []
    for future in futures:
        error = future.exception(60)
        assert error is None or isinstance(error, txnkv.TransactionConflictError)
        found.append(error is None)
    return found


def add(txn: txnkv.Transaction, table: txnkv.Table, read: int, written: int) -> None:
    row = txn.get(table, read)
    assert row is not None
    txn.update(table, {"id": written, "value": row["value"] + 1})


@pytest.mark.parametrize("level", LEVELS)
def test_one_of_a_group_wins_a_key(client: txnkv.Client, counters: txnkv.Table, level: str) -> None:
    """They may share one SQLite transaction: each is validated against those before it."""
    txns = [client.new_transaction(isolation=level) for _ in range(30)]
    for txn in txns:
        add(txn, counters, 7, 7)
    assert sum(outcomes([txn.commit_async() for txn in txns])) == 1
    assert counters.get(7) == {"id": 7, "value": 1}


@pytest.mark.parametrize("level", LEVELS)
def test_write_skew_inside_a_group(client: txnkv.Client, counters: txnkv.Table, level: str) -> None:
    """Pairs that each read what the other writes."""
    txns = [client.new_transaction(isolation=level) for _ in range(30)]
    for number, txn in enumerate(txns):
        add(txn, counters, number, number ^ 1)
    committed = outcomes([txn.commit_async() for txn in txns])
    pairs = [sum(committed[at : at + 2]) for at in range(0, 30, 2)]
    assert pairs == [2 if level == "snapshot" else 1] * 15
    values = counters.scan(where=[("id", "<", 30)], ordered=True).to_arrow()["value"].to_pylist()
    assert values == [int(committed[number ^ 1]) for number in range(30)]


def test_a_group_without_conflicts_commits_in_order(
    client: txnkv.Client, counters: txnkv.Table
) -> None:
    """Each has a timestamp of its own, and a snapshot at it has that one and those before."""
    txns = [client.new_transaction(isolation="serializable") for _ in range(30)]
    for number, txn in enumerate(txns):
        add(txn, counters, number, number)
    stamps = [future.result(60) for future in [txn.commit_async() for txn in txns]]
    assert len(set(stamps)) == 30
    for rank, stamp in enumerate(sorted(stamps), 1):
        with client.snapshot(at=stamp) as snapshot:
            values = snapshot.scan(counters, ["value"]).to_arrow()["value"].to_pylist()
        assert sum(values) == rank
