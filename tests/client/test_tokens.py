"""Transaction tokens: what they carry, and every way in which one is refused."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.storage import settle_dropped
from txnkv.storage.clocks import clock
from txnkv.storage.faults import arm, disarm
from txnkv.transaction import token as tokens
from txnkv.transaction.token import TokenContent

deserialize = txnkv.Transaction.deserialize


@pytest.fixture
def txn(client: txnkv.Client, table: txnkv.Table) -> txnkv.Transaction:
    return client.new_transaction()


def test_token_is_the_same_each_time(client: txnkv.Client, txn: txnkv.Transaction) -> None:
    """TxnToken: equal bytes on re-serialization, by a joined handle too, in every state."""
    token = txn.serialize()
    assert bytes(txn.serialize()) == bytes(token)
    joined = deserialize(client, token)
    assert bytes(joined.serialize()) == bytes(token)
    assert txn.serialize(keepalive=True) != token
    txn.insert("t", (1, None))
    assert txn.serialize() == token
    txn.commit()
    assert txn.serialize() == joined.serialize() == token


def test_token_of_an_aborted_transaction_is_the_same(
    client: txnkv.Client, txn: txnkv.Transaction
) -> None:
    token = txn.serialize()
    txn.rollback()
    assert txn.serialize() == token
    assert deserialize(client, token).state is txnkv.TxnState.ABORTED


@pytest.mark.parametrize("op", ["insert", "upsert"])
def test_who_joins_has_what_was_written_before(
    client: txnkv.Client, table: txnkv.Table, txn: txnkv.Transaction, op: str
) -> None:
    """By any handle and whoever commits, as it is for `get` of the transaction itself."""
    topic = client.create_topic("events")
    for row in range(2):  # the first of a table is looked at later
        getattr(txn, op)("t", (row, None))
    txn.new_session().insert("t", (7, None))
    txn.send(topic, b"m")
    joined = deserialize(client, txn.serialize())
    txn.close()
    assert [joined.get("t", key) is None for key in (0, 1, 7)] == [False] * 3
    joined.insert("t", (1, None))
    with pytest.raises(txnkv.RowErrors, match="key 1"):
        joined.flush()
    joined.commit()
    assert sorted(row["id"] for row in table.scan()) == [0, 1, 7]
    assert [m.value for m in topic.consumer().poll()] == [b"m"]


def test_a_refused_row_is_told_before_there_is_a_token(
    client: txnkv.Client, table: txnkv.Table, txn: txnkv.Transaction
) -> None:
    table.insert((1, None))
    other = client.new_transaction()
    other.insert("t", (1, None))
    with pytest.raises(txnkv.RowErrors, match="key 1"):
        other.serialize()
    other.insert("t", (2, None))
    deserialize(client, other.serialize()).commit()
    assert sorted(row["id"] for row in table.scan()) == [1, 2]


def test_who_joined_has_written_what_waited_when_it_is_closed(
    client: txnkv.Client, table: txnkv.Table, txn: txnkv.Transaction
) -> None:
    joined = deserialize(client, txn.serialize())
    joined.insert("t", (1, None))
    joined.new_session().insert("t", (2, None))
    for _ in range(2):
        joined.close()
    txn.commit()
    assert sorted(row["id"] for row in table.scan()) == [1, 2]


def test_who_joined_is_told_at_its_close_of_what_is_not_written(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    table.insert((1, None))
    txn = client.new_transaction()
    joined, late = (deserialize(client, txn.serialize()) for _ in range(2))
    joined.insert("t", (1, "there"))
    with pytest.raises(txnkv.RowErrors, match="key 1"):
        joined.close()
    late.insert("t", (2, None))
    txn.rollback()
    with pytest.raises(txnkv.InvalidTxnStateError, match="rolled back"):
        late.close()
    late.close()
    assert table.count() == 1


def test_a_refused_row_keeps_no_other_session_from_being_written(
    client: txnkv.Client, table: txnkv.Table, txn: txnkv.Transaction
) -> None:
    joined = deserialize(client, txn.serialize())
    refused, other = joined.new_session(), joined.new_session()
    for _ in range(2):
        refused.insert("t", (1, None))
    other.insert("t", (2, None))
    with joined.new_session() as closed:
        closed.insert("t", (3, None))
    with pytest.raises(txnkv.RowErrors):
        joined.close()
    joined.close()
    txn.commit()
    assert sorted(row["id"] for row in table.scan()) == [1, 2, 3]


@pytest.mark.parametrize("rows", [1, 50_000])
def test_who_failed_writes_nothing_when_it_is_closed(
    client: txnkv.Client, table: txnkv.Table, txn: txnkv.Transaction, rows: int
) -> None:
    joined = deserialize(client, txn.serialize())

    def fail() -> None:
        with joined:
            for id in range(rows):
                joined.insert("t", (id, "x" * 400))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    joined.close()
    txn.commit()
    assert table.count() == 0


@pytest.mark.parametrize("call", ["flush", "commit"])
@pytest.mark.parametrize(
    ("step", "messages", "rows", "sent"),
    [
        ("append.written", 20, 0, range(1, 20)),
        ("append.written", 1, 1, [1]),
        ("stage.staged", 0, 2, [0]),
        ("stage.claimed", 0, 1, None),
    ],
)
def test_a_flush_that_meets_the_commit_says_what_is_in_it(
    client: txnkv.Client,
    table: txnkv.Table,
    txn: txnkv.Transaction,
    step: str,
    messages: int,
    rows: int,
    sent: Any,
    call: str,
) -> None:
    """Whoever flushed all of it anew, as it said, had a part of it twice."""
    topic = client.create_topic("e", partitions=4)
    joined = deserialize(client, txn.serialize())
    for n in range(messages):
        joined.send(topic, b"m", key=str(n))
    for n in range(rows):
        (joined.upsert, joined.insert)[n % 2](table, (n, None))
    arm(step, txn.commit)
    with pytest.raises(txnkv.InvalidTxnStateError) as caught:
        getattr(joined, call)()
    disarm()
    joined.drop()
    assert ("A part of what was flushed" in str(caught.value)) == (sent is not None)
    assert ("Begin a new transaction" in str(caught.value)) == (sent is None)
    with topic.consumer() as consumer:
        assert len(consumer.poll(timeout=0.3)) in (sent or [0])


def test_who_joined_and_commits_sends_once(client: txnkv.Client, txn: txnkv.Transaction) -> None:
    topic = client.create_topic("e")
    joined = deserialize(client, txn.serialize())
    joined.send("e", b"m")
    committing = joined.commit_async()
    joined.close()
    committing.result(60)
    with topic.consumer() as consumer:
        assert len(consumer.poll(timeout=1)) == 1


@pytest.mark.parametrize(
    ("how", "rows"), [("close", 2), ("with", 2), ("failed", 0), ("exits", 2), ("exits with 1", 0)]
)
def test_a_client_that_closes_writes_what_waits_in_those_it_joined(
    connect: Any, table: txnkv.Table, txn: txnkv.Transaction, how: str, rows: int
) -> None:
    """A worker's rows were lost, and it ended as if all were well."""
    other = connect()
    joined = deserialize(other, txn.serialize())
    joined.insert("t", (1, None))
    joined.new_session().insert("t", (2, None))
    if how == "close":
        other.close()
    else:
        with suppress(KeyError, SystemExit), other:
            if how == "failed":
                raise KeyError
            if how != "with":
                sys.exit(0 if how == "exits" else 1)
    joined.close()
    txn.commit()
    assert table.count() == rows


