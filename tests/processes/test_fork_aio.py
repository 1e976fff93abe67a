"""Clients for asyncio that a fork hands on: the child begins with threads of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.children import Children

PRELUDE = """
import asyncio, faulthandler, txnkv.aio

def child_of(work):
    pid = os.fork()
    if pid:
        return pid
    faulthandler.dump_traceback_later(60, exit=True)
    code = 1
    try:
        asyncio.run(work())
        code = 0
    except BaseException as error:
        say("child:", repr(error))
    sys.stdout.flush()
    os._exit(code)

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

async def refused(error, making):
    try:
        await making
    except error:
        return
    say("it was done, and not", error.__name__)
"""

IDLE = """
async def before():
    client = await txnkv.aio.connect(args[0], create=False)
    left = await client.table("left")
    for _ in range(int(args[1])):  # so many threads are there
        await left.get(0)
    topic = await client.create_topic("events")
    consumer = await topic.consumer(start="earliest")
    subscription = await topic.subscribe("shared", type="shared")
    await client.run(send)
    assert [each.value for each in await consumer.poll(timeout=1)] == [b"1"]
    session = await client.new_session()
    await session.insert("left", (5000, "of the parent"))
    txn = await client.new_transaction()
    await txn.insert("left", (5001, "of the parent"))
    return client, left, topic, consumer, subscription, session, txn

async def send(txn):
    await txn.send("events", b"1")

client, left, topic, consumer, subscription, session, txn = asyncio.run(before())

async def in_child():
    assert (await left.get(0))["text"] == "row 0"
    assert await consumer.poll(timeout=0.1) == []
    async with client.transaction() as own:
        await own.insert("left", (6000, "of a child"))
        await own.send("events", b"2")
    assert [each.value for each in await consumer.poll(timeout=5)] == [b"2"]
    assert [row["id"] async for row in left.scan(where=[("id", ">=", 5000)])] == [6000]
    await client.run(update)
    for call in (txn.insert("left", (1, None)), txn.get("left", 1), txn.commit(), txn.rollback()):
        await refused(txnkv.InvalidTxnStateError, call)
    await session.insert("left", (6001, "of a child"))
    await session.close()
    async with await topic.producer() as producer:
        await producer.send(b"3")
    await client.close()
    await refused(txnkv.ClosedError, left.get(0))

async def update(txn):
    row = await txn.get("left", 6000)
    await txn.update("left", (6000, row["text"] + "!"))

async def after():
    assert (await left.get(6000))["text"] == "of a child!"
    assert [each.value for each in await consumer.poll(timeout=5)] == [b"2", b"3"]
    assert (await subscription.receive(timeout=5)).value == b"1"
    await session.close()
    await txn.commit()
    async with client:
        return sorted([row["id"] async for row in left.scan(where=[("id", ">=", 5000)])])

code = ended(child_of(in_child))
say(code, asyncio.run(after()))
"""


@pytest.mark.parametrize("gets", [1, 50])
def test_handles_of_before_a_fork_go_on_in_the_child(
    children: Children, store: Path, gets: int
) -> None:
    program = children.start(PRELUDE + IDLE, store, gets)
    assert program.finish() == ["0 [5000, 5001, 6000, 6001]"]


BUSY = """
import threading, time

async def main():
    async with txnkv.aio.connect(args[0], create=False) as client:
        left = await client.table("left")
        topic = await client.create_topic("events")
        consumer, idle = await topic.consumer(), await topic.consumer()
        producer = await topic.producer()
        txn = await client.new_transaction()
        goes_on, begun = threading.Event(), threading.Semaphore(0)

        def call():
            begun.release()
            goes_on.wait(60)

        # Each thread is busy, others wait for one, and calls of one object for their turn.
        busy = [asyncio.create_task(client._calls(call)) for _ in range(40)]
        turns = [each._turn for each in (consumer, producer, txn)]
        patient = client._calls.patient
        kept = [asyncio.create_task(each.to_the_end(call)) for each in turns]
        kept += [asyncio.create_task(patient(call)) for _ in range(3)]
        queued = [
            asyncio.create_task(each)
            for each in (consumer.poll(timeout=0), producer.send(b"once"), written(txn))
        ]
        waiting = asyncio.create_task(idle.poll(timeout=60))
        while client._calls.is_idle or patient._pool._work_queue.qsize():
            await asyncio.sleep(0.01)

        async def in_child():
            assert (await left.get(0))["text"] == "row 0"
            assert await consumer.poll(timeout=0) == []
            assert await producer.sent() == 0
            await refused(txnkv.InvalidTxnStateError, txn.get("left", 0))
            waiting.get_coro().close()  # as the collector may
            assert await idle.poll(timeout=0) == []
            async with client.transaction() as own:
                await own.insert("left", (6000, "of a child"))
            await asyncio.gather(*(left.get(id) for id in range(100)))
            assert await topic.end_offsets() == {0: 0}
            for each in (consumer, producer, idle, client):
                await each.close()

        code = await asyncio.to_thread(ended, child_of(in_child))
        assert not any(each.done() for each in [*busy, *kept, *queued, waiting])
        goes_on.set()
        await asyncio.gather(*busy, *kept, *queued)
        await txn.commit()
        assert [each.value for each in await waiting] == [b"once"]
        ids = [row["id"] async for row in left.scan(where=[("id", ">=", 5000)])]
        say(code, await topic.end_offsets(), sorted(ids))

async def written(txn):
    await txn.get("left", 0)
    await txn.insert("left", (5000, "of the parent"))

asyncio.run(main())
"""


def test_calls_under_way_at_a_fork_are_the_parents(children: Children, store: Path) -> None:
    assert children.start(PRELUDE + BUSY, store).finish() == ["0 {0: 1} [5000, 6000]"]
