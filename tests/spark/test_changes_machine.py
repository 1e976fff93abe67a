"""A stream of changes against a dict of versions, under random use of its table.

Small and large commits, of this and of other processes, flushes, compactions, batches planned and
not run, queries stopped at any moment and begun again. A target that gets the changes of each
batch, one by one and strictly, is the table as it was at the batch's end; a batch that runs again
gives the same rows, here and in another process. A query that runs is never overtaken by the
history, even where none is kept.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import txnkv
from tests import internals
from tests.property.machine_tools import SCHEMA, as_table, batches, compact_all, in_child
from tests.property.versions import Given, Row, Txn, Versions, apply
from txnkv.coordinator.maintenance import Maintenance
from txnkv.server import Server
from txnkv.spark.streams import stream_readers
from txnkv.tables.tablets import row_set_format, row_set_writer
from txnkv.tables.write import write_buffer

from .changes_tools import Query, close_clients

pytestmark = pytest.mark.spark

NEVER = ("flush.written", 10**9)
"""A fault point that is not come to so often."""


class ChangesMachine(RuleBasedStateMachine):
    """A table in two tablets, whose history is kept for long."""

    history = 900.0
    starting = "earliest"
    forks = True

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="txnkv-changes-"))
        self.client = txnkv.connect(self.path / "store", history=self.history)
        self.client.create_table("t", SCHEMA, txnkv.hash_partition("id", 2))
        self.client.create_table("other", SCHEMA)
        self.versions = Versions()
        self.place = self.reached()
        self.query = self.begin()

    def reached(self) -> dict[str, str]:
        """The options of the query that tell where the store is."""
        return {"path": str(self.path / "store")}

    def begin(self) -> Query:
        options = {"table": "t", "changes": "true", "startingOffsets": self.starting}
        query = Query(options | self.place)
        self.ran: list[list[dict[str, Any]]] = []
        self.target: dict[int, Row] = {}
        if self.starting == "latest":
            self.target = self.versions.at(self.versions.last)
            assert query.trigger() == []  # where it begins is written down at once
            self.ran.append([])
        return query

    def teardown(self) -> None:
        try:
            while self.one_batch(False):
                pass
            assert self.target == self.versions.at(self.versions.last)
            self.query.stop()
            assert self.client.check().problems == []
        finally:
            close_clients()
            self.leave()
            self.client.close()
            shutil.rmtree(self.path)

    def leave(self) -> None:
        """The end of what `reached` began."""

    # -- the table -----------------------------------------------------------------------

    @rule(batch=batches(), where=st.sampled_from(["small", "large", "child"]))
    def change(self, batch: tuple[str, list[str], list[Given]], where: str) -> None:
        op, columns, rows = batch
        op = op if op == "upsert" else op.removesuffix("_ignore") + "_ignore"
        txn = Txn(None, self.versions.last)
        apply(txn, self.versions, op, rows)

        def work(say: Any = None) -> None:
            with self.client.transaction(timeout=None) as handle:
                if where == "large":
                    handle.serialize()
                handle.write("t", as_table(columns, rows), op)

        if where == "child" and self.forks:
            in_child(work, *NEVER)
        else:
            work()
        if txn.own:
            self.versions.commit(txn.own, int(self.client.snapshot().timestamp))

    @rule()
    def change_another_table(self) -> None:
        with self.client.transaction() as txn:
            txn.upsert("other", {"id": 1})

    @rule()
    def flush(self) -> None:
        internals.flush(self.client)

    @rule()
    def compact(self) -> None:
        compact_all(self.client)

    @rule()
    def round(self) -> None:
        internals.maintenance(self.client).round(resume_all=True)

    # -- the query -----------------------------------------------------------------------

    @rule(in_other=st.booleans())
    def trigger(self, in_other: bool) -> None:
        self.one_batch(in_other)

    def one_batch(self, in_other: bool) -> bool:
        """Plan and read one batch; tell whether there was one."""
        fresh = self.query.reader is None
        try:
            tasks = self.query.plan()
        except txnkv.HistoryExpiredError:
            assert self.history == 0, "the history is kept for long"
            assert fresh, "what runs is not overtaken"
            assert self.query.checkpoint.offsets
            self.query.stop()
            self.query = self.begin()
            return True
        log = self.query.checkpoint
        if tasks is None:
            assert self.target == self.versions.at(self.versions.last)
            return False
        rows = self.read(tasks, in_other)
        log.done += 1
        self.ran.append(rows)
        end = log.end["timestamp"]
        since = log.end.get("since", end)  # without it, nothing
        for row in rows:
            self.follow(row, since, end)
        assert self.target == self.versions.at(end)
        if since:
            expected = self.versions.diff(since, end)
            found = {row["id"]: (row["_op"], as_row(row), row["_commit_timestamp"]) for row in rows}
            assert found == expected
        return True

    def follow(self, row: dict[str, Any], since: int, end: int) -> None:
        """Do to the target what the row says; nothing else can have been."""
        key, op = row["id"], row["_op"]
        assert since < row["_commit_timestamp"] <= end
        assert (key in self.target) == (op != "insert")
        if op == "delete":
            assert self.target.pop(key) == as_row(row)
        else:
            self.target[key] = as_row(row)

    @rule()
    def plan_and_die(self) -> None:
        """The end of a batch is written, and nothing else of it happens."""
        fresh = self.query.reader is None
        try:
            self.query.plan()
        except txnkv.HistoryExpiredError:
            assert self.history == 0 and fresh  # noqa: PT018
        self.query.stop()

    @rule()
    def restart(self) -> None:
        self.query.stop()

    @rule(in_other=st.booleans())
    def run_the_last_again(self, in_other: bool) -> None:
        """Read the last batch as after a crash before Spark noted it as done: the same rows."""
        log = self.query.checkpoint
        if not self.ran or log.done != len(log.offsets):
            return
        try:
            tasks = self.query.plan_again(log.done - 1)
        except txnkv.HistoryExpiredError:
            assert self.history == 0, "the history is kept for long"
            self.query.stop()  # as Spark does with a query that failed
            return
        assert by_key(self.read(tasks, in_other)) == by_key(self.ran[-1])

    def read(self, tasks: list[Any], in_other: bool) -> list[dict[str, Any]]:
        if not in_other or not self.forks:
            return self.query.read(tasks)
        found: list[dict[str, Any]]
        (found,) = in_child(lambda say: say(self.query.read(tasks)), *NEVER)
        return found


class FromNowMachine(ChangesMachine):
    """Changes alone, without the rows that are there."""

    starting = "latest"


class NoHistoryMachine(ChangesMachine):
    """Nothing is kept that nobody holds."""

    history = 0.0


class ServedMachine(ChangesMachine):
    """The query goes over a server, whose process is not to be forked."""

    forks = False

    def reached(self) -> dict[str, str]:
        self.server = Server(str(self.path / "store"), "grpc://127.0.0.1:0")
        return {"path": f"grpc://127.0.0.1:{self.server.port}", "direct": "false"}

    def leave(self) -> None:
        self.server.close()


def as_row(row: dict[str, Any]) -> Row:
    return row["text"], row["n"]


def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: int(row["id"]))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    def few_rows(widths: object) -> int:
        return 4

    monkeypatch.setattr(row_set_format, "rows_per_block", few_rows)
    monkeypatch.setattr(row_set_writer, "rows_per_block", few_rows)
    monkeypatch.setattr(write_buffer, "MAX_ROWS", 8)
    monkeypatch.setattr(stream_readers, "LEAST_ROWS", 3)
    monkeypatch.setattr(Maintenance, "start", lambda self: None)


QUICK = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # made smaller in the long run alone
    max_examples=10,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(QUICK, max_examples=300, stateful_step_count=40, phases=tuple(Phase))
MACHINES = [ChangesMachine, FromNowMachine, NoHistoryMachine]
SERVED = pytest.param(ServedMachine, marks=pytest.mark.slow)


@pytest.mark.parametrize("machine", [*MACHINES, SERVED])
def test_changes_make_the_table(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [*MACHINES, SERVED])
def test_changes_make_the_table_long(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=MANY)
