#include "tablet/gone.h"

#include <stdbool.h>

#include "codec/hash.h"
#include "codec/keys_inline.h"
#include "common/alloc.h"

enum { MOST_LOOKED = 4096 };

static bool take(gone_t *gone) {
    return __atomic_exchange_n(&gone->busy, 1, __ATOMIC_ACQUIRE) == 0;
}

static void give_back(gone_t *gone) { __atomic_store_n(&gone->busy, 0, __ATOMIC_RELEASE); }

static gone_range_t **place_of(gone_t *gone, slice_t low) {
    return gone->ranges + hash64(low.data, low.len) % GONE_RANGES;
}

/* The range in a place; NULL: no memory. */
static gone_range_t *made(gone_range_t **place) {
    gone_range_t *range = *place;
    if (range == NULL) {
        range = *place = alloc_array(1, sizeof *range);
        if (range != NULL) range->n = 0;
    }
    return range;
}

static gone_bound_t bound_of(slice_t key) {
    gone_bound_t bound = {.len = (uint32_t)key.len};
    copy_bytes(bound.data, key.data, key.len);
    return bound;
}

static int compare(slice_t key, const gone_bound_t *bound) {
    const slice_t other = {bound->data, bound->len};
    return bound->len == UINT32_MAX ? -1 : slice_compare(key, other);
}

static bool is_for(const gone_range_t *range, slice_t low) {
    return range != NULL && range->n != 0 && range->parts[0].low.len == low.len &&
           compare_bytes(range->parts[0].low.data, low.data, low.len) == 0;
}

/* How many bytes the bounds of a part have in common: the more, the fewer keys lie between. */
static uint32_t in_common(const gone_part_t *part) {
    uint32_t n = 0;
    if (part->end.len == UINT32_MAX) return 0;
    while (n < part->low.len && n < part->end.len && part->low.data[n] == part->end.data[n]) n++;
    return n;
}

static void remove_part(gone_range_t *range, uint32_t i) {
    range->n--;
    for (; i < range->n; i++) range->parts[i] = range->parts[i + 1];
}

/* Puts a part behind number i; where there are too many, the narrowest but the first goes. */
static void add_behind(gone_range_t *range, uint32_t i, gone_part_t part) {
    if (range->n == GONE_PARTS) {
        uint32_t narrow = 1;
        for (uint32_t k = 2; k < range->n; k++) {
            if (in_common(range->parts + k) > in_common(range->parts + narrow)) narrow = k;
        }
        if (in_common(&part) >= in_common(range->parts + narrow)) return;
        remove_part(range, narrow);
        if (narrow <= i) i--;
    }
    for (uint32_t k = range->n++; k > i + 1; k--) range->parts[k] = range->parts[k - 1];
    range->parts[i + 1] = part;
}

/* A row has this key: the part that it lies in ends there, and another begins behind it. */
static void cut(gone_range_t *range, slice_t key) {
    for (uint32_t i = 0; i < range->n; i++) {
        gone_part_t *part = range->parts + i;
        if (part->low.len != 0 && compare(key, &part->low) < (i == 0 ? 0 : 1)) return;
        if (compare(key, &part->end) >= 0) continue;
        if (key.len > GONE_KEY_BYTES) {
            range->n = i;
            return;
        }
        const gone_part_t rest = {bound_of(key), part->end};
        part->end = rest.low;
        add_behind(range, i, rest);
        return;
    }
}

/* Sees what was put since. */
static void renew(gone_range_t *range, const mem_row_set_t *memory) {
    const mem_entry_t *newest = mem_row_set_newest(memory);
    uint32_t looked = 0;
    for (const mem_entry_t *entry = newest; entry != range->newest && range->n != 0;
         entry = mem_row_set_older(entry)) {
        const slice_t key = {entry->row - entry->key_len, entry->key_len};
        cut(range, key);
        if (looked++ == MOST_LOOKED) range->n = 0;
    }
    range->newest = newest;
}

void gone_find(gone_t *gone, const mem_row_set_t *memory, const uint8_t *low, size_t low_len,
               uint64_t snapshot, gone_range_t *out) {
    const slice_t from = {low, low_len};
    out->n = 0;
    out->newest = mem_row_set_newest(memory);
    if (low_len > GONE_KEY_BYTES || !take(gone)) return;
    gone_range_t *range = *place_of(gone, from);
    if (is_for(range, from) && range->stamp <= snapshot) {
        renew(range, memory);
        out->n = range->n;
        out->newest = range->newest;
        for (uint32_t i = 0; i < range->n; i++) out->parts[i] = range->parts[i];
    }
    give_back(gone);
}

void gone_note(gone_t *gone, const gone_range_t *found, const uint8_t *low, size_t low_len,
               const uint8_t *end, size_t end_len, uint64_t snapshot) {
    const slice_t from = {low, low_len}, to = {end, end_len};
    if (low_len > GONE_KEY_BYTES || (end != NULL && end_len > GONE_KEY_BYTES)) return;
    if (!take(gone)) return;
    gone_range_t *range = made(place_of(gone, from));
    if (range == NULL) {
        give_back(gone);
        return;
    }
    gone_part_t first = {bound_of(from), {.len = UINT32_MAX}};
    if (end != NULL) first.end = bound_of(to);
    const bool known = is_for(range, from);
    if (!known || range->stamp <= snapshot) { /* a later one knows better */
        uint32_t n = 1;
        /* What others have looked at since may be known of another state. */
        for (uint32_t i = 1; known && range->newest == found->newest && i < range->n; i++) {
            const gone_bound_t *next = &range->parts[i].low;
            const slice_t key = {next->data, next->len};
            if (compare(key, &first.end) >= 0) range->parts[n++] = range->parts[i];
        }
        range->parts[0] = first;
        range->n = n;
        range->stamp = snapshot;
        range->newest = found->newest;
    }
    give_back(gone);
}

void gone_clear(gone_t *gone) {
    for (uint32_t i = 0; i < GONE_RANGES; i++) {
        alloc_free(gone->ranges[i]);
        gone->ranges[i] = NULL;
    }
}
