"""The runtime file: liveness, pins, heartbeats, the change number, rebuilding."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

import txnkv
from txnkv.errors import ClosedError, NotSupportedError, StorageFullError, UnavailableError
from txnkv.storage import Runtime, clock, lmdb_open, runtime_file
from txnkv.storage.clocks import boot_id
from txnkv.storage.directory import FORMAT_VERSION

OPEN = "runtime = Runtime.open(__import__('pathlib').Path(sys.argv[1]))\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runtime"


@pytest.fixture
def runtime(folder: Path) -> Iterator[Runtime]:
    opened = Runtime.open(folder)
    yield opened
    opened.close()


# -- the file --------------------------------------------------------------------------


def test_files_are_private_and_their_blocks_are_there(runtime: Runtime, folder: Path) -> None:
    # Writing to a hole of a mapped file on a full disk is a SIGBUS.
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    shared = (folder / "shared").stat()
    assert shared.st_size == runtime_file.FILE_BYTES
    assert shared.st_blocks * 512 >= shared.st_size


@pytest.mark.skipif(sys.platform != "linux", reason="fallocate")
def test_a_copy_with_holes_is_given_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write to a hole on a full disk was a SIGBUS."""
    store = tmp_path / "store"
    with txnkv.connect(store) as client:
        table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
        table.insert({"id": 1})
        client.compact()
    files = [store / "runtime" / "shared", store / "tablets" / "1" / "lock.mdb"]
    for file in files:
        content = file.read_bytes()
        with file.open("wb") as copy:
            copy.truncate(len(content))
            copy.write(content.rstrip(b"\0"))
    for module in (runtime_file, lmdb_open):

        def refuse(descriptor: int, length: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(module, "fill_holes", refuse)
        with pytest.raises(StorageFullError), txnkv.connect(store) as client:
            client.table("t").count()
        monkeypatch.undo()
    with txnkv.connect(store) as client:
        assert client.table("t").count() == 1
    for file in files:
        assert file.stat().st_blocks * 512 >= file.stat().st_size, file


@pytest.mark.parametrize("written", [[], [70_000]], ids=["full", "full soon"])
def test_where_the_system_gives_no_blocks_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    """On macOS the file was a hole."""
    monkeypatch.delattr("os.posix_fallocate", raising=False)
    Runtime.open(tmp_path / "runtime").close()
    shared = (tmp_path / "runtime" / "shared").stat()
    assert shared.st_size == runtime_file.FILE_BYTES
    assert shared.st_blocks * 512 >= shared.st_size
    monkeypatch.setattr("os.pwrite", Mock(side_effect=[*written, OSError(errno.ENOSPC, "full")]))
    with pytest.raises(StorageFullError):
        Runtime.open(tmp_path / "other")


def test_processes_share_one_generation(runtime: Runtime, folder: Path, python) -> None:
    assert python(OPEN + "say(runtime.generation)", folder).finish() == [str(runtime.generation)]


def test_generation_stays_when_all_have_gone(folder: Path, python) -> None:
    first = python(OPEN + "say(runtime.generation)", folder).finish()
    assert python(OPEN + "say(runtime.generation)", folder).finish() == first


def overwrite(folder: Path, word: int, value: int) -> None:
    with (folder / "shared").open("r+b") as file:
        file.seek(word * 8)
        file.write(value.to_bytes(8, "little"))


def truncate(folder: Path) -> None:
    os.truncate(folder / "shared", 100)


DAMAGES = {
    "magic": lambda folder: overwrite(folder, 0, 7),
    "version": lambda folder: overwrite(folder, 1, 99),
    "boot": lambda folder: overwrite(folder, 3, 12345),
    "generation": lambda folder: overwrite(folder, 2, 0),
    "short": truncate,
    "gone": lambda folder: (folder / "shared").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_unfit_file_is_replaced_when_nobody_is_there(folder: Path, python, damage: str) -> None:
    first = python(OPEN + "say(runtime.generation)", folder).finish()
    DAMAGES[damage](folder)
    runtime = Runtime.open(folder)
    assert str(runtime.generation) not in first
    assert runtime.change_number() is not None
    assert runtime.least_pin() is None
    assert runtime.heartbeat_read(5) == (0, 0)
    runtime.close()


BOOT, VERSION = (3, 12345), (1, FORMAT_VERSION - 1)
TOLD = {BOOT: "this process sees another boot id", VERSION: "other processes use it"}


@pytest.mark.parametrize(("slot", "of_another"), [(True, BOOT), (False, BOOT), (True, VERSION)])
def test_unfit_file_is_not_replaced_under_another_process(
    folder: Path, python, slot: bool, of_another: tuple[int, int]
) -> None:
    """Whoever has the old file mapped would never see what is written to the new one; a program of
    an elder format would misread what the new one writes to the store.
    """
    code = OPEN + f"say(runtime.slot if {slot} else 0); wait()"
    other = python(code, folder)
    other.line()
    overwrite(folder, *of_another)
    with pytest.raises(UnavailableError, match=TOLD[of_another]):
        Runtime.open(folder)
    other.kill()
    Runtime.open(folder).close()


def test_deleted_runtime_is_noticed(runtime: Runtime, folder: Path) -> None:
    assert runtime.is_current()
    (folder / "shared").unlink()
    assert not runtime.is_current()


def test_close_beside_threads_that_use_it(folder: Path) -> None:
    """A thread in the background killed the process: the memory went while it was at a word."""

    def use(runtime: Runtime) -> None:
        while True:
            runtime.note_synced(runtime.to_sync() or 0)
            runtime.change_word()

    with ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            runtime = Runtime.open(folder)
            using = [pool.submit(use, runtime) for _ in range(3)]
            runtime.close()
            assert all(isinstance(future.exception(), ClosedError) for future in using)


def test_closed_runtime_says_so(folder: Path) -> None:
    runtime = Runtime.open(folder)
    runtime.close()
    for use in (runtime.change_number, runtime.note_regained, runtime.least_pin):
        with pytest.raises(ClosedError):
            use()
    with pytest.raises(ClosedError):
        runtime.hold_snapshot(1)


def test_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(runtime_file.RuntimeFile, "attach", refuse)
    with pytest.raises(OSError, match="Read-only"):
        Runtime.open(folder)
    runtime = Runtime.open(folder, read_only=True)
    assert runtime.change_number() is None  # look: nobody tells
    pin = runtime.hold_snapshot(5)
    assert runtime.least_pin() == pin.snapshot == 5
    assert runtime.slot_alive(runtime.slot)
    assert runtime.is_current()
    runtime.close()


# -- slots -----------------------------------------------------------------------------


def test_slot_is_alive_until_its_process_is_killed(runtime: Runtime, folder: Path, python) -> None:
    own = runtime.slot
    other = python(OPEN + "say(*runtime.owner); wait()", folder)
    slot, start = map(int, other.line().split())
    assert slot != own
    assert runtime.slot_alive(own)
    assert runtime.slot_alive(slot)
    assert runtime.slot_alive(slot, start)
    assert not runtime.slot_alive(slot, start + 1)
    assert runtime.slot_owner(slot) == other.popen.pid
    other.kill()
    assert not runtime.slot_alive(slot)
    assert runtime.slot_owner(slot) == other.popen.pid


def test_slot_of_the_dead_is_taken_again_under_another_start(
    runtime: Runtime, folder: Path, python
) -> None:
    assert runtime.slot == 0
    code = OPEN + "say(*runtime.owner); wait()"
    first = python(code, folder)
    slot, start = map(int, first.line().split())
    first.kill()
    second = python(code, folder)
    assert int(second.line().split()[0]) == slot
    assert runtime.slot_alive(slot)
    assert not runtime.slot_alive(slot, start)


def test_asking_does_not_look_like_life(runtime: Runtime, folder: Path, python) -> None:
    # A lock that is tried to find out, and taken for a moment, would fool who asks meanwhile.
    other = python(OPEN + "say(runtime.slot); wait()", folder)
    slot = int(other.line())
    other.kill()
    code = (
        OPEN
        + f"""
say("asking")
while not os.path.exists(sys.argv[2]): runtime.slot_alive({slot})
"""
    )
    stop = folder.parent / "stop"
    asker = python(code, folder, stop)
    asker.line()
    assert not any(runtime.slot_alive(slot) for _ in range(20000))
    stop.touch()
    asker.finish()


def test_processes_take_different_slots_at_once(folder: Path, python) -> None:
    code = OPEN + "say('ready'); wait(); say(runtime.slot); wait()"
    processes = [python(code, folder) for _ in range(5)]
    assert [process.line() for process in processes] == ["ready"] * 5
    for process in processes:
        process.tell()
    assert sorted(int(process.line()) for process in processes) == list(range(5))


def test_another_process_of_the_same_pid_is_refused(runtime: Runtime, folder: Path, python) -> None:
    """As in two containers, of which each has a pid 1."""
    code = "os.getpid = lambda: int(sys.argv[2])\n" + OPEN + "say(runtime.slot); wait()"
    other = python(code, folder, os.getpid())
    assert other.line() == "0"
    with pytest.raises(NotSupportedError, match=f"has pid {os.getpid()} too"):
        runtime.require_slot()
    with pytest.raises(NotSupportedError, match="--pid=container"):
        runtime.hold_snapshot(1)
    other.kill()
    assert runtime.slot == 0
    again = Runtime.open(folder)
    assert again.slot == 0  # this process is no other
    again.close()


def test_threads_of_a_process_take_one_slot(runtime: Runtime) -> None:
    together = threading.Barrier(4)

    def slot(_: int) -> int:
        together.wait(60)
        return runtime.slot

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(slot, range(4))) == {0}


def test_slots_run_out_with_a_clear_error(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txnkv.storage.runtime_file.SlotLocks.take", lambda self, slot: False)
    with pytest.raises(UnavailableError, match="1024 process slots"):
        _ = runtime.slot


@pytest.mark.parametrize("slot", [-1, 1024])
def test_slot_outside_of_the_table(runtime: Runtime, slot: int) -> None:
    with pytest.raises(ValueError, match="slot"):
        runtime.slot_owner(slot)


# -- pins ------------------------------------------------------------------------------


def test_least_pin_is_over_all_live_processes(runtime: Runtime, folder: Path, python) -> None:
    assert runtime.least_pin() is None
    pin = runtime.hold_snapshot(50)
    other = python(
        OPEN + "pin = runtime.hold_snapshot(20); say(runtime.least_pin()); wait()", folder
    )
    assert other.line() == "20"
    assert runtime.least_pin() == 20
    assert runtime.oldest_reader() == (20, other.popen.pid)
    other.kill()
    assert runtime.least_pin() == pin.snapshot == 50


def test_pins_are_counted(runtime: Runtime) -> None:
    pins = [runtime.hold_snapshot(timestamp) for timestamp in (30, 20, 20, 40)]
    for i, least in ((1, 20), (2, 30), (0, 40), (3, None)):
        pins[i].end()
        pins[i].end()  # twice is fine
        assert runtime.least_pin() == least


def test_pin_that_is_dropped_is_given_back(runtime: Runtime) -> None:
    pins = [runtime.hold_snapshot(1), runtime.hold_snapshot(2)]
    del pins[0]
    assert runtime.least_pin() == 2


def test_manifest_pins_are_apart(runtime: Runtime) -> None:
    pin = runtime.hold_manifest(3)
    assert runtime.least_pin() is None
    assert runtime.least_manifest_pin() == 3
    pin.end()
    assert runtime.least_manifest_pin() is None


@pytest.mark.parametrize("timestamp", [-1, 2**64 - 1, 2**64])
def test_pin_that_fits_no_word(runtime: Runtime, timestamp: int) -> None:
    with pytest.raises(ValueError, match="cannot pin"):
        runtime.hold_snapshot(timestamp)
    assert runtime.least_pin() is None


def test_pins_from_many_threads(runtime: Runtime) -> None:
    def pin(first: int) -> None:
        pins = [runtime.hold_snapshot(timestamp) for timestamp in range(first, first + 200)]
        for one in pins:
            one.end()

    kept = runtime.hold_snapshot(10**6)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(pin, range(0, 400, 100)))
    assert runtime.least_pin() == kept.snapshot == 10**6


# -- heartbeats ------------------------------------------------------------------------


def test_heartbeat_is_seen_by_others(runtime: Runtime, folder: Path, python) -> None:
    runtime.heartbeat_register(7, 2**63 + 5, 1000)
    assert runtime.heartbeat_read(7) == (2**63 + 5, 1000)
    before = clock.monotonic_micros()
    code = OPEN + "say(runtime.heartbeat(7, 2**63 + 5)); say(runtime.heartbeat(7, 6))"
    assert python(code, folder).finish() == ["True", "False"]
    txn_id, beat = runtime.heartbeat_read(7)
    assert txn_id == 2**63 + 5
    assert before <= beat <= clock.monotonic_micros()


def test_heartbeat_at_a_given_time(runtime: Runtime) -> None:
    runtime.heartbeat_register(0, 1, 10)
    assert runtime.heartbeat(0, 1, 20)
    assert runtime.heartbeat_read(0) == (1, 20)


def test_heartbeat_entry_is_taken_over(runtime: Runtime) -> None:
    last = Runtime.HEARTBEATS - 1
    runtime.heartbeat_register(last, 1, 10)
    runtime.heartbeat_register(last, 2, 20)
    assert not runtime.heartbeat(last, 1)
    assert runtime.heartbeat_read(last) == (2, 20)


@pytest.mark.parametrize("index", [-1, 65536])
def test_heartbeat_outside_of_the_table(runtime: Runtime, index: int) -> None:
    with pytest.raises(ValueError, match="heartbeat"):
        runtime.heartbeat_read(index)


def test_tables_do_not_overlap(runtime: Runtime) -> None:
    pin = runtime.hold_snapshot(1)
    generation, change = runtime.generation, runtime.change_number()
    for index in (0, Runtime.HEARTBEATS - 1):
        runtime.heartbeat_register(index, 2**64 - 1, 2**64 - 1)
    assert (runtime.generation, runtime.change_number()) == (generation, change)
    assert runtime.least_pin() == pin.snapshot == 1
    assert runtime.slot_owner(Runtime.SLOTS - 1) == 0


# -- the change number -----------------------------------------------------------------


def test_new_file_begins_at_another_change_number(folder: Path, python) -> None:
    first = python(OPEN + "say(runtime.change_number())", folder).finish()
    (folder / "shared").unlink()
    assert python(OPEN + "say(runtime.change_number())", folder).finish() != first


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, encoding: str) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(Path, "read_text", missing)
    with pytest.raises(NotSupportedError, match="Have /proc mounted"):
        boot_id.__wrapped__()
