"""Scripts of transactions: rows, sessions, the ends; see tests/scripts.py.

    begin a                       a transaction named a, of new_transaction's options
    insert a 1..3 7 @u            rows into table u (t by default), with a's own session
    commit a -> as a              the same answer as a's commit before
    commit b -> InvalidTxnStateError: not open
    keys -> 1 2 3 7

Keys are ints; a row's v is "v" and its key.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.scripts import Script, numbers
from txnkv.coordinator.maintenance import Maintenance
from txnkv.storage.faults import arm, disarm

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])


class Transactions(Script):
    """Runs scripts against a store with table t (one tablet) and u (four)."""

    def __init__(
        self, connect: Callable[..., txnkv.Client], until: Any, now: Any, patch: Any
    ) -> None:
        self._patch = patch
        self._connect = connect
        self._until = until
        self._now = now
        self.options: dict[str, Any] = {}
        self.client = connect()
        self.client.create_table("t", SCHEMA)
        self.client.create_table("u", SCHEMA, txnkv.hash_partition("id", 4))
        self.txns: dict[str, txnkv.Transaction] = {}
        self.sessions: dict[str, txnkv.Session] = {}
        self.ids: dict[str, int] = {}
        self.commits: dict[str, Any] = {}

    def _step(self, line: str) -> None:
        call, _, answer = line.partition(" -> as ")
        if not answer:
            super()._step(line)
        else:
            verb, name = call.split()
            assert getattr(self, f"do_{verb}")(name) == self.commits[answer]

    # -- transactions ------------------------------------------------------------------

    def do_begin(self, name: str, *options: str) -> None:
        txn = self.client.new_transaction(**dict(map(_option, options)))
        self.txns[name], self.ids[name] = txn, txn.id

    def do_join(self, name: str, other: str, keepalive: str = "") -> None:
        token = self.txns[other].serialize(keepalive=bool(keepalive))
        txn = txnkv.Transaction.deserialize(self.client, token)
        self.txns[name], self.ids[name] = txn, txn.id

    def do_commit(self, name: str) -> Any:
        self.commits[name] = self.txns[name].commit()
        return self.commits[name]

    def do_start(self, name: str) -> None:
        self.txns[name].start_commit()

    def do_complete(self, name: str) -> bool:
        return self.txns[name].is_commit_complete()

    def do_await(self, name: str) -> None:
        self._until(self.txns[name].is_commit_complete)

    def do_rollback(self, name: str) -> None:
        self.txns[name].rollback()

    def do_close(self, name: str) -> None:
        self.txns[name].close()

    def do_forget(self, *names: str) -> None:
        for name in names:
            self.txns.pop(name, None)
            self.sessions.pop(name, None)
        gc.collect()

    def do_state(self, name: str) -> str:
        return self.client.transaction_state(self.ids[name]).name

    def do_open(self, name: str) -> str:
        """The state as the handle has it, also when nothing is stored."""
        return self.txns[name].state.name

    def do_abort(self, name: str) -> None:
        self.client.abort_transaction(self.ids[name])

    def do_alive(self, name: str) -> None:
        self.client.keep_transaction_alive(self.ids[name])

    # -- rows --------------------------------------------------------------------------

    def do_insert(self, name: str, *keys: str) -> None:
        table, found = _keys(keys)
        for key in found:
            self.txns[name].insert(table, _row(key))

    def do_ignore(self, name: str, *keys: str) -> None:
        table, found = _keys(keys)
        for key in found:
            self.txns[name].insert_ignore(table, _row(key))

    def do_write(self, name: str, *keys: str) -> int:
        table, found = _keys(keys)
        return self.txns[name].write(table, _batch(found)).inserted

    def do_plain(self, *keys: str) -> int:
        table, found = _keys(keys)
        with self.client.new_session() as session:
            return session.write(table, _batch(found)).inserted

    def do_flush(self, name: str) -> int:
        return self.txns[name].flush().inserted

    def do_session(self, name: str, txn: str, mode: str = "manual") -> None:
        self.sessions[name] = self.txns[txn].new_session(mode)

    def do_apply(self, name: str, *keys: str) -> None:
        table, found = _keys(keys)
        for key in found:
            self.sessions[name].insert(table, _row(key))

    def do_push(self, name: str) -> int:
        return self.sessions[name].flush().inserted

    def do_finish(self, name: str) -> None:
        self.sessions[name].close()

    def do_errors(self, name: str) -> str:
        holder = self.sessions.get(name) or self.txns[name]
        return " ".join(f"{error.key}" for error in holder.pending_errors())

    # -- looking -----------------------------------------------------------------------

    def do_count(self, table: str = "@t") -> int:
        return self.client.table(table[1:]).count()

    def do_keys(self, table: str = "@t") -> str:
        rows = self.client.table(table[1:]).scan(["id"], ordered=True).to_arrow()
        return " ".join(map(str, rows["id"].to_pylist()))

    def do_sees(self, name: str, table: str = "@t") -> str:
        rows = self.txns[name].scan(table[1:], ["id"], ordered=True).to_arrow()
        return " ".join(map(str, rows["id"].to_pylist()))

    def do_staged(self) -> int:
        return int(self.client.stats()["staged_row_sets"])

    # -- the world ---------------------------------------------------------------------

    def do_drop(self, table: str) -> None:
        self.client.drop_table(table[1:])

    def do_forward(self, seconds: str) -> None:
        self._now.forward(float(seconds))

    def do_round(self) -> None:
        assert internals.maintenance(self.client).round(resume_all=True)

    def do_restart(self) -> None:
        """The store is closed and opened; the handles of before are gone."""
        self.txns.clear()
        self.sessions.clear()
        gc.collect()
        self.client.close()
        self.client = self._connect(**self.options)

    def do_shortwait(self) -> None:
        """Have transactions that may wait for a lock give up at once."""
        for txn in self.txns.values():
            txn.context.lock_timeout = 0.05

    def do_large(self) -> None:
        """From now on every write is staged at once."""
        self._patch.setattr("txnkv.tables.write.write_buffer.MAX_ROWS", -1)
        self._patch.setattr("txnkv.tables.write.write_buffer.FEW_ROWS", -1)

    def do_arm(self, name: str, action: str) -> None:
        arm(name, action)

    def do_disarm(self) -> None:
        disarm()


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, {"None": None, "True": True, "False": False}.get(value, _number(value))


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _keys(words: tuple[str, ...]) -> tuple[str, list[int]]:
    table = next((word[1:] for word in words if word.startswith("@")), "t")
    return table, numbers([word for word in words if not word.startswith("@")])


def _row(key: int) -> dict[str, Any]:
    return {"id": key, "v": f"v{key}"}


def _batch(keys: list[int]) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(keys, pa.int64()), "v": [f"v{key}" for key in keys]})


@pytest.fixture
def script(
    connect: Callable[..., txnkv.Client],
    until: Any,
    now: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Transactions:
    """Runs scripts. No background rounds run but those they ask for."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    return Transactions(connect, until, now, monkeypatch)


