"""A mutable table against a dict of versions, under random use by several clients.

Every operation, by row and by batch, in small and in large transactions, several of them open at
once; flushes, compactions, deaths of other processes in the middle of something; all ways to
read, now and in the past. What is to come out is predicted by `versions`: after every step, what
each reader sees, which commit is refused, what has changed since when.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

import txnkv
from tests import internals
from tests.property.machine_tools import (
    KEYS,
    OPERATORS,
    OPS,
    SCHEMA,
    as_dict,
    as_rows,
    as_table,
    batches,
    compact_all,
    givens,
    holds,
    in_child,
)
from tests.property.versions import COLUMNS, Given, Result, Row, Txn, Versions, apply
from tools.crash import leftovers, settle
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage.faults import FAULT_POINTS
from txnkv.tables.operations import OPERATIONS
from txnkv.tables.tablets import row_set_format, row_set_writer
from txnkv.tables.write import write_buffer

BLOCK_ROWS = 4
SMALL_ROWS = 8
OVER = (txnkv.InvalidTxnStateError, txnkv.ClosedError)
"""Errors for a caller that goes on with a transaction that has ended."""


class MutableMachine(RuleBasedStateMachine):
    """Two clients on one store. Subclasses differ by partitioning and history."""

    partitioning: Any = None
    history = 900.0
    transactions: Bundle[Txn] = Bundle("transactions")
    snapshots: Bundle[Any] = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="txnkv-machine-"))
        self.versions = Versions()
        self.open: list[Txn] = []
        self.pinned: list[Any] = []

    @initialize()
    def make(self) -> None:
        self.clients = [self.connect()]
        self.clients[0].create_table("t", SCHEMA, partition_by=self.partitioning)
        self.clients.append(self.connect())
        self.versions.last = int(self.clients[0].snapshot().timestamp)

    def connect(self) -> txnkv.Client:
        return txnkv.connect(self.path / "store", history=self.history)

    def teardown(self) -> None:
        try:
            if hasattr(self, "clients"):
                for txn in self.open:
                    txn.handle.rollback()
                for client in self.clients:
                    self.same(client.table("t").scan(ordered=True).to_arrow(), self.now)
                settle(self.clients[0])
                # What flushes and compactions that died have left goes with the next ones.
                internals.flush(self.clients[0])
                compact_all(self.clients[0])
                assert leftovers(self.clients[0]) == []
                assert [p for p in self.clients[0].check().problems if "ascending" not in p] == []
                for client in self.clients:
                    client.close()
        finally:
            shutil.rmtree(self.path)

    @property
    def now(self) -> dict[int, Row]:
        return self.versions.at(self.versions.last)

    # -- transactions ------------------------------------------------------------------

    @rule(target=transactions, client=st.integers(0, 1), serializable=st.booleans())
    def begin(self, client: int, serializable: bool) -> Txn:
        isolation = "serializable" if serializable else "snapshot"
        handle = self.clients[client].new_transaction(timeout=None, isolation=isolation)
        assert handle.snapshot == self.versions.last
        txn = Txn(handle, int(handle.snapshot), serializable)
        self.open.append(txn)
        return txn

    @rule(txn=transactions, batch=batches())
    def write(self, txn: Txn, batch: tuple[str, list[str], list[Given]]) -> None:
        op, columns, rows = batch
        if txn.over:
            with pytest.raises(OVER):
                txn.handle.write("t", as_table(columns, rows), op)
            return
        self.flush_buffered(txn)
        expected = apply(txn, self.versions, op, rows)
        self.outcome(lambda: txn.handle.write("t", as_table(columns, rows), op), expected)

    @rule(txn=transactions, op=st.sampled_from(OPS), row=givens())
    def write_row(self, txn: Txn, op: str, row: Given) -> None:
        given = row["id"] if op.startswith("delete") else row
        if txn.over:
            with pytest.raises(OVER):
                write_and_flush(txn.handle, op, given)
            return
        getattr(txn.handle, op)("t", given)
        txn.buffered.append((op, row))

    @rule(txn=transactions)
    def flush_session(self, txn: Txn) -> None:
        if not txn.over:
            self.flush_buffered(txn)

    @rule(txn=transactions, client=st.integers(0, 1), batch=batches(6))
    def join(self, txn: Txn, client: int, batch: tuple[str, list[str], list[Given]]) -> None:
        """By token, after which it is large, whatever it holds."""
        if txn.over or txn.serializable:
            return
        self.flush_buffered(txn)
        token = txn.handle.serialize()
        joined = txnkv.Transaction.deserialize(self.clients[client], str(token))
        op, columns, rows = batch
        expected = apply(txn, self.versions, op, rows)
        self.outcome(lambda: joined.write("t", as_table(columns, rows), op), expected)
        joined.close()

    @rule(txn=consumes(transactions), asynchronous=st.booleans())
    def commit(self, txn: Txn, asynchronous: bool) -> None:
        if txn.over:
            return
        self.flush_buffered(txn)
        conflict = txn.conflicts(self.versions)
        try:
            at = int(txn.handle.commit_async().result() if asynchronous else txn.handle.commit())
        except txnkv.TransactionConflictError:
            assert conflict in (True, None)
            assert txn.handle.state is txnkv.TxnState.ABORTED
        else:
            assert conflict in (False, None)
            if txn.own:
                self.versions.commit(txn.own, at)
        self.end(txn)

    @rule(txn=consumes(transactions), how=st.sampled_from(["rollback", "abandon"]))
    def give_up(self, txn: Txn, how: str) -> None:
        if txn.over:
            return
        if how == "abandon":
            self.clients[0].abort_transaction(txn.handle.id)
        txn.handle.rollback()
        txn.handle.rollback()
        self.end(txn)

    def end(self, txn: Txn) -> None:
        txn.over = True
        self.open.remove(txn)

    # -- outside of transactions -------------------------------------------------------

    @rule(batch=batches(), client=st.integers(0, 1))
    def write_outside(self, batch: tuple[str, list[str], list[Given]], client: int) -> None:
        op, columns, rows = batch
        txn = Txn(None, self.versions.last)
        expected = apply(txn, self.versions, op, rows)
        session = self.clients[client].new_session()
        self.outcome(lambda: session.write("t", as_table(columns, rows), op), expected)
        self.committed_outside(txn)

    @rule(rows=st.lists(st.tuples(st.sampled_from(OPS), givens()), max_size=4))
    def write_rows_outside(self, rows: list[tuple[str, Given]]) -> None:
        txn = Txn(None, self.versions.last, buffered=list(rows))
        with self.clients[0].new_session() as session:
            for op, row in rows:
                getattr(session, op)("t", row["id"] if op.startswith("delete") else row)
            self.flush_buffered(txn, session)
        self.committed_outside(txn)

    def committed_outside(self, txn: Txn) -> None:
        at = int(self.clients[0].snapshot().timestamp)
        if txn.own:
            self.versions.commit(txn.own, at)
        assert at == self.versions.last

    # -- maintenance -------------------------------------------------------------------

    @rule(client=st.integers(0, 1))
    def flush_store(self, client: int) -> None:
        internals.flush(self.clients[client])

    @rule(client=st.integers(0, 1))
    def compact(self, client: int) -> None:
        compact_all(self.clients[client])

    @rule()
    def round(self) -> None:
        """One round of the leader's work."""
        internals.maintenance(self.clients[0]).round(resume_all=True)

    @precondition(lambda self: not self.open and not self.pinned)
    @rule()
    def reopen(self) -> None:
        for client in self.clients:
            client.close()
        self.clients = [self.connect(), self.connect()]

    @rule(
        what=st.sampled_from(["small", "large", "flush", "compact", "round"]),
        batch=batches(),
        point=st.sampled_from(
            sorted(name for name in FAULT_POINTS if not name.startswith(("directory", "abort")))
        ),
        hit=st.integers(1, 4),
    )
    def die(
        self, what: str, batch: tuple[str, list[str], list[Given]], point: str, hit: int
    ) -> None:
        """Another process does something and is killed at a fault point, if it comes to it."""
        op, columns, rows = batch
        rows = rows[:SMALL_ROWS] if what == "small" else rows
        txn = Txn(None, self.versions.last)
        expected = apply(txn, self.versions, op, rows)

        def work(say: Any) -> None:
            client = self.clients[0]
            if what in ("small", "large"):
                handle = client.new_transaction(timeout=None)
                say(int(handle.id.local))
                try:
                    if what == "large":
                        handle.serialize()
                    handle.write("t", as_table(columns, rows), op)
                except txnkv.RowErrors:
                    assert expected.refused
                handle.commit()
            elif what == "round":
                internals.maintenance(client).round(resume_all=True)
            elif what == "flush":
                internals.flush(client)
            else:
                compact_all(client)

        said = in_child(work, point, hit)
        if said:
            self.learn(txn, said[0])

    def learn(self, txn: Txn, local: int) -> None:
        """Find out whether a transaction of the dead process committed."""
        coordinator = internals.coordinator(self.clients[1])
        try:
            row = coordinator.get(local)
        except txnkv.TxnNotFoundError:
            return
        if row.state is txnkv.TxnState.COMMIT_IN_PROGRESS:
            row = coordinator.orchestrator.finish(local)
        elif row.state is txnkv.TxnState.OPEN:
            row = coordinator.abort(local, "its process is dead")
        if row.commit_ts is not None and txn.own:
            self.versions.commit(txn.own, int(row.commit_ts))

    # -- reading -----------------------------------------------------------------------

    @rule(txn=transactions, keys=st.lists(KEYS, max_size=4), scan=st.booleans())
    def read_in_transaction(self, txn: Txn, keys: list[int], scan: bool) -> None:
        if txn.over:
            with pytest.raises(OVER):
                txn.handle.get("t", 1)
            return
        self.flush_buffered(txn)
        expected = txn.seen(self.versions)
        for key in keys:
            assert txn.handle.get("t", key) == as_dict(key, expected)
        assert txn.handle.get_many("t", keys).to_pylist() == [
            as_dict(key, expected) or {"id": None, "text": None, "n": None} for key in keys
        ]
        txn.read.update(keys)
        if scan:
            txn.read_all = True
            self.same(txn.handle.scan("t", ordered=True).to_arrow(), expected)
            self.same(txn.handle.scan("t").to_arrow(), expected)

    @rule(target=snapshots, client=st.integers(0, 1))
    def take_snapshot(self, client: int) -> Any:
        taken = self.clients[client].snapshot()
        assert taken.timestamp == self.versions.last
        self.pinned.append(taken)
        return taken

    @rule(snapshot=consumes(snapshots))
    def close_snapshot(self, snapshot: Any) -> None:
        snapshot.close()
        self.pinned.remove(snapshot)

    @rule(snapshot=snapshots, keys=st.lists(KEYS, max_size=4))
    def read_snapshot(self, snapshot: Any, keys: list[int]) -> None:
        expected = self.versions.at(snapshot.timestamp)
        self.same(snapshot.scan("t", ordered=True).to_arrow(), expected)
        for key in keys:
            assert snapshot.get("t", key) == as_dict(key, expected)

    @rule(at=st.data(), client=st.integers(0, 1))
    def read_past(self, at: Any, client: int) -> None:
        """Read a version that is not pinned: it may be gone, and is never wrong."""
        stamp = at.draw(st.sampled_from(self.versions.stamps))
        table = self.clients[client].table("t")
        try:
            with self.clients[client].snapshot(txnkv.Timestamp(stamp)) as snapshot:
                self.same(snapshot.scan("t").to_arrow(), self.versions.at(stamp))
            assert table.count(snapshot=txnkv.Timestamp(stamp)) == len(self.versions.at(stamp))
        except txnkv.HistoryExpiredError:
            self.may_expire(stamp)

    @rule(data=st.data(), client=st.integers(0, 1))
    def diff(self, data: Any, client: int) -> None:
        stamps = st.sampled_from(self.versions.stamps)
        start, end = sorted((data.draw(stamps), data.draw(stamps)))
        table = self.clients[client].table("t")
        try:
            found = table.diff(txnkv.Timestamp(start), txnkv.Timestamp(end)).read_all().to_pylist()
        except txnkv.HistoryExpiredError:
            self.may_expire(start)
            return
        got = {
            row["id"]: (row["_op"], (row["text"], row["n"]), row["_commit_timestamp"])
            for row in found
        }
        assert len(got) == len(found)
        assert got == self.versions.diff(start, end)

    @rule(
        column=st.sampled_from(["id", "text", "n"]),
        op=st.sampled_from([*OPERATORS, "is null", "is not null"]),
        row=givens(set(COLUMNS)),
        ordered=st.booleans(),
        limit=st.one_of(st.none(), st.integers(0, 10)),
        client=st.integers(0, 1),
    )
    def scan(
        self, column: str, op: str, row: Given, ordered: bool, limit: int | None, client: int
    ) -> None:
        value = row[column] if row[column] is not None else ""
        condition = (column, op) if "null" in op else (column, op, value)
        of = {"id": lambda id, row: id, "text": lambda id, row: row[0], "n": lambda id, row: row[1]}
        expected = {
            id: found for id, found in self.now.items() if holds(op, of[column](id, found), value)
        }
        table = self.clients[client].table("t")
        got = table.scan(where=[condition], ordered=ordered, limit=limit).to_arrow()
        if limit is None:
            self.same(got, expected)
            assert table.count(where=[condition]) == len(expected)
        else:
            assert got.num_rows == min(limit, len(expected))
            assert as_rows(got).items() <= expected.items()
        if ordered and not isinstance(self.partitioning, type(txnkv.hash_partition("id", 2))):
            assert got["id"].to_pylist() == sorted(expected)[:limit]

    @rule(rows=st.integers(1, 20), client=st.integers(0, 1))
    def scan_by_tokens(self, rows: int, client: int) -> None:
        tokens = self.clients[client].table("t").scan().tokens(rows)
        internals.flush(self.clients[client])
        parts = [token.open(self.clients[1 - client]).to_arrow() for token in tokens]
        self.same(pa.concat_tables([SCHEMA.arrow.empty_table(), *parts]), self.now)

    @invariant()
    def all_is_there(self) -> None:
        if hasattr(self, "clients"):
            table = self.clients[0].table("t")
            assert table.count() == len(self.now)
            self.same(table.scan().to_arrow(), self.now)

    def may_expire(self, stamp: int) -> None:
        """Before the first commit is before all history."""
        assert self.history == 0 or stamp == 0
        assert stamp < self.versions.last
        assert all(stamp < pinned.timestamp for pinned in self.pinned)

    # -- comparing ---------------------------------------------------------------------

    def flush_buffered(self, txn: Txn, session: Any = None) -> None:
        waiting, txn.buffered = txn.buffered, []
        expected = Result()
        for op, row in waiting:
            one = apply(txn, self.versions, op, [row])
            expected.inserted += one.inserted
            expected.updated += one.updated
            expected.deleted += one.deleted
            expected.ignored += one.ignored
            expected.refused += one.refused
        if waiting or session is not None:
            self.outcome((session or txn.handle).flush, expected)

    @staticmethod
    def outcome(do: Any, expected: Result) -> None:
        if expected.refused:
            with pytest.raises(txnkv.RowErrors) as raised:
                do()
            assert sorted(e.key for e in raised.value.errors) == sorted(expected.refused)
        else:
            did = do()
            assert (did.inserted, did.updated, did.deleted, did.ignored) == expected.counts

    @staticmethod
    def same(table: pa.Table, expected: dict[int, Row]) -> None:
        assert as_rows(table) == expected


