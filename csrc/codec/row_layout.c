#include "codec/row.h"

#include "common/bits.h"
#include "common/check.h"

#include <stdbool.h>

void row_layout_init(row_slot_t *slots, uint32_t n, row_layout_t *out) {
    uint32_t at = (uint32_t)bits_bytes(n);
    for (uint32_t i = 0; i < n; i++) {
        if (slots[i].kind == ROW_VARLEN) continue;
        CHECK(slots[i].width != 0 && (slots[i].kind == ROW_FIXED || slots[i].width == 1));
        slots[i].at = at;
        at += slots[i].width;
    }
    const uint32_t ends = at;
    for (uint32_t i = 0; i < n; i++) {
        if (slots[i].kind != ROW_VARLEN) continue;
        slots[i].at = at;
        at += 4;
    }
    *out = (row_layout_t){slots, n, ends, at};
}

status_t row_slices(const uint8_t *data, size_t data_len, const uint32_t *offsets, uint32_t n,
                    row_slice_t *out) {
    for (size_t i = 0; i < n; i++) {
        if (offsets[i] > offsets[i + 1] || offsets[i + 1] > data_len) return STATUS_CORRUPT;
        out[i] = (row_slice_t){data + offsets[i], offsets[i + 1] - offsets[i]};
    }
    return STATUS_OK;
}

static bool slice_sane(const row_layout_t *layout, row_slice_t row) {
    if (row.len < layout->head) return false;
    uint32_t end = 0;
    for (uint32_t at = layout->ends; at < layout->head; at += 4) {
        const uint32_t next = load_le32(row.data + at);
        if (next < end) return false;
        end = next;
    }
    return row.len - layout->head == end;
}

status_t row_check(const row_layout_t *layout, const row_slice_t *slices, uint32_t n) {
    for (size_t i = 0; i < n; i++) {
        if (slices[i].data != NULL && !slice_sane(layout, slices[i])) return STATUS_CORRUPT;
    }
    return STATUS_OK;
}
