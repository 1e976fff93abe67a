"""Aborts for silence or age, and transactions left alone (Kudu's txn_status_manager-itest)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.coordinator import liveness
from txnkv.coordinator.maintenance import Maintenance
from txnkv.coordinator.status_table import TxnState
from txnkv.storage import BusyError
from txnkv.storage.clocks import clock
from txnkv.storage.runtime import Runtime

OPEN, ABORTED = TxnState.OPEN, TxnState.ABORTED
OTHERS = [state for state in TxnState if state is not OPEN]

# options of begin, seconds of silence, seconds with a beat every second, the state then
EXPIRY = [
    ("fresh", {}, 0, 0, OPEN),
    ("silent for less than the keepalive", {}, 20, 0, OPEN),
    ("silent for the keepalive", {}, 31, 0, ABORTED),
    ("kept alive", {}, 0, 120, OPEN),
    ("kept alive, then silent", {}, 31, 60, ABORTED),
    ("own keepalive", {"keepalive": 5.0}, 6, 0, ABORTED),
    ("own longer keepalive", {"keepalive": 90.0}, 60, 0, OPEN),
    ("past its timeout though alive", {"timeout": 10.0}, 0, 11, ABORTED),
    ("before its timeout", {"timeout": 90.0}, 0, 50, OPEN),
]


@pytest.mark.parametrize(
    ("options", "silent", "beating", "state"),
    [case[1:] for case in EXPIRY],
    ids=[case[0] for case in EXPIRY],
)
def test_expiry(
    world: Any, now: Any, options: dict[str, float], silent: int, beating: int, state: TxnState
) -> None:
    """StaleTransactionsCleanup: OPEN without heartbeat is aborted."""
    txn_id = world.begin(1, **options)
    for _ in range(beating):
        now.forward(1)
        world.coordinator.keep_alive(txn_id)
    now.forward(silent)
    world.round()
    assert world.state(txn_id) is state
    row = world.coordinator.get(txn_id)
    if state is ABORTED:
        assert "timeout" in row.reason or "heartbeat" in row.reason
        assert row.error == "TransactionTimedOutError"
        assert world.pages.of(txn_id) == ["abort"]
        with pytest.raises(txnkv.TransactionTimedOutError):
            world.coordinator.orchestrator.start_commit(txn_id)


@pytest.mark.parametrize("state", OTHERS, ids=lambda state: state.name)
def test_only_open_transactions_expire(world: Any, now: Any, state: TxnState) -> None:
    """StaleTransactionsCleanup: COMMIT_IN_PROGRESS stays, however old."""
    txn_id = world.begin(1, timeout=5.0)
    world.put_into(txn_id, state)
    now.forward(10_000)
    assert _abort_expired(world) == []
    assert world.state(txn_id) is state


def test_one_that_begins_to_commit_meanwhile_is_left_alone(
    world: Any, now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checker read OPEN; before its move the owner began to commit."""
    txn_id = world.begin(1)
    now.forward(31)
    expired = liveness.expired

    def meanwhile(row: Any, store: Any) -> str | None:
        if world.state(txn_id) is OPEN:
            world.put_into(txn_id, TxnState.COMMIT_IN_PROGRESS)
        return expired(row, store)

    monkeypatch.setattr(liveness, "expired", meanwhile)
    assert _abort_expired(world) == []
    assert world.state(txn_id) is TxnState.COMMIT_IN_PROGRESS


