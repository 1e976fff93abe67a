#include "codec/value.h"
#include "common/bits.h"
#include "tests/fuzz_core.h"
#include "tests/harness.h"

enum { SCHEMA = 0x0107 };

/* Two columns, (i32, bytes), of n rows with nulls. */
typedef struct {
    row_slot_t slots[2];
    row_layout_t layout;
    row_column_t columns[2];
    uint8_t *numbers, *ends, *text, *valid;
} sample_t;

static void sample_make(sample_t *sample, uint32_t n) {
    sample->slots[0] = (row_slot_t){ROW_FIXED, 4, 0};
    sample->slots[1] = (row_slot_t){ROW_VARLEN, 0, 0};
    row_layout_init(sample->slots, 2, &sample->layout);
    sample->numbers = exact(4 * (size_t)n);
    sample->ends = exact(4 * ((size_t)n + 1));
    sample->valid = exact(bits_bytes(n));
    random_bytes(sample->numbers, 4 * (size_t)n);
    random_bytes(sample->valid, bits_bytes(n));
    uint32_t len = 0;
    for (uint32_t i = 0; i <= n; i++) {
        store_le32(sample->ends + 4 * (size_t)i, len);
        if (i != n) len += random_below(6);
    }
    sample->text = exact(len);
    random_bytes(sample->text, len);
    sample->columns[0] = (row_column_t){.values = sample->numbers,
                                        .values_len = 4 * (size_t)n,
                                        .validity = sample->valid,
                                        .validity_len = bits_bytes(n),
                                        .length = n};
    sample->columns[1] = (row_column_t){.values = sample->text,
                                        .values_len = len,
                                        .offsets = sample->ends,
                                        .offsets_len = 4 * ((size_t)n + 1),
                                        .length = n};
}

static void sample_drop(sample_t *sample) {
    free(sample->numbers);
    free(sample->ends);
    free(sample->text);
    free(sample->valid);
}

/* Values as a binary column; buffers of exactly their length. */
static row_column_t encoded(const sample_t *sample, const uint32_t *rows, uint32_t n) {
    uint32_t *offsets = (uint32_t *)(void *)exact(4 * ((size_t)n + 1));
    EXPECT(value_encode_size(&sample->layout, sample->columns, rows, n, offsets) == STATUS_OK);
    const size_t len = (size_t)offsets[n] + VALUE_HEAD;
    uint8_t *out = exact(len);
    value_encode(&sample->layout, sample->columns, rows, n, SCHEMA, offsets, out, len);
    uint8_t *data = exact_copy(out, offsets[n]);
    free(out);
    return (row_column_t){.values = data,
                          .values_len = offsets[n],
                          .offsets = (const uint8_t *)offsets,
                          .offsets_len = 4 * ((size_t)n + 1),
                          .length = n};
}

static void column_drop(row_column_t column) {
    free((void *)(uintptr_t)column.values);
    free((void *)(uintptr_t)column.offsets);
}

/* Each value is its head and then the very bytes that row_encode makes. */
static void check_bytes(uint32_t n, bool picked) {
    sample_t sample;
    uint32_t bad = UINT32_MAX;
    sample_make(&sample, n);
    uint32_t *rows = (uint32_t *)(void *)exact(4 * (size_t)n);
    for (uint32_t i = 0; i < n; i++) rows[i] = picked ? random_below(n) : i;
    const row_column_t values = encoded(&sample, picked ? rows : NULL, n);
    row_slice_t *slices = (row_slice_t *)(void *)exact(n * sizeof *slices);
    EXPECT(value_rows(&sample.layout, &values, SCHEMA, slices, &bad) == STATUS_OK);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t ends[2];
        EXPECT(row_encode_size(&sample.layout, sample.columns, rows + i, 1, ends) == STATUS_OK);
        uint8_t *row = exact(ends[1]);
        row_encode(&sample.layout, sample.columns, rows + i, 1, ends, row, ends[1]);
        EXPECT(slices[i].len == ends[1] && memcmp(slices[i].data, row, ends[1]) == 0);
        EXPECT(slices[i].data[-3] == VALUE_VERSION && load_le16(slices[i].data - 2) == SCHEMA);
        free(row);
    }
    free(slices);
    free(rows);
    column_drop(values);
    sample_drop(&sample);
}

/* Slices of a column, and nulls, whose bytes are not looked at. */
static void check_nulls(uint32_t n) {
    sample_t sample;
    uint32_t bad = UINT32_MAX;
    sample_make(&sample, n);
    row_column_t values = encoded(&sample, NULL, n);
    uint8_t *validity = exact(bits_bytes(n));
    random_bytes(validity, bits_bytes(n));
    values.validity = validity;
    values.validity_len = bits_bytes(n);
    values.offset = random_below(n);
    values.length = n - values.offset;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t at = load_le32(values.offsets + 4 * (size_t)i);
        if (bits_get(validity, i) == 0) ((uint8_t *)(uintptr_t)values.values)[at] = 0xFF;
    }
    row_slice_t *slices = (row_slice_t *)(void *)exact(values.length * sizeof *slices);
    EXPECT(value_rows(&sample.layout, &values, SCHEMA, slices, &bad) == STATUS_OK);
    for (uint32_t i = 0; i < values.length; i++) {
        EXPECT((slices[i].data == NULL) == (bits_get(validity, values.offset + i) == 0));
    }
    free(slices);
    free(validity);
    column_drop(values);
    sample_drop(&sample);
}

/* Lists of the sample's column c, cut where chance wants, some null: the rows of their elements
 * come back. */
