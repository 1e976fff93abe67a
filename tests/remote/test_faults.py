"""A server that breaks at each step of a commit, has no room, or waits for a client that stopped.

What `client.run` does over it happens once, whatever becomes of the server meanwhile: it is killed
and started again, or hangs for longer than its client waits, and then goes on with what it has.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

import txnkv
from tests.crash.test_full_disk import Disk, disk  # noqa: F401  a fixture
from tests.remote.conftest import SCHEMA, Serving, Wire
from txnkv.server import Server
from txnkv.transaction import Session

SMALL = ["status.before_commit", "log.written", "status.after_commit", "log.durable"]
LARGE = [
    "stage.claimed", "stage.written", "stage.staged", "commit.started", "commit.validated",
    "commit.in_point", "commit.decided", "commit.finalized",
]  # fmt: skip
ROWS = 70_000
LONG = 120.0


def test_a_transaction_whose_commit_found_no_server_goes_on(
    serving: Serving, store: txnkv.Client
) -> None:
    serving.start()
    with txnkv.connect(serving.address, keepalive_time=2.0) as client:
        table, txn = client.table("t"), client.new_transaction()
        txn.insert(table, (1, "a"))
        serving.kill()
        with pytest.raises(txnkv.UnavailableError, match=r"Nothing was (done|changed)"):
            txn.commit()
        txn.insert(table, (2, "b"))
        serving.start()
        begin_again = time.monotonic() + 60
        while True:
            with suppress(txnkv.UnavailableError):
                txn.commit()
                break
            assert time.monotonic() < begin_again
        assert table.count() == 2


@pytest.mark.parametrize("back", [True, False], ids=["back", "gone"])
def test_a_call_that_was_refused_looks_once_more(
    remote: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """A server was there again, and gRPC had not connected anew: the call failed at once."""
    client, asked = remote(keepalive_time=3600.0), []  # no heartbeat comes in between
    flight = client.channel._flight

    def ask(*args: Any) -> Any:
        asked.append(args)
        if back and len(asked) > 1:
            return flight.do_action(*args)
        raise fl.FlightUnavailableError("failed to connect to all addresses: Connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(client.channel, "_flight", SimpleNamespace(do_action=ask))
        with nullcontext() if back else pytest.raises(txnkv.UnavailableError, match="Nothing was"):
            assert client.tables() == ["t"]
    assert len(asked) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped", "cut"])
@pytest.mark.parametrize(
    ("point", "large"), [(each, False) for each in SMALL] + [(each, True) for each in LARGE]
)
def test_it_happens_once(
    serving: Any, store: txnkv.Client, point: str, large: bool, how: str
) -> None:
    serving.start(at=(point, signal.SIGKILL if how == "killed" else signal.SIGSTOP))
    broke, over = threading.Event(), threading.Event()
    wire = Wire(serving.port)

    def mend() -> None:
        while not serving.stopped():
            if over.wait(0.02):
                return
        broke.set()
        if how == "killed":
            serving.wait()
            serving.start()
        elif how == "cut":
            wire.cut()
            serving.signal(signal.SIGCONT)
        else:
            time.sleep(8.0)  # longer than its client waits: that has given it up, and asks
            serving.signal(signal.SIGCONT)

    rows = pa.table({"id": pa.array(range(1, ROWS), pa.int64()), "v": ["x"] * (ROWS - 1)})

    def work(txn: txnkv.Transaction) -> None:
        found = txn.get("t", 0)
        assert found is not None
        txn.upsert("t", (0, found["v"] + "+"))
        txn.send("events", b"once")
        if large:
            txn.write("t", rows)

    address = wire.address if how == "cut" else serving.address
    with txnkv.connect(address, keepalive_time=30.0) as client:
        channel = client.channel  # type: ignore[attr-defined]
        # It lives longer than it waits for an answer.
        channel._options = fl.FlightCallOptions(timeout=2.0)
        client.table("t").insert((0, ""))
        serving.arm()
        mending = threading.Thread(target=mend)
        mending.start()
        try:
            client.run(work, deadline=None)
        finally:
            over.set()
            mending.join()
            wire.close()
        assert broke.is_set(), f"it never came to {point}"
        assert client.table("t").get(0) == {"id": 0, "v": "+"}
        assert client.table("t").count() == (ROWS if large else 1)
        assert client.check().problems == []
    messages = store.topic("events").consumer().poll(max_messages=10, timeout=30)
    assert [message.value for message in messages] == [b"once"]


@pytest.mark.slow
def test_a_full_disk(disk: Disk) -> None:  # noqa: F811
    path = disk.path / "store"
    with txnkv.connect(path) as here:
        here.create_table("t", SCHEMA)
    serving = Serving(path)
    serving.start()
    known: set[int] = set()
    unsure: set[int] = set()
    try:
        with txnkv.connect(serving.address) as client:
            table = client.table("t")
            disk.leave(2048)
            with pytest.raises(txnkv.StorageFullError):
                _fill(client, known, unsure)
            assert known
            assert table.get(max(known)) is not None  # it answers
            there = {row["id"] for row in table.scan(["id"])}
            assert known <= there <= known | unsure
            disk.make_room()
            with client.transaction() as txn:
                txn.insert(table, (-1, "there is room"))
            assert client.check().problems == []
    finally:
        serving.kill()
    with txnkv.connect(path) as here:
        there = {row["id"] for row in here.table("t").scan(["id"])} - {-1}
        assert known <= there <= known | unsure
        assert here.check().problems == []


def _fill(client: txnkv.Client, known: set[int], unsure: set[int]) -> None:
    text = "".join(chr(33 + n % 90) for n in range(20_000))
    for number in range(10_000):
        try:
            with client.transaction() as txn:
                txn.insert("t", (number, f"{number}{text[number % 90 :]}"))
            known.add(number)
        except txnkv.CommitOutcomeUnknownError:
            unsure.add(number)
    pytest.fail("the disk never was full")


_STOPS = """
import os, signal, sys
import pyarrow as pa, txnkv
schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
def batches():
    yield pa.record_batch([range(1000), ["x"] * 1000], schema=schema)
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    yield pa.record_batch([range(1000, 2000), ["x"] * 1000], schema=schema)
with txnkv.connect(sys.argv[1], keepalive_time=0.5) as client:
    try:
        with client.transaction(timeout=None) as txn:
            txn.serialize()
            txn.write("t", pa.RecordBatchReader.from_batches(schema, batches()))
        print("written")
    except (txnkv.InvalidTxnStateError, txnkv.UnavailableError):
        print("begin again")
