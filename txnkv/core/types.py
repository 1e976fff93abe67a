"""The core's key type for each Arrow type that may stand in a key."""

from __future__ import annotations

import pyarrow as pa

from txnkv.core.native import lib

_BY_ID: dict[int, int] = {
    pa.bool_().id: lib.KEY_BOOL,
    pa.int8().id: lib.KEY_I8,
    pa.int16().id: lib.KEY_I16,
    pa.int32().id: lib.KEY_I32,
    pa.int64().id: lib.KEY_I64,
    pa.uint8().id: lib.KEY_U8,
    pa.uint16().id: lib.KEY_U16,
    pa.uint32().id: lib.KEY_U32,
    pa.uint64().id: lib.KEY_U64,
    pa.float32().id: lib.KEY_F32,
    pa.float64().id: lib.KEY_F64,
    pa.date32().id: lib.KEY_I32,
    pa.timestamp("us").id: lib.KEY_I64,
    pa.decimal128(38).id: lib.KEY_DECIMAL128,
    pa.string().id: lib.KEY_BYTES,
    pa.binary().id: lib.KEY_BYTES,
}


def key_type(type_: pa.DataType) -> int | None:
    """The core's `key_type_t` of an Arrow type, None when it cannot stand in a key."""
    return _BY_ID.get(type_.id)