def write_and_flush(handle: Any, op: str, given: Any) -> None:
    """The first of both that asks status.db refuses a transaction ended elsewhere."""
    getattr(handle, op)("t", given)
    handle.flush()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    def few_rows(widths: object) -> int:
        return BLOCK_ROWS

    monkeypatch.setattr(row_set_format, "rows_per_block", few_rows)
    monkeypatch.setattr(row_set_writer, "rows_per_block", few_rows)
    monkeypatch.setattr(row_set_writer, "WRITE_BYTES", 512)
    monkeypatch.setattr(write_buffer, "MAX_ROWS", SMALL_ROWS)
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    assert set(OPS) == set(OPERATIONS), "teach the model what is new"


class HashedMachine(MutableMachine):
    """Three tablets, and nothing is kept that nobody pins."""

    partitioning = txnkv.hash_partition("id", 3)
    history = 0.0


class RangedMachine(MutableMachine):
    """Tablets by range."""

    partitioning = txnkv.range_partition("id", [0, 10, 25])


MACHINES = [MutableMachine, HashedMachine, RangedMachine]
FEW = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # made smaller in the long run alone
    max_examples=5,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
MANY = settings(FEW, max_examples=500, stateful_step_count=60, phases=tuple(Phase))


@pytest.mark.parametrize("machine", MACHINES)
def test_mutable_table_does_what_the_model_does(machine: type[MutableMachine]) -> None:
    run(machine, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_mutable_table_does_what_the_model_does_for_long(machine: type[MutableMachine]) -> None:
    run(machine, MANY)


def run(machine: type[MutableMachine], chosen: settings) -> None:
    case = machine.TestCase
    case.settings = chosen
    case("runTest").runTest()
