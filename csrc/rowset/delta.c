#include "rowset/delta.h"

#include "common/alloc.h"
#include "common/bits.h"
#include "common/check.h"

#define STAMP_NEVER UINT64_C(0x7FFFFFFFFFFFFFFF)

static inline uint32_t row_at(const delta_t *delta, uint32_t i) {
    return load_le32(delta->rows + 4 * (size_t)i);
}

static inline uint64_t stamp_at(const delta_t *delta, uint32_t i) {
    return load_le64(delta->stamps + 8 * (size_t)i);
}

status_t delta_check(const delta_t *delta, uint32_t limit) {
    for (uint32_t i = 0; i < delta->n; i++) {
        if (row_at(delta, i) >= limit) return STATUS_CORRUPT;
        if (i != 0 && row_at(delta, i) <= row_at(delta, i - 1)) return STATUS_CORRUPT;
    }
    return STATUS_OK;
}

void delta_merge(const delta_t *a, const delta_t *b, uint8_t *out_rows, uint8_t *out_stamps,
                 uint32_t *out_n) {
    uint32_t i = 0, j = 0, n = 0;
    while (i < a->n || j < b->n) {
        /* Above every row when one side has come to its end. */
        const uint64_t left = i < a->n ? row_at(a, i) : UINT64_MAX;
        const uint64_t right = j < b->n ? row_at(b, j) : UINT64_MAX;
        uint64_t stamp = STAMP_NEVER;
        if (left <= right) stamp = stamp_at(a, i);
        if (right <= left) {
            const uint64_t other = stamp_at(b, j);
            if (right < left || other < stamp) stamp = other;
        }
        store_le32(out_rows + 4 * (size_t)n, (uint32_t)(left < right ? left : right));
        store_le64(out_stamps + 8 * (size_t)n, stamp);
        n++;
        i += left <= right;
        j += right <= left;
    }
    *out_n = n;
}

status_t delta_expand(const delta_t *delta, uint32_t n, uint8_t *out_stamps) {
    for (uint32_t i = 0; i < n; i++) store_le64(out_stamps + 8 * (size_t)i, STAMP_NEVER);
    for (uint32_t i = 0; i < delta->n; i++) {
        const uint32_t row = row_at(delta, i);
        if (row >= n) return STATUS_RANGE;
        store_le64(out_stamps + 8 * (size_t)row, stamp_at(delta, i));
    }
    return STATUS_OK;
}

status_t delta_between(const delta_t *delta, uint32_t n, uint64_t after, uint64_t upto,
                       uint8_t *out_bits, uint32_t *out_count) {
    uint32_t count = 0;
    if (n != 0) memset(out_bits, 0, bits_bytes(n));
    for (uint32_t i = 0; i < delta->n; i++) {
        const uint32_t row = row_at(delta, i);
        const uint64_t stamp = stamp_at(delta, i);
        if (row >= n) return STATUS_RANGE;
        const unsigned hit = stamp > after && stamp <= upto;
        bits_or(out_bits, row, hit);
        count += hit;
    }
    *out_count = count;
    return STATUS_OK;
}

/* Descending by stamp, stable: a merge sort of order[0 .. n) through scratch of n. */
static void sort_run(const uint8_t *inserts, uint32_t *order, uint32_t *scratch, size_t n) {
    for (size_t width = 1; width < n; width *= 2) {
        for (size_t lo = 0; lo + width < n; lo += 2 * width) {
            const size_t mid = lo + width, hi = n - mid < width ? n : mid + width;
            size_t i = lo, j = mid;
            for (size_t at = lo; at < hi; at++) {
                const int left =
                    j == hi || (i < mid && load_le64(inserts + 8 * (size_t)order[i]) >=
                                               load_le64(inserts + 8 * (size_t)order[j]));
                scratch[at] = left ? order[i++] : order[j++];
            }
            memcpy(order + lo, scratch + lo, (hi - lo) * sizeof *order);
        }
    }
}

static int run_falls(const uint8_t *inserts, uint32_t lo, uint32_t hi) {
    for (uint32_t i = lo + 1; i < hi; i++) {
        if (load_le64(inserts + 8 * (size_t)i) > load_le64(inserts + 8 * (size_t)(i - 1))) {
            return 0;
        }
    }
    return 1;
}

status_t delta_order(const uint8_t *same, const uint8_t *inserts, uint32_t n, uint32_t *out_order,
                     int *out_moved) {
    uint32_t *scratch = NULL;
    for (uint32_t i = 0; i < n; i++) out_order[i] = i;
    *out_moved = 0;
    for (uint32_t lo = 0; lo < n;) {
        uint32_t hi = lo + 1;
        while (hi < n && bits_get(same, hi)) hi++;
        if (!run_falls(inserts, lo, hi)) {
            if (scratch == NULL) scratch = alloc_array(n, sizeof *scratch);
            if (scratch == NULL) return STATUS_NO_MEMORY;
            sort_run(inserts, out_order + lo, scratch, hi - lo);
            *out_moved = 1;
        }
        lo = hi;
    }
    alloc_free(scratch);
    return STATUS_OK;
}
