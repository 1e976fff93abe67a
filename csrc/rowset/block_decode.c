#include "rowset/block.h"

#include "common/alloc.h"
#include "common/bits.h"
#include "common/check.h"
#include "common/rows.h"
#include "rowset/access.h"
#include "rowset/unpack.h"

#include <stdbool.h>

static bool rows_inside(const block_t *block, block_rows_t rows) {
    if (rows.rows == NULL) return rows.n <= block->rows && rows.lo <= block->rows - rows.n;
    return rows_below_or_null(rows.rows, rows.n, block->rows);
}

static uint32_t value_start(const block_t *block, uint32_t row) {
    return load_le32(block->offsets + 4 * (size_t)row);
}

static status_t varlen_range_size(const block_t *block, block_rows_t rows, uint64_t *out_size) {
    const uint32_t from = value_start(block, rows.lo), to = value_start(block, rows.lo + rows.n);
    const uint8_t *at = block->offsets + 4 * (size_t)rows.lo;
    uint32_t falls = 0;
    for (size_t i = 0; i < rows.n; i++) falls |= load_le32(at + 4 * i) > load_le32(at + 4 * i + 4);
    if (falls != 0 || to > block->data_len) return STATUS_CORRUPT;
    *out_size = to - from;
    return STATUS_OK;
}

static status_t varlen_list_size(const block_t *block, block_rows_t rows, uint64_t *out_size) {
    uint64_t size = 0;
    for (uint32_t i = 0; i < rows.n; i++) {
        const uint32_t row = rows.rows[i];
        if (row == ROWS_NULL) continue;
        const uint32_t from = value_start(block, row), to = value_start(block, row + 1);
        if (from > to || to > block->data_len) return STATUS_CORRUPT;
        size += to - from;
    }
    *out_size = size;
    return STATUS_OK;
}

static status_t light_list_size(const block_t *block, block_rows_t rows, uint64_t *out_size) {
    access_value_t value;
    *out_size = 0;
    for (uint32_t i = 0; i < rows.n; i++) {
        if (rows.rows[i] == ROWS_NULL) continue;
        const status_t status = access_value(block, rows.rows[i], &value);
        if (status != STATUS_OK) return status;
        *out_size += value.len;
    }
    return STATUS_OK;
}

status_t block_decode_size(const block_t *block, block_rows_t rows, uint64_t *out_size) {
    if (!rows_inside(block, rows)) return STATUS_RANGE;
    switch (block->kind) {
        case BLOCK_FIXED: *out_size = (uint64_t)rows.n * block->width; return STATUS_OK;
        case BLOCK_BIT: *out_size = bits_bytes(rows.n); return STATUS_OK;
        case BLOCK_OPAQUE: return STATUS_CORRUPT;
        case BLOCK_VARLEN: break;
    }
    status_t status;
    if (block->encoding == BLOCK_PLAIN) {
        status = rows.rows == NULL ? varlen_range_size(block, rows, out_size)
                                   : varlen_list_size(block, rows, out_size);
    } else {
        status = rows.rows == NULL ? unpack_size(block, rows.lo, rows.n, out_size)
                                   : light_list_size(block, rows, out_size);
    }
    if (status != STATUS_OK) return status;
    return *out_size <= INT32_MAX ? STATUS_OK : STATUS_LIMIT;
}

/* Bits of gathered rows; a null row gives 0. Returns how many are set. */
static uint32_t gather_bits(const uint8_t *bits, block_rows_t rows, uint8_t *out) {
    uint32_t set = 0;
    memset(out, 0, bits_bytes(rows.n));
    for (uint32_t i = 0; i < rows.n; i++) {
        const uint32_t row = rows.rows[i];
        const unsigned bit = row == ROWS_NULL ? 0 : bits == NULL ? 1 : bits_get(bits, row);
        bits_or(out, i, bit);
        set += bit;
    }
    return set;
}

static uint32_t decode_validity(const block_t *block, block_rows_t rows, uint8_t *out) {
    if (rows.rows != NULL) return rows.n - gather_bits(block->validity, rows, out);
    if (block->validity != NULL) {
        return rows.n - (uint32_t)bits_copy(block->validity, rows.lo, out, rows.n);
    }
    memset(out, 0xff, bits_bytes(rows.n));
    return 0;
}

/* Called with a constant `width` for the common ones. */
static inline void gather_fixed(const block_t *block, block_rows_t rows, uint8_t *out,
                                size_t width) {
    for (size_t i = 0; i < rows.n; i++) {
        const uint32_t row = rows.rows[i];
        if (row == ROWS_NULL) {
            memset(out + i * width, 0, width);
        } else {
            memcpy(out + i * width, block->data + row * width, width);
        }
    }
}