def test_one_that_beats_meanwhile_is_left_alone(
    world: Any, now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    txn_id = world.begin(1)
    now.forward(31)
    expired = liveness.expired

    def beats(*args: Any) -> str | None:
        found = expired(*args)
        if found is not None:
            world.coordinator.keep_alive(txn_id)
        return found

    monkeypatch.setattr(liveness, "expired", beats)
    assert _abort_expired(world) == []
    assert world.state(txn_id) is OPEN


def test_commit_past_the_timeout(world: Any, now: Any) -> None:
    txn_id = world.begin(1, timeout=5.0)
    now.forward(6)
    with pytest.raises(txnkv.TransactionTimedOutError, match="timed out"):
        world.coordinator.orchestrator.start_commit(txn_id)
    assert world.state(txn_id) is ABORTED


def test_an_unstored_transaction_past_its_timeout_is_not_stored(world: Any, now: Any) -> None:
    row = world.row(timeout=5.0)
    now.forward(6)
    with pytest.raises(txnkv.TransactionTimedOutError, match="5 s before it wrote anything"):
        world.coordinator.write_open(row)
    with pytest.raises(txnkv.TxnNotFoundError):
        world.coordinator.get(row.txn_id)


def lives_on_for(seconds: float, world: Any, now: Any, txn_id: int) -> None:
    """It is open almost as long, and then aborted."""
    assert world.state(txn_id) is OPEN
    now.forward(seconds - 10)
    world.round()
    assert world.state(txn_id) is OPEN
    now.forward(11)
    world.round()
    assert world.state(txn_id) is ABORTED


def test_heartbeats_after_a_restart(world: Any, now: Any) -> None:
    """Heartbeats live in memory: at open each OPEN transaction gets a fresh one."""
    txn_id = world.begin(1)
    now.forward(25)
    world.close()
    now.forward(1000)
    (world.path / "runtime").rename(world.path.parent / "gone")
    world.open()
    world.coordinator.recover()
    lives_on_for(30, world, now, txn_id)


def test_after_a_boot_only_the_timeout_counts(world: Any, now: Any) -> None:
    """The monotonic clock of another boot says nothing; the wall clock does."""
    row = world.coordinator.get(world.begin(1, timeout=60.0))
    elsewhere = replace(row, boot="another boot", deadline=1, heartbeat_slot=row.heartbeat_slot)
    assert liveness.expired(elsewhere, world.store) is None
    assert liveness.expired(replace(elsewhere, timeout=None), world.store) is None
    now.forward(61)
    assert "timeout" in str(liveness.expired(elsewhere, world.store))


def test_slots_of_ended_transactions_are_used_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runtime, "HEARTBEATS", 6)
    ids = [world.begin(1) for _ in range(5)]
    slots = [world.coordinator.get(id).heartbeat_slot for id in ids]
    assert slots == list(range(5))
    for gone in (0, 3):
        world.coordinator.abort(ids[gone], "test")
    fresh = [world.coordinator.get(world.begin(1)).heartbeat_slot for _ in range(3)]
    assert fresh == [5, 0, 3]


def test_a_free_slot_is_found_without_looking_at_all(world: Any) -> None:
    """It was linear in the open transactions: a thousand of them cost a second."""
    ids = [world.begin(1) for _ in range(50)]
    with world.store.status.write() as cur:
        cur.execute("DELETE FROM transactions WHERE txn_id = ?", (ids[7],))
        steps = []
        cur.connection.set_progress_handler(lambda: bool(steps.append(1)), 1)
        try:
            assert liveness.free_slot(cur, world.store) == 50
        finally:
            cur.connection.set_progress_handler(None)
    assert len(steps) < 50


def test_silence_counts_only_while_somebody_listens(world: Any, now: Any) -> None:
    """A store that was closed for longer than the keepalive time aborted what was open in it."""
    txn_id = world.begin(1)
    world.round()
    now.forward(10)
    world.close()
    now.forward(1000)
    world.open()
    world.coordinator.recover()
    world.round()
    lives_on_for(30, world, now, txn_id)


def test_a_round_that_finds_nothing_new_writes_nothing(world: Any, now: Any) -> None:
    """It took the write lock each second, and other processes had to look again."""
    world.begin(1)
    maintenance = world.coordinator.maintenance
    maintenance.round()
    number = world.store.runtime.change_number()
    for _ in range(10):
        now.forward(2)
        world.coordinator.keep_alive(1)
        assert maintenance.round()
    assert world.store.runtime.change_number() == number


