"""Every process that has a store open to write takes its turn in looking after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import txnkv
from tools.children import Children
from txnkv.coordinator.status_table import TxnState

Connect = Callable[..., txnkv.Client]

ABANDON = """
client = txnkv.connect(args[0], create=False, keepalive_time=0.5)
txn = client.new_transaction(timeout=None)
txn.write("left", rows(BEFORE, 10))
txn.serialize()  # it is stored
say(int(txn.id))
wait()
"""

READ = """
client = txnkv.connect(args[0], create=False)
left = client.table("left")
id = int(wait())
give_up = time.monotonic() + 60
while client.transaction_state(id) is txnkv.TxnState.OPEN and time.monotonic() < give_up:
    left.count()
    time.sleep(0.02)
say(client.transaction_state(id).name)
"""


def test_one_that_only_reads_ends_what_a_dead_one_left(children: Children, store: Path) -> None:
    reader = children.start(READ, store)
    writer = children.start(ABANDON, store)
    id = writer.line()
    writer.kill()
    reader.tell(id)
    assert reader.finish()[-1] in (TxnState.ABORTED.name, TxnState.ABORT_IN_PROGRESS.name)
