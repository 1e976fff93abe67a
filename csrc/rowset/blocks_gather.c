#include "common/bits.h"
#include "common/check.h"
#include "common/rows.h"
#include "rowset/access.h"
#include "rowset/blocks.h"

#include <stdbool.h>

enum { AHEAD = 16 };

void blocks_pick(const block_bytes_t *const *lists, uint32_t n, uint32_t column,
                 block_bytes_t *out) {
    for (uint32_t i = 0; i < n; i++) {
        const block_bytes_t none = {NULL, 0};
        out[i] = lists[i] == NULL ? none : lists[i][column];
    }
}

/* What is asked of all blocks, and the block that was parsed last: rows of one block mostly
 * follow each other. */
typedef struct {
    const block_bytes_t *blocks;
    uint32_t n;
    block_kind_t kind;
    uint32_t width;
    uint32_t number;
    block_t block;
} reader_t;

static reader_t reader_make(const block_bytes_t *blocks, uint32_t n, block_kind_t kind,
                            uint32_t width) {
    const reader_t reader = {.blocks = blocks, .n = n, .kind = kind, .width = width,
                             .number = ROWS_NULL};
    return reader;
}

/* One value: `at` is the value, its byte of the bitmap, or its two offsets; NULL for a null. Of a
 * block that is not plain, it is the value of each kind: then `is_light`, with its length. */
typedef struct {
    const uint8_t *at;
    const uint8_t *data;
    size_t data_len;
    unsigned bit;
    bool is_light;
    access_value_t light;
} value_t;

static status_t find_light(const block_t *block, uint32_t row, value_t *out) {
    const status_t status = access_value(block, row, &out->light);
    if (status != STATUS_OK) return status;
    static const uint8_t nothing[1] = {0};
    out->is_light = true;
    out->at = out->light.len == 0 ? nothing : out->light.data;
    out->data = out->at;
    out->data_len = out->light.len;
    return STATUS_OK;
}

static status_t open_block(reader_t *reader, uint32_t number) {
    const block_bytes_t bytes = reader->blocks[number];
    const status_t status = block_parse(bytes.bytes, bytes.len, &reader->block);
    if (status != STATUS_OK) return status;
    reader->number = number;
    const bool fits = reader->block.kind == reader->kind && reader->block.width == reader->width;
    return fits ? STATUS_OK : STATUS_CORRUPT;
}

static status_t find_value(reader_t *reader, uint32_t number, uint32_t row, value_t *out) {
    out->at = NULL;
    out->is_light = false;
    if (number == ROWS_NULL) return STATUS_OK;
    if (number >= reader->n) return STATUS_RANGE;
    if (reader->blocks[number].bytes == NULL) return STATUS_OK;
    if (number != reader->number) {
        const status_t status = open_block(reader, number);
        if (status != STATUS_OK) return status;
    }
    const block_t *block = &reader->block;
    if (row >= block->rows) return STATUS_RANGE;
    if (block->validity != NULL && !bits_get(block->validity, row)) return STATUS_OK;
    if (block->encoding != BLOCK_PLAIN) return find_light(block, row, out);
    out->data = block->data;
    out->data_len = block->data_len;
    switch (block->kind) {
        case BLOCK_FIXED: out->at = block->data + (size_t)row * block->width; break;
        case BLOCK_BIT: out->at = block->data + row / 8; break;
        case BLOCK_VARLEN: out->at = block->offsets + 4 * (size_t)row; break;
        case BLOCK_OPAQUE: return STATUS_CORRUPT;
    }
    out->bit = row % 8;
    __builtin_prefetch(out->at);
    return STATUS_OK;
}

/* The next values, AHEAD at most; returns how many, or 0 with a status. */
static uint32_t find_some(reader_t *reader, const uint32_t *block_of, const uint32_t *row_of,
                          uint32_t rows, value_t *out, status_t *status) {
    const uint32_t n = rows < AHEAD ? rows : AHEAD;
    for (uint32_t i = 0; i < n; i++) {
        *status = find_value(reader, block_of[i], row_of[i], out + i);
        if (*status != STATUS_OK) return 0;
    }
    return n;
}

