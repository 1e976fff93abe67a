"""kill -9 while threads commit small transactions together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from tests.property.machine_tools import in_child
from tools.crash import run_child
from tools.crash_scenarios import ACKNOWLEDGED, BEFORE, ROWS, TABLES
from txnkv.coordinator import commit_log
from txnkv.coordinator.maintenance import Maintenance


@pytest.mark.parametrize(
    "fault",
    [
        *(f"log.written=kill@{number}" for number in (1, 2, 7)),
        *(f"log.durable=kill@{number}" for number in (1, 2, 7)),
        *(f"status.before_commit=kill@{number}" for number in (2, 5)),
        *(f"status.after_commit=kill@{number}" for number in (2, 5)),
    ],
)
def test_each_member_of_a_group_is_whole(fault: str, template: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    shutil.copytree(template, path)
    death = run_child("group", path, fault)
    assert death.killed
    acknowledged = {int(line.removeprefix(ACKNOWLEDGED)) for line in death.said}
    with txnkv.connect(path, create=False) as client:
        left, right = (
            client.table(name).scan(where=[("id", ">=", BEFORE)], ordered=True).to_arrow()
            for name in TABLES
        )
        assert left == right
        there = left.column("id").to_pylist()
        assert acknowledged <= set(there)
        assert left.column("text").to_pylist() == [f"row {id}" for id in there]
        assert len(there) < ROWS
        assert client.check().problems == []


def test_what_was_acknowledged_is_replayed_by_several_at_once(
    template: Path, tmp_path: Path
) -> None:
    """A process that was open before the death and one opened after it see the same."""
    path = tmp_path / "store"
    shutil.copytree(template, path)
    with txnkv.connect(path, create=False) as before:
        assert before.table(TABLES[0]).count() == BEFORE
        death = run_child("group", path, "log.durable=kill@5")
        assert death.killed
        seen = before.table(TABLES[0]).scan(ordered=True).to_arrow()
    with txnkv.connect(path, create=False) as after:
        assert after.table(TABLES[0]).scan(ordered=True).to_arrow() == seen
    assert seen.num_rows > BEFORE


def test_whoever_is_told_of_a_commit_can_read_it(
    connect: Callable[[], txnkv.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process died between COMMIT and sync: its state says so no earlier than reads show it."""
    monkeypatch.setattr(commit_log, "_PATIENCE", 10**9)
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    client = connect()
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    table.count()

    def insert(id: int) -> Callable[[Callable[[int], object]], None]:
        def work(say: Callable[[int], object]) -> None:
            txn = client.new_transaction()
            txn.insert(table, (id,))
            say(int(txn.id))
            txn.commit()

        return work

    told = []
    for hit in (2, 3):  # the first is that of a range of ids
        (txn_id,) = in_child(insert(hit), "status.after_commit", hit)
        state = client.transaction_state(txn_id)
        assert (table.get(hit) is not None) == (state is txnkv.TxnState.COMMITTED)
        told.append(state)
    assert txnkv.TxnState.COMMITTED in told
