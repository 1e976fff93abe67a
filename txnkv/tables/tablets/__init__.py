"""A tablet on disk and in memory: row sets, blocks and deletes, the manifest, the fence."""

from txnkv.tables.tablets import fence, manifest
from txnkv.tables.tablets.deltas import Deletes, put_deletes, stored_counts
from txnkv.tables.tablets.fence import FENCE_DB
from txnkv.tables.tablets.manifest import KIND, ROWS, TOMBSTONES, RowSetInfo, Scope
from txnkv.tables.tablets.memory import CommittedMemory
from txnkv.tables.tablets.merging import (
    Source,
    common_keys,
    common_with,
    keys_between,
    keys_of,
    merged,
    rows_of,
)
from txnkv.tables.tablets.row_set import RowSet
from txnkv.tables.tablets.row_set_blocks import RowSetRetired, until_there
from txnkv.tables.tablets.row_set_format import (
    BLOOM,
    COLUMNS,
    DELETES,
    HEADER,
    INSERTS,
    KEYS,
    Header,
    HeaderError,
    block_key,
    delta_summary,
    pack_delta,
    unpack_delta,
)
from txnkv.tables.tablets.row_set_writer import (
    EncodedRowSet,
    RowPart,
    RowSetBuilder,
    SortedRows,
    delete_row_set,
    encode_row_set,
    put_row_set,
)
from txnkv.tables.tablets.tablet import (
    EVERY_STAMP,
    InFlight,
    Step,
    Tablet,
    TabletState,
    TabletView,
    first_stamp,
)
from txnkv.tables.tablets.tablet_files import BLOCKS_DB, LARGE_CHECK, LARGE_READ, Pages

__all__ = [
    "keys_between",
    "until_there",
    "first_stamp",
    "TabletView",
    "Step",
    "InFlight",
    "EVERY_STAMP",
    "BLOCKS_DB",
    "BLOOM",
    "COLUMNS",
    "CommittedMemory",
    "DELETES",
    "Deletes",
    "EncodedRowSet",
    "FENCE_DB",
    "HEADER",
    "Header",
    "HeaderError",
    "INSERTS",
    "KEYS",
    "KIND",
    "LARGE_CHECK",
    "LARGE_READ",
    "Pages",
    "ROWS",
    "RowPart",
    "RowSet",
    "RowSetBuilder",
    "RowSetInfo",
    "RowSetRetired",
    "Scope",
    "SortedRows",
    "Source",
    "TOMBSTONES",
    "Tablet",
    "TabletState",
    "block_key",
    "common_keys",
    "common_with",
    "delete_row_set",
    "delta_summary",
    "encode_row_set",
    "fence",
    "keys_of",
    "manifest",
    "merged",
    "pack_delta",
    "put_deletes",
    "put_row_set",
    "rows_of",
    "stored_counts",
    "unpack_delta",
]
