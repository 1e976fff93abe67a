#include "rowset/point.h"

#include "common/bits.h"
#include "rowset/access.h"
#include "rowset/bloom.h"

#include <stdbool.h>

enum { TOGETHER = 16 };

int64_t point_find(const uint8_t *keys, size_t keys_len, const uint8_t *filter, size_t filter_len,
                   const uint8_t *key, size_t key_len) {
    block_t parsed;
    int64_t row;
    if (filter != NULL) {
        block_t block;
        if (block_parse(filter, filter_len, &block) != STATUS_OK) return POINT_CORRUPT;
        if (block.kind != BLOCK_OPAQUE || block.data_len == 0 || block.data_len % 32 != 0) {
            return POINT_CORRUPT;
        }
        if (!bloom_probe(block.data, block.data_len, key, key_len)) return POINT_ABSENT;
    }
    if (block_parse(keys, keys_len, &parsed) != STATUS_OK) return POINT_CORRUPT;
    if (access_find(&parsed, key, key_len, &row) != STATUS_OK) return POINT_CORRUPT;
    return row < 0 ? POINT_ABSENT : row;
}

static block_kind_t kind_of(row_kind_t kind) {
    return kind == ROW_BIT ? BLOCK_BIT : kind == ROW_FIXED ? BLOCK_FIXED : BLOCK_VARLEN;
}

/* Whether a column's block has its values: a column that is not there reads as nulls, and so
 * does an opaque one, whose values are not for the core. */
static bool has_values(row_slot_t slot, block_bytes_t bytes) {
    if (bytes.bytes == NULL) return false;
    return slot.kind != ROW_VARLEN || bytes.len < 6 || bytes.bytes[5] != BLOCK_OPAQUE;
}

/* Parses the block of a column and asks for what a read of its row needs. */
static int64_t open_column(row_slot_t slot, block_bytes_t bytes, uint32_t row, block_t *out) {
    *out = (block_t){.kind = BLOCK_OPAQUE};
    if (!has_values(slot, bytes)) return 0;
    if (block_parse(bytes.bytes, bytes.len, out) != STATUS_OK) return POINT_CORRUPT;
    const uint32_t width = slot.kind == ROW_FIXED ? slot.width : 0;
    if (out->kind != kind_of(slot.kind) || out->width != width) return POINT_CORRUPT;
    if (row >= out->rows) return POINT_RANGE;
    if (out->validity != NULL) __builtin_prefetch(out->validity + row / 8);
    if (out->encoding != BLOCK_PLAIN) {
        const size_t frame = row / PACKED_FRAME;
        __builtin_prefetch(out->numbers[0].frames + frame * PACKED_FRAME_BYTES);
        return 0;
    }
    switch (slot.kind) {
        case ROW_BIT: __builtin_prefetch(out->data + row / 8); break;
        case ROW_FIXED: __builtin_prefetch(out->data + (size_t)row * width); break;
        case ROW_VARLEN: __builtin_prefetch(out->offsets + 4 * (size_t)row); break;
    }
    return 0;
}

/* A row that grows; `used` goes on behind `cap`, where nothing is written. */
typedef struct {
    uint8_t *out;
    size_t cap;
    size_t used;
    size_t head;
} row_out_t;

static void add_bytes(row_slot_t slot, access_value_t *value, row_out_t *to) {
    const size_t len = value->is_null ? 0 : value->len;
    if (to->used <= to->cap && len <= to->cap - to->used) {
        copy_bytes(to->out + to->used, value->data, len);
    }
    to->used += len;
    store_le32(to->out + slot.at, (uint32_t)(to->used - to->head));
}

static int64_t add_value(row_slot_t slot, uint32_t c, const block_t *block, uint32_t row,
                         row_out_t *to) {
    access_value_t value = {.is_null = 1};
    if (block->kind != BLOCK_OPAQUE && access_value(block, row, &value) != STATUS_OK) {
        return POINT_CORRUPT;
    }
    if (value.is_null) bits_set(to->out, c);
    switch (slot.kind) {
        case ROW_VARLEN: add_bytes(slot, &value, to); break;
        case ROW_BIT: to->out[slot.at] = (uint8_t)(value.is_null ? 0 : value.bit); break;
        case ROW_FIXED:
            if (!value.is_null) memcpy(to->out + slot.at, value.data, slot.width);
            break;
    }
    return 0;
}

static void prefetch_headers(const row_layout_t *layout, const block_bytes_t *blocks) {
    for (uint32_t c = 0; c < layout->n; c++) {
        if (blocks[c].bytes != NULL) __builtin_prefetch(blocks[c].bytes);
    }
}

/* Column by column, each waits for memory several times; so all ask first, then all read. */
int64_t point_row(const row_layout_t *layout, const block_bytes_t *blocks, uint32_t row,
                  uint8_t *out, size_t cap) {
    if (layout->head > cap) return layout->head;
    row_out_t to = {out, cap, layout->head, layout->head};
    block_t open[TOGETHER];
    if (layout->head != 0) memset(out, 0, layout->head);
    prefetch_headers(layout, blocks);
    for (uint32_t lo = 0; lo < layout->n; lo += TOGETHER) {
        const uint32_t n = layout->n - lo < TOGETHER ? layout->n - lo : TOGETHER;
        const row_slot_t *slots = layout->slots + lo;
        for (uint32_t i = 0; i < n; i++) {
            const int64_t status = open_column(slots[i], blocks[lo + i], row, open + i);
            if (status < 0) return status;
        }
        for (uint32_t i = 0; i < n; i++) {
            const int64_t status = add_value(slots[i], lo + i, open + i, row, &to);
            if (status < 0) return status;
        }
    }
    return (int64_t)to.used;
}

int64_t point_get(const row_layout_t *layout, const block_bytes_t *probe,
                  const block_bytes_t *blocks, const uint8_t *key, size_t key_len, uint8_t *out,
                  size_t cap) {
    prefetch_headers(layout, blocks);
    const int64_t row = point_find(probe[0].bytes, probe[0].len, probe[1].bytes, probe[1].len,
                                   key, key_len);
    return row < 0 ? row : point_row(layout, blocks, (uint32_t)row, out, cap);
}
