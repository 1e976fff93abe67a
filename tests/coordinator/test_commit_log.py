"""The commit log: groups, validation, failure, tailing by another process's eyes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

from tests.coordinator.conftest import World
from tests.internals import die_in_commit
from txnkv.coordinator import payload as payloads
from txnkv.coordinator.commit_log import CommitLog
from txnkv.coordinator.commit_queue import SmallCommit
from txnkv.coordinator.held import Key
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.payload import PayloadError, Section, differs, pack, unpack, unpack_whole
from txnkv.errors import (
    ClosedError,
    CommitOutcomeUnknownError,
    CorruptionError,
    StorageFullError,
    TransactionConflictError,
    UnavailableError,
)
from txnkv.metrics import Metrics
from txnkv.storage import BusyError, arm, clock, disarm, waiting_for

KIND = 7


class Shelf:
    """A log member that keeps (stamp, bytes) by id."""

    def __init__(self) -> None:
        self.held: dict[int, dict[int, bytes]] = {}
        self.lost: dict[int, dict[int, str]] = {}
        self.flushes: list[int] = []

    def apply(self, id: int, data: bytes, stamp: int) -> None:
        self.held.setdefault(id, {})[stamp] = data

    def lose(self, section: Section, stamp: int, error: str) -> None:
        self.lost.setdefault(section.id, {})[stamp] = error

    def forget(self, id: int) -> None:
        self.held.pop(id, None)
        self.lost.pop(id, None)

    def undo(self, ids: set[int], upto: int) -> None:
        for id in ids:
            self.held[id] = {stamp: data for stamp, data in self.held[id].items() if stamp <= upto}

    def write_out(self, upto: Timestamp) -> dict[Key, str]:
        self.written_out = upto
        return {}

    def flushed(self, upto: Timestamp, held: Collection[int]) -> None:
        self.flushes.append(upto)

    def reset(self) -> None:
        self.held.clear()

    def values(self, id: int = 1) -> list[bytes]:
        return [data for _, data in sorted(self.held.get(id, {}).items())]


@pytest.fixture
def shelf(world: World) -> Shelf:
    shelf = Shelf()
    world.coordinator.log.add_member(KIND, shelf)
    return shelf


def second_log(world: World) -> tuple[CommitLog, Shelf]:
    """Make the log that another process would have: it shares the store alone."""
    log, shelf = CommitLog(world.store, Metrics()), Shelf()
    log.add_member(KIND, shelf)
    return log, shelf


def allow(cur: apsw.Cursor, latest: Timestamp) -> None:
    """Refuses nothing."""


@contextmanager
def monotonic_standing_still() -> Iterator[None]:
    now = clock.monotonic_micros()
    with clock.replaced(monotonic=lambda: now):
        yield


def small(
    txn_id: int,
    data: bytes = b"x",
    id: int = 1,
    validate: Callable[[apsw.Cursor, Timestamp], None] = allow,
) -> SmallCommit:
    return SmallCommit(txn_id, [Section(KIND, id, data)], validate)


def test_a_commit_is_in_memory_and_in_the_latest_snapshot(world: World, shelf: Shelf) -> None:
    log = world.coordinator.log
    before = log.latest()
    stamp = log.commit(small(5, b"one"))
    assert stamp > before
    assert log.latest() == stamp
    assert shelf.held == {1: {stamp: b"one"}}


def test_another_process_hears_of_it_at_its_next_look(world: World, shelf: Shelf) -> None:
    other, other_shelf = second_log(world)
    assert other.latest() == world.coordinator.log.latest()
    first = world.coordinator.log.commit(small(5, b"one"))
    second = world.coordinator.log.commit(small(6, b"two", id=2))
    assert other.latest() == second
    assert other_shelf.held == {1: {first: b"one"}, 2: {second: b"two"}}


def test_nothing_new_is_not_looked_for(world: World, shelf: Shelf) -> None:
    log = world.coordinator.log
    log.commit(small(5))
    stamp = log.latest()
    with world.store.status.read() as cur:
        statements: list[str] = []
        cur.connection.set_exec_trace(lambda _, sql, __: statements.append(sql) or True)
        try:
            assert log.latest() == stamp
        finally:
            cur.connection.set_exec_trace(None)
    assert statements == []


def test_refusal_concerns_one_member_alone(world: World, shelf: Shelf) -> None:
    log = world.coordinator.log

    def refuse(cur: apsw.Cursor, latest: Timestamp) -> None:
        raise TransactionConflictError("the key was changed")

    futures = [
        log.commit_async(small(1, b"a")),
        log.commit_async(small(2, b"b", validate=refuse)),
        log.commit_async(small(3, b"c")),
    ]
    assert futures[0].result(10) < futures[2].result(10)
    with pytest.raises(TransactionConflictError):
        futures[1].result(10)
    assert shelf.values() == [b"a", b"c"]


def test_a_member_is_validated_after_those_before_it(world: World, shelf: Shelf) -> None:
    """Earlier members of the same group are in memory, and counted as committed."""
    log = world.coordinator.log
    seen: list[tuple[list[bytes], Timestamp]] = []

    def look(cur: apsw.Cursor, latest: Timestamp) -> None:
        seen.append((shelf.values(), latest))

    with world.store.status.write():  # all wait for one group
        futures = [log.commit_async(small(i, b"%d" % i, validate=look)) for i in range(3)]
    stamps = [future.result(10) for future in futures]
    assert [values for values, _ in seen] == [[], [b"0"], [b"0", b"1"]]
    assert [latest for _, latest in seen[1:]] == stamps[:2]
    assert world.coordinator.metrics.commit_groups.read() == 1


def test_threads_that_wait_share_a_group(world: World, shelf: Shelf) -> None:
    log = world.coordinator.log
    started = threading.Barrier(9)

    def commit(number: int) -> Timestamp:
        started.wait(10)
        return log.commit(small(number, b"%d" % number))

    with ThreadPoolExecutor(8) as pool:
        with world.store.status.write():
            futures = [pool.submit(commit, number) for number in range(8)]
            started.wait(10)
            while len(log.queue._queue) < 8:
                threading.Event().wait(0.001)
        stamps = [future.result(10) for future in futures]
    assert len(set(stamps)) == 8
    assert world.coordinator.metrics.commit_groups.read() == 1
    assert log.latest() == max(stamps)
    assert sorted(shelf.values()) == [b"%d" % number for number in range(8)]


def test_many_threads_each_get_their_own_answer(world: World, shelf: Shelf) -> None:
    log = world.coordinator.log

    def commit(number: int) -> tuple[int, Timestamp]:
        return number, log.commit(small(number, b"%d" % number))

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(commit, range(400)))
    other, other_shelf = second_log(world)
    other.latest()
    assert {stamp: b"%d" % number for number, stamp in answers} == other_shelf.held[1]
    assert shelf.held == other_shelf.held
    assert world.coordinator.metrics.small_commits.read() == 400


def test_nobody_is_answered_before_the_disk_has_it(
    world: World, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = world.coordinator.log
    waits = threading.Event()

    class Wake:
        def __init__(self, lock: threading.Lock) -> None:
            self.lock, self.release = lock, lock.release

        def acquire(self) -> bool:
            waits.set()
            return self.lock.acquire()

    def sync() -> None:
        if threading.current_thread() is threading.main_thread():
            return  # what holds up the leader at first
        assert waits.wait(60)
        raise UnavailableError("the disk failed")

    with ThreadPoolExecutor(1) as pool:
        with world.store.status.write():
            leader = pool.submit(log.commit, small(1, b"leader"))
            while not log.queue._queue:
                threading.Event().wait(0.001)
            request = log.offer(small(2, b"follower"))
            assert request.wake is not None
            monkeypatch.setattr(request, "wake", Wake(request.wake))
            monkeypatch.setattr(world.store.status, "sync", sync)
        while request.given is None:
            threading.Event().wait(0.001)
        try:
            assert not request.ended
            assert request.stamp is None
            with pytest.raises(CommitOutcomeUnknownError):
                log.outcome(request)
        finally:
            waits.set()
        with pytest.raises(CommitOutcomeUnknownError):
            leader.result(60)
    assert request.ended
    assert request.stamp is None


@pytest.mark.parametrize("behind", ["the writer", "a commit that waits for it"])
def test_background_work_does_not_wait_for_its_turn(
    world: World, shelf: Shelf, behind: str
) -> None:
    """It waited for as long as a process was stopped that was writing."""
    log, over = world.coordinator.log, threading.Event()

    def commit() -> Timestamp:
        with waiting_for(0.01):
            return log.commit(small(1, b"background"))

    with ThreadPoolExecutor(2) as pool:
        with world.store.status.write():
            other = None
            if behind != "the writer":
                other = pool.submit(log.commit, small(2, b"other"))
                while not log.queue._queue:
                    over.wait(0.001)
            with pytest.raises(BusyError):
                pool.submit(commit).result(60)
        if other is not None:
            other.result(60)
    log.commit(small(3, b"after"))
    assert b"background" not in shelf.values()


def test_what_is_on_the_disk_is_never_told_as_not_committed(
    world: World, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was closed between the sync and the answer."""
    log = world.coordinator.log

    def closed(_: int) -> None:
        raise ClosedError("the store was closed")

    def sync() -> None:
        monkeypatch.setattr(log.runtime, "raise_durable", closed)

    monkeypatch.setattr(world.store.status, "sync", sync)
    with pytest.raises(CommitOutcomeUnknownError):
        log.commit(small(1, b"a"))


