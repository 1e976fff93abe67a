"""Without pyspark or Java there is one clear line; and the benchmark checks itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import txnkv
from txnkv.spark import require_java

pytestmark = pytest.mark.spark


def test_without_pyspark() -> None:
    code = """
import sys
sys.modules["pyspark"] = None
try:
    import txnkv.spark
except ModuleNotFoundError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == ("txnkv.spark needs pyspark 4.1 or later: pip install 'txnkv[spark]'\n")


def test_batches_need_nothing_of_streams() -> None:
    """Streams import what Spark 4.1 does not have."""
    rooms = "txnkv.spark.source, txnkv.spark.reading, txnkv.spark.writing"
    code = f"import sys, {rooms}; print('txnkv.spark.streams' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


def test_without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(txnkv.NotSupportedError, match="no java on PATH: install one"):
        require_java()
    monkeypatch.setenv("JAVA_HOME", "/no/such/java")
    with pytest.raises(txnkv.NotSupportedError, match="JAVA_HOME is /no/such/java"):
        require_java()


@pytest.mark.parametrize(
    ("version", "found"),
    [('openjdk version "17.0.15" 2025-04-15', 17), ('openjdk version "25-ea"', 25)],
)
def test_java_is_new_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, found: int
) -> None:
    fake_java(monkeypatch, tmp_path, version)
    assert require_java() == found


@pytest.mark.parametrize(
    ("version", "words"), [('java version "1.8.0_392"', "is 8:"), ("?", "of an unknown version")]
)
def test_java_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, words: str
) -> None:
    fake_java(monkeypatch, tmp_path, version)
    with pytest.raises(txnkv.NotSupportedError, match=words):
        require_java()


def fake_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))


def test_the_module_exports_the_source_on_demand() -> None:
    import pyspark_txnkv
    import txnkv.spark

    assert txnkv.spark.TxnkvDataSource is pyspark_txnkv.DefaultSource
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        _ = txnkv.spark.nobody


@pytest.mark.slow
def test_the_benchmark_runs_and_checks_its_answers(spark: Any, tmp_path: Path) -> None:
    from benchmarks.spark_bench import spark_races

    lines = spark_races(20_000, 1, tmp_path)
    assert [line.race for line in lines].count("Spark reads 20,000 rows") == 3
    assert all(line.rate > 0 for line in lines)
    assert list(tmp_path.iterdir()) == []
