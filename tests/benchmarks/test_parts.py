"""The parts that benchmarks are made of: rows, chances, charts, checks."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("duckdb", reason="the peers of the benchmarks are not installed")

from benchmarks import rows
from benchmarks.crews import Crew
from benchmarks.harness import MICROSECONDS, MILLISECONDS, compare
from benchmarks.latency import Operation, percentile, race_each
from benchmarks.svg import Series, bars, chart
from benchmarks.tpcc.checks import totals, violations
from benchmarks.tpcc.load import population
from benchmarks.tpcc.schema import Scale
from benchmarks.tpcc.stores import SqliteTpcc
from benchmarks.tpcc.transactions import NewOrder, Payment, plan
from benchmarks.zipfian import ScrambledZipfian, fnv64


def test_rows_are_the_same_in_python_and_arrow() -> None:
    keys = np.array([5, 0, 123_456_789])
    expected = [rows.row(key) for key in keys.tolist()]
    assert [row for some in rows.chunks(keys) for row in some] == expected
    assert [rows.unpack(row[0], rows.pack(row)) for row in expected] == expected


def test_zipfian_follows_its_law() -> None:
    items, count = 1000, 200_000
    taken = ScrambledZipfian(items, seed=1).take(count)
    assert taken.min() >= 0
    assert taken.max() < items
    counts = np.bincount(taken, minlength=items)
    total = sum(1 / rank**0.99 for rank in range(1, items + 1))
    for rank in (0, 1):
        key = int(fnv64(np.array([rank]))[0] % items)
        # Others may be scattered on the same key, so it is asked for at least as often.
        assert counts[key] / count >= 0.95 / ((rank + 1) ** 0.99 * total)
    assert counts.argmax() == fnv64(np.array([0]))[0] % items


def test_fnv_is_that_of_ycsb() -> None:
    """The hash is the one that a loop over the bytes gives."""
    hashed = 0xCBF29CE484222325
    for byte in (123456789).to_bytes(8, "little"):
        hashed = (hashed ^ byte) * 1099511628211 % 2**64
    assert fnv64(np.array([123456789]))[0] == abs(hashed - 2**64 if hashed >> 63 else hashed)


def test_bars_are_svg() -> None:
    root = ElementTree.fromstring(
        bars("t", [("produce", {"a": 2.0, "b & c": 0.25}), ("fetch", {"a": 1.0})])
    )
    rects = [(float(each.get("x") or 0), float(each.get("width") or 0)) for each in root.iter()
             if each.tag.endswith("rect") and each.get("fill") != "white"]  # fmt: skip
    (faster, long), (slower, longer), (_, nothing) = rects
    assert (slower + longer, longer, nothing) == (faster, 2 * long, 0)
    texts = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert {"t", "produce", "fetch", "b & c", "0.25", "1/4", "1x", "4x"} <= set(texts)


def test_chart_is_svg() -> None:
    text = chart(
        "t & c", "x", "us", [Series("a", [(1e6, 3.0), (1e7, 5.0)]), Series("b", [(1e6, 1.0)])]
    )
    root = ElementTree.fromstring(text)
    found = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "t & c" in found
    assert "10 M" in found
    assert len([e for e in root.iter() if e.tag.endswith("circle")]) == 3


def test_times_are_compared_by_how_many_times_as_fast() -> None:
    lines = compare("r", {"us": [100.0], "peer": [80.0]}, ratios={"peer": 0.8}, unit=MICROSECONDS)
    assert lines[1].ratio == pytest.approx(1.25)
    assert (lines[1].goal, lines[1].reached) == ("time <= 1.25x", True)
    assert lines[1].figure(lines[1].rate) == "12,500.0 us"


def test_long_times_are_in_milliseconds() -> None:
    lines = compare("r", {"ms": [4.0, 8.0, 5.0], "peer": [4.0]}, unit=MILLISECONDS)
    assert lines[0].figure(lines[0].rate) == "200 ms"
    assert lines[1].ratio == pytest.approx(1.25)


def test_the_rows_that_do_nothing_are_counted_up(tmp_path: Path) -> None:
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

    from benchmarks.streaming.nothing import NothingStream, advance, save

    batch = pa.record_batch({"n": pa.array([1, 2, 3])})
    counter = tmp_path / "counter"
    advance(counter, 7)
    options = {"batch": save(batch, tmp_path / "batch"), "counter": str(counter), "tasks": "2"}
    reader = NothingStream(options, from_arrow_schema(batch.schema))
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadMaxRows(5)) == {"rows": 5}
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end == {"rows": 7}
    tasks = [pa.Table.from_batches(reader.read(task)) for task in reader.partitions(start, end)]
    assert [task["n"].to_pylist() for task in tasks] == [[1, 2, 3, 1], [1, 2, 3]]
    assert reader.partitions(end, end) == []


def test_each_operation_gets_the_same_arguments() -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}
    operations = [
        Operation(name, found.append, lambda number: [number * 10, number * 10 + 1])
        for name, found in seen.items()
    ]
    lines = race_each("r", operations, rounds=2)
    assert [line.name for line in lines] == ["a", "b"]
    assert seen["a"] == seen["b"] == [0, 1, 10, 11, 20, 21]


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(100)], 0.99) == 99.0


def test_crew_works_in_rounds_and_tells_what_failed() -> None:
    done: list[tuple[int, int]] = []
    lock = threading.Lock()

    @contextmanager
    def handle() -> Iterator[None]:
        yield None

    def work(_: None, thread: int, number: int):  # type: ignore[no-untyped-def]
        def run() -> None:
            if number == 2:
                raise ValueError("the third round fails")
            with lock:
                done.append((number, thread))

        return run

    def three_rounds() -> None:
        with Crew(3, handle, work) as crew:
            crew.round()
            assert sorted(done) == [(0, 0), (0, 1), (0, 2)]
            crew.round()
            assert len(done) == 6
            crew.round()

    with pytest.raises(ValueError, match="third round"):
        three_rounds()


@pytest.fixture
def tpcc(tmp_path: Path) -> Iterator[SqliteTpcc]:
    store = SqliteTpcc(tmp_path)
    for table, data in population(Scale(2, 50, 20, 20)):
        store.load(table, data)
    yield store
    store.close()


def test_tpcc_begins_consistent_and_stays_so(tpcc: SqliteTpcc) -> None:
    assert violations(tpcc) == []
    before = totals(tpcc)
    some = plan(Scale(2, 50, 20, 20), 1, 0, 60)
    assert {type(transaction) for transaction in some} == {NewOrder, Payment}
    for transaction in some:
        tpcc.run(transaction)
    assert violations(tpcc) == []
    assert totals(tpcc)["history"][0] == 30
    assert totals(tpcc)["orders"][0] > before["orders"][0]


@pytest.mark.parametrize(
    ("condition", "damage"),
    [
        ("1, ", "UPDATE district SET d_ytd = d_ytd + 1 WHERE d_w_id = 1 AND d_id = 3"),
        ("2, ", "UPDATE district SET d_next_o_id = d_next_o_id + 1 WHERE d_w_id = 2 AND d_id = 1"),
        ("3, ", "DELETE FROM new_order WHERE no_w_id = 1 AND no_d_id = 2 AND no_o_id = 17"),
        ("4, ", "DELETE FROM order_line WHERE ol_w_id = 1 AND ol_d_id = 2 AND ol_number = 5"),
    ],
)
def test_tpcc_conditions_see_damage(tpcc: SqliteTpcc, condition: str, damage: str) -> None:
    tpcc._db.execute(damage)
    assert any(f"condition {condition}" in text for text in violations(tpcc))


def test_tpcc_new_order_of_an_unknown_item_leaves_nothing(tpcc: SqliteTpcc) -> None:
    before = {name: tpcc.all(name) for name in ("orders", "order_line", "stock", "district")}
    some = plan(Scale(2, 50, 20, 20), 1, 0, 1000)
    unknown = next(
        order
        for order in some
        if isinstance(order, NewOrder) and any(line.item > 50 for line in order.lines)
    )
    tpcc.run(unknown)
    assert all(tpcc.all(name).equals(table) for name, table in before.items())