@pytest.fixture(params=[True, False], ids=["in a transaction", "outside"])
def make(request: pytest.FixtureRequest, client: txnkv.Client) -> Any:
    """A call with a flush mode gives a session and what ends it."""

    def made(mode: str = "manual", **options: Any) -> tuple[txnkv.Session, Any]:
        if not request.param:
            session = client.new_session(mode, **options)
            return session, session.flush
        txn = client.new_transaction()
        return txn.new_session(mode, **options), txn.commit

    return made


# -- topics ----------------------------------------------------------------------------


@pytest.fixture(params=["marker", "sidecar"])
def topic(request: pytest.FixtureRequest, client: txnkv.Client) -> txnkv.Topic:
    """A topic of one partition, of either buffer."""
    return client.create_topic("events", buffer=request.param)


def read(topic: txnkv.Topic, isolation: str = "read_committed") -> list[txnkv.Message]:
    """All messages that a new reader finds, by partition."""
    found: list[txnkv.Message] = []
    with topic.consumer(isolation=isolation) as consumer:
        while some := consumer.poll(max_messages=1000, timeout=0):
            found += some
    return sorted(found, key=lambda message: message.id)


@pytest.fixture
def messages() -> Callable[..., list[txnkv.Message]]:
    """All messages of a topic that a new reader finds, by partition."""
    return read


@pytest.fixture
def values() -> Callable[..., list[bytes | None]]:
    """Their values."""
    return lambda topic, isolation="read_committed": [m.value for m in read(topic, isolation)]


@pytest.fixture(autouse=True)
def always_calm(calm: None) -> None:
    """See `calm`."""
