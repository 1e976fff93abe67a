"""Jobs against plain lists, under random use: attempts that send to topics and write rows.

Transactions interleave, each with jobs, each job with attempts that send in bits, one by one or
in batches, to two topics of either buffer; attempts die in other processes, jobs are committed
with some of their attempts in any order, or aborted, their committer dies; late attempts go on.
The model: what of each attempt was answered, what a job made of it, what was committed.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import txnkv
from tests import internals
from tests.property.machine_tools import in_child
from txnkv.coordinator import jobs
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage.faults import FAULT_POINTS
from txnkv.topics.write import staged_sends
from txnkv.transaction.job import Job

Place = tuple[str, int]
PLACES: list[Place] = [("marker", 0), ("marker", 1), ("sidecar", 0), ("sidecar", 1)]
POINTS = ("staged.removed", "job.", "append.", "partition.put", "status.before", "lmdb.before")
COUNTS = st.integers(1, 4)
Lots = list[tuple[Place, int, bool]]
LOTS = st.lists(st.tuples(st.sampled_from(PLACES), COUNTS, st.booleans()), max_size=3)


@dataclass(eq=False)
class Attempt:
    name: str
    session: Any
    sent: list[tuple[Place, bytes]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Work:
    """A job that runs."""

    job: Any
    attempts: list[Attempt] = field(default_factory=list)


@dataclass(eq=False)
class Txn:
    """An open transaction, and what counts of it."""

    handle: Any
    token: str
    running: list[Work] = field(default_factory=list)
    sent: dict[Place, list[bytes]] = field(default_factory=dict)
    rows: set[int] = field(default_factory=set)


class JobMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="txnkv-jobs-"))
        self.client = txnkv.connect(self.folder / "store")
        for name in ("marker", "sidecar"):
            self.client.create_topic(name, partitions=2, buffer=name)
        self.table = self.client.create_table(
            "t", txnkv.Schema({"id": "int64"}, primary_key=["id"])
        )
        self.number = 0
        self.open: list[Txn] = []
        self.late: list[Attempt] = []
        self.log: dict[Place, list[tuple[Txn, bytes]]] = {place: [] for place in PLACES}
        self.committed: list[Txn] = []

    def teardown(self) -> None:
        try:
            for txn in self.open:
                txn.handle.rollback()
            self.open = []
            self.readers_find_what_counts()
            staged = internals.topics(self.client).staged
            assert staged.files() == []
            internals.maintenance(self.client).round(resume_all=True)
            assert not staged.folder.exists() or list(staged.folder.iterdir()) == []
            assert self.client.check().problems == []
            self.client.close()
        finally:
            shutil.rmtree(self.folder)

    def values(self, count: int) -> list[bytes]:
        self.number += count
        return [b"%d" % i for i in range(self.number - count, self.number)]

    def works(self) -> list[tuple[Txn, Work]]:
        return [(txn, work) for txn in self.open for work in txn.running]

    def attempts(self) -> list[Attempt]:
        return [each for _, work in self.works() for each in work.attempts if each.session]

    # -- transactions ------------------------------------------------------------------

    @precondition(lambda self: len(self.open) < 3)
    @rule(jobs=st.lists(st.lists(LOTS, max_size=3), min_size=1, max_size=2))
    def begin(self, jobs: list[list[Lots]]) -> None:
        handle = self.client.new_transaction(timeout=None)
        txn = Txn(handle, str(handle.serialize()))
        self.open.append(txn)
        for attempts in jobs:
            txn.running.append(Work(Job.start(handle)))
            for lots in attempts:
                self.attempt(txn.running[-1], lots)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=COUNTS, place=st.sampled_from(PLACES))
    def send_in_the_transaction(self, data: Any, count: int, place: Place) -> None:
        txn = data.draw(st.sampled_from(self.open))
        values = self.values(count)
        _send_batch(txn.handle, place, values)
        self.counts(txn, [(place, value) for value in values])

    @rule(count=COUNTS, place=st.sampled_from(PLACES))
    def send_alone(self, count: int, place: Place) -> None:
        values = self.values(count)
        with self.client.transaction() as handle:
            _send_batch(handle, place, values)
        txn = Txn(handle, "")
        self.counts(txn, [(place, value) for value in values])
        self.committed.append(txn)
        if place[0] == "sidecar":
            self.log[place] += [(txn, value) for value in values]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), roll_back=st.sampled_from([False, False, False, True]))
    def end(self, data: Any, roll_back: bool) -> None:
        txn = data.draw(st.sampled_from(self.open))
        if roll_back:
            self.rolled_back(txn)
            return
        if txn.running:
            # By a handle of its own: one that was told to commit takes no new sessions.
            handle = txnkv.Transaction.deserialize(self.client, txn.token)
            with pytest.raises(txnkv.InvalidTxnStateError, match="still runs"):
                handle.commit()
            return
        txn.handle.commit()
        self.open.remove(txn)
        self.committed.append(txn)
        for place, values in txn.sent.items():
            if place[0] == "sidecar":
                self.log[place] += [(txn, value) for value in values]

    def rolled_back(self, txn: Txn) -> None:
        txn.handle.rollback()
        self.open.remove(txn)
        for work in txn.running:
            self.late += work.attempts

    def counts(self, txn: Txn, sent: list[tuple[Place, bytes]]) -> None:
        for place, value in sent:
            txn.sent.setdefault(place, []).append(value)
            if place[0] == "marker":
                self.log[place].append((txn, value))

    # -- attempts ----------------------------------------------------------------------

    @precondition(lambda self: self.works())
    @rule(data=st.data(), lots=LOTS)
    def an_attempt(self, data: Any, lots: Lots) -> None:
        _, work = data.draw(st.sampled_from(self.works()))
        self.attempt(work, lots)

    def attempt(self, work: Work, lots: Lots) -> None:
        name = f"attempt {self.values(1)[0].decode()}"
        work.attempts.append(Attempt(name, work.job.session(name)))
        self.send(work.attempts[-1], lots)

    @precondition(lambda self: self.attempts())
    @rule(data=st.data(), lots=LOTS)
    def an_attempt_goes_on(self, data: Any, lots: Lots) -> None:
        self.send(data.draw(st.sampled_from(self.attempts())), lots)

    def send(self, attempt: Attempt, lots: Lots) -> None:
        for place, count, batch in lots:
            values = self.values(count)
            if batch:
                _send_batch(attempt.session, place, values)
            else:
                for value in values:
                    attempt.session.send(place[0], value, partition=place[1])
                attempt.session.flush()
            attempt.sent += [(place, value) for value in values]

    @precondition(lambda self: self.attempts())
    @rule(data=st.data(), count=COUNTS)
    def write_rows_in_an_attempt(self, data: Any, count: int) -> None:
        attempt = data.draw(st.sampled_from(self.attempts()))
        ids = [int(value) for value in self.values(count)]
        attempt.session.write(self.table, pa.table({"id": pa.array(ids, pa.int64())}))
        attempt.rows += ids

    @precondition(lambda self: self.works())
    @rule(data=st.data(), point=st.sampled_from(["staged.", "status."]), hit=st.integers(1, 4))
    def an_attempt_dies(self, data: Any, point: str, hit: int) -> None:
        """In another process. If it was not told that it is done, nobody names it."""
        txn, work = data.draw(st.sampled_from(self.works()))
        chosen = data.draw(st.sampled_from(sorted(p for p in FAULT_POINTS if p.startswith(point))))
        attempt = Attempt(f"dies {self.values(1)[0].decode()}", None)
        attempt.sent = [(place, value) for place in PLACES for value in self.values(2)]
        path, token, id = self.folder / "store", txn.token, work.job.id

        def dies(say: Any) -> None:
            client = txnkv.connect(path)
            handle = txnkv.Transaction.deserialize(client, token)
            with Job.join(handle, id).session(attempt.name) as session:
                for place, value in attempt.sent:
                    session.send(place[0], value, partition=place[1])
                    session.flush()
            say(True)

        if in_child(dies, chosen, hit):
            work.attempts.append(attempt)

    @precondition(lambda self: any(each.session for each in self.late))
    @rule(data=st.data(), place=st.sampled_from(PLACES))
    def a_late_attempt_goes_on(self, data: Any, place: Place) -> None:
        attempt = data.draw(st.sampled_from([each for each in self.late if each.session]))
        with pytest.raises((txnkv.InvalidTxnStateError, txnkv.TxnNotFoundError)):
            _send_batch(attempt.session, place, [b"late"])

    # -- jobs --------------------------------------------------------------------------

    @precondition(lambda self: self.works())
    @rule(data=st.data(), cut=st.integers(0, 2))
    def commit_a_job(self, data: Any, cut: int) -> None:
        txn, work = data.draw(st.sampled_from(self.works()))
        chosen, first = self.choose(data, work, cut)
        work.job.commit([a.name for a in chosen], first=[a.name for a in first])
        self.job_committed(txn, work, first + chosen)

    @precondition(lambda self: self.works())
    @rule(data=st.data())
    def abort_a_job(self, data: Any) -> None:
        txn, work = data.draw(st.sampled_from(self.works()))
        work.job.abort()
        txn.running.remove(work)
        self.late += work.attempts

    @precondition(lambda self: any(each.sent for _, work in self.works() for each in work.attempts))
    @rule(
        data=st.data(),
        point=st.sampled_from(sorted(p for p in FAULT_POINTS if p.startswith(POINTS))),
        hit=st.sampled_from([1, 1, 1, 2, 5]),
    )
    def the_committer_dies(self, data: Any, point: str, hit: int) -> None:
        works = [each for each in self.works() if any(a.sent for a in each[1].attempts)]
        txn, work = data.draw(st.sampled_from(works))
        chosen, first = self.choose(data, work, 0)
        path, token, id = self.folder / "store", txn.token, work.job.id

        def dies(say: Any) -> None:
            handle = txnkv.Transaction.deserialize(txnkv.connect(path), token)
            Job.join(handle, id).commit([a.name for a in chosen])
            say(True)

        told = bool(in_child(dies, point, hit))
        with internals.status(self.client).read() as cur:
            state = jobs.state(cur, txn.handle.id.local, id)
        if state == jobs.COMMITTED:
            self.job_committed(txn, work, first + chosen)
            return
        assert not told
        if state == jobs.ENDING:  # nobody can go on
            for ends in (txn.handle.commit, lambda: work.job.commit([]), work.job.abort):
                with pytest.raises(txnkv.InvalidTxnStateError):
                    ends()
            self.rolled_back(txn)
        else:
            assert state == jobs.RUNNING

    def choose(self, data: Any, work: Work, cut: int) -> tuple[list[Attempt], list[Attempt]]:
        left_out = data.draw(st.sampled_from([0, 0, 1, 2]))
        chosen = data.draw(st.permutations(work.attempts))[left_out:]
        return chosen[cut:], chosen[:cut]

    def job_committed(self, txn: Txn, work: Work, chosen: list[Attempt]) -> None:
        for attempt in chosen:
            self.counts(txn, attempt.sent)
            txn.rows.update(attempt.rows)
        txn.running.remove(work)
        self.late += work.attempts

    # -- the rest ----------------------------------------------------------------------

    @rule(check=st.booleans())
    def look_after(self, check: bool) -> None:
        internals.maintenance(self.client).round(resume_all=True)
        if check:
            assert self.client.check().problems == []

    @invariant()
    def readers_find_what_counts(self) -> None:
        assert {row["id"] for row in self.table.scan()} == {
            id for txn in self.committed for id in txn.rows
        }
        for name in ("marker", "sidecar"):
            found: dict[int, list[bytes | None]] = {0: [], 1: []}
            with self.client.topic(name).consumer() as consumer:
                while messages := consumer.poll(timeout=0):
                    for message in messages:
                        found[message.partition].append(message.value)
            assert found == {number: self.expected((name, number)) for number in found}

    def expected(self, place: Place) -> list[bytes]:
        items = self.log[place]
        stable = next((i for i, (txn, _) in enumerate(items) if txn in self.open), len(items))
        return [value for txn, value in items[:stable] if txn in self.committed]


def _send_batch(to: Any, place: Place, values: list[bytes]) -> None:
    name, number = place
    to.send_batch(name, pa.table({"value": values, "partition": [number] * len(values)}))


FEW = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # made smaller in the long run alone
    max_examples=7,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
MANY = settings(FEW, max_examples=300, stateful_step_count=60, phases=tuple(Phase))


@pytest.fixture(autouse=True)
def _in_small_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    monkeypatch.setattr(staged_sends, "FRAME_BYTES", 100)
    monkeypatch.setattr(staged_sends, "APPEND_BYTES", 400)


def test_jobs_do_what_the_model_does() -> None:
    run(FEW)


@pytest.mark.slow
def test_jobs_do_what_the_model_does_for_long() -> None:
    run(MANY)


def run(chosen: settings) -> None:
    case = JobMachine.TestCase
    case.settings = chosen
    case("runTest").runTest()
