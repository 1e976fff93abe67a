"""The rules of acknowledgement, row by row: who may acknowledge what, in which state it is.

    PENDING -- ack in a transaction --> PENDING_ACK -- commit --> DELETED
        ^------------------ abort ----------'

Each row runs with an exclusive and a shared subscription, with transactions that are small and
stored ones. A is the transaction that holds the message, B another one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import txnkv
from tests.topics.acks.ack_tools import COUNT, TAKE_CUMULATIVE, Acks
from txnkv.topics.messages.message import MessageId

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
