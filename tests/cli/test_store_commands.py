"""init, tables, stats, check and txn."""

from __future__ import annotations

import os

import lmdb
import pytest

import txnkv
from txnkv import UnavailableError
from txnkv.coordinator import Loss
from txnkv.coordinator.ids import MAX_JUMP
from txnkv.storage.clocks import clock
from txnkv.storage.directory import FORMAT_NAME


def test_a_file_is_no_store(file, fail):
    path = file("a.csv", "id\n")
    for command in ("init", "tables"):
        assert fail(command, path) == f"{path} is a file; a store is a directory"


def test_init_makes_a_store_once(tmp_path, run):
    path = tmp_path / "a" / "shop"
    assert run("init", path, "--json").json == {"path": str(path), "made": True, "tables": 0}
    assert FORMAT_NAME in (path / "FORMAT").read_text()
    assert "is a store already, with 0 tables" in run("init", path).out
    assert run("init", tmp_path / "b").out == f"made the store {tmp_path / 'b'}\n"


def test_init_changes_no_store_that_is_there(tmp_path, run, monkeypatch):
    """It could not be opened where it may only be read."""
    opened, connect = [], txnkv.connect
    monkeypatch.setattr(
        txnkv, "connect", lambda *args, **named: opened.append(named) or connect(*args, **named)
    )
    for _ in range(2):
        run("init", tmp_path / "shop")
    assert opened == [{"read_only": True}, {}, {"read_only": True}]


def test_init_refuses_a_foreign_directory(tmp_path, fail):
    (tmp_path / "letter.txt").write_text("hello")
    fail("init", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize(
    "command", [["scan", "{}", "t"], ["tables", "{}"], ["stats", "{}"], ["check", "{}"]]
)
def test_reading_makes_no_store(command, tmp_path, fail):
    path = tmp_path / "none"
    message = fail(*(word.format(path) for word in command))
    assert message == f"no store at {path}: there is nothing; `txnkv init` makes one"
    assert not path.exists()


def test_tables(orders, run):
    assert run("tables", orders, "--json").json == [
        {
            "name": "orders",
            "rows": 4,
            "bytes": pytest.approx(1000, abs=900),
            "tablets": 1,
            "primary_key": ["id"],
            "columns": {
                "id": "int64",
                "region": "string?",
                "total": "double?",
                "day": "date32[day]?",
            },
        }
    ]
    out = run("tables", orders).out
    assert "id int64, region string?, total double?, day date32[day]?" in out


def test_no_tables(store, run):
    assert run("tables", store).out == "no tables\n"
    assert run("tables", store, "--json").json == []


def test_stats(orders, run):
    found = run("stats", orders, "--json").json
    assert found["tables"]["orders"]["rows"] == 4
    assert found["transactions"] == {"COMMITTED": 1}
    out = run("stats", orders).out
    assert "1 COMMITTED" in out
    assert str(found["snapshot"]) in out


def test_stats_name_who_keeps_versions(orders, run):
    assert "oldest snapshot" in run("stats", orders).out
    with txnkv.connect(orders) as client, client.snapshot() as snapshot:
        assert run("stats", orders, "--json").json["oldest_snapshot"] is None  # it is the latest
        client.table("orders").delete(1)
        found = client.stats()["oldest_snapshot"]
        assert (found["timestamp"], found["pid"]) == (snapshot.timestamp, os.getpid())
        assert 0 <= found["seconds"] < 3600
        (line,) = [each for each in run("stats", orders).out.splitlines() if "oldest" in each]
        assert line.rstrip().endswith(f"process {os.getpid()}")


def test_check_is_content(orders, run):
    assert run("check", orders).out.startswith("ok: 4 rows, ")
    found = run("check", orders, "--json").json
    assert found["ok"] is True
    assert found["rows"] == 4
    assert found["problems"] == []


def test_check_finds_a_flipped_byte(tmp_path, file, run, invoke, large):
    path = tmp_path / "damaged"
    run("load", path, "t", file("a.csv", "id\n1\n2\n"), "--key", "id")
    flip_a_byte(path)
    ran = invoke("check", path)
    assert (ran.status, ran.err) == (1, f"Error: 1 problem found in {path}\n")
    assert "row set" in ran.out
    assert len(ran.out.splitlines()) == 1
    ran = invoke("check", path, "--json")
    assert ran.status == 1
    assert ran.json["ok"] is False
    assert len(ran.json["problems"]) == 1


def flip_a_byte(store):
    """The last of the last block."""
    folder = next((store / "tablets").iterdir())
    with lmdb.open(str(folder), max_dbs=8) as environment, environment.begin(write=True) as txn:
        blocks = environment.open_db(b"blocks", txn)
        key, value = list(txn.cursor(blocks))[-1]
        txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=blocks)


