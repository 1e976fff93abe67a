"""Running streaming queries, and what Spark says their triggers took."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.harness import ROWS, Line, compare


@dataclass(frozen=True)
class Batch:
    """A micro batch that a query has done.

    Attributes:
        rows: that its sources gave.
        seconds: from asking the sources for offsets to the end of the commit.
    """

    number: int
    rows: int
    seconds: float


@dataclass
class Streamer:
    """Somebody in a race of queries.

    Attributes:
        run: starts a query of its own, waits for its end, and answers what it did.
        prepare: called before each run.
        check: called after each run, with the rows of it.
    """

    name: str
    run: Callable[[], list[Batch]]
    prepare: Callable[[], None] = lambda: None
    check: Callable[[int], None] = lambda rows: None


def drain(writer: DataStreamWriter, checkpoint: Path) -> list[Batch]:
    """Process all that is there, with a new checkpoint, which goes with the query.

    Raises:
        StreamingQueryException: the query failed.
    """
    shutil.rmtree(checkpoint, ignore_errors=True)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
        return batches(query)
    finally:
        query.stop()
        shutil.rmtree(checkpoint, ignore_errors=True)


def batches(query: Any) -> list[Batch]:
    """The latest micro batches of a query, without triggers that had nothing to do."""
    return [
        Batch(
            progress["batchId"],
            progress["numInputRows"],
            progress["durationMs"]["triggerExecution"] / 1000,
        )
        for progress in map(_as_dict, query.recentProgress)
        if "addBatch" in progress["durationMs"]
    ]


def _as_dict(progress: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(progress.json)
    return found


def race_queries(
    title: str,
    streamers: list[Streamer],
    rows: int,
    *,
    rounds: int,
    warm: bool,
    ratios: dict[str, float] | None = None,
) -> list[Line]:
    """Run all in turn, ours first, and compare rows by the time of their triggers.

    Args:
        title: name of the race.
        streamers: the contestants.
        rows: that each query is to have done.
        rounds: counted rounds.
        warm: whether a round that is not counted goes before.
        ratios: for a peer's name, by how much ours should be faster.

    Raises:
        RuntimeError: a query did not do all rows.
    """
    rates: dict[str, list[float]] = {one.name: [] for one in streamers}
    for number in range(rounds + warm):
        for one in streamers:
            one.prepare()
            gc.collect()
            done = one.run()
            found = sum(batch.rows for batch in done)
            if found != rows:
                raise RuntimeError(f"{one.name} did {found} rows, not {rows}: {done}")
            one.check(rows)
            if number >= warm:
                rates[one.name].append(rows / sum(batch.seconds for batch in done))
    return compare(title, rates, ratios=ratios, unit=ROWS)
