"""The command line as a process of its own: pipes, signals, exit statuses."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from click.shell_completion import BashComplete

import txnkv
from tests import internals
from tools.kafka_wire import Wire
from txnkv.cli import main

PROGRAM = [sys.executable, "-m", "txnkv"]


def start(*args, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*PROGRAM, *map(str, args)], **pipes)


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out.decode(), err.decode()


def test_it_is_a_program(orders):
    status, out, err = finish(start("scan", orders, "orders", "--json", "--ordered"))
    assert (status, err) == (0, "")
    assert [json.loads(line)["id"] for line in out.splitlines()] == [1, 2, 3, 4]
    status, out, err = finish(start("--version"))
    assert (status, out) == (0, f"txnkv, version {txnkv.__version__}\n")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["co"], ["plain,count", "plain,consume", "plain,compact"]),
        (["scan", "STORE", ""], ["plain,orders"]),
        (["scan", "STORE", "x"], []),
        (["scan", "."], ["dir,."]),
        (["consume", "STORE", "e"], ["plain,events"]),
        (["topics", "STORE", ""], ["plain,events"]),
        (["topics", "d"], ["plain,drop"]),
        (["scan", "nowhere", ""], []),
    ],
)
def test_a_shell_completes_commands_stores_tables_and_topics(words, wanted, orders, monkeypatch):
    with txnkv.connect(orders) as client:
        client.create_topic("events")
    _ask(monkeypatch, orders, words)
    shell = BashComplete(main, {}, "txnkv", "_TXNKV_COMPLETE")
    assert shell.complete().split() == wanted


def test_the_program_completes(orders, monkeypatch):
    _ask(monkeypatch, orders, ["scan", "STORE", ""])
    monkeypatch.setenv("_TXNKV_COMPLETE", "bash_complete")
    assert finish(start()) == (0, "plain,orders\n", "")


def _ask(monkeypatch, orders, words):
    line = ["txnkv", *(str(orders) if word == "STORE" else word for word in words)]
    monkeypatch.setenv("COMP_WORDS", " ".join(line))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))


def test_errors_are_one_line_without_a_traceback(tmp_path, orders, fail):
    status, out, err = finish(start("tables", tmp_path / "none"))
    assert (status, out) == (1, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    for args in (
        ["scan", orders, "none"],
        ["load", orders, "orders", tmp_path / "none.csv"],
        ["tables", tmp_path / "orders.csv"],
    ):
        assert fail(*args)


def test_a_wrong_call_is_exit_status_2(orders, invoke):
    status, out, err = finish(start("scan"))
    assert (status, out) == (2, "")
    assert "Usage: " in err
    for args in (
        ["nope"],
        ["scan", orders, "orders", "--limit", "x"],
        ["scan", orders, "orders", "--where", "nope = 1"],
        ["scan", orders, "orders", "--snapshot", "2090-01-01T00:00Z"],
        ["load", orders, "u", "-", "--format", "csv", "--key", "id", "--schema", "id"],
        ["index", "create", orders, "orders", "nope"],
        ["query", orders, "SELEC 1"],
        ["query", orders, "SELECT * FROM nope"],
        ["query", orders, "SELECT nope FROM orders"],
    ):
        ran = invoke(*args)
        assert (ran.status, ran.out) == (2, "")
        assert "Usage: " in ran.err


def test_tables_in_a_pipe_are_not_cut(store, file, run):
    run("load", store, "t", file("a.csv", f"id,v\n1,{'x' * 500}\n"), "--key", "id")
    _, out, _ = finish(start("scan", store, "t"))
    assert "x" * 500 in out


@pytest.mark.parametrize(
    "form", [["--json"], ["--format", "csv"], ["--limit", "4000"]], ids=["json", "csv", "table"]
)
def test_a_reader_that_goes_away_ends_a_scan_quietly(form, store, file, run):
    rows = "id,v\n" + "".join(f"{i},{'x' * 300}\n" for i in range(4_000))  # many pipes full
    run("load", store, "t", file("a.csv", rows), "--key", "id")
    # Unbuffered, Python writes a part of a table and is content with that.
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    process = start("scan", store, "t", *form, env=environment)
    process.stdout.read(1)
    process.stdout.close()
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err.decode()) == (0, "")


def test_a_full_disk_is_one_line(orders):
    for args in (["--help"], ["scan", "--help"], ["scan", orders, "orders"]):
        with open("/dev/full", "w") as full:
            process = start(*args, stdout=full)
        _, err = process.communicate(timeout=300)
        told = b"Error: stdout: No space left on device\n"
        assert (process.returncode, err) == (1, told), args


def test_a_full_disk_for_a_file_is_told_as_the_file(orders, fail):
    assert "no room to write /dev/full: No" in fail(
        "scan", orders, "orders", "-o", "/dev/full", "--format", "csv"
    )


def test_what_nobody_reads_from_the_first_byte_ends_quietly(orders):
    process = start("tables", orders)
    process.stdout.close()
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err.decode()) == (0, "")


@pytest.mark.parametrize("together", [False, True], ids=["as they come", "transaction"])
def test_a_producer_that_is_stopped_tells_what_it_sent(together, store, run, until):
    run("produce", store, "events", "--partitions", 1, input="before\n")
    first = start("consume", store, "events", "-n", 1)
    assert finish(first)[:2] == (0, "before\n")
    options = ["--transaction"] if together else []
    process = start("produce", store, "events", *options, stdin=subprocess.PIPE)
    process.stdin.write(b"one\ntwo\n" * 40_000)
    process.stdin.flush()
    if together:
        until(lambda: run("txn", "list", store, "--state", "open", "--json").json, 300)
    else:
        until(lambda: len(run("consume", store, "events").out.split()) > 1, 300)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert (status, out) == (130, "")
    there = len(run("consume", store, "events").out.split()) - 1
    if together:
        assert (err, there) == ("stopped; nothing was sent\n", 0)
    else:
        # What was being sent in that moment may be there.
        told = re.fullmatch(r"stopped; at least ([\d,]+) messages? sent\n", err)
        assert int(told[1].replace(",", "")) <= there


@pytest.mark.parametrize(
    ("command", "fault", "mark"),
    [
        ("backup", "backup.file=pause:1@2", "tablets/*/*"),
        ("dump", "dump.copied=pause:1", "aside/store/FORMAT"),
        ("restore", "restore.part=pause:1@1", "FORMAT"),
    ],
)
def test_a_copy_that_is_stopped_leaves_nothing(
    command, fault, mark, orders, run, file, until, tmp_path
):
    run("load", orders, "more", file("more.csv", "id\n1\n"), "--key", "id")
    dest, backup = tmp_path / "out", tmp_path / "backup"
    run("backup", orders, backup)
    source = backup if command == "restore" else orders
    before = sorted(tmp_path.iterdir())
    process = start(command, source, dest, env={**os.environ, "TXNKV_FAULT": fault})
    until(lambda: list(tmp_path.glob(f".out.unfinished/{mark}")))
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", f"stopped; nothing is left at {dest}\n")
    assert sorted(tmp_path.iterdir()) == before


def test_a_subscriber_that_is_stopped_tells_what_it_acknowledged(store, run):
    run("produce", store, "events", "--partitions", 1, input="a\nb\n")
    process = start("consume", store, "events", "--follow", "--subscription", "s")
    assert [process.stdout.readline() for _ in range(2)] == [b"a\n", b"b\n"]
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert status == 130
    told = re.fullmatch(r"stopped; at least (\d) messages acknowledged; others come again\n", err)
    left = run("consume", store, "events", "--subscription", "s").out.split()
    assert int(told[1]) <= 2 - len(left)


def test_the_version_loads_next_to_nothing():
    program = "import sys, txnkv.cli; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    assert not {"pyarrow", "rich", "apsw", "asyncio", "pandas"} & set(found.stdout.split())


@pytest.mark.parametrize("command", ["scan", "consume"])
def test_lines_of_json_load_little(command, store):
    with txnkv.connect(store) as client:
        table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "float64"}, ["id"]))
        topic = client.create_topic("e")
        with client.transaction() as txn:
            txn.insert(table, (1, 2.0))
            txn.send(topic, b"x")
    name = {"scan": "t", "consume": "e"}[command]
    program = (
        "import atexit, sys; sys.argv[0] = 'txnkv'; from txnkv.__main__ import main; "
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main()"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, command, str(store), name, "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.startswith("{")
    assert not {"numpy", "pandas", "pyarrow.parquet", "rich"} & set(found.stderr.split())


def test_a_look_at_a_store_is_stopped(orders):
    """In a terminal, whose screen it gives back."""
    ours, theirs = pty.openpty()
    with start("top", orders, stdout=theirs) as process, open(ours, "rb", buffering=0) as screen:
        os.close(theirs)
        shown = b""
        while b"orders" not in shown:
            shown += screen.read(1 << 16)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # at its end
            while piece := screen.read(1 << 16):
                shown += piece
        assert process.communicate(timeout=300)[1] == b"stopped\n"
    assert process.returncode == 130
    assert b"\x1b[?1049l" in shown


def test_a_signal_behind_the_end_of_a_command_leaves_its_exit_status(orders):
    code = (
        "import atexit, os, signal, sys; from txnkv.__main__ import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT); main()"
    )
    command = [sys.executable, "-c", code, "count", str(orders), "orders"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    assert finish(subprocess.Popen(command, **pipes)) == (0, "4\n", "")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_a_query_is_stopped(orders, until):
    """In DuckDB's C++, where Python looks at no signals."""
    pytest.importorskip("duckdb")
    process = start("query", orders, "SELECT sum(sqrt(n)) FROM range(1000000000000) AS r(n)")

    def asked():
        words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        # More seconds of CPU than the process takes to begin.
        return sum(map(int, words[11:13])) > 4 * os.sysconf("SC_CLK_TCK")

    until(asked, 300)
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "stopped\n")


