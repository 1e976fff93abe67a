#include "codec/keys_inline.h"
#include "common/bits.h"
#include "rowset/access.h"
#include "rowset/search.h"
#include "tablet/layers.h"

#include <stdbool.h>

/* -- the bytes of a row ------------------------------------------------------------------- */

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

/* -- short ranges ------------------------------------------------------------------------- */

enum { MOST_GONE = 32 * LAYERS_FEW };

/* The next key of a source: of memory, or of a row set. */
typedef struct {
    const mem_row_set_t *memory;
    mem_range_t range;
    const mem_entry_t *last;
    const mem_entry_t *entry; /* of memory: the newest one of the key */
    const layer_row_set_t *row_set;
    uint32_t step;
    uint32_t number;
    uint32_t row;
    bool over;
    access_value_t key;
} cursor_t;

typedef struct {
    cursor_t cursors[LAYERS_CURSORS];
    uint32_t n;
    uint32_t most;
    slice_t high;
} merge_t;

static bool is_below(slice_t key, slice_t high) {
    return high.data == NULL || slice_compare(key, high) < 0;
}

static slice_t key_of(const cursor_t *cursor) {
    const slice_t key = {cursor->key.data, cursor->key.len};
    return key;
}

static void next_in_memory(cursor_t *cursor) {
    cursor->over =
        mem_row_set_select(cursor->memory, &cursor->range, &cursor->last, 1, &cursor->entry) == 0;
    if (cursor->over) return;
    cursor->key.data = cursor->entry->row - cursor->entry->key_len;
    cursor->key.len = cursor->entry->key_len;
}

/* Reads the key at the cursor's place, or at the beginning of the block behind. */
static layers_range_status_t read_key(cursor_t *cursor, slice_t high, layer_found_t *stop) {
    const layer_row_set_t *row_set = cursor->row_set;
    for (; cursor->number < row_set->lasts.n; cursor->number++, cursor->row = 0) {
        if (!is_below(keys_at(&row_set->firsts, cursor->number), high)) break;
        const layer_block_t *block =
            __atomic_load_n(row_set->blocks + cursor->number, __ATOMIC_ACQUIRE);
        stop->step = cursor->step;
        stop->number = cursor->number;
        stop->state = block == NULL ? LAYERS_LOAD : LAYERS_CORRUPT;
        if (block == NULL) return LAYERS_RANGE_STOP;
        if (cursor->row >= block->keys.rows) continue;
        if (access_value(&block->keys, cursor->row, &cursor->key) != STATUS_OK) {
            return LAYERS_RANGE_STOP;
        }
        cursor->over = !is_below(key_of(cursor), high);
        return LAYERS_RANGE_OK;
    }
    cursor->over = true;
    return LAYERS_RANGE_OK;
}

/* Moves to the first row of the range, and sees whether a block alone has too many. */
static layers_range_status_t open_row_set(cursor_t *cursor, slice_t low, const merge_t *merge,
                                          layer_found_t *stop) {
    const layer_row_set_t *row_set = cursor->row_set;
    const slice_t high = merge->high;
    cursor->number = search_lower_bound(&row_set->lasts, low.data, low.len);
    uint32_t end = row_set->lasts.n;
    if (high.data != NULL) end = search_lower_bound(&row_set->firsts, high.data, high.len);
    if (cursor->number >= end) {
        cursor->over = true;
        return LAYERS_RANGE_OK;
    }
    if (merge->most >= LAYERS_FEW && end > cursor->number + 2) return LAYERS_RANGE_LONG;
    const layer_block_t *block =
        __atomic_load_n(row_set->blocks + cursor->number, __ATOMIC_ACQUIRE);
    if (block == NULL) return read_key(cursor, high, stop);
    uint32_t behind = block->keys.rows;
    status_t status = access_lower_bound(&block->keys, low.data, low.len, &cursor->row);
    if (status == STATUS_OK && end == cursor->number + 1 && high.data != NULL) {
        status = access_lower_bound(&block->keys, high.data, high.len, &behind);
    }
    if (status != STATUS_OK) {
        *stop = (layer_found_t){
            .state = LAYERS_CORRUPT, .step = cursor->step, .number = cursor->number};
        return LAYERS_RANGE_STOP;
    }
    if (merge->most >= LAYERS_FEW && behind > cursor->row + 4 * LAYERS_FEW) {
        return LAYERS_RANGE_LONG;
    }
    return read_key(cursor, high, stop);
}

static layers_range_status_t add_memory(merge_t *merge, const mem_row_set_t *memory, slice_t low,
                                        uint64_t after, uint64_t upto) {
    if (memory == NULL || mem_row_set_count(memory) == 0) return LAYERS_RANGE_OK;
    if (merge->n == LAYERS_CURSORS) return LAYERS_RANGE_LONG;
    cursor_t *cursor = merge->cursors + merge->n++;
    *cursor = (cursor_t){.memory = memory,
                         .range = {low.data, low.len, merge->high.data, merge->high.len, after,
                                   upto, 0}};
    next_in_memory(cursor);
    return LAYERS_RANGE_OK;
}

