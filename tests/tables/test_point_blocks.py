"""Reads of single rows remember where blocks lie: they must notice when that is true no more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.maintenance import Maintenance
from txnkv.core import layers

ROWS = 20_000
SCHEMA = txnkv.Schema(
    {"k": "int64", "a": "int64", "s": "string", "f": "bool", "n": "float64?"}, primary_key=["k"]
)


def data(version: int, keys: range) -> pa.Table:
    return pa.table(
        {
            "k": pa.array(keys, pa.int64()),
            "a": pa.array([k * 7 + version for k in keys], pa.int64()),
            "s": [f"{version}:{k}" for k in keys],
            "f": [k % 2 == 0 for k in keys],
            "n": pa.array([None if k % 10 == 0 else k / 4 for k in keys], pa.float64()),
        }
    )


def row(version: int, k: int) -> dict[str, Any]:
    n = None if k % 10 == 0 else k / 4
    return {"k": k, "a": k * 7 + version, "s": f"{version}:{k}", "f": k % 2 == 0, "n": n}


@pytest.fixture
def table(client: txnkv.Client, monkeypatch: pytest.MonkeyPatch) -> txnkv.Table:
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    return client.create_table("t", SCHEMA)


def put(client: txnkv.Client, version: int, keys: range, op: str = "upsert") -> None:
    with client.transaction(timeout=None) as txn:
        txn.write("t", data(version, keys), op)
    internals.flush(client)


def at_hand(client: txnkv.Client, table: txnkv.Table) -> Iterator[Any]:
    """The blocks that are remembered, and whose addresses are good beyond one read."""
    (tablet,) = internals.tables(client).tablets(table.info)
    for info in tablet.state(client.snapshot().timestamp).infos:
        yield from tablet.row_set(info).layer[2].blocks.values()


def look(table: txnkv.Table, versions: dict[int, int | None]) -> None:
    """Some keys one by one, and at once."""
    asked = random.Random(1).sample(sorted(versions), 60)
    wanted = [None if versions[k] is None else row(versions[k] or 0, k) for k in asked]
    assert [table.get(k) for k in asked] == wanted
    nothing = dict.fromkeys(SCHEMA.names)
    assert table.get_many(asked).to_pylist() == [each or nothing for each in wanted]


def test_they_are_at_hand(client: txnkv.Client, table: txnkv.Table) -> None:
    put(client, 1, range(ROWS))
    look(table, dict.fromkeys(range(ROWS), 1))
    assert list(at_hand(client, table))
    look(table, dict.fromkeys(range(ROWS), 1))
    assert table.get(-1) is table.get(ROWS) is None


def test_a_block_whose_reader_was_interrupted(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler's exception comes when the block is kept here, and the core does not know of it."""
    put(client, 1, range(ROWS))
    core, interrupts = layers.lib, [KeyboardInterrupt]

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            if name == "layers_set_block" and interrupts:
                raise interrupts.pop()
            return getattr(core, name)

    monkeypatch.setattr(layers, "lib", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        table.get_many([3])
    assert not interrupts
    assert table.get(3) == row(1, 3)
    look(table, dict.fromkeys(range(ROWS), 1))


def test_row_sets_that_were_replaced_and_whose_pages_are_used_again(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Any, connect: Any
) -> None:
    """All in one process, then by another while this one remembers."""
    put(client, 1, range(ROWS))
    versions: dict[int, int | None] = dict.fromkeys(range(ROWS), 1)
    for version in range(2, 5):
        look(table, versions)
        changed = range(version * 100, ROWS, version)
        put(client, version, changed)
        versions |= dict.fromkeys(changed, version)
        look(table, versions)
        internals.compact(client)
        look(table, versions)
    elsewhere(
        """
        import pyarrow as pa
        keys = range(0, 20_000, 2)
        with client.transaction(timeout=None) as txn:
            txn.write("t", pa.table({"k": pa.array(keys, pa.int64())}), "delete")
        client.instance.engine.flush()
        client.instance.engine.compactor.compact_all()
        with client.transaction(timeout=None) as txn:
            txn.write("t", pa.table({"k": pa.array(range(20_000, 40_000), pa.int64()),
                "a": [0] * 20_000, "s": ["x" * 20] * 20_000, "f": [True] * 20_000}))
        client.instance.engine.compactor.compact_all()
        say()
        """
    )
    versions |= dict.fromkeys(range(0, ROWS, 2))
    look(table, versions)
    assert table.get(30_000) == {"k": 30_000, "a": 0, "s": "x" * 20, "f": True, "n": None}


def test_a_map_that_has_moved(client: txnkv.Client, table: txnkv.Table) -> None:
    """Grown, or closed and opened again: at another address, or at the same."""
    put(client, 1, range(ROWS))
    look(table, dict.fromkeys(range(ROWS), 1))
    (tablet,) = internals.tables(client).tablets(table.info)
    before = {id(block) for block in at_hand(client, table)}
    assert tablet.environment().close()
    look(table, dict.fromkeys(range(ROWS), 1))
    assert not before & {id(block) for block in at_hand(client, table)}
    environment = tablet.environment()
    environment._move_map(lambda open_: open_.grow(open_.map_size))
    look(table, dict.fromkeys(range(ROWS), 1))


@pytest.mark.usefixtures("by_hand")
def test_small_blocks_are_copied(client: txnkv.Client, table: txnkv.Table) -> None:
    """They share pages, which LMDB does rewrite."""
    (tablet,) = internals.tables(client).tablets(table.info)
    put(client, 1, range(60))
    for version in range(2, 12):
        look(table, dict.fromkeys(range(60), version - 1))
        known = list(at_hand(client, table))
        tablet.environment().write(lambda txn: txn.put(b"moved", b"x", db=tablet.fence_db))
        look(table, dict.fromkeys(range(60), version - 1))
        assert known == list(at_hand(client, table))
        put(client, version, range(60))


def test_a_column_that_a_block_does_not_have(client: txnkv.Client, table: txnkv.Table) -> None:
    """The case after a column was added: reads give its default, or null."""
    put(client, 1, range(ROWS))
    (tablet,) = internals.tables(client).tablets(table.info)
    ids = tablet.schema.ids
    ids["a"], ids["n"] = 77, 78
    tablet.fills = tablet.layout.encode_one((5, None, None, None))
    wanted = {**row(1, 3), "a": 5, "n": None}
    assert table.get(3) == wanted
    assert table.get(3) == wanted
    assert table.get_many([3]).to_pylist() == [wanted]


def test_a_commit_leaves_the_layers_of_other_row_sets(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """With partition locks each transaction has a row set; all were made anew for the next get."""

    def commit(k: int) -> dict[int, Any]:
        with client.transaction(locking="partition") as txn:
            txn.insert(table, row(0, k))
        assert table.get(k) == row(0, k)
        (tablet,) = internals.tables(client).tablets(table.info)
        infos = tablet.state(client.snapshot().timestamp).infos
        return {info.id: tablet.row_set(info).layer for info in infos}

    before = [commit(k) for k in range(4)][-1]
    after = commit(4)
    assert len(before) == 4
    assert [id for id in before if after[id] is not before[id]] == []


@pytest.mark.parametrize("kinds", [("int64", "int64"), ("int64", "uint32"), ("int32", "int64")])
@pytest.mark.parametrize("small", [True, False])
def test_keys_of_two_numbers_over_several_frames(
    client: txnkv.Client, kinds: tuple[str, str], small: bool
) -> None:
    """Within a block the second number is in order only beside rows of one first number."""
    chance = random.Random(7)
    least, most = (
        (0, 1000) if small else {"int64": (-(2**63), 2**63), "uint32": (0, 2**32)}[kinds[1]]
    )
    schema = txnkv.Schema(dict(zip("ab", kinds, strict=True)) | {"v": "int64"}, ["a", "b"])
    table = client.create_table("two", schema)
    keys = sorted({(a, chance.randrange(least, most)) for a in range(8) for _ in range(900)})
    wanted = {key: number for number, key in enumerate(keys)}
    rows = {"a": [a for a, _ in keys], "b": [b for _, b in keys], "v": [*wanted.values()]}
    with client.transaction() as txn:
        txn.write(table, pa.table(rows))
    internals.flush(client)
    for key in keys:
        found = table.get(key)
        assert found is not None, key
        assert found["v"] == wanted[key]
    for a, b in [
        *chance.sample(keys, 100),
        *((n, chance.randrange(least, most)) for n in range(-1, 9)),
    ]:
        after = [key for key in keys if key[0] == a and key[1] >= b][:2]
        scan = table.scan(where=[("a", "=", a), ("b", ">=", b)], ordered=True, limit=2)
        assert [(row["a"], row["b"]) for row in scan] == after
        assert (table.get((a, b)) is not None) == ((a, b) in wanted)
