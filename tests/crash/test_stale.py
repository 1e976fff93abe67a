"""Processes that are stopped, overtaken, and go on: they change nothing any more.

The story: a worker claims row set 7 in status.db and is stopped (SIGSTOP, a long garbage
collection, a laptop's lid). Its transaction is aborted and swept meanwhile. When it goes on
it would write the blocks of 7, which nobody knows of and nobody would ever remove. The same
with a leader that is stopped in the middle of resuming a transaction: another takes the
lease, and what the first one does later must change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from tools.children import Children
from tools.crash import later, leftovers, run_child, settle
from tools.crash_scenarios import BEFORE, ROWS, rows
from txnkv import TxnState
from txnkv.tables.commit.tablet_participants import TabletParticipants

pytestmark = pytest.mark.usefixtures("large")

Connect = Callable[..., txnkv.Client]

JOIN = """
cut_small()
client = txnkv.connect(args[0], create=False)
txn = txnkv.Transaction.deserialize(client, args[1])
"""

WRITE_ROWS = """
try:
    txn.write("left", rows(1000, 400))
    say("done")
except txnkv.TxnkvError as error:
    say(type(error).__name__)
"""


@pytest.mark.parametrize("point", ["stage.claimed", "stage.blocks", "stage.written"])
@pytest.mark.parametrize("end", ["abort", "commit", "forgotten"])
def test_stale_worker_stages_nothing(
    point: str, end: str, children: Children, store: Path, connect: Connect
) -> None:
    client = connect(history=0.0 if end == "forgotten" else 900.0)
    txn = client.new_transaction()
    token = str(txn.serialize())
    worker = children.start(JOIN + "arm(args[2], stop)" + WRITE_ROWS, store, token, point)
    worker.until_stopped()
    if end == "commit":
        txn.commit()
    else:
        txn.rollback()
    if end == "forgotten":
        with later(20):  # the worker may lead, and its lease has to run out
            assert internals.maintenance(client).round()
        with pytest.raises(txnkv.TxnNotFoundError):
            client.transaction_state(txn.id)
    assert client.check().problems == []
    worker.go_on()
    said = worker.finish()[-1]
    assert said == "InvalidTxnStateError" or (end == "forgotten" and said == "TxnNotFoundError")
    assert client.check().problems == []
    assert leftovers(client) == []
    assert client.table("left").count() == BEFORE


CHECK_OWN_KEYS = """
from txnkv.tables.tablets.row_set import RowSet
txn.write("left", rows(1200, 10))
common = RowSet.common
def stopping(self, *rest):
    RowSet.common = common
    stop()
    return common(self, *rest)
RowSet.common = stopping
"""

READ_OWN_ROWS = """
from txnkv.tables.tablets.row_set import RowSet
txn.write("left", rows(1200, 10))
header = RowSet.header
def stopping(self, *rest):
    RowSet.header = header
    stop()
    return header(self, *rest)
RowSet.header = stopping
try:
    say(txn.scan("left", where=[("id", ">=", 1000)]).to_arrow().num_rows)
except txnkv.TxnkvError as error:
    say(type(error).__name__)
"""


@pytest.mark.parametrize("code", [CHECK_OWN_KEYS + WRITE_ROWS, READ_OWN_ROWS])
def test_stale_worker_that_looks_at_its_own_rows_is_told_of_the_end(
    code: str, children: Children, store: Path, connect: Connect
) -> None:
    """Between its list of its own row sets and their blocks the sweep takes the blocks away:
    that is no damage of the store.
    """
    client = connect()
    txn = client.new_transaction()
    worker = children.start(JOIN + code, store, str(txn.serialize()))
    worker.until_stopped()
    txn.rollback()
    worker.go_on()
    assert worker.finish()[-1] == "InvalidTxnStateError"
    assert client.check().problems == []


# -- leaders ---------------------------------------------------------------------------

LEADER = """
    from txnkv.transaction.instance import acquire
    arm(args[1], stop)
    client = txnkv.connect(args[0], create=False)
    say(str(client.instance.coordinator.maintenance.round()))
    client.close()
