"""Transactions and sessions of a process, from the first change to the commit.

connection                              a client's hold on a store, for its handles
transaction, session                    what a user holds
context, small_parts, local_state       what is not committed yet, and how a transaction stands
session_rows, send_buffer               what waits to be flushed
one_phase_commit, two_phase_commit      small ones, in a row of the commit log; large ones
autocommit, job, token                  writes outside of a transaction; attempts; other processes
"""

from txnkv.transaction import one_phase_commit, two_phase_commit
from txnkv.transaction.acknowledged import Acknowledged
from txnkv.transaction.closeable import Closing, Handle
from txnkv.transaction.connection import AnyTable, At, Connection
from txnkv.transaction.context import TxnContext
from txnkv.transaction.job import Job
from txnkv.transaction.local_state import Local
from txnkv.transaction.retry import DEADLINE, DEFAULTS, Retries
from txnkv.transaction.scan import Scan, ScanToken, unpin
from txnkv.transaction.session import Session
from txnkv.transaction.session_buffer import BUFFER_BYTES
from txnkv.transaction.token import TxnToken
from txnkv.transaction.transaction import Transaction
from txnkv.transaction.typed_values import ValueSchema, declared, encoder_of
from txnkv.transaction.write_result import WriteResult

__all__ = [
    "Acknowledged",
    "AnyTable",
    "At",
    "BUFFER_BYTES",
    "Closing",
    "Connection",
    "DEADLINE",
    "DEFAULTS",
    "Handle",
    "Job",
    "Local",
    "Retries",
    "Scan",
    "ScanToken",
    "Session",
    "Transaction",
    "TxnContext",
    "TxnToken",
    "ValueSchema",
    "WriteResult",
    "declared",
    "encoder_of",
    "one_phase_commit",
    "two_phase_commit",
    "unpin",
]
