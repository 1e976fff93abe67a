"""Numbers of what a process does with a store: counters, gauges and histograms.

    metrics.commits.add()                     one more
    metrics.log_bytes.set(4096)               now so much
    metrics.commit_seconds.observe(0.00025)   one more of this length

Names are attributes of `Metrics`, so that one misspelt is an error where it stands. They are of one
process: whoever wants those of all adds them up, as OpenMetrics' collectors do.

None of the three takes a lock, allocates much or fails, so that the commit path can afford them.
Counting is exact as long as the interpreter switches threads at calls and backward jumps alone,
as CPython's does: there is none between reading a number here and writing it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Self

from txnkv.core import HistogramBase
from txnkv.errors import NotSupportedError

PREFIX: Final = "txnkv_"

SECONDS: Final = tuple(
    float(f"{base}e{power}") for power in range(-6, 2) for base in (1.0, 2.5, 5.0)
)
"""Upper ends of the classes of a length in time: 1 us to 50 s."""

SIZES: Final = tuple(float(1 << power) for power in range(11))
"""Upper ends of the classes of a group's size: 1 to 1,024."""


class Counter:
    """A number that only grows."""

    __slots__ = ("help", "value")
    kind = "counter"

    def __init__(self, help: str) -> None:
        self.help = help
        self.value = 0

    def add(self, n: int = 1) -> None:
        """Count `n` more."""
        self.value += n

    def read(self) -> int:
        return self.value


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("help", "value")
    kind = "gauge"

    def __init__(self, help: str) -> None:
        self.help = help
        self.value = 0.0

    def set(self, value: float) -> None:
        """It is so much now."""
        self.value = value

    def read(self) -> float:
        return self.value


class Histogram(HistogramBase):
    """Counts of observed values, by classes of their size."""

    __slots__ = ("bounds", "help")
    bounds: tuple[float, ...]
    help: str
    kind = "histogram"

    def __new__(cls, help: str, bounds: tuple[float, ...] = SECONDS) -> Self:
        made = super().__new__(cls, bounds)
        made.help, made.bounds = help, bounds
        return made

    def read(self) -> dict[str, Any]:
        """Return a dict: count, sum, p50, p99, and the counts by upper end (the last has none)."""
        counts = self.counts
        ends: list[float | None] = [*self.bounds, None]
        return {
            "count": sum(counts),
            "sum": self.sum,
            "p50": self._at_share(counts, 0.5),
            "p99": self._at_share(counts, 0.99),
            "classes": [[end, n] for end, n in zip(ends, counts, strict=True)],
        }

    def _at_share(self, counts: list[int], share: float) -> float | None:
        """The upper end of the class that holds this share; None when nothing was observed."""
        wanted, seen = share * sum(counts), 0
        for end, n in zip((*self.bounds, float("inf")), counts, strict=True):
            seen += n
            if n and seen >= wanted:
                return min(end, self.bounds[-1])
        return None


