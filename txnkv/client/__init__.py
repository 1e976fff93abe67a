"""The handles of a store, each one class in one file.

client, table, topic                  the store; tables and snapshots; topics
consumer, subscription, producer      what a topic gives
replica, admin                        copies of topics; a whole store seen, checked and compacted
"""

from txnkv.client.admin import CheckReport, CompactReport, TxnInfo
from txnkv.client.client import Client, connect
from txnkv.client.consumer import Consumer
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
    "TxnInfo",
    "connect",
    "replicate",
]
