"""The worker of examples/billing.py is killed at random: no effect is lost and none comes twice.

The program counts by itself; here the store that it leaves is looked at. A customer's receipts
number his orders and add them up, so one that was lost or came twice shows in all behind it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

import txnkv
from txnkv.topics import overview

PROGRAM = Path(__file__).parent.parent.parent / "examples" / "billing.py"
RECEIPT = re.compile(rb"(customer \d+): order (\d+), (\d+) in all")
ORDERS = 240


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
@pytest.mark.parametrize("how", [(), ("--large",)], ids=["small", "large"])
def test_every_order_is_billed_once(tmp_path: Path, buffer: str, how: tuple[str, ...]) -> None:
    store = tmp_path / "store"
    command = [sys.executable, str(PROGRAM), "--orders", str(ORDERS), "--kills", "4"]
    ran = subprocess.run(
        [*command, "--buffer", buffer, *how, str(store)],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{ORDERS} receipts, {ORDERS} different ones" in ran.stdout
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
        seen = overview.look(client.instance.topics, client.topic("orders").info)
        (billing,) = seen.subscriptions
        assert set(billing.lag.values()) == {0}
        assert client.check().problems == []
