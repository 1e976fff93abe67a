"""A table against a model, under random use by several clients and transactions.

The model is a dict of rows with the commit timestamp of each, and for each open transaction
its snapshot and what it staged. After every run the store is checked, and nothing of a
transaction that is over is left.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from operator import eq, ge, gt, le, lt, ne
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
from tools.crash import leftovers, settle
from txnkv.tables import incoming, row_set_format, row_set_writer

BLOCK_ROWS = 4
KEYS = st.integers(-20, 60)
TEXTS = st.one_of(st.none(), st.text("abc\0é", max_size=5))
ROWS = st.lists(st.tuples(KEYS, TEXTS), min_size=1, max_size=30)
OPERATORS = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}

OVER = (txnkv.InvalidTxnStateError, txnkv.ClosedError)
"""The handle's transaction has ended, or its client was closed since."""

Row = tuple[int, str | None]


@dataclass
class Model:
    """What an open transaction is to see and to leave."""

    handle: txnkv.Transaction
    snapshot: int
    staged: dict[int, str | None] = field(default_factory=dict)
    buffered: list[Row] = field(default_factory=list)
    over: bool = False


@dataclass
class Committed:
    text: str | None
    at: int


class TableMachine(RuleBasedStateMachine):
    """Two clients on one store; `partitioning` differs by subclass."""

    partitioning: Any = None
    transactions: Bundle[Model] = Bundle("transactions")
    snapshots: Bundle[tuple[int, dict[int, str | None]]] = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="txnkv-machine-"))
        self.rows: dict[int, Committed] = {}
        self.last_commit = 0
        self.serial = 1000
        self.open: list[Model] = []

    @initialize()
    def make(self) -> None:
        self.clients = [txnkv.connect(self.path / "store")]
        schema = txnkv.Schema({"id": "int64", "text": "string?"}, primary_key=["id"])
        self.clients[0].create_table("t", schema, partition_by=self.partitioning)
        self.clients.append(txnkv.connect(self.path / "store"))

    def teardown(self) -> None:
        try:
            if hasattr(self, "clients"):
                for model in self.open:
                    model.handle.rollback()
                self.look_at_all()
                assert leftovers(self.clients[0]) == []
                assert self.clients[0].check().problems == []
                for client in self.clients:
                    client.close()
        finally:
            shutil.rmtree(self.path)

    # -- transactions ------------------------------------------------------------------

    @rule(target=transactions, client=st.integers(0, 1), keepalive=st.booleans())
    def begin(self, client: int, keepalive: bool) -> Model:
        handle = self.clients[client].new_transaction(timeout=None, keepalive=keepalive)
        assert handle.snapshot == self.last_commit
        model = Model(handle, int(handle.snapshot))
        self.open.append(model)
        return model

    @rule(target=transactions, model=transactions, client=st.integers(0, 1))
    def join_by_token(self, model: Model, client: int) -> Model:
        if not model.over:
            token = model.handle.serialize()
            joined = txnkv.Transaction.deserialize(self.clients[client], str(token))
            assert joined.id == model.handle.id
            self.serial += 1
            assert joined.write("t", as_table([(self.serial, None)])).inserted == 1
            model.staged[self.serial] = None
            joined.close()
        return model

    @rule(model=transactions, rows=ROWS, op=st.sampled_from(["insert", "insert_ignore"]))
    def write(self, model: Model, rows: list[Row], op: str) -> None:
        if model.over:
            with pytest.raises(OVER):
                model.handle.write("t", as_table(rows), op)
            return
        self.flush_buffered(model)
        fresh, doubles = self.stage(model, rows)
        if doubles and op == "insert":
            with pytest.raises(txnkv.RowErrors) as raised:
                model.handle.write("t", as_table(rows), op)
            assert sorted(error.key for error in raised.value.errors) == sorted(doubles)
            return
        result = model.handle.write("t", as_table(rows), op)
        assert (result.inserted, result.ignored) == (fresh, len(doubles))

    @rule(model=transactions, row=st.tuples(KEYS, TEXTS))
    def insert_one(self, model: Model, row: Row) -> None:
        if model.over:
            with pytest.raises(OVER):
                insert_and_flush(model.handle, row)
        else:
            model.handle.insert("t", {"id": row[0], "text": row[1]})
            model.buffered.append(row)

    @rule(model=transactions)
    def flush(self, model: Model) -> None:
        if not model.over:
            self.flush_buffered(model)

    @rule(model=consumes(transactions))
    def commit(self, model: Model) -> None:
        if model.over:
            return
        self.flush_buffered(model)
        conflict = any(
            key in self.rows and self.rows[key].at > model.snapshot for key in model.staged
        )
        if conflict:
            with pytest.raises(txnkv.TransactionConflictError):
                model.handle.commit()
            assert model.handle.state is txnkv.TxnState.ABORTED
        else:
            at = int(model.handle.commit())
            assert at > self.last_commit or not model.staged
            for key, text in model.staged.items():
                self.rows[key] = Committed(text, at)
            self.last_commit = max(self.last_commit, at)
        self.end(model)

    @rule(model=consumes(transactions))
    def roll_back(self, model: Model) -> None:
        if not model.over:
            model.handle.rollback()
            model.handle.rollback()
            self.end(model)

    @rule(model=consumes(transactions), client=st.integers(0, 1))
    def abandon(self, model: Model, client: int) -> None:
        """As when its process dies: nobody beats for it any more."""
        if model.over:
            return
        id = model.handle.id
        model.handle.serialize()
        model.handle.close()
        if self.open == [model]:
            settle(self.clients[client])  # an hour passes, for all that are open
        else:
            self.clients[client].abort_transaction(id)
        assert self.clients[client].transaction_state(id) is txnkv.TxnState.ABORTED
        self.end(model)

    def end(self, model: Model) -> None:
        model.over = True
        self.open.remove(model)

    # -- outside of transactions -------------------------------------------------------

    @rule(rows=ROWS, client=st.integers(0, 1))
    def write_outside(self, rows: list[Row], client: int) -> None:
        before = Model(None, self.last_commit)  # type: ignore[arg-type]
        fresh, doubles = self.stage(before, rows)
        result = self.clients[client].new_session().write("t", as_table(rows), "insert_ignore")
        assert (result.inserted, result.ignored) == (fresh, len(doubles))
        at = int(self.clients[client].snapshot().timestamp)
        assert (at > self.last_commit) == bool(fresh)
        for key, text in before.staged.items():
            self.rows[key] = Committed(text, at)
        self.last_commit = at

    @precondition(lambda self: not self.open)
    @rule()
    def reopen(self) -> None:
        for client in self.clients:
            client.close()
        self.clients = [txnkv.connect(self.path / "store", create=False) for _ in range(2)]

    # -- reading -----------------------------------------------------------------------

    @rule(model=transactions, key=KEYS)
    def read_in_transaction(self, model: Model, key: int) -> None:
        if model.over:
            with pytest.raises(OVER):
                model.handle.get("t", key)
            return
        self.flush_buffered(model)
        expected = {**self.seen_at(model.snapshot), **model.staged}
        assert as_rows(model.handle.scan("t").to_arrow()) == expected
        assert model.handle.get("t", key) == as_dict(key, expected)

    @rule(target=snapshots, client=st.integers(0, 1))
    def take_snapshot(self, client: int) -> tuple[int, dict[int, str | None]]:
        taken = self.clients[client].snapshot().timestamp
        assert taken == self.last_commit
        return int(taken), self.seen_at(int(taken))

    @rule(taken=snapshots, client=st.integers(0, 1))
    def read_snapshot(self, taken: tuple[int, dict[int, str | None]], client: int) -> None:
        at, expected = taken
        with self.clients[client].snapshot(txnkv.Timestamp(at)) as snapshot:
            assert as_rows(snapshot.scan("t").to_arrow()) == expected

    @rule(
        column=st.sampled_from(["id", "text"]),
        op=st.sampled_from([*OPERATORS, "is null", "is not null"]),
        key=KEYS,
        text=st.text("abc", max_size=3),
        ordered=st.booleans(),
        limit=st.one_of(st.none(), st.integers(0, 10)),
        client=st.integers(0, 1),
    )
    def scan(
        self,
        column: str,
        op: str,
        key: int,
        text: str,
        ordered: bool,
        limit: int | None,
        client: int,
    ) -> None:
        value = key if column == "id" else text
        condition = (column, op) if "null" in op else (column, op, value)
        expected = {
            id: found
            for id, found in self.seen_at(self.last_commit).items()
            if holds(op, id if column == "id" else found, value)
        }
        table = self.clients[client].table("t")
        got = table.scan(where=[condition], ordered=ordered, limit=limit).to_arrow()
        ids = got["id"].to_pylist()
        if limit is None:
            assert as_rows(got) == expected
            assert table.count(where=[condition]) == len(expected)
        else:
            assert len(ids) == min(limit, len(expected))
            assert as_rows(got).items() <= expected.items()
        if ordered:
            assert ids == sorted(expected)[:limit]

    @rule(keys=st.lists(KEYS, max_size=12), client=st.integers(0, 1))
    def get_many(self, keys: list[int], client: int) -> None:
        seen = self.seen_at(self.last_commit)
        got = self.clients[client].table("t").get_many(keys).to_pylist()
        assert got == [
            {"id": key, "text": seen[key]} if key in seen else {"id": None, "text": None}
            for key in keys
        ]

    @rule(rows=st.integers(1, 20), client=st.integers(0, 1))
    def scan_by_tokens(self, rows: int, client: int) -> None:
        tokens = self.clients[client].table("t").scan().tokens(rows)
        got: dict[int, str | None] = {}
        for token in tokens:
            part = as_rows(token.open(self.clients[1 - client]).to_arrow())
            assert not part.keys() & got.keys()
            got |= part
        assert got == self.seen_at(self.last_commit)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "clients"):
            assert [client.table("t").count() for client in self.clients] == [len(self.rows)] * 2

    # -- the model ---------------------------------------------------------------------

    def seen_at(self, snapshot: int) -> dict[int, str | None]:
        return {key: row.text for key, row in self.rows.items() if row.at <= snapshot}

    def stage(self, model: Model, rows: list[Row]) -> tuple[int, list[int]]:
        """Answers how many are new, and the keys of the others."""
        there = self.seen_at(model.snapshot).keys()
        doubles = []
        for key, text in rows:
            if key in there or key in model.staged:
                doubles.append(key)
            else:
                model.staged[key] = text
        return len(rows) - len(doubles), doubles

    def flush_buffered(self, model: Model) -> None:
        rows, model.buffered = model.buffered, []
        _, doubles = self.stage(model, rows)
        if doubles:
            with pytest.raises(txnkv.RowErrors) as raised:
                model.handle.flush()
            assert raised.value.count == len(doubles)
        else:
            model.handle.flush()

    def look_at_all(self) -> None:
        for client in self.clients:
            got = client.table("t").scan(ordered=True).to_arrow()
            assert got["id"].to_pylist() == sorted(self.rows)
            assert as_rows(got) == self.seen_at(self.last_commit)


