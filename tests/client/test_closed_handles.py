"""Handles whose client was closed: every call says so, also beside another client of the store.

Beside another client the store itself is still open, so that only the handle can tell.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.client.group_members import Membership

ROW = {"id": 9, "v": None}
BATCH = pa.table({"id": [9]})
NOW = datetime.now(UTC)
ID = txnkv.MessageId(0, 0)
SUB = object()  # stands for the subscription
ROWS = ("insert", "insert_ignore", "upsert", "update", "update_ignore")

# The arguments of each public call, by handle. Names alone take none.
CALLS: dict[str, dict[str, tuple[Any, ...]]] = {
    "client": {
        "create_table": ("n", txnkv.Schema({"id": "int64"}, primary_key=["id"])),
        "table": ("t",), "tables": (), "drop_table": ("t",), "recall_table": ("t",),
        "table_info": ("t",), "writer": ("t",), "create_topic": ("n",),
        "topic": ("e",), "topics": (), "drop_topic": ("e",), "topic_info": ("e",),
        "consumer": ("e", "g"), "new_transaction": (),
        "transaction": (), "run": (lambda txn: None,), "new_session": (),
        "transaction_state": (1,), "transactions": (), "abort_transaction": (1,),
        "keep_transaction_alive": (1,), "snapshot": (),
        "stats": (), "metrics": (), "check": (), "compact": (), "applied": ("a",),
        "applications": (), "forget_applied": ("a",), "require_open": (), "require_writable": (),
        "repair_clock": (), "backup": ("nowhere",), "rename_table": ("t", "u"),
        "accept_loss": ("t/0",), "create_index": ("t", "v"), "drop_index": ("t", "v"),
    },
    "table": {
        "get": (1,), "get_many": ([1],), "count": (), "scan": (), "diff": (0,),
        "diff_tokens": (0,), "dataset": (), "next_id": (), "alter": ({"n": "int8?"},),
        "history": (),
        "restore": (0,), "get_by": ("v", "x"),
        **dict.fromkeys(("insert", "upsert", "update"), (ROW,)), "delete": (1,),
    },
    "scan": {
        "to_batches": (), "to_arrow": (), "to_pandas": (), "to_polars": (), "tokens": (),
        "__iter__": (), "__arrow_c_stream__": (), "snapshot": (),
    },
    "snapshot": {
        "get": ("t", 1), "get_by": ("t", "v", "x"), "get_many": ("t", [1]), "scan": ("t",),
    },
    "txn": {
        **dict.fromkeys(ROWS, ("t", ROW)), "delete": ("t", 1), "delete_ignore": ("t", 1),
        "write": ("t", BATCH), "send": ("e", b"1"), "send_batch": ("e", pa.table({"value": ["a"]})),
        "flush": (), "commit": (), "start_commit": (),
        "is_commit_complete": (), "rollback": (), "state": (), "serialize": (),
        "new_session": (), "get": ("t", 1), "get_by": ("t", "v", "x"),
        "get_many": ("t", [1]), "scan": ("t",),
        "mark_applied": ("a", 1), "ack": (SUB, ID), "ack_cumulative": (SUB, ID),
    },
    "session": {
        **dict.fromkeys(ROWS, ("t", ROW)), "delete": ("t", 1), "delete_ignore": ("t", 1),
        "write": ("t", BATCH), "send": ("e", b"1"), "send_batch": ("e", pa.table({"value": ["a"]})),
        "flush": (), "ack": (SUB, ID), "ack_cumulative": (SUB, ID),
    },
    "topic": {
        "end_offsets": (), "last_stable_offsets": (), "fetch": (0, 0), "consumer": (),
        "subscribe": ("n",), "producer": (), "subscriptions": (), "drop_subscription": ("s",),
        "alter": (), "truncate": (0,),
    },
    "consumer": {"poll": (), "poll_batch": (), "seek_to_time": (NOW,), "lag": (0,)},
    "subscription": {
        "receive": (), "receive_many": (), "ack": (ID,), "ack_cumulative": (ID,), "nack": (ID,),
        "lag": (), "lost": (), "committed": (), "seek": (0, "earliest"),
    },
    "producer": {"send": (b"1",)},
}  # fmt: skip

# What a handle knows by itself, or is of the inside; `commit_async` answers by its future.
BY_ITSELF = {
    "client": {
        "path", "instance", "close", "outcome", "timestamp_of", "keepalive_time", "sessions",
        "renew_sessions", "is_open", "attempts", "retries", "elsewhere", "addresses",
        "claims", "info_of", "require_own", "handles", "close_handles",
    },
    "table": {"name", "schema", "info", "indexes", "close"},
    "scan": {"schema", "over", "close"},
    "snapshot": {"timestamp", "require_open", "close"},
    "txn": {
        "id", "age", "snapshot", "close", "connection", "context", "commit_async", "begin",
        "deserialize",
        "abort_for", "drop", "start_heart", "pending_errors",
    },
    "session": {
        "flush_mode", "txn_id", "has_pending", "pending_errors", "close", "discard", "end",
        "flush_for_commit", "begin_anew", "flush_untold", "flushing", "look_anew", "waiting",
    },
    "topic": {"name", "partitions", "buffer", "value_schema", "info", "options", "close"},
    "consumer": {"partitions", "position", "seek", "unpoll", "close"},
    "subscription": {"name", "info", "is_active", "unreceive", "close"},
    "producer": {"name", "sent", "flush", "hurry", "close"},
}  # fmt: skip


def handles(client: txnkv.Client) -> dict[str, Any]:
    """One of each; the transaction and the session have rows that wait."""
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "string?"}, ["id"]))
    topic = client.create_topic("e")
    with client.transaction() as txn:
        txn.insert(table, (1, None))
        txn.send(topic, b"0")
    txn, session, scan = client.new_transaction(), client.new_session(), table.scan()
    txn.insert(table, (2, None))
    session.insert(table, (3, None))
    scan.to_arrow()
    return {
        "client": client, "table": table, "scan": scan, "snapshot": client.snapshot(),
        "txn": txn, "session": session, "topic": topic, "consumer": topic.consumer(),
        "subscription": topic.subscribe("s"), "producer": topic.producer("p"),
    }  # fmt: skip


def call(handle: Any, name: str, args: list[Any]) -> None:
    """A call to its end; a property does its work when it is looked up."""
    found = getattr(handle, name)
    found = found(*args) if callable(found) else found
    if name in ("to_batches", "__iter__"):
        list(found)
    pytest.fail(f"{name} worked")


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another client"])
@pytest.mark.parametrize("kind", CALLS)
def test_every_call_says_that_it_is_closed(
    connect: Callable[..., txnkv.Client], kind: str, beside: bool
) -> None:
    """TxnHandleLifecycle: the client is gone, and every call of its handles says so."""
    client = connect()
    other = connect() if beside else None
    known = handles(client)
    client.close()
    handle = known[kind]
    for name, given in CALLS[kind].items():
        args = [known["subscription"] if one is SUB else one for one in given]
        # By handles of table and topic as well as by name.
        swapped = [known["table"] if a == "t" else known["topic"] if a == "e" else a for a in args]
        for some in (args, swapped):
            with pytest.raises(txnkv.ClosedError):
                call(handle, name, some)
    assert "closed" in repr(client)
    if other is not None:
        assert other.table("t").count() == 1
        assert other.tables() == ["t"]
        other.close()


@pytest.mark.parametrize("kind", CALLS)
def test_the_table_has_every_public_call(client: txnkv.Client, kind: str) -> None:
    handle = handles(client)[kind]
    public = {name for name in dir(handle) if not name.startswith("_")}
    dunders = {name for name in CALLS[kind] if name.startswith("__")}
    assert public | dunders == CALLS[kind].keys() | BY_ITSELF[kind]


@pytest.mark.parametrize("host", ["here", "elsewhere"], indirect=True)
def test_a_handle_is_closed_behind_its_client(
    host: str, connect: Callable[..., txnkv.Client]
) -> None:
    """But a session whose rows are lost says so."""
    client = connect()
    known = handles(client)
    known["empty"], known["flushed"] = client.new_session(), client.new_session()
    known["flushed"].insert("t", (4, None))
    known["flushed"].flush()
    known["of a transaction"] = known["txn"].new_session()
    lost = known.pop("session")
    client.close()
    for handle in known.values():
        handle.close()
        handle.close()
    with pytest.raises(txnkv.ClosedError):
        lost.close()
    lost.close()


@pytest.mark.parametrize("host", ["here", "elsewhere"], indirect=True)
def test_a_scan_is_not_read_first_when_its_snapshot_is_closed(
    host: str, client: txnkv.Client
) -> None:
    table = handles(client)["table"]
    reads: list[Callable[[txnkv.Scan], Any]] = [list, lambda scan: scan.to_arrow().to_pylist()]
    for read in reads:
        now = client.snapshot()
        scan, was_read = now.scan(table), table.scan(snapshot=now)
        assert read(was_read) == [{"id": 1, "v": None}]
        now.close()
        assert read(was_read) == [{"id": 1, "v": None}]
        was_read.close()
        for each in (scan, was_read):
            with pytest.raises(txnkv.ClosedError, match=r"snapshot .* was closed"):
                read(each)


# -- what they look like, and that they stay here ---------------------------------------


def test_handles_say_what_they_are(client: txnkv.Client) -> None:
    found = {name: repr(handle) for name, handle in handles(client).items()}
    assert found == {
        "client": f"<Client of {client.path!r}>",
        "table": "<Table 't', id int64, v string?; key id>",
        "scan": found["scan"],
        "snapshot": found["snapshot"],
        "txn": found["txn"],
        "session": "<Session, manual, 1 waiting>",
        "topic": "<Topic 'e', 1 partitions, marker buffer>",
        "consumer": "<Consumer of 'e', read_committed: 0@0>",
        "subscription": "<Subscription 's' of 'e', exclusive>",
        "producer": "<Producer 'p' of 'e', 0 waiting>",
    }
    assert found["scan"].startswith("<Scan of 't', columns id, v, at ")
    assert found["snapshot"].startswith("<Snapshot ")
    assert found["txn"].startswith("<Transaction ")


@pytest.mark.parametrize("kind", CALLS)
def test_representations_need_no_store(
    connect: Callable[..., txnkv.Client], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a debugger, a log or a traceback: no I/O, never an error, closed or not."""
    client = connect()
    handle = handles(client)[kind]
    for end in (None, getattr(handle, "close"), client.close):  # noqa: B009
        if end is not None:
            end()
        with monkeypatch.context() as patch:
            patch.setattr("txnkv.storage.status_db.StatusDatabase.read", None)
            patch.setattr("txnkv.storage.status_db.StatusDatabase.write", None)
            assert repr(handle).startswith(f"<{type(handle).__name__}")
    closes = kind not in ("table", "topic", "scan", "txn")
    assert ("closed" in repr(handle)) is closes


