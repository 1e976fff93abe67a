/* A block: one column of up to 2^32 - 1 rows in Arrow's memory layout, with a checksum.
 * Part of the format: docs/format-blocks.md, "Block".
 *
 *   header (32 bytes) | validity bitmap | offsets | data       sections padded to 8 bytes
 *
 * Encoding is canonical: padding, bits behind the last row and the values of nulls are zero.
 * Everything read from a block is checked, so that damaged bytes give CORRUPT and never a
 * read outside of it; block_verify also says whether they are the bytes that were written.
 * All functions are safe from any thread. */
#ifndef TXNKV_ROWSET_BLOCK_H
#define TXNKV_ROWSET_BLOCK_H

#include "codec/keys.h"
#include "common/status.h"

typedef enum {
    BLOCK_FIXED = 1,  /* width bytes a row */
    BLOCK_BIT = 2,    /* one bit a row */
    BLOCK_VARLEN = 3, /* u32 offsets, then bytes */
    BLOCK_OPAQUE = 4  /* bytes whose meaning is the caller's */
} block_kind_t;

enum { BLOCK_HEADER_BYTES = 32, BLOCK_VERSION = 1, BLOCK_HAS_VALIDITY = 1 };

/* Little-endian, at the start of every block. */
typedef struct {
    uint32_t crc; /* of everything behind it, seeded by the caller */
    uint8_t version;
    uint8_t kind;
    uint16_t flags;
    uint32_t rows;
    uint32_t null_count;
    uint32_t width; /* of BLOCK_FIXED 1 or more, else 0 */
    uint32_t reserved;
    uint64_t body_len; /* without the padding at its end */
} block_header_t;

/* A parsed block. Pointers lie in the block, at any alignment, NULL when absent. */
typedef struct {
    block_kind_t kind;
    uint32_t rows;
    uint32_t null_count;
    uint32_t width;
    const uint8_t *validity;
    const uint8_t *offsets;
    const uint8_t *data;
    size_t data_len;
} block_t;

/* The bytes of a block that block_verify has accepted; NULL: it is not there. */
typedef struct {
    const uint8_t *bytes;
    size_t len;
} block_bytes_t;

/* An Arrow column. Lengths are those of whole buffers in bytes, `offset` and `length` are
 * Arrow's, in rows; validity is NULL when there are no nulls. BLOCK_VARLEN has i32 offsets. */
typedef struct {
    block_kind_t kind;
    uint32_t width;
    const uint8_t *values;
    size_t values_len;
    const uint8_t *offsets;
    size_t offsets_len;
    const uint8_t *validity;
    size_t validity_len;
    uint64_t offset;
    uint64_t length;
} block_column_t;

/* Which rows of a column or block: rows[0 .. n) when rows is given, else lo .. lo + n. */
typedef struct {
    const uint32_t *rows;
    uint32_t lo;
    uint32_t n;
} block_rows_t;

/* Header sane, checksum right, offsets in order. CORRUPT otherwise. */
status_t block_verify(const uint8_t *bytes, size_t len, uint32_t seed);

/* Header sane and sections inside of the block, in constant time. */
status_t block_parse(const uint8_t *bytes, size_t len, block_t *out);

/* Keys that point into a block which block_verify has accepted. CORRUPT when it is of
 * another kind or has nulls. */
status_t block_keys(const uint8_t *bytes, size_t len, keys_t *out);

/* The size of the encoded block, then the block itself into exactly that many bytes.
 * RANGE: a row is outside of the column. INPUT: a buffer is too short, or Arrow offsets
 * fall. LIMIT: more than 2 GiB of strings. The column stays as it is between the two. */
status_t block_encode_size(const block_column_t *column, block_rows_t rows, uint64_t *out_size);
status_t block_encode(const block_column_t *column, block_rows_t rows, uint32_t seed,
                      uint8_t *out, size_t out_len);

/* Keys, and bytes of the caller's, as blocks. */
uint64_t block_size_of_keys(const keys_t *keys);
void block_encode_keys(const keys_t *keys, uint32_t seed, uint8_t *out, size_t out_len);
uint64_t block_size_of_opaque(size_t len);
void block_encode_opaque(const uint8_t *data, size_t len, uint32_t rows, uint32_t null_count,
                         uint32_t seed, uint8_t *out, size_t out_len);

/* Rows of a block as Arrow buffers: out_validity (n + 7) / 8 bytes, out_values width * n
 * bytes, or a bitmap, or as many bytes as block_decode_size says with n + 1 offsets from 0.
 * A gathered row of 2^32 - 1 is a null. RANGE: a row is not in the block. LIMIT: more than
 * Arrow's i32 offsets can say. */
status_t block_decode_size(const block_t *block, block_rows_t rows, uint64_t *out_size);
status_t block_decode(const block_t *block, block_rows_t rows, uint8_t *out_validity,
                      uint32_t *out_offsets, uint8_t *out_values, size_t out_len,
                      uint32_t *out_null_count);

/* Rows [lo, lo + n) but for gone[0 .. gone_n), strictly ascending, copied in runs: otherwise as
 * block_decode_size and block_decode. out_validity is written when the block has nulls. */
status_t block_decode_but_size(const block_t *block, uint32_t lo, uint32_t n,
                               const uint32_t *gone, uint32_t gone_n, uint64_t *out_size);
status_t block_decode_but(const block_t *block, uint32_t lo, uint32_t n, const uint32_t *gone,
                          uint32_t gone_n, uint8_t *out_validity, uint32_t *out_offsets,
                          uint8_t *out_values, size_t out_len, uint32_t *out_null_count);

#endif
