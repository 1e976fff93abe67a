"""The rules of acknowledgement, row by row: who may acknowledge what, in which state it is.

    PENDING -- ack in a transaction --> PENDING_ACK -- commit --> DELETED
        ^------------------ abort ----------'

Each row runs with an exclusive and a shared subscription, with transactions that are small and
stored ones. A is the transaction that holds the message, B another one.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.storage import settle_dropped
from txnkv.topics.acks import ack_rows
from txnkv.topics.delivery import leases
from txnkv.topics.messages.message import MessageId
from txnkv.topics.topic_catalog import TopicOptions

COUNT = 6
TYPES = ("exclusive", "counted", "shared")
TAKE_CUMULATIVE = pytest.mark.parametrize("type", ["exclusive", "counted"], indirect=True)


class Acks:
    """A topic with messages 0 .. 5 in one partition, all of them received once.

    Attributes:
        cumulative: whether the subscription takes cumulative acks.
    """

    def __init__(self, client: txnkv.Client, type: str, stored: str) -> None:
        self.client = client
        self.topic = client.create_topic("events")
        for number in range(COUNT):
            with client.transaction() as txn:
                txn.send("events", str(number))
        self.cumulative = type != "shared"
        self._stored = {"small": "", "large": "AB", "A large": "A", "B large": "B"}[stored]
        self._options: dict[str, Any] = (
            {"type": "exclusive", "max_deliveries": 1000}
            if type == "counted"
            else {"type": type, "lease_seconds": 3600}
        )
        self.sub = self.subscribe()
        self.messages = self.sub.receive_many(COUNT, timeout=0)
        assert [int(m.value or b"") for m in self.messages] == list(range(COUNT))

    def subscribe(self) -> txnkv.Subscription:
        return self.topic.subscribe("s", **self._options)

    def begin(self, name: str) -> txnkv.Transaction:
        txn = self.client.new_transaction()
        if name in self._stored:
            txn.serialize()
        return txn

    def ack(self, number: int, txn: txnkv.Transaction | None = None) -> None:
        self.sub.ack(self.messages[number], txn)

    def ack_to(self, number: int, txn: txnkv.Transaction | None = None) -> None:
        self.sub.ack_cumulative(self.messages[number], txn)

    def refused(self, ack: Callable[..., None], number: int, txn: txnkv.Transaction) -> None:
        """The ack is a conflict, and its transaction is aborted whole."""
        with pytest.raises(txnkv.AckConflictError):
            ack(number, txn)
        assert txn.state is txnkv.TxnState.ABORTED

    def delivered(self) -> list[int]:
        """Return the messages that are delivered again without asking."""
        found = self.sub.receive_many(100, timeout=0)
        return sorted(int(m.value or b"") for m in found)

    def left(self) -> list[int]:
        """Return the messages that a new consumer gets: neither deleted nor pending."""
        self.sub.close()
        self.sub = self.subscribe()
        return self.delivered()


@pytest.fixture(params=TYPES)
def type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["small", "large", "A large", "B large"])
def acks(request: pytest.FixtureRequest, client: txnkv.Client, type: str) -> Iterator[Acks]:
    found = Acks(client, type, request.param)
    yield found
    found.sub.close()


# -- PENDING ---------------------------------------------------------------------------


def test_pending_plain_ack_deletes(acks: Acks) -> None:
    acks.ack(2)
    assert acks.left() == [0, 1, 3, 4, 5]


@TAKE_CUMULATIVE
def test_pending_plain_cumulative_ack_deletes(acks: Acks) -> None:
    acks.ack_to(2)
    assert acks.left() == [3, 4, 5]


def test_pending_ack_in_a_transaction_then_commit_deletes(acks: Acks) -> None:
    b = acks.begin("B")
    acks.ack(2, b)
    assert acks.left() == [0, 1, 3, 4, 5]
    b.commit()
    assert acks.left() == [0, 1, 3, 4, 5]


def test_pending_ack_in_a_transaction_then_abort_delivers_again(acks: Acks) -> None:
    b = acks.begin("B")
    acks.ack(2, b)
    assert acks.delivered() == []
    b.rollback()
    assert acks.delivered() == [2]
    assert acks.delivered() == []


@TAKE_CUMULATIVE
def test_pending_cumulative_ack_in_a_transaction(acks: Acks) -> None:
    b = acks.begin("B")
    acks.ack_to(2, b)
    assert acks.delivered() == []
    b.rollback()
    assert acks.delivered() == [0, 1, 2]
    a = acks.begin("A")
    acks.ack_to(1, a)
    a.commit()
    assert acks.left() == [2, 3, 4, 5]


def test_pending_negative_ack_delivers_again(acks: Acks) -> None:
    acks.sub.nack(acks.messages[3])
    assert acks.delivered() == [3]


# -- PENDING_ACK, A individually -------------------------------------------------------


def test_individually_pending_plain_ack_is_dropped(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack(2, a)
    acks.ack(2)
    a.rollback()
    assert acks.delivered() == [2]


@TAKE_CUMULATIVE
def test_individually_pending_plain_cumulative_ack_is_dropped_for_it(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack(2, a)
    acks.ack_to(4)
    assert acks.delivered() == []
    a.rollback()
    assert acks.delivered() == [2]
    assert acks.left() == [2, 5]


def test_individually_pending_refuses_the_ack_of_another(acks: Acks) -> None:
    a, b = acks.begin("A"), acks.begin("B")
    acks.ack(2, a)
    acks.ack(3, b)
    acks.refused(acks.ack, 2, b)
    assert acks.delivered() == [3]  # the later one is aborted whole
    a.commit()
    assert acks.left() == [0, 1, 3, 4, 5]


@TAKE_CUMULATIVE
def test_individually_pending_refuses_the_cumulative_ack_of_another(acks: Acks) -> None:
    for number in (2, 4):  # the message itself, and one behind it
        a, b = acks.begin("A"), acks.begin("B")
        acks.ack(2, a)
        acks.refused(acks.ack_to, number, b)
        a.rollback()
        assert acks.delivered() == [2]


@TAKE_CUMULATIVE
def test_a_cumulative_ack_below_what_is_pending_is_no_conflict(acks: Acks) -> None:
    a, b = acks.begin("A"), acks.begin("B")
    acks.ack(2, a)
    acks.ack_to(1, b)
    a.commit()
    b.commit()
    assert acks.left() == [3, 4, 5]


def test_individually_pending_refuses_a_again(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack(2, a)
    acks.refused(acks.ack, 2, a)
    assert acks.delivered() == [2]


@TAKE_CUMULATIVE
def test_individually_pending_refuses_a_cumulatively_at_it(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack(2, a)
    acks.refused(acks.ack_to, 2, a)
    assert acks.delivered() == [2]


def test_individually_pending_is_not_delivered_to_a_new_consumer(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack(2, a)
    assert acks.left() == [0, 1, 3, 4, 5]
    a.rollback()
    assert acks.delivered() == [2]


def test_an_abort_without_a_consumer_delivers_again(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack(2, a)
    acks.sub.close()
    a.rollback()
    assert acks.left() == [0, 1, 2, 3, 4, 5]
    if acks.cumulative:
        b = acks.begin("B")
        acks.ack_to(2, b)
        acks.sub.close()
        b.rollback()
        assert acks.left() == [0, 1, 2, 3, 4, 5]


def test_individually_pending_ignores_a_negative_ack(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack(2, a)
    acks.sub.nack(acks.messages[2])
    assert acks.delivered() == []
    a.commit()
    assert acks.delivered() == []


# -- PENDING_ACK, A cumulatively to p --------------------------------------------------


@TAKE_CUMULATIVE
def test_cumulatively_pending_plain_ack_is_dropped(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack_to(3, a)
    acks.ack(1)
    acks.ack(3)
    a.rollback()
    assert acks.delivered() == [0, 1, 2, 3]


@TAKE_CUMULATIVE
def test_cumulatively_pending_plain_cumulative_ack_is_dropped_up_to_it(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack_to(2, a)
    acks.ack_to(4)
    a.rollback()
    assert acks.delivered() == [0, 1, 2]
    assert acks.left() == [0, 1, 2, 5]


@TAKE_CUMULATIVE
@pytest.mark.parametrize("number", [1, 3])
def test_cumulatively_pending_refuses_the_ack_of_another(acks: Acks, number: int) -> None:
    a, b = acks.begin("A"), acks.begin("B")
    acks.ack_to(3, a)
    acks.refused(acks.ack, number, b)
    a.commit()
    assert acks.left() == [4, 5]


@TAKE_CUMULATIVE
@pytest.mark.parametrize("number", [1, 3, 5])
def test_cumulatively_pending_refuses_the_cumulative_ack_of_another(
    acks: Acks, number: int
) -> None:
    a, b = acks.begin("A"), acks.begin("B")
    acks.ack_to(3, a)
    acks.refused(acks.ack_to, number, b)
    a.commit()
    assert acks.left() == [4, 5]


@TAKE_CUMULATIVE
def test_cumulatively_pending_a_extends_to_a_larger_position(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack_to(1, a)
    acks.ack_to(3, a)
    a.commit()
    assert acks.left() == [4, 5]


@TAKE_CUMULATIVE
@pytest.mark.parametrize("number", [3, 1])
def test_cumulatively_pending_refuses_a_at_an_equal_or_lower_position(
    acks: Acks, number: int
) -> None:
    a = acks.begin("A")
    acks.ack_to(3, a)
    acks.refused(acks.ack_to, number, a)
    assert acks.delivered() == [0, 1, 2, 3]


@TAKE_CUMULATIVE
def test_cumulatively_pending_refuses_a_individually_below(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack_to(3, a)
    acks.refused(acks.ack, 2, a)


@TAKE_CUMULATIVE
def test_cumulatively_pending_is_not_delivered_to_a_new_consumer(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack_to(3, a)
    assert acks.left() == [4, 5]
    a.rollback()
    assert acks.delivered() == [0, 1, 2, 3]


@TAKE_CUMULATIVE
def test_cumulatively_pending_ignores_a_negative_ack(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack_to(3, a)
    acks.sub.nack(acks.messages[:2])
    assert acks.delivered() == []
    a.commit()
    assert acks.delivered() == []


# -- DELETED ---------------------------------------------------------------------------


@pytest.fixture(params=["plainly", "in a transaction"])
def deleted(request: pytest.FixtureRequest, acks: Acks) -> Acks:
    """Message 2 is deleted."""
    if request.param == "plainly":
        acks.ack(2)
    else:
        with acks.begin("A") as a:
            acks.ack(2, a)
    return acks


def test_deleted_plain_acks_have_no_effect(deleted: Acks) -> None:
    deleted.ack(2)
    if deleted.cumulative:
        deleted.ack_to(2)
        assert deleted.left() == [3, 4, 5]
    else:
        assert deleted.left() == [0, 1, 3, 4, 5]


def test_deleted_refuses_a_transaction(deleted: Acks) -> None:
    deleted.refused(deleted.ack, 2, deleted.begin("B"))
    if deleted.cumulative:
        deleted.refused(deleted.ack_to, 2, deleted.begin("B"))
    assert deleted.left() == [0, 1, 3, 4, 5]


def test_deleted_is_never_delivered(deleted: Acks) -> None:
    deleted.sub.nack(deleted.messages[2])
    assert deleted.delivered() == []
    assert deleted.left() == [0, 1, 3, 4, 5]


# -- four faults seen elsewhere --------------------------------------------------------


@TAKE_CUMULATIVE
def test_a_plain_cumulative_ack_beyond_a_pending_one_and_then_its_commit(acks: Acks) -> None:
    """The commit found the cursor beyond its position, and failed."""
    a = acks.begin("A")
    acks.ack_to(1, a)
    acks.ack_to(4)
    a.commit()
    assert acks.left() == [5]


@TAKE_CUMULATIVE
def test_individual_acks_commit_while_a_cumulative_one_is_pending(acks: Acks) -> None:
    """The individual ones were looked for in the cumulative transaction, and forgotten."""
    a, b = acks.begin("A"), acks.begin("B")
    acks.ack_to(1, a)
    acks.ack(3, b)
    b.commit()
    a.rollback()
    assert acks.delivered() == [0, 1]
    assert acks.left() == [0, 1, 2, 4, 5]


@TAKE_CUMULATIVE
@pytest.mark.parametrize("first", ["individual", "cumulative"])
def test_both_kinds_in_one_transaction(acks: Acks, first: str) -> None:
    """One kind was applied, the other one lost."""
    a = acks.begin("A")
    if first == "individual":
        acks.ack(4, a)
        acks.ack_to(1, a)
    else:
        acks.ack_to(1, a)
        acks.ack(4, a)
    a.commit()
    assert acks.left() == [2, 3, 5]


@TAKE_CUMULATIVE
def test_a_cumulative_ack_over_own_individual_ones(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack(1, a)
    acks.ack_to(3, a)
    a.rollback()
    assert acks.delivered() == [0, 1, 2, 3]
    with acks.begin("A") as a:
        acks.ack(1, a)
        acks.ack_to(3, a)
    assert acks.left() == [4, 5]


@TAKE_CUMULATIVE
def test_an_abort_leaves_the_pending_cumulative_ack_of_another(
    store_path: object, client: txnkv.Client, type: str, elsewhere: Callable[..., object]
) -> None:
    """After a crash the replay of B's abort took A's acks away."""
    acks = Acks(client, type, "large")
    a, b = acks.begin("A"), acks.begin("B")
    acks.ack_to(1, a)
    acks.ack(3, b)
    b.rollback()
    options = acks._options
    acks.sub.close()
    code = """
