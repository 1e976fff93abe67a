"""kill -9 at every fault point: the transaction is wholly there or wholly not.

What is wrong after a death is found by `tools.crash.examine`: a part of the transaction, one
that was acknowledged or decided and is gone, one that was rolled back and is there, row sets,
locks or transactions left over, blocks that belong to nothing, damage.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import txnkv
from tools.crash import EXAMINERS, GONE, PLANS, THERE, examine, kill_at, run_child
from txnkv.storage import FAULT_POINTS


def test_every_fault_point_has_a_plan() -> None:
    own = {point for point in FAULT_POINTS if not point.startswith("test.")}  # of other tests
    assert set(PLANS) == own


EVERYWHERE = ("lmdb.", "status.")
"""Points that every step passes: many times in each scenario."""
CASES = [(point, scenario) for point, plan in PLANS.items() for scenario in plan.scenarios]


@pytest.mark.parametrize(("point", "scenario"), CASES)
def test_store_is_whole_after_a_death_at(
    point: str, scenario: str, template: Path, tmp_path: Path
) -> None:
    stride = 162 if point.startswith(EVERYWHERE) else 54  # the slow test takes each
    deaths = list(kill_at(template, tmp_path, point, scenario, stride))
    assert [(fault, problems) for fault, problems in deaths if problems] == []
    assert deaths


@pytest.mark.slow
@pytest.mark.parametrize(("point", "scenario"), CASES)
def test_store_is_whole_after_a_death_at_each_pass(
    point: str, scenario: str, template: Path, tmp_path: Path
) -> None:
    deaths = list(kill_at(template, tmp_path, point, scenario))
    assert [(fault, problems) for fault, problems in deaths if problems] == []
    assert deaths


@pytest.mark.parametrize(
    ("first", "scenario", "outcome", "second"),
    [
        ("commit.decided", "commit", THERE, "status.before_commit"),
        ("commit.decided", "commit", THERE, "commit.finalized"),
        ("commit.started", "commit", THERE, "commit.in_point"),
        ("commit.started", "commit", THERE, "status.after_commit"),
        ("commit.decided", "replace", THERE, "resolve.put"),
        ("commit.decided", "replace", THERE, "resolve.resolved"),
        ("commit.decided", "replace", THERE, "lmdb.before_commit"),
        ("commit.started", "replace", THERE, "resolve.put"),
        ("resolve.put", "replace", THERE, "resolve.put"),
        ("abort.started", "rollback", GONE, "lmdb.before_commit"),
        ("abort.started", "rollback", GONE, "lmdb.after_commit"),
        ("abort.started", "rollback", GONE, "abort.swept"),
        ("commit.decided", "topics_commit", THERE, "lmdb.before_commit"),
        ("commit.decided", "topics_commit", THERE, "log.completed"),
        ("commit.decided", "topics_commit", THERE, "marker.written"),
        ("commit.started", "topics_commit", THERE, "commit.in_point"),
        ("commit.started", "topics_commit", THERE, "log.completed"),
        ("abort.started", "topics_rollback", GONE, "marker.aborting"),
        ("abort.started", "topics_rollback", GONE, "marker.aborted"),
        ("abort.started", "topics_rollback", GONE, "lmdb.before_commit"),
    ],
)
def test_recovery_that_dies_is_recovered(
    first: str,
    scenario: str,
    outcome: str,
    second: str,
    template: Path,
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    shutil.copytree(template, path)
    assert run_child(scenario, path, f"{first}=kill").killed
    deaths = 0
    for number in range(1, 6):
        death = run_child("recover", path, f"{second}=kill@{number}")
        deaths += death.killed
    assert deaths > 0
    with txnkv.connect(path, create=False) as client:
        assert examine(client, death, outcome) == []
        if scenario in EXAMINERS:
            assert EXAMINERS[scenario](client, death.said) == []
