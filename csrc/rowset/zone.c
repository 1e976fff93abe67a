#include "rowset/zone.h"

#include "codec/key_value.h"
#include "codec/keys_inline.h"
#include "common/alloc.h"
#include "common/bits.h"
#include "rowset/unpack.h"

#include <stdbool.h>

static bool row_valid(const block_t *block, uint32_t row) {
    return block->validity == NULL || bits_get(block->validity, row) != 0;
}

/* Values as numbers that order as their encodings do. */
static inline uint64_t ordered_u8(const uint8_t *p) { return *p; }
static inline uint64_t ordered_i8(const uint8_t *p) { return *p ^ 0x80U; }
static inline uint64_t ordered_u16(const uint8_t *p) { return load_le16(p); }
static inline uint64_t ordered_i16(const uint8_t *p) { return load_le16(p) ^ 0x8000U; }
static inline uint64_t ordered_u32(const uint8_t *p) { return load_le32(p); }
static inline uint64_t ordered_i32(const uint8_t *p) { return load_le32(p) ^ KEY_SIGN_32; }
static inline uint64_t ordered_u64(const uint8_t *p) { return load_le64(p); }
static inline uint64_t ordered_i64(const uint8_t *p) { return load_le64(p) ^ KEY_SIGN_64; }
static inline uint64_t ordered_f32(const uint8_t *p) { return key_order_f32(load_le32(p)); }
static inline uint64_t ordered_f64(const uint8_t *p) { return key_order_f64(load_le64(p)); }

typedef struct {
    uint64_t min;
    uint64_t max;
} range_t;

/* All but the block are constants at each call, which makes this a loop of its own. */
static inline range_t range_among(const block_t *block, uint64_t (*ordered)(const uint8_t *),
                                  size_t width, bool has_nulls) {
    range_t range = {UINT64_MAX, 0};
    for (uint32_t i = 0; i < block->rows; i++) {
        if (has_nulls && !row_valid(block, i)) continue;
        const uint64_t value = ordered(block->data + i * width);
        range.min = value < range.min ? value : range.min;
        range.max = value > range.max ? value : range.max;
    }
    return range;
}

static inline range_t range_of(const block_t *block, uint64_t (*ordered)(const uint8_t *),
                               size_t width) {
    return block->validity == NULL ? range_among(block, ordered, width, false)
                                   : range_among(block, ordered, width, true);
}

static range_t number_range(const block_t *block, key_type_t type) {
    switch (type) {
        case KEY_U8: return range_of(block, ordered_u8, 1);
        case KEY_I8: return range_of(block, ordered_i8, 1);
        case KEY_U16: return range_of(block, ordered_u16, 2);
        case KEY_I16: return range_of(block, ordered_i16, 2);
        case KEY_U32: return range_of(block, ordered_u32, 4);
        case KEY_I32: return range_of(block, ordered_i32, 4);
        case KEY_U64: return range_of(block, ordered_u64, 8);
        case KEY_I64: return range_of(block, ordered_i64, 8);
        case KEY_F32: return range_of(block, ordered_f32, 4);
        case KEY_F64: return range_of(block, ordered_f64, 8);
        case KEY_BOOL:
        case KEY_DECIMAL128:
        case KEY_UUID:
        case KEY_BYTES: break;
    }
    const range_t none = {UINT64_MAX, 0};
    return none;
}

static range_t bool_range(const block_t *block) {
    range_t range = {UINT64_MAX, 0};
    for (uint32_t i = 0; i < block->rows; i++) {
        if (!row_valid(block, i)) continue;
        const uint64_t value = bits_get(block->data, i);
        range.min = value < range.min ? value : range.min;
        range.max = value > range.max ? value : range.max;
    }
    return range;
}

static void put_number(uint8_t *out, uint64_t value, uint32_t width) {
    uint8_t bytes[8];
    store_be64(bytes, value);
    memcpy(out, bytes + 8 - width, width);
}

