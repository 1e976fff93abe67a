#include "codec/row.h"

#include "common/bits.h"
#include "common/check.h"

#include <stdbool.h>

static bool has_value(row_slice_t row, uint32_t column) {
    return row.data != NULL && bits_get(row.data, column) == 0;
}

/* Returns how many rows have no value in this column. */
static uint32_t write_validity(const row_slice_t *slices, uint32_t n, uint32_t column,
                               uint8_t *out) {
    uint32_t nulls = 0;
    if (n != 0) memset(out, 0, bits_bytes(n));
    for (uint32_t i = 0; i < n; i++) {
        const unsigned valid = has_value(slices[i], column);
        bits_or(out, i, valid);
        nulls += 1 - valid;
    }
    return nulls;
}

/* Called with a constant `width` for the common ones. */
static inline void read_fixed(row_slot_t slot, const row_slice_t *slices, uint32_t n,
                              uint8_t *out, size_t width) {
    for (size_t i = 0; i < n; i++) {
        if (slices[i].data == NULL) {
            memset(out + i * width, 0, width);
        } else {
            memcpy(out + i * width, slices[i].data + slot.at, width);
        }
    }
}

static void read_bits(row_slot_t slot, const row_slice_t *slices, uint32_t n, uint8_t *out) {
    if (n != 0) memset(out, 0, bits_bytes(n));
    for (uint32_t i = 0; i < n; i++) {
        bits_or(out, i, slices[i].data != NULL && slices[i].data[slot.at] != 0);
    }
}

uint32_t row_decode_fixed(const row_layout_t *layout, const row_slice_t *slices, uint32_t n,
                          uint32_t column, uint8_t *out_validity, uint8_t *out_values) {
    CHECK(column < layout->n && layout->slots[column].kind != ROW_VARLEN);
    const row_slot_t slot = layout->slots[column];
    const uint32_t nulls = write_validity(slices, n, column, out_validity);
    if (slot.kind == ROW_BIT) {
        read_bits(slot, slices, n, out_values);
        return nulls;
    }
    switch (slot.width) {
        case 4: read_fixed(slot, slices, n, out_values, 4); break;
        case 8: read_fixed(slot, slices, n, out_values, 8); break;
        default: read_fixed(slot, slices, n, out_values, slot.width);
    }
    return nulls;
}

static uint32_t value_start(const row_layout_t *layout, row_slot_t slot, row_slice_t row) {
    return slot.at == layout->ends ? 0 : load_le32(row.data + slot.at - 4);
}

status_t row_decode_offsets(const row_layout_t *layout, const row_slice_t *slices, uint32_t n,
                            uint32_t column, uint8_t *out_validity, uint32_t *out_offsets,
                            uint32_t *out_null_count) {
    CHECK(column < layout->n && layout->slots[column].kind == ROW_VARLEN);
    const row_slot_t slot = layout->slots[column];
    uint64_t at = 0;
    out_offsets[0] = 0;
    for (size_t i = 0; i < n; i++) {
        const row_slice_t row = slices[i];
        if (row.data != NULL) at += load_le32(row.data + slot.at) - value_start(layout, slot, row);
        if (at > INT32_MAX) return STATUS_LIMIT;
        out_offsets[i + 1] = (uint32_t)at;
    }
    *out_null_count = write_validity(slices, n, column, out_validity);
    return STATUS_OK;
}

void row_decode_bytes(const row_layout_t *layout, const row_slice_t *slices, uint32_t n,
                      uint32_t column, const uint32_t *offsets, uint8_t *out) {
    const row_slot_t slot = layout->slots[column];
    for (size_t i = 0; i < n; i++) {
        const row_slice_t row = slices[i];
        if (row.data == NULL) continue;
        const uint8_t *from = row.data + layout->head + value_start(layout, slot, row);
        copy_bytes(out + offsets[i], from, offsets[i + 1] - offsets[i]);
    }
}
