"""Rows in: what an operation makes of them, and where they wait for the commit."""

from txnkv.tables.write import staging, write_buffer
from txnkv.tables.write.index_changes import ChangedRows, Lacking, lacking
from txnkv.tables.write.mutations import Evaluated, Outcome
from txnkv.tables.write.staging import WriteContext
from txnkv.tables.write.write_buffer import Ahead, Run, SmallWrites, Written
