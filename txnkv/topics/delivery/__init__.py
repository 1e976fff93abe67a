"""Subscriptions: leases, redelivery, acknowledgements of a transaction, failover."""

from txnkv.topics.delivery import holders
from txnkv.topics.delivery.holders import HeldMessages, Holders
from txnkv.topics.delivery.leases import LeaseReader
from txnkv.topics.delivery.redelivery import Delivery, ExclusiveReader
from txnkv.topics.delivery.retry_hold import Hold
from txnkv.topics.delivery.standby import Standby
from txnkv.topics.delivery.subscriptions import (
    Place,
    SubscriptionInfo,
    SubscriptionOptions,
    Subscriptions,
)
from txnkv.topics.delivery.transaction_acks import PendingAcks, refuse

__all__ = [
    "Delivery",
    "ExclusiveReader",
    "HeldMessages",
    "Hold",
    "Holders",
    "LeaseReader",
    "PendingAcks",
    "Place",
    "Standby",
    "SubscriptionInfo",
    "SubscriptionOptions",
    "Subscriptions",
    "holders",
    "refuse",
]
