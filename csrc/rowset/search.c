#include "rowset/search.h"

#include "common/check.h"
#include "rowset/search_inline.h"

uint32_t search_lower_bound(const keys_t *keys, const uint8_t *key, size_t key_len) {
    const slice_t probe = {key, key_len};
    if (keys->width == 8 && key_len == 8) {
        return search_range_8(keys->data, load_be64(key), 0, keys->n);
    }
    return search_range(keys, probe, 0, keys->n);
}

int64_t search_find(const keys_t *keys, const uint8_t *key, size_t key_len) {
    const slice_t probe = {key, key_len};
    const uint32_t at = search_lower_bound(keys, key, key_len);
    return at < keys->n && slice_compare(keys_at(keys, at), probe) == 0 ? (int64_t)at : -1;
}

static void batch_8(const keys_t *keys, const keys_t *probes, int32_t *out) {
    uint64_t last = 0;
    uint32_t at = 0;
    for (uint32_t i = 0; i < probes->n; i++) {
        const uint64_t probe = load_be64(probes->data + 8 * (size_t)i);
        at = i != 0 && probe >= last ? search_gallop_8(keys->data, probe, at, keys->n)
                                     : search_range_8(keys->data, probe, 0, keys->n);
        const int found = at < keys->n && load_be64(keys->data + 8 * (size_t)at) == probe;
        out[i] = found ? (int32_t)at : -1;
        last = probe;
    }
}

void search_batch(const keys_t *keys, const keys_t *probes, int32_t *out_positions) {
    CHECK(keys->n <= INT32_MAX);
    if (keys->width == 8 && probes->width == 8) {
        batch_8(keys, probes, out_positions);
        return;
    }
    slice_t last = {NULL, 0};
    uint32_t at = 0;
    for (uint32_t i = 0; i < probes->n; i++) {
        const slice_t probe = keys_at(probes, i);
        at = i != 0 && slice_compare(last, probe) <= 0 ? search_gallop(keys, probe, at)
                                                       : search_range(keys, probe, 0, keys->n);
        const int found = at < keys->n && slice_compare(keys_at(keys, at), probe) == 0;
        out_positions[i] = found ? (int32_t)at : -1;
        last = probe;
    }
}
