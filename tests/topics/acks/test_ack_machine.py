"""Acknowledgements against a plain model: a set of what is deleted, and what each transaction has.

The model knows nothing of ranges, leases, versions or memory. After each step the consumer is
given what the model says is to be delivered, neither more nor less, and every finalizer has run.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import txnkv
from tests import internals
from txnkv.storage import settle_dropped
from txnkv.topics.messages.message import MessageId
from txnkv.topics.topic_catalog import TopicOptions

PARTITIONS = 2
NAMES = st.sampled_from("ABC")


@dataclass
class Held:
    """The acknowledgements of a transaction."""

    ones: set[MessageId] = field(default_factory=set)
    positions: dict[int, int] = field(default_factory=dict)

    def covers(self, id: MessageId) -> bool:
        return id in self.ones or id.offset < self.positions.get(id.partition, 0)


class Model:
    """The rules as they are written down."""

    def __init__(self) -> None:
        self.sent: set[MessageId] = set()
        self.deleted: set[MessageId] = set()
        self.held: dict[str, Held] = {}
        self.waiting: set[MessageId] = set()

    def covered(self, id: MessageId) -> set[MessageId]:
        """The message and all before it."""
        return {
            one for one in self.sent if one.partition == id.partition and one.offset <= id.offset
        }

    def pending(self, id: MessageId) -> bool:
        return any(held.covers(id) for held in self.held.values())

    def refuses(self, name: str, id: MessageId, *, cumulative: bool) -> bool:
        own = self.held[name]
        if id in self.deleted or own.covers(id):
            return True
        others = [held for other, held in self.held.items() if other != name]
        named = self.covered(id) if cumulative else {id}
        if cumulative and any(id.partition in held.positions for held in others):
            return True
        return any(held.covers(one) and one not in self.deleted for held in others for one in named)

    def delete(self, ids: set[MessageId]) -> None:
        gone = {one for one in ids if not self.pending(one)}
        self.deleted |= gone
        self.waiting -= gone

    def end(self, name: str, *, commit: bool) -> None:
        held = self.held.pop(name)
        had = {one for one in self.sent if held.covers(one)} - self.deleted
        if commit:
            self.delete(had)
        else:
            self.waiting |= had

    def anew(self) -> None:
        """A new consumer gets all that is neither deleted nor pending."""
        self.waiting = {one for one in self.sent - self.deleted if not self.pending(one)}

    def deliver(self) -> set[MessageId]:
        found = {one for one in self.waiting if not self.pending(one)}
        self.waiting -= found
        return found


class AckMachine(RuleBasedStateMachine):
    """A subscription, three transactions, and the model."""

    options: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.model = Model()
        self.transactions: dict[str, txnkv.Transaction] = {}
        self.tokens: dict[str, str] = {}

    @initialize()
    def begin_store(self) -> None:
        self.client = txnkv.connect(self.folder / "store")
        options = TopicOptions(max_message_bytes=100)
        internals.topics(self.client).create("events", PARTITIONS, "marker", options)
        self.subscribe()
        self.send(3, 0)
        self.send(3, 1)

    def subscribe(self) -> None:
        self.sub = self.client.topic("events").subscribe("s", **self.options)

    @property
    def cumulative(self) -> bool:
        return self.options.get("type") != "shared"

    def teardown(self) -> None:
        if hasattr(self, "client"):
            for name in list(self.transactions):
                self.end(name, commit=False)
            self.reopen()
            self.check_delivered()
            with internals.status(self.client).read() as cur:
                assert cur.execute("SELECT count(*) FROM pending_acks").get == 0
            assert self.client.check().problems == []
            self.client.close()
        shutil.rmtree(self.folder)

    # -- messages ----------------------------------------------------------------------

    @rule(count=st.integers(1, 4), partition=st.integers(0, PARTITIONS - 1))
    def send(self, count: int, partition: int) -> None:
        with self.client.transaction() as txn:
            for _ in range(count):
                txn.send("events", b"x", partition=partition)
        last = self.client.topic("events").end_offsets()[partition]
        new = {MessageId(partition, offset) for offset in range(last - count, last)}
        self.model.sent |= new
        self.model.waiting |= new

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def send_a_large_one(self, partition: int) -> None:
        """In pieces, behind a small one of the same transaction."""
        begin = self.client.topic("events").end_offsets()[partition]
        with self.client.transaction() as txn:
            txn.send("events", b"x", partition=partition)
            txn.send("events", b"x" * 250, partition=partition)
        end = self.client.topic("events").end_offsets()[partition]
        new = {MessageId(partition, begin), MessageId(partition, end - 1)}
        self.model.sent |= new
        self.model.waiting |= new

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def send_and_roll_back(self, partition: int) -> None:
        """Aborted messages and a marker are in the log, and are nobody's."""
        txn = self.client.new_transaction()
        txn.serialize()
        txn.send("events", b"never", partition=partition)
        txn.flush()
        txn.rollback()

    def some(self, data: st.DataObject, of: set[MessageId] | None = None) -> MessageId:
        ids = sorted(self.model.sent if of is None else of)
        return data.draw(st.sampled_from(ids))

    # -- transactions ------------------------------------------------------------------

    def transaction(self, name: str, *, stored: bool) -> txnkv.Transaction:
        if name not in self.transactions:
            self.transactions[name] = self.client.new_transaction(timeout=None)
            self.model.held[name] = Held()
        if stored and name not in self.tokens:
            self.tokens[name] = str(self.transactions[name].serialize())
        return self.transactions[name]

    @rule(name=NAMES, stored=st.booleans(), data=st.data())
    def ack(self, name: str, stored: bool, data: st.DataObject) -> None:
        txn, id = self.transaction(name, stored=stored), self.some(data)
        if self.model.refuses(name, id, cumulative=False):
            self.refused(name, lambda: txn.ack(self.sub, id))
        else:
            txn.ack(self.sub, id)
            self.model.held[name].ones.add(id)

    @precondition(lambda self: self.cumulative)
    @rule(name=NAMES, stored=st.booleans(), data=st.data())
    def ack_cumulative(self, name: str, stored: bool, data: st.DataObject) -> None:
        txn, id = self.transaction(name, stored=stored), self.some(data)
        if self.model.refuses(name, id, cumulative=True):
            self.refused(name, lambda: txn.ack_cumulative(self.sub, id))
        else:
            txn.ack_cumulative(self.sub, id)
            self.model.held[name].positions[id.partition] = id.offset + 1

    @rule(name=NAMES, stored=st.booleans(), data=st.data())
    def ack_of_nothing(self, name: str, stored: bool, data: st.DataObject) -> None:
        """It is refused with what stands beside it, and the transaction goes on."""
        txn, id = self.transaction(name, stored=stored), self.some(data)
        with pytest.raises(txnkv.OffsetOutOfRangeError):
            txn.ack(self.sub, [id, MessageId(id.partition, 1 << 40)])

    @rule(data=st.data())
    def ack_of_two(self, data: st.DataObject) -> None:
        """In one call, of two partitions perhaps; a conflict takes neither."""
        ids = {self.some(data), self.some(data)}
        txn = self.client.new_transaction()
        self.model.held["D"] = Held()
        refused = any(self.model.refuses("D", id, cumulative=False) for id in ids)
        del self.model.held["D"]
        if not refused:
            txn.ack(self.sub, sorted(ids))
            txn.commit()
            self.model.delete(ids)
            return
        with pytest.raises(txnkv.AckConflictError) as self.error:  # looked at from now on
            txn.ack(self.sub, sorted(ids))
        assert txn.state is txnkv.TxnState.ABORTED
        self.taken_by_the_refused(ids)

    def taken_by_the_refused(self, ids: set[MessageId]) -> None:
        """Neither is pending: whoever had it before may acknowledge it."""
        free = {id for id in ids - self.model.deleted if not self.model.pending(id)}
        self.sub.nack(sorted(free))
        self.model.waiting |= free

    def refused(self, name: str, ack: Any) -> None:
        with pytest.raises(txnkv.AckConflictError):
            ack()
        assert self.transactions.pop(name).state is txnkv.TxnState.ABORTED
        self.tokens.pop(name, None)
        self.model.end(name, commit=False)

    @precondition(lambda self: self.transactions)
    @rule(data=st.data(), commit=st.booleans())
    def end_one(self, data: st.DataObject, commit: bool) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.transactions))), commit=commit)

    def end(self, name: str, *, commit: bool) -> None:
        txn = self.transactions.pop(name)
        self.tokens.pop(name, None)
        (txn.commit if commit else txn.rollback)()
        self.model.end(name, commit=commit)

    # -- outside of transactions -------------------------------------------------------

    @rule(data=st.data())
    def plain_ack(self, data: st.DataObject) -> None:
        id = self.some(data)
        self.sub.ack(id)
        self.model.delete({id})

    @precondition(lambda self: self.cumulative)
    @rule(data=st.data())
    def plain_cumulative_ack(self, data: st.DataObject) -> None:
        id = self.some(data)
        self.sub.ack_cumulative(id)
        self.model.delete(self.model.covered(id))

    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        id = self.some(data)
        self.sub.nack(id)
        if id not in self.model.deleted and not self.model.pending(id):
            self.model.waiting.add(id)

    # -- consumers ---------------------------------------------------------------------

    @rule()
    def subscribe_again(self) -> None:
        self.sub.close()
        self.subscribe()
        self.model.anew()

    @rule()
    def reopen(self) -> None:
        """Small transactions go with the client, stored ones are joined again."""
        for name in [name for name in self.transactions if name not in self.tokens]:
            self.end(name, commit=False)
        self.sub.close()
        self.client.close()
        self.client = txnkv.connect(self.folder / "store")
        for name, token in self.tokens.items():
            self.transactions[name] = txnkv.Transaction.deserialize(self.client, token)
        self.subscribe()
        self.model.anew()

    @rule()
    def flush(self) -> None:
        internals.flush(self.client)

    @invariant()
    def check_delivered(self) -> None:
        if hasattr(self, "sub"):
            gc.collect(1)
            settle_dropped()
            found = [m.id for m in self.sub.receive_many(1000, timeout=0)]
            assert len(found) == len(set(found))
            assert set(found) == self.model.deliver()


OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"type": "shared", "lease_seconds": 3600}, {"max_deliveries": 1_000_000}],
    ids=["exclusive", "shared", "counted"],
)
FEW = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # made smaller in the long run alone
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=300, stateful_step_count=50, phases=tuple(Phase))


@OPTIONS
def test_acknowledgements_are_what_the_model_says(options: dict[str, Any]) -> None:
    run(options, FEW)


@pytest.mark.slow
@OPTIONS
def test_acknowledgements_are_what_the_model_says_for_long(options: dict[str, Any]) -> None:
    run(options, MANY)


def run(options: dict[str, Any], chosen: settings) -> None:
    machine = type("Machine", (AckMachine,), {"options": options})
    run_state_machine_as_test(machine, settings=chosen)
