#include "codec/row.h"
#include "common/bits.h"
#include "tests/harness.h"

enum { COLUMNS = 6, ROWS = 300 };

/* Arrow columns of all kinds with an offset, and what is in them. */
typedef struct {
    row_slot_t slots[COLUMNS];
    row_column_t columns[COLUMNS];
    row_layout_t layout;
} table_t;

static void fill_column(row_slot_t slot, row_column_t *column, uint32_t n, uint32_t offset) {
    const size_t total = (size_t)n + offset;
    uint8_t *validity = NULL, *offsets = NULL, *values;
    size_t len = slot.kind == ROW_BIT ? bits_bytes(total) : total * slot.width;
    if (random_below(3) != 0) {
        validity = exact(bits_bytes(total));
        random_bytes(validity, bits_bytes(total));
    }
    if (slot.kind == ROW_VARLEN) {
        offsets = exact(4 * (total + 1));
        len = 0;
        for (size_t i = 0; i <= total; i++) {
            store_le32(offsets + 4 * i, (uint32_t)len);
            len += i == total ? 0 : random_below(9);
        }
        column->offsets_len = 4 * (total + 1);
    }
    values = exact(len);
    random_bytes(values, len);
    column->values = values;
    column->values_len = len;
    column->offsets = offsets;
    column->validity = validity;
    column->validity_len = validity == NULL ? 0 : bits_bytes(total);
    column->offset = offset;
    column->length = n;
}

static void table_make(table_t *table, uint32_t n) {
    static const row_slot_t kinds[] = {{ROW_BIT, 1, 0},   {ROW_FIXED, 4, 0}, {ROW_FIXED, 8, 0},
                                       {ROW_FIXED, 3, 0}, {ROW_VARLEN, 0, 0}};
    memset(table, 0, sizeof *table);
    const uint32_t offset = random_below(20);
    for (uint32_t c = 0; c < COLUMNS; c++) {
        table->slots[c] = kinds[random_below(5)];
        fill_column(table->slots[c], table->columns + c, n, offset);
    }
    row_layout_init(table->slots, COLUMNS, &table->layout);
}

static void table_drop(table_t *table) {
    for (uint32_t c = 0; c < COLUMNS; c++) {
        free((void *)(uintptr_t)table->columns[c].values);
        free((void *)(uintptr_t)table->columns[c].offsets);
        free((void *)(uintptr_t)table->columns[c].validity);
    }
}

static bool is_valid(const row_column_t *column, uint64_t row) {
    return column->validity == NULL || bits_get(column->validity, column->offset + row) == 1;
}

static void expect_fixed(const table_t *table, const row_slice_t *slices, uint32_t n, uint32_t c,
                         const uint32_t *rows) {
    const row_slot_t slot = table->slots[c];
    const row_column_t *column = table->columns + c;
    const size_t len = slot.kind == ROW_BIT ? bits_bytes(n) : (size_t)n * slot.width;
    uint8_t *validity = exact(bits_bytes(n)), *values = exact(len);
    uint32_t nulls = 0;
    const uint32_t count = row_decode_fixed(&table->layout, slices, n, c, validity, values);
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t at = column->offset + rows[i];
        const bool valid = slices[i].data != NULL && is_valid(column, rows[i]);
        EXPECT(bits_get(validity, i) == valid);
        nulls += !valid;
        if (!valid) continue;
        if (slot.kind == ROW_BIT) {
            EXPECT(bits_get(values, i) == bits_get(column->values, at));
        } else {
            EXPECT(memcmp(values + (size_t)i * slot.width, column->values + at * slot.width,
                          slot.width) == 0);
        }
    }
    EXPECT(count == nulls);
    free(validity);
    free(values);
}

static void expect_varlen(const table_t *table, const row_slice_t *slices, uint32_t n, uint32_t c,
                          const uint32_t *rows) {
    const row_column_t *column = table->columns + c;
    uint8_t *validity = exact(bits_bytes(n));
    uint32_t *offsets = (uint32_t *)(void *)exact(4 * ((size_t)n + 1)), nulls, seen = 0;
    EXPECT(row_decode_offsets(&table->layout, slices, n, c, validity, offsets, &nulls) ==
           STATUS_OK);
    uint8_t *values = exact(offsets[n]);
    row_decode_bytes(&table->layout, slices, n, c, offsets, values);
    for (uint32_t i = 0; i < n; i++) {
        const bool valid = slices[i].data != NULL && is_valid(column, rows[i]);
        const uint8_t *ends = column->offsets + 4 * (column->offset + rows[i]);
        const uint32_t from = load_le32(ends), len = valid ? load_le32(ends + 4) - from : 0;
        EXPECT(bits_get(validity, i) == valid);
        EXPECT(offsets[i + 1] - offsets[i] == len);
        EXPECT(compare_bytes(values + offsets[i], column->values + from, len) == 0);
        seen += !valid;
    }
    EXPECT(nulls == seen);
    free(validity);
    free(offsets);
    free(values);
}

