/* Short ranges: the sources of a tablet side by side by their keys. */
#include "codec/keys_inline.h"
#include "rowset/access.h"
#include "rowset/search.h"
#include "tablet/layers.h"

#include <stdbool.h>

enum { MOST_GONE = 32 * LAYERS_FEW, NOTED_GONE = 64 };

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
    slice_t low;
    slice_t high;
    bool descending;
    bool own_alone; /* of what is committed, nothing is left */
} merge_t;

static bool is_below(slice_t key, slice_t high) {
    return high.data == NULL || slice_compare(key, high) < 0;
}

static bool is_under(slice_t key, slice_t low) {
    return low.len != 0 && slice_compare(key, low) < 0;
}

static slice_t key_of(const cursor_t *cursor) {
    const slice_t key = {cursor->key.data, cursor->key.len};
    return key;
}

/* The newest entry of the next key; of an ascending merge it goes on from the `last` one. */
static layers_range_status_t next_in_memory(cursor_t *cursor, bool descending) {
    if (descending) {
        const status_t status = mem_row_set_last(cursor->memory, &cursor->range, &cursor->entry);
        if (status != STATUS_OK) return LAYERS_RANGE_LONG;
        cursor->over = cursor->entry == NULL;
    } else {
        cursor->over = mem_row_set_select(cursor->memory, &cursor->range, &cursor->last, 1,
                                          &cursor->entry) == 0;
    }
    if (cursor->over) return LAYERS_RANGE_OK;
    cursor->key.data = cursor->entry->row - cursor->entry->key_len;
    cursor->key.len = cursor->entry->key_len;
    if (descending) {
        cursor->range.high = cursor->key.data;
        cursor->range.high_len = cursor->key.len;
    }
    return LAYERS_RANGE_OK;
}

/* The block of a cursor; NULL, and the place in `stop`: it is to be loaded. */
static const layer_block_t *block_at(const cursor_t *cursor, layer_found_t *stop) {
    const layer_block_t *block =
        __atomic_load_n(cursor->row_set->blocks + cursor->number, __ATOMIC_ACQUIRE);
    stop->step = cursor->step;
    stop->number = cursor->number;
    stop->state = block == NULL ? LAYERS_LOAD : LAYERS_CORRUPT;
    return block;
}

