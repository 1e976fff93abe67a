/* Values of typed messages on any bytes; see fuzz_core.c. */
#include "tests/fuzz_core.h"

#include <stdlib.h>

#include "codec/value.h"
#include "common/bits.h"
#include "common/bytes.h"

static void read_column(const row_layout_t *layout, const row_slice_t *row, uint32_t column) {
    uint8_t validity, fixed[16];
    uint32_t offsets[2], nulls;
    if (layout->slots[column].kind != ROW_VARLEN) {
        row_decode_fixed(layout, row, 1, column, &validity, fixed);
        return;
    }
    if (row_decode_offsets(layout, row, 1, column, &validity, offsets, &nulls) != STATUS_OK) return;
    uint8_t *out = malloc((size_t)offsets[1] + 1);
    if (out != NULL) row_decode_bytes(layout, row, 1, column, offsets, out);
    free(out);
}

/* As elements of a list: what lengths say is followed to the end, and no further. */
static int read_list(const row_slot_t *kind, const row_column_t *lists) {
    row_slot_t slot = *kind;
    row_layout_t element;
    uint32_t ends[2], bad;
    row_layout_init(&slot, 1, &element);
    if (value_list_offsets(&element, lists, ends, &bad) != STATUS_OK) return 0;
    row_slice_t *rows = malloc(((size_t)ends[1] + 1) * sizeof *rows);
    if (rows == NULL) return 0;
    value_list_rows(&element, lists, rows);
    const int sane = row_check(&element, rows, ends[1]) == STATUS_OK;
    for (uint32_t i = 0; i < ends[1]; i++) read_column(&element, rows + i, 0);
    free(rows);
    if (!sane) abort();
    return 1;
}

int fuzz_value(const uint8_t *data, size_t len) {
    static const row_slot_t shapes[2][4] = {
        {{ROW_VARLEN, 0, 0}, {ROW_VARLEN, 0, 0}, {ROW_VARLEN, 0, 0}, {ROW_VARLEN, 0, 0}},
        {{ROW_BIT, 1, 0}, {ROW_VARLEN, 0, 0}, {ROW_FIXED, 8, 0}, {ROW_VARLEN, 0, 0}}};
    int sane = 0;
    if (len > INT32_MAX) return 0;
    const uint32_t ends[2] = {0, (uint32_t)len};
    const row_column_t values = {.values = data,
                                 .values_len = len,
                                 .offsets = (const uint8_t *)ends,
                                 .offsets_len = sizeof ends,
                                 .length = 1};
    for (int c = 0; c < 4; c++) sane |= read_list(shapes[1] + c, &values);
    for (int shape = 0; shape < 2; shape++) {
        row_slot_t slots[4];
        row_layout_t layout;
        row_slice_t row;
        uint32_t bad;
        memcpy(slots, shapes[shape], sizeof slots);
        row_layout_init(slots, 4, &layout);
        if (value_rows(&layout, &values, 1, &row, &bad) != STATUS_OK) continue;
        for (uint32_t c = 0; c < 4; c++) read_column(&layout, &row, c);
        sane = 1;
    }
    return sane;
}
