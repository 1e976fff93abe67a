"""Streams that look alike: no option tells their checkpoint, so that planner and committer cannot
tell them apart; or batches of theirs have one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from txnkv import TxnState

from .conftest import batch
from .test_stream_writing import Query

pytestmark = pytest.mark.spark

Ids = Callable[..., list[int]]


@pytest.fixture
def nameless(
    where: dict[str, str], clients_are_closed: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Query]:
    """A query into table t whose checkpoint no option tells; no keepers."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")

    def make(id: str = "q", **options: str) -> Query:
        return Query(where | options, id)

    return make


@pytest.mark.parametrize("staged", [False, True])
def test_a_batch_without_an_answer_whose_checkpoint_is_of_the_conf(
    client: txnkv.Client,
    nameless: Callable[..., Query],
    nothing_is_left: Callable[[], None],
    staged: bool,
) -> None:
    one = nameless()
    one.run(0, [batch(1)])
    writer = one.plan(batch(2))
    if staged:
        one.task(writer, 1, batch(2))
    one.committer().abort([None], 1)
    assert [info.state for info in client.transactions()] == [
        TxnState.COMMITTED,
        TxnState.ABORTED,
    ]
    nothing_is_left()


def test_a_batch_without_an_answer_beside_queries_that_look_alike(
    client: txnkv.Client, nameless: Callable[..., Query], ids: Ids
) -> None:
    """Another's is never ended: what may be either's stays."""

    def states() -> list[str]:
        return [info.state.name for info in client.transactions()]

    one, other, named = nameless("q"), nameless("r"), nameless("s", queryName="s")
    writer, beside, _ = (some.plan(batch(1)) for some in (one, other, named))
    one.committer().abort([None], 4)  # of no task is known which batch it does
    assert states() == ["OPEN", "OPEN", "OPEN"]
    told = [other.task(beside, 5, batch(1))]
    one.task(writer, 4, batch(2))
    one.committer().abort([None], 4)
    assert states() == ["ABORTED", "OPEN", "OPEN"]
    named.committer().abort([None], 0)
    assert states() == ["ABORTED", "OPEN", "ABORTED"]
    other.committer().commit(told, 5)
    assert ids() == [1]


def test_a_batch_that_passed_its_timeout_beside_a_query_that_looks_alike(
    client: txnkv.Client, nameless: Callable[..., Query], ids: Ids, until: Callable[..., Any]
) -> None:
    one, other = nameless("q", timeout="0.2"), nameless("r")
    writer, beside = one.plan(batch(1)), other.plan(batch(2))
    until(lambda: client.transactions()[0].state is TxnState.ABORTED)
    told = other.task(beside, 0, batch(2))
    with pytest.raises(txnkv.TransactionTimedOutError):
        one.task(writer, 0, batch(1))
    one.committer().abort([None], 0)
    other.committer().commit([told], 0)
    assert ids() == [2]


def test_a_query_that_is_behind_its_store(
    nameless: Callable[..., Query], ids: Ids, nothing_is_left: Callable[[], None]
) -> None:
    """Its checkpoint was restored, or its driver is late: rows of it would be lost in silence."""
    behind = nameless()
    writer = behind.plan(batch(1))
    told = [behind.task(writer, 0, batch(1))]
    for number in (0, 1):
        nameless().run(number, [batch(number)])
    for work in (
        lambda: behind.task(writer, 0, batch(3)),
        lambda: behind.committer().commit(told, 0),
    ):
        with pytest.raises(ValueError, match=r"batch 0 .* comes again.*older than.*another driver"):
            work()
    behind.committer().abort(told, 0)
    assert ids() == [0, 1]
    nothing_is_left()
