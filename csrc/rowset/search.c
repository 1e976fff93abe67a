#include "rowset/search.h"

#include "common/check.h"
#include "rowset/search_inline.h"

#include <stdbool.h>

enum { FEW = 16 }; /* one probe for this many keys, or fewer */

uint32_t search_lower_bound(const keys_t *keys, const uint8_t *key, size_t key_len) {
    const slice_t probe = {key, key_len};
    if (keys->width == 8 && key_len == 8) {
        return search_range_number(keys->data, 8, load_be64(key), 0, keys->n);
    }
    if (keys->width == 4 && key_len == 4) {
        return search_range_number(keys->data, 4, load_be32(key), 0, keys->n);
    }
    return search_range(keys, probe, 0, keys->n);
}

static bool probes_ascending(const keys_t *probes) {
    for (uint32_t i = 1; i < probes->n; i++) {
        if (slice_compare(keys_at(probes, i - 1), keys_at(probes, i)) > 0) return false;
    }
    return true;
}

static inline bool numbers_ascending(const keys_t *probes, uint32_t width) {
    uint32_t falls = 0;
    for (size_t i = 1; i < probes->n; i++) {
        falls |= keys_number(probes->data, width, i - 1) > keys_number(probes->data, width, i);
    }
    return falls == 0;
}

/* `width` is a constant at each call. Few probes are guessed, from the one before on: a gallop
 * to them would be longer. */
static inline void batch_numbers(const keys_t *keys, const keys_t *probes, uint32_t width,
                                 int32_t *out) {
    const bool ascending = probes->n > 1 && numbers_ascending(probes, width);
    const bool few = probes->n < keys->n / FEW;
    uint32_t at = 0;
    for (size_t i = 0; i < probes->n; i++) {
        const uint64_t probe = keys_number(probes->data, width, i);
        if (few) {
            at = search_guess_number(keys->data, width, probe, ascending ? at : 0, keys->n);
        } else if (ascending) {
            at = search_gallop_number(keys->data, width, probe, at, keys->n);
        } else {
            at = search_range_number(keys->data, width, probe, 0, keys->n);
        }
        const bool found = at < keys->n && keys_number(keys->data, width, at) == probe;
        out[i] = found ? (int32_t)at : -1;
    }
}

static void batch_any(const keys_t *keys, const keys_t *probes, int32_t *out) {
    const bool ascending = probes->n > 1 && probes_ascending(probes);
    uint32_t at = 0;
    for (uint32_t i = 0; i < probes->n; i++) {
        const slice_t probe = keys_at(probes, i);
        at = ascending ? search_gallop(keys, probe, at) : search_range(keys, probe, 0, keys->n);
        const bool found = at < keys->n && slice_compare(keys_at(keys, at), probe) == 0;
        out[i] = found ? (int32_t)at : -1;
    }
}

void search_batch(const keys_t *keys, const keys_t *probes, int32_t *out_positions) {
    CHECK(keys->n <= INT32_MAX);
    if (!keys_are_numbers(keys, probes)) {
        batch_any(keys, probes, out_positions);
    } else if (keys->width == 8) {
        batch_numbers(keys, probes, 8, out_positions);
    } else {
        batch_numbers(keys, probes, 4, out_positions);
    }
}
