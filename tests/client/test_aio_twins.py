"""Each handle for asyncio has what its blocking twin has: one table says where they differ."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txnkv
from txnkv import aio
from txnkv.aio.calls import Calls
from txnkv.client import Attempts

TWINS = [
    (txnkv.Client, aio.AsyncClient),
    (txnkv.Table, aio.AsyncTable),
    (txnkv.Scan, aio.AsyncScan),
    (txnkv.Snapshot, aio.AsyncSnapshot),
    (txnkv.Topic, aio.AsyncTopic),
    (txnkv.Consumer, aio.AsyncConsumer),
    (txnkv.GroupConsumer, aio.AsyncGroupConsumer),
    (txnkv.Subscription, aio.AsyncSubscription),
    (txnkv.Producer, aio.AsyncProducer),
    (txnkv.Session, aio.AsyncSession),
    (txnkv.Transaction, aio.AsyncTransaction),
]

INSIDE = {
    "Client": "addresses attempts close_handles elsewhere renew_sessions is_open outcome retries "
    "require_open require_writable table_info timestamp_of topic_info writer info_of require_own",
    "Scan": "over",
    "Snapshot": "require_open",
    "Consumer": "unpoll",
    "GroupConsumer": "unpoll",
    "Subscription": "unreceive",
    "Producer": "hurry",
    "Session": "discard end flush_for_commit flush_untold begin_anew look_anew waiting",
    "Transaction": "abort_for begin drop start_heart",
}
"""Methods that the package calls, and users do not."""

DIFFERENT = {
    "Client": {"join": "AsyncTransaction.deserialize by another name"},
    "Session": {"set_flush_mode": "a property cannot be set on another thread"},
    "Transaction": {"age": "of client.run", "commit_async": "commit is awaited"},
}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("blocking", "twin"), TWINS, ids=lambda kind: kind.__name__)
def test_a_twin_has_all_methods(blocking: type, twin: type) -> None:
    name = blocking.__name__
    inside = set(INSIDE.get(name, "").split())
    by_init = {"blocking", "info"}  # attributes that one of the two makes when it is made
    apart = (public(blocking) ^ public(twin)) - inside - by_init
    assert apart == set(DIFFERENT.get(name, {}))


@pytest.mark.parametrize(("blocking", "twin"), TWINS, ids=lambda kind: kind.__name__)
def test_a_method_of_a_twin_takes_the_same(blocking: type, twin: type) -> None:
    for name in public(blocking) & public(twin):
        one, other = getattr(blocking, name), getattr(twin, name)
        if not callable(one) or not callable(other):
            continue
        wanted = inspect.signature(one).parameters
        given = inspect.signature(other).parameters
        passes_on = any(each.kind is each.VAR_KEYWORD for each in given.values())
        for parameter in given.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                assert parameter.name in wanted, f"{twin.__name__}.{name}({parameter.name})"
        for parameter in wanted.values():
            if passes_on and parameter.name not in given:
                continue
            found = given.get(parameter.name)
            assert found is not None, f"{twin.__name__}.{name} lacks {parameter.name}"
            assert found.default == parameter.default, f"{twin.__name__}.{name}"


@pytest.mark.parametrize("of", ["table", "snapshot", "transaction"])
def test_a_scan_may_be_awaited_and_need_not(
    of: str, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers = set()
    for kind in (txnkv.Snapshot, txnkv.Transaction):

        def scan(self: Any, *args: Any, made: Any = kind.scan) -> Any:
            makers.add(threading.current_thread())
            return made(self, *args)

        monkeypatch.setattr(kind, "scan", scan)

    async def work(client: aio.AsyncClient) -> None:
        table = await client.create_table("t", txnkv.Schema({"id": "int64", "v": "string?"}, "id"))
        for i in range(3):
            await table.insert((i, None))
        async with client.transaction() as txn, client.snapshot() as snapshot:

            def scan(columns: Any = None) -> aio.AsyncScan:
                if of == "table":
                    return table.scan(columns)
                return (snapshot if of == "snapshot" else txn).scan("t", columns)

            assert (await scan().to_arrow()).num_rows == 3
            assert (await (await scan()).to_arrow()).num_rows == 3
            assert len([row async for row in scan()]) == len([row async for row in await scan()])
            assert sum([batch.num_rows async for batch in scan().to_batches()]) == 3
            again = scan()
            assert repr(again).startswith("<AsyncScan")
            assert await again.snapshot() == await again.snapshot()
            assert (await again.to_arrow()) == (await again.to_arrow())
            assert await (await again) is again
            async with scan(["id"]) as entered:
                assert entered.schema.names == ["id"]
            with pytest.raises(txnkv.SchemaError, match="nothing"):
                await scan(["nothing"])
            names = ["id"]
            asked, names[0] = scan(names), "v"
            assert (await asked.to_arrow()).column_names == ["id"]
            if of != "table":  # whose columns are looked at by the call
                await scan(["nothing"]).close()
            untyped: Any = snapshot if of == "snapshot" else txn
            with pytest.raises(TypeError, match="colums"):
                untyped.scan("t", colums=["id"])

    async def main() -> None:
        async with aio.connect(store_path) as client:
            await work(client)

    asyncio.run(main())
    assert threading.main_thread() not in makers


MADE: dict[str, Callable[[Any], Any]] = {
    "client": lambda client: client,
    "snapshot": lambda client: client.snapshot(),
    "transaction": lambda client: client.transaction(),
    "session": lambda client: client.new_session(),
    "group": lambda client: client.consumer("e", "g"),
    "table": lambda client: client.table("t"),
    "topic": lambda client: client.topic("e"),
}
OF_TABLE: dict[str, Callable[[Any], Any]] = {"scan": lambda table: table.scan()}
OF_TOPIC: dict[str, Callable[[Any], Any]] = {
    "consumer": lambda topic: topic.consumer(),
    "subscription": lambda topic: topic.subscribe("s"),
    "producer": lambda topic: topic.producer("p"),
}


class Broken(Exception):
    pass


@pytest.mark.parametrize("what", [*MADE, *OF_TABLE, *OF_TOPIC])
@pytest.mark.parametrize("fails", [False, True])
def test_a_block_whose_client_is_closed_ends_as_the_blocking_one(
    what: str, fails: bool, client: txnkv.Client, store_path: Path
) -> None:
    client.create_table("t", txnkv.Schema({"id": "int64"}, "id"))
    client.create_topic("e")
    make = {**MADE, **OF_TABLE, **OF_TOPIC}[what]

    def blocking() -> None:
        client = txnkv.connect(store_path)
        of: Any = client
        if what in OF_TABLE or what in OF_TOPIC:
            of = client.table("t") if what in OF_TABLE else client.topic("e")
        with make(of):
            client.close()
            if fails:
                raise Broken

    async def awaited() -> None:
        client = await aio.connect(store_path)
        of: Any = client
        if what in OF_TABLE or what in OF_TOPIC:
            of = await (client.table("t") if what in OF_TABLE else client.topic("e"))
        async with make(of):
            await client.close()
            if fails:
                raise Broken

    def end(call: Callable[[], None]) -> str:
        try:
            call()
        except (Broken, txnkv.ClosedError) as error:
            return repr(error)
        return "nothing raised"

    told = end(blocking)
    assert end(lambda: asyncio.run(awaited())) == told
    assert ("Broken" in told) == fails
    assert ("Closed" in told) == (what == "transaction" and not fails)


def test_a_task_that_is_collected_in_a_close_ends_without_a_word() -> None:
    go_on = threading.Event()
    pool = Calls(1)

    async def main() -> None:
        ending = pool.to_the_end(go_on.wait, 30)
        ending.send(None)
        ending.close()  # as the collector does with what a closed loop has left
        go_on.set()

    asyncio.run(main())
    pool.close()


def test_a_run_takes_two_turns_of_a_thread(
    table: txnkv.Table, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside those of its function: one to begin, one to commit and to let go."""
    made = list[str]()

    def submit(self: Calls, fn: Any, *args: Any, real: Any = Calls.submit, **kwargs: Any) -> Any:
        made.append(fn.__name__)
        return real(self, fn, *args, **kwargs)

    async def main() -> None:
        async with aio.connect(store_path) as client:
            await client.run(lambda txn: txn.insert("t", (1, None)))
            with monkeypatch.context() as patched:
                patched.setattr(Calls, "submit", submit)
                await client.run(lambda txn: txn.insert("t", (2, None)))

    asyncio.run(main())
    assert len(made) == 2, made
    assert table.count() == 2


