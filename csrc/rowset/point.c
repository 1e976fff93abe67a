#include "rowset/point.h"

#include "common/bits.h"
#include "rowset/bloom.h"
#include "rowset/search.h"

#include <stdbool.h>

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
    return search_find(&parsed, key, key_len);
}

static block_kind_t kind_of(row_kind_t kind) {
    return kind == ROW_BIT ? BLOCK_BIT : kind == ROW_FIXED ? BLOCK_FIXED : BLOCK_VARLEN;
}

/* A row that grows; `used` goes on behind `cap`, where nothing is written. */
typedef struct {
    uint8_t *out;
    size_t cap;
    size_t used;
} row_out_t;

static status_t add_value(const row_layout_t *layout, uint32_t c, block_bytes_t bytes,
                          uint32_t row, row_out_t *to) {
    const row_slot_t slot = layout->slots[c];
    const bool is_varlen = slot.kind == ROW_VARLEN;
    block_value_t value = {.is_null = 1};
    if (bytes.bytes != NULL && !(is_varlen && bytes.len > 5 && bytes.bytes[5] == BLOCK_OPAQUE)) {
        const uint32_t width = slot.kind == ROW_FIXED ? slot.width : 0;
        const status_t status =
            block_value(bytes.bytes, bytes.len, kind_of(slot.kind), width, row, &value);
        if (status != STATUS_OK) return status;
    }
    const size_t len = is_varlen && !value.is_null ? value.len : 0;
    if (to->used + len <= to->cap) {
        if (value.is_null) bits_set(to->out, c);
        if (slot.kind == ROW_BIT) to->out[slot.at] = (uint8_t)value.bit;
        if (slot.kind == ROW_FIXED && !value.is_null) {
            memcpy(to->out + slot.at, value.data, slot.width);
        }
        if (len != 0) memcpy(to->out + to->used, value.data, len);
        if (is_varlen) store_le32(to->out + slot.at, (uint32_t)(to->used + len - layout->head));
    }
    to->used += len;
    return STATUS_OK;
}

int64_t point_row(const row_layout_t *layout, const block_bytes_t *blocks, uint32_t row,
                  uint8_t *out, size_t cap) {
    if (layout->head > cap) return layout->head;
    row_out_t to = {out, cap, layout->head};
    if (layout->head != 0) memset(out, 0, layout->head);
    for (uint32_t c = 0; c < layout->n; c++) {
        if (blocks[c].bytes != NULL) __builtin_prefetch(blocks[c].bytes);
    }
    for (uint32_t c = 0; c < layout->n; c++) {
        const status_t status = add_value(layout, c, blocks[c], row, &to);
        if (status != STATUS_OK) return status == STATUS_RANGE ? POINT_RANGE : POINT_CORRUPT;
    }
    return (int64_t)to.used;
}
