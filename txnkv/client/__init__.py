"""The handles of a store, each one class in one file.

opening                               the way in
client, table, topic                  the store; tables and snapshots; topics
consumer, subscription, producer      what a topic gives
attempts                              transactions of one `run`, and those that have a name
replica, admin                        copies of topics; a whole store seen, checked and compacted
indexes                               made, filled, compared with their tables
planning                              what Spark asks of a store, in its planners and tasks
backup, dump_files                    a store copied at one timestamp, as it is or in plain files,
                                      and made of such a copy

With them come the words that options take, as types: a checker finds a wrong one before the program
runs.
"""

from txnkv.client.admin import CheckReport, CompactReport, TxnInfo
from txnkv.client.attempts import (
    NAMES_TABLE,
    Attempts,
    Claim,
    NamedTransaction,
    begin_transaction,
    claim_name,
    names_table,
)
from txnkv.client.backup import BackupReport, RestoreReport, restore
from txnkv.client.client import Client
from txnkv.client.consumer import Consumer
from txnkv.client.dump_files import DumpReport, dump
from txnkv.client.indexes import Index
from txnkv.client.opening import connect
from txnkv.client.planning import Planning
from txnkv.client.producer import Producer, close_producers
from txnkv.client.replica import replicate
from txnkv.client.subscription import Subscription
from txnkv.client.table import DiffToken, Snapshot, Table
from txnkv.client.topic import Topic
from txnkv.tables import Operation
from txnkv.topics import (
    Buffer,
    Compression,
    FetchIsolation,
    Order,
    ReadIsolation,
    Start,
    SubscriptionType,
)
from txnkv.transaction import FlushMode, Isolation, Locking

__all__ = [
    "Attempts",
    "BackupReport",
    "Buffer",
    "CheckReport",
    "Claim",
    "Client",
    "CompactReport",
    "Compression",
    "Consumer",
    "DiffToken",
    "DumpReport",
    "FetchIsolation",
    "FlushMode",
    "Index",
    "Isolation",
    "Locking",
    "NAMES_TABLE",
    "NamedTransaction",
    "Operation",
    "Order",
    "Planning",
    "Producer",
    "ReadIsolation",
    "RestoreReport",
    "Snapshot",
    "Start",
    "Subscription",
    "SubscriptionType",
    "Table",
    "Topic",
    "TxnInfo",
    "begin_transaction",
    "claim_name",
    "close_producers",
    "connect",
    "dump",
    "names_table",
    "replicate",
    "restore",
]
