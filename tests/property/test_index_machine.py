"""Indexes of a table that is written in every way, against a model.

Indexes are made and dropped between writes, single ones, batches of all operations, small and
large transactions that are open meanwhile; through flushes, compactions, reopenings and deaths.
While one is built, others write between the look for what rows lack and the commit of that. In
each state the table is that of the model, an index leads to what a look at all rows finds, and
`check` finds index and table in step.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    precondition,
    rule,
)

import txnkv
from tests import internals
from tests.property.machine_tools import in_child
from txnkv.client import indexes
from txnkv.tables.write import write_buffer

Row = dict[str, Any]
Rows = dict[int, Row]

OPS = ("insert", "insert_ignore", "upsert", "update", "update_ignore", "delete", "delete_ignore")
KEYS = st.integers(0, 11)
MAILS = st.sampled_from([None, *"abcdef"])
NUMBERS = st.integers(0, 3)
BY = st.sampled_from([("mail",), ("n",), ("n", "mail"), ("mail", "id")])
POINTS = ("index.added", "index.filled", "index.whole", "alter.written", "alter.durable")


@st.composite
def givens(draw: Any, op: str) -> Any:
    """What an operation on one row is given."""
    key = draw(KEYS)
    if op.startswith("delete"):
        return key
    row = {"id": key, "mail": draw(MAILS), "n": draw(NUMBERS)}
    if not op.startswith("insert") and draw(st.booleans()):
        del row[draw(st.sampled_from(["mail", "n"]))]
    return row


WRITES = st.sampled_from(OPS).flatmap(lambda op: st.tuples(st.just(op), givens(op)))


def applied(rows: Rows, op: str, given: Any) -> bool:
    """Change rows by an operation, as far as keys say; whether it did."""
    key = given["id"] if isinstance(given, dict) else given
    there = key in rows
    if there if op.startswith("insert") else not there and op != "upsert":
        return False
    if op.startswith("delete"):
        del rows[key]
    else:
        new = {"id": key, "mail": None, "n": 2} if not there else rows[key]
        rows[key] = {**new, **given}
    return True


def twice(rows: Rows, columns: tuple[str, ...]) -> set[Any]:
    """The values in some columns that several rows have, without nulls among them."""
    counts = Counter(tuple(row[name] for name in columns) for row in rows.values())
    return {values for values, count in counts.items() if count > 1 and None not in values}


class Txn:
    """An open transaction, and what it sees."""

    def __init__(self, handle: txnkv.Transaction, rows: Rows, commits: int, altered: int) -> None:
        self.handle = handle
        self.rows = {key: dict(row) for key, row in rows.items()}
        self.began = commits
        self.altered = altered
        self.wrote: set[int] = set()


class IndexMachine(RuleBasedStateMachine):
    """One process, two clients; others that are killed."""

    transactions: Bundle[Txn] = Bundle("transactions")
    snapshots: Bundle[tuple[txnkv.Snapshot, Rows]] = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="txnkv-index-"))
        self.open: list[Txn] = []
        self.pinned: list[txnkv.Snapshot] = []
        self.rows: Rows = {}
        self.commits = self.altered = 0
        self.changed: Counter[int] = Counter()

    @initialize(tablets=st.integers(1, 2))
    def make(self, tablets: int) -> None:
        self.client = txnkv.connect(self.path / "store")
        self.table = self.client.create_table(
            "t",
            txnkv.Schema(
                {"id": "int64", "mail": "string?", "n": txnkv.Column("int32", default=2)}, ["id"]
            ),
            partition_by=None if tablets == 1 else txnkv.hash_partition("id", tablets),
        )

    def teardown(self) -> None:
        try:
            if hasattr(self, "client"):
                for txn in self.open:
                    txn.handle.rollback()
                self.look()
                internals.flush(self.client)
                internals.compact(self.client)
                self.look()
                self.client.close()
        finally:
            shutil.rmtree(self.path)

    # -- what is there -----------------------------------------------------------------

    def state(self, *columns: str) -> str:
        """Whether an index is "ready", "building" or "none"."""
        found = [each for each in self.table.indexes if each.columns == columns]
        return found[0].state if found else "none"

    def broken(self, rows: Rows, *, ready: bool = False) -> bool:
        """A unique index, of those that are ready or of all, would have two rows of one value."""
        return any(
            twice(rows, each.columns)
            for each in self.table.indexes
            if each.unique and (each.state == "ready" or not ready)
        )

    def look(self) -> None:
        assert self.client.check().problems == []
        self.compare(self.table, self.rows)
        assert not self.broken(self.rows, ready=True)

    def compare(self, seen: Any, rows: Rows, *table: Any) -> None:
        """What is read by indexes, and what all rows say."""
        assert by_key(seen.scan(*table)) == rows
        for mail in "abcdef":
            wanted = {key: row for key, row in rows.items() if row["mail"] == mail}
            assert by_key(seen.scan(*table, where=[("mail", "=", mail)])) == wanted
            for n in range(2):
                where = [("n", "=", n), ("mail", ">=", mail)]
                some = {
                    key: row
                    for key, row in rows.items()
                    if row["n"] == n and row["mail"] is not None and row["mail"] >= mail
                }
                assert by_key(seen.scan(*table, where=where)) == some
            if table or self.state("mail") != "none":
                with suppress(*[txnkv.SchemaError] if table else []):  # none of then
                    assert by_key(seen.get_by(*table, "mail", mail)) == wanted
        for n in range(4):
            wanted = {key: row for key, row in rows.items() if row["n"] > n}
            assert by_key(seen.scan(*table, where=[("n", ">", n)], ordered=True)) == wanted

    # -- indexes -----------------------------------------------------------------------

    @rule(columns=BY, unique=st.booleans(), writes=st.lists(WRITES, max_size=3))
    def create(self, columns: Any, unique: bool, writes: list[tuple[str, Any]]) -> None:
        """Others write while it is built."""
        there = [each for each in self.table.indexes if each.columns == columns]
        if there and there[0].unique != unique:
            with pytest.raises(txnkv.SchemaError, match="drop_index"):
                self.client.create_index("t", columns, unique)
            return
        doubled = bool(twice(self.rows, columns))

        def meanwhile() -> None:
            nonlocal doubled
            if writes:
                self.write_one(*writes.pop())
                doubled |= bool(twice(self.rows, columns))

        with between(meanwhile):
            try:
                made = self.client.create_index("t", columns, unique)
            except txnkv.RowErrors:
                assert unique
                assert doubled
                assert self.state(*columns) == "none"
            else:
                assert made == txnkv.Index(columns, unique, "ready")
        self.altered += 1
        self.look()

    @rule(columns=BY)
    def drop(self, columns: Any) -> None:
        if self.state(*columns) == "none":
            with pytest.raises(txnkv.SchemaError):
                self.client.drop_index("t", columns)
        else:
            self.client.drop_index("t", columns)
            self.altered += 1

    @precondition(lambda self: not self.open and not self.pinned)
    @rule(columns=BY, unique=st.booleans(), point=st.sampled_from(POINTS), hit=st.integers(1, 3))
    def die_while_it_is_made(self, columns: Any, unique: bool, point: str, hit: int) -> None:
        """Or while it is dropped."""
        drop = self.state(*columns) == "ready"
        self.client.close()

        def make(say: Callable[[Any], None]) -> None:
            indexes._FIRST_ROWS = 2
            with txnkv.connect(self.path / "store") as client:
                try:
                    if drop:
                        client.drop_index("t", columns)
                    else:
                        client.create_index("t", columns, unique)
                except (txnkv.RowErrors, txnkv.SchemaError) as error:
                    say(str(error))

        in_child(make, point, hit)
        self.again()

    @precondition(lambda self: not self.open and not self.pinned)
    @rule()
    def reopen(self) -> None:
        self.client.close()
        self.again()

    def again(self) -> None:
        self.client = txnkv.connect(self.path / "store")
        self.table = self.client.table("t")
        self.altered += 1
        self.look()

    # -- writing -----------------------------------------------------------------------

    def write_one(self, op: str, given: Any) -> None:
        """A row by itself, in a transaction of its own."""
        after = {key: dict(row) for key, row in self.rows.items()}
        done = applied(after, op, given)
        try:
            with self.client.new_session() as session:
                getattr(session, op)(self.table, given)
                result = session.flush()
            assert not (done and result.ignored) or self.broken(after)
            done = done and not result.ignored
            assert not done or not self.broken(after, ready=True)
        except txnkv.RowErrors:
            assert not done or self.broken(after)
            done = False
        if done:
            self.take(after)

    def take(self, after: Rows) -> None:
        for key in after.keys() | self.rows.keys():
            if after.get(key) != self.rows.get(key):
                self.changed[key] += 1
        self.rows = after
        self.commits += 1

    @rule(write=WRITES)
    def write(self, write: tuple[str, Any]) -> None:
        self.write_one(*write)

    @rule(data=st.data(), op=st.sampled_from(OPS), large=st.booleans())
    def write_batch(self, data: Any, op: str, large: bool) -> None:
        """All rows of it together: values may go from one to another."""
        rows = data.draw(st.lists(givens(op), min_size=1, max_size=12, unique_by=key_of))
        names = ["id"] if op.startswith("delete") else ["id", "mail", "n"]
        if op.startswith("up"):
            names = [name for name in names if all(name in row for row in rows)]
            rows = [{name: row[name] for name in names} for row in rows]
        values = [row if isinstance(row, dict) else {"id": row} for row in rows]
        batch = pa.table({n: pa.array([v[n] for v in values], TYPES[n]) for n in names})
        with size(large):
            refused, ignored = self.write_all(batch, op)
        whole = {key: dict(row) for key, row in self.rows.items()}
        done = [row for row in rows if applied(whole, op, row)]
        if ignored:
            self.adopt()
            return
        by_index = refused & {key_of(row) for row in done}
        after = {key: dict(row) for key, row in self.rows.items()}
        for row in rows:
            if key_of(row) not in refused:
                assert applied(after, op, row)
        if by_index:
            assert self.broken(whole) or self.broken(after)
        assert not self.broken(after, ready=True)
        self.take(after)
        self.compare(self.table, self.rows)

    def write_all(self, batch: pa.Table, op: Any) -> tuple[set[int], int]:
        """The keys that were refused, and how many were ignored."""
        with self.client.new_session() as session:
            try:
                return set(), session.write(self.table, batch, op).ignored
            except txnkv.RowErrors as error:
                return {each.key for each in error.errors}, 0  # type: ignore[misc]

    def adopt(self) -> None:
        """Take the rows as they are: which were ignored, nobody says."""
        found = by_key(self.table.scan())
        assert not self.broken(found, ready=True)
        self.take(found)
        self.look()

    # -- transactions ------------------------------------------------------------------

    @rule(target=transactions, large=st.booleans())
    def begin(self, large: bool) -> Txn:
        handle = self.client.new_transaction(timeout=None)
        if large:
            handle.serialize()
        txn = Txn(handle, self.rows, self.commits, self.altered)
        self.open.append(txn)
        return txn

    @rule(txn=transactions, data=st.data(), op=st.sampled_from(OPS))
    def write_in_transaction(self, txn: Txn, data: Any, op: str) -> None:
        if txn not in self.open:
            return
        given = data.draw(givens(op))
        after = {key: dict(row) for key, row in txn.rows.items()}
        done = applied(after, op, given)
        try:
            getattr(txn.handle, op)(self.table, given)
            ignored = txn.handle.flush().ignored
            done = done and not ignored
        except txnkv.SchemaChangedError:
            assert txn.altered < self.altered
            txn.handle.rollback()
            self.open.remove(txn)
            return
        except txnkv.RowErrors:
            assert not done or self.broken(after) or txn.altered < self.altered
            done = False
        if done:
            txn.rows = after
            txn.wrote.add(key_of(given))

    @rule(txn=transactions)
    def read_in_transaction(self, txn: Txn) -> None:
        if txn in self.open:
            self.compare(txn.handle, txn.rows, self.table)

    @rule(txn=consumes(transactions))
    def commit(self, txn: Txn) -> None:
        if txn not in self.open:
            return
        self.open.remove(txn)
        try:
            txn.handle.commit()
        except txnkv.SchemaChangedError:
            assert txn.altered < self.altered
            return
        except txnkv.TransactionConflictError:
            assert txn.began < self.commits or txn.altered < self.altered
            return
        after = {key: dict(row) for key, row in self.rows.items()}
        for key in txn.wrote:
            after.pop(key, None)
            if key in txn.rows:
                after[key] = txn.rows[key]
        if txn.wrote:
            self.take(after)
        self.look()

    # -- time --------------------------------------------------------------------------

    @rule(target=snapshots)
    def pin(self) -> tuple[txnkv.Snapshot, Rows]:
        snapshot = self.client.snapshot()
        self.pinned.append(snapshot)
        return snapshot, {key: dict(row) for key, row in self.rows.items()}

    @rule(pinned=consumes(snapshots), restore=st.booleans())
    def read_snapshot(self, pinned: tuple[txnkv.Snapshot, Rows], restore: bool) -> None:
        snapshot, rows = pinned
        self.compare(snapshot, rows, self.table)
        if restore:
            try:
                self.table.restore(snapshot)
                self.take(rows)
            except txnkv.RowErrors:
                assert self.broken(rows)
        snapshot.close()
        self.pinned.remove(snapshot)
        self.look()

    @rule()
    def flush(self) -> None:
        internals.flush(self.client)

    @rule()
    def compact(self) -> None:
        internals.compact(self.client)
        self.look()


TYPES = {"id": pa.int64(), "mail": pa.string(), "n": pa.int32()}


def key_of(given: Any) -> int:
    return int(given["id"] if isinstance(given, dict) else given)


def by_key(found: Any) -> Rows:
    rows = list(found)
    assert len({row["id"] for row in rows}) == len(rows), "no row comes twice"
    return {row["id"]: row for row in rows}


@contextmanager
def size(large: bool) -> Iterator[None]:
    """What is written is staged, however little it is."""
    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr(write_buffer, "MAX_ROWS", -1)
        yield


@contextmanager
def between(write: Callable[[], None]) -> Iterator[None]:
    """A few rows are filled in at a time, and others write before that is committed."""
    step = indexes._Build._write_lacking

    def staged(*args: Any) -> Any:
        found = step(*args)
        write()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexes._Build, "_write_lacking", staged)
        patch.setattr(indexes, "_FIRST_ROWS", 3)
        patch.setattr(indexes, "_MOST_ROWS", 4)
        patch.setattr(indexes, "_LONGEST_PAUSE", 0.0)
        yield


QUICK = settings(
    max_examples=8,
    stateful_step_count=16,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class TestIndexes(IndexMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = QUICK


@pytest.mark.slow
class TestIndexesForLonger(IndexMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(QUICK, max_examples=100, stateful_step_count=30)
