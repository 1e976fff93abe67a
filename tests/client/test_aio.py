"""The client for asyncio: it does what the blocking one does, and what is cancelled is whole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.aio import calls
from txnkv.storage.faults import arm, disarm

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])
Work = Callable[[txnkv.aio.AsyncClient, txnkv.aio.AsyncTable], Coroutine[Any, Any, Any]]


def run(path: Path, work: Work) -> Any:
    """Runs `work(client, table)` in an event loop, and checks the store after."""

    async def main() -> Any:
        async with txnkv.aio.connect(path) as client:
            table = await client.create_table("t", SCHEMA)
            found = await work(client, table)
            report = await client.check()
            assert report.problems == []
            return found

    return asyncio.run(main())


def test_who_joins_has_written_at_the_end_of_its_block_and_at_its_close(store_path: Path) -> None:
    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        owner = await client.new_transaction()
        token = await owner.serialize()
        async with await txnkv.aio.AsyncTransaction.deserialize(client, token) as joined:
            await joined.insert(table, (1, "block"))
        joined = await client.join(token)
        await joined.insert(table, (2, "close"))
        await joined.close()
        await owner.commit()
        async with table, table.scan(columns=["id"]) as scan:
            assert sorted([row["id"] async for row in scan]) == [1, 2]

    run(store_path, work)


@pytest.mark.parametrize("fails", [False, True])
def test_a_client_that_is_left_writes_what_waits_in_those_it_joined(
    store_path: Path, fails: bool
) -> None:
    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        owner = await client.new_transaction()
        token = await owner.serialize()
        with suppress(KeyError):
            async with txnkv.aio.connect(store_path) as worker:
                joined = await worker.join(token)
                await joined.insert("t", (1, None))
                if fails:
                    raise KeyError
        await owner.commit()
        assert await table.count() == (not fails)

    run(store_path, work)


def test_a_restore_waits_for_a_call_of_its_transaction_that_was_cancelled(store_path: Path) -> None:
    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        before = (await client.snapshot()).timestamp
        async with client.transaction() as txn:
            goes_on = threading.Event()
            waiting = asyncio.ensure_future(txn._turn(goes_on.wait, 5))
            await asyncio.sleep(0.05)
            waiting.cancel()
            restoring = asyncio.ensure_future(table.restore(before, txn))
            await asyncio.wait((restoring,), timeout=0.1)
            assert not restoring.done()
            goes_on.set()
            await restoring

    run(store_path, work)


def test_it_does_what_the_blocking_client_does(store_path: Path) -> None:
    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        async with client.transaction() as txn:
            await txn.insert(table, (1, "a"))
            await txn.upsert("t", {"id": 2, "v": "b"})
            assert await txn.get(table, 1) == {"id": 1, "v": "a"}
            assert (await txn.flush()).inserted == 0
            assert [row["id"] async for row in await txn.scan(table, ordered=True)] == [1, 2]
        assert await txn.state() is txnkv.TxnState.COMMITTED
        assert await client.transaction_state(txn.id) is txnkv.TxnState.COMMITTED
        async with await client.new_session() as session:
            await session.update(table, {"id": 1, "v": "c"})
            await session.delete(table, 2)
            await session.insert_ignore(table, (1, "d"))
            written = await session.write(table, pa.table({"id": [5, 6], "v": ["e", "f"]}))
            assert written.inserted == 2
        before = txn.snapshot
        assert (await table.get_many([1, 2, 5])).to_pylist() == [
            {"id": 1, "v": "c"},
            {"id": None, "v": None},
            {"id": 5, "v": "e"},
        ]
        async with await client.snapshot(before) as snapshot:
            assert await snapshot.get(table, 1) is None
            assert (await (await snapshot.scan("t")).to_arrow()).num_rows == 0
            changed = await table.diff(before, columns=["id"])
            assert sorted(changed["id"].to_pylist()) == [1, 5, 6]
            assert sum(token.rows for token in await table.diff_tokens(before)) >= 3
        async with client.transaction() as txn:
            await txn.mark_applied("daily", 7, "query")
        found = await client.applied("daily")
        assert found is not None
        assert (found.version, found.source, found.txn_id) == (7, "query", txn.id)
        assert await client.applications() == {"daily": found}
        assert await client.forget_applied("daily")
        assert await client.applied("daily") is None
        assert await table.count() == 3
        assert await client.tables() == ["t"]
        assert (await table.next_id()) != (await table.next_id())
        batches = [batch async for batch in table.scan().to_batches()]
        assert sum(batch.num_rows for batch in batches) == 3

    run(store_path, work)


def test_a_handle_is_awaited_or_entered(store_path: Path) -> None:
    """`async with client.snapshot()` was a TypeError, unlike that of `client.transaction()`."""

    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        topic = await client.create_topic("events")
        async with client.snapshot() as before, client.new_session() as session:
            await session.insert(table, (1, "a"))
            await session.flush()
            assert await before.get(table, 1) is None
        with pytest.raises(txnkv.ClosedError):
            await before.get(table, 1)
        async with topic.subscribe("s") as subscription, topic.producer() as producer:
            await producer.send("x")
            assert (await subscription.receive()).value == b"x"
        async with client.new_transaction() as txn, txn.new_session() as inner:
            await inner.upsert(table, (1, "b"))
        assert await txn.state() is txnkv.TxnState.COMMITTED
        snapshot = await asyncio.create_task(client.snapshot())
        assert await snapshot.get(table, 1) == {"id": 1, "v": "b"}
        with pytest.raises(ValueError, match="future"):
            async with client.snapshot(txnkv.Timestamp(1 << 60)):
                pass

    run(store_path, work)


def test_sessions_have_limits(store_path: Path) -> None:
    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        txn = await client.new_transaction()
        for session in (
            await client.new_session(buffer_bytes=1),
            await txn.new_session("manual", buffer_bytes=1),
        ):
            await session.insert(table, (1, "a"))
            with pytest.raises(txnkv.InvalidTxnStateError, match="flush the session"):
                await session.insert(table, (2, "b"))
        await txn.rollback()

    run(store_path, work)


def test_tasks_commit_side_by_side(store_path: Path) -> None:
    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> int:
        async def one(id: int) -> txnkv.Timestamp:
            txn = await client.new_transaction()
            await txn.insert(table, (id, None))
            return await txn.commit()

        stamps = await asyncio.gather(*(one(id) for id in range(300)))
        assert len(set(stamps)) == 300
        return await table.count()

    assert run(store_path, work) == 300


def test_a_block_rolls_back_on_an_exception(store_path: Path) -> None:
    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        with pytest.raises(LookupError):  # noqa: PT012 - the block is what is tested
            async with client.transaction() as txn:
                await txn.insert(table, (1, None))
                raise LookupError
        assert await txn.state() is txnkv.TxnState.ABORTED
        with pytest.raises(txnkv.RowErrors):
            async with client.transaction() as txn:
                await txn.delete(table, 1)
        assert await table.count() == 0

    run(store_path, work)


def test_run_tries_again(store_path: Path) -> None:
    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        async with client.transaction() as txn:
            await txn.insert(table, (1, "0"))

        async def add(txn: txnkv.aio.AsyncTransaction) -> None:
            found = await txn.get(table, 1)
            assert found is not None
            await txn.update(table, (1, str(int(found["v"]) + 1)))

        await asyncio.gather(*(client.run(add, attempts=100) for _ in range(20)))
        assert await table.get(1) == {"id": 1, "v": "20"}

    run(store_path, work)


class Later(Exception):
    """A program's own."""

    retriable = True


