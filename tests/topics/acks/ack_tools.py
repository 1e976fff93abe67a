"""Messages in the states of acknowledgement, and transactions that hold them.

Scripts of it (see tests/scripts.py) name messages 0 to 5 and transactions A and B:

    ack 1..3 A                    in one call, in A, which begins with it; ack_to is cumulative
    ack 2 B -> AckConflictError   and B is aborted whole
    delivered -> 2                what comes again without asking
    left -> 0 1 3 4 5             what a new consumer gets: neither deleted nor pending
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests.scripts import Script, numbers

COUNT = 6


TYPES = ("exclusive", "counted", "shared")


TAKE_CUMULATIVE = pytest.mark.parametrize("type", ["exclusive", "counted"], indirect=True)


class Acks(Script):
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
        self._open: dict[str, txnkv.Transaction] = {}
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
        if name[0] in self._stored:
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

    # -- steps of scripts --------------------------------------------------------------

    def do_ack(self, *words: str, cumulative: bool = False) -> None:
        *ones, name = words if words[-1].isalpha() else (*words, "")
        messages = [self.messages[number] for number in numbers(ones)]
        txn = None
        if name:
            txn = self._open[name] = self._open.get(name) or self.begin(name)
        try:
            (self.sub.ack_cumulative if cumulative else self.sub.ack)(messages, txn)
        except txnkv.AckConflictError:
            assert self._open.pop(name).state is txnkv.TxnState.ABORTED
            raise

    def do_ack_to(self, *words: str) -> None:
        self.do_ack(*words, cumulative=True)

    def do_nack(self, *words: str) -> None:
        self.sub.nack([self.messages[number] for number in numbers(words)])

    def do_commit(self, name: str) -> None:
        self._open.pop(name).commit()

    def do_rollback(self, name: str) -> None:
        self._open.pop(name).rollback()

    def do_close(self) -> None:
        self.sub.close()

    def do_delivered(self) -> str:
        return " ".join(map(str, self.delivered()))

    def do_left(self) -> str:
        return " ".join(map(str, self.left()))