static void put_numbers(zone_t *out, range_t range, uint32_t width) {
    put_number(out->min, range.min, width);
    put_number(out->max, range.max, width);
    out->min_len = out->max_len = width;
}

static void uuid_encode(const uint8_t *value, uint8_t *out) { memcpy(out, value, 16); }

static void decimal_encode(const uint8_t *value, uint8_t *out) {
    store_be64(out, load_le64(value + 8) ^ KEY_SIGN_64);
    store_be64(out + 8, load_le64(value));
}

/* Of values of 16 bytes, which `encode` brings into the form that memcmp orders. */
static void wide_zone(const block_t *block, void (*encode)(const uint8_t *, uint8_t *),
                      zone_t *out) {
    memset(out->min, 0xff, sizeof out->min);
    out->min_len = out->max_len = ZONE_BYTES;
    for (size_t i = 0; i < block->rows; i++) {
        if (!row_valid(block, (uint32_t)i)) continue;
        uint8_t value[16];
        encode(block->data + 16 * i, value);
        if (memcmp(value, out->min, sizeof value) < 0) memcpy(out->min, value, sizeof value);
        if (memcmp(value, out->max, sizeof value) > 0) memcpy(out->max, value, sizeof value);
    }
}

static bool put_cut(slice_t value, uint8_t *out, uint32_t *out_len) {
    *out_len = value.len < ZONE_BYTES ? (uint32_t)value.len : ZONE_BYTES;
    copy_bytes(out, value.data, *out_len);
    return value.len > ZONE_BYTES;
}

/* A value with its first 8 bytes at hand: most comparisons need no more. */
typedef struct {
    uint64_t prefix;
    slice_t value;
} bound_t;

static int bound_compare(bound_t a, bound_t b) {
    if (a.prefix != b.prefix) return a.prefix < b.prefix ? -1 : 1;
    return slice_compare(a.value, b.value);
}

static status_t bytes_zone(const block_t *block, zone_t *out) {
    const keys_t values = {block->data, block->data_len, block->offsets, 0, block->rows};
    bound_t min = {0, {NULL, 0}}, max = {0, {NULL, 0}};
    bool first = true;
    const status_t status = keys_check(&values);
    if (status != STATUS_OK) return status;
    for (uint32_t i = 0; i < block->rows; i++) {
        if (!row_valid(block, i)) continue;
        const slice_t value = keys_at(&values, i);
        const bound_t next = {slice_prefix(value, 0), value};
        if (first || bound_compare(next, min) < 0) min = next;
        if (first || bound_compare(next, max) > 0) max = next;
        first = false;
    }
    const bool min_cut = put_cut(min.value, out->min, &out->min_len);
    const bool max_cut = put_cut(max.value, out->max, &out->max_len);
    out->exact = !min_cut && !max_cut;
    return STATUS_OK;
}

static block_kind_t kind_of(key_type_t type) {
    return type == KEY_BOOL ? BLOCK_BIT : type == KEY_BYTES ? BLOCK_VARLEN : BLOCK_FIXED;
}

status_t zone_compute(const block_t *block, key_type_t type, zone_t *out) {
    const uint32_t width = key_type_width(type);
    if (block->kind != kind_of(type)) return STATUS_CORRUPT;
    if (block->kind == BLOCK_FIXED && block->width != width) return STATUS_CORRUPT;
    *out = (zone_t){.null_count = block->null_count,
                    .has_values = block->rows > block->null_count,
                    .exact = 1};
    if (!out->has_values) return STATUS_OK;
    block_t plain;
    void *memory;
    status_t status = unpack_block(block, &plain, &memory);
    if (status != STATUS_OK) return status;
    if (type == KEY_BYTES) {
        status = bytes_zone(&plain, out);
    } else if (type == KEY_DECIMAL128 || type == KEY_UUID) {
        wide_zone(&plain, type == KEY_UUID ? uuid_encode : decimal_encode, out);
    } else {
        put_numbers(out, type == KEY_BOOL ? bool_range(&plain) : number_range(&plain, type), width);
    }
    alloc_free(memory);
    return status;
}