sub = client.topic("events").subscribe("s", **how)
say(sorted(int(m.value) for m in sub.receive_many(100, timeout=0)))
"""
    assert elsewhere(code, how=options) == [2, 3, 4, 5]
    a.commit()
    assert elsewhere(code, how=options) == [2, 3, 4, 5]


# -- more of the same ------------------------------------------------------------------


def test_a_refused_transaction_takes_its_rows_with_it(acks: Acks) -> None:
    client = acks.client
    schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
    client.create_table("t", schema)
    a, b = acks.begin("A"), acks.begin("B")
    acks.ack(2, a)
    b.insert("t", {"id": 1})
    b.send("events", "of b")
    acks.refused(acks.ack, 2, b)
    a.commit()
    assert client.table("t").count() == 0
    assert acks.left() == [0, 1, 3, 4, 5]


def test_no_other_transaction_of_many_is_touched(acks: Acks) -> None:
    open_ones = [acks.begin("AB"[number % 2]) for number in range(4)]
    for number, txn in enumerate(open_ones):
        acks.ack(number, txn)
    open_ones[1].rollback()
    assert acks.delivered() == [1]
    open_ones[2].commit()
    assert acks.left() == [1, 4, 5]
    open_ones[0].rollback()
    assert acks.delivered() == [0]
    open_ones[3].commit()
    assert acks.left() == [0, 1, 4, 5]


def test_several_messages_in_one_call_fail_as_a_whole(acks: Acks) -> None:
    a, b = acks.begin("A"), acks.begin("B")
    acks.ack(3, a)
    with pytest.raises(txnkv.AckConflictError):
        acks.sub.ack(acks.messages[2:5], b)
    assert b.state is txnkv.TxnState.ABORTED
    a.commit()
    assert acks.left() == [0, 1, 2, 4, 5]


def test_several_messages_in_one_call(acks: Acks) -> None:
    with acks.begin("A") as a:
        acks.sub.ack(acks.messages[1:4], a)
    acks.sub.ack([m.id for m in acks.messages[4:]])
    assert acks.left() == [0]


def test_a_cumulative_ack_of_a_shared_subscription_is_refused(
    client: txnkv.Client,
) -> None:
    acks = Acks(client, "shared", "small")
    with pytest.raises(txnkv.NotSupportedError, match="shared"):
        acks.ack_to(2)
    with client.transaction() as txn, pytest.raises(txnkv.NotSupportedError, match="shared"):
        acks.ack_to(2, txn)
    assert acks.left() == [0, 1, 2, 3, 4, 5]


def test_what_was_never_sent_is_not_acknowledged(acks: Acks) -> None:
    with pytest.raises(txnkv.OffsetOutOfRangeError):
        acks.sub.ack(MessageId(0, 1000))
    with pytest.raises(txnkv.OffsetOutOfRangeError):
        acks.sub.ack(MessageId(1, 0))
    txn = acks.begin("A")
    with pytest.raises(txnkv.OffsetOutOfRangeError):
        acks.sub.ack(MessageId(0, 1000), txn)
    txn.rollback()


def test_what_is_not_decided_is_not_acknowledged(acks: Acks) -> None:
    """It cannot have been delivered, and its acknowledgement would lose it."""
    open_one = acks.client.new_transaction()
    open_one.serialize()
    open_one.send("events", b"6")
    open_one.flush()
    for ack in (acks.sub.ack, acks.sub.ack_cumulative) if acks.cumulative else (acks.sub.ack,):
        with pytest.raises(txnkv.OffsetOutOfRangeError):
            ack(MessageId(0, COUNT))
        with pytest.raises(txnkv.OffsetOutOfRangeError):
            ack(MessageId(0, COUNT), acks.begin("A"))
    open_one.commit()
    assert acks.left() == [0, 1, 2, 3, 4, 5, 6]


@TAKE_CUMULATIVE
@pytest.mark.parametrize("transactional", [False, True])
def test_a_cumulative_ack_of_what_was_not_delivered_is_of_all_before_it(
    acks: Acks, transactional: bool
) -> None:
    """The rule of Pulsar: what was sent and committed may be acknowledged, delivered or not."""
    with acks.client.transaction() as txn:
        for number in range(6, 9):
            txn.send("events", str(number))
    if not transactional:
        acks.sub.ack_cumulative(MessageId(0, 7))
        assert acks.delivered() == [8]
        return
    a = acks.begin("A")
    acks.sub.ack_cumulative(MessageId(0, 7), a)
    assert acks.delivered() == [8]
    a.rollback()
    assert acks.delivered() == [0, 1, 2, 3, 4, 5, 6, 7]
    with acks.client.transaction() as txn:
        txn.ack_cumulative(acks.sub, MessageId(0, 7))
    assert acks.left() == [8]


def test_an_ack_after_the_end_is_refused(acks: Acks) -> None:
    """A late ack of an ended transaction was accepted, and stayed pending for ever."""
    a = acks.begin("A")
    acks.ack(1, a)
    a.commit()
    with pytest.raises(txnkv.InvalidTxnStateError):
        acks.ack(2, a)
    assert acks.left() == [0, 2, 3, 4, 5]


# -- what is refused leaves nothing behind ---------------------------------------------


def collected() -> None:
    """Finalizers of what nothing refers to have run."""
    gc.collect()
    settle_dropped()


@pytest.mark.parametrize("late", [False, True], ids=["refused first", "refused later"])
def test_a_refused_ack_gives_nothing_of_its_transaction_back(acks: Acks, late: bool) -> None:
    """The remains of the refused ack gave back, when they were collected, all acks of its
    transaction, which then committed: output there, input delivered again.
    """
    a = acks.begin("A")
    if late:
        acks.ack(1, a)
    with pytest.raises(txnkv.OffsetOutOfRangeError) as error:
        acks.sub.ack(MessageId(0, 1000), a)
    acks.ack(2, a)
    a.serialize()
    del error
    collected()
    assert acks.delivered() == []
    a.commit()
    assert acks.left() == ([0, 3, 4, 5] if late else [0, 1, 3, 4, 5])


def test_an_ack_that_a_full_disk_refused_gives_nothing_back(
    acks: Acks, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = acks.begin("A")
    register = ack_rows.register
    full = threading.Event()
    full.set()

    def refuse(*args: Any) -> int:
        if full.is_set():
            raise txnkv.StorageFullError("no room")
        return register(*args)

    monkeypatch.setattr(ack_rows, "register", refuse)
    in_memory = False
    try:
        acks.ack(1, a)
        in_memory = True
        a.serialize()
    except txnkv.StorageFullError:
        pass
    collected()
    full.clear()
    acks.ack(2, a)
    collected()
    a.commit()
    assert acks.left() == ([0, 3, 4, 5] if in_memory else [0, 1, 3, 4, 5])


@pytest.mark.parametrize("stored", ["small", "large"])
def test_a_conflict_in_one_partition_holds_nothing_of_another(
    client: txnkv.Client, type: str, stored: str
) -> None:
    """The message of the other was nobody's for as long as the error was looked at."""
    topic = client.create_topic("two", partitions=2)
    with client.transaction() as txn:
        for number in range(2):
            txn.send("two", str(number), partition=number)
    options = {"max_deliveries": 9} if type == "counted" else {"type": type}
    sub = topic.subscribe("s", **options)
    messages = {m.partition: m for m in sub.receive_many(2, timeout=0)}
    a, b = client.new_transaction(), client.new_transaction()
    if stored == "large":
        b.serialize()
    sub.ack(messages[1], a)
    with pytest.raises(txnkv.AckConflictError) as error:
        sub.ack([messages[0], messages[1]], b)
    with client.transaction() as txn:
        txn.ack(sub, messages[0])
    assert error.value is not None  # it keeps its traceback alive
    a.commit()
    assert sub.lag() == {0: 0, 1: 0}
    sub.close()


