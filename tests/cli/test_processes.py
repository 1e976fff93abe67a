"""The command line as a process of its own: pipes, signals, exit statuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

import txnkv

PROGRAM = [sys.executable, "-m", "txnkv"]


def start(*args, **options):
    return subprocess.Popen(
        [*PROGRAM, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out.decode(), err.decode()


def test_it_is_a_program(orders):
    status, out, err = finish(start("scan", orders, "orders", "--json", "--ordered"))
    assert (status, err) == (0, "")
    assert [json.loads(line)["id"] for line in out.splitlines()] == [1, 2, 3, 4]
    status, out, err = finish(start("--version"))
    assert (status, out) == (0, f"txnkv, version {txnkv.__version__}\n")


def test_errors_are_one_line_without_a_traceback(tmp_path, orders):
    for args in (
        ["tables", tmp_path / "none"],
        ["scan", orders, "none"],
        ["load", orders, "orders", tmp_path / "none.csv"],
        ["tables", tmp_path / "orders.csv"],
    ):
        status, out, err = finish(start(*args))
        assert (status, out) == (1, "")
        assert err.startswith("Error: ")
        assert err.count("\n") == 1


def test_a_wrong_call_is_exit_status_2(orders):
    for args in (["scan"], ["nope"], ["scan", orders, "orders", "--limit", "x"]):
        status, out, err = finish(start(*args))
        assert (status, out) == (2, "")
        assert "Usage: " in err


def test_tables_in_a_pipe_are_not_cut(store, file, run):
    run("load", store, "t", file("a.csv", f"id,v\n1,{'x' * 500}\n"), "--key", "id")
    _, out, _ = finish(start("scan", store, "t"))
    assert "x" * 500 in out


def test_a_reader_that_goes_away_ends_a_scan_quietly(store, file, run):
    rows = "id,v\n" + "".join(f"{i},{'x' * 50}\n" for i in range(50_000))
    run("load", store, "t", file("a.csv", rows), "--key", "id")
    process = start("scan", store, "t", "--json")
    process.stdout.readline()
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert err == b""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_load_that_is_stopped_leaves_no_rows(kind, store, file, run):
    """It has read and staged rows, and waits for more in its pipe when the signal comes."""
    run("load", store, "t", file("a.csv", "id,v\n-1,x\n"), "--key", "id")
    process = start("load", store, "t", "-", "--format", "csv", stdin=subprocess.PIPE)
    process.stdin.write(b"id,v\n")
    process.stdin.write(b"".join(b"%d,%s\n" % (i, b"x" * 100) for i in range(200_000)))
    process.stdin.flush()
    process.send_signal(kind)
    status, out, err = finish(process)
    assert status == (1 if kind is signal.SIGINT else -signal.SIGKILL), err
    assert out == ""
    with txnkv.connect(store) as client:
        client.instance.coordinator.maintenance.round(resume_all=True)
        for info in client.transactions():
            if info.state is txnkv.TxnState.OPEN:  # of the killed one: its heartbeats have ended
                client.abort_transaction(info.id)
        assert client.table("t").count() == 1
