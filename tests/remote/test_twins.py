"""Each remote handle sends what its local twin does; one table has the calls."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import txnkv
from txnkv.client import Planning
from txnkv.remote.remote_client import RemoteClient, RemotePlanning
from txnkv.remote.remote_handles import RemoteScan, RemoteSnapshot, RemoteTable
from txnkv.remote.remote_session import RemoteSession
from txnkv.remote.remote_topics import (
    RemoteConsumer,
    RemoteProducer,
    RemoteSubscription,
    RemoteTopic,
)
from txnkv.remote.remote_transaction import RemoteJob, RemoteTransaction
from txnkv.remote.wire import METHODS
from txnkv.transaction import Job

TWINS = [
    (txnkv.Client, RemoteClient),
    (txnkv.Table, RemoteTable),
    (txnkv.Scan, RemoteScan),
    (txnkv.Snapshot, RemoteSnapshot),
    (txnkv.Topic, RemoteTopic),
    (txnkv.Consumer, RemoteConsumer),
    (txnkv.Subscription, RemoteSubscription),
    (txnkv.Producer, RemoteProducer),
    (txnkv.Session, RemoteSession),
    (txnkv.Transaction, RemoteTransaction),
    (Job, RemoteJob),
    (Planning, RemotePlanning),
]

AS_THEY_ARE = {
    "Client": "consumer run transaction",
    "Table": "close dataset",
    "Scan": "to_pandas to_polars",
    "Snapshot": "get get_by get_many scan timestamp",
    "Topic": "buffer close name value_schema",
    "Subscription": "ack ack_cumulative name receive",
    "Planning": "boot of",
    "Job": "join start",
    "Producer": "close flush hurry name send sent",
    "Session": "ack ack_cumulative delete delete_ignore insert insert_ignore update update_ignore "
    "upsert",
    "Transaction": "delete delete_ignore deserialize flush insert insert_ignore "
    "pending_errors send_batch update update_ignore upsert write",
}
"""Methods of the local handle that do with others of it, which are sent."""

INSIDE = {
    "Client": "addresses close_handles renew_sessions info_of writer elsewhere",
    "Scan": "over",
    "Session": "begin_anew look_anew",
    "Transaction": "abort_for begin start_heart",
}
"""Methods that nobody calls on a remote handle."""


@pytest.mark.parametrize(("here", "there"), TWINS, ids=lambda kind: kind.__name__)
def test_all_methods_are_sent(here: type, there: type) -> None:
    own = {name for kind in there.__mro__[: there.__mro__.index(here)] for name in vars(kind)}
    public = {name for name in dir(here) if not name.startswith("_")}
    inside = set(INSIDE.get(here.__name__, "").split())
    assert public - own - inside == set(AS_THEY_ARE.get(here.__name__, "").split())


@pytest.mark.parametrize(("here", "there"), TWINS, ids=lambda kind: kind.__name__)
def test_they_take_the_same(here: type, there: type) -> None:
    for name in dir(here):
        one, other = getattr(here, name), getattr(there, name, None)
        if name.startswith("_") or not callable(one) or (here.__name__, name) in LESS:
            continue
        assert _arguments(other) == _arguments(one), f"{here.__name__}.{name}"


def _arguments(of: Any) -> list[Any]:
    return [
        (each.name, each.kind, each.default) for each in inspect.signature(of).parameters.values()
    ]


LESS = {("Client", "backup"), ("Client", "accept_loss")}
"""They are refused: they are done on the store's host."""


@pytest.mark.parametrize("kind", METHODS)
def test_the_table_names_what_there_is(kind: str) -> None:
    from txnkv.server.answering import _KINDS, _OWN

    for name in METHODS[kind]:
        assert (kind, name) in _OWN or hasattr(_KINDS[kind], name), f"{kind}.{name}"
    assert {name for of, name in _OWN if of == kind} <= set(METHODS[kind])