def test_a_client_closes_and_tells_what_those_it_joined_have_not_written(
    connect: Any, client: txnkv.Client, table: txnkv.Table
) -> None:
    table.insert((1, "there"))
    txn, other = client.new_transaction(), connect()
    refused, sound = (deserialize(other, txn.serialize()) for _ in range(2))
    refused.insert("t", (1, None))
    sound.insert("t", (2, None))
    with pytest.raises(txnkv.RowErrors, match="key 1"):
        other.close()
    other.close()
    with pytest.raises(txnkv.ClosedError):
        other.tables()
    txn.commit()
    assert table.count() == 2


def test_clients_close_while_others_join(
    connect: Any, client: txnkv.Client, table: txnkv.Table, txn: txnkv.Transaction
) -> None:
    """Who closed ran over those who came, and what waited with it was lost."""
    token, over = txn.serialize(), threading.Event()

    def join() -> None:
        kept: deque[Any] = deque(maxlen=1_000)
        while not over.is_set():
            kept.append(deserialize(client, token))

    joining = threading.Thread(target=join)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    joining.start()
    try:
        for id in range(60):
            other = connect()
            joined = deserialize(other, token)
            joined.insert("t", (id, None))
            other.close()
    finally:
        over.set()
        joining.join()
        sys.setswitchinterval(interval)
    txn.commit()
    assert table.count() == 60


