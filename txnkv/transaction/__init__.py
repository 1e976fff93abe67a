"""Transactions and sessions of a process, from the first change to the commit.

instance                              what all clients of a store share in a process
connection                            a client's hold on a store, for its handles
transaction, session, table_scan      what a user holds
begin, context, local_state           an open transaction, and how it stands
uncommitted                           what it has that is not committed yet
session_buffer, send_buffer           rows and messages that wait to be flushed
commit_protocols                      small ones, in a row of the commit log; large ones
autocommit, job, token                writes outside of a transaction; attempts; other processes
"""

from txnkv.transaction import commit_protocols, instance
from txnkv.transaction.autocommit import expiring, write_alone, write_row
from txnkv.transaction.begin import (
    DEADLINE,
    DEFAULTS,
    FlushMode,
    Isolation,
    Locking,
    Retries,
    TransactionOptions,
    require_client,
)
from txnkv.transaction.connection import (
    Acknowledged,
    AnyTable,
    AnyTopic,
    At,
    Closing,
    Connection,
    Grid,
    Handle,
    close_sessions,
    ending_joined,
    has_failed,
    message_ids,
    note_alone,
    note_joined,
    require_time,
    subscription_info,
)
from txnkv.transaction.context import TxnContext
from txnkv.transaction.instance import Instance, closing_once, keep_longer, open_instances
from txnkv.transaction.job import Job
from txnkv.transaction.local_state import ROLLED_BACK, Local
from txnkv.transaction.send_buffer import ValueSchema, declared, encoder_of, evolved_values
from txnkv.transaction.session import Session
from txnkv.transaction.session_buffer import (
    BUFFER_BYTES,
    Background,
    Room,
    SessionRows,
    WriteResult,
    flush_rest,
    size_of,
)
from txnkv.transaction.table_scan import Order, Scan, ScanToken
from txnkv.transaction.token import TxnToken
from txnkv.transaction.transaction import Transaction
from txnkv.transaction.uncommitted import Fence, name_taken