static void check_lists(uint32_t c) {
    sample_t sample;
    sample_make(&sample, 100);
    row_slot_t slot = sample.slots[c];
    row_layout_t element;
    row_layout_init(&slot, 1, &element);
    uint32_t rows[101], cuts[21], found[21], bad;
    EXPECT(row_encode_size(&element, sample.columns + c, NULL, 100, rows) == STATUS_OK);
    uint8_t *data = exact(rows[100]), validity[3];
    row_encode(&element, sample.columns + c, NULL, 100, rows, data, rows[100]);
    random_bytes(validity, sizeof validity);
    for (uint32_t i = 0; i <= 20; i++) cuts[i] = rows[i * 5 - random_below(i == 0 ? 1 : 5)];
    cuts[20] = rows[100];
    const row_column_t lists = {.values = data,
                                .values_len = rows[100],
                                .offsets = (const uint8_t *)cuts,
                                .offsets_len = sizeof cuts,
                                .validity = validity,
                                .validity_len = sizeof validity,
                                .offset = 1,
                                .length = 19};
    EXPECT(value_list_offsets(&element, &lists, found, &bad) == STATUS_OK);
    row_slice_t slices[100];
    value_list_rows(&element, &lists, slices);
    EXPECT(row_check(&element, slices, found[19]) == STATUS_OK);
    for (uint32_t i = 0; i < 19; i++) {
        const uint8_t *from = data + cuts[i + 1];
        EXPECT(bits_get(validity, i + 1) == 1 || found[i] == found[i + 1]);
        for (uint32_t j = found[i]; j < found[i + 1]; j++) {
            EXPECT(slices[j].data == from);
            from += slices[j].len;
        }
        EXPECT(bits_get(validity, i + 1) == 0 || from == data + cuts[i + 2]);
    }
    const row_column_t cut = {.values = data,
                              .values_len = rows[3] - 1,
                              .offsets = (const uint8_t *)(uint32_t[]){0, rows[3] - 1},
                              .offsets_len = 8,
                              .length = 1};
    EXPECT(value_list_offsets(&element, &cut, found, &bad) == STATUS_CORRUPT && bad == 0);
    free(data);
    sample_drop(&sample);
}

static void check_refused(void) {
    sample_t sample;
    uint32_t bad = UINT32_MAX;
    row_slice_t slices[8];
    sample_make(&sample, 8);
    row_column_t values = encoded(&sample, NULL, 8);
    uint8_t *fifth = (uint8_t *)(uintptr_t)values.values + load_le32(values.offsets + 4 * 5);
    for (uint32_t at = 0; at < VALUE_HEAD; at++) { /* another version, another schema */
        fifth[at] ^= 0x40;
        EXPECT(value_rows(&sample.layout, &values, SCHEMA, slices, &bad) == STATUS_CORRUPT);
        EXPECT(bad == 5);
        fifth[at] ^= 0x40;
    }
    EXPECT(value_rows(&sample.layout, &values, SCHEMA + 1, slices, &bad) == STATUS_CORRUPT);
    EXPECT(bad == 0);
    values.values_len -= 1;
    EXPECT(value_rows(&sample.layout, &values, SCHEMA, slices, &bad) == STATUS_INPUT);
    values.values_len += 1;
    values.offsets_len -= 4;
    EXPECT(value_rows(&sample.layout, &values, SCHEMA, slices, &bad) == STATUS_INPUT);
    values.offsets_len += 4;
    values.validity = (const uint8_t *)"";
    EXPECT(value_rows(&sample.layout, &values, SCHEMA, slices, &bad) == STATUS_INPUT);
    column_drop(values);
    sample_drop(&sample);
}

static void check_limit(void) {
    row_slot_t slot = {ROW_VARLEN, 0, 0};
    row_layout_t layout;
    row_layout_init(&slot, 1, &layout);
    const uint32_t ends[] = {0, 0x7FFFFFF0};
    uint32_t offsets[2];
    const row_column_t column = {.values_len = 0x7FFFFFFF, /* never read: sizes alone */
                                 .offsets = (const uint8_t *)ends,
                                 .offsets_len = sizeof ends,
                                 .length = 1};
    EXPECT(row_encode_size(&layout, &column, NULL, 1, offsets) == STATUS_OK);
    EXPECT(value_encode_size(&layout, &column, NULL, 1, offsets) == STATUS_OK);
    EXPECT(offsets[1] == 0x7FFFFFF0 + 5 + VALUE_HEAD);
    const uint32_t more[] = {0, 0x7FFFFFF8};
    const row_column_t longer = {.values_len = 0x7FFFFFFF,
                                 .offsets = (const uint8_t *)more,
                                 .offsets_len = sizeof more,
                                 .length = 1};
    EXPECT(value_encode_size(&layout, &longer, NULL, 1, offsets) == STATUS_LIMIT);
}

/* Bytes like values', changed and cut: a status, or columns within them. */
static void check_damage(void) {
    for (uint32_t round = 0; round < 2000; round++) {
        uint8_t bytes[64];
        const size_t len = random_below(sizeof bytes);
        random_bytes(bytes, len);
        for (size_t at = 0; at < len; at++) bytes[at] &= random_below(3) == 0 ? 0xFF : 0x0F;
        if (len > 0) bytes[0] = VALUE_VERSION;
        if (len > 1) bytes[1] = 1;
        if (len > 2) bytes[2] = 0;
        fuzz_value(bytes, len);
    }
}

void test_value(void) {
    for (uint32_t n = 0; n < 300; n += 1 + random_below(40)) {
        check_bytes(n, false);
        check_bytes(n, true);
        if (n != 0) check_nulls(n);
    }
    for (uint32_t round = 0; round < 40; round++) check_lists(round % 2);
    check_refused();
    check_limit();
    check_damage();
}
