"""A store with its coordinator, and a participant that writes down what it was asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from txnkv.coordinator import coordinator as coordination
from txnkv.coordinator import jobs, status_table
from txnkv.coordinator.coordinator import Coordinator
from txnkv.coordinator.ids import Timestamp, latest_snapshot
from txnkv.coordinator.maintenance import Maintenance
from txnkv.coordinator.orchestration import Participants
from txnkv.coordinator.status_schema import SCHEMA
from txnkv.coordinator.status_table import TxnRow, TxnState
from txnkv.storage.faults import disarm
from txnkv.storage.store import Store


class Notebook(Participants):
    """A participant handler that holds no data."""

    kind = "page"

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.refuse: dict[int, Exception] = {}
        self.late: int | None = None  # the transaction that is asked to validate once more

    def check(self, row: TxnRow, ids: Sequence[int]) -> int:
        self.calls.append(("check", row.txn_id))
        return 0

    def begin_commit(self, row: TxnRow, ids: Sequence[int]) -> Timestamp:
        self.calls.append(("begin_commit", row.txn_id))
        if row.txn_id in self.refuse:
            raise self.refuse[row.txn_id]
        return Timestamp(0)

    def validate(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], validated: Timestamp
    ) -> bool:
        self.calls.append(("validate", row.txn_id))
        if self.late == row.txn_id:
            self.late = None
            return False
        return True

    def write_commit(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], commit_ts: Timestamp
    ) -> None:
        self.calls.append(("write_commit", row.txn_id))

    def finalize_commit(self, row: TxnRow, ids: Sequence[int]) -> None:
        assert row.commit_ts is not None
        self.calls.append(("finalize_commit", row.txn_id))

    def abort(self, row: TxnRow, ids: Sequence[int]) -> None:
        self.calls.append(("abort", row.txn_id))

    def of(self, txn_id: int) -> list[str]:
        return [what for what, id in self.calls if id == txn_id]


class World:
    """A coordinator with a notebook as the only kind of participant."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pages = Notebook()
        self.open()

    def open(self, history: float = 900.0) -> None:
        self.store = Store.open(
            self.path,
            create=True,
            read_only=False,
            schema_sql=SCHEMA,
            initialise=coordination.initialise,
        )
        self.coordinator = Coordinator(self.store, history)
        self.coordinator.orchestrator.add_handler(self.pages)

    def close(self) -> None:
        self.coordinator.close()
        self.store.close()

    def restart(self) -> None:
        self.close()
        self.open()

    def row(self, **options: Any) -> TxnRow:
        """A transaction that is not stored yet."""
        settings = {
            "timeout": None,
            "isolation": "snapshot",
            "locking": "optimistic",
            "keepalive": 30.0,
        }
        return self.coordinator.begin(**(settings | options))

    def begin(self, *pages: int, **options: Any) -> int:
        """A stored OPEN transaction with these participants."""
        row = self.coordinator.write_open(self.row(**options))
        self.register(row.txn_id, *pages)
        return row.txn_id

    def register(self, txn_id: int, *pages: int) -> None:
        with self.store.status.write() as cur:
            status_table.get_open(cur, txn_id, "register")
            status_table.register_participant(cur, txn_id, "page", pages)

    def start_job(self, txn_id: int, job_id: str) -> None:
        with self.store.status.write() as cur:
            jobs.start(cur, txn_id, job_id)

    def state(self, txn_id: int) -> TxnState:
        return self.coordinator.get(txn_id).state

    def put_into(self, txn_id: int, state: TxnState) -> None:
        """Drive an OPEN transaction into a state by the moves of a commit or an abort."""
        steps = {
            TxnState.OPEN: [],
            TxnState.COMMIT_IN_PROGRESS: [TxnState.COMMIT_IN_PROGRESS],
            TxnState.FINALIZE_IN_PROGRESS: [
                TxnState.COMMIT_IN_PROGRESS,
                TxnState.FINALIZE_IN_PROGRESS,
            ],
            TxnState.COMMITTED: [
                TxnState.COMMIT_IN_PROGRESS,
                TxnState.FINALIZE_IN_PROGRESS,
                TxnState.COMMITTED,
            ],
            TxnState.ABORT_IN_PROGRESS: [TxnState.ABORT_IN_PROGRESS],
            TxnState.ABORTED: [TxnState.ABORT_IN_PROGRESS, TxnState.ABORTED],
        }[state]
        at = TxnState.OPEN
        for step in steps:
            with self.store.status.write() as cur:
                row = status_table.get(cur, txn_id)
                if step is TxnState.FINALIZE_IN_PROGRESS:
                    parts = status_table.participants(cur, txn_id)
                    self.coordinator.orchestrator._write_commit_point(cur, row, parts)
                else:
                    assert status_table.move(cur, txn_id, at, step)
            at = step

    def latest(self) -> Timestamp:
        with self.store.status.read() as cur:
            return latest_snapshot(cur)

    def round(self) -> None:
        assert self.coordinator.maintenance.round(resume_all=True)


@pytest.fixture
def world(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Without background rounds but those that a test asks for."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    made = World(store_path)
    yield made
    disarm()
    made.close()
