"""The same scripts as on a real broker, with the same answers: `broker_answers.json` has those.

It was recorded on Apache Kafka 4.1.0 (KRaft, one node, as it comes but for a check of timed-out
transactions each second): `python -m tools.kafka_answers HOST:PORT FILE`.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

import txnkv
from tools.kafka_answers import INTERLEAVINGS, TABLE, interleaving, states
from tools.kafka_wire import Wire


@cache
def broker() -> Any:
    return json.loads(TABLE.read_text())


def test_states(store: txnkv.Client, wire: Wire) -> None:
    """Each request in each state of a transactional producer has the broker's code."""
    ours = [list(each) for each in states(wire, "t")]
    theirs = broker()["states"]
    assert [each[:2] for each in ours] == [each[:2] for each in theirs]
    assert [each for each in ours if each not in theirs] == []
    assert ours == theirs


def _compare(wire: Wire, seed: int) -> None:
    for number, step in enumerate(interleaving(wire, "t", seed)):
        word, answer, high, stable, levels = broker()["interleavings"][seed][number]
        theirs = (word, answer, high, stable, [tuple(each) for each in levels])
        assert tuple(step) == theirs, f"interleaving {seed}, step {number}"


@pytest.mark.parametrize("seed", range(0, INTERLEAVINGS, 8))
def test_interleavings(store: txnkv.Client, wire: Wire, seed: int) -> None:
    """After each step: offsets, high watermark, last stable offset, what both levels read."""
    _compare(wire, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [n for n in range(INTERLEAVINGS) if n % 8])
def test_all_interleavings(store: txnkv.Client, wire: Wire, seed: int) -> None:
    _compare(wire, seed)
