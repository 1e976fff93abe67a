"""Jobs that write into a table with indexes, and reads that go by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv
import txnkv.spark

pytestmark = pytest.mark.spark


@pytest.fixture
def table(client: txnkv.Client, where: dict[str, str]) -> txnkv.Table:
    """Table t with a unique index by v."""
    found = client.table("t")
    client.create_index(found, "v", unique=True)
    return found


def ids_of(table: txnkv.Table, *values: str) -> list[list[int]]:
    return [[row["id"] for row in table.get_by("v", value)] for value in values]


@pytest.mark.slow
def test_jobs_of_every_kind(
    client: txnkv.Client,
    table: txnkv.Table,
    rows: Callable[..., Any],
    save: Callable[..., None],
    load: Callable[..., Any],
    where: dict[str, str],
    nothing_is_left: Callable[[], None],
) -> None:
    save(rows(1, 100))
    assert ids_of(table, "v7", "v100", "v101") == [[7], [100], []]
    moved = rows(1, 50).selectExpr("concat('w', id) AS v", "id")
    save(moved, operation="upsert")
    assert ids_of(table, "v7", "w7", "v51") == [[], [7], [51]]
    found = load(pushFilters="true").where("v = 'w7'").collect()
    assert [row.id for row in found] == [7]
    # What was there goes first, so that its values are free.
    swapped = rows(1, 100).selectExpr("concat('v', 101 - id) AS v", "id")
    swapped.write.format("txnkv").options(**where).mode("overwrite").save()
    assert ids_of(table, "v1", "v100", "w7") == [[100], [1], []]
    nothing_is_left()


def test_a_value_that_two_tasks_write(
    client: txnkv.Client,
    table: txnkv.Table,
    rows: Callable[..., Any],
    save: Callable[..., None],
    ids: Callable[..., list[int]],
) -> None:
    with client.transaction(timeout=None) as txn:
        doubled = rows(1, 100).selectExpr("concat('v', id % 50) AS v", "id")
        save(doubled, **txnkv.spark.options(txn, "t"))
        with pytest.raises(txnkv.RowErrors, match=r"t \(index by v\).*two workers") as caught:
            txn.commit()
        assert caught.value.count == 50
        txn.rollback()
    assert ids() == []


def test_a_value_that_is_there(
    table: txnkv.Table, rows: Callable[..., Any], save: Callable[..., None], ids: Any
) -> None:
    table.insert({"id": 1000, "v": "v7"})
    with pytest.raises(Exception, match="another row has v = 'v7'"):
        save(rows(1, 100))
    assert ids() == [1000]