def test_a_run_that_cannot_let_go_is_not_run_again(
    table: txnkv.Table, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[int]()

    def close(self: Attempts) -> None:
        raise txnkv.UnavailableError("the disk failed")

    async def work(txn: aio.AsyncTransaction) -> None:
        ran.append(1)
        await txn.insert("t", (len(ran), None))

    async def main() -> None:
        async with aio.connect(store_path) as client:
            with monkeypatch.context() as patched:
                patched.setattr(Attempts, "close", close)
                with pytest.raises(txnkv.UnavailableError, match="the disk failed"):
                    await client.run(work)

    asyncio.run(main())
    assert ran == [1]
    assert table.count() == 1


def test_a_run_that_is_cancelled_as_it_begins_lets_go(
    table: txnkv.Table, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginning, go_on, closed = threading.Event(), threading.Event(), list[Attempts]()

    def begin(self: Attempts, *args: Any, real: Any = Attempts.begin) -> Any:
        beginning.set()
        assert go_on.wait(30)
        return real(self, *args)

    def close(self: Attempts, real: Any = Attempts.close) -> None:
        closed.append(self)
        real(self)

    async def main() -> None:
        async with aio.connect(store_path) as client:
            with monkeypatch.context() as patched:
                patched.setattr(Attempts, "begin", begin)
                patched.setattr(Attempts, "close", close)
                task = asyncio.create_task(client.run(lambda txn: txn.insert("t", (1, None))))
                await asyncio.to_thread(beginning.wait, 30)
                task.cancel()
                go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert len(closed) == 1

    asyncio.run(main())
    assert table.count() == 0
