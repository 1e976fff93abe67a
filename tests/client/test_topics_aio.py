"""Topics by asyncio: the same, and nothing lost by a call that is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.aio import AsyncClient, AsyncTopic
from txnkv.aio.calls import Calls

Work = Callable[[AsyncClient], Awaitable[Any]]


@pytest.fixture
def run(client: txnkv.Client, store_path: Path) -> Callable[[Work], Any]:
    """Runs a coroutine with a client of the test's store."""

    async def main(work: Work) -> Any:
        async with txnkv.aio.connect(store_path) as client:
            return await asyncio.wait_for(work(client), 60)

    return lambda work: asyncio.run(main(work))


async def values(topic: AsyncTopic) -> list[bytes | None]:
    async with await topic.consumer() as consumer:
        return [message.value for message in await consumer.poll(timeout=0)]


def test_the_catalog(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        made = await client.create_topic("events", partitions=2, buffer="sidecar")
        assert (made.name, made.partitions) == ("events", 2)
        assert await client.topics() == ["events"]
        assert (await client.topic("events")).blocking.info == made.blocking.info
        await client.drop_topic(made)
        await client.drop_topic("events", missing_ok=True)
        with pytest.raises(txnkv.TopicNotFoundError):
            await client.topic("events")

    run(work)


def test_rows_messages_and_acks_in_one_transaction(run: Any, table: txnkv.Table) -> None:
    async def work(client: AsyncClient) -> None:
        source = await client.create_topic("source")
        out = await client.create_topic("out")
        session = await client.new_session()
        await session.send(source, b"a", key=b"k")
        assert (await session.send_batch(source, pa.table({"value": ["b"]}))).sent == 1
        await session.close()
        async with await source.subscribe("worker") as subscription:
            async with client.transaction() as txn:
                for message in await subscription.receive_many(timeout=5):
                    await txn.send(out, message.value, headers={"from": message.key or b""})
                    await txn.ack(subscription, message)
                await txn.upsert("t", {"id": 1})
                assert await values(out) == []
            assert await values(out) == [b"a", b"b"]
            assert await subscription.receive(timeout=0) is None
        assert await out.end_offsets() == await out.last_stable_offsets() == {0: 2}
        assert (await out.fetch(0, 0)).high_watermark == 2

    run(work)
    assert table.count() == 1


def test_a_block_that_is_left_by_an_exception_sends_nothing(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")

        async def fail() -> None:
            async with client.transaction() as txn:
                await txn.send(topic, b"a")
                await txn.flush()
                raise KeyError

        with pytest.raises(KeyError):
            await fail()
        assert await values(topic) == []

    run(work)


def test_a_producer_does_not_have_a_task_wait_for_others(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        async with await topic.producer(linger=3600) as producer:
            assert [(await producer.send(b"%d" % n)).offset for n in range(3)] == [0, 1, 2]
            found = await asyncio.gather(*(producer.send(b"%d" % n) for n in range(100)))
            assert [each.offset for each in found] == list(range(3, 103))
        assert await values(topic) == [b"%d" % n for n in (*range(3), *range(100))]

    run(work)


def test_many_tasks_send(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")

        async def send(n: int) -> None:
            async with client.transaction() as txn:
                for i in range(10):
                    await txn.send(topic, b"%d %d" % (n, i))

        await asyncio.gather(*(send(n) for n in range(30)))
        found = await values(topic)
        for n in range(30):
            own = [value for value in found if value and value.startswith(b"%d " % n)]
            assert own == [b"%d %d" % (n, i) for i in range(10)]

    run(work)


def test_a_cancelled_poll_loses_nothing(run: Any) -> None:
    """Messages that come while a cancelled call still waits on its thread are given to the next."""

    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        async with (
            await topic.consumer() as consumer,
            await topic.subscribe("s") as subscription,
            await client.new_session() as session,
        ):
            polled: list[txnkv.Message] = []
            received: list[Any] = []
            for n in range(10):
                polling = asyncio.ensure_future(consumer.poll(timeout=30))
                receiving = asyncio.ensure_future(subscription.receive())
                await asyncio.sleep(0.01 * n)
                polling.cancel()
                receiving.cancel()
                await session.send(topic, b"%d" % n)
                await session.flush()
                await asyncio.wait((polling, receiving))
                polled += [] if polling.cancelled() else polling.result()
                received += [] if receiving.cancelled() else [receiving.result()]
            while len(polled) < 10:
                polled += await consumer.poll(timeout=5)
            while len(received) < 10:
                received.append(await subscription.receive(timeout=5))
        expected = [b"%d" % n for n in range(10)]
        assert [message.value for message in polled] == expected
        assert [message.value for message in received] == expected

    run(work)


def test_what_a_cancelled_call_had_goes_to_the_next_of_either_kind(run: Any) -> None:
    """It was for the next call of the same kind, and `position` was ahead of what was given."""

    async def cancelled(call: Any) -> None:
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))

    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        async with client.transaction() as txn:
            for n in range(6):
                await txn.send(topic, b"%d" % n)
        async with await topic.consumer() as consumer:
            await cancelled(consumer.poll(max_messages=4))
            assert await consumer.position(0) == 0
            await cancelled(consumer.poll_batch(max_messages=4))
            assert [m.value for m in await consumer.poll(max_messages=1)] == [b"0"]
            assert await consumer.position(0) == 1
            found = await consumer.poll_batch(max_messages=9)
            while await consumer.position(0) < 6:
                assert found.num_rows
                found = await consumer.poll_batch(max_messages=9)
            assert found.column("value")[-1].as_py() == b"5"
            await cancelled(consumer.poll())
            await consumer.seek(0, 3)
            assert [m.value for m in await consumer.poll()] == [b"3", b"4", b"5"]
        kinds: list[Any] = ["exclusive", "shared"]
        for type in kinds:
            async with await topic.subscribe(type, type) as subscription:
                await cancelled(subscription.receive_many(4))
                first = await subscription.receive(timeout=5)
                assert first is not None
                await cancelled(subscription.receive())
                rest: list[txnkv.Message] = []
                while len(rest) < 5:
                    rest += await subscription.receive_many(9, timeout=5)
                assert [m.value for m in [first, *rest]] == [b"%d" % n for n in range(6)]

    run(work)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has calls from then on made where they are given to threads: before the loop goes on."""

    def submit(calls: Calls, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        made = Future[Any]()
        made.set_result(fn(*args))
        return made

    return lambda: monkeypatch.setattr(Calls, "submit", submit)


KINDS = ("consumer", "group", "exclusive", "shared")


async def reader(client: AsyncClient, kind: str) -> Callable[[], Awaitable[list[txnkv.Message]]]:
    """Read one message of six at each call."""
    topic = await client.create_topic("events")
    async with client.transaction() as txn:
        for n in range(6):
            await txn.send(topic, b"%d" % n)
    if kind in ("consumer", "group"):
        by: Any = await (topic.consumer() if kind == "consumer" else client.consumer("events", "g"))
        return lambda: by.poll(max_messages=1, timeout=30)
    subscription = await topic.subscribe("s", cast(Any, kind))
    return lambda: subscription.receive_many(1, timeout=30)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_call_begins_when_a_cancelled_one_has_dropped_what_it_had(
    run: Any, at_once: Callable[[], None], kind: str
) -> None:
    """It began before the task that was cancelled had run, and went on behind its messages."""

    async def work(client: AsyncClient) -> None:
        read = await reader(client, kind)
        at_once()
        got = await read()
        for _ in range(2):
            cancelled = asyncio.ensure_future(read())
            await asyncio.sleep(0)
            cancelled.cancel()
            got += await read()
        assert [message.value for message in got] == [b"0", b"1", b"2"]

    run(work)


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_that_share_a_reader_lose_nothing_by_one_that_is_cancelled(
    run: Any, at_once: Callable[[], None], kind: str
) -> None:
    async def work(client: AsyncClient) -> None:
        read = await reader(client, kind)
        at_once()
        tasks = [asyncio.ensure_future(read()) for _ in range(4)]
        await asyncio.sleep(0)  # each has called
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.wait(tasks)
        got = [*await tasks[1], *await tasks[3], *await read()]
        assert [message.value for message in got] == [b"0", b"1", b"2"]

    run(work)


def test_a_loop_that_is_closed_beside_a_call_keeps_nothing(
    store_path: Path, at_once: Callable[[], None]
) -> None:
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    client = first.run_until_complete(asyncio.wait_for(txnkv.aio.connect(store_path), 60))
    read = first.run_until_complete(reader(client, "consumer"))
    tasks: list[Any] = []

    async def begin() -> None:
        tasks.append(asyncio.ensure_future(read()))
        await asyncio.sleep(0)

    at_once()
    first.run_until_complete(begin())
    first.close()
    found = second.run_until_complete(asyncio.wait_for(read(), 60))
    assert [message.value for message in found] == [b"0"]
    second.run_until_complete(client.close())
    second.close()
    tasks[0]._log_destroy_pending = False  # asyncio would complain of this test


def test_waiting_ends_when_something_comes_or_the_time_is_over(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        async with await topic.consumer() as consumer:
            assert await consumer.poll(timeout=0.15) == []
            assert (await consumer.poll_batch(timeout=0.15)).num_rows == 0
            waiting = asyncio.ensure_future(consumer.poll(timeout=30))
            async with client.transaction() as txn:
                await txn.send(topic, b"a")
            assert [message.value for message in await waiting] == [b"a"]
            assert await consumer.position(0) == 1
            await consumer.seek(0, 0)
            async with client.transaction() as txn:
                await txn.send(topic, b"b")
            async for message in consumer:
                assert message.value == b"a"
                assert await consumer.position(0) == 1
                break
            assert [message.value for message in await consumer.poll(timeout=30)] == [b"b"]

    run(work)


def test_a_member_of_a_group(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        async with await client.consumer(topic, group="g") as member:
            waiting = asyncio.ensure_future(member.poll(timeout=30))
            async with client.transaction() as txn:
                await txn.send(topic, b"a")
            assert [message.value for message in await waiting] == [b"a"]
            async with client.transaction() as txn:
                await member.commit(txn)
                await txn.send(topic, b"b")
            assert [message.value for message in await member.poll(timeout=30)] == [b"b"]
            cancelled = asyncio.ensure_future(member.poll(timeout=30))
            await asyncio.sleep(0.02)
            cancelled.cancel()
            assert member.blocking.group == "g"
            assert (await member.committed(), await member.position(0)) == ({0: 1}, 2)
            await member.commit()
            assert await member.committed() == {0: 2}
            await member.seek(0, 1)
            assert [message.value for message in await member.poll(timeout=30)] == [b"b"]
            await member.rewind()
            assert (member.partitions, await member.lag()) == ([0], 0)

    run(work)


def test_a_commit_of_positions_waits_for_a_poll_that_was_cancelled(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It committed what that poll had and nobody was given."""

    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        has, goes_on = threading.Event(), threading.Event()

        async with (
            await client.consumer(topic, group="g") as member,
            await client.new_session("auto_sync") as session,
        ):
            await session.send(topic, b"a")
            assert [m.value for m in await member.poll(timeout=30)] == [b"a"]
            poll = member.blocking.poll

            def slow(**options: Any) -> Any:
                found = poll(**options)
                has.set()
                goes_on.wait(5)
                return found

            monkeypatch.setattr(member.blocking, "poll", slow)
            await session.send(topic, b"b")
            polling = asyncio.ensure_future(member.poll(timeout=30))
            await asyncio.to_thread(has.wait)
            polling.cancel()
            async with client.transaction() as txn:
                committing = asyncio.ensure_future(member.commit(txn))
                await asyncio.wait((committing,), timeout=0.1)
                goes_on.set()
                await committing
            assert await member.committed() == {0: 1}
            assert [m.value for m in await member.poll(timeout=30)] == [b"b"]

    run(work)


def test_a_producer(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        async with await topic.producer("billing") as producer:
            ids = await asyncio.gather(*(producer.send(b"%d" % n) for n in range(20)))
            await producer.flush()
        assert ids == [txnkv.MessageId(0, n) for n in range(20)]
        assert await values(topic) == [b"%d" % n for n in range(20)]

    run(work)


def test_a_cancelled_send_is_sent_all_the_same(run: Any) -> None:
    """On its way to a thread, and while the producer sends it, or has."""

    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        producer = await topic.producer(linger=0.3)
        for n in range(40):
            sending = asyncio.ensure_future(producer.send(b"%d" % n))
            await asyncio.sleep(0.02 if n % 8 == 0 else 0)
            sending.cancel()
            await asyncio.wait((sending,))
            assert sending.cancelled() or sending.result().offset == n
        await producer.flush()  # in its turn, behind them
        assert await producer.sent() == 40
        assert await values(topic) == [b"%d" % n for n in range(40)]

    run(work)


def test_readers_tell_how_far_they_are(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events", buffer="sidecar")
        assert topic.buffer == "sidecar"
        async with await topic.producer("feeder") as producer:
            for value in (b"a", b"b"):
                await producer.send(value)
            assert (producer.name, await producer.sent()) == ("feeder", 2)
        async with await topic.consumer() as consumer:
            assert (consumer.partitions, await consumer.lag()) == ([0], 2)
            await consumer.seek_to_time(datetime.now(UTC) + timedelta(days=1))
            assert await consumer.lag(0) == 0
        async with await topic.subscribe("worker") as subscription:
            assert (subscription.name, subscription.is_active) == ("worker", True)
            assert (await subscription.lag(), await subscription.lost()) == ({0: 2}, {0: 0})
            for message in await subscription.receive_many(timeout=5):
                await subscription.ack(message)
            assert await subscription.lag() == {0: 0}

    run(work)


# -- many that wait --------------------------------------------------------------------


def threads_of(client: AsyncClient) -> int:
    """The threads that calls of all kinds have had up to now."""
    return len(client._calls._pool._threads)


async def waiting(client: AsyncClient, n: int) -> None:
    watch = internals.topics(client.blocking).watch
    while len(watch._told) < n:
        await asyncio.sleep(0.005)


def test_tasks_that_wait_hold_no_thread_and_each_gets_its_message(run: Any) -> None:
    """Each held one of 14 for a tenth of a second at a time: with 200 a `get` took 1.4 s, and of
    200 messages 193 were given to nobody in 15 s.
    """

    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        kinds: list[Any] = ["shared", "key_shared", "exclusive"]
        subs = [await topic.subscribe("shared", "shared") for _ in range(60)]
        others = [await topic.subscribe(each, each) for each in kinds[1:]]
        consumers = [await topic.consumer() for _ in range(20)]
        before = threads_of(client)
        shared = [asyncio.ensure_future(sub.receive()) for sub in subs]
        rest: list[asyncio.Future[Any]] = [asyncio.ensure_future(sub.receive()) for sub in others]
        rest += [asyncio.ensure_future(each.poll(timeout=60)) for each in consumers]
        await waiting(client, 82)
        assert threads_of(client) == before
        for n in range(60):
            async with client.transaction() as txn:
                await txn.send(topic, b"%d" % n, key=b"k")
        found = await asyncio.gather(*shared)
        assert sorted(each.offset for each in found if each is not None) == list(range(60))
        for each in await asyncio.gather(*rest):
            assert (each[0] if isinstance(each, list) else each).offset == 0
        assert internals.topics(client.blocking).watch._told == {}

    run(work)


def test_tasks_that_are_cancelled_are_told_nothing(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        subs = [await topic.subscribe("s", "shared") for _ in range(10)]
        tasks = [asyncio.ensure_future(sub.receive()) for sub in subs]
        await waiting(client, 10)
        for task in tasks[:-1]:
            task.cancel()
        await asyncio.wait(tasks[:-1])
        assert len(internals.topics(client.blocking).watch._told) == 1
        async with client.transaction() as txn:
            await txn.send(topic, b"a")
        found = await tasks[-1]
        assert found is not None
        assert found.value == b"a"

    run(work)


def test_a_cancellation_at_the_moment_of_being_told_is_not_lost(run: Any) -> None:
    """`asyncio.wait_for` of Python 3.11 drops it."""

    async def work(client: AsyncClient) -> None:
        subscription = await (await client.create_topic("events")).subscribe("s")
        told = internals.topics(client.blocking).watch._told
        for steps in range(8):
            task = asyncio.ensure_future(subscription.receive())
            await waiting(client, 1)
            await asyncio.sleep(0.05)  # it waits: it would be told before otherwise
            for wake in list(told.values()):
                wake()
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=10)
            assert task.cancelled()

    run(work)


def test_a_message_whose_lease_runs_out_goes_to_a_task_that_waits(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        async with client.transaction() as txn:
            await txn.send(topic, b"a")
        one, *others = [await topic.subscribe("s", "shared", lease_seconds=0.3) for _ in range(4)]
        assert await one.receive() is not None
        tasks = [asyncio.ensure_future(sub.receive()) for sub in others]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        found = done.pop().result()
        assert found is not None
        assert (found.value, found.redelivery_count) == (b"a", 1)

    run(work)


def test_closing_ends_the_waits_of_tasks(run: Any) -> None:
    """Of the client, with another one of the same store, and of one handle."""

    async def work(client: AsyncClient) -> None:
        topic = await client.create_topic("events")
        one = await topic.subscribe("one")
        receiving = asyncio.ensure_future(one.receive())
        await waiting(client, 1)
        await one.close()
        with pytest.raises(txnkv.ClosedError):
            await receiving
        async with txnkv.aio.connect(client.path) as other:
            there = await other.topic("events")
            group = await other.consumer(there, group="g")
            many = [await there.subscribe("many", "shared") for _ in range(8)]
            tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(group.poll(timeout=None))]
            tasks += [asyncio.ensure_future(sub.receive()) for sub in many]
            tasks.append(asyncio.ensure_future((await there.consumer()).poll(timeout=60)))
            await waiting(client, 10)
        for task in tasks:
            with pytest.raises(txnkv.ClosedError):
                await task

    run(work)


def test_a_wait_for_no_number_of_seconds_is_refused(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        subscription = await (await client.create_topic("events")).subscribe("s")
        with pytest.raises(ValueError):
            await subscription.receive(timeout=float("nan"))

    run(work)