/* Whatever row_check lets pass is read without leaving it. */
static void check_damage(const table_t *table, const uint8_t *row, size_t len) {
    row_slice_t slice;
    uint32_t nulls, offsets[2];
    uint8_t validity, *values = exact(16);
    for (size_t at = 0; at < len; at++) {
        uint8_t *copy = exact_copy(row, len), *bytes;
        copy[at] = (uint8_t)(copy[at] ^ 1u << random_below(8));
        slice = (row_slice_t){copy, len};
        if (row_check(&table->layout, &slice, 1) == STATUS_OK) {
            for (uint32_t c = 0; c < COLUMNS; c++) {
                if (table->slots[c].kind != ROW_VARLEN) {
                    row_decode_fixed(&table->layout, &slice, 1, c, &validity, values);
                    continue;
                }
                EXPECT(row_decode_offsets(&table->layout, &slice, 1, c, &validity, offsets,
                                          &nulls) == STATUS_OK);
                bytes = exact(offsets[1]);
                row_decode_bytes(&table->layout, &slice, 1, c, offsets, bytes);
                free(bytes);
            }
        }
        free(copy);
        copy = exact_copy(row, at); /* and every truncation is found */
        slice = (row_slice_t){copy, at};
        EXPECT(row_check(&table->layout, &slice, 1) == STATUS_CORRUPT);
        free(copy);
    }
    free(values);
}

static void check_table(uint32_t n, bool picked) {
    table_t table;
    table_make(&table, n);
    const uint32_t m = picked && n != 0 ? random_below(2 * n) : n;
    uint32_t *rows = (uint32_t *)(void *)exact(4 * (size_t)m);
    uint32_t *offsets = (uint32_t *)(void *)exact(4 * ((size_t)m + 1));
    for (uint32_t i = 0; i < m; i++) rows[i] = picked ? random_below(n) : i;
    const uint32_t *list = picked ? rows : NULL;
    EXPECT(row_encode_size(&table.layout, table.columns, list, m, offsets) == STATUS_OK);
    uint8_t *data = exact(offsets[m]);
    row_encode(&table.layout, table.columns, list, m, offsets, data, offsets[m]);
    row_slice_t *slices = (row_slice_t *)(void *)exact(m * sizeof *slices);
    EXPECT(row_slices(data, offsets[m], offsets, m, slices) == STATUS_OK);
    EXPECT(row_check(&table.layout, slices, m) == STATUS_OK);
    if (m != 0) check_damage(&table, slices[m - 1].data, slices[m - 1].len);
    for (uint32_t i = 0; i < m; i += 7) slices[i] = (row_slice_t){NULL, 0};
    for (uint32_t c = 0; c < COLUMNS; c++) {
        if (table.slots[c].kind == ROW_VARLEN) {
            expect_varlen(&table, slices, m, c, rows);
        } else {
            expect_fixed(&table, slices, m, c, rows);
        }
    }
    free(rows);
    free(offsets);
    free(data);
    free(slices);
    table_drop(&table);
}

static void check_bad_input(void) {
    row_slot_t slot = {ROW_VARLEN, 0, 0};
    row_layout_t layout;
    row_layout_init(&slot, 1, &layout);
    const uint32_t starts[] = {0, 2, 1}, past[] = {0, 2, 9}, outside[] = {2};
    uint32_t offsets[4];
    row_column_t column = {.values = (const uint8_t *)"abcd",
                           .values_len = 4,
                           .offsets = (const uint8_t *)starts,
                           .offsets_len = sizeof starts,
                           .length = 2};
    EXPECT(row_encode_size(&layout, &column, NULL, 2, offsets) == STATUS_INPUT);
    EXPECT(row_encode_size(&layout, &column, outside, 1, offsets) == STATUS_RANGE);
    EXPECT(row_encode_size(&layout, &column, NULL, 3, offsets) == STATUS_RANGE);
    column.offsets = (const uint8_t *)past;
    EXPECT(row_encode_size(&layout, &column, NULL, 2, offsets) == STATUS_INPUT);
    EXPECT(row_encode_size(&layout, &column, NULL, 1, offsets) == STATUS_OK);
    column.offsets_len = 8;
    EXPECT(row_encode_size(&layout, &column, NULL, 1, offsets) == STATUS_INPUT);
    row_slice_t slices[2];
    EXPECT(row_slices((const uint8_t *)"abcd", 4, past, 2, slices) == STATUS_CORRUPT);
    EXPECT(row_slices((const uint8_t *)"abcd", 4, starts, 2, slices) == STATUS_CORRUPT);
}

/* Two values of 3 GiB cannot be: their offsets are i32. Two columns of 2 GiB can pass 4 GiB. */
static void check_limit(void) {
    row_slot_t slots[3] = {{ROW_VARLEN, 0, 0}, {ROW_VARLEN, 0, 0}, {ROW_VARLEN, 0, 0}};
    row_layout_t layout;
    row_layout_init(slots, 3, &layout);
    const uint32_t ends[] = {0, 0x7FFFFFFF};
    uint32_t offsets[2];
    row_column_t columns[3];
    for (int c = 0; c < 3; c++) {
        columns[c] = (row_column_t){.values_len = 0x7FFFFFFF, /* never read: sizes alone */
                                    .offsets = (const uint8_t *)ends,
                                    .offsets_len = sizeof ends,
                                    .length = 1};
    }
    EXPECT(row_encode_size(&layout, columns, NULL, 1, offsets) == STATUS_LIMIT);
}

void test_row(void) {
    for (uint32_t n = 0; n < ROWS; n += 1 + random_below(20)) {
        check_table(n, false);
        if (n != 0) check_table(n, true);
    }
    check_table(1000, true);
    check_bad_input();
    check_limit();
}
