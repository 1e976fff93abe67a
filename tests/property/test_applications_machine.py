"""Versions of applications against a dict, under random use by several transactions at once.

Small transactions, stored ones, some that are stored after they were marked; sources that change,
applications that are forgotten, stores that are opened anew. What each mark and each commit
answers is predicted, and after every step the versions and the rows are those that committed.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

import txnkv

APPS = st.sampled_from(["a", "b"])
VERSIONS = st.integers(0, 4)
SOURCES = st.sampled_from([None, None, "p", "q"])
Known = tuple[int, str | None]
Errors = type[Exception] | tuple[type[Exception], ...]
OVER = (txnkv.InvalidTxnStateError, txnkv.ClosedError)
"""Errors for a caller that goes on with a transaction that has ended."""


@dataclass
class Model:
    """A transaction as it is to be.

    Attributes:
        row: the key of the row that it inserts.
        marked_by: another handle of it, by which it is marked.
        marks: version and source by application.
        over: it was aborted by a mark, or with its store.
        refused: what aborted it, when another handle of it was told.
    """

    txn: txnkv.Transaction
    row: int
    marked_by: txnkv.Transaction | None = None
    marks: dict[str, Known] = field(default_factory=dict)
    over: bool = False
    refused: Errors = OVER


class ApplicationsMachine(RuleBasedStateMachine):
    """Transactions of one store, side by side."""

    transactions: Bundle[Model] = Bundle("transactions")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="txnkv-machine-"))
        self.applied: dict[str, Known] = {}
        self.rows: set[int] = set()
        self.inserted: set[int] = set()
        self.open: list[Model] = []
        self.given = 0

    @initialize()
    def make(self) -> None:
        self.client = txnkv.connect(self.path / "store")
        schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
        self.client.create_table("t", schema)

    @rule(target=transactions, kind=st.sampled_from(["small", "stored", "joined", "locked"]))
    def begin(self, kind: str) -> Model:
        locking = "partition" if kind == "locked" else "optimistic"
        txn = self.client.new_transaction(locking=locking, timeout=None)
        self.given += 1
        model = Model(txn, self.given)
        if kind != "locked":  # they would wait for each other
            txn.insert("t", (self.given,))
            self.inserted.add(self.given)
        if kind == "stored":
            txn.serialize()
        elif kind == "joined":
            model.marked_by = txnkv.Transaction.deserialize(self.client, txn.serialize())
        self.open.append(model)
        return model

    @rule(model=transactions)
    def store(self, model: Model) -> None:
        if not model.over:
            model.txn.serialize()

    @rule(model=transactions, app=APPS, version=VERSIONS, source=SOURCES)
    def mark(self, model: Model, app: str, version: int, source: str | None) -> None:
        def refused(error: Errors) -> None:
            with pytest.raises(error):
                by.mark_applied(app, version, source)

        by = model.marked_by or model.txn
        there, marked = self.applied.get(app), model.marks.get(app)
        if model.over:
            refused(OVER)
        elif there is not None and source not in (None, there[1]):
            refused(ValueError)
        elif there is not None and there[0] >= version:
            refused(txnkv.AlreadyAppliedError)
            model.over = True
            if model.marked_by is not None:
                model.refused = txnkv.AlreadyAppliedError
        elif marked is not None and (
            marked[0] != version or (None not in (marked[1], source) and marked[1] != source)
        ):
            refused(ValueError)
        else:
            by.mark_applied(app, version, source)
            model.marks[app] = (version, (source if marked is None else marked[1]) or source)

    @rule(model=consumes(transactions))
    def commit(self, model: Model) -> None:
        if model.over:
            with pytest.raises(model.refused):
                model.txn.commit()
            return
        self.open.remove(model)
        for app, (version, source) in model.marks.items():
            there = self.applied.get(app)
            if there is not None and (there[0] >= version or source not in (None, there[1])):
                with pytest.raises(txnkv.AlreadyAppliedError):
                    model.txn.commit()
                assert model.txn.state is txnkv.TxnState.ABORTED
                return
        model.txn.commit()
        self.rows |= {model.row} & self.inserted
        for app, (version, source) in model.marks.items():
            before = self.applied.get(app, (0, None))[1]
            self.applied[app] = (version, source or before)

    @rule(model=consumes(transactions))
    def roll_back(self, model: Model) -> None:
        if not model.over:
            model.txn.rollback()

    @rule(app=APPS)
    def forget(self, app: str) -> None:
        assert self.client.forget_applied(app) == (app in self.applied)
        self.applied.pop(app, None)

    @rule()
    def open_anew(self) -> None:
        for model in self.open:
            with suppress(*OVER):
                model.txn.rollback()
            model.over, model.refused = True, OVER
        self.open.clear()
        self.client.close()
        self.client = txnkv.connect(self.path / "store")

    @invariant()
    def is_as_predicted(self) -> None:
        if not hasattr(self, "client"):
            return
        found = {app: (it.version, it.source) for app, it in self.client.applications().items()}
        assert found == self.applied
        assert {row["id"] for row in self.client.table("t").scan()} == self.rows

    def teardown(self) -> None:
        if hasattr(self, "client"):
            assert self.client.check().problems == []
            self.client.close()
        shutil.rmtree(self.path)


FEW = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # made smaller in the long run alone
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
MANY = settings(FEW, max_examples=600, stateful_step_count=50, phases=tuple(Phase))


def test_applications_do_what_the_model_does() -> None:
    run(FEW)


@pytest.mark.slow
def test_applications_do_what_the_model_does_for_long() -> None:
    run(MANY)


def run(chosen: settings) -> None:
    case = ApplicationsMachine.TestCase
    case.settings = chosen
    case("runTest").runTest()
