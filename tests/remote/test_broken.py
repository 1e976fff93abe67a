"""A server that is killed, stopped or started again, and connections that are cut."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

import txnkv
import txnkv.aio
from tests import internals
from tests.topics.reading_tools import looped
from txnkv.server import Server

from .conftest import Wire


@pytest.fixture
def wire(serve: Callable[..., Server]) -> Iterator[Wire]:
    made = Wire(serve().port)
    yield made
    made.close()


def test_a_server_that_is_busy_is_connected_to_late(wire: Wire) -> None:
    """It was not there for one who connected, if its first word took half a second."""
    wire.late = 1.0
    with txnkv.connect(f"grpc://127.0.0.1:{wire.port}") as client:
        client.table("t").insert((1, "late"))
        assert client.table("t").get(1) == {"id": 1, "v": "late"}


@pytest.mark.slow
def test_a_server_that_is_started_again(serving: Any, store: txnkv.Client) -> None:
    serving.start()
    with txnkv.connect(serving.address) as client:
        table, topic = client.table("t"), client.topic("events")
        table.insert((1, "before"))
        consumer, subscription = topic.consumer(), topic.subscribe("one", type="shared")
        txn = client.new_transaction()
        txn.insert(table, (2, "never"))
        assert txn.get(table, 2) is not None
        serving.kill()
        with pytest.raises(txnkv.UnavailableError):
            table.get(1)
        serving.start()
        assert _patiently(lambda: table.get(1)) == {"id": 1, "v": "before"}
        with pytest.raises(txnkv.UnavailableError, match="begin again"):
            txn.commit()
        table.insert((3, "after"))
        with client.transaction() as txn:
            txn.send(topic, b"after")
        assert [m.value for m in consumer.poll(timeout=30)] == [b"after"]
        assert [m.value for m in subscription.receive_many(timeout=30)] == [b"after"]
        calls = []

        def work(txn: txnkv.Transaction) -> None:
            calls.append(txn.id)
            if len(calls) == 1:
                serving.kill()
                serving.start()
            txn.insert(table, (4, "once"))

        client.run(work, deadline=None)
        assert len(calls) > 1
    assert sorted(row["id"] for row in store.table("t").scan()) == [1, 3, 4]


def test_a_consumer_that_went_to_a_time_is_there_after_a_new_start_of_the_server(
    serving: Any, store: txnkv.Client
) -> None:
    serving.start()
    with txnkv.connect(serving.address) as client, client.topic("events").consumer() as consumer:
        with client.transaction() as txn:
            txn.send("events", b"old")
        sought: object = consumer.seek_to_time(datetime.now(UTC) + timedelta(days=1))
        assert sought is None
        serving.kill()
        serving.start()
        client.run(lambda txn: txn.send("events", b"new"), deadline=None)
        assert [m.value for m in consumer.poll(timeout=30)] == [b"new"]


ORDERS: list[dict[str, Any]] = [{}, {"order": "commit"}, {"isolation": "serializable"}]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_consumer_that_has_given_nothing_begins_where_it_began_after_a_new_start(
    serving: Any, store: txnkv.Client, order: dict[str, Any]
) -> None:
    torn = store.create_topic("torn")
    with store.transaction() as txn:
        txn.send(torn, b"0")
        txn.flush()
        txn.send(torn, b"1")
    torn.truncate(before=1)
    store.run(lambda txn: txn.send(torn, b"2"))
    serving.start()
    with txnkv.connect(serving.address) as client:
        begun = [
            [
                host.topic("events").consumer(start="latest", **order),
                host.topic("torn").consumer(**order),
            ]
            for host in (store, client)
        ]
        assert repr(begun[0]) == repr(begun[1])
        store.run(lambda txn: txn.send("events", b"a"))
        _again(serving, client)
        store.topic("events").alter(partitions=2)
        store.run(lambda txn: txn.send("events", b"b", partition=1))
        here, there = ([_all(consumer) for consumer in consumers] for consumers in begun)
        assert here == there
        assert here[0] == [b"a", b"b"]


def test_messages_that_were_given_back_come_again_after_a_new_start_of_the_server(
    serving: Any, store: txnkv.Client
) -> None:
    def send(value: bytes) -> None:
        store.run(lambda txn: txn.send("events", value))

    serving.start()

    async def work() -> None:
        async with txnkv.aio.connect(serving.address) as client:
            member = await client.consumer("events", group="g")
            await member.poll(timeout=0.0)
            send(b"a")
            polling = asyncio.ensure_future(member.poll(timeout=5.0))
            await asyncio.sleep(0)
            polling.cancel()
            await asyncio.wait([polling])
            await asyncio.sleep(0.5)  # it goes on
            await asyncio.to_thread(_again, serving, client.blocking)
            send(b"b")
            got = [m.value for m in await member.poll(timeout=30.0)]
            if got == [b"a"]:  # it was given back, and comes before what is new
                got += [m.value for m in await member.poll(timeout=30.0)]
            assert got == [b"a", b"b"]
            await member.close()

    asyncio.run(work())
    with txnkv.connect(serving.address) as client, client.topic("events").consumer() as consumer:
        assert [message.value for message in consumer.poll(max_messages=1)] == [b"a"]
        assert [message.value for message in consumer.poll()] == [b"b"]
        consumer.unpoll()
        serving.kill()
        consumer.unpoll()
        serving.start()
        _patiently(client.topics)
        assert consumer.position(0) == 1
        assert _all(consumer) == [b"b"]
        consumer.unpoll()
        consumer.seek(0, 0)
        consumer.unpoll()
        assert _all(consumer) == [b"a", b"b"]


def test_messages_whose_poll_was_not_answered_come_again(store: txnkv.Client, wire: Wire) -> None:
    with txnkv.connect(wire.address) as client, client.topic("events").consumer() as consumer:
        consumer.poll(timeout=0.0)
        store.run(lambda txn: txn.send("events", b"a"))
        wire.answers = False
        cuts = [threading.Timer(after, wire.cut) for after in (0.3, 0.8, 1.3, 1.8)]
        for each in cuts:
            each.start()
        with pytest.raises((txnkv.CommitOutcomeUnknownError, txnkv.UnavailableError)):
            consumer.poll(timeout=1.0)
        for each in cuts:
            each.join()
        wire.answers = True
        wire.cut()
        _patiently(client.topics)
        assert _all(consumer) == [b"a"]


@pytest.mark.parametrize("order", ORDERS[1:], ids=str)
def test_a_transaction_that_was_given_in_part_goes_on_after_a_new_start_of_the_server(
    serving: Any, store: txnkv.Client, order: dict[str, Any]
) -> None:
    values = [b"%d" % number for number in range(10)]
    for some, is_large in ((values[:5], True), (values[5:], False)):
        with store.transaction() as txn:
            for value in some:
                txn.send("events", value)
            if is_large:
                txn.flush()
    serving.start()
    with txnkv.connect(serving.address) as client:
        consumer = client.topic("events").consumer(**order)
        found: list[bytes] = []
        for most in (3, 3, 1, 1):
            given = consumer.poll(max_messages=most)
            consumer.unpoll()
            assert consumer.poll(max_messages=len(given)) == given
            found += [message.value for message in given]
            if len(found) in (3, 7):
                _again(serving, client)
        assert found + _all(consumer) == values


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("order", ["offset", "commit", "serializable"])
def test_a_loop_that_is_left_is_gone_on_with(
    store: txnkv.Client, serving: Any, order: Any, seed: int
) -> None:
    """As it is here; a server that was started again meanwhile takes nothing of it along."""
    topic = store.create_topic("two", partitions=2)
    for _ in range(10):
        with store.transaction() as txn:
            for number in (0, 1):
                txn.send(topic, b"", partition=number)
    serving.start()
    serial = order == "serializable"
    with txnkv.connect(serving.address) as client:
        there = client.topic("two")
        consumer = there.consumer("serializable") if serial else there.consumer(order=order)
        looped(consumer, [10, 10], order, seed)
        for number in (0, 1) if not seed else ():
            consumer.seek(number, 0)
        for message in consumer if not seed else ():
            _again(serving, client)
            assert message.offset == 0
            break
        assert len(_all(consumer)) == (0 if seed else 19)


def _all(consumer: Any) -> list[bytes]:
    found: list[bytes] = []
    while some := consumer.poll(timeout=0.5):
        found += [message.value for message in some]
    return found


def test_a_subscription_that_was_dropped_or_altered_stays_so_after_a_new_start_of_the_server(
    serving: Any, store: txnkv.Client
) -> None:
    serving.start()
    here = store.topic("events")
    with txnkv.connect(serving.address) as client:
        topic = client.topic("events")
        gone, closed, anew, kept = (
            topic.subscribe(name=name, type="shared", lease_seconds=5.0)
            for name in ("gone", "closed", "anew", "kept")
        )
        serving.kill()
        for name in ("gone", "closed", "anew"):
            here.drop_subscription(name)
        here.subscribe("anew", "shared", lease_seconds=60.0).close()
        here.subscribe("kept", "shared", lease_seconds=60.0).close()
        serving.start()
        _patiently(client.topics)
        closed.close()
        for dropped in (gone, anew):
            with pytest.raises(txnkv.TopicNotFoundError, match="was dropped: subscribe again"):
                dropped.receive(timeout=0.0)
        assert kept.receive(timeout=0.0) is None
        assert kept.info.lease_seconds == 60.0
        assert here.subscriptions() == ["anew", "kept"]


def test_a_producer_goes_on_after_a_new_start_of_the_server_unless_it_is_fenced(
    serving: Any, store: txnkv.Client
) -> None:
    serving.start()
    with txnkv.connect(serving.address) as client:
        elder, other = (client.topic("events").producer(name) for name in ("web", "other"))
        for producer in (elder, other):
            producer.send(b"elder's").result()
        heir = store.topic("events").producer("web")
        heir.send(b"heir's").result()
        for _ in range(2):
            _again(serving, client)
            with pytest.raises(txnkv.ProducerFencedError, match="a later producer took over"):
                elder.send(b"never").result()
            heir.send(b"heir's").result()
            other.send(b"other's").result()
        assert other.sent == 3
        with internals.status(store).write() as cur:  # as a week after its last use
            cur.execute("DELETE FROM producer_states")
            cur.execute("DELETE FROM producers WHERE name = 'other'")
        _again(serving, client)
        other.send(b"other's").result()
    values = [message.value for message in store.topic("events").consumer().poll()]
    assert Counter(values) == {b"elder's": 2, b"heir's": 3, b"other's": 3}


def _again(serving: Any, client: txnkv.Client) -> None:
    """Kill the server and start it; return when the client has it again."""
    serving.kill()
    serving.start()
    _patiently(client.topics)


def _patiently(ask: Callable[[], Any]) -> Any:
    """Ask until the server is there again."""
    give_up = time.monotonic() + 60
    while True:
        try:
            return ask()
        except txnkv.UnavailableError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize("point", ["log.written", "log.durable"])
def test_killed_at_a_step_of_a_commit(serving: Any, store: txnkv.Client, point: str) -> None:
    serving.start(fault=f"{point}=kill")
    with txnkv.connect(serving.address, keepalive_time=0.5) as client:
        txn = client.new_transaction()
        txn.insert("t", (1, "a"))
        id = txn.id
        with pytest.raises(txnkv.CommitOutcomeUnknownError) as caught:
            txn.commit()
        assert caught.value.txn_id == id
        serving.wait()
        serving.start()
        try:
            state = _patiently(lambda: client.transaction_state(id))
        except txnkv.TxnNotFoundError:
            state = txnkv.TxnState.ABORTED
        there = store.table("t").count() == 1
        assert (state is txnkv.TxnState.COMMITTED) == there
        error, words = (
            (txnkv.InvalidTxnStateError, "committed already")
            if there
            else (txnkv.UnavailableError, "begin again")
        )
        with pytest.raises(error, match=words):
            txn.commit()


@pytest.mark.parametrize("how", ["poll", "receive_many"])
def test_a_read_of_messages_whose_server_is_killed_may_be_made_again(
    serving: Any, store: txnkv.Client, how: str
) -> None:
    serving.start()
    topic = store.create_topic("read")
    with txnkv.connect(serving.address, keepalive_time=0.5) as client:
        there = client.topic("read")
        reader: Any = there.consumer() if how == "poll" else there.subscribe("s")
        read = getattr(reader, how)
        killing = threading.Timer(1.0, serving.kill)
        killing.start()
        with pytest.raises(txnkv.UnavailableError) as caught:
            read(timeout=60)
        assert caught.value.retriable
        killing.join()
        with store.transaction() as txn:
            txn.send(topic, b"m")
        serving.start()
        assert [message.value for message in _patiently(lambda: read(timeout=10))] == [b"m"]


@contextmanager
def _unreachable(client: Any) -> Iterator[None]:
    """Nothing arrives at the server."""

    def fail(*_: Any) -> None:
        raise fl.FlightUnavailableError("failed to connect to all addresses")

    flight = client.channel._flight
    client.channel._flight = SimpleNamespace(do_action=fail, do_put=fail)
    try:
        yield
    finally:
        client.channel._flight = flight


@pytest.mark.parametrize("how", ["heartbeat", "call"])
def test_what_is_dropped_while_the_server_is_away_is_given_up_later(
    remote: Callable[..., Any], store: txnkv.Client, how: str
) -> None:
    client, runtime = remote(), internals.runtime(store)
    table, txn = client.table("t"), client.new_transaction()
    assert txn.get(table, 1) is None
    assert runtime.least_pin() is not None
    with _unreachable(client):
        del txn
        gc.collect()
        if how == "heartbeat":
            client.channel.beat()
        else:
            with pytest.raises(txnkv.UnavailableError):
                table.get(1)
    if how == "heartbeat":
        client.channel.beat()
    else:
        assert table.get(1) is None
    assert runtime.least_pin() is None


def test_rows_whose_stream_did_not_arrive_may_be_written_again(
    remote: Callable[..., Any], store: txnkv.Client
) -> None:
    """The call that begins their transaction goes before them, and is not lost either."""
    client = remote()
    table = client.table("t")
    rows = pa.table({"id": range(200_000), "v": ["x" * 40] * 200_000})
    txn = client.new_transaction()
    with _unreachable(client), pytest.raises(txnkv.UnavailableError):
        txn.write(table, rows)
    txn.write(table, rows)
    txn.commit()
    assert store.table("t").count() == 200_000


def test_a_session_goes_on_after_a_new_start_of_the_server(
    serving: Any, store: txnkv.Client
) -> None:
    serving.start()
    with txnkv.connect(serving.address) as client, client.new_session() as session:
        session.insert("t", (1, "flushed"))
        session.flush()
        session.insert("t", (2, "waits at the client"))
        _again(serving, client)
        session.flush()
    assert store.table("t").count() == 2


@pytest.mark.parametrize("how", ["flush", "get", "caught"])
def test_a_transaction_is_given_up_where_a_call_of_it_breaks_off(
    store: txnkv.Client, wire: Wire, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing of it is committed: `run` runs it again."""
    monkeypatch.setattr("txnkv.remote.channel._TRIES", 1)
    begun: list[txnkv.Transaction] = []
    with txnkv.connect(wire.address) as client:
        table = client.table("t")

        def work(txn: txnkv.Transaction) -> None:
            assert txn.id
            begun.append(txn)
            txn.insert(table, (1, "once"))
            if len(begun) == 1:
                wire.cut_at_an_answer()
            with suppress(txnkv.UnavailableError if how == "caught" else ()):
                txn.get(table, 1) if how == "get" else txn.flush()

        client.run(work, deadline=None)
        assert len(begun) == 2
        with pytest.raises(txnkv.InvalidTxnStateError, match="was lost"):
            begun[0].commit()
    assert store.table("t").count() == 1


