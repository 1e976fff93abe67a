"""Tools of the tests of subscriptions: messages by their texts, and rows of status.db."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import txnkv
from tests import internals


def send(client: txnkv.Client, *values: Any, topic: str = "events", **options: Any) -> None:
    with client.transaction() as txn:
        for value in values:
            txn.send(topic, str(value), **options)


def received(sub: txnkv.Subscription, most: int = 1000) -> list[str]:
    return [(m.value or b"").decode() for m in sub.receive_many(most, timeout=0)]


def take(sub: txnkv.Subscription) -> Any:
    found = sub.receive(timeout=0)
    assert found is not None
    return found


def cursor_rows(client: txnkv.Client) -> list[tuple[Any, ...]]:
    with internals.status(client).read() as cur:
        return (
            cur.execute("SELECT mark_delete FROM cursors").fetchall()
            + cur.execute("SELECT first, last FROM acked_ranges").fetchall()
        )


def left_over(client: txnkv.Client) -> int:
    """Rows that only unfinished business has."""
    tables = ("pending_acks", "leases", "returned_acks", "acked_ranges")
    with internals.status(client).read() as cur:
        return sum(cur.execute(f"SELECT count(*) FROM {name}").get for name in tables)


def asked(program: Any, call: Callable[[Any], Any]) -> Any:
    """What a call of a program answers, or the class of its error; `program.open` has its
    transactions by name, of which those that ended go.
    """
    try:
        return call(program)
    except (txnkv.TxnkvError, IndexError) as error:
        for name, txn in list(program.open.items()):
            if txn.state is not txnkv.TxnState.OPEN:
                del program.open[name]
        return type(error)


def answer_the_same(
    short: Any, long: Any, calls: Iterable[Callable[[Any], Any]], long_way: Callable[[bool], None]
) -> None:
    """Make the same calls of two programs, of one of them the long way, and end what is open."""
    for number, call in enumerate(calls):
        found = asked(short, call)
        long_way(True)
        wanted = asked(long, call)
        long_way(False)
        assert found == wanted, number
    for program in short, long:
        for name in [*program.open]:
            asked(program, lambda p, name=name: p.end(name, "rollback"))