def test_a_live_serializable_commit_is_left_to_its_process(
    world: Any, now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 5 s another process drove it, did not know what it had read, and aborted it."""
    txn_id = world.begin(1, isolation="serializable")
    world.put_into(txn_id, TxnState.COMMIT_IN_PROGRESS)
    maintenance = world.coordinator.maintenance
    row = world.coordinator.get(txn_id)
    now.forward(10)
    assert maintenance._abandoned(row)  # by its own process, which knows
    other = Maintenance(world.store, world.coordinator.orchestrator, 900.0)
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "owner", (7, row.owner_start))
        assert not other._abandoned(row)
    with world.store.status.write() as cur:
        cur.execute("UPDATE transactions SET owner_start = owner_start - 1")
    assert maintenance._abandoned(world.coordinator.get(txn_id))  # that one is dead


@pytest.mark.parametrize("number", [0, 1])
def test_a_busy_participant_keeps_nothing_from_the_others(
    world: Any, now: Any, number: int
) -> None:
    """The round ended at the first that another process kept busy, with an UnboundLocalError."""
    txn_ids = [world.begin(1), world.begin(1)]
    for txn_id in txn_ids:
        world.put_into(txn_id, TxnState.COMMIT_IN_PROGRESS)
    busy, other = txn_ids[number], txn_ids[1 - number]
    world.pages.refuse[busy] = BusyError("another one is writing")
    now.forward(10)
    world.round()
    assert world.state(busy) is TxnState.COMMIT_IN_PROGRESS
    assert world.state(other) is TxnState.COMMITTED
    assert not world.coordinator.damage.parts()  # as long as that does not last
    world.pages.refuse.clear()
    world.round()
    assert world.state(busy) is TxnState.COMMITTED


def test_a_beat_for_another_transaction_in_the_slot_counts_for_nothing(
    world: Any, now: Any
) -> None:
    """The owner of an ended transaction goes on beating into a slot that has a new one."""
    old = world.coordinator.get(world.begin(1))
    world.coordinator.abort(old.txn_id, "test")
    new = world.coordinator.get(world.begin(1))
    assert new.heartbeat_slot == old.heartbeat_slot
    now.forward(31)
    world.store.runtime.heartbeat(old.heartbeat_slot, old.txn_id, clock.monotonic_micros())
    world.round()
    assert world.state(new.txn_id) is ABORTED


def test_more_open_transactions_than_heartbeats(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runtime, "HEARTBEATS", 3)
    ids = [world.begin(1) for _ in range(3)]
    with pytest.raises(txnkv.UnavailableError, match="3 transactions are open"):
        world.begin(1)
    world.coordinator.abort(ids[0], "test")
    world.begin(1)


def test_the_log_says_who_was_aborted(
    world: Any, now: Any, caplog: pytest.LogCaptureFixture
) -> None:
    txn_id = world.begin(1)
    now.forward(31)
    with caplog.at_level(logging.WARNING, "txnkv"):
        world.round()
    assert f"aborted transaction {txn_id}: it had no heartbeat for 30 s" in caplog.text


# -- with real time and real threads ---------------------------------------------------


@pytest.mark.usefixtures("large")
def test_a_live_handle_keeps_its_transaction(connect: Any, until: Callable[..., Any]) -> None:
    """testKeepaliveBasic: alive for longer than the keepalive time, then dropped."""
    client = connect(keepalive_time=3.0)
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    kept, dropped = client.new_transaction(), client.new_transaction()
    for n, txn in enumerate((kept, dropped)):
        txn.insert(table, {"id": n})
        txn.flush()
    id = dropped.id
    dropped.close()
    dropped.close()
    until(lambda: client.transaction_state(id) is ABORTED)
    assert kept.state is OPEN
    kept.commit()
    assert table.count() == 1


@pytest.mark.usefixtures("large")
def test_a_killed_process_loses_its_transaction(
    connect: Any, process: Any, until: Callable[..., Any]
) -> None:
    """TestBackgroundAborts: its driver dies; its staged space comes back."""
    client = connect(keepalive_time=0.6)
    client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    other = process(
        """
        txn = client.new_transaction(timeout=None)
        txn.insert("t", {"id": 1})
        txn.flush()
        say(txn.id)
        wait()
        """,
        options={"keepalive_time": 0.6},
    )
    id = other.hear()
    assert client.transaction_state(id) is OPEN
    assert client.stats()["staged_row_sets"] == 1
    other.kill()
    internals.maintenance(client).start()
    until(lambda: client.transaction_state(id) is ABORTED)
    assert client.stats()["staged_row_sets"] == 0


def _abort_expired(world: Any) -> list[int]:
    lease = world.coordinator.maintenance.lease
    assert lease.acquire()
    return liveness.abort_expired(world.store, world.coordinator.orchestrator, lease)


def test_an_error_that_stays_is_told_once(
    client: txnkv.Client,
    now: Any,
    until: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line of the log for each round, two a second, while a writer was stopped."""
    maintenance, rounds = internals.maintenance(client), []
    maintenance.set_pace(0.02)
    said = ["one"]

    def look() -> None:
        rounds.append(1)
        raise txnkv.UnavailableError(said[0])

    monkeypatch.setattr(maintenance, "look", look)

    def tell(times: int) -> None:
        until(lambda: len(rounds) >= times)
        rounds.clear()

    tell(5)
    said[0] = "two"
    tell(5)
    now.forward(61)
    tell(5)
    told = [each.getMessage()[-3:] for each in caplog.records if "background" in each.getMessage()]
    assert told == ["one", "two", "two"]
