"""Many that write one key: each gets its turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import txnkv
import txnkv.aio
from tests import internals
from txnkv.storage import right_of_way
from txnkv.storage.right_of_way import CONFLICTS
from txnkv.transaction import autocommit

SCHEMA = txnkv.Schema({"id": "int64", "n": "int64"}, primary_key=["id"])


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes on because a lease ran out: a busy machine gives wrong orders else."""
    monkeypatch.setattr(right_of_way, "LEASE", 60_000_000)


@pytest.fixture
def counter(client: txnkv.Client) -> txnkv.Table:
    table = client.create_table("counter", SCHEMA)
    table.insert({"id": 1, "n": 0})
    return table


def add(table: txnkv.Table) -> Callable[[txnkv.Transaction], None]:
    def step(txn: txnkv.Transaction) -> None:
        row = txn.get(table, 1)
        assert row is not None
        txn.upsert(table, {"id": 1, "n": row["n"] + 1})

    return step


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("rival", ["run", "upsert"])
@pytest.mark.parametrize("large", [False, True])
def test_who_lost_goes_before_who_comes(
    client: txnkv.Client, counter: txnkv.Table, rival: str, large: bool
) -> None:
    order: list[str] = []
    ready, rivals = threading.Event(), ThreadPoolExecutor(1)

    def come() -> None:
        ready.set()
        if rival == "run":
            client.run(add(counter))
        else:
            counter.upsert({"id": 1, "n": 1000})
        order.append("rival")

    def lose(txn: txnkv.Transaction) -> None:
        tries.append(txn)
        add(counter)(txn)
        if large:
            txn.serialize()
        if len(tries) <= CONFLICTS:
            with client.transaction() as first:
                add(counter)(first)
        else:
            futures.append(rivals.submit(come))
            assert ready.wait(60)
            order.append("loser")

    tries: list[txnkv.Transaction] = []
    futures: list[object] = []
    with rivals:
        client.run(lose)
    assert order == ["loser", "rival"]
    assert len(tries) == CONFLICTS + 1
    assert not internals.runtime(client).way_until


@pytest.mark.usefixtures("patient")
def test_a_run_inside_of_one_that_goes_first(
    client: txnkv.Client, counter: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(right_of_way, "_LOOK", -1.0)  # who waits fails
    audit = client.create_table("audit", SCHEMA)
    tries = []

    def lose(txn: txnkv.Transaction) -> None:
        tries.append(txn)
        add(counter)(txn)
        if len(tries) <= CONFLICTS:
            with client.transaction() as first:
                add(counter)(first)
        client.run(lambda inner: inner.upsert(audit, {"id": len(tries), "n": 0}))
        audit.upsert({"id": -len(tries), "n": 0})

    client.run(lose)
    assert counter.get(1) == {"id": 1, "n": CONFLICTS + 1}
    assert audit.count() == 2 * (CONFLICTS + 1)


def test_a_run_that_fails_gives_it_up(client: txnkv.Client, counter: txnkv.Table) -> None:
    tries = []

    def lose(txn: txnkv.Transaction) -> None:
        tries.append(txn)
        if len(tries) > CONFLICTS:
            assert internals.runtime(client).way_until
            raise RuntimeError("enough")
        add(counter)(txn)
        with client.transaction() as first:
            add(counter)(first)

    with pytest.raises(RuntimeError, match="enough"):
        client.run(lose)
    assert not internals.runtime(client).way_until


def test_a_row_outside_of_transactions_goes_before_others(
    client: txnkv.Client, counter: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    had: list[bool] = []

    def begin(*args: Any, **options: Any) -> Any:
        begun = autocommit_begin(*args, **options)
        had.append(internals.runtime(client).way_until > 0)
        if len(had) <= CONFLICTS:
            with client.transaction() as first:
                add(counter)(first)
        return begun

    autocommit_begin = autocommit.begin
    monkeypatch.setattr(autocommit, "begin", begin)
    counter.upsert({"id": 1, "n": -1})
    assert had == [False] * CONFLICTS + [True]
    assert counter.get(1) == {"id": 1, "n": -1}
    assert not internals.runtime(client).way_until


def test_rows_outside_of_transactions(client: txnkv.Client, counter: txnkv.Table) -> None:
    """Some lost twenty times in a row to others, and were refused."""

    def write(n: int) -> None:
        for _ in range(100):
            counter.upsert({"id": 1, "n": n})

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(write, n) for n in range(8)]:
            done.result()


@pytest.mark.usefixtures("patient")
def test_more_coroutines_than_threads(tmp_path: Path) -> None:
    """Those that wait leave a thread to the one that has the right of way."""

    async def main() -> None:
        async with txnkv.aio.connect(tmp_path / "aio") as client:
            table = await client.create_table("counter", SCHEMA)
            await table.insert({"id": 1, "n": 0})

            async def step(txn: txnkv.aio.AsyncTransaction) -> None:
                row = await txn.get(table, 1)
                assert row is not None
                await txn.upsert(table, {"id": 1, "n": row["n"] + 1})

            await asyncio.gather(*(client.run(step, deadline=None) for _ in range(60)))
            assert await table.get(1) == {"id": 1, "n": 60}

            async def write(n: int) -> None:
                await table.upsert({"id": 2, "n": n})

            both = [each for n in range(60) for each in (client.run(step), write(n))]
            await asyncio.gather(*both)
            assert await table.get(1) == {"id": 1, "n": 120}

    asyncio.run(asyncio.wait_for(main(), 300))


def test_tasks_that_take_turns_lose_to_none(client: txnkv.Client, counter: txnkv.Table) -> None:
    tries = []

    async def step(txn: txnkv.aio.AsyncTransaction) -> None:
        tries.append(txn)
        row = await txn.get("counter", 1)
        assert row is not None
        await txn.upsert("counter", {"id": 1, "n": row["n"] + 1})

    async def work() -> None:
        turn = asyncio.Lock()
        async with txnkv.aio.connect(client.path) as store:

            async def add_many() -> None:
                for _ in range(20):
                    async with turn:
                        await store.run(step)

            await asyncio.gather(*(add_many() for _ in range(6)))

    asyncio.run(work())
    assert counter.get(1) == {"id": 1, "n": 120}
    assert len(tries) == 120
