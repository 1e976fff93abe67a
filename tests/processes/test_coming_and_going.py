"""Processes that open a store, write, compact and close it, again and again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from tools.children import Children
from tools.crash_scenarios import BEFORE

COMING_AND_GOING = """
import random
path, number, turns = args[0], int(args[1]), int(args[2])
chance = random.Random(number)
written = []
for turn in range(turns):
    with txnkv.connect(path, create=False) as client:
        for _ in range(chance.randrange(1, 4)):
            first = 1_000_000 * (number + 1) + 10 * len(written)
            with client.transaction() as txn:
                for name in TABLES:
                    txn.write(name, rows(first, 10))
                if chance.random() < 0.5:
                    txn.serialize()
            written.append(first)
            if chance.random() < 0.6:
                client.compact()
say(written)
"""


@pytest.mark.parametrize("turns", [6, pytest.param(250, marks=pytest.mark.slow)])
def test_nothing_is_lost(
    children: Children, store: Path, connect: Callable[..., txnkv.Client], turns: int
) -> None:
    started = [children.start(COMING_AND_GOING, store, number, turns) for number in range(3)]
    firsts = [first for child in started for first in json.loads(child.finish()[-1])]
    ids = [*range(BEFORE), *(first + i for first in sorted(firsts) for i in range(10))]
    client = connect()
    for name in ("left", "right"):
        found = client.table(name).scan(columns=["id"]).to_arrow()["id"].to_pylist()
        assert sorted(found) == ids
    assert client.check().problems == []
