"""A table that is altered while it is written, against a model, from two processes.

Columns are added, renamed, dropped, widened and get other defaults between writes, small and large
ones, flushes, compactions and reopenings; by this process and by another one; while snapshots and
transactions from before go on. Each reader sees the columns of its time, with the values that they
had then.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from tests.property.alter_tools import INT, SMALL, TEXT, VALUES, Field, Model, Other
from txnkv.coordinator.maintenance import Maintenance
from txnkv.tables.tablets import row_set_format, row_set_writer

NAMES = ("a", "b", "c", "d", "e")
KEYS = st.integers(0, 12)
OPS = ("insert", "upsert", "update", "delete")


class Txn:
    """An open transaction and what it should see."""

    def __init__(self, handle: txnkv.Transaction, model: Model, large: bool) -> None:
        self.handle = handle
        self.began = model.copy()
        self.sees = model.copy()
        self.large = large
        self.wrote: set[int] = set()
        self.over = False


class AlterMachine(RuleBasedStateMachine):
    """Two clients here, one of another process."""

    history = 900.0
    other: Other
    transactions: Bundle[Txn] = Bundle("transactions")
    snapshots: Bundle[tuple[Any, Model]] = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="txnkv-alter-"))
        self.open: list[Txn] = []
        self.pinned: list[Any] = []
        self.past: list[tuple[int, Model]] = []

    @initialize()
    def make(self) -> None:
        self.model = Model([Field(1, "a", INT, 7), Field(2, "b", TEXT, None)], next_id=3)
        self.client = self.connect()
        columns = {"id": txnkv.Column("int64"), **{f.name: f.column for f in self.model.fields}}
        self.table = self.client.create_table(
            "t", txnkv.Schema(columns, ["id"]), partition_by=txnkv.hash_partition("id", 2)
        )
        self.second = self.connect()
        self.other("open", str(self.path / "store"), self.history)

    def connect(self) -> txnkv.Client:
        return txnkv.connect(self.path / "store", history=self.history)

    def teardown(self) -> None:
        try:
            if hasattr(self, "client"):
                for txn in self.open:
                    txn.handle.rollback()
                internals.flush(self.client)
                internals.compact(self.client)
                assert self.other("read") == self.model.all()
                assert self.client.check().ok
                self.other("close")
                self.client.close()
                self.second.close()
        finally:
            shutil.rmtree(self.path)

    # -- altering ----------------------------------------------------------------------

    @rule(data=st.data(), by=st.sampled_from(["here", "second", "other"]))
    def alter(self, data: Any, by: str) -> None:
        names = [each.name for each in self.model.fields]
        drop = data.draw(some(names, 1))
        left = [name for name in names if name not in drop]
        old = data.draw(some(left, 1))
        new = data.draw(some([name for name in NAMES if name not in left], 2))
        rename = dict(zip(old, new, strict=False))
        add = []
        for name in new[len(rename) :]:
            kind = data.draw(st.sampled_from([SMALL, INT, TEXT]))
            add.append((name, kind, data.draw(st.sampled_from([None, *VALUES[kind]]))))
        kinds = {each.name: each.type for each in self.model.fields}
        small = [name for name in left if kinds[name] == SMALL]
        widen = dict.fromkeys(data.draw(some(small, 1)), INT)
        was = {each.name: each.default for each in self.model.fields}
        default = {
            name: data.draw(
                st.sampled_from([v for v in (None, *VALUES[kinds[name]]) if v != was[name]])
            )
            for name in data.draw(some(left, 1))
        }
        change = (rename, drop, widen, default)
        if not (add or any(change)):
            return
        columns = {name: Field(0, name, kind, value).column for name, kind, value in add}
        if by == "other":
            self.other("alter", columns, *change)
        else:
            client = self.client if by == "here" else self.second
            client.table("t").alter(columns, *change)
        self.model.alter(add, *change)
        assert self.table.schema.names == self.model.names
        self.note()

    # -- writing -----------------------------------------------------------------------

    def given(self, data: Any, op: str, key: int, model: Model) -> Any:
        if op == "delete":
            return key
        chosen = data.draw(
            st.fixed_dictionaries(
                {},
                optional={
                    each.name: st.sampled_from([None, *VALUES[each.type]]) for each in model.fields
                },
            )
        )
        return {"id": key, **chosen}

    @rule(data=st.data(), op=st.sampled_from(OPS), key=KEYS, there=st.booleans())
    def write(self, data: Any, op: str, key: int, there: bool) -> None:
        given = self.given(data, op, key, self.model)
        done = self.model.apply(op, key, {} if op == "delete" else given)
        try:
            if there:
                self.other("write", op, given)
            else:
                with self.client.new_session() as session:
                    getattr(session, op)(self.table, given)
            assert done
        except txnkv.RowErrors:
            assert not done
        self.note()

    @rule(target=transactions, large=st.booleans())
    def begin(self, large: bool) -> Txn:
        handle = self.client.new_transaction(timeout=None)
        if large:
            handle.serialize()
        txn = Txn(handle, self.model, large)
        self.open.append(txn)
        return txn

    @rule(txn=transactions, data=st.data(), op=st.sampled_from(OPS), key=KEYS)
    def write_in_transaction(self, txn: Txn, data: Any, op: str, key: int) -> None:
        if txn.over:
            return
        given = self.given(data, op, key, txn.sees)
        try:
            getattr(txn.handle, op)(self.table, given)
            txn.handle.flush()
        except txnkv.SchemaChangedError:
            assert not txn.large
            assert txn.began.altered < self.model.altered
            txn.handle.rollback()
            self.end(txn)
            return
        except txnkv.RowErrors:
            assert not txn.sees.apply(op, key, {} if op == "delete" else given)
            return
        assert txn.sees.apply(op, key, {} if op == "delete" else given)
        txn.wrote.add(key)

    @rule(txn=transactions, key=KEYS)
    def read_in_transaction(self, txn: Txn, key: int) -> None:
        if not txn.over:
            assert txn.handle.get(self.table, key) == txn.sees.row(key)
            assert ordered(txn.handle.scan(self.table)) == txn.sees.all()
            assert txn.handle.scan(self.table).schema.names == txn.sees.names

    @rule(txn=consumes(transactions))
    def commit(self, txn: Txn) -> None:
        if txn.over:
            return
        stale = not txn.large and bool(txn.wrote) and txn.began.altered < self.model.altered
        conflict = any(self.model.changes[key] > txn.began.changes[key] for key in txn.wrote)
        try:
            txn.handle.commit()
        except txnkv.SchemaChangedError:
            assert stale
        except txnkv.TransactionConflictError:
            assert conflict
            assert not stale
        else:
            assert not conflict
            assert not stale
            for key in txn.wrote:
                self.model.changes[key] += 1
                if key in txn.sees.rows:
                    self.model.rows[key] = txn.sees.rows[key]
                else:
                    self.model.rows.pop(key, None)
        self.end(txn)
        self.note()

    def end(self, txn: Txn) -> None:
        txn.over = True
        self.open.remove(txn)

    # -- maintenance -------------------------------------------------------------------

    @rule(there=st.booleans())
    def flush(self, there: bool) -> None:
        if there:
            self.other("flush")
        else:
            internals.flush(self.client)

    @rule(there=st.booleans())
    def compact(self, there: bool) -> None:
        if there:
            self.other("compact")
        else:
            internals.compact(self.client)

    @precondition(lambda self: not self.open and not self.pinned)
    @rule()
    def reopen(self) -> None:
        self.other("close")
        self.client.close()
        self.second.close()
        self.client, self.second = self.connect(), self.connect()
        self.table = self.client.table("t")
        self.other("open", str(self.path / "store"), self.history)

    # -- reading -----------------------------------------------------------------------

    def note(self) -> None:
        self.past.append((int(internals.latest(self.client)), self.model.copy()))

    @rule(target=snapshots)
    def take_snapshot(self) -> tuple[Any, Model]:
        taken = self.client.snapshot()
        self.pinned.append(taken)
        return taken, self.model.copy()

    @rule(found=consumes(snapshots))
    def close_snapshot(self, found: tuple[Any, Model]) -> None:
        found[0].close()
        self.pinned.remove(found[0])

    @rule(found=snapshots, keys=st.lists(KEYS, max_size=4), data=st.data())
    def read_snapshot(self, found: tuple[Any, Model], keys: list[int], data: Any) -> None:
        snapshot, model = found
        self.look(snapshot, model, keys, data)
        tokens = snapshot.scan("t").tokens(2)
        parts = [row for part in self.other("tokens", *tokens) for row in part]
        assert sorted(parts, key=lambda row: row["id"]) == model.all()

    @rule(data=st.data(), keys=st.lists(KEYS, max_size=4))
    def read_past(self, data: Any, keys: list[int]) -> None:
        if self.past:
            at, model = data.draw(st.sampled_from(self.past))
            try:
                with self.client.snapshot(txnkv.Timestamp(at)) as snapshot:
                    self.look(snapshot, model, keys, data)
            except txnkv.HistoryExpiredError:
                assert self.history == 0

    def look(self, snapshot: Any, model: Model, keys: list[int], data: Any) -> None:
        scan = snapshot.scan("t")
        assert ordered(scan) == model.all()
        assert scan.schema.names == model.names
        nothing = dict.fromkeys(model.names)
        assert [snapshot.get("t", key) for key in keys] == [model.row(key) for key in keys]
        assert snapshot.get_many("t", keys).to_pylist() == [model.row(k) or nothing for k in keys]
        if model.fields:
            self.filtered(snapshot.scan, model, data, "t")

    @rule(data=st.data())
    def scan_where(self, data: Any) -> None:
        if self.model.fields:
            self.filtered(self.second.table("t").scan, self.model, data)

    def filtered(self, scan: Any, model: Model, data: Any, *table: str) -> None:
        of = data.draw(st.sampled_from(model.fields))
        value = data.draw(st.sampled_from(VALUES[of.type]))
        found = ordered(scan(*table, where=[(of.name, ">=", value)]))
        wanted = [r for r in model.all() if r[of.name] is not None and r[of.name] >= value]
        assert found == wanted
        found = ordered(scan(*table, where=[(of.name, "is null")]))
        assert found == [row for row in model.all() if row[of.name] is None]

    @rule(data=st.data())
    def diff(self, data: Any) -> None:
        """Deleted rows have the columns of the end, with what they had in them."""
        if len(self.past) < 2:
            return
        pair = data.draw(st.lists(st.sampled_from(range(len(self.past))), min_size=2, max_size=2))
        (start, before), (end, after) = (self.past[i] for i in sorted(pair))
        try:
            found = self.table.diff(txnkv.Timestamp(start), txnkv.Timestamp(end)).read_all()
        except txnkv.HistoryExpiredError:
            assert self.history == 0
            return
        assert found.schema.names[:-2] == after.names
        for row in found.to_pylist():
            op, _ = row.pop("_op"), row.pop("_commit_timestamp")
            if op == "delete":
                there = after.copy()
                there.rows = before.rows
                assert row == there.row(row["id"])
                assert row["id"] not in after.rows
            else:
                assert row == after.row(row["id"])
                assert (row["id"] in before.rows) is (op == "update")

    @invariant()
    def all_is_there(self) -> None:
        if hasattr(self, "client"):
            assert self.table.schema.names == self.model.names
            assert ordered(self.table.scan()) == self.model.all()
            assert self.table.get(5) == self.model.row(5)
            assert self.other("get", 3, 4) == [self.model.row(3), self.model.row(4)]


def some(names: list[str], most: int) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), unique=True, max_size=most) if names else st.just([])


def ordered(scan: txnkv.Scan) -> list[dict[str, Any]]:
    return sorted(scan.to_arrow().to_pylist(), key=lambda row: row["id"])


class ForgetfulMachine(AlterMachine):
    """Nothing is kept that nobody pins: former columns go with the next compaction."""

    history = 0.0


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    process = Other()
    yield process
    process.end()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    def few_rows(widths: object) -> int:
        return 3

    monkeypatch.setattr(row_set_format, "rows_per_block", few_rows)
    monkeypatch.setattr(row_set_writer, "rows_per_block", few_rows)
    monkeypatch.setattr(Maintenance, "start", lambda self: None)


MACHINES = [AlterMachine, ForgetfulMachine]
SETTINGS = settings(
    deadline=None,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)


def run(machine: type[AlterMachine], other: Other, examples: int) -> None:
    machine.other = other
    case = machine.TestCase
    case.settings = settings(SETTINGS, max_examples=examples)
    case("runTest").runTest()


@pytest.mark.parametrize("machine", MACHINES)
def test_a_few(machine: type[AlterMachine], other: Other) -> None:
    run(machine, other, 12)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_many(machine: type[AlterMachine], other: Other) -> None:
    run(machine, other, 200)