# -- two processes ---------------------------------------------------------------------

BY_TOKEN = """
joined = txnkv.Transaction.deserialize(client, token)
joined.ack(info, id)
joined.flush()
"""


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("first", ["here", "there", "rolled back"])
def test_two_processes_have_one_message_and_one_commits(
    client: txnkv.Client, elsewhere: Callable[..., Any], looks: bool, first: str
) -> None:
    """Both did, when the consumer had looked for messages between ack and commit."""
    acks = Acks(client, "exclusive", "small")
    here, there = client.new_transaction(), client.new_transaction()
    acks.ack(1, here)
    elsewhere(BY_TOKEN, token=str(there.serialize()), info=acks.sub.info, id=acks.messages[1].id)
    if looks:
        assert acks.delivered() == []
    if first == "rolled back":
        there.rollback()
        here.commit()
        assert acks.left() == [0, 2, 3, 4, 5]
        return
    if first == "there":
        there.commit()
    with pytest.raises(txnkv.AckConflictError):
        here.commit()
    assert here.state is txnkv.TxnState.ABORTED
    there.commit()
    assert acks.left() == [0, 2, 3, 4, 5]


def test_a_consumer_closes_over_an_ack_that_another_process_has(
    client: txnkv.Client, elsewhere: Callable[..., Any]
) -> None:
    """`close` raised, kept the place, and left the acks of other transactions behind."""
    acks = Acks(client, "exclusive", "small")
    loses, other, joined = (client.new_transaction() for _ in range(3))
    acks.ack(1, loses)
    acks.ack(2, other)
    elsewhere(BY_TOKEN, token=str(joined.serialize()), info=acks.sub.info, id=acks.messages[1].id)
    assert acks.left() == [0, 3, 4, 5]
    with pytest.raises(txnkv.AckConflictError):
        loses.commit()
    other.commit()
    joined.rollback()
    assert acks.delivered() == [1]


