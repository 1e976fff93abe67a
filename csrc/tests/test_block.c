/* Blocks: round trips against a plain model, zones, and every kind of damage. */
#include "codec/crc32c.h"
#include "codec/keys_inline.h"
#include "common/bits.h"
#include "rowset/access.h"
#include "rowset/block.h"
#include "rowset/zone.h"
#include "tests/fuzz_core.h"
#include "tests/harness.h"

enum { SEED = 77 };

/* An Arrow column of n rows behind `offset` others; a quarter are nulls when `nulls`. */
typedef struct {
    block_column_t column;
    keys_t values;
    uint8_t *validity;
} source_t;

static source_t source_make(block_kind_t kind, uint32_t width, uint32_t n, uint32_t offset,
                            bool nulls) {
    source_t source = {.validity = NULL};
    const uint32_t all = n + offset;
    if (kind == BLOCK_VARLEN) {
        source.values = keys_random(KEYS_VARIABLE, all, false);
    } else {
        const size_t len = kind == BLOCK_BIT ? bits_bytes(all) : (size_t)all * width;
        uint8_t *data = exact(len);
        random_bytes(data, len);
        source.values = (keys_t){data, len, NULL, width, all};
    }
    if (nulls) {
        source.validity = exact(bits_bytes(all));
        memset(source.validity, 0, bits_bytes(all));
        for (uint32_t i = 0; i < all; i++) bits_or(source.validity, i, random_below(4) != 0);
    }
    source.column = (block_column_t){.kind = kind,
                                     .width = kind == BLOCK_FIXED ? width : 0,
                                     .values = source.values.data,
                                     .values_len = source.values.data_len,
                                     .offsets = source.values.offsets,
                                     .offsets_len = kind == BLOCK_VARLEN ? 4 * ((size_t)all + 1) : 0,
                                     .validity = source.validity,
                                     .validity_len = nulls ? bits_bytes(all) : 0,
                                     .offset = offset,
                                     .length = n};
    return source;
}

static void source_drop(source_t source) {
    keys_drop(source.values);
    free(source.validity);
}

static uint8_t *encode(const source_t *source, block_rows_t rows, uint64_t *len) {
    EXPECT(block_encode_size(&source->column, rows, len) == STATUS_OK);
    uint8_t *block = exact(*len);
    EXPECT(block_encode(&source->column, rows, SEED, block, *len) == STATUS_OK);
    EXPECT(block_verify(block, *len, SEED) == STATUS_OK);
    EXPECT(block_verify(block, *len, SEED + 1) == STATUS_CORRUPT);
    return block;
}

static uint32_t picked(block_rows_t rows, uint32_t i) {
    return rows.rows == NULL ? rows.lo + i : rows.rows[i];
}

typedef struct {
    uint8_t *validity;
    uint32_t *offsets;
    uint8_t *values;
} decoded_t;

static void check_row(const source_t *source, const decoded_t *out, uint32_t i, uint64_t row) {
    const block_column_t *column = &source->column;
    const unsigned valid = column->validity == NULL || bits_get(column->validity, row) != 0;
    const size_t width = column->width;
    EXPECT(bits_get(out->validity, i) == valid);
    if (column->kind == BLOCK_BIT) {
        EXPECT(bits_get(out->values, i) == (valid & bits_get(column->values, row)));
    } else if (column->kind == BLOCK_FIXED) {
        static const uint8_t zeros[32] = {0};
        const uint8_t *want = valid ? column->values + row * width : zeros;
        EXPECT(memcmp(out->values + i * width, want, width) == 0);
    } else {
        const slice_t value = keys_at(&source->values, (uint32_t)row);
        const size_t len = valid ? value.len : 0;
        EXPECT(out->offsets[i + 1] - out->offsets[i] == len);
        EXPECT(compare_bytes(out->values + out->offsets[i], value.data, len) == 0);
    }
}

