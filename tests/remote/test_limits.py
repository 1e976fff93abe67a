"""What stays at the server of clients that fail, leave, or are not heard: nothing."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
import txnkv.aio
from tests.remote.conftest import SCHEMA, Wire
from tests.remote.test_faults import _until
from txnkv.remote import unpack
from txnkv.remote.channel import Channel, _Broken
from txnkv.server import EVERYBODY, Limits, Server, Users, add_user, answering, guests
from txnkv.transaction import Transaction

Serve = Callable[..., Server]


def stream(*columns: Any, names: tuple[str, ...] = ("id", "v")) -> pa.RecordBatchReader:
    batches = [pa.record_batch(list(each), names=names) for each in columns]
    return pa.RecordBatchReader.from_batches(batches[0].schema, batches)


def test_streams_that_fail_are_counted_no_more(store: txnkv.Client, serve: Serve) -> None:
    """Each of them took one of the user's streams for ever: after so many it had none."""
    server = serve(limits=Limits(streams=2))
    with txnkv.connect(f"grpc://127.0.0.1:{server.port}") as client:
        for _ in range(5):
            _until(lambda: not any(server._streams.values()))
            with pytest.raises((ValueError, txnkv.TxnkvError)) as caught:
                client.new_session().write("t", stream([[1]], names=("nothing",)))
            assert "streams" not in str(caught.value)
            null = pa.array([None], pa.int64())
            with pytest.raises((ValueError, txnkv.TxnkvError)) as caught:
                client.new_session().write("t", stream([[1], ["a"]], [null, ["b"]]))
            assert "streams" not in str(caught.value)
        with client.transaction() as txn:
            txn.write("t", stream([[1], ["a"]], [[2], ["b"]]))
        assert client.table("t").scan().to_arrow().num_rows == 2
        _until(lambda: not any(server._streams.values()))


def test_batches_of_a_stream_that_differ(store: txnkv.Client, serve: Serve) -> None:
    """They are refused here, and the client waited for the server to do so, for ever."""
    with txnkv.connect(f"grpc://127.0.0.1:{serve().port}") as client:
        with pytest.raises(ValueError, match="columns"):
            client.new_session().write("t", stream([[1], ["a"]], [[None], ["b"]]))
        client.new_session().write("t", stream([[1], ["a"]]))


def test_one_that_cannot_be_given_up_keeps_no_other(
    store: txnkv.Client, serve: Serve, monkeypatch: Any
) -> None:
    """The thread that gives clients up ended with the first error that it had not thought of."""
    server = serve()
    address = f"grpc://127.0.0.1:{server.port}"
    rollback = Transaction.rollback

    def failing(txn: Transaction) -> None:
        monkeypatch.setattr(Transaction, "rollback", rollback)
        raise RuntimeError("no way")

    with txnkv.connect(address, keepalive_time=0.5) as one:
        kept = one.new_transaction()
        assert kept.id
        monkeypatch.setattr(Transaction, "rollback", failing)
        one.channel._stop.set()  # type: ignore[attr-defined]
        server._guests._guests[one.channel.guest].seen = 0.0  # type: ignore[attr-defined]
        _until(lambda: not server._guests._guests)
        server._guests._thread.join(0.6)
        assert server._guests._thread.is_alive()


def test_a_handle_that_is_made_while_its_client_leaves(
    store: txnkv.Client, serve: Serve, monkeypatch: Any
) -> None:
    server = serve()
    begin = answering.begin_transaction
    made: list[Transaction] = []

    def late(client: Any, *args: Any, **named: Any) -> Any:
        made.append(begin(client, *args, **named))
        made[0].context.ensure_stored("begin")
        (guest,) = server._guests._guests
        server._guests.end(guest, EVERYBODY)
        return made[0]

    monkeypatch.setattr(answering, "begin_transaction", late)
    with txnkv.connect(f"grpc://127.0.0.1:{server.port}") as client:
        with pytest.raises(txnkv.UnavailableError):
            _ = client.new_transaction().id
        assert made[0]._heart is None  # which would keep it open for ever


