"""Errors, as they cross from a worker of a pool to who waits for it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from txnkv import errors

CLASSES = [each for each in vars(errors).values() if isinstance(each, type)]
MADE: dict[type, Any] = {
    txnkv.CommitOutcomeUnknownError: lambda: txnkv.CommitOutcomeUnknownError("it", 7, lambda: True),
    txnkv.RowErrors: lambda: txnkv.RowErrors(
        [txnkv.RowError("insert", "t", 1, txnkv.AlreadyPresentError("there"))], 2, 3, True
    ),
}


@pytest.mark.parametrize(
    "kind", [each for each in CLASSES if issubclass(each, txnkv.TxnkvError)], ids=str
)
@pytest.mark.parametrize(
    "carry", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy]
)
def test_an_error_is_the_same_elsewhere(kind: type, carry: Callable[[Any], Any]) -> None:
    """One without its id broke the whole pool of processes."""
    error = MADE.get(kind, lambda: kind("it"))()
    error.add_note("on day 7")
    if kind is txnkv.RowErrors:
        error.others = "and nothing of the task counts"
        error.mendable = False
    found = carry(error)
    assert type(found) is kind
    assert (str(found), repr(found)) == (str(error), repr(error))
    wanted = vars(error) | ({"ask": None} if "ask" in vars(error) else {})
    assert vars(found).keys() == wanted.keys()
    assert str(vars(found)) == str(wanted)
