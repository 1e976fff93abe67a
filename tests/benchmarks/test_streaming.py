"""The benchmarks of streams run tiny; each checks its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")
pytest.importorskip("duckdb", reason="the peers of the benchmarks are not installed")

from benchmarks.remote_spark import CLUSTER, FOLDER, LOCAL, over_server
from benchmarks.spark_bench import TINY_ROWS
from benchmarks.spark_session import require_kafka  # only with Spark
from benchmarks.streaming.__main__ import streaming_races
from tests.spark.conftest import java, spark, worker_python

__all__ = ["java", "spark", "worker_python"]  # fixtures: the one Spark of all tests

pytestmark = pytest.mark.spark


@pytest.mark.parametrize(
    ("name", "peers"),
    [
        pytest.param(
            "source",
            {"source that does nothing", "txnkv, order=commit"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sinks", {"sink that does nothing", "parquet, in the JVM"}, marks=pytest.mark.slow
        ),
        pytest.param("pipeline", {"parquet files, checkpoint"}, marks=pytest.mark.slow),
        pytest.param(
            "trigger",
            {"nothing", "txnkv, no message", "txnkv, into a table"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_runs_tiny(spark: Any, tmp_path: Path, name: str, peers: set[str]) -> None:
    plots = tmp_path / "plots"
    place = tmp_path / "place"
    place.mkdir()
    lines = streaming_races((name,), tiny=True, rounds=1, base=place, plots=plots)
    assert {line.name for line in lines} >= {"txnkv", *peers}
    assert all(line.rate > 0 for line in lines)
    assert list(place.iterdir()) == [], "a benchmark left its store behind"
    if name == "trigger":
        assert "txnkv, into a table" in (plots / "streaming-trigger.svg").read_text()


@pytest.mark.slow
def test_over_a_server_runs_tiny(java: None, tmp_path: Path) -> None:
    lines = over_server(TINY_ROWS, 1, tmp_path)
    assert {line.name for line in lines} == {CLUSTER, FOLDER, LOCAL}
    assert list(tmp_path.iterdir()) == [], "a benchmark left its store behind"


def test_without_the_connector_it_is_named(spark: Any) -> None:
    with pytest.raises(click.ClickException, match="give the jars by --jars"):
        require_kafka(spark)