@pytest.mark.parametrize("kind", CALLS)
def test_handles_are_not_pickled(client: txnkv.Client, kind: str) -> None:
    hints = {"client": r"txn\.serialize", "txn": r"txn\.serialize", "scan": r"scan\.tokens"}
    with pytest.raises(TypeError, match=hints.get(kind, "by its name")):
        pickle.dumps(handles(client)[kind])


def test_sessions_and_producers_are_made_while_others_hear_of_a_change(
    client: txnkv.Client, connect: Callable[..., txnkv.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By other threads: DDL that was done failed, and a client that was half closed stayed so."""
    beside = connect()
    schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
    table, _ = client.create_table("t", schema), client.create_topic("made")
    kept: list[Any] = [client.new_session() for _ in range(3)]
    kept += [client.topic("made").producer() for _ in range(3)]
    look_anew, close = type(kept[0]).look_anew, type(kept[-1]).close

    def looking(session: Any, by: Any) -> None:
        if client.is_open:
            kept.append(client.new_session())
        look_anew(session, by)

    def closing(producer: Any) -> None:
        kept.append(beside.topic("made").producer())
        close(producer)

    with monkeypatch.context() as beside_others:
        beside_others.setattr(type(kept[0]), "look_anew", looking)
        beside_others.setattr(type(kept[-1]), "close", closing)
        table.alter(add={"more": "int64?"})
        client.close()
    assert not client.is_open
    assert "made" in beside.topics()
    assert len(kept) == 12


def test_what_a_closed_client_had_is_free_at_once(connect: Callable[..., txnkv.Client]) -> None:
    """Beside another one of this process, and while somebody has its handles."""
    client, beside = connect(), connect()
    topic = beside.create_topic("e", partitions=2)
    with beside.transaction() as txn:
        for number in range(4):
            txn.send(topic, b"%d" % number, partition=number % 2)
    of = client.topic("e")
    places = {
        name: of.subscribe(name, type=kind, lease_seconds=600)
        for name, kind in (("x", "exclusive"), ("s", "shared"), ("k", "key_shared"))
    }
    taken = {name: place.receive_many(10) for name, place in places.items()}
    member = client.consumer(topic, "g", max_poll_seconds=600)
    while len(member.partitions) < 2:
        member.poll()
    client.close()
    for name, had in taken.items():
        kind = places[name].info.type
        with beside.topic("e").subscribe(name, type=kind) as other:
            found = other.receive_many(10, timeout=0)
            assert {one.value for one in had} <= {one.value for one in found}
    with beside.consumer(topic, "g") as other:
        other.poll(timeout=0)
        assert other.partitions == [0, 1]
    for handle in (member, *places.values()):
        handle.close()
        assert "closed" in repr(handle)


def test_a_handle_that_fails_keeps_no_other_from_being_closed(
    connect: Callable[..., txnkv.Client],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, beside = connect(), connect()
    topic = beside.create_topic("e")
    places = [client.topic("e").subscribe(name) for name in "abc"]
    close = type(places[0]).close

    def closing(place: txnkv.Subscription) -> None:
        close(place)
        raise txnkv.StorageFullError("no room")

    monkeypatch.setattr(type(places[0]), "close", closing)
    client.close()
    monkeypatch.undo()
    assert caplog.text.count("was closed with its client, and failed: no room") == 3
    for name in "abc":
        topic.subscribe(name).close()


def test_a_client_closes_behind_a_receive_of_another_thread(
    connect: Callable[..., txnkv.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases that are taken meanwhile are given back."""
    client, beside = connect(), connect()
    topic = beside.create_topic("e")
    with beside.transaction() as txn:
        txn.send(topic, b"one")
    place = client.topic("e").subscribe("s", type="shared", lease_seconds=600)
    inside, go_on = threading.Event(), threading.Event()
    take = type(place._reader).take

    def taking(reader: Any, most: int) -> Any:
        inside.set()
        go_on.wait(30)
        return take(reader, most)

    monkeypatch.setattr(type(place._reader), "take", taking)
    receiving = threading.Thread(target=place.receive)
    closing = threading.Thread(target=client.close)
    receiving.start()
    assert inside.wait(30)
    closing.start()
    closing.join(0.05)
    go_on.set()
    receiving.join()
    closing.join()
    monkeypatch.undo()
    with topic.subscribe("s", type="shared") as other:
        assert other.receive(timeout=5) is not None


@pytest.mark.parametrize("during", ["renew", "join"])
def test_a_member_that_is_closed_behind_a_poll_of_another_thread_is_none_again(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    client.create_topic("e")
    member = client.consumer("e", "g")
    inside, go_on = threading.Event(), threading.Event()
    errors: list[str] = []
    does = getattr(Membership, during)

    def doing(membership: Membership) -> Any:
        inside.set()
        go_on.wait(30)
        return does(membership)

    def polling() -> None:
        with pytest.raises(txnkv.ClosedError) as raised:
            member.poll()
        errors.append(str(raised.value))

    if during == "join":
        member._membership.end()
    monkeypatch.setattr(Membership, during, doing)
    thread = threading.Thread(target=polling)
    thread.start()
    assert inside.wait(30)
    member.close()
    go_on.set()
    thread.join()
    assert errors == ["this member of group 'g' was closed; make another"]
    assert member.partitions == []
    assert [each for each in client.transactions() if not each.state.ended] == []
