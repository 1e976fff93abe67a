"""Benchmarks run tiny in every test run, so that they do not rot; each checks its answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("duckdb", reason="the peers of the benchmarks are not installed")

from benchmarks.__main__ import main  # only with the peers
from benchmarks.harness import Contestant, race


@pytest.mark.parametrize("name", ["insert-sorted", "insert-random", "scan", "memory"])
def test_runs_tiny(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, [name, "--tiny", "--json", str(tmp_path / "out.json"), "--dir", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    lines = json.loads((tmp_path / "out.json").read_text())
    assert lines
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"], "a benchmark left its store behind"


def test_ratios_compare_with_ours() -> None:
    lines = race(
        "sleep",
        Contestant("ours", lambda: 1000),
        [Contestant("peer", lambda: 10)],
        rounds=1,
        ratios={"peer": 0.0},
    )
    assert lines[0].ratio is None
    assert lines[1].ratio == pytest.approx(lines[0].rate / lines[1].rate)
    assert lines[1].reached is True


def test_unknown_race_is_refused() -> None:
    result = CliRunner().invoke(main, ["nonsense", "--tiny"])
    assert result.exit_code == 2
    assert "no race nonsense" in result.output