class Metrics:
    """All that one process counts about one store."""

    def __init__(self) -> None:
        self.commits = Counter("Transactions committed")
        self.small_commits = Counter("Transactions committed in a row of the commit log")
        self.bulk_commits = Counter("Transactions committed by way of staged row sets")
        self.aborts = Counter("Transactions aborted of which something was stored")
        self.conflicts = Counter("Transactions that another committed before")
        self.locked = Counter("Transactions that met a lock and gave up")
        self.timeouts = Counter("Transactions that ran out of time")
        self.failing_parts = Gauge("Tablets, partitions, transactions and sweeps that fail")
        self.retries = Counter("Further attempts of client.run")
        self.commit_groups = Counter("Groups of small commits that shared one write")
        self.log_written_bytes = Counter("Bytes put into the commit log")
        self.tails = Counter("Looks at what other processes committed")
        self.tailed_commits = Counter("Commits of other processes taken into memory")
        self.flushes = Counter("Flushes of memory into row sets")
        self.flushed_rows = Counter("Row versions that flushes wrote")
        self.compactions = Counter("Compactions")
        self.compacted_rows = Counter("Row versions that compactions wrote")
        self.dropped_versions = Counter("Row versions left out because no snapshot sees them")
        self.collected_row_sets = Counter("Row sets removed after they were replaced")
        self.history_expired = Counter("Snapshots refused because their history is gone")
        self.messages_sent = Counter("Messages flushed, whatever became of their transaction")
        self.messages_acked = Counter("Acknowledgements, whatever became of their transaction")
        self.messages_delivered = Counter("Messages that subscriptions gave to consumers")
        self.messages_redelivered = Counter("Messages among them that were delivered before")
        self.messages_timed_out = Counter("Leases of messages that ran out")
        self.dead_letters = Counter("Messages given up after max_deliveries")
        self.messages_lost_to_retention = Counter("Unacknowledged messages that retention took")
        self.ack_conflicts = Counter("Transactions aborted because another had the message")

        self.log_bytes = Gauge("Bytes in the commit log that no flush has taken")
        self.log_commits = Gauge("Commits in the commit log that no flush has taken")
        self.memory_bytes = Gauge("Bytes of committed rows in memory")
        self.flush_lag_seconds = Gauge("Age of the oldest commit that no flush has taken")

        self.commit_seconds = Histogram("Length of a small commit, as its caller sees it")
        self.group_size = Histogram("Members of a group of small commits", SIZES)
        self.flush_seconds = Histogram("Length of a flush")
        self.compaction_seconds = Histogram("Length of a compaction")

    def snapshot(self) -> MetricsSnapshot:
        """All numbers as they are now."""
        return MetricsSnapshot(self)

    def __iter__(self) -> Iterator[tuple[str, Counter | Gauge | Histogram]]:
        yield from vars(self).items()


class MetricsSnapshot(dict[str, Any]):
    """Numbers by name, as they were: int for counters, float for gauges, dict for histograms.

    Attributes:
        about: kind and help of each.
    """

    def __init__(self, metrics: Metrics) -> None:
        found = list(metrics)
        super().__init__((name, each.read()) for name, each in found)
        self.about = {name: (each.kind, each.help) for name, each in found}

    @classmethod
    def of(cls, numbers: dict[str, Any], about: dict[str, tuple[str, str]]) -> MetricsSnapshot:
        """Numbers of another process, and for each its kind and its help."""
        made = cls.__new__(cls)
        made.update(numbers)
        made.about = about
        return made

    def openmetrics(self) -> str:
        """The same as OpenMetrics text, for a collector to scrape.

        Raises:
            NotSupportedError: the package prometheus_client is not installed.
        """
        try:
            from prometheus_client.core import (
                CounterMetricFamily,
                GaugeMetricFamily,
                HistogramMetricFamily,
            )
            from prometheus_client.openmetrics.exposition import generate_latest
        except ImportError as error:
            raise NotSupportedError(
                "OpenMetrics text needs the package prometheus_client: install it, or read the "
                "numbers from the dict that this is"
            ) from error

        about, numbers = self.about, self

        class _Collector:
            def collect(self) -> Iterator[Any]:
                for name, (kind, help) in about.items():
                    value = numbers[name]
                    if kind == "counter":
                        yield CounterMetricFamily(PREFIX + name, help, value=value)
                    elif kind == "gauge":
                        yield GaugeMetricFamily(PREFIX + name, help, value=value)
                    else:
                        buckets = _cumulative(value["classes"])
                        yield HistogramMetricFamily(
                            PREFIX + name, help, buckets=buckets, sum_value=value["sum"]
                        )

        generate: Any = generate_latest  # has no types
        return str(generate(_Collector()).decode())


def _cumulative(classes: list[list[Any]]) -> list[tuple[str, int]]:
    buckets, total = [], 0
    for end, n in classes:
        total += n
        if end is not None:
            buckets.append((repr(end), total))
    return [*buckets, ("+Inf", total)]
