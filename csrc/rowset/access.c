#include "rowset/access.h"

#include "common/bits.h"
#include "rowset/search_inline.h"
#include "rowset/unpack_inline.h"

static status_t string_at(const block_t *block, uint64_t i, access_value_t *out) {
    const uint8_t *ends = block->offsets + 4 * (size_t)i;
    const uint32_t from = load_le32(ends), to = load_le32(ends + 4);
    if (from > to || to > block->data_len) return STATUS_CORRUPT;
    out->data = block->data + from;
    out->len = to - from;
    return STATUS_OK;
}

/* The i-th value of a plain block, a dictionary or runs. */
static status_t plain_at(const block_t *block, uint64_t i, access_value_t *out) {
    if (i >= block->values) return STATUS_CORRUPT;
    if (block->kind == BLOCK_VARLEN) return string_at(block, i, out);
    out->data = block->data + (size_t)i * block->width;
    out->len = block->width;
    return STATUS_OK;
}

static status_t ends_at(const block_t *block, uint32_t row, access_value_t *out) {
    uint64_t from, to;
    if (packed_get(block->numbers, row, &from) != STATUS_OK) return STATUS_CORRUPT;
    if (packed_get(block->numbers, row + 1, &to) != STATUS_OK) return STATUS_CORRUPT;
    if (from > to || to > block->data_len) return STATUS_CORRUPT;
    out->data = block->data + from;
    out->len = (size_t)(to - from);
    return STATUS_OK;
}

static status_t packed_at(const block_t *block, uint32_t row, access_value_t *out) {
    const uint32_t words = block->width > 8 ? 2 : 1;
    for (uint32_t word = 0; word < words; word++) {
        uint64_t number;
        if (packed_get(block->numbers + word, row, &number) != STATUS_OK) return STATUS_CORRUPT;
        unpack_store(number, unpack_word_bytes(block->width, word), block->keys,
                     out->own + 8 * word);
    }
    out->data = out->own;
    out->len = block->width;
    return STATUS_OK;
}

static status_t decimal_at(const block_t *block, uint32_t row, access_value_t *out) {
    uint64_t number;
    if (packed_get(block->numbers, row, &number) != STATUS_OK) return STATUS_CORRUPT;
    const double value = unpack_decimal(number, unpack_power(block->digits));
    const float narrow = (float)value;
    if (block->width == 8) {
        memcpy(out->own, &value, 8);
    } else {
        memcpy(out->own, &narrow, 4);
    }
    out->data = out->own;
    out->len = block->width;
    return STATUS_OK;
}

static status_t light_at(const block_t *block, uint32_t row, access_value_t *out) {
    uint64_t code;
    uint32_t run;
    switch (block->encoding) {
        case BLOCK_PACKED: return packed_at(block, row, out);
        case BLOCK_DECIMAL: return decimal_at(block, row, out);
        case BLOCK_ENDS: return ends_at(block, row, out);
        case BLOCK_DICTIONARY:
            if (packed_get(block->numbers, row, &code) != STATUS_OK) return STATUS_CORRUPT;
            return plain_at(block, code, out);
        case BLOCK_RUNS:
            if (packed_lower_bound(block->numbers, (uint64_t)row + 1, 0, block->values, &run) !=
                STATUS_OK) {
                return STATUS_CORRUPT;
            }
            return plain_at(block, run, out);
        case BLOCK_PLAIN: break;
    }
    return STATUS_CORRUPT;
}

status_t access_value(const block_t *block, uint32_t row, access_value_t *out) {
    if (block->kind == BLOCK_OPAQUE) return STATUS_CORRUPT;
    if (row >= block->rows) return STATUS_RANGE;
    out->is_null = block->validity != NULL && !bits_get(block->validity, row);
    out->data = NULL;
    out->len = out->bit = 0;
    if (block->kind == BLOCK_BIT) {
        out->bit = bits_get(block->data, row);
        return STATUS_OK;
    }
    if (out->is_null) return STATUS_OK;
    return block->encoding == BLOCK_PLAIN ? plain_at(block, row, out) : light_at(block, row, out);
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

/* Keys of up to 16 bytes as two numbers: those whose first one is the key's are in order by the
 * second, which over all of a frame is in none, so that its frames tell nothing. A key that is shorter
 * than they are is as one that goes on with zeros. */
static status_t find_packed(const block_t *keys, const uint8_t *key, size_t key_len,
                            uint32_t *out_row) {
    uint8_t padded[16] = {0};
    uint64_t numbers[2];
    uint32_t n = keys->rows;
    copy_bytes(padded, key, key_len);
    for (uint32_t word = 0; word < 2; word++) {
        numbers[word] = unpack_load(padded + 8 * word, unpack_word_bytes(keys->width, word), 1);
    }
    status_t status = packed_lower_bound(keys->numbers, numbers[0], 0, n, out_row);
    if (status == STATUS_OK && numbers[0] != UINT64_MAX) {
        status = packed_lower_bound(keys->numbers, numbers[0] + 1, *out_row, n, &n);
    }
    if (status != STATUS_OK || n < *out_row) return status == STATUS_OK ? STATUS_CORRUPT : status;
    for (n -= *out_row; n > 0;) {
        const uint32_t half = n / 2;
        uint64_t second;
        status = packed_get(keys->numbers + 1, *out_row + half, &second);
        if (status != STATUS_OK) return status;
        *out_row += second < numbers[1] ? half + 1 : 0;
        n = second < numbers[1] ? n - half - 1 : half;
    }
    return STATUS_OK;
}

status_t access_lower_bound(const block_t *keys, const uint8_t *key, size_t key_len,
                            uint32_t *out_row) {
    uint32_t lo = 0, n = keys->rows;
    if (!holds_keys(keys)) return STATUS_CORRUPT;
    if (keys->encoding == BLOCK_PACKED && keys->keys && keys->width > 8 && key_len <= keys->width) {
        return find_packed(keys, key, key_len, out_row);
    }
    if (keys->kind == BLOCK_FIXED && keys->width == key_len && (key_len == 8 || key_len == 4)) {
        if (keys->encoding == BLOCK_PACKED && keys->keys) {
            const uint64_t number = key_len == 8 ? load_be64(key) : load_be32(key);
            return packed_lower_bound(keys->numbers, number, 0, keys->rows, out_row);
        }
        if (keys->encoding != BLOCK_PLAIN) return STATUS_CORRUPT;
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