/* Decodes rows `inner` of a block that holds rows `outer` of the source. */
static void check_decoded(const source_t *source, block_rows_t outer, const block_t *block,
                          block_rows_t inner) {
    uint64_t size;
    uint32_t nulls, seen = 0;
    EXPECT(block_decode_size(block, inner, &size) == STATUS_OK);
    const decoded_t out = {exact(bits_bytes(inner.n)), calloc((size_t)inner.n + 1, 4),
                           exact(size)};
    EXPECT(block_decode(block, inner, out.validity, out.offsets, out.values, size, &nulls) ==
           STATUS_OK);
    for (uint32_t i = 0; i < inner.n; i++) {
        const uint32_t row = picked(inner, i);
        seen += 1 - bits_get(out.validity, i);
        if (row == UINT32_MAX) {
            EXPECT(bits_get(out.validity, i) == 0);
        } else {
            check_row(source, &out, i, source->column.offset + picked(outer, row));
        }
    }
    EXPECT(nulls == seen);
    free(out.validity);
    free(out.offsets);
    free(out.values);
}

/* Single values are what decoding one row gives. */
static void check_value(const source_t *source, block_rows_t outer, const block_t *block,
                        uint32_t i) {
    const block_column_t *column = &source->column;
    const uint64_t row = column->offset + picked(outer, i);
    access_value_t value;
    EXPECT(access_value(block, i, &value) == STATUS_OK);
    EXPECT(value.is_null == (column->validity != NULL && !bits_get(column->validity, row)));
    if (value.is_null) return;
    if (column->kind == BLOCK_BIT) {
        EXPECT(value.bit == bits_get(column->values, row));
    } else if (column->kind == BLOCK_FIXED) {
        EXPECT(value.len == column->width);
        EXPECT(memcmp(value.data, column->values + row * column->width, value.len) == 0);
    } else {
        const slice_t got = {value.data, value.len};
        EXPECT(slice_compare(got, keys_at(&source->values, (uint32_t)row)) == 0);
    }
}

static void check_block(const source_t *source, block_rows_t rows) {
    uint64_t len;
    block_t block;
    uint8_t *bytes = encode(source, rows, &len);
    uint8_t *moved = exact(len + 2); /* as LMDB has it: aligned to 2 */
    memcpy(moved + 2, bytes, len);
    EXPECT(block_parse(moved + 2, len, &block) == STATUS_OK && block.rows == rows.n);
    const block_rows_t all = {NULL, 0, rows.n};
    access_value_t value;
    check_decoded(source, rows, &block, all);
    for (uint32_t i = 0; i < rows.n; i++) check_value(source, rows, &block, i);
    EXPECT(access_value(&block, rows.n, &value) == STATUS_RANGE);
    if (rows.n > 2) {
        const block_rows_t part = {NULL, rows.n / 3, rows.n / 2};
        const uint32_t list[] = {rows.n - 1, UINT32_MAX, 0, rows.n / 2, 0};
        const block_rows_t some = {list, 0, 5};
        check_decoded(source, rows, &block, part);
        check_decoded(source, rows, &block, some);
    }
    const uint32_t outside = rows.n;
    const block_rows_t late = {NULL, rows.n, 1}, list = {&outside, 0, 1};
    EXPECT(block_decode_size(&block, late, &len) == STATUS_RANGE);
    EXPECT(block_decode_size(&block, list, &len) == STATUS_RANGE);
    free(bytes);
    free(moved);
}

static const uint32_t widths[] = {1, 2, 4, 8, 16, 12};
enum { KINDS = 8 }; /* bit, varlen, fixed of each width */

static source_t source_of(int kind, uint32_t n, uint32_t offset, bool nulls) {
    if (kind == 0) return source_make(BLOCK_BIT, 0, n, offset, nulls);
    if (kind == 1) return source_make(BLOCK_VARLEN, 0, n, offset, nulls);
    return source_make(BLOCK_FIXED, widths[kind - 2], n, offset, nulls);
}

