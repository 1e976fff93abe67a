"""A tablet on disk and in memory: row sets, blocks and deletes, the manifest, the fence."""

from txnkv.tables.tablets import manifest
from txnkv.tables.tablets.manifest import KIND, ROWS, TOMBSTONES, KnownKeys, RowSetInfo, Scope
from txnkv.tables.tablets.memory import CommittedMemory
from txnkv.tables.tablets.merging import (
    Source,
    common_keys,
    common_with,
    keys_between,
    keys_of,
    merged,
)
from txnkv.tables.tablets.row_set import FEW_KEYS, RowSet, RowSetRetired, until_there
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
    Counts,
    Deletes,
    EncodedRowSet,
    RowPart,
    RowSetBuilder,
    SortedRows,
    delete_row_set,
    encode_row_set,
    put_deletes,
    put_row_set,
    stored_counts,
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
from txnkv.tables.tablets.tablet_files import (
    BLOCKS_DB,
    FENCE_DB,
    LARGE_CHECK,
    LARGE_READ,
    Pages,
    check_writer,
    mark_ended,
)
