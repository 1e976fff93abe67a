#include "codec/row.h"

#include "common/bits.h"
#include "common/check.h"
#include "common/rows.h"

#include <stdbool.h>

enum { TOGETHER = 256 }; /* rows that go through all columns before the next do: they stay near */

static uint64_t row_of(const row_column_t *column, const uint32_t *rows, uint32_t i) {
    return column->offset + (rows == NULL ? i : rows[i]);
}

static bool is_null(const row_column_t *column, uint64_t row) {
    return column->validity != NULL && bits_get(column->validity, row) == 0;
}

static uint32_t value_start(const row_column_t *column, uint64_t row) {
    return load_le32(column->offsets + 4 * row);
}

static status_t check_column(row_slot_t slot, const row_column_t *column, const uint32_t *rows,
                             uint32_t n) {
    const uint64_t end = column->offset + column->length;
    const uint32_t limit = column->length < UINT32_MAX ? (uint32_t)column->length : UINT32_MAX;
    if (rows == NULL ? n > limit : !rows_below(rows, n, limit)) return STATUS_RANGE;
    if (column->length == 0) return STATUS_OK;
    if (column->validity != NULL && column->validity_len < bits_bytes(end)) return STATUS_INPUT;
    bool holds = false;
    switch (slot.kind) {
        case ROW_BIT: holds = column->values_len >= bits_bytes(end); break;
        case ROW_FIXED: holds = column->values_len / slot.width >= end; break;
        case ROW_VARLEN: holds = column->offsets_len / 4 > end; break;
    }
    return holds ? STATUS_OK : STATUS_INPUT;
}

/* Adds the bytes of a variable column's values to lens. */
static status_t add_lens(const row_column_t *column, const uint32_t *rows, uint32_t n,
                         uint32_t *lens) {
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t row = row_of(column, rows, i);
        if (is_null(column, row)) continue;
        const uint32_t from = value_start(column, row), to = value_start(column, row + 1);
        if (from > to || to > column->values_len) return STATUS_INPUT;
        if (to - from >= UINT32_MAX - lens[i]) return STATUS_LIMIT;
        lens[i] += to - from;
    }
    return STATUS_OK;
}

status_t row_encode_size(const row_layout_t *layout, const row_column_t *columns,
                         const uint32_t *rows, uint32_t n, uint32_t *out_offsets) {
    uint32_t *lens = out_offsets + 1;
    for (uint32_t i = 0; i < n; i++) lens[i] = layout->head;
    for (uint32_t c = 0; c < layout->n; c++) {
        status_t status = check_column(layout->slots[c], columns + c, rows, n);
        if (status == STATUS_OK && layout->slots[c].kind == ROW_VARLEN) {
            status = add_lens(columns + c, rows, n, lens);
        }
        if (status != STATUS_OK) return status;
    }
    uint64_t at = 0;
    out_offsets[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        at += lens[i];
        if (at >= UINT32_MAX) return STATUS_LIMIT;
        lens[i] = (uint32_t)at;
    }
    return STATUS_OK;
}

static void write_nulls(const row_column_t *column, uint32_t c, const uint32_t *rows, uint32_t lo,
                        uint32_t hi, const uint32_t *offsets, uint8_t *out) {
    for (uint32_t i = lo; i < hi; i++) {
        if (is_null(column, row_of(column, rows, i))) bits_set(out + offsets[i], c);
    }
}

static void write_bits(row_slot_t slot, const row_column_t *column, const uint32_t *rows,
                       uint32_t lo, uint32_t hi, const uint32_t *offsets, uint8_t *out) {
    for (uint32_t i = lo; i < hi; i++) {
        const uint64_t row = row_of(column, rows, i);
        if (is_null(column, row)) continue;
        out[offsets[i] + slot.at] = (uint8_t)bits_get(column->values, row);
    }
}

/* Called with a constant `width` for the common ones. */
static inline void write_fixed(row_slot_t slot, const row_column_t *column, const uint32_t *rows,
                               uint32_t lo, uint32_t hi, const uint32_t *offsets, uint8_t *out,
                               size_t width) {
    for (uint32_t i = lo; i < hi; i++) {
        const uint64_t row = row_of(column, rows, i);
        if (is_null(column, row)) continue;
        memcpy(out + offsets[i] + slot.at, column->values + row * width, width);
    }
}

static void write_varlen(const row_layout_t *layout, row_slot_t slot, const row_column_t *column,
                         const uint32_t *rows, uint32_t lo, uint32_t hi, const uint32_t *offsets,
                         uint8_t *out) {
    for (uint32_t i = lo; i < hi; i++) {
        uint8_t *row = out + offsets[i];
        const uint64_t from_row = row_of(column, rows, i);
        uint32_t at = slot.at == layout->ends ? 0 : load_le32(row + slot.at - 4);
        if (!is_null(column, from_row)) {
            const uint32_t from = value_start(column, from_row);
            const uint32_t len = value_start(column, from_row + 1) - from;
            if (len != 0) memcpy(row + layout->head + at, column->values + from, len);
            at += len;
        }
        store_le32(row + slot.at, at);
    }
}

static void write_column(const row_layout_t *layout, const row_column_t *columns, uint32_t c,
                         const uint32_t *rows, uint32_t lo, uint32_t hi, const uint32_t *offsets,
                         uint8_t *out) {
    const row_slot_t slot = layout->slots[c];
    const row_column_t *column = columns + c;
    if (column->validity != NULL) write_nulls(column, c, rows, lo, hi, offsets, out);
    if (slot.kind == ROW_VARLEN) {
        write_varlen(layout, slot, column, rows, lo, hi, offsets, out);
    } else if (slot.kind == ROW_BIT) {
        write_bits(slot, column, rows, lo, hi, offsets, out);
    } else {
        switch (slot.width) {
            case 4: write_fixed(slot, column, rows, lo, hi, offsets, out, 4); break;
            case 8: write_fixed(slot, column, rows, lo, hi, offsets, out, 8); break;
            default: write_fixed(slot, column, rows, lo, hi, offsets, out, slot.width);
        }
    }
}

void row_encode(const row_layout_t *layout, const row_column_t *columns, const uint32_t *rows,
                uint32_t n, const uint32_t *offsets, uint8_t *out, size_t out_len) {
    CHECK(offsets[n] <= out_len);
    for (uint32_t lo = 0; lo < n; lo += TOGETHER) {
        const uint32_t hi = n - lo < TOGETHER ? n : lo + TOGETHER;
        for (uint32_t i = lo; i < hi; i++) {
            if (layout->head != 0) memset(out + offsets[i], 0, layout->head);
        }
        for (uint32_t c = 0; c < layout->n; c++) {
            write_column(layout, columns, c, rows, lo, hi, offsets, out);
        }
    }
}
