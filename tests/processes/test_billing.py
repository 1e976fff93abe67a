"""The worker of examples/billing.py is killed at random: no effect is lost and none comes twice.

The program counts by itself; here the store that it leaves is looked at. A customer's receipts
number his orders and add them up, so one that was lost or came twice shows in all behind it.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

import txnkv
from tests import internals
from tools.forked import Popen
from txnkv.topics import overview_of

PROGRAM = Path(__file__).parent.parent.parent / "examples" / "billing.py"
RECEIPT = re.compile(rb"(customer \d+): order (\d+), (\d+) in all")
ORDERS = 240


def start(path: str, batch: int, large: bool) -> Popen:
    """Start a worker, as the program does."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['work'](sys.argv[2], {}, {})"
    command = [sys.executable, "-c", code.format(batch, large), str(PROGRAM), path]
    return Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_every_order_is_billed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], buffer: str, size: str
) -> None:
    store = tmp_path / "store"
    main = runpy.run_path(str(PROGRAM))["main"]
    main.__globals__["start"] = start
    main(str(store), ORDERS, 4, size == "large", buffer)
    assert f"{ORDERS} receipts, {ORDERS} different ones" in capsys.readouterr().out
    with txnkv.connect(store, create=False) as client:
        amounts: defaultdict[bytes, list[int]] = defaultdict(list)
        for order in client.topic("orders").consumer().poll(max_messages=ORDERS + 1, timeout=0):
            assert order.key is not None
            assert order.value is not None
            amounts[order.key].append(int(order.value))
        totals: defaultdict[bytes, list[int]] = defaultdict(list)
        for receipt in client.topic("receipts").consumer().poll(max_messages=9999, timeout=0):
            match = RECEIPT.fullmatch(receipt.value or b"")
            assert match is not None
            totals[match[1]].append(int(match[3]))
            assert int(match[2]) == len(totals[match[1]])
        # The order may be another: what a dead worker has acknowledged in a transaction that is
        # open still comes after what stands behind it.
        billed = {
            name: sorted(b - a for a, b in pairwise([0, *sums])) for name, sums in totals.items()
        }
        assert billed == {name: sorted(paid) for name, paid in amounts.items()}
        seen = overview_of(internals.topics(client), client.topic("orders").info)
        (billing,) = seen.subscriptions
        assert set(billing.lag.values()) == {0}
        assert client.check().problems == []
