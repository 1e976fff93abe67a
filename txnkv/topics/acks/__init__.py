"""Acknowledgements as they are kept: cursors, subscriptions, what is pending."""

from txnkv.topics.acks import cursors, pending_ack_rows, subscription_rows
from txnkv.topics.acks.cursors import Cursor
from txnkv.topics.acks.exclusive import Exclusive, Held, LocalSubscriptions
from txnkv.topics.acks.pending_ack_rows import Holder, conflict
from txnkv.topics.acks.subscription_info import (
    EXCLUSIVE,
    FAILOVER,
    SHARED,
    SubscriptionInfo,
    SubscriptionOptions,
)
from txnkv.topics.acks.subscription_rows import OPTIONS, Place, dropped

__all__ = [
    "Cursor",
    "EXCLUSIVE",
    "Exclusive",
    "FAILOVER",
    "Held",
    "Holder",
    "LocalSubscriptions",
    "OPTIONS",
    "Place",
    "SHARED",
    "SubscriptionInfo",
    "SubscriptionOptions",
    "conflict",
    "cursors",
    "dropped",
    "pending_ack_rows",
    "subscription_rows",
]
