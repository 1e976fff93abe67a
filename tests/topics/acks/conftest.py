"""Runs each rule with every kind of subscription, and transactions small and large."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import txnkv
from tests.topics.acks.ack_tools import TYPES, Acks


@pytest.fixture(params=TYPES)
def type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["small", "large", "A large", "B large"])
def acks(request: pytest.FixtureRequest, client: txnkv.Client, type: str) -> Iterator[Acks]:
    found = Acks(client, type, request.param)
    yield found
    found.sub.close()