@pytest.fixture
def transactions(orders):
    """The store with an open and an aborted transaction besides the committed one."""
    with txnkv.connect(orders) as client:
        aborted = client.new_transaction()
        aborted.insert("orders", {"id": 10})
        aborted.flush()
        aborted.rollback()
        opened = client.new_transaction(timeout=None)
        opened.insert("orders", {"id": 11})
        opened.flush()
        yield orders, opened.id.local, aborted.id.local
        opened.rollback()


def test_txn_list(transactions, run):
    store, opened, aborted = transactions
    found = {info["id"]: info for info in run("txn", "list", store, "--json").json}
    assert found[opened]["state"] == "OPEN"
    assert found[opened]["participants"] == 1
    assert found[aborted]["state"] == "ABORTED"
    assert found[aborted]["reason"] == "rolled back"
    listed = run("txn", "list", store, "--state", "open").out
    assert str(opened) in listed
    assert "ABORTED" not in listed
    assert len(run("txn", "list", store, "--json").json) == 3


def test_txn_list_of_an_empty_store(store, run):
    assert run("txn", "list", store).out == "no transactions\n"


def test_txn_show(transactions, run, fail):
    store, opened, _ = transactions
    info = run("txn", "show", store, opened, "--json").json
    assert (info["id"], info["state"], info["timeout"]) == (opened, "OPEN", None)
    again = run("txn", "show", store, info["full_id"], "--json").json
    assert again.pop("open_seconds") >= info.pop("open_seconds") >= 0
    assert again == info
    assert "OPEN" in run("txn", "show", store, opened).out
    assert "there is no transaction 999999" in fail("txn", "show", store, 999999)


def test_txn_abort(transactions, run, fail, misuse):
    store, opened, aborted = transactions
    assert run("txn", "abort", store, opened).out == f"transaction {opened} is ABORTED\n"
    assert run("txn", "abort", store, aborted, "--json").json == {"id": aborted, "state": "ABORTED"}
    assert run("txn", "list", store, "--state", "OPEN").out == "no transactions\n"
    committed = run("txn", "list", store, "--state", "COMMITTED", "--json").json[0]["id"]
    assert "is COMMITTED" in fail("txn", "abort", store, committed)
    assert "999999" in fail("txn", "abort", store, 999999)
    assert "not a valid integer" in misuse("txn", "abort", store, "x")


def test_compact(orders, run):
    out = run("compact", orders).out
    assert out.startswith("merged ")
    assert run("check", orders).out.startswith("ok: ")
    found = run("compact", orders, "--json").json
    assert (found["row_sets_before"], found["in_use"]) == (0, 0)
    assert run("tables", orders, "--json").json[0]["rows"] == 4


def test_compact_makes_no_store(tmp_path, fail):
    fail("compact", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_check_and_stats_of_what_is_in_the_log(tmp_path, file, run):
    path = tmp_path / "small"
    run("load", path, "t", file("a.csv", "id\n1\n2\n"), "--key", "id")
    assert run("check", path).out == "ok: 0 rows, 0 blocks, 0 row sets, 1 commit in the log\n"
    assert run("stats", path, "--json").json["log_commits"] == 1
    assert "in the log alone" in run("stats", path).out
    run("compact", path)
    assert run("check", path).out.startswith("ok: 2 rows, ")
    assert run("stats", path, "--json").json["log_commits"] == 0


def test_the_clock_is_repaired(tmp_path, run, invoke):
    path = tmp_path / "store"
    with txnkv.connect(path) as client:
        client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
        with client.transaction() as txn:
            txn.insert("t", {"id": 1})

    def delete(key):
        with txnkv.connect(path) as client, client.transaction() as txn:
            txn.delete("t", key)

    asked = invoke("repair", path)
    assert (asked.status, "name what is to be mended: --clock" in asked.err) == (2, True)
    late = clock.now_micros() + MAX_JUMP + 60_000_000
    with clock.replaced(wall=lambda: late):
        with pytest.raises(UnavailableError, match="txnkv repair"):
            delete(1)
        said = run("repair", path, "--clock").out
        then = txnkv.Timestamp.from_micros(late).datetime
        assert said.startswith(f"the store's clock stands at {then:%Y-%m-%d}")
        delete(1)
    with txnkv.connect(path) as client:
        assert client.table("t").count() == 0


def test_repair_tells_the_loss_that_it_makes(tmp_path, run, monkeypatch):
    """It told what a look before had found, and nothing of what went in the end."""
    with txnkv.connect(tmp_path / "store") as client:
        client.create_topic("q")
    asked = []

    def lost(client, part, *, dry_run=False):
        asked.append(dry_run)
        return Loss(part, offsets=() if dry_run else ((0, 3),))

    monkeypatch.setattr(txnkv.Client, "accept_loss", lost)
    said = run("repair", tmp_path / "store", "--accept-loss", "q/0", "--yes").out
    assert said == "q/0: offsets 0 to 2\nq/0 works again\n"
    assert asked == [False]
