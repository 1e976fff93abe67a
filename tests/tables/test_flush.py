"""The flush: from memory and commit log into row sets, without a difference to any reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.ids import Timestamp
from txnkv.storage.faults import InjectedFault, arm
from txnkv.tables import table_engine
from txnkv.tables.maintenance import flush, history
from txnkv.tables.tablets import manifest
from txnkv.tables.tablets.manifest import RowSetInfo
from txnkv.tables.tablets.tablet import Tablet


def upsert(client: txnkv.Client, **values: str) -> Timestamp:
    """One small commit: a=... sets the row with the key ord("a")."""
    with client.transaction() as txn:
        for name, value in values.items():
            txn.upsert("t", {"id": ord(name), "v": value})
    return txn.commit()


def delete(client: txnkv.Client, *names: str) -> Timestamp:
    with client.transaction() as txn:
        for name in names:
            txn.delete("t", ord(name))
    return txn.commit()


def rows(client: txnkv.Client, snapshot: Any = None) -> dict[str, str]:
    table = client.table("t")
    found = {chr(row["id"]): row["v"] for row in table.scan(snapshot=snapshot, ordered=True)}
    assert found == {chr(row["id"]): row["v"] for row in table.scan(snapshot=snapshot)}
    for name in "abcdef":
        row = table.get(ord(name), snapshot=snapshot)
        assert (row and row["v"]) == found.get(name)
    return found


def tablet(client: txnkv.Client) -> Tablet:
    engine = internals.tables(client)
    return engine.tablets(engine.get("t"))[0]


def infos(client: txnkv.Client) -> tuple[RowSetInfo, ...]:
    return tablet(client).state(internals.latest(client)).infos


@pytest.fixture
def quiet(by_hand: Callable[[txnkv.Client], None]) -> None:
    """No background rounds."""


@pytest.fixture
def at(client: txnkv.Client, table: txnkv.Table, quiet: None) -> dict[str, Timestamp]:
    """Five commits in memory, by name."""
    return {
        "first": upsert(client, a="1", b="1", c="1"),
        "changed": upsert(client, a="2"),
        "gone": delete(client, "b"),
        "back": upsert(client, b="3"),
        "last": delete(client, "c"),
    }


STATES = {
    "first": {"a": "1", "b": "1", "c": "1"},
    "changed": {"a": "2", "b": "1", "c": "1"},
    "gone": {"a": "2", "c": "1"},
    "back": {"a": "2", "b": "3", "c": "1"},
    "last": {"a": "2", "b": "3"},
}


def check_states(client: txnkv.Client, at: dict[str, Timestamp]) -> None:
    for name, stamp in at.items():
        assert rows(client, stamp) == STATES[name], name
    assert client.table("t").count() == len(STATES["last"])


def test_every_snapshot_reads_the_same_before_and_after(
    client: txnkv.Client, at: dict[str, Timestamp]
) -> None:
    check_states(client, at)
    assert internals.flush(client) == at["last"]
    check_states(client, at)
    (info,) = infos(client)
    assert (info.rows, info.deleted, info.versioned) == (5, 3, True)
    assert (info.min_stamp, info.stamp) == (at["first"], at["back"])
    assert tablet(client).state(at["last"]).memory.n == 0
    assert client.metrics()["flushes"] == 1
    assert client.metrics()["flushed_rows"] == 5


def test_a_part_of_the_commits_can_be_flushed(
    client: txnkv.Client, at: dict[str, Timestamp]
) -> None:
    assert internals.tables(client).flush(at["gone"]) == at["gone"]
    check_states(client, at)
    assert tablet(client).state(at["last"]).memory.n == 2
    assert internals.tables(client).flush(at["first"]) == at["gone"]  # was flushed already
    internals.flush(client)
    check_states(client, at)


def test_rows_on_disk_die_with_what_replaces_them(
    client: txnkv.Client, at: dict[str, Timestamp]
) -> None:
    engine = internals.tables(client)
    engine.flush()
    more = upsert(client, a="9", d="9")
    last = delete(client, "b")
    engine.flush()
    assert rows(client) == {"a": "9", "d": "9"}
    assert rows(client, more) == {"a": "9", "b": "3", "d": "9"}
    check_states_before(client, at)
    old, new = infos(client)
    assert (old.deleted, old.max_delete, old.delta_seq) == (5, last, 1)
    assert (new.uniform, new.rows, new.deleted) == (True, 2, 0)


def test_a_flush_of_deletes_alone_writes_no_row_set(
    client: txnkv.Client, at: dict[str, Timestamp]
) -> None:
    engine = internals.tables(client)
    engine.flush()
    delete(client, "a", "b")
    engine.flush()
    assert rows(client) == {}
    assert len(infos(client)) == 1
    assert client.table("t").count() == 0


def test_what_nobody_sees_is_left_out(connect: Callable[..., txnkv.Client], quiet: None) -> None:
    client = connect(history=0.0)
    client.create_table("t", txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"]))
    upsert(client, a="1", b="1")
    kept = client.snapshot()
    upsert(client, a="2")
    upsert(client, a="3")
    internals.flush(client)
    (info,) = infos(client)
    assert info.rows == 4, "a pinned snapshot keeps all that was alive since"
    assert rows(client, kept) == {"a": "1", "b": "1"}
    kept.close()
    upsert(client, c="1")
    upsert(client, c="2")
    delete(client, "b")
    internals.flush(client)
    assert [info.rows for info in infos(client)] == [4, 1]
    assert client.metrics()["dropped_versions"] == 1
    assert rows(client) == {"a": "3", "c": "2"}


def test_a_bulk_commit_flushes_what_its_snapshot_has(
    client: txnkv.Client, at: dict[str, Timestamp], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, client.transaction() as txn:
        patch.setattr("txnkv.tables.write.write_buffer.MAX_ROWS", -1)
        patch.setattr("txnkv.tables.write.write_buffer.FEW_ROWS", -1)
        txn.write("t", pa.table({"id": [97, 98, 99], "v": ["x", "y", "z"]}), op="upsert")
    assert len(infos(client)) == 2
    assert rows(client) == {"a": "x", "b": "y", "c": "z"}
    check_states_before(client, at)
    upsert(client, a="after")
    assert rows(client)["a"] == "after"
    internals.flush(client)
    assert rows(client) == {"a": "after", "b": "y", "c": "z"}
    check_states_before(client, at)


def check_states_before(client: txnkv.Client, at: dict[str, Timestamp]) -> None:
    for name, stamp in at.items():
        assert rows(client, stamp) == STATES[name], name


def test_many_row_sets_when_there_are_many_rows(
    client: txnkv.Client, at: dict[str, Timestamp], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush, "ROW_SET_ROWS", 2)
    internals.flush(client)
    assert [info.rows for info in infos(client)] == [2, 2, 1]
    check_states(client, at)


@pytest.mark.parametrize(
    "point", ["flush.claimed", "flush.blocks", "flush.written", "flush.deleted"]
)
def test_a_flush_that_failed_is_done_again(
    client: txnkv.Client, at: dict[str, Timestamp], point: str
) -> None:
    engine = internals.tables(client)
    engine.flush(at["gone"])
    arm(point, "error")
    with pytest.raises(InjectedFault):
        engine.flush()
    check_states(client, at)
    arm(point, lambda: None)
    engine.flush()
    check_states(client, at)
    with engine.store.status.read() as cur:
        assert manifest.unfinished(cur, flush.WHO) == {}


def test_deletes_of_a_flush_that_died_are_counted(
    client: txnkv.Client, at: dict[str, Timestamp]
) -> None:
    """The deltas were there, the count was not: a second flush that finds the rows dead already
    must note them, or the table's count is wrong for ever.
    """
    engine = internals.tables(client)
    engine.flush()
    delete(client, "a")
    arm("flush.deleted", "error")
    with pytest.raises(InjectedFault):
        engine.flush()
    arm("flush.deleted", lambda: None)
    engine.flush()
    (info,) = infos(client)
    assert info.deleted == 4
    assert client.table("t").count() == 1


def test_the_leader_flushes_what_is_long_or_old(
    client: txnkv.Client,
    at: dict[str, Timestamp],
    by_hand: Callable[[txnkv.Client], None],
    now: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_hand(client)
    assert infos(client) == ()
    now.forward(61)
    by_hand(client)
    assert len(infos(client)) == 1
    upsert(client, d="1")
    by_hand(client)
    assert len(infos(client)) == 1
    monkeypatch.setattr(table_engine, "FLUSH_COMMITS", 0)
    by_hand(client)
    assert len(infos(client)) == 2
    assert rows(client) == {"a": "2", "b": "3", "d": "1"}


def test_the_log_is_trimmed_a_minute_after_the_flush(
    client: txnkv.Client,
    at: dict[str, Timestamp],
    by_hand: Callable[[txnkv.Client], None],
    now: Any,
) -> None:
    internals.flush(client)
    by_hand(client)
    assert client.stats()["log_commits"] == 0, "none is in the log alone"
    with internals.status(client).read() as cur:
        assert cur.execute("SELECT count(*) FROM commit_log").fetchone() == (5,)
    now.forward(61)
    by_hand(client)
    with internals.status(client).read() as cur:
        assert cur.execute("SELECT count(*) FROM commit_log").fetchone() == (0,)
    check_states(client, at)


def test_the_log_is_trimmed_while_timestamps_are_ahead_of_the_clock(
    client: txnkv.Client, table: txnkv.Table, quiet: None, now: Any
) -> None:
    """After one short jump it kept every commit until the clock had caught up, for days."""
    tables = internals.tables(client)
    now.ahead = 86_400
    upsert(client, a="1")
    now.ahead = 0
    trimmed = []
    for step in range(6):
        upsert(client, a=str(step))
        internals.flush(client)
        trimmed.append(history.trim(tables))
        now.forward(35)
    assert trimmed == [0, 0, 2, 0, 2, 0], "what was flushed more than a minute before"
    assert rows(client) == {"a": "5"}
    assert client.check().ok


def test_what_is_not_flushed_stays_in_the_log_however_old_it_is(
    client: txnkv.Client, at: dict[str, Timestamp], now: Any
) -> None:
    now.forward(61)
    assert history.trim(internals.tables(client)) == 0
    with internals.status(client).read() as cur:
        assert cur.execute("SELECT count(*) FROM commit_log").fetchone() == (len(at),)


def test_another_process_adopts_a_flush(
    client: txnkv.Client, at: dict[str, Timestamp], process: Callable[..., Any]
) -> None:
    other = process(
        """
        table = client.table("t")
        while wait():
            say({chr(row["id"]): row["v"] for row in table.scan()})
        """
    )
    other.tell("look")
    assert other.hear() == STATES["last"]
    internals.flush(client)
    other.tell("look")
    assert other.hear() == STATES["last"]
    upsert(client, a="7")
    other.tell("look")
    assert other.hear() == STATES["last"] | {"a": "7"}


def test_flushed_rows_are_there_after_reopening(
    connect: Callable[..., txnkv.Client], client: txnkv.Client, at: dict[str, Timestamp]
) -> None:
    internals.tables(client).flush(at["gone"])
    client.close()
    check_states(connect(), at)


def test_what_is_left_of_a_dropped_table_does_not_stay_in_the_log(
    client: txnkv.Client, at: dict[str, Timestamp], elsewhere: Callable[..., Any]
) -> None:
    """Another process drops the table and removes its files; memory here still has its rows."""
    elsewhere(
        """
        client.drop_table("t")
        client.create_table("other", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
        with client.transaction() as txn:
            txn.insert("other", {"id": 1})
        """
    )
    engine = internals.tables(client)
    latest = internals.latest(client)
    assert engine.flush() == latest > at["last"]
    assert client.stats()["log_commits"] == 0
    assert client.table("other").count() == 1
    assert engine.flush() == latest


def test_a_flush_replaces_rows_of_a_bulk_commit_whose_driver_is_gone(
    client: txnkv.Client,
    at: dict[str, Timestamp],
    by_hand: Callable[[txnkv.Client], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bulk commit is decided and not finalized when a newer version of one of its rows is
    flushed. The flush finalizes it first; its deletes must be noted with the row set that this
    made, or the row lives on beside its newer version.
    """
    with monkeypatch.context() as patch:
        patch.setattr("txnkv.tables.write.write_buffer.MAX_ROWS", -1)
        patch.setattr("txnkv.tables.write.write_buffer.FEW_ROWS", -1)
        txn = client.new_transaction()
        txn.write("t", pa.table({"id": [97, 98, 99], "v": ["x", "y", "z"]}), op="upsert")
        arm("commit.decided", "error")
        with pytest.raises(InjectedFault):
            txn.commit()
        arm("commit.decided", lambda: None)
    upsert(client, a="newer")
    assert rows(client) == {"a": "newer", "b": "y", "c": "z"}
    internals.flush(client)
    assert rows(client) == {"a": "newer", "b": "y", "c": "z"}
    by_hand(client)
    assert rows(client) == {"a": "newer", "b": "y", "c": "z"}
    assert client.table("t").count() == 3
    check_states_before(client, at)
