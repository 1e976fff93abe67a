"""Consumers that die: no message is lost, none is passed on twice, whatever died when.

`test_fault_points` kills at the steps of acknowledgements; these at the steps of everybody.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import txnkv
from tools import crash_subscriptions
from tools.crash import run_child, settle


@pytest.mark.parametrize(
    ("point", "first", "step"),
    [
        ("log.written", 3, 4),
        ("log.durable", 2, 3),
        ("commit.validated", 1, 2),
        ("commit.decided", 1, 1),
        ("commit.finalized", 1, 2),
        ("abort.started", 1, 1),
        ("abort.swept", 1, 2),
        ("append.written", 1, 2),
        ("status.before_commit", 11, 17),
        ("status.after_commit", 12, 17),
    ],
)
def test_consumers_that_die_lose_and_double_nothing(
    point: str, first: int, step: int, template: Path, tmp_path: Path
) -> None:
    deaths = 0
    while True:
        path = tmp_path / f"store-{deaths}"
        shutil.copytree(template, path)
        death = run_child("pass_on", path, f"{point}=kill@{first + deaths * step}")
        if not death.killed:
            assert death.code == 0
            break
        deaths += 1
        with txnkv.connect(path, create=False) as client:
            settle(client)
            assert crash_subscriptions.examine(client, death.said) == []
            assert client.check().problems == []
    assert deaths > 0
