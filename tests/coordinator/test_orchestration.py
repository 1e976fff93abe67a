"""Driving transactions to their end: what participants are asked, whatever dies between.

`die at` a fault point raises in the driving thread, as if its process had gone; somebody
else (the same orchestrator, the leader, a restarted store) goes on from the status table.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

import txnkv
from tests.threads import at_once
from txnkv.coordinator import jobs, status_table
from txnkv.coordinator.status_table import TxnState
from txnkv.storage.faults import InjectedFault, arm, disarm

COMMITTED, ABORTED = TxnState.COMMITTED, TxnState.ABORTED
COMMITTING, FINALIZING = TxnState.COMMIT_IN_PROGRESS, TxnState.FINALIZE_IN_PROGRESS
ABORTING = TxnState.ABORT_IN_PROGRESS
COMMIT_CALLS = ["check", "begin_commit", "validate", "write_commit", "finalize_commit"]


def test_successful_sequences(world: Any) -> None:
    """TestSuccessfulSequences: {begin, begin commit, finalize}, {begin, abort} and the third."""
    a, b, c = world.begin(1), world.begin(1), world.begin(1)
    world.coordinator.orchestrator.start_commit(a)
    row = world.coordinator.orchestrator.finish(a)
    assert (row.state, world.pages.of(a)) == (COMMITTED, COMMIT_CALLS)
    assert row.commit_ts == world.latest()
    row = world.coordinator.abort(b, "test")
    assert (row.state, row.commit_ts, world.pages.of(b)) == (ABORTED, None, ["abort"])
    world.coordinator.orchestrator.start_commit(c)
    row = world.coordinator.abort(c, "test")
    assert (row.state, row.commit_ts, world.pages.of(c)) == (ABORTED, None, ["check", "abort"])


# where it dies, the state then, what participants are asked afterwards, how it ends
DEATHS = [
    ("commit.started", COMMITTING, COMMIT_CALLS[1:], COMMITTED),
    ("commit.validated", COMMITTING, COMMIT_CALLS[1:], COMMITTED),
    ("commit.decided", FINALIZING, COMMIT_CALLS[4:], COMMITTED),
    ("commit.finalized", FINALIZING, COMMIT_CALLS[4:], COMMITTED),
    ("commit.ended", COMMITTED, [], COMMITTED),
    ("abort.started", ABORTING, ["abort"], ABORTED),
    ("abort.swept", ABORTING, ["abort"], ABORTED),
    ("abort.ended", ABORTED, [], ABORTED),
]


@pytest.mark.parametrize("who", ["caller", "leader", "restart"])
@pytest.mark.parametrize(("point", "state", "calls", "end"), DEATHS, ids=[d[0] for d in DEATHS])
def test_goes_on_where_it_died(
    world: Any, point: str, state: TxnState, calls: list[str], end: TxnState, who: str
) -> None:
    """TestRestartingWhileCommitting, TestAbortInProgress, TestCommitTasksReloadOn..."""
    txn_id = world.begin(1, 2)
    arm(point, "error")
    with pytest.raises(InjectedFault):
        _end(world, txn_id, abort=point.startswith("abort"))
    disarm()
    assert world.state(txn_id) is state
    stamp = world.coordinator.get(txn_id).commit_ts
    world.pages.calls.clear()
    if who == "restart":
        world.restart()
        world.coordinator.recover()
    elif who == "leader":
        world.round()
    else:
        world.coordinator.orchestrator.finish(txn_id)
    row = world.coordinator.get(txn_id)
    assert (row.state, world.pages.of(txn_id)) == (end, calls)
    if stamp is not None:
        assert row.commit_ts == stamp
    with world.store.status.read() as cur:
        states = cur.execute("SELECT DISTINCT state FROM participants").fetchall()
    assert states == [(int(end),)]


def test_commit_point_that_is_not_durable_never_was(world: Any) -> None:
    txn_id, latest = world.begin(1), world.latest()
    arm("commit.in_point", "error")
    with pytest.raises(txnkv.UnavailableError):
        _end(world, txn_id)
    disarm()
    assert (world.state(txn_id), world.latest()) == (COMMITTING, latest)
    assert world.coordinator.get(txn_id).commit_ts is None
    assert world.coordinator.orchestrator.finish(txn_id).state is COMMITTED
    assert world.pages.of(txn_id)[-1] == "finalize_commit"


REFUSALS = [
    txnkv.TransactionConflictError("page 1 was written by another"),
    txnkv.TransactionLockedError("page 1 is locked"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_participant_that_refuses_aborts_it(world: Any, error: Exception) -> None:
    """A refused BEGIN_COMMIT aborts; the reason and the error's kind stay in the row."""
    txn_id = world.begin(1, 2)
    world.pages.refuse[txn_id] = error
    row = _end(world, txn_id)
    assert (row.state, row.error, row.reason) == (ABORTED, type(error).__name__, str(error))
    assert world.pages.of(txn_id) == ["check", "begin_commit", "abort"]
    with pytest.raises(type(error), match="page 1"):
        world.coordinator.orchestrator.start_commit(txn_id)


