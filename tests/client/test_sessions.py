"""Sessions: flush modes, rows at the call, errors that are told once and never lost."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import txnkv
from txnkv.storage.faults import arm, disarm

MODES = ["manual", "auto_background", "auto_sync"]


# -- flush modes -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_rows_arrive_in_every_mode(make: Any, table: txnkv.Table, mode: str) -> None:
    session, end = make(mode)
    for id in range(20):
        session.insert(table, (id, str(id)))
    end()
    assert sorted(row["id"] for row in table.scan()) == list(range(20))
    assert table.get(7) == {"id": 7, "v": "7"}


def test_flush_modes_are_checked(client: txnkv.Client) -> None:
    """test_session_flush_modes."""
    with pytest.raises(ValueError, match="flush_mode is one of manual, auto_background, auto_sync"):
        client.new_session("sometimes")
    with pytest.raises(ValueError, match="flush_mode"):
        client.new_transaction().new_session("sometimes")


def test_manual_waits_for_flush(client: txnkv.Client, table: txnkv.Table) -> None:
    session = client.new_session()
    session.insert(table, (1, None))
    assert session.has_pending
    assert table.count() == 0
    assert session.flush() == txnkv.WriteResult(inserted=1)
    assert not session.has_pending
    assert session.flush() == txnkv.WriteResult()
    assert table.count() == 1


def test_auto_sync_writes_at_once(client: txnkv.Client, table: txnkv.Table) -> None:
    """TestInsertAutoFlushSync: each call is a flush; an error comes at the call."""
    session = client.new_session("auto_sync")
    session.insert(table, (1, None))
    assert table.count() == 1
    with pytest.raises(txnkv.RowErrors, match="key 1"):
        session.insert(table, (1, None))
    session.insert(table, (2, None))
    session.insert_ignore(table, (2, None))
    assert table.count() == 2


def test_auto_background_writes_by_itself(
    client: txnkv.Client, table: txnkv.Table, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TestAutoFlushBackgroundSmallOps, and with rows enough at once, BigOps."""
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 0.05)
    session = client.new_session("auto_background")
    session.insert(table, (1, None))
    until(lambda: table.count() == 1)
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 1000.0)
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_ROWS", 10)
    for id in range(10, 20):
        session.insert(table, (id, None))
    until(lambda: table.count() == 11)
    session.close()