def test_a_session_writes_what_waits_though_the_handle_is_gone(
    connect: Any, table: txnkv.Table, txn: txnkv.Transaction
) -> None:
    other = connect()
    session = deserialize(other, txn.serialize()).new_session()
    session.insert("t", (1, None))
    other.close()
    txn.commit()
    assert table.count() == 1


@pytest.mark.parametrize(("end", "rows"), [("pass", 1), ("sys.exit()", 1), ("1 / 0", 0)])
def test_a_worker_of_multiprocessing_writes_what_waits(
    table: txnkv.Table, txn: txnkv.Transaction, store_path: Path, end: str, rows: int
) -> None:
    """Such a fork ends by `os._exit`, and the rows were gone without a word."""
    work = f"""
        import multiprocessing, sys, txnkv
        def work():
            global client, txn
            client = txnkv.connect({str(store_path)!r})
            txn = txnkv.Transaction.deserialize(client, {str(txn.serialize())!r})
            txn.insert("t", (1, None))
            {end}
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        """
    subprocess.run([sys.executable, "-c", dedent(work)], capture_output=True, check=True)
    txn.commit()
    assert table.count() == rows


@pytest.mark.parametrize(
    ("end", "rows"),
    [
        ("", 1),
        ("raise SystemExit", 1),
        ("1 / 0", 0),
        ("sys.ps1 = '>>> '; code.InteractiveConsole().push('oops')", 1),
    ],
)
def test_a_process_that_ends_writes_what_waits_in_those_it_joined(
    table: txnkv.Table, txn: txnkv.Transaction, store_path: Path, end: str, rows: int
) -> None:
    work = f"""
        import code, sys, txnkv
        client = txnkv.connect({str(store_path)!r})
        txn = txnkv.Transaction.deserialize(client, {str(txn.serialize())!r})
        txn.insert("t", (1, None))
        {end}
        """
    ran = subprocess.run([sys.executable, "-c", dedent(work)], capture_output=True, check=False)
    assert ran.returncode == (end == "1 / 0"), ran.stderr
    txn.commit()
    assert table.count() == rows


@pytest.mark.parametrize(
    "work",
    [
        lambda joined: joined.insert("t", (1, None)),
        lambda joined: joined.send("e", b"m"),
        lambda joined: joined.new_session().insert("t", (1, None)),
        lambda joined: joined.new_session().send("e", b"m"),
    ],
)
def test_a_joined_handle_that_is_dropped_tells_what_is_lost(
    client: txnkv.Client, table: txnkv.Table, txn: txnkv.Transaction, caplog: Any, work: Any
) -> None:
    client.create_topic("e")
    work(deserialize(client, txn.serialize()))
    gc.collect()
    settle_dropped()
    txn.commit()
    assert table.count() == 0
    assert "was dropped with rows or messages that are lost (1)" in caplog.text


def test_transactions_have_different_tokens(client: txnkv.Client) -> None:
    made = {client.new_transaction().serialize() for _ in range(10)}
    assert len(made) == 10
    assert len({bytes(token) for token in made}) == 10


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda token: token, id="token"),
        pytest.param(bytes, id="bytes"),
        pytest.param(str, id="str"),
        pytest.param(lambda token: bytearray(bytes(token)), id="bytearray"),
        pytest.param(lambda token: memoryview(bytes(token)), id="memoryview"),
        pytest.param(lambda token: pickle.loads(pickle.dumps(token)), id="pickle"),
        pytest.param(lambda token: txnkv.TxnToken(bytes(token)), id="made again"),
    ],
)
def test_every_form_joins(client: txnkv.Client, txn: txnkv.Transaction, form: Any) -> None:
    token = txn.serialize()
    joined = deserialize(client, form(token))
    assert joined.id == txn.id
    assert joined.serialize() == token