@pytest.mark.parametrize("point", ["status.before_commit", "log.written"])
def test_what_did_not_become_durable_is_taken_back(world: World, shelf: Shelf, point: str) -> None:
    log = world.coordinator.log
    kept = log.commit(small(1, b"kept"))
    arm(point, "error")
    with pytest.raises(CommitOutcomeUnknownError) as raised:
        log.commit(small(2, b"lost"))
    disarm()
    assert raised.value.txn_id == 2
    assert shelf.values() == [b"kept"]
    assert log.latest() == kept
    with world.store.status.read() as cur:
        assert payloads.find(cur, 2) is None
    again = log.commit(small(3, b"next"))
    assert again > kept
    assert shelf.values() == [b"kept", b"next"]


@pytest.mark.parametrize("alone", [True, False])
def test_a_commit_that_was_seen_before_its_writer_failed_is_applied_again(
    world: World, shelf: Shelf, alone: bool
) -> None:
    log = world.coordinator.log
    log.commit(small(1, b"kept"))

    def look() -> None:
        with world.store.status.read() as cur:
            log.catch_up(cur)

    def write() -> None:
        if not alone or log.commit_alone(small(2, b"there")) is None:
            log.commit(small(2, b"there"))

    def seen_and_failed() -> None:
        disarm()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(look).result(60)
        raise OSError("late")

    arm("status.after_commit", seen_and_failed)
    with pytest.raises(CommitOutcomeUnknownError):
        write()
    log.latest()
    assert shelf.values() == [b"kept", b"there"]
    log.commit(small(3, b"next"))
    assert shelf.values() == [b"kept", b"there", b"next"]