def test_run_tries_again_what_a_program_calls_retriable(store_path: Path) -> None:
    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        tried: list[int] = []

        async def third(txn: txnkv.aio.AsyncTransaction) -> None:
            tried.append(1)
            await txn.insert(table, (len(tried), None))
            if len(tried) < 3:
                raise Later("again")

        await client.run(third)
        assert [row["id"] async for row in table.scan()] == [3]

    run(store_path, work)


def test_run_refuses_what_has_not_run(store_path: Path) -> None:
    """A forgotten `await` committed nothing, in silence."""

    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        async def forgetful(txn: txnkv.aio.AsyncTransaction) -> Any:
            return txn.insert(table, (1, None))

        async def both(txn: txnkv.aio.AsyncTransaction) -> Any:
            await txn.insert(table, (1, None))
            yield

        for fn, words in {
            forgetful: "insert gave a coroutine.*await it in the function",
            both: "gave a async_generator. Nothing",
            lambda txn: None: "gave a NoneType. Nothing was committed",
        }.items():
            with pytest.raises(TypeError, match=words):
                await client.run(fn)
        assert await table.count() == 0

    run(store_path, work)


def test_a_cancelled_block_has_rolled_back(store_path: Path) -> None:
    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        began = asyncio.Event()
        txns = []

        async def stuck() -> None:
            async with client.transaction() as txn:
                txns.append(txn)
                await txn.insert(table, (1, None))
                await txn.flush()
                began.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(stuck())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await txns[0].state() is txnkv.TxnState.ABORTED
        assert await table.count() == 0

    run(store_path, work)


