"""Members of a group whose topic is dropped: they are none of another one that gets the name."""

from __future__ import annotations

from typing import Any

import pytest

import txnkv
from txnkv.client import MEMBERS_TABLE, group_consumer
from txnkv.client.group_consumer import GroupConsumer, Membership
from txnkv.errors import TopicNotFoundError


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each poll looks at the rows."""
    monkeypatch.setattr(group_consumer, "_SETTLED", 0)
    monkeypatch.setattr(group_consumer, "_UNSETTLED", 0)


def make_anew(client: txnkv.Client) -> None:
    """Make the topic, of two partitions with a message in each, in which the group was."""
    client.drop_topic("t", missing_ok=True)
    client.create_topic("t", partitions=2)
    client.run(lambda txn: [txn.send("t", b"v", partition=each) for each in range(2)])
    with client.consumer("t", group="g") as made:
        made.poll(timeout=0)


@pytest.fixture
def old(client: txnkv.Client) -> Any:
    """A member that has them."""
    make_anew(client)
    with client.consumer("t", group="g") as made:
        assert len(made.poll(timeout=0)) == 2
        made.rewind()
        yield made


def require_that_all_is_read(client: txnkv.Client) -> None:
    with client.consumer("t", group="g") as new:
        assert len(new.poll(timeout=0)) == 2
        assert client.table(MEMBERS_TABLE).count() == 1


@pytest.mark.parametrize("polls", [0, 2])
def test_a_member_is_out(client: txnkv.Client, old: GroupConsumer, polls: int) -> None:
    """It kept its share of the new topic's partitions, and nobody read them."""
    make_anew(client)
    for _ in range(polls):
        with pytest.raises(TopicNotFoundError, match="'t' was dropped"):
            old.poll(timeout=0)
        assert not old._membership.lasts
    require_that_all_is_read(client)
    old.close()


@pytest.mark.parametrize("method", ["renew", "live", "join"])
def test_a_topic_is_dropped_while_a_member_looks(
    client: txnkv.Client, old: GroupConsumer, monkeypatch: Any, method: str
) -> None:
    """It is found out by who has written that it is there."""
    then = getattr(Membership, method)

    def first(*args: Any) -> Any:
        monkeypatch.setattr(Membership, method, then)
        make_anew(client)
        return then(*args)

    monkeypatch.setattr(Membership, method, first)
    if method == "join":
        old._membership.end()
    with pytest.raises(TopicNotFoundError, match="'t' was dropped"):
        old.poll(timeout=0)
    assert client.table(MEMBERS_TABLE).count() == 0
    require_that_all_is_read(client)


@pytest.mark.parametrize(
    "commit", [lambda _, it: it.commit(), lambda client, it: client.run(it.commit)]
)
def test_a_commit_tells_that_the_topic_was_dropped(
    client: txnkv.Client, old: GroupConsumer, commit: Any
) -> None:
    """It told of another member."""
    assert len(old.poll(timeout=0)) == 2
    make_anew(client)
    with pytest.raises(TopicNotFoundError, match="'t' was dropped"):
        commit(client, old)