@pytest.mark.parametrize("change", ["alter", "create_index", "another client is closed"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_change_of_others_leaves_the_timer(
    client: txnkv.Client,
    table: txnkv.Table,
    until: Any,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    inside: bool,
) -> None:
    """Rows waited until the next call of the session, however long that took."""
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 0.3)
    other = client.create_table("o", txnkv.Schema({"id": "int64", "n": "int64?"}, ["id"]))
    txn = client.new_transaction() if inside else None
    session = (client if txn is None else txn).new_session("auto_background")
    session.insert(table, (1, None))
    if change == "alter":
        other.alter(add={"m": "int64?"})
    elif change == "create_index":
        client.create_index(other, ["n"])
    else:
        txnkv.connect(client.path).close()
    until(lambda: not session.has_pending)
    if txn is not None:
        txn.commit()
    until(lambda: table.count() == 1)


def test_auto_background_tells_of_its_errors_at_flush(
    client: txnkv.Client, table: txnkv.Table, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TestAutoFlushBackgroundAndErrorCollector: none lost, none told twice."""
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 0.01)
    session = client.new_session("auto_background")
    session.insert(table, (1, None))
    session.flush()
    session.insert(table, (1, "again"))
    until(lambda: not session.has_pending)
    session.insert(table, (2, None))
    with pytest.raises(txnkv.RowErrors) as caught:
        session.flush()
    assert [error.key for error in caught.value.errors] == [1]
    session.flush()
    session.close()
    assert table.count() == 2


def test_an_abandoned_background_session_does_not_flush(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TestAutoFlushBackgroundDropSession."""
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 0.05)
    session = client.new_session("auto_background")
    session.insert(table, (1, None))
    gone = weakref.ref(session)
    timer = session._background._timer
    del session
    gc.collect()
    assert gone() is None
    assert timer is not None
    timer.join(10)
    assert table.count() == 0


def test_many_tables_and_operations_in_one_flush(make: Any, client: txnkv.Client) -> None:
    schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
    for name in "ab":
        client.create_table(name, schema)
    session, end = make()
    for id in range(6):
        session.insert("ab"[id % 2], (id,))
        session.insert_ignore("b", (id,))
    result = session.flush()
    assert (result.inserted, result.ignored) == (9, 3)
    end()
    assert client.table("a").count() == 3
    assert client.table("b").count() == 6


def test_a_row_waits_for_the_order_it_was_given_in(make: Any, table: txnkv.Table) -> None:
    session, end = make()
    session.insert_ignore(table, (1, "first"))
    session.insert_ignore(table, (1, "second"))
    session.insert_ignore(table, (1, "third"))
    assert session.flush().ignored == 2
    end()
    assert table.get(1) == {"id": 1, "v": "first"}


# -- closing ---------------------------------------------------------------------------


def test_close_flushes(make: Any, table: txnkv.Table) -> None:
    session, end = make()
    with session:
        session.insert(table, (1, None))
    with pytest.raises(txnkv.ClosedError, match="make a new one"):
        session.insert(table, (2, None))
    with pytest.raises(txnkv.ClosedError):
        session.write(table, {})
    session.close()
    assert session._lost is None or not session._lost.alive  # nobody is to look after it
    end()
    assert table.count() == 1


def test_what_a_close_has_refused_is_known_behind_it(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    table.insert((1, None))
    session = client.new_session()
    session.insert(table, (1, "again"))
    with pytest.raises(txnkv.RowErrors, match="key 1"):
        session.close()
    assert session.flush() == txnkv.WriteResult()
    assert [error.key for error in session.pending_errors()] == [1]
    assert session.pending_errors() == []


def test_with_drops_what_waits_on_an_exception(make: Any, table: txnkv.Table) -> None:
    session, end = make()
    try:
        with session:
            session.insert(table, (1, None))
            raise KeyError
    except KeyError:
        pass
    end()
    assert table.count() == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_transaction_keeps_no_closed_sessions(
    client: txnkv.Client, table: txnkv.Table, mode: Any
) -> None:
    """It asked each at every call, which cost more the more there were."""
    txn, seen = client.new_transaction(), []
    for id in (0, 1, 1):
        session = txn.new_session(mode)
        session.insert_ignore(table, (id, None))
        session.close()
        seen.append(weakref.ref(session))
    with pytest.raises(txnkv.RowErrors), txn.new_session(mode) as session:
        session.insert(table, (1, None))
    seen.append(weakref.ref(session))
    del session
    gc.collect()
    assert [each() for each in seen] == [None] * 4
    txn.commit()
    assert table.count() == 2


def test_close_tells_of_errors_and_is_closed(client: txnkv.Client, table: txnkv.Table) -> None:
    with client.new_session() as session:
        session.insert(table, (1, None))
    session = client.new_session()
    session.insert(table, (1, None))
    with pytest.raises(txnkv.RowErrors, match="key 1"):
        session.close()
    session.close()
    with pytest.raises(txnkv.ClosedError):
        session.insert(table, (2, None))


# -- errors ----------------------------------------------------------------------------


def test_row_errors_name_the_keys(make: Any, client: txnkv.Client) -> None:
    """test_capture_kudu_error, test_failed_write_op: op, table, key, error; in order."""
    schema = txnkv.Schema({"a": "int64", "b": "string", "n": "int64?"}, primary_key=["b", "a"])
    pairs = client.create_table("pairs", schema)
    with client.new_session() as before:
        before.insert(pairs, {"a": 1, "b": "x"})
        before.insert(pairs, {"a": 2, "b": "x"})
    session, end = make()
    for a, b in [(1, "x"), (9, "z"), (2, "x"), (9, "z")]:
        session.insert(pairs, {"a": a, "b": b})
    with pytest.raises(txnkv.RowErrors) as caught:
        session.flush()
    errors = caught.value.errors
    assert caught.value.count == 3
    assert {error.key for error in errors} == {("x", 1), ("x", 2), ("z", 9)}
    for error in errors:
        assert (error.op, error.table) == ("insert", "pairs")
        assert isinstance(error.error, txnkv.AlreadyPresentError)
        assert repr(error.key) in str(caught.value)
    assert session.pending_errors() == errors
    assert session.pending_errors() == []
    end()
    assert pairs.count() == 3  # the rows without error stand


def test_errors_read_from_pending_are_told(client: txnkv.Client, table: txnkv.Table) -> None:
    """GetPendingErrors drains: a commit does not raise what was read."""
    with client.new_session() as before:
        before.insert(table, (1, None))
    txn = client.new_transaction()
    session = txn.new_session("auto_sync")
    with pytest.raises(txnkv.RowErrors):
        session.insert(table, (1, None))
    txn.commit()  # told at the call
    assert [error.key for error in session.pending_errors()] == [1]


def test_errors_nobody_was_told_of_raise_at_commit(
    client: txnkv.Client, table: txnkv.Table, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the background session and an unflushed one; then commit may be called again."""
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 0.01)
    with client.new_session() as before:
        before.insert(table, (1, None))
    txn = client.new_transaction()
    session = txn.new_session("auto_background")
    session.insert(table, (1, None))
    session.insert(table, (2, None))
    until(lambda: not session.has_pending)
    with pytest.raises(txnkv.RowErrors, match="key 1"):
        txn.commit()
    assert txn.state is txnkv.TxnState.OPEN
    txn.commit()
    assert [row["id"] for row in table.scan()] == [1, 2]


def test_errors_of_every_session_are_told(client: txnkv.Client, table: txnkv.Table) -> None:
    with client.new_session() as before:
        for id in range(3):
            before.insert(table, (id, None))
    txn = client.new_transaction()
    for id in range(3):
        txn.new_session().insert(table, (id, None))
    told = []
    for _ in range(3):
        with pytest.raises(txnkv.RowErrors) as caught:
            txn.commit()
        told += [error.key for error in caught.value.errors]
    assert sorted(told) == [0, 1, 2]
    txn.commit()


def test_at_most_a_thousand_errors_are_kept(client: txnkv.Client, table: txnkv.Table) -> None:
    """Error buffer: all are counted, 1,000 are kept."""
    session = client.new_session()
    for _ in range(2):
        for id in range(1500):
            session.insert(table, (id, None))
        if table.count() == 0:
            session.flush()
    with pytest.raises(txnkv.RowErrors, match="1500 rows refused") as caught:
        session.flush()
    assert caught.value.count == 1500
    assert len(caught.value.errors) == len(session.pending_errors()) == 1000
    assert table.count() == 1500


def test_a_write_outside_of_transactions_stands_row_by_row(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """Batches are not atomic outside a transaction: the good rows stand."""
    session = client.new_session()
    for id in (1, 2, 2, 3):
        session.insert(table, (id, None))
    with pytest.raises(txnkv.RowErrors, match="key 2: an earlier row of the same data"):
        session.flush()
    assert table.count() == 3
    assert client.stats()["staged_row_sets"] == 0


# -- operations and tables -------------------------------------------------------------


def test_an_operation_that_there_is_not(client: txnkv.Client, table: txnkv.Table) -> None:
    with pytest.raises(ValueError, match="is no operation; there are insert, insert_ignore"):
        client.new_session().write(table, {}, op="replace")


def test_tables_by_name_and_by_handle(make: Any, client: txnkv.Client, table: txnkv.Table) -> None:
    session, end = make()
    session.insert("t", (1, None))
    session.insert(table, (2, None))
    with pytest.raises(txnkv.TableNotFoundError, match="no table 'none'; the tables are: t"):
        session.insert("none", (3,))
    with pytest.raises(TypeError, match="a table is a name or a Table"):
        session.insert(5, (3,))
    end()
    assert table.count() == 2


def test_an_error_in_the_background_waits_for_a_call(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock, which comes round behind it, does not take it."""
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 1000.0)
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_ROWS", 2)

    def away(*what: Any, **more: Any) -> Any:
        raise txnkv.UnavailableError("the disk is away")

    session = client.new_session("auto_background")
    session.insert(table, (1, None))
    timer = session._background._timer
    with monkeypatch.context() as patched:
        patched.setattr("txnkv.transaction.session.write_alone", away)
        session.insert(table, (2, None))
        assert session._background._flushing.exception(30) is not None
    timer.function()
    with pytest.raises(txnkv.UnavailableError, match="the disk is away"):
        session.insert(table, (3, None))
    session.insert(table, (3, None))  # the call that told of it has taken nothing
    session.close()
    assert table.count() == 3


@pytest.mark.parametrize("gone", ["table", "topic"])
def test_what_is_gone_keeps_no_other_rows(client: txnkv.Client, gone: str) -> None:
    """In a transaction, too: what waited for it is forgotten once that is told."""
    schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
    for name in "ab":
        client.create_table(name, schema)
    client.create_topic("t")
    txn = client.new_transaction()
    session = txn.new_session()
    if gone == "table":
        session.insert("a", (1,))
    else:
        session.send("t", b"m")
    session.insert("b", (1,))
    client.drop_table("a") if gone == "table" else client.drop_topic("t")
    with pytest.raises((txnkv.TableNotFoundError, txnkv.TopicNotFoundError)):
        session.flush()
    txn.commit()
    assert client.table("b").count() == 1


def test_an_error_of_few_rows_in_the_background_is_told_at_the_next_call(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the clock flushes them again."""
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_SECONDS", 1000.0)

    def away(*what: Any, **more: Any) -> Any:
        raise txnkv.UnavailableError("the disk is away")

    session = client.new_session("auto_background")
    session.insert(table, (1, None))
    with monkeypatch.context() as patched:
        patched.setattr("txnkv.transaction.session.write_alone", away)
        session._background._timer.function()
        assert session._background._flushing.exception(30) is not None
    with pytest.raises(txnkv.UnavailableError, match="the disk is away"):
        session.insert(table, (2, None))
    session._background._timer.function()
    session._background.wait(session)
    assert table.count() == 1  # the call that told of it has taken nothing
    session.close()


# -- tables and topics that are gone ---------------------------------------------------


@pytest.mark.parametrize("end", ["flush", "close"])
@pytest.mark.parametrize("gone_first", [False, True])
def test_what_is_of_others_than_a_dropped_table_stays(
    client: txnkv.Client, table: txnkv.Table, end: str, *, gone_first: bool
) -> None:
    """The rows of all tables were dropped with those of one, and nobody was told."""
    other = client.create_table("other", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    topic = client.create_topic("e")
    session = client.new_session()
    for to in (other, table) if gone_first else (table, other):
        session.insert(to, {"id": 1})
    session.send(topic, b"x")
    client.drop_table("other")
    with pytest.raises(txnkv.TableNotFoundError, match="'other' was dropped"):
        getattr(session, end)()
    if end == "flush":
        result = session.flush()
        assert (result.inserted, result.sent) == (1, 1)
    assert table.get(1) is not None
    assert topic.end_offsets() == {0: 1}


def test_each_table_that_is_gone_is_told(
    client: txnkv.Client, table: txnkv.Table, host: str
) -> None:
    """One after the other; by a server that is given rows of both, at once."""
    session = client.new_session()
    for name in ("one", "two"):
        made = client.create_table(name, txnkv.Schema({"id": "int64"}, primary_key=["id"]))
        session.insert(made, (1,))
        client.drop_table(name)
    session.insert(table, {"id": 1})
    told = ["'one' was dropped", "'two' was dropped"]
    for said in told if host == "here" else [".*; .*".join(told)]:
        with pytest.raises(txnkv.TableNotFoundError, match=said):
            session.flush()
    assert session.flush().inserted == 1


def test_what_is_of_others_than_a_dropped_topic_stays(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    gone, topic = client.create_topic("gone"), client.create_topic("e")
    session = client.new_session()
    session.insert(table, {"id": 1})
    for to in (gone, topic):
        session.send(to, b"x")
    client.drop_topic("gone")
    with pytest.raises(txnkv.TopicNotFoundError, match="'gone' was dropped"):
        session.flush()
    result = session.flush()
    assert (result.inserted, result.sent) == (1, 1)


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"widen": {"n": "int64"}}, {"id": 1, "n": 2}),
        ({"drop": ["n"]}, {"id": 1}),
        ({"rename": {"n": "m"}}, {"id": 1, "m": 2}),
        ({"add": {"m": "int64?"}}, {"id": 1, "n": 2, "m": None}),
    ],
)
@pytest.mark.parametrize("end", ["flush", "close"])
def test_rows_that_wait_while_their_table_is_altered(
    client: txnkv.Client, change: dict[str, Any], row: dict[str, Any], end: str
) -> None:
    """A server refused them where a column was widened or dropped, and nobody had them."""
    schema = txnkv.Schema({"id": "int64", "n": "int32?"}, primary_key=["id"])
    table = client.create_table("changing", schema)
    session = client.new_session(flush_mode="manual")
    session.insert(table, {"id": 1, "n": 2})
    client.table("changing").alter(**change)
    getattr(session, end)()
    assert list(table.scan()) == [row]


def test_a_transaction_whose_table_was_altered_commits_no_part(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """A second commit at a server was one of its messages, without the row."""
    topic = client.create_topic("e")
    txn = client.new_transaction()
    txn.send(topic, b"the row is there")
    assert txn.id
    table.alter(add={"w": "int64?"})
    txn.insert(table, {"id": 1, "v": "x"})
    with pytest.raises(txnkv.SchemaChangedError):
        txn.flush()
    for _ in range(2):
        with pytest.raises((txnkv.SchemaChangedError, txnkv.InvalidTxnStateError)):
            txn.commit()
    assert (table.count(), topic.end_offsets()) == (0, {0: 0})


def test_close_writes_the_rest_however_many_are_gone(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """After a hundred it gave up."""
    session = client.new_session(flush_mode="manual")
    for number in range(110):
        session.send(client.create_topic(f"e{number}"), b"x")
        client.drop_topic(f"e{number}")
    session.insert(table, {"id": 1})
    with pytest.raises(txnkv.TopicNotFoundError, match="'e0' was dropped"):
        session.close()
    assert table.get(1) is not None


@pytest.mark.parametrize("what", ["two tables", "two topics", "one of each"])
def test_close_writes_what_is_of_others_than_several_that_are_gone(
    client: txnkv.Client, table: txnkv.Table, what: str
) -> None:
    session = client.new_session()
    for name in ("one", "two"):
        if what == "two tables" or (what == "one of each" and name == "one"):
            made = client.create_table(name, txnkv.Schema({"id": "int64"}, primary_key=["id"]))
            session.insert(made, (1,))
            client.drop_table(name)
        else:
            session.send(client.create_topic(name), b"x")
            client.drop_topic(name)
    session.insert(table, {"id": 1})
    with pytest.raises(txnkv.TxnkvError, match=r"'(one|two)' was dropped"):
        session.close()
    assert table.get(1) is not None


@pytest.mark.parametrize("what", ["table", "topic", "subscription", "abort"])
def test_a_flush_in_whose_midst_others_end_its_transaction(
    client: txnkv.Client, table: txnkv.Table, what: str
) -> None:
    """It spoke of a transaction, which its caller has not."""
    other = client.create_table("other", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    topic = client.create_topic("e")
    client.run(lambda txn: txn.send(topic, b"x"))
    session = client.new_session(flush_mode="manual")
    for id in range(12_000):
        session.insert(table, (id, None))
    session.insert(other, (1,))
    session.send(topic, b"y")
    session.ack(topic.subscribe("s"), txnkv.MessageId(0, 0))

    def meanwhile() -> None:
        disarm()
        match what:
            case "table":
                client.drop_table("t")
            case "topic":
                client.drop_topic("e")
            case "subscription":
                topic.drop_subscription("s")
            case "abort":
                client.abort_transaction(client.transactions()[-1].id)

    arm("stage.written", meanwhile)
    if what == "abort":
        assert session.flush().inserted == 12_001
    else:
        error = txnkv.TableNotFoundError if what == "table" else txnkv.TopicNotFoundError
        with pytest.raises(error, match=r"'[tes]' .*was dropped"):
            session.flush()
        assert other.count() == 0
        assert session.flush().inserted == (1 if what == "table" else 12_001)
    assert other.count() == 1
