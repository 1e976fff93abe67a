"""The rules of acknowledgement, row by row: who may acknowledge what, in which state it is.

    PENDING -- ack in a transaction --> PENDING_ACK -- commit --> DELETED
        ^------------------ abort ----------'

Each row runs with an exclusive and a shared subscription, and one that counts deliveries, with
transactions that are small and stored ones. A is the transaction that holds the message, B another
one. What is said of cumulative acks is not for shared subscriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests.scripts import scripts
from tests.topics.acks.ack_tools import COUNT, TAKE_CUMULATIVE, Acks
from txnkv.topics.messages.message import MessageId


@scripts("""
== pending: a plain ack deletes
ack 2; left -> 0 1 3 4 5
== pending: an ack and a commit delete
ack 2 B; left -> 0 1 3 4 5; commit B; left -> 0 1 3 4 5
== pending: an ack and an abort deliver again, once
ack 2 B; delivered -> none; rollback B; delivered -> 2; delivered -> none
== pending: a negative ack delivers again
nack 3; delivered -> 3
== held: a plain ack is dropped
ack 2 A; ack 2; rollback A; delivered -> 2
== held: the ack of another is refused, and the later one is aborted whole
ack 2 A; ack 3 B; ack 2 B -> AckConflictError; delivered -> 3; commit A; left -> 0 1 3 4 5
== held: a second ack of its own is refused
ack 2 A; ack 2 A -> AckConflictError; delivered -> 2
== held: it is not delivered to a new consumer
ack 2 A; left -> 0 1 3 4 5; rollback A; delivered -> 2
== held: an abort without a consumer delivers again
ack 2 A; close; rollback A; left -> 0 1 2 3 4 5
== held: a negative ack is ignored
ack 2 A; nack 2; delivered -> none; commit A; delivered -> none
== deleted plainly: a plain ack has no effect
ack 2; ack 2; left -> 0 1 3 4 5
== deleted by a commit: a plain ack has no effect
ack 2 A; commit A; ack 2; left -> 0 1 3 4 5
== deleted plainly: a transaction is refused
ack 2; ack 2 B -> AckConflictError; left -> 0 1 3 4 5
== deleted by a commit: a transaction is refused
ack 2 A; commit A; ack 2 B -> AckConflictError; left -> 0 1 3 4 5
== deleted plainly: never delivered
ack 2; nack 2; delivered -> none; left -> 0 1 3 4 5
== deleted by a commit: never delivered
ack 2 A; commit A; nack 2; delivered -> none; left -> 0 1 3 4 5
== no other transaction of many is touched
ack 0 A; ack 1 B; ack 2 AA; ack 3 BB; rollback B; delivered -> 1; commit AA; left -> 1 4 5
rollback A; delivered -> 0; commit BB; left -> 0 1 4 5
== several messages in one call
ack 1..3 A; commit A; ack 4..5; left -> 0
== several messages in one call fail as a whole
ack 3 A; ack 2..4 B -> AckConflictError; commit A; left -> 0 1 2 4 5
""")
def test_one_by_one(acks: Acks, text: str) -> None:
    acks(text)


@TAKE_CUMULATIVE
@scripts("""
== pending: a plain ack deletes all before
ack_to 2; left -> 3 4 5
== pending: an ack in a transaction
ack_to 2 B; delivered -> none; rollback B; delivered -> 0 1 2; ack_to 1 A; commit A; left -> 2 3 4 5
== held one by one: a plain cumulative ack is dropped for it
ack 2 A; ack_to 4; delivered -> none; rollback A; delivered -> 2; left -> 2 5
== held one by one: another's at it is refused
ack 2 A; ack_to 2 B -> AckConflictError; rollback A; delivered -> 2
== held one by one: another's behind it is refused
ack 2 A; ack_to 4 B -> AckConflictError; rollback A; delivered -> 2
== held one by one: another's below it is no conflict
ack 2 A; ack_to 1 B; commit A; commit B; left -> 3 4 5
== held one by one: its own at it is refused
ack 2 A; ack_to 2 A -> AckConflictError; delivered -> 2
== held: an abort without a consumer delivers again
ack_to 2 A; close; rollback A; left -> 0 1 2 3 4 5
== held: plain acks are dropped
ack_to 3 A; ack 1; ack 3; rollback A; delivered -> 0 1 2 3
== held: a plain cumulative ack is dropped up to it
ack_to 2 A; ack_to 4; rollback A; delivered -> 0 1 2; left -> 0 1 2 5
== held: another's ack below it is refused
ack_to 3 A; ack 1 B -> AckConflictError; commit A; left -> 4 5
== held: another's ack at it is refused
ack_to 3 A; ack 3 B -> AckConflictError; commit A; left -> 4 5
== held: another's cumulative ack is refused below it, at it and behind it
ack_to 3 A; ack_to 1 B -> AckConflictError; ack_to 3 B -> AckConflictError
ack_to 5 B -> AckConflictError; commit A; left -> 4 5
== held: it is extended by a larger position of its own
ack_to 1 A; ack_to 3 A; commit A; left -> 4 5
== held: an equal position of its own is refused
ack_to 3 A; ack_to 3 A -> AckConflictError; delivered -> 0 1 2 3
== held: a lower position of its own is refused
ack_to 3 A; ack_to 1 A -> AckConflictError; delivered -> 0 1 2 3
== held: one of its own below is refused
ack_to 3 A; ack 2 A -> AckConflictError
== held: it is not delivered to a new consumer
ack_to 3 A; left -> 4 5; rollback A; delivered -> 0 1 2 3
== held: a negative ack is ignored
ack_to 3 A; nack 0..1; delivered -> none; commit A; delivered -> none
== deleted plainly: a plain cumulative ack at it deletes all before
ack 2; ack_to 2; left -> 3 4 5
== deleted by a commit: a plain cumulative ack at it deletes all before
ack 2 A; commit A; ack_to 2; left -> 3 4 5
== deleted plainly: a transaction is refused
ack 2; ack_to 2 B -> AckConflictError; left -> 0 1 3 4 5
== deleted by a commit: a transaction is refused
ack 2 A; commit A; ack_to 2 B -> AckConflictError; left -> 0 1 3 4 5
== over its own one by one, which commits
ack 1 A; ack_to 3 A; commit A; left -> 4 5
== over its own one by one, which is rolled back
ack 1 A; ack_to 3 A; rollback A; delivered -> 0 1 2 3
== seen elsewhere: a commit finds the cursor beyond its position, and fails
ack_to 1 A; ack_to 4; commit A; left -> 5
== seen elsewhere: those of a commit are looked for in another's position, and forgotten
ack_to 1 A; ack 3 B; commit B; rollback A; delivered -> 0 1; left -> 0 1 2 4 5
== seen elsewhere: of both kinds in one transaction one is lost, the first
ack 4 A; ack_to 1 A; commit A; left -> 2 3 5
== seen elsewhere: of both kinds in one transaction one is lost, the second
ack_to 1 A; ack 4 A; commit A; left -> 2 3 5
""")
def test_cumulatively(acks: Acks, text: str) -> None:
    acks(text)


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
    for number in (1, -1):
        with pytest.raises(txnkv.OffsetOutOfRangeError, match=f"partitions 0 to 0, not {number}"):
            acks.sub.nack(MessageId(number, 0))


def test_what_is_given_to_acknowledge_is_checked(acks: Acks) -> None:
    sub: Any = acks.sub
    for given in (5, None, [acks.messages[0], "x"]):
        for take in (sub.ack, sub.nack):
            with pytest.raises(TypeError, match="is a Message, its MessageId or a list of them"):
                take(given)
    with pytest.raises(TypeError, match="txn is a Transaction, not str"):
        sub.ack(acks.messages[0], "A")
    assert acks.left() == [0, 1, 2, 3, 4, 5]


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