static layers_range_status_t add_steps(merge_t *merge, const layer_step_t *steps, uint32_t n,
                                       uint32_t first, slice_t low, layer_found_t *stop) {
    for (uint32_t i = 0; i < n; i++) {
        bool there = steps[i].row_set->tombstones != 0;
        for (uint32_t k = 0; k < merge->n; k++) {
            there |= merge->cursors[k].row_set == steps[i].row_set;
        }
        if (there) continue; /* what hides only, and what comes in several steps */
        if (merge->n == LAYERS_CURSORS) return LAYERS_RANGE_LONG;
        cursor_t *cursor = merge->cursors + merge->n++;
        *cursor = (cursor_t){.row_set = steps[i].row_set, .step = first + i};
        const layers_range_status_t status = open_row_set(cursor, low, merge, stop);
        if (status != LAYERS_RANGE_OK) return status;
    }
    return LAYERS_RANGE_OK;
}

static cursor_t *least(merge_t *merge) {
    cursor_t *found = NULL;
    for (uint32_t k = 0; k < merge->n; k++) {
        cursor_t *cursor = merge->cursors + k;
        if (cursor->over) continue;
        if (found == NULL || slice_compare(key_of(cursor), key_of(found)) < 0) found = cursor;
    }
    return found;
}

/* All cursors go beyond a key, which several of them may have, or one of them several times. */
static layers_range_status_t pass(merge_t *merge, slice_t key, layer_found_t *stop) {
    for (uint32_t k = 0; k < merge->n; k++) {
        cursor_t *cursor = merge->cursors + k;
        while (!cursor->over && slice_compare(key_of(cursor), key) == 0) {
            if (cursor->memory != NULL) {
                next_in_memory(cursor);
                continue;
            }
            cursor->row++;
            const layers_range_status_t status = read_key(cursor, merge->high, stop);
            if (status != LAYERS_RANGE_OK) return status;
        }
    }
    return LAYERS_RANGE_OK;
}

static layers_range_status_t open_all(merge_t *merge, const layers_t *layers,
                                      const mem_row_set_t *own, slice_t low, uint64_t snapshot,
                                      layer_found_t *stop) {
    layers_range_status_t status = add_memory(merge, own, low, 0, UINT64_MAX);
    if (status == LAYERS_RANGE_OK) {
        status = add_steps(merge, layers->staged, layers->staged_n, 0, low, stop);
    }
    if (status == LAYERS_RANGE_OK) {
        status = add_memory(merge, layers->memory, low, layers->flushed, snapshot);
    }
    if (status == LAYERS_RANGE_OK) {
        status = add_steps(merge, layers->steps, layers->steps_n, layers->staged_n, low, stop);
    }
    return status;
}

/* The next key was deleted: of the sources that have it this one is above, as `least` gives it. */
static bool is_gone(const cursor_t *cursor) {
    return cursor->memory != NULL && cursor->entry->row_len == UINT32_MAX;
}

/* Each key that is in one of the sources is looked for as a single one is, unless it is seen to be
 * gone. */
layers_range_status_t layers_range(const layers_t *layers, const mem_row_set_t *own,
                                   const uint8_t *low, size_t low_len, const uint8_t *high,
                                   size_t high_len, uint64_t snapshot, uint32_t most,
                                   layers_range_t *out) {
    const slice_t from = {low, low_len};
    merge_t merge = {.n = 0, .most = most, .high = {high, high_len}};
    out->n = out->ends[0] = 0;
    layers_range_status_t status = open_all(&merge, layers, own, from, snapshot, out->found);
    uint32_t looked = 0, gone = 0;
    for (const cursor_t *cursor;
         status == LAYERS_RANGE_OK && out->n < most && (cursor = least(&merge)) != NULL;) {
        const slice_t key = key_of(cursor);
        const uint32_t at = out->ends[out->n];
        if (is_gone(cursor)) {
            if (gone++ == MOST_GONE) return LAYERS_RANGE_LONG;
            status = pass(&merge, key, out->found + out->n);
            continue;
        }
        if (out->n == LAYERS_FEW - 1 || looked++ == 4 * LAYERS_FEW ||
            key.len > LAYERS_KEY_BYTES - at) {
            return LAYERS_RANGE_LONG;
        }
        copy_bytes(out->keys + at, key.data, key.len);
        const slice_t copy = {out->keys + at, key.len};
        layer_found_t *found = out->found + out->n;
        layers_find(layers, own, copy.data, copy.len, snapshot, found);
        if (found->state >= LAYERS_LOAD) return LAYERS_RANGE_STOP;
        if (found->state != LAYERS_ABSENT) out->ends[++out->n] = at + (uint32_t)copy.len;
        status = pass(&merge, copy, out->found + out->n);
    }
    return status;
}
