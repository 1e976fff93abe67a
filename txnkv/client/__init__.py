"""The handles of a store: client, tables, scans, topics, consumers, producers, subscriptions."""

from txnkv.client import client
from txnkv.client.client import Client, connect
from txnkv.client.compacting import CompactReport
from txnkv.client.consumer import Consumer
from txnkv.client.inspection import CheckReport
from txnkv.client.producer import Producer
from txnkv.client.replica import replicate
from txnkv.client.subscription import Subscription
from txnkv.client.table import DiffToken, Snapshot, Table
from txnkv.client.topic import Topic

__all__ = [
    "CheckReport",
    "Client",
    "CompactReport",
    "Consumer",
    "DiffToken",
    "Producer",
    "Snapshot",
    "Subscription",
    "Table",
    "Topic",
    "client",
    "connect",
    "replicate",
]
