"""`txnkv ui`: answers of its server, and requests that it refuses."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys

import pytest

import txnkv
from tests import internals
from txnkv.cli.ui import KEPT_SECONDS, SAMPLED, Samples, Watched, application
from txnkv.topics import outbox

pytest.importorskip("starlette", reason="needs txnkv[ui]")
pytest.importorskip("uvicorn", reason="needs txnkv[ui]")

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def held(store, monkeypatch):
    """A store with a row set of which a row is deleted, and a message that two others wait for."""
    with txnkv.connect(store) as client:
        table = client.create_table("orders", txnkv.Schema({"id": "int64"}, ["id"]))
        client.create_index(table, ["id"], unique=True)
        events = client.create_topic("events")
        events.subscribe(EVIL).close()
        with client.transaction() as txn:
            for number in range(3):
                txn.insert(table, (number,))
            txn.send(events, b"first")
        internals.flush(client)
        with client.transaction() as txn:
            txn.delete(table, 1)
        internals.flush(client)
        holder = client.new_transaction(timeout=600)
        with monkeypatch.context() as patch:
            patch.setattr(outbox, "MAX_BYTES", -1)
            holder.send(events, b"held")
            holder.flush()
        with client.transaction() as txn:
            txn.send(events, b"behind")
        yield holder
        holder.rollback()


@pytest.fixture
def serve(store):
    """Starts the command as a user does; each is stopped by Ctrl-C at the end."""
    begun = []

    def start(*options):
        args = [sys.executable, "-m", "txnkv", "ui", str(store), *options]
        server = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        begun.append(server)
        line = server.stdout.readline()
        found = re.fullmatch(rf"showing {re.escape(str(store))} at http://(127.0.0.1:\d+)/\n", line)
        assert found, (line, server.poll())
        return found[1]

    yield start
    for server in begun:
        os.kill(server.pid, signal.SIGINT)
        assert server.communicate(timeout=120)[1] == "stopped\n"
        assert server.returncode == 130


def test_a_server_that_is_terminated_did_what_it_should(store):
    args = [sys.executable, "-m", "txnkv", "ui", str(store)]
    server = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout.readline().startswith("showing ")
    os.kill(server.pid, signal.SIGTERM)
    assert server.communicate(timeout=120) == ("", "")
    assert server.returncode == 0


def ask(address, method, path, **headers):
    """Return status, headers and text of an answer."""
    connection = http.client.HTTPConnection(address, timeout=120)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


def test_the_page_shows_the_store_and_ends_what_holds_it_up(held, serve, until):
    address = serve()
    status, headers, page = ask(address, "GET", "/")
    assert status == 200
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    token = re.search('name="token" content="([^"]+)"', page)[1]
    assert len(token) > 30
    for path in ("/ui.js", "/ui.css"):
        assert ask(address, "GET", path)[0] == 200

    def state():
        return json.loads(ask(address, "GET", "/state?of=0")[2])

    until(lambda: state()["view"], 300)
    found = state()
    view, ring = found["view"], found["ring"]
    assert found["error"] is None
    assert view["held_up"][0]["held_up_by"] == held.id.local
    assert view["transactions"][0]["holds_up"] == ["events/0 @1"]
    assert view["subscriptions"][0]["name"] == EVIL
    assert (view["counts"]["tables"], view["counts"]["topics"]) == (1, 1)
    assert ring[-1]["lag"] == 1
    last = ring[-1]["at"]
    assert all(
        each["at"] > last
        for each in json.loads(ask(address, "GET", f"/state?of={last}")[2])["ring"]
    )

    table = json.loads(ask(address, "GET", "/table?of=orders")[2])
    assert table["indexes"] == [{"columns": ["id"], "unique": True, "ready": True}]
    (tablet,) = table["tablets"]
    (row_set,) = tablet["row_sets"]
    assert (row_set["first"], row_set["last"], row_set["rows"], row_set["deleted"]) == (
        "0",
        "2",
        3,
        1,
    )
    (partition,) = json.loads(ask(address, "GET", "/topic?of=events")[2])["partitions"]
    assert (partition["start"], partition["stable"], partition["end"]) == (0, 1, 3)
    assert partition["open"] == [{"id": held.id.local, "first": 1}]
    status, _, text = ask(address, "GET", "/table?of=%3Cscript%3E")
    assert status == 400
    assert "<script>" in json.loads(text)["error"]
    for name, kind in (("orders", "table"), ("events", "topic"), ("%20events", None), ("", None)):
        status, _, text = ask(address, "GET", f"/find?of={name}")
        assert (status, json.loads(text)) == (200, {"kind": kind})

    abort = f"/abort?of={held.id.local}"
    for method, path, headers, refused in (
        ("POST", abort, {}, 403),
        ("POST", abort, {"X_Token": "guessed"}, 403),
        ("POST", abort, {"X_Token": token, "Origin": "http://evil.example"}, 403),
        ("POST", abort, {"X_Token": token, "Origin": "null"}, 403),
        ("GET", abort, {"X_Token": token}, 405),
        ("GET", "/state", {"Host": "evil.example"}, 403),
        ("GET", "/../pyproject.toml", {}, 404),
        ("POST", "/abort?of=x", {"X_Token": token}, 400),
    ):
        assert ask(address, method, path, **headers)[0] == refused, (method, path, headers)
    assert held.state.name == "OPEN"
    own = {"X_Token": token, "Origin": f"http://{address}"}
    status, _, text = ask(address, "POST", abort, **own)
    assert (status, json.loads(text)) == (200, f"transaction {held.id.local} is ABORTED")
    status, _, text = ask(address, "POST", "/abort?of=987654321", **own)
    assert (status, "987654321" in json.loads(text)["error"]) == (400, True)
    status, _, text = ask(address, "POST", "/compact", **own)
    assert status == 200
    assert json.loads(text)
    until(lambda: not state()["view"]["held_up"], 300)


def test_versions_are_exact_in_a_browser(store, until):
    """Its numbers are not, beyond 2^53."""
    with txnkv.connect(store) as client, client.transaction() as txn:
        txn.mark_applied("daily", (1 << 53) + 1)
    with Watched(str(store), 0.05) as watched:
        until(lambda: watched.state(0)["view"], 300)
        (daily,) = watched.state(0)["view"]["applications"]
    assert daily["version"] == "9007199254740993"


def test_read_only_has_no_token(store, serve):
    address = serve("--read-only")
    assert 'name="token" content=""' in ask(address, "GET", "/")[2]
    for token in ("", "x"):
        assert ask(address, "POST", "/compact", X_Token=token)[0] == 403


@pytest.mark.parametrize(
    ("port", "host", "status"),
    [
        (80, "127.0.0.1", 200),
        (80, "localhost", 200),
        (80, "localhost:80", 200),
        (80, "evil.example", 403),
        (8080, "127.0.0.1", 403),
        (8080, "127.0.0.1:80", 403),
    ],
)
def test_browsers_leave_out_the_default_port(store, port, host, status):
    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"host", host.encode()), (b"origin", f"http://{host}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": headers}
    with Watched(str(store), 1.0) as watched:
        asyncio.run(application(watched, f"127.0.0.1:{port}", "")(scope, None, send))
    assert sent[0]["status"] == status


def test_a_store_that_is_not_there_is_told(tmp_path, fail):
    assert "no store at" in fail("ui", tmp_path / "none")


def test_the_extra_that_is_missing_is_told(store, fail, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert fail("ui", store).endswith("pip install 'txnkv[ui]'")


def test_an_error_of_the_store_is_told_and_it_looks_again(store, until, monkeypatch):
    def broken(*_):
        raise txnkv.CorruptionError("status.db is damaged")

    watched = Watched(str(store), 0.05)
    with monkeypatch.context() as patch:
        patch.setattr("txnkv.cli.ui.views", broken)
        with watched:
            until(lambda: watched.state(0)["error"] == "status.db is damaged", 300)
            patch.undo()
            until(lambda: watched.state(0)["ring"], 300)
            assert watched.state(0)["error"] is None


def test_samples_outlive_who_took_them_and_what_is_no_sample_is_left_out(tmp_path):
    now = 1_800_000_000.25
    numbers = {**dict.fromkeys(SAMPLED, 1.5), "p99": None}
    first = Samples(tmp_path)
    for second in range(KEPT_SECONDS + 10):
        first.add(now + second, numbers)
    end = now + KEPT_SECONDS + 9
    kept = first.since(0, end)
    at = [now + second for second in range(10, KEPT_SECONDS + 10)]
    assert [each["at"] for each in kept] == at
    first.close()
    first.add(end, numbers)  # of this process alone now

    second = Samples(tmp_path)
    assert second.since(0, end) == kept
    assert second.since(end - 2, end) == kept[-2:]
    assert second.since(0, end + KEPT_SECONDS - 1) == kept[-1:]
    second.close()

    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data[:-7])
    third = Samples(tmp_path)
    assert len(third.since(0, end)) == KEPT_SECONDS - 2
    third.close()
    file.write_bytes(b"x" * len(data))
    Samples(tmp_path).close()


def test_samples_are_kept_in_memory_where_nothing_can_be_written(tmp_path):
    there_is_none = Samples(tmp_path / "none")
    there_is_none.add(5.0, dict.fromkeys(SAMPLED, 0.0))
    assert [each["at"] for each in there_is_none.since(0, 9)] == [5.0]
    there_is_none.close()


def test_ends_of_transactions_are_shown_around_the_last_stable_offset(store, monkeypatch):
    with txnkv.connect(store) as client:
        events = client.create_topic("events")
        monkeypatch.setattr(outbox, "MAX_BYTES", -1)
        for end in ("commit", "rollback", "commit"):
            txn = client.new_transaction()
            txn.send(events, b"sent")
            txn.flush()
            getattr(txn, end)()
        monkeypatch.undo()
        with client.transaction() as txn:
            txn.send(events, b"no marker")
    with Watched(str(store)) as watched:
        (seen,) = watched.topic("events")["partitions"]
    assert [(each["first"], each["marker"]) for each in seen["committed"]] == [(0, 1), (4, 5)]
    assert [(each["first"], each["marker"]) for each in seen["aborted"]] == [(2, 3)]
    assert (seen["low"], seen["high"], seen["end"]) == (0, 7, 7)


def test_a_damaged_part_says_what_it_lost_and_works_again(store):
    with txnkv.connect(store) as client:
        events = client.create_topic("events")
        with client.transaction() as txn:
            txn.send(events, b"gone")
        client.compact()
        engine = client.instance.topics
        (partition,) = engine.partitions(engine.get("events"))
        file = partition.environment.path / "data.mdb"
    file.write_bytes(bytes(file.stat().st_size))
    with Watched(str(store)) as watched:
        (seen,) = watched.topic("events")["partitions"]
        assert seen["error"]
        found = watched.lost(seen["part"])
        assert found == {"any": True, "lines": ["topic 'events', partition 0: offsets 0 to 0"]}
        assert "works again" in watched.mend(seen["part"])
        assert watched.topic("events")["partitions"][0]["error"] is None
        assert watched.lost(seen["part"])["any"] is False
        with pytest.raises(ValueError, match="no topic has the part"):
            watched.lost("topic:none/0")
