"""Numbers of processes are told while somebody watches, and not else."""

from __future__ import annotations

import os
from pathlib import Path

from txnkv.coordinator import watch
from txnkv.coordinator.maintenance import _Published
from txnkv.metrics import Metrics


def test_numbers_are_told_after_each_touch(tmp_path: Path) -> None:
    metrics, published = Metrics(), _Published(tmp_path)
    published.round(metrics)
    assert not list(tmp_path.iterdir())  # nobody watches
    assert watch(tmp_path) == {}
    metrics.commits.add(3)
    published.round(metrics)
    assert watch(tmp_path)[os.getpid()]["commits"] == 3
    published.round(metrics)
    metrics.commits.add()
    published.round(metrics)  # not touched since
    assert watch(tmp_path)[os.getpid()]["commits"] == 3
    published.withdraw()
    published.withdraw()
    assert [file.name for file in tmp_path.iterdir()] == ["watched"]


def test_the_dead_are_forgotten_and_half_a_file_is_left_alone(tmp_path: Path) -> None:
    watch(tmp_path)
    (tmp_path / "metrics-7").write_text("{}")
    (tmp_path / "metrics-8").write_text('{"commits": ')
    os.utime(tmp_path / "metrics-7", (0, 0))
    assert watch(tmp_path) == {}
    assert not (tmp_path / "metrics-7").exists()
    assert (tmp_path / "metrics-8").exists()
    assert watch(tmp_path / "none") == {}
