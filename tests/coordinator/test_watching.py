"""Numbers of processes are told while somebody watches, and not else."""

from __future__ import annotations

import os
from pathlib import Path

from txnkv.coordinator import watch
from txnkv.coordinator.maintenance import _Published
from txnkv.metrics import Metrics


def _commits(folder: Path) -> list[int]:
    found = watch(folder)
    assert {pid for pid, _ in found} == {os.getpid()}
    return sorted(each["commits"] for each in found.values())


def test_numbers_are_told_after_each_touch(tmp_path: Path) -> None:
    metrics, published = Metrics(), _Published(tmp_path)
    published.round(metrics)
    assert not list(tmp_path.iterdir())  # nobody watches
    assert watch(tmp_path) == {}
    metrics.commits.add(3)
    published.round(metrics)
    assert _commits(tmp_path) == [3]
    published.round(metrics)
    metrics.commits.add()
    published.round(metrics)  # not touched since
    assert _commits(tmp_path) == [3]
    published.withdraw()
    published.withdraw()
    assert [file.name for file in tmp_path.iterdir()] == ["watched"]


def test_the_dead_are_forgotten_and_half_a_file_is_left_alone(tmp_path: Path) -> None:
    watch(tmp_path)
    (tmp_path / "metrics-7-a").write_text("{}")
    (tmp_path / "metrics-8-a").write_text('{"commits": ')
    (tmp_path / "part-7-a").write_text("{")
    for name in ("metrics-7-a", "part-7-a"):
        os.utime(tmp_path / name, (0, 0))
    assert watch(tmp_path) == {}
    assert not list(tmp_path.glob("*-7-a"))
    assert (tmp_path / "metrics-8-a").exists()
    assert watch(tmp_path / "none") == {}


def test_processes_of_one_pid_tell_their_own_numbers(tmp_path: Path) -> None:
    """As in containers: each replaced the other's file, and rates were differences of two."""
    several = [(Metrics(), _Published(tmp_path)) for _ in range(2)]
    watch(tmp_path)
    for n, (metrics, published) in enumerate(several):
        metrics.commits.add(n + 3)
        published.round(metrics)
    assert _commits(tmp_path) == [3, 4]
    several[0][1].withdraw()
    assert _commits(tmp_path) == [4]
