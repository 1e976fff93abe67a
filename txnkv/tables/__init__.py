"""Tables: columnar row sets in LMDB, written by transactions, read at snapshots.

schema, schema_change, partitioning, table_catalog     what a table is
arrow_input, row_writer, operations     rows on their way in, and what an operation makes of them
table_index                             an index, and the entry of a row
tables                                  the ground: all tablets of a store
tablets/                                a tablet: row sets, manifest, memory, the order of layers
write/                                  what a transaction writes: in memory, as staged row sets
read/                                   views, keys, scans, differences between snapshots
commit/                                 conflicts, the participant, intents (delete stamps)
maintenance/                            from memory to row sets, and fewer of them; checks
table_engine                            the wiring: work on tables, in transactions and rounds
"""

from txnkv.tables import arrow_input, operations, table_catalog
from txnkv.tables.arrow_input import MISSING, Normaliser
from txnkv.tables.commit import LockedByYoungerError, RowWatch, timed_out
from txnkv.tables.maintenance import (
    Counted,
    accept_loss,
    back_up_tablet,
    check_row_set,
    check_together,
    committed_row_sets,
    history,
    row_set_ids,
)
from txnkv.tables.operations import (
    DELETES,
    INSERTS,
    OPERATIONS,
    PARTIAL,
    UPDATES,
    Operation,
    require_operation,
)
from txnkv.tables.partitioning import (
    HashPartition,
    PartitionBy,
    Partitioning,
    RangePartition,
    hash_partition,
    range_partition,
)
from txnkv.tables.read import (
    BATCH_ROWS,
    COMMIT_TIMESTAMP,
    OP,
    TOKEN_ROWS,
    DiffParts,
    DiffRequest,
    KeyRange,
    Order,
    OwnThen,
    Piece,
    Plan,
    ReadView,
    Request,
    TokenParts,
    changed,
    diff,
    lookup,
    parse,
    point,
    scan,
    scan_tokens,
    short_scan,
)
from txnkv.tables.read_set import ReadSet
from txnkv.tables.row_writer import (
    Adder,
    RowChecker,
    RowWriter,
    Values,
    nothing,
)
from txnkv.tables.schema import Column, IndexInfo, Schema, normal, widened
from txnkv.tables.schema_change import AnyColumn, SchemaChange, TtlChange, altered, places_of
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.table_engine import TableEngine
from txnkv.tables.table_history import History, seconds_of
from txnkv.tables.table_index import TableIndex, find_index, no_index
from txnkv.tables.tablets import BLOCKS_DB, FENCE_DB, RowSetInfo, Scope, Tablet, manifest
from txnkv.tables.write import (
    Ahead,
    ChangedRows,
    Evaluated,
    Lacking,
    Outcome,
    Run,
    SmallWrites,
    WriteContext,
    Written,
    lacking,
    staging,
    write_buffer,
)