"""


@pytest.mark.slow
def test_a_client_that_stops_in_a_stream(store: txnkv.Client, serve: Callable[..., Server]) -> None:
    server = serve()
    command = [sys.executable, "-c", _STOPS, f"grpc://127.0.0.1:{server.port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "stops\n"
            _until(lambda: not server._guests._guests)
            _until(lambda: not [t for t in store.transactions() if not t.state.ended])
            child.send_signal(signal.SIGCONT)
            assert child.communicate(timeout=LONG)[0] == "begin again\n"
        finally:
            child.kill()
    assert store.table("t").count() == 0


def _until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_what_the_server_could_not_take_now_is_sent_again_once(
    store: txnkv.Client, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, with what waits beside it: none of that was taken."""
    store.create_table("u", SCHEMA)
    server = serve()
    add, failing = Session._add, ["t"]

    def busy(self: Session, table: Any, op: str, row: Any) -> None:
        if failing and table.name == failing[0]:
            failing.clear()
            raise txnkv.UnavailableError("the disk is away")
        add(self, table, op, row)

    monkeypatch.setattr(Session, "_add", busy)
    with (
        txnkv.connect(f"grpc://127.0.0.1:{server.port}") as client,
        client.new_session() as session,
    ):
        for table in "tu":
            session.insert(table, (1, "a"))
        with pytest.raises(txnkv.UnavailableError):
            session.flush()
        assert session.flush().inserted == 2
    assert [store.table(name).count() for name in "tu"] == [1, 1]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_server_whose_store_is_gone_ends(tmp_path: Path, replaced: bool) -> None:
    """It went on, let clients in and refused what they wrote, also when the store was put back."""
    for name in ("served", "other"):
        txnkv.connect(tmp_path / name).close()
    command = [sys.executable, "-m", "txnkv", "serve", str(tmp_path / "served")]
    with subprocess.Popen(
        [*command, "--listen", "grpc://127.0.0.1:0", "--kafka", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        with txnkv.connect(address) as client:
            client.tables()
            (tmp_path / "served").rename(tmp_path / "away")
            if replaced:
                (tmp_path / "other").rename(tmp_path / "served")
            _, said = server.communicate(timeout=60)
    assert server.returncode == 1
    gone = f"Error: {tmp_path / 'served'} was removed, moved or replaced: the server ends. "
    assert said.splitlines()[-1].startswith(gone)
    assert "Traceback" not in said


def test_a_server_without_a_thread(
    store: txnkv.Client, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "txnkv-guests":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(txnkv.UnavailableError, match="no thread could be started"):
        Server(str(store_path), "grpc://127.0.0.1:0")
