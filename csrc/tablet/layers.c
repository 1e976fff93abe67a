#include "tablet/layers.h"

#include "codec/keys_inline.h"
#include "common/bits.h"
#include "common/check.h"
#include "rowset/access.h"
#include "rowset/bloom.h"
#include "rowset/search.h"

#include <stdbool.h>

/* The first 8 bytes of a key as a number; of a shorter key as if it went on with zeros. */
static uint64_t beginning_of(slice_t key) {
    uint8_t bytes[8] = {0};
    if (key.len >= 8) return load_be64(key.data);
    copy_bytes(bytes, key.data, key.len);
    return load_be64(bytes);
}

void layers_init_row_set(layer_row_set_t *row_set) {
    const uint32_t n = row_set->lasts.n;
    CHECK(n == row_set->firsts.n);
    row_set->low = n == 0 ? UINT64_MAX : beginning_of(keys_at(&row_set->firsts, 0));
    row_set->high = n == 0 ? 0 : beginning_of(keys_at(&row_set->lasts, n - 1));
}

void layers_set_block(layer_row_set_t *row_set, uint32_t number, const layer_block_t *block) {
    CHECK(number < row_set->lasts.n);
    __atomic_store_n(row_set->blocks + number, block, __ATOMIC_RELEASE);
}

/* -- one row set -------------------------------------------------------------------------- */

/* What a row set says of a key: it has no version, none that is seen, or one that is. */
typedef enum { NOT_THERE, UNSEEN, SEEN, STOPPED } version_t;

static bool filter_has(const block_t *filter, const uint8_t *key, size_t key_len) {
    if (filter->kind != BLOCK_OPAQUE || filter->data_len == 0 || filter->data_len % 32 != 0) {
        return true; /* there is none, or it is damaged: the keys say */
    }
    return bloom_probe(filter->data, filter->data_len, key, key_len) != 0;
}

/* The rows [lo, hi) of a block that have the key; the first of them is `row`, where that is not
 * negative. */
static status_t rows_of(const layer_row_set_t *row_set, const block_t *keys, const uint8_t *key,
                        size_t key_len, int64_t row, uint32_t *lo, uint32_t *hi) {
    status_t status = row < 0 ? access_find(keys, key, key_len, &row) : STATUS_OK;
    *lo = *hi = 0;
    if (status != STATUS_OK || row < 0) return status;
    *lo = (uint32_t)row;
    *hi = *lo + 1;
    for (uint32_t n = row_set->versioned != 0 ? keys->rows - *hi : 0; n > 0;) {
        int order;
        status = access_compare(keys, *hi + n / 2, key, key_len, &order);
        if (status != STATUS_OK) return status;
        *hi += order == 0 ? n / 2 + 1 : 0;
        n = order == 0 ? n - n / 2 - 1 : n / 2;
    }
    return STATUS_OK;
}

static status_t stamp_at(const layer_row_set_t *row_set, const layer_block_t *block, uint32_t row,
                         uint64_t *out) {
    access_value_t value;
    *out = row_set->stamp;
    if (block->inserts.rows == 0) return STATUS_OK;
    const status_t status = access_value(&block->inserts, row, &value);
    if (status != STATUS_OK) return status;
    if (value.len != 8 || value.is_null != 0) return STATUS_CORRUPT;
    *out = load_le64(value.data);
    return STATUS_OK;
}

/* Of the versions [lo, hi) of a key, newest first, the first at or below the snapshot; hi: none. */
static status_t newest_of(const layer_row_set_t *row_set, const layer_block_t *block, uint32_t lo,
                          uint32_t hi, uint64_t snapshot, uint32_t *out) {
    while (lo < hi && row_set->stamp > snapshot) {
        const uint32_t mid = lo + (hi - lo) / 2;
        uint64_t stamp;
        const status_t status = stamp_at(row_set, block, mid, &stamp);
        if (status != STATUS_OK) return status;
        lo = stamp > snapshot ? mid + 1 : lo;
        hi = stamp > snapshot ? hi : mid;
    }
    *out = lo;
    return STATUS_OK;
}

static bool is_deleted(const delta_t *deletes, uint32_t row, uint64_t snapshot) {
    uint32_t lo = 0, hi = deletes->n;
    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;
        const bool below = load_le32(deletes->rows + 4 * (size_t)mid) < row;
        lo = below ? mid + 1 : lo;
        hi = below ? hi : mid;
    }
    if (lo == deletes->n || load_le32(deletes->rows + 4 * (size_t)lo) != row) return false;
    return load_le64(deletes->stamps + 8 * (size_t)lo) <= snapshot;
}

