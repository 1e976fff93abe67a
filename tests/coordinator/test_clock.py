"""Hybrid time and snapshots: they never change what they show."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.coordinator.ids import (
    EPOCH,
    MAX_JUMP,
    Timestamp,
    aging_micros,
    latest_snapshot,
    next_timestamp,
)
from txnkv.coordinator.status_schema import one
from txnkv.storage import arm, clock, disarm
from txnkv.tables import history

TTL = txnkv.Schema(
    {"id": "int64", "v": "timestamp[us, tz=UTC]?"}, primary_key=["id"], ttl=("v", 3600)
)


def test_timestamps_rise_whatever_the_wall_clock_does(world: Any, now: Any) -> None:
    """A clock that jumps back is carried as logical time."""
    found = []
    for ahead in (0, 0, 5, -100, -100, 3, -3000, 0):
        now.ahead = ahead
        with world.store.status.write() as cur:
            found += [next_timestamp(cur), next_timestamp(cur)]
    assert found == sorted(set(found))


def test_timestamps_follow_the_wall_clock(world: Any) -> None:
    with world.store.status.write() as cur:
        stamp = next_timestamp(cur)
    assert abs(stamp.micros - clock.now_micros()) < 60e6


def test_a_clock_that_was_ahead_blocks_nothing(client: Any, table: Any, now: Any) -> None:
    """One commit two hours ahead blocked commits and rollbacks for an hour, years for years."""
    now.forward(300 * 86_400)
    with client.transaction() as txn:
        txn.insert(table, (1, None))
    ahead = txn.commit()
    now.ahead = 0
    with client.transaction() as txn:
        txn.insert(table, (2, None))
    assert txn.commit() > ahead
    assert table.count() == 2
    client.new_transaction().rollback()


def test_a_jump_is_refused_when_it_is_made(client: Any, table: Any, now: Any) -> None:
    with client.transaction() as txn:
        txn.insert(table, (1, None))
    before = txn.commit()
    now.ahead = MAX_JUMP / 1e6 + 60
    late = client.new_transaction(timeout=None)
    late.insert(table, (2, None))
    with pytest.raises(txnkv.UnavailableError, match=r"3653 days ahead .*txnkv repair"):
        late.commit()
    with pytest.raises(txnkv.UnavailableError, match="days ahead"):
        client.snapshot(at=datetime.now(UTC) + timedelta(seconds=now.ahead - 1))
    now.ahead = 0
    with client.transaction() as txn:
        txn.insert(table, (3, None))
    assert 0 < txn.commit().micros - before.micros < MAX_JUMP
    now.ahead = MAX_JUMP / 1e6 + 60
    assert client.repair_clock().micros == pytest.approx(clock.now_micros(), abs=60e6)
    with client.transaction() as txn:
        txn.insert(table, (4, None))
    assert table.count() == 3


def test_a_store_without_a_timestamp_refuses_no_clock(world: Any, now: Any) -> None:
    """One that is made more than ten years behind the epoch."""
    now.ahead = MAX_JUMP / 1e6
    with world.store.status.write() as cur:
        cur.execute("UPDATE clock_row SET last_timestamp = 0")
        assert one(cur, "SELECT last_timestamp FROM clock") == (0,)
        assert aging_micros(cur) > MAX_JUMP


def test_who_names_a_time_by_a_datetime_is_told_that_timestamps_are_ahead(
    client: Any, table: Any, now: Any, caplog: Any, tmp_path: Path
) -> None:
    """A day after a jump of the clock `snapshot(at=now)` showed the store of before it."""
    client.backup(tmp_path / "backups" / "1")
    now.forward(30)
    _commit(client, 1)
    now.ahead = 0
    client.snapshot(at=datetime.now(UTC)).close()
    assert not caplog.records, "so far clocks differ"
    now.ahead = 86_400
    _commit(client, 2)
    now.ahead = 0
    last = _commit(client, 3)
    client.backup(tmp_path / "backups" / "2")
    client.snapshot(at=last).close()
    assert table.count() == table.count(snapshot=last) == 3
    assert not caplog.records
    for _ in range(2):
        assert table.count(snapshot=datetime.now(UTC)) == 0
    assert len(caplog.records) == 1
    made = txnkv.restore(tmp_path / "backups", tmp_path / "made", at=datetime.now(UTC))
    assert made.timestamp < last
    assert len(caplog.records) == 2
    for each in caplog.records:
        assert (each.name, each.levelname) == ("txnkv", "WARNING")
        assert "s ahead of this machine's clock" in each.getMessage()
        assert f"Give a timestamp; the latest is {last}, of " in each.getMessage()


_TO_1970 = -clock.now_micros() / 1e6 - 49 * 365 * 86_400


def test_a_clock_of_before_2020_stops_nobody(connect: Any, now: Any, caplog: Any) -> None:
    """That of a machine without a battery, until it is told the time: "a timestamp has 63 bits"."""
    client = connect()
    client.create_table("t", TTL)
    client.create_table("old", TTL)
    topic = client.create_topic("e")
    txn = client.new_transaction(timeout=None)
    txn.send(topic, b"undone")
    txn.flush()
    txn.serialize()
    last = _commit(client, 1)
    now.ahead = _TO_1970
    txn.rollback()
    assert last < _commit(client, 2) < last + 10
    with client.transaction() as txn:
        txn.send(topic, b"after")
    assert [each.value for each in topic.consumer().poll()] == [b"after"]
    client.drop_table("old", keep=3600)
    with pytest.raises(ValueError, match="in the future, it is now 19"):
        client.snapshot(at=Timestamp.from_micros(last.micros + 10**12))
    client.close()
    client = connect()
    client.drop_table("t")
    client.recall_table("old")
    client.close()
    now.ahead = 0
    assert connect().check().ok
    assert not caplog.records


def test_a_store_that_was_made_before_2020(connect: Any, by_hand: Any, now: Any) -> None:
    now.ahead = _TO_1970
    client = connect()
    table = client.create_table("t", TTL)
    assert client.snapshot().timestamp < 10
    table.insert((1, datetime.now(UTC) - timedelta(days=1)))
    _commit(client, 2)
    internals.flush(client)
    by_hand(client)
    client.compact()
    client.close()
    client = connect()
    assert client.table("t").count() == 2, "nothing is old by this clock"
    now.ahead = 0
    by_hand(client)
    assert client.table("t").count() == 1
    assert abs(_commit(client, 3).micros - clock.now_micros()) < 60e6
    assert client.check().ok


def test_an_outcome_that_was_forgotten_under_a_clock_that_went_back_is_not_known(
    client: Any, table: Any, now: Any, by_hand: Any
) -> None:
    """By the wall clock no minute has passed since, and it said ABORTED."""
    now.ahead = 86_400
    txn = client.new_transaction(timeout=None)
    txn.insert(table, (1, "a"))
    arm("status.after_commit", "error@1")
    with pytest.raises(txnkv.CommitOutcomeUnknownError):
        txn.commit()
    disarm()
    now.ahead = 0
    internals.flush(client)
    assert history.trim(internals.tables(client)) == 0
    now.passed += 61
    assert history.trim(internals.tables(client)) == 1
    with pytest.raises(txnkv.CommitOutcomeUnknownError, match="look for what it wrote"):
        txn.rollback()
    assert table.get(1) == {"id": 1, "v": "a"}


def _aging(client: Any, snapshot: Timestamp) -> dict[str, int]:
    """What goes by its age, and how much of it is there."""
    with internals.status(client).read() as cur:
        left = {
            each: one(cur, f"SELECT count(*) FROM {each}")[0]
            for each in ("commit_log", "producers", "producer_states", "transactions")
        }
    for name in ("old", "keyed"):
        left[name] = len(client.topic(name).consumer().poll(timeout=0))
    try:
        left["history"] = client.snapshot(at=snapshot).get("t", 1)["v"] == "a"
    except txnkv.HistoryExpiredError:
        left["history"] = 0
    return left


def test_while_the_clock_is_refused_nothing_goes_for_its_age(
    by_hand: Any, client: Any, table: Any, now: Any, caplog: Any
) -> None:
    """Retention emptied topics by a clock by which nobody could write."""
    client.create_topic("old", retention_seconds=86_400)
    client.create_topic("keyed", cleanup="compact", tombstone_seconds=86_400)
    client.topic("old").producer("p").send(b"x").result()
    with client.transaction() as txn:
        txn.send("keyed", None, key=b"k")
    table.insert((1, "a"))
    snapshot = client.snapshot().timestamp
    table.update((1, "b"))
    ended = client.new_transaction()
    ended.insert(table, (2, None))
    ended.serialize()
    ended.rollback()
    internals.flush(client)
    there = _aging(client, snapshot)
    assert all(there.values())
    now.ahead = MAX_JUMP / 1e6 + 60
    for _ in range(2):
        by_hand(client)
        client.compact()
    assert _aging(client, snapshot) == there
    assert [each.getMessage()[:50] for each in caplog.records if "clock" in each.getMessage()] == [
        "this machine's clock is 3653 days ahead of the sto"
    ]
    client.repair_clock()
    table.update((1, "c"))  # no floor is above the last commit
    now.passed += 600  # it is time to look again
    by_hand(client)
    client.compact()
    assert not any((_aging(client, snapshot) | {"commit_log": 0}).values())


def test_a_snapshot_ahead_of_the_last_commit_stays_as_it_is(client: Any, table: Any) -> None:
    """TestLatestSnapshots: no later commit appears inside a snapshot once given."""
    moment = Timestamp.from_micros(clock.now_micros())
    named = client.snapshot(at=moment)
    with client.transaction() as txn:
        txn.insert(table, (1, None))
    assert txn.commit() > named.timestamp
    assert named.get(table, 1) is None
    assert table.count(snapshot=named) == 0
    with client.snapshot() as after:
        assert after.timestamp == txn.commit()
        assert after.get(table, 1) == {"id": 1, "v": None}


def test_every_snapshot_sees_what_committed_at_or_below_it(client: Any, table: Any) -> None:
    """TestTimestampSnapshot, with the inclusive bound: commit timestamp <= T."""
    stamps = []
    for id in range(6):
        with client.transaction() as txn:
            txn.insert(table, (id, None))
        stamps.append(txn.commit())
    for n, stamp in enumerate(stamps):
        for at, rows in ((stamp - 1, n), (stamp, n + 1), (stamp + 1, n + 1)):
            if at <= stamps[-1]:
                assert table.count(snapshot=Timestamp(at)) == rows
    for n, stamp in enumerate(stamps):  # again, from the newest store
        assert table.scan(["id"], snapshot=stamp).to_arrow().num_rows == n + 1


def test_a_snapshot_by_datetime(client: Any, table: Any, now: Any) -> None:
    with client.transaction() as txn:
        txn.insert(table, (1, None))
    first = txn.commit()
    now.forward(10)
    with client.transaction() as txn:
        txn.insert(table, (2, None))
    second = txn.commit()
    for when, rows in (
        (first.datetime - timedelta(seconds=1), 0),
        (first.datetime, 1),
        (first.datetime + timedelta(seconds=5), 1),
        (second.datetime, 2),
    ):
        with client.snapshot(at=when) as snapshot:
            assert snapshot.scan(table).to_arrow().num_rows == rows
        assert table.count(snapshot=when) == rows


BAD_MOMENTS = [
    ("naive", datetime(2026, 1, 1), "time zone"),
    ("before 2020", datetime(2010, 1, 1, tzinfo=UTC), "before 2020"),
    ("in the future", datetime(2090, 1, 1, tzinfo=UTC), "in the future"),
    ("timestamp in the future", Timestamp.from_micros(70 * 365 * 86400 * 10**6), "in the future"),
    ("not a timestamp", -5, "63 bits"),
]


@pytest.mark.parametrize(
    ("when", "words"), [b[1:] for b in BAD_MOMENTS], ids=[b[0] for b in BAD_MOMENTS]
)
def test_snapshot_refuses(client: Any, table: Any, when: Any, words: str) -> None:
    """Future snapshot: InvalidArgument 'Snapshot time in the future'."""
    with pytest.raises(ValueError, match=words):
        client.snapshot(at=when)
    with pytest.raises(ValueError, match=words):
        table.scan(snapshot=when).to_arrow()
    with pytest.raises(ValueError, match=words):
        table.get(1, snapshot=when)


def test_commit_timestamps_rise_over_processes(client: Any, table: Any, process: Any) -> None:
    code = """
        stamps = []
        for n in range(30):
            with client.transaction() as txn:
                txn.insert("t", (first + n, None))
            stamps.append(txn.commit())
        say(stamps)
    """
    others = [process(code, first=100), process(code, first=200)]
    lists = [other.finish() for other in others]
    found = [stamp for stamps in lists for stamp in stamps]
    assert all(stamps == sorted(stamps) for stamps in lists)
    assert len(set(found)) == 60
    with internals.status(client).read() as cur:
        assert latest_snapshot(cur) == max(found)
    assert table.count() == 60
    assert Timestamp(max(found)).datetime > EPOCH


def test_an_empty_commit_leaves_the_latest_snapshot(client: Any, table: Any) -> None:
    """CommitTimestampPropagation: an empty transaction raises nothing."""
    with client.transaction() as txn:
        txn.insert(table, (1, None))
    before = client.snapshot().timestamp
    empty = client.new_transaction()
    empty.commit()
    assert client.snapshot().timestamp == before == txn.commit()


def test_commit_timestamp_propagation(client: Any, table: Any, until: Any) -> None:
    """Observed time is as before when a commit starts, higher when done, and stays."""
    txn = client.new_transaction()
    txn.insert(table, (1, None))
    txn.flush()
    before = client.snapshot().timestamp
    txn.start_commit()
    until(txn.is_commit_complete)
    after = client.snapshot().timestamp
    assert after > before
    for _ in range(10):
        assert txn.is_commit_complete()
        assert client.snapshot().timestamp == after


def _commit(client: Any, id: int) -> Timestamp:
    with client.transaction() as txn:
        txn.insert("t", (id, None))
    return Timestamp(txn.commit())


def _clock(client: Any, name: str = "clock") -> tuple[Any, ...]:
    with internals.status(client).read() as cur:
        return one(cur, f"SELECT last_timestamp, last_commit FROM {name}")


def test_a_commit_of_the_log_is_all_that_moves_the_clock(client: Any, table: Any) -> None:
    before = _clock(client, "clock_row")
    stamp = _commit(client, 1)
    assert _clock(client, "clock_row") == before
    assert _clock(client) == (stamp, stamp)


def test_a_wall_clock_that_went_back_does_not_matter_to_a_store_without_a_log(
    connect: Any, by_hand: Any, now: Any
) -> None:
    """What told the last commit was flushed and trimmed, and nobody has it in memory."""
    client = connect()
    client.create_table("t", txnkv.Schema({"id": "int64", "v": "string?"}, primary_key="id"))
    last = [_commit(client, id) for id in range(3)][-1]
    internals.flush(client)
    now.forward(61)
    by_hand(client)
    with internals.status(client).read() as cur:
        assert one(cur, "SELECT count(*) FROM commit_log") == (0,)
    client.close()
    now.ahead = -3600
    client = connect()
    assert client.snapshot().timestamp == last
    assert client.table("t").count() == 3
    assert _clock(client) == (last, last)
    assert _commit(client, 3) == last + 1
    assert client.check().ok


def test_a_store_goes_on_from_the_last_commit_of_a_process_that_was_killed(
    connect: Any, process: Any, now: Any
) -> None:
    """Killed at once, and the wall clock went back: nothing is left but the log."""
    client = connect()
    client.create_table("t", txnkv.Schema({"id": "int64", "v": "string?"}, primary_key="id"))
    client.close()
    other = process(
        """
        with client.transaction() as txn:
            txn.insert("t", (1, None))
        say(txn.commit())
        wait()
        """
    )
    last = other.hear()
    other.kill()
    now.ahead = -3600
    client = connect()
    assert client.snapshot().timestamp == last
    assert _commit(client, 2) == last + 1
