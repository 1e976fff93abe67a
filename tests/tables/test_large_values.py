"""Values of many MiB: flushes, compactions, scans and diffs hold some bytes of them at a time."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.tables.read import scan
from txnkv.tables.tablets import merging
from txnkv.tables.tablets.row_set_format import BLOCK_BYTES, rows_per_block

SIZE = 100_000


def table_of(client: txnkv.Client, rounds: int, rows: int, size: int) -> Any:
    """A table of `rows` row sets in each of some rounds, each with a value of one byte repeated."""
    schema = txnkv.Schema({"id": "int64", "v": "binary"}, primary_key=["id"])
    table = client.create_table("large", schema)
    for again in range(rounds):
        for id in range(again, rows, again + 1):
            batch = pa.table({"id": [id, id + 1000], "v": [bytes([id % 250 + again]) * size, b"s"]})
            with client.transaction() as txn:
                txn.write(table, batch, op="upsert")
    return table


def contents(batches: Any, size: int) -> dict[int, int]:
    """First byte of each value, by key; each is checked to be whole."""
    found = {}
    for batch in batches:
        for id, value in zip(batch["id"].to_pylist(), batch["v"], strict=True):
            whole = value.as_buffer()
            assert whole.size == (size if id < 1000 else 1)
            found[id] = whole[0]
    return found


def test_a_block_has_one_row_if_that_is_large() -> None:
    assert rows_per_block([4 * BLOCK_BYTES]) == 1
    assert rows_per_block([BLOCK_BYTES / 2, 8]) == 2


def test_little_is_in_memory_at_a_time(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "LOADED_BYTES", 4 * SIZE)
    monkeypatch.setattr(scan, "BATCH_BYTES", 4 * SIZE)
    table = table_of(client, 2, 20, SIZE)
    expected = {id: id % 250 + id % 2 * (id > 0) for id in range(20)}
    expected |= {1000 + id: ord("s") for id in range(20)}
    for _ in range(2):
        batches = list(table.scan(ordered=True).to_batches())
        assert contents(batches, SIZE) == expected
        assert [id for batch in batches for id in batch["id"].to_pylist()] == sorted(expected)
        assert max(batch.nbytes for batch in batches) <= max(6 * SIZE, BLOCK_BYTES)
        sizes: list[int] = []
        real = merging.RowPart.concat

        def concat(parts: Any, sizes: list[int] = sizes, real: Any = real) -> Any:
            sizes.append(sum(array.nbytes for part in parts for array in part.columns.values()))
            return real(parts)

        monkeypatch.setattr(merging.RowPart, "concat", staticmethod(concat))
        client.compact()
        monkeypatch.setattr(merging.RowPart, "concat", staticmethod(real))
        assert not sizes or max(sizes) <= BLOCK_BYTES + 30 * SIZE  # a row of each of 30 row sets


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 66])
def test_values_of_34_mib(client: txnkv.Client, rows: int) -> None:
    """64 of them pass the 2 GiB of an Arrow array: as one block, compaction raised."""
    size = 34 << 20
    table = table_of(client, 1, rows, size)
    for _ in range(2):  # the second time one row set, and a row in memory
        found: dict[int, int] = {}
        for batch in table.scan(ordered=True).to_batches():
            assert batch.nbytes <= 2 * size
            found |= contents([batch], size)
        expected = {id: id % 250 for id in range(rows)}
        assert found == expected | {1000 + id: ord("s") for id in range(rows)}
        assert sum(batch.num_rows for batch in table.scan().to_batches()) == 2 * rows
        client.compact()
        with client.transaction() as txn:
            txn.upsert(table, {"id": 0, "v": bytes(size)})
    got = table.get(rows - 1)
    assert got is not None
    assert len(got["v"]) == size
