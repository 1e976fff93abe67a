"""Exactly once, as Kafka's own system test shows it: copies, while everybody is killed.

The programs of `copying` run as processes of their own: a producer, a Spark that copies topic to
topic (and tables), and a READ_COMMITTED reader beside them. In the end nothing is lost, nothing
is there twice, order is kept, and the reader has seen what stands, and nothing else.

How large and how often can be set by TXNKV_TEST_SCALE: 0.1 is a tenth of the messages and cycles.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

import txnkv

from . import copy_checks as checks
from .copy_runs import Producer, Query, Spark, applied, copy_while, make, marks, targets
from .killing import PATIENCE, Program

pytest.importorskip("pyspark.sql.streaming.datasource")

SCALE: Final = float(os.environ.get("TXNKV_TEST_SCALE", "1"))
MESSAGES: Final = int(100_000 * SCALE)
CHUNK: Final = 750
KILLS: Final = {"producer": 4, "query": 2}
"""The latter cost the start of a Spark each."""
CYCLES: Final = int(50 * SCALE)
SHARES: Final = {"worker": 26, "between": 10, "all": 6, "jvm": 4, "driver": 4}
"""The number of kills of each way in 50 cycles; see `WAYS`."""


@dataclass(frozen=True)
class Case:
    """One combination.

    Attributes:
        hard: by SIGKILL; else told to end.
        victim: "producer" or "query".
        by_key: the order that is kept: of each key; else of each partition.
        kind: the sink: "topic", or "each" for topic, table and acks by foreach_batch.
    """

    hard: bool
    victim: str
    by_key: bool
    kind: str

    @property
    def buffers(self) -> tuple[str, str]:
        """The buffers of source and copies: each sink gets both, in either order."""
        marker = self.by_key == (self.kind == "topic")
        return ("marker", "sidecar") if marker else ("sidecar", "marker")

    @property
    def target(self) -> str:
        """The topic of the copies."""
        return "out" if self.kind == "topic" else "each"

    def __str__(self) -> str:
        how = "hard" if self.hard else "clean"
        return f"{how}-{self.victim}-{'key' if self.by_key else 'partition'}-{self.kind}"


CASES: Final = [
    Case(hard, victim, by_key, kind)
    for victim, hard, by_key, kind in itertools.product(
        ("producer", "query"), (True, False), (False, True), ("topic", "each")
    )
]


@pytest.fixture(scope="module")
def spark_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    """One Spark for all tests that do not kill it."""
    spark = Spark(tmp_path_factory.mktemp("programs"))
    yield spark
    spark.close()


@pytest.fixture(autouse=True)
def no_query_is_left(spark_program: Spark) -> Iterator[None]:
    """A test that failed leaves none to the next."""
    yield
    if spark_program.queries and spark_program.program is not None:
        spark_program.queries.clear()
        spark_program.program.kill()
    spark_program.failures.clear()
    spark_program.killed = 0


class Copying:
    """A copy from topic to topic, with kills."""

    def __init__(
        self, case: Case, spark: Spark, client: txnkv.Client, folder: Path, total: int, chunk: int
    ) -> None:
        self.case = case
        self.spark = spark
        self.client = client
        self.folder = folder
        self.total = total
        make(client, case.buffers, (3, 2) if case.by_key else (2, 3))
        self.query = Query(
            kind=case.kind,
            app="copy",
            path=client.path,
            checkpoint=folder / "checkpoint",
            most=max(total // 25, chunk),
            by_key=case.by_key,
            order="commit" if case.by_key else "offset",
        )
        arguments = {
            "path": client.path,
            "total": total,
            "chunk": chunk,
            "ahead": total // 8,
            "partitions": None if case.by_key else 2,
            "follow": case.target,
        }
        self.producer = Producer(folder, arguments)
        topics = ["in", case.target]
        self.reader = Program(folder, "reader", path=client.path, topics=topics, into=str(folder))

    def run(self, kills: dict[int, str]) -> None:
        """All of it.

        Args:
            kills: who is killed, by how many copies there are.
        """
        waiting = sorted(kills)

        def tend(count: int) -> None:
            self.producer.tend()
            self.spark.tend()
            if waiting and count >= waiting[0]:
                time.sleep(random.uniform(0, 0.3))
                self._kill(kills[waiting.pop(0)])

        try:
            self.spark.start(self.query)
            copy_while(self.client.topic(self.case.target), self.total, tend)
            self.spark.finish()
            checks.await_the_killed(self.client)  # the reader stands before what they left open
            self.reader.tell(do="end")
            self.reader.hear("read")
        finally:
            self.producer.close()
            self.reader.close()
        assert not waiting, f"not killed at {waiting} copies: they did not come"

    def _kill(self, victim: str) -> None:
        if victim == "producer":
            self.producer.kill(self.case.hard)
        elif self.case.hard:
            self.spark.kill(random.choice(["all", "driver", "jvm"]))
        else:
            self.spark.end_cleanly()

    def problems(self) -> list[str]:
        """Return what is not as it must be, one line each."""
        case, total = self.case, self.total
        source = checks.standing(self.client.topic("in"))
        copy = checks.standing(self.client.topic(case.target))
        found = checks.each_once("source", total, [message.n for message in source])
        found += checks.each_once("copies", total, [message.n for message in copy])
        found += checks.in_order("copies", copy, case.by_key)
        if not case.by_key:
            found += checks.partitions_kept("copies", source, copy)
        for name, stands in (("in", source), (case.target, copy)):
            found += checks.reader_saw(name, checks.noted(self.folder / f"{name}.arrow"), stands)
        if case.kind == "each":
            found += self._problems_of_tables()
        return found

    def _problems_of_tables(self) -> list[str]:
        found = checks.each_once("table copied", self.total, numbers(self.client, "copied"))
        expected = checks.counts(self.total)
        found += checks.same_rows("table counted", expected, counted(self.client))
        if self.query.order == "offset":
            with self.client.topic("in").subscribe("copier") as subscription:
                left = {number: lag for number, lag in subscription.lag().items() if lag}
            found += [f"subscription is behind by {left}"] if left else []
        return found


def numbers(client: txnkv.Client, table: str) -> list[int]:
    """The column n of a table."""
    found: list[int] = client.table(table).scan(["n"]).to_arrow()["n"].to_pylist()
    return found


def counted(client: txnkv.Client, suffix: str = "") -> dict[str, int]:
    """The table of counts."""
    return {row["key"]: row["n"] for row in client.table(f"counted{suffix}").scan()}


# -- copies ----------------------------------------------------------------------------


@pytest.mark.slow
def test_copies_are_exact_while_producer_and_query_are_killed(
    spark_program: Spark,
    client: txnkv.Client,
    tmp_path: Path,
    nothing_is_left: Callable[[], None],
) -> None:
    """3,000 messages; the small one of those below."""
    case = Case(hard=True, victim="both", by_key=False, kind="topic")
    copying = Copying(case, spark_program, client, tmp_path, 3000, 150)
    copying.run({500: "producer", 1500: "query"})
    assert copying.problems() == []
    checks.await_the_killed(client)
    nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_as_in_kafkas_transactions_test(
    spark_program: Spark,
    client: txnkv.Client,
    tmp_path: Path,
    case: Case,
    nothing_is_left: Callable[[], None],
) -> None:
    copying = Copying(case, spark_program, client, tmp_path, MESSAGES, CHUNK)
    copying.run(dict.fromkeys(marks(MESSAGES, KILLS[case.victim]), case.victim))
    assert copying.problems() == []
    checks.await_the_killed(client)
    nothing_is_left()


# -- cycles ----------------------------------------------------------------------------


@pytest.mark.slow
def test_tables_are_those_of_an_undisturbed_run(
    spark_program: Spark,
    client: txnkv.Client,
    tmp_path: Path,
    until: Callable[..., Any],
    nothing_is_left: Callable[[], None],
) -> None:
    """Three queries of one topic, each with its sinks, are killed at random moments."""
    make(client, ("marker", "sidecar"), (2, 3))
    queries = [
        Query(kind, kind, client.path, tmp_path / kind, most=400)
        for kind in ("topic", "table", "each")
    ]
    ways = [way for way, share in SHARES.items() for _ in range(share * CYCLES // 50)]
    random.shuffle(ways)
    arguments = {
        "path": client.path,
        "total": 1_000_000_000,
        "chunk": 200,
        "ahead": 4_000,
        "partitions": 2,
        "follow": "out",
    }
    producer = Producer(tmp_path, arguments)
    try:
        spark_program.start(*queries)
        for way in ways:
            # Whatever was killed before, this one has come to a batch of its own since.
            app = random.choice(queries).app
            before = applied(client, app)
            give_up = time.monotonic() + PATIENCE
            while applied(client, app) == before:
                producer.tend()
                spark_program.tend()
                assert time.monotonic() < give_up, f"{app} stands still after {spark_program}"
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.5))
            spark_program.kill(way, client)
        producer.kill(hard=False)
    finally:
        producer.close()
    assert spark_program.between or "between" not in ways
    spark_program.up()
    spark_program.finish()

    targets(client, "sidecar", 3, "_2")
    spark_program.start(*(query.again("_2") for query in queries))
    spark_program.finish()
    row = client.table("produced").get(0)
    assert row is not None
    assert problems_of_cycles(client, row["n"]) == []
    checks.await_the_killed(client)
    nothing_is_left()


def problems_of_cycles(client: txnkv.Client, total: int) -> list[str]:
    """Return what differs from the undisturbed run, and from what the copies should be."""
    found = []
    for suffix in ("_2", ""):
        for name in ("out", "each"):
            copy = checks.standing(client.topic(name + suffix))
            found += checks.each_once(f"topic {name}{suffix}", total, [m.n for m in copy])
            found += checks.in_order(f"topic {name}{suffix}", copy, by_key=False)
        for name in ("mirror", "copied"):
            found += checks.each_once(
                f"table {name}{suffix}", total, numbers(client, name + suffix)
            )
    undisturbed = counted(client, "_2")
    found += checks.same_rows("table counted_2", checks.counts(total), undisturbed)
    found += checks.same_rows("table counted", undisturbed, counted(client))
    return found
