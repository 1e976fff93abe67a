#include "codec/keys_inline.h"
#include "common/bits.h"
#include "rowset/access.h"
#include "tablet/layers.h"

#include <stdbool.h>

static block_kind_t kind_of(row_kind_t kind) {
    return kind == ROW_BIT ? BLOCK_BIT : kind == ROW_FIXED ? BLOCK_FIXED : BLOCK_VARLEN;
}

enum { TOGETHER = 16 };

static bool is_packed(const block_t *block, uint32_t row) {
    return block->encoding != BLOCK_PLAIN && block->encoding != BLOCK_RUNS &&
           row < block->numbers[0].n;
}

/* A value waits for memory twice or more, so those of some rows are asked for before all are read. */
static void prefetch(const block_t *block, uint32_t row) {
    if (block->validity != NULL) __builtin_prefetch(block->validity + row / 8);
    if (is_packed(block, row)) {
        __builtin_prefetch(block->numbers[0].frames + row / PACKED_FRAME * PACKED_FRAME_BYTES);
    } else if (block->encoding != BLOCK_PLAIN) {
        return;
    } else if (block->offsets != NULL) {
        __builtin_prefetch(block->offsets + 4 * (size_t)row);
    } else if (block->data != NULL) {
        const size_t at = block->kind == BLOCK_BIT ? row / 8 : (size_t)row * block->width;
        if (at < block->data_len) __builtin_prefetch(block->data + at);
    }
}

/* The value of a column that no block has, from a row of the layout. */
static void take_default(const row_layout_t *layout, const uint8_t *defaults, size_t defaults_len,
                         uint32_t c, access_value_t *out) {
    const row_slot_t slot = layout->slots[c];
    *out = (access_value_t){.is_null = bits_get(defaults, c)};
    if (slot.kind != ROW_VARLEN) {
        out->data = defaults + slot.at;
        out->len = slot.width;
        out->bit = defaults[slot.at];
        return;
    }
    const uint32_t to = load_le32(defaults + slot.at);
    const uint32_t from = slot.at == layout->ends ? 0 : load_le32(defaults + slot.at - 4);
    if (from <= to && to <= defaults_len - layout->head) {
        out->data = defaults + layout->head + from;
        out->len = to - from;
    }
}

/* A row that grows; `used` goes on behind `cap`, where nothing is written. */
typedef struct {
    uint8_t *out;
    size_t cap;
    size_t used;
    size_t head;
} row_out_t;

static void add_value(row_slot_t slot, uint32_t c, const access_value_t *value, row_out_t *to) {
    if (value->is_null != 0) bits_set(to->out, c);
    if (slot.kind == ROW_VARLEN) {
        const size_t len = value->is_null != 0 ? 0 : value->len;
        if (to->used <= to->cap && len <= to->cap - to->used) {
            copy_bytes(to->out + to->used, value->data, len);
        }
        to->used += len;
        store_le32(to->out + slot.at, (uint32_t)(to->used - to->head));
    } else if (value->is_null == 0) {
        if (slot.kind == ROW_BIT) {
            to->out[slot.at] = (uint8_t)value->bit;
        } else {
            memcpy(to->out + slot.at, value->data, slot.width);
        }
    }
}

static bool fits(row_slot_t slot, const block_t *block) {
    return block->kind == kind_of(slot.kind) &&
           block->width == (slot.kind == ROW_FIXED ? slot.width : 0);
}

int64_t layers_row(const row_layout_t *layout, const uint8_t *defaults, size_t defaults_len,
                   const layer_found_t *found, uint8_t *out, size_t cap) {
    const block_t *columns = found->block->columns;
    row_out_t to = {out, cap, layout->head, layout->head};
    if (layout->head > cap) return layout->head;
    if (layout->head != 0) memset(out, 0, layout->head);
    for (uint32_t c = 0; c < layout->n; c++) {
        const row_slot_t slot = layout->slots[c];
        access_value_t value;
        if (columns[c].kind == 0) {
            take_default(layout, defaults, defaults_len, c, &value);
        } else if (!fits(slot, columns + c) ||
                   access_value(columns + c, found->row, &value) != STATUS_OK) {
            return -1;
        }
        add_value(slot, c, &value, &to);
    }
    return (int64_t)to.used;
}

static void prefetch_rows(const row_layout_t *layout, const layer_found_t *found, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (found[i].state != LAYERS_BLOCK) continue;
        for (uint32_t c = 0; c < layout->n; c++) {
            prefetch(found[i].block->columns + c, found[i].row);
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        if (found[i].state != LAYERS_BLOCK) continue;
        for (uint32_t c = 0; c < layout->n; c++) {
            const block_t *block = found[i].block->columns + c;
            if (is_packed(block, found[i].row)) packed_prefetch(block->numbers, found[i].row);
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        if (found[i].state != LAYERS_BLOCK) continue;
        for (uint32_t c = 0; c < layout->n; c++) {
            access_value_t value;
            if (layout->slots[c].kind != ROW_VARLEN) continue;
            if (access_value(found[i].block->columns + c, found[i].row, &value) == STATUS_OK) {
                __builtin_prefetch(value.data);
            }
        }
    }
}

int64_t layers_rows(const row_layout_t *layout, const uint8_t *defaults, size_t defaults_len,
                    const layer_found_t *found, uint32_t from, uint32_t n, uint8_t *out,
                    size_t cap, row_slice_t *out_slices) {
    for (uint32_t i = from; i < n; i++) {
        row_slice_t slice = {NULL, 0};
        if ((i - from) % TOGETHER == 0) {
            prefetch_rows(layout, found + i, n - i < TOGETHER ? n - i : TOGETHER);
        }
        if (found[i].state == LAYERS_MEMORY || found[i].state == LAYERS_OWN) {
            slice = (row_slice_t){found[i].entry->row, found[i].entry->row_len};
        } else if (found[i].state == LAYERS_BLOCK) {
            const int64_t len = layers_row(layout, defaults, defaults_len, found + i, out, cap);
            if (len < 0) return -1;
            if ((size_t)len > cap) return i;
            slice = (row_slice_t){out, (size_t)len};
            out += len;
            cap -= (size_t)len;
        }
        out_slices[i] = slice;
    }
    return n;
}
