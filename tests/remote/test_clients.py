"""A store by the address of its server: tables, transactions and topics, with local ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.threads import at_once
from tools.forked import Popen
from txnkv.remote import remote_client
from txnkv.remote.remote_transaction import RemoteTransaction

Remote = Callable[..., txnkv.Client]


def test_a_token_joins_from_here_and_from_there(store: txnkv.Client, remote: Remote) -> None:
    client, other = remote(), remote()
    with client.transaction() as txn:
        txn.insert("t", (1, "begun there"))
        token = txn.serialize()
        for joined_by in (store, other):
            with txnkv.Transaction.deserialize(joined_by, bytes(token)) as joined:
                joined.insert("t", (2 if joined_by is store else 3, "joined"))
        assert [row["id"] for row in txn.scan("t", ordered=True)] == [1, 2, 3]
        assert store.table("t").count() == 0
    assert store.table("t").count() == 3
    txn = store.new_transaction()  # and begun here
    with txnkv.Transaction.deserialize(client, str(txn.serialize())) as joined:
        joined.upsert("t", (1, "joined from there"))
    txn.commit()
    assert client.table("t").get(1) == {"id": 1, "v": "joined from there"}


def test_a_member_of_a_group_leaves_with_its_client(store: txnkv.Client, remote: Remote) -> None:
    store.create_topic("read", partitions=2)
    client = remote()
    member = client.consumer("read", "g", max_poll_seconds=600)
    while len(member.partitions) < 2:
        member.poll()
    client.close()
    with store.consumer("read", "g") as other:
        other.poll(timeout=0)
        assert other.partitions == [0, 1]
    member.close()


def test_a_small_transaction_is_one_request(store: txnkv.Client, remote: Remote) -> None:
    client = remote()
    table = client.table("t")
    client.transaction().commit()  # which asks for its id first
    before = next(client.channel._numbers)  # type: ignore[attr-defined]
    with client.transaction() as txn:
        txn.insert(table, (1, "a"))
        txn.upsert(table, {"id": 2})
        txn.delete_ignore(table, 3)
    assert next(client.channel._numbers) == before + 2  # type: ignore[attr-defined]
    assert list(store.table("t").scan(ordered=True)) == [{"id": 1, "v": "a"}, {"id": 2, "v": None}]


@pytest.mark.parametrize("mode", ["manual", "auto_background"])
def test_what_waits_goes_in_requests_of_a_bounded_size(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    monkeypatch.setattr("txnkv.remote.remote_session._REQUEST_BYTES", 1 << 16)
    client: Any = remote()
    sizes: list[int] = []
    answers = client.channel._answers

    def noted(request: bytes) -> Any:
        sizes.append(len(request))
        return answers(request)

    monkeypatch.setattr(client.channel, "_answers", noted)
    table, topic = client.table("t"), client.topic("events")
    with client.transaction() as txn:
        for i in range(40):
            txn.insert(table, (i, "x" * 10_000))
            txn.send(topic, b"y" * 10_000)
    with client.new_session(flush_mode=mode, buffer_bytes=None) as session:
        for i in range(40, 80):
            session.insert(table, (i, "x" * 10_000))
    assert max(sizes) < 100_000
    assert table.count() == 80
    limited = client.new_session(buffer_bytes=200_000)
    for i in range(80, 100):
        limited.insert(table, (i, "x" * 10_000))
    with pytest.raises(txnkv.InvalidTxnStateError, match="buffer_bytes"):
        limited.insert(table, (100, "x"))
    assert limited.flush().inserted == 20
    limited.insert(table, (200, "z"))
    limited.close()
    assert table.count() == 101


def test_an_answer_is_read_to_its_end(
    store: txnkv.Client, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not is cancelled, which takes a fifth of a get's time."""
    client = remote()
    answers = client.channel._answers  # type: ignore[attr-defined]
    begun: list[bytes] = []
    ended: list[bytes] = []

    def watched(request: bytes) -> Iterator[Any]:
        begun.append(request)
        yield from answers(request)
        ended.append(request)

    monkeypatch.setattr(client.channel, "_answers", watched)  # type: ignore[attr-defined]
    client.table("t").insert((1, "a"))
    client.run(lambda txn: txn.upsert("t", (2, "b")))
    assert client.table("t").get(1) is not None
    assert ended == begun != []