def test_a_commit_is_done_whose_begin_was_not_heard(store: txnkv.Client, serve: Serve) -> None:
    """The connection is cut between the two parts of an answer: the request was over, half done."""
    server = serve()
    with txnkv.connect(f"grpc://127.0.0.1:{server.port}") as client:
        cut: list[int] = []

        def answers(request: bytes) -> Iterator[Any]:
            parts = server._request(EVERYBODY, request)
            for part in parts:
                answer = unpack(part)
                if not cut:
                    cut.append(len(answer["values"]))
                    parts.close()  # type: ignore[attr-defined]
                    raise _Broken("it was cut", arrived=True)
                yield answer["values"], answer.get("error"), answer

        client.channel._answers = answers  # type: ignore[attr-defined]
        with client.transaction() as txn:
            txn.insert("t", (1, "once"))
        assert cut == [2]
    assert store.table("t").count() == 1


def test_a_request_whose_answer_was_given_up_is_not_done_again(
    store: txnkv.Client, serve: Serve
) -> None:
    guest = serve()._guests.of("x" * 16, 10.0, EVERYBODY)
    for number in range(1, 1002):
        assert guest.answer_of(number, asked=False, known=True)[1]
    with pytest.raises(txnkv.CommitOutcomeUnknownError):
        guest.answer_of(1, asked=True, known=True)
    assert guest.answer_of(1002, asked=True, known=True)[1]  # it had not arrived


