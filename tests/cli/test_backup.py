"""backup and restore."""

from __future__ import annotations

import txnkv


def test_backup_and_restore(orders, tmp_path, run, fail, misuse):
    first, second = tmp_path / "b" / "1", tmp_path / "b" / "2"
    assert run("backup", orders, first).out.startswith(f"copied {orders} as of 20")
    found = run("backup", orders, second, "--base", first, "--limit", "100", "--json").json
    assert found["path"] == str(second)
    assert found["linked"] > 0
    made = tmp_path / "made"
    assert run("restore", tmp_path / "b", made, "--json").json["backup"] == str(second)
    with txnkv.connect(made, create=False) as client:
        assert client.table("orders").count() == 4
    again = tmp_path / "again"
    assert run("restore", first, again).out.startswith(f"made the store {again} as of 20")
    assert "is not empty: it holds" in fail("restore", first, made)
    assert "is no backup, but a store" in fail("restore", orders, tmp_path / "c")
    nothing = fail("restore", tmp_path / "none", tmp_path / "c")
    assert nothing == f"no backup at {tmp_path / 'none'}: there is no such folder"
    early = fail("restore", first, tmp_path / "c", "--at", "2026-01-01T00:00:00Z")
    assert "the first one is of" in early
    assert "no store at" in fail("backup", tmp_path / "none", tmp_path / "c")
    told = fail("init", first)
    assert told.startswith(f"{first} is a backup, and no store: ")
    assert told.endswith("`txnkv restore` makes a store of it, in another folder")
    misuse("restore", first, tmp_path / "c", "--at", "soon")
    misuse("backup", orders, tmp_path / "c", "--limit", "0")
    assert not (tmp_path / "c").exists()


def test_check_of_backups_and_dumps(orders, tmp_path, run, fail, misuse):
    first, second, dump = tmp_path / "1", tmp_path / "2", tmp_path / "d"
    run("compact", orders)
    run("backup", orders, first)
    run("dump", orders, dump)
    found = run("check", first, "--json").json
    assert found["ok"] is True
    assert found["files"] > 1
    assert run("check", dump).out.startswith("ok: ")
    assert run("check", f"file://{first}").out == run("check", first).out
    misuse("check", "nofs://bucket/1")
    rows = max(first.glob("tablets/*/*"), key=lambda each: each.stat().st_size)
    data = bytearray(rows.read_bytes())
    data[-1] ^= 1
    rows.write_bytes(data)
    # Its file is linked, not read, and so damaged in both.
    run("backup", orders, second, "--base", first)
    for place in (first, second):
        told = fail("check", place)
        assert told.startswith(f"{place / rows.relative_to(first)} is damaged: its checksum")


def test_dump_and_restore(orders, tmp_path, run, fail):
    dest, made = tmp_path / "d", tmp_path / "made"
    text = run("dump", orders, dest).out
    assert text.startswith(f"dumped {orders} as of 20")
    assert "4 rows of 1 table, 0 messages of 0 topics" in text
    assert run("dump", orders, tmp_path / "e", "--json").json["rows"] == 4
    assert run("restore", dest, made).out.startswith(f"made the store {made} as of 20")
    with txnkv.connect(made, create=False) as client:
        assert client.table("orders").count() == 4
    assert "is not empty: it holds" in fail("dump", orders, dest)
