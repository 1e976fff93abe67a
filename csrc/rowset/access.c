#include "rowset/access.h"

#include "common/bits.h"
#include "rowset/search_inline.h"

status_t access_value(const block_t *block, uint32_t row, access_value_t *out) {
    if (block->kind == BLOCK_OPAQUE) return STATUS_CORRUPT;
    if (row >= block->rows) return STATUS_RANGE;
    out->is_null = block->validity != NULL && !bits_get(block->validity, row);
    out->data = NULL;
    out->len = out->bit = 0;
    if (block->kind == BLOCK_BIT) {
        out->bit = bits_get(block->data, row);
    } else if (block->kind == BLOCK_FIXED) {
        out->data = block->data + (size_t)row * block->width;
        out->len = block->width;
    } else {
        const uint8_t *ends = block->offsets + 4 * (size_t)row;
        const uint32_t from = load_le32(ends), to = load_le32(ends + 4);
        if (from > to || to > block->data_len) return STATUS_CORRUPT;
        out->data = block->data + from;
        out->len = to - from;
    }
    return STATUS_OK;
}

status_t access_bytes(const uint8_t *bytes, size_t len, block_kind_t kind, uint32_t width,
                      uint32_t row, access_value_t *out) {
    block_t block;
    const status_t status = block_parse(bytes, len, &block);
    if (status != STATUS_OK) return status;
    if (block.kind != kind || block.width != width) return STATUS_CORRUPT;
    return access_value(&block, row, out);
}

static bool holds_keys(const block_t *block) {
    return (block->kind == BLOCK_FIXED || block->kind == BLOCK_VARLEN) && block->validity == NULL;
}

status_t access_compare(const block_t *keys, uint32_t row, const uint8_t *key, size_t key_len,
                        int *out_order) {
    access_value_t value;
    if (!holds_keys(keys)) return STATUS_CORRUPT;
    const status_t status = access_value(keys, row, &value);
    if (status != STATUS_OK) return status;
    const slice_t found = {value.data, value.len}, probe = {key, key_len};
    *out_order = slice_compare(found, probe);
    return STATUS_OK;
}

/* Numbers are guessed first: keys that count up are found in a step or two. */
static uint32_t find_number(const block_t *keys, uint64_t key, uint32_t width) {
    return search_guess_number(keys->data, width, key, 0, keys->rows);
}

status_t access_lower_bound(const block_t *keys, const uint8_t *key, size_t key_len,
                            uint32_t *out_row) {
    uint32_t lo = 0, n = keys->rows;
    if (!holds_keys(keys)) return STATUS_CORRUPT;
    if (keys->kind == BLOCK_FIXED && keys->width == key_len && (key_len == 8 || key_len == 4)) {
        *out_row = key_len == 8 ? find_number(keys, load_be64(key), 8)
                                : find_number(keys, load_be32(key), 4);
        return STATUS_OK;
    }
    while (n > 0) {
        const uint32_t half = n / 2;
        int order;
        const status_t status = access_compare(keys, lo + half, key, key_len, &order);
        if (status != STATUS_OK) return status;
        lo += order < 0 ? half + 1 : 0;
        n = order < 0 ? n - half - 1 : half;
    }
    *out_row = lo;
    return STATUS_OK;
}

status_t access_find(const block_t *keys, const uint8_t *key, size_t key_len, int64_t *out_row) {
    uint32_t row;
    int order = -1;
    *out_row = -1;
    status_t status = access_lower_bound(keys, key, key_len, &row);
    if (status != STATUS_OK || row == keys->rows) return status;
    status = access_compare(keys, row, key, key_len, &order);
    if (status == STATUS_OK && order == 0) *out_row = row;
    return status;
}