"""


@pytest.mark.parametrize(
    ("scenario", "death", "point"),
    [
        ("commit", "commit.started", "commit.validated"),
        ("commit", "commit.started", "commit.decided"),
        ("commit", "commit.decided", "commit.finalized"),
        ("rollback", "abort.started", "abort.swept"),
        ("rollback", "abort.started", "abort.ended"),
    ],
)
def test_stale_leader_changes_nothing(
    scenario: str,
    death: str,
    point: str,
    children: Children,
    store: Path,
    connect: Connect,
) -> None:
    assert run_child(scenario, store, f"{death}=kill").killed
    leader = children.start(LEADER, store, point)
    leader.until_stopped()
    client = connect()
    maintenance = internals.maintenance(client)
    assert not maintenance.round(), "the stopped leader's lease holds"
    with later(20):
        assert maintenance.round(resume_all=True)
        term = maintenance.lease.term
        ended = max(client.transactions(), key=lambda info: info.id)
        expected = TxnState.COMMITTED if scenario == "commit" else TxnState.ABORTED
        assert ended.state is expected
        before = client.transactions()
        counts = [client.table(name).count() for name in ("left", "right")]
        leader.go_on()
        assert leader.finish()[-1] == "False", "it knows that it leads no more"
        assert client.transactions() == before
        assert maintenance.round()
        assert maintenance.lease.term == term
    assert [client.table(name).count() for name in ("left", "right")] == counts
    assert counts == [BEFORE + (ROWS if scenario == "commit" else 0)] * 2
    assert leftovers(client) == []
    assert client.check().problems == []


STALE_CHECKER = """
    from txnkv.coordinator import liveness
    found = liveness.expired
    def stopping(row, store):
        reason = found(row, store)
        if reason is not None:
            stop()
        return reason
    liveness.expired = stopping
    client = txnkv.connect(args[0], create=False)
    from tools.crash import later
    with later(100):
        say(str(client.instance.coordinator.maintenance.round()))
"""


def test_stale_leader_aborts_no_open_transaction(
    children: Children, store: Path, connect: Connect
) -> None:
    """It found a transaction without heartbeat, was stopped, and lost the lease; the owner
    beats again. What it found is not true any more.
    """
    client = connect()
    txn = client.new_transaction(timeout=None)
    txn.write("left", rows(BEFORE, ROWS))
    internals.maintenance(client).lease.release()
    leader = children.start(STALE_CHECKER, store)
    leader.until_stopped()
    with later(200):
        client.keep_transaction_alive(txn.id)
        assert internals.maintenance(client).round()
        leader.go_on()
        assert leader.finish()[-1] == "False"
    assert txn.state is TxnState.OPEN
    txn.commit()
    assert client.table("left").count() == BEFORE + ROWS


def test_keys_that_are_staged_behind_the_look_for_them_are_found(
    children: Children, store: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers staged the same keys; the second one between the look and the commit."""
    client = connect()
    txn = client.new_transaction()
    stopping = "arm(args[2], lambda: (disarm(), stop()))"
    one_chunk = WRITE_ROWS.replace("400", "200")  # a second one is looked for beside the write
    code = f"{JOIN}from txnkv.storage import disarm\n{stopping}{one_chunk}"
    worker = children.start(code, store, str(txn.serialize()), "stage.written")
    worker.until_stopped()  # it has seen none of the keys
    txn.write("left", rows(1000, 400))
    check = TabletParticipants.check

    def overtaken(self: TabletParticipants, *args: Any) -> int:
        found = check(self, *args)
        monkeypatch.undo()
        worker.go_on()
        assert worker.finish()[-1] == "done"
        return found

    monkeypatch.setattr(TabletParticipants, "check", overtaken)
    with pytest.raises(txnkv.RowErrors, match="two workers"):
        txn.commit()
    txn.rollback()
    assert client.table("left").count() == BEFORE


def test_settle_ends_what_nobody_keeps_alive(connect: Connect) -> None:
    client = connect()
    txn = client.new_transaction(keepalive=False)
    txn.write("left", rows(BEFORE, ROWS))
    settle(client)
    assert txn.state is TxnState.ABORTED
    assert leftovers(client) == []
