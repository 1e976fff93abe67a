"""Room of LMDB files that is given back in use: what may be a hole, and that nobody sees it."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import lmdb
import pytest

from txnkv.errors import CorruptionError
from txnkv.storage import Environment, Environments, StoreDirectory, extents

NAME = "tablets/1"
PAGE = mmap.PAGESIZE
KINDS = (10, 300, 5_000, 40_000)
"""Bytes of values: several on a page, and on pages of their own."""

OTHER = """
from txnkv.storage import extents
extents.LEAST_FREE_BYTES = 0
env = Environments(StoreDirectory.open(sys.argv[1])).get("tablets/1")
def put(first, count, size=20_000):
    def fn(txn):
        for key in range(first, first + count):
            txn.put(b"%06d" % key, b"%06d" % key * (size // 6), db=env.db(b"blocks"))
    env.write(fn)
def drop(first, count):
    def fn(txn):
        for key in range(first, first + count):
            txn.delete(b"%06d" % key, db=env.db(b"blocks"))
    env.write(fn)
def keys():
    with env.read() as txn:
        found = list(txn.cursor(env.db(b"blocks")))
    assert all(bytes(value[:6]) == bytes(value[-6:]) == bytes(key) for key, value in found)
    return len(found)
"""


@pytest.fixture(autouse=True)
def _keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "LEAST_FREE_BYTES", 0)


@pytest.fixture
def environment(directory: StoreDirectory) -> Any:
    made = Environments(directory)
    yield made.get(NAME)
    made.close_all()


def put(environment: Environment, rows: dict[bytes, bytes]) -> None:
    def fn(txn: Any) -> None:
        for key, value in rows.items():
            txn.put(key, value, db=environment.db(b"blocks"))

    environment.write(fn)


def drop(environment: Environment, keys: list[bytes]) -> None:
    def fn(txn: Any) -> None:
        for key in keys:
            txn.delete(key, db=environment.db(b"blocks"))

    environment.write(fn)


def content(environment: Environment) -> dict[bytes, bytes]:
    with environment.read() as txn:
        return {bytes(k): bytes(v) for k, v in txn.cursor(environment.db(b"blocks"))}


def room(environment: Environment) -> int:
    return (environment.path / "data.mdb").stat().st_blocks * 512


def rows(first: int, count: int, size: int = 20_000) -> dict[bytes, bytes]:
    return {b"%06d" % key: b"%06d" % key * (size // 6) for key in range(first, first + count)}


def empty(environment: Environment) -> dict[bytes, bytes]:
    """4 MB of free pages, and two rows."""
    put(environment, rows(0, 202))
    drop(environment, [b"%06d" % key for key in range(200)])
    put(environment, {b"last": b"one"})  # what was freed last is not free for the next
    return content(environment)


def test_room_goes_back_to_the_disk_and_the_rows_stay(environment: Environment) -> None:
    there = empty(environment)
    file = environment.path / "data.mdb"
    before, length = room(environment), file.stat().st_size
    given = environment.give_room_back(10.0)
    assert given > 3_000_000
    assert room(environment) == before - given
    assert file.stat().st_size == length
    assert content(environment) == there
    assert environment.give_room_back(10.0) == 0  # all is given
    put(environment, rows(0, 150))  # holes are pages as others are
    assert content(environment) == {**there, **rows(0, 150)}
    environment.close()
    assert content(environment) == {**there, **rows(0, 150)}


def test_a_file_keeps_as_much_free_as_it_uses(environment: Environment) -> None:
    put(environment, rows(0, 200))
    drop(environment, [b"%06d" % key for key in range(80)])
    put(environment, {b"last": b"one"})
    assert environment.give_room_back(10.0) == 0
    drop(environment, [b"%06d" % key for key in range(80, 150)])
    put(environment, {b"last": b"two"})
    assert environment.give_room_back(10.0) > 0
    used = 50 * -(-20_016 // PAGE) * PAGE  # each is in pages of its own, behind 16 bytes
    assert used * 1.5 - (256 << 10) < room(environment) < used * 2


def test_small_files_are_left_alone(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    empty(environment)
    assert room(environment) > 4_000_000
    assert environment.give_room_back(10.0) == 0


def test_a_page_that_is_read_is_no_hole(environment: Environment) -> None:
    put(environment, rows(0, 200))
    with environment.read() as txn:
        db = environment.db(b"blocks")
        drop_elsewhere = [b"%06d" % key for key in range(198)]

        def change() -> None:
            drop(environment, drop_elsewhere)
            put(environment, {b"last": b"one"})
            assert environment.give_room_back(10.0) == 0

        thread = threading.Thread(target=change)
        thread.start()
        thread.join()
        assert {bytes(k): bytes(v) for k, v in txn.cursor(db)} == rows(0, 200)
    assert environment.give_room_back(10.0) > 3_000_000  # though nothing was written since


@pytest.mark.parametrize("reopened", [False, True])
def test_what_the_last_write_freed_waits_for_no_other(
    environment: Environment, directory: StoreDirectory, reopened: bool
) -> None:
    """A write is made for it, once, which changes nothing."""
    put(environment, rows(0, 202))
    drop(environment, [b"%06d" % key for key in range(200)])
    there, before = content(environment), environment.extent()
    if reopened:
        environment.close()
        environment.give_all_room_back()
    else:
        assert environment.give_room_back(0.0) > 0
        while environment.give_room_back(0.0):
            pass
    assert room(environment) < 500_000
    assert environment.extent() == (before.identity, before.written + 1)
    environment.give_all_room_back()
    assert environment.extent().written == before.written + 1
    assert content(environment) == there


def test_a_page_that_another_process_reads_is_no_hole(
    environment: Environment, directory: StoreDirectory, python: Any
) -> None:
    put(environment, rows(0, 200))
    reader = python(
        OTHER
        + """
with env.read() as txn:
    first = dict(txn.cursor(env.db(b"blocks")))
    say(len(first)); wait()
    assert all(bytes(value[:6]) == bytes(value[-6:]) == bytes(key) for key, value in first.items())
say("whole")
wait()
say(keys())
""",
        directory.path,
    )
    assert reader.line() == "200"
    drop(environment, [b"%06d" % key for key in range(198)])
    put(environment, rows(500, 1))
    assert environment.give_room_back(10.0) == 0
    reader.tell()
    assert reader.line() == "whole"
    put(environment, rows(501, 1))
    assert environment.give_room_back(10.0) > 3_000_000
    reader.tell()
    assert reader.finish() == ["4"]


def test_nobody_waits_for_a_writer(
    environment: Environment, directory: StoreDirectory, python: Any
) -> None:
    empty(environment)
    writer = python(
        OTHER + "env.write(lambda txn: (say('writing'), wait())); say('done')", directory.path
    )
    assert writer.line() == "writing"
    began = time.monotonic()
    assert environment.give_room_back(10.0) == 0
    assert time.monotonic() - began < 5
    writer.tell()
    assert writer.line() == "done"
    assert environment.give_room_back(10.0) > 3_000_000


def test_a_reader_gives_nothing_back(directory: StoreDirectory, environment: Environment) -> None:
    there = empty(environment)
    environment.close()
    assert content(environment) == there
    assert not environment.is_writable
    assert environment.give_room_back(10.0) == 0


def test_other_writers_have_their_turn_in_between(environment: Environment) -> None:
    # Every other value goes: runs of few pages.
    put(environment, rows(0, 600, 5_000))
    drop(environment, [b"%06d" % key for key in range(600) if key % 20])
    put(environment, {b"last": b"one"})
    there, steps = content(environment), 0
    while environment.give_room_back(0.0):
        steps += 1
    assert steps > 5
    assert content(environment) == there


def test_a_file_system_without_holes_is_asked_once(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = empty(environment)
    asked = []

    def refuse(*where: int) -> None:
        asked.append(where)
        raise OSError(errno.EOPNOTSUPP, "no holes here")

    monkeypatch.setattr(extents, "punch_hole", refuse)
    assert environment.give_room_back(10.0) == 0
    put(environment, {b"last": b"two"})
    assert environment.give_room_back(10.0) == 0
    assert len(asked) == 1
    assert content(environment) == {**there, b"last": b"two"}


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_death_between_two_holes(
    environment: Environment, directory: StoreDirectory, python: Any, at: int
) -> None:
    put(environment, rows(0, 300, 5_000))
    environment.close()
    died = python(
        OTHER
        + """
for first in range(0, 300, 20): drop(first, 19)
put(999, 1)
say("holes"); env.give_room_back(10.0)
""",
        directory.path,
        fault=f"holes.made=kill@{at}",
    )
    assert died.finish(-9) == ["holes"]
    kept = {k: v for k, v in rows(0, 300, 5_000).items() if int(k) % 20 == 19}
    assert content(environment) == {**kept, **rows(999, 1)}
    put(environment, rows(0, 300, 5_000))
    assert environment.give_room_back(10.0) == 0
    assert content(environment) == {**rows(0, 300, 5_000), **rows(999, 1)}


def test_a_death_behind_the_write_that_holes_wait_for(
    environment: Environment, directory: StoreDirectory, python: Any
) -> None:
    put(environment, rows(0, 202))
    environment.close()
    died = python(
        OTHER + 'drop(0, 200); say("holes"); env.give_room_back(10.0)',
        directory.path,
        fault="holes.awaited=kill",
    )
    assert died.finish(-9) == ["holes"]
    assert content(environment) == rows(200, 2)
    put(environment, rows(900, 1))
    environment.give_all_room_back()
    assert room(environment) < 500_000
    assert content(environment) == {**rows(200, 2), **rows(900, 1)}


def used_pages(env: Any) -> int:
    """All pages of the databases, and the two of the head."""
    count = 2
    with env.begin() as txn:
        trees = [env.stat(), *(txn.stat(env.open_db(name, txn=txn)) for name in (b"a", b"b"))]
    for each in trees:
        count += each["branch_pages"] + each["leaf_pages"] + each["overflow_pages"]
    return count


@pytest.mark.parametrize("seed", range(6))
def test_what_is_free_and_what_is_used_are_all_pages(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    model: dict[tuple[bytes, bytes], bytes] = {}
    with lmdb.open(str(tmp_path), map_size=1 << 30, max_dbs=2, sync=False) as env:
        databases = {name: env.open_db(name) for name in (b"a", b"b")}
        for step in range(40):
            rate = chance.choice((0.1, 0.5, 0.9))
            with env.begin(write=True) as txn:
                for _ in range(200):
                    name, key = chance.choice((b"a", b"b")), b"%04d" % chance.randrange(800)
                    if chance.random() < rate:
                        model[name, key] = chance.randbytes(chance.choice(KINDS))
                        txn.put(key, model[name, key], db=databases[name])
                    elif model.pop((name, key), None) is not None:
                        txn.delete(key, db=databases[name])
            pinned = env.begin() if chance.random() < 0.3 else None
            _make_holes(env, tmp_path, chance.random() < 0.5)
            if pinned:
                pinned.abort()
            with env.begin() as txn:
                found = {
                    (name, key): value
                    for name, db in databases.items()
                    for key, value in txn.cursor(db)
                }
            assert found == model, step


def _make_holes(env: Any, folder: Path, all_of_them: bool) -> None:
    with env.begin(write=True) as txn:
        descriptor = os.open(folder / "data.mdb", os.O_RDWR)
        meta, lists, kept = extents._free_pages(descriptor, txn.id() - 1)
        free = [page for _, pages in lists for page in pages]
        assert len(set(free) | kept) == len(free) + len(kept)
        number, read = txn.id(), extents.numbers_read(env)
        extents.make_holes(descriptor, number, read, lambda: all_of_them)
        os.close(descriptor)
        txn.abort()
    assert used_pages(env) + len(free) + len(kept) == meta.last_page + 1


def test_a_damaged_list_is_left_alone_or_taken_as_it_is(environment: Environment) -> None:
    """Each byte of the head and of the lists, flipped: no error, and no hole behind the end."""
    there = empty(environment)
    environment.close()
    file = environment.path / "data.mdb"
    data = bytearray(file.read_bytes())
    with file.open("r+b") as opened:
        descriptor = opened.fileno()
        meta = extents._last_meta(descriptor)
        _, _, kept = extents._free_pages(descriptor, meta.number)
        places = [*range(16, 152), *range(PAGE + 16, PAGE + 152)]
        for page in kept:
            places += range(page * PAGE, page * PAGE + 64)
            places += range((page + 1) * PAGE - 96, (page + 1) * PAGE)
        alone = 0
        for place in places:
            os.pwrite(descriptor, bytes([data[place] ^ 0x41]), place)
            with patch.object(extents, "punch_hole") as punched:
                made = extents.make_holes(descriptor, meta.number + 1, iter(()), lambda: True)
            assert made.given == 0
            alone += not punched.called
            for (_, at, count), _ in punched.call_args_list:
                assert 2 * PAGE <= at < at + count <= len(data)
            os.pwrite(descriptor, data[place : place + 1], place)
    assert alone > 50
    assert content(environment) == there


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_file_that_ends_too_soon(
    directory: StoreDirectory,
    monkeypatch: pytest.MonkeyPatch,
    whole: bool,
    writable: bool,
) -> None:
    """Free pages at its end LMDB may leave unwritten; rows that were cut off are told, to those
    who read only too.
    """
    made = Environments(directory)
    environment = made.get(NAME)
    put(environment, rows(0, 200))
    drop(environment, [b"%06d" % key for key in range(1, 200)])
    for _ in range(3):  # what is left moves into free pages
        put(environment, rows(0, 1))
    there = content(environment)
    made.close_all()
    file = environment.path / "data.mdb"
    length = file.stat().st_size
    os.truncate(file, length - 400_000 if whole else 7 * PAGE + PAGE // 2)
    readers = Environments(replace(directory, read_only=True))
    reader = readers.get(NAME)
    writable = writable and hasattr(os, "posix_fallocate")
    refused = OSError(errno.EROFS, "injected")
    if not writable:
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=refused), raising=False)
    if whole:
        assert content(reader) == there
    else:
        with pytest.raises(CorruptionError, match="damaged" if writable else "was cut off"):
            content(reader)
    readers.close_all()
    assert (file.stat().st_size == length) == writable
