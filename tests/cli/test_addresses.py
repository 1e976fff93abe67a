"""Commands whose STORE is the address of a server."""

from __future__ import annotations

import errno
import os
import re

import pytest

import txnkv
from txnkv.remote.remote_client import RemoteClient
from txnkv.remote.remote_transaction import RemoteTransaction
from txnkv.server import Server

TIME = re.compile(r"\b[\d.]+ (s|min)\b")
SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])


@pytest.fixture
def client(store):
    with txnkv.connect(store) as client:
        client.create_table("t", SCHEMA).insert((1, "a"))
        client.create_topic("events")
        yield client


@pytest.fixture
def address(client):
    server = Server(client.path, "grpc://127.0.0.1:0", None, None)
    yield f"grpc://127.0.0.1:{server.port}"
    server.close()


def test_snapshots(client, address, run, misuse):
    before = int(client.snapshot().timestamp)
    client.table("t").upsert((1, "b"))
    client.table("t").insert((2, "b"))
    at = ("--snapshot", before)
    assert run("scan", address, "t", *at, "--json").lines == [{"id": 1, "v": "a"}]
    assert run("get", address, "t", "1", *at, "--json").lines == [{"id": 1, "v": "a"}]
    assert run("count", address, "t", *at, "--json").json == {"table": "t", "rows": 1}
    assert run("count", address, "t").out == "2\n"
    later = "2090-01-01T00:00:00Z"
    assert "in the future" in misuse("count", address, "t", "--snapshot", later)
    assert "in the future" in misuse("revert", address, "t", "--to", later)
    assert run("revert", address, "t", "--to", before, "--json").json == {
        "inserted": 0,
        "updated": 1,
        "deleted": 1,
    }
    assert list(client.table("t").scan()) == [{"id": 1, "v": "a"}]


def test_queries_at_a_snapshot(client, address, run):
    pytest.importorskip("duckdb")
    before = int(client.snapshot().timestamp)
    client.table("t").insert((2, "b"))
    asked = run("query", address, "SELECT count(*) AS n FROM t", "--snapshot", before, "--json")
    assert asked.lines == [{"n": 1}]


def test_what_only_reads(client, address, run):
    assert run("stats", address, "--json").json["tables"]["t"]["rows"] == 1
    assert run("check", address, "--json").json["ok"]
    with client.transaction() as txn:
        txn.send("events", b"x")
        id = txn.id.local  # others know of it from here on
        txn.serialize()
        shown = run("txn", "show", address, id, "--json").json
        assert (shown["state"], shown["messages"]) == ("OPEN", None)
        (line,) = [line for line in run("txn", "list", address).out.splitlines() if "OPEN" in line]
        assert line.split()[-1] == "?"
    run("txn", "show", address, id)


def test_init_makes_nothing(client, address, run, fail):
    assert run("init", address).out == f"{address} is a store already, with 1 table\n"
    assert run("init", address, "--json").json["made"] is False
    assert "does not answer" in fail("init", "grpc://127.0.0.1:1")


def test_create(client, address, run):
    made = ["create", address, "n", "--schema", "id:int64", "--key", "id"]
    assert run(*made, "--partition-hash", "id:3", "--json").json["tablets"] == 3
    assert run(*made, "--partition-hash", "id:3", "--exists-ok").out == "n is there already\n"
    assert client.stats()["tables"]["n"]["tablets"] == 3


@pytest.mark.parametrize(
    "command",
    [
        "top {} --once",
        "ui {}",
        "backup {} none/here",
        "dump {} none/here",
    ],
)
def test_what_runs_on_the_stores_host(command, client, address, fail):
    told = fail(*command.format(address).split())
    name = command.partition(" {}")[0]
    assert told.endswith(f"on the store's host: `txnkv {name}` there")


def test_topics_and_subscriptions_as_in_the_folder(client, address, run, store):
    late = client.create_topic("late", 2, buffer="sidecar", value_schema={"n": "int64"})
    with client.transaction() as txn:
        txn.send("events", b"x")
        txn.send("events", b"y")
        txn.send(late, {"n": 1}, partition=1)
    reader = client.topic("events").subscribe("s")
    workers = client.topic("events").subscribe("w", "shared", lease_seconds=1000)
    with workers, reader, client.transaction() as txn:
        txn.ack(reader, reader.receive())
        txn.send("events", b"open")
        txn.serialize()
        workers.receive()
        for command in (
            "topics list {}",
            "topics list {} events",
            "topics list {} late --json",
            "topics list {} --json",
            "group list {}",
            "group list {} events --json",
            "group show {} events s --json",
            "group show {} events w",
        ):
            at_server = run(*command.format(address).split()).out.replace(address, str(store))
            in_folder = run(*command.format(store).split()).out
            assert TIME.sub("?", at_server) == TIME.sub("?", in_folder)
            assert at_server
    moved = run("group", "seek", address, "events", "s", "--to", 1, "--json")
    assert moved.json == {"name": "s", "committed": [1]}
    with client.topic("events").subscribe("s") as reader:
        assert reader.receive().value == b"y"


def test_subscriptions_that_are_not_there(client, address, store, fail):
    client.topic("events").subscribe("s").close()
    for command in ("group show {} events n", "group seek {} events n --to latest"):
        told = fail(*command.format(address).split())
        assert told == fail(*command.format(store).split())
        assert "no subscription or group 'n'; it has: s" in told


def test_groups(client, address, run, fail):
    client.topic("events").subscribe("s").close()
    with client.consumer("events", group="g") as member:
        member.poll(timeout=0)
        member.commit()
        (shown,) = run("group", "show", address, "events", "g", "--json").json["members"]
        assert shown["member"]
    moved = run("group", "seek", address, "events", "g", "--to", "earliest", "--json")
    assert moved.json["committed"] == [0]
    run("group", "drop", address, "events", "s")
    assert client.topic("events").subscriptions() == []
    run("group", "drop", address, "events", "g")
    assert "no subscription or group 's'" in fail("group", "show", address, "events", "s")


@pytest.mark.parametrize("dropped", [False, True])
def test_a_load_whose_server_goes_tells_what_is_left(
    client, address, fail, tmp_path, monkeypatch, dropped
):
    """It said that nothing was done and that this was not known, and no word of the table."""

    def gone(*args, **options):
        raise txnkv.UnavailableError("no answer")

    monkeypatch.setattr(RemoteTransaction, "write", gone)
    monkeypatch.setattr(RemoteTransaction, "state", property(gone))
    if not dropped:
        monkeypatch.setattr(RemoteClient, "drop_table", gone)
    (tmp_path / "in.csv").write_text("id,name\n1,a\n")
    told = fail("load", address, "made", tmp_path / "in.csv", "--key", "id")
    assert told.startswith("no answer; nothing was loaded (")
    assert ("; the table made was made for it, and stays" in told) == (not dropped)
    assert ("made" in client.tables()) == (not dropped)


def test_a_port_that_is_taken_is_named(client, store, fail):
    with Server(client.path, "grpc://127.0.0.1:0") as server:
        told = fail("serve", store, "--listen", f"grpc://127.0.0.1:{server.port}")
    assert told.endswith(f"{server.port}: {os.strerror(errno.EADDRINUSE)}")
