/* Encoding of primary keys: columns of a key, one behind the other, so that memcmp of the
 * bytes is the order of the values. Part of the format: docs/format-blocks.md, "Key encoding".
 *
 *   bool              1 byte, 0 or 1
 *   intN, date, time  big-endian, sign bit flipped
 *   uintN             big-endian
 *   floatN            big-endian bits; negative: all inverted, else sign flipped;
 *                     -0.0 is stored as 0.0, every NaN as the one quiet NaN, above +inf
 *   decimal128        16 bytes big-endian, sign bit flipped
 *   uuid              its 16 bytes
 *   string, binary    last column: as it is; else 00 becomes 00 FF and 00 01 ends it
 *
 * All functions are pure and safe from any thread. */
#ifndef TXNKV_CODEC_KEY_H
#define TXNKV_CODEC_KEY_H

#include "codec/keys.h"
#include "common/status.h"

typedef enum {
    KEY_BOOL = 0,
    KEY_I8 = 1,
    KEY_I16 = 2,
    KEY_I32 = 3,
    KEY_I64 = 4,
    KEY_U8 = 5,
    KEY_U16 = 6,
    KEY_U32 = 7,
    KEY_U64 = 8,
    KEY_F32 = 9,
    KEY_F64 = 10,
    KEY_DECIMAL128 = 11,
    KEY_BYTES = 12,
    KEY_UUID = 13
} key_type_t;

/* One Arrow column without nulls. `offset` is Arrow's: the row at which it begins. Offsets
 * are i32, for KEY_BYTES only. The lengths are those of whole buffers, in bytes. */
typedef struct {
    const uint8_t *values;
    size_t values_len;
    const uint8_t *offsets;
    size_t offsets_len;
    uint64_t offset;
    key_type_t type;
} key_column_t;

/* Bytes of the type in a key, 0 for KEY_BYTES. */
uint32_t key_type_width(key_type_t type);

/* Bytes of a whole key, 0 when it varies. */
uint32_t key_width(const key_type_t *types, uint32_t n_types);

/* n rows of fixed columns to n * key_width bytes. INPUT: a buffer is too short. */
status_t key_encode_fixed(const key_column_t *columns, uint32_t n_columns, uint32_t n,
                          uint8_t *out, size_t out_len);

/* Variable keys go in two steps. The first writes where each key begins to out_offsets
 * [1 .. n] and the size of them all; the second, given the same offsets, writes the keys
 * and leaves offsets as keys_t has them. INPUT: a buffer is too short, or Arrow offsets fall.
 * LIMIT: the keys pass 4 GiB. Columns stay as they are between the two. */
status_t key_encode_starts(const key_column_t *columns, uint32_t n_columns, uint32_t n,
                           uint32_t *out_offsets, uint64_t *out_size);
status_t key_encode_variable(const key_column_t *columns, uint32_t n_columns, uint32_t n,
                             uint32_t *offsets, uint8_t *out, size_t out_len);

/* Column `column` of keys [lo, lo + n) as Arrow values: width * n bytes, or a bitmap for
 * KEY_BOOL. CORRUPT: a key is too short for its columns, or a string in it has no end. */
status_t key_decode_fixed(const keys_t *keys, const key_type_t *types, uint32_t n_types,
                          uint32_t column, uint32_t lo, uint32_t n, uint8_t *out,
                          size_t out_len);

/* The same without gone[0 .. gone_n), which are strictly ascending and among [lo, lo + n); not
 * for KEY_BOOL. RANGE: they are not. */
status_t key_decode_but(const keys_t *keys, const key_type_t *types, uint32_t n_types,
                        uint32_t column, uint32_t lo, uint32_t n, const uint32_t *gone,
                        uint32_t gone_n, uint8_t *out, size_t out_len);

/* key_decode_fixed for KEY_BYTES: first the n + 1 offsets from 0, then that many bytes. */
status_t key_decode_offsets(const keys_t *keys, const key_type_t *types, uint32_t n_types,
                            uint32_t column, uint32_t lo, uint32_t n, uint32_t *out_offsets,
                            uint64_t *out_size);
status_t key_decode_bytes(const keys_t *keys, const key_type_t *types, uint32_t n_types,
                          uint32_t column, uint32_t lo, uint32_t n, const uint32_t *offsets,
                          uint8_t *out, size_t out_len);

#endif