@pytest.mark.parametrize("in_transaction", [False, True])
def test_what_a_flush_behind_the_caller_meets_is_told(
    store: txnkv.Client,
    remote: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    in_transaction: bool,
) -> None:
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 1000.0)
    client = remote()
    gone = store.create_table("gone", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    txn = client.new_transaction() if in_transaction else None
    session = (txn or client).new_session("auto_background")
    session.insert("t", (1, "stays"))
    session.insert("gone", (1,))
    store.drop_table(gone)
    session._flusher._timer.function()
    assert session._flusher._flushing.exception(30) is not None
    with pytest.raises(txnkv.TableNotFoundError):
        session.insert("t", (2, "is not taken"))
    assert session.flush().inserted == 1
    session.close()
    if txn is not None:
        txn.commit()
    assert store.table("t").count() == 1


def test_nothing_is_flushed_behind_a_session_that_is_closed_or_dropped(
    store: txnkv.Client, remote: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 1000.0)
    client = remote()
    closed, dropped, left = (client.new_session("auto_background") for _ in range(3))
    for number, session in enumerate((closed, dropped, left)):
        session.insert("t", (number, ""))
    closed.close()
    assert closed._flusher._timer is None
    timer = dropped._flusher._timer
    del session, dropped
    gc.collect()
    timer.function()
    client.close()
    assert left._flusher._timer is None
    assert [row["id"] for row in store.table("t").scan()] == [0, 2]  # as the client was closed


def test_an_ended_transaction_keeps_no_rows(remote: Callable[..., Any]) -> None:
    client = remote()
    txn = client.new_transaction()
    session = txn.new_session("auto_sync")
    session.insert("t", (1, "in it"))
    at = txn.commit()
    for call in (lambda: session.insert("t", (2, "")), lambda: txn.get("t", 1)):
        with pytest.raises(txnkv.InvalidTxnStateError, match="COMMITTED"):
            call()
    session.close()
    assert txn.commit() == at


def test_a_transaction_whose_commit_refused_rows_takes_no_new_sessions(
    remote: Callable[..., Any],
) -> None:
    txn = remote().new_transaction()
    txn.delete("t", 9)
    with pytest.raises(txnkv.RowErrors):
        txn.commit()
    with pytest.raises(txnkv.InvalidTxnStateError, match="commit has already started"):
        txn.new_session()
    txn.commit()


def test_an_answer_that_is_lost_is_asked_for_again(store: txnkv.Client, wire: Wire) -> None:
    with txnkv.connect(f"grpc://127.0.0.1:{wire.port}") as client:
        table = client.table("t")
        for number in range(3):
            wire.cut_at_an_answer()
            with client.transaction() as txn:
                txn.insert(table, (number, "once"))  # a second time it would be refused
        wire.cut()
        table.insert((3, "once"))
        wire.cut()
        assert table.count() == 4
    assert store.table("t").count() == 4


def test_a_commit_that_comes_after_the_question_how_it_ended(
    store: txnkv.Client, serve: Callable[..., Server]
) -> None:
    """What a server that hung reads late must not be done, once its client was told that it is not:
    whoever was told so does it again.
    """
    with txnkv.connect(f"grpc://127.0.0.1:{serve().port}") as client:
        table = client.table("t")
        begun = client.new_transaction()
        begun.insert(table, (1, "begun, its commit is late"))
        assert client.transaction_state(begun.id) is txnkv.TxnState.OPEN
        assert client.outcome(begun.id) is txnkv.TxnState.ABORTED
        with pytest.raises(txnkv.InvalidTxnStateError):
            begun.commit()
        channel = client.channel  # type: ignore[attr-defined]
        spare = channel.spare_id()
        assert client.outcome(spare) is txnkv.TxnState.ABORTED
        channel.spare_ids.append(spare)
        late = client.new_transaction()
        late.insert(table, (2, "all of it is late"))
        with pytest.raises(txnkv.UnavailableError, match="begin again"):
            late.commit()
        with client.transaction() as txn:
            txn.insert(table, (3, "again"))
        assert client.outcome(txn.id) is txnkv.TxnState.COMMITTED
        assert [row["id"] for row in store.table("t").scan()] == [3]


@pytest.mark.slow
def test_a_server_that_hangs(serving: Any, store: txnkv.Client) -> None:
    serving.start()
    with txnkv.connect(serving.address, keepalive_time=0.5) as client:
        table = client.table("t")
        txn = client.new_transaction()
        txn.insert(table, (1, "a"))
        id = txn.id
        serving.signal(signal.SIGSTOP)
        with pytest.raises(txnkv.UnavailableError):
            table.get(1)
        with pytest.raises(txnkv.CommitOutcomeUnknownError) as caught:
            txn.commit()
        assert caught.value.txn_id == id
        serving.signal(signal.SIGCONT)
        assert _patiently(lambda: table.get(7)) is None
