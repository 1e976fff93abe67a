#include "rowset/point.h"

#include "common/bits.h"
#include "rowset/bloom.h"
#include "rowset/search.h"
#include "rowset/search_inline.h"

#include <stdbool.h>

enum { TOGETHER = 16 };

static int64_t find_number(const keys_t *keys, uint64_t key, uint32_t width) {
    const uint32_t at = search_guess_number(keys->data, width, key, 0, keys->n);
    const bool found = at < keys->n && keys_number(keys->data, width, at) == key;
    return found ? (int64_t)at : POINT_ABSENT;
}

static int64_t find_key(const keys_t *keys, const uint8_t *key, size_t key_len) {
    if (keys->width == 8 && key_len == 8) return find_number(keys, load_be64(key), 8);
    if (keys->width == 4 && key_len == 4) return find_number(keys, load_be32(key), 4);
    return search_find(keys, key, key_len);
}

int64_t point_find(const uint8_t *keys, size_t keys_len, const uint8_t *filter, size_t filter_len,
                   const uint8_t *key, size_t key_len) {
    keys_t parsed;
    if (filter != NULL) {
        block_t block;
        if (block_parse(filter, filter_len, &block) != STATUS_OK) return POINT_CORRUPT;
        if (block.kind != BLOCK_OPAQUE || block.data_len == 0 || block.data_len % 32 != 0) {
            return POINT_CORRUPT;
        }
        if (!bloom_probe(block.data, block.data_len, key, key_len)) return POINT_ABSENT;
    }
    if (block_keys(keys, keys_len, &parsed) != STATUS_OK) return POINT_CORRUPT;
    return find_key(&parsed, key, key_len);
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

static int64_t add_bytes(row_slot_t slot, const block_t *block, uint32_t row, bool is_null,
                         row_out_t *to) {
    size_t len = 0;
    if (!is_null) {
        const uint8_t *ends = block->offsets + 4 * (size_t)row;
        const uint32_t from = load_le32(ends), end = load_le32(ends + 4);
        if (from > end || end > block->data_len) return POINT_CORRUPT;
        len = end - from;
        if (len <= to->cap - to->used && to->used <= to->cap) {
            copy_bytes(to->out + to->used, block->data + from, len);
        }
    }
    to->used += len;
    store_le32(to->out + slot.at, (uint32_t)(to->used - to->head));
    return 0;
}

static int64_t add_value(row_slot_t slot, uint32_t c, const block_t *block, uint32_t row,
                         row_out_t *to) {
    const bool is_null = block->kind == BLOCK_OPAQUE ||
                         (block->validity != NULL && !bits_get(block->validity, row));
    if (is_null) bits_set(to->out, c);
    if (slot.kind == ROW_VARLEN) return add_bytes(slot, block, row, is_null, to);
    if (is_null) return 0;
    if (slot.kind == ROW_BIT) {
        to->out[slot.at] = (uint8_t)bits_get(block->data, row);
    } else {
        memcpy(to->out + slot.at, block->data + (size_t)row * slot.width, slot.width);
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