@pytest.mark.parametrize(("kind", "ended"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_server_is_stopped(kind, ended, orders):
    process = start("serve", orders, "--listen", "grpc://127.0.0.1:0")
    assert process.stdout.readline().startswith(b"serving ")
    process.send_signal(kind)
    assert finish(process)[0] == ended


@pytest.mark.parametrize(("kind", "ended"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("call", ["read", "load"])
def test_a_server_is_stopped_beside_a_client_that_goes_on_no_more(kind, ended, call, tmp_path):
    """It waited for them for ever, and told its port no more."""
    with txnkv.connect(tmp_path / "store") as client:
        table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "string"}, "id"))
        with client.transaction() as txn:
            ids = range(200_000)
            txn.write(table, pa.table({"id": ids, "v": [f"{id:100}" for id in ids]}))
    process = start("serve", tmp_path / "store", "--listen", "grpc://127.0.0.1:0")
    address = process.stdout.readline().decode().split()[-1]
    begun, go_on = threading.Event(), threading.Event()

    def batches():
        for id in (-1, -2, -3):  # more than is under way, so that the server is at it
            yield pa.record_batch({"id": pa.array([id]), "v": ["x" * 5_000_000]})
        begun.set()
        assert go_on.wait(300)

    def load():
        schema = pa.schema({"id": pa.int64(), "v": pa.string()})
        with suppress(txnkv.TxnkvError), txnkv.connect(address) as client:
            client.new_transaction().write(
                "t", pa.RecordBatchReader.from_batches(schema, batches())
            )

    loading = threading.Thread(target=load)
    if call == "load":
        loading.start()
        assert begun.wait(300)
    else:
        flight = fl.connect(address)
        reader = flight.do_get(fl.Ticket(json.dumps({"table": "t"})))
        reader.read_chunk()
    process.send_signal(kind)
    code, _, err = finish(process)
    assert code == ended
    assert "calls that had not ended after 5 s were cut off\n" in err
    assert err.endswith("stopped\n") == (kind == signal.SIGINT)
    go_on.set()
    if call == "load":
        loading.join()
    with txnkv.connect(tmp_path / "store") as client:
        assert client.table("t").count() == 200_000
        assert client.check().problems == []


def test_kafkas_clients_come_by_ipv6(orders):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no ::1")
    process = start("serve", orders, "--listen", "grpc://127.0.0.1:0", "--kafka", "[::1]:0")
    process.stdout.readline()
    found = re.search(rb"at \[::1\]:(\d+)$", process.stdout.readline().strip())
    wire = Wire(int(found[1]), "::1")
    assert wire.ask("Metadata", topics=[])["brokers"][0]["host"] == "::1"
    wire.socket.close()
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0


def test_kafkas_clients_are_told_where_they_find_the_server(orders):
    told = ["--kafka", "127.0.0.1:0", "--kafka-advertise", "[fd00::5]:9999"]
    process = start("serve", orders, "--listen", "grpc://127.0.0.1:0", *told)
    process.stdout.readline()
    wire = Wire(int(process.stdout.readline().rpartition(b":")[2]))
    for name, body in (("Metadata", {"topics": []}), ("DescribeCluster", {})):
        (broker,) = wire.ask(name, **body)["brokers"]
        assert (broker["host"], broker["port"]) == ("fd00::5", 9999)
    (found,) = wire.ask("FindCoordinator", coordinator_keys=["g"])["coordinators"]
    assert (found["host"], found["port"]) == ("fd00::5", 9999)
    wire.socket.close()
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_load_that_is_stopped_leaves_no_rows(kind, store, file, run):
    """It has read and staged rows, and waits for more in its pipe when the signal comes."""
    run("load", store, "t", file("a.csv", "id,v\n-1,x\n"), "--key", "id")
    process = start("load", store, "t", "-", "--format", "csv", stdin=subprocess.PIPE)
    process.stdin.write(b"id,v\n")
    process.stdin.write(b"".join(b"%d,%s\n" % (i, b"x" * 300) for i in range(30_000)))
    process.stdin.flush()
    process.send_signal(kind)
    status, out, err = finish(process)
    assert out == ""
    if kind is signal.SIGINT:
        assert status == 130
        assert err.startswith("stopped; nothing was loaded (")
    else:
        assert status == -signal.SIGKILL
    with txnkv.connect(store) as client:
        internals.maintenance(client).round(resume_all=True)
        for info in client.transactions():
            if info.state is txnkv.TxnState.OPEN:  # of the killed one: its heartbeats have ended
                client.abort_transaction(info.id)
        assert client.table("t").count() == 1


@pytest.fixture
def few(store, run):
    run("create", store, "t", "--schema", "id:int64", "--key", "id")
    run("insert", store, "t", '{"id": 1}', '{"id": 2}')
    with txnkv.connect(store) as client, client.snapshot() as then:
        run("insert", store, "t", '{"id": 3}')
        yield store, client.table("t"), str(int(then.timestamp))


def _commands(store, then, file):
    loaded = file("a.csv", "id\n7\n8\n")
    return [
        (("delete", store, "t", "-w", "id >= 2"), "2 rows had been deleted", "deleted", {1}),
        (("insert", store, "t", "id=4"), "1 row had been written", "written", {1, 2, 3, 4}),
        (("revert", store, "t", "--to", then), "1 row had been changed", "changed", {1, 2}),
        (("load", store, "t", loaded), "2 rows had been loaded", "loaded", {1, 2, 3, 7, 8}),
        (("produce", store, "e", "--transaction"), "1 message had been sent", "sent", {1, 2, 3}),
    ]


# Ctrl-C, as it comes out of the commit or of the output behind it.
STOPPED = """
import os, sys, txnkv
from txnkv.__main__ import main
from txnkv.cli import command_group, load, messages_commands, table_commands
when, real = os.environ["WHEN"], txnkv.Transaction.commit

def stop(*args):
    if when in ("committed", "unknown"):
        real(*args)
    raise KeyboardInterrupt

if when == "output":
    load.tell = messages_commands.tell = table_commands.tell = stop
else:
    txnkv.Transaction.commit = stop
if when == "unknown":
    command_group._PATIENCE = 0.05
    txnkv.Transaction.state = txnkv.TxnState.COMMIT_IN_PROGRESS
main()
"""


MOMENTS = ["before", "committed", "output", "unknown"]


@pytest.mark.parametrize(
    ("which", "when"),
    [
        pytest.param(which, when, marks=[pytest.mark.slow] if (which + n) % 2 else [])
        for which in range(5)
        for n, when in enumerate(MOMENTS)
    ],
)
def test_a_command_that_is_stopped_tells_how_its_commit_ended(which, when, few, file, run):
    """It said that nothing was deleted, and all rows were gone."""
    store, table, then = few
    run("topics", "create", store, "e")
    args, done, verb, there = _commands(store, then, file)[which]
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    command = [sys.executable, "-c", STOPPED, *map(str, args)]
    process = subprocess.Popen(command, env={**os.environ, "WHEN": when}, **pipes)
    out, err = (each.decode() for each in process.communicate(b"m\n", timeout=300))
    assert (process.returncode, out) == (130, "")
    if when == "before":
        assert err.startswith(f"stopped; nothing was {verb}")
        assert table.count() == 3
        return
    assert {row["id"] for row in table.scan(["id"]).to_arrow().to_pylist()} == there
    if when == "unknown":
        told = rf"stopped; whether anything was {verb} is not known here: `txnkv (.*)` may know\n"
        assert re.fullmatch(told, err)[1].startswith(f"txn show {store} ")
    else:
        assert err == f"stopped; {done} by then, and stay\n"
