"""Benchmarks run tiny, so that they do not rot; each checks its answers."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("duckdb", reason="the peers of the benchmarks are not installed")

from benchmarks.__main__ import main  # only with the peers
from benchmarks.harness import Contestant, race

PEERS = {
    "insert-sorted": {"duckdb, primary key", "sqlite executemany", "parquet file, no key"},
    "insert-random": {"duckdb, primary key"},
    "scan": {"duckdb", "parquet file"},
    "memory": {"load, sorted keys", "scan, sorted keys"},
    "commit": {"sqlite", "lmdb"},
    "commit-threads": {"sqlite", "lmdb"},
    "commit-processes": {"sqlite", "lmdb"},
    "get": {"sqlite", "lmdb", "sqlite, select by select", "sqlite, IN (carray)"},
    "indexed": {"sqlite"},
    "few": {"sqlite"},
    "executemany": {"sqlite executemany"},
    "ycsb": {"sqlite"},
    "tpcc": {"sqlite"},
    "scan-beside": {"txnkv, quiet"},
    "compaction-latency": {"txnkv, p99 quiet"},
    "produce": {"the disk, with the same fsyncs", "sqlite executemany"},
    "send": {"txnkv"},
    "fetch": {"txnkv, read_uncommitted"},
    "consume": {"txnkv, poll_batch"},
    "pass-on": {"txnkv, a row alone"},
    "aborted": {"txnkv"},
    "open-log": {"txnkv"},
    "open-transaction": {"txnkv"},
    "many": {"txnkv, tables", "txnkv, partitions"},
    "life": {"txnkv"},
    "remote-scan": {"pyarrow.flight, from memory", "txnkv, in a folder"},
    "remote-write": {"pyarrow.flight, thrown away", "txnkv, in a folder"},
    "remote-transaction": {"pyarrow.flight, an empty action", "txnkv, in a folder"},
    "remote-get": {"pyarrow.flight, an empty action", "txnkv, in a folder"},
    "remote-clients": {"txnkv, over a server"},
    "growth": {"sqlite"},
}


DRAWN = {
    "growth": {"growth-commit.svg", "growth-get.svg"},
    "many": {f"many-{what}.svg" for what in ("flush", "round", "open", "poll")},
    "life": {"life-memory.svg", "life-descriptors.svg"},
}


SECONDS_LONG = {"scan", "get", "ycsb", "commit", "commit-processes", "growth", "produce"} | {
    f"remote-{name}" for name in ("scan", "write", "transaction", "get", "clients")
}
"""Each takes 4 s or more, for its peers or their processes."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SECONDS_LONG else ()) for n in PEERS],
)
def test_runs_tiny(name: str, tmp_path: Path) -> None:
    """Each race compares what its contestants answered or hold, and fails when that differs."""
    plots, base = tmp_path / "plots", tmp_path / "base"
    base.mkdir()
    order = [name, "--tiny", "--rounds", "1", "--json", str(tmp_path / "out.json")]
    order += ["--plots", str(plots)] if name in DRAWN else []
    result = CliRunner().invoke(main, [*order, "--dir", str(base)])
    assert result.exit_code == 0, "".join(traceback.format_exception(*result.exc_info or ()))
    lines = json.loads((tmp_path / "out.json").read_text())
    assert {line["name"] for line in lines} >= PEERS[name]
    if name not in ("memory", "open-transaction", "many"):
        assert any(line["name"].startswith("txnkv") for line in lines)
        assert all(line["rate"] > 0 for line in lines)
        first = {line["race"]: line["name"] for line in reversed(lines)}
        for line in lines:
            assert (line["ratio"] is None) == (first[line["race"]] == line["name"])
    assert list(base.iterdir()) == [], "a benchmark left its store behind"
    drawn = {path.name: path.read_text() for path in plots.glob("*")}
    assert drawn.keys() == DRAWN.get(name, set())
    assert all("txnkv" in text for text in drawn.values())


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


def test_what_was_found_before_ctrl_c_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    program = sys.modules[main.callback.__module__]
    known = {
        "one": lambda: race("one", Contestant("a", lambda: 1), [], rounds=1),
        "two": stopped,
        "three": pytest.fail,
    }
    monkeypatch.setattr(program, "races", lambda *_: known)
    ran = CliRunner().invoke(main, ["--json", str(tmp_path / "found.json")])
    assert ran.exit_code == 130, ran.output
    assert "Error: stopped; of 3 races these are done: one" in ran.stderr
    assert "one" in ran.stdout
    assert [line["race"] for line in json.loads((tmp_path / "found.json").read_text())] == ["one"]


def test_quick_ones_have_less_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = sys.modules[main.callback.__module__]
    asked = []

    def insert(rows: int, rounds: int, base: Path) -> list[object]:
        asked.append((rows, rounds))
        return race("r", Contestant("a", lambda: rows), [], rounds=rounds)

    monkeypatch.setattr(program.tables, "insert_sorted", insert)
    for option in ("--quick", "--tiny", "--rounds=2"):
        ran = CliRunner().invoke(main, ["insert-sorted", option])
        assert ran.exit_code == 0, ran.output
        assert "insert-sorted: " in ran.stderr
    assert asked == [(program.ROWS // program.QUICK, 1), (program.TINY_ROWS, 1), (program.ROWS, 2)]
