"""The workload against a store of a few lines, right and broken: what breaks it is found.

So a clean history of the real store means something: the same transactions, checked in the
same way, show each of these faults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests.threads import at_once
from tools.isolation.checker import check
from tools.isolation.histories import Txn
from tools.isolation.replay import replay
from tools.isolation.workload import Load, prepare, read_all, work

Rows = dict[tuple[str, int], dict[str, Any]]

FAULTS: dict[str, tuple[str, set[str]]] = {
    "no validation": ("snapshot", {"lost-update"}),
    "reads are not validated": ("serializable", {"G2-item"}),
    "reads the latest": ("snapshot", {"internal", "G-single", "G1c"}),
    "commits are seen a bit later": ("snapshot", {"G-single-realtime", "G-single-session"}),
    "reads what is not committed": ("snapshot", {"G1a", "G1b", "G1c"}),
    "a commit in two halves": ("snapshot", {"G-single", "G1c", "internal"}),
    "rolls back a half": ("snapshot", {"G1a"}),
    "forgets a row at times": ("snapshot", {"G-single", "G-single-realtime", "G-single-session"}),
}
"""By fault, the isolation that is asked for and names of which at least one is found."""


@dataclass
class Model:
    """A store that is its versions by commit; one lock, and a pause wherever others may run."""

    fault: str = ""
    versions: list[Rows] = field(default_factory=lambda: [{}])
    dirty: Rows = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def create_table(self, name: str, schema: object, partition_by: object) -> None:
        """Tables need not be made here."""

    def new_transaction(self, isolation: str, locking: str) -> ModelTxn:
        late = self.fault == "commits are seen a bit later"
        return ModelTxn(self, max(0, len(self.versions) - 1 - 2 * late), isolation)

    def snapshot(self) -> ModelTxn:
        return ModelTxn(self, len(self.versions) - 1, "snapshot")


@dataclass
class ModelTxn:
    """A transaction, or a snapshot."""

    store: Model
    snapshot: int
    isolation: str
    own: Rows = field(default_factory=dict)
    read: set[tuple[str, int]] = field(default_factory=set)

    @property
    def timestamp(self) -> int:
        return self.snapshot

    def __enter__(self) -> ModelTxn:
        return self

    def __exit__(self, *_: object) -> None:
        """A snapshot's end."""

    @property
    def context(self) -> ModelTxn:
        return self

    def ensure_large(self) -> None:
        """All are of one size here."""

    def rows(self, table: str) -> dict[int, dict[str, Any]]:
        time.sleep(0.0001)
        with self.store.lock:
            latest = self.store.fault == "reads the latest"
            seen = self.store.versions[-1 if latest else self.snapshot]
            if self.store.fault == "reads what is not committed":
                seen = seen | self.store.dirty
            found = {key: row for (name, key), row in (seen | self.own).items() if name == table}
        self.read |= {(table, key) for key in range(100)}
        return found

    def get(self, table: str, key: int) -> dict[str, Any] | None:
        return self.rows(table).get(key)

    def get_many(self, table: str, keys: list[int]) -> pa.Table:
        rows = self.rows(table)
        name = "values" if table == "lists" else "value"
        return pa.Table.from_pylist([rows.get(key, {"id": None, name: None}) for key in keys])

    def scan(self, table: str, where: Any = None) -> Any:
        low, high = (where[0][2], where[1][2]) if where else (0, 100)
        rows = [row for key, row in self.rows(table).items() if low <= key < high]
        return _Found(rows)

    def upsert(self, table: str, row: dict[str, Any]) -> None:
        self.own[table, row["id"]] = row
        if self.store.fault == "reads what is not committed":
            self.store.dirty[table, row["id"]] = row

    insert = update = upsert

    def delete_ignore(self, table: str, key: int) -> None:
        """An insert follows."""

    def write(self, table: str, data: pa.Table, op: str) -> None:
        for row in data.to_pylist():
            self.upsert(table, row)

    def commit(self) -> int:
        time.sleep(0.0001)
        fault = self.store.fault
        with self.store.lock:
            if not self.own:
                return self.snapshot
            looked_at = set(self.own)
            if self.isolation == "serializable" and fault != "reads are not validated":
                looked_at |= self.read
            latest, before = self.store.versions[-1], self.store.versions[self.snapshot]
            if fault != "no validation" and any(
                latest.get(key) is not before.get(key) for key in looked_at
            ):
                if fault == "rolls back a half":
                    self.store.versions.append(latest | dict([*self.own.items()][:1]))
                raise txnkv.TransactionConflictError("another was first")
            own = dict(self.own)
            if fault == "forgets a row at times" and len(self.store.versions) % 5 == 0:
                own.popitem()
            if fault == "a commit in two halves":
                self.store.versions.append(latest | dict([*own.items()][:1]))
                self.store.lock.release()
                time.sleep(0.001)
                self.store.lock.acquire()
                latest = self.store.versions[-1]
            self.store.versions.append(latest | own)
            return len(self.store.versions) - 1

    def rollback(self) -> None:
        """Do nothing: no other transaction has seen what this one wrote."""


@dataclass
class _Found:
    rows: list[dict[str, Any]]

    def to_arrow(self) -> pa.Table:
        return pa.Table.from_pylist(self.rows)


def run(store: Any, isolation: str, transactions: int) -> list[Txn]:
    prepare(store)

    def session(number: int) -> list[Txn]:
        return work(store, Load(f"t{number}", number + 1, isolation, transactions, seconds=30))

    histories = at_once(*(partial(session, number) for number in range(4)))
    return [*(txn for history in histories for txn in history), read_all(store)]


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
def test_a_store_without_faults_is_clean(isolation: str) -> None:
    history = run(Model(), isolation, 60)
    report = check(history)
    assert report.violations(isolation) == []
    assert replay(history, isolation) == []
    assert report.satisfies("serializable") == (isolation == "serializable")


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, until: Callable[..., Any]) -> None:
    isolation, names = FAULTS[fault]

    def found() -> bool:
        report = check(run(Model(fault), isolation, 60))
        return bool({found.name for found in report.violations(isolation)} & names)

    until(found)  # few runs do not meet it


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("no validation", "overlapping-commits"),
        ("reads the latest", "not-at-snapshot"),
        ("commits are seen a bit later", "late-snapshot"),
        ("forgets a row at times", "not-at-snapshot"),
    ],
)
def test_timestamps_show_faults_too(fault: str, name: str) -> None:
    assert name in {found.name for found in replay(run(Model(fault), "snapshot", 60))}
