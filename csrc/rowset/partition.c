#include "rowset/partition.h"

#include "codec/hash.h"
#include "codec/hash_inline.h"
#include "common/check.h"
#include "rowset/search.h"
#include "rowset/search_inline.h"

static uint16_t bucket_of(uint64_t hash, uint32_t buckets) {
    const uint64_t mixed = hash * UINT64_C(0x9E3779B97F4A7C15);
    return (uint16_t)((mixed >> 32) * buckets >> 32);
}

void partition_hash(const keys_t *keys, uint32_t buckets, uint16_t *out) {
    CHECK(buckets >= 1 && buckets <= 65536);
    if (keys->width == 8) {
        for (size_t i = 0; i < keys->n; i++) {
            out[i] = bucket_of(hash_8_bytes(load_le64(keys->data + 8 * i)), buckets);
        }
        return;
    }
    for (uint32_t i = 0; i < keys->n; i++) {
        const slice_t key = keys_at(keys, i);
        out[i] = bucket_of(hash64(key.data, key.len), buckets);
    }
}

/* The first bound above the key is the upper bound: step over an equal one. */
void partition_range(const keys_t *keys, const keys_t *bounds, uint16_t *out) {
    CHECK(bounds->n <= UINT16_MAX);
    for (uint32_t i = 0; i < keys->n; i++) {
        const slice_t key = keys_at(keys, i);
        uint32_t at = search_lower_bound(bounds, key.data, key.len);
        while (at < bounds->n && slice_compare(keys_at(bounds, at), key) == 0) at++;
        out[i] = (uint16_t)at;
    }
}

status_t partition_scatter(const uint16_t *numbers, uint32_t n, uint32_t n_parts,
                           uint32_t *out_rows, uint32_t *out_starts) {
    CHECK(n_parts >= 1 && n_parts <= 65536);
    memset(out_starts, 0, ((size_t)n_parts + 1) * sizeof *out_starts);
    for (uint32_t i = 0; i < n; i++) {
        if (numbers[i] >= n_parts) return STATUS_RANGE;
        out_starts[numbers[i] + 1]++;
    }
    for (uint32_t p = 0; p < n_parts; p++) out_starts[p + 1] += out_starts[p];
    /* out_starts[p] runs to the start of p + 1 while rows are put; shift it back after. */
    for (uint32_t i = 0; i < n; i++) out_rows[out_starts[numbers[i]]++] = i;
    for (uint32_t p = n_parts; p > 0; p--) out_starts[p] = out_starts[p - 1];
    out_starts[0] = 0;
    return STATUS_OK;
}