static void check_golden(void) {
    static const uint32_t values[] = {1, 2, 3};
    static const uint8_t validity = 5;
    const block_column_t column = {BLOCK_FIXED, 4, (const uint8_t *)values, 12, NULL, 0, &validity,
                                   1, 0, 3};
    const block_rows_t rows = {NULL, 0, 3};
    static const uint8_t want[] = {1, 1, 1, 0, 3, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 0, 0,
                                   0, 0, 20, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0,
                                   1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0};
    uint8_t out[56];
    uint64_t size;
    EXPECT(block_encode_size(&column, rows, &size) == STATUS_OK && size == sizeof out);
    EXPECT(block_encode(&column, rows, SEED, out, sizeof out) == STATUS_OK);
    EXPECT(memcmp(out + 4, want, sizeof want) == 0);
    EXPECT(load_le32(out) == crc32c(SEED, want, sizeof want));
}

static void check_keys(shape_t shape) {
    const keys_t keys = keys_random(shape, 100, false);
    keys_t part = keys, back;
    part.n = 60;
    if (keys.offsets == NULL) part.data += 9 * (size_t)keys.width;
    if (keys.offsets != NULL) part.offsets += 4 * 9;
    const size_t len = block_size_of_keys(&part);
    uint8_t *block = exact(len);
    block_encode_keys(&part, SEED, block, len);
    EXPECT(block_verify(block, len, SEED) == STATUS_OK);
    EXPECT(block_keys(block, len, &back) == STATUS_OK && back.n == 60);
    for (uint32_t i = 0; i < 60; i++) EXPECT(keys_compare(&back, i, &keys, 9 + i) == 0);
    free(block);
    keys_drop(keys);
}

void test_block(void) {
    check_golden();
    for (int shape = 0; shape < KEYS_SHAPES; shape++) check_keys((shape_t)shape);
    for (int kind = 0; kind < KINDS; kind++) {
        for (uint32_t n = 0; n < 200; n += 1 + n / 2) {
            const source_t source = source_of(kind, n, n % 11, n % 2 == 0);
            const block_rows_t all = {NULL, 0, n}, part = {NULL, n / 4, n / 2};
            check_block(&source, all);
            check_block(&source, part);
            if (n > 0) {
                const uint32_t list[] = {n - 1, 0, n / 2, 0};
                const block_rows_t some = {list, 0, 4};
                check_block(&source, some);
            }
            source_drop(source);
        }
    }
    const source_t source = source_of(3, 10, 0, true);
    const uint32_t outside = 10;
    const block_rows_t late = {NULL, 8, 3}, list = {&outside, 0, 1}, all = {NULL, 0, 10};
    uint64_t size;
    EXPECT(block_encode_size(&source.column, late, &size) == STATUS_RANGE);
    EXPECT(block_encode_size(&source.column, list, &size) == STATUS_RANGE);
    block_column_t few = source.column;
    few.values_len--;
    EXPECT(block_encode_size(&few, all, &size) == STATUS_INPUT);
    few = source.column;
    few.validity_len--;
    EXPECT(block_encode_size(&few, all, &size) == STATUS_INPUT);
    source_drop(source);
}

/* -- zones --------------------------------------------------------------------- */

/* The zone must hold what encoding each value as a key and comparing would give. */
static void check_zone(key_type_t type, uint32_t n, bool nulls) {
    const uint32_t width = key_type_width(type);
    const block_kind_t kind =
        type == KEY_BOOL ? BLOCK_BIT : type == KEY_BYTES ? BLOCK_VARLEN : BLOCK_FIXED;
    const source_t source = source_make(kind, width, n, 3, nulls);
    const block_rows_t all = {NULL, 0, n};
    uint64_t len;
    block_t block;
    zone_t zone;
    uint8_t *bytes = encode(&source, all, &len);
    EXPECT(block_parse(bytes, len, &block) == STATUS_OK);
    EXPECT(zone_compute(&block, type, &zone) == STATUS_OK);
    const slice_t min = {zone.min, zone.min_len}, max = {zone.max, zone.max_len};
    bool min_met = false, max_met = false, any = false;
    for (uint32_t i = 0; i < n; i++) {
        if (nulls && bits_get(source.validity, 3 + i) == 0) continue;
        uint8_t encoded[16];
        slice_t value = {encoded, width};
        if (type == KEY_BYTES) {
            value = keys_at(&source.values, 3 + i);
        } else {
            const key_column_t column = {source.values.data, source.values.data_len, NULL, 0,
                                         3 + (uint64_t)i, type};
            EXPECT(key_encode_fixed(&column, 1, 1, encoded, width) == STATUS_OK);
        }
        const slice_t cut = {value.data, value.len < ZONE_BYTES ? value.len : ZONE_BYTES};
        any = true;
        EXPECT(slice_compare(min, value) <= 0 && slice_compare(max, cut) >= 0);
        min_met = min_met || slice_compare(min, cut) == 0;
        max_met = max_met || slice_compare(max, cut) == 0;
    }
    EXPECT(zone.has_values == any && (!any || (min_met && max_met)));
    EXPECT(zone.null_count == block.null_count);
    EXPECT(zone_compute(&block, type == KEY_BOOL ? KEY_I8 : KEY_BOOL, &zone) == STATUS_CORRUPT);
    free(bytes);
    source_drop(source);
}

