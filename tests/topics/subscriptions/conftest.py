"""The topic of the tests of subscriptions."""

from __future__ import annotations

import pytest

import txnkv


@pytest.fixture
def topic(client: txnkv.Client) -> txnkv.Topic:
    return client.create_topic("events")
