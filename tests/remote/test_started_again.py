"""Transactions and snapshots over a server that is started again while they wait, or before they
begin.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests.remote.conftest import Serving
from txnkv.server import Server
from txnkv.transaction import Job

Txn = txnkv.Transaction
Use = Callable[[txnkv.Client, Txn, int], Any]


def again(serving: Serving) -> None:
    serving.kill()
    serving.start()


def flush(_: txnkv.Client, txn: Txn, __: int) -> None:
    txn.flush()


def handed_to_spark(_: txnkv.Client, txn: Txn, __: int) -> None:
    pytest.importorskip("pyspark")
    import txnkv.spark

    assert txnkv.spark.options(txn, table="t")["path"].startswith("grpc")


def commit(_: txnkv.Client, txn: Txn, __: int) -> None:
    txn.commit()


def a_row(client: txnkv.Client, txn: Txn, key: int) -> None:
    assert txn.state is txnkv.TxnState.OPEN
    txn.insert("t", (key, "own"))
    commit(client, txn, key)


def by_a_job(client: txnkv.Client, txn: Txn, key: int) -> None:
    job = Job.start(txn)
    with job.session("0") as session:
        session.insert("t", (key, "own"))
    job.commit(["0"])
    commit(client, txn, key)


HELD: list[tuple[Use, Use]] = [
    (flush, commit),
    (handed_to_spark, commit),
    (flush, lambda client, txn, key: (flush(client, txn, key), commit(client, txn, key))),
    (flush, a_row),
    (lambda _, txn, __: txn.new_session(), commit),
    (flush, by_a_job),
]
GIVEN: list[tuple[Use, Use]] = [
    (lambda _, txn, key: txn.insert("t", (key, "a")), commit),
    (lambda _, txn, key: (txn.send("events", b"a"), txn.get("t", key)), commit),
    (lambda _, txn, key: (txn.send("events", b"a"), txn.get("t", key)), by_a_job),
    (lambda client, txn, _: client.table("t").restore(client.snapshot().timestamp, txn), commit),
]


@pytest.mark.parametrize("cases", [HELD, GIVEN], ids=["held", "given"])
def test_a_transaction_that_others_know_of_is_joined_again_unless_it_was_given_something(
    serving: Serving, store: txnkv.Client, cases: list[tuple[Use, Use]]
) -> None:
    """By whom holds it: what others wrote in it is committed."""
    serving.start()
    with txnkv.connect(serving.address) as client:
        txns = [client.new_transaction(timeout=None) for _ in cases]
        for key, (txn, (before, _)) in enumerate(zip(txns, cases, strict=True)):
            with Txn.deserialize(store, txn.serialize()) as joined:
                joined.insert("t", (key, "of another"))
            before(client, txn, 100 + key)
        again(serving)
        for key, (txn, (_, after)) in enumerate(zip(txns, cases, strict=True)):
            if cases is HELD:
                after(client, txn, 100 + key)
                continue
            with pytest.raises(txnkv.UnavailableError, match="begin again"):
                after(client, txn, 100 + key)
            txn.rollback()
    rows = store.table("t").scan().to_arrow()["v"].to_pylist()
    assert rows == (["of another"] * len(HELD) + ["own"] * 2 if cases is HELD else [])


# -- snapshots -------------------------------------------------------------------------


def test_snapshots_are_made_again(serving: Serving, store: txnkv.Client) -> None:
    """Whoever holds one reads on, and keeps the history from then on."""
    table = store.create_table("brief", store.table("t").schema, history=0.0)
    table.insert((1, "then"))
    serving.start()
    with txnkv.connect(serving.address) as client:
        channel: Any = vars(client)["_channel"]
        channel.patience = 300.0
        held, dropped = client.snapshot(), client.snapshot()
        scan = client.table("brief").scan(snapshot=held)
        again(serving)
        assert held.get("brief", 1) == {"id": 1, "v": "then"}
        channel.beat()
        table.update((1, "now"))
        dropped.close()
        store.compact()
        assert held.get("brief", 1) == {"id": 1, "v": "then"}
        assert scan.to_arrow()["v"].to_pylist() == ["then"]
        del scan  # it may be read again
        held.close()
        channel.beat()
        table.update((1, "last"))
        store.compact()
        with pytest.raises(txnkv.HistoryExpiredError):
            client.table("brief").get(1, held.timestamp)


# -- transactions that begin after it --------------------------------------------------


class Again:
    """A server in this process, started again at its port, and an idle client that had begun."""

    def __init__(self, serve: Callable[..., Server]) -> None:
        self._serve = serve
        self._server = serve()
        self.client: Any = txnkv.connect(f"grpc://127.0.0.1:{self._server.port}")
        self.table = self.client.table("t")
        self.client.new_transaction().rollback()  # from then on it has an id for another one

    def start(self) -> None:
        port = self._server.port
        self._server.close()
        self._server = self._serve(port=port)


@pytest.fixture
def idle(serve: Callable[..., Server]) -> Iterator[Again]:
    made = Again(serve)
    yield made
    made.client.close()


def by_run(client: txnkv.Client, txn: Txn, key: int) -> None:
    txn.rollback()
    client.run(lambda txn: txn.insert("t", (key, "a")), attempts=1)


def by_a_scan(client: txnkv.Client, txn: Txn, key: int) -> None:
    assert client.table("t").scan().to_arrow().num_rows < key
    a_row(client, txn, key)


def by_a_stream(client: txnkv.Client, txn: Txn, key: int) -> None:
    rows = pa.table({"id": pa.array([key], pa.int64()), "v": ["a"]})
    txn.write("t", rows.to_reader())
    txn.commit()


def by_id(client: txnkv.Client, txn: Txn, key: int) -> None:
    id = txn.id
    a_row(client, txn, key)
    assert (txn.id, client.transaction_state(id)) == (id, txnkv.TxnState.COMMITTED)


def with_another(client: txnkv.Client, txn: Txn, key: int) -> None:
    with client.transaction() as other:
        other.insert("t", (key, "a"))
    txn.commit()
    assert other.id != txn.id


BEGUN: list[Use] = [
    a_row, by_a_job, by_run, by_a_scan, by_a_stream, by_id, with_another,
    lambda _, txn, key: (txn.insert("t", (key, "a")), txn.commit()),
    lambda _, txn, key: (txn.insert("t", (key, "a")), txn.commit_async().result()),
    lambda _, txn, key: (txn.get("t", key), txn.insert("t", (key, "a")), txn.commit()),
    lambda _, txn, key: (txn.serialize(), txn.insert("t", (key, "a")), txn.commit()),
    lambda _, txn, key: (txn.mark_applied("a", key), txn.insert("t", (key, "a")), txn.commit()),
    lambda c, txn, key: (handed_to_spark(c, txn, key), txn.insert("t", (key, "a")), txn.commit()),
]  # fmt: skip


@pytest.mark.parametrize("known", ["", "begun before it"])
def test_the_first_transaction_after_it_begins(
    idle: Again, store: txnkv.Client, known: str
) -> None:
    for key, use in enumerate(BEGUN, 1):
        txn = idle.client.new_transaction() if known else None
        idle.start()
        use(idle.client, txn or idle.client.new_transaction(), key)
    assert [row["id"] for row in store.table("t").scan()] == [*range(1, len(BEGUN) + 1)]


@pytest.mark.parametrize("point", ["log.written", "log.durable"])
def test_one_whose_server_is_killed_again_at_its_commit_is_there_as_its_state_tells(
    serving: Serving, store: txnkv.Client, point: str
) -> None:
    serving.start()
    with txnkv.connect(serving.address) as client:
        table = client.table("t")
        client.new_transaction().rollback()
        serving.kill()
        serving.start(at=(point, signal.SIGKILL))
        serving.arm()
        txn = client.new_transaction()
        txn.insert(table, (1, "a"))
        with pytest.raises(txnkv.CommitOutcomeUnknownError) as caught:
            txn.commit()
        serving.wait()
        serving.start()
        state = client.outcome(caught.value.txn_id)
        assert (state is txnkv.TxnState.COMMITTED) == (store.table("t").count() == 1)
        assert caught.value.txn_id


def test_one_that_was_told_never_to_have_begun_does_not_begin(
    idle: Again, store: txnkv.Client
) -> None:
    """Its state is asked for while its commit is on its way."""
    idle.start()
    txn = idle.client.new_transaction()
    txn.insert(idle.table, (1, "a"))
    channel = idle.client.channel
    (begin,) = channel._waiting
    with idle.client.committer._sending:
        committed = txn.commit_async()
        assert channel.forget(begin)
        with pytest.raises(txnkv.TxnNotFoundError):
            _ = txn.state
        channel.server = "before"  # as when the commit was sent
        channel.later(begin)
    with pytest.raises(txnkv.UnavailableError, match="begin again"):
        committed.result(30)
    assert store.table("t").count() == 0


def test_the_state_of_one_that_is_lost_is_not_that_of_an_id(idle: Again) -> None:
    """An id that it was to begin by, which nobody else has."""
    txn = idle.client.new_transaction()
    assert idle.client.channel.forget(idle.client.channel._waiting[0])
    idle.start()
    with pytest.raises(txnkv.UnavailableError, match="begin again"):
        _ = txn.state


@pytest.mark.parametrize("refused", ["commit", "get"])
def test_rows_that_the_server_had_are_not_left_out_of_a_commit(
    idle: Again, store: txnkv.Client, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """It had refused a call for now, after it had begun the transaction and taken its rows."""
    if refused == "get":
        idle.client.channel.spare_ids.clear()  # it has no id to begin by
    txn = idle.client.new_transaction()
    txn.insert(idle.table, (1, "a"))

    def busy(*_: Any) -> None:
        raise txnkv.UnavailableError("the disk is away")

    with monkeypatch.context() as patched:
        patched.setattr(Txn, refused, busy)
        with pytest.raises(txnkv.UnavailableError, match="disk is away"):
            txn.commit() if refused == "commit" else txn.get(idle.table, 1)
    idle.start()
    with pytest.raises(txnkv.UnavailableError, match="begin again"):
        txn.commit()
    assert store.table("t").count() == 0


@pytest.mark.parametrize("joined", [False, True])
def test_a_block_that_fails_tells_its_own_error(serving: Serving, joined: bool) -> None:
    serving.start()
    with txnkv.connect(serving.address) as client:
        begun = client.new_transaction()
        token = begun.serialize()

        def fail() -> None:
            with txnkv.Transaction.deserialize(client, token) if joined else begun as txn:
                txn.insert("t", (1, "never"))
                txn.flush()
                serving.kill()
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            fail()
