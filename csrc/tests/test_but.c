/* Rows but for some, against a gather of those that are left. */
#include "codec/key.h"
#include "codec/keys_inline.h"
#include "common/bits.h"
#include "rowset/block.h"
#include "tests/harness.h"

enum { MOST = 400 };

typedef struct {
    uint32_t lo, n, gone_n, left_n;
    uint32_t gone[MOST], left[MOST];
} but_t;

static but_t random_but(uint32_t total) {
    but_t but = {.lo = random_below(total + 1)};
    but.n = random_below(total - but.lo + 1);
    const uint32_t share = 1 + random_below(30);
    for (uint32_t i = but.lo; i < but.lo + but.n; i++) {
        if (random_below(share) == 0) {
            but.gone[but.gone_n++] = i;
        } else {
            but.left[but.left_n++] = i;
        }
    }
    return but;
}

static uint8_t *column_block(block_kind_t kind, uint32_t width, uint32_t n, uint64_t *len) {
    uint8_t *validity = exact(bits_bytes(n)), *offsets = exact(4 * ((size_t)n + 1));
    size_t size = kind == BLOCK_BIT ? bits_bytes(n) : (size_t)n * width;
    random_bytes(validity, bits_bytes(n));
    store_le32(offsets, 0);
    for (uint32_t i = 0; kind == BLOCK_VARLEN && i < n; i++) {
        size += random_below(9);
        store_le32(offsets + 4 * (size_t)(i + 1), (uint32_t)size);
    }
    uint8_t *values = exact(size);
    random_bytes(values, size);
    const block_column_t column = {.kind = kind, .width = width, .values = values,
                                   .values_len = size, .offsets = offsets,
                                   .offsets_len = 4 * ((size_t)n + 1),
                                   .validity = random_below(2) == 0 ? NULL : validity,
                                   .validity_len = bits_bytes(n), .length = n};
    const block_rows_t all = {NULL, 0, n};
    EXPECT(block_encode_size(&column, all, len) == STATUS_OK);
    uint8_t *bytes = exact(*len);
    EXPECT(block_encode(&column, all, 0, bytes, *len) == STATUS_OK);
    free(validity);
    free(offsets);
    free(values);
    return bytes;
}

static void check_block(block_kind_t kind, uint32_t width) {
    const uint32_t n = random_below(MOST);
    uint64_t len, size, but_size;
    uint8_t *bytes = column_block(kind, width, n, &len);
    block_t block;
    EXPECT(block_parse(bytes, len, &block) == STATUS_OK);
    const but_t but = random_but(n);
    const block_rows_t left = {but.left, 0, but.left_n};
    EXPECT(block_decode_size(&block, left, &size) == STATUS_OK);
    EXPECT(block_decode_but_size(&block, but.lo, but.n, but.gone, but.gone_n, &but_size) ==
           STATUS_OK);
    EXPECT(size == but_size);
    uint8_t *values[2] = {exact(size), exact(size)};
    uint8_t *validity[2] = {exact(bits_bytes(but.left_n)), exact(bits_bytes(but.left_n))};
    uint32_t nulls[2], offsets[2][MOST + 1];
    EXPECT(block_decode(&block, left, validity[0], offsets[0], values[0], size, nulls) ==
           STATUS_OK);
    EXPECT(block_decode_but(&block, but.lo, but.n, but.gone, but.gone_n, validity[1], offsets[1],
                            values[1], size, nulls + 1) == STATUS_OK);
    EXPECT(nulls[0] == nulls[1]);
    EXPECT(compare_bytes(values[0], values[1], size) == 0);
    if (block.validity != NULL) {
        EXPECT(compare_bytes(validity[0], validity[1], bits_bytes(but.left_n)) == 0);
    }
    if (kind == BLOCK_VARLEN) {
        EXPECT(memcmp(offsets[0], offsets[1], 4 * ((size_t)but.left_n + 1)) == 0);
    }
    const uint32_t outside[] = {but.lo + but.n};
    EXPECT(block_decode_but_size(&block, but.lo, but.n, outside, 1, &size) == STATUS_RANGE);
    for (int i = 0; i < 2; i++) {
        free(values[i]);
        free(validity[i]);
    }
    free(bytes);
}

static void check_keys(shape_t shape) {
    const keys_t keys = keys_random(shape, random_below(MOST), false);
    const but_t but = random_but(keys.n);
    uint64_t size, but_size;
    EXPECT(keys_gather_size(&keys, but.left, but.left_n, &size) == STATUS_OK);
    EXPECT(keys_but_size(&keys, but.lo, but.n, but.gone, but.gone_n, &but_size) == STATUS_OK);
    EXPECT(size == but_size);
    uint8_t *out[2] = {exact(size), exact(size)};
    uint32_t offsets[2][MOST + 1] = {{0}};
    EXPECT(keys_gather(&keys, but.left, but.left_n, out[0], size, offsets[0]) == STATUS_OK);
    EXPECT(keys_but(&keys, but.lo, but.n, but.gone, but.gone_n, out[1], size, offsets[1]) ==
           STATUS_OK);
    EXPECT(compare_bytes(out[0], out[1], size) == 0);
    if (keys.offsets != NULL) {
        EXPECT(memcmp(offsets[0], offsets[1], 4 * ((size_t)but.left_n + 1)) == 0);
    }
    if (shape == KEYS_8) {
        const key_type_t types[] = {KEY_I32, KEY_U32};
        const keys_t left = {out[0], size, NULL, 8, but.left_n};
        uint8_t *numbers[2] = {exact(size / 2), exact(size / 2)};
        EXPECT(key_decode_fixed(&left, types, 2, 1, 0, but.left_n, numbers[0], size / 2) ==
               STATUS_OK);
        EXPECT(key_decode_but(&keys, types, 2, 1, but.lo, but.n, but.gone, but.gone_n, numbers[1],
                              size / 2) == STATUS_OK);
        EXPECT(compare_bytes(numbers[0], numbers[1], size / 2) == 0);
        free(numbers[0]);
        free(numbers[1]);
    }
    free(out[0]);
    free(out[1]);
    keys_drop(keys);
}

void test_but(void) {
    for (int i = 0; i < 200; i++) {
        check_block(BLOCK_BIT, 0);
        check_block(BLOCK_FIXED, 1 + random_below(9));
        check_block(BLOCK_VARLEN, 0);
        check_keys((shape_t)(i % KEYS_SHAPES));
    }
}