void test_zone(void) {
    for (int type = KEY_BOOL; type <= KEY_UUID; type++) {
        for (uint32_t n = 0; n < 40; n++) check_zone((key_type_t)type, n, n % 2 == 0);
    }
}

/* -- damage -------------------------------------------------------------------- */

static void sign_again(uint8_t *block, size_t len) {
    if (len >= 4) store_le32(block, crc32c(SEED, block + 4, len - 4));
}

/* Cut anywhere, or one byte changed anywhere: refused. With the checksum made right again:
 * refused or decoded to something, within its memory. */
static void check_damage(const uint8_t *block, size_t len) {
    EXPECT(fuzz_block(block, len, SEED) == 1);
    for (size_t cut = 0; cut < len; cut++) {
        uint8_t *part = exact_copy(block, cut);
        EXPECT(fuzz_block(part, cut, SEED) == 0);
        sign_again(part, cut);
        EXPECT(fuzz_block(part, cut, SEED) == 0);
        free(part);
    }
    for (size_t at = 0; at < len; at++) {
        for (unsigned bit = 0; bit < 9; bit++) {
            uint8_t *changed = exact_copy(block, len);
            changed[at] = (uint8_t)(changed[at] ^ (bit == 8 ? 0xff : 1u << bit));
            EXPECT(fuzz_block(changed, len, SEED) == 0);
            sign_again(changed, len);
            fuzz_block(changed, len, SEED);
            free(changed);
        }
    }
}

static void check_damaged_keys(void) {
    /* (1, "a\0b", true, "x", 1.0): every cut and every flipped bit of one key. */
    static const uint8_t key[] = {0x80, 0, 0, 1,   'a',  0,    0xff, 'b', 0, 1, 1,
                                  'x',  0, 1, 0xbf, 0xf0, 0,    0,    0,   0, 0, 0};
    for (size_t len = 0; len <= sizeof key; len++) {
        for (size_t flip = 0; flip <= 8 * len; flip++) {
            uint8_t *data = exact_copy(key, len), offsets[8];
            if (flip < 8 * len) data[flip / 8] = (uint8_t)(data[flip / 8] ^ 1u << flip % 8);
            store_le32(offsets, 0);
            store_le32(offsets + 4, (uint32_t)len);
            const keys_t keys = {data, len, offsets, 0, 1};
            fuzz_keys(&keys);
            free(data);
        }
    }
}

void test_damage(void) {
    for (int kind = 0; kind < KINDS; kind++) {
        for (int nulls = 0; nulls < 2; nulls++) {
            const source_t source = source_of(kind, 13, 1, nulls != 0);
            const block_rows_t all = {NULL, 0, 13};
            uint64_t len;
            uint8_t *block = encode(&source, all, &len);
            check_damage(block, len);
            free(block);
            source_drop(source);
        }
    }
    const uint8_t filter[64] = {1, 2, 3};
    uint8_t *block = exact(block_size_of_opaque(sizeof filter));
    block_encode_opaque(filter, sizeof filter, 5, 0, SEED, block, 96);
    check_damage(block, 96);
    free(block);
    check_damaged_keys();
}