def test_a_client_that_closes_asks_a_server_that_hangs_no_more(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited for three tries of a flush behind it, each as long as its patience."""
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 0.01)
    wire = Wire(serve().port)
    client = txnkv.connect(wire.address, keepalive_time=2.0)
    table, session = client.table("t"), client.new_session("auto_background")
    asked, answers = list[bytes](), client.channel._answers
    monkeypatch.setattr(
        client.channel, "_answers", lambda request: asked.append(request) or answers(request)
    )
    wire.answers = False
    session.insert(table, (1, ""))
    _until(lambda: bool(asked))
    client.close()
    assert len(asked) == 1
    assert (
        "in which 1 rows or messages waited, failed as its client was closed: the server"
        in caplog.text
    )
    wire.close()


def test_a_reader_takes_no_names(store: txnkv.Client, serve: Serve, tmp_path: Path) -> None:
    """It would end the transaction that another one has open under the name."""
    token = add_user(tmp_path / "users", "eve", "read", ["*"], ["*"])
    server = serve(Users(tmp_path / "users"))
    with (
        txnkv.connect(f"grpc://127.0.0.1:{server.port}", credentials=token) as eve,
        store.new_transaction(name="billing") as billing,
    ):
        billing.upsert("t", (1, "paid"))
        with pytest.raises(txnkv.AuthenticationError, match="write"):
            _ = eve.new_transaction(name="billing").id
        with pytest.raises(txnkv.AuthenticationError, match="write"):
            eve.run(lambda txn: txn.get("t", (1,)), name="billing")
        billing.commit()
    assert store.table("t").schema.names == SCHEMA.names
    assert store.table("t").count() == 1


def test_free_memory_goes_back(serve: Serve, monkeypatch: Any) -> None:
    """What is free in pieces stayed with the process, more with each minute."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("the allocator is not glibc's")

    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    monkeypatch.setattr(guests, "_TRIM_SECONDS", 3600.0)
    serve()
    many = [bytearray(40_000) for _ in range(2_000)]
    del many[:-1]  # the last one holds the end of the heap
    high = mapped()
    monkeypatch.setattr(guests, "_TRIM_SECONDS", 0.0)
    _until(lambda: mapped() < high - 60_000_000)
    assert len(many) == 1


def test_a_closed_server_is_gone_at_once(store: txnkv.Client, store_path: Path) -> None:
    """A forked child cleared it away, and waited for threads of gRPC that it does not have."""
    gc.disable()
    try:
        server = Server(str(store_path), "grpc://127.0.0.1:0")
        with txnkv.connect(f"grpc://127.0.0.1:{server.port}") as client:
            client.table("t").insert((1, "a"))
        server.close()
        seen = weakref.ref(server)
        del server
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("open_here", ["a client", "a server"])
def test_a_forked_child_waits_for_no_threads(
    store_path: Path, serve: Serve, process: Callable[..., Any], open_here: str
) -> None:
    """Those of gRPC that it does not have: its first call hung, and so did its end."""
    code = """
        from txnkv.server import Server
        if open_here == "a server":
            held = Server(path, "grpc://127.0.0.1:0")
        else:
            held = txnkv.connect(address)
            held.table("t").get(1)
        if (pid := os.fork()) == 0:
            try:
                txnkv.connect(address).table("t").get(1)
            except txnkv.NotSupportedError:
                with held:
                    sys.exit(7)
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        held.close()
    """
    address = f"grpc://127.0.0.1:{serve().port}"
    child = process(code, address=address, path=str(store_path), open_here=open_here)
    assert child.finish() == 7


def test_who_is_gone_gets_no_id_that_nobody_ends(store: txnkv.Client) -> None:
    """A request that was under way at its good-bye; the low water mark stood still at that id."""
    connected = guests.Guests(lambda _: txnkv.connect(store.path), Limits())
    try:
        guest = connected.of("w" * 16, 10.0, EVERYBODY)
        assert guest.spare_id() > 0
        connected.end(guest.id, EVERYBODY)
        assert guest.spare_id() == 0
    finally:
        connected.close()


def test_a_client_that_waits_for_a_long_request_is_not_gone(store: txnkv.Client) -> None:
    """It says nothing meanwhile; another one that says nothing is given up."""
    connected = guests.Guests(lambda _: txnkv.connect(store.path), Limits())
    try:
        waiting, silent = (connected.of(name * 16, 0.5, EVERYBODY) for name in "ws")
        waiting.work(1)
        waiting.seen = silent.seen = 0.0
        _until(lambda: not connected.has(silent.id))
        assert connected.has(waiting.id)
        assert not waiting.closed
    finally:
        connected.close()


def test_tasks_that_wait_at_a_server_keep_no_thread_from_others(
    remote: Callable[..., txnkv.Client],
) -> None:
    async def work() -> None:
        async with txnkv.aio.connect(remote().path) as client:
            topic = await client.topic("events")
            subs = [await topic.subscribe("s", "shared") for _ in range(20)]
            before = len(client._calls._pool._threads)
            tasks = [asyncio.ensure_future(sub.receive(timeout=60)) for sub in subs]
            while len(client._calls.patient._pool._threads) < 20:
                await asyncio.sleep(0.005)
            assert len(client._calls._pool._threads) == before
            async with client.transaction() as txn:
                for _ in range(20):
                    await txn.send(topic, b"a")
            found = await asyncio.gather(*tasks)
            assert sorted(each.offset for each in found if each is not None) == list(range(20))

    asyncio.run(work())


def test_a_forked_child_is_refused_in_asyncio(serving: Any) -> None:
    serving.start()

    async def begin() -> tuple[txnkv.aio.AsyncClient, txnkv.aio.AsyncTable]:
        client = await txnkv.aio.connect(serving.address)
        return client, await client.table("t")

    async def in_child() -> None:
        with pytest.raises(txnkv.ClosedError):
            await asyncio.wait_for(table.get(1), 30)

    async def end() -> None:
        async with client:
            await table.insert((1, "parent"))

    client, table = asyncio.run(begin())
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(in_child())
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    asyncio.run(end())


def test_a_client_that_could_not_connect_knocks_no_more(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error may be kept for long, and with it the client."""
    made: list[Channel] = []
    begin = Channel._client

    def client(channel: Channel) -> Any:
        made.append(channel)
        return begin(channel)

    monkeypatch.setattr(Channel, "_client", client)
    gone = serve()
    gone.close()
    with pytest.raises(txnkv.UnavailableError, match="does not answer"):
        txnkv.connect(f"grpc://127.0.0.1:{gone.port}")
    assert {each.closed for each in made} == {True}
    _until(lambda: not any(each._thread and each._thread.is_alive() for each in made))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EMFILE, txnkv.UnavailableError),
        (errno.ENOSPC, txnkv.StorageFullError),
        (errno.ELOOP, OSError),
    ],
)
def test_what_the_system_refuses_the_server_is_the_server_s(
    remote: Callable[..., txnkv.Client],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    expected: type[Exception],
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(code, os.strerror(code), "some/file")

    client = remote()
    txn = client.new_transaction()
    txn.insert("t", (1, "a"))
    monkeypatch.setattr(Transaction, "_write_rows", refuse)
    with pytest.raises(expected) as caught:
        txn.commit()
    monkeypatch.undo()
    told = str(caught.value)
    assert ("the server's some/file" in told) == (expected is not OSError)
    assert "a call failed" in caplog.messages


def _held(server: Server) -> list[str]:
    (guest,) = server._guests._guests.values()
    return [type(each.value).__name__ for each in guest.handles.values()]


def test_what_is_dropped_before_it_is_made_is_not_kept(store: txnkv.Client, serve: Serve) -> None:
    """A session stayed at the server for good, where it was made and dropped between requests."""
    server = serve()
    with txnkv.connect(f"grpc://127.0.0.1:{server.port}") as client:
        table = client.table("t")
        for _ in range(3):
            client.new_session()
        gc.collect()
        assert table.get(1) is None
        assert _held(server) == []
        for _ in range(3):
            client.new_session()
        gc.collect()
        client.channel.beat()  # type: ignore[attr-defined]  # which is ahead of the calls
        assert table.get(1) is None
        assert _held(server) == []


def test_what_a_failed_run_drops_lets_others_begin(store: txnkv.Client, serve: Serve) -> None:
    """The attempts of a run are given up in the request that makes them, and begins by them."""
    server = serve()
    with txnkv.connect(f"grpc://127.0.0.1:{server.port}") as client:
        table, kept = client.table("t"), list[txnkv.Transaction]()

        def fails(txn: txnkv.Transaction) -> None:
            kept.append(txn)
            raise KeyError

        with pytest.raises(KeyError):
            client.run(fails)
        assert table.get(1) is None
        kept.clear()
        gc.collect()
        assert table.get(1) is None
        assert _held(server) == []


def test_a_full_user_makes_one_where_one_is_dropped(store: txnkv.Client, serve: Serve) -> None:
    server = serve(limits=Limits(handles=2))
    with txnkv.connect(f"grpc://127.0.0.1:{server.port}") as client:
        sessions = [client.new_session() for _ in range(2)]
        for n in range(3):
            sessions[0].insert("t", (n, ""))
            sessions[0].close()
            sessions = [sessions[1], client.new_session()]
            gc.collect()
        sessions[1].upsert("t", (9, ""))
        sessions[1].flush()
    assert store.table("t").count() == 4


def test_a_client_that_waits_for_its_commits_to_close_takes_no_more(
    store: txnkv.Client, serve: Serve
) -> None:
    """Threads that went on with their work held it up for as long as they did."""
    client: Any = txnkv.connect(f"grpc://127.0.0.1:{serve().port}")
    table, session = client.table("t"), client.new_session()
    first, other = client.new_transaction(), client.new_transaction()
    first.insert(table, (1, "a"))
    other.insert(table, (2, "b"))
    assert first.id
    assert other.id
    with client.committer._sending:
        committing = first.commit_async()
        closing = threading.Thread(target=client.close)
        closing.start()
        _until(lambda: not client.is_open)
        for refused in (
            client.new_transaction,
            client.new_session,
            other.commit_async,
            other.commit,
            lambda: session.insert(table, (3, "c")),
            lambda: client.run(lambda txn: txn.insert(table, (4, "d"))),
        ):
            with pytest.raises(txnkv.ClosedError):
                refused()
        assert closing.is_alive()
    closing.join(60)
    assert committing.result(60)
    assert [row["id"] for row in store.table("t").scan()] == [1]


@pytest.mark.parametrize("end", ["commit", "async", "rollback", "conflict"])
def test_transactions_that_have_ended_do_not_count(
    store: txnkv.Client, serve: Serve, end: str
) -> None:
    """They counted as open ones for as long as their handles were kept, or not yet collected."""
    server = serve(limits=Limits(transactions=2))
    kept = list[txnkv.Transaction]()
    with txnkv.connect(f"grpc://127.0.0.1:{server.port}") as client:
        for n in range(6):
            kept.append(client.new_transaction())
            _end(kept[-1], end, store, n)
        both = [client.new_transaction() for _ in range(2)]
        assert all(txn.id for txn in both)
        with pytest.raises(txnkv.UnavailableError, match="2 open transactions"):
            _ = client.new_transaction().id
        both[0].rollback()
        with client.transaction() as txn:
            txn.upsert("t", (9, end))
        done = txnkv.TxnState.COMMITTED if end in ("commit", "async") else txnkv.TxnState.ABORTED
        assert {each.state for each in kept} == {done}


def _end(txn: txnkv.Transaction, end: str, store: txnkv.Client, n: int) -> None:
    txn.upsert("t", (n, end))
    if end == "commit":
        txn.commit()
    elif end == "async":
        txn.commit_async().result()
    elif end == "rollback":
        txn.rollback()
    else:
        assert txn.id
        store.run(lambda other: other.upsert("t", (n, "first")))
        with pytest.raises(txnkv.TransactionConflictError):
            txn.commit()