def insert_and_flush(txn: txnkv.Transaction, row: Row) -> None:
    """The first of both that asks status.db refuses a transaction ended elsewhere."""
    txn.insert("t", row)
    txn.flush()


def as_table(rows: list[Row]) -> pa.Table:
    return pa.table(
        {
            "id": pa.array([key for key, _ in rows], pa.int64()),
            "text": pa.array([text for _, text in rows], pa.string()),
        }
    )


def as_rows(table: pa.Table) -> dict[int, str | None]:
    found = dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))
    assert len(found) == table.num_rows, "no key comes twice"
    return found


def as_dict(key: int, rows: dict[int, str | None]) -> dict[str, Any] | None:
    return {"id": key, "text": rows[key]} if key in rows else None


def holds(op: str, found: Any, value: Any) -> bool:
    if "null" in op:
        return (found is None) == (op == "is null")
    return found is not None and bool(OPERATORS[op](found, value))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    def few_rows(widths: object) -> int:
        return BLOCK_ROWS

    monkeypatch.setattr(row_set_format, "rows_per_block", few_rows)
    monkeypatch.setattr(row_set_writer, "rows_per_block", few_rows)
    monkeypatch.setattr(row_set_writer, "WRITE_BYTES", 512)
    assert incoming.OPERATIONS == ("insert", "insert_ignore"), "teach the model what is new"


class HashedMachine(TableMachine):
    partitioning = txnkv.hash_partition("id", 3)


class RangedMachine(TableMachine):
    partitioning = txnkv.range_partition("id", [0, 10, 30])


FEW = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # made smaller in the long run alone
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
MANY = settings(FEW, max_examples=600, stateful_step_count=60, phases=tuple(Phase))


@pytest.mark.parametrize("machine", [TableMachine, HashedMachine, RangedMachine])
def test_table_does_what_the_model_does(machine: type[TableMachine]) -> None:
    run(machine, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [TableMachine, HashedMachine, RangedMachine])
def test_table_does_what_the_model_does_for_long(machine: type[TableMachine]) -> None:
    run(machine, MANY)


def run(machine: type[TableMachine], chosen: settings) -> None:
    case = machine.TestCase
    case.settings = chosen
    case("runTest").runTest()