def test_text_is_short_and_url_safe(txn: txnkv.Transaction) -> None:
    text = str(txn.serialize())
    assert len(text) < 128
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    assert text not in repr(txn.serialize())  # a token does not leak into logs


def test_text_as_a_file_or_a_pipe_gives_it(client: txnkv.Client, txn: txnkv.Transaction) -> None:
    text = str(txn.serialize())
    for given in (f" {text}\r\n", text.encode(), f"{text}\n".encode(), memoryview(text.encode())):
        assert deserialize(client, given).id == txn.id
    with pytest.raises(txnkv.InvalidTokenError, match="not URL-safe base64"):
        deserialize(client, f"{text[:9]}\n{text[9:]}")


def test_joined_handle_is_fully_usable(client: txnkv.Client, txn: txnkv.Transaction) -> None:
    txn.insert("t", (1, "a"))
    txn.flush()
    joined = deserialize(client, txn.serialize())
    assert joined.get("t", 1) == {"id": 1, "v": "a"}
    joined.insert("t", (2, "b"))
    stamp = joined.commit()
    assert joined.commit() == txn.commit() == stamp
    assert client.table("t").count() == 2


@pytest.mark.parametrize("position", range(74))
def test_every_altered_byte_is_refused(
    client: txnkv.Client, txn: txnkv.Transaction, position: int
) -> None:
    data = bytearray(bytes(txn.serialize()))
    for bit in (1, 128):
        data[position] ^= bit
        with pytest.raises(txnkv.InvalidTokenError):
            deserialize(client, bytes(data))
        data[position] ^= bit
    assert deserialize(client, bytes(data)).id == txn.id


def test_the_table_of_altered_bytes_is_whole(txn: txnkv.Transaction) -> None:
    assert len(bytes(txn.serialize())) == 74


CORRUPTED = {
    "empty": (lambda token: b"", "empty"),
    "empty text": (lambda token: "", "empty"),
    "cut by one": (lambda token: bytes(token)[:-1], "73 bytes"),
    "cut to one": (lambda token: bytes(token)[:1], "1 bytes"),
    "no token": (lambda token: "abc", "2 bytes: it was cut, or is no token"),
    "a byte more": (lambda token: bytes(token) + b"\0", "75 bytes"),
    "version 3": (lambda token: b"\3" + bytes(token)[1:], "version 3, this program reads up to 2"),
    "text of another alphabet": (lambda token: "!" + str(token)[1:], "base64"),
    "text with a blank": (lambda token: str(token)[:9] + " " + str(token)[9:], "base64"),
    "not ascii": (lambda token: "ä" + str(token)[1:], "base64"),
    "cut text": (lambda token: str(token)[:-4], "bytes"),
}


@pytest.mark.parametrize(("spoil", "words"), CORRUPTED.values(), ids=CORRUPTED.keys())
def test_corrupted_token(
    client: txnkv.Client, txn: txnkv.Transaction, spoil: Any, words: str
) -> None:
    """TxnCorruptedToken: each is told apart."""
    with pytest.raises(txnkv.InvalidTokenError, match=words):
        deserialize(client, spoil(txn.serialize()))


def test_forged_token(client: txnkv.Client, txn: txnkv.Transaction) -> None:
    """Everything right but the key."""
    coordinator = internals.coordinator(client)
    store_id = internals.store(client).store_id
    content = tokens.unseal(txn.serialize(), store_id, coordinator.token_key)
    assert tokens.seal(content, coordinator.token_key) == txn.serialize()
    with pytest.raises(txnkv.InvalidTokenError, match="signature"):
        deserialize(client, tokens.seal(content, b"\0" * 32))


def test_token_of_another_store(txn: txnkv.Transaction, tmp_path: Path) -> None:
    with (
        txnkv.connect(tmp_path / "other") as other,
        pytest.raises(txnkv.InvalidTokenError, match=r"of store .* connect to its own store"),
    ):
        deserialize(other, txn.serialize())


@pytest.mark.parametrize("no_token", [None, 5, [b"x"]])
def test_what_is_no_token_at_all(client: txnkv.Client, no_token: Any) -> None:
    with pytest.raises(TypeError, match="a token is"):
        deserialize(client, no_token)