/* Reads the key at the cursor's place, or at the beginning of the block behind. */
static layers_range_status_t read_key(cursor_t *cursor, slice_t high, layer_found_t *stop) {
    const layer_row_set_t *row_set = cursor->row_set;
    for (; cursor->number < row_set->lasts.n; cursor->number++, cursor->row = 0) {
        if (!is_below(keys_at(&row_set->firsts, cursor->number), high)) break;
        const layer_block_t *block = block_at(cursor, stop);
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

/* Reads the key of the row before the cursor's, or of the last one of the block before. */
static layers_range_status_t read_key_before(cursor_t *cursor, slice_t low, layer_found_t *stop) {
    const layer_row_set_t *row_set = cursor->row_set;
    for (;;) {
        if (cursor->row == 0) {
            cursor->over = cursor->number == 0 ||
                           is_under(keys_at(&row_set->lasts, cursor->number - 1), low);
            if (cursor->over) return LAYERS_RANGE_OK;
            cursor->number--;
            cursor->row = UINT32_MAX;
        }
        const layer_block_t *block = block_at(cursor, stop);
        if (block == NULL) return LAYERS_RANGE_STOP;
        if (cursor->row > block->keys.rows) cursor->row = block->keys.rows;
        if (cursor->row == 0) continue;
        cursor->row--;
        if (access_value(&block->keys, cursor->row, &cursor->key) != STATUS_OK) {
            return LAYERS_RANGE_STOP;
        }
        cursor->over = is_under(key_of(cursor), low);
        return LAYERS_RANGE_OK;
    }
}

static layers_range_status_t next_key(cursor_t *cursor, const merge_t *merge, layer_found_t *stop) {
    if (merge->descending) return read_key_before(cursor, merge->low, stop);
    return read_key(cursor, merge->high, stop);
}

/* Moves to the first row of the range, and sees whether a block alone has too many. */
static layers_range_status_t open_row_set(cursor_t *cursor, slice_t low, const merge_t *merge,
                                          layer_found_t *stop) {
    const layer_row_set_t *row_set = cursor->row_set;
    const slice_t high = merge->high;
    const uint32_t start = search_lower_bound(&row_set->lasts, low.data, low.len);
    uint32_t end = row_set->lasts.n;
    if (high.data != NULL) end = search_lower_bound(&row_set->firsts, high.data, high.len);
    if (start >= end) {
        cursor->over = true;
        return LAYERS_RANGE_OK;
    }
    if (merge->most >= LAYERS_FEW && end > start + 2) return LAYERS_RANGE_LONG;
    cursor->number = merge->descending ? end - 1 : start;
    const layer_block_t *block = block_at(cursor, stop);
    if (block == NULL) return LAYERS_RANGE_STOP;
    uint32_t from = 0, behind = block->keys.rows;
    status_t status = STATUS_OK;
    if (cursor->number == start) {
        status = access_lower_bound(&block->keys, low.data, low.len, &from);
    }
    if (status == STATUS_OK && cursor->number + 1 == end && high.data != NULL) {
        status = access_lower_bound(&block->keys, high.data, high.len, &behind);
    }
    if (status != STATUS_OK) return LAYERS_RANGE_STOP;
    if (merge->most >= LAYERS_FEW && behind > from + 4 * LAYERS_FEW) return LAYERS_RANGE_LONG;
    cursor->row = merge->descending ? behind : from;
    return next_key(cursor, merge, stop);
}

static layers_range_status_t add_memory(merge_t *merge, const mem_row_set_t *memory, slice_t low,
                                        uint64_t after, uint64_t upto) {
    if (memory == NULL || mem_row_set_count(memory) == 0) return LAYERS_RANGE_OK;
    if (merge->n == LAYERS_CURSORS) return LAYERS_RANGE_LONG;
    cursor_t *cursor = merge->cursors + merge->n++;
    *cursor = (cursor_t){.memory = memory,
                         .range = {low.data, low.len, merge->high.data, merge->high.len, after,
                                   upto, 0}};
    return next_in_memory(cursor, merge->descending);
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

/* The cursor with the key that comes next, of several with it the uppermost; NULL: none does. */
static cursor_t *foremost(merge_t *merge) {
    cursor_t *found = NULL;
    for (uint32_t k = 0; k < merge->n; k++) {
        cursor_t *cursor = merge->cursors + k;
        if (cursor->over) continue;
        const int order = found == NULL ? -1 : slice_compare(key_of(cursor), key_of(found));
        if (found == NULL || (merge->descending ? order > 0 : order < 0)) found = cursor;
    }
    return found;
}

/* All cursors go beyond a key, which several of them may have, or one of them several times. */
static layers_range_status_t pass(merge_t *merge, slice_t key, layer_found_t *stop) {
    for (uint32_t k = 0; k < merge->n; k++) {
        cursor_t *cursor = merge->cursors + k;
        while (!cursor->over && slice_compare(key_of(cursor), key) == 0) {
            if (cursor->memory == NULL && !merge->descending) cursor->row++;
            const layers_range_status_t status = cursor->memory != NULL
                                                     ? next_in_memory(cursor, merge->descending)
                                                     : next_key(cursor, merge, stop);
            if (status != LAYERS_RANGE_OK) return status;
        }
    }
    return LAYERS_RANGE_OK;
}

/* What is committed is looked for from `committed` on, where all below is known to be gone. */
static layers_range_status_t open_all(merge_t *merge, const layers_t *layers,
                                      const mem_row_set_t *own, slice_t low, slice_t committed,
                                      uint64_t snapshot, layer_found_t *stop) {
    layers_range_status_t status = add_memory(merge, own, low, 0, UINT64_MAX);
    if (status == LAYERS_RANGE_OK) {
        status = add_steps(merge, layers->staged, layers->staged_n, 0, low, stop);
    }
    if (status != LAYERS_RANGE_OK || merge->own_alone) return status;
    status = add_memory(merge, layers->memory, committed, layers->flushed, snapshot);
    if (status == LAYERS_RANGE_OK) {
        status = add_steps(merge, layers->steps, layers->steps_n, layers->staged_n, committed,
                           stop);
    }
    return status;
}

/* The next key was deleted: of the sources that have it this one is above, as `foremost` gives it. */
static bool is_gone(const cursor_t *cursor) {
    return cursor->memory != NULL && cursor->entry->row_len == UINT32_MAX;
}

typedef struct {
    const layers_t *layers;
    const mem_row_set_t *own;
    uint64_t snapshot;
    merge_t *merge;
    uint32_t looked;
    uint32_t gone;
    slice_t reached; /* no row was found below; data NULL: nor behind */
    gone_range_t known;
    uint32_t part; /* of those the next */
} walk_t;

static slice_t slice_of(const gone_bound_t *bound) {
    const slice_t none = {NULL, 0}, slice = {bound->data, bound->len};
    return bound->len == UINT32_MAX ? none : slice;
}

/* What is committed goes on behind the next part that is gone. */
static layers_range_status_t leap(walk_t *walk, slice_t key, layer_found_t *stop) {
    merge_t *merge = walk->merge;
    const slice_t end = slice_of(&walk->known.parts[walk->part++].end);
    if (!is_below(key, end)) return LAYERS_RANGE_OK;
    for (uint32_t k = 0; k < merge->n; k++) {
        cursor_t *cursor = merge->cursors + k;
        if (cursor->memory != NULL && cursor->memory == walk->own) continue;
        cursor->over = cursor->over || end.data == NULL;
        if (cursor->over) continue;
        cursor->range.low = end.data;
        cursor->range.low_len = end.len;
        cursor->last = NULL;
        const layers_range_status_t status = cursor->memory != NULL
                                                 ? next_in_memory(cursor, false)
                                                 : open_row_set(cursor, end, merge, stop);
        if (status != LAYERS_RANGE_OK) return status;
    }
    return LAYERS_RANGE_OK;
}

/* Each key that is in one of the sources is looked for as a single one is, unless it is seen to be
 * gone. */
static layers_range_status_t find_rows(walk_t *walk, layers_range_t *out) {
    merge_t *merge = walk->merge;
    layers_range_status_t status = LAYERS_RANGE_OK;
    while (status == LAYERS_RANGE_OK && out->n < merge->most) {
        const cursor_t *cursor = foremost(merge);
        if (out->n == 0) walk->reached = cursor == NULL ? merge->high : key_of(cursor);
        if (cursor == NULL) break;
        const slice_t key = key_of(cursor);
        if (walk->part < walk->known.n &&
            slice_compare(key, slice_of(&walk->known.parts[walk->part].low)) > 0) {
            status = leap(walk, key, out->found + out->n);
            continue;
        }
        const uint32_t at = out->ends[out->n];
        if (is_gone(cursor)) {
            if (walk->gone++ == MOST_GONE) return LAYERS_RANGE_LONG;
            status = pass(merge, key, out->found + out->n);
            continue;
        }
        if (out->n == LAYERS_FEW - 1 || walk->looked++ == 4 * LAYERS_FEW ||
            key.len > LAYERS_KEY_BYTES - at) {
            return LAYERS_RANGE_LONG;
        }
        copy_bytes(out->keys + at, key.data, key.len);
        const slice_t copy = {out->keys + at, key.len};
        if (out->n == 0) walk->reached = copy;
        layer_found_t *found = out->found + out->n;
        const layer_row_set_t *row_set = cursor->row_set;
        const layer_place_t place = {row_set, cursor->number, cursor->row};
        /* From behind, the oldest version of a key comes first. */
        const bool placed = row_set != NULL && !(merge->descending && row_set->versioned != 0);
        layers_find_at(walk->layers, walk->own, copy.data, copy.len, walk->snapshot,
                       placed ? &place : NULL, found);
        if (found->state >= LAYERS_LOAD) return LAYERS_RANGE_STOP;
        if (found->state != LAYERS_ABSENT) out->ends[++out->n] = at + (uint32_t)copy.len;
        status = pass(merge, copy, out->found + out->n);
    }
    return status;
}

/* Whether all that is committed here is below a snapshot, so that what it does not see nobody will.
 * Own writes, which may come meanwhile, hide rows from their transaction alone. */
static bool sees_all(const layers_t *layers, const mem_row_set_t *own, uint64_t snapshot) {
    if (own != NULL) return false;
    if (mem_row_set_max_stamp(layers->memory) > snapshot) return false;
    for (uint32_t i = 0; i < layers->steps_n; i++) {
        if (layers->steps[i].row_set->stamp > snapshot) return false;
    }
    return true;
}

layers_range_status_t layers_range(const layers_t *layers, const mem_row_set_t *own,
                                   const uint8_t *low, size_t low_len, const uint8_t *high,
                                   size_t high_len, uint64_t snapshot, uint32_t most,
                                   uint32_t descending, layers_range_t *out) {
    const slice_t from = {low, low_len};
    merge_t merge = {.n = 0,
                     .most = most,
                     .low = from,
                     .high = {high, high_len},
                     .descending = descending != 0};
    walk_t walk = {.layers = layers,
                   .own = own,
                   .snapshot = snapshot,
                   .merge = &merge,
                   .reached = from,
                   .part = 1};
    slice_t committed = from;
    bool notes = layers->gone != NULL && layers->staged_n == 0 && !merge.descending;
    out->n = out->ends[0] = 0;
    if (notes) {
        gone_find(layers->gone, layers->memory, low, low_len, snapshot, &walk.known);
        if (walk.known.n != 0) {
            committed = slice_of(&walk.known.parts[0].end);
            merge.own_alone = committed.data == NULL;
        }
        notes = sees_all(layers, own, snapshot);
    }
    layers_range_status_t status =
        open_all(&merge, layers, own, from, committed, snapshot, out->found);
    if (status != LAYERS_RANGE_OK) return status;
    status = find_rows(&walk, out);
    const bool leapt = walk.part > 1 && status == LAYERS_RANGE_OK;
    if (notes && (leapt || walk.gone + walk.looked - out->n >= NOTED_GONE)) {
        gone_note(layers->gone, &walk.known, low, low_len, walk.reached.data, walk.reached.len,
                  snapshot);
    }
    return status;
}
