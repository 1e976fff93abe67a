/* Lower bounds within a range, for either shape of keys. */
#ifndef TXNKV_ROWSET_SEARCH_INLINE_H
#define TXNKV_ROWSET_SEARCH_INLINE_H

#include <stdbool.h>

#include "codec/keys_inline.h"

/* First position in [lo, hi) whose key is not below `key`, else hi. */
static inline uint32_t search_range(const keys_t *keys, slice_t key, uint32_t lo, uint32_t hi) {
    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (slice_compare(keys_at(keys, mid), key) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

/* The same for keys that are numbers, without a branch on their content. */
static inline uint32_t search_range_number(const uint8_t *data, uint32_t width, uint64_t key,
                                           uint32_t lo, uint32_t hi) {
    uint32_t n = hi - lo;
    while (n > 1) {
        const uint32_t half = n / 2;
        lo += keys_number(data, width, (size_t)lo + half - 1) < key ? half : 0;
        n -= half;
    }
    return n == 1 && keys_number(data, width, lo) < key ? lo + 1 : lo;
}

/* Search from `lo` on by doubling steps, for a key that is likely near. */
static inline uint32_t search_gallop(const keys_t *keys, slice_t key, uint32_t lo) {
    uint64_t step = 1, at = lo;
    while (at < keys->n && slice_compare(keys_at(keys, (uint32_t)at), key) < 0) {
        lo = (uint32_t)at + 1;
        at += step;
        step *= 2;
    }
    return search_range(keys, key, lo, at < keys->n ? (uint32_t)at : keys->n);
}

static inline uint32_t search_gallop_number(const uint8_t *data, uint32_t width, uint64_t key,
                                            uint32_t lo, uint32_t n) {
    uint64_t step = 1, at = lo;
    while (at < n && keys_number(data, width, at) < key) {
        lo = (uint32_t)at + 1;
        at += step;
        step *= 2;
    }
    return search_range_number(data, width, key, lo, at < n ? (uint32_t)at : n);
}

enum { SEARCH_NEAR = 8 };

/* Lower bound in [from, n) of numbers that may be evenly spread, as counters are: then a guess
 * by their range is close, and spares the steps of a binary search that reach memory. A bad
 * guess costs SEARCH_NEAR of them. */
static inline uint32_t search_guess_number(const uint8_t *data, uint32_t width, uint64_t key,
                                           uint32_t from, uint32_t n) {
    if (from >= n) return n;
    const uint64_t first = keys_number(data, width, from);
    const uint64_t last = keys_number(data, width, (size_t)n - 1);
    if (key <= first) return from;
    if (key > last) return n;
    const double share = (double)(key - first) / (double)(last - first);
    uint32_t lo = from, hi = n - 1, at = from + (uint32_t)(share * (double)(hi - from));
    if (at > hi) at = hi;
    const bool up = keys_number(data, width, at) < key;
    for (uint32_t i = 0, step = 1; i < SEARCH_NEAR; i++, step *= 2) {
        if (up) {
            lo = at + 1;
            if (hi - lo < step) break;
            at = lo + step - 1;
            if (keys_number(data, width, at) < key) continue;
            hi = at;
        } else {
            hi = at;
            if (hi - lo < step) break;
            at = hi - step;
            if (keys_number(data, width, at) >= key) continue;
            lo = at + 1;
        }
        break;
    }
    return search_range_number(data, width, key, lo, hi);
}

#endif