status_t blocks_gather_ends(const block_bytes_t *blocks, uint32_t n, const uint32_t *block_of,
                            const uint32_t *row_of, uint32_t rows, uint32_t *out_offsets) {
    reader_t reader = reader_make(blocks, n, BLOCK_VARLEN, 0);
    value_t values[AHEAD];
    status_t status = STATUS_OK;
    uint64_t end = 0;
    out_offsets[0] = 0;
    for (uint32_t lo = 0, some; lo < rows; lo += some) {
        some = find_some(&reader, block_of + lo, row_of + lo, rows - lo, values, &status);
        if (status != STATUS_OK) return status;
        for (uint32_t i = 0; i < some; i++) {
            if (values[i].at != NULL && values[i].is_light) {
                end += values[i].data_len;
            } else if (values[i].at != NULL) {
                const uint32_t from = load_le32(values[i].at), to = load_le32(values[i].at + 4);
                if (from > to || to > values[i].data_len) return STATUS_CORRUPT;
                end += to - from;
            }
            if (end > INT32_MAX) return STATUS_LIMIT;
            out_offsets[lo + i + 1] = (uint32_t)end;
        }
    }
    return STATUS_OK;
}

/* Called with a constant `width` for the common ones. */
static inline void write_fixed(const value_t *values, uint32_t n, uint8_t *out, size_t width) {
    for (uint32_t i = 0; i < n; i++) {
        if (values[i].at == NULL) {
            memset(out + i * width, 0, width);
        } else {
            memcpy(out + i * width, values[i].at, width);
        }
    }
}

static void write_strings(value_t *values, uint32_t n, const uint32_t *offsets, uint8_t *out) {
    for (uint32_t i = 0; i < n; i++) {
        if (values[i].at == NULL || values[i].is_light) continue;
        values[i].data += load_le32(values[i].at);
        __builtin_prefetch(values[i].data);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (values[i].at == NULL) continue;
        copy_bytes(out + offsets[i], values[i].data, offsets[i + 1] - offsets[i]);
    }
}

static void write_some(const reader_t *reader, value_t *values, uint32_t lo, uint32_t n,
                       const uint32_t *offsets, uint8_t *out) {
    const size_t width = reader->width;
    if (reader->kind == BLOCK_VARLEN) {
        write_strings(values, n, offsets + lo, out);
    } else if (reader->kind == BLOCK_BIT) {
        for (uint32_t i = 0; i < n; i++) {
            bits_or(out, lo + i, values[i].at == NULL ? 0 : *values[i].at >> values[i].bit & 1u);
        }
    } else {
        switch (width) {
            case 4: write_fixed(values, n, out + (size_t)lo * 4, 4); break;
            case 8: write_fixed(values, n, out + (size_t)lo * 8, 8); break;
            default: write_fixed(values, n, out + (size_t)lo * width, width);
        }
    }
}

status_t blocks_gather(const block_bytes_t *blocks, uint32_t n, block_kind_t kind, uint32_t width,
                       const uint32_t *block_of, const uint32_t *row_of, uint32_t rows,
                       const uint32_t *offsets, uint8_t *out_validity, uint8_t *out_values,
                       uint32_t *out_null_count) {
    CHECK((kind == BLOCK_FIXED) == (width != 0) && (kind == BLOCK_VARLEN) == (offsets != NULL));
    reader_t reader = reader_make(blocks, n, kind, width);
    value_t values[AHEAD];
    status_t status = STATUS_OK;
    uint32_t nulls = 0;
    if (rows != 0) memset(out_validity, 0, bits_bytes(rows));
    if (rows != 0 && kind == BLOCK_BIT) memset(out_values, 0, bits_bytes(rows));
    for (uint32_t lo = 0, some; lo < rows; lo += some) {
        some = find_some(&reader, block_of + lo, row_of + lo, rows - lo, values, &status);
        if (status != STATUS_OK) return status;
        write_some(&reader, values, lo, some, offsets, out_values);
        for (uint32_t i = 0; i < some; i++) {
            bits_or(out_validity, lo + i, values[i].at != NULL);
            nulls += values[i].at == NULL;
        }
    }
    *out_null_count = nulls;
    return STATUS_OK;
}
