"""The C core, bound to Arrow: keys, sorted sets, blocks, filters, visibility, record batches.

Functions take any buffer object and give back memory that Arrow owns, so that nothing they
return points into LMDB; the exceptions (`Keys.from_block`, `Keys.slice`) say so. The GIL is
released while the core works, and all functions may be called from any thread; an object
belongs to one thread at a time unless it is only read.

    native                         the core as cffi sees it, and txnkv._native; memory, checksums
    rows, keys, codec              row numbers; encoded keys: made, sorted, searched, merged
    value_codecs                   keys and numbers of single values
    block, filters                 row sets on the disk
    layers                         keys and short ranges in what is published of a tablet
    row_layout, mem_row_set        rows as bytes, one by one too (`RowTable`); committed memory,
                                   and the deleted rows of blocks
    log_batch, log_messages, value_layout    the log of a topic, the last message of each key,
                                   typed values
    kafka_records                  its messages as Kafka's clients have them
    column_types, column_texts     types of columns; values as text, rows as lines of JSON
    compute                        Arrow's kernels, loaded when first used
"""

from txnkv.core import column_types, compute
from txnkv.core.block import (
    Zone,
    block_rows,
    bloom_build,
    bloom_probe,
    decode_block,
    decode_block_without,
    decode_key_block,
    encode_block,
    gather_block,
    gather_keys,
    lower_bound_in,
    match_block,
    verify_block,
    zone,
)
from txnkv.core.codec import KeyCodec, key_codec, successor
from txnkv.core.column_texts import (
    JSON,
    MANY_DIGITS,
    UUID,
    JsonField,
    JsonKind,
    JsonLineError,
    decimal_of,
    duration_of,
    duration_text,
    json_kind,
    json_members,
    json_of,
    json_rows,
    json_texts,
    no_decimal,
    require_json,
    uuid_of,
    uuid_texts,
)
from txnkv.core.column_types import (
    cast,
    castable,
    column_type,
    comparable,
    element_type,
    inexact,
    is_text,
    may_be_key,
    numpy_kind,
    other_unit,
    parse_type,
    plain_values,
    repeated,
    require_finite,
    require_valid,
    require_valid_columns,
    require_zones,
    split_outside,
    storage_type,
    type_name,
)
from txnkv.core.kafka_records import decode_records, encode_records
from txnkv.core.keys import (
    KeyOwners,
    Keys,
    Merger,
    find,
    hash_partition,
    lower_bound,
    mark_common,
    mark_duplicates,
    range_partition,
    scatter,
    sort_keys,
)
from txnkv.core.layers import FEW, LayerBlock, LayerRowSet, Layers, LayerStep, Load, RowSlices
from txnkv.core.log_batch import (
    HEADER_BYTES,
    ROW_BYTES,
    Attributes,
    BatchHeader,
    Chunk,
    CommittedFilter,
    Control,
    ControlType,
    Spans,
    all_data,
    check_batch,
    decided,
    emptied,
    intact,
    place,
    place_here,
    read_chunk,
    read_control,
    read_header,
    resized,
    sound,
    walk,
    within,
)
from txnkv.core.log_messages import (
    MESSAGES,
    LastKeys,
    decode,
    decode_headers,
    encode_batch,
    encode_control,
    encode_headers,
    join_headers,
    split_headers,
)
from txnkv.core.mem_row_set import (
    STAMP_NEVER,
    STAMP_UNDECIDED,
    Delta,
    Entries,
    MemRowSet,
    version_order,
    visible,
)
from txnkv.core.native import (
    AckRun,
    CoreError,
    Delivery,
    Handlers,
    HistogramBase,
    Holding,
    IdSet,
    LimitError,
    MessageFields,
    PinSet,
    PublishedRows,
    RowCheck,
    RowReader,
    RowTable,
    SharedWords,
    SqliteWriter,
    StoreWords,
    Turn,
    WriterLock,
    Writes,
    crc32c,
    fill_holes,
    hash64,
    message_batch,
    message_size,
    messages,
    monotonic_micros,
    pack,
    punch_hole,
    put_message,
    release_pages,
    sqlite_api,
    take_in,
    unpack,
    wall_micros,
    wire_pack,
    wire_unpack,
)
from txnkv.core.row_layout import RowBytes, RowLayout, number_type, row_table, value_of
from txnkv.core.rows import NULL_ROW, Bitmap, Rows, gathered, joined, slices_of
from txnkv.core.value_layout import VALUE_HEAD, DamagedValueError, ValueLayout
