#include <math.h>

#include "codec/key.h"
#include "codec/keys_inline.h"
#include "common/bits.h"
#include "tests/harness.h"

static void expect_bytes(key_type_t type, const void *value, size_t width, const char *hex) {
    const key_column_t column = {value, width, NULL, 0, 0, type};
    uint8_t out[16];
    char text[33] = "";
    EXPECT(key_encode_fixed(&column, 1, 1, out, key_type_width(type)) == STATUS_OK);
    for (uint32_t i = 0; i < key_type_width(type); i++) {
        snprintf(text + 2 * (size_t)i, 3, "%02x", out[i]);
    }
    EXPECT(strcmp(text, hex) == 0);
}

#define GOLDEN(type, ctype, value, hex)                      \
    do {                                                     \
        const ctype v = (value);                             \
        expect_bytes((type), &v, sizeof v, (hex));           \
    } while (0)

static void golden(void) {
    GOLDEN(KEY_BOOL, uint8_t, 1, "01");
    GOLDEN(KEY_I8, int8_t, -128, "00");
    GOLDEN(KEY_I16, int16_t, 1, "8001");
    GOLDEN(KEY_I32, int32_t, -2, "7ffffffe");
    GOLDEN(KEY_I64, int64_t, 258, "8000000000000102");
    GOLDEN(KEY_U8, uint8_t, 200, "c8");
    GOLDEN(KEY_U16, uint16_t, 258, "0102");
    GOLDEN(KEY_U32, uint32_t, 258, "00000102");
    GOLDEN(KEY_U64, uint64_t, 258, "0000000000000102");
    GOLDEN(KEY_F32, float, 1.0f, "bf800000");
    GOLDEN(KEY_F32, float, -1.0f, "407fffff");
    GOLDEN(KEY_F32, float, -0.0f, "80000000");
    GOLDEN(KEY_F32, float, -NAN, "ffc00000");
    GOLDEN(KEY_F64, double, 1.0, "bff0000000000000");
    GOLDEN(KEY_F64, double, -INFINITY, "000fffffffffffff");
    GOLDEN(KEY_F64, double, -0.0, "8000000000000000");
    GOLDEN(KEY_F64, double, NAN, "fff8000000000000");
    const uint64_t minus_two[2] = {UINT64_MAX - 1, UINT64_MAX};
    expect_bytes(KEY_DECIMAL128, minus_two, 16, "7ffffffffffffffffffffffffffffffe");
    expect_bytes(KEY_UUID, "\x80\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\xff", 16,
                 "800102030405060708090a0b0c0d0eff");
}

/* Rows of (i32, bytes, bool, bytes, f64), the types that fuzz_keys decodes. */
enum { COLUMNS = 5 };
static const key_type_t types[COLUMNS] = {KEY_I32, KEY_BYTES, KEY_BOOL, KEY_BYTES, KEY_F64};

typedef struct {
    keys_t strings[2];
    uint8_t *numbers;
    uint8_t *bools;
    uint8_t *doubles;
    key_column_t columns[COLUMNS];
    uint32_t n;
} rows_t;

static rows_t rows_make(uint32_t n, uint32_t skipped) {
    rows_t rows = {.n = n};
    const size_t all = (size_t)n + skipped;
    rows.numbers = exact(4 * all);
    rows.bools = exact(bits_bytes(all));
    rows.doubles = exact(8 * all);
    random_bytes(rows.numbers, 4 * all);
    random_bytes(rows.bools, bits_bytes(all));
    for (size_t i = 0; i < all; i++) {
        const double value = (double)random_below(1000) / 8 - 60;
        memcpy(rows.doubles + 8 * i, &value, 8);
        if (i % 2 == 0) memset(rows.numbers + 4 * i, 0, 4);
    }
    for (int s = 0; s < 2; s++) rows.strings[s] = keys_random(KEYS_VARIABLE, (uint32_t)all, true);
    const uint8_t *fixed[COLUMNS] = {rows.numbers, NULL, rows.bools, NULL, rows.doubles};
    const size_t lens[COLUMNS] = {4 * all, 0, bits_bytes(all), 0, 8 * all};
    for (int c = 0; c < COLUMNS; c++) {
        const keys_t *s = &rows.strings[c == 3];
        rows.columns[c] = (key_column_t){fixed[c], lens[c], NULL, 0, skipped, types[c]};
        if (types[c] == KEY_BYTES) {
            rows.columns[c] =
                (key_column_t){s->data, s->data_len, s->offsets, 4 * (all + 1), skipped, KEY_BYTES};
        }
    }
    return rows;
}

static void rows_drop(rows_t rows) {
    free(rows.numbers);
    free(rows.bools);
    free(rows.doubles);
    for (int s = 0; s < 2; s++) keys_drop(rows.strings[s]);
}

static keys_t encode(const rows_t *rows) {
    uint8_t *offsets = exact(4 * ((size_t)rows->n + 1));
    uint32_t *ends = (uint32_t *)(void *)offsets;
    uint64_t size;
    EXPECT(key_encode_starts(rows->columns, COLUMNS, rows->n, ends, &size) == STATUS_OK);
    uint8_t *data = exact(size);
    EXPECT(key_encode_variable(rows->columns, COLUMNS, rows->n, ends, data, size) == STATUS_OK);
    EXPECT(ends[rows->n] == size);
    const keys_t keys = {data, size, offsets, 0, rows->n};
    EXPECT(keys_check(&keys) == STATUS_OK);
    return keys;
}