@pytest.mark.parametrize("start", [False, True])
def test_a_commit_that_fails_in_its_own_way_leaves_word_of_how_the_transaction_stands(
    store: txnkv.Client, remote: Remote, monkeypatch: pytest.MonkeyPatch, start: bool
) -> None:
    client = remote()
    txn = client.new_transaction()
    txn.upsert("t", (1, "a"))
    txn.flush()

    def refuse(*_: object) -> None:
        raise ValueError("a row is too large")

    with monkeypatch.context() as patched:
        patched.setattr(txnkv.Transaction, "start_commit" if start else "commit", refuse)
        with pytest.raises(ValueError, match="too large"):
            (txn.start_commit if start else txn.commit)()
    txn.upsert("t", (2, "b"))  # it is open
    txn.commit()
    assert store.table("t").count() == 2


def test_what_comes_to_a_transaction_whose_commit_found_its_table_dropped_is_told_so(
    store: txnkv.Client, remote: Remote
) -> None:
    client = remote()
    store.create_table("gone", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    txn = client.new_transaction()
    txn.upsert("gone", (1,))
    store.drop_table("gone")
    with pytest.raises(txnkv.TableNotFoundError, match="'gone' was dropped"):
        txn.commit()
    with pytest.raises(txnkv.InvalidTxnStateError, match=r"ABORTED \(table 'gone' was dropped"):
        txn.upsert("t", (1, "a"))


def test_the_begin_is_before_the_next_request(store: txnkv.Client, remote: Remote) -> None:
    client = remote()
    table = client.table("t")
    with client.new_transaction() as txn:
        assert table.get(1) is None
        store.table("t").insert((1, "another"))
        txn.upsert(table, (1, "by what was read before"))
        with pytest.raises(txnkv.TransactionConflictError):
            txn.commit()
    assert table.get(1) == {"id": 1, "v": "another"}


def test_streams_of_many_rows(store: txnkv.Client, remote: Remote) -> None:
    client = remote()
    rows = pa.table({"id": pa.array(range(300_000), pa.int64()), "v": ["x"] * 300_000})
    with client.transaction() as txn:
        assert txn.write("t", rows).inserted == 300_000
    table = client.table("t")
    assert table.scan(ordered=True).to_arrow().cast(rows.schema) == rows
    tokens = table.scan().tokens(rows=50_000)
    assert len(tokens) > 1
    assert sum(token.open(client).to_arrow().num_rows for token in tokens) == 300_000
    assert sum(token.open(store).to_arrow().num_rows for token in tokens) == 300_000
    assert table.scan([]).to_arrow().num_rows == 300_000

    def broken() -> Any:
        yield rows.slice(0, 10).to_batches()[0]
        raise RuntimeError("the source broke")

    reader = pa.RecordBatchReader.from_batches(rows.schema, broken())
    with pytest.raises(RuntimeError, match="the source broke"), client.new_session() as session:
        session.write("t", reader, op="upsert")
    with client.transaction() as txn, pytest.raises(txnkv.RowErrors) as caught:
        txn.write("t", rows.slice(0, 100_000))
    assert caught.value.count == 100_000


def test_few_rows_come_as_here(store: txnkv.Client, remote: Remote) -> None:
    """In one answer, if that is small, and batches would not keep more of their types."""
    zone, utc = "timestamp[us, tz=Europe/Berlin]", "timestamp[us, tz=UTC]"
    schema = {"k": "int64", "at": utc, "in": f"list<{zone}>?", "v": "binary"}
    here = store.create_table("few", txnkv.Schema(schema, primary_key=["k"]))
    at = datetime(2024, 3, 30, 11, tzinfo=UTC)
    few = [("k", ">=", 0), ("k", "<", 40)]
    for k in range(3):
        here.insert({"k": k, "at": at, "in": [at], "v": b"x"})
    there = remote().table("few")
    for columns in (["k", "at"], None):
        wanted = repr(list(here.scan(columns, few, ordered=True)))
        scan = there.scan(columns, few, ordered=True)
        assert repr(list(scan)) == wanted
        here.upsert({"k": 2, "at": at, "in": None, "v": b"y"})
        assert repr(list(scan)) == wanted
        assert scan.to_arrow().num_rows == 3
    scan = there.scan(where=few)
    here.alter(add={"n": txnkv.Column("int8", default=7)}, drop=["in"])
    assert {row["n"] for row in scan} == {7}
    assert scan.schema.names == ["k", "at", "v", "n"]
    for k in range(30):
        here.upsert({"k": k, "at": at, "v": bytes(100_000)})
    assert sum(len(row["v"]) for row in there.scan(where=few)) == 3_000_000


def test_times_keep_their_zones(store: txnkv.Client, remote: Remote) -> None:
    schema = {"k": "int64", "at": "timestamp[us, tz=Europe/Berlin]", "utc": "timestamp[us, tz=UTC]"}
    here = store.create_table("times", txnkv.Schema(schema, primary_key=["k"]))
    for k, hour in enumerate((0, 1)):  # the hour that comes twice
        at = datetime(2026, 10, 25, hour, 30, tzinfo=UTC)
        here.insert({"k": k, "at": at, "utc": at})
    client = remote()
    there = client.table("times")
    for k in range(2):
        row = there.get(k)
        assert row is not None
        assert repr(row) == repr(here.get(k)) == repr(client.new_transaction().get(there, k))
        assert row["at"].tzinfo is ZoneInfo("Europe/Berlin")
    there.upsert({"k": 2, "at": row["at"], "utc": row["at"]})
    assert here.get(2) == row | {"k": 2}


def test_rows_that_wait_go_into_the_columns_of_their_call(
    store: txnkv.Client, remote: Remote
) -> None:
    """Whatever these are named by the time of the flush."""
    columns = {"id": "int64", "price": "int64?", "cost": "int64?", "old": "int64?"}
    here = store.create_table("named", txnkv.Schema(columns, primary_key=["id"]))
    client = remote()
    session, late, txn = client.new_session(), client.new_session(), client.new_transaction()
    txn.get("named", 1)
    there, row = client.table("named"), {"price": 100, "cost": 7}
    session.upsert(there, {"id": 1, **row})
    txn.upsert(there, {"id": 2, **row})
    here.alter(rename={"price": "value"})
    session.flush()
    assert list(here.scan()) == [{"id": 1, "value": 100, "cost": 7, "old": None}]
    with pytest.raises(txnkv.SchemaChangedError):
        txn.commit()
    late.upsert(there, {"id": 3, "old": 1})
    here.alter(drop=["old"])
    late.flush()
    assert list(here.scan(where=[("id", "=", 3)])) == [{"id": 3, "value": None, "cost": None}]
    assert here.count() == 2


def test_an_exactly_once_pipe(store: txnkv.Client, remote: Remote) -> None:
    client = remote()
    topic = client.topic("events")
    with topic.producer("source") as producer:
        futures = [producer.send(b"%d" % n) for n in range(10)]
    assert [future.result().offset for future in futures] == list(range(10))
    with topic.subscribe("pipe", type="shared") as subscription:
        done = 0
        while done < 10:
            messages = subscription.receive_many(4, timeout=30)

            def work(txn: txnkv.Transaction, messages: list[txnkv.Message] = messages) -> None:
                for message in messages:
                    txn.insert("t", (int(message.value), "worked on"))
                txn.ack(subscription, messages)

            client.run(work)
            done += len(messages)
        assert subscription.lag() == {0: 0}
    assert store.table("t").count() == 10


def test_a_client_that_is_gone_gives_back_what_it_had(
    store: txnkv.Client, remote: Remote, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txnkv.server.guests._MADE_SOON", 3600)  # nobody waits for what is lost
    client = remote(keepalive_time=0.5)
    subscription = client.topic("events").subscribe("one")
    txn = client.new_transaction()
    txn.insert("t", (1, "never"))
    assert txn.get("t", 1) is not None
    client.channel._stop.set()  # type: ignore[attr-defined]  # as with its process
    until(lambda: _may_subscribe(store))
    with pytest.raises(txnkv.TxnNotFoundError):
        _ = txn.state
    with pytest.raises(txnkv.UnavailableError, match="begin again"):
        txn.commit()
    txn.rollback()
    assert store.table("t").count() == 0
    assert subscription.receive(timeout=0) is None  # made again


def _may_subscribe(store: txnkv.Client) -> bool:
    try:
        store.topic("events").subscribe("one").close()
    except txnkv.UnavailableError:
        return False
    return True


def test_a_forked_child_is_refused(serving: Any) -> None:
    serving.start()
    with txnkv.connect(serving.address) as client:
        table = client.table("t")
        child = os.fork()
        if child == 0:
            try:
                table.get(1)
            except txnkv.ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        table.insert((1, "parent"))


def test_asyncio(store: txnkv.Client, remote: Remote) -> None:
    address = remote().path

    async def work() -> int:
        async with txnkv.aio.connect(address) as client:
            table = await client.table("t")

            async def write(txn: Any) -> None:
                await txn.insert(table, (1, "a"))
                await txn.send("events", b"a")
                assert (await txn.scan("t").to_arrow()).num_rows == 1

            await client.run(write)
            assert [row["v"] async for row in (await client.snapshot()).scan("t")] == ["a"]
            return int(await table.count())

    assert asyncio.run(work()) == 1


@pytest.mark.parametrize("in_asyncio", [False, True])
def test_who_lost_goes_before_who_comes(
    store: txnkv.Client, remote: Remote, in_asyncio: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, had = internals.runtime(store), []
    asked: list[bool] = []  # in the main thread

    def wait(attempts: Any, *args: Any) -> Any:
        asked.append(threading.current_thread() is threading.main_thread())
        return waiting(attempts, *args)

    waiting = remote_client._RemoteAttempts.wait
    monkeypatch.setattr(remote_client._RemoteAttempts, "wait", wait)

    def meet_another() -> tuple[int, str]:
        had.append(way.way_until > 0)
        if len(had) <= 2:
            store.table("t").upsert((1, "rival"))
        return 1, str(len(had))

    def lose(txn: txnkv.Transaction) -> None:
        txn.get("t", 1)
        txn.upsert("t", meet_another())

    async def lose_in_turn(txn: Any) -> None:
        await txn.get("t", 1)
        await txn.upsert("t", meet_another())

    async def work() -> None:
        async with txnkv.aio.connect(remote().path) as client:
            await client.run(lose_in_turn)
            assert not way.way_until

    if in_asyncio:
        asyncio.run(work())
        assert asked == [False] * 2  # a loop goes on meanwhile
    else:
        remote().run(lose)
    assert had == [False, False, True]
    assert not way.way_until  # though the server does not know yet that the run is over
    assert store.table("t").get(1) == {"id": 1, "v": "3"}


def test_who_only_reads_is_told_all_that_is_read(store: txnkv.Client, remote: Remote) -> None:
    reader = remote(read_only=True)
    with store.transaction() as txn:
        txn.insert("t", (1, "a"))
    assert [each.id for each in reader.transactions()] == [each.id for each in store.transactions()]
    assert reader.stats()["tables"].keys() == {"t"}
    assert reader.metrics()["commits"] >= 1
    assert reader.check().ok
    token = store.new_transaction().serialize()
    for call in (
        lambda: txnkv.Transaction.deserialize(reader, token),
        reader.table("t").next_id,
        reader.compact,
        reader.repair_clock,
        lambda: reader.drop_table("t"),
        lambda: reader.abort_transaction(txn.id),
        lambda: reader.table("t").insert((2, "b")),
    ):
        with pytest.raises(txnkv.NotSupportedError, match="read_only=True"):
            call()
    assert store.table("t").count() == 1


def test_what_is_done_on_the_stores_host(
    store: txnkv.Client, remote: Remote, tmp_path: Path
) -> None:
    client, anywhere = remote(), tmp_path / "anywhere"
    with pytest.raises(txnkv.NotSupportedError, match="store's host"):
        client.backup(anywhere)
    with pytest.raises(txnkv.NotSupportedError, match="made on the store's host"):
        txnkv.dump(client, anywhere)
    with pytest.raises(txnkv.NotSupportedError, match="another host's store"):
        txnkv.replicate(client, anywhere)
    assert not anywhere.exists()
    assert client.check().problems == []
    assert client.stats()["tables"]["t"]["rows"] == 0
    assert client.metrics()["commits"] >= 0
    with pytest.raises(ValueError, match="no address"):
        txnkv.connect("grpc://nowhere")
    with pytest.raises(txnkv.UnavailableError, match="Nothing was done"):
        txnkv.connect("grpc://127.0.0.1:1")
    with pytest.raises(ValueError, match="is a folder"):
        txnkv.connect("somewhere", credentials="ann.secret")


def test_the_command(serving: Any) -> None:
    serving.start()
    with txnkv.connect(serving.address) as client:
        client.table("t").insert((1, "a"))
    serving.signal(signal.SIGTERM)
    assert serving.wait() == 0


_SIGNALLED = """
import signal, threading, time
def end():
    while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        time.sleep(0.01)
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=end).start()
from txnkv.__main__ import main
main()
"""


def test_the_command_ends_whichever_thread_has_the_signal(
    store: txnkv.Client, store_path: Path
) -> None:
    """The main thread, which waits, is not woken by it; nor is it by one that arrives as it begins
    to wait, as it did at servers that were stopped when they had just started (`tools.bounces`).
    """
    command = [sys.executable, "-c", _SIGNALLED, "serve", str(store_path)]
    child = Popen([*command, "--listen", "grpc://127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    try:
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.communicate()


def test_tables_and_topics_change(store: txnkv.Client, remote: Remote) -> None:
    """From there, under handles that others have, and the other way round."""
    client, other = remote(), remote()
    table, here = client.table("t"), store.table("t")
    kept = other.table("t")
    table.insert((1, "a"))
    with client.snapshot() as before:
        new = txnkv.Column("int8", default=3)
        table.alter(add={"n": new}, rename={"v": "w"})
        schema = table.alter(widen={"n": pa.int64()}, default={"n": None}, nullable={"w": False})
        assert schema == here.schema == kept.schema
        assert schema.type_names() == {"id": "int64", "w": "string", "n": "int64"}
        kept.insert({"id": 2, "w": "b", "n": 1 << 40})
        with pytest.raises(txnkv.SchemaError, match="not all its values are int8"):
            table.alter(widen={"n": "int8"})
        renamed = client.rename_table(table, "u")
        assert renamed.name == table.name == here.name == store.tables()[0] == "u"
        assert table.get(2) == renamed.get(2) == {"id": 2, "w": "b", "n": 1 << 40}
        assert kept.get(1) == {"id": 1, "w": "a", "n": 3}
        done = client.run(lambda txn: renamed.restore(before, txn))
        assert (done.inserted, done.updated, done.deleted) == (0, 0, 1)
        assert renamed.restore(before) == txnkv.WriteResult()
    assert list(here.scan()) == [{"id": 1, "w": "a", "n": 3}]
    topic = client.topic("events")
    assert topic.alter(compression="zstd", retention_bytes=5)["compression"] == "zstd"
    assert store.topic("events").options == topic.options == other.topic("events").options
    with client.transaction() as txn:
        for number in range(4):
            txn.send(topic, b"%d" % number)
    with pytest.raises(txnkv.OffsetOutOfRangeError, match="Truncate after -1"):
        topic.truncate(after=2)
    assert topic.truncate(3) == topic.truncate({0: 1}) == {0: 3}
    with pytest.raises(txnkv.OffsetOutOfRangeError):
        topic.truncate(9)
    assert topic.truncate(after=3) == {0: 4}
    with topic.consumer() as consumer:
        assert [each.value for each in consumer.poll()] == [b"3"]


def test_partitions_are_added_to_a_topic_that_is_held(store: txnkv.Client, remote: Remote) -> None:
    client, other = remote(), remote()
    topic, held = client.topic("events"), other.topic("events")
    with (
        held.consumer(start="latest") as consumer,
        held.subscribe("s", start="latest") as subscription,
        held.producer() as producer,
    ):
        count = topic.partitions + 2
        topic.alter(partitions=count)
        assert held.partitions == store.topic("events").partitions == count
        with other.transaction() as txn:
            txn.send(held, b"by the transaction", partition=count - 1)
        producer.send(b"by the producer", partition=count - 2).result()
        values = [b"by the producer", b"by the transaction"]
        assert sorted(each.value for each in subscription.receive_many(timeout=60)) == values
        found = []
        while len(found) < 2:
            found += consumer.poll(timeout=60)
        assert sorted(each.value for each in found) == values
        assert consumer.partitions == list(range(count))
        assert consumer.position(count - 1) == 1
    with pytest.raises(ValueError, match="it can have more"):
        client.topic("events").alter(partitions=1)


def test_a_successor_under_a_name(store: txnkv.Client, remote: Remote) -> None:
    client, other = remote(), remote()
    first = client.new_transaction(name="n")
    first.insert("t", (1, "never"))
    with other.transaction(name="n") as second:
        second.insert("t", (2, "a"))
        with pytest.raises(txnkv.ProducerFencedError, match="another transaction 'n' has begun"):
            first.commit()
        for begin in (
            lambda: client.new_transaction(name="n"),
            lambda: client.run(lambda txn: txn.insert("t", (3, "never")), name="n"),
        ):
            with pytest.raises(txnkv.ProducerFencedError, match="another client has taken"):
                begin()
    other.run(lambda txn: txn.insert("t", (4, "again")), name="n")
    other.run(lambda txn: txn.insert("t", (5, "and again")), name="n")
    with store.transaction(name="n") as txn:
        txn.insert("t", (6, "from here"))
    with pytest.raises(txnkv.ProducerFencedError):
        other.run(lambda txn: None, name="n")
    with remote().transaction(name="n") as txn:
        txn.insert("t", (7, "begun anew"))
    assert [row["id"] for row in store.table("t").scan(ordered=True)] == [2, 4, 5, 6, 7]


def test_threads_that_begin_under_a_name_at_once(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client was locked out of its name by the claim of its own that came later."""
    client, told, late = remote(), RemoteTransaction._learn, [0.3, 0.0]

    def slowly(txn: RemoteTransaction, about: Any) -> None:
        time.sleep(late.pop(0) if late else 0)
        told(txn, about)

    monkeypatch.setattr(RemoteTransaction, "_learn", slowly)
    at_once(*[lambda: client.new_transaction(name="n").rollback()] * 2)
    client.new_transaction(name="n").rollback()
    assert [row["epoch"] for row in client.table("transaction_names").scan()] == [0]