def test_token_of_an_unknown_transaction(client: txnkv.Client) -> None:
    """testCommitNonExistentTransaction, with a token that the store itself signed."""
    coordinator = internals.coordinator(client)
    content = TokenContent(internals.store(client).store_id, 123456, None, 30_000_000, False)
    with pytest.raises(txnkv.TxnNotFoundError, match="123456 was not found; the highest id"):
        deserialize(client, tokens.seal(content, coordinator.token_key))


def test_expired_token(client: txnkv.Client, table: txnkv.Table, now: Any) -> None:
    token = client.new_transaction(timeout=60).serialize()
    now.forward(40)
    deserialize(client, token)
    now.forward(21)
    with pytest.raises(txnkv.InvalidTokenError, match=r"expired \d+\.\d s ago"):
        deserialize(client, token)


def test_a_token_expires_with_its_transaction_whatever_the_wall_clock_does(
    client: txnkv.Client, now: Any
) -> None:
    txn = client.new_transaction(timeout=60)
    token = txn.serialize()
    with clock.replaced(wall=lambda: txn.age.micros + 3_600_000_000):
        assert deserialize(client, token).state is txnkv.TxnState.OPEN
    now.forward(61)
    with clock.replaced(wall=lambda: txn.age.micros), pytest.raises(txnkv.InvalidTokenError):
        deserialize(client, token)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_ended_small_has_no_token(client: txnkv.Client, table: txnkv.Table, end: str) -> None:
    """No other process has ever known of it, nor ever will."""
    txn = client.new_transaction()
    txn.insert(table, (1, None))
    getattr(txn, end)()
    with pytest.raises(txnkv.InvalidTxnStateError, match="cannot serialize"):
        txn.serialize()


def test_token_without_timeout_does_not_expire(
    client: txnkv.Client, now: Any, by_hand: Any
) -> None:
    txn = client.new_transaction(timeout=None)
    token = txn.serialize()
    now.forward(10**6)
    assert deserialize(client, token).id == txn.id


@pytest.mark.parametrize("keepalive", [False, True])
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_what_a_token_says(client: txnkv.Client, keepalive: bool, timeout: float | None) -> None:
    """testSerializationOptions, testNewTransaction."""
    txn = client.new_transaction(timeout=timeout)
    instance = client.instance
    content = tokens.unseal(
        txn.serialize(keepalive=keepalive),
        instance.store.store_id,
        instance.coordinator.token_key,
    )
    assert content.txn_id == txn.id.local > 0
    assert content.keepalive_time == 30_000_000
    assert content.keepalive is keepalive
    if timeout is None:
        assert content.expires is None
    else:
        assert content.expires == txn.age.micros + 60_000_000 > clock.now_micros()


def test_joins_in_another_process(client: txnkv.Client, txn: Any, elsewhere: Any) -> None:
    found = elsewhere(
        """
        import pickle
        txn = txnkv.Transaction.deserialize(client, token)
        txn.insert("t", (2, "there"))
        txn.flush()
        say((txn.id, txn.get("t", 1), bytes(txn.serialize()), pickle.dumps(txn.serialize())))
        """,
        token=_with_row(txn),
    )
    id, row, data, pickled = found
    assert (id, row, data) == (txn.id, {"id": 1, "v": "here"}, bytes(txn.serialize()))
    assert pickle.loads(pickled) == txn.serialize()
    txn.commit()
    assert client.table("t").count() == 2


def test_a_token_alone_is_not_a_handle_in_a_fork_of_it(txn: Any, client: txnkv.Client) -> None:
    """A token may be joined many times in one process; the handles are of one transaction."""
    token = txn.serialize()
    handles = [deserialize(client, token) for _ in range(3)]
    for n, handle in enumerate(handles):
        handle.insert("t", (n, None))
        handle.flush()
    handles[1].commit()
    assert client.table("t").count() == 3
    assert all(handle.is_commit_complete() for handle in handles)


def _with_row(txn: Any) -> txnkv.TxnToken:
    txn.insert("t", (1, "here"))
    txn.flush()
    token = txn.serialize()
    assert isinstance(token, txnkv.TxnToken)
    return token