static void decode_fixed(const block_t *block, block_rows_t rows, uint8_t *out) {
    const size_t width = block->width;
    if (rows.n == 0) return;
    if (rows.rows == NULL) {
        memcpy(out, block->data + rows.lo * width, rows.n * width);
        return;
    }
    switch (width) {
        case 1: gather_fixed(block, rows, out, 1); break;
        case 2: gather_fixed(block, rows, out, 2); break;
        case 4: gather_fixed(block, rows, out, 4); break;
        case 8: gather_fixed(block, rows, out, 8); break;
        case 16: gather_fixed(block, rows, out, 16); break;
        default: gather_fixed(block, rows, out, width);
    }
}

static void decode_varlen(const block_t *block, block_rows_t rows, uint32_t *offsets,
                          uint8_t *out) {
    if (rows.rows == NULL) {
        const uint32_t from = value_start(block, rows.lo);
        const uint8_t *starts = block->offsets + 4 * (size_t)rows.lo;
        for (size_t i = 0; i <= rows.n; i++) offsets[i] = load_le32(starts + 4 * i) - from;
        copy_bytes(out, block->data + from, offsets[rows.n]);
        return;
    }
    uint32_t at = 0;
    offsets[0] = 0;
    for (uint32_t i = 0; i < rows.n; i++) {
        const uint32_t row = rows.rows[i];
        if (row != ROWS_NULL) {
            const uint32_t from = value_start(block, row), len = value_start(block, row + 1) - from;
            copy_bytes(out + at, block->data + from, len);
            at += len;
        }
        offsets[i + 1] = at;
    }
}

/* Called for plain blocks alone. */
static void decode_plain(const block_t *block, block_rows_t rows, uint32_t *out_offsets,
                         uint8_t *out) {
    switch (block->kind) {
        case BLOCK_FIXED: decode_fixed(block, rows, out); break;
        case BLOCK_VARLEN: decode_varlen(block, rows, out_offsets, out); break;
        case BLOCK_BIT:
            if (rows.rows != NULL) {
                gather_bits(block->data, rows, out);
            } else {
                bits_copy(block->data, rows.lo, out, rows.n);
            }
            break;
        case BLOCK_OPAQUE: break;
    }
}

/* Some rows, each by itself. */
static status_t pick_few(const block_t *block, block_rows_t rows, uint32_t *out_offsets,
                         uint8_t *out, size_t out_len) {
    const size_t width = block->width;
    access_value_t value;
    size_t end = 0;
    if (out_offsets != NULL) out_offsets[0] = 0;
    for (size_t i = 0; i < rows.n; i++) {
        value.len = 0;
        if (rows.rows[i] != ROWS_NULL) {
            const status_t status = access_value(block, rows.rows[i], &value);
            if (status != STATUS_OK) return status;
        }
        if (block->kind == BLOCK_FIXED) {
            if (value.len == 0) memset(out + i * width, 0, width);
            copy_bytes(out + i * width, value.data, value.len);
            continue;
        }
        if (value.len > out_len - end) return STATUS_CORRUPT;
        copy_bytes(out + end, value.data, value.len);
        end += value.len;
        out_offsets[i + 1] = (uint32_t)end;
    }
    return STATUS_OK;
}

/* A value by itself costs as much as FEW of a whole block. */
enum { FEW = 8 };

static status_t decode_light(const block_t *block, block_rows_t rows, uint32_t *out_offsets,
                             uint8_t *out, size_t out_len) {
    if (rows.rows == NULL) {
        return block->kind == BLOCK_FIXED
                   ? unpack_fixed(block, rows.lo, rows.n, out)
                   : unpack_varlen(block, rows.lo, rows.n, out_offsets, out, out_len);
    }
    if (rows.n < block->rows / FEW) {
        return pick_few(block, rows, block->kind == BLOCK_FIXED ? NULL : out_offsets, out, out_len);
    }
    block_t plain;
    void *memory;
    const status_t status = unpack_block(block, &plain, &memory);
    if (status != STATUS_OK) return status;
    decode_plain(&plain, rows, out_offsets, out);
    alloc_free(memory);
    return STATUS_OK;
}

status_t block_decode(const block_t *block, block_rows_t rows, uint8_t *out_validity,
                      uint32_t *out_offsets, uint8_t *out_values, size_t out_len,
                      uint32_t *out_null_count) {
    uint64_t size;
    const status_t status = block_decode_size(block, rows, &size);
    if (status != STATUS_OK) return status;
    CHECK(size <= out_len);
    *out_null_count = decode_validity(block, rows, out_validity);
    if (block->encoding != BLOCK_PLAIN) {
        return decode_light(block, rows, out_offsets, out_values, size);
    }
    decode_plain(block, rows, out_offsets, out_values);
    return STATUS_OK;
}