@pytest.mark.usefixtures("size")
def test_a_cancelled_commit_is_whole_and_can_be_asked_for(store_path: Path) -> None:
    """The commit is on its way to the disk when its task is cancelled: it goes on."""
    at_the_disk, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        at_the_disk.set()
        assert go_on.wait(30)

    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        txn = await client.new_transaction()
        await txn.insert(table, (1, None))
        await txn.insert(table, (2, None))
        await txn.flush()
        arm("status.before_commit", hold)
        task = asyncio.create_task(txn.commit())
        assert await asyncio.to_thread(at_the_disk.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        asked = asyncio.create_task(txn.state())
        await asyncio.sleep(0.05)
        assert not asked.done()
        disarm()
        go_on.set()
        assert await asked is await txn.state() is txnkv.TxnState.COMMITTED
        assert await client.transaction_state(txn.id) is txnkv.TxnState.COMMITTED
        assert await table.count() == 2

    run(store_path, work)


def test_a_block_cancelled_while_it_commits_is_left_when_that_is_over(store_path: Path) -> None:
    at_the_disk, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        at_the_disk.set()
        assert go_on.wait(30)

    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        async def block() -> None:
            async with client.transaction() as txn:
                await txn.insert(table, (1, None))
                arm("status.before_commit", hold)

        task = asyncio.create_task(block())
        assert await asyncio.to_thread(at_the_disk.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        disarm()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await table.count() == 1

    run(store_path, work)


@pytest.mark.parametrize(
    ("locking", "flushes"), [("partition", True), ("partition", False), ("optimistic", False)]
)
def test_who_has_a_lock_ends_beside_many_that_wait_for_it(
    store_path: Path, locking: Any, flushes: bool
) -> None:
    """They had all threads, so that it could not give the lock up."""

    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        many = 80
        older = [
            await client.new_transaction(locking=locking, lock_timeout=3600, timeout=None)
            for _ in range(many)
        ]
        young = await client.new_transaction(locking="partition", timeout=None)
        await young.upsert(table, (0, "young"))
        await young.flush()

        async def wait(number: int) -> bool:
            txn = older[number]
            await txn.upsert(table, (number + 1, "older"))
            try:
                if flushes:
                    await txn.flush()
                await txn.commit()
            except txnkv.TransactionLockedError:  # another one, older yet, was first
                return False
            return True

        waiting = [asyncio.ensure_future(wait(number)) for number in range(many)]
        await asyncio.sleep(0.1)
        await young.commit()
        assert sum(await asyncio.gather(*waiting)) == await table.count() - 1 > 0

    run(store_path, work)


def test_the_event_loop_goes_on_meanwhile(store_path: Path) -> None:
    go_on = threading.Event()

    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        txn = await client.new_transaction()
        await txn.insert(table, (1, None))
        arm("status.before_commit", lambda: go_on.wait(30))
        task = asyncio.create_task(txn.commit())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        disarm()
        go_on.set()
        assert await task > txn.snapshot

    run(store_path, work)


def test_a_closed_client_says_so(store_path: Path) -> None:
    async def main() -> None:
        client = await txnkv.aio.connect(store_path)
        await client.close()
        await client.close()
        with pytest.raises(txnkv.ClosedError, match="connect again"):
            await client.tables()

    asyncio.run(main())


def test_what_cannot_be_opened(store_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(txnkv.StoreNotFoundError):
            await txnkv.aio.connect(store_path, create=False)

    asyncio.run(main())


def test_a_part_of_a_scan_is_opened_by_a_blocking_client(
    store_path: Path, client: txnkv.Client
) -> None:
    async def work(aio: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        start = await aio.snapshot()
        await table.insert((1, "v"))
        (token,) = await table.scan().tokens()
        (change,) = await table.diff_tokens(start.timestamp)
        wrong: Any = aio
        for each in (token, change):
            with pytest.raises(TypeError, match=r"a client is .* not AsyncClient"):
                each.open(wrong)
        part = await asyncio.to_thread(token.open, client)
        assert await asyncio.to_thread(list, part) == [{"id": 1, "v": "v"}]
        changes = await asyncio.to_thread(change.open, client)
        assert changes.read_all()["_op"].to_pylist() == ["insert"]

    run(store_path, work)


def test_a_store_is_looked_after(store_path: Path, table: txnkv.Table) -> None:
    async def work() -> None:
        async with txnkv.aio.connect(store_path) as client:
            assert client.path == str(store_path)
            told: list[tuple[int, int]] = []
            assert (await client.check(lambda *done: told.append(done))).ok
            assert told
            assert (await client.compact()).in_use == 0
            assert not await client.accept_loss(f"{table.name}/0", dry_run=True)
            assert await client.repair_clock() >= 0
            async with client.transaction() as txn:
                txn.blocking.serialize()
                await client.keep_transaction_alive(txn.id)
            scan = (await client.table(table.name)).scan()
            assert await scan.snapshot() > 0
            assert sum(token.rows for token in await scan.tokens(rows=1)) == 0

    asyncio.run(work())


def test_calls_of_one_object_come_one_after_the_other() -> None:
    """The next one waits for one that was cancelled when it had begun, and still runs."""
    begun, go_on = threading.Event(), threading.Event()
    inside: list[bool] = [False]
    seen: list[bool] = []

    def first() -> None:
        inside[0] = True
        begun.set()
        go_on.wait(30)
        inside[0] = False

    async def main() -> None:
        pool = calls.Calls(threads=3)
        turn = calls.InTurn(pool)
        cancelled = asyncio.create_task(turn(first))
        await pool(begun.wait, 30)
        cancelled.cancel()
        second = asyncio.create_task(turn(lambda: seen.append(inside[0])))
        await asyncio.sleep(0)  # it is given to a thread, and the next one to another
        await pool(lambda: None)
        go_on.set()
        await second
        pool.close()

    asyncio.run(main())
    assert seen == [False]


def test_calls_that_wait_for_their_turn_have_no_thread_and_keep_their_order() -> None:
    begun, go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def first() -> None:
        begun.set()
        go_on.wait(30)
        seen.append("first")

    async def main() -> None:
        pool = calls.Calls(threads=3)
        turn = calls.InTurn(pool)
        held = asyncio.create_task(turn(first))
        await pool(begun.wait, 30)
        behind = [asyncio.create_task(turn(seen.append, str(n))) for n in range(20)]
        ended = asyncio.create_task(turn.to_the_end(seen.append, "to the end"))
        quick = asyncio.create_task(turn.quick(seen.append, "quick"))
        await asyncio.sleep(0)  # each has taken its place
        async with asyncio.timeout(30):
            for _ in range(8):  # and no thread, even of those that are cancelled now
                await pool(lambda: None)
        for each in (held, *behind[::2], ended):
            each.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(held, *behind, quick, return_exceptions=True)
        await turn.quick(seen.append, "in place")
        pool.close()

    asyncio.run(main())
    odd = [str(n) for n in range(1, 20, 2)]
    assert seen == ["first", *odd, "to the end", "quick", "in place"]


def test_a_call_of_two_objects_waits_for_both() -> None:
    go_on = [threading.Event(), threading.Event()]
    seen: list[str] = []

    async def main() -> None:
        pool = calls.Calls(threads=3)
        one, two = calls.InTurn(pool), calls.InTurn(pool)
        held = [asyncio.create_task(t(e.wait, 30)) for t, e in zip((one, two), go_on, strict=True)]
        both = [
            asyncio.create_task(calls.InTurn(pool, turns)(seen.append, name))
            for name, turns in (("a", (one, two)), ("b", (two, one)), ("c", (one, two)))
        ]
        await asyncio.sleep(0)
        behind = [asyncio.create_task(turn.quick(seen.append, "last")) for turn in (one, two)]
        go_on[1].set()
        await held[1]
        await pool(lambda: None)
        assert seen == []
        go_on[0].set()
        await asyncio.gather(*held, *both, *behind)
        pool.close()

    asyncio.run(main())
    assert seen == ["a", "b", "c", "last", "last"]


def test_calls_that_wait_when_the_client_is_closed_are_made() -> None:
    go_on = threading.Event()
    seen: list[int] = []

    async def main() -> None:
        pool = calls.Calls(threads=1)
        turn = calls.InTurn(pool)
        made = [turn(go_on.wait, 30), *(turn(seen.append, n) for n in range(3))]
        tasks = [asyncio.create_task(each) for each in made]
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(txnkv.errors.ClosedError):
            await turn(seen.append, 3)
        go_on.set()
        await asyncio.gather(*tasks)
        with pytest.raises(txnkv.errors.ClosedError):
            await turn(seen.append, 4)

    asyncio.run(main())
    assert seen == [0, 1, 2]


def test_a_write_that_was_cancelled_does_not_come_after_a_later_one(store_path: Path) -> None:
    go_on = threading.Event()

    async def work(client: txnkv.aio.AsyncClient, table: txnkv.aio.AsyncTable) -> None:
        async with client.transaction() as txn, asyncio.TaskGroup() as group:
            held = group.create_task(txn._turn(go_on.wait, 30))
            late = group.create_task(txn.upsert(table, (1, "cancelled")))
            last = group.create_task(txn.upsert(table, (1, "last")))
            await client._calls(lambda: None)
            late.cancel()
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.gather(held, last)
        assert await table.get(1) == {"id": 1, "v": "last"}

    run(store_path, work)


def test_elsewhere_than_in_a_loop_of_asyncio(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no loop of asyncio .* txnkv\.connect in a thread"):
        txnkv.aio.connect(tmp_path).__await__().send(None)  # as trio does
