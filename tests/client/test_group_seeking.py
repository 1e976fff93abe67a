"""Members of a group that go elsewhere: after attempts that failed, and while others go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import txnkv


@pytest.fixture
def topic(client: txnkv.Client) -> txnkv.Topic:
    topic = client.create_topic("e")
    with client.transaction() as txn:
        for number in range(10):
            txn.send(topic, f"{number}")
    return topic


@pytest.fixture
def member(client: txnkv.Client, topic: txnkv.Topic) -> Iterator[txnkv.GroupConsumer]:
    with client.consumer(topic, group="g") as member:
        yield member


def test_a_message_that_cannot_be_worked_on_is_left_out(
    client: txnkv.Client, member: txnkv.GroupConsumer
) -> None:
    """It came again for ever: the next poll went back over the seek."""
    done: list[bytes] = []
    while len(done) < 9:
        (message,) = member.poll(max_messages=1)
        try:
            with client.transaction() as txn:
                member.commit(txn)
                assert message.value != b"3"
            done.append(message.value)
        except AssertionError:
            member.seek(0, message.offset + 1)
            assert member.position(0) == message.offset + 1
    assert done == [b"%d" % number for number in (0, 1, 2, 4, 5, 6, 7, 8, 9)]


def test_a_commit_behind_a_seek_over_a_failed_attempt(
    client: txnkv.Client, member: txnkv.GroupConsumer
) -> None:
    member.poll(max_messages=4)
    txn = client.new_transaction()
    member.commit(txn)
    txn.rollback()
    member.seek(0, 7)
    member.commit()
    assert member.committed() == {0: 7}
    assert [message.offset for message in member.poll()] == [7, 8, 9]


@pytest.mark.parametrize("again", [0, 2, 4, 6])
def test_what_is_committed_after_a_rewind_is_not_done_twice(
    client: txnkv.Client, member: txnkv.GroupConsumer, again: int
) -> None:
    """The position went back, too."""
    member.poll(max_messages=4)
    first, second = client.new_transaction(), client.new_transaction()
    member.commit(first)
    member.rewind()
    if again:
        assert [each.offset for each in member.poll(max_messages=again)] == [*range(again)]
    first.commit()
    if again:
        with pytest.raises(txnkv.TransactionConflictError, match="open at a rewind"):
            member.commit(second)
    second.rollback()
    assert [each.offset for each in member.poll()] == [4, 5, 6, 7, 8, 9]
    member.commit()
    assert member.committed() == {0: member.position(0)}


def test_what_is_rolled_back_after_a_rewind_is_given_again(
    client: txnkv.Client, member: txnkv.GroupConsumer
) -> None:
    member.poll(max_messages=4)
    txn = client.new_transaction()
    member.commit(txn)
    member.rewind()
    member.poll(max_messages=2)
    txn.rollback()
    assert member.poll()[0].offset == 0
    member.commit()
    assert member.committed() == {0: member.position(0)}
