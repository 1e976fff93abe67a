"""The rules of acknowledgement, row by row: who may acknowledge what, in which state it is.

    PENDING -- ack in a transaction --> PENDING_ACK -- commit --> DELETED
        ^------------------ abort ----------'

Each row runs with an exclusive and a shared subscription, with transactions that are small and
stored ones. A is the transaction that holds the message, B another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import txnkv
from txnkv.topics.message import MessageId

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
        """What is delivered again without asking."""
        found = self.sub.receive_many(100, timeout=0)
        return sorted(int(m.value or b"") for m in found)

    def left(self) -> list[int]:
        """What a new consumer gets: neither deleted nor pending."""
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


def test_an_ack_after_the_end_is_refused(acks: Acks) -> None:
    """A late ack of an ended transaction was accepted, and stayed pending for ever."""
    a = acks.begin("A")
    acks.ack(1, a)
    a.commit()
    with pytest.raises(txnkv.InvalidTxnStateError):
        acks.ack(2, a)
    assert acks.left() == [0, 2, 3, 4, 5]
