"""Attempts that come too late, are repeated, or run twice at once: they leave nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tools.children import ROOT
from tools.spark_cluster import spark_cluster

from . import copy_checks as checks
from .copy_runs import Query, Spark, make
from .copying import messages
from .killing import PATIENCE
from .test_exactly_once import numbers

pytest.importorskip("pyspark.sql.streaming.datasource")
pytestmark = pytest.mark.slow

TOTAL = 2000


@pytest.fixture
def stalling(tmp_path: Path) -> Path:
    """The folder of what attempts shall do; see `stalling`."""
    folder = tmp_path / "stalling"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path: Path, stalling: Path) -> Iterator[Callable[..., Spark]]:
    """Starts Sparks whose tasks stall when they are told to."""
    started: list[Spark] = []

    def make_one(**options: Any) -> Spark:
        environment = {"TXNKV_TEST_STALL": str(stalling)}
        started.append(Spark(tmp_path, environment=environment, **options))
        return started[-1]

    yield make_one
    for each in started:
        each.close()


@pytest.fixture(params=["topic", "table"])
def query(request: pytest.FixtureRequest, client: txnkv.Client, tmp_path: Path) -> Query:
    """A query into a topic or a table; what it reads is there."""
    make(client, ("marker", "sidecar"), (2, 2))
    with client.transaction() as txn:
        txn.send_batch("in", messages(0, TOTAL, 2))
    return Query(
        request.param, "late", client.path, tmp_path / "checkpoint", TOTAL, format="stalling"
    )


def problems(client: txnkv.Client, query: Query) -> list[str]:
    if query.kind == "table":
        return checks.each_once("table mirror", TOTAL, numbers(client, "mirror"))
    copies = checks.standing(client.topic("out"))
    return checks.each_once("topic out", TOTAL, [message.n for message in copies])


def test_a_zombie_goes_on_when_its_batch_was_committed(
    client: txnkv.Client,
    query: Query,
    start: Callable[..., Spark],
    stalling: Path,
    until: Callable[..., Any],
    nothing_is_left: Callable[[], None],
) -> None:
    """A task is stopped when it has staged half of its rows. All others of its Spark are killed,
    and the next Spark does the batch. Then the task goes on.
    """
    (stalling / "stop").touch()
    spark = start()
    spark.start(query)
    until((stalling / "pid").exists, PATIENCE)
    zombie = int((stalling / "pid").read_text())
    try:
        assert spark.program is not None
        spark.program.kill(spare=[zombie])
        spark.start()
        spark.finish()
        assert problems(client, query) == []
        assert not (stalling / "outcome").exists()
    finally:
        os.kill(zombie, signal.SIGCONT)
    until((stalling / "outcome").exists, PATIENCE)
    assert (stalling / "outcome").read_text().startswith("InvalidTxnStateError: ")
    assert problems(client, query) == []
    nothing_is_left()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A cluster of two workers, which take themselves for two machines: Spark runs no two attempts
    of a task on one.
    """
    if sys.platform != "linux":
        pytest.skip("needs addresses 127.0.0.2 and 127.0.0.3")
    with spark_cluster(tmp_path) as master:
        yield master


def test_speculation_and_retries(
    client: txnkv.Client,
    query: Query,
    cluster: str,
    start: Callable[..., Spark],
    stalling: Path,
    nothing_is_left: Callable[[], None],
) -> None:
    """One attempt is slow until its twin has staged; another fails when it has staged."""
    (stalling / "slow").touch()
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.executorEnv.TXNKV_TEST_STALL": str(stalling),
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.speculation": "true",
        "spark.speculation.quantile": "0.25",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.interval": "100ms",
    }
    spark = start(master=cluster, conf=conf)
    spark.start(replace(query, spread=4))
    spark.finish()
    assert problems(client, query) == []
    staged = sorted(path.name for path in stalling.glob("staged-*"))
    assert any(name.startswith("staged-0-") and name != "staged-0-0" for name in staged), staged
    assert {"staged-1-0", "staged-1-1"} <= set(staged)
    assert spark.failures == []
    nothing_is_left()
