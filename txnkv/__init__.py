"""txnkv: exactly-once tables, embedded in a Python process.

client = txnkv.connect("data/shop")
orders = client.create_table(
"orders", txnkv.Schema({"id": "int64", "total": "float64?"}, primary_key=["id"])
)
with client.transaction() as txn:
txn.insert(orders, {"id": 1, "total": 9.5})
"""

from importlib.metadata import PackageNotFoundError, version

from txnkv import aio
from txnkv.client import Client, connect
from txnkv.compacting import CompactReport
from txnkv.coordinator.ids import Timestamp, TxnId
from txnkv.coordinator.states import TxnState
from txnkv.errors import (
    AckConflictError,
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
from txnkv.inspection import CheckReport
from txnkv.scan import Scan, ScanToken
from txnkv.session import Session
from txnkv.table import Snapshot, Table
from txnkv.tables.partitioning import hash_partition, range_partition
from txnkv.tables.schema import Column, Schema
from txnkv.token import TxnToken
from txnkv.transaction import Transaction
from txnkv.txn_info import TxnInfo
from txnkv.write_result import WriteResult

try:
    __version__ = version("txnkv")
except PackageNotFoundError:
    __version__ = "0+unknown"

__all__ = [
    "AckConflictError",
    "AlreadyPresentError",
    "AuthenticationError",
    "CheckReport",
    "CompactReport",
    "Client",
    "ClosedError",
    "Column",
    "CommitOutcomeUnknownError",
    "CorruptionError",
    "HistoryExpiredError",
    "IncompatibleStoreError",
    "InvalidTokenError",
    "InvalidTxnStateError",
    "NotFoundError",
    "NotSupportedError",
    "OffsetOutOfRangeError",
    "OutOfOrderSequenceError",
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
    "Table",
    "TableExistsError",
    "TableNotFoundError",
    "Timestamp",
    "TopicExistsError",
    "TopicNotFoundError",
    "Transaction",
    "TransactionConflictError",
    "TransactionLockedError",
    "TransactionTimedOutError",
    "TxnId",
    "TxnInfo",
    "TxnkvError",
    "TxnNotFoundError",
    "TxnState",
    "TxnToken",
    "UnavailableError",
    "WriteResult",
    "aio",
    "connect",
    "hash_partition",
    "range_partition",
]
