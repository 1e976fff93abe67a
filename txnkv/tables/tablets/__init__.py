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