static int order_of(double a, double b) { return (a > b) - (a < b); }

static int compare_values(const rows_t *rows, uint32_t i, uint32_t j) {
    const uint64_t x = rows->columns[0].offset + i, y = rows->columns[0].offset + j;
    const int32_t a = (int32_t)load_le32(rows->numbers + 4 * x);
    const int32_t b = (int32_t)load_le32(rows->numbers + 4 * y);
    int order = (a > b) - (a < b);
    if (order == 0) order = keys_compare(&rows->strings[0], (uint32_t)x, &rows->strings[0], (uint32_t)y);
    if (order == 0) order = (int)bits_get(rows->bools, x) - (int)bits_get(rows->bools, y);
    if (order == 0) order = keys_compare(&rows->strings[1], (uint32_t)x, &rows->strings[1], (uint32_t)y);
    double p, q;
    memcpy(&p, rows->doubles + 8 * x, 8);
    memcpy(&q, rows->doubles + 8 * y, 8);
    return order != 0 ? order : order_of(p, q);
}

static int sign(int v) { return (v > 0) - (v < 0); }

static void check_order(const rows_t *rows, const keys_t *keys) {
    for (uint32_t k = 0; k < 4000; k++) {
        const uint32_t i = random_below(rows->n), j = random_below(rows->n);
        const int order = slice_compare(keys_at(keys, i), keys_at(keys, j));
        EXPECT(sign(order) == sign(compare_values(rows, i, j)));
    }
}

static void check_decoded(const rows_t *rows, const keys_t *keys) {
    const uint32_t n = rows->n, skipped = (uint32_t)rows->columns[0].offset;
    uint8_t *out = exact(8 * (size_t)n);
    EXPECT(key_decode_fixed(keys, types, COLUMNS, 0, 0, n, out, 4 * (size_t)n) == STATUS_OK);
    EXPECT(memcmp(out, rows->numbers + 4 * (size_t)skipped, 4 * (size_t)n) == 0);
    EXPECT(key_decode_fixed(keys, types, COLUMNS, 4, 0, n, out, 8 * (size_t)n) == STATUS_OK);
    EXPECT(memcmp(out, rows->doubles + 8 * (size_t)skipped, 8 * (size_t)n) == 0);
    EXPECT(key_decode_fixed(keys, types, COLUMNS, 2, 0, n, out, bits_bytes(n)) == STATUS_OK);
    for (uint32_t i = 0; i < n; i++) EXPECT(bits_get(out, i) == bits_get(rows->bools, skipped + i));
    free(out);
    for (uint32_t c = 1; c < 4; c += 2) {
        uint32_t *offsets = calloc((size_t)n + 1, 4);
        uint64_t size;
        EXPECT(key_decode_offsets(keys, types, COLUMNS, c, 0, n, offsets, &size) == STATUS_OK);
        uint8_t *data = exact(size);
        EXPECT(key_decode_bytes(keys, types, COLUMNS, c, 0, n, offsets, data, size) == STATUS_OK);
        const keys_t decoded = {data, size, (const uint8_t *)offsets, 0, n};
        for (uint32_t i = 0; i < n; i++) {
            EXPECT(keys_compare(&decoded, i, &rows->strings[c == 3], skipped + i) == 0);
        }
        free(offsets);
        free(data);
    }
}

static void check_copies(const keys_t *keys) {
    keys_t part = {keys->data, keys->data_len, keys->offsets + 4 * 7, 0, keys->n - 7};
    const uint64_t len = keys_data_len(&part);
    uint8_t *data = exact(len), *offsets = exact(4 * ((size_t)part.n + 1));
    store_le32(offsets, 0);
    keys_copy(&part, 0, data, (uint32_t *)(void *)offsets);
    const keys_t copy = {data, len, offsets, 0, part.n};
    EXPECT(keys_check(&copy) == STATUS_OK);
    for (uint32_t i = 0; i < part.n; i++) EXPECT(keys_compare(&copy, i, &part, i) == 0);
    keys_drop(copy);
}

void test_key(void) {
    golden();
    EXPECT(key_width(types, COLUMNS) == 0 && key_width(types, 1) == 4);
    for (uint32_t skipped = 0; skipped < 10; skipped += 3) {
        const rows_t rows = rows_make(500, skipped);
        const keys_t keys = encode(&rows);
        check_order(&rows, &keys);
        check_decoded(&rows, &keys);
        check_copies(&keys);
        keys_drop(keys);
        rows_drop(rows);
    }
    uint32_t bad[2] = {1, 0}, good[2] = {0, 5}, out[2];
    uint64_t size;
    key_column_t column = {(const uint8_t *)"abc", 3, (const uint8_t *)bad, 8, 0, KEY_BYTES};
    EXPECT(key_encode_starts(&column, 1, 1, out, &size) == STATUS_INPUT);
    column.offsets = (const uint8_t *)good;
    EXPECT(key_encode_starts(&column, 1, 2, out, &size) == STATUS_INPUT);
    key_column_t number = {(const uint8_t *)"1234567", 7, NULL, 0, 0, KEY_I64};
    uint8_t encoded[8];
    EXPECT(key_encode_fixed(&number, 1, 1, encoded, 8) == STATUS_INPUT);
    EXPECT(key_encode_starts(&column, 1, 1, out, &size) == STATUS_INPUT);
}