static version_t stopped(layer_found_t *out, uint32_t number, layers_state_t state) {
    out->number = number;
    out->state = (uint32_t)state;
    return STOPPED;
}

static bool begins_by(const keys_t *firsts, uint32_t number, slice_t key) {
    return number < firsts->n && slice_compare(keys_at(firsts, number), key) <= 0;
}

/* The version of a key that a snapshot sees, and its insert stamp. Versions go over from one block
 * into the next; when the newest at or below the snapshot is dead, all before are. */
static version_t version_of(const layer_row_set_t *row_set, slice_t key, uint64_t snapshot,
                            bool filtered, const layer_place_t *place, layer_found_t *out,
                            uint64_t *out_stamp) {
    version_t version = NOT_THERE;
    int64_t known = -1;
    uint32_t number;
    if (place != NULL && place->row_set == row_set) {
        number = place->number;
        known = place->row;
    } else {
        number = search_lower_bound(&row_set->lasts, key.data, key.len);
    }
    for (; begins_by(&row_set->firsts, number, key); number++, known = -1) {
        const layer_block_t *block = __atomic_load_n(row_set->blocks + number, __ATOMIC_ACQUIRE);
        uint32_t lo, hi, row;
        if (block == NULL) return stopped(out, number, LAYERS_LOAD);
        if (filtered && known < 0 && !filter_has(&block->filter, key.data, key.len)) continue;
        if (rows_of(row_set, &block->keys, key.data, key.len, known, &lo, &hi) != STATUS_OK ||
            newest_of(row_set, block, lo, hi, snapshot, &row) != STATUS_OK) {
            return stopped(out, number, LAYERS_CORRUPT);
        }
        if (lo < hi) version = UNSEEN;
        if (row == hi) continue;
        out->block = block;
        out->number = number;
        out->row = row;
        if (stamp_at(row_set, block, row, out_stamp) != STATUS_OK) {
            return stopped(out, number, LAYERS_CORRUPT);
        }
        const bool own = row_set->stamp == 0;
        return own || !is_deleted(&block->deletes, row, snapshot) ? SEEN : UNSEEN;
    }
    return version;
}

/* -- all of them -------------------------------------------------------------------------- */

static bool is_asked(const layer_step_t *step, slice_t key, uint64_t snapshot) {
    const layer_row_set_t *row_set = step->row_set;
    const uint64_t number = beginning_of(key);
    if (number < row_set->low || number > row_set->high) return false;
    const keys_t *firsts = &row_set->firsts, *lasts = &row_set->lasts;
    if (row_set->first_stamp > snapshot) return false;
    return slice_compare(keys_at(firsts, 0), key) <= 0 &&
           slice_compare(keys_at(lasts, lasts->n - 1), key) >= 0;
}

/* The first step in [from, n) that may have the key, else n. */
static uint32_t next_asked(const layer_step_t *steps, uint32_t from, uint32_t n, slice_t key,
                           uint64_t snapshot) {
    while (from < n && !is_asked(steps + from, key, snapshot)) from++;
    return from;
}

int layers_meet(const layers_t *layers, const uint8_t *key, size_t key_len, uint64_t snapshot) {
    const slice_t bytes = {key, key_len};
    const uint32_t staged_n = layers->staged_n, steps_n = layers->steps_n;
    return next_asked(layers->staged, 0, staged_n, bytes, snapshot) < staged_n ||
           next_asked(layers->steps, 0, steps_n, bytes, snapshot) < steps_n;
}

/* Looks in the steps by turns; whether one of them has decided. In the last that may have it, with
 * `more` steps or none behind these, the key most likely is: its filter is not asked. */
static bool walk(const layer_step_t *steps, uint32_t n, uint32_t first, bool more, slice_t key,
                 uint64_t snapshot, const layer_place_t *place, layer_found_t *out) {
    uint32_t i = next_asked(steps, 0, n, key, snapshot);
    for (uint32_t next; i < n; i = next) {
        const layer_step_t *step = steps + i;
        next = next_asked(steps, i + 1, n, key, snapshot);
        uint64_t stamp = 0;
        const version_t version =
            version_of(step->row_set, key, snapshot, more || next < n, place, out, &stamp);
        out->step = first + i;
        if (version == STOPPED) return true;
        if (version == SEEN && step->row_set->tombstones == 0 && stamp >= step->before) {
            out->state = LAYERS_BLOCK;
            return true;
        }
        if (version != NOT_THERE && step->hides != 0) return true;
    }
    return false;
}