def test_a_consumer_closes_on_a_full_disk(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks = Acks(client, "exclusive", "small")
    txn = client.new_transaction()
    acks.ack(1, txn)

    def refuse(*args: Any) -> int:
        raise txnkv.StorageFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(ack_rows, "register", refuse)
        acks.sub.close()
    with pytest.raises(txnkv.AckConflictError, match="no room"):
        txn.ack(acks.sub.info, acks.messages[2])
    assert txn.state is txnkv.TxnState.ABORTED
    assert acks.left() == [0, 1, 2, 3, 4, 5]


# -- copies ----------------------------------------------------------------------------


def test_messages_of_a_copy_are_acknowledged_in_a_transaction(
    client: txnkv.Client, tmp_path: Path
) -> None:
    """The acks were refused: it is a copy. Dead letters made `receive` raise for ever."""
    client.create_topic("events")
    with client.transaction() as txn:
        txn.send("events", b"0")
        txn.send("events", b"1")
    txnkv.replicate(client, tmp_path / "copy")
    with txnkv.connect(tmp_path / "copy") as copy:
        with copy.topic("events").subscribe("s", max_deliveries=1, dead_letter="dead") as sub:
            got = sub.receive_many(2, timeout=0)
            with copy.transaction() as txn:
                txn.ack(sub, got[0])
            sub.nack(got[1])
            assert sub.receive(timeout=0) is None
            assert sub.lag() == {0: 0}
        with copy.topic("dead").subscribe("s") as dead:
            assert [m.value for m in dead.receive_many(2, timeout=0)] == [b"1"]


# -- sessions outside of transactions ---------------------------------------------------


def test_a_session_says_what_it_cannot_acknowledge_and_lets_go(acks: Acks) -> None:
    """The ack waited on after each flush that failed, and let none pass."""
    with acks.client.new_session() as session:
        with pytest.raises(txnkv.OffsetOutOfRangeError):
            session.ack(acks.sub, MessageId(0, 1000))
        session.ack(acks.sub, acks.messages[1])
        assert session.flush().acked == 1
    assert acks.left() == [0, 2, 3, 4, 5]


def test_a_session_lets_go_of_acks_of_a_dropped_topic(acks: Acks) -> None:
    table = acks.client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    with acks.client.new_session() as session:
        session.insert(table, {"id": 1})
        session.ack(acks.sub, acks.messages[1])
        acks.client.drop_topic("events")
        with pytest.raises(txnkv.TopicNotFoundError):
            session.flush()
        assert session.flush().acked == 0
        with pytest.raises(txnkv.TopicNotFoundError):
            session.ack(acks.sub, acks.messages[2])
    assert table.count() == 1
    with pytest.raises(txnkv.TopicNotFoundError):
        acks.sub.receive(timeout=0)


# -- a subscription that is dropped -----------------------------------------------------


@pytest.mark.parametrize("looks", [False, True])
def test_dropping_a_subscription_aborts_who_acknowledged_its_messages(
    acks: Acks, looks: bool
) -> None:
    acks.client.create_topic("out")
    a = acks.begin("A")
    acks.ack(1, a)
    a.send("out", b"1")
    acks.topic.drop_subscription("s")
    assert acks.topic.subscriptions() == []
    if looks:
        with pytest.raises(txnkv.TopicNotFoundError):
            acks.delivered()
    with pytest.raises(txnkv.InvalidTxnStateError, match="dropped"):
        a.commit()
    assert a.state is txnkv.TxnState.ABORTED
    assert acks.client.topic("out").last_stable_offsets() == acks.client.topic("out").end_offsets()
    late = acks.begin("B")
    with pytest.raises(txnkv.TopicNotFoundError, match="dropped"):
        acks.ack(2, late)
    late.rollback()
    with pytest.raises(txnkv.TopicNotFoundError, match="no subscription 's'"):
        acks.topic.drop_subscription("s")
    acks.topic.drop_subscription("s", missing_ok=True)
    assert acks.left() == [0, 1, 2, 3, 4, 5]
    assert acks.client.check().problems == []


# -- what people see --------------------------------------------------------------------


def test_who_holds_which_message(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack(1, a)
    acks.sub.nack(acks.messages[4])
    found = leases.held_messages(acks.client.instance.topics, acks.sub.info)
    states = {each.first: (each.state, each.pid) for each in found.held}
    pending = ("pending", None if "A" in acks._stored else os.getpid())
    if acks.client.instance.topics.local.exclusive(acks.sub.info.id) is None:  # counted, or shared
        leased = ("leased", os.getpid())
        free = ("free", None)
        assert states == {0: leased, 1: pending, 2: leased, 3: leased, 4: free, 5: leased}
    else:
        assert states == ({1: pending} if "A" in acks._stored else {})
    shared = acks.sub.info.type == "shared"
    assert found.consumer_pid == (None if shared else os.getpid())
    assert {each.txn_id for each in found.held} <= {a.id, None}
    seen = acks.client.stats()["topics"]["events"]["subscriptions"]["s"]
    assert (seen["lag"], seen["type"]) == (6, acks.sub.info.type)
    a.rollback()


def test_lag_is_0_when_all_is_done(acks: Acks) -> None:
    """Markers and aborted messages behind the last one were counted."""
    for end in ("rollback", "commit"):
        txn = acks.client.new_transaction()
        txn.serialize()
        txn.send("events", b"6")
        getattr(txn, end)()
    last = acks.sub.receive(timeout=0)
    assert last is not None
    acks.sub.ack(acks.messages)
    assert acks.sub.lag()[0] > 0
    acks.sub.ack(last)
    assert acks.sub.lag() == {0: 0}


def test_redeliveries_are_counted(acks: Acks) -> None:
    assert [m.redelivery_count for m in acks.messages] == [0] * COUNT
    for count in (1, 2):
        acks.sub.nack(acks.messages[2])
        (again,) = acks.sub.receive_many(10, timeout=0)
        assert (again.offset, again.redelivery_count) == (2, count)
    a = acks.begin("A")
    acks.ack(2, a)
    a.rollback()
    (again,) = acks.sub.receive_many(10, timeout=0)
    assert again.redelivery_count == 3
    assert again == acks.messages[2]
    metrics = acks.client.metrics()
    assert (metrics["messages_delivered"], metrics["messages_redelivered"]) == (COUNT + 3, 3)
    other, late = acks.begin("A"), acks.begin("B")
    acks.ack(1, other)
    acks.refused(acks.ack, 1, late)
    assert acks.client.metrics()["ack_conflicts"] == 1
    other.rollback()


def test_messages_sent_and_acknowledged_are_counted(acks: Acks) -> None:
    """Once each, whatever becomes of the transaction."""
    metrics = acks.client.metrics

    def counts() -> tuple[int, int]:
        found = metrics()
        return found["messages_sent"], found["messages_acked"]

    assert counts() == (COUNT, 0)
    with acks.begin("A") as a:
        acks.sub.ack(acks.messages[:2], a)
        a.send("events", b"6")
    acks.ack(2)
    assert counts() == (COUNT + 1, 3)
    b = acks.begin("B")
    acks.ack(3, b)
    b.send("events", b"7")
    b.flush()
    b.rollback()
    assert counts() == (COUNT + 2, 4)
    with acks.topic.producer() as producer:
        producer.send(b"8")
    with acks.client.new_session() as session:
        session.send("events", b"9")
        session.ack(acks.sub, acks.messages[4])
        session.send_batch("events", pa.table({"value": [b"10", b"11"]}))
    assert counts() == (COUNT + 6, 5)


# -- large messages ----------------------------------------------------------------------


@pytest.fixture(params=["plainly", "in a transaction"])
def large(
    request: pytest.FixtureRequest, client: txnkv.Client, type: str
) -> Callable[..., list[int]]:
    """Acknowledges offsets 0 (a), 1 to 3 (a large message in pieces) or 4 (b); answers what a new
    consumer gets.
    """
    client.instance.topics.create("large", 1, "marker", TopicOptions(max_message_bytes=1000))
    topic = client.topic("large")
    options: Any = {"max_deliveries": 1000} if type == "counted" else {"type": type}
    with client.transaction() as txn:
        for value in ("a", "L" * 2500, "b"):
            txn.send("large", value)

    def left(how: str, *offsets: int) -> list[int]:
        ids = [MessageId(0, offset) for offset in offsets]
        with topic.subscribe("s", **options) as sub:
            sub.receive_many(9, timeout=0)
            if request.param == "plainly":
                getattr(sub, how)(ids)
            else:
                with client.transaction() as txn:
                    getattr(txn, how)(sub, ids)
        with topic.subscribe("s", **options) as sub:
            return sorted(message.offset for message in sub.receive_many(9, timeout=0))

    return left


def test_an_ack_of_a_piece_is_of_no_message(large: Callable[..., list[int]]) -> None:
    assert large("ack", 1) == [0, 3, 4]
    assert large("ack", 0, 2) == [3, 4]
    assert large("ack", 3) == [4]


@TAKE_CUMULATIVE
@pytest.mark.parametrize("piece", [1, 2])
def test_a_cumulative_ack_of_a_piece_is_of_the_messages_before(
    large: Callable[..., list[int]], piece: int
) -> None:
    """The cursor stands inside of the large message, which was left out then."""
    assert large("ack_cumulative", piece) == [3, 4]
    assert large("ack_cumulative", 3) == [4]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("how", ["ack", "ack_cumulative"])
def test_small_messages_before_a_large_one_come_again(
    client: txnkv.Client, type: str, stored: bool, how: str
) -> None:
    """Only the large one did, and a cumulative ack of what came next lost the others."""
    client.instance.topics.create("large", 1, "marker", TopicOptions(max_message_bytes=100))
    topic = client.topic("large")
    options: Any = {"max_deliveries": 1000} if type == "counted" else {"type": type}
    values = [b"a", b"b", b"x" * 1000, b"c"]
    with client.transaction() as txn:
        for value in values:
            txn.send(topic, value)
    sub = topic.subscribe("s", **options)
    messages = sub.receive_many(9, timeout=0)
    a = client.new_transaction()
    if stored:
        a.serialize()
    if how == "ack_cumulative" and type != "shared":
        a.ack_cumulative(sub, messages[2])
    else:
        a.ack(sub, messages[:3])
    a.rollback()
    assert [m.value for m in sub.receive_many(9, timeout=0)] == values[:3]
    sub.ack(messages[3])
    sub.close()
    again = topic.subscribe("s", **options)
    assert [m.value for m in again.receive_many(9, timeout=0)] == values[:3]
