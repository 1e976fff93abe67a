"""All that `txnkv` gives: see the package itself, which loads this when it is used."""

from txnkv.client.client import Client, connect
from txnkv.client.compacting import CompactReport
from txnkv.client.consumer import Consumer
from txnkv.client.inspection import CheckReport
from txnkv.client.producer import Producer
from txnkv.client.replica import replicate
from txnkv.client.scan import Scan, ScanToken
from txnkv.client.subscription import Subscription
from txnkv.client.table import DiffToken, Snapshot, Table
from txnkv.client.topic import Topic
from txnkv.coordinator.applications import Applied
from txnkv.coordinator.ids import Timestamp, TxnId
from txnkv.coordinator.states import TxnState
from txnkv.errors import (
    AckConflictError,
    AlreadyAppliedError,
    AlreadyPresentError,
    AuthenticationError,
    ClosedError,
    CommitOutcomeUnknownError,
    CorruptionError,
    HistoryExpiredError,
    IncompatibleStoreError,
    InvalidTokenError,
    InvalidTxnStateError,
    NotFoundError,
    NotSupportedError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RowError,
    RowErrors,
    SchemaError,
    StorageFullError,
    StoreNotFoundError,
    TableExistsError,
    TableNotFoundError,
    TopicExistsError,
    TopicNotFoundError,
    TransactionConflictError,
    TransactionLockedError,
    TransactionTimedOutError,
    TxnkvError,
    TxnNotFoundError,
    UnavailableError,
)
from txnkv.tables.partitioning import hash_partition, range_partition
from txnkv.tables.schema import Column, Schema
from txnkv.topics.fetch import AbortedTxn, FetchResult
from txnkv.topics.message import Message, MessageId
from txnkv.transaction.info import TxnInfo
from txnkv.transaction.session import Session
from txnkv.transaction.token import TxnToken
from txnkv.transaction.transaction import Transaction
from txnkv.transaction.write_result import WriteResult

__all__ = [
    "AbortedTxn",
    "AckConflictError",
    "AlreadyAppliedError",
    "AlreadyPresentError",
    "Applied",
    "AuthenticationError",
    "CheckReport",
    "Client",
    "ClosedError",
    "Column",
    "CommitOutcomeUnknownError",
    "CompactReport",
    "Consumer",
    "CorruptionError",
    "DiffToken",
    "FetchResult",
    "HistoryExpiredError",
    "IncompatibleStoreError",
    "InvalidTokenError",
    "InvalidTxnStateError",
    "Message",
    "MessageId",
    "NotFoundError",
    "NotSupportedError",
    "OffsetOutOfRangeError",
    "OutOfOrderSequenceError",
    "Producer",
    "ProducerFencedError",
    "RowError",
    "RowErrors",
    "Scan",
    "ScanToken",
    "Schema",
    "SchemaError",
    "Session",
    "Snapshot",
    "StorageFullError",
    "StoreNotFoundError",
    "Subscription",
    "Table",
    "TableExistsError",
    "TableNotFoundError",
    "Timestamp",
    "Topic",
    "TopicExistsError",
    "TopicNotFoundError",
    "Transaction",
    "TransactionConflictError",
    "TransactionLockedError",
    "TransactionTimedOutError",
    "TxnId",
    "TxnInfo",
    "TxnNotFoundError",
    "TxnState",
    "TxnToken",
    "TxnkvError",
    "UnavailableError",
    "WriteResult",
    "connect",
    "hash_partition",
    "range_partition",
    "replicate",
]