static bool in_memory(const mem_row_set_t *memory, slice_t key, uint64_t after, uint64_t upto,
                      layers_state_t state, layer_found_t *out) {
    if (memory == NULL) return false;
    out->entry = mem_row_set_get(memory, key.data, key.len, after, upto);
    if (out->entry == NULL) return false;
    if (out->entry->row_len != UINT32_MAX) out->state = (uint32_t)state;
    return true;
}

uint32_t layers_find_memory(const layers_t *layers, const mem_row_set_t *own, const uint8_t *key,
                            size_t key_len, uint64_t snapshot, layer_found_t *out) {
    const slice_t bytes = {key, key_len};
    *out = (layer_found_t){.state = LAYERS_ABSENT};
    if (!in_memory(own, bytes, 0, UINT64_MAX, LAYERS_OWN, out)) {
        in_memory(layers->memory, bytes, layers->flushed, snapshot, LAYERS_MEMORY, out);
    }
    return out->state;
}

uint32_t layers_find_at(const layers_t *layers, const mem_row_set_t *own, const uint8_t *key,
                        size_t key_len, uint64_t snapshot, const layer_place_t *place,
                        layer_found_t *out) {
    const slice_t bytes = {key, key_len};
    *out = (layer_found_t){.state = LAYERS_ABSENT};
    if (in_memory(own, bytes, 0, UINT64_MAX, LAYERS_OWN, out)) return out->state;
    const bool more = layers->steps_n != 0;
    if (walk(layers->staged, layers->staged_n, 0, more, bytes, snapshot, place, out)) {
        return out->state;
    }
    if (in_memory(layers->memory, bytes, layers->flushed, snapshot, LAYERS_MEMORY, out)) {
        return out->state;
    }
    walk(layers->steps, layers->steps_n, layers->staged_n, false, bytes, snapshot, place, out);
    return out->state;
}

uint32_t layers_find(const layers_t *layers, const mem_row_set_t *own, const uint8_t *key,
                     size_t key_len, uint64_t snapshot, layer_found_t *out) {
    return layers_find_at(layers, own, key, key_len, snapshot, NULL, out);
}

enum { TOGETHER = 16 };

/* Asks for the memory in which numbers of 8 bytes are searched first, if they are evenly spread:
 * the next key's is on its way while one is looked for. */
static void prefetch_number(const layer_row_set_t *row_set, slice_t key) {
    if (key.len != 8 || row_set->lasts.width != 8) return;
    const uint32_t number = search_lower_bound(&row_set->lasts, key.data, 8);
    if (!begins_by(&row_set->firsts, number, key)) return;
    const layer_block_t *block = __atomic_load_n(row_set->blocks + number, __ATOMIC_ACQUIRE);
    if (block == NULL || block->keys.encoding != BLOCK_PLAIN) return;
    const uint64_t first = keys_number(row_set->firsts.data, 8, number);
    const uint64_t last = keys_number(row_set->lasts.data, 8, number);
    const double share = (double)(load_be64(key.data) - first) / ((double)(last - first) + 1);
    __builtin_prefetch(block->keys.data + (size_t)(share * (double)block->keys.data_len));
}

static slice_t asked_key(const keys_t *keys, const uint32_t *rows, uint32_t i) {
    return keys_at(keys, rows == NULL ? i : rows[i]);
}

uint32_t layers_find_many(const layers_t *layers, const mem_row_set_t *own, const keys_t *keys,
                          const uint32_t *rows, uint32_t from, uint32_t n, uint64_t snapshot,
                          layer_found_t *out) {
    for (uint32_t i = from; i < n; i++) {
        for (uint32_t k = i; (i - from) % TOGETHER == 0 && k < n && k < i + TOGETHER; k++) {
            if (layers->steps_n == 0) break;
            prefetch_number(layers->steps->row_set, asked_key(keys, rows, k));
        }
        const slice_t key = asked_key(keys, rows, i);
        if (layers_find(layers, own, key.data, key.len, snapshot, out + i) >= LAYERS_LOAD) return i;
    }
    return n;
}

uint32_t layers_present(const layer_found_t *found, uint32_t n, uint8_t *out_bits) {
    uint32_t count = 0;
    if (n != 0) memset(out_bits, 0, bits_bytes(n));
    for (uint32_t i = 0; i < n; i++) {
        const bool there = found[i].state != LAYERS_ABSENT;
        bits_or(out_bits, i, there);
        count += there;
    }
    return count;
}