def test_a_commit_whose_answer_was_lost_comes_to_light(world: World, shelf: Shelf) -> None:
    log = world.coordinator.log
    arm("log.durable", "error")
    with pytest.raises(CommitOutcomeUnknownError):
        log.commit(small(2, b"there"))
    disarm()
    stamp = log.latest()
    assert shelf.held == {1: {stamp: b"there"}}
    with world.store.status.read() as cur:
        assert payloads.find(cur, 2) == stamp
    assert world.coordinator.get(2).commit_ts == stamp


def test_a_full_disk_refuses_and_loses_nothing(
    world: World, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = world.coordinator.log
    kept = log.commit(small(1, b"kept"))

    def full() -> None:
        raise StorageFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(world.store.status, "_commit", full)
        with pytest.raises(StorageFullError):
            log.commit(small(2, b"lost"))
    world.store.status._roll_back(StorageFullError("no room"))
    assert shelf.values() == [b"kept"]
    assert log.latest() == kept
    log.commit(small(3, b"next"))
    assert shelf.values() == [b"kept", b"next"]


def test_replay_at_open(world: World, shelf: Shelf) -> None:
    stamps = [world.coordinator.log.commit(small(i, b"%d" % i)) for i in range(5)]
    world.restart()
    again = Shelf()
    world.coordinator.log.add_member(KIND, again)
    assert world.coordinator.log.latest() == stamps[-1]
    assert again.held == {1: {stamp: b"%d" % i for i, stamp in enumerate(stamps)}}


def test_what_was_flushed_is_not_replayed(world: World, shelf: Shelf) -> None:
    log = world.coordinator.log
    first = log.commit(small(1, b"flushed"))
    second = log.commit(small(2, b"not yet"))
    with world.store.status.write() as cur:
        cur.execute(
            "UPDATE clock_row SET flushed_ts = ?, manifest_version = manifest_version + 1", (first,)
        )
    log.latest()
    assert shelf.flushes == [first]
    other, other_shelf = second_log(world)
    other.latest()
    assert other_shelf.held == {1: {second: b"not yet"}}
    assert other.version == log.version == 2


def test_a_damaged_payload_is_told_and_not_applied(world: World, shelf: Shelf) -> None:
    stamp = world.coordinator.log.commit(small(1, b"precious"))
    with world.store.status.write() as cur:
        cur.execute("UPDATE commit_log SET payload = ?", (b"\0" * 40,))
    other, other_shelf = second_log(world)
    with pytest.raises(CorruptionError, match=str(stamp)):
        other.latest()
    assert other_shelf.held == {}


def test_a_commit_in_flight_hides_nobody_elses(world: World, shelf: Shelf) -> None:
    """While this process's group is on its way, `latest` is what it was, not less."""
    log = world.coordinator.log
    kept = log.commit(small(1, b"kept"))
    seen: list[Timestamp] = []
    done = threading.Event()

    def look() -> None:
        seen.append(log.latest())
        done.set()

    def slow() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        assert done.wait(10)
        thread.join()

    arm("status.before_commit", slow)
    try:
        later = log.commit(small(2, b"later"))
    finally:
        disarm("status.before_commit")
    assert seen == [kept]
    assert log.latest() == later


def test_what_is_not_durable_is_left_out(world: World, shelf: Shelf) -> None:
    """Another process's commit can be read before it is on the disk; a snapshot waits for that."""
    other, _ = second_log(world)
    kept = other.commit(small(1, b"kept"))
    log = world.coordinator.log
    assert log.latest() == kept
    with monotonic_standing_still():
        seen: list[Timestamp] = []
        real = world.store.status.sync

        def look_then_sync() -> None:
            seen.append(log.latest())
            real()

        world.store.status.sync = look_then_sync  # type: ignore[method-assign]
        try:
            later = other.commit(small(2, b"later"))
        finally:
            world.store.status.sync = real  # type: ignore[method-assign]
    assert seen == [kept]
    assert log.latest() == later


def test_what_a_dead_process_did_not_sync_is_synced_by_who_sees_it(
    world: World, shelf: Shelf
) -> None:
    log = world.coordinator.log
    kept = log.commit(small(1, b"kept"))
    with world.store.status.write(sync=False) as cur:  # died before its sync
        stamp = kept + 1
        cur.execute("INSERT INTO commit_log VALUES (?, 2, ?)", (stamp, pack([], stamp)))
        cur.execute("UPDATE clock_row SET last_timestamp = ?, last_commit = ?", (stamp, stamp))
    assert log.latest() == kept
    time.sleep(0.02)
    assert log.latest() == stamp
    assert world.store.runtime.all_synced()


def put_unnoted(world: World, stamp: int, txn_id: int, *, sync: bool) -> None:
    """A commit whose process was stopped before it said that it is durable."""
    with world.store.status.write(sync=sync) as cur:
        row = (stamp, txn_id, pack([], stamp))
        cur.execute("INSERT INTO commit_log VALUES (?, ?, ?)", row)
        cur.execute("UPDATE clock_row SET last_timestamp = ?, last_commit = ?", (stamp, stamp))


@pytest.mark.parametrize("who", ["first look", "all is synced", "a writer"])
def test_what_one_has_seen_nobody_leaves_out_afterwards(
    world: World, shelf: Shelf, who: str
) -> None:
    """Seen once in thirty seconds of three busy processes: real time went backwards.

    p0    COMMIT of A ... sync ..................................... says: durable up to A
    p1                        looks, A is on the disk, sees A, ends
    p3                                                     COMMIT of B ...
    p2                                                             looks: durable up to before A
    """
    log = world.coordinator.log
    kept = log.commit(small(1, b"kept"))
    other, _ = second_log(world)
    if who == "all is synced":
        other.latest()
    stamp = kept + 1
    put_unnoted(world, stamp, 2, sync=who != "first look")
    if who == "a writer":
        stamp = int(other.commit(SmallCommit(0, [], lambda _, latest: None)))
    else:
        assert other.latest() == stamp
    with monotonic_standing_still():
        put_unnoted(world, stamp + 1, 3, sync=False)
        assert log.latest() == stamp


def test_a_new_process_sees_all_that_is_there(world: World, shelf: Shelf) -> None:
    """Its first look is durable, whatever the runtime file knows."""
    log = world.coordinator.log
    stamp = log.commit(small(1, b"kept"))
    die_in_commit(world.store.runtime)
    other, other_shelf = second_log(world)
    assert other.latest() == stamp
    assert other_shelf.values() == [b"kept"]


class TestPayload:
    SECTIONS = (Section(1, 9, b"abc"), Section(2, (1 << 63) - 1, b"", 1 << 40, 7))
    VERSION_1 = bytes.fromhex(
        "21f780380100000002000000010000000300000009000000000000006162630200"
        "000000000000ffffffffffffff7f"
    )

    def test_round_trip(self) -> None:
        found = unpack(pack(self.SECTIONS, 77), 77)
        assert [section[:5] for section in found] == [section[:5] for section in self.SECTIONS]
        assert all(section.is_whole(77) and not section.is_whole(78) for section in found)
        assert pack(found, 77) == pack(self.SECTIONS, 77)

    def test_version_1(self) -> None:
        found = unpack(self.VERSION_1, 77)
        assert found == [Section(1, 9, b"abc"), Section(2, (1 << 63) - 1, b"")]
        assert not differs(self.VERSION_1, 77)
        for at in range(len(self.VERSION_1)):
            changed = bytearray(self.VERSION_1)
            changed[at] ^= 0x40
            with pytest.raises(PayloadError):
                unpack(bytes(changed), 77)

    def test_of_another_commit(self) -> None:
        with pytest.raises(PayloadError, match="checksum"):
            unpack(pack(self.SECTIONS, 77), 78)

    @pytest.mark.parametrize("mask", [0x01, 0x40, 0xFF])
    def test_a_changed_byte_is_of_one_section_at_most(self, mask: int) -> None:
        whole = pack(self.SECTIONS, 77)
        right = unpack(whole, 77)
        for at in range(len(whole)):
            payload = bytearray(whole)
            payload[at] ^= mask
            found = unpack(bytes(payload), 77)
            assert [s[:2] for s in found] == [s[:2] for s in right]
            for section, expected in zip(found, right, strict=True):
                assert (section == expected) == section.is_whole(77)
            assert sum(not section.is_whole(77) for section in found) <= 1
            plain = unpack_whole(bytes(payload), 77)
            assert plain is None or plain == [section[:3] for section in right]
            assert differs(bytes(payload), 77)

    def test_what_is_whole_is_known_to_be(self) -> None:
        for sections in (self.SECTIONS, ()):
            payload = pack(sections, 77)
            assert unpack_whole(payload, 77) == [section[:3] for section in sections]
            assert unpack_whole(payload, 78) is None
            assert unpack_whole(payload + b"x", 77) is None
            for cut in range(len(payload)):
                assert unpack_whole(payload[:cut], 77) is None
        assert unpack_whole(self.VERSION_1, 77) is None
        with pytest.raises(TypeError, match="bytes and a commit timestamp"):
            unpack_whole("x", 77)  # type: ignore[arg-type]

    def test_both_directories_damaged(self) -> None:
        payload = bytearray(pack(self.SECTIONS, 77))
        payload[5] ^= 1
        payload[-10] ^= 1
        with pytest.raises(PayloadError, match="checksum"):
            unpack(bytes(payload), 77)

    @pytest.mark.parametrize("length", [0, 3, 4, 11])
    def test_cut_short(self, length: int) -> None:
        with pytest.raises(PayloadError):
            unpack(pack(self.SECTIONS, 77)[:length], 77)


def test_the_store_can_be_opened_without_a_log(tmp_path: Path) -> None:
    world = World(tmp_path / "s")
    try:
        assert world.coordinator.latest().micros <= clock.now_micros()
    finally:
        world.close()
