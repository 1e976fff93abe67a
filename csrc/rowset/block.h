/* A block: one column of up to 2^32 - 1 rows, with a checksum. Part of the format:
 * docs/format-blocks.md, "Block".
 *
 *   header (32 bytes) | validity bitmap | offsets | data       sections padded to 8 bytes
 *
 * That is a plain block, in Arrow's memory layout. encode.h makes lighter ones, which have other
 * sections; access.h reads single rows of either, unpack.h many.
 *
 * Encoding is canonical: padding, bits behind the last row and the values of nulls are zero.
 * Everything read from a block is checked, so that damaged bytes give CORRUPT and never a
 * read outside of it; block_verify also says whether they are the bytes that were written.
 * All functions are safe from any thread. */
#ifndef TXNKV_ROWSET_BLOCK_H
#define TXNKV_ROWSET_BLOCK_H

#include "codec/keys.h"
#include "common/status.h"
#include "rowset/packed.h"

typedef enum {
    BLOCK_FIXED = 1,  /* width bytes a row */
    BLOCK_BIT = 2,    /* one bit a row */
    BLOCK_VARLEN = 3, /* u32 offsets, then bytes */
    BLOCK_OPAQUE = 4  /* bytes whose meaning is the caller's */
} block_kind_t;

/* What stands behind the validity bitmap; version 1 has plain blocks alone. */
typedef enum {
    BLOCK_PLAIN = 0,
    BLOCK_PACKED = 1,  /* fixed: each value as a packed number, of 9 to 16 bytes as two */
    BLOCK_DECIMAL = 2, /* fixed: a float as a packed number over a power of ten */
    BLOCK_DICTIONARY = 3, /* fixed, varlen: packed codes, and the values that they stand for */
    BLOCK_RUNS = 4,    /* fixed: packed ends of runs, and their values */
    BLOCK_ENDS = 5     /* varlen: packed offsets, and the bytes as they are */
} block_encoding_t;

enum {
    BLOCK_HEADER_BYTES = 32,
    BLOCK_VERSION = 1,       /* of a plain block */
    BLOCK_VERSION_LIGHT = 2, /* of one that is not */
    BLOCK_HAS_VALIDITY = 1,
    BLOCK_MOST_DIGITS = 15
};

/* Little-endian, at the start of every block. */
typedef struct {
    uint32_t crc; /* of everything behind it, seeded by the caller */
    uint8_t version;
    uint8_t kind;
    uint16_t flags;
    uint32_t rows;
    uint32_t null_count;
    uint32_t width; /* of BLOCK_FIXED 1 or more, else 0 */
    uint8_t encoding;
    uint8_t digits;  /* of BLOCK_DECIMAL: the power of ten */
    uint8_t keys;    /* of BLOCK_PACKED, 1: values are big-endian */
    uint8_t reserved;
    uint64_t body_len; /* without the padding at its end */
} block_header_t;

/* A parsed block. Pointers lie in the block, at any alignment, NULL when absent. Of one that is
 * not plain, offsets and data are those of its values: of the dictionary or the runs, of which
 * there are `values`; or of all rows, with their offsets packed. */
typedef struct {
    block_kind_t kind;
    uint32_t rows;
    uint32_t null_count;
    uint32_t width;
    const uint8_t *validity;
    const uint8_t *offsets;
    const uint8_t *data;
    size_t data_len;
    block_encoding_t encoding;
    uint32_t digits;
    uint32_t keys;
    uint32_t values;
    packed_t numbers[2]; /* the second: the high bytes of values of more than 8 */
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

/* Keys that point into a plain block which block_verify has accepted. CORRUPT when it is of
 * another kind, is not plain, or has nulls. */
status_t block_keys(const uint8_t *bytes, size_t len, keys_t *out);

/* The size of the plain block, then the block itself into exactly that many bytes.
 * RANGE: a row is outside of the column. INPUT: a buffer is too short, or Arrow offsets
 * fall. LIMIT: more than 2 GiB of strings. The column stays as it is between the two. */
status_t block_encode_size(const block_column_t *column, block_rows_t rows, uint64_t *out_size);
status_t block_encode(const block_column_t *column, block_rows_t rows, uint32_t seed,
                      uint8_t *out, size_t out_len);

/* Keys, and bytes of the caller's, as plain blocks. */
uint64_t block_size_of_keys(const keys_t *keys);
void block_encode_keys(const keys_t *keys, uint32_t seed, uint8_t *out, size_t out_len);
uint64_t block_size_of_opaque(size_t len);
void block_encode_opaque(const uint8_t *data, size_t len, uint32_t rows, uint32_t null_count,
                         uint32_t seed, uint8_t *out, size_t out_len);

/* Writes the header of a block whose body is there, zeros behind it, and the checksum. `size` is
 * that of the whole block, header->body_len what it holds but for the header and those zeros. */
void block_seal(const block_header_t *header, uint32_t seed, uint8_t *out, uint64_t size);

/* Rows of a block as Arrow buffers: out_validity (n + 7) / 8 bytes, out_values width * n
 * bytes, or a bitmap, or as many bytes as block_decode_size says with n + 1 offsets from 0.
 * A gathered row of 2^32 - 1 is a null. RANGE: a row is not in the block. LIMIT: more than
 * Arrow's i32 offsets can say. CORRUPT: it is damaged. NO_MEMORY: some of a block that is not
 * plain, in no order or in runs, are read by way of a plain one. */
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