def test_a_participant_that_is_down_is_asked_again(world: Any) -> None:
    """TestCommitWhenParticipantsAreDown: in progress until it is back, then committed."""
    txn_id = world.begin(1)
    world.pages.refuse[txn_id] = txnkv.UnavailableError("page 1 is out of reach")
    with pytest.raises(txnkv.UnavailableError):
        _end(world, txn_id)
    for _ in range(3):
        assert world.state(txn_id) is COMMITTING
        world.round()
    assert world.pages.of(txn_id).count("begin_commit") == 4
    world.pages.refuse.clear()
    world.round()
    assert world.state(txn_id) is COMMITTED


def test_validation_that_came_late_is_done_again(world: Any) -> None:
    txn_id = world.begin(1)
    world.pages.late = txn_id
    assert _end(world, txn_id).state is COMMITTED
    assert world.pages.of(txn_id).count("begin_commit") == 2
    assert world.pages.of(txn_id).count("validate") == 2


def test_a_commit_that_another_has_started_meanwhile_goes_on(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    txn_id = world.begin(1)
    check = world.pages.check

    def overtaken(*args: Any) -> int:
        monkeypatch.undo()
        world.put_into(txn_id, COMMITTING)
        return int(check(*args))

    monkeypatch.setattr(world.pages, "check", overtaken)
    assert world.coordinator.orchestrator.start_commit(txn_id).state is COMMITTING


def test_commit_timestamps_rise_in_commit_order(world: Any) -> None:
    """Above the begin timestamps, the participants' and every earlier commit's."""
    stamps = []
    for txn_id in [world.begin(1, 2) for _ in range(5)]:
        row = _end(world, txn_id)
        with world.store.status.read() as cur:
            begun = cur.execute(
                "SELECT max(begin_commit_ts) FROM participants WHERE txn_id = ?", (txn_id,)
            ).fetchone()[0]
        assert row.begin_ts <= begun < row.commit_ts
        stamps.append(row.commit_ts)
    assert stamps == sorted(set(stamps))
    assert stamps[-1] == world.latest()


def test_concurrent_repeated_commits(world: Any) -> None:
    """TestConcurrentRepeatedCommitCalls: all succeed, with one timestamp."""
    txn_id = world.begin(1)
    found: list[Any] = []
    at_once(*[lambda: found.append(_end(world, txn_id).commit_ts)] * 6)
    assert len(found) == 6
    assert len(set(found)) == 1


@pytest.mark.parametrize("seed", range(8))
def test_commit_and_abort_raced(world: Any, seed: int) -> None:
    """TestConcurrentOps, TestUpdateStateConcurrently: exactly one of them has its way."""
    txn_id = world.begin(1)
    outcomes: dict[str, Any] = {}

    def run(name: str, abort: bool) -> None:
        try:
            outcomes[name] = _end(world, txn_id, abort=abort).state
        except txnkv.InvalidTxnStateError as error:
            outcomes[name] = error

    jobs_ = [lambda: run("commit", False), lambda: run("abort", True)]
    at_once(*(jobs_ if seed % 2 else reversed(jobs_)))
    end = world.state(txn_id)
    assert end.ended
    calls = world.pages.of(txn_id)
    if end is COMMITTED:
        assert outcomes["commit"] is COMMITTED
        assert isinstance(outcomes["abort"], txnkv.InvalidTxnStateError)
        assert "abort" not in calls
    else:
        assert outcomes["abort"] is ABORTED
        assert outcomes["commit"] is ABORTED or isinstance(
            outcomes["commit"], txnkv.InvalidTxnStateError
        )
        assert "finalize_commit" not in calls


@pytest.mark.parametrize("abort", [False, True])
def test_an_end_for_which_memory_is_short_is_tried_again(
    world: Any, monkeypatch: pytest.MonkeyPatch, abort: bool
) -> None:
    """It is decided: who asked for it is told so."""
    txn_id = world.begin(1)
    what = "abort" if abort else "finalize_commit"

    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as short:
        short.setattr(world.pages, what, fail)
        assert _end(world, txn_id, abort=abort).state is (ABORTED if abort else COMMITTED)
    assert not world.state(txn_id).ended
    assert world.coordinator.orchestrator.finish(txn_id).state.ended
    assert world.pages.of(txn_id)[-1] == what


def test_a_job_that_runs_holds_the_commit(world: Any) -> None:
    txn_id = world.begin(1)
    world.start_job(txn_id, "load")
    with pytest.raises(txnkv.InvalidTxnStateError, match="job that still runs: load"):
        _end(world, txn_id)
    assert world.state(txn_id) is TxnState.OPEN
    with world.store.status.write() as cur:
        assert jobs.end(cur, txn_id, "load", jobs.COMMITTED)
        assert not jobs.end(cur, txn_id, "load", jobs.COMMITTED)
        with pytest.raises(txnkv.InvalidTxnStateError, match="committed, not running"):
            jobs.end(cur, txn_id, "load", jobs.ABORTED)
        with pytest.raises(txnkv.InvalidTxnStateError, match="unknown"):
            jobs.end(cur, txn_id, "another", jobs.ABORTED)
        with pytest.raises(txnkv.InvalidTxnStateError, match="too late"):
            jobs.require_running(cur, txn_id, "load")
    assert _end(world, txn_id).state is COMMITTED


def test_a_job_of_another_transaction_is_unknown(world: Any) -> None:
    mine, other = world.begin(1), world.begin(1)
    world.start_job(mine, "load")
    with world.store.status.write() as cur:
        assert jobs.state(cur, other, "load") is None
        with pytest.raises(txnkv.InvalidTxnStateError, match="unknown"):
            jobs.end(cur, other, "load", jobs.COMMITTED)
    world.coordinator.abort(mine, "rolled back with its job")
    assert _end(world, other).state is COMMITTED


@pytest.mark.parametrize(("history", "kept"), [(900.0, 900), (math.inf, 86400)])
def test_ended_rows_are_forgotten_after_the_history(
    world: Any, now: Any, history: float, kept: int
) -> None:
    """TxnNotFoundError once it ended longer ago than the history; open ones are kept."""
    world.close()
    world.open(history)
    ended, aborted, open_ = world.begin(1), world.begin(1), world.begin(1)
    _end(world, ended)
    _end(world, aborted, abort=True)
    now.forward(kept - 100)
    world.coordinator.keep_alive(open_)
    world.round()
    assert (world.state(ended), world.state(aborted)) == (COMMITTED, ABORTED)
    now.forward(101)
    world.coordinator.keep_alive(open_)
    world.round()
    for txn_id in (ended, aborted):
        with pytest.raises(txnkv.TxnNotFoundError, match="forgotten"):
            world.state(txn_id)
    assert world.state(open_) is TxnState.OPEN
    with world.store.status.read() as cur:
        assert cur.execute("SELECT DISTINCT txn_id FROM participants").fetchall() == [(open_,)]


def test_a_row_that_a_snapshot_may_need_is_kept(world: Any, now: Any) -> None:
    txn_id = world.begin(1)
    before = world.latest()
    _end(world, txn_id)
    pin = world.store.runtime.hold_snapshot(before)
    now.forward(5000)
    world.round()
    assert world.state(txn_id) is COMMITTED
    pin.end()
    world.round()
    with world.store.status.read() as cur:
        assert status_table.find(cur, txn_id) is None


def _end(world: Any, txn_id: int, *, abort: bool = False) -> Any:
    if abort:
        return world.coordinator.abort(txn_id, "test")
    world.coordinator.orchestrator.start_commit(txn_id)
    return world.coordinator.orchestrator.finish(txn_id)
