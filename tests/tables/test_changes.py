"""Changes by others since a snapshot, wherever they lie: in memory, in row sets, in their
deletes, in commits that are being finalized.

Keys 0 to 99 are there, in several row sets. One transaction changes some; `changed` must answer
the first of them, from any snapshot before it, and nothing from those after, whatever is flushed,
finalized or compacted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.storage.faults import arm, disarm
from txnkv.tables.commit import conflicts
from txnkv.tables.read_set import ReadSet
from txnkv.tables.tablets.tablet import Tablet

pytestmark = pytest.mark.usefixtures("small_blocks")

WHERE = ("memory", "flushed", "bulk", "being finalized", "compacted")


@pytest.fixture
def tablet(client: txnkv.Client, table: txnkv.Table, by_hand: Any) -> Tablet:
    for first in range(3):
        _write(client, table, "insert", range(first, 100, 3), bulk=first < 2)
    internals.flush(client)
    (found,) = internals.tables(client).tablets(client.table_info(table))
    return found


@pytest.fixture(params=WHERE)
def put(
    request: Any, client: txnkv.Client, table: txnkv.Table
) -> Iterator[Callable[[str, Any], None]]:
    """Commits changes, and leaves them where the parameter says."""

    def run(op: str, ids: Any) -> None:
        if request.param == "being finalized":
            arm("commit.decided", "error")
            with pytest.raises(OSError, match="injected"):
                _write(client, table, op, ids, bulk=True)
            disarm()
            return
        _write(client, table, op, ids, bulk=request.param in ("bulk", "compacted"))
        if request.param == "flushed":
            internals.flush(client)
        if request.param == "compacted":
            client.compact()

    yield run
    disarm()


def _write(client: txnkv.Client, table: txnkv.Table, op: str, ids: Any, *, bulk: bool) -> None:
    txn = client.new_transaction()
    if bulk:
        txn.serialize()
    data = pa.table({"id": pa.array(ids, pa.int64()), "v": [f"{op} {i}" for i in ids]})
    txn.write(table, data, op)
    txn.commit()


def _keys(tablet: Tablet, ids: Any) -> core.Keys:
    return tablet.codec.encode([pa.array(ids, pa.int64())])


def _key(tablet: Tablet, id: int | None) -> bytes | None:
    return None if id is None else _keys(tablet, [id]).key(0)


@pytest.mark.parametrize(
    ("op", "ids"),
    [
        ("insert", [100, 150, 207]),
        ("update", [3, 40, 41, 99]),
        ("upsert", [17, 101]),
        ("delete", [5, 50, 51, 52]),
    ],
)
def test_changes_are_found(
    client: txnkv.Client, tablet: Tablet, put: Any, op: str, ids: list[int]
) -> None:
    before = internals.latest(client)
    pin = client.snapshot()
    put(op, ids)
    after = internals.latest(client)

    def changed(asked: Any, since: int = before) -> bytes | None:
        return conflicts.changed(tablet, _keys(tablet, asked), since, after)

    assert changed(range(300)) == _key(tablet, ids[0])
    assert changed(range(ids[0] + 1, 300)) == _key(tablet, ids[1] if len(ids) > 1 else None)
    for id in ids:
        assert changed([id]) == _key(tablet, id)
    assert changed([id for id in range(300) if id not in ids]) is None
    assert changed(range(300), after) is None
    assert changed([]) is None

    def changed_of(asked: Any, since: int = before) -> bytes | None:
        own = core.MemRowSet(tablet.codec.width)
        for id in asked:
            own.put(_keys(tablet, [id]).key(0), 1, None)
        return conflicts.changed_of(tablet, own, Timestamp(since))

    assert changed_of(range(300)) == _key(tablet, ids[0])
    assert changed_of([id for id in range(300) if id not in ids]) is None
    assert changed_of(range(300), after) is None
    assert changed_of([]) is None
    pin.close()


@pytest.mark.parametrize("op", ["insert", "update", "delete"])
def test_ranges_of_changes(client: txnkv.Client, tablet: Tablet, put: Any, op: str) -> None:
    ids = [110, 120] if op == "insert" else [33, 34, 60]
    before = internals.latest(client)
    pin = client.snapshot()
    put(op, ids)
    after = internals.latest(client)

    def changed(low: int | None, high: int | None, since: int = before) -> bytes | None:
        bounds = _key(tablet, low), _key(tablet, high)
        return conflicts.changed_range(tablet, *bounds, since, after)

    assert changed(None, None) == changed(None, ids[0] + 1) == _key(tablet, ids[0])
    assert changed(ids[0] + 1, None) == _key(tablet, ids[1])
    assert changed(ids[0], ids[0] + 1) == _key(tablet, ids[0])
    assert changed(ids[-1], None) == _key(tablet, ids[-1])
    assert changed(None, ids[0]) is None
    assert changed(ids[-1] + 1, None) is None
    assert changed(ids[0], ids[0]) is None
    assert changed(None, None, after) is None
    pin.close()


def test_the_first_of_several_places(
    client: txnkv.Client, table: txnkv.Table, tablet: Tablet
) -> None:
    """The lowest of the keys changed in row sets, deletes and memory is answered."""
    before = internals.latest(client)
    for op, ids, bulk in [("update", [70], True), ("delete", [60], True), ("update", [80], False)]:
        _write(client, table, op, ids, bulk=bulk)
    after = internals.latest(client)
    assert conflicts.changed(tablet, _keys(tablet, range(100)), before, after) == _key(tablet, 60)
    assert conflicts.changed_range(tablet, None, None, before, after) == _key(tablet, 60)
    _write(client, table, "update", [50], bulk=False)
    after = internals.latest(client)
    assert conflicts.changed(tablet, _keys(tablet, range(100)), before, after) == _key(tablet, 50)
    assert conflicts.changed_range(tablet, None, None, before, after) == _key(tablet, 50)


def test_reads_are_validated(client: txnkv.Client, tablet: Tablet, put: Any) -> None:
    engine = internals.tables(client)
    before = internals.latest(client)
    pin = client.snapshot()
    put("update", [30, 40])
    after = internals.latest(client)

    def validate(*, key: int | None = None, reach: tuple[int, int] | None = None) -> None:
        reads = ReadSet()
        if key is not None:
            reads.add_keys(tablet.id, _keys(tablet, [5, key]))
        if reach is not None:
            reads.add_range(tablet.id, _key(tablet, reach[0]), _key(tablet, reach[1]))
        conflicts.validate_reads(engine, reads, before, after)

    validate(key=31, reach=(31, 40))
    validate()
    with pytest.raises(txnkv.TransactionConflictError, match="'t', key 30: another transaction"):
        validate(key=30)
    with pytest.raises(txnkv.TransactionConflictError, match="key 40"):
        validate(key=7, reach=(31, 41))
    pin.close()


def test_the_changed_keys_of_a_row_set(
    client: txnkv.Client, table: txnkv.Table, tablet: Tablet
) -> None:
    """All of those inserted later, and of older row sets those deleted later."""
    before = internals.latest(client)
    _write(client, table, "delete", [0, 30, 33, 90], bulk=True)
    _write(client, table, "update", [1, 4, 31], bulk=True)
    state = tablet.state(internals.latest(client))
    seen: set[int] = set()
    rows = 0
    for info in conflicts.changed_row_sets(state, before):
        rows += conflicts.changed_rows(info, before)
        for keys in conflicts.changes_in(tablet, info, info.min_key, info.max_key, before):
            seen |= set(tablet.codec.decode(keys, 0).to_pylist())
    assert seen == {0, 30, 33, 90, 1, 4, 31}
    assert rows == 4 + 3 + 3
    (whole,) = [info for info in state.infos if info.min_key == _key(tablet, 0)]
    keys = conflicts.changes_in(tablet, whole, _keys(tablet, [1]).key(0), whole.max_key, before)
    found = [key for some in keys for key in tablet.codec.decode(some, 0).to_pylist()]
    assert found == [30, 33]
