"""Members of groups under random use, beside a plain model.

Members join, leave, die, poll, and commit in transactions that end later, or never. The model has
whose each partition is to be, and what the group has committed. Each message is handled once, in
the order of its partition, whatever happens: its effect is a row in the same transaction.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import txnkv
from txnkv.client import OFFSETS_TABLE, group_consumer
from txnkv.client.group_consumer import GroupConsumer
from txnkv.errors import TransactionConflictError, TxnkvError

PARTITIONS = 3
WHO = st.integers(0, 3)
EFFECTS = txnkv.Schema(
    {"partition": "int32", "offset": "int64", "number": "int64"},
    primary_key=["partition", "offset"],
)
LAST = txnkv.Schema({"partition": "int32", "offset": "int64"}, primary_key=["partition"])


class Machine(RuleBasedStateMachine):
    """Up to four members of one group, two of each of two clients."""

    clients: list[txnkv.Client]
    names = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.name = f"t{next(self.names)}"
        self.client = self.clients[0]
        self.topic = self.client.create_topic(self.name, partitions=PARTITIONS)
        self.effects = self.client.create_table(f"{self.name}-effects", EFFECTS)
        self.last = self.client.create_table(f"{self.name}-last", LAST)
        self.partitions = PARTITIONS
        self.sent: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)
        self.members: dict[int, GroupConsumer] = {}
        self.came: list[int] = []  # members, as they came
        self.batches: dict[int, list[txnkv.Message]] = {}  # given, and not committed
        self.pending: dict[int, txnkv.Transaction] = {}

    # -- messages ----------------------------------------------------------------------

    @rule(number=st.integers(0, 8), count=st.integers(1, 4))
    def send(self, number: int, count: int) -> None:
        number %= self.partitions
        with self.client.transaction() as txn:
            for _ in range(count):
                txn.send(self.topic, b"m", partition=number)
        self.sent[number] = self.topic.end_offsets()[number]

    @precondition(lambda self: self.partitions < 6)
    @rule()
    def add_a_partition(self) -> None:
        self.topic.alter(partitions=self.partitions + 1)
        self.sent[self.partitions] = 0
        self.partitions += 1

    # -- members -----------------------------------------------------------------------

    @rule(who=WHO)
    def join(self, who: int) -> None:
        if who not in self.members:
            client = self.clients[who // 2]
            self.members[who] = client.consumer(self.name, group=self.name)
            self.came.append(who)

    @rule(who=WHO)
    def leave(self, who: int) -> None:
        if who in self.members:
            self.members.pop(who).close()
            self.came.remove(who)
            self.forget(who)

    @rule(who=WHO)
    def die(self, who: int) -> None:
        """Nothing of it goes on, and its lease ends some time."""
        if who in self.members:
            self.end_lease(who)
            self.members.pop(who)
            self.came.remove(who)
            self.forget(who)

    @rule(who=WHO)
    def be_stopped(self, who: int) -> None:
        """Its lease ends, and it goes on later."""
        if who in self.members:
            self.end_lease(who)
            if who in self.came:
                self.came.remove(who)
                self.came.append(who)

    def end_lease(self, who: int) -> None:
        lease = self.members[who]._membership._lease
        if lease is not None:
            with suppress(TxnkvError):
                self.client.abort_transaction(lease.id)

    def forget(self, who: int) -> None:
        self.batches.pop(who, None)
        if who in self.pending:
            self.pending.pop(who).rollback()

    # -- work --------------------------------------------------------------------------

    @rule(who=WHO, most=st.integers(1, 5))
    def poll(self, who: int, most: int) -> None:
        if who not in self.members or who in self.pending:
            return
        member = self.members[who]
        batch = self.batches.pop(who, [])
        try:
            found = member.poll(max_messages=most, timeout=0)
        except TransactionConflictError:
            return  # what it was given is lost
        self.batches[who] = batch + found

    @rule(who=WHO)
    def begin_to_commit(self, who: int) -> None:
        if who not in self.batches or who in self.pending:
            return
        txn = self.clients[who // 2].new_transaction(timeout=None)
        try:
            self.handle(txn, who)
            self.pending[who] = txn
        except TxnkvError:
            txn.rollback()
            self.batches.pop(who)
            with suppress(TransactionConflictError):
                self.members[who].rewind()

    def handle(self, txn: txnkv.Transaction, who: int) -> None:
        self.members[who].commit(txn)
        last: dict[int, int] = {}
        for message in self.batches[who]:
            at = message.partition
            row = txn.get(self.last, at)
            before = last.get(at, -1 if row is None else row["offset"])
            # Where another one was first, its offsets may be behind these: it must be refused.
            if message.offset <= before:
                raise TransactionConflictError("of another's")
            last[at] = message.offset
            txn.insert(self.effects, (at, message.offset, int(txn.id.local)))
        for at, offset in last.items():
            txn.upsert(self.last, (at, offset))

    @rule(who=WHO, commit=st.booleans())
    def end(self, who: int, commit: bool) -> None:
        txn = self.pending.pop(who, None)
        if txn is None:
            return
        try:
            if commit:
                txn.commit()
            else:
                txn.rollback()
            if commit:
                self.batches.pop(who)
                return
        except TransactionConflictError:
            pass  # what is not committed is given again
        self.batches.pop(who)

    # -- what holds --------------------------------------------------------------------

    @invariant()
    def each_partition_is_one_members(self) -> None:
        rows = self.rows()
        numbers = {m._membership.number: who for who, m in self.members.items()}
        for who, member in self.members.items():
            for number in member.partitions:
                owner = numbers.get(rows[number]["member"])
                assert owner in (who, None) or member._membership.number != rows[number]["member"]

    @invariant()
    def what_is_committed_is_what_was_handled(self) -> None:
        handled = {row["partition"]: row["offset"] for row in self.last.scan()}
        for number, row in self.rows().items():
            assert row["offset"] > handled.get(number, -1)
            assert row["offset"] <= self.sent[number] + 1

    def rows(self) -> dict[int, dict[str, Any]]:
        if OFFSETS_TABLE not in self.client.tables():
            return {}
        where = [("group", "=", self.name)]
        return {r["partition"]: r for r in self.client.table(OFFSETS_TABLE).scan(where=where)}

    def teardown(self) -> None:
        for who in list(self.pending):
            self.end(who, True)
        self.join(0)
        live = list(self.members)
        for _ in range(3):  # a look, a handover, a look; what was given is committed
            for who in live:
                for _ in range(2):
                    self.poll(who, 100)
                    self.begin_to_commit(who)
                    self.end(who, True)
        shares = [self.members[who].partitions for who in live]
        assert sorted(n for each in shares for n in each) == list(range(self.partitions))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(each == list(range(each[0], each[0] + len(each))) for each in shares if each)
        for who in live:
            while True:
                self.poll(who, 100)
                if not self.batches.get(who):
                    break
                self.begin_to_commit(who)
                self.end(who, True)
        effects = sorted((row["partition"], row["offset"]) for row in self.effects.scan())
        with self.topic.consumer() as every:
            there: list[tuple[int, int]] = []
            while found := every.poll(timeout=0):
                there += [(message.partition, message.offset) for message in found]
        assert effects == sorted(there)
        for who in live:
            self.leave(who)
        assert {row["member"] for row in self.rows().values()} <= {None}


def run(examples: int, steps: int, patch: Callable[[Any, str, Any], None]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    patch(group_consumer, "_SETTLED", 0)
    patch(group_consumer, "_UNSETTLED", 0)
    folder = Path(tempfile.mkdtemp())
    try:
        with txnkv.connect(folder / "store") as client, txnkv.connect(folder / "store") as other:
            made = type("Made", (Machine,), {"clients": [client, other]})
            run_state_machine_as_test(
                made,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=steps,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
            assert client.check().problems == []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_short(monkeypatch: pytest.MonkeyPatch) -> None:
    run(4, 30, monkeypatch.setattr)


@pytest.mark.slow
def test_long(monkeypatch: pytest.MonkeyPatch) -> None:
    run(300, 80, monkeypatch.setattr)
